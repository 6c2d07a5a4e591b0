"""Engine latency without a GPU: a sum of physical terms, fitted to engines that were measured.

Every term is a count of the plan and the model's shapes (matrix products, bytes, kernels), and its
coefficient is the milliseconds that one of it takes, so none may be negative: nonnegative least squares
(Lawson and Hanson 1974) on relative errors. What it says is modelled and not measured, for the GPU and
backend of its data only.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import PrivateAttr, model_validator

from qdqbench.quantize.core.arrays import Float64
from qdqbench.quantize.core.errors import MissingDevice, UserError
from qdqbench.quantize.core.strict import Frozen, Strict, read
from qdqbench.quantize.families.family import ENCODER_KINDS
from qdqbench.quantize.families.known import family_of
from qdqbench.quantize.recipe.plan import Plan

DATA = "cost_data.json"  # beside this file
COST_COLUMNS = (*ENCODER_KINDS, "attention")
TILE, WAVE = 128, 128  # a GEMM below one wave of 128 output tiles of 128 x 128 takes as long as a full one

TERMS = {
    "base": "one run, whatever is in it",
    "kernels": "kernels, each with its launch",
    "int8_kernels": "INT8 products, each with what it takes beside its multiply-adds",
    "fp16_gemm": "FP16 matrix products, multiply-adds in units of 128^3, at least one wave each",
    "int8_gemm": "INT8 matrix products, the same",
    "traffic": "bytes of tensors and weights that the linears, LayerNorms and residuals read and write",
    "gelu": "elements of a GELU that is a kernel of its own, behind an INT8 product",
    "attention_fp16": "multiply-adds of fused FP16 attentions",
    "attention_int8": "multiply-adds of fused INT8 attentions",
    "borders": "elements that are quantized in a kernel of their own, where FP16 meets INT8",
    "heads": "elements of q, k and v that are copied to their heads before an INT8 attention",
    "unmerged": "elements of q, k and v that are not made by one product",
    "embeddings": "elements of the embeddings",
}


class ModelShape(Frozen):
    """Sizes of a BERT encoder."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    gated: bool = False  # the first feed-forward linear is twice as wide


class CostRow(Frozen):
    """One measured engine at one shape, and its FP16 twin in the same process."""

    name: str  # of the model
    model: ModelShape
    batch: int
    length: int
    placement: dict[str, str]  # by COLUMNS: one character a layer, "1" is INT8
    ms_int8: float
    ms_fp16: float
    gpu: str
    backend: str
    version: str
    clock_mhz: float | None = None

    @model_validator(mode="after")
    def _complete(self) -> "CostRow":
        if set(self.placement) != set(COST_COLUMNS) or {len(v) for v in self.placement.values()} != {
            self.model.layers
        }:
            raise ValueError(f"placement needs {', '.join(COST_COLUMNS)} with one character for each layer")
        if not (self.ms_int8 > 0 and self.ms_fp16 > 0):
            raise ValueError("latencies must be positive")
        return self

    @property
    def engine(self) -> str:
        """Same text for the rows of one engine."""
        return json.dumps([self.name, self.model.model_dump(), self.placement], sort_keys=True)

    @property
    def mixed(self) -> bool:
        """Whether some linears are in INT8 and others in FP16."""
        return len({value for kind in ENCODER_KINDS for value in self.placement[kind]}) > 1

    @property
    def machine(self) -> tuple[str, str, str]:
        """What the latencies are of."""
        return self.gpu, self.backend, self.version


class FitError(Strict):
    """Relative errors when the rows of one engine at a time are left out of the fit."""

    ms_median: float
    ms_p90: float
    speedup_median: float
    speedup_p90: float


class CostModel(Strict):
    """Coefficients and the measurements that they were fitted to."""

    schema_version: Literal[1] = 1
    gpu: str
    backend: str
    version: str
    n: int  # rows
    engines: int
    coefficients: dict[str, float]  # milliseconds of one unit of each term, over all shapes alike
    leave_one_out: FitError
    rows: list[CostRow]
    _local: dict[tuple[int, int], Float64] = PrivateAttr(default_factory=dict)

    def predict(self, model: ModelShape, placement: "Placement", batch: int, length: int) -> float:
        """Milliseconds of one run, from the rows that are nearest to the shape."""
        key = batch, length
        if key not in self._local:
            self._local[key] = solve(self.rows, batch, length)
        return float(terms(model, placement, batch, length) @ self._local[key])

    @property
    def label(self) -> str:
        """Where its numbers come from, for every place that shows one."""
        made = f"{self.engines} engines of {self.backend} {self.version} on {self.gpu}"
        return f"modelled, not measured: fitted to {made}"

    def outside(self, model: ModelShape, batch: int, length: int) -> list[str]:
        """Sizes and placements that lie outside of what was measured."""
        rows = [_sizes(row.model, row.batch, row.length) for row in self.rows]
        found = []
        for name, value in _sizes(model, batch, length).items():
            known = [sizes[name] for sizes in rows]
            if not min(known) <= value <= max(known):
                found.append(f"{name} {value} (measured: {min(known)} to {max(known)})")
        mixed = sorted({(row.batch, row.length) for row in self.rows if row.mixed})
        if not mixed:
            found.append(
                "linears in INT8 beside others in FP16 (measured: all alike): a border costs nothing"
            )
        elif (batch, length) not in mixed:
            shapes = ", ".join(f"{b} x {n}" for b, n in mixed)
            found.append(
                f"linears in INT8 beside others in FP16 at batch {batch} x {length} tokens "
                f"(measured at {shapes})"
            )
        return found


def _sizes(model: ModelShape, batch: int, length: int) -> dict[str, int]:
    return {**model.model_dump(), "batch": batch, "length": length}


@dataclass(frozen=True)
class Placement:
    """What is INT8, by layer."""

    linears: dict[str, tuple[float, ...]]  # kind -> part of its linears that is INT8, of each layer
    attention: tuple[bool, ...]

    @classmethod
    def parse(cls, columns: dict[str, str]) -> "Placement":
        """From a row."""
        linears = {kind: tuple(float(c == "1") for c in columns[kind]) for kind in ENCODER_KINDS}
        return cls(linears, tuple(c == "1" for c in columns["attention"]))

    @classmethod
    def of_plan(cls, plan: Plan, layers: int) -> "Placement":
        """From a resolved recipe."""
        family = plan.family
        own = {layer for n in (*plan.int8, *plan.high) if (layer := family.layer_of(n)) is not None}
        runs = family.run_order(len(own) or layers, layers)
        counts = {kind: [[0, 0] for _ in range(layers)] for kind in ENCODER_KINDS}
        for name in (*plan.int8, *plan.high):
            kind, layer = family.kind(name), family.layer_of(name)
            if kind in counts and layer is not None:
                counts[kind][layer][0] += name in plan.int8
                counts[kind][layer][1] += 1
        linears = {
            kind: tuple(each[n][0] / each[n][1] if each[n][1] else 0.0 for n in runs)
            for kind, each in counts.items()
        }
        inside = {family.layer_of(name) for name in plan.attention}
        return cls(linears, tuple(layer in inside for layer in runs))

    @classmethod
    def none(cls, layers: int) -> "Placement":
        """The FP16 twin."""
        return cls(dict.fromkeys(ENCODER_KINDS, (0.0,) * layers), (False,) * layers)


def terms(model: ModelShape, placement: Placement, batch: int, length: int) -> Float64:
    """Counts of every term, float64 [terms], in the order of TERMS."""
    tokens, hidden, inner = batch * length, model.hidden, model.intermediate
    count = dict.fromkeys(TERMS, 0.0)
    count["base"] = 1.0
    count["embeddings"] = tokens * hidden
    products = {  # output and inner size of each kind
        "qkv": (3 * hidden, hidden),
        "output": (hidden, hidden),
        "ffn-in": ((1 + model.gated) * inner, hidden),
        "ffn-out": (hidden, inner),
    }
    for layer in range(model.layers):
        share = {kind: placement.linears[kind][layer] for kind in ENCODER_KINDS}
        for kind, (rows, depth) in products.items():
            work = max(tokens * rows / TILE**2, WAVE) * depth / TILE
            count["int8_gemm"] += share[kind] * work
            count["fp16_gemm"] += (1 - share[kind]) * work
            # q, k and v have scales of their own and stay three products in INT8 (`export.qkv: separate`)
            count["int8_kernels"] += share[kind] * (3 if kind == "qkv" else 1)
            count["traffic"] += (2 - share[kind]) * (tokens + rows) * depth + 2 * tokens * rows
        split = 0 < share["qkv"] < 1
        count["kernels"] += (3 if split else 1) + 6 + (share["ffn-in"] > 0)
        count["unmerged"] += 3 * tokens * hidden if split else 0
        # two LayerNorms: product and residual in, FP16 out, and INT8 out where an INT8 linear reads it
        count["traffic"] += (12 + (share["qkv"] > 0) + (share["ffn-in"] > 0)) * tokens * hidden
        count["gelu"] += share["ffn-in"] * tokens * inner
        count["borders"] += (1 - share["ffn-in"]) * share["ffn-out"] * tokens * inner
        fused = placement.attention[layer]
        count["attention_int8" if fused else "attention_fp16"] += 2 * tokens * length * hidden
        if fused:
            count["heads"] += 3 * tokens * hidden
            count["borders"] += (1 - share["qkv"]) * 3 * tokens * hidden
    return np.array(list(count.values()), dtype=np.float64)


def equations(rows: Sequence[CostRow]) -> tuple[Float64, Float64]:
    """Terms [2 rows, terms] and milliseconds [2 rows] of every engine and every twin."""
    counts, times = [], []
    for row in rows:
        for placement, ms in (
            (Placement.parse(row.placement), row.ms_int8),
            (Placement.none(row.model.layers), row.ms_fp16),
        ):
            counts.append(terms(row.model, placement, row.batch, row.length))
            times.append(ms)
    return np.array(counts), np.array(times)


def solve(rows: Sequence[CostRow], batch: int | None = None, length: int | None = None) -> Float64:
    """Coefficients [terms] with the least squared relative error, none negative.

    Builders choose kernels by shape, and a kernel's speed changes with it in steps that no such sum follows.
    So rows of the asked (batch, length) count in full, others a tenth for each factor of two between them.
    """
    from scipy.optimize import nnls

    counts, times = equations(rows)
    weights = np.ones(len(times))
    if batch is not None and length is not None:
        apart = [abs(math.log2(r.batch / batch)) + abs(math.log2(r.length / length)) for r in rows]
        weights = np.repeat(10.0 ** -np.array(apart), 2)
    relative = counts / times[:, None] * weights[:, None]
    largest = relative.max(axis=0)
    scale = np.where(largest > 0, largest, 1.0)  # terms differ by ten orders of magnitude
    found, _ = nnls(relative / scale, weights)
    return np.asarray(found / scale, dtype=np.float64)


def load_cost_model(path: Path | None = None) -> CostModel:
    """The cost model of a file, or the one that is shipped.

    Raises:
        MissingDevice: none is shipped; names the command that makes one.
        UserError: the file is not one.
    """
    if path is None:
        path = Path(__file__).parent / DATA
        if not path.is_file():
            raise MissingDevice(
                "latency can be measured on a GPU only, none is here, and no cost model is shipped; on a GPU "
                "run `qdqbench cost measure` and `qdqbench cost fit`, and give the file with --cost-model"
            )
    elif not path.is_file():
        raise UserError(f"there is no cost model {path}; make one with `qdqbench cost fit`")
    return read(path, CostModel, "cost model", "make it with `qdqbench cost fit`")


def shape_of(config: Any) -> ModelShape:
    """Sizes from a transformers configuration."""
    return ModelShape(
        layers=int(config.num_hidden_layers),
        hidden=int(config.hidden_size),
        intermediate=int(getattr(config, family_of(config).intermediate)),
        heads=int(config.num_attention_heads),
        gated=family_of(config).gated,
    )
