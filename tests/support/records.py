"""Records of results with every field filled in; a test names those that it is about."""

import math
from collections.abc import Mapping

from qdqbench.eval.metrics.results import Comparison, Speedup
from qdqbench.eval.selection.auto.results import StepRun
from qdqbench.eval.selection.search.results import SearchTrial
from qdqbench.quantize.engine.results import EngineResult
from qdqbench.quantize.recipe.schema import load_recipe


def comparison(delta, error, **changes):
    """A stage minus FP32 by metric, the primary first, and the standard error of each."""
    errors = error if isinstance(error, Mapping) else dict.fromkeys(delta, error)
    first = next(iter(delta))
    fields = {
        "delta": delta,
        "delta_stderr": errors,
        "n": 872,
        "disagreements": 5,
        "mcnemar_p": 0.625,
        "within_noise": abs(delta[first]) <= 2 * errors[first],
        "mean_abs_logit_diff": 0.1683,
        "sqnr_db": 21.4,
        "sqnr_db_stderr": 0.62,
    }
    return Comparison.model_validate(fields | changes)


def draw_record(name, **changes):
    """What results on a draw of train rows share, with this name of a model in every text."""
    return {
        "created": "2026-01-01T00:00:00+00:00",
        "command": f"qdqbench x --model {name}",
        "metric": "accuracy",
        "warnings": [f"a warning {name}"],
        "notes": [f"a note {name}"],
        "environment": {"python": "3.11"},
        "recipe": load_recipe("bert-int8-linears").model_dump(mode="json"),
        "model": {"name": name, "sha256": "0" * 64},
        "task": {"name": "sst2"},
        "data": {"samples": 512, "split": "train"},
        "seed": 0,
        "batch_size": 32,
    } | changes


def step_run(**changes):
    """What a run of `auto` leaves of a recipe that is the first and holds."""
    fields = {
        "folder": "run",
        "engine": None,
        "int8_linears": 1,
        "int8_attention": 0,
        "stage": "engine",
        "previous": None,
        "vs_previous": {},
        "source": None,
        "not_timed": None,
        "issues": [],
    }
    return StepRun.model_validate(fields | changes)


def engine_result(gemms, **changes):
    """An engine built ahead of time that runs all of its INT8 products in INT8."""
    fields = {
        "backend": "tensorrt_rtx",
        "version": "1.7.1.116",
        "compute_capability": ["8.9"],
        "ahead_of_time": True,
        "file": "engine/model.int8.engine",
        "bytes": 34_900_000,
        "int8_gemms": gemms,
        "expected_int8_gemms": gemms,
        "not_int8": [],
        "attention_fused": 0,
        "attention_int8": 0,
        "expected_attention_int8": 0,
        "int8_residuals": 0,
        "expected_int8_residuals": 0,
        "not_int8_residuals": [],
        "profiles": 1,
        "kernels": 1,
        "layers": [],
    }
    return EngineResult.model_validate(fields | changes)


def speedup(
    value, low=None, high=None, *, system="INT8 engine", baseline="FP16 engine", config="32 x 128", ms=1.0
):
    """A speed-up of a system that takes so many milliseconds."""
    return Speedup(
        system=system,
        baseline=baseline,
        config=config,
        value=value,
        ci95_low=low,
        ci95_high=high,
        system_ms=ms,
        baseline_ms=value * ms,
    )


def sqnr(noise):
    """Fields of a comparison with this noise power, whose error is 10 %."""
    return {"sqnr_db": -10 * math.log10(noise), "sqnr_db_stderr": 0.4} if noise else {"sqnr_db": None}


def search_trial(number, noise, speed, drop=0.0, error=0.0001, **changes):
    """A trial of a search whose baseline takes 2 ms."""
    score = comparison({"accuracy": -drop}, error, n=1000, **sqnr(noise))
    fields = {
        "number": number,
        "recipe": None,
        "origin": "tpe",
        "params": {"keep": number},
        "scores": {"draw": score},
        "speedup": speedup(speed, ms=2 / speed),
        "int8_linears": 4,
    }
    return SearchTrial.model_validate(fields | changes)
