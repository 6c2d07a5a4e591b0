"""Check an ONNX file without a GPU: what will run in INT8, and what an engine would refuse or get wrong.

Rules come from what was measured with TensorRT and TensorRT-RTX: some mistakes make the parser refuse the
file, others are accepted and the layer then runs in FP16, or gives wrong numbers, without a word.
"""

import difflib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import onnx

from qdqbench.quantize.graph.check.codes import CODES, finding, finding_label
from qdqbench.quantize.graph.check.rules import (
    HALVES,
    check_attentions,
    check_matmuls,
    check_operators,
    check_pairs,
    check_protected,
    check_residuals,
    check_weights,
    is_stored_kn,
    is_whole,
    missing_residuals,
)
from qdqbench.quantize.graph.check.types import check_constants, walk_types
from qdqbench.quantize.graph.check.view import (
    MOVES,
    PRODUCTS,
    CheckGraph,
    is_dequantize,
    is_integer,
    is_quantize,
    missing_arguments,
    operator,
)
from qdqbench.quantize.graph.index import MATMULS, MAX_STEPS, module_of, opset_of
from qdqbench.quantize.graph.read import read_model, validate_names, validate_tensors
from qdqbench.quantize.graph.residuals import ResidualAdd, find_residuals
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.names import count_of
from qdqbench.quantize.utils.results import FindingRow
from qdqbench.quantize.utils.schema import Strict, Tabular

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
