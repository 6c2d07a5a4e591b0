"""Compare an engine's layers with a recipe, sum up a profile, and say why INT8 can be slower than FP16."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from onnx import TensorProto

from qdqbench.quantize.engine import layers as tables
from qdqbench.quantize.engine.results import LayerRow
from qdqbench.quantize.graph.index import MATMULS, list_int8_norms, module_of, run_of
from qdqbench.quantize.graph.read import read_model, validate_names
from qdqbench.quantize.lint.codes import Effect
from qdqbench.quantize.lint.view import walk_types
from qdqbench.quantize.models.families.known import ANY_MERGED_QKV, ANY_QKV, first_feed_forwards
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.limits import FP16_MAX, HEAD_SIZES_TEXT, INT8_ATTENTION_LENGTH
from qdqbench.quantize.utils.names import name_list

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


MAX_LAYERS_NAMED = 6


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
            messages.append(f"{len(self.proof.not_int8)} of {len(self.expected)} GEMMs do not run in INT8")
        if self.proof.attention_int8 < self.expected_attention:
            messages.append(
                f"{self.proof.attention_int8} of {self.expected_attention} attentions run as one INT8 kernel"
            )
        if self.expected is not None and self.facts.float_residuals:
            problems = find_problems(self.facts)
            messages += [problem.place for problem in problems if problem.code == "float-residual"]
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


@dataclass(frozen=True)
class Problem:
    code: str
    effect: Effect
    what: str
    why: str
    remedy: str  # in the recipe
    nodes: list[str] = field(default_factory=list)

    @property
    def place(self) -> str:
        return f"{self.what} ({format_nodes(self.nodes)})" if self.nodes else self.what

    @property
    def sentence(self) -> str:
        return f"{self.place}{'; ' if self.why else ''}{self.why}: {self.remedy}"


def find_problems(facts: EngineFacts) -> Iterator[Problem]:
    if nodes := facts.raw_outputs:
        what = f"{len(nodes)} INT8 GEMMs store raw INT32 sums as FP16 before they are scaled"
        why = f"sums over {FP16_MAX:.0f} become infinite, and logits NaN"
        remedy = "set `export.weight_scales: factored`, or `weights: int8/per-tensor`"
        yield Problem("raw-int32-as-fp16", "wrong", what, why, remedy, nodes)
    if nodes := facts.dequantized:
        what = f"{len(nodes)} linears dequantize INT8 codes and then multiply in floating point"
        remedy = "give both operands Q/DQ that a GEMM takes, `qdqbench check` names the fault"
        yield Problem("dequantized", "not INT8", what, "that is slower than plain FP16", remedy, nodes)
    if nodes := facts.fp32_outputs:
        what = f"{len(nodes)} of {len(facts.int8)} INT8 GEMMs write FP32"
        why = "that is twice the bytes of FP16, in the kernels that move the most"
        yield Problem("gemm-writes-fp32", "slow", what, why, "set `export.weight_scales: factored`", nodes)
    if nodes := facts.float_residuals:
        what = f"{len(nodes)} of {len(facts.residuals)} LayerNorms do not read their INT8 residual as INT8"
        why = "that costs the rounding and saves nothing"
        remedy = "set `residual: fp16`"
        if not facts.on_cpu:
            remedy += ", or look with `qdqbench check` for residuals with a scale of their own"
        yield Problem("float-residual", "slow", what, why, remedy, nodes)
    if len(facts.fused) < facts.attentions:
        yield attention_apart(facts)
    if facts.qkv_apart:
        what = f"q, k and v are three GEMMs in {facts.qkv_apart} of {facts.qkv} attentions"
        remedy = "for small batches set `export.qkv_scales: shared` with factored weights, which makes it one"
        yield Problem("qkv-apart", "note", what, "", remedy)
    if low := facts.norms.get("FP16", []):
        what = f"{len(low)} of {sum(map(len, facts.norms.values()))} LayerNorms sum their squares in FP16"
        why = f"sums over {FP16_MAX:.0f} overflow; models with large activations then answer NaN"
        remedy = 'add the rule `{match: "*", type: LayerNorm, precision: fp32}`'
        yield Problem("layernorm-fp16", "note", what, why, remedy)


def attention_apart(facts: EngineFacts) -> Problem:
    count = facts.attentions
    return Problem(
        "attention-apart",
        "slow",
        f"{count - len(facts.fused)} of {count} attentions fall apart into single kernels",
        "a fused kernel takes Q/DQ on all of q, k, v, the softmax output and the output, or on none. In INT8 "
        f"it takes head size {HEAD_SIZES_TEXT} and at most {INT8_ATTENTION_LENGTH} tokens; in FP16 a mask "
        "added once and no other operator in between",
        "quantize the whole attention (`attention: int8`) or none of it (`attention: fp16`)",
    )


def explain_slowdown(layers_int8: Sequence[LayerRow], layers_fp16: Sequence[LayerRow]) -> list[str]:
    ours, twin = EngineFacts(layers_int8), EngineFacts(layers_fp16)
    problems = {problem.code: problem.sentence for problem in find_problems(ours)}
    reasons = []
    encoder = [node for node in ours.linears if tables.block_of_node(node).startswith("layer.")]
    done = {*ours.int8, *ours.dequantized}
    if rest := [node for node in encoder if node not in done]:
        reasons.append(
            f"{len(rest)} of {len(encoder)} encoder linears are not in INT8 and gain nothing "
            f"({format_nodes(rest)}): give them `weights` and `input` in the recipe's rules"
        )
    if ours.dequantized:
        reasons.append(problems["dequantized"])
    if len(ours.fused) < max(ours.attentions, len(twin.fused)):
        reasons.append(f"{attention_apart(ours).sentence} (FP16 fuses {len(twin.fused)})")
    if ours.qkv_apart:
        reasons.append(f"{problems['qkv-apart']} (FP16 merges {twin.qkv_merged})")
    if ours.fp32_outputs:
        reasons.append(problems["gemm-writes-fp32"])
    gelus = ours.gelu_separate - twin.gelu_separate
    if gelus > 0:
        rule = first_feed_forwards(map(module_of, ours.linears))
        fix = f'try `{{match: "{rule}", precision: fp16}}`' if rule else "keep those linears in FP16"
        reasons.append(
            f"{ours.gelu_separate} GELU run in a kernel of their own (FP16: {twin.gelu_separate}, and "
            f"{twin.gelu_fused} inside of the GEMM), which reads and writes the widest activation once "
            f"more: for small batches {fix}"
        )
    epilogues = len(ours.separate) - len(twin.separate)
    if epilogues > max(gelus, 0):
        reasons.append(
            f"{len(ours.separate)} of {len(ours.linears)} linears have their bias or scale applied by "
            f"another kernel (FP16: {len(twin.separate)}): `weights: int8/per-tensor` needs no scale there"
        )
    if ours.kernels["layout"] > twin.kernels["layout"]:
        reasons.append(
            f"{ours.kernels['layout']} kernels only move, cast or transpose (FP16: "
            f"{twin.kernels['layout']}), {ours.layout_quantized} of them INT8 codes: `attention: int8` lets "
            "the engine drop those after the attention"
        )
    if alone := ours.kernels["quantize"]:
        reasons.append(
            f"{alone} kernels only quantize or dequantize: quantize the inputs of linears and nothing else, "
            "which the kernel ahead of them does"
        )
    total, other = sum(ours.kernels.values()), sum(twin.kernels.values())
    if total > other:
        kinds = [kind for kind in ours.kernels if ours.kernels[kind] > twin.kernels[kind]]
        kinds.sort(key=lambda kind: twin.kernels[kind] - ours.kernels[kind])
        listed = ", ".join(f"{kind} {ours.kernels[kind]} against {twin.kernels[kind]}" for kind in kinds)
        reasons.append(
            f"{total} kernels run where FP16 runs {other} ({listed}), and a launch costs the same at any "
            "batch size: use larger batches, or quantize fewer layers (recipe int8-ffn)"
        )
    return reasons


def format_nodes(nodes: Sequence[str]) -> str:
    """Format ONNX nodes in few words, several layers together: `layer.0-11: attention key, output`."""
    layers: dict[str, list[int]] = defaultdict(list)
    for node in nodes:
        block, _, name = tables.shorten_node(node).partition(" ")
        number = block.removeprefix("layer.")
        if block.startswith("layer.") and number.isdecimal() and name:
            layers[name].append(int(number[:9]))
        else:
            layers[tables.shorten_node(node)] = []
    groups: dict[str, list[str]] = defaultdict(list)
    for name, numbers in layers.items():
        groups[format_ranges(numbers)].append(name)
    texts = [f"layer.{key}: {name_list(names)}" if key else name_list(names) for key, names in groups.items()]
    more = f"; and {len(texts) - MAX_LAYERS_NAMED} more" if len(texts) > MAX_LAYERS_NAMED else ""
    return "; ".join(texts[:MAX_LAYERS_NAMED]) + more


def format_ranges(numbers: Sequence[int]) -> str:
    """Format 0, 1, 2, 5 as `0-2,5`."""
    spans: list[list[int]] = []
    for number in sorted({*numbers}):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
