"""Tables of `inspect`: kernels under the ONNX layers that they compute, and their time."""

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from qdqbench.cli.terminal import console, plain

if TYPE_CHECKING:
    from qdqbench.quantize.engine.inspection import Inspection, Time
    from qdqbench.quantize.utils.results import LayerRow

MAX_TEXT = 400  # of a name; TensorRT's are shorter


def kernel_table(judged: "Inspection", every: bool) -> Any:
    """ONNX layer, kernel, datatypes, and the time where there is a profile."""
    from rich.table import Table

    from qdqbench.quantize.engine.kernels import types_text
    from qdqbench.quantize.engine.layers import base_name, is_int8

    times = judged.time.by_kernel if judged.time else {}
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False)
    table.add_column("ONNX layer", overflow="fold", ratio=5)
    table.add_column("", justify="right")
    table.add_column("kernel", overflow="fold", ratio=6)
    table.add_column("datatypes", overflow="fold", min_width=12)
    if judged.time:
        table.add_column("ms", justify="right")
        table.add_column("share", justify="right")
    groups = _groups(judged, every)
    if judged.time:
        groups.sort(key=lambda group: -sum(times.get(row.name, 0.0) for row in group[1]))
    for name, rows in groups:
        row, cells = rows[0], []
        if judged.time:
            spent = sum(times.get(each.name, 0.0) for each in rows)
            cells = [f"{spent:.4f}", f"{spent / judged.time.total:.1%}" if judged.time.total else ""]
        named = judged.facts.computed.get(row.name)
        whole = row.name if every else base_name(row)
        kernel = "gemm" if named and row.kind == "gemm" else plain(whole[:MAX_TEXT])
        style = "green" if is_int8(row) else None
        count = f"{len(rows)}x" if not every else ""
        table.add_row(plain(name[:MAX_TEXT]), count, kernel, types_text(row), *cells, style=style)
    return table


def _groups(judged: "Inspection", every: bool) -> "list[tuple[str, list[LayerRow]]]":
    """Kernels under their labels; equal ones of several layers are one group, unless every one is wanted."""
    from qdqbench.quantize.engine.inspection import format_ranges
    from qdqbench.quantize.engine.kernels import kernel_kind, kernel_label, types_text
    from qdqbench.quantize.engine.layers import base_name

    facts = judged.facts
    labels = [(kernel_label(row, facts.computed.get(row.name, ())), row) for row in facts.rows]
    if every:
        return [(name, [row]) for name, row in labels]
    groups: dict[tuple[str, ...], list[tuple[int | None, LayerRow]]] = defaultdict(list)
    for name, row in labels:
        block, _, rest = name.partition(" ")
        number = block.removeprefix("layer.")
        layer = int(number[:9]) if block.startswith("layer.") and number.isdecimal() else None
        kernel = "gemm" if row.kind == "gemm" else base_name(row)
        what = (rest, "layer") if layer is not None else (name, "")
        groups[(*what, kernel_kind(row), kernel, types_text(row))].append((layer, row))
    found = []
    for key, members in groups.items():
        layers = [layer for layer, _ in members if layer is not None]
        name = f"layer.{format_ranges(layers)} {key[0]}".strip() if layers else key[0]
        found.append((name, [row for _, row in members]))
    return found


def print_time(time: "Time", shape: str) -> None:
    """Time of each block and kind of kernel, and what the profile and the table do not share."""
    from rich.table import Table

    out = console()
    out.print(f"{time.total:.3f} ms in all{f' at {shape}' if shape else ''}, kernels one after the other")
    for title, parts in (("block", time.by_block), ("kind", time.by_kind)):
        table = Table(title, "ms", "share", box=None)
        for name, ms in parts.items():
            table.add_row(name, f"{ms:.4f}", f"{ms / time.total:.1%}" if time.total else "")
        out.print(table, highlight=False)
    if time.unmatched:
        names = ", ".join(list(time.unmatched)[:3])
        lost = f"{len(time.unmatched)} names of the profile ({sum(time.unmatched.values()):.3f} ms)"
        out.print(f"[yellow]note[/] {lost} are not in the table, such as {plain(names)}", highlight=False)
    if time.missing:
        out.print(
            f"[yellow]note[/] {time.missing} kernels of the table are not in the profile", highlight=False
        )
