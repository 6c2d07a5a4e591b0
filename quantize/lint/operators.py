"""Operators and types of a file against what engines of TensorRT-RTX made of them (`operators.json`).

`tools/measure_operators.py` builds a file for each, and writes what each version took, or refused.
"""

import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto

from qdqbench.quantize.graph.index import ONNX_DOMAINS, argument, attribute, is_qdq, type_name
from qdqbench.quantize.lint.findings import FindingRow, find_at
from qdqbench.quantize.lint.view import CheckGraph, has_plain_form, is_integer
from qdqbench.quantize.utils.limits import ATTENTION_HEAD_SIZES, ATTENTION_HEADS_TEXT

_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
REFUSED = "refused"
_DYNAMIC = ("DynamicQuantizeLinear", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM", "QAttention")


@cache
def read_measured() -> dict[str, Any]:
    """Return the tables: by label and outcome the versions that have it, or "all"."""
    path = Path(__file__).with_name("operators.json")
    tables: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return tables


def newest(table: str, label: str) -> str:
    """Return what the newest version made of a file, or "" where none was built."""
    measured = read_measured()
    version = measured["versions"][-1]
    outcomes = measured[table].get(label, {})
    return next((told for told, those in outcomes.items() if those == "all" or version in those), "")


def label_codes(kinds: Sequence[str], blocked: bool) -> str:
    """Return the name of a row: types of activation and weight ("float": no Q/DQ)."""
    return f"{' x '.join(kinds)}{' by block' * blocked}"


def is_taken(code: int) -> bool:
    """Return whether an engine takes Q/DQ of this type, whatever it multiplies in."""
    name = type_name(code)
    found = (newest("codes", label) for label in (f"{name} x {name}", f"float x {name}"))
    return any(told not in ("", REFUSED) for told in found)


def check_operators(graph: CheckGraph) -> Iterator[FindingRow]:
    """Find operators that TensorRT refuses, and nodes that nothing is known about."""
    functions = {(function.domain, function.name) for function in graph.index.model.functions}
    shapes = [value.type.tensor_type.shape.dim for value in graph.index.graph.input]
    batches = any(shape and shape[0].dim_value != 1 for shape in shapes)
    for node in graph.nodes:
        kind = node.op_type
        if is_integer(node):
            code = "unsupported-op" if has_plain_form(graph.index, node) else "no-plain-form"
            why = f"TensorRT does not parse {kind}; it takes INT8 from explicit Q/DQ only"
            yield find_at(code, node, why)
            if kind in _DYNAMIC and batches:
                why = (
                    f"{kind} has one range for all that it reads, so padding and other texts change the codes"
                )
                yield find_at("batch-dependent", node, why)
        elif is_qdq(node):
            continue
        elif node.domain == "com.microsoft":
            why = f"{kind} is ONNX Runtime's own, and TensorRT has no plugin of this name"
            yield find_at("onnxruntime-operators", node, why)
        elif any(item.HasField("g") or item.graphs for item in node.attribute):
            yield find_at("not-checked", node, f"the subgraphs of {kind} were not looked into")
        elif (node.domain, kind) in functions:
            yield find_at("not-checked", node, f"the local function {kind} was not looked into")
        elif node.domain not in ONNX_DOMAINS:
            why = f"{kind} of domain {node.domain!r} needs a plugin, and was not looked into"
            yield find_at("not-checked", node, why)
        elif kind == "Attention":
            yield from _check_attention(graph, node)
        else:
            yield from _check_measured(graph, node)


def _check_measured(graph: CheckGraph, node: onnx.NodeProto) -> Iterator[FindingRow]:
    kind = node.op_type
    floats = (graph.types.get(name, 0) for name in (*node.input, *node.output))
    code = next((each for each in floats if each in _FLOATS), TensorProto.FLOAT)
    measured, typed = read_measured(), f"{kind} {type_name(code)}"
    label = typed if typed in measured["operators"] else kind
    told = newest("operators", label)
    if told == REFUSED:
        which = f"{kind} in {type_name(code)}" if label == typed else kind
        why = f"TensorRT-RTX {measured['versions'][-1]} refuses {which} in each form that was tried"
        yield find_at("operator-refused", node, why)
    elif told in ("", "not told"):
        yield find_at("not-checked", node, f"no engine was built with {kind}, so nothing is known of it")
    elif others := measured["operators"][label].get(REFUSED):
        why = f"{kind} needs a newer TensorRT-RTX than {others[-1]}, which refuses it"
        yield find_at("operator-refused", node, why, "warning", "note")


def _check_attention(graph: CheckGraph, node: onnx.NodeProto) -> Iterator[FindingRow]:
    """Find what keeps ONNX's own Attention (opset 23) from its kernel, which multiplies in FP16 or BF16."""
    code, size = graph.types.get(node.input[0], 0), _head_size(graph, node)
    softcap = next((item.f for item in node.attribute if item.name == "softcap"), 0.0)
    masked = bool(argument(node, 3))
    taken, in_fp16 = (
        is_attention_taken(kind, size or ATTENTION_HEAD_SIZES[0], rank=_rank(node), masked=masked)
        for kind in (code, TensorProto.FLOAT16)
    )
    if code not in _FLOATS:
        yield find_at(
            "not-checked", node, f"its inputs are {type_name(code)}, with which no engine was built"
        )
    elif softcap or in_fp16 is False:
        why = f"its softcap is {softcap:g}" if softcap else f"its head size is {size}"
        kernels = f"a kernel takes a softcap of 0 and head sizes of {ATTENTION_HEADS_TEXT}"
        yield find_at("operator-refused", node, f"{why}; {kernels}")
    elif taken is None:
        why = f"its inputs are {type_name(code)} and its head size is {size}: it has no kernel of its own"
        yield find_at("not-checked", node, f"{why}, and engines were built of some such files only")
    elif not taken:
        why = f"its inputs are {type_name(code)}, and its kernels take FP16 and BF16 only"
        yield find_at("attention-operator", node, why)
    elif any(graph.operand(name).dq is not None for name in node.input[:3] if name):
        why = "its inputs have Q/DQ, which make no INT8 kernel of it: it multiplies in FP16"
        yield find_at("attention-operator", node, why, None, "not INT8")


def is_attention_taken(code: int, size: int, *, rank: int, masked: bool) -> bool | None:
    """Return whether an engine takes ONNX's Attention of a type and head size; None: some do.

    Without its kernel an engine may split it into single operators, which it does without a mask alone.
    """
    half = code != TensorProto.FLOAT
    if half and size in ATTENTION_HEAD_SIZES:
        return True
    if not masked and (rank == 3 or (half and 8 < size < ATTENTION_HEAD_SIZES[-1])):
        return None
    return False


def _rank(node: onnx.NodeProto) -> int:
    return 3 if attribute(node, "q_num_heads") else 4


def _head_size(graph: CheckGraph, node: onnx.NodeProto) -> int | None:
    """Return the head size of Attention where the file says it: q is [B, H, L, S], or [B, L, H * S]."""
    known = (*graph.index.graph.input, *graph.index.graph.value_info)
    value = next((value for value in known if value.name == node.input[0]), None)
    sizes = [size.dim_value for size in value.type.tensor_type.shape.dim] if value is not None else []
    if len(sizes) == _rank(node) == 3 and sizes[-1] > 0:
        return int(sizes[-1]) // int(attribute(node, "q_num_heads"))
    return int(sizes[-1]) if len(sizes) == 4 and sizes[-1] > 0 else None
