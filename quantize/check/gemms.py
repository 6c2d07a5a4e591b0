"""What becomes of each matrix product in an engine of TensorRT, and findings of one kind together."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Literal

import onnx

from qdqbench.quantize.check.codes import finding_label
from qdqbench.quantize.check.operators import PRODUCTS, is_integer
from qdqbench.quantize.check.view import MOVES, CheckGraph, is_dequantize, is_quantize, operator
from qdqbench.quantize.check.weights import is_stored_kn
from qdqbench.quantize.core.results import FindingRow
from qdqbench.quantize.core.strict import Strict
from qdqbench.quantize.graph.index import MATMULS, MAX_STEPS

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
    """Every matrix product with what happens to it, in the order of the graph."""
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


def grouped(findings: Sequence[FindingRow], gemms: Sequence[GemmRow]) -> list[Group]:
    """Findings by code, in their order."""
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
    """The products of attentions in INT8 that no fused kernel takes."""
    apart = set()
    for attention in graph.attentions:
        names = {finding_label(node) for node in (attention.scores, attention.context)}
        codes = {row.code for name in names for row in found.get(name, ())}
        if codes & {"partial-attention", "attention-head-size"}:
            apart |= names
    return apart


def _behind(graph: CheckGraph, node: onnx.NodeProto) -> Iterator[str]:
    """The Q and DQ that the operands of a product come through."""
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
