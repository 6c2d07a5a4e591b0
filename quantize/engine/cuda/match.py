"""From an exported graph to a plan: backwards from its outputs, each tensor with the kernel that makes it.

The graph is in the form of the CPU runtimes: FP32, weights with a scale for each output channel, operator
Gelu. A node that no pattern covers, or two would, is refused by its name.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto

from qdqbench.quantize.engine.cuda import plan
from qdqbench.quantize.engine.cuda.cover import SHARED, Cover, read_attribute, refuse
from qdqbench.quantize.engine.cuda.plan import Operation, Plan, View
from qdqbench.quantize.engine.cuda.tokens import MASK, TOKENS, TYPES
from qdqbench.quantize.graph.index import use_of
from qdqbench.quantize.models.attention import MASK_FILL
from qdqbench.quantize.utils.arrays import Array
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.names import name_list

# whose graphs are covered
FAMILIES = ("bert", "roberta", "electra", "distilbert", "mpnet", "albert", "modernbert")
BIASED = ("mpnet",)  # of them: with a bias by distance, for INT8 attention alone
UNTIMED = ("mpnet", "modernbert")  # next to TensorRT
_CODES = " codes"  # behind the owner of nodes that round its tensor
# of [batch, length, heads, size]: heads before tokens, and with the last two axes swapped
_SPLIT, _SPLIT_SWAPPED, _SWAPPED = [0, 2, 1, 3], [0, 2, 3, 1], [0, 1, 3, 2]
_STEPS: dict[str, plan.StepKind] = {"Tanh": "tanh", "Relu": "relu", "Sigmoid": "sigmoid"}
_ACTIVATED = {"Gelu", *_STEPS}  # what a LayerNorm of a head reads
_GELU = (0.5, 1, np.sqrt(2 / np.pi), 0.044715, 3)  # numbers of its approximation by tanh
_ADDS = 2  # nested, of three tables
_VIEWS = "query", "key", "value"
_HEAD_SIZES = range(1, 1025)


@dataclass(frozen=True)
class Match:
    """A plan and the numbers of the file, before they are packed for kernels.

    Args:
        constants: `LINEAR.weight` [N, K], `.weight_scale`, `.input_scale`, `.bias` and `.residual`.
            `ATTENTION.factor` holds the scales of softmax and v. `TENSOR.multiplier` holds factors of
            smoothing over the scale of a QuantizeLinear. The plan names tables and vectors of the rest.
    """

    plan: Plan
    constants: dict[str, Array]


@dataclass
class _RequestedForms:
    """Forms in which kernels read a tensor: FP16, and codes by center, factors and scale, with names."""

    half: bool = False
    codes: dict[tuple[float, bytes, float], str] = field(default_factory=dict)
    multipliers: dict[str, Array] = field(default_factory=dict)
    rotated: "_Rotated | None" = None


class _Operand(NamedTuple):
    """A tensor that a kernel reads: the graph's, or codes of it and their scale."""

    name: str
    source: str
    scale: float = 1.0


class _Rotated(NamedTuple):
    """q, k and v as attention reads them, of one linear: its tensor, theirs, and scales of codes."""

    name: str
    parts: tuple[str, ...]
    scales: tuple[float, ...]
    int8: bool
    head_size: int
    frequencies: Array


class _Heads(NamedTuple):
    """q, k and v of an attention: where they are, their channels, those of a head, and their scales."""

    views: dict[str, View]
    width: int
    size: int
    scales: tuple[float, ...]


class _Step(NamedTuple):
    """A step of a head, with its arrays; `of_rows`: of one vector for each row."""

    kind: plan.StepKind
    read: str
    arrays: dict[str, Array] = {}
    of_rows: bool = False
    epsilon: float | None = None


def match_graph(model: onnx.ModelProto) -> Match:
    """Return the plan of a graph; UserError names the nodes that no kernel covers."""
    try:
        return _Matcher(model).match()
    except RecursionError:
        raise UserError("backend cuda takes no graph whose shapes are computed in so many steps") from None


class _Matcher(Cover):
    def __init__(self, model: onnx.ModelProto) -> None:
        super().__init__(model)
        self.wanted: dict[str, _RequestedForms] = {}
        self.made: set[str] = set()  # tensors [batch, length, ...]
        self.span: int | None = None  # tokens that a bias by distance is for
        self.tensors: dict[str, plan.Tensor] = {}
        self.constants: dict[str, Array] = {}
        self.operations: list[tuple[str, Operation]] = []  # with their node_owner, the last one first

    def match(self) -> Match:
        outputs = [value.name for value in self.graph.output]
        answers = outputs[: len(outputs) - len(self.given)]
        self._head(answers)
        states = tuple(self._half(name).name for name in outputs[len(answers) :])
        while self.wanted:
            self.owner = max(self.wanted, key=lambda name: self.order.get(name, -1))
            self.made.add(self.owner)
            self._produce(self.owner, self.wanted.pop(self.owner))
        unmatched = [node for node in self.graph.node if node.output[0] not in self.node_owner]
        if unmatched or self.shaped.keys() - self.made:
            shaped = (self.shaped[name] for name in self.shaped.keys() - self.made)
            refuse("no pattern of an encoder holds them", *shaped, *unmatched)
        names = Counter(operation.name for _, operation in self.operations)
        if twice := [name for name, count in names.items() if count > 1]:
            raise UserError(f"backend cuda needs node names that tell kernels apart, not {name_list(twice)}")
        inputs, given = tuple(value.name for value in self.graph.input), tuple(self.given)
        operations = tuple(self._with_nodes())
        found = Plan(inputs=inputs, given=given, states=states, tensors=self.tensors, operations=operations)
        return Match(found, self.constants)

    def _with_nodes(self) -> Iterator[Operation]:
        """Yield the operations in the order of computation, each with its nodes in that of the graph."""
        apart = {owner for owner, operation in self.operations if isinstance(operation, plan.Quantize)}
        owned = {SHARED}  # which the first operation covers
        for owner, operation in reversed(self.operations):
            alone = isinstance(operation, plan.Quantize)
            owned |= {owner + _CODES} if alone else {owner} if owner in apart else {owner, owner + _CODES}
            nodes = (node for node in self.graph.node if self.node_owner[node.output[0]] in owned)
            yield replace(operation, nodes=tuple(node.name or node.output[0] for node in nodes))
            owned = set()

    def _produce(self, source: str, wanted: _RequestedForms) -> None:
        kind = self.kind(source)
        if source in self.given:
            self._output(source, wanted, self.given[source][-1].dim_value, source, one=False)
        elif kind == "LayerNormalization":
            self._norm(source, wanted)
        elif kind == "Reshape":
            self._attention(source, wanted)
        elif kind in ("Gelu", "Mul", "Add", "MatMul"):
            self._linear(source, wanted)
        else:
            refuse("it is no LayerNorm, attention or linear", self.index.producers.get(source, source))

    # tensors between kernels

    def _half(self, name: str) -> _Operand:
        self.wanted.setdefault(name, _RequestedForms()).half = True
        return _Operand(name, name)

    def _codes(self, name: str, *moves: Callable[[str], str]) -> _Operand:
        """Return the codes that a DequantizeLinear reads; `moves` lead from their Q to the tensor before."""
        dq = self.take(name, "DequantizeLinear", free=("axis",), shared=True)
        covered = [q := self.take(dq.input[0], "QuantizeLinear", free=("axis",), shared=True)]
        scale = self._scale(q, dq)
        source = q.input[0]
        for move in moves:
            source = move(source)
        factors: Array = np.ones((), np.float32)
        if self._is_scaled(source):  # smoothing
            covered.append(mul := self.take(source, "Mul", shared=True))
            source, factors = self.operands(mul, 0, 1)
        if self.kind(source) == "Clip":
            covered.append(clip := self.take(source, "Clip", shared=True))
            if any(clip.input[1:]):
                refuse("it has bounds", clip)
            source = clip.input[0]
        center = 0.0
        if self.kind(source) == "Sub":
            covered.append(sub := self.take(source, "Sub", shared=True))
            source, center = sub.input[0], float(self.constant(sub, 1))
            if self.kind(source) not in ("Gelu", "Mul") or self._is_scaled(source):
                refuse("it is behind no GELU", sub)
        for node in covered:  # by the kernel that writes the tensor
            self.node_owner[node.output[0]] = source + _CODES
        wanted = self.wanted.setdefault(source, _RequestedForms())
        codes = wanted.codes.setdefault((center, factors.tobytes(), scale), dq.input[0])
        wanted.multipliers[codes] = factors.astype(np.float64) / scale
        return _Operand(codes, source, scale)

    def _is_scaled(self, name: str) -> bool:
        """Return whether a tensor is a product with a constant; that of a written GELU is not."""
        return self.kind(name) == "Mul" and any(
            self.index.constant(part) is not None for part in self.index.producers[name].input
        )

    def _scale(self, *nodes: onnx.NodeProto, kind: type[np.integer[Any]] = np.int8) -> float:
        """Return the scale that a Q and its DQ share."""
        for node in nodes:
            scale, zero = self.constant(node, 1), self.constant(node, 2)
            if scale.dtype != np.float32 or not scale > 0 or zero.dtype != kind or zero:
                refuse(f"it needs a positive float32 scale and the {kind.__name__} zero point 0", node)
        scales = {float(self.constant(node, 1)) for node in nodes}
        return scales.pop() if len(scales) == 1 else refuse("their scales differ", *nodes)

    def _write(self, source: str, wanted: _RequestedForms, width: int) -> dict[str, Any]:
        """Return the forms that kernels write of a tensor, as fields of its operation."""
        for (_, _, scale), name in wanted.codes.items():
            self.constants[f"{name}.multiplier"] = multiplier = wanted.multipliers[name]
            if multiplier.shape not in ((), (width,)):
                refuse(f"{multiplier.size} factors for {width} channels", name)
            one = None if multiplier.ndim else scale
            self.tensors[name] = plan.Tensor(kind="int8", width=width, scale=one)
        if wanted.half:
            self.tensors[source] = plan.Tensor(kind="fp16", width=width)
        return {"half": source if wanted.half else None, "codes": tuple(wanted.codes.values())}

    def _output(self, source: str, wanted: _RequestedForms, width: int, name: str, one: bool = True) -> str:
        """Return the one tensor that a kernel writes; codes next to FP16, or of a sum, get their own."""
        if one and not wanted.half and len(wanted.codes) == 1:
            return str(self._write(source, wanted, width)["codes"][0])
        wanted.half = True
        if any(center for center, *_ in wanted.codes):
            refuse("it has another reader than its Sub", self.index.producers[source])
        if codes := self._write(source, wanted, width)["codes"]:
            self._add(plan.Quantize(name=f"{name}.quantize", input=source, codes=codes))
        return source

    def _add(self, operation: Operation) -> None:
        self.operations.append((self.owner, operation))

    # embeddings and norms

    def _norm(self, source: str, wanted: _RequestedForms) -> None:
        node = self.take(source, "LayerNormalization", free=("epsilon",))
        first = self.kind(node.input[0])
        parts = self.index.producers[node.input[0]].input if first == "Add" else ()
        embeds = first == "Gather" or any(self.kind(part) == "Gather" for part in parts)
        gathers = self._gathers(node.input[0]) if embeds else []
        name = "embed" if gathers else use_of(node.name)
        gamma, beta = (self.constant(node, position, 1) for position in (1, 2))
        if gamma.shape != beta.shape:
            refuse("gamma and beta differ in size", node)
        self.constants |= {f"{name}.gamma": gamma, f"{name}.beta": beta}
        forms = self._write(source, wanted, len(gamma)) | {"epsilon": read_attribute(node, "epsilon", 1e-5)}
        if gathers:
            tables = self._tables(gathers, len(gamma))
            self._add(plan.Embed(name=name, **forms, **tables, span=self.span))
        else:
            self._add(plan.Norm(name=name, input=self._half(node.input[0]).name, **forms))

    def _gathers(self, name: str, depth: int = 0) -> list[onnx.NodeProto]:
        """Return the Gathers that an embedding adds."""
        node = self.take(name, "Gather", *(["Add"] if depth < _ADDS else []))
        parts = node.input if node.op_type == "Add" else ()
        return [each for part in parts for each in self._gathers(part, depth + 1)] or [node]

    def _tables(self, gathers: list[onnx.NodeProto], width: int) -> dict[str, Any]:
        tables: dict[str, Array] = {}
        padding, zeros = None, ""
        for gather in gathers:
            ids, part = gather.input[1], "type"
            if ids == TOKENS:
                part = "word"
                self.made.add(gather.output[0])
            elif self.kind(ids) in ("Slice", "Add"):
                part, padding = "position", self._positions(ids)
            elif ids != TYPES:
                zeros = ids
            table = self.constant(gather, 0, 2)
            if part in tables or table.shape[1] != width or table.dtype != np.float32:
                refuse(f"a second table of {part}s, or one of another width", gather)
            tables[part] = table
        if "word" not in tables:
            refuse("no table of words", *gathers)
        if zeros:
            self._zeros(zeros)
        typed = not zeros and "type" in tables
        tables.setdefault("type", np.zeros((1, width), np.float32))
        self.constants |= {f"embed.{part}": table for part, table in tables.items()}
        return {"padding": padding, "typed": typed, "placed": "position" in tables}

    def _positions(self, name: str) -> int | None:
        """Return the id of padding that positions are counted past; None: they are places in the row."""
        if self.kind(name) == "Slice":
            node = self._until_length(name, 1)
            table = self.constant(node, 0, 2)
            if (table != np.arange(table.shape[1])).any():
                refuse("positions are no consecutive numbers from 0 on", node)
            return None
        self.made.add(name)
        counted, padding = self.operands(self.take(name, "Add"))
        product = self.take(self.take(counted, "Cast", to=TensorProto.INT64).input[0], "Mul")
        count = self.take(product.input[0], "CumSum")
        seen = self.take(product.input[1], "Cast", to=TensorProto.INT32)
        equal = self.take(self.take(seen.input[0], "Not").input[0], "Equal")
        ids, found = self.operands(equal)
        if (
            count.input[0] != seen.output[0]
            or self.constant(count, 1) != 1
            or ids != TOKENS
            or found != padding
        ):
            refuse("it does not count the tokens past padding", count, equal)
        return int(padding)

    def _zeros(self, name: str) -> None:
        """Cover type ids [batch, length] that are all 0, as RoBERTa's: a buffer, gathered and expanded."""
        expand = self.take(name, "Expand")
        gather = self.take(expand.input[0], "GatherElements", axis=1)
        buffer = self.take(gather.input[0], "Expand")
        shapes = self.sizes(expand.input[1]), self.sizes(buffer.input[1])
        if shapes != (["batch", "length"], ["batch", 1]) or gather.input[1] not in self.made:
            refuse("its type ids are not [batch, length]", expand, gather, buffer)
        if self.constant(buffer, 0, 2).any():
            refuse("expected type ids that are all 0", buffer)

    # linears

    def _product(self, name: str) -> onnx.NodeProto | None:
        """Return the MatMul of a linear, behind its bias; None for another tensor."""
        if self.kind(name) == "Add":
            computed = [
                part for part in self.index.producers[name].input if self.index.constant(part) is None
            ]
            name = computed[0] if len(computed) == 1 else ""
        return self.index.producers[name] if self.kind(name) == "MatMul" else None

    def _count_channels(self, name: str) -> int:
        """Return the width of a linear that another kernel reads."""
        matmul = self._product(name)
        if matmul is None:
            refuse("expected a linear", self.index.producers.get(name, name))
        if (weight := self.index.constant(matmul.input[1])) is not None:
            return int(weight.shape[-1])
        turned = self.index.producers.get(matmul.input[1])
        dq = self.index.producers.get(turned.input[0]) if turned is not None and turned.input else None
        codes = self.index.constant(dq.input[0]) if dq is not None and dq.input else None
        return (
            len(codes) if codes is not None and codes.ndim else refuse("expected a weight", turned or matmul)
        )

    def _linear(self, source: str, wanted: _RequestedForms) -> None:
        name, activation, residual, rotated = source, None, None, wanted.rotated
        parts = self.index.producers[name].input if self.kind(name) == "Mul" else ()
        gated = any(self.kind(part) in ("Gelu", "Slice") for part in parts)
        if gated:
            activation, name, halves = self._gate(name)
        elif self.kind(name) in ("Gelu", "Mul"):
            activation, name = self._gelu(name)
        elif self.kind(name) == "Add" and self._product(name) is None:
            add = self.take(name, "Add")
            linears = [part for part in add.input if self._product(part) is not None]
            if not linears or add.input[0] == add.input[1]:
                makers = (self.index.producers.get(part, part) for part in add.input)
                refuse("expected a linear and a residual", add, *makers)
            name = max(linears, key=self.order.__getitem__)
            residual = add.input[1 - [*add.input].index(name)]
        bias = None
        if self.kind(name) == "Add":
            name, bias = self.operands(self.take(name, "Add"), 1)
        matmul = self.take(name, "MatMul")
        module = use_of(matmul.name)
        weight, kind = self._weight(module, matmul)
        count = len(weight)
        width = count // 2 if gated else count
        bias = np.zeros(count, np.float32) if bias is None else bias
        if bias.shape != (count,):
            refuse(f"its bias has {bias.size} values for {count} channels", matmul)
        if gated and (count % 2 or halves != [[0], [width], [width], [count]]):
            refuse(f"its {count} channels are no input and gate of one width", matmul)
        self.constants |= {f"{module}.weight": weight, f"{module}.bias": bias}
        read = self._codes(matmul.input[0]) if kind == "int8" else self._half(matmul.input[0])
        self.constants[f"{module}.input_scale"] = np.array(read.scale)
        added = None if residual is None else self._residual(module, residual)
        center = sum((center for center, *_ in wanted.codes), 0.0)  # of one, or all are 0
        form: dict[str, Any] = {"weight": kind, "activation": activation, "residual": added, "gated": gated}
        form["center"] = center
        if rotated is None:
            output = self._output(source, wanted, width, module, one=residual is None)
        else:
            output = self._output_rotated(module, rotated, width, wanted)
            form |= {"rotary": rotated.head_size, "parts": rotated.parts}
        self._add(plan.Linear(name=module, input=read.name, output=output, **form))

    def _output_rotated(self, module: str, rotated: _Rotated, width: int, wanted: _RequestedForms) -> str:
        """Return the tensor of rotated q and k and of v; nothing else reads their linear."""
        if wanted.half or wanted.codes or width % 3 or rotated.frequencies.shape != (rotated.head_size // 2,):
            refuse(f"q, k and v of {width} channels are not for heads of {rotated.head_size}", module)
        kind: Literal["int8", "fp16"] = "int8" if rotated.int8 else "fp16"
        self.tensors[rotated.name] = plan.Tensor(kind=kind, width=width)
        self.constants[f"{module}.frequencies"] = rotated.frequencies
        if rotated.int8:
            self.constants[f"{rotated.name}.multiplier"] = np.repeat(1 / np.array(rotated.scales), width // 3)
        return rotated.name

    def _gate(self, name: str) -> tuple[plan.Activation, str, list[Any]]:
        """Cover `gelu(half of the channels) * the other`; return the whole, and where halves lie."""
        product = self.take(name, "Mul")
        kinds = {"Gelu": 0, "Mul": 0, "Slice": 2}  # a gate is the last
        activated, gate = sorted(product.input, key=lambda part: kinds.get(self.kind(part), 1))
        activation, one = self._gelu(activated)
        slices = [self.take(one, "Slice"), self.take(gate, "Slice")]
        sources = {node.input[0] for node in slices}
        if len(sources) > 1 or any(self.vector(node, 3) not in ([-1], [2]) for node in slices):
            refuse("expected halves of the channels", *slices)
        source = sources.pop()
        self.shapes[source] = ["batch", "length", self._count_channels(source)]
        steps = [self.vector(node, 4) for node in slices if len(node.input) > 4]
        if any(step != [1] for step in steps):
            refuse("expected halves of the channels", *slices)
        return activation, source, [self.sizes(end) for node in slices for end in node.input[1:3]]

    def _gelu(self, name: str) -> tuple[plan.Activation, str]:
        if self.kind(name) == "Mul":
            return "gelu_tanh", self._written_gelu(name)
        node = self.take(name, "Gelu", free=("approximate",))
        form = read_attribute(node, "approximate", b"none")
        return "gelu_tanh" if form == b"tanh" else "gelu", node.input[0]

    def _written_gelu(self, name: str) -> str:
        """Cover `0.5 x (1 + tanh(0.7979 (x + 0.044715 x^3)))`, and return x."""
        product = self.take(name, "Mul")
        x, half = self.operands(self.take(product.input[0], "Mul"))
        curved, one = self.operands(self.take(product.input[1], "Add"))
        scaled, root = self.operands(self.take(self.take(curved, "Tanh").input[0], "Mul"))
        added = self.take(scaled, "Add")
        cubed, share = self.operands(self.take(added.input[1], "Mul"))
        power = self.take(cubed, "Pow")
        numbers = [float(each) for each in (half, one, root, share, self.constant(power, 1))]
        if {added.input[0], power.input[0]} != {x} or not np.allclose(numbers, _GELU, rtol=1e-6, atol=0):
            refuse("expected a GELU", product)
        return x

    def _weight(self, module: str, matmul: onnx.NodeProto) -> tuple[Array, Literal["int8", "fp16"]]:
        """Return a weight [N, K] and its kind; the scale of an INT8 one goes to the constants."""
        if self.index.constant(matmul.input[1]) is not None:
            return self.constant(matmul, 1, 2).T, "fp16"
        turned = self.take(matmul.input[1], "Transpose", perm=[1, 0])
        dq = self.take(turned.input[0], "DequantizeLinear", free=("axis",))
        codes, scale, zeros = self.constant(dq, 0, 2), self.constant(dq, 1, 0, 1), self.constant(dq, 2, 0, 1)
        channels = scale.ndim == 0 or (read_attribute(dq, "axis", 1) == 0 and scale.shape == codes.shape[:1])
        if (
            codes.dtype != np.int8
            or scale.dtype != np.float32
            or not (scale > 0).all()
            or zeros.any()
            or not channels
        ):
            refuse("expected INT8 codes [N, K] with positive scales, one in all or one for each of N", dq)
        self.constants[f"{module}.weight_scale"] = scale
        return codes, "int8"

    def _residual(self, module: str, name: str) -> str:
        factors: Array = np.ones(())
        if self.kind(name) == "Mul":
            name, factors = self.operands(self.take(name, "Mul"), 0, 1)
        elif self.kind(name) != "DequantizeLinear":
            return self._half(name).name
        codes = self._codes(name)
        self.constants[f"{module}.residual"] = codes.scale * factors.astype(np.float64)
        return codes.name

    # attention

    def _attention(self, source: str, wanted: _RequestedForms) -> None:
        joined = self.take(source, "Reshape")
        context = self.take(joined.input[0], "Transpose", perm=_SPLIT).input[0]
        total = None
        if self.kind(context) == "Div":
            div = self.take(context, "Div")
            total, context = self._over_keys(div, "ReduceSum"), div.input[0]
        product = self.take(context, "MatMul")
        weights, value = product.input
        int8, score_scale, factor = self.kind(weights) == "DequantizeLinear", 1.0, 1.0
        if total not in (None, weights):
            refuse("it divides by another sum than that of its softmax", div)
        if int8:
            dq = self.take(weights, "DequantizeLinear")
            q = self.take(dq.input[0], "QuantizeLinear")
            kind = np.int8 if total is None else np.uint8
            factor, weights = self._scale(q, dq, kind=kind), q.input[0]
        if total is not None:
            div = self.take(weights, "Div")
            if not int8 or self._over_keys(div, "ReduceMax") != div.input[0]:
                refuse("expected codes of a softmax over the maximum of each row", div)
            weights = div.input[0]
        masked = self.take(self.take(weights, "Softmax").input[0], "Add")
        scores, mask = sorted(masked.input, key=lambda part: self.kind(part) in {"Where", "Add"})
        bias, window = self._bias(mask)
        if self.kind(scores) == "Mul":
            scores, number = self.operands(self.take(scores, "Mul"))
            score_scale = float(number)
        dot = self.take(scores, "MatMul")
        name = use_of(product.name)
        heads = self._queries(name, dot, value, int8)
        size, width = heads.size, heads.width
        if self.sizes(joined.input[1]) not in (["batch", "length", -1], ["batch", "length", width]):
            refuse(f"heads are joined to {self.sizes(joined.input[1])}, not to {width}", dot, joined)
        query, key, values = heads.scales
        self.constants[f"{name}.factor"] = np.array((factor if total is None else 1.0) * values)
        form = {
            "heads": width // size,
            "head_size": size,
            "output": self._output(source, wanted, width, name),
        }
        form |= {"score_scale": score_scale * query * key}
        form |= {"probability_multiplier": 1 / factor if int8 else None, "row_max": total is not None}
        form |= {"biased": self._keep_bias(f"{name}.bias", bias, width // size), "window": window}
        self._add(plan.Attention(name=name, **heads.views, **form))  # type: ignore[arg-type]

    def _queries(self, name: str, dot: onnx.NodeProto, value: str, int8: bool) -> _Heads:
        """Cover what makes q, k and v of their linears."""
        turned, perm = dot.input[1], _SPLIT_SWAPPED
        if int8 or read_attribute(self.index.producers[turned], "perm", None) == _SWAPPED:
            turned, perm = self.take(turned, "Transpose", perm=_SWAPPED).input[0], _SPLIT
        rotated = self._rotated(f"{name}.qkv", dot.input[0], turned, value, int8)
        if rotated is not None:
            return rotated
        shapes: list[Any] = []
        split = [(dot.input[0], _SPLIT), (turned, perm), (value, _SPLIT)]
        reads = [self._heads(tensor, int8, shapes, perm) for tensor, perm in split]
        widths = [self._count_channels(read.source) for read in reads]
        width, size = widths[0], shapes[0][-1]
        if size not in _HEAD_SIZES or width % size or {*widths} != {width}:
            refuse(f"q, k and v of {widths} channels are not for heads of {size}", dot)
        whole, part = ["batch", "length"], {-1, width // size}
        if not all(shape[:2] == whole and shape[2] in part and shape[3:] == [size] for shape in shapes):
            refuse(f"q, k and v are no heads of {size}, split: {shapes}", dot)
        views = {key: View(tensor=read.name) for key, read in zip(_VIEWS, reads, strict=True)}
        return _Heads(views, width, size, tuple(read.scale for read in reads))

    def _over_keys(self, div: onnx.NodeProto, kind: str) -> str:
        """Return what a reduction over keys reads, by which a Div divides."""
        reduced = self.take(div.input[1], kind)
        if self.vector(reduced) != [-1]:
            refuse("expected a reduction over keys", reduced)
        return str(reduced.input[0])

    def _heads(self, name: str, int8: bool, shapes: list[Any], perm: list[int]) -> _Operand:
        """Return the linear's output that a Transpose and a Reshape split into heads, or codes of it."""

        def turn(tensor: str) -> str:
            return str(self.take(tensor, "Transpose", perm=perm).input[0])

        def split(tensor: str) -> str:
            node = self.take(tensor, "Reshape")
            shapes.append(self.sizes(node.input[1]))
            return str(node.input[0])

        return self._codes(name, turn, split) if int8 else self._half(split(turn(name)))

    def _bias(self, name: str) -> tuple[Array | None, int | None]:
        """Cover the mask; return the bias that it is added to, of each head and distance, and its window."""
        if self.kind(name) == "Where":
            return None, self._mask(name)
        added = self.take(name, "Add", shared=True)
        bias, mask = sorted(added.input, key=lambda part: self.kind(part) == "Where")
        if self._mask(mask) is not None:
            refuse("a bias by distance and a window", added)
        outer = self.take(bias, "Unsqueeze", shared=True)
        turned = self.take(outer.input[0], "Transpose", perm=[2, 0, 1], shared=True)
        gather = self.take(turned.input[0], "Gather", shared=True)
        inner = self._until_length(gather.input[1], 1)
        buckets = self.constant(self._until_length(inner.input[0], 0), 0, 2)
        table = self.constant(gather, 0, 2)
        count = len(buckets)
        if (
            self.vector(outer) != [0]
            or buckets.shape != (count, count)
            or (buckets[1:, 1:] != buckets[:-1, :-1]).any()
            or not ((buckets >= 0) & (buckets < len(table))).all()
        ):
            refuse("expected a bias by the distance from query to key", gather, outer)
        return table[[*buckets[::-1, 0], *buckets[0, 1:]]].T, None

    def _keep_bias(self, name: str, bias: Array | None, heads: int) -> bool:
        """Add the bias of an attention to the constants, if it has one."""
        if bias is None:
            return False
        span = bias.shape[1] // 2 + 1
        self.span = self.span or span
        if (len(bias), span) != (heads, self.span):
            refuse(f"for {heads} heads and {self.span} tokens, it is of {len(bias)} and {span}", name)
        self.constants[name] = bias
        return True

    def _until_length(self, name: str, axis: int) -> onnx.NodeProto:
        """Cover a Slice of the first places of an axis, as many as a row has."""
        node = self.take(name, "Slice", shared=True)
        ranges = [self.vector(node, 1), self.sizes(node.input[2]), self.vector(node, 3), self.vector(node, 4)]
        if ranges != [[0], ["length"], [axis], [1]]:
            refuse("expected the places of a row", node)
        return node

    def _mask(self, name: str) -> int | None:
        """Cover the mask, which gives masked keys the weight 0 exactly; return its window, if it has one."""
        where = self.take(name, "Where", shared=True)
        zero, fill = (float(self.constant(where, position)) for position in (1, 2))
        if zero != 0 or fill > MASK_FILL:
            refuse(f"a mask of {zero:g} and {fill:g}, expected 0 and {MASK_FILL:g} or less", where)
        tensor, window = where.input[0], None
        if self.kind(tensor) == "And":
            near, tensor = sorted(self.take(tensor, "And", shared=True).input, key=self._is_mask)
            window = self._window(near)
        while self.kind(tensor) == "Cast" and self._is_mask(tensor):
            tensor = self.take(tensor, "Cast", to=TensorProto.BOOL, shared=True).input[0]
        for axis in (2, 1):
            node = self.take(tensor, "Unsqueeze", shared=True)
            tensor = (
                node.input[0]
                if self.vector(node) == [axis]
                else refuse("expected [batch, 1, 1, length]", node)
            )
        self._of_mask(tensor, TensorProto.BOOL)
        return window

    def _of_mask(self, name: str, kind: int) -> None:
        cast = self.take(name, "Cast", to=kind, shared=True)
        if cast.input[0] != MASK:
            refuse(f"expected {MASK}", cast)

    def _is_mask(self, name: str) -> bool:
        """Return whether a tensor is a mask with more axes, whatever its type."""
        while self.kind(name) == "Cast":
            name = self.index.producers[name].input[0]
        return self.kind(name) == "Unsqueeze"

    def _window(self, name: str) -> int:
        """Cover `|i - j| <= window` of places i and j; return the window."""
        near = self.take(name, "LessOrEqual", shared=True)
        distance = self.take(self.take(near.input[0], "Abs", shared=True).input[0], "Sub", shared=True)
        column, row = distance.input
        column = self._raised(column, 1)
        self._places(column)
        self._places(self._raised(row, 0) if self.kind(row) == "Unsqueeze" else row)
        window = int(self.constant(near, 1))
        return window if window > 0 else refuse("expected a window over 0", near)

    def _raised(self, name: str, *axes: int) -> str:
        """Return what Unsqueezes give these axes, the last one first."""
        for axis in axes:
            node = self.take(name, "Unsqueeze", shared=True)
            name = node.input[0] if self.vector(node) == [axis] else refuse(f"expected axis {axis}", node)
        return name

    def _places(self, name: str) -> None:
        """Cover the numbers of the places of a row, from 0 on."""
        node = self.take(name, "Range", shared=True)
        ends = [int(self.constant(node, position)) for position in (0, 2)]
        if (ends, self.sizes(node.input[1])) != ([0, 1], "length"):
            refuse("expected the places of a row", node)

    # rotated queries and keys

    def _rotated(self, name: str, query: str, key: str, value: str, int8: bool) -> _Heads | None:
        """Cover rotated q and k, and v of the same linear; None: they are not rotated."""
        tensors, scales = [query, key, value], [1.0] * 3
        if self.kind(self._behind_codes(query) if int8 else query) != "Add":
            return None
        parts = [*tensors]
        for place, part in enumerate(tensors if int8 else []):
            dq = self.take(part, "DequantizeLinear")
            q = self.take(dq.input[0], "QuantizeLinear")
            scales[place], parts[place], tensors[place] = self._scale(q, dq), dq.input[0], q.input[0]
        (query, size, one), (key, other_size, other) = (self._rotation(tensor) for tensor in tensors[:2])
        if size != other_size or not np.array_equal(one, other):
            refuse("q and k are rotated otherwise", *tensors[:2])
        linear, shape = self._split([query, key, tensors[2]])
        width = self._count_channels(linear) // 3
        if shape not in ([*("batch", "length", 3), heads, size] for heads in (-1, width // size)):
            refuse(f"no q, k and v of heads of {size}: {shape}", linear)
        rotated = _Rotated(name, tuple(parts), tuple(scales), int8, size, one)
        self.wanted.setdefault(linear, _RequestedForms()).rotated = rotated
        views = {each: View(tensor=name, column=place * width) for place, each in enumerate(_VIEWS)}
        return _Heads(views, width, size, tuple(scales))

    def _behind_codes(self, name: str) -> str:
        """Return the tensor that a DequantizeLinear and a QuantizeLinear round."""
        for _ in range(2):
            node = self.index.producers.get(name)
            name = node.input[0] if node is not None and node.input else ""
        return name

    def _rotation(self, name: str) -> tuple[str, int, Array]:
        """Cover `x cos + [-x2, x1] sin` with halves x1 and x2; return x, its channels and the frequencies."""
        products = [self.take(part, "Mul") for part in self.take(name, "Add").input]
        straight, crossed = sorted(products, key=lambda node: self.kind(node.input[0]) == "Concat")
        halves = self.take(crossed.input[0], "Concat", axis=-1)
        minus = self.take(self.take(halves.input[0], "Neg").input[0], "Slice")
        plus, x = self.take(halves.input[1], "Slice"), straight.input[0]
        (one, cos), (other, sin) = (self._angle(node.input[1]) for node in (straight, crossed))
        size = 2 * len(one)
        self.shapes[x] = ["batch", "heads", "length", size]
        ends = [self.sizes(minus.input[1]), *(self.sizes(end) for end in plus.input[1:3])]
        axes, steps = ([self.vector(node, place) for node in (minus, plus)] for place in (3, 4))
        if (
            (cos, sin) != ("Cos", "Sin")
            or not np.array_equal(one, other)
            or {minus.input[0], plus.input[0]} != {x}
            or ends != [[size // 2], [0], [size // 2]]
            or self.vector(minus, 2)[0] < size
            or any(axis not in ([3], [-1]) for axis in axes)
            or steps != [[1], [1]]
        ):
            refuse("expected channels that are rotated by the places of their tokens", crossed)
        return x, size, one

    def _angle(self, name: str) -> tuple[Array, str]:
        """Cover cosine or sine of the angles that places in a row have; return the frequencies, and which."""
        scaled = self.take(self._raised(name, 1), "Mul", shared=True)
        computed, factor = self.operands(scaled)
        wave = self.take(computed, "Cos", "Sin", shared=True)
        both = self.take(wave.input[0], "Concat", axis=-1, shared=True)
        if self.kind(both.input[0]) == "Transpose":  # older transformers multiply matrices
            turned = self.take(both.input[0], "Transpose", perm=[0, 2, 1], shared=True)
            spread, angles = self.take(turned.input[0], "MatMul", shared=True).input
            axis = 1
        else:
            angles, frequencies = self.operands(self.take(both.input[0], "Mul", shared=True), 1)
            spread, axis = "", 2
        single = self.take(angles, "Cast", to=TensorProto.FLOAT, shared=True)
        places = self._raised(single.input[0], axis)
        self._places(self._raised(places, 0))
        if spread:
            self.shapes[places] = [1, "length"]
            expand = self.take(spread, "Expand", shared=True)
            column = self.constant(expand, 0, 3)
            frequencies = column.ravel()
            if column.shape != (1, len(frequencies), 1) or self.sizes(expand.input[1]) != [1, 1, 1]:
                refuse("expected a column of frequencies", expand)
        if factor != 1 or [*both.input] != [both.input[0]] * 2:
            refuse("expected the cosine and sine of angles alone", scaled, both)
        return frequencies, wave.op_type

    def _split(self, heads: list[str]) -> tuple[str, list[Any]]:
        """Cover q, k and v [batch, heads, length, size] as thirds of one tensor; return it, and its shape."""
        split: onnx.NodeProto | None = None
        for place, head in enumerate(heads):
            squeeze = self.take(self.take(head, "Transpose", perm=_SPLIT).input[0], "Squeeze")
            node = self.take(squeeze.input[0], "Split", axis=-3)
            split = split or node
            if (
                node is not split
                or self.vector(squeeze) != [-3]
                or [*node.output].index(squeeze.input[0]) != place
            ):
                refuse("expected q, k and v of one linear", squeeze, node)
        assert split is not None
        if self.vector(split) != [1, 1, 1]:
            refuse("expected three parts of 1", split)
        reshape = self.take(split.input[0], "Reshape")
        return str(reshape.input[0]), self.sizes(reshape.input[1])

    # heads

    def _head(self, outputs: list[str]) -> None:
        self.owner = "head"
        name, answers = self._answers(outputs)
        steps: list[_Step] = []
        pooling: plan.Pooling = "tokens"
        while (step := self._step(name := self._behind_casts(name))) is not None:
            steps.insert(0, step)
            name = step.read
        if self.kind(name) in ("Gather", "ReduceSum", "Div"):
            pooling, name = self._pooled(name)
        elif steps and any(step.of_rows for step in steps):
            refuse("expected one token of each row", self.index.producers.get(name, name))
        for number, step in enumerate(steps):
            self.constants |= {f"head.{number}.{part}": array for part, array in step.arrays.items()}
        listed = tuple(plan.Step(kind=step.kind, epsilon=step.epsilon) for step in steps)
        read = self._half(name).name
        self._add(plan.Head(name="head", input=read, pooling=pooling, steps=listed, answers=answers))

    def _behind_casts(self, name: str) -> str:
        while self.kind(name) == "Cast":
            name = self.take(name, "Cast", to=TensorProto.FLOAT).input[0]
        return name

    def _step(self, name: str) -> _Step | None:
        """Cover the last step of a head; None: it has none before `name`."""
        kind = self.kind(name)
        if kind in _STEPS:
            return _Step(_STEPS[kind], self.take(name, kind).input[0])
        if kind == "Gelu":
            return _Step(*self._gelu(name))
        if kind == "Div" and self.kind(self.index.producers[name].input[1]) != "Cast":
            return _Step("normalize", self._normalized(name), of_rows=True)
        if kind == "LayerNormalization" and self.kind(self.index.producers[name].input[0]) in _ACTIVATED:
            norm = self.take(name, "LayerNormalization", free=("epsilon",))
            arrays = {part: self.constant(norm, place, 1) for place, part in ((1, "gamma"), (2, "beta"))}
            epsilon = float(read_attribute(norm, "epsilon", 1e-5))
            return _Step("norm", norm.input[0], arrays, epsilon=epsilon)
        if kind == "Gemm":
            product = self.take(name, "Gemm", transB=1)
            bias = self.constant(product, 2, 1) if len(product.input) > 2 else None
            weight = self.constant(product, 1, 2)
        else:
            matmul = self._product(name)
            if matmul is None or self.index.constant(matmul.input[1]) is None:
                return None
            name, bias = self.operands(self.take(name, "Add"), 1) if kind == "Add" else (name, None)
            product = self.take(name, "MatMul")
            weight = self.constant(product, 1, 2).T
        bias = np.zeros(len(weight), np.float32) if bias is None else bias
        return _Step("dense", product.input[0], {"weight": weight, "bias": bias}, of_rows=kind == "Gemm")

    def _answers(self, outputs: list[str]) -> tuple[str, tuple[plan.Answer, ...]]:
        """Return the tensor that the outputs are of, and each output."""
        if len(outputs) == 1:
            return outputs[0], (plan.Answer(name=outputs[0]),)
        answers, sources = [], set()
        for name in outputs:
            squeezed, wide = name, self.kind(name) == "Unsqueeze"
            if wide:  # of a cut graph
                again = self.take(name, "Unsqueeze")
                squeezed = again.input[0] if self.vector(again) == [-1] else refuse("expected columns", again)
            squeeze = self.take(squeezed, "Squeeze")
            split = self.take(squeeze.input[0], "Split", axis=-1)
            if self.vector(squeeze) != [2] or {*self.vector(split)} != {1}:
                refuse("expected columns of 1", squeeze, split)
            column = [*split.output].index(squeeze.input[0])
            answers.append(plan.Answer(name=name, column=column, wide=wide))
            sources.add(split.input[0])
        return (sources.pop(), tuple(answers)) if len(sources) == 1 else refuse("no one tensor", *outputs)

    def _normalized(self, name: str) -> str:
        div = self.take(name, "Div")
        norm = self.take(self._at_least(div.input[1]), "ReduceL2")
        if norm.input[0] != div.input[0] or self.vector(norm) != [1]:
            refuse("expected a vector over its own length", div, norm)
        return str(div.input[0])

    def _at_least(self, name: str) -> str:
        """Return what a Clip keeps above a small number, so that nothing is divided by 0."""
        clip = self.take(name, "Clip")
        if not 0 < self.constant(clip, 1) <= 1e-6 or any(clip.input[2:]):
            refuse("expected a small lower bound alone", clip)
        return str(clip.input[0])

    def _pooled(self, name: str) -> tuple[plan.Pooling, str]:
        if self.kind(name) == "Gather":
            gather = self.take(name, "Gather", axis=1)
            return (
                ("first", gather.input[0]) if self.constant(gather, 1) == 0 else refuse("expected 0", gather)
            )
        if self.kind(name) == "Div":
            return "mean", self._mean(name)
        total = self.take(name, "ReduceSum", keepdims=0)
        product = self.take(total.input[0], "Mul")
        weights = self.take(product.input[1], "Unsqueeze")
        if self.vector(total) != [1] or self.vector(weights) != [2]:
            refuse("expected a sum over tokens", total, weights)
        share = weights.input[0]
        if self.kind(share) == "Div":
            div = self.take(share, "Div")
            count = self.take(self._at_least(div.input[1]), "ReduceSum")
            pooling, kept = "mean", div.input[0]
            right = self.vector(count) == [1] and count.input[0] == kept
        else:
            chosen = self.take(share, "Mul")
            equal = self.take(self.take(chosen.input[1], "Cast", to=TensorProto.FLOAT).input[0], "Equal")
            most, places = self.take(equal.input[1], "ReduceMax"), self.take(equal.input[0], "Mul")
            numbers = self.take(places.input[0], "Range")
            length = self.sizes(self.take(numbers.input[1], "Cast", to=TensorProto.FLOAT).input[0])
            pooling, kept = "last", chosen.input[0]
            right = self.vector(most) == [1] and most.input[0] == equal.input[0] and places.input[1] == kept
            ends = [float(self.constant(numbers, position)) for position in (0, 2)]
            right &= (ends, length) == ([0, 1], "length")
        if not right:
            refuse("expected the mean of the attended tokens, or the last of them", total)
        self._of_mask(kept, TensorProto.FLOAT)
        return pooling, str(product.input[0])  # type: ignore[return-value]

    def _mean(self, name: str) -> str:
        """Cover `sum(states * mask) / sum(mask)` over the tokens of each row; return the states."""
        div = self.take(name, "Div")
        total = self.take(div.input[0], "ReduceSum", keepdims=0)
        product = self.take(total.input[0], "Mul")
        states, mask = product.input
        mask = self.take(mask, "Cast", to=TensorProto.FLOAT).input[0]
        outer = self.take(mask, "Unsqueeze")
        count = self.take(self.take(div.input[1], "Cast", to=TensorProto.FLOAT).input[0], "ReduceSum")
        right = {outer.input[0], count.input[0]} == {MASK} and self.vector(outer) in ([-1], [2])
        if not right or self.vector(total) != [1] or self.vector(count) != [1]:
            refuse("expected the mean of the attended tokens", div)
        return str(states)
