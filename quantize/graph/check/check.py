"""Check an ONNX file without a GPU: what will run in INT8, and what an engine would refuse or get wrong.

Rules come from what was measured with TensorRT and TensorRT-RTX: some mistakes make the parser refuse the
file, others are accepted and the layer then runs in FP16, or gives wrong numbers, without a word.
"""

import difflib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from onnx import TensorProto

from qdqbench.quantize.graph.check.codes import CODES, finding, finding_label, type_name
from qdqbench.quantize.graph.check.view import (
    MOVES,
    PRODUCTS,
    Attention,
    CheckGraph,
    Operand,
    check_constants,
    has_plain_form,
    is_dequantize,
    is_integer,
    is_quantize,
    missing_arguments,
    operator,
    walk_types,
)
from qdqbench.quantize.graph.index import (
    MATMULS,
    MAX_STEPS,
    ONNX_DOMAINS,
    ResidualAdd,
    attribute,
    find_other_rounding,
    find_residuals,
    module_of,
    opset_of,
)
from qdqbench.quantize.graph.read import read_model, validate_names, validate_tensors
from qdqbench.quantize.utils.arrays import Array
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.frames import Tabular
from qdqbench.quantize.utils.limits import FP16_MAX, limits_of
from qdqbench.quantize.utils.names import count_of, name_list
from qdqbench.quantize.utils.results import FindingRow
from qdqbench.quantize.utils.schema import Strict

HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
_NORMS = (
    "LayerNormalization",
    "RMSNormalization",
    "com.microsoft.SkipLayerNormalization",
    "GroupNormalization",
)


def check_operators(graph: CheckGraph) -> Iterator[FindingRow]:
    """Find operators that TensorRT does not parse, and nodes that `check` cannot look into."""
    functions = {(function.domain, function.name) for function in graph.index.model.functions}
    for node in graph.nodes:
        if is_integer(node):
            why = f"TensorRT does not parse {node.op_type}; it takes INT8 from explicit Q/DQ only"
            yield finding(
                "unsupported-op" if has_plain_form(graph.index, node) else "no-plain-form", node, why
            )
        elif node.domain == "com.microsoft" and not is_quantize(node) and not is_dequantize(node):
            why = f"{node.op_type} is ONNX Runtime's own, and TensorRT has no plugin of this name"
            yield finding("onnxruntime-operators", node, why)
        elif any(item.HasField("g") or item.graphs for item in node.attribute):
            yield finding("not-checked", node, f"the subgraphs of {node.op_type} were not looked into")
        elif (node.domain, node.op_type) in functions:
            why = f"the local function {node.op_type} was not looked into"
            yield finding("not-checked", node, why)
        elif node.domain not in ONNX_DOMAINS and not is_quantize(node) and not is_dequantize(node):
            why = f"{node.op_type} of domain {node.domain!r} needs a plugin, and was not looked into"
            yield finding("not-checked", node, why)


def check_pairs(graph: CheckGraph) -> Iterator[FindingRow]:
    """Find every QuantizeLinear and DequantizeLinear without a partner of the same scale."""
    outputs = {value.name for value in graph.index.graph.output}
    for node in graph.nodes:
        if is_quantize(node):
            readers = graph.reach(node.output[0], MOVES)
            if node.output[0] not in outputs and not any(is_dequantize(n) or is_integer(n) for n in readers):
                yield finding("q-without-dq", node, "no DequantizeLinear reads its output")
            yield from _check_scale(graph, node)
        elif is_dequantize(node):
            source, name = graph.origin(node.input[0])
            if source is not None and is_quantize(source):
                if not _same_parameters(graph, source, node):
                    why = f"its scale, zero point or axis differs from that of {finding_label(source)!r}"
                    yield finding("scale-mismatch", node, why)
                    yield from _check_scale(graph, node)
                continue
            if source is None or graph.index.stored(name) is not None:  # a weight, or INT8 given as input
                yield from _check_scale(graph, node)
            elif not is_integer(source):
                made = f"{source.op_type} {finding_label(source)!r}"
                yield finding("dq-without-q", node, f"it reads {made} instead of a QuantizeLinear")


def _same_parameters(graph: CheckGraph, q: onnx.NodeProto, dq: onnx.NodeProto) -> bool:
    if list(q.input[1:3]) == list(dq.input[1:3]) and attribute(q, "axis", 1) == attribute(dq, "axis", 1):
        return True
    first, second = graph.value(q.input[1]), graph.value(dq.input[1])
    if first is None or second is None:
        return True  # computed: named as dynamic-scale
    same_axis = attribute(q, "axis", 1) == attribute(dq, "axis", 1) or first.size == 1
    points = [_zero_point(graph, node) for node in (q, dq)]
    shifted = [point is not None and bool(np.any(point)) for point in points]
    return same_axis and shifted[0] == shifted[1] and np.array_equal(first, second)


def _zero_point(graph: CheckGraph, node: onnx.NodeProto) -> Array | None:
    return graph.value(node.input[2]) if len(node.input) > 2 and node.input[2] else None


def _check_scale(graph: CheckGraph, node: onnx.NodeProto) -> Iterator[FindingRow]:
    """Check scale, zero point and type of one Q, or of a DQ that reads a constant."""
    scale = graph.value(node.input[1])
    if scale is None:
        yield finding("dynamic-scale", node, "its scale is computed at run time and cannot be checked")
        return
    number = scale.astype(np.float64).reshape(-1)
    bad = np.flatnonzero(~(np.isfinite(number) & (number > 0)))
    if bad.size:
        taken = bool(np.all(number[bad] == np.inf))  # builds, and gives NaN
        why = f"its scale is {number[bad[0]]:g}"
        if number.size > 1:
            why = f"{bad.size} of its {number.size} scales are bad: {number[bad[0]]:g} at channel {bad[0]}"
        why += "; the engine gives NaN" if taken else "; the engine is not built"
        yield finding("bad-scale", node, why, None, "wrong" if taken else None)
    if scale.ndim > 1 or attribute(node, "block_size"):
        yield finding("blocked-scale", node, f"its scale has shape {list(scale.shape)}: not for INT8")
    yield from _check_type(graph, node, number.size)
    if is_quantize(node) and number.size > 1 and not graph.is_constant(node.input[0]):
        why = f"an activation with {number.size} scales is accepted, but its matmul does not run in INT8"
        yield finding("per-channel-activation", node, why)


def _check_type(graph: CheckGraph, node: onnx.NodeProto, scales: int) -> Iterator[FindingRow]:
    quantized = graph.types.get(node.output[0] if is_quantize(node) else node.input[0], 0)
    point = _zero_point(graph, node)
    if quantized == TensorProto.UINT8:
        missing = " (QuantizeLinear without a zero point makes UINT8)" if point is None else ""
        why = f"TensorRT runs symmetric INT8 only, and this is UINT8{missing}"
        shifted = point is not None and bool(np.any(point))
        yield finding("uint8", node, why, None, "refused" if shifted else None)
        return
    if quantized not in (0, TensorProto.INT8):
        yield finding("not-int8", node, f"its quantized type is {type_name(quantized)}")
        return
    if point is None:
        return
    if np.any(point):
        value = point.reshape(-1)[np.flatnonzero(point.reshape(-1))[0]]
        yield finding("non-zero-zero-point", node, f"its zero point is {value}; TensorRT refuses all but 0")
    if point.size != scales:
        why = f"its zero point has {point.size} values and its scale {scales}; TensorRT refuses that"
        yield finding("zero-point-shape", node, why)


def check_matmuls(graph: CheckGraph) -> Iterator[FindingRow]:
    """Require Q/DQ on both inputs of a matmul or on neither."""
    attention = {node.output[0] for found in graph.attentions for node in (found.scores, found.context)}
    for node in graph.matmuls:
        first, second = graph.operands[node.output[0]]
        if node.output[0] not in attention and (first.dq is None) != (second.dq is None):
            with_dq, without = ("first", second) if first.dq is not None else ("second", first)
            why = (
                f"only its {with_dq} input has Q/DQ, the other comes from {without.stop}; "
                "the engine runs it in floating point without a word"
            )
            yield finding("half-quantized", node, why)


def check_attentions(graph: CheckGraph) -> Iterator[FindingRow]:
    """Require an attention to be in INT8 as a whole or not at all."""
    for attention in graph.attentions:
        with_dq = [part for part, operand in attention.operands.items() if operand.dq is not None]
        if not with_dq:
            continue
        if is_whole(attention):
            size = graph.head_size(attention)
            if size is not None and size not in limits_of().int8_head_sizes:
                why = f"its head size is {size}, and there is no fused INT8 attention for it"
                yield finding("attention-head-size", attention.scores, why)
            continue
        missing = [part for part in attention.operands if part not in with_dq]
        missing += [] if attention.output_quantized else ["the output"]
        early = attention.operands["q"].dq is None or attention.operands["k"].dq is None
        why = (
            f"Q/DQ is on {', '.join(with_dq)} but not on {', '.join(missing)}: the fused attention is lost, "
            "the engine is slower than FP16 and its logits can be wrong"
        )
        yield finding("partial-attention", attention.scores if early else attention.context, why)


def is_whole(attention: Attention) -> bool:
    """Do q, k, v, the softmax output and the output all have Q/DQ?"""
    return attention.output_quantized and all(part.dq is not None for part in attention.operands.values())


def check_protected(graph: CheckGraph) -> Iterator[FindingRow]:
    """Find Q/DQ on LayerNorm (also written out in primitive operators) and on softmax."""
    attentions = {attention.softmax.output[0] for attention in graph.attentions}
    for node in graph.nodes:
        if operator(node) in _NORMS:
            yield from _check_norm(graph, node)
        elif operator(node) == "ReduceMean" and _activation_dq(graph, node.input[0]):
            readers = graph.index.consumers.get(node.output[0], [])
            if any(operator(n) == "Sub" and node.input[0] in n.input for n in readers):
                yield finding("quantized-layernorm", node, "its LayerNorm reads a dequantized tensor")
        elif operator(node) in ("Softmax", "LogSoftmax"):
            if graph.behind_softmax(node)[1]:
                yield finding("quantized-softmax", node, "its input was quantized to INT8")
            if node.output[0] not in attentions and any(map(is_quantize, graph.reach(node.output[0], MOVES))):
                yield finding("quantized-softmax", node, "its output is quantized outside of attention")


def _check_norm(graph: CheckGraph, node: onnx.NodeProto) -> Iterator[FindingRow]:
    for name in node.input[:3]:
        operand = graph.operand(name) if name else None
        if operand is not None and operand.dq is not None:
            why = f"its input {name!r} comes from {finding_label(operand.dq)!r}"
            yield finding("quantized-layernorm", node, why)
            return


def _activation_dq(graph: CheckGraph, name: str) -> onnx.NodeProto | None:
    operand = graph.operand(name)
    return None if operand.constant else operand.dq


def check_weights(graph: CheckGraph) -> Iterator[FindingRow]:
    """Check the quantized weight of every matmul, and the order in which weights are stored."""
    for node in graph.matmuls:
        pair = graph.operands[node.output[0]]
        for position, operand in enumerate(pair):
            if operand.dq is not None and operand.constant:
                yield from _check_weight(graph, node, position, operand)
                yield from _check_overflow(graph, node, operand, pair[1 - position])
    yield from _check_order(graph)


def _check_weight(
    graph: CheckGraph, node: onnx.NodeProto, position: int, weight: Operand
) -> Iterator[FindingRow]:
    dq = weight.dq
    assert dq is not None
    source = graph.index.producers.get(dq.input[0])
    if source is not None and is_quantize(source):
        why = "its weight is stored in floating point with Q/DQ, so the file is 2 to 4 times larger"
        yield finding("float-weight", source, why)
    scale, shape = graph.value(dq.input[1]), graph.shape(dq.input[0])
    if scale is None or scale.size < 2 or scale.ndim > 1 or not shape:
        return
    rank = len(shape)
    axis = attribute(dq, "axis", 1)
    axis += rank if axis < 0 else 0
    sizes = f"weight {shape}, {scale.size} scales along axis {axis}"
    if not 0 <= axis < rank or shape[axis] != scale.size:
        yield finding("wrong-weight-axis", dq, f"{sizes}: they do not fit")
        return
    if weight.reshaped or rank < 2:
        return
    wanted = _channel_axis(node, position, weight, rank)
    if wanted is None:
        why = f"{sizes}: a Transpose between it and {finding_label(node)!r} does not fit these axes"
        yield finding("wrong-weight-axis", dq, why)
    elif wanted != axis:
        why = f"{sizes}, but the output channels of {finding_label(node)!r} are axis {wanted}"
        yield finding("wrong-weight-axis", dq, f"{why}; it is accepted and does not run in INT8")


def _channel_axis(node: onnx.NodeProto, position: int, weight: Operand, rank: int) -> int | None:
    """Return the axis of the output channels of a weight in the frame of its DequantizeLinear.

    None: a Transpose on the way permutes other axes than these.
    """
    axis = rank - 1 if position == 1 else rank - 2
    if node.op_type == "Gemm" and attribute(node, "transB" if position == 1 else "transA"):
        axis = rank - 1 - axis
    for permutation in weight.permutations:
        if permutation is not None and sorted(permutation) != list(range(rank)):
            return None
        axis = rank - 1 - axis if permutation is None else permutation[axis]
    return axis


def _check_overflow(
    graph: CheckGraph, node: onnx.NodeProto, weight: Operand, other: Operand
) -> Iterator[FindingRow]:
    assert weight.dq is not None
    scale = graph.value(weight.dq.input[1])
    if scale is None or scale.size < 2 or other.dq is None:
        return
    types = [graph.types.get(dq.input[1], 0) for dq in (weight.dq, other.dq)]
    if TensorProto.FLOAT16 in types:
        which = "weight" if types[0] == TensorProto.FLOAT16 else "activation"
        why = (
            f"its {which} scale is FP16 and the weight has {scale.size} scales: TensorRT-RTX stores the "
            f"INT32 sums as FP16 before scaling, and sums over {FP16_MAX:.0f} become infinite"
        )
        yield finding("fp16-overflow", node, why)


def _check_order(graph: CheckGraph) -> Iterator[FindingRow]:
    """Make one finding for all weights stored [K, N]: an exporter writes all of a model in one order."""
    linears, slow = 0, []
    for node in graph.matmuls:
        pair = graph.operands[node.output[0]]
        if pair[1].constant and all(map(graph.is_int8, pair)):
            linears += 1
            slow += [finding_label(node)] if is_stored_kn(graph, node) else []
    if not slow:
        return
    if len(slow) == 1:
        which = "its INT8 weight is"
    elif len(slow) == linears:
        which = f"all {linears} INT8 weights are"
    else:
        which = f"{len(slow)} of {linears} INT8 weights ({name_list(slow)}) are"
    why = (
        f"{which} stored [K, N]: INT8 tensor cores read both operands along K, so a kernel can be in INT8 "
        "and slower than in FP16, which shows in its time alone"
    )
    yield finding("slow-weight-order", slow[0], why)


def is_stored_kn(graph: CheckGraph, node: onnx.NodeProto) -> bool:
    """Return whether the INT8 codes of the second operand are contiguous along N; False where unknown."""
    operands = graph.operands.get(node.output[0])  # none of another domain's MatMul
    if operands is None:
        return False
    weight = operands[1]
    shape = graph.shape(weight.dq.input[0]) if weight.dq is not None and weight.constant else None
    if shape is None or len(shape) != 2 or min(shape) < 2 or weight.reshaped:
        return False  # with a single channel both orders are one
    return _channel_axis(node, 1, weight, len(shape)) == 1


def check_residuals(
    graph: CheckGraph, added: Collection[ResidualAdd], expected: Collection[str] | None
) -> Iterator[FindingRow]:
    """Find INT8 residuals that no recipe asks for, or that are rounded unlike their tensor's other readers.

    The latter is slow and not wrong: a warning, and an error in a file that is held to a recipe.

    Args:
        expected: modules that the recipe wants in INT8; None: no recipe.
    """
    for residual in added:
        if residual.dq is None:
            continue
        if expected is not None and residual.module not in expected:
            why = f"its residual is in INT8, but the recipe keeps that of {residual.module} in floating point"
            yield finding("recipe-surplus", residual.add, why)
        elif other := find_other_rounding(graph.index, residual):
            why = (
                f"its residual and {finding_label(other)!r} round one tensor with scales of two values or "
                "types, so the engine keeps it in floating point and in INT8"
            )
            yield finding("split-residual", residual.add, why, None if expected is None else "error")
        elif expected is None:
            norm, dq = finding_label(residual.norm), finding_label(residual.dq)
            why = f"what {norm!r} adds comes from {dq!r}; that costs accuracy"
            yield finding("quantized-residual", residual.add, why)


def missing_residuals(found: Collection[ResidualAdd], expected: Collection[str]) -> Iterator[FindingRow]:
    """Return the residuals that the recipe wants in INT8 and that have no Q/DQ."""
    for residual in found:
        if residual.module in expected and residual.dq is None:
            why = f"the recipe asks for the residual of {residual.module} in INT8, and neither input has Q/DQ"
            yield finding("recipe-missing", residual.add, why)


ORDER = "slow-weight-order"
State = Literal["INT8", "refused", "not INT8", "floating point"]


class GemmRow(Strict):
    """One node that multiplies matrices.

    "refused": in a form of INT8 that TensorRT does not take; "not INT8": with Q/DQ that make no INT8 kernel.
    """

    node: str
    operator: str
    state: State
    codes: list[str] = []  # of findings at it, or at the Q/DQ behind its inputs


class Group(Strict):
    """Findings of one code."""

    code: str
    rows: list[FindingRow]
    gemms: list[str]  # nodes that they touch


def gemm_rows(graph: CheckGraph, findings: Sequence[FindingRow]) -> list[GemmRow]:
    """Return every matrix product with what happens to it, in the order of the graph."""
    found: dict[str, list[FindingRow]] = defaultdict(list)
    for row in findings:
        found[row.node].append(row)
    apart = _attentions_apart(graph, found)
    slow = any(row.code == ORDER for row in findings)  # one finding names one of them for all
    rows = []
    for node in graph.nodes:
        if node.op_type in PRODUCTS and node.output:
            name = finding_label(node)
            touching = [row for label in (name, *_behind(graph, node)) for row in found.get(label, ())]
            state = _state(graph, node, touching, name in apart)
            codes = list(dict.fromkeys(row.code for row in touching))
            if slow and node.op_type in MATMULS and ORDER not in codes and is_stored_kn(graph, node):
                codes.append(ORDER)
            rows.append(GemmRow(node=name, operator=node.op_type, state=state, codes=codes))
    return rows


def group_findings(findings: Sequence[FindingRow], gemms: Sequence[GemmRow]) -> list[Group]:
    """Group findings by code, in their order."""
    found: dict[str, list[FindingRow]] = defaultdict(list)
    for row in findings:
        found[row.code].append(row)
    return [
        Group(code=code, rows=rows, gemms=[row.node for row in gemms if code in row.codes])
        for code, rows in found.items()
    ]


def _state(graph: CheckGraph, node: onnx.NodeProto, touching: Sequence[FindingRow], apart: bool) -> State:
    if is_integer(node):
        return "refused"
    operands = graph.operands.get(node.output[0], ())
    effects = {row.effect for row in touching}
    if not any(operand.dq is not None for operand in operands):
        return "floating point"
    if "refused" in effects:
        return "refused"
    lost = apart or "not INT8" in effects or not all(map(graph.is_int8, operands))
    return "not INT8" if lost else "INT8"


def _attentions_apart(graph: CheckGraph, found: dict[str, list[FindingRow]]) -> set[str]:
    """Return the products of attentions in INT8 that no fused kernel takes."""
    apart = set()
    for attention in graph.attentions:
        names = {finding_label(node) for node in (attention.scores, attention.context)}
        codes = {row.code for name in names for row in found.get(name, ())}
        if codes & {"partial-attention", "attention-head-size"}:
            apart |= names
    return apart


def _behind(graph: CheckGraph, node: onnx.NodeProto) -> Iterator[str]:
    """Return the Q and DQ that the operands of a product come through."""
    for position in (0, PRODUCTS[node.op_type]):
        name = node.input[position] if position < len(node.input) else ""
        for _ in range(MAX_STEPS):
            maker = graph.index.producers.get(name)
            if maker is None:
                break
            if is_quantize(maker) or is_dequantize(maker):
                yield finding_label(maker)
            elif operator(maker) not in (*MOVES, "Mul", "Div"):
                break
            name = next(iter(maker.input), "")


class CheckReport(Tabular):
    """What `check` found; node names are those of the file."""

    ir_version: int
    opset: int
    findings: list[FindingRow] = []  # errors first, each in the order of the graph
    gemms: list[GemmRow] = []  # every node that multiplies matrices, and what an engine makes of it
    quantized: list[str] = []  # MatMul and Gemm nodes with INT8 behind both inputs, refused or not
    not_quantized: list[str] = []
    attention_quantized: list[str] = []  # Softmax nodes of attentions that are wholly in INT8
    attention_not_quantized: list[str] = []
    residual_quantized: list[str] = []  # LayerNormalization nodes that add a dequantized tensor

    @property
    def errors(self) -> list[FindingRow]:
        """Findings that break or silently change the engine."""
        return [row for row in self.findings if row.severity == "error"]

    @property
    def refusals(self) -> list[FindingRow]:
        """Findings for which TensorRT builds no engine at all."""
        return [row for row in self.findings if row.effect == "refused"]

    @property
    def groups(self) -> list[Group]:
        """Findings of one code together."""
        return group_findings(self.findings, self.gemms)

    @property
    def counts(self) -> dict[str, int]:
        """GEMMs by what an engine makes of them, and findings: the figures of every summary."""
        states = Counter(row.state for row in self.gemms)
        return {
            "gemms": len(self.gemms),
            "int8": 0 if self.refusals else states["INT8"],
            "refused": states["refused"],
            "not_int8": states["not INT8"],
            "floating_point": states["floating point"],
            "findings": len(self.findings),
            "errors": len(self.errors),
            "refusals": len(self.refusals),
        }

    def rows(self) -> list[FindingRow]:
        """Return one row a finding."""
        return self.findings


def to_json(report: CheckReport) -> dict[str, Any]:
    """Return the report as JSON values."""
    return report.model_dump(mode="json") | {"counts": report.counts}


def check_file(
    path: Path, *, expected_quantized: Collection[str] | None = None, allow: Collection[str] = ()
) -> CheckReport:
    """Check an ONNX file of any origin; arguments and result are those of `check_model`.

    Raises:
        UserError: the file or its external data is missing, empty, truncated, corrupted or not ONNX.
    """
    _check_allow(allow)
    try:
        return check_model(read_model(path), expected_quantized=expected_quantized, allow=allow)
    except UserError as error:
        raise error if str(path) in str(error) else UserError(f"{path}: {error}") from error


def check_model(
    model: onnx.ModelProto, *, expected_quantized: Collection[str] | None = None, allow: Collection[str] = ()
) -> CheckReport:
    """Check a model whose external data, if any, were loaded.

    Args:
        model: not changed.
        expected_quantized: module paths such as `bert.encoder.layer.0.output.dense`, as `graph.module_of`
            reads them from node names: every MatMul and Gemm of these modules must be in INT8 and no
            other. The two matmuls of an attention belong to its module, such as
            `bert.encoder.layer.0.attention.self`; what a LayerNorm adds belongs to the module that adds it,
            such as `bert.encoder.layer.0.attention.output`. Empty: nothing may be in INT8. None: not
            compared.
        allow: codes of findings to leave out, such as `quantized-residual`.

    Raises:
        UserError: the model holds no graph, its names or tensors are corrupted, or `allow` names no code.
    """
    _check_allow(allow)
    report = _check(model, expected_quantized)
    report.findings = [row for row in report.findings if row.code not in allow]
    report.findings.sort(key=lambda row: row.severity)  # stable, and "error" sorts before "warning"
    return report


def _check_allow(allow: Collection[str]) -> None:
    unknown = sorted(set(allow) - set(CODES))
    if unknown:
        near = difflib.get_close_matches(unknown[0], CODES, n=3, cutoff=0.3) or list(CODES)
        raise UserError(f"no finding is called {', '.join(unknown)}; did you mean {', '.join(near)}?")


def _check(model: onnx.ModelProto, expected: Collection[str] | None) -> CheckReport:
    validate_names(model)
    validate_tensors(model)
    opset = opset_of(model)
    if not opset or not model.graph.node:
        raise UserError("the model holds no graph with ONNX operators; export the model again")
    report = CheckReport(ir_version=model.ir_version, opset=opset)
    report.findings = list(_unreadable(model, opset))
    if report.findings:
        return report
    types, mixes = walk_types(model, opset)
    graph = CheckGraph(model, types)
    added = find_residuals(graph.index)
    report.residual_quantized = [finding_label(found.norm) for found in added if found.dq is not None]
    report.findings = [
        *mixes,
        *_check_opset(graph, opset),
        *check_operators(graph),
        *check_pairs(graph),
        *check_matmuls(graph),
        *check_weights(graph),
        *check_attentions(graph),
        *check_protected(graph),
        *check_residuals(graph, added, expected),
        *check_constants(graph),
    ]
    for node in graph.matmuls:
        both = all(graph.is_int8(operand) for operand in graph.operands[node.output[0]])
        (report.quantized if both else report.not_quantized).append(finding_label(node))
    for attention in graph.attentions:
        whole = is_whole(attention) and all(map(graph.is_int8, attention.operands.values()))
        (report.attention_quantized if whole else report.attention_not_quantized).append(
            finding_label(attention.softmax)
        )
    if expected is not None:
        report.findings += _compare(report, graph, added, set(expected))
    report.gemms = gemm_rows(graph, report.findings)
    return report


def _unreadable(model: onnx.ModelProto, opset: int) -> Iterator[FindingRow]:
    """Return the faults that keep the other rules from being applied."""
    name = model.graph.name or "graph"
    if not 10 <= opset <= 1000:
        yield finding("opset-too-low" if opset < 10 else "invalid-onnx", name, f"its opset is {opset}")
    elif invalid := _invalid(model):
        per_channel = [n for n in model.graph.node if opset < 13 and _has_axis(n)]
        if per_channel:
            why = f"{len(per_channel)} nodes have per-channel Q/DQ, which opset {opset} does not have"
            yield finding("opset-too-low", per_channel[0], why)
        else:
            yield invalid


def _has_axis(node: onnx.NodeProto) -> bool:
    return (is_quantize(node) or is_dequantize(node)) and any(item.name == "axis" for item in node.attribute)


def _check_opset(graph: CheckGraph, opset: int) -> Iterator[FindingRow]:
    qdq = (n for n in graph.nodes if (is_quantize(n) or is_dequantize(n)) and not n.domain)
    halves = [node for node in qdq if graph.types.get(node.input[1]) in HALVES]
    if opset < 19 and halves:
        why = f"{len(halves)} nodes have scales in half precision; ONNX Runtime refuses that in opset {opset}"
        yield finding("opset-too-low", halves[0], why, None, "not portable")


def _invalid(model: onnx.ModelProto) -> FindingRow | None:
    """Return what onnx.checker says about the structure, without weights so that none is copied."""
    bare = onnx.ModelProto(ir_version=model.ir_version)
    bare.opset_import.extend(model.opset_import)
    bare.functions.extend(model.functions)
    bare.graph.name = model.graph.name or "graph"
    bare.graph.node.extend(model.graph.node)
    bare.graph.output.extend(model.graph.output)
    bare.graph.input.extend(model.graph.input)
    known = {value.name for value in model.graph.input}
    stored = [(tensor.name, tensor) for tensor in model.graph.initializer]
    stored += [(sparse.values.name, sparse.values) for sparse in model.graph.sparse_initializer]
    for name, tensor in stored:
        if name not in known:
            value = onnx.helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims))
            bare.graph.input.append(value)
    try:
        onnx.checker.check_model(bare)
    except onnx.checker.ValidationError as error:
        reason, _, context = str(error).partition("==> Context:")
        name = context.partition("Name: ")[2].partition(" OpType:")[0]
        return finding("invalid-onnx", name or bare.graph.name, " ".join(reason.split()) or "not valid ONNX")
    incomplete = ((node, missing_arguments(node)) for node in model.graph.node)
    return next((finding("invalid-onnx", node, why) for node, why in incomplete if why), None)


def _compare(
    report: CheckReport, graph: CheckGraph, added: list[ResidualAdd], expected: set[str]
) -> Iterator[FindingRow]:
    """Compare the quantized set with the modules that a recipe wants in INT8."""
    if expected and not any(is_dequantize(node) for node in graph.nodes):
        why = f"the recipe asks for INT8 in {len(expected)} modules, and the file has no Q/DQ at all"
        yield finding("no-qdq", graph.index.graph.name or "graph", why)
        return
    modules: dict[str, list[str]] = defaultdict(list)
    for node in graph.matmuls:
        modules[module_of(node.name)].append(finding_label(node))
    quantized = set(report.quantized)
    added = [found for found in added if found.module not in modules]
    yield from missing_residuals(added, expected)
    for module in sorted(expected - {found.module for found in added}):
        if module not in modules:
            near = difflib.get_close_matches(module, modules, n=3)
            why = (
                f"the file has no MatMul or Gemm of this module; the nearest are {', '.join(near) or 'none'}"
            )
            yield finding("recipe-missing", module, why)
        for name in modules.get(module, ()):
            if name not in quantized:
                yield finding("recipe-missing", name, f"the recipe asks for INT8 in {module}")
    for module, names in modules.items():
        for name in names:
            if module not in expected and name in quantized:
                why = f"it is in INT8, but the recipe keeps {module or 'it'} in floating point"
                yield finding("recipe-surplus", name, why)


def summary(report: CheckReport) -> list[str]:
    """Summarize what TensorRT would run of the file, its attentions, and the number of findings."""
    return [_gemms(report), *_attentions(report), _findings(report)]


def _gemms(report: CheckReport) -> str:
    counts = report.counts
    if not report.gemms:
        return "no matrix products were looked into"
    refused = Counter(row.operator for row in report.gemms if row.state == "refused")
    parts = [
        f"{counts['refused']} in INT8 that it refuses ({_operators(refused)})" if refused else "",
        f"{counts['not_int8']} with Q/DQ that make no INT8 kernel" if counts["not_int8"] else "",
        f"{counts['floating_point']} in floating point" if counts["floating_point"] else "",
    ]
    if report.refusals:
        taken = sum(row.state == "INT8" for row in report.gemms)
        parts.insert(1, f"{taken} in INT8 that it takes" if taken else "")
        of_all = f"; of {count_of(counts['gemms'], 'GEMM')}, {', '.join(filter(None, parts))}"
        return f"TensorRT refuses this file, so none of it runs in INT8{of_all}"
    rest = f"; {', '.join(filter(None, parts))}" if any(parts) else ""
    return f"{counts['int8']} of {count_of(counts['gemms'], 'GEMM')} run in INT8{rest}"


def _operators(refused: Counter[str]) -> str:
    return ", ".join(f"{count} {operator}" for operator, count in refused.most_common())


def _attentions(report: CheckReport) -> list[str]:
    whole, rest = len(report.attention_quantized), len(report.attention_not_quantized)
    if not whole or report.refusals:
        return []
    return [f"{whole} of {count_of(whole + rest, 'attention')} in INT8 as a whole"]


def _findings(report: CheckReport) -> str:
    counts = report.counts
    if not counts["findings"]:
        return "no findings"
    kinds = count_of(len(report.groups), "kind")
    errors = count_of(counts["errors"], "error")
    refusals = f", {counts['refusals']} of them refusals" if counts["refusals"] else ""
    return f"{count_of(counts['findings'], 'finding')} of {kinds}: {errors}{refusals}"
