"""Records of results with every field filled in; a test names those that it is about."""

import math
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path

import yaml

from qdqbench.eval.metrics.results import Comparison, Speedup
from qdqbench.eval.selection.auto.results import StepRun
from qdqbench.eval.selection.search.results import SearchTrial
from qdqbench.quantize.engine.results import EngineResult
from qdqbench.quantize.recipe.schema import load_recipe

SAMPLES = yaml.safe_load(Path(__file__).with_name("samples.yaml").read_text(encoding="utf-8"))


def sample_of(kind, **changes):
    """The invented fields of a record, with those that a test changes."""
    return deepcopy(SAMPLES[kind]) | changes


def comparison(delta, error, **changes):
    """A stage minus FP32 by metric, the primary first, and the standard error of each."""
    errors = error if isinstance(error, Mapping) else dict.fromkeys(delta, error)
    first = next(iter(delta))
    within = abs(delta[first]) <= 2 * errors[first]
    fields = sample_of("comparison", delta=delta, delta_stderr=errors, within_noise=within)
    return Comparison.model_validate(fields | changes)


def draw_record(name, **changes):
    """What results on a draw of train rows share, with this name of a model in every text."""
    fields = {"command": f"qdqbench x --model {name}", "model": {"name": name, "sha256": "0" * 64}}
    fields |= {"warnings": [f"a warning {name}"], "notes": [f"a note {name}"]}
    recipe = load_recipe("bert-int8-linears").model_dump(mode="json")
    return sample_of("draw", recipe=recipe, **fields) | changes


def step_run(**changes):
    """What a run of `auto` leaves of a recipe that is the first and holds."""
    return StepRun.model_validate(sample_of("step run", **changes))


def engine_result(gemms, **changes):
    """An engine built ahead of time that runs all of its INT8 products in INT8."""
    fields = sample_of("engine", int8_gemms=gemms, expected_int8_gemms=gemms)
    return EngineResult.model_validate(fields | changes)


def speedup(
    value, low=None, high=None, *, system="INT8 engine", baseline="FP16 engine", config="32 x 128", ms=1.0
):
    """A speed-up of a system that takes so many milliseconds."""
    named = {"system": system, "baseline": baseline, "config": config}
    times = {"system_ms": ms, "baseline_ms": value * ms}
    return Speedup(value=value, ci95_low=low, ci95_high=high, **named, **times)


def sqnr(noise):
    """Fields of a comparison with this noise power, whose error is 10 %."""
    return {"sqnr_db": -10 * math.log10(noise), "sqnr_db_stderr": 0.4} if noise else {"sqnr_db": None}


def search_trial(number, noise, speed, drop=0.0, error=0.0001, **changes):
    """A trial of a search whose baseline takes 2 ms."""
    score = comparison({"accuracy": -drop}, error, n=1000, **sqnr(noise))
    measured = {"scores": {"draw": score}, "speedup": speedup(speed, ms=2 / speed)}
    fields = sample_of("search trial", number=number, params={"keep": number}, **measured)
    return SearchTrial.model_validate(fields | changes)
