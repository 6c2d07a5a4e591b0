"""Facts about an engine, read from its layer table and, where it is at hand, its ONNX graph.

Counts are of one copy of the network; an engine has one copy a profile.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from onnx import TensorProto

from qdqbench.quantize.engine.kernels import (
    float_residuals,
    format_count,
    is_gelu,
    is_norm,
    kernel_kind,
    kernel_label,
    kernel_operator,
    norm_precision,
    select_profile,
)
from qdqbench.quantize.engine.layers import find_computing_rows, is_attention, is_int8, name_parts
from qdqbench.quantize.graph.check.view import walk_types
from qdqbench.quantize.graph.index import MATMULS, list_int8_norms, module_of, opset_of, run_of
from qdqbench.quantize.graph.read import read_model, validate_names
from qdqbench.quantize.models.families.known import ANY_MERGED_QKV, ANY_QKV
from qdqbench.quantize.utils.results import LayerRow

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


@dataclass
class EngineFacts:
    """What one copy of the network does; the lists hold ONNX names in the order of the table."""

    rows: list[LayerRow]
    profiles: int  # of the whole table
    count: str  # kernels of the whole table, in words
    kernels: Counter[str]  # by kind, without signals and waits
    computed: dict[str, list[str]]  # kernel name -> ONNX linears and products that it multiplies
    linears: list[str]
    int8: list[str]  # linears in INT8
    dequantized: list[str]  # linears with INT8 inputs or weights that a kernel dequantizes to multiply in FP
    fp32_outputs: list[str]  # INT8 linears that write FP32
    raw_outputs: list[str]  # INT8 linears that write INT32 sums as FP16; the next kernel scales them
    separate: list[str]  # linears whose bias or scale another kernel applies
    qkv: int  # attentions with q, k and v linears
    qkv_merged: int  # of these, in one GEMM
    attentions: int
    fused: list[LayerRow]  # kernels of fused attentions
    gelu_fused: int  # GELUs in the kernel of a GEMM
    gelu_separate: int  # GELUs in another kernel
    norms: dict[str, list[str]]  # precision -> kernels, as labels
    residuals: list[str]  # LayerNorms whose residual has Q/DQ in the graph
    float_residuals: list[str]  # of these, that a kernel reads in floating point all the same
    softmax: dict[str, int]  # precision -> kernels of their own
    layout_quantized: int  # layout kernels that read or write INT8, or quantize
    int8_writers: Counter[str]  # kernels that write INT8, by kind

    @property
    def qkv_apart(self) -> int:
        """Count attentions with a GEMM for each of q, k and v; a runtime for CPUs has no other choice."""
        return 0 if self.on_cpu else self.qkv - self.qkv_merged

    @property
    def on_cpu(self) -> bool:
        return any(row.kernel is not None for row in self.rows)


def read_graph(path: Path) -> Graph:
    model = read_model(path)
    validate_names(model)
    opset = opset_of(model)
    types, _ = walk_types(model, opset)
    constant = {tensor.name for tensor in model.graph.initializer} | {""}
    graph_nodes = Graph([], [], [])
    for node in model.graph.node:
        if constant.issuperset(node.input):
            constant.update(node.output)
        elif node.op_type in MATMULS:
            weighted = not constant.isdisjoint(node.input[:2])
            (graph_nodes.linears if weighted else graph_nodes.products).append(node.name)
        elif node.op_type == "Softmax":
            graph_nodes.softmaxes.append(node.name)
            graph_nodes.softmax_types[node.name] = _FLOATS.get(types.get(node.input[0], 0), "unknown")
    graph_nodes.residuals.extend(list_int8_norms(model))
    return graph_nodes


def rebuild_graph(layers: Sequence[LayerRow]) -> Graph:
    listed = dict.fromkeys(
        name for row in layers for name in ((*name_parts(row), *row.onnx) if row.kind == "gemm" else row.onnx)
    )
    softmaxes = [name for name in listed if kernel_operator(name) == "Softmax"]
    gemms = [name for name in listed if kernel_operator(name) in MATMULS and "+" not in name]
    attended = {module_of(name) for name in softmaxes}
    fused = {name for row in layers if is_attention(row) for name in row.onnx}
    attended |= {module_of(name) for name in fused.intersection(gemms)}
    return Graph(
        linears=[name for name in gemms if module_of(name) not in attended],
        products=[name for name in gemms if module_of(name) in attended],
        softmaxes=softmaxes,
        # ModelOpt's AutoCast puts this node behind a softmax that it keeps in FP32
        softmax_types={name: "FP32" for name in softmaxes if f"{name}_output_0_cast_to_fp16" in listed},
    )


def collect_facts(layers: Sequence[LayerRow], graph: Graph | None = None) -> EngineFacts:
    graph = graph or rebuild_graph(layers)
    rows, profiles = select_profile(layers)
    deciding = {
        node: found[0] for node, found in find_computing_rows(rows, [*graph.linears, *graph.products]).items()
    }
    computed: dict[str, list[str]] = defaultdict(list)
    for node, makers in deciding.items():
        for row in makers:
            if kernel_kind(row) == "gemm":
                computed[row.name].append(node)
    known = {*graph.linears}
    linears = [node for nodes in computed.values() for node in nodes if node in known]
    made = {node: deciding[node][0] for node in linears}
    int8 = [node for node in linears if all(map(is_int8, deciding[node]))]
    rest = [node for node in linears if not all(map(is_int8, deciding[node]))]
    listing: dict[str, list[LayerRow]] = defaultdict(list)
    for row in rows:
        for name in row.onnx:
            listing[name].append(row)
    qkv: dict[str, list[str]] = defaultdict(list)  # kernels of q, k and v linears by attention
    whole = 0  # attentions with one linear for all three
    separate = []
    for node in linears:
        parent, _, leaf = module_of(node).rpartition(".")
        if ANY_QKV.fullmatch(leaf):
            qkv[parent + run_of(node)].append(made[node].name)
        whole += bool(ANY_MERGED_QKV.fullmatch(leaf))
        bias = f"{node.rpartition('/')[0]}/Add{run_of(node)}"
        if any(row is not made[node] for name in (node, bias) for row in listing.get(name, ())):
            separate.append(node)
    apart = [{*names} for names in qkv.values() if len(names) == 3]
    gelus = [row for row in rows if is_gelu(row)]
    norms: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if is_norm(row):
            norms[norm_precision(row)].append(kernel_label(row))
    fused = [row for row in rows if is_attention(row)]
    return EngineFacts(
        rows=rows,
        profiles=profiles,
        count=format_count(layers),
        kernels=Counter(kernel_kind(row) for row in rows),
        computed=dict(computed),
        linears=linears,
        int8=int8,
        dequantized=[
            node for node in rest if any("Int8" in (*row.inputs, *row.constants) for row in deciding[node])
        ],
        fp32_outputs=[node for node in int8 if "Float" in made[node].outputs],
        raw_outputs=[
            node
            for node in int8
            if "Half" in made[node].outputs and any(row is not made[node] for row in listing[node])
        ],
        separate=separate,
        qkv=len(apart) + whole,
        qkv_merged=sum(len(names) == 1 for names in apart) + whole,
        attentions=len(graph.softmaxes) or len(fused),
        fused=fused,
        gelu_fused=sum(kernel_kind(row) == "gemm" for row in gelus),
        gelu_separate=sum(kernel_kind(row) != "gemm" for row in gelus),
        norms=dict(norms),
        residuals=graph.residuals,
        float_residuals=float_residuals(rows, graph.residuals),
        softmax=dict(Counter(norm_precision(row) for row in rows if kernel_kind(row) == "softmax")),
        layout_quantized=sum(
            kernel_kind(row) == "layout" and "Int8" in (*row.inputs, *row.outputs) for row in rows
        ),
        int8_writers=Counter(kernel_kind(row) for row in rows if "Int8" in row.outputs),
    )
