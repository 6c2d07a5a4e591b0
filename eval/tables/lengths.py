"""The table of real lengths: sequences per second of whole splits, INT8 beside the fastest other one."""

from collections.abc import Sequence

from qdqbench.eval.bench.report import headline_title, ratio_cell
from qdqbench.eval.bench.results import Bench, BenchConfig, row_of
from qdqbench.eval.report.formats import label, text
from qdqbench.eval.tables.accuracy import table
from qdqbench.eval.tables.changed import Changed


def length_tables(benches: Sequence[Bench], changed: Changed) -> list[str]:
    """One table: for each bench of real lengths a row a batch size; nothing without one."""
    cells = [(bench, cell) for bench in benches for cell in bench.configs if cell.kind == "dataset"]
    if not cells:
        return []
    title = (
        "### Real lengths\n\nThe whole validation split, sorted by length; every contestant gets the same "
        "batches. Sequences per second of the split's rows, from the median time of a launch; the ratio is "
        "over the fastest other contestant of that run, with its 95% interval. All times are below."
    )
    over = dict.fromkeys(headline_title(bench) for bench, _ in cells)
    header = ["model", "recipe", "split", "batch", "padded to", "padding", "INT8", "fastest other"]
    rows = [_row(bench, cell, changed) for bench, cell in cells]
    return [title, table([*header, " or ".join(over)], rows)]


def _row(bench: Bench, cell: BenchConfig, changed: Changed) -> list[str]:
    names = {about.name: about.label for about in bench.systems}
    random = " (random weights)" if bench.target.random_weights else ""
    lengths = cell.padded_to
    best = cell.headline
    mark = ratio_cell(best)
    return [
        f"{text(bench.target.name)}{random}",
        changed.label(bench.recipe),
        text(label(bench.settings.dataset or "")),
        str(cell.batch),
        ", ".join(map(str, lengths)) if len(lengths) <= 8 else f"{lengths[0]} to {lengths[-1]} by 8",
        f"{1 - cell.real_tokens / cell.padded_tokens:.1%}",
        _rate(cell, names, best.system if best else ""),
        _rate(cell, names, best.baseline if best else ""),
        f"**{mark.text} ✗**" if mark.state == "bad" else mark.text,
    ]


def _rate(cell: BenchConfig, names: dict[str, str], name: str) -> str:
    """Sequences per second of a contestant, and its name."""
    row = row_of(cell, name)
    return "" if row is None else f"{row.sequences_per_s:,.0f} ({text(names[name])})"
