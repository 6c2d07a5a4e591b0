"""Check an ONNX file without a GPU: what will run in INT8, and what an engine would refuse or get wrong.

Rules come from what was measured with TensorRT and TensorRT-RTX: the parser refuses the file for some
mistakes; it accepts others, and the layer then silently runs in FP16 or gives wrong numbers.
"""

import difflib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from qdqbench.quantize.engine.layers import format_nodes
from qdqbench.quantize.graph import index
from qdqbench.quantize.graph.index import (
    MOVES,
    QDQ,
    ResidualAdd,
    argument,
    attribute,
    is_qdq,
    operator,
    type_name,
)
from qdqbench.quantize.graph.read import read_model, validate_names, validate_tensors
from qdqbench.quantize.lint.findings import (
    WORST_FIRST,
    Effect,
    Finding,
    FindingRow,
    find,
    find_at,
    finding_label,
    read_kinds,
)
from qdqbench.quantize.lint.operators import check_operators, is_taken, label_codes, newest
from qdqbench.quantize.lint.view import (
    PRODUCTS,
    CheckGraph,
    Operand,
    is_dequantize,
    is_integer,
    is_quantize,
    list_constants,
    missing_arguments,
)
from qdqbench.quantize.report.coverage import coverage, share
from qdqbench.quantize.utils.arrays import Array
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.limits import FP16_MAX, INT8_HEAD_SIZES
from qdqbench.quantize.utils.names import count_of, name_list
from qdqbench.quantize.utils.schema import Strict, Tabular

ORDER = "slow-weight-order"
FIX = "qdqbench fix "
BLOCKERS = ("mixed-types", "bad-scale")  # that stop `fix`: a type or a value that it would have to guess
MENDS = "`qdqbench fix`"  # in the advice of a place where they do not
State = Literal["INT8", "refused", "not INT8", "floating point"]
_HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
_FLOATS = (*_HALVES, TensorProto.FLOAT, TensorProto.DOUBLE)
_NORMS = (*index.NORMS, "com.microsoft.SkipLayerNormalization")
_BEHIND = (*MOVES, *QDQ, "Mul", "Div")  # a product, where a finding concerns it
# Operators through which a large constant stays as large.
_CARRIES = (*MOVES, "Add", "Sub", "Mul", "Div", "Where", "Concat", "Neg", "Max", "Sum")


class GemmRow(Strict):
    """One node that multiplies matrices."""

    node: str
    operator: str
    linear: bool = False  # a product with weights; else of two activations, as in attentions
    state: State  # refused: INT8 that TensorRT does not take; not INT8: with Q/DQ that make no INT8 kernel
    codes: list[str] = []  # of findings at it, or at the Q/DQ behind its inputs


class CheckReport(Tabular):
    """Findings of `check`; node names are those of the file."""

    ir_version: int
    opset: int
    findings: list[FindingRow] = []  # errors first, each in the order of the graph
    gemms: list[GemmRow] = []  # every node that multiplies matrices, and what an engine makes of it
    quantized: list[str] = []  # MatMul and Gemm nodes with INT8 behind both inputs, refused or not
    not_quantized: list[str] = []
    attention_quantized: list[str] = []  # Softmax nodes of attentions that are wholly in INT8
    attention_not_quantized: list[str] = []
    residual_quantized: list[str] = []  # LayerNormalization nodes that add a dequantized tensor

    def facts(self) -> dict[str, Any]:
        """Return what is shown of it."""
        counts = self.counts
        return {
            "INT8 linears": share(counts["int8_linears"], counts["linears"]),
            "errors": counts["errors"],
            "findings": counts["findings"],
        }

    @property
    def errors(self) -> list[FindingRow]:
        return [row for row in self.findings if row.severity == "error"]

    @property
    def refusals(self) -> list[FindingRow]:
        return [row for row in self.findings if row.effect == "refused"]

    @property
    def codes(self) -> dict[str, list[FindingRow]]:
        """The findings, by code."""
        by_code: dict[str, list[FindingRow]] = defaultdict(list)
        for row in self.findings:
            by_code[row.code].append(row)
        return by_code

    def grouped(self, path: Path | None = None) -> list[Finding]:
        """Return a finding for each code, the worst first; commands name the file at `path`."""
        found = [self._group(code, rows, path) for code, rows in self.codes.items()]
        return sorted(found, key=lambda each: WORST_FIRST.index(each.effect))

    def _group(self, code: str, rows: Sequence[FindingRow], path: Path | None) -> Finding:
        kind, gemms = read_kinds("graph")[code], self.gemms_of(code)
        fixes = kind.fixes
        stops = " and ".join(
            blocker
            for blocker in BLOCKERS
            if any(MENDS not in row.fix for row in self.codes.get(blocker, ()))
        )
        if code == "mixed-types" and not stops:
            fixes = (read_kinds("graph")["unsupported-op"].fixes[0], *fixes)
        if stops:
            fixes = tuple(f"correct {stops}, then {fix}" if fix.startswith(FIX) else fix for fix in fixes)
        nodes = gemms or [row.node for row in rows]
        example = f"{'for example ' * (len(rows) > 1)}{rows[0].node}: {rows[0].why}"
        return find(
            code,
            nodes=nodes,
            where=format_nodes([node.removesuffix("_quant") for node in nodes]),
            effect=min((row.effect or "note" for row in rows), key=WORST_FIRST.index),
            why=None if code == ORDER else example,
            fixes=fixes,
            shown=[path.name] if path else (),
            path=path,
            n=len(rows),
            gemms=len(gemms),
            all=len(self.gemms),
        )

    def gemms_of(self, code: str) -> list[str]:
        """Return the nodes of the GEMMs that a code touches."""
        return list(dict.fromkeys(gemm.node for gemm in self.gemms if code in gemm.codes))

    @property
    def counts(self) -> dict[str, int]:
        """GEMMs by what an engine makes of them, and findings: the figures of every summary."""
        states = Counter(row.state for row in self.gemms)
        linears = [row.state == "INT8" and not self.refusals for row in self.gemms if row.linear]
        return {
            "linears": len(linears),
            "int8_linears": sum(linears),
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
        return self.findings


def to_json(report: CheckReport) -> dict[str, Any]:
    return report.model_dump(mode="json") | {"counts": report.counts}


def check_file(
    path: Path,
    *,
    expected_quantized: Collection[str] | None = None,
    allow: Collection[str] = (),
    unsigned: bool = False,
) -> CheckReport:
    """Check an ONNX file of any origin as `check_model` does; UserError for one that cannot be read."""
    _check_allow(allow)
    try:
        model = read_model(path)
        return check_model(model, expected_quantized=expected_quantized, allow=allow, unsigned=unsigned)
    except UserError as error:
        raise error if str(path) in str(error) else UserError(f"{path}: {error}") from error


def check_model(
    model: onnx.ModelProto,
    *,
    expected_quantized: Collection[str] | None = None,
    allow: Collection[str] = (),
    unsigned: bool = False,
) -> CheckReport:
    """Check a model whose external data, if any, were loaded; it stays as it is.

    Args:
        expected_quantized: module paths such as `bert.encoder.layer.0.output.dense`, as `module_of` reads
            them: every MatMul and Gemm of these must be in INT8 and no other. The matmuls of an attention
            belong to its module (`(...).attention.self`), what a LayerNorm adds to the module that adds it
            (`(...).attention.output`). Empty: nothing may be in INT8. None: not compared.
        allow: codes of findings to leave out; UserError where it names none, or the model is corrupted.
        unsigned: the engine multiplies UINT8 activations with the zero point 0, as those of backend cuda.
    """
    _check_allow(allow)
    validate_names(model)
    validate_tensors(model)
    opset = index.opset_of(model)
    if not opset or not model.graph.node:
        raise UserError("the model holds no graph with ONNX operators; export the model again")
    report = CheckReport(ir_version=model.ir_version, opset=opset)
    report.findings = _list_unreadable(model, opset)
    if not report.findings:
        _apply_rules(report, CheckGraph(model, unsigned=unsigned), expected_quantized)
    report.findings = [row for row in report.findings if row.code not in allow]
    report.findings.sort(key=lambda row: row.severity)  # stable, and "error" sorts before "warning"
    return report


def _check_allow(allow: Collection[str]) -> None:
    codes = read_kinds("graph")
    if unknown := sorted(set(allow) - set(codes)):
        near = difflib.get_close_matches(unknown[0], codes, n=3, cutoff=0.3) or list(codes)
        raise UserError(f"no finding is called {', '.join(unknown)}; did you mean {', '.join(near)}?")


def _list_unreadable(model: onnx.ModelProto, opset: int) -> list[FindingRow]:
    name = model.graph.name or "graph"
    if not 10 <= opset <= 1000:
        return [find_at("opset-too-low" if opset < 10 else "invalid-onnx", name, f"its opset is {opset}")]
    invalid = _find_invalid(model)
    per_channel = [n for n in model.graph.node if is_qdq(n) and any(a.name == "axis" for a in n.attribute)]
    if invalid and opset < 13 and per_channel:
        why = f"{len(per_channel)} nodes have per-channel Q/DQ, which opset {opset} does not have"
        return [find_at("opset-too-low", per_channel[0], why)]
    return [invalid] if invalid else []


def _find_invalid(model: onnx.ModelProto) -> FindingRow | None:
    """Return what onnx.checker says about the structure, without weights so that none is copied."""
    given = {value.name for value in model.graph.input}
    stored = [*model.graph.initializer, *(sparse.values for sparse in model.graph.sparse_initializer)]
    weights = [
        onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
        for tensor in stored
        if tensor.name not in given
    ]
    bare = onnx.GraphProto(
        name=model.graph.name or "graph",
        node=model.graph.node,
        input=[*model.graph.input, *weights],
        output=model.graph.output,
    )
    for value in bare.output:  # ONNX Runtime and TensorRT find a shape that is left out
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.shape.SetInParent()
    imports = {"opset_import": model.opset_import, "functions": model.functions}
    try:
        onnx.checker.check_model(onnx.ModelProto(ir_version=model.ir_version, graph=bare, **imports))
    except onnx.checker.ValidationError as error:
        reason, _, context = str(error).partition("==> Context:")
        name = context.partition("Name: ")[2].partition(" OpType:")[0]
        return find_at("invalid-onnx", name or bare.name, " ".join(reason.split()) or "not valid ONNX")
    incomplete = ((node, missing_arguments(node)) for node in model.graph.node)
    return next((find_at("invalid-onnx", node, why) for node, why in incomplete if why), None)


def _apply_rules(report: CheckReport, graph: CheckGraph, expected: Collection[str] | None) -> None:
    added = index.find_residuals(graph.index)
    report.residual_quantized = [finding_label(each.norm) for each in added if each.dq is not None]
    for node in graph.matmuls:
        both = all(graph.is_int8(operand) for operand in graph.operands[node.output[0]])
        (report.quantized if both else report.not_quantized).append(finding_label(node))
    for attention in graph.attentions:
        whole = attention.is_whole and all(map(graph.is_int8, attention.operands.values()))
        names = report.attention_quantized if whole else report.attention_not_quantized
        names.append(finding_label(attention.softmax))
    own = (node for node in graph.nodes if operator(node) == "Attention")
    report.attention_not_quantized += map(finding_label, own)
    _advise_on_mixes(graph)
    report.findings = [
        *graph.mixes,
        *_check_opset(graph, report.opset),
        *check_operators(graph),
        *_check_pairs(graph),
        *_check_matmuls(graph),
        *_check_weights(graph),
        *_check_attentions(graph),
        *_check_protected(graph),
        *_check_residuals(graph, added, expected),
        *_check_constants(graph),
    ]
    if expected is not None:
        report.findings += _compare(report, graph, added, set(expected))
    report.gemms = _list_gemms(graph, report.findings)


def _advise_on_mixes(graph: CheckGraph) -> None:
    """Say where a mix is of the scales of dynamic quantization in FP16, which `fix` takes away."""
    nodes = {finding_label(node): node for node in graph.nodes} if graph.mixes else {}
    for row in graph.mixes:
        sources = (graph.index.producers.get(name) for name in nodes[row.node].input)
        if any(source is not None and source.op_type == "DynamicQuantizeLinear" for source in sources):
            row.fix = f"{MENDS} writes static scales instead"


def _list_gemms(graph: CheckGraph, findings: Sequence[FindingRow]) -> list[GemmRow]:
    by_node: dict[str, list[FindingRow]] = defaultdict(list)
    for row in findings:
        by_node[row.node].append(row)
    apart = set()  # products of attentions in INT8 that no fused kernel takes
    for attention in graph.attentions:
        names = {finding_label(node) for node in (attention.scores, attention.context)}
        codes = {row.code for name in names for row in by_node.get(name, ())}
        if codes & {"partial-attention", "attention-head-size"}:
            apart |= names
    slow = any(row.code == ORDER for row in findings)  # one finding names one of them for all
    gemms = []
    for node in graph.nodes:
        if node.op_type in PRODUCTS and node.output:
            name, read = finding_label(node), graph.operands.get(node.output[0], ())
            inputs = [argument(node, at) for at in (0, PRODUCTS[node.op_type])]
            behind = (maker for each in inputs for _, maker in graph.index.back(each, _BEHIND))
            qdq = (finding_label(maker) for maker in behind if maker is not None and is_qdq(maker))
            touching = [row for label in (name, *qdq) for row in by_node.get(label, ())]
            of_node = list(dict.fromkeys(row.code for row in touching))
            if slow and node.op_type in index.MATMULS and ORDER not in of_node and _is_stored_kn(graph, node):
                of_node.append(ORDER)
            state = _state(graph, node, touching, name in apart)
            linear = any(operand.constant for operand in read) or any(map(graph.is_constant, inputs))
            gemm = GemmRow(node=name, operator=node.op_type, linear=linear, state=state, codes=of_node)
            gemms += [gemm] * (2 if operator(node) == "Attention" else 1)  # q times k, and the result times v
    return gemms


def _state(graph: CheckGraph, node: onnx.NodeProto, touching: Sequence[FindingRow], apart: bool) -> State:
    operands = graph.operands.get(node.output[0], ())
    effects = {row.effect for row in touching}
    if is_integer(node):
        return "refused"
    if not any(operand.dq is not None for operand in operands):
        return "floating point"
    if "refused" in effects:
        return "refused"
    lost = apart or "not INT8" in effects or not all(map(graph.is_int8, operands))
    return "not INT8" if lost else "INT8"


def _compare(
    report: CheckReport, graph: CheckGraph, added: list[ResidualAdd], expected: set[str]
) -> Iterator[FindingRow]:
    if expected and not any(is_dequantize(node) for node in graph.nodes):
        why = f"the recipe asks for INT8 in {len(expected)} modules, and the file has no Q/DQ at all"
        yield find_at("no-qdq", graph.index.graph.name or "graph", why)
        return
    modules: dict[str, list[str]] = defaultdict(list)
    for node in graph.matmuls:
        modules[index.module_of(node.name)].append(finding_label(node))
    added = [residual for residual in added if residual.module not in modules]
    for residual in added:
        if residual.module in expected and residual.dq is None:
            why = f"the recipe asks for the residual of {residual.module} in INT8, and neither input has Q/DQ"
            yield find_at("recipe-missing", residual.add, why)
    quantized = set(report.quantized)
    for module in sorted(expected - {residual.module for residual in added}):
        if module not in modules:
            near = ", ".join(difflib.get_close_matches(module, modules, n=3)) or "none"
            why = f"the file has no MatMul or Gemm of this module; the nearest are {near}"
            yield find_at("recipe-missing", module, why)
        for name in modules.get(module, ()):
            if name not in quantized:
                yield find_at("recipe-missing", name, f"the recipe asks for INT8 in {module}")
    for module, names in modules.items():
        for name in names:
            if module not in expected and name in quantized:
                why = f"it is in INT8, but the recipe keeps {module or 'it'} in floating point"
                yield find_at("recipe-surplus", name, why)


def _check_opset(graph: CheckGraph, opset: int) -> Iterator[FindingRow]:
    qdq = (node for node in graph.nodes if is_qdq(node) and not node.domain)
    halves = [node for node in qdq if graph.types.get(node.input[1]) in _HALVES]
    if opset < 19 and halves:
        why = f"{len(halves)} nodes have scales in half precision; ONNX Runtime refuses that in opset {opset}"
        yield find_at("opset-too-low", halves[0], why, None, "not portable")


def _check_pairs(graph: CheckGraph) -> Iterator[FindingRow]:
    outputs = {value.name for value in graph.index.graph.output}
    for node in graph.nodes:
        if is_quantize(node):
            readers = graph.index.forward(node.output[0], MOVES)
            if node.output[0] not in outputs and not any(is_dequantize(n) or is_integer(n) for n in readers):
                yield find_at("q-without-dq", node, "no DequantizeLinear reads its output")
            yield from _check_scale(graph, node)
        elif is_dequantize(node):
            source, name = graph.index.origin(node.input[0], MOVES)
            if source is not None and is_quantize(source):
                if not _same_parameters(graph, source, node):
                    why = f"its scale, zero point or axis differs from that of {finding_label(source)!r}"
                    yield find_at("scale-mismatch", node, why)
                    yield from _check_scale(graph, node)
            elif source is None or graph.index.stored(name) is not None:  # a weight, or INT8 given as input
                yield from _check_scale(graph, node)
            elif not is_integer(source):
                maker = f"{source.op_type} {finding_label(source)!r}"
                yield find_at("dq-without-q", node, f"it reads {maker} instead of a QuantizeLinear")


def _same_parameters(graph: CheckGraph, q: onnx.NodeProto, dq: onnx.NodeProto) -> bool:
    same_axis = attribute(q, "axis", 1) == attribute(dq, "axis", 1)
    if same_axis and list(q.input[1:3]) == list(dq.input[1:3]):
        return True
    first, second = graph.value(q.input[1]), graph.value(dq.input[1])
    if first is None or second is None:
        return True  # computed: named as dynamic-scale
    points = [graph.zero_point(node) for node in (q, dq)]
    shifted = [point is not None and bool(np.any(point)) for point in points]
    return (same_axis or first.size == 1) and shifted[0] == shifted[1] and np.array_equal(first, second)


def _check_scale(graph: CheckGraph, node: onnx.NodeProto) -> Iterator[FindingRow]:
    scale = graph.value(node.input[1])
    if scale is None:
        yield find_at("dynamic-scale", node, "its scale is computed at run time and cannot be checked")
        return
    number = scale.astype(np.float64).reshape(-1)
    bad = np.flatnonzero(~(np.isfinite(number) & (number > 0)))
    if not number.size:
        yield find_at("bad-scale", node, "its tensor of scales is empty; the engine is not built")
    elif bad.size:
        taken = bool(np.all(number[bad] == np.inf))  # builds, and gives NaN
        why = f"its scale is {number[bad[0]]:g}"
        if number.size > 1:
            why = f"{bad.size} of its {number.size} scales are bad: {number[bad[0]]:g} at channel {bad[0]}"
        why += "; the engine gives NaN" if taken else "; the engine is not built"
        row = find_at("bad-scale", node, why, None, "wrong" if taken else None)
        if is_quantize(node) and not graph.is_constant(node.input[0]):
            row.fix = f"{MENDS} with --inputs calibrates it again"
        yield row
    yield from _check_type(graph, node, scale)
    if is_quantize(node) and number.size > 1 and not graph.is_constant(node.input[0]):
        why = f"an activation with {number.size} scales is accepted, but its matmul does not run in INT8"
        yield find_at("per-channel-activation", node, why)


def _check_type(graph: CheckGraph, node: onnx.NodeProto, scale: Array) -> Iterator[FindingRow]:
    quantized = graph.types.get(node.output[0] if is_quantize(node) else node.input[0], 0)
    point = graph.zero_point(node)
    shifted = point is not None and bool(np.any(point))
    if quantized not in (0, TensorProto.INT8, TensorProto.UINT8):
        name = type_name(quantized)
        if is_taken(quantized):
            yield find_at("other-codes", node, f"its quantized type is {name}, which does not run in INT8")
        else:
            yield find_at("not-int8", node, f"its quantized type is {name}")
        return
    if scale.ndim > 1 or attribute(node, "block_size"):
        effect: Effect | None = "not INT8" if node.output[0] in graph.weight_only else None
        yield find_at("blocked-scale", node, f"its scale has shape {list(scale.shape)}", None, effect)
    if quantized == TensorProto.UINT8 and (shifted or quantized not in graph.int8_types):
        missing = " (QuantizeLinear without a zero point makes UINT8)" if point is None else ""
        why = f"TensorRT runs symmetric INT8 only, and this is UINT8{missing}"
        refused = shifted or (is_dequantize(node) and graph.index.stored(node.input[0]) is not None)
        yield find_at("uint8", node, why, None, "refused" if refused else None)
    elif point is not None:
        if shifted:
            value = point.reshape(-1)[np.flatnonzero(point)[0]]
            why = f"its zero point is {value}; TensorRT refuses all but 0"
            yield find_at("non-zero-zero-point", node, why)
        if point.size != scale.size:
            why = f"its zero point has {point.size} values and its scale {scale.size}; TensorRT refuses that"
            yield find_at("zero-point-shape", node, why)


def _check_matmuls(graph: CheckGraph) -> Iterator[FindingRow]:
    attention = {node.output[0] for found in graph.attentions for node in (found.scores, found.context)}
    for node in graph.matmuls:
        first, second = graph.operands[node.output[0]]
        if first.dq is not None and second.dq is not None:
            kinds = [graph.types.get(dq.input[0], 0) for dq in (first.dq, second.dq)]
            names, blocked = [*map(type_name, kinds)], bool(attribute(second.dq, "block_size"))
            mixed = kinds[0] != kinds[1] and all(map(is_taken, kinds)) and not {*kinds} <= {*graph.int8_types}
            if mixed and newest("codes", label_codes(names, blocked)) == "refused":
                why = f"its inputs are {' and '.join(names)}, and an engine multiplies two of one type"
                yield find_at("not-int8", node, why)
        if node.output[0] not in attention and (first.dq is None) != (second.dq is None):
            with_dq, without = ("first", second) if first.dq is not None else ("second", first)
            why = (
                f"only its {with_dq} input has Q/DQ, the other comes from {without.stop}; "
                "the engine runs it in floating point without a word"
            )
            yield find_at("half-quantized", node, why)


def _check_attentions(graph: CheckGraph) -> Iterator[FindingRow]:
    for attention in graph.attentions:
        with_dq = [part for part, operand in attention.operands.items() if operand.dq is not None]
        if attention.is_whole:
            size = graph.head_size(attention)
            if size is not None and size not in INT8_HEAD_SIZES:
                why = f"its head size is {size}, and there is no fused INT8 attention for it"
                yield find_at("attention-head-size", attention.scores, why)
        elif with_dq:
            missing = [part for part in attention.operands if part not in with_dq]
            missing += [] if attention.output_quantized else ["the output"]
            early = attention.operands["q"].dq is None or attention.operands["k"].dq is None
            why = (
                f"Q/DQ is on {', '.join(with_dq)} but not on {', '.join(missing)}: the fused attention is "
                "lost, the engine is slower than FP16 and its logits can be wrong"
            )
            yield find_at("partial-attention", attention.scores if early else attention.context, why)


def _check_protected(graph: CheckGraph) -> Iterator[FindingRow]:
    """Find Q/DQ on LayerNorm (also written out in primitive operators) and on softmax."""
    attentions = {attention.softmax.output[0] for attention in graph.attentions}
    for node in graph.nodes:
        kind = operator(node)
        if kind in _NORMS:
            operands = ((name, graph.operand(name).dq) for name in node.input[:3] if name)
            name, dq = next((pair for pair in operands if pair[1] is not None), ("", None))
            if dq is not None:
                why = f"its input {name!r} comes from {finding_label(dq)!r}"
                yield find_at("quantized-layernorm", node, why)
        elif kind == "ReduceMean":
            operand = graph.operand(node.input[0])
            readers = graph.index.consumers.get(node.output[0], [])
            norm = any(operator(n) == "Sub" and node.input[0] in n.input for n in readers)
            if norm and operand.dq is not None and not operand.constant:
                yield find_at("quantized-layernorm", node, "its LayerNorm reads a dequantized tensor")
        elif kind in ("Softmax", "LogSoftmax"):
            if graph.find_before(node.input[0])[1]:
                yield find_at("quantized-softmax", node, "its input was quantized to INT8")
            if node.output[0] not in attentions and any(
                map(is_quantize, graph.index.forward(node.output[0], MOVES))
            ):
                yield find_at("quantized-softmax", node, "its output is quantized outside of attention")


def _check_weights(graph: CheckGraph) -> Iterator[FindingRow]:
    for node in graph.matmuls:
        pair = graph.operands[node.output[0]]
        for position, operand in enumerate(pair):
            if operand.dq is not None and operand.constant:
                yield from _check_weight(graph, node, position, operand.dq)
                yield from _check_overflow(graph, node, operand.dq, pair[1 - position].dq)
    yield from _check_order(graph)


def _check_weight(
    graph: CheckGraph, node: onnx.NodeProto, position: int, dq: onnx.NodeProto
) -> Iterator[FindingRow]:
    weight = graph.operands[node.output[0]][position]
    source = graph.index.producers.get(dq.input[0])
    if source is not None and is_quantize(source):
        why = "its weight is stored in floating point with Q/DQ, so the file is 2 to 4 times larger"
        yield find_at("float-weight", source, why)
    scale, shape = graph.value(dq.input[1]), graph.shape(dq.input[0])
    if scale is None or scale.size < 2 or scale.ndim > 1 or not shape:
        return
    rank = len(shape)
    axis = attribute(dq, "axis", 1)
    axis += rank if axis < 0 else 0
    sizes = f"weight {shape}, {scale.size} scales along axis {axis}"
    if not 0 <= axis < rank or shape[axis] != scale.size:
        yield find_at("wrong-weight-axis", dq, f"{sizes}: they do not fit", None, "refused")
        return
    if weight.reshaped or rank < 2:
        return
    channels = _channel_axis(node, position, weight, rank)
    if channels is None:
        why = f"{sizes}: a Transpose between it and {finding_label(node)!r} does not fit these axes"
        yield find_at("wrong-weight-axis", dq, why)
    elif channels != axis:
        why = f"{sizes}, but the output channels of {finding_label(node)!r} are axis {channels}"
        yield find_at("wrong-weight-axis", dq, f"{why}; it is accepted and does not run in INT8")


def _channel_axis(node: onnx.NodeProto, position: int, weight: Operand, rank: int) -> int | None:
    """Return the axis of the output channels at a weight's DQ; None if a Transpose permutes other axes."""
    axis = rank - 1 if position == 1 else rank - 2
    if node.op_type == "Gemm" and attribute(node, "transB" if position == 1 else "transA"):
        axis = rank - 1 - axis
    for permutation in weight.permutations:
        if permutation is not None and sorted(permutation) != list(range(rank)):
            return None
        axis = rank - 1 - axis if permutation is None else permutation[axis]
    return axis


def _check_overflow(
    graph: CheckGraph, node: onnx.NodeProto, dq: onnx.NodeProto, other: onnx.NodeProto | None
) -> Iterator[FindingRow]:
    scale = graph.value(dq.input[1])
    if scale is None or scale.size < 2 or other is None:
        return
    types = [graph.types.get(each.input[1], 0) for each in (dq, other)]
    if TensorProto.FLOAT16 in types:
        which = "weight" if types[0] == TensorProto.FLOAT16 else "activation"
        why = (
            f"its {which} scale is FP16 and the weight has {scale.size} scales: TensorRT-RTX stores the "
            f"INT32 sums as FP16 before scaling, and sums over {FP16_MAX:.0f} become infinite"
        )
        yield find_at("fp16-overflow", node, why)


def _check_order(graph: CheckGraph) -> Iterator[FindingRow]:
    """Make one finding for all weights stored [K, N]: an exporter writes all of a model in one order."""
    pairs = ((node, graph.operands[node.output[0]]) for node in graph.matmuls)
    linears = [node for node, pair in pairs if pair[1].constant and all(map(graph.is_int8, pair))]
    slow = [finding_label(node) for node in linears if _is_stored_kn(graph, node)]
    if not slow:
        return
    if len(slow) == 1:
        which = "its INT8 weight is"
    elif len(slow) == len(linears):
        which = f"all {len(linears)} INT8 weights are"
    else:
        which = f"{len(slow)} of {len(linears)} INT8 weights ({name_list(slow)}) are"
    why = (
        f"{which} stored [K, N]: INT8 tensor cores read both operands along K, so a kernel can be in INT8 "
        "and slower than FP16, which its time alone shows"
    )
    yield find_at(ORDER, slow[0], why)


def _is_stored_kn(graph: CheckGraph, node: onnx.NodeProto) -> bool:
    """Return whether the INT8 codes of the second operand are contiguous along N; False where unknown."""
    operands = graph.operands.get(node.output[0])  # none of another domain's MatMul
    if operands is None:
        return False
    weight = operands[1]
    shape = graph.shape(weight.dq.input[0]) if weight.dq is not None and weight.constant else None
    if shape is None or len(shape) != 2 or min(shape) < 2 or weight.reshaped:
        return False  # with a single channel both orders are one
    return _channel_axis(node, 1, weight, len(shape)) == 1


def _check_residuals(
    graph: CheckGraph, added: Collection[ResidualAdd], expected: Collection[str] | None
) -> Iterator[FindingRow]:
    """Find INT8 residuals that no recipe asks for, or that are rounded unlike their tensor's other readers.

    The latter is slow and not wrong: a warning, and an error in a file with a recipe (`expected`).
    """
    for residual in added:
        if residual.dq is None:
            continue
        if expected is not None and residual.module not in expected:
            why = f"its residual is in INT8, but the recipe keeps that of {residual.module} in floating point"
            yield find_at("recipe-surplus", residual.add, why)
        elif other := index.find_other_rounding(graph.index, residual.dq):
            why = (
                f"its residual and {finding_label(other)!r} round one tensor with scales of two values or "
                "types, so the engine keeps it in floating point and in INT8"
            )
            yield find_at("split-residual", residual.add, why, None if expected is None else "error")
        elif expected is None:
            norm, dq = finding_label(residual.norm), finding_label(residual.dq)
            why = f"what {norm!r} adds comes from {dq!r}; that costs accuracy"
            yield find_at("quantized-residual", residual.add, why)


def _check_constants(graph: CheckGraph) -> Iterator[FindingRow]:
    for tensor, name, node in _list_float_constants(graph):
        value = numpy_helper.to_array(tensor)
        value = value.astype(np.float32) if tensor.data_type == TensorProto.BFLOAT16 else value
        with np.errstate(all="ignore"):
            low, high = (float(value.min()), float(value.max())) if value.size else (0.0, 0.0)
        largest = low if -low > high else high
        if np.isnan(low) or np.isnan(high):
            yield find_at("nan-constant", node, f"its constant {name!r} holds NaN")
        elif abs(largest) > FP16_MAX:
            yield from _check_large(graph, name, node, largest)


def _list_float_constants(graph: CheckGraph) -> Iterator[tuple[TensorProto, str, onnx.NodeProto]]:
    """Return floating-point tensors with the first node that reads them as data (not as a Q/DQ's scale)."""
    for name, tensor, maker in list_constants(graph.index):
        shaped = [maker] if maker is not None and maker.op_type == "ConstantOfShape" else []
        readers = shaped or graph.index.consumers.get(name, [])
        nodes = [node for node in readers if not is_qdq(node) or node.input[0] == name]
        if nodes and tensor.data_type in _FLOATS:
            yield tensor, name, nodes[0]


def _check_large(graph: CheckGraph, name: str, node: onnx.NodeProto, largest: float) -> Iterator[FindingRow]:
    code = "constant-overflows-fp16"
    why = f"its constant {name!r} holds {largest:g}; FP16 ends at {FP16_MAX:g}"
    casts = (n for n in graph.index.forward(name, _CARRIES) if operator(n) == "Cast")
    if graph.types.get(name) == TensorProto.FLOAT16:
        why = f"its FP16 constant {name!r} holds {largest:g}, and -inf times 0, or a row of -inf, makes NaN"
        yield find_at(code, node, why)
    elif any(attribute(cast, "to") == TensorProto.FLOAT16 for cast in casts):
        yield find_at(code, node, f"{why}, and a Cast to FP16 behind it makes it infinite")
    elif not graph.has_fp16 and not is_quantize(node):  # else it stays in FP32, or is clipped by the Q
        yield find_at(code, node, f"{why}, so a conversion to FP16 makes it infinite", "warning", "note")


def summary(report: CheckReport) -> list[str]:
    counts = report.counts
    whole, rest = len(report.attention_quantized), len(report.attention_not_quantized)
    lines = [_summarize_gemms(report)]
    if whole and not report.refusals:
        lines.append(f"{coverage(whole, whole + rest, 'attentions')} as a whole")
    if not counts["findings"]:
        return [*lines, "no findings"]
    kinds, errors = count_of(len(report.codes), "kind"), count_of(counts["errors"], "error")
    refusals = f", {counts['refusals']} of them refusals" if counts["refusals"] else ""
    return [*lines, f"{count_of(counts['findings'], 'finding')} of {kinds}: {errors}{refusals}"]


def _summarize_gemms(report: CheckReport) -> str:
    counts = report.counts
    if not report.gemms:
        return "no matrix products were looked into"
    refused = Counter(row.operator for row in report.gemms if row.state == "refused").most_common()
    operators = ", ".join(f"{count} {kind}" for kind, count in refused)
    parts = [
        f"{counts['refused']} in INT8 that it refuses ({operators})" if refused else "",
        f"{counts['not_int8']} with Q/DQ that make no INT8 kernel" if counts["not_int8"] else "",
    ]
    if report.refusals:
        taken = sum(row.state == "INT8" for row in report.gemms)
        parts.insert(1, f"{taken} in INT8 that it takes" if taken else "")
        parts.append(f"{counts['floating_point']} in floating point" if counts["floating_point"] else "")
        of_all = f"; of {count_of(counts['gemms'], 'GEMM')}, {', '.join(filter(None, parts))}"
        return f"TensorRT refuses this file, so none of it runs in INT8{of_all}"
    weighted, products = counts["int8_linears"], counts["gemms"] - counts["linears"]
    linears = coverage(weighted, counts["linears"], "linears")
    if products:
        linears += f", {share(counts['int8'] - weighted, products)} products of activations"
    rest = f"; {', '.join(filter(None, parts))}" if any(parts) else ""
    return f"{linears}{rest}"
