"""Charts of a run's report, drawn by `svg`: accuracy, ranges, parity, lengths, embeddings; and its grid."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, cycle
from typing import Any

import numpy as np

from qdqbench.eval.metrics.gate import judge
from qdqbench.eval.metrics.results import COSINE_EDGES, Agreement, Parity, StageResult
from qdqbench.eval.runs.results import BEFORE_TRAINING, Results
from qdqbench.quantize.engine.layers import find_computing_rows, is_int8
from qdqbench.quantize.engine.profiles import Lengths
from qdqbench.quantize.engine.results import LayerRow
from qdqbench.quantize.graph.index import module_of
from qdqbench.quantize.models.families.known import PARTS, adds_behind_attention, part_of
from qdqbench.quantize.report import svg
from qdqbench.quantize.report.formats import datatype

KIND_STYLES = {  # a kind looks the same in every chart; color is never the only difference
    "query": (svg.BLUE, "o"),
    "key": (svg.ORANGE, "s"),
    "value": (svg.GREEN, "^"),
    "attention output": (svg.PURPLE, "D"),
    "intermediate": (svg.SKY, "v"),
    "output": (svg.INK, "P"),
}
OTHERS = [*zip((svg.MUTED, svg.BLUE, svg.ORANGE, svg.GREEN, svg.PURPLE, svg.SKY), "X<>*ph", strict=True)]
AGREEMENT_STYLES = {
    "ptq": (svg.PURPLE, "D"),
    "reconstructed": (svg.SKY, "v"),
    "fake_quant": (svg.BLUE, "o"),
    "onnxruntime": (svg.ORANGE, "s"),
    "engine": (svg.GREEN, "^"),
}
RANGE_TITLES = {"amax": "amax (largest magnitude seen)", "amax_over_rms": "amax / rms (outlier measure)"}
_NAMED = {"output": "attention output", "ffn-in": "intermediate", "ffn-out": "output"}
PART_KINDS = tuple(_NAMED.get(part, part) for part in PARTS)
_MATMUL = re.compile(r"/(MatMul|Gemm)(_\d+)?(@\d+)?$")

Points = dict[str, dict[int, float]]  # values by encoder layer, by kind


def place(module: str) -> tuple[int | None, str]:
    """Return layer and kind of a module; one outside the numbered layers has None and its own path.

    Example: `bert.encoder.layer.3.output.dense` is (3, "output").
    """
    if (match := part_of(module)) is None:
        return None, module
    layer, part, path = match
    return layer, _NAMED.get(part, part) or path


@dataclass(frozen=True)
class GridCell:
    datatype: str
    as_asked: bool  # by the recipe
    note: str  # the kernel


@dataclass(frozen=True)
class Grid:
    """Encoder layers (rows) by kind of module (columns)."""

    kinds: list[str]
    rows: list[tuple[int, list[GridCell | None]]]
    outside: list[tuple[str, GridCell]]  # modules outside the numbered layers
    datatypes: dict[str, int]  # modules by datatype


def precision_grid(results: Results) -> Grid:
    """Return the datatype of each module: from the engine's kernels, or planned if no engine was built."""
    cells = _plan(results) if results.engine is None else _measured(results)
    layers: dict[int, dict[str, GridCell]] = defaultdict(dict)
    outside = []
    for module, cell in cells.items():
        layer, kind = place(module)
        if layer is None:
            outside.append((module, cell))
        else:
            layers[layer][kind] = cell
    kinds = _ordered(kind for row in layers.values() for kind in row)
    rows = [(layer, [row.get(kind) for kind in kinds]) for layer, row in sorted(layers.items())]
    return Grid(kinds, rows, outside, dict(sorted(Counter(cell.datatype for cell in cells.values()).items())))


def _ordered(kinds: Iterable[str]) -> list[str]:
    unique = dict.fromkeys(kinds)
    return sorted(unique, key=lambda kind: PART_KINDS.index(kind) if kind in PART_KINDS else len(PART_KINDS))


def _plan(results: Results) -> dict[str, GridCell]:
    precision = results.recipe.get("precision")
    compute = str(precision.get("compute", "?") if isinstance(precision, dict) else "?").upper()
    plan = dict.fromkeys(results.quantized_layers, "INT8")
    plan |= dict.fromkeys(results.high_precision_layers, compute)
    return {module: GridCell(name, True, f"{module}: planned, not proven") for module, name in plan.items()}


def _measured(results: Results) -> dict[str, GridCell]:
    assert results.engine is not None
    asked = set(results.quantized_layers)
    linears = [*results.quantized_layers, *results.high_precision_layers]
    computing: dict[str, list[LayerRow]] = {module: [] for module in linears}
    layers = results.engine.layers
    matmuls = {node for row in layers for node in row.onnx if _MATMUL.search(node)}
    for node, copies in find_computing_rows(layers, matmuls).items():
        computing.setdefault(module_of(node), []).extend(chain.from_iterable(copies))
    wrong = {module_of(node) for node in results.engine.not_int8}
    cells = {}
    for module, rows in computing.items():
        if module not in linears and place(module)[0] is None:
            continue
        names = set(map(_runs_in, rows))
        name = names.pop() if len(names) == 1 else "mixed" if names else "absent"
        int8 = module in asked or (module not in linears and results.recipe.get("attention") == "int8")
        kernels = ", ".join(dict.fromkeys(row.name for row in rows)) or "not in the engine's layer table"
        as_asked = module not in wrong and (not int8 or name == "INT8")
        cells[module] = GridCell(name, as_asked, f"{module}: {kernels}")
    return cells


def _runs_in(row: LayerRow) -> str:
    """Return INT8 only where proven: a kernel may dequantize its INT8 codes and multiply in FP16."""
    if is_int8(row):
        return "INT8"
    names = {datatype(name) for name in (*row.inputs, *row.outputs)} - {"INT8", "UINT8"}  # or a mask's
    inputs = names & {datatype(name) for name in row.inputs} or names
    return inputs.pop() if len(inputs) == 1 else "mixed" if inputs else "unknown"


def accuracy_svg(results: Results, labels: dict[str, str]) -> str:
    stages = results.stages
    measured = [row for row in stages.values() if row.status == "done" and row.metrics]
    if not measured:
        return ""
    base = stages.get("fp32")
    metrics = base.metrics if base and base.metrics else measured[0].metrics
    figure = svg.figure_of(0.55 + len(metrics) * (0.5 + 0.27 * len(stages)))
    for index, metric in enumerate(metrics):
        axes = figure.add_subplot(len(metrics), 1, index + 1)
        _metric_axes(axes, results, metric, primary=index == 0)
        axes.set_yticks(range(len(stages)), [_short(labels.get(stage, stage)) for stage in stages])
        svg.dress(axes, _short(labels.get(metric, metric)), grid=None)
    return svg.svg_of(figure, "accuracy", "Accuracy by stage with one standard error")


def _metric_axes(axes: Any, results: Results, metric: str, *, primary: bool) -> None:
    base, limited = results.stages.get("fp32"), False
    if base is not None and metric in base.metrics:
        value, error = base.metrics[metric], base.stderr.get(metric, 0.0)
        axes.axvspan(value - error, value + error, color=svg.SKY, alpha=0.22, linewidth=0)
        axes.axvline(value, color=svg.BLUE, linewidth=0.8)
        if limited := primary:
            axes.axvline(value - results.gate.max_drop, **svg.LIMIT_LINE)
    beside = {"transform": axes.get_yaxis_transform(), "va": "center"}
    for position, (stage, row) in enumerate(results.stages.items()):
        if metric not in row.metrics:
            text = "skipped" if row.status == "skipped" else "not measured"
            axes.text(1.02, position, text, color=svg.MUTED, **beside)
            continue
        value, error = row.metrics[metric], row.stderr.get(metric, 0.0)
        color, marker = (svg.BLUE, "o") if row is base else (svg.GREEN, "^")
        if limited and drop_fails(row, metric, results.gate.max_drop):
            color, marker = svg.VERMILLION, "v"
        elif stage in BEFORE_TRAINING:
            color, marker = svg.ORANGE, "s"
        axes.errorbar(value, position, xerr=error, color=color, marker=marker, markersize=5, capsize=3)
        axes.text(1.02, position, f"{value:.4f}", **beside)
    axes.set_ylim(len(results.stages) - 0.4, -0.6)  # FP32 on top
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0.08)
    axes.locator_params(axis="x", nbins=4)  # of numbers with four decimals more would overlap


def drop_fails(row: StageResult, metric: str, max_drop: float) -> bool:
    if (versus := row.vs_fp32) is None or metric not in versus.delta:
        return False
    return judge(-versus.delta[metric], versus.delta_stderr.get(metric, 0.0), max_drop) == "failed"


def ranges_svg(results: Results, measure: str) -> str:
    points: Points = defaultdict(dict)
    for row in results.quantizers:
        value = getattr(row, measure)
        layer, kind = place(row.module)
        if row.kind != "weight" and value is not None and layer is not None:
            if row.kind == "residual":
                kind = f"residual: {'attn' if adds_behind_attention(row.module) else 'ffn'}"
            elif row.kind != "input":
                kind = f"attention: {row.kind}"
            points[kind][layer] = value
    return layer_chart(points, RANGE_TITLES[measure], measure)


def layer_chart(points: Points, title: str, name: str, limit: float | None = None) -> str:
    """Draw one line per kind over the encoder layers; kinds with the same values share a line."""
    if not points:
        return ""
    shared: dict[tuple[tuple[int, float], ...], list[str]] = defaultdict(list)
    for kind in _ordered(points):
        shared[tuple(sorted(points[kind].items()))].append(kind)
    figure, axes = svg.axes_of(2.75)
    others = cycle(OTHERS)
    for line, kinds in shared.items():
        layers, heights = zip(*line, strict=True)
        color, marker = KIND_STYLES.get(kinds[0].partition(",")[0]) or next(others)
        axes.plot(layers, heights, color=color, marker=marker, markersize=4.5, label=_short(", ".join(kinds)))
    values = [value for line in shared for _, value in line]
    if limit is not None:
        axes.axhline(limit, **svg.LIMIT_LINE, label=f"own limit, {limit:g}%")
    elif min(values) > 0 and max(values) > 50 * min(values):
        svg.log_scale(axes)
    if axes.get_yscale() == "linear":
        top = max([*values, limit or 0.0]) or 1.0
        axes.set_ylim(-0.02 * top, 1.12 * top)  # markers at zero stay whole
    axes.xaxis.get_major_locator().set_params(integer=True, nbins=12)
    axes.set_xlabel("encoder layer")
    svg.dress(axes, title)
    svg.legend(figure, 3)
    return svg.svg_of(figure, name, f"{title}, by encoder layer")


def lengths_svg(lengths: Lengths) -> str:
    figure, axes = svg.axes_of(2.0)
    tokens, rows = zip(*lengths.histogram, strict=True)
    axes.bar(tokens, rows, width=0.9, color=svg.BLUE)
    for number, bucket in enumerate(lengths.buckets):
        axes.axvline(bucket.length + 0.5, **svg.LIMIT_LINE, label="_" if number else "padded to")
    axes.set_xlabel("tokens of a row")
    svg.dress(axes, "rows by length")
    svg.legend(figure, 3)
    return svg.svg_of(figure, "lengths", "Rows by length, and the lengths that they are padded to")


def _short(name: str) -> str:
    return name if len(name) <= 32 else f"{name[:31]}…"


def agreements(results: Results) -> dict[str, Agreement]:
    compared = {name: row.vs_fp32 for name, row in results.stages.items()}
    return {name: row.agreement for name, row in compared.items() if row is not None and row.agreement}


def agreement_svg(stages: dict[str, Agreement], labels: dict[str, str]) -> str:
    figure = svg.figure_of(4.6)
    near, kept = figure.subplots(2, 1)
    edges = np.array([COSINE_EDGES[0] / 2, *COSINE_EDGES, 2])
    centers = np.sqrt(edges[1:] * edges[:-1])
    for name, row in stages.items():
        color, marker = AGREEMENT_STYLES[name]
        look = {"color": color, "marker": marker, "markersize": 4, "label": labels.get(name, name)}
        shares = 100 * np.array(row.cosine_counts) / row.n
        seen = np.flatnonzero(shares)
        shown = slice(max(seen[0] - 1, 0), seen[-1] + 2)
        near.plot(centers[shown], shares[shown], **look)
        kept.plot(range(len(row.neighbor_counts)), 100 * np.array(row.neighbor_counts) / row.n, **look)
    svg.log_scale(near, "x")
    near.set_xlabel("1 - cosine to the embedding of FP32")
    kept.set_xlabel("of the nearest texts by FP32, how many are still among the nearest")
    kept.xaxis.get_major_locator().set_params(integer=True)
    svg.dress(near, "texts by distance from FP32, %", grid="both")
    svg.dress(kept, "texts by neighbors that stay, %", grid="both")
    svg.legend(figure, 3)
    return svg.svg_of(figure, "agreement", "How near the embeddings of each stage are to those of FP32")


def parity_svg(parity: Parity) -> str:
    points: Points = defaultdict(dict)
    for row in parity.rows:
        layer, kind = place(row.name)
        if layer is not None:
            points[kind][layer] = 100 * min(row.nearest[0], 100.0)
    return layer_chart(points, "part of its own limit that each tensor uses, %", "parity", 100)
