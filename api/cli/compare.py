"""The commands `compare` and `timings`, which need no extra."""

from functools import cache, partial
from pathlib import Path

from rich.table import Table

from qdqbench._options import CompareOptions, StageOptions
from qdqbench.cli.answer import Answer
from qdqbench.eval.runs.comparison import NAME, compare_runs, comparison_report, write_comparison
from qdqbench.eval.runs.results import read_results
from qdqbench.quantize.pipeline.ownership import RunIdentity, owned_folder
from qdqbench.quantize.utils.progress import reporter
from qdqbench.quantize.utils.system.process import invocation


def timings(options: StageOptions) -> Answer:
    found = read_results(options.folder)
    table = Table("stage", "wall s", "CPU s", "peak MB", "", box=None)
    rows = found.timings.values()
    for name, row in found.timings.items():
        reused = "reused" if row.reused else ""
        cpu = "-" if row.cpu_s is None else f"{row.cpu_s:.1f}"
        table.add_row(name, f"{row.wall_s:.1f}", cpu, f"{row.peak_rss_bytes / 1e6:.0f}", reused)
    wall, cpu_s = sum(row.wall_s for row in rows), sum(row.cpu_s or 0 for row in rows)
    peak = max(row.peak_rss_bytes for row in rows)
    table.add_row("total", f"{wall:.1f}", f"{cpu_s:.1f}", f"{peak / 1e6:.0f}", "")
    return Answer(found.model_dump()["timings"], table)


def compare(options: CompareOptions) -> Answer:
    out = options.out or Path("runs/compare")
    compared = cache(partial(compare_runs, options.runs, invocation()))
    reporter().begin("comparing")
    with owned_folder(out, RunIdentity(kind=NAME), overwrite=options.overwrite, ready=compared):
        found = compared()
        written = write_comparison(found, out)
    pages = [f"page: {path}" for path in written if path.suffix == ".html"]
    return Answer(found, comparison_report(found), pages)
