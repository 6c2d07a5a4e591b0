"""The plan of an engine as plain data: operations on token-packed tensors, and the ONNX nodes of each.

Tensors are [T, width], with T the tokens of all rows without padding. They have the names of the ONNX
tensors that they hold. Arrays of an operation are named `OPERATION.PART`, those of a tensor `TENSOR.PART`:
`pack` lists them. Operations come in the order of computation.

Codes are `clip(rint(x), -128, 127)`, as QuantizeLinear rounds: half to even.
"""

from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from math import isfinite
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from qdqbench.quantize.utils.errors import UserError

Activation = Literal["gelu", "gelu_tanh"]
Pooling = Literal["tokens", "first", "mean", "last"]
StepKind = Literal["dense", "tanh", "relu", "sigmoid", "gelu", "gelu_tanh", "normalize", "norm"]
Positive = Annotated[int, "over 0"]
_MOST = 1 << 31  # integers of a plan are below


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A buffer [T, width]. INT8 ones hold codes: of one scale, or of one for each channel (None).

    Behind the model's own `channels` a wider one has such that change nothing.
    """

    kind: Literal["int8", "fp16"]
    width: Positive
    scale: float | None = None
    channels: Positive | None = None  # None: all of them

    @property
    def own(self) -> int:
        """Channels of the model."""
        return self.channels or self.width


@dataclass(frozen=True, kw_only=True)
class View:
    """Columns of a tensor: q, k or v in the output of a merged GEMM."""

    tensor: str
    column: int = 0


@dataclass(frozen=True, kw_only=True)
class _Operation:
    name: str
    nodes: tuple[str, ...] = ()  # of the ONNX graph

    @property
    def reads(self) -> tuple[str, ...]:
        """Tensors, the main one first."""
        given = (getattr(self, "input", None), getattr(self, "residual", None))
        return tuple(name for name in given if name is not None)

    @property
    def writes(self) -> tuple[str, ...]:
        return (str(getattr(self, "output", "")),)


@dataclass(frozen=True, kw_only=True)
class Quantized(_Operation):
    """An operation that writes FP16, INT8 codes, or both: codes are `rint(y * TENSOR.multiplier)`."""

    half: str | None = None
    codes: tuple[str, ...] = ()

    @property
    def writes(self) -> tuple[str, ...]:
        return self.codes if self.half is None else (self.half, *self.codes)


@dataclass(frozen=True, kw_only=True)
class Embed(Quantized):
    """The LayerNorm of the sum of three tables, by word, position and type: `NAME.word` and so on.

    A model without types has a table of one row of zeros.
    """

    op: Literal["embed"] = "embed"
    epsilon: float
    padding: int | None = None  # id of padding, that positions are counted past; None: the place in the row
    typed: bool = True  # types are an input; else all are 0
    placed: bool = True  # there is a table of positions
    span: Positive | None = None  # most tokens of a row, if attention has a bias by their distances


@dataclass(frozen=True, kw_only=True)
class Norm(Quantized):
    """LayerNorm with `NAME.gamma` and `NAME.beta`."""

    op: Literal["norm"] = "norm"
    input: str
    epsilon: float


@dataclass(frozen=True, kw_only=True)
class Quantize(Quantized):
    """Codes of an FP16 tensor that no kernel writes with what makes it."""

    op: Literal["quantize"] = "quantize"
    input: str


@dataclass(frozen=True, kw_only=True)
class Linear(_Operation):
    """Codes or FP16 of `activation(input @ NAME.weight.T * NAME.scale + NAME.bias) - center + residual`.

    The scale of output codes is in scale and bias; behind an activation and FP16 weights it is in
    `OUTPUT.multiplier`. An INT8 residual is multiplied by `NAME.residual`. FP16 weights have no scale; their
    product with the bias is rounded to FP16.

    If `gated`, columns 2 j and 2 j + 1 of the product make output j: `activation(one) * other`. If `rotary`,
    columns are q, k and v in heads of that size. Columns 2 j and 2 j + 1 of each head of q and k are rotated
    by the angle `position * NAME.frequencies[j]`.
    """

    op: Literal["linear"] = "linear"
    input: str
    weight: Literal["int8", "fp16"]
    activation: Activation | None = None
    gated: bool = False
    rotary: Positive | None = None
    residual: str | None = None
    center: float = 0.0  # subtracted behind an activation, from what becomes codes
    output: str
    parts: tuple[str, ...] = ()  # of a merged q, k and v: ONNX tensors in the order of columns


@dataclass(frozen=True, kw_only=True)
class Attention(_Operation):
    """`softmax(q k^T * score_scale) v` over the tokens of each row; times `NAME.scale` for each channel.

    An INT8 softmax is codes `rint(p * probability_multiplier)`, whose sum with v's codes is an exact integer.
    With `row_max` p is over the largest of its row, whose code is 255, and the sum is divided by that of
    the codes. If `biased`, the score of query i and key j has `NAME.bias[head, j - i + span - 1]` added.
    With a `window` a query sees the keys up to so many tokens to each side.
    """

    op: Literal["attention"] = "attention"
    query: View
    key: View
    value: View
    heads: Positive
    head_size: Positive
    score_scale: float  # scales of q and k are in it
    probability_multiplier: float | None = None  # None: FP16 attention
    row_max: bool = False
    biased: bool = False
    window: Positive | None = None
    output: str

    @property
    def views(self) -> tuple[View, View, View]:
        return self.query, self.key, self.value

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(view.tensor for view in self.views)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One operation of a head, in FP32.

    Dense: `HEAD.NUMBER.weight` [N, K] and `HEAD.NUMBER.bias`. LayerNorm: `HEAD.NUMBER.gamma`, `.beta`.
    """

    kind: StepKind
    epsilon: float | None = None  # of a LayerNorm


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An output of the graph; `column`: one of the head's columns, None: all of them."""

    name: str
    column: int | None = None
    wide: bool = False  # a column keeps its axis, of 1

    @property
    def place(self) -> int | slice:
        """The columns of the answer."""
        if self.column is None:
            return slice(None)
        return slice(self.column, self.column + 1) if self.wide else self.column


@dataclass(frozen=True, kw_only=True)
class Head(_Operation):
    """The answers, in FP32: one of each row, or one of each token (`tokens`)."""

    op: Literal["head"] = "head"
    input: str
    pooling: Pooling
    steps: tuple[Step, ...]
    answers: tuple[Answer, ...]

    @property
    def writes(self) -> tuple[str, ...]:
        return ()


Operation = Embed | Norm | Quantize | Linear | Attention | Head


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that an engine computes; weights are in the arrays next to it.

    A graph that is cut to be verified has as many states given as it gives: FP16 tensors.
    """

    inputs: tuple[str, ...]
    given: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    tensors: dict[str, Tensor]
    operations: tuple[Operation, ...]

    @property
    def embed(self) -> Embed:
        return next(each for each in self.operations if isinstance(each, Embed))

    @property
    def linears(self) -> list[Linear]:
        return [each for each in self.operations if isinstance(each, Linear)]

    @property
    def attentions(self) -> list[Attention]:
        return [each for each in self.operations if isinstance(each, Attention)]

    @property
    def measures_distances(self) -> bool:
        """Attention counts the tokens between a query and a key."""
        return self.embed.span is not None or any(each.window for each in self.attentions)

    @property
    def head(self) -> Head:
        return next(each for each in self.operations if isinstance(each, Head))


def parse(kind: Any, value: Any) -> Any:  # noqa: PLR0911
    """Return a value of a type in this module from JSON; UserError where it is none."""
    origin, inner = get_origin(kind), get_args(kind)
    if type(None) in inner:
        return None if value is None else parse(inner[0], value)
    match value:
        case dict() if is_dataclass(kind):
            return _parse_record(kind, value)
        case dict() if origin is dict:
            return {key: parse(inner[1], each) for key, each in value.items()}
        case {"op": str(name)} if name in (
            kinds := {get_args(_hints(each)["op"])[0]: each for each in inner}
        ):
            return _parse_record(kinds[name], value)
        case list() if origin is tuple:
            return tuple(parse(inner[0], each) for each in value)
        case str() if kind is str or (origin is Literal and value in inner):
            return value
        case bool() if kind is bool:
            return value
        case int() if type(value) is int and abs(value) < _MOST:
            if kind is int or (kind == Positive and value > 0):
                return value
            value = float(value)
    if kind is float and isinstance(value, float) and isfinite(value):
        return value
    raise UserError(f"{str(value)[:40]!r} is no {getattr(kind, '__name__', 'operation')} of a plan")


def _parse_record(kind: Any, value: dict[str, Any]) -> Any:
    hints = _hints(kind)
    needed = {each.name for each in fields(kind) if each.default is MISSING}
    if wrong := (value.keys() - hints.keys()) | (needed - value.keys()):
        raise UserError(f"{min(wrong)[:40]!r} is unknown or missing in {kind.__name__}")
    return kind(**{name: parse(hints[name], each) for name, each in value.items()})


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)
