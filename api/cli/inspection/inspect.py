"""The command `inspect`: what an engine runs, kernel by kernel. Everything heavy is imported inside."""

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qdqbench.cli.inspection.inspect_tables import kernel_table, print_time
from qdqbench.cli.progress import status
from qdqbench.cli.terminal import Json, console, plain, print_json, say

if TYPE_CHECKING:
    from qdqbench.quantize.engine.inspection import Inspection
    from qdqbench.quantize.pipeline.inspect_target import InspectTarget


def inspect(  # noqa: PLR0913, PLR0917  (a command's options)
    target: Annotated[Path, typer.Argument(help="Run directory, .engine file or saved inspector JSON.")],
    onnx: Annotated[Path | None, typer.Option(help="ONNX file that the engine was built from.")] = None,
    recipe: Annotated[str | None, typer.Option(help="Hold the engine to this recipe.")] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|gpu|cpu", help="Kernel times: saved JSON (name, ms), or gpu or cpu to measure here."
        ),
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="With --profile gpu; none: the optimum.")] = None,
    length: Annotated[int | None, typer.Option(min=1, help="Tokens, with --profile gpu.")] = None,
    every: Annotated[
        bool, typer.Option("--all", help="List every kernel, not one row for equal ones.")
    ] = False,
    bisect: Annotated[bool, typer.Option("--bisect", help="Find the first tensor that goes wrong.")] = False,
    json: Json = False,
) -> None:
    """Which kernel runs each ONNX layer, in which datatypes: INT8 against the recipe, attention, time."""
    from qdqbench.quantize.engine.facts import read_graph
    from qdqbench.quantize.engine.inspection import inspect_layers
    from qdqbench.quantize.engine.trtexec import read_profile
    from qdqbench.quantize.pipeline.inspect_target import (
        MEASURED,
        count_expected,
        measure_times,
        open_target,
    )
    from qdqbench.quantize.utils.errors import CheckFailed, UserError

    if (batch or length) and profile not in MEASURED:
        raise UserError("--batch and --length are shapes to measure at; give them with --profile gpu or cpu")
    found = open_target(target, onnx, recipe)
    if bisect:
        _bisect(found, json)
        return
    expected, attentions = count_expected(found)
    times, shape = None, ""
    if profile in MEASURED:
        with status() as say_now:
            say_now("measuring kernels")
            times, shape = measure_times(found, profile, batch, length)
    elif profile:
        times = read_profile(Path(profile))
    judged = inspect_layers(
        found.layers,
        read_graph(found.onnx) if found.onnx else None,
        expected=expected,
        expected_attention=attentions,
        times=times,
    )
    if json:
        print_json(to_json(found, judged))
    else:
        _print(found, judged, every, shape)
    if judged.failures:
        raise CheckFailed(f"{found.name}: {' and '.join(judged.failures)} as the recipe asks")


def _bisect(target: "InspectTarget", json: bool) -> None:
    from qdqbench.quantize.utils.errors import CheckFailed, UserError

    if target.folder is None:
        raise UserError(
            f"--bisect needs a run directory, whose model is the reference; {target.name} is not in one"
        )
    from qdqbench.eval.verification.bisect import bisect_lines, bisect_run

    with status() as say_now:
        say_now("looking for the first wrong tensor")
        result = bisect_run(target.folder)
    if json:
        print_json(result.model_dump(mode="json"))
    else:
        for line in bisect_lines(result):
            say(plain(line))
    if result.block is not None:
        raise CheckFailed(f"{target.name}: block {result.block} is wrong on its own")


def to_json(target: "InspectTarget", judged: "Inspection") -> dict[str, Any]:
    """Every figure; datatypes are TensorRT's names."""
    from dataclasses import asdict

    from qdqbench.quantize.engine.inspection import find_problems
    from qdqbench.quantize.engine.kernels import kernel_block, kernel_kind

    facts, proof, sidecar = judged.facts, judged.proof, target.sidecar
    times = judged.time.by_kernel if judged.time else {}
    return {
        "target": target.name,
        "engine": sidecar
        and sidecar.model_dump(include={"backend", "version", "compute_capability", "ahead_of_time"}),
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
        "findings": [problem.sentence for problem in find_problems(facts)],
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
    from qdqbench.quantize.engine.inspection import find_problems

    out = console()
    say(f"[bold]{plain(target.name)}[/] {_made(target)}")
    grid = Table.grid(padding=(0, 2))
    for name, text in _summary(judged):
        grid.add_row(name, text)
    out.print(grid, highlight=False)
    _print_not_int8(judged)
    known: list[str] = []
    if side := target.sidecar:
        known = [
            text for cc in side.compute_capability for text in find_hazards(side.backend, side.version, cc)
        ]
    for text in (*(problem.sentence for problem in find_problems(judged.facts)), *known):
        out.print(f"[yellow]note[/] {plain(text)}", highlight=False)
    out.print()
    out.print(kernel_table(judged, every), highlight=False)
    if judged.time:
        out.print()
        print_time(judged.time, shape)


def _print_not_int8(judged: "Inspection") -> None:
    from qdqbench.quantize.engine.inspection import format_nodes
    from qdqbench.quantize.engine.kernels import block_of_node, block_order

    groups: dict[str, list[str]] = defaultdict(list)
    for node in judged.proof.not_int8:
        groups[str(judged.reasons[node])].append(node)
    title = "[red]not INT8[/]" if judged.expected is not None else "not INT8"
    for why, nodes in groups.items():
        ordered = sorted(nodes, key=lambda node: block_order(block_of_node(node)))
        console().print(f"{title} {plain(format_nodes(ordered))}: {plain(why)}", highlight=False)


def _made(target: "InspectTarget") -> str:
    if (sidecar := target.sidecar) is None:
        return "(saved table)"
    ahead = ", built ahead of time" if sidecar.ahead_of_time else ""
    targets = ", ".join(sidecar.compute_capability)  # none: an engine for a CPU
    made_for = f", compute capability {targets}" if targets else ""
    return plain(f"({sidecar.backend} {sidecar.version}{made_for}{ahead})")


def _summary(judged: "Inspection") -> list[tuple[str, str]]:
    """One line a question: its name, and the answer as markup."""
    from qdqbench.quantize.engine.kernels import block_of_node, types_text

    facts, proof, expected = judged.facts, judged.proof, judged.expected
    lines = []
    total = f"{len(proof.int8_gemms)} of {judged.gemms}"
    encoder = [node for node in facts.linears if block_of_node(node).startswith("layer.")]
    inside = f"{len({*encoder}.intersection(facts.int8))} of {len(encoder)} in the encoder"
    if expected is None:
        lines.append(("INT8 GEMMs", f"{total}, {inside} (no recipe to hold them to)"))
    elif not expected:
        lines.append(("INT8 GEMMs", f"{total} (the recipe wants none)"))
    else:
        colour = "red" if proof.not_int8 else "green"
        met = len(expected) - len(proof.not_int8)
        lines.append(
            ("INT8 GEMMs", f"[{colour}]{met} of {len(expected)} the recipe wants[/], {total} of all")
        )
    kinds = ", ".join(dict.fromkeys(types_text(row) for row in facts.fused))
    wanted = f", the recipe wants {judged.expected_attention}" if judged.expected_attention else ""
    colour = "red" if proof.attention_int8 < judged.expected_attention else "default"
    text = f"{proof.attention_fused} of {facts.attentions} fused, "
    text += f"[{colour}]{proof.attention_int8} in INT8{wanted}[/]"
    lines.append(("attention", f"{text} ({kinds})" if kinds else text))
    if facts.qkv:
        lines.append(("q, k, v", f"merged into one GEMM in {facts.qkv_merged} of {facts.qkv} attentions"))
    lines.append(("softmax", _softmax_text(judged)))
    norms = ", ".join(f"{len(rows)} in {name}" for name, rows in facts.norms.items())
    lines.append(("LayerNorm", norms or "none found"))
    if asked := len(facts.residuals):
        colour = "red" if facts.float_residuals else "green"
        read = f"[{colour}]{asked - len(facts.float_residuals)} of {asked}[/]"
        lines.append(("residuals", f"{read} with Q/DQ in the graph are read as INT8"))
    gelus = facts.gelu_fused + facts.gelu_separate
    if gelus:
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
    of_one = "" if facts.profiles == 1 else "; of one profile: "
    in_all = facts.count.replace(" kernels", "", 1)
    lines.append(("kernels", f"{in_all}{of_one or ': '}{counts}"))
    return lines


def _softmax_text(judged: "Inspection") -> str:
    facts = judged.facts
    parts = [f"{len(facts.fused)} inside a fused attention"] if facts.fused else []
    parts += [f"{count} kernels in {name}" for name, count in facts.softmax.items()]
    asked = ", ".join(dict.fromkeys(judged.graph.softmax_types.values()))
    return ", ".join(parts) + (f"; the graph computes it in {asked}" if asked else "") or "none found"
