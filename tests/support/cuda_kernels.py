"""What kernels of backend cuda make, on a GPU or emulated, against the interpreter of their plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from qdqbench.eval.metrics.parity import LIMIT_FRACTION
from qdqbench.eval.verification.bisect import GELU_ERROR
from qdqbench.quantize.engine.cuda.interpret import compute
from qdqbench.quantize.engine.cuda.names import find_target, list_tiles
from qdqbench.quantize.engine.cuda.plan import (
    Answer,
    Attention,
    Head,
    Linear,
    Norm,
    Plan,
    Quantize,
    Step,
    Tensor,
)
from qdqbench.quantize.engine.cuda.runtime import CudaEngine
from qdqbench.quantize.engine.cuda.tokens import Tokens

SHARE, GELU_SHARE = 0.002, 0.01  # of codes that may differ by a step; the chip's tanh has an error of 2^-11
Array = np.ndarray[Any, Any]
EPILOGUES = [  # activation, residual and output of a GEMM
    (None, None, "int8"),
    ("gelu", None, "int8"),
    ("gelu_tanh", None, "int8"),
    ("gelu_tanh", None, "fp16"),
    (None, "fp16", "fp16"),
    (None, "int8", "fp16"),
    ("gated_gelu_tanh", None, "int8"),
    ("gated_gelu", None, "fp16"),
    ("rotary", None, "int8"),
    ("rotary", None, "fp16"),
]


def compare(
    name: str,
    got: Array,
    wanted: Array,
    *,
    share: float = SHARE,
    few: int = 3,
    steps: int = 1,
    least: float = 2e-3,
) -> None:
    """Codes are equal but for rounding borders, FP16 and FP32 but for the order of sums.

    A probability on a border moves all channels of a head, by up to two codes, and by one where it is over
    the largest of its row. The terms of a logit are larger than it may be.
    """
    assert got.shape == wanted.shape, name
    off = np.abs(got.astype(np.float64) - wanted)
    if got.dtype == np.int8:
        assert off.max(initial=0) <= steps, name
        assert (off > 0).sum() <= max(few, share * off.size), name
    else:
        assert off.max(initial=0) <= max(least, 4e-3 * np.abs(wanted).max()), name


def compare_kernels(engine: CudaEngine, tokens: Tokens) -> None:
    """Feed the interpreter of each operation with what the kernels made before it."""
    kept: dict[str, Any] = {}
    answers = engine.forward(engine.load(tokens), kept)
    count = len(tokens.ids)
    values = {name: tensor[:count].cpu().numpy() for name, tensor in kept.items()}
    by_row = engine.plan.head.pooling != "tokens"
    rows = len(tokens.starts) - 1 if by_row else count
    values |= {name: answer[:rows].cpu().numpy() for name, answer in answers.items()}
    for operation in engine.plan.operations:
        for name, wanted in compute(operation, engine.plan, engine.arrays, values, tokens).items():
            activated = isinstance(operation, Linear) and operation.activation is not None
            linear = isinstance(operation, Linear) and operation.weight == "int8" and not activated
            if linear and wanted.dtype == np.int8:
                assert (values[name] == wanted).all(), name  # sums of integers are exact
            limits: dict[str, Any] = {}
            if isinstance(operation, Head):  # sums of |terms| are up to 20, of states rounded to FP16
                limits = {"least": 5e-3}
            elif isinstance(operation, Attention):
                row_max = operation.row_max
                limits = {"few": operation.head_size, "steps": 1 if row_max else 2}
                limits["share"] = GELU_SHARE if row_max else SHARE
            elif activated and wanted.dtype == np.int8:
                zero = wanted.min() if operation.center else 0  # type: ignore[union-attr]
                reach = float(np.abs(wanted.astype(np.float64) - zero).mean())
                limits["share"] = max(GELU_SHARE, LIMIT_FRACTION + GELU_ERROR * reach)
            compare(f"{operation.name}: {name}", values[name], wanted, **limits)


def end(of: str) -> Head:
    return Head(name="head", input=of, pooling="first", steps=(), answers=(Answer(name="answer"),))


def make_gemm(k, n, activation, residual, output):
    """A GEMM of random codes with such an epilogue, from FP16 states `x` and `r`.

    Rotated heads take up to 47 more columns.
    """
    random, kinds = (
        np.random.default_rng(0),
        {"x": "fp16", "a": "int8", "r": "fp16", "b": "int8", "y": output},
    )
    rotary, gated = activation == "rotary", (activation or "").startswith("gated_")
    activation = None if rotary else activation and activation.removeprefix("gated_")
    n = -(-n // 48) * 48 if rotary else n
    rows = 2 * n if gated else n
    tensors = {name: Tensor(kind=kind, width=k if name in "xa" else n) for name, kind in kinds.items()}
    other = {"fp16": "r", "int8": "b"}.get(residual)
    center = 0.3 if activation and output == "int8" else 0.0
    head = next(size for size in (64, 32, 16) if n % (3 * size) == 0) if rotary else None
    form = {"activation": activation, "residual": other, "center": center, "gated": gated, "rotary": head}
    gemm = Linear(name="g", input="a", weight="int8", output="y", **form)
    quantize = [Quantize(name=f"of {x}", input=x, codes=(a,)) for x, a in ("xa", "rb")]
    plan = Plan(inputs=(), given=("x", "r"), tensors=tensors, operations=(*quantize, gemm, end("x")))
    arrays = {
        "a.multiplier": np.full(k, 30),
        "b.multiplier": np.full(n, 30),
        "y.multiplier": random.uniform(20, 40, n),
        "g.weight": random.integers(-127, 128, (rows, k)),
        "g.scale": random.uniform(1, 2, rows)
        / (30 * 127 * k**0.5)
        * (40 if not activation and output == "int8" else 1),
        "g.bias": random.normal(size=rows),
    }
    if head is not None:
        arrays["g.frequencies"] = random.uniform(0, 1, head // 2)
    if residual == "int8":
        arrays["g.residual"] = random.uniform(0.02, 0.04, n)
    if not activation:
        del arrays["y.multiplier"]
    return plan, {
        name: np.asarray(each, np.int8 if "weight" in name else np.float32) for name, each in arrays.items()
    }


TILED = [  # epilogues with each tile that Hopper has for them
    (epilogue, tile)
    for epilogue in EPILOGUES
    for plan, _ in [make_gemm(64, 64, *epilogue)]
    for tile in list_tiles(plan.operations[2], plan, find_target("9.0"))
]


def make_norm(width, codes):
    """A LayerNorm of random states that writes FP16, and codes of so many quantizers."""
    random, names = np.random.default_rng(0), [f"c{number}" for number in range(codes)]
    tensors = {name: Tensor(kind="fp16", width=width) for name in "xy"}
    tensors |= {name: Tensor(kind="int8", width=width) for name in names}
    norm = Norm(name="n", input="x", epsilon=1e-5, half="y", codes=tuple(names))
    arrays = {"n.gamma": random.uniform(0.5, 2, width), "n.beta": random.normal(size=width)}
    arrays |= {f"{name}.multiplier": random.uniform(20, 60, width) for name in names}
    plan = Plan(inputs=(), given=("x",), tensors=tensors, operations=(norm, end("y")))
    return plan, {name: each.astype(np.float32) for name, each in arrays.items()}


@dataclass(frozen=True)
class Dense:
    """Rows of random states, and a head of such steps."""

    lengths: tuple[int, ...]
    pooling: str
    steps: str
    widths: tuple[int, ...]
    alone: bool = True  # the kernel takes all steps: PyTorch takes none

    def __str__(self) -> str:
        return f"{self.pooling} {self.steps} {self.widths} of {len(self.lengths)}"

    def plan(self) -> Plan:
        head = Head(
            name="head",
            input="x",
            pooling=self.pooling,
            steps=tuple(Step(kind=kind) for kind in self.steps.split()),
            answers=(Answer(name="y"), Answer(name="z", column=self.widths[-1] - 1)),
        )
        return Plan(inputs=(), tensors={"x": Tensor(kind="fp16", width=self.widths[0])}, operations=(head,))

    def arrays(self) -> dict[str, Array]:
        random, sizes, made = np.random.default_rng(0), pairwise(self.widths), dict[str, Array]()
        for number in (number for number, kind in enumerate(self.steps.split()) if kind == "dense"):
            k, n = next(sizes)
            made[f"head.{number}.weight"] = random.normal(size=(n, k)) / k**0.5
            made[f"head.{number}.bias"] = random.normal(size=n)
        return {name: array.astype(np.float16).astype(np.float32) for name, array in made.items()}

    def tokens(self) -> Tokens:
        return give_states(self.lengths, {"x": self.widths[0]})


def give_states(lengths: Sequence[int], widths: Mapping[str, int]) -> Tokens:
    """Return rows of random FP16 states instead of ids."""
    random, count = np.random.default_rng(1), sum(lengths)
    states = {name: random.normal(size=(count, width)).astype(np.float16) for name, width in widths.items()}
    starts, (ids, types) = np.cumsum([0, *lengths], dtype=np.int32), np.zeros((2, count), np.int32)
    positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    return Tokens(ids, positions, types, starts, np.ones((1, count), bool), states)


DENSE = [
    Dense((8,) * 8, "first", "dense tanh dense", (768, 768, 2)),  # no spare row or token
    Dense((2,) * 256, "first", "dense sigmoid dense", (384, 384, 1)),
    Dense((2,) * 256, "last", "dense", (768, 768)),
    Dense((3, 1) * 65, "last", "dense gelu dense relu", (768, 1024, 40)),
    Dense((1,), "last", "dense relu dense", (128, 104, 17)),
    Dense((5, 2, 4), "first", "dense gelu_tanh dense tanh", (1024, 20, 300), alone=False),  # K of 20
    Dense((5, 2, 4), "first", "tanh dense relu sigmoid", (64, 33), alone=False),
    Dense((7,) * 9, "mean", "dense tanh normalize", (768, 8), alone=False),
    Dense((1,) * 300, "first", "dense tanh dense", (768, 768, 2), alone=False),  # and that many rows
]


def compare_dense(dense: Dense, engine: CudaEngine, tokens: Tokens) -> None:
    """Hold the answers of a head to those of the interpreter."""
    answers = engine.unpack(tokens, engine.forward(engine.load(tokens)))
    for name, wanted in compute(engine.plan.head, engine.plan, engine.arrays, tokens.given, tokens).items():
        compare(name, answers[name], wanted)
        if dense.alone and dense.steps.split().count("dense") == 1:  # FP32 from the sums on
            np.testing.assert_allclose(answers[name], wanted, rtol=1e-4, atol=1e-4)
