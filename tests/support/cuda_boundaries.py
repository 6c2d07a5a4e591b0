"""Tensors of an exported graph at the boundaries of kernels, and what one kernel makes of the graph's own."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto

from qdqbench.eval.metrics.runners import session_of
from qdqbench.quantize.engine.cuda import check
from qdqbench.quantize.engine.cuda.interpret import compute
from qdqbench.quantize.engine.cuda.pack import order_rows
from qdqbench.quantize.engine.cuda.plan import Attention, Head, Plan
from qdqbench.quantize.engine.cuda.tokens import Tokens, pack_tokens

Arrays = Mapping[str, Any]


class Boundary(NamedTuple):
    """A tensor by one kernel from ONNX Runtime's inputs, against ONNX Runtime's."""

    operation: str  # kind of kernel
    reads: str  # kind of its input
    tensor: str
    int8: bool
    share: float  # of codes that differ
    largest: float  # steps; of FP16 tensors relative to the largest value


def run_tensors(graph: onnx.ModelProto, names: list[str], batch: Arrays) -> dict[str, Any]:
    """Tensors of a graph and its answers by ONNX Runtime, without optimizations."""
    seen = onnx.ModelProto()
    seen.CopyFrom(graph)
    answers = [value.name for value in graph.graph.output]
    names = [name for name in dict.fromkeys(names) if name not in answers]
    kinds = {name: node.op_type for node in graph.graph.node for name in node.output}
    for name in names:
        kind = TensorProto.INT8 if kinds[name] == "QuantizeLinear" else TensorProto.FLOAT
        seen.graph.output.append(onnx.helper.make_tensor_value_info(name, kind, None))
    session = session_of(seen.SerializeToString(), "the test's graph")
    return dict(zip([*answers, *names], session.run(None, dict(batch)), strict=True))


def packed_tensors(graph: onnx.ModelProto, plan: Plan, batch: Arrays, tokens: Tokens) -> dict[str, Any]:
    """Every tensor of a plan [T, width], as the graph has it, and its answers."""
    merged = {each.output: each.parts for each in plan.linears if each.parts}
    parts = {name: merged.get(name, (name,)) for name in plan.tensors}
    found = run_tensors(graph, [part for each in parts.values() for part in each], batch)

    def pack(array: Any) -> Any:
        rows = array.transpose(0, 2, 1, 3) if array.ndim == 4 else array  # heads stand before tokens
        return rows.reshape(*rows.shape[:2], -1)[tokens.kept]

    whole = {name: np.concatenate([pack(found[part]) for part in each], 1) for name, each in parts.items()}
    for each in (each for each in plan.linears if each.rotary):
        graph_width = whole[each.output].shape[1]
        own = graph_width // (plan.tensors[each.output].width // each.rotary)
        whole[each.output] = whole[each.output][:, order_rows(replace(each, rotary=own), graph_width)]
    for each in plan.attentions:
        for name in {*each.reads, each.output}:  # heads may be wider, by zeros
            heads = whole[name].reshape(len(whole[name]), plan.tensors[name].width // each.head_size, -1)
            spare = each.head_size - heads.shape[2]
            whole[name] = np.pad(heads, ((0, 0), (0, 0), (0, spare))).reshape(len(heads), -1)
    for name, tensor in plan.tensors.items():  # and so may tensors
        whole[name] = np.pad(whole[name], ((0, 0), (0, tensor.width - whole[name].shape[1])))
    answers = {value.name: found[value.name] for value in graph.graph.output}
    by_token = plan.head.pooling == "tokens"
    return {name: x if x.dtype == np.int8 else x.astype(check.HALF) for name, x in whole.items()} | {
        name: array[tokens.kept] if by_token else array for name, array in answers.items()
    }


def run_outputs(graph: onnx.ModelProto, batch: Arrays) -> dict[str, Any]:
    """The answers of a graph by ONNX Runtime, without optimizations."""
    names = [value.name for value in graph.graph.output]
    return dict(zip(names, _open(graph.SerializeToString()).run(None, dict(batch)), strict=True))


@lru_cache(maxsize=1)
def _open(graph: bytes) -> Any:
    return session_of(graph, "the graph")


def _kind_read(operation: Any, plan: Plan) -> str:
    """The kind of the tensor that an operation reads; tables are FP16."""
    read = operation.query.tensor if isinstance(operation, Attention) else getattr(operation, "input", None)
    return plan.tensors[read].kind if read else "fp16"


def require_boundaries(
    graph: onnx.ModelProto, plan: Plan, arrays: Arrays, batch: Arrays, share: float = 0.001
) -> None:
    """In FP32, codes of every kernel differ by a step and next to rounding borders alone."""
    for found in compare_boundaries(graph, plan, arrays, batch):
        assert found.largest <= (1 if found.int8 else 1e-4), found
        assert not found.int8 or found.share <= share, found


def compare_boundaries(
    graph: onnx.ModelProto, plan: Plan, arrays: Arrays, batch: Arrays
) -> Iterator[Boundary]:
    """Feed every kernel with the graph's own tensors."""
    tokens = pack_tokens(plan, arrays, batch)
    given = packed_tensors(graph, plan, batch, tokens)
    for operation in plan.operations:
        for name, made in compute(operation, plan, arrays, given, tokens).items():
            assert (made.shape, made.dtype) == (given[name].shape, given[name].dtype), name
            own = plan.tensors[name].own if name in plan.tensors else None
            off = np.abs(made.astype(np.float64) - given[name])[..., :own]
            int8 = made.dtype == np.int8
            largest = off.max() / (1 if int8 else np.abs(given[name]).max() + 1e-9)
            read = "fp32" if isinstance(operation, Head) else _kind_read(operation, plan)
            yield Boundary(operation.op, read, name, int8, float((off > 0).mean()), float(largest))
