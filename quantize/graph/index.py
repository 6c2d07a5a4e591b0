"""Small queries on an ONNX graph that many share: producers, consumers, constants and INT8 residuals."""

import math
import re
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from qdqbench.quantize.models.families.known import RUN, family_of
from qdqbench.quantize.utils.arrays import Array

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MATMULS = ("MatMul", "Gemm")
ONNX_DOMAINS = ("", "ai.onnx")
QDQ_DOMAINS = (*ONNX_DOMAINS, "com.microsoft")
QDQ = ("QuantizeLinear", "DequantizeLinear")
SAME_VALUES = ("Cast", "Identity", "Dropout", "Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze")
MOVES = (*SAME_VALUES, "Slice", "Gather", "Split", "Expand", "Tile")  # some values, or some several times
MAX_SHAPE = 64  # values of a constant that a shape may come from
MAX_STEPS = 64  # nodes of one walk, so that a hostile graph cannot make it long
# Operators that a walk passes, or a function that returns the tensors of a node at which it continues.
Through = Collection[str] | Callable[[onnx.NodeProto], Iterable[str]]
# The exporter writes equal initializers once, the others as Identity; a Reciprocal is of smoothing's factors.
FOLDED = ("Identity", "Cast", "Reciprocal")
_NUMBERS = [
    TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE, TensorProto.BOOL,
    TensorProto.INT8, TensorProto.UINT8, TensorProto.INT32, TensorProto.INT64,
]  # fmt: skip


class GraphIndex:
    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model
        self.graph = model.graph
        self._constants: dict[tuple[str, tuple[str, ...]], Array | None] = {}

    @cached_property
    def initializers(self) -> dict[str, onnx.TensorProto]:
        return {tensor.name: tensor for tensor in self.graph.initializer}

    @cached_property
    def producers(self) -> dict[str, onnx.NodeProto]:
        return {name: node for node in self.graph.node for name in node.output if name}

    @cached_property
    def consumers(self) -> dict[str, list[onnx.NodeProto]]:
        consumers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in self.graph.node:
            for name in filter(None, dict.fromkeys(node.input)):
                consumers[name].append(node)
        return consumers

    def back(
        self, name: str, through: Through, limit: int = MAX_STEPS
    ) -> Iterator[tuple[str, onnx.NodeProto | None]]:
        """Follow a tensor back: return it and what it is computed from, the nearest first.

        Each comes once, with its producer (None for inputs and constants). Operators in `through` are passed
        by their first input.
        """

        def sources(tensor: str) -> Iterable[str]:
            node = self.producers.get(tensor)
            return () if node is None else _pass(node, node.input, through)

        return ((tensor, self.producers.get(tensor)) for tensor in _walk(name, sources, limit))

    def forward(self, name: str, through: Through, limit: int = MAX_STEPS) -> Iterator[onnx.NodeProto]:
        """Return the nodes that read a tensor, also behind operators in `through`, the nearest first."""

        def results(tensor: str) -> Iterator[str]:
            readers = self.consumers.get(tensor, ())
            return (result for node in readers for result in _pass(node, node.output, through))

        tensors = _walk(name, results, limit)
        return islice((node for tensor in tensors for node in self.consumers.get(tensor, ())), limit)

    def origin(self, name: str, through: Through) -> tuple[onnx.NodeProto | None, str]:
        """Follow a tensor back as far as `through` goes; return the producer there, and the tensor."""
        *_, (tensor, node) = self.back(name, through)
        return node, tensor

    def scaled(self, node: onnx.NodeProto) -> tuple[str, onnx.TensorProto] | None:
        """Return the tensor that a Mul or Div scales by a constant, and this constant; else None."""
        if operator(node) not in ("Mul", "Div") or len(node.input) != 2:
            return None
        first, second = (self.stored(self.origin(name, SAME_VALUES)[1]) for name in node.input)
        if first is None and second is not None:
            return node.input[0], second
        if second is None and first is not None and node.op_type == "Mul":
            return node.input[1], first
        return None

    def stored(self, name: str) -> onnx.TensorProto | None:
        """Return the tensor of an initializer or a Constant node; None if computed, and for text."""
        tensor, node = self.initializers.get(name), self.producers.get(name)
        if tensor is None and node is not None and operator(node) == "Constant":
            tensor = read_constant(node)
        return None if tensor is None or tensor.data_type == TensorProto.STRING else tensor

    def constant(self, name: str, through: tuple[str, ...] = FOLDED) -> Array | None:
        """Return the number that a graph holds, directly or behind operators in `through`; else None."""
        if (name, through) not in self._constants:
            self._constants[name, through] = self._read_constant(name, through)
        return self._constants[name, through]

    def _read_constant(self, name: str, through: tuple[str, ...]) -> Array | None:
        walk = [*self.back(name, through)]
        if (tensor := self.stored(walk[-1][0])) is None:
            return None
        value: Array = numpy_helper.to_array(tensor)
        for node in (node for _, node in reversed(walk) if node is not None):
            with np.errstate(all="ignore"):
                if node.op_type == "Reciprocal":
                    value = np.asarray(np.reciprocal(value))
                elif node.op_type == "Transpose":
                    permutation = permutation_of(node)
                    if permutation is not None and sorted(permutation) != [*range(value.ndim)]:
                        return None
                    value = np.transpose(value, permutation)
                elif node.op_type == "Cast":
                    if (target := attribute(node, "to")) not in _NUMBERS:
                        return None
                    value = value.astype(onnx.helper.tensor_dtype_to_np_dtype(target))
        return None if value.dtype.kind in "OSUc" else value


def _walk(start: str, neighbors: Callable[[str], Iterable[str]], limit: int) -> Iterator[str]:
    """Return tensors from `start` on, the nearest first, each once and after `start` at most `limit`."""
    todo, seen = deque([start]), {start}
    while todo:
        yield (tensor := todo.popleft())
        for other in neighbors(tensor):
            if other not in seen and len(seen) <= limit:
                seen.add(other)
                todo.append(other)


def _pass(node: onnx.NodeProto, ends: Sequence[str], through: Through) -> Iterable[str]:
    if callable(through):
        return through(node)
    return ends[:1] if operator(node) in through else ()


def operator(node: onnx.NodeProto) -> str:
    """Return the operator of a node, with its domain where that is not ONNX's own."""
    known = node.domain in ONNX_DOMAINS or is_qdq(node)
    return str(node.op_type) if known else f"{node.domain}.{node.op_type}"


def is_qdq(node: onnx.NodeProto) -> bool:
    known = node.op_type in QDQ and node.domain in QDQ_DOMAINS
    return known and len(node.input) > 1 and bool(node.output)


def permutation_of(node: onnx.NodeProto) -> tuple[int, ...] | None:
    """Return the permutation of a Transpose; None: it reverses the axes."""
    return next((tuple(item.ints) for item in node.attribute if item.name == "perm"), None)


def read_constant(node: onnx.NodeProto) -> onnx.TensorProto | None:
    """Return the tensor in any attribute of a Constant or ConstantOfShape; None for text and sparse ones."""
    for item in node.attribute:
        if item.name == "value":
            tensor: onnx.TensorProto = item.t
            return tensor
        if kind := {"value_float": np.float32, "value_int": np.int64}.get(item.name.removesuffix("s")):
            return numpy_helper.from_array(np.asarray(onnx.helper.get_attribute_value(item), kind))
    return None


def argument(node: onnx.NodeProto, position: int) -> str:
    """Return the name of an input; empty where it is left out."""
    return str(node.input[position]) if position < len(node.input) else ""


def attribute(node: onnx.NodeProto, name: str, default: int = 0) -> int:
    return next((int(item.i) for item in node.attribute if item.name == name), default)


def module_of(node_name: str) -> str:
    """Return `bert.encoder.layer.0.output.dense` of `/bert/encoder/layer.0/output/dense/MatMul`."""
    return node_name.strip("/").rpartition("/")[0].replace("/", ".")


def count_attentions(gemms: Iterable[str], modules: Collection[str]) -> int:
    return sum(module_of(name) in modules for name in gemms) // 2


def replace_nodes(model: onnx.ModelProto, nodes: Iterable[onnx.NodeProto]) -> None:
    nodes = list(nodes)
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def rename_tensors(
    nodes: Iterable[onnx.NodeProto], names: Mapping[str, str], *, outputs: bool = False
) -> None:
    for node in nodes:
        for tensors in (node.input, node.output) if outputs else (node.input,):
            for position, name in enumerate(tensors):
                tensors[position] = names.get(name, name)


def store_constants(model: onnx.ModelProto, arrays: Mapping[str, Array]) -> None:
    """Add initializers, those of a shared layer once: each of its runs makes the same ones."""
    known = {tensor.name for tensor in model.graph.initializer}
    model.graph.initializer.extend(
        numpy_helper.from_array(array, name) for name, array in arrays.items() if name not in known
    )


def tensor_values(model: onnx.ModelProto) -> dict[str, onnx.TypeProto.Tensor]:
    """Return type and shape of all tensors but constants, inferred without the values of large ones."""
    bare = onnx.GraphProto(
        name=model.graph.name,
        node=model.graph.node,
        input=model.graph.input,
        output=model.graph.output,
        value_info=model.graph.value_info,
        initializer=[
            tensor
            if math.prod(tensor.dims) <= MAX_SHAPE
            else TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
            for tensor in model.graph.initializer
        ],
        sparse_initializer=model.graph.sparse_initializer,
    )
    without = onnx.ModelProto(
        ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions, graph=bare
    )
    inferred = onnx.shape_inference.infer_shapes(without, strict_mode=True).graph
    values = [*inferred.value_info, *inferred.input, *inferred.output]
    return {value.name: value.type.tensor_type for value in values}


def prune(model: onnx.ModelProto) -> None:
    """Remove nodes and initializers whose outputs nobody reads, in place."""
    graph = model.graph
    needed = {output.name for output in graph.output}
    kept = []
    for node in reversed(graph.node):  # exporters write nodes in topological order
        if any(name in needed for name in node.output):
            kept.append(node)
            needed.update(_reads(node))
    replace_nodes(model, reversed(kept))
    initializers = [tensor for tensor in graph.initializer if tensor.name in needed]
    del graph.initializer[:]
    graph.initializer.extend(initializers)


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    """Return the names that a node reads, inside of its subgraphs too."""
    yield from node.input
    for item in node.attribute:
        for graph in (*item.graphs, *([item.g] if item.HasField("g") else [])):
            yield from (output.name for output in graph.output)
            for inner in graph.node:
                yield from _reads(inner)


def opset_of(model: onnx.ModelProto) -> int:
    """Return the version of ONNX's own operators; 0 where a file does not say."""
    return next((int(entry.version) for entry in model.opset_import if entry.domain in ONNX_DOMAINS), 0)


_AGAIN = re.compile(r"(.+)_(\d+)")  # of a module's second call and all after it, as the exporter writes it


def name_runs(graph: onnx.GraphProto, model: "PreTrainedModel") -> None:
    """Name nodes of shared layers by module and run, in place: `/a/query_3/MatMul` is `/a/query/MatMul@3`."""
    family = family_of(model.config)
    if not family.shared_layers:
        return
    first: dict[str, int] = {}
    for run, layer in enumerate(family.runs(model)):
        first.setdefault(layer, run)
    modules = {name for name, _ in model.named_modules()}
    for node in graph.node:
        path, _, operator = node.name.rpartition("/")
        again = None if module_of(node.name) in modules else _AGAIN.fullmatch(path)
        path, call = (again[1], int(again[2])) if again else (path, 0)
        place = family.place(module_of(f"{path}/{operator}"))
        if place is not None:
            node.name = f"{path}/{operator}@{first[f'{place.layers}.{place.number}'] + call}"


def run_of(name: str) -> str:
    """Return `@3` of a node of run 3 of a shared layer; else empty."""
    run = RUN.search(name)
    return run[0] if run else ""


def use_of(name: str) -> str:
    """Return the module of a node, with `@run` of a shared one: `albert.encoder.(...).attention.query@3`."""
    return module_of(name) + run_of(name)


NORMS = ("LayerNormalization", "RMSNormalization", "GroupNormalization")


@dataclass(frozen=True)
class ResidualAdd:
    norm: onnx.NodeProto
    add: onnx.NodeProto
    dq: onnx.NodeProto | None  # behind one of its operands: the residual is INT8

    @property
    def module(self) -> str:
        return module_of(self.add.name)


def find_residuals(index: GraphIndex) -> list[ResidualAdd]:
    """Return every Add before a normalization, in the order of the graph."""
    added = []
    for norm in index.graph.node:
        known = norm.op_type in NORMS and norm.input
        add = index.origin(norm.input[0], SAME_VALUES)[0] if known else None
        if add is not None and add.op_type == "Add":
            behind = (_find_dq(index, name) for name in add.input)
            added.append(ResidualAdd(norm, add, next((dq for dq in behind if dq is not None), None)))
    return added


def list_int8_norms(model: onnx.ModelProto) -> list[str]:
    return [residual.norm.name for residual in find_residuals(GraphIndex(model)) if residual.dq is not None]


def find_other_rounding(index: GraphIndex, dq: onnx.NodeProto) -> onnx.NodeProto | None:
    """Return a QuantizeLinear of a residual's tensor with another scale or other factors than `dq`."""
    own, _ = index.origin(dq.input[0], SAME_VALUES)
    assert own is not None, "find_residuals saw the QuantizeLinear"
    root, rounding = _trace_rounding(index, own)
    node: onnx.NodeProto
    for node in index.graph.node:
        if node.op_type == "QuantizeLinear" and _stored(index, node.input[0]) is None:
            other, way = _trace_rounding(index, node)
            if other == root and way != rounding:
                return node
    return None


def _trace_rounding(index: GraphIndex, q: onnx.NodeProto) -> tuple[str, Any]:
    """Return the tensor that a Q rounds, before the factors of smoothing; its scale and these factors."""
    walk = [*index.back(q.input[0], partial(_unscale, index))]
    nodes = [node for _, node in walk if node is not None]
    factors = [(node.op_type, _value(pair[1])) for node in nodes if (pair := index.scaled(node))]
    scale = _stored(index, q.input[1])
    return walk[-1][0], [q.input[1] if scale is None else _value(scale), *factors]


def _find_dq(index: GraphIndex, name: str) -> onnx.NodeProto | None:
    """Return the DequantizeLinear of an activation behind a tensor, across moves and factors of smoothing."""
    dq, _ = index.origin(name, partial(_unscale, index))
    if dq is None or dq.op_type != "DequantizeLinear":
        return None
    q, _ = index.origin(dq.input[0], SAME_VALUES)
    quantized = q is not None and q.op_type == "QuantizeLinear"
    return dq if q is not None and quantized and _stored(index, q.input[0]) is None else None


def _unscale(index: GraphIndex, node: onnx.NodeProto) -> Iterable[str]:
    """Return what a node moves, or scales by a constant (factors of smoothing)."""
    pair = index.scaled(node)
    return _pass(node, node.input, SAME_VALUES) if pair is None else pair[:1]


def _value(tensor: onnx.TensorProto) -> tuple[int, bytes]:
    return tensor.data_type, numpy_helper.to_array(tensor).tobytes()


def _stored(index: GraphIndex, name: str) -> onnx.TensorProto | None:
    return index.stored(index.origin(name, SAME_VALUES)[1])


def type_name(elem_type: int) -> str:
    """Return `FLOAT16` for 10, and so on; the number itself for one that ONNX does not know."""
    try:
        return str(onnx.TensorProto.DataType.Name(elem_type))
    except ValueError:
        return f"type {elem_type}"
