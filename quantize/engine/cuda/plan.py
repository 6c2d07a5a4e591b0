"""The plan of an engine as plain data: operations on token-packed tensors, and the ONNX nodes of each.

Tensors are [T, width], with T the tokens of all rows without padding. They have the names of the ONNX
tensors that they hold. Arrays of an operation are named `OPERATION.PART`, those of a tensor `TENSOR.PART`:
`pack` lists them. Operations come in the order of computation.

Codes are `clip(rint(x), -128, 127)`, as QuantizeLinear rounds: half to even.
"""

from typing import Annotated, Literal

from pydantic import Field

from qdqbench.quantize.utils.schema import Frozen, Positive

Activation = Literal["gelu", "gelu_tanh"]
Pooling = Literal["tokens", "first", "mean", "last"]
StepKind = Literal["dense", "tanh", "relu", "sigmoid", "gelu", "gelu_tanh", "normalize"]


class Tensor(Frozen):
    """A buffer [T, width]. INT8 ones hold codes: of one scale, or of one for each channel (None)."""

    kind: Literal["int8", "fp16"]
    width: Positive
    scale: float | None = None


class View(Frozen):
    """Columns of a tensor: q, k or v in the output of a merged GEMM."""

    tensor: str
    column: int = 0


class _Operation(Frozen):
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


class Quantized(_Operation):
    """An operation that writes FP16, INT8 codes, or both: codes are `rint(y * TENSOR.multiplier)`."""

    half: str | None = None
    codes: tuple[str, ...] = ()

    @property
    def writes(self) -> tuple[str, ...]:
        return self.codes if self.half is None else (self.half, *self.codes)


class Embed(Quantized):
    """The LayerNorm of the sum of three tables, by word, position and type: `NAME.word` and so on.

    A model without types has a table of one row of zeros.
    """

    op: Literal["embed"] = "embed"
    epsilon: float
    padding: int | None = None  # id of padding, that positions are counted past; None: the place in the row
    typed: bool = True  # types are an input; else all are 0


class Norm(Quantized):
    """LayerNorm with `NAME.gamma` and `NAME.beta`."""

    op: Literal["norm"] = "norm"
    input: str
    epsilon: float


class Quantize(Quantized):
    """Codes of an FP16 tensor that no kernel writes with what makes it."""

    op: Literal["quantize"] = "quantize"
    input: str


class Linear(_Operation):
    """Codes or FP16 of `activation(input @ NAME.weight.T * NAME.scale + NAME.bias) + residual`.

    The scale of output codes is in scale and bias; behind an activation and FP16 weights it is in
    `OUTPUT.multiplier`. An INT8 residual is multiplied by `NAME.residual`. FP16 weights have no scale; their
    product with the bias is rounded to FP16.
    """

    op: Literal["linear"] = "linear"
    input: str
    weight: Literal["int8", "fp16"]
    activation: Activation | None = None
    residual: str | None = None
    output: str
    parts: tuple[str, ...] = ()  # of a merged q, k and v: ONNX tensors in the order of columns


class Attention(_Operation):
    """`softmax(q k^T * score_scale) v` over the tokens of each row; times `NAME.scale` for each channel.

    An INT8 softmax is codes `rint(p * probability_multiplier)`, whose sum with v's codes is an exact integer.
    """

    op: Literal["attention"] = "attention"
    query: View
    key: View
    value: View
    heads: Positive
    head_size: Positive
    score_scale: float  # scales of q and k are in it
    probability_multiplier: float | None = None  # None: FP16 attention
    output: str

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(view.tensor for view in (self.query, self.key, self.value))


class Step(Frozen):
    """One operation of a head, in FP32; dense: `HEAD.NUMBER.weight` [N, K] and `HEAD.NUMBER.bias`."""

    kind: StepKind


class Answer(Frozen):
    """An output of the graph; `column`: one of the head's columns, None: all of them."""

    name: str
    column: int | None = None


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


Operation = Annotated[
    Embed | Norm | Quantize | Linear | Attention | Head,
    Field(discriminator="op"),
]


class Plan(Frozen):
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
    def head(self) -> Head:
        return next(each for each in self.operations if isinstance(each, Head))
