"""What `check`, `diagnose`, `fix`, `inspect` and `doctor` show, as report documents."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from qdqbench.quantize.engine.hazards import find_hazards
from qdqbench.quantize.engine.layers import (
    base_name,
    block_of_node,
    block_order,
    format_nodes,
    format_ranges,
    is_int8,
    kernel_kind,
    kernel_label,
    types_text,
)
from qdqbench.quantize.engine.results import LayerRow
from qdqbench.quantize.engine.sidecar import Sidecar
from qdqbench.quantize.lint.check import CheckReport, summary
from qdqbench.quantize.lint.diagnose import Diagnosis
from qdqbench.quantize.lint.doctor import Doctor
from qdqbench.quantize.lint.findings import EFFECTS, Finding
from qdqbench.quantize.lint.fix import NOT_FINITE, EngineRow, FixReport
from qdqbench.quantize.lint.inspection import Inspection, Time
from qdqbench.quantize.lint.machines import Machine
from qdqbench.quantize.report import document as doc
from qdqbench.quantize.report.coverage import share
from qdqbench.quantize.report.formats import size
from qdqbench.quantize.utils.limits import CPU_BACKENDS
from qdqbench.quantize.utils.names import install_command
from qdqbench.quantize.utils.system.environment import now

LONGEST_NAME = 400  # characters; TensorRT's are shorter
Grouped = tuple[str, list[LayerRow]]


def plain(text: str) -> str:
    """Return a text without the addresses of its links."""
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", text)


def report_of(kind: str, title: str, blocks: Sequence[doc.Block]) -> doc.Report:
    return doc.Report(doc.Page(kind, title, [], now(), "", "", {}), [], lead=blocks)


def _everywhere(text: str, state: doc.State = "") -> doc.Prose:
    return doc.Prose(text, state, doc.EVERYWHERE)


def _list(lines: Sequence[str], state: doc.State = "") -> doc.Bullets:
    return doc.Bullets(lines, state, doc.EVERYWHERE)


def check_report(report: CheckReport, path: Path, every: bool = False) -> doc.Report:
    blocks: list[doc.Block] = []
    seen: dict[str, int] = {}
    for number, found in enumerate(report.grouped(path), 1):
        rows = report.codes[found.code] if every else []
        places = [f"- {row.node}: {row.why}" for row in rows]
        blocks.append(_describe_finding(number, found, seen, places))
    state: doc.State = "bad" if report.refusals else "unclear" if report.errors else "good"
    first, *rest = summary(report)
    first = f"\n{first}" if blocks else first
    return report_of("check", path.name, [*blocks, _everywhere(first, state), *map(_everywhere, rest)])


def diagnosis_report(found: Diagnosis) -> doc.Report:
    blocks: list[doc.Block] = [_everywhere(f"{row.name} {row.kind}: {row.what}") for row in found.files]
    blocks += [_everywhere(f"read together: {text}") for text in found.joined]
    seen: dict[str, int] = {}
    for number, each in enumerate(found.findings, 1):
        blocks.append(_describe_finding(number, each, seen))
    blocks.append(_everywhere(f"\nRanked: {found.ranked_by}." if found.findings else "\nNothing was found."))
    return report_of("diagnose", ", ".join(row.name for row in found.files), blocks)


def _describe_finding(
    number: int, found: Finding, seen: dict[str, int], places: Sequence[str] = ()
) -> doc.Fold:
    """Return a finding's title and lines; a fix that an earlier one has is told by its number."""
    effect = EFFECTS[found.effect]
    if found.share is not None:
        effect = f"{effect}, {found.share:.0%} of {found.basis}"
    state: doc.State = "bad" if found.severity == "error" else "unclear"
    first = {fix: seen.setdefault(fix, number) for fix in found.fixes}
    fixes = dict.fromkeys(fix if seen == number else f"as {seen}" for fix, seen in first.items())
    where = [f"where: {found.where}"] if found.where else []
    lines = [f"why: {found.why}", *where, *(f"fix: {fix}" for fix in fixes), *places]
    title = f"{number}. {found.what} ({effect}; {found.code})"
    return doc.Fold(title, [doc.Bullets(lines, on=doc.EVERYWHERE, indent=3)], doc.EVERYWHERE, state)


def doctor_report(found: Doctor) -> doc.Report:
    met = f"{len(found.packages)} required ones are there"
    features = ", ".join(found.cpu_features) or "not known"
    facts = [
        ("qdqbench", found.qdqbench + (f" ({found.git[:12]})" if found.git else "")),
        ("Python", found.python),
        ("system", found.platform),
        ("CPU", f"{found.cpu}, {found.cores} cores; INT8 and BF16: {features}"),
        ("GPU", found.gpu_text),
        ("memory", f"{size(found.memory_bytes)}, {size(found.memory_free_bytes)} free"),
        ("disk", f"{size(found.disk_free_bytes)} free in this folder"),
        ("hub", found.hub),
        ("torch", found.libraries["torch"].text),
        ("packages", met if not found.unmet else f"{met}, {len(found.unmet)} do not fit"),
    ]
    rows = []
    for name, backend in found.backends.items():
        can = "runs" if backend.runs else "builds" if backend.builds else "no"
        state: doc.State = "good" if backend.runs else "unclear"
        why = can if backend.why is None else backend.why if can == "no" else f"{can}: {backend.why}"
        label = f"{name} (auto)" if name == found.auto else name
        rows.append(doc.row(label, found.libraries[name].version or "-", doc.Cell(why, state)))
    if (here := found.machine) is None:
        facts.append(("INT8 here", "not known of this GPU; `qdqbench bench RUN` measures it"))
    else:
        facts.append(("INT8 here", f"{here.gains} ({here.names})"))
        facts.append(
            ("start with", f"qdqbench run {here.start} --backend {here.backend}{_missing(found, here)}")
        )
        facts.append(("known of it", "; ".join(plain(text) for text in (here.ours, here.others) if text)))
    versions = ", ".join(map(" ".join, found.packages.items()))
    blocks: list[doc.Block] = [
        doc.Pairs(facts, on=doc.EVERYWHERE),
        doc.Table(["backend", "version", "here"], rows, texts=(0, 1, 2), on=doc.EVERYWHERE),
        doc.Prose(f"Packages: {versions}", on=doc.TEXT),
        _list(found.unmet, "bad"),
        _list([f"hazard: {text}" for text in found.hazards], "unclear"),
        doc.Prose("for a bug report: qdqbench doctor --report", on=doc.SCREEN),
    ]
    return report_of("doctor", "qdqbench doctor", blocks)


def _missing(found: Doctor, here: Machine) -> str:
    """Say what is missing for the backend to start with, and which one runs meanwhile."""
    if found.backends[here.backend].runs:
        return ""
    on_cpu = here.backend in CPU_BACKENDS
    others = [name for name, each in found.backends.items() if each.runs and (name in CPU_BACKENDS) == on_cpu]
    now = f"; --backend {others[0]} runs now" if others else ""
    return f", once {here.backend} runs (below){now}"


def fix_report(found: FixReport) -> doc.Report:
    first, second, outputs = found.engine_before, found.engine_after, found.outputs
    after = share(found.int8_after, found.linears)
    rows = [doc.row("linears in INT8, by the graph", found.int8_before, after)]
    for code in dict.fromkeys((*found.findings_before, *found.findings_after)):
        numbers = (each.get(code, 0) for each in (found.findings_before, found.findings_after))
        rows.append(doc.row(f"check: {code}", *numbers))
    if first and second:
        rows += [
            doc.row("linears in INT8 in the engine", _gemms(first), _gemms(second)),
            doc.row("attentions fused (in INT8)", _attentions(first), _attentions(second)),
            doc.row("kernels", *("-" if row.refused else row.kernels for row in (first, second))),
        ]
    several = len(outputs.rows) > 1
    for output in outputs.rows:
        own = "not run" if output.before_error is None else _error(output.before_error)
        limit = f"{_error(output.after_error)} (limit {output.limit:.4f})"
        which = f"output {output.name}" if several else "outputs"
        rows.append(doc.row(f"{which}, relative error to the file without Q/DQ", own, limit))
    lines = []
    if outputs.difference is not None:
        other = "" if outputs.disagreements is None else f", another class for {outputs.disagreements}"
        lengths = f", another shape in {outputs.other_lengths} batches" if outputs.other_lengths else ""
        where = f"{outputs.name}, " if several else ""
        lines.append(
            f"{where}after against before: relative difference {_error(outputs.difference)}, largest "
            f"{_error(outputs.largest or 0.0)}{other}{lengths} "
            f"(n = {outputs.n}, {outputs.inputs}, ONNX Runtime)"
        )
    refused = ((row, name) for row, name in ((first, "before"), (second, "after")) if row and row.refused)
    lines += [f"engine {name}: {row.refused}" for row, name in refused]
    if second and not second.refused:
        lines.append(f"engine: {second.engine}; read, not run")
    elif second is None and found.engine_wanted:
        lines.append(f"no engine was built: {install_command('rtx')} builds without a GPU")
    done = [f"done: {text}" for text in found.done or ["nothing had to be changed"]]
    table = doc.Table(["", "before", "after"], rows, on=doc.EVERYWHERE)
    blocks: list[doc.Block] = [_list(done, "good"), _list(found.left, "bad"), table, _list(lines)]
    return report_of("fix", found.out, blocks)


def _error(value: float) -> str:
    return "NaN or infinite" if value >= NOT_FINITE else f"{value:.4f}"


def _gemms(row: EngineRow) -> str:
    return "refused" if row.refused else share(row.int8_gemms, row.gemms)


def _attentions(row: EngineRow) -> str:
    return "-" if row.refused else f"{share(row.attention_fused, row.attentions)} ({row.attention_int8})"


def inspect_report(found: Inspection, sidecar: Sidecar | None, every: bool, shape: str) -> doc.Report:
    groups: dict[str, list[str]] = defaultdict(list)
    for node in found.not_int8:
        groups[found.why_not_int8[node]].append(node)
    lost = [
        f"not INT8 {format_nodes(sorted(nodes, key=lambda node: block_order(block_of_node(node))))}: {why}"
        for why, nodes in groups.items()
    ]
    notes = list(found.findings)
    if sidecar:
        for cc in sidecar.compute_capability:
            notes += find_hazards(sidecar.backend, sidecar.version, cc)
    blocks = [
        _everywhere(f"{found.target} {_made(sidecar)}"),
        doc.Pairs(list(_summarize(found)), on=doc.EVERYWHERE),
        _list(lost, "bad" if found.failures else ""),
        _list([f"note: {text}" for text in notes], "unclear"),
        _kernel_table(found, every),
        *(_time_blocks(found.time, shape) if found.time else ()),
    ]
    return report_of("inspect", found.target, blocks)


def _made(sidecar: Sidecar | None) -> str:
    if sidecar is None:
        return "(saved table)"
    ahead = ", built ahead of time" if sidecar.ahead_of_time else ""
    targets = ", ".join(sidecar.compute_capability)  # none: an engine for a CPU
    made_for = f", compute capability {targets}" if targets else ""
    return f"({sidecar.backend} {sidecar.version}{made_for}{ahead})"


def _summarize(found: Inspection) -> Iterator[tuple[str, str]]:
    expected = found.expected_int8_gemms
    lost = len({*found.linears}.intersection(found.not_int8))
    total = share(len(found.int8), len(found.linears))
    encoder = [node for node in found.linears if block_of_node(node).startswith("layer.")]
    inside = f"{len({*encoder}.intersection(found.int8))} of {len(encoder)} in the encoder"
    if expected is None:
        yield "INT8 linears", f"{total}, {inside} (no recipe to hold them to)"
    elif not expected:
        yield "INT8 linears", f"{total} (the recipe wants none)"
    else:
        yield "INT8 linears", f"{total}, {f'{lost} fewer than' if lost else 'as'} the recipe wants"
    kinds = ", ".join(dict.fromkeys(types_text(row) for row in found.fused))
    wanted = f", the recipe wants {found.expected_attention_int8}" if found.expected_attention_int8 else ""
    fused = f"{share(found.attention_fused, found.attentions)} fused, {found.attention_int8} in INT8{wanted}"
    yield "attention", f"{fused} ({kinds})" if kinds else fused
    if count := found.qkv["attentions"]:
        yield "q, k, v", f"merged into one GEMM in {found.qkv['merged']} of {count} attentions"
    parts = [f"{len(found.fused)} inside a fused attention"] if found.fused else []
    parts += [f"{count} kernels in {name}" for name, count in found.softmax_kernels.items()]
    computed = ", ".join(dict.fromkeys(found.softmax_in_graph.values()))
    softmax = ", ".join(parts) + (f"; the graph computes it in {computed}" if computed else "")
    yield "softmax", softmax or "none found"
    yield "LayerNorm", ", ".join(f"{n} in {name}" for name, n in found.layernorm.items()) or "none found"
    if asked := found.expected_int8_residuals:
        yield "residuals", f"{share(found.int8_residuals, asked)} with Q/DQ in the graph are read as INT8"
    if gelus := sum(found.gelu.values()):
        yield "GELU", f"{found.gelu['fused']} of {gelus} fused into the GEMM"
    joined = len(found.linears) - len(found.separate_epilogues)
    yield "epilogues", f"bias or scale fused into {joined} of {len(found.linears)} linears"
    writers = ", ".join(f"{kind} {count}" for kind, count in found.int8_writers.most_common())
    if writers or found.quantize_kernels:
        alone = f"{found.quantize_kernels} kernels of their own"
        yield "quantize", f"{alone}; INT8 is written by {writers or 'none'}"
    layout = f"{found.layout_kernels} kernels move, cast or transpose"
    yield "layout", f"{layout}, {found.layout_kernels_int8} of them INT8" if writers else layout
    counts = ", ".join(f"{kind} {count}" for kind, count in found.kernel_counts.items())
    of_one = ": " if found.profiles == 1 else "; of one profile: "
    yield "kernels", f"{found.count.replace(' kernels', '', 1)}{of_one}{counts}"


def _kernel_table(found: Inspection, every: bool) -> doc.Table:
    times = found.time.by_kernel if found.time else {}
    total = found.time.total if found.time else 0.0

    def spent(group: Grouped) -> float:
        return sum(times.get(row.name, 0.0) for row in group[1])

    groups = _group_kernels(found, every)
    rows = []
    for name, members in sorted(groups, key=spent, reverse=True) if found.time else groups:
        row = members[0]
        whole = row.name if every else base_name(row)
        kernel = "gemm" if found.computed.get(row.name) and row.kind == "gemm" else whole[:LONGEST_NAME]
        ms = spent((name, members))
        cells = [f"{ms:.4f}", f"{ms / total:.1%}" if total else ""] if found.time else []
        count = "" if every else f"{len(members)}x"
        state: doc.State = "good" if is_int8(row) else ""
        texts = [name[:LONGEST_NAME], count, kernel, types_text(row), *cells]
        rows.append(doc.row(*(doc.Cell(text, state) for text in texts)))
    columns = ["ONNX layer", "", "kernel", "datatypes", *(["ms", "share"] if found.time else [])]
    return doc.Table(columns, rows, "Kernels", (0, 2, 3), on=doc.EVERYWHERE)


def _group_kernels(found: Inspection, every: bool) -> list[Grouped]:
    labels = [(kernel_label(row, found.computed.get(row.name, ())), row) for row in found.rows]
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
    merged = []
    for key, members in groups.items():
        layers = [layer for layer, _ in members if layer is not None]
        name = f"layer.{format_ranges(layers)} {key[0]}".strip() if layers else key[0]
        merged.append((name, [row for _, row in members]))
    return merged


def _time_blocks(time: Time, shape: str) -> Iterator[doc.Block]:
    at = f" at {shape}" if shape else ""
    yield _everywhere(f"{time.total:.3f} ms in all{at}, kernels one after the other")
    for title, parts in (("block", time.by_block), ("kind", time.by_kind)):
        rows = [
            doc.row(name, f"{ms:.4f}", f"{ms / time.total:.1%}" if time.total else "")
            for name, ms in parts.items()
        ]
        yield doc.Table([title, "ms", "share"], rows, f"Time by {title}", on=doc.EVERYWHERE)
    notes = []
    if time.unmatched:
        names = ", ".join(list(time.unmatched)[:3])
        lost = f"{len(time.unmatched)} names of the profile ({sum(time.unmatched.values()):.3f} ms)"
        notes.append(f"note: {lost} are not in the table, such as {names}")
    if time.missing:
        notes.append(f"note: {time.missing} kernels of the table are not in the profile")
    yield _list(notes, "unclear")
