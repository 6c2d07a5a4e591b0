"""A comparison on the terminal, as one HTML page, as Markdown, and as CSV."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from qdqbench.eval.compare.results import Compared, ComparedRun, Pair
from qdqbench.eval.report.formats import cleaned, count_of, first, in_points, label, size
from qdqbench.eval.report.page import page_of
from qdqbench.eval.report.render import write
from qdqbench.quantize.core.files import atomic_path, write_json
from qdqbench.quantize.core.names import without_formula

if TYPE_CHECKING:
    from rich.console import Group

PAGE = "compare"


def write_comparison(found: Compared, folder: Path) -> list[Path]:
    """Write `compare.html`, `compare.md`, `compare.json` and a CSV of runs, pairs, samples and layers each.

    Raises:
        UserError: the folder cannot be written.
    """
    import pandas

    shown = cleaned(found)
    title = " against ".join(run.name for run in shown.runs)
    page = page_of(shown, "runs side by side", title, [], f"{PAGE}.json")
    paths = write(PAGE, folder, {"c": shown, "view": _view(shown), "page": page})
    write_json(folder / f"{PAGE}.json", found.model_dump(mode="json"))
    tables = {
        "runs": [*found.rows()],
        "pairs": [row.model_dump() for row in found.pairs],
        "samples": [_flat(row.model_dump(), "answers") for row in found.samples],
        "layers": [_flat(row.model_dump(), "values") for row in found.layers],
    }
    for name, rows in tables.items():
        path = folder / f"{name}.csv"
        with atomic_path(path) as temporary:
            pandas.json_normalize(rows).map(without_formula).to_csv(temporary, index=False)
        paths.append(path)
    return [*paths, folder / f"{PAGE}.json"]


def _flat(row: dict[str, Any], field: str) -> dict[str, Any]:
    """A row whose dictionary of that name are columns."""
    inner = row.pop(field)
    return row | {
        f"{name}.{key}" if key else name: value
        for name, each in inner.items()
        for key, value in (each.items() if isinstance(each, dict) else [("", each)])
    }


def comparison_summary(found: Compared) -> "Group":
    """What a terminal of 80 columns shows: a block for each run, what pairs differ in, notes."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    shown = cleaned(found)
    blocks: list[Text | Table] = []
    for run in shown.runs:
        table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 1))
        for name, said in _lines(run):
            table.add_row(Text(f"  {name}"), Text(said))  # Text: names are never read as markup
        blocks += [Text(run.name, style="bold"), table]
    known, apart = _by_pairing(shown)
    pairs = [Text(f"{pair.second} against {pair.first}: {pair_text(pair)}") for pair in known]
    if apart:
        said = f"{count_of(len(apart), 'pair')} not paired: {apart[0].not_paired}"
        pairs.append(Text(said, style="yellow"))
    notes = [Text(f"note: {line}", style="yellow") for line in first(shown.notes, 4, "the page")]
    kept = Text(samples_text(shown))
    return Group(*blocks, Text(""), *pairs, kept, *notes)


def _lines(run: ComparedRun) -> list[tuple[str, str]]:
    """What is said of one run on the terminal."""
    said = [
        ("result", f"{score_text(run)}, against FP32 {drop_text(run) or 'not known'}"),
        ("INT8", f"{int8_text(run)}{f', engine {engine_size(run)}' if run.engine_bytes else ''}"),
        ("gate", run.gate),
    ]
    return said + [("latency", line) for line in latency_lines(run)]


def _by_pairing(found: Compared) -> tuple[list[Pair], list[Pair]]:
    """Pairs that answered the same samples, and the others."""
    return [p for p in found.pairs if not p.not_paired], [p for p in found.pairs if p.not_paired]


def score_text(run: ComparedRun) -> str:
    """The primary metric of the deployed stage: F1 85.42 ± 1.20."""
    metric = next(iter(run.metrics))
    return f"{label(metric)} {in_points(run.metrics[metric], run.stderr.get(metric))}"


def drop_text(run: ComparedRun) -> str:
    """Its distance from FP32."""
    metric = next(iter(run.metrics))
    return in_points(run.delta[metric], run.delta_stderr.get(metric), "+") if metric in run.delta else ""


def int8_text(run: ComparedRun) -> str:
    """How much is in INT8, and whether an engine proves it."""
    if run.int8 is None:
        return f"{run.planned_int8} planned, no engine" if run.planned_int8 else "none asked"
    return f"{run.int8} of {run.expected_int8}"


def engine_size(run: ComparedRun) -> str:
    """Backend and size of the engine."""
    return "" if run.engine_bytes is None else f"{label(run.backend or '')} {size(run.engine_bytes)}"


def latency_lines(run: ComparedRun) -> list[str]:
    """INT8 in each cell that was timed."""
    lines = []
    for each in run.latency:
        over = "" if each.speedup is None else f", {each.speedup:.2f}x over {each.over}"
        between = "" if each.low is None or each.high is None else f" [{each.low:.2f}, {each.high:.2f}]"
        lines.append(f"{each.cell} {each.median_ms:.3g} ms{over}{between}")
    return lines


def pair_text(pair: Pair) -> str:
    """The paired difference in words."""
    metric, delta = next(iter(pair.delta.items()))
    said = [f"{label(metric)} {in_points(delta, pair.delta_stderr.get(metric), '+')}"]
    said.append("within noise" if pair.within_noise else "beyond noise")
    if pair.disagreements is not None:
        said.append(f"{pair.disagreements} of {pair.n} answers differ")
    if pair.mcnemar_p is not None:
        said.append(f"McNemar p {pair.mcnemar_p:.2g}")
    return ", ".join(said)


def samples_text(found: Compared) -> str:
    """How many samples are listed."""
    if not found.samples_found:
        return "No sample is answered otherwise by any of them."
    answers = [answer for row in found.samples for answer in row.answers.values()]
    scores = all(answer.margin is None and answer.right is None for answer in answers)
    what = "scored most differently" if scores else "answered otherwise by at least one of them"
    kept = len(found.samples)
    rest = "" if kept == found.samples_found else f"; the {kept} whose answers are farthest apart are listed"
    return f"{found.samples_found} samples are {what}{rest}."


def _view(found: Compared) -> dict[str, Any]:
    paired, apart = _by_pairing(found)
    cells = dict.fromkeys(each.cell for run in found.runs for each in run.latency)
    return {
        "paired": paired,
        "apart": apart,
        "cells": [*cells],
        "milliseconds": [f"{cell}, ms" for cell in cells],
        "names": [run.name for run in found.runs],
        "latency": {run.name: {each.cell: each for each in run.latency} for run in found.runs},
        "answers": [*dict.fromkeys(name for row in found.samples for name in row.answers)],
        "layers": {
            what: [row for row in found.layers if row.what == what]
            for what in dict.fromkeys(row.what for row in found.layers)
        },
        "titles": {
            "amax": "amax of activations",
            "output error": "relative error of each linear's output, ONNX Runtime against fake-quant",
            "block error": "relative error of each block of the engine against the reference",
        },
        "points": in_points,
        "samples": samples_text(found),
        "pair": pair_text,
        "int8": int8_text,
        "size": size,
        "lines": latency_lines,
    }
