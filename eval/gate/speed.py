"""Speed of INT8, and sizes of engines without it, from the bench of a run: one of its present files."""

from pathlib import Path

from qdqbench.eval.bench.report import stale_files
from qdqbench.eval.bench.results import (
    BENCH_FILE,
    Bench,
    headline_of,
    read_bench,
    row_of,
)
from qdqbench.quantize.core.comparison import EngineSize
from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.core.speedup import Speedup


def speed_of(folder: Path) -> list[Speedup]:
    """The fastest INT8 engine over the fastest in FP16, cell by cell; none where nothing was measured."""
    if (bench := _bench(folder)) is None:
        return []
    labels = {about.name: about.label for about in bench.systems}
    best = (headline_of(bench.systems, cell) for cell in bench.configs)
    return [
        ratio.model_copy(update={"system": labels[ratio.system], "baseline": labels[ratio.baseline]})
        for ratio in best
        if ratio is not None
    ]


def twins_of(folder: Path, backend: str | None) -> list[EngineSize]:
    """Sizes of the engines without INT8 that the bench built for the same profiles; none without a bench.

    Args:
        backend: of the run's own engine; None: it has none.
    """
    if backend is None or (bench := _bench(folder)) is None:
        return []
    found = []
    for about in bench.systems:
        same = about.backend.partition(" ")[0] == backend and not about.name.endswith("-exact")
        rows = (row_of(cell, about.name) for cell in bench.configs)
        sizes = [row.engine_bytes for row in rows if row is not None and row.engine_bytes is not None]
        if same and sizes and about.precision != "int8":
            found.append(EngineSize(name=about.label, precision=about.precision, bytes=sizes[0]))
    return found


def _bench(folder: Path) -> Bench | None:
    """The bench of the files that a run has now."""
    if not (folder / BENCH_FILE).is_file():
        return None
    try:
        bench = read_bench(folder / BENCH_FILE)
    except UserError:  # the report says so
        return None
    return None if stale_files(bench, folder) else bench
