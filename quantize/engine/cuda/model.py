"""An engine of backend cuda as the other runtimes' are: signatures, and a layer table with times."""

from pathlib import Path
from typing import Any

import numpy as np

from qdqbench.quantize.engine.cpu_runtimes import CompiledModel, Kernel, Signature
from qdqbench.quantize.engine.cuda.file import list_rows, read_file
from qdqbench.quantize.engine.cuda.plan import Plan
from qdqbench.quantize.engine.cuda.runtime import CudaEngine, load_engine


def load_kernels(path: Path) -> tuple["CudaModel", int]:
    """Return the engine of a file on the current GPU, and the bytes that it takes there.

    Raises:
        UserError: a damaged file, or one of another version.
        MissingDevice: no GPU that it is for, or a driver that cannot load its kernels.
    """
    import torch

    file = read_file(path)
    free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
    engine = load_engine(file, CudaModel, tiles_path(path))
    return engine, max(0, free - torch.cuda.mem_get_info()[0])


def tiles_path(engine: Path) -> Path:
    """Return the file that keeps the fastest tiles of an engine."""
    return engine.with_name(f"{engine.name}.tiles.json")


class CudaModel(CudaEngine, CompiledModel):
    """An engine with signatures and a layer table."""

    def __init__(self, plan: Plan, *given: Any) -> None:
        super().__init__(plan, *given)
        self.inputs = dict.fromkeys(plan.inputs, Signature(np.dtype(np.int64), (None, None)))
        for name in plan.given:  # states of a cut graph
            width = plan.tensors[name].own
            self.inputs[name] = Signature(np.dtype(np.float32), (None, None, width))
        self.outputs = [*(answer.name for answer in plan.head.answers), *plan.states]
        self.lanes = [self.run]

    def blob(self) -> bytes:
        raise NotImplementedError("an engine file is written where it is built")

    def kernels(self) -> list[Kernel]:
        """Return the layer table with the times of the operations on the last batch, each alone."""
        assert self.ran is not None
        times = [sum(times.values()) for times in self.profile(self.ran)]
        return [Kernel(row, ms) for row, ms in zip(list_rows(self.plan), times, strict=True)]
