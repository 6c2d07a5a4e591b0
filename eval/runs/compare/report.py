"""The report of a comparison: a page, Markdown, a screen, JSON, and CSV."""

from functools import partial
from pathlib import Path
from typing import Any

from qdqbench.eval.reporting.document import (
    EVERYWHERE,
    PAGE,
    SCREEN,
    TEXT,
    Block,
    Bullets,
    Cell,
    Fold,
    Pairs,
    Prose,
    Report,
    Section,
    State,
    Table,
    code,
    page_of,
    table_of,
)
from qdqbench.eval.reporting.formats import cleaned, count_of, in_points, known, label, size
from qdqbench.eval.reporting.render import write_report
from qdqbench.eval.runs.compare.results import (
    ComparedLayer,
    ComparedRun,
    ComparedSample,
    Pair,
    RunComparison,
    RunLatency,
)
from qdqbench.eval.runs.report.verdict import differing_text, noise_text
from qdqbench.quantize.utils.comparison import Comparison, GateState
from qdqbench.quantize.utils.files import atomic_path, write_json
from qdqbench.quantize.utils.names import without_formula
from qdqbench.quantize.utils.speedup import SpeedVerdict

NAME = "compare"  # of its files
SPEED_STATES: dict[SpeedVerdict, State] = {"slower": "bad"}
GATE_STATES: dict[GateState, State] = {"passed": "good", "failed": "bad"}
LAYERS = {
    "amax": "amax of activations",
    "output error": "Relative error of each linear's output, ONNX Runtime against fake-quant",
    "block error": "Relative error of each block of the engine against the reference",
}


def write_comparison(comparison: RunComparison, folder: Path) -> list[Path]:
    """Write `compare.html`, `compare.md`, `compare.json` and a CSV of runs, pairs, samples and layers each.

    Raises:
        UserError: the folder cannot be written.
    """
    import pandas

    paths = write_report(comparison_report(comparison), folder, NAME)
    write_json(folder / f"{NAME}.json", comparison.model_dump(mode="json"))
    tables = {
        "runs": [*comparison.rows()],
        "pairs": [pair.model_dump() for pair in comparison.pairs],
        "samples": [_flatten(sample.model_dump(), "predictions") for sample in comparison.samples],
        "layers": [_flatten(layer.model_dump(), "values") for layer in comparison.layers],
    }
    for name, rows in tables.items():
        path = folder / f"{name}.csv"
        with atomic_path(path) as temporary:
            pandas.json_normalize(rows).map(without_formula).to_csv(temporary, index=False)
        paths.append(path)
    return [*paths, folder / f"{NAME}.json"]


def _flatten(values: dict[str, Any], field: str) -> dict[str, Any]:
    """Return a row whose dictionary of that name becomes columns."""
    inner = values.pop(field)
    return values | {
        f"{name}.{key}" if key else name: value
        for name, each in inner.items()
        for key, value in (each.items() if isinstance(each, dict) else [("", each)])
    }


def comparison_report(comparison: RunComparison) -> Report:
    """Return what a comparison shows: runs, paired differences, changed answers, layers."""
    comparison = cleaned(comparison)
    lines = [_pair_text(pair, pair.comparison) for pair in comparison.pairs if pair.comparison]
    apart = [
        f"{pair.second} and {pair.first}: {pair.not_paired}" for pair in comparison.pairs if pair.not_paired
    ]
    pairs: list[Block] = [Bullets(lines, on=EVERYWHERE)]
    if apart:
        pairs += [Fold(f"Not paired: {len(apart)}", [Bullets(apart)])]
        pairs += [Prose(f"{count_of(len(apart), 'pair')} not paired: {apart[0]}", "unclear", SCREEN)]
    layers = [_layer_section(comparison, what, number) for number, what in enumerate(LAYERS, 1)]
    return Report(
        page_of(
            comparison,
            "runs side by side",
            " against ".join(run.name for run in comparison.runs),
            [],
            "compare.json",
        ),
        [
            Section(
                "overview",
                "Runs",
                [_runs_table(comparison), *_runs_screen(comparison), *_runs_remarks(comparison)],
            ),
            Section("differences", "Paired differences", pairs),
            Section("changed", "Answers that differ", _sample_blocks(comparison)),
            *(section for section in layers if section is not None),
        ],
        warnings=comparison.notes,
        warnings_title="Know before you compare",
    )


def _runs_table(comparison: RunComparison) -> Table:
    configs = [*dict.fromkeys(latency.config for run in comparison.runs for latency in run.latency)]
    return table_of(
        comparison.runs,
        ("run", lambda run: Cell(run.name, note=f"{run.recipe}, model {run.model}")),
        ("result", lambda run: _points_cell(run.metrics, run.stderr)),
        ("against FP32", lambda run: _delta_cell(run.vs_fp32)),
        *((f"{config}, ms", partial(_latency_cell, config)) for config in configs),
        ("gate", lambda run: Cell(run.gate, GATE_STATES.get(run.gate, "unclear"))),
        ("INT8", _int8_text),
        ("ONNX file", lambda run: _size_cell(run.onnx_bytes)),
        ("engine", lambda run: Cell(_engine_size(run), sort=run.engine_bytes or 0)),
        ("answers of", lambda run: f"{label(run.stage)}, n {run.n}"),
        look="full cards sortable names",
        anchor="runs",
    )


def _runs_screen(comparison: RunComparison) -> list[Block]:
    """Return a block for each run, which 80 columns have room for."""
    blocks: list[Block] = []
    for run in comparison.runs:
        metric = next(iter(run.metrics))
        drop = _delta_text(run.vs_fp32, metric) if run.vs_fp32 else "not known"
        score = f"{label(metric)} {in_points(run.metrics[metric], run.stderr.get(metric))}"
        engine = f", engine {_engine_size(run)}" if run.engine_bytes else ""
        pairs = [
            ("result", f"{score}, against FP32 {drop}"),
            ("INT8", f"{_int8_text(run)}{engine}"),
            ("gate", run.gate.replace("_", " ")),
            *(("latency", _latency_text(each)) for each in run.latency),
        ]
        blocks.append(Pairs(pairs, run.name, on=SCREEN))
    return blocks


def _runs_remarks(comparison: RunComparison) -> list[Block]:
    lines = [f"{run.name}: {_latency_text(each)}" for run in comparison.runs for each in run.latency]
    bench = "" if lines else " No run has a bench: `qdqbench bench RUN` measures latency."
    text = f"Points of the metric ± one standard error; against FP32 is paired on the same samples.{bench}"
    return [Bullets(lines, on=TEXT), Prose(text, "quiet")]


def _points_cell(values: dict[str, float], errors: dict[str, float], sign: str = "") -> Cell:
    lines = [f"{label(name)} {in_points(value, errors.get(name), sign)}" for name, value in values.items()]
    return Cell("\n".join(lines), sort=next(iter(values.values()), None))


def _size_cell(count: int | None) -> Cell:
    return Cell("" if count is None else size(count), sort=count or 0)


def _delta_cell(versus: Comparison | None) -> Cell:
    return _points_cell(versus.delta, versus.delta_stderr, "+") if versus else Cell()


def _delta_text(versus: Comparison, metric: str) -> str:
    return in_points(versus.delta[metric], versus.delta_stderr.get(metric), "+")


def _latency_cell(config: str, run: ComparedRun) -> Cell:
    latency = next((latency for latency in run.latency if latency.config == config), None)
    if latency is None:
        return Cell()
    if (ratio := latency.speedup) is None:
        return Cell(f"{latency.median_ms:.3g}")
    state = SPEED_STATES.get(ratio.verdict, "")
    return Cell(f"{latency.median_ms:.3g}", state, f"{ratio.value:.2f}x over {ratio.baseline}")


def _latency_text(each: RunLatency) -> str:
    if (ratio := each.speedup) is None:
        return f"{each.config} {each.median_ms:.3g} ms"
    interval = "" if ratio.ci95_low is None else f" [{ratio.ci95_low:.2f}, {ratio.ci95_high:.2f}]"
    return f"{each.config} {each.median_ms:.3g} ms, {ratio.value:.2f}x over {ratio.baseline}{interval}"


def _int8_text(run: ComparedRun) -> str:
    """Return how much is in INT8, and whether an engine proves it."""
    if run.int8 is None:
        return f"{run.planned_int8} planned, no engine" if run.planned_int8 else "none asked"
    return f"{run.int8} of {run.expected_int8}"


def _engine_size(run: ComparedRun) -> str:
    return "" if run.engine_bytes is None else f"{label(run.backend or '')} {size(run.engine_bytes)}"


def _pair_text(pair: Pair, versus: Comparison) -> str:
    """Return the paired difference in words."""
    metric = next(iter(versus.delta))
    difference = f"{label(metric)} {_delta_text(versus, metric)}"
    parts = [f"{pair.second} against {pair.first}: {difference}", noise_text(versus)]
    if versus.disagreements is not None:
        parts.append(f"{differing_text(versus)} answers differ")
    if versus.mcnemar_p is not None:
        parts.append(f"McNemar p {versus.mcnemar_p:.2g}")
    return ", ".join(parts)


def _sample_blocks(comparison: RunComparison) -> list[Block]:
    if not comparison.samples:
        return [Prose(_samples_text(comparison), on=EVERYWHERE)]
    names = [*dict.fromkeys(name for sample in comparison.samples for name in sample.predictions)]
    table = table_of(
        comparison.samples,
        ("sample", lambda sample: sample.sample),
        ("text", lambda sample: Cell("not found" if sample.text is None else sample.text, look="text")),
        ("label", lambda sample: sample.label),
        *((name, partial(_answer_cell, name)) for name in names),
        ("distance", lambda sample: f"{sample.distance:.3g}"),
        texts=range(len(names) + 4),
        look="full cards sortable",
        filter="texts, labels, answers",
        anchor="samples",
    )
    about = (
        "With an answer: its margin, the probability of that class less that of the next; near 0 the answer "
        "was near the threshold."
    )
    return [Prose(_samples_text(comparison), on=EVERYWHERE), table, Prose(about, "quiet", PAGE)]


def _answer_cell(name: str, sample: ComparedSample) -> Cell:
    if (answer := sample.predictions.get(name)) is None:
        return Cell()
    look = "" if answer.right is None else "right" if answer.right else "wrong-answer"
    return Cell(answer.prediction, note=known(answer.margin, ".2f"), sort=answer.margin, look=look)


def _samples_text(comparison: RunComparison) -> str:
    """Return how many samples differ, and how many of them are listed."""
    if not comparison.sample_count:
        return "No sample is answered otherwise by any of them."
    answers = [answer for sample in comparison.samples for answer in sample.predictions.values()]
    scores = all(answer.margin is None and answer.right is None for answer in answers)
    what = "scored most differently" if scores else "answered otherwise by at least one of them"
    kept = len(comparison.samples)
    rest = f"; the {kept} whose answers are farthest apart are listed"
    return f"{comparison.sample_count} samples are {what}{rest if kept < comparison.sample_count else ''}."


def _layer_section(comparison: RunComparison, what: str, number: int) -> Section | None:
    """Return quantizers, linears or blocks of all runs side by side; None where no run has any."""
    layers = [layer for layer in comparison.layers if layer.what == what]
    if not layers:
        return None
    table = table_of(
        layers,
        ("name", lambda layer: code(layer.name)),
        *((run.name, partial(_value_text, run.name)) for run in comparison.runs),
        look="sortable",
        filter="layers",
        anchor=f"layers-{number}",
        on=PAGE,
    )
    return Section(what.replace(" ", "-"), LAYERS[what], [table], on=PAGE)


def _value_text(name: str, layer: ComparedLayer) -> str:
    return known(layer.values.get(name), ".3g")
