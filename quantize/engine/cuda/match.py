"""From an exported graph to a plan: backwards from its outputs, each tensor with the kernel that makes it.

The graph is in the form of the CPU runtimes: FP32, weights with a scale per output channel, operator Gelu. Every
node is covered once, by the pattern of one operation, with all its attributes; else the graph is refused.
"""

import operator
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import onnx
from onnx import TensorProto

from qdqbench.quantize.engine.cuda.plan import (
    Activation,
    Answer,
    Attention,
    Embed,
    Head,
    Linear,
    Norm,
    Operation,
    Plan,
    Pooling,
    Quantize,
    Step,
    StepKind,
    Tensor,
    View,
)
from qdqbench.quantize.graph.index import FOLDED, ONNX_DOMAINS, GraphIndex, module_of, opset_of
from qdqbench.quantize.models.attention import MASK_FILL
from qdqbench.quantize.models.inputs import MASK, TOKENS
from qdqbench.quantize.utils.arrays import Array
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.limits import FP16_MAX
from qdqbench.quantize.utils.names import name_list

TYPES = "token_type_ids"
SHARED = "constants and the mask"
Sizes = list[Any]  # of a shape: integers, "batch" and "length"
# of [batch, length, heads, size]: to heads first, and with the last two axes swapped
_SPLIT, _SPLIT_SWAPPED, _SWAPPED = [0, 2, 1, 3], [0, 2, 3, 1], [0, 1, 3, 2]
_NUMBERS = (np.float32, np.int8, np.int32, np.int64)
_CODES = " codes"  # behind the owner of nodes that round its tensor
_STEPS: dict[str, StepKind] = {"Tanh": "tanh", "Relu": "relu", "Sigmoid": "sigmoid"}
_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "Mul": operator.mul,
    "Equal": operator.eq,
    "Where": lambda condition, one, other: one if condition else other,
}


@dataclass(frozen=True)
class Match:
    """A plan and the numbers of the file, before they are packed for kernels.

    Args:
        constants: `LINEAR.weight` [N, K], `.weight_scale`, `.input_scale`, `.bias` and `.residual`;
            `ATTENTION.factor`, the scales of softmax and v; `TENSOR.multiplier`, factors of smoothing over the
            scale of a QuantizeLinear; tables and vectors of the rest as the plan names them.
    """

    plan: Plan
    constants: dict[str, Array]


@dataclass
class _Wanted:
    """Forms in which kernels read a tensor of the graph, and the names that they get."""

    half: bool = False
    codes: dict[tuple[bytes, float], str] = field(default_factory=dict)
    multipliers: dict[str, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class _Codes:
    """An activation behind Q and DQ: codes of `source`, whose value is `codes * scale / factors`."""

    name: str
    source: str
    scale: float


def match_graph(model: onnx.ModelProto) -> Match:
    """Return the plan of a graph; UserError names the nodes that no kernel covers."""
    return _Matcher(model).match()


class _Matcher:
    def __init__(self, model: onnx.ModelProto) -> None:
        self.index, self.opset = GraphIndex(model), opset_of(model)
        self.order = {name: i for i, node in enumerate(model.graph.node) for name in node.output}
        self.owners: dict[str, str] = {}  # of nodes, by their first output: the tensor that the kernel writes
        self.owner = SHARED
        self.wanted: dict[str, _Wanted] = {}
        self.made: dict[str, _Wanted] = {}
        self.shaped: dict[str, str] = {}  # tensors whose shape is read, and a node that does
        self.tensors: dict[str, Tensor] = {}
        self.constants: dict[str, Array] = {}
        self.operations: list[tuple[str, Operation]] = []  # with their owners, the last one first

    def match(self) -> Match:
        graph = self.index.graph
        if unknown := {value.name for value in graph.input} - {TOKENS, MASK, TYPES}:
            raise UserError(f"backend cuda takes no input {name_list(sorted(unknown))}")
        for value in (*graph.input, *graph.output):
            wanted = TensorProto.INT64 if value in graph.input else TensorProto.FLOAT
            if value.type.tensor_type.elem_type != wanted:
                raise UserError(f"backend cuda takes int64 inputs and float32 outputs, unlike {value.name}")
        self._head()
        while self.wanted:
            source = max(self.wanted, key=lambda name: self.order.get(name, -1))
            self.made[source] = wanted = self.wanted.pop(source)
            self.owner = source
            self._produce(source, wanted)
        read = [node for name, node in self.shaped.items() if name not in self.made]
        left = [_name(node) for node in graph.node if node.output[0] not in self.owners]
        if left or read:
            _refuse([*read, *left], "no pattern of an encoder holds them")
        plan = Plan(
            inputs=tuple(value.name for value in graph.input),
            tensors=self.tensors,
            operations=tuple(self._with_nodes()),
        )
        return Match(plan, self.constants)

    def _with_nodes(self) -> Iterable[Operation]:
        """Yield the operations in the order of computation, each with its nodes in that of the graph."""
        apart = {owner for owner, operation in self.operations if isinstance(operation, Quantize)}
        names = Counter(operation.name for _, operation in self.operations)
        if twice := [name for name, count in names.items() if count > 1]:
            raise UserError(f"backend cuda needs names of nodes that tell kernels apart, not {name_list(twice)}")
        owned = {SHARED}  # which the first operation covers
        for owner, operation in reversed(self.operations):
            quantize = isinstance(operation, Quantize)
            owned |= {f"{owner}{_CODES}"} if quantize else {owner}
            owned |= set() if owner in apart else {f"{owner}{_CODES}"}
            nodes = (node for node in self.index.graph.node if self.owners[node.output[0]] in owned)
            yield operation.model_copy(update={"nodes": tuple(map(_name, nodes))})
            owned = set()

    # nodes and constants

    def _kind(self, name: str) -> str:
        node = self.index.producers.get(name)
        return str(node.op_type) if node is not None and node.domain in ONNX_DOMAINS else ""

    def _take(
        self, name: str, *kinds: str, shared: bool = False, free: tuple[str, ...] = (), **attributes: Any
    ) -> onnx.NodeProto:
        """Cover the maker of a tensor, which is of one of `kinds`, with these attributes that are no defaults."""
        node = self.index.producers.get(name)
        if node is None:
            raise UserError(f"backend cuda expects {name} from a node of {' or '.join(kinds)}")
        if self._kind(name) not in kinds:
            _refuse([_name(node)], f"expected {' or '.join(kinds)}")
        schema = onnx.defs.get_schema(node.op_type, self.opset, "").attributes
        given: dict[str, Any] = {}
        for item in node.attribute:
            value, known = onnx.helper.get_attribute_value(item), schema.get(item.name)
            default = known.default_value if known is not None else None
            if item.name in free or (
                default is not None and default.type and value == onnx.helper.get_attribute_value(default)
            ):
                continue
            given[item.name] = value
        if given != attributes:
            _refuse([_name(node)], f"its attributes are {given}, expected {attributes}")
        if self.owners.setdefault(node.output[0], self.owner) != self.owner and not shared:
            _refuse([_name(node)], "two kernels would need it")
        return node

    def _number(self, name: str) -> Array | None:
        """Return a constant, and cover the nodes that it comes from; None: computed."""
        value = self.index.constant(name)
        while value is not None and (node := self.index.producers.get(name)) is not None:
            self.owners[node.output[0]] = SHARED
            name = node.input[0] if node.input else ""
        return value

    def _constant(self, node: onnx.NodeProto, position: int, ranks: tuple[int, ...] = (0,)) -> Array:
        """Return an input that is a finite constant of one of these ranks."""
        name = node.input[position] if position < len(node.input) else ""
        value = self._number(name)
        right = value is not None and value.dtype in _NUMBERS and value.ndim in ranks
        if value is None or not right or not np.isfinite(value).all():
            _refuse([_name(node)], f"its input {position} is no finite float32 or integer of rank {ranks}")
        return value

    def _split(self, node: onnx.NodeProto, ranks: tuple[int, ...] = (0, 1)) -> tuple[str, Array]:
        """Return the operands of an Add, Mul or the like of a tensor and a constant."""
        for position in (1, 0):
            if self.index.constant(node.input[position]) is not None:
                return node.input[1 - position], self._constant(node, position, ranks)
        _refuse([_name(node)], "neither input is a constant")

    def _axes(self, node: onnx.NodeProto, *axes: int) -> None:
        if self._constant(node, 1, (0, 1)).ravel().tolist() != [*axes]:
            _refuse([_name(node)], f"its axes are not {axes}")

    def _sizes(self, name: str) -> Sizes:
        """Return what a computed shape holds, symbols for the axes of the inputs."""
        value = self._number(name)
        if value is not None:
            return [int(size) for size in value.ravel()]
        node = self._take(name, "Shape", "Gather", "Unsqueeze", "Concat", "Reshape", "ConstantOfShape",
                          *_ELEMENTWISE, free=("axis", "value"), shared=True)  # fmt: skip
        match node.op_type:
            case "Shape":
                return self._shape(node)
            case "Gather":
                return [self._sizes(node.input[0])[int(self._constant(node, 1))]]
            case "Unsqueeze":
                self._axes(node, 0)
                return self._sizes(node.input[0])
            case "Reshape":
                self._axes(node, -1)
                return self._sizes(node.input[0])
            case "Concat":
                return [size for part in node.input for size in self._sizes(part)]
            case "ConstantOfShape":
                (count,) = self._sizes(node.input[0])
                return [int(onnx.numpy_helper.to_array(node.attribute[0].t)[0])] * count
        operands = [self._sizes(part) for part in node.input]
        most = max(map(len, operands))
        spread = [part * most if len(part) == 1 else part for part in operands]
        return [_ELEMENTWISE[node.op_type](*each) for each in zip(*spread, strict=True)]

    def _shape(self, node: onnx.NodeProto) -> Sizes:
        name = node.input[0]
        if self._kind(name) in ("Concat", "Reshape"):  # itself a shape
            return [len(self._sizes(name))]
        if name not in (TOKENS, MASK, TYPES):
            self.shaped.setdefault(name, _name(node))
        return ["batch", "length", "width"]

    # tensors between kernels

    def _half(self, name: str) -> str:
        self.wanted.setdefault(name, _Wanted()).half = True
        return name

    def _dequantized(self, name: str, *moves: Callable[[str], str]) -> _Codes:
        """Return the codes that a DequantizeLinear reads; `moves` lead from their Q to the tensor before."""
        dq = self._take(name, "DequantizeLinear", free=("axis",), shared=True)
        source = dq.input[0]
        q = self._take(source, "QuantizeLinear", free=("axis",), shared=True)
        scales = [self._scale(node) for node in (q, dq)]
        if scales[0] != scales[1]:
            _refuse([_name(q), _name(dq)], f"their scales differ: {scales}")
        before = q.input[0]
        for move in moves:
            before = move(before)
        factors: Array = np.float64(1)
        covered = [q]
        if self._kind(before) == "Mul":
            covered.append(mul := self._take(before, "Mul", shared=True))
            before, factors = self._split(mul)
            if self._kind(before) == "Clip":
                covered.append(clip := self._take(before, "Clip", shared=True))
                bounds = [float(self._constant(clip, position)) for position in (1, 2)]
                if bounds != [-FP16_MAX, FP16_MAX]:
                    _refuse([_name(clip)], "its range is not that of FP16")
                before = clip.input[0]
        for node in covered:  # the kernel that writes the tensor rounds it
            self.owners[node.output[0]] = before + _CODES
        wanted = self.wanted.setdefault(before, _Wanted())
        key = (np.asarray(factors, np.float32).tobytes(), scales[0])
        codes = wanted.codes.setdefault(key, source)
        wanted.multipliers[codes] = np.asarray(factors, np.float64) / scales[0]
        return _Codes(codes, before, scales[0])

    def _scale(self, node: onnx.NodeProto) -> float:
        scale, zero = self._constant(node, 1), self._constant(node, 2)
        if scale.dtype != np.float32 or not scale > 0 or zero.dtype != np.int8 or zero.any():
            _refuse([_name(node)], "needs a positive float32 scale and the INT8 zero point 0")
        return float(scale)

    def _produce(self, source: str, wanted: _Wanted) -> None:
        kind = self._kind(source)
        if kind == "LayerNormalization":
            self._norm(source, wanted)
        elif kind == "Reshape":
            self._attention(source, wanted)
        elif kind in ("Gelu", "Add", "MatMul"):
            self._linear(source, wanted)
        elif kind:
            _refuse([_name(self.index.producers[source])], "no kernel computes it")
        else:
            raise UserError(f"backend cuda has no kernel for {source}, which no node of the graph computes")

    def _add(self, operation: Operation) -> None:
        self.operations.append((self.owner, operation))

    def _write(self, name: str, kind: str, width: int, scale: float | None = None) -> None:
        self.tensors[name] = Tensor.model_validate({"kind": kind, "width": width, "scale": scale})

    def _write_codes(self, wanted: _Wanted, width: int) -> tuple[str, ...]:
        for (factors, scale), name in wanted.codes.items():
            one = len(factors) == np.dtype(np.float32).itemsize
            self._write(name, "int8", width, scale if one else None)
            multiplier = wanted.multipliers[name]
            if multiplier.ndim and multiplier.shape != (width,):
                raise UserError(f"backend cuda: {name} has {multiplier.size} factors for {width} channels")
            self.constants[f"{name}.multiplier"] = multiplier
        return tuple(wanted.codes.values())

    def _one_output(self, source: str, wanted: _Wanted, width: int, name: str, summed: bool = False) -> str:
        """Return the one tensor that a kernel writes; codes of a sum or beside another form get their own."""
        if not (summed or wanted.half) and len(wanted.codes) == 1:
            return self._write_codes(wanted, width)[0]
        if codes := self._write_codes(wanted, width):
            self._add(Quantize(name=f"{name}.quantize", nodes=(), input=source, codes=codes))
        self._write(source, "fp16", width)
        return source

    # kernels

    def _norm(self, source: str, wanted: _Wanted) -> None:
        node = self._take(source, "LayerNormalization", free=("epsilon",))
        name = module_of(node.name)
        summed = node.input[0]
        tables = self._tables(summed)
        width = self._vectors("embed" if tables else name, node)
        forms = {"half": source if wanted.half else None, "codes": self._write_codes(wanted, width)}
        forms |= {"nodes": (), "epsilon": _epsilon(node)}
        if wanted.half:
            self._write(source, "fp16", width)
        if tables:
            self._add(Embed(name="embed", **forms, **self._embed(tables, width)))
        else:
            self._add(Norm(name=name, input=self._half(summed), **forms))

    def _vectors(self, name: str, norm: onnx.NodeProto) -> int:
        gamma, beta = (self._constant(norm, position, (1,)) for position in (1, 2))
        if gamma.shape != beta.shape:
            _refuse([_name(norm)], "gamma and beta differ in size")
        self.constants |= {f"{name}.gamma": gamma, f"{name}.beta": beta}
        return len(gamma)

    def _tables(self, name: str, depth: int = 0) -> list[onnx.NodeProto]:
        """Return the Gathers that an embedding adds; nothing if it is none."""
        if self._kind(name) == "Gather":
            return [self._take(name, "Gather")]
        parts = self.index.producers[name].input if self._kind(name) == "Add" else []
        if depth == 3 or not parts or not all(self._kind(part) in ("Gather", "Add") for part in parts):
            return []
        found = [self._tables(part, depth + 1) for part in parts]
        if not all(found):
            return []
        self._take(name, "Add")
        return [gather for each in found for gather in each]

    def _embed(self, gathers: list[onnx.NodeProto], width: int) -> dict[str, Any]:
        tables: dict[str, Array] = {}
        padding, typed, later = None, False, []
        for gather in gathers:
            ids, table = gather.input[1], self._constant(gather, 0, (2,))
            if ids == TOKENS:
                part = "word"
                self.made[gather.output[0]] = _Wanted()  # [batch, length, width]: a shape may be read from it
            elif ids == TYPES:
                part, typed = "type", True
            elif self._kind(ids) in ("Slice", "Add"):
                part, padding = "position", self._positions(ids)
            else:
                part = "type"
                later.append(ids)
            if part in tables or table.shape[1] != width:
                _refuse([_name(gather)], f"a second table of {part}s, or one of another width")
            tables[part] = table
        for ids in later:
            self._zeros(ids)
        if missing := {"word", "position"} - tables.keys():
            _refuse(map(_name, gathers), f"no table of {' and '.join(sorted(missing))}s")
        tables.setdefault("type", np.zeros((1, width), np.float32))
        self.constants |= {f"embed.{part}": table for part, table in tables.items()}
        return {"padding": padding, "typed": typed}

    def _positions(self, name: str) -> int | None:
        """Return the id of padding that positions are counted past; None: they are places in the row."""
        if self._kind(name) == "Slice":
            node = self._take(name, "Slice")
            table = self._constant(node, 0, (2,))
            starts, axes, steps = (self._constant(node, i, (1,)).tolist() for i in (1, 3, 4))
            ends = self._sizes(node.input[2])
            if (starts, ends, axes, steps) != ([0], ["length"], [1], [1]) or (
                table != np.arange(table.shape[1])
            ).any():
                _refuse([_name(node)], "positions are no consecutive numbers from 0 on")
            return None
        add = self._take(name, "Add")
        self.made[name] = _Wanted()
        counted, padding = self._split(add, (0,))
        product = self._take(self._take(counted, "Cast", to=TensorProto.INT64).input[0], "Mul")
        total, seen = product.input
        count = self._take(total, "CumSum")
        if count.input[0] != seen or int(self._constant(count, 1)) != 1:
            _refuse([_name(count)], "it does not count along the row")
        cast = self._take(seen, "Cast", to=TensorProto.INT32)
        equal = self._take(self._take(cast.input[0], "Not").input[0], "Equal")
        ids, pad = self._split(equal, (0,))
        if ids != TOKENS or int(pad) != int(padding):
            _refuse([_name(equal)], "it does not find padding in the token ids")
        return int(padding)

    def _zeros(self, name: str) -> None:
        """Cover type ids [batch, length] that are all 0, as RoBERTa's: a buffer, gathered and expanded."""
        value = self._number(name)
        if value is not None:
            if value.any():
                raise UserError(f"backend cuda takes type ids that are all 0; {name} holds others")
            return
        node = self._take(name, "Expand", "GatherElements", free=("axis",))
        if node.op_type == "Expand":
            sizes = self._sizes(node.input[1])
            if sizes not in (["batch", "length"], ["batch", 1]):
                _refuse([_name(node)], f"it makes type ids {sizes}, expected [batch, length]")
        elif node.input[1] not in self.made:
            _refuse([_name(node)], "its indices are no positions")
        self._zeros(node.input[0])

    def _linear(self, source: str, wanted: _Wanted) -> None:
        activation: Activation | None = None
        residual = None
        name = source
        if self._kind(name) == "Gelu":
            gelu = self._take(name, "Gelu", free=("approximate",))
            activation, name = _gelu(gelu), gelu.input[0]
        elif self._kind(name) == "Add" and self._product(name) is None:
            add = self._take(name, "Add")
            found = [part for part in add.input if self._product(part) is not None]
            if not found or add.input[0] == add.input[1]:
                _refuse([_name(add)], "expected a linear plus a residual")
            name = max(found, key=self.order.__getitem__)
            residual = next(part for part in add.input if part != name)
        bias = None
        if self._kind(name) == "Add":
            name, bias = self._split(self._take(name, "Add"), (1,))
        matmul = self._take(name, "MatMul")
        module = module_of(matmul.name)
        weight, kind = self._weight(module, matmul)
        width = len(weight)
        bias = np.zeros(width, np.float32) if bias is None else bias
        if bias.shape != (width,):
            _refuse([_name(matmul)], f"its bias has {bias.size} values for {width} channels")
        self.constants |= {f"{module}.weight": weight, f"{module}.bias": bias}
        if kind == "int8":
            codes = self._dequantized(matmul.input[0])
            self.constants[f"{module}.input_scale"] = np.array(codes.scale)
            read = codes.name
        else:
            read = self._half(matmul.input[0])
        added = self._residual(module, residual) if residual is not None else None
        self._add(
            Linear(
                name=module,
                nodes=(),
                input=read,
                weight=kind,
                activation=activation,
                residual=added,
                output=self._one_output(source, wanted, width, module, residual is not None),
            )
        )

    def _product(self, name: str) -> tuple[onnx.NodeProto, Array, bool] | None:
        """Return the MatMul of a linear, its weight [N, K], and whether it is FP32; None for another tensor."""
        if self._kind(name) == "Add":
            computed = [part for part in self.index.producers[name].input if self.index.constant(part) is None]
            name = computed[0] if len(computed) == 1 else ""
        if self._kind(name) != "MatMul":
            return None
        node = self.index.producers[name]
        if (plain := self.index.constant(node.input[1])) is not None:
            return node, plain.T, True
        turned = self.index.producers.get(node.input[1])
        dq = self.index.producers.get(turned.input[0]) if turned is not None and turned.input else None
        codes = self.index.constant(dq.input[0]) if dq is not None and dq.input else None
        return None if codes is None else (node, codes, False)

    def _weight(self, module: str, matmul: onnx.NodeProto) -> tuple[Array, Any]:
        """Return a weight [N, K] and its kind; the scale of an INT8 one goes to the constants."""
        name = matmul.input[1]
        if self._number(name) is not None:
            return np.ascontiguousarray(self._constant(matmul, 1, (2,)).T), "fp16"
        turned = self._take(name, "Transpose", perm=[1, 0])
        dq = self._take(turned.input[0], "DequantizeLinear", free=("axis",))
        codes, scale = self._constant(dq, 0, (2,)), self._constant(dq, 1, (0, 1))
        axis = next((item.i for item in dq.attribute if item.name == "axis"), 1)
        zeros = self._constant(dq, 2, (0, 1)) if len(dq.input) > 2 else np.zeros((), np.int8)
        right = codes.dtype == np.int8 and scale.dtype == np.float32 and (scale > 0).all() and not zeros.any()
        if not right or (scale.ndim and (axis != 0 or scale.shape != codes.shape[:1])):
            _refuse([_name(dq)], "needs INT8 codes [N, K] with positive scales, one in all or one for each of N")
        self.constants[f"{module}.weight_scale"] = scale
        return codes, "int8"

    def _residual(self, module: str, name: str) -> str:
        factors: Array = np.float64(1)
        if self._kind(name) == "Mul":
            name, factors = self._split(self._take(name, "Mul"))
        elif self._kind(name) != "DequantizeLinear":
            return self._half(name)
        codes = self._dequantized(name)
        self.constants[f"{module}.residual"] = codes.scale * np.asarray(factors, np.float64)
        return codes.name

    def _attention(self, source: str, wanted: _Wanted) -> None:
        joined = self._take(source, "Reshape")
        if self._sizes(joined.input[1])[:2] != ["batch", "length"]:
            _refuse([_name(joined)], "expected [batch, length, width]")
        turned = self._take(joined.input[0], "Transpose", perm=_SPLIT)
        product = self._take(turned.input[0], "MatMul")
        name = module_of(product.name)
        weights, value = product.input
        int8 = self._kind(value) == "DequantizeLinear"
        inverse, scales = None, 1.0
        if int8:
            dq = self._take(weights, "DequantizeLinear")
            q = self._take(dq.input[0], "QuantizeLinear")
            if self._scale(q) != self._scale(dq):
                _refuse([_name(q), _name(dq)], "their scales differ")
            weights, inverse = q.input[0], 1 / self._scale(q)
            scales = self._scale(q)
        softmax = self._take(weights, "Softmax")
        masked = self._take(softmax.input[0], "Add")
        scores, mask = sorted(masked.input, key=lambda part: self._kind(part) == "Where")
        self._mask(mask)
        score_scale: float = 1.0
        if self._kind(scores) == "Mul":
            scores, factor = self._split(self._take(scores, "Mul"), (0,))
            score_scale = float(factor)
        dot = self._take(scores, "MatMul")
        size: list[int] = []
        query = self._heads(dot.input[0], int8, size, _SPLIT)
        if int8 or _perm(self.index.producers.get(dot.input[1])) == _SWAPPED:
            turned = self._take(dot.input[1], "Transpose", perm=_SWAPPED)
            key = self._heads(turned.input[0], int8, size, _SPLIT)
        else:
            key = self._heads(dot.input[1], int8, size, _SPLIT_SWAPPED)
        found = [query, key, self._heads(value, int8, size, _SPLIT)]
        if int8:
            codes = [each for each in found if isinstance(each, _Codes)]
            score_scale *= codes[0].scale * codes[1].scale
            scales *= codes[2].scale
        views = [View(tensor=each.name if isinstance(each, _Codes) else each) for each in found]
        linears = [self._product(each.source if isinstance(each, _Codes) else each) for each in found]
        widths = {len(linear[1]) if linear is not None else 0 for linear in linears}
        width = max(widths)
        if len({*size}) != 1 or len(widths) != 1 or width % size[0]:
            _refuse([_name(dot), _name(product)], f"q, k and v are no linears of {widths} for heads of {size}")
        self.constants[f"{name}.factor"] = np.array(scales)
        self._add(
            Attention(
                name=name,
                nodes=(),
                query=views[0],
                key=views[1],
                value=views[2],
                heads=width // size[0],
                head_size=size[0],
                score_scale=score_scale,
                probability_multiplier=inverse,
                output=self._one_output(source, wanted, width, name),
            )
        )

    def _heads(self, name: str, int8: bool, size: list[int], perm: list[int]) -> Any:
        """Return the linear's output, or codes of it, that a Reshape and a Transpose split into heads."""

        def turn(tensor: str) -> str:
            return str(self._take(tensor, "Transpose", perm=perm).input[0])

        def split(tensor: str) -> str:
            node = self._take(tensor, "Reshape")
            sizes = self._sizes(node.input[1])
            if len(sizes) != 4 or sizes[:2] != ["batch", "length"] or not isinstance(sizes[3], int) or sizes[3] < 1:
                _refuse([_name(node)], f"it makes heads {sizes}, expected [batch, length, heads, size]")
            size.append(sizes[3])
            return str(node.input[0])

        return self._dequantized(name, turn, split) if int8 else self._half(split(turn(name)))

    def _mask(self, name: str) -> None:
        """Cover the mask, whose masked keys have the weight 0 exactly."""
        where = self._take(name, "Where", shared=True)
        zero, fill = (float(self._constant(where, position)) for position in (1, 2))
        if zero != 0 or fill > MASK_FILL:
            _refuse([_name(where)], f"a mask of {zero:g} and {fill:g}, expected 0 and {MASK_FILL:g} or less")
        tensor = where.input[0]
        for axis in (2, 1):
            node = self._take(tensor, "Unsqueeze", shared=True)
            self._axes(node, axis)
            tensor = node.input[0]
        cast = self._take(tensor, "Cast", to=TensorProto.BOOL, shared=True)
        if cast.input[0] != MASK:
            _refuse([_name(cast)], f"expected {MASK}")

    # heads

    def _head(self) -> None:
        self.owner = "head"
        steps: list[tuple[StepKind, Array | None, Array | None]] = []
        name, answers = self._answers()
        pooling: Pooling = "tokens"
        while pooling == "tokens":
            kind = self._kind(name)
            node = self.index.producers.get(name)
            if kind in _STEPS:
                steps.append((_STEPS[kind], None, None))
                name = self._take(name, kind).input[0]
            elif kind == "Gelu":
                gelu = self._take(name, "Gelu", free=("approximate",))
                steps.append((_gelu(gelu), None, None))
                name = gelu.input[0]
            elif kind == "Cast":
                name = self._take(name, "Cast", to=TensorProto.FLOAT).input[0]
            elif kind == "Gemm":
                gemm = self._take(name, "Gemm", transB=1)
                steps.append(("dense", self._constant(gemm, 1, (2,)), self._constant(gemm, 2, (1,)) if len(gemm.input) > 2 else None))
                name = gemm.input[0]
            elif (product := self._product(name)) is not None and product[2]:
                bias = None
                if kind == "Add":
                    name, bias = self._split(self._take(name, "Add"), (1,))
                matmul = self._take(name, "MatMul")
                steps.append(("dense", np.ascontiguousarray(self._constant(matmul, 1, (2,)).T), bias))
                name = matmul.input[0]
            elif kind == "Div":
                name = self._normalized(name)
                steps.append(("normalize", None, None))
            elif kind == "Gather" and node is not None:
                gather = self._take(name, "Gather", axis=1)
                if int(self._constant(gather, 1)) != 0:
                    _refuse([_name(gather)], "expected the first token")
                name, pooling = gather.input[0], "first"
            elif kind == "ReduceSum":
                name, pooling = self._pooled(name)
            else:
                break
        for number, (_, weight, bias) in enumerate(reversed(steps)):
            if weight is not None:
                self.constants[f"head.{number}.weight"] = weight
                zeros = np.zeros(len(weight), np.float32)
                self.constants[f"head.{number}.bias"] = zeros if bias is None else bias
        self._add(
            Head(
                name="head",
                nodes=(),
                input=self._half(name),
                pooling=pooling,
                steps=tuple(Step(kind=kind) for kind, _, _ in reversed(steps)),
                answers=tuple(answers),
            )
        )

    def _answers(self) -> tuple[str, list[Answer]]:
        """Return the tensor that the outputs are of, and each output."""
        outputs = [value.name for value in self.index.graph.output]
        if len(outputs) == 1:
            return outputs[0], [Answer(name=outputs[0])]
        answers, sources = [], set()
        for name in outputs:
            squeeze = self._take(name, "Squeeze")
            self._axes(squeeze, 2)
            split = self._take(squeeze.input[0], "Split", axis=-1)
            if {*self._constant(split, 1, (1,)).tolist()} != {1}:
                _refuse([_name(split)], "expected columns of 1")
            answers.append(Answer(name=name, column=[*split.output].index(squeeze.input[0])))
            sources.add(split.input[0])
        if len(sources) != 1:
            raise UserError(f"backend cuda takes outputs of one tensor, not {', '.join(outputs)}")
        return sources.pop(), answers

    def _normalized(self, name: str) -> str:
        div = self._take(name, "Div")
        clip = self._take(div.input[1], "Clip")
        norm = self._take(clip.input[0], "ReduceL2")
        self._axes(norm, 1)
        if norm.input[0] != div.input[0] or not 0 < float(self._constant(clip, 1)) <= 1e-6 or any(clip.input[2:]):
            _refuse([_name(div)], "expected a vector over its own length")
        return str(div.input[0])

    def _pooled(self, name: str) -> tuple[str, Pooling]:
        total = self._take(name, "ReduceSum", keepdims=0)
        self._axes(total, 1)
        product = self._take(total.input[0], "Mul")
        weights = self._take(product.input[1], "Unsqueeze")
        self._axes(weights, 2)
        if self._kind(weights.input[0]) == "Div":
            div = self._take(weights.input[0], "Div")
            clip = self._take(div.input[1], "Clip")
            count = self._take(clip.input[0], "ReduceSum")
            self._axes(count, 1)
            kept = div.input[0]
            if count.input[0] != kept or not 0 < float(self._constant(clip, 1)) <= 1 or any(clip.input[2:]):
                _refuse([_name(div)], "expected the mean of the attended tokens")
            pooling: Pooling = "mean"
        else:
            chosen = self._take(weights.input[0], "Mul")
            kept = chosen.input[0]
            equal = self._take(self._take(chosen.input[1], "Cast", to=TensorProto.FLOAT).input[0], "Equal")
            most = self._take(equal.input[1], "ReduceMax")
            self._axes(most, 1)
            places = self._take(equal.input[0], "Mul")
            numbers = self._take(places.input[0], "Range")
            start, step = (float(self._constant(numbers, position)) for position in (0, 2))
            length = self._sizes(self._take(numbers.input[1], "Cast", to=TensorProto.FLOAT).input[0])
            if (start, step, length, most.input[0]) != (0, 1, ["length"], equal.input[0]) or places.input[1] != kept:
                _refuse([_name(chosen)], "expected the last attended token")
            pooling = "last"
        mask = self._take(kept, "Cast", to=TensorProto.FLOAT)
        if mask.input[0] != MASK:
            _refuse([_name(mask)], f"expected {MASK}")
        return str(product.input[0]), pooling


def _epsilon(norm: onnx.NodeProto) -> float:
    return next((float(item.f) for item in norm.attribute if item.name == "epsilon"), 1e-5)


def _perm(node: onnx.NodeProto | None) -> list[int]:
    return [axis for item in (node.attribute if node is not None else ()) for axis in item.ints]


def _gelu(node: onnx.NodeProto) -> Activation:
    form = next((item.s for item in node.attribute if item.name == "approximate"), b"none")
    return "gelu_tanh" if form == b"tanh" else "gelu"


def _name(node: onnx.NodeProto) -> str:
    return f"{node.name or node.output[0]} ({node.op_type})"


def _refuse(nodes: Iterable[str], why: str) -> NoReturn:
    raise UserError(f"backend cuda has no kernel for {name_list([*nodes])}: {why}; take tensorrt_rtx or tensorrt")
