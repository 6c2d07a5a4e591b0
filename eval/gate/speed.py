"""How fast INT8 is, from the bench of a run, where it is of the files that are there now."""

from pathlib import Path

from qdqbench.eval.bench.results import (
    BENCH_FILE,
    cell_label,
    headline_of,
    read_bench,
    without_unmasked,
)
from qdqbench.eval.benchreport.report import stale_files
from qdqbench.quantize.core.comparison import Speed
from qdqbench.quantize.core.errors import UserError


def speed_of(folder: Path) -> list[Speed]:
    """The fastest INT8 engine over the fastest in FP16, cell by cell; none where nothing was measured."""
    if not (folder / BENCH_FILE).is_file():
        return []
    try:
        bench = without_unmasked(read_bench(folder / BENCH_FILE))
    except UserError:  # the report says so
        return []
    if stale_files(bench, folder):
        return []
    labels = {about.name: about.label for about in bench.contestants}
    found = [(cell, headline_of(bench.contestants, cell)) for cell in bench.cells]
    return [
        Speed(
            cell=cell_label(cell, bench.settings.real_lengths),
            over=labels[best.over],
            value=best.value,
            low=best.low,
            high=best.high,
        )
        for cell, best in found
        if best is not None
    ]
