"""Engines by what their sidecars say: on a GPU, or on this CPU."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np

from qdqbench.quantize.engine.cpu_runtimes import compile_model
from qdqbench.quantize.engine.profiles import LENGTH_STEP
from qdqbench.quantize.engine.runtime.cpu import CpuEngine, CpuRunner
from qdqbench.quantize.engine.runtime.engine import BoundRun, Engine
from qdqbench.quantize.engine.runtime.tensors import Arrays, pad_to_profile
from qdqbench.quantize.engine.sidecar import read_sidecar
from qdqbench.quantize.tasks.types.kind import LOGITS, join_outputs
from qdqbench.quantize.utils.arrays import Float32, Int64
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.limits import CPU_BACKENDS, BackendName

MAX_GRAPHS = 16


class EngineRunner:
    """Callable on one batch: int64 [B, L] arrays to float32 answers [B, width] or [B, L or more, width].

    Lengths are padded with masked positions to a multiple of 16, so that shapes repeat, and batches with
    copies of their first row, where the profile's minimum is larger. A shape that comes a second time becomes
    a CUDA graph; the least recently used graph goes when there are too many, or too little memory.

    Args:
        path, onnx_path, runtime_cache: as of Engine.
        pad_id: token id of padding.
        graphs: most CUDA graphs to keep; 0 for none.
        outputs: of the graph, as the kind of task says; several are joined into one.

    Raises:
        UserError, MissingDevice: as of Engine; UserError also where one of them is not there.
    """

    def __init__(  # noqa: PLR0913
        self,
        path: Path,
        onnx_path: Path,
        *,
        pad_id: int,
        runtime_cache: Path | None = None,
        graphs: int = MAX_GRAPHS,
        outputs: Iterable[str] = LOGITS,
    ) -> None:
        self.pad_id = pad_id
        self._outputs = list(outputs)
        self.engine = Engine(path, onnx_path, runtime_cache=runtime_cache)
        if lost := [name for name in self._outputs if name not in self.engine.outputs]:
            raise UserError(f"{path} has no output {', '.join(lost)} but {', '.join(self.engine.outputs)}")
        free = self.engine.torch.cuda.mem_get_info()[0]
        room = free // 2 // max(1, self.engine.memory.activation_bytes)  # half of what is free
        self._most = min(graphs, int(room))
        self._graphs: OrderedDict[tuple[int, int], BoundRun] = OrderedDict()
        self._seen: set[tuple[int, int]] = set()

    @property
    def max_batch(self) -> int:
        """Largest batch of any profile."""
        return max(profile.max[0] for profile in self.engine.profiles)

    def __call__(self, batch: Mapping[str, Int64]) -> Float32:
        """Run one batch.

        Raises:
            CheckFailed: it is larger than every profile, or the engine fails.
        """
        rows = len(next(iter(batch.values())))
        feeds = pad_to_profile(batch, self.engine.profiles, self.engine.inputs, self.pad_id, LENGTH_STEP)
        answers = join_outputs(self._run(feeds), self._outputs)[:rows]
        return np.asarray(answers, dtype=np.float32)

    def _run(self, feeds: Arrays) -> Arrays:
        shape = next(iter(feeds.values())).shape
        if shape not in self._graphs and (shape not in self._seen or not self._most):
            self._seen.add(shape)
            return self.engine.run(feeds)
        if shape in self._graphs:
            self._graphs.move_to_end(shape)
        else:
            while len(self._graphs) >= self._most:
                self._graphs.popitem(last=False)[1].close()
            self._graphs[shape] = self.engine.bind(*shape)
        bound = self._graphs[shape]
        bound.load(feeds)
        bound.launch()
        return bound.read()

    def close(self) -> None:
        """Give the memory back."""
        self._graphs.clear()
        self.engine.close()

    def __enter__(self) -> "EngineRunner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_engine(path: Path, onnx_path: Path) -> Engine | CpuEngine:
    """Load an engine; errors are those of both."""
    return CpuEngine(path, onnx_path) if is_for_cpu(path) else Engine(path, onnx_path)


def open_runner(
    path: Path,
    onnx_path: Path,
    *,
    pad_id: int,
    runtime_cache: Path | None = None,
    outputs: Iterable[str] = LOGITS,
) -> EngineRunner | CpuRunner:
    """Return a runner of an engine; arguments and errors are those of both."""
    if is_for_cpu(path):
        return CpuRunner(path, onnx_path, pad_id=pad_id, outputs=outputs)
    return EngineRunner(path, onnx_path, pad_id=pad_id, runtime_cache=runtime_cache, outputs=outputs)


def open_fp32_graph(
    path: Path, backend: BackendName, outputs: Iterable[str] = LOGITS
) -> Callable[[Mapping[str, Int64]], Float32]:
    """Return a runner of an FP32 graph on this CPU, optimized as its runtime does; batches of any shape.

    Raises:
        UserError: the runtime refuses the graph.
    """
    model, names = compile_model(backend, path.read_bytes(), blob=False, compute="fp32"), [*outputs]

    def run(batch: Mapping[str, Int64]) -> Float32:
        made = model.run({name: np.ascontiguousarray(batch[name]) for name in model.inputs})
        return np.asarray(join_outputs(made, names), dtype=np.float32)

    return run


def is_for_cpu(path: Path) -> bool:
    """Return whether an engine is for a CPU; errors are those of its sidecar."""
    return read_sidecar(path).backend in CPU_BACKENDS
