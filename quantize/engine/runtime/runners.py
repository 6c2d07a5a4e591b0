"""Load an engine as its sidecar says, and run it on batches: on a GPU, or on this CPU."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import cast

import numpy as np
import psutil

from qdqbench.quantize.engine.cpu_runtimes import CompiledModel, Run, compile_model, warm_up
from qdqbench.quantize.engine.cuda.model import load_kernels
from qdqbench.quantize.engine.profiles import LENGTH_STEP, fit_batch
from qdqbench.quantize.engine.results import LayerRow
from qdqbench.quantize.engine.runtime.engine import Arrays, BoundRun, Engine
from qdqbench.quantize.engine.sidecar import check_sidecar, note_sidecar, read_sidecar
from qdqbench.quantize.standalone.runtimes import Flight
from qdqbench.quantize.standalone.texts import pad_batch
from qdqbench.quantize.tasks.kinds.kind import LOGITS, join_outputs
from qdqbench.quantize.utils.arrays import Array, Float32, Int64
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.limits import BackendName, has_profiles
from qdqbench.quantize.utils.system.gpu import find_gpu

MAX_GRAPHS = 16


@dataclass(frozen=True)
class CpuMemory:
    engine_bytes: int  # the file
    resident_bytes: int  # of the process after loading minus before

    def __str__(self) -> str:
        file = f"file {self.engine_bytes / 1e6:.1f} MB"
        return f"memory {self.resident_bytes / 1e6:.1f} MB after loading; {file}"


@dataclass(frozen=True)
class GpuMemory:
    engine_bytes: int  # the file
    weights_bytes: int  # free memory of the GPU before loading minus after

    def __str__(self) -> str:
        file = f"file {self.engine_bytes / 1e6:.1f} MB"
        return f"GPU memory {self.weights_bytes / 1e6:.1f} MB after loading; {file}"


class CompiledEngine(AbstractContextManager["CompiledEngine"]):
    """An engine without profiles of its own, loaded: of a CPU runtime, or of our kernels for a GPU.

    It takes any shape, as `Engine` takes those of its profiles.
    """

    memory: CpuMemory | GpuMemory

    def __init__(
        self,
        path: Path,
        onnx_path: Path | None = None,
        *,
        profile: bool = False,
        threads: int | None = None,
        streams: int = 1,
    ) -> None:
        sidecar = check_sidecar(path, onnx_path)
        backend, compute = cast("BackendName", sidecar.backend), sidecar.compute or "fp32"
        self._model: CompiledModel
        if backend == "cuda":
            self._model, used = load_kernels(path)
            self.memory = GpuMemory(sidecar.engine_bytes, used)
        else:
            before = psutil.Process().memory_info().rss
            data = path.read_bytes()
            self._model = compile_model(
                backend, data, blob=True, compute=compute, threads=threads, streams=streams, profile=profile
            )
            used = max(0, psutil.Process().memory_info().rss - before)
            self.memory = CpuMemory(sidecar.engine_bytes, used)
        self._lanes: SimpleQueue[Run] = SimpleQueue()  # of those that do not run
        for lane in self._model.lanes:
            self._lanes.put(lane)
        self.launch = getattr(self._model, "launch", None)  # where tokens are packed
        self.name, self.profiles = path.name, sidecar.profiles
        self.notes = note_sidecar(sidecar, None if sidecar.cpu else find_gpu())
        self.inputs, self.outputs = self._model.inputs, self._model.outputs

    def run(self, feeds: Mapping[str, Array]) -> Arrays:
        wrong = [f"{name} is missing" for name in self.inputs if name not in feeds]
        wrong += [f"{name} is unknown" for name in feeds if name not in self.inputs]
        if wrong:
            raise UserError(f"inputs of {self.name} do not fit: {'; '.join(wrong)}")
        lane = self._lanes.get()
        try:
            return lane({name: np.ascontiguousarray(feeds[name]) for name in self.inputs})
        finally:
            self._lanes.put(lane)

    def kernels(self) -> list[LayerRow]:
        """Return the layer table, after one run of the first profile's opt shape."""
        warm_up(self._model, self.profiles[0].opt)
        return [kernel.row for kernel in self._model.kernels()]

    def kernel_times(self, feeds: Mapping[str, Array], repeats: int = 20) -> dict[str, float]:
        """Return mean milliseconds of each kernel, by the name in the layer table; needs `profile`."""
        self.run(feeds)  # compiles what is compiled at first use
        total: dict[str, float] = {}
        for _ in range(repeats):
            self.run(feeds)
            for kernel in self._model.kernels():
                total[kernel.row.name] = total.get(kernel.row.name, 0.0) + kernel.ms
        return {name: ms / repeats for name, ms in total.items() if ms > 0}

    def close(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class EngineRunner(AbstractContextManager["EngineRunner"]):
    """Callable on one batch: int64 [B, L] arrays to float32 answers [B, width] or [B, L or more, width]."""

    step = 1  # lengths are padded to multiples of it
    pads = True  # to a profile; without, a batch runs as it is, which an engine without profiles allows

    def __init__(
        self, engine: Engine | CompiledEngine, *, pad_id: int, outputs: Iterable[str] = LOGITS
    ) -> None:
        self.engine, self.pad_id, self._outputs = engine, pad_id, list(outputs)
        self.launch = self._launch if getattr(engine, "launch", None) else None
        if lost := [name for name in self._outputs if name not in engine.outputs]:
            has = ", ".join(engine.outputs)
            raise UserError(f"{engine.name} has no output {', '.join(lost)} but {has}")

    def _launch(self, ids: Int64, types: Int64, lengths: Int64) -> Flight:
        """Start rows whose tokens stand in a line; answers are those of rows, or of all tokens in a line."""
        assert isinstance(self.engine, CompiledEngine)
        assert self.engine.launch is not None
        return Flight(self.engine.launch(ids, types, lengths), self._outputs)

    @property
    def max_batch(self) -> int:
        return max(profile.max[0] for profile in self.engine.profiles)

    def __call__(self, batch: Mapping[str, Int64]) -> Float32:
        rows, length = next(iter(batch.values())).shape
        feeds: Arrays = {name: batch[name] for name in self.engine.inputs}
        if self.pads:
            _, to_rows, to_length = fit_batch(self.engine.profiles, rows, length, self.step)
            feeds = pad_batch(feeds, to_length, self.pad_id, to_rows)
        return np.asarray(join_outputs(self._run(feeds), self._outputs)[:rows], dtype=np.float32)

    def _run(self, feeds: Arrays) -> Arrays:
        return self.engine.run(feeds)

    def close(self) -> None:
        self.engine.close()

    def __exit__(self, *_: object) -> None:
        self.close()


class GpuRunner(EngineRunner):
    """A runner on a GPU.

    Lengths are padded with masked positions to a multiple of 16, so that shapes repeat, and batches with
    copies of their last row, where the profile's minimum is larger. A shape that comes a second time becomes
    a CUDA graph; the least recently used graph goes when there are too many, or too little memory.
    """

    engine: Engine
    step = LENGTH_STEP

    def __init__(self, engine: Engine, *, pad_id: int, outputs: Iterable[str] = LOGITS) -> None:
        super().__init__(engine, pad_id=pad_id, outputs=outputs)
        free = engine.torch.cuda.mem_get_info()[0]
        room = free // 2 // max(1, engine.memory.activation_bytes)  # half of what is free
        self._most = min(MAX_GRAPHS, int(room))
        self._graphs: OrderedDict[tuple[int, int], BoundRun] = OrderedDict()
        self._seen: set[tuple[int, int]] = set()

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
        self._graphs.clear()
        super().close()


def open_engine(
    path: Path,
    onnx_path: Path,
    *,
    runtime_cache: Path | None = None,
    threads: int | None = None,
    streams: int = 1,
) -> Engine | CompiledEngine:
    if has_profiles(read_sidecar(path).backend):
        return Engine(path, onnx_path, runtime_cache=runtime_cache)
    return CompiledEngine(path, onnx_path, threads=threads, streams=streams)


def open_runner(  # noqa: PLR0913
    path: Path,
    onnx_path: Path,
    *,
    pad_id: int,
    runtime_cache: Path | None = None,
    outputs: Iterable[str] = LOGITS,
    threads: int | None = None,
    streams: int = 1,
) -> EngineRunner:
    """Return a runner of an engine; `threads`, of all `streams` together, are for one of a CPU."""
    engine = open_engine(path, onnx_path, runtime_cache=runtime_cache, threads=threads, streams=streams)
    if isinstance(engine, Engine):
        return GpuRunner(engine, pad_id=pad_id, outputs=outputs)
    return EngineRunner(engine, pad_id=pad_id, outputs=outputs)


def open_fp32_graph(
    path: Path, backend: BackendName, outputs: Iterable[str] = LOGITS
) -> Callable[[Mapping[str, Int64]], Float32]:
    """Return a runner of an FP32 graph on this CPU, optimized as its runtime does; batches of any shape."""
    model, names = compile_model(backend, path.read_bytes(), blob=False, compute="fp32"), [*outputs]

    def run(batch: Mapping[str, Int64]) -> Float32:
        feeds = {name: np.ascontiguousarray(batch[name]) for name in model.inputs}
        return np.asarray(join_outputs(model.run(feeds), names), dtype=np.float32)

    return run
