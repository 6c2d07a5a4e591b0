"""`report.md`, `report.html` and the terminal's summary, all written from one `Results` and nothing else."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qdqbench.eval import plots
from qdqbench.eval.results import STAGES, Parity, ParityRow, Results, StageResult
from qdqbench.quantize.files import write_text

if TYPE_CHECKING:
    from rich.console import Group

TEMPLATES = Path(__file__).parent / "templates"
LABELS = {
    "fp32": "FP32",
    "fake_quant": "fake-quant",
    "onnxruntime": "ONNX Runtime",
    "tensorrt": "TensorRT",
    "tensorrt_rtx": "TensorRT-RTX",
    "f1": "F1",
    "matthews": "Matthews",
    "pearson": "Pearson",
    "spearman": "Spearman",
    "cola": "CoLA",
    "sst2": "SST-2",
    "stsb": "STS-B",
} | {name: name.upper() for name in ("mrpc", "qqp", "mnli", "qnli", "rte", "wnli")}
# What garbles a terminal or a page, or cannot be encoded: controls, direction overrides, lone surrogates.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def write_reports(results: Results, folder: Path) -> list[Path]:
    """Write `report.md` and `report.html` (one file, no external request) to `folder`; return their paths.

    Raises:
        UserError: the folder cannot be written.
    """
    context = _context(_printable(results))
    texts = {folder / f"report.{kind}": _render(f"report.{kind}.j2", context) for kind in ("md", "html")}
    for path, text in texts.items():
        write_text(path, text)
    return list(texts)


def summary_lines(results: Results) -> "Group":
    """One screen for the end of a run, as a rich renderable: verdict, stages, the first warnings."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    results = _printable(results)
    said = verdict(results)
    colour = "green" if said.passed else "red"
    body = Text(said.sentence)
    for line in _first(said.failures, 5, "the report"):
        body.append(f"\n✗ {line}", style="red")
    for line in _first(said.notes, 3, "the report"):
        body.append(f"\n{line}", style="yellow")
    table = Table("stage", "result", "against FP32", "differing answers", box=None, pad_edge=False)
    for name, row in results.stages.items():
        versus = row.vs_fp32
        cells = (
            label(name),
            _headline(row) or row.status,
            _delta(row) if versus else "",
            f"{versus.disagreements} of {row.n}" if versus and versus.disagreements is not None else "",
        )
        table.add_row(*(Text(cell) for cell in cells))  # Text: names are never read as markup
    warned = [Text(f"warning: {line}", style="yellow") for line in _first(results.warnings, 3, "the report")]
    return Group(Panel(body, title=Text(said.title), border_style=colour, title_align="left"), table, *warned)


@dataclass(frozen=True)
class Verdict:
    """The run in plain words."""

    passed: bool
    title: str
    sentence: str
    failures: list[str] = field(default_factory=list)  # of the gate, then of the checks beside it
    notes: list[str] = field(default_factory=list)  # what was not done, and why


def verdict(results: Results) -> Verdict:
    """What a reader must know first, made from the numbers alone."""
    gate = results.gate
    checks = _failed_checks(results)
    clauses = [*_int8(results), _accuracy(results)]
    if (shrunk := _quantized_file(results)) is not None:
        clauses.append(f"ONNX file {shrunk[1]:.2f} of FP32")
    clauses.append("gate passed" if gate.passed else "gate FAILED")
    if gate.passed:
        title = "Gate passed, but a check does not hold" if checks else "Gate passed"
    else:
        title = "Gate failed"
    sentence = "; ".join(clauses) + "."
    return Verdict(
        passed=gate.passed and not checks,
        title=title,
        sentence=sentence[0].upper() + sentence[1:],
        failures=[*gate.failures, *checks] or ([] if gate.passed else ["the gate gives no reason"]),
        notes=_not_done(results),
    )


def _int8(results: Results) -> list[str]:
    engine, planned = results.engine, len(results.quantized_layers)
    if engine is None:
        if not planned:
            return ["nothing is quantized, as the recipe asks, and no engine was built"]
        return [f"INT8 in {planned} linears of the ONNX file, not proven: no engine was built"]
    done, asked = engine.int8_gemms, engine.expected_int8_gemms
    what = "linears" if asked == planned else "matrix products"
    clauses = [f"INT8 in {done} of {asked} {what}, proven from the engine's layer table"]
    if done < asked:
        clauses = [f"INT8 in only {done} of {asked} {what} according to the engine's layer table"]
    if not asked:
        clauses = [
            "nothing runs in INT8, as the recipe asks" if not done else f"INT8 in {done} {what}, none asked"
        ]
    if engine.expected_attention_int8:
        clauses.append(
            f"INT8 attention in {engine.attention_int8} of {engine.expected_attention_int8} layers"
        )
    return clauses


def _last_measured(results: Results) -> tuple[str, StageResult] | None:
    """The measured stage that is nearest to deployment."""
    done = [(name, row) for name, row in results.stages.items() if row.status == "done" and row.metrics]
    return done[-1] if done else None


def _accuracy(results: Results) -> str:
    task = label(str(results.task.get("name", "task")))
    if (last := _last_measured(results)) is None:
        return f"{task} was not scored in any stage"
    name, row = last
    metric = next(iter(row.metrics))
    text = f"{task} {label(metric)} {_value(row, metric)} in {_stage(results, name)}"
    base = results.stages.get("fp32")
    if name == "fp32":
        return f"{text} ({row.n} samples), no other stage was scored"
    if base is None or row.vs_fp32 is None or metric not in base.metrics:
        return f"{text} ({row.n} samples), not compared with FP32"
    return f"{text} against {base.metrics[metric]:.4f} in FP32 ({_delta(row)}, {row.n} samples)"


def _not_done(results: Results) -> list[str]:
    notes = []
    absent = {name: StageResult(status="skipped") for name in STAGES}
    for name, row in (absent | results.stages).items():
        why = _sentence(row.reason or "no reason was recorded")
        if row.status == "done":
            continue
        if name != "engine":
            notes.append(f"{label(name)} was skipped: {why}")
        elif results.engine is None:
            notes.append(f"No engine was built: {why}")
        else:
            how = "ahead of time, without running it" if results.engine.ahead_of_time else "but not run"
            notes.append(f"The engine was built {how}; its outputs are not verified: {why}")
    return notes


def _failed_checks(results: Results) -> list[str]:
    """Checks that fail beside the gate."""
    failures = []
    errors = [row for row in results.findings if row.severity == "error"]
    if errors:
        codes = ", ".join(f"{code} ({n})" for code, n in Counter(row.code for row in errors).items())
        failures.append(f"check of the ONNX file: {_count(len(errors), 'error')}: {codes}")
    if results.parity is not None and not results.parity.passed:
        bad = sum(not _holds(row, results.parity) for row in results.parity.rows)
        failures.append(f"layer parity: {bad} of {len(results.parity.rows)} tensors are over the limit")
    if (engine := results.engine) is not None and results.gate.passed and engine.not_int8:
        failures.append(f"not in INT8 in the engine: {', '.join(engine.not_int8)}")
    return failures


def _holds(row: ParityRow, parity: Parity) -> bool:
    return row.differing <= parity.limit_fraction * row.codes and row.max_step <= parity.limit_step


def _share(row: ParityRow) -> float:
    return row.differing / max(row.codes, 1)


def _quantized_file(results: Results) -> tuple[str, float, int] | None:
    """Name, size ratio and bytes of the smallest file that has an FP32 twin."""
    ratios = [(row.name, row.fp32_ratio, row.bytes) for row in results.files if row.fp32_ratio is not None]
    others = [row for row in ratios if "fp32" not in row[0]]
    return min(others, key=lambda row: (row[1], row[0]), default=None)


def _tiles(results: Results) -> list[tuple[str, str, str, bool]]:
    """Label, value, remark and whether it holds, of the numbers under the verdict."""
    tiles = []
    engine, last, shrunk, parity = (
        results.engine,
        _last_measured(results),
        _quantized_file(results),
        results.parity,
    )
    if engine is not None and engine.expected_int8_gemms:
        done, asked = engine.int8_gemms, engine.expected_int8_gemms
        tiles.append(
            ("INT8 linears", f"{done} / {asked}", "in the engine", done >= asked and not engine.not_int8)
        )
    elif engine is None and results.quantized_layers:
        tiles.append(("INT8 linears", str(len(results.quantized_layers)), "planned, not proven", True))
    if last is not None and (versus := last[1].vs_fp32) is not None:
        metric = next(iter(last[1].metrics))
        holds = versus.delta[metric] >= -results.gate.max_drop
        error = f"± {versus.delta_stderr[metric]:.4f}, " if metric in versus.delta_stderr else ""
        tiles.append(
            (f"{label(metric)} against FP32", f"{versus.delta[metric]:+.4f}", error + _noise(last[1]), holds)
        )
    if shrunk is not None:
        tiles.append(("ONNX file against FP32", f"{shrunk[1]:.2f}", f"{size(shrunk[2])}, {shrunk[0]}", True))
    if parity is not None and parity.rows:
        worst = max(map(_share, parity.rows))
        remark = f"codes differ at worst, limit {parity.limit_fraction:.2%}"
        tiles.append(("layer parity", f"{worst:.2%}", remark, parity.passed))
    if results.timings:
        peak = max(row.peak_rss_bytes for row in results.timings.values())
        total = seconds(sum(row.wall_s for row in results.timings.values()))
        tiles.append(("whole run", total, f"peak memory {size(peak)}", True))
    return tiles


def _context(results: Results) -> dict[str, Any]:
    recipe = results.recipe
    outliers = [row for row in results.quantizers if row.amax_over_rms is not None]
    outliers.sort(key=lambda row: -(row.amax_over_rms or 0.0))
    return {
        "r": results,
        "said": verdict(results),
        "tiles": _tiles(results),
        "name": results.model.get("name", "model"),
        "task": label(str(results.task.get("name", "task"))),
        "recipe_name": recipe.get("name", "unnamed recipe"),
        "recipe_yaml": _yaml(recipe),
        "metrics": list(dict.fromkeys(metric for row in results.stages.values() for metric in row.metrics)),
        "stage_labels": {name: _stage(results, name) for name in results.stages},
        "grid": plots.precision_grid(results),
        "kernels": Counter(row.kind for row in results.engine.layers).most_common() if results.engine else [],
        "outliers": outliers[:3],
        "worst": sorted(results.parity.rows, key=lambda row: -_share(row))[:6] if results.parity else [],
        "accuracy_svg": plots.accuracy_svg(results, LABELS | {name: label(name) for name in _names(results)}),
        "amax_svg": plots.ranges_svg(results, "amax"),
        "outlier_svg": plots.ranges_svg(results, "amax_over_rms"),
        "parity_svg": plots.parity_svg(results),
        "total_s": sum(row.wall_s for row in results.timings.values()),
        "inputs": [
            *flat(results.model, "model"),
            *flat(results.task, "task"),
            *flat(results.data, "data"),
            ("seed", str(results.seed)),
        ],
        "environment": flat(results.environment),
    }


def _names(results: Results) -> Iterable[str]:
    return [*results.stages, *(metric for row in results.stages.values() for metric in row.metrics)]


def _render(template: str, context: dict[str, Any]) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=select_autoescape(enabled_extensions=("html.j2",)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    for function in (label, size, seconds, types, text, code, fenced):
        environment.filters[function.__name__] = function
    environment.globals |= {"value": _value, "holds": _holds, "noise": _noise, "share": _share}
    return environment.get_template(template).render(context)


def label(name: str) -> str:
    """How the field writes the name of a stage, metric, task or backend; `_mm` is MNLI's mismatched split."""
    if name.endswith("_mm"):
        return f"{label(name[:-3])} (mismatched)"
    return LABELS.get(name, name.replace("_", " "))


def size(count: float) -> str:
    """Bytes in decimal units with three digits: 90.9 MB."""
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def seconds(count: float) -> str:
    """Seconds with the digits that matter: 0.24 s, 12.3 s, 4 min 05 s."""
    if count >= 119.5:
        return f"{round(count) // 60} min {round(count) % 60:02d} s"
    return f"{count:.2f} s" if count < 9.995 else f"{count:.1f} s"


def types(names: list[str]) -> str:
    """Datatypes with their number: `3 FP16, INT8`."""
    counted = Counter(plots.datatype(name) for name in names)
    return ", ".join(f"{n} {name}" if n > 1 else name for name, n in counted.items())


def text(value: Any) -> str:
    """Any text as one line of Markdown that stays text, in a table too."""
    line = " ".join(str(value).split())
    line = (
        re.sub(r"([\\`*\[\]|~])", r"\\\1", line)
        .replace("&", "&amp;")
        .replace("<", "&lt;")
        .replace(">", "&gt;")
    )
    return re.sub(r"^([#+=-])", r"\\\1", line)


def code(value: Any) -> str:
    """Any text as one Markdown code span, in a table too."""
    line = " ".join(str(value).split()).replace("`", "'").replace("|", r"\|")
    return f"`{line}`" if line else ""


def fenced(block: str, language: str = "") -> str:
    """A Markdown code block whose fence is longer than any in the text."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", block)), default=0))
    return f"{fence}{language}\n{block.rstrip()}\n{fence}"


def flat(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Nested mappings as dotted names and printable values."""
    if isinstance(value, dict):
        return [
            row
            for key, item in value.items()
            for row in flat(item, f"{prefix}.{key}" if prefix else str(key))
        ]
    if isinstance(value, list):
        return [(prefix, ", ".join(str(item) for item in value))]
    if isinstance(value, int) and value >= 100_000:
        return [(prefix, f"{value:,}")]
    return [(prefix, "none" if value is None else str(value))]


def _value(row: StageResult, metric: str) -> str:
    error = f" ± {row.stderr[metric]:.4f}" if metric in row.stderr else ""
    return f"{row.metrics[metric]:.4f}{error}" if metric in row.metrics else ""


def _headline(row: StageResult) -> str:
    return ", ".join(f"{label(metric)} {_value(row, metric)}" for metric in row.metrics)


def _delta(row: StageResult) -> str:
    assert row.vs_fp32 is not None
    metric = next(iter(row.metrics))
    error = row.vs_fp32.delta_stderr.get(metric)
    return f"{row.vs_fp32.delta[metric]:+.4f}{'' if error is None else f' ± {error:.4f}'}, {_noise(row)}"


def _noise(row: StageResult) -> str:
    return "within noise" if row.vs_fp32 is not None and row.vs_fp32.within_noise else "beyond noise"


def _stage(results: Results, name: str) -> str:
    backend = f" ({label(results.engine.backend)})" if name == "engine" and results.engine else ""
    return label(name) + backend


def _sentence(line: str) -> str:
    return line if line.endswith((".", "!", "?")) else f"{line}."


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _first(lines: list[str], count: int, where: str) -> list[str]:
    """The first lines, and a word on the rest."""
    rest = len(lines) - count
    return lines if rest <= 0 else [*lines[:count], f"and {rest} more in {where}"]


def _yaml(value: Any) -> str:
    import yaml

    return str(yaml.safe_dump(value, sort_keys=False, allow_unicode=True, default_flow_style=None, width=100))


def _printable(results: Results) -> Results:
    return Results.model_validate(_clean(results.model_dump(mode="json")))


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return _UNPRINTABLE.sub("\ufffd", value)
    if isinstance(value, list):
        return [_clean(item) for item in value]
    if isinstance(value, dict):
        return {_clean(key): _clean(item) for key, item in value.items()}
    return value
