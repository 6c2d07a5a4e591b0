"""A report of every kind, of made-up results: what pages, terminals and golden files are tested on."""

import json
from pathlib import Path

from qdqbench.eval.bench.report import bench_report
from qdqbench.eval.bench.results import read_bench
from qdqbench.eval.metrics.results import Gate, GateIssue
from qdqbench.eval.runs.comparison import comparison_report
from qdqbench.eval.runs.report.report import run_report, stages_report
from qdqbench.eval.runs.report.training import finetuning_report
from qdqbench.eval.runs.study import Study, study_report
from qdqbench.eval.selection.auto.report import auto_report
from qdqbench.eval.selection.calibration_comparison import calibration_report
from qdqbench.eval.selection.search.report import search_report
from qdqbench.eval.selection.search.results import Source
from qdqbench.eval.selection.sensitivity.report import sensitivity_report
from qdqbench.quantize.calibration.techniques.softmax_scale import SoftmaxRow
from qdqbench.quantize.pipeline.pipeline import Timing

from .benches import bench_that_is, many_shapes, odd_bench, sample_bench
from .choices import NOTHING, sample_auto, sample_calibrations, sample_search, sample_sensitivity
from .compared import sample_comparison
from .records import comparison, speedup
from .runs import (
    bare,
    effects,
    engine,
    failed,
    measured,
    mnli,
    regression,
    sample,
    unscored,
    verification,
    without_engine,
)
from .trainings import failed_run, finetuning, qat_run, run_of

MEASURED = Path(__file__).parents[2] / "docs" / "measured"
MNLI = ("validation_matched", "validation_mismatched")


STOPPED = run_of(1, stopped="no gain in 3 evaluations", steps=276, processes=2, samples_per_s=1402.5)


def measured_study():
    """A study whose rows are not kept."""
    fields = json.loads(Path(__file__).with_name("study.json").read_text(encoding="utf-8"))
    del fields["kind"]
    return Study(**fields, data="glue", seeds=[0, 1, 2], rows=[])


def timed_run():
    """A run of two layers with all that a report can show, and a bench behind its speed."""
    speed = [speedup(1.4, 1.3, 1.5), speedup(1.31, 0.9, 1.6, config="1 x 128")]
    half = measured({"accuracy": 0.8945}, -0.0023)
    versus = measured({"accuracy": 0.8956}, 0.0011).vs_fp32
    int8 = {
        "attention_int8": 1,
        "expected_attention_int8": 2,
        "int8_residuals": 2,
        "expected_int8_residuals": 2,
    }
    softmax = {"module": "bert.encoder.layer.0.attention.self", "length": 384, "amax": 0.5, "centered": True}
    return effects(
        layers=2,
        speed=speed,
        fp16=half,
        vs_fp16=versus,
        engine=engine(2, "bert.encoder").model_copy(update=int8),
        verification=verification(),
        softmax=[SoftmaxRow(**softmax, zeroed=0.331, clipped=0.012, error=0.254)],
    )


def unclear_run():
    """A run whose samples and quick bench cannot tell."""
    numbers = {"value": 0.0115, "stderr": 0.0113, "limit": 0.01, "n": 872, "needed": 9000}
    drop = GateIssue(code="accuracy", state="within_noise", stage="engine", metric="accuracy", **numbers)
    gate = Gate(passed=True, max_drop=0.01, issues=[drop, drop.model_copy(update={"state": "inconclusive"})])
    quick = speedup(1.31, 1.2, 1.4).model_copy(update={"quick": True})
    uncut = verification(blocks=[], blocks_not_checked="the layers do not end with a LayerNorm")
    notes = ["mine.csv has semicolons between its fields"]
    return sample(2, gate=gate, speed=[quick], notes=notes, warnings=[], verification=uncut)


def wrong_engine():
    """An engine with NaN in a block and in its answers."""
    right = verification().model_dump()
    lost = {"error": None, "position_error": None, "systematic_error": None, "nonfinite": 3}
    blocks = [*right["blocks"][:1], right["blocks"][1] | lost | {"nonfinite_shapes": [[12, 20]]}]
    nothing = dict.fromkeys(("drop", "disagreements", "mean_abs_logit_diff", "ks_statistic", "ks_p"))
    answers = right["predictions"] | nothing | {"nonfinite": 9}
    return verification(blocks=blocks, predictions=answers, passed=False)


def share_search():
    """A search without latencies, on two splits, of another precision."""
    source = Source(mode="int8-share", batch=32, length=128, baseline_precision="BF16")
    found = sample_search(source=source)
    for number, each in enumerate([*found.trials, *found.confirmed]):
        each.speedup, each.int8_share = None, number / 10
    drops = {"validation_matched": 0.01, "validation_mismatched": 0.05}
    scores = {split: comparison({"accuracy": -drop}, 0.001) for split, drop in drops.items()}
    found.confirmed[0].scores = scores
    return found


def stages():
    """What the stage commands print, of a run with QAT whose engine was not run."""
    names = (
        "baseline",
        "quantize",
        "ptq",
        "qat",
        "fake_quant",
        "export",
        "check",
        "parity",
        "build",
        "verify",
    )
    calibration = {"method": "max", "samples": 512, "split": "train"}
    results = qat_run(
        layers=2,
        data={"calibration": calibration},
        quantized_attention=["a", "b"],
        timings={name: Timing(wall_s=12.3, peak_rss_bytes=1, reused=name == "build") for name in names},
        verification=verification(),
        skipped={"engine": "no GPU"},
    )
    results.timings["engine"] = results.timings["verify"]
    return stages_report(results, Path("runs/a"))


REPORTS = {
    "run": lambda: run_report(timed_run(), sample_bench(), Path("runs/a")),
    "run-alone": lambda: run_report(sample()),
    "run-qat": lambda: run_report(qat_run(layers=2)),
    "run-failed": lambda: run_report(failed().model_copy(update={"verification": wrong_engine()})),
    "run-planned": lambda: run_report(without_engine()),
    "run-two-splits": lambda: run_report(mnli()),
    "run-regression": lambda: run_report(regression()),
    "run-fp32": lambda: run_report(bare()),
    "run-unclear": lambda: run_report(unclear_run()),
    "run-unscored": lambda: run_report(unscored()),
    "stages": stages,
    "bench": lambda: bench_report(sample_bench()),
    "bench-odd": lambda: bench_report(odd_bench()),
    "bench-inconclusive": lambda: bench_report(bench_that_is("unclear")),
    "bench-many-shapes": lambda: bench_report(many_shapes()),
    "bench-measured": lambda: bench_report(
        read_bench(MEASURED / "benches" / "bert-base-recipes-tensorrt_rtx.json")
    ),
    "compare": lambda: comparison_report(sample_comparison()),
    "sensitivity": lambda: sensitivity_report(sample_sensitivity()),
    "methods": lambda: calibration_report(sample_calibrations()),
    "methods-two-splits": lambda: calibration_report(sample_calibrations(splits=MNLI)),
    "search": lambda: search_report(sample_search()),
    "search-share": lambda: search_report(share_search()),
    "search-nothing": lambda: search_report(sample_search(**NOTHING)),
    "auto": lambda: auto_report(sample_auto()),
    "auto-nothing": lambda: auto_report(sample_auto(passed=False)),
    "finetune": lambda: finetuning_report(finetuning([run_of(0), STOPPED, failed_run(2)])),
    "finetune-one": lambda: finetuning_report(finetuning([run_of(7)])),
    "finetune-failed": lambda: finetuning_report(finetuning([failed_run(0), failed_run(1, reason=None)])),
    "study": lambda: study_report(measured_study()),
}
