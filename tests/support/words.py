"""What figures, verdicts and other sentences say of made-up records; `tests/golden/words` holds it."""

import re
from types import SimpleNamespace

import numpy as np

from qdqbench.eval.metrics import figures
from qdqbench.eval.metrics.gate import judge_shapes
from qdqbench.eval.metrics.results import Agreement, Gate, GateIssue
from qdqbench.eval.runs.collect import MOST_SOFTMAX_ERROR, model_changes, softmax_warnings
from qdqbench.eval.runs.gate import find_label_order
from qdqbench.eval.runs.report import charts, report
from qdqbench.eval.runs.report.verdict import run_verdict
from qdqbench.quantize.calibration.record import CalibrationRecord
from qdqbench.quantize.calibration.techniques.channel_splitting import ChannelSplit
from qdqbench.quantize.calibration.techniques.smoothing import Smoothing
from qdqbench.quantize.calibration.techniques.softmax_scale import SoftmaxRow
from qdqbench.quantize.recipe.plan import Plan
from qdqbench.quantize.report import document as doc
from qdqbench.quantize.report import formats
from qdqbench.quantize.report.coverage import coverage, uncovered
from qdqbench.quantize.tasks.metrics import Baseline
from qdqbench.quantize.tasks.task import get_task

from .records import comparison, speedup
from .reports import REPORTS
from .runs import LINEARS, built, failed, finding, parity_of, parity_row, sample
from .trainings import qat_run, reconstruction, run_of, twice_trained


def in_words(record):
    """The fields that a cell or tile has, in a line."""
    return ", ".join(f"{name} {value!r}" for name, value in vars(record).items() if value not in ("", None))


LOADED = speedup(0.73, 0.14, 4.07).model_copy(update={"cpu": speedup(1.1, 1.05, 1.2), "other_cores": 1.3})
SPEEDS = [
    *(speedup(1.31), speedup(0.74, 0.7, 0.8), speedup(1.31, 0.7, 1.4), speedup(1.01, 0.97, 1.04)),
    *(LOADED, LOADED.model_copy(update={"other_cores": 0.1})),
]


def figure_words():
    yield from (coverage(35, 36, "linears"), uncovered(1), uncovered(2))
    for delta in (-0.001, -0.01, -0.0):
        versus = comparison({"accuracy": delta}, 0.002)
        yield figures.change_text(versus)
        yield from (in_words(figures.change(versus, in_percent=percent)) for percent in (False, True))
    yield from (f"{in_words(figures.speed(each))}; {figures.speed_place(each)}" for each in SPEEDS)
    fast, slow = speedup(1.31, 1.2, 1.4), speedup(0.89, 0.87, 0.89, config="8 x 128")
    same, unclear = speedup(1.0, 0.99, 1.01, config="8 x 128"), speedup(0.5, 0.1, 2.0)
    later = speedup(1.5, 1.4, 1.6, config="8 x 128")  # takes no measured loss away
    for rows in ([later, unclear, fast, slow], [fast], [fast, same], [same], []):
        shapes = judge_shapes(rows)
        yield f"{len(shapes)}: {figures.speed_verdict(shapes)}; {figures.speed_doubt(shapes)!r}"
    for least in (None, 1.2, 9.0):
        gate = Gate(passed=True, max_drop=0.01, min_speedup=least)
        yield in_words(report._speed_tile(sample(speed=[fast], gate=gate)))
    times = (None, 0.67123, 9.94, 31.52, 1234.5, 123456.7, speedup(2, ms=1.5))
    yield " ".join(map(figures.latency, times))
    yield " ".join(map(formats.size, (512, 35_200_000, 999_700, 2_310_000_000)))
    yield " ".join(map(formats.seconds, (0.2399, 61.04, 245.2)))
    yield formats.types(["Half", "Int8", "Half"])
    yield " ".join(map(formats.label, ("accuracy_mm", "my_task")))
    models = ("/models/minilm-sst2", "owner/minilm", "runs/a/embedded/model", "model")
    yield " ".join(map(formats.model_label, models))


def on_cpu(*rows, **changes):
    """A run on OpenVINO whose gate passed, with these speed-ups."""
    passed = {"gate": Gate(passed=True, max_drop=0.01), "speed": [*rows]}
    return sample(**passed | {"engine": built(backend="openvino", version="2026.4.1")} | changes)


def embedder(kept):
    """A run of an embedder that keeps so many of the nearest texts."""
    values = {"cosine": 0.996, "cosine_p1": 0.99, "neighbors": kept}
    errors = {"cosine": 0.001, "cosine_p1": 0.001, "neighbors": 0.005}
    counts = {"cosine_counts": [0] * 29, "neighbor_counts": [0] * 11}
    results = sample()
    versus = results.stages["onnxruntime"].vs_fp32
    versus.agreement = Agreement(n=200, values=values, stderr=errors, **counts)
    return results


def verdicts():
    wrong = finding(severity="error", effect="refused", code="uint8")
    tensors = [parity_row("a.0.b", 100, 1), parity_row("a.1.b", 1000, 1, 2), parity_row("a.2.b", 1000, 5)]
    unrun = GateIssue(code="engine", state="not_evaluated", stage="engine", detail="no GPU")
    over = {"baseline": "OpenVINO BF16"}
    fast = speedup(1.4, 1.3, 1.5, config="1 x 128", **over)
    slow = speedup(0.9, 0.8, 0.95, config="8 x 128", **over)
    same = speedup(1.0, 0.99, 1.01, config="32 x 32", **over)
    return {
        "no INT8 asked": sample(engine=built(int8_gemms=0, expected_int8_gemms=0), quantized_layers=[]),
        "an engine that never ran": sample(gate=Gate(passed=True, max_drop=0.01, issues=[unrun])),
        "faster, slower and as fast on a CPU": on_cpu(fast, slow, same),
        "as fast on a CPU": on_cpu(same),
        "faster on a CPU": on_cpu(fast),
        "slower on a GPU": on_cpu(fast, slow, engine=built()),
        "two errors of check": sample(findings=2 * [wrong]),
        "two tensors over their limit": sample(parity=parity_of(tensors)),
        "a GEMM not in INT8": sample(engine=built(not_int8=["/x/MatMul"], int8_gemms=35)),
        "an embedder that keeps its neighbors": embedder(0.951),
        "an embedder that loses neighbors": embedder(0.918),
        "QAT that gained": qat_run(),
        "QAT that lost": qat_run(gain=-0.011, ptq=-0.001),
        "QAT within noise": qat_run(gain=-0.002, within=True, ptq=-0.001),
        "QAT at its start": qat_run(gain=0.0, within=True, training=run_of(0, best_step=0)),
        "QAT not compared": qat_run(qat_vs_ptq=None),
        "PTQ not scored": qat_run(stages=sample().stages),
        "reconstruction and QAT": twice_trained(),
        "reconstruction in vain and QAT": qat_run(reconstruction=reconstruction(after_db=21.0)),
        "reconstruction alone": qat_run(training=None, reconstruction=reconstruction()),
        "reconstruction in vain": qat_run(training=None, reconstruction=reconstruction(after_db=21.0)),
    }


def verdict_words():
    for name, results in verdicts().items():
        said = run_verdict(results)
        yield f"{name}: {said.title} [{said.state}]"
        yield from (f"  {title}: {text} [{state}]" for title, text, state in said.lines)
        yield from (f"  ✗ {line}" for line in said.failures)
        yield from (f"  {line}" for line in said.notes)


def grid_words():
    """Datatypes by layer and kind of module, of the kernel that multiplies; ✗: the recipe asks another."""
    lost = sample()
    lost.engine.layers = [row for row in lost.engine.layers if "layer.3" not in " ".join(row.onnx)]
    runs = {"a GEMM in FP16": failed(), "a layer that the engine does not list": lost}
    for inputs in ("Int8 Int8 Int8 Half", "Half Half Half Half", "Int8 Half Half Half"):
        runs[f"INT8 attention of {inputs}"] = results = sample(recipe={"attention": "int8"}, layers=1)
        for row in results.engine.layers:
            row.inputs = inputs.split() if "_gemm_mha" in row.name else row.inputs
    for name, results in runs.items():
        grid = charts.precision_grid(results)
        yield f"{name}: {grid.datatypes}"
        rows = [(layer, zip(grid.kinds, cells, strict=True)) for layer, cells in grid.rows]
        for layer, cells in [*rows, ("outside", grid.outside)]:
            shown = [f"{kind} {it.datatype}{'' if it.as_asked else ' ✗'}" for kind, it in cells if it]
            yield f"  {layer}: {', '.join(shown)}"
    modules = (
        "bert.encoder.layer.11.attention.output.dense roberta.encoder.layer.0.output.dense blocks.3.unknown "
        "distilbert.transformer.layer.4.ffn.lin1 deberta.encoder.layer.2.attention.self.query_proj "
        "model.layers.21.attn.Wqkv classifier"
    )
    yield from (f"{module} is {charts.place(module)}" for module in modules.split())


def softmax_row(module, error, **changes):
    known = {"length": 128, "amax": 1, "centered": False, "zeroed": 0.3, "clipped": 0}
    return SoftmaxRow(module=module, error=error, **known | changes)


def change_words():
    """What a recipe changed besides Q/DQ, with the counts of what calibration and export wrote down."""
    inside, prefix = "bert.encoder.layer.0.attention.self", "bert.encoder.layer.0"
    linears = [f"{prefix}.{name}" for name in LINEARS]
    query, key, value, output, up, down = linears
    everything = {
        "biases": {up: [0.1], down: [0.2]},
        "splits": {down: ChannelSplit(extra=64, outliers={3: (2, 1), 9: (4, 1)})},
        "smoothing": Smoothing(inputs={name: [2.0] for name in linears[:3]}, rows={query: [0.5]}),
        "softmax": [softmax_row(inside, 0, length=n, centered=True, zeroed=0) for n in (64, 384)],
    }
    rewrites = {"tanh GELU": 12, "tokens first": 0, "short GELU": 12, "joined heads": 3}
    moved = {"centers": {name: [0.5] for name in (key, value, output)}}
    cases = {  # fields of the record, weight scales, INT8 attentions, rewrites, and what else differs
        "plain Q/DQ in FP32": ({}, "channel", (), {}, {"half": False}),
        "plain Q/DQ": ({}, "channel", (), {}, {}),
        "everything": (everything, "channel", (inside,), rewrites, {}),
        "biases moved in front of centered values": (moved, "tensor", (inside,), {}, {}),
        "a model that has tanh GELU itself": ({}, "channel", (), rewrites, {"to_tanh": False}),
        "trained": ({}, "channel", (), {}, {"reconstructed": 6, "trained": 276}),
    }
    plain = {"to_tanh": True, "half": True, "reconstructed": 0, "trained": 0}
    for name, (fields, scales, attention, made, how) in cases.items():
        plan = Plan(int8=dict.fromkeys(linears, scales), high=("classifier",), attention=attention)
        record = CalibrationRecord(method="max", seed=0, data={}, notes=[], quantizers={}, **fields)
        yield f"{name}:"
        changes = model_changes(plan, record, made, **plain | how)
        yield from (f"  {each.what}, {each.count}: {each.description}" for each in changes)


def warning_words():
    """What is said of an INT8 softmax that loses much or saw short texts, and of labels in another order."""
    cases = [  # errors of softmaxes, longest text of calibration, lengths of the evaluation, setting
        *(([], 128, [500], "auto"), ([0.0, MOST_SOFTMAX_ERROR], 128, [9, 128], "auto")),
        *(([0.1], 40, [9, 128], "auto"), ([0.1], 384, [384, 300], "auto")),
        *(([0.1, 0.25, 0.4], 128, [100], how) for how in ("fixed", "auto", "min-error", "row-max")),
        ([0.1], 200, [100, 300, 384], "auto"),
    ]
    for errors, longest, lengths, setting in cases:
        rows = [softmax_row(f"layer.{n}", error) for n, error in enumerate(errors)]
        record = SimpleNamespace(softmax=rows, data={"lengths": {"max": longest}})
        recipe = SimpleNamespace(calibration=SimpleNamespace(softmax_scale=setting))
        splits = {"validation": (None, SimpleNamespace(lengths=np.array(lengths)))}
        session = SimpleNamespace(eval_splits=splits, recipe=recipe)
        yield f"errors {errors}, calibrated to {longest}, {setting}, lengths {lengths}:"
        yield from (f"  {line}" for line in softmax_warnings(session, record))
    right, mnli = np.array([0, 1, 2] * 40), get_task("mnli").model_copy(update={"name": "own"})
    named = [([1, 2, 0], ()), ([1, 0, 2], ()), ([1, 0, 2], ("bad", "good", "so-so")), ([2, 1, 0], (*"123",))]
    for order, values in named:  # `order[i]` is what the data call the model's class i
        answers = np.eye(3, dtype=np.float32)[np.argsort(order)[right]]
        task = mnli.model_copy(update={"values": values})
        yield f"{order} {values}: {find_label_order(task, answers, right, Baseline(0, 1 / 3), 0.04)}"


CHARTED = ("run", "run-two-splits", "run-fp32", "run-unscored", "run-qat", "finetune", "finetune-failed")


def charts_in(blocks):
    for block in blocks:
        if isinstance(block, doc.Chart):
            yield block.draw()
        for part in block.parts if isinstance(block, doc.Columns) else [getattr(block, "blocks", ())]:
            yield from charts_in(part)


def chart_words():
    """What stands in charts, ticks included."""
    for name in CHARTED:
        yield f"{name}:"
        for svg in (svg for section in REPORTS[name]().sections for svg in charts_in(section.blocks)):
            title = re.search(r'aria-label="([^"]+)"', svg)
            yield f"  {title[1]}: {', '.join(re.findall(r'>([^<>]+)</text>', svg))}" if title else "  none"


WORDS = {
    "figures": figure_words,
    "verdicts": verdict_words,
    "grids": grid_words,
    "changes": change_words,
    "warnings": warning_words,
    "charts": chart_words,
}
