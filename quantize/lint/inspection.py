"""Compare an engine's layers with a recipe, sum up a profile, and say why INT8 can be slower than FP16."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onnx import TensorProto
from pydantic import Field

from qdqbench.quantize.engine import layers as tables
from qdqbench.quantize.engine.results import LayerRow
from qdqbench.quantize.graph.index import MATMULS, list_int8_norms, module_of, run_of
from qdqbench.quantize.graph.read import read_model, validate_names
from qdqbench.quantize.lint.findings import Finding, find
from qdqbench.quantize.lint.view import walk_types
from qdqbench.quantize.models.families.known import ANY_MERGED_QKV, ANY_QKV, first_feed_forwards
from qdqbench.quantize.report.coverage import fused_attentions, uncovered
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.schema import Strict

_FLOATS: dict[int, str] = {
    TensorProto.FLOAT: "FP32",
    TensorProto.FLOAT16: "FP16",
    TensorProto.BFLOAT16: "BF16",
}


@dataclass(frozen=True)
class Graph:
    linears: list[str]  # MatMul and Gemm with weights
    products: list[str]  # MatMul of two activations
    softmaxes: list[str]
    # where the graph is at hand: datatype of each softmax, and LayerNorms that add an INT8 residual
    softmax_types: dict[str, str] = field(default_factory=dict)
    residuals: list[str] = field(default_factory=list)


def read_graph(path: Path) -> Graph:
    model = read_model(path)
    validate_names(model)
    types, _ = walk_types(model)
    constant = {tensor.name for tensor in model.graph.initializer} | {""}
    found = Graph([], [], [])
    for node in model.graph.node:
        if constant.issuperset(node.input):
            constant.update(node.output)
        elif node.op_type in MATMULS:
            weighted = not constant.isdisjoint(node.input[:2])
            (found.linears if weighted else found.products).append(node.name)
        elif node.op_type == "Softmax":
            found.softmaxes.append(node.name)
            found.softmax_types[node.name] = _FLOATS.get(types.get(node.input[0], 0), "unknown")
    found.residuals.extend(list_int8_norms(model))
    return found


def rebuild_graph(layers: Sequence[LayerRow]) -> Graph:
    listed = dict.fromkeys(
        name
        for row in layers
        for name in ((*tables.name_parts(row), *row.onnx) if row.kind == "gemm" else row.onnx)
    )
    softmaxes = [name for name in listed if tables.kernel_operator(name) == "Softmax"]
    gemms = [name for name in listed if tables.kernel_operator(name) in MATMULS and "+" not in name]
    attended = {module_of(name) for name in softmaxes}
    fused = {name for row in layers if tables.is_attention(row) for name in row.onnx}
    attended |= {module_of(name) for name in fused.intersection(gemms)}
    return Graph(
        linears=[name for name in gemms if module_of(name) not in attended],
        products=[name for name in gemms if module_of(name) in attended],
        softmaxes=softmaxes,
        # ModelOpt's AutoCast puts this node behind a softmax that it keeps in FP32
        softmax_types={name: "FP32" for name in softmaxes if f"{name}_output_0_cast_to_fp16" in listed},
    )


class Time(Strict):
    total: float
    by_kernel: dict[str, float]  # kernel name, the slowest first
    by_block: dict[str, float]  # in the order of the network
    by_kind: dict[str, float]  # the slowest first
    unmatched: dict[str, float]  # names that the table does not have
    missing: int  # kernels of the table that the profile does not have, over all copies


class Inspection(Strict):
    """Layers of an engine, of one copy of the network; ONNX names are in the order of the table."""

    target: str = ""
    engine: dict[str, Any] | None = None  # of its sidecar
    gemms: int = 0  # linears, and products that the recipe wants in INT8
    int8_gemms: int = 0
    expected_int8_gemms: int | None = None  # None: no recipe, and nothing fails
    not_int8: list[str] = []  # of what the recipe wants, else of all linears
    why_not_int8: dict[str, str] = {}
    unknown: list[str] = []  # GEMMs of the graph that no kernel names
    attentions: int = 0
    attention_fused: int = 0
    attention_int8: int = 0
    expected_attention_int8: int = 0
    attention_kernels: list[dict[str, Any]] = []
    layernorm: dict[str, int] = {}  # kernels by the precision of their statistics
    int8_residuals: int = 0
    expected_int8_residuals: int = 0  # LayerNorms whose residual has Q/DQ in the graph
    not_int8_residuals: list[str] = []  # read in floating point all the same
    softmax_kernels: dict[str, int] = {}  # kernels of their own, by precision
    softmax_in_graph: dict[str, str] = {}
    qkv: dict[str, int] = {}  # attentions with q, k and v linears; of these, merged into one GEMM
    gelu: dict[str, int] = {}  # fused into the kernel of a GEMM; separate
    separate_epilogues: list[str] = []  # linears whose bias or scale another kernel applies
    fp32_outputs: list[str] = []  # INT8 linears that write FP32
    raw_fp16_outputs: list[str] = []  # that write INT32 sums as FP16; the next kernel scales them
    dequantized: list[str] = []  # linears with INT8 operands that are dequantized and multiplied as floats
    layout_kernels: int = 0
    layout_kernels_int8: int = 0
    quantize_kernels: int = 0
    profiles: int = 1  # each has kernels of its own; counts are of one
    kernel_counts: dict[str, int] = {}  # by kind, without signals and waits
    findings: list[str] = []
    failures: list[str] = []
    time: Time | None = None
    kernels: list[dict[str, Any]] = []  # of the whole table

    rows: list[LayerRow] = Field([], exclude=True)  # kernels of one copy
    count: str = Field("", exclude=True)  # of the whole table, in words
    graph: Graph = Field(default_factory=lambda: Graph([], [], []), exclude=True)
    proven: list[str] = Field([], exclude=True)  # GEMMs in INT8, in every copy
    reasons: dict[str, tables.NotInt8] = Field({}, exclude=True)  # of `not_int8`
    computed: dict[str, list[str]] = Field({}, exclude=True)  # kernel name -> linears and products
    linears: list[str] = Field([], exclude=True)
    int8: list[str] = Field([], exclude=True)  # linears

    @property
    def fused(self) -> list[LayerRow]:
        return [row for row in self.rows if tables.is_attention(row)]

    @property
    def on_cpu(self) -> bool:
        return any(row.kernel is not None for row in self.rows)

    @property
    def qkv_apart(self) -> int:
        """Attentions with a GEMM for each of q, k and v; a runtime for CPUs has no other choice."""
        return 0 if self.on_cpu else self.qkv["attentions"] - self.qkv["merged"]

    def count_of(self, kind: str) -> int:
        return self.kernel_counts.get(kind, 0)

    @property
    def int8_writers(self) -> Counter[str]:
        """Kinds of kernels that write INT8."""
        return Counter(tables.kernel_kind(row) for row in self.rows if "Int8" in row.outputs)


def inspect_layers(
    layers: Sequence[LayerRow],
    graph: Graph | None = None,
    *,
    expected: Collection[str] | None = None,
    expected_attention: int = 0,
    times: Mapping[str, float] | None = None,
) -> Inspection:
    """Compare a layer table with an ONNX graph, or without one with the nodes that the table names.

    Args:
        expected: GEMMs that the recipe wants in INT8. None: every linear that is not is listed, none fails.
        expected_attention: attentions that it wants in INT8.
        times: milliseconds by kernel name.

    Raises:
        UserError: the table names no node of the graph.
    """
    graph = graph or rebuild_graph(layers)
    wanted = graph.linears if expected is None else list(expected)
    gemms = [*graph.linears, *graph.products]
    proof = tables.measure_coverage(layers, wanted, gemms)
    if graph.linears and len(proof.unknown) == len({*wanted, *gemms}):
        raise UserError(
            "no kernel of the table names a MatMul or Gemm of the ONNX file; give the file that the "
            "engine was built from"
        )
    naming: dict[str, list[LayerRow]] = defaultdict(list)
    for row in layers:
        for name in dict.fromkeys((*tables.name_parts(row), *row.onnx)):
            naming[name].append(row)
    reasons = {node: tables.why_not(naming[node], node) for node in proof.not_int8}
    ran = list(layers)
    if times is not None:  # each profile has its own kernels for every layer: those of the measured ones
        copies = {tables.copy_of(row) for row in layers if row.name in times} | {""}
        if len(copies) > 1:
            ran = [row for row in layers if tables.copy_of(row) in copies]
    rows, profiles = tables.select_profile(ran)
    kinds: dict[str, list[LayerRow]] = defaultdict(list)
    for row in rows:
        kinds[tables.kernel_kind(row)].append(row)
    norms = Counter(map(tables.norm_precision, filter(tables.is_norm, rows)))
    gelus = [tables.kernel_kind(row) == "gemm" for row in rows if tables.is_gelu(row)]
    attention = [row for row in rows if tables.is_attention(row)]
    lost = tables.float_residuals(rows, graph.residuals)
    found = Inspection(
        gemms=len({*graph.linears, *wanted}),
        int8_gemms=len(proof.int8_gemms),
        expected_int8_gemms=None if expected is None else len(expected),
        not_int8=proof.not_int8,
        why_not_int8={node: str(why) for node, why in reasons.items()},
        unknown=proof.unknown,
        attentions=len(graph.softmaxes) or len(attention),
        attention_fused=proof.attention_fused,
        attention_int8=proof.attention_int8,
        expected_attention_int8=expected_attention,
        attention_kernels=[
            row.model_dump(include={"name", "inputs", "outputs"}) | {"block": tables.kernel_block(row)}
            for row in attention
        ],
        layernorm=norms,
        int8_residuals=len(graph.residuals) - len(lost),
        expected_int8_residuals=len(graph.residuals),
        not_int8_residuals=lost,
        softmax_kernels=Counter(map(tables.norm_precision, kinds["softmax"])),
        softmax_in_graph=graph.softmax_types,
        gelu={"fused": sum(gelus), "separate": len(gelus) - sum(gelus)},
        layout_kernels=len(kinds["layout"]),
        layout_kernels_int8=sum("Int8" in (*row.inputs, *row.outputs) for row in kinds["layout"]),
        quantize_kernels=len(kinds["quantize"]),
        profiles=profiles,
        kernel_counts=dict(Counter(map(tables.kernel_kind, rows)).most_common()),
        time=None if times is None else split_time(ran, times),
        kernels=[
            {**row.model_dump(), "what": tables.kernel_kind(row), "block": tables.kernel_block(row)}
            | {"ms": None if times is None else times.get(row.name)}
            for row in layers
        ],
        rows=rows,
        count=tables.format_count(ran),
        graph=graph,
        proven=proof.int8_gemms,
        reasons=reasons,
        **_follow_linears(rows, graph),
    )
    faults = list(find_faults(found))
    found.findings = [fault.sentence for fault in faults]
    if expected is not None and proof.not_int8:
        found.failures.append(uncovered(len(proof.not_int8)))
    if proof.attention_int8 < expected_attention:
        found.failures.append(fused_attentions(proof.attention_int8, expected_attention))
    if expected is not None:
        found.failures += [fault.place for fault in faults if fault.code == "float-residual"]
    return found


def _follow_linears(rows: Sequence[LayerRow], graph: Graph) -> dict[str, Any]:
    """Return fields about linears: which kernels compute them, and what these read and write."""
    makers = tables.find_computing_rows(rows, [*graph.linears, *graph.products])
    deciding = {node: copies[0] for node, copies in makers.items()}
    computed: dict[str, list[str]] = {}
    for node, kernels in deciding.items():
        for row in kernels:
            if tables.kernel_kind(row) == "gemm":
                computed.setdefault(row.name, []).append(node)
    known = {*graph.linears}
    linears = [node for nodes in computed.values() for node in nodes if node in known]
    made = {node: deciding[node][0] for node in linears}
    int8 = [node for node in linears if all(map(tables.is_int8, deciding[node]))]
    rest = [node for node in linears if not all(map(tables.is_int8, deciding[node]))]
    listing: dict[str, list[LayerRow]] = defaultdict(list)
    for row in rows:
        for name in row.onnx:
            listing[name].append(row)

    def elsewhere(node: str, *names: str) -> bool:
        return any(row is not made[node] for name in names for row in listing.get(name, ()))

    qkv: dict[str, list[str]] = defaultdict(list)  # kernels of q, k and v linears by attention
    whole = 0  # attentions with one linear for all three
    for node in linears:
        parent, _, leaf = module_of(node).rpartition(".")
        if ANY_QKV.fullmatch(leaf):
            qkv[parent + run_of(node)].append(made[node].name)
        whole += bool(ANY_MERGED_QKV.fullmatch(leaf))
    apart = [{*kernels} for kernels in qkv.values() if len(kernels) == 3]
    return {
        "computed": computed,
        "linears": linears,
        "int8": int8,
        "dequantized": [
            node for node in rest if any("Int8" in (*row.inputs, *row.constants) for row in deciding[node])
        ],
        "fp32_outputs": [node for node in int8 if "Float" in made[node].outputs],
        "raw_fp16_outputs": [node for node in int8 if "Half" in made[node].outputs and elsewhere(node, node)],
        "separate_epilogues": [
            node for node in linears if elsewhere(node, node, f"{node.rpartition('/')[0]}/Add{run_of(node)}")
        ],
        "qkv": {"attentions": len(apart) + whole, "merged": sum(len(names) == 1 for names in apart) + whole},
    }


def split_time(layers: Sequence[LayerRow], times: Mapping[str, float]) -> Time:
    rows = {row.name: row for row in layers}
    known = {name: ms for name, ms in times.items() if name in rows}
    blocks: dict[str, float] = defaultdict(float)
    kinds: dict[str, float] = defaultdict(float)
    for name, ms in known.items():
        blocks[tables.kernel_block(rows[name])] += ms
        kinds[tables.kernel_kind(rows[name])] += ms
    kernels = [row for row in layers if tables.kernel_kind(row) != "none"]
    return Time(
        total=sum(times.values()),
        by_kernel=dict(sorted(known.items(), key=lambda item: -item[1])),
        by_block=dict(sorted(blocks.items(), key=lambda item: tables.block_order(item[0]))),
        by_kind=dict(sorted(kinds.items(), key=lambda item: -item[1])),
        unmatched={name: ms for name, ms in times.items() if name not in rows},
        missing=sum(row.name not in times for row in kernels),
    )


def find_faults(engine: Inspection, path: Path | None = None) -> Iterator[Finding]:
    """Find what is wrong or slow in the layers of one engine; commands name the file at `path`."""
    if nodes := engine.raw_fp16_outputs:
        yield find("raw-int32-as-fp16", path=path, nodes=nodes)
    if nodes := engine.dequantized:
        yield find("dequantized", path=path, nodes=nodes)
    if nodes := engine.fp32_outputs:
        yield find("gemm-writes-fp32", path=path, nodes=nodes, all=len(engine.int8))
    if nodes := engine.not_int8_residuals:
        look = ", or look with `qdqbench check` for residuals with a scale of their own"
        look, total = "" if engine.on_cpu else look, engine.expected_int8_residuals
        yield find("float-residual", path=path, nodes=nodes, all=total, or_look=look)
    if (apart := engine.attentions - len(engine.fused)) > 0:
        yield find("attention-apart", path=path, count=apart, all=engine.attentions)
    if engine.qkv_apart:
        yield find("qkv-apart", path=path, count=engine.qkv_apart, all=engine.qkv["attentions"])
    if low := engine.layernorm.get("FP16"):
        yield find("layernorm-fp16", path=path, count=low, all=sum(engine.layernorm.values()))


def explain_slowdown(layers_int8: Sequence[LayerRow], layers_fp16: Sequence[LayerRow]) -> list[str]:
    """Say why an INT8 engine can be slower than its FP16 twin."""
    return list(_compare(inspect_layers(layers_int8), inspect_layers(layers_fp16)))


def _compare(ours: Inspection, twin: Inspection) -> Iterator[str]:
    faults = {fault.code: fault.sentence for fault in find_faults(ours)}
    encoder = [node for node in ours.linears if tables.block_of_node(node).startswith("layer.")]
    done = {*ours.int8, *ours.dequantized}
    if rest := [node for node in encoder if node not in done]:
        yield find("encoder-floating-point", nodes=rest, all=len(encoder)).sentence
    beside = {
        "dequantized": "",
        "attention-apart": f" (FP16 fuses {len(twin.fused)})",
        "qkv-apart": f" (FP16 merges {twin.qkv['merged']})",
        "gemm-writes-fp32": "",
    }
    yield from (faults[code] + text for code, text in beside.items() if code in faults)
    gelus = ours.gelu["separate"] - twin.gelu["separate"]
    if gelus > 0:
        rule = first_feed_forwards(map(module_of, ours.linears))
        keep = f'try `{{match: "{rule}", precision: fp16}}`' if rule else "keep those linears in FP16"
        fused, apart = twin.gelu["fused"], twin.gelu["separate"]
        count = ours.gelu["separate"]
        yield find("gelu-apart", count=count, fp16=apart, fused=fused, keep=keep).sentence
    epilogues, other = ours.separate_epilogues, len(twin.separate_epilogues)
    if len(epilogues) - other > max(gelus, 0):
        total = len(ours.linears)
        yield find("epilogue-apart", nodes=epilogues, where="", all=total, fp16=other).sentence
    if ours.layout_kernels > twin.layout_kernels:
        figures = count_alone(ours, "layout")
        yield f"{find('copies', why='', **figures).sentence} (FP16: {twin.layout_kernels})"
    if ours.quantize_kernels:
        yield find("quantize-alone", why="", **count_alone(ours, "quantize")).sentence
    if len(ours.rows) > len(twin.rows):
        more = {kind: count for kind, count in ours.kernel_counts.items() if count > twin.count_of(kind)}
        kinds = sorted(more, key=lambda kind: twin.count_of(kind) - more[kind])
        listed = ", ".join(f"{kind} {more[kind]} against {twin.count_of(kind)}" for kind in kinds)
        yield find("more-kernels", count=len(ours.rows), fp16=len(twin.rows), kinds=listed).sentence


ALONE: dict[tables.KernelKind, str] = {"layout": "copies", "quantize": "quantize-alone"}


def count_alone(engine: Inspection, kind: tables.KernelKind) -> dict[str, Any]:
    """Return the figures of a finding about kernels that only move or quantize."""
    rows = [row for row in engine.rows if tables.kernel_kind(row) == kind]
    int8 = sum("Int8" in (*row.inputs, *row.outputs) for row in rows)
    return {"count": len(rows), "all": len(engine.rows), "int8": int8}
