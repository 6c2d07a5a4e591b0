"""What both CPU runtimes have in common: an engine's kernels, and how it computes what is not quantized."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from qdqbench.quantize.core.arrays import Array
from qdqbench.quantize.core.results import LayerRow

Compute = Literal["fp32", "bf16"]
Run = Callable[[Mapping[str, Array]], dict[str, Array]]
Sizes = tuple[int | None, int | None]  # batch and length; None: free
FREE: Sizes = (None, None)


@dataclass(frozen=True)
class Kernel:
    """One executed kernel, and its milliseconds where they were measured."""

    row: LayerRow
    ms: float


@dataclass(frozen=True)
class Signature:
    """What an input takes."""

    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]  # None: free, the batch on axis 0 and the length on the others


class Compiled(Protocol):
    """A model that a CPU runtime compiled."""

    inputs: dict[str, Signature]
    outputs: list[str]

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run once; every output by name."""

    def lanes(self) -> list[Run]:
        """One function a stream, each as `run`; they may run at once."""

    def blob(self) -> bytes:
        """The engine: what it compiled, for this version of the runtime and this kind of CPU."""

    def kernels(self) -> list[Kernel]:
        """Executed kernels in their order."""
