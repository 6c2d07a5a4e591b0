"""Who takes part on a GPU: one table of contestants, each in the best form that it has."""

import importlib.metadata
from dataclasses import dataclass, replace
from typing import Literal

from qdqbench.eval.bench.cell import TORCH_FP32, BenchOptions
from qdqbench.eval.bench.results import BenchContestant
from qdqbench.eval.bench.target import Target

EXACT = ", exact shape"


@dataclass(frozen=True)
class Kind:
    """A contestant of the table: an engine has a profile, a peer of PyTorch has none."""

    name: str
    label: str
    precision: Literal["int8", "fp16", "fp32"]
    profile: Literal["recipe", "static", ""] = ""  # shapes that the engine takes
    mode: str = ""  # of torch.compile; empty: eager
    graph: bool = True  # in a CUDA graph
    recipe: str = ""  # another than the bench's


TABLE = (
    Kind("int8", "INT8 engine", "int8", "recipe"),
    Kind("int8-exact", f"INT8 engine{EXACT}", "int8", "static"),
    Kind("fp16", "FP16 engine", "fp16", "recipe"),
    Kind("fp16-exact", f"FP16 engine{EXACT}", "fp16", "static"),
    Kind("fp32", "FP32 engine", "fp32", "recipe"),
    Kind(TORCH_FP32, "PyTorch FP32, CUDA graph", "fp32"),
    Kind("torch-fp16-eager", "PyTorch FP16", "fp16", graph=False),
    Kind("torch-fp16", "PyTorch FP16, CUDA graph", "fp16"),
    Kind("compile-fp16-eager", "torch.compile FP16", "fp16", mode="default", graph=False),
    Kind("compile-fp16", "torch.compile FP16, CUDA graph", "fp16", mode="default"),
    Kind("autotune-fp16", "max-autotune FP16, CUDA graph", "fp16", mode="max-autotune-no-cudagraphs"),
)


def table_of(target: Target | None, options: BenchOptions) -> dict[str, Kind]:
    """The kinds that were asked for, by name; without a target the peers alone."""
    twins = target.twins if target else ()
    wanted = [
        kind
        for kind in TABLE
        if not kind.profile or (kind.precision in twins and (kind.precision != "fp32" or options.fp32))
    ]
    wanted += [
        Kind(f"int8-{name}", f"INT8 engine, {name}", "int8", "recipe", recipe=name)
        for name in (target.also if target else ())
    ]
    if options.profile != "both":
        wanted = [kind for kind in wanted if kind.profile != "static"]
    if options.profile == "static":
        wanted = [
            replace(kind, profile="static", label=kind.label + EXACT) if kind.profile else kind
            for kind in wanted
        ]
    return {
        kind.name: kind
        for kind in wanted
        if (options.peers or kind.profile) and kind.name not in options.without
    }


def contestants(target: Target, options: BenchOptions, backend: str) -> list[BenchContestant]:
    """Who takes part, in the order of tables and charts; `backend` is the engine builder and its version."""
    torch = f"torch {importlib.metadata.version('torch')}"
    return [
        BenchContestant(
            name=kind.name,
            label=kind.label,
            precision=kind.precision,
            backend=backend if kind.profile else torch,
            recipe=target.also[kind.recipe].session.recipe.model_dump(mode="json") if kind.recipe else None,
        )
        for kind in table_of(target, options).values()
    ]
