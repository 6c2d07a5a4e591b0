"""The command `inspect`: what an engine runs, kernel by kernel. Everything heavy is imported inside."""

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qdqbench._options import InspectOptions
from qdqbench._progress import displayed
from qdqbench.cli.options import command
from qdqbench.cli.terminal import Json, console, plain, print_json, say
from qdqbench.quantize.utils.errors import CheckFailed, UserError
from qdqbench.quantize.utils.progress import reporter

if TYPE_CHECKING:
    from qdqbench.quantize.engine.results import LayerRow
    from qdqbench.quantize.lint.inspect_target import InspectTarget
    from qdqbench.quantize.lint.inspection import Inspection, Time

LONGEST_NAME = 400  # characters; TensorRT's are shorter


@command
def inspect(
    target: Annotated[Path, typer.Argument(help="Run directory, .engine file or saved inspector JSON.")],
    *,
    options: InspectOptions,
    json: Json = False,
) -> None:
    """Show the kernel and datatypes of each ONNX layer: INT8 against the recipe, attention, time."""
    from qdqbench.quantize.engine.trtexec import read_profile
    from qdqbench.quantize.lint.inspect_target import MEASURED, count_expected, measure_times, open_target
    from qdqbench.quantize.lint.inspection import Inspection, read_graph

    batch, length, profile = options.batch, options.length, options.profile
    if (batch or length) and profile not in MEASURED:
        raise UserError("--batch and --length are shapes to measure at; give them with --profile gpu or cpu")
    found = open_target(target, options.onnx, options.recipe)
    if options.bisect:
        _bisect(found, json)
        return
    expected, attentions = count_expected(found)
    times, shape = None, ""
    if profile in MEASURED:
        with displayed():
            reporter().begin("measuring kernels")
            times, shape = measure_times(found, profile, batch, length)
    elif profile:
        times = read_profile(Path(profile))
    graph = read_graph(found.onnx) if found.onnx else None
    judged = Inspection(found.layers, graph, expected=expected, expected_attention=attentions, times=times)
    if json:
        print_json(_to_json(found, judged))
    else:
        _print(found, judged, options.all, shape)
    if judged.failures:
        raise CheckFailed(f"{found.name}: {' and '.join(judged.failures)} as the recipe asks")


def _bisect(target: "InspectTarget", json: bool) -> None:
    if target.folder is None:
        raise UserError(
            f"--bisect needs a run directory, whose model is the reference; {target.name} is not in one"
        )
    from qdqbench.eval.verification.bisect import bisect_lines, bisect_run

    with displayed():
        reporter().begin("looking for the first wrong tensor")
        result = bisect_run(target.folder)
    if json:
        print_json(result.model_dump(mode="json"))
    else:
        for line in bisect_lines(result):
            say(plain(line))
    if result.block is not None:
        raise CheckFailed(f"{target.name}: block {result.block} is wrong on its own")


def _to_json(target: "InspectTarget", judged: "Inspection") -> dict[str, Any]:
    from dataclasses import asdict

    from qdqbench.quantize.engine.layers import kernel_block, kernel_kind
    from qdqbench.quantize.lint.inspection import find_faults

    facts, proof, sidecar = judged.facts, judged.proof, target.sidecar
    times = judged.time.by_kernel if judged.time else {}
    names = {"backend", "version", "compute_capability", "ahead_of_time"}
    return {
        "target": target.name,
        "engine": sidecar and sidecar.model_dump(include=names),
        "gemms": judged.gemms,
        "int8_gemms": len(proof.int8_gemms),
        "expected_int8_gemms": None if judged.expected is None else len(judged.expected),
        "not_int8": proof.not_int8,
        "why_not_int8": {node: str(why) for node, why in judged.reasons.items()},
        "unknown": proof.unknown,
        "attentions": facts.attentions,
        "attention_fused": proof.attention_fused,
        "attention_int8": proof.attention_int8,
        "expected_attention_int8": judged.expected_attention,
        "attention_kernels": [
            {"name": row.name, "block": kernel_block(row), "inputs": row.inputs, "outputs": row.outputs}
            for row in facts.fused
        ],
        "layernorm": {name: len(rows) for name, rows in facts.norms.items()},
        "int8_residuals": len(facts.residuals) - len(facts.float_residuals),
        "expected_int8_residuals": len(facts.residuals),
        "not_int8_residuals": facts.float_residuals,
        "softmax_kernels": facts.softmax,
        "softmax_in_graph": judged.graph.softmax_types,
        "qkv": {"attentions": facts.qkv, "merged": facts.qkv_merged},
        "gelu": {"fused": facts.gelu_fused, "separate": facts.gelu_separate},
        "separate_epilogues": facts.separate,
        "fp32_outputs": facts.fp32_outputs,
        "raw_fp16_outputs": facts.raw_outputs,
        "dequantized": facts.dequantized,
        "layout_kernels": facts.kernels["layout"],
        "layout_kernels_int8": facts.layout_quantized,
        "quantize_kernels": facts.kernels["quantize"],
        "profiles": facts.profiles,  # each has kernels of its own; counts are of one
        "kernel_counts": dict(facts.kernels),
        "findings": [problem.sentence for problem in find_faults(facts)],
        "failures": judged.failures,
        "time": judged.time and asdict(judged.time),
        "kernels": [
            row.model_dump()
            | {"what": kernel_kind(row), "block": kernel_block(row), "ms": times.get(row.name)}
            for row in target.layers
        ],
    }


def _print(target: "InspectTarget", judged: "Inspection", every: bool, shape: str) -> None:
    from rich.table import Table

    from qdqbench.quantize.engine.hazards import find_hazards
    from qdqbench.quantize.lint.inspection import find_faults

    out = console()
    say(f"[bold]{plain(target.name)}[/] {_made(target)}")
    grid = Table.grid(padding=(0, 2))
    for name, text in _summary(judged):
        grid.add_row(name, text)
    out.print(grid)
    _print_not_int8(judged)
    notes = [problem.sentence for problem in find_faults(judged.facts)]
    if side := target.sidecar:
        for cc in side.compute_capability:
            notes += find_hazards(side.backend, side.version, cc)
    for text in notes:
        out.print(f"[yellow]note[/] {plain(text)}")
    out.print()
    out.print(_kernel_table(judged, every))
    if judged.time:
        out.print()
        _print_time(judged.time, shape)


def _print_not_int8(judged: "Inspection") -> None:
    from qdqbench.quantize.engine.layers import block_of_node, block_order, format_nodes

    groups: dict[str, list[str]] = defaultdict(list)
    for node in judged.proof.not_int8:
        groups[str(judged.reasons[node])].append(node)
    title = "[red]not INT8[/]" if judged.expected is not None else "not INT8"
    for why, nodes in groups.items():
        ordered = sorted(nodes, key=lambda node: block_order(block_of_node(node)))
        console().print(f"{title} {plain(format_nodes(ordered))}: {plain(why)}")


def _made(target: "InspectTarget") -> str:
    if (sidecar := target.sidecar) is None:
        return "(saved table)"
    ahead = ", built ahead of time" if sidecar.ahead_of_time else ""
    targets = ", ".join(sidecar.compute_capability)  # none: an engine for a CPU
    made_for = f", compute capability {targets}" if targets else ""
    return plain(f"({sidecar.backend} {sidecar.version}{made_for}{ahead})")


def _summary(judged: "Inspection") -> list[tuple[str, str]]:
    from qdqbench.quantize.engine.layers import block_of_node, types_text

    facts, proof, expected = judged.facts, judged.proof, judged.expected
    total = f"{len(proof.int8_gemms)} of {judged.gemms}"
    encoder = [node for node in facts.linears if block_of_node(node).startswith("layer.")]
    inside = f"{len({*encoder}.intersection(facts.int8))} of {len(encoder)} in the encoder"
    if expected is None:
        gemms = f"{total}, {inside} (no recipe to hold them to)"
    elif not expected:
        gemms = f"{total} (the recipe wants none)"
    else:
        color, met = "red" if proof.not_int8 else "green", len(expected) - len(proof.not_int8)
        gemms = f"[{color}]{met} of {len(expected)} the recipe wants[/], {total} of all"
    lines = [("INT8 GEMMs", gemms)]
    kinds = ", ".join(dict.fromkeys(types_text(row) for row in facts.fused))
    wanted = f", the recipe wants {judged.expected_attention}" if judged.expected_attention else ""
    color = "red" if proof.attention_int8 < judged.expected_attention else "default"
    text = f"{proof.attention_fused} of {facts.attentions} fused, "
    text += f"[{color}]{proof.attention_int8} in INT8{wanted}[/]"
    lines.append(("attention", f"{text} ({kinds})" if kinds else text))
    if facts.qkv:
        lines.append(("q, k, v", f"merged into one GEMM in {facts.qkv_merged} of {facts.qkv} attentions"))
    parts = [f"{len(facts.fused)} inside a fused attention"] if facts.fused else []
    parts += [f"{count} kernels in {name}" for name, count in facts.softmax.items()]
    computed = ", ".join(dict.fromkeys(judged.graph.softmax_types.values()))
    softmax = ", ".join(parts) + (f"; the graph computes it in {computed}" if computed else "")
    lines.append(("softmax", softmax or "none found"))
    norms = ", ".join(f"{len(rows)} in {name}" for name, rows in facts.norms.items())
    lines.append(("LayerNorm", norms or "none found"))
    if asked := len(facts.residuals):
        color = "red" if facts.float_residuals else "green"
        read = f"[{color}]{asked - len(facts.float_residuals)} of {asked}[/]"
        lines.append(("residuals", f"{read} with Q/DQ in the graph are read as INT8"))
    if gelus := facts.gelu_fused + facts.gelu_separate:
        lines.append(("GELU", f"{facts.gelu_fused} of {gelus} fused into the GEMM"))
    fused = len(facts.linears) - len(facts.separate)
    lines.append(("epilogues", f"bias or scale fused into {fused} of {len(facts.linears)} linears"))
    writers = ", ".join(f"{kind} {count}" for kind, count in facts.int8_writers.most_common())
    alone = facts.kernels["quantize"]
    if writers or alone:
        lines.append(("quantize", f"{alone} kernels of their own; INT8 is written by {writers or 'none'}"))
    layout = f"{facts.kernels['layout']} kernels move, cast or transpose"
    lines.append(("layout", f"{layout}, {facts.layout_quantized} of them INT8" if writers else layout))
    counts = ", ".join(f"{kind} {count}" for kind, count in facts.kernels.most_common())
    of_one = ": " if facts.profiles == 1 else "; of one profile: "
    lines.append(("kernels", f"{facts.count.replace(' kernels', '', 1)}{of_one}{counts}"))
    return lines


def _kernel_table(judged: "Inspection", every: bool) -> Any:
    from rich.table import Table

    from qdqbench.quantize.engine.layers import base_name, is_int8, types_text

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
        kernel = "gemm" if named and row.kind == "gemm" else plain(whole[:LONGEST_NAME])
        style = "green" if is_int8(row) else None
        count = f"{len(rows)}x" if not every else ""
        table.add_row(plain(name[:LONGEST_NAME]), count, kernel, types_text(row), *cells, style=style)
    return table


def _groups(judged: "Inspection", every: bool) -> "list[tuple[str, list[LayerRow]]]":
    from qdqbench.quantize.engine.layers import (
        base_name,
        format_ranges,
        kernel_kind,
        kernel_label,
        types_text,
    )

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


def _print_time(time: "Time", shape: str) -> None:
    from rich.table import Table

    out = console()
    out.print(f"{time.total:.3f} ms in all{f' at {shape}' if shape else ''}, kernels one after the other")
    for title, parts in (("block", time.by_block), ("kind", time.by_kind)):
        table = Table(title, "ms", "share", box=None)
        for name, ms in parts.items():
            table.add_row(name, f"{ms:.4f}", f"{ms / time.total:.1%}" if time.total else "")
        out.print(table)
    if time.unmatched:
        names = ", ".join(list(time.unmatched)[:3])
        lost = f"{len(time.unmatched)} names of the profile ({sum(time.unmatched.values()):.3f} ms)"
        out.print(f"[yellow]note[/] {lost} are not in the table, such as {plain(names)}")
    if time.missing:
        out.print(f"[yellow]note[/] {time.missing} kernels of the table are not in the profile")
