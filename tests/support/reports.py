"""A report of every kind, of made-up results: what pages, terminals and golden files are tested on."""

import json
from pathlib import Path

from qdqbench.eval.bench.report import bench_report
from qdqbench.eval.bench.results import read_bench
from qdqbench.eval.metrics.results import Gate, GateIssue
from qdqbench.eval.runs.comparison import comparison_report
from qdqbench.eval.runs.report.report import run_report, stages_report
from qdqbench.eval.runs.report.training import finetuning_report
from qdqbench.eval.runs.results import FileRow
from qdqbench.eval.runs.study import Study, study_report
from qdqbench.eval.selection.auto.report import auto_report
from qdqbench.eval.selection.calibration_comparison import calibration_report
from qdqbench.eval.selection.search.report import search_report
from qdqbench.eval.selection.search.results import Source
from qdqbench.eval.selection.sensitivity.report import sensitivity_report
from qdqbench.quantize.calibration.techniques.softmax_scale import SoftmaxRow
from qdqbench.quantize.pipeline.pipeline import Timing
from qdqbench.quantize.report import document as doc

from .benches import bench_that_is, many_shapes, odd_bench, sample_bench
from .choices import (
    NOTHING,
    asked_search,
    sample_auto,
    sample_calibrations,
    sample_search,
    sample_sensitivity,
    unconfirmed_search,
    undecided_auto,
)
from .compared import sample_comparison
from .records import comparison, speedup
from .runs import (
    answer,
    bare,
    changed,
    effects,
    engine,
    failed,
    measured,
    mnli,
    parity_of,
    regression,
    sample,
    unscored,
    verification,
    without_engine,
)
from .trainings import failed_run, finetuning, log_of, qat_run, run_of, twice_trained

MEASURED = Path(__file__).parents[2] / "docs" / "measured"
MNLI = ("validation_matched", "validation_mismatched")


BEGUN = log_of(2)[:9]  # of a seed that failed
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
    why = "the layers do not end with a LayerNorm"
    uncut = verification(blocks=[], blocks_not_checked=why, passed=False)
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


def moved_scores():
    """A regression whose scores moved more often than are listed, without labels and margins."""
    unknown = dict.fromkeys(("label", "margin", "fp32_margin"))
    rows = [answer(number, "moved", fp32="2.5", prediction="2.6", **unknown) for number in range(12)]
    results = regression()
    for row in results.quantizers:
        row.amax_spread = None
    return results.model_copy(update={"changed_predictions": changed(rows, count=90, moved=90)})


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
    results.timings |= dict.fromkeys(("engine", "[red]odd"), results.timings["verify"])
    return stages_report(results, Path("runs/a"))


def wrong_stages():
    """Stages of which more does not hold, and more is to know, than a terminal shows."""
    issue = GateIssue(code="verification", state="failed", detail="the [gate]")
    gate = Gate(passed=False, max_drop=0.01, issues=[issue])
    files = [FileRow(name=f"{n}.onnx", bytes=1000 * n, fp32_ratio=None) for n in range(1, 10)]
    notes = ["n1", "n2", "n3", "n4", "[bold]n5"]
    results = sample(2, files=files, gate=gate, notes=notes, parity=parity_of([]))
    results.timings["parity"] = results.timings["build"]
    return stages_report(results, Path("runs/a"))


WRONG = {  # what besides its gate, and a list that was cut
    "verification": wrong_engine(),
    "changed_predictions": changed([answer(number) for number in range(3)], count=90, regressed=90),
}
TABLE = doc.Table(
    ["name", "ms", "remark"],
    [
        doc.row(doc.code("layer.0"), doc.Cell("1.50", short="1.5", sort=1.5), None, chosen=True),
        doc.row("<b>|x|", doc.Cell("0.90x", "bad", note="slower"), doc.Cell(state="good", tip="why")),
        doc.row("third", doc.Cell("failed: *why*", "bad")),
    ],
    texts=(0, -1),
    look="full sortable",
    foot=[doc.row("mean", "2")],
    anchor="times",
    screen=(0, 1),
    most=2,
    on=doc.EVERYWHERE,
)
DOCUMENT = doc.Report(
    doc.Page("speed", "bert", ["sst2"], "2026-07-01T12:00:00+00:00", "qdqbench bench", "bench.json", {}),
    [
        doc.Section(
            "speed",
            "Speed of `x`",
            [
                "Run `a|b` *now*.",
                doc.Prose("only seen on a screen", "bad", doc.SCREEN),
                TABLE,
                doc.Fold("More", [doc.Pairs([("seed", "7")], "settings"), doc.Bullets(["a fault"], "bad")]),
                doc.Columns([[doc.Chart(lambda: "<svg></svg>")], [doc.Chart(lambda: "")]]),
                doc.Code("a: 1", "yaml", doc.TEXT),
            ],
            "good",
        ),
        doc.Section("layers", "Layers", [doc.Prose("only on the page", on=doc.PAGE)], on=doc.PAGE),
    ],
    verdict=doc.Verdict("unclear", "Too few samples", "INT8 is `fast`", ["it failed"], ["it is open"]),
    tiles=[doc.Tile("speed", "0.9x", "over `FP16`", "bad")],
    warnings=[f"warning {number}" for number in range(6)],
    notes=["a note"],
)
REPORTS = {
    "document": lambda: DOCUMENT,
    "run": lambda: run_report(timed_run(), sample_bench(), Path("runs/a")),
    "run-alone": lambda: run_report(sample()),
    "run-qat": lambda: run_report(twice_trained(layers=2)),
    "run-unlogged": lambda: run_report(qat_run(layers=2, training=run_of(0, log=[], samples_per_s=None))),
    "run-failed": lambda: run_report(failed().model_copy(update=WRONG)),
    "run-planned": lambda: run_report(without_engine()),
    "run-two-splits": lambda: run_report(mnli()),
    "run-regression": lambda: run_report(moved_scores()),
    "run-fp32": lambda: run_report(bare()),
    "run-unclear": lambda: run_report(unclear_run()),
    "run-unscored": lambda: run_report(unscored()),
    "stages": stages,
    "stages-wrong": wrong_stages,
    "bench": lambda: bench_report(sample_bench()),
    "bench-odd": lambda: bench_report(odd_bench()),
    "bench-inconclusive": lambda: bench_report(bench_that_is("unclear")),
    "bench-many-shapes": lambda: bench_report(many_shapes()),
    "bench-measured": lambda: bench_report(
        read_bench(MEASURED / "benches" / "bert-base-recipes-tensorrt_rtx.json")
    ),
    "compare": lambda: comparison_report(sample_comparison()),
    "sensitivity": lambda: sensitivity_report(sample_sensitivity()),
    "sensitivity-all": lambda: sensitivity_report(sample_sensitivity(kept=0)),
    "sensitivity-missed": lambda: sensitivity_report(sample_sensitivity(reached=False)),
    "methods": lambda: calibration_report(sample_calibrations()),
    "methods-two-splits": lambda: calibration_report(sample_calibrations(splits=MNLI)),
    "search": lambda: search_report(sample_search()),
    "search-share": lambda: search_report(share_search()),
    "search-nothing": lambda: search_report(sample_search(**NOTHING)),
    "search-noise": lambda: search_report(asked_search(max_drop=0.003)),
    "search-fast": lambda: search_report(asked_search(max_drop=0.003, min_speedup=1.5)),
    "search-slow": lambda: search_report(asked_search(min_speedup=9.0, min_sqnr_db=30)),
    "search-unconfirmed": lambda: search_report(unconfirmed_search()),
    "auto": lambda: auto_report(sample_auto()),
    "auto-nothing": lambda: auto_report(sample_auto(passed=False)),
    "auto-undecided": lambda: auto_report(undecided_auto()),
    "finetune": lambda: finetuning_report(finetuning([run_of(0), STOPPED, failed_run(2, log=BEGUN)])),
    "finetune-one": lambda: finetuning_report(finetuning([run_of(7)])),
    "finetune-failed": lambda: finetuning_report(
        finetuning([failed_run(0, log=BEGUN), failed_run(1, reason=None)])
    ),
    "study": lambda: study_report(measured_study()),
}
