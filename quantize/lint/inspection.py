"""Compare an engine's layers with a recipe, sum up a profile, and say why INT8 can be slower than FP16."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onnx import TensorProto

from qdqbench.quantize.engine import layers as tables
from qdqbench.quantize.engine.results import LayerRow
from qdqbench.quantize.graph.index import MATMULS, list_int8_norms, module_of, run_of
from qdqbench.quantize.graph.read import read_model, validate_names
from qdqbench.quantize.lint.findings import Finding, find
from qdqbench.quantize.lint.view import walk_types
from qdqbench.quantize.models.families.known import ANY_MERGED_QKV, ANY_QKV, first_feed_forwards
from qdqbench.quantize.report.figures import uncovered
from qdqbench.quantize.utils.errors import UserError

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


class EngineFacts:
    """Facts of one copy of the network; the lists hold ONNX names in the order of the table."""

    def __init__(self, layers: Sequence[LayerRow], graph: Graph | None = None) -> None:
        graph = graph or rebuild_graph(layers)
        self.rows, self.profiles = rows, _ = tables.select_profile(layers)  # profiles: of the whole table
        self.count = tables.format_count(layers)  # kernels of the whole table, in words
        self.kernels = Counter(map(tables.kernel_kind, rows))  # by kind, without signals and waits
        found = tables.find_computing_rows(rows, [*graph.linears, *graph.products])
        deciding = {node: copies[0] for node, copies in found.items()}
        self.computed: dict[
            str, list[str]
        ] = {}  # kernel name -> ONNX linears and products that it multiplies
        for node, makers in deciding.items():
            for row in makers:
                if tables.kernel_kind(row) == "gemm":
                    self.computed.setdefault(row.name, []).append(node)
        known = {*graph.linears}
        self.linears = [node for nodes in self.computed.values() for node in nodes if node in known]
        made = {node: deciding[node][0] for node in self.linears}
        self.int8 = [node for node in self.linears if all(map(tables.is_int8, deciding[node]))]
        # linears with INT8 inputs or weights that a kernel dequantizes to multiply in floating point
        self.dequantized = [
            node
            for node in self.linears
            if not all(map(tables.is_int8, deciding[node]))
            and any("Int8" in (*row.inputs, *row.constants) for row in deciding[node])
        ]
        self.fp32_outputs = [node for node in self.int8 if "Float" in made[node].outputs]
        listing: dict[str, list[LayerRow]] = defaultdict(list)
        for row in rows:
            for name in row.onnx:
                listing[name].append(row)
        # INT8 linears that write INT32 sums as FP16; the next kernel scales them
        self.raw_outputs = [
            node
            for node in self.int8
            if "Half" in made[node].outputs and any(row is not made[node] for row in listing[node])
        ]
        qkv: dict[str, list[str]] = defaultdict(list)  # kernels of q, k and v linears by attention
        whole = 0  # attentions with one linear for all three
        self.separate: list[str] = []  # linears whose bias or scale another kernel applies
        for node in self.linears:
            parent, _, leaf = module_of(node).rpartition(".")
            if ANY_QKV.fullmatch(leaf):
                qkv[parent + run_of(node)].append(made[node].name)
            whole += bool(ANY_MERGED_QKV.fullmatch(leaf))
            bias = f"{node.rpartition('/')[0]}/Add{run_of(node)}"
            if any(row is not made[node] for name in (node, bias) for row in listing.get(name, ())):
                self.separate.append(node)
        apart = [{*names} for names in qkv.values() if len(names) == 3]
        self.qkv = len(apart) + whole  # attentions with q, k and v linears
        self.qkv_merged = sum(len(names) == 1 for names in apart) + whole  # of these, in one GEMM
        self.fused = [row for row in rows if tables.is_attention(row)]
        self.attentions = len(graph.softmaxes) or len(self.fused)
        gelus = [tables.kernel_kind(row) == "gemm" for row in rows if tables.is_gelu(row)]
        self.gelu_fused = sum(gelus)  # in the kernel of a GEMM
        self.gelu_separate = len(gelus) - sum(gelus)
        self.norms: dict[str, list[str]] = {}  # precision -> kernels, as labels
        for row in filter(tables.is_norm, rows):
            self.norms.setdefault(tables.norm_precision(row), []).append(tables.kernel_label(row))
        self.residuals = graph.residuals  # LayerNorms whose residual has Q/DQ in the graph
        self.float_residuals = tables.float_residuals(
            rows, graph.residuals
        )  # read in floating point all the same
        # precision -> kernels of their own
        self.softmax = dict(
            Counter(tables.norm_precision(row) for row in rows if tables.kernel_kind(row) == "softmax")
        )
        layouts = (row for row in rows if tables.kernel_kind(row) == "layout")
        self.layout_quantized = sum("Int8" in (*row.inputs, *row.outputs) for row in layouts)
        self.int8_writers = Counter(tables.kernel_kind(row) for row in rows if "Int8" in row.outputs)

    @property
    def qkv_apart(self) -> int:
        """Count attentions with a GEMM for each of q, k and v; a runtime for CPUs has no other choice."""
        return 0 if self.on_cpu else self.qkv - self.qkv_merged

    @property
    def on_cpu(self) -> bool:
        return any(row.kernel is not None for row in self.rows)


@dataclass(frozen=True)
class Time:
    total: float
    by_kernel: dict[str, float]  # kernel name, the slowest first
    by_block: dict[str, float]  # in the order of the network
    by_kind: dict[str, float]  # the slowest first
    unmatched: dict[str, float]  # names that the table does not have
    missing: int  # kernels of the table that the profile does not have, over all copies


class Inspection:
    """A layer table, judged by the nodes of a graph (UserError: it names none) or else by those it names.

    `expected` and `expected_attention` are what the recipe wants; without `expected` every linear that is not
    in INT8 is listed and nothing fails. `times` are milliseconds by kernel name.
    """

    def __init__(
        self,
        layers: Sequence[LayerRow],
        graph: Graph | None = None,
        *,
        expected: Collection[str] | None = None,
        expected_attention: int = 0,
        times: Mapping[str, float] | None = None,
    ) -> None:
        self.graph = graph = graph or rebuild_graph(layers)
        self.expected = None if expected is None else list(expected)
        self.expected_attention = expected_attention
        wanted = graph.linears if self.expected is None else self.expected
        self.proof = tables.measure_coverage(layers, wanted, [*graph.linears, *graph.products])
        if graph.linears and len(self.proof.unknown) == len({*wanted, *graph.linears, *graph.products}):
            raise UserError(
                "no kernel of the table names a MatMul or Gemm of the ONNX file; give the file that the "
                "engine was built from"
            )
        naming: dict[str, list[LayerRow]] = defaultdict(list)
        for row in layers:
            for name in dict.fromkeys((*tables.name_parts(row), *row.onnx)):
                naming[name].append(row)
        self.reasons = {node: tables.why_not(naming[node], node) for node in self.proof.not_int8}
        ran = list(layers)
        if times is not None:  # each profile has its own kernels for every layer: those of the measured ones
            copies = {tables.copy_of(row) for row in layers if row.name in times} | {""}
            if len(copies) > 1:
                ran = [row for row in layers if tables.copy_of(row) in copies]
        self.facts = EngineFacts(ran, graph)
        self.gemms = len({*graph.linears, *wanted})  # and the products that a recipe wants in INT8
        self.time = None if times is None else split_time(ran, times)

    @property
    def failures(self) -> list[str]:
        messages = []
        if self.expected is not None and self.proof.not_int8:
            messages.append(uncovered(len(self.proof.not_int8), len(self.expected)))
        if self.proof.attention_int8 < self.expected_attention:
            messages.append(
                f"{self.proof.attention_int8} of {self.expected_attention} attentions run as one INT8 kernel"
            )
        if self.expected is not None and self.facts.float_residuals:
            messages += [fault.place for fault in find_faults(self.facts) if fault.code == "float-residual"]
        return messages


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


def find_faults(facts: EngineFacts, path: Path | None = None) -> Iterator[Finding]:
    """Find what is wrong or slow in the layers of one engine; commands name the file at `path`."""
    if nodes := facts.raw_outputs:
        yield find("raw-int32-as-fp16", path=path, nodes=nodes)
    if nodes := facts.dequantized:
        yield find("dequantized", path=path, nodes=nodes)
    if nodes := facts.fp32_outputs:
        yield find("gemm-writes-fp32", path=path, nodes=nodes, all=len(facts.int8))
    if nodes := facts.float_residuals:
        look = ", or look with `qdqbench check` for residuals with a scale of their own"
        look = "" if facts.on_cpu else look
        yield find("float-residual", path=path, nodes=nodes, all=len(facts.residuals), or_look=look)
    if (apart := facts.attentions - len(facts.fused)) > 0:
        yield find("attention-apart", path=path, count=apart, all=facts.attentions)
    if facts.qkv_apart:
        yield find("qkv-apart", path=path, count=facts.qkv_apart, all=facts.qkv)
    if low := facts.norms.get("FP16", []):
        yield find("layernorm-fp16", path=path, count=len(low), all=sum(map(len, facts.norms.values())))


def explain_slowdown(layers_int8: Sequence[LayerRow], layers_fp16: Sequence[LayerRow]) -> list[str]:
    """Say why an INT8 engine can be slower than its FP16 twin."""
    return list(_compare(EngineFacts(layers_int8), EngineFacts(layers_fp16)))


def _compare(ours: EngineFacts, twin: EngineFacts) -> Iterator[str]:
    faults = {fault.code: fault.sentence for fault in find_faults(ours)}
    encoder = [node for node in ours.linears if tables.block_of_node(node).startswith("layer.")]
    done = {*ours.int8, *ours.dequantized}
    if rest := [node for node in encoder if node not in done]:
        yield find("encoder-floating-point", nodes=rest, all=len(encoder)).sentence
    beside = {
        "dequantized": "",
        "attention-apart": f" (FP16 fuses {len(twin.fused)})",
        "qkv-apart": f" (FP16 merges {twin.qkv_merged})",
        "gemm-writes-fp32": "",
    }
    yield from (faults[code] + text for code, text in beside.items() if code in faults)
    gelus = ours.gelu_separate - twin.gelu_separate
    if gelus > 0:
        rule = first_feed_forwards(map(module_of, ours.linears))
        keep = f'try `{{match: "{rule}", precision: fp16}}`' if rule else "keep those linears in FP16"
        yield find(
            "gelu-apart",
            count=ours.gelu_separate,
            fp16=twin.gelu_separate,
            fused=twin.gelu_fused,
            keep=keep,
        ).sentence
    if len(ours.separate) - len(twin.separate) > max(gelus, 0):
        yield find(
            "epilogue-apart",
            nodes=ours.separate,
            where="",
            all=len(ours.linears),
            fp16=len(twin.separate),
        ).sentence
    if ours.kernels["layout"] > twin.kernels["layout"]:
        yield f"{_alone(ours, 'layout').sentence} (FP16: {twin.kernels['layout']})"
    if ours.kernels["quantize"]:
        yield _alone(ours, "quantize").sentence
    total, other = sum(ours.kernels.values()), sum(twin.kernels.values())
    if total > other:
        kinds = [kind for kind in ours.kernels if ours.kernels[kind] > twin.kernels[kind]]
        kinds.sort(key=lambda kind: twin.kernels[kind] - ours.kernels[kind])
        listed = ", ".join(f"{kind} {ours.kernels[kind]} against {twin.kernels[kind]}" for kind in kinds)
        yield find("more-kernels", count=total, fp16=other, kinds=listed).sentence


ALONE: dict[tables.KernelKind, str] = {"layout": "copies", "quantize": "quantize-alone"}


def _alone(facts: EngineFacts, kind: tables.KernelKind) -> Finding:
    return find(ALONE[kind], why="", **count_alone(facts, kind))


def count_alone(facts: EngineFacts, kind: tables.KernelKind) -> dict[str, Any]:
    """Return the figures of a finding about kernels that only move or quantize."""
    rows = [row for row in facts.rows if tables.kernel_kind(row) == kind]
    int8 = sum("Int8" in (*row.inputs, *row.outputs) for row in rows)
    return {"count": len(rows), "all": len(facts.rows), "int8": int8}
