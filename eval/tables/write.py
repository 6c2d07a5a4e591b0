"""Measured tables in Markdown, made from `results.json` and `bench.json` files and from nothing else.

The same files give the same bytes, in whatever order they are named; no table exists without its files.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from qdqbench.eval.bench.report import (
    ENGINE_SHAPES,
    clocks,
    config_text,
    hardware,
    headline_cells,
    headline_title,
    latency_rows,
    method,
    ratio_rows,
    slow_lines,
    without_systems,
)
from qdqbench.eval.bench.results import BENCH_FILE as BENCH
from qdqbench.eval.bench.results import Bench, rate_of, read_bench
from qdqbench.eval.report.document import Cell
from qdqbench.eval.report.formats import cleaned, size, text
from qdqbench.eval.runs.study_results import STUDY_FILE as STUDY
from qdqbench.eval.runs.study_results import Study, read_study
from qdqbench.eval.search.results import SEARCH_FILE as SEARCH
from qdqbench.eval.search.results import Search, read_search
from qdqbench.eval.tables.accuracy import Places, accuracy_tables, mean_tables, run_key, table
from qdqbench.eval.tables.changed import Changed, differences
from qdqbench.eval.tables.lengths import length_tables
from qdqbench.eval.tables.search import search_tables
from qdqbench.eval.tables.study import study_tables
from qdqbench.quantize.core import files
from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.core.results import RESULTS_FILE as RESULTS
from qdqbench.quantize.core.results import Results
from qdqbench.quantize.core.strict import Schema, read
from qdqbench.quantize.recipe.shapes import AUTO

BEGIN, END = "<!-- tables:begin -->", "<!-- tables:end -->"


def find_results(paths: Sequence[Path]) -> tuple[list[Results], list[Bench]]:
    """Read every results file that is named, or that lies below a named folder.

    Raises:
        UserError: nothing found, an unreadable file, or two files with the same measurement.
    """
    found: dict[Path, None] = {}
    for path in paths:
        below = _below(path, RESULTS, BENCH, STUDY, SEARCH)
        if not below:
            raise UserError(f"{path} holds no {RESULTS} and no {BENCH}; name the folders of finished runs")
        found.update(dict.fromkeys(file for file in below if file.name not in (STUDY, SEARCH)))
    runs: dict[tuple[Any, ...], tuple[Path, Results]] = {}
    benches: dict[tuple[Any, ...], tuple[Path, Bench]] = {}
    for path in found:
        value = files.read_json(path)
        if isinstance(value, dict) and "configs" in value:
            bench = read_bench(path)
            _add(benches, _bench_key(bench), path, cleaned(bench))
        else:
            run = read(path, Results, "results.json or bench.json", "make it again")
            _add(runs, run_key(run), path, cleaned(run))
    return [runs[key][1] for key in sorted(runs)], [benches[key][1] for key in sorted(benches)]


def find_studies(paths: Sequence[Path]) -> list[Study]:
    """Read every `study.json` that is named, or that lies below a named folder.

    Raises:
        UserError: unreadable, or of another version.
    """
    studies = _read_all(STUDY, read_study, paths)
    return sorted(studies, key=lambda study: (str(study.task["name"]), sorted(study.recipes), study.created))


def find_searches(paths: Sequence[Path]) -> list[Search]:
    """Read every `search.json` that is named, or that lies below a named folder.

    Raises:
        UserError: unreadable, or of another version.
    """
    searches = _read_all(SEARCH, read_search, paths)
    return sorted(searches, key=lambda found: (found.task, found.source.mode, found.created))


def _below(path: Path, *names: str) -> list[Path]:
    """The files of these names in a folder, or the file itself."""
    return [file for name in names for file in path.rglob(name)] if path.is_dir() else [path]


def _read_all(name: str, reader: Callable[[Path], Schema], paths: Sequence[Path]) -> list[Schema]:
    """Every file of this name, each once."""
    below = dict.fromkeys(file for path in paths for file in _below(path, name))
    return [cleaned(reader(file)) for file in below if file.name == name]


def insert(before: str, tables: str, name: str) -> str:
    """Put the tables between the markers of a Markdown text.

    Raises:
        UserError: not exactly one pair of markers, in order.
    """
    if before.count(BEGIN) != 1 or before.count(END) != 1 or before.index(BEGIN) > before.index(END):
        raise UserError(f"{name} must hold the line {BEGIN} once and after it {END} once; add them")
    head, _, rest = before.partition(BEGIN)
    return f"{head}{BEGIN}\n{tables.strip()}\n{END}{rest.partition(END)[2]}"


def tables_markdown(
    runs: Sequence[Results],
    benches: Sequence[Bench],
    studies: Sequence[Study] = (),
    searches: Sequence[Search] = (),
) -> str:
    """All tables: accuracy by task, means, QAT over seeds, searches, real lengths, latency, and where."""
    places, changed = Places(), Changed()
    current = [without_changed(bench) for bench in benches]
    parts = [
        "Written by `qdqbench tables` from results files; do not edit by hand.",
        *accuracy_tables(runs, places, changed),
        *mean_tables(runs, places, changed),
        *study_tables(studies, changed),
        *search_tables(searches, changed),
        *length_tables(current, changed),
        *(part for bench in current for part in _latency(bench, changed)),
    ]
    return "\n\n".join(part for part in [*parts, changed.text(), places.text()] if part)


def without_changed(bench: Bench) -> Bench:
    """A bench without the engines of `--extra-recipe` recipes that are shipped otherwise now."""
    changed = {about.name: about.label for about in bench.systems if differences(about.recipe or {})}
    if not changed:
        return bench
    said = f"left out, as what is shipped has changed since: {', '.join(changed.values())}"
    return without_systems(bench, {*changed}, said)


def _latency(bench: Bench, changed: Changed) -> list[str]:
    """Latency, speed-ups and throughput of one bench."""
    about = bench.target
    shape, random = about.shape, " (random weights)" if about.random_weights else ""
    on_gpu = bench.device == "gpu"
    built = ENGINE_SHAPES[bench.settings.engine_shapes] if on_gpu else "engines for any shape"
    title = (
        f"### Latency: {text(about.name)}{random}, {changed.label(bench.recipe)}, "
        f"{built}\n\n"
        f"{text(hardware(bench))}. {shape.get('layers')} layers, hidden {shape.get('hidden')}, "
        f"{shape.get('heads')} heads, {shape.get('parameters', 0) / 1e6:.0f}M parameters. "
        f"Median milliseconds. {text(method(bench))}"
    )
    labels = {about.name: about.label for about in bench.systems}
    shapes = [text(config_text(bench, cell)) for cell in bench.configs]
    heads = []
    for name, cell in zip(shapes, bench.configs, strict=True):
        ratio, *sides = headline_cells(bench, cell)
        heads.append([name, _shown(ratio), *(text(side.text) for side in sides)])
    rows = [[text(name), *map(_shown, marks)] for name, marks in (*latency_rows(bench), *ratio_rows(bench))]
    said = [*bench.notes, *_built_as(bench), *_proofs(bench), clocks(bench), *slow_lines(bench)]
    notes = [f"- {text(line)}" for line in (*said, *bench.errors, *bench.warnings)]
    if not bench.complete:
        notes.insert(0, "- interrupted: not every shape was measured")
    return [
        title,
        table(["shape", text(headline_title(bench)), "INT8, ms", "over, ms"], heads),
        "Medians, and ratios with their intervals:",
        table(["ms", *shapes], rows),
        *_throughput(bench, labels),
        *_memory(bench, labels),
        "\n".join(notes),
    ]


def _shown(cell: Cell) -> str:
    """A figure of ours, whose interval needs no escape."""
    return f"**{cell.text} ✗**" if cell.state == "bad" else cell.text


def _built_as(bench: Bench) -> list[str]:
    """Shapes and form of engines that were built as the recipe says."""
    if bench.settings.engine_shapes == "exact" or bench.device == "cpu":
        return []
    shapes = bench.recipe["engine"]["shapes"]
    if shapes == AUTO:
        return ["optimization profiles: those of the data (shapes: auto)"]
    profiles = [shapes] if isinstance(shapes, dict) else shapes
    said = "; ".join(f"batch {list(each['batch'])}, length {list(each['length'])}" for each in profiles)
    return [f"optimization profiles [min, opt, max]: {said}"]


def _proofs(bench: Bench) -> list[str]:
    """INT8 GEMMs of the engines that were timed, from their layer tables; fused attention of the peers."""
    rows = [row for cell in bench.configs for row in cell.rows if row.expected_int8_gemms is not None]
    counts = sorted({(row.int8_gemms, row.expected_int8_gemms) for row in rows})
    said = [f"INT8 proven in {done} of {asked} GEMMs of the timed engines" for done, asked in counts]
    if read := [row.kernels for cell in bench.configs for row in cell.rows if row.kernels]:
        fused = sorted({kernels.fused_attention for kernels in read})
        said.append(
            f"fused attention kernels of each PyTorch peer, by torch.profiler: {', '.join(map(str, fused))}"
        )
    return said


def _throughput(bench: Bench, labels: dict[str, str]) -> list[str]:
    """Sequences per second of each contestant by shape and streams; nothing where it was not measured."""
    rows = []
    for cell in bench.configs:
        for streams in bench.settings.streams:
            rates = [rate_of(cell, name, streams) for name in labels]
            if any(rates):
                shown = ("" if rate is None else f"{rate:,.0f}" for rate in rates)
                rows.append([text(config_text(bench, cell)), str(streams), *shown])
    if not rows:
        return []
    return ["Sequences per second:", table(["shape", "streams", *map(text, labels.values())], rows)]


def _memory(bench: Bench, labels: dict[str, str]) -> list[str]:
    """Size of each engine and of one context of it, by shape; nothing without engines."""
    sizes = {
        (config_text(bench, cell), row.system): f"{size(row.engine_bytes)} + {size(row.activation_bytes)}"
        for cell in bench.configs
        for row in cell.rows
        if row.engine_bytes is not None and row.activation_bytes is not None
    }
    names = [name for name in labels if any(name == engine for _, engine in sizes)]
    rows = [
        [text(shape), *(sizes.get((shape, name), "") for name in names)]
        for shape in dict.fromkeys(shape for shape, _ in sizes)
    ]
    header = ["shape", *(text(labels[name]) for name in names)]
    return ["Memory on the GPU, engine + one context:", table(header, rows)] if rows else []


def _bench_key(bench: Bench) -> tuple[Any, ...]:
    return (
        bench.device,
        bench.target.name,
        str(bench.recipe.get("name")),
        hardware(bench),
        bench.settings.engine_shapes,
        tuple(bench.settings.lengths),
        tuple(bench.settings.batches),
        str(bench.settings.dataset),
    )


def _add(
    known: dict[tuple[Any, ...], tuple[Path, Any]], key: tuple[Any, ...], path: Path, value: Any
) -> None:
    if key in known:
        raise UserError(f"{known[key][0]} and {path} measured the same thing; name only one of them")
    known[key] = (path, value)
