"""An engine on the GPU: torch CUDA buffers, a stream of its own, one execution context per profile.

Nothing runs on the default stream, where TensorRT would synchronize the whole device. Outputs are filled with
NaN before every run that is looked at, so that an element that the engine does not write cannot pass for one.
"""

import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qdqbench.quantize.engine.backend import CacheFile, capture, choose_backend
from qdqbench.quantize.engine.profiles import choose_profile, fill_shape, measure_distance
from qdqbench.quantize.engine.sidecar import check_sidecar, note_sidecar
from qdqbench.quantize.utils.arrays import Array
from qdqbench.quantize.utils.capture import capture_graph
from qdqbench.quantize.utils.errors import CheckFailed, MissingDevice, UserError
from qdqbench.quantize.utils.system.gpu import find_gpu

if TYPE_CHECKING:
    import torch

DEVICE = "cuda"
Arrays = dict[str, Array]
_DTYPES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "FP8": "float8_e4m3fn"}
_DTYPES |= {name: name.lower() for name in ("INT8", "INT32", "INT64", "UINT8", "BOOL")}  # of trt.DataType


def torch_dtype(name: str) -> "torch.dtype":
    import torch

    if name not in _DTYPES:
        raise UserError(f"the engine has an input or output of type {name}, which is not supported")
    dtype: torch.dtype = getattr(torch, _DTYPES[name])
    return dtype


def to_torch(
    feeds: Mapping[str, Array], dtypes: "Mapping[str, torch.dtype]", what: str
) -> "dict[str, torch.Tensor]":
    """Return host tensors for every input, in the engine's datatypes; an error lists all that do not fit."""
    import torch

    wrong = [f"{name} is missing" for name in dtypes if name not in feeds]
    wrong += [f"{name} is unknown" for name in feeds if name not in dtypes]
    tensors = {}
    for name, dtype in dtypes.items():
        if name not in feeds:
            continue
        array = np.ascontiguousarray(feeds[name])
        floats = array.dtype.kind == "f"
        if array.dtype.kind not in "fiub" or floats != dtype.is_floating_point:
            wrong.append(f"{name} is {array.dtype} and the engine takes {str(dtype).removeprefix('torch.')}")
        else:
            # numpy's read-only arrays draw a warning from torch
            tensors[name] = torch.from_numpy(array if array.flags.writeable else array.copy()).to(dtype)
    if wrong:
        raise UserError(f"inputs of {what} do not fit: {'; '.join(wrong)}")
    return tensors


def make_poisoned(shape: tuple[int, ...], dtype: "torch.dtype", device: str) -> "torch.Tensor":
    """Return a buffer full of NaN, or of the smallest value of an integer type."""
    import torch

    if dtype.is_floating_point:
        return torch.full(shape, float("nan"), dtype=torch.float32, device=device).to(dtype)
    if dtype == torch.bool:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.full(shape, torch.iinfo(dtype).min, dtype=dtype, device=device)


def to_numpy(buffer: "torch.Tensor") -> Array:
    import torch

    wide = (torch.float16, torch.float32, torch.float64)
    if buffer.dtype.is_floating_point and buffer.dtype not in wide:
        buffer = buffer.float()
    return np.asarray(buffer.cpu().numpy())


class BoundRun:
    """One fixed shape of an engine; inputs are zeros (masks: ones) until written on `stream` or by `load`."""

    def __init__(self, owner: "Engine", batch: int, length: int, *, stream: Any, graph: bool) -> None:
        gpu = self._torch = owner.torch
        self._owner = owner
        self.stream: torch.cuda.Stream = gpu.cuda.Stream() if stream is None else stream
        self._context: Any = owner.new_context(choose_profile(owner.profiles, batch, length), self.stream)
        with gpu.cuda.stream(self.stream):
            self.inputs: dict[str, torch.Tensor] = {}
            for name in owner.inputs:
                make = gpu.ones if "mask" in name else gpu.zeros
                shape = fill_shape(owner.shapes[name], (batch, length))
                self.inputs[name] = make(shape, dtype=owner.dtypes[name], device=DEVICE)
            self.outputs: dict[str, torch.Tensor] = owner.attach(self._context, self.inputs)
        for _ in range(2):  # kernels are compiled and memory is taken at the first run of a shape
            owner.enqueue(self._context, self.stream)
            self.stream.synchronize()
        self._graph: Any = self._capture(f"batch {batch}, length {length}") if graph else None

    @property
    def captured(self) -> bool:
        return self._graph is not None

    def launch(self) -> None:
        if self._graph is not None:
            with self._torch.cuda.stream(self.stream):
                self._graph.replay()
            return
        context = self._context
        if not context.execute_async_v3(self.stream.cuda_stream):
            raise CheckFailed(f"{self._owner.name} fails to run")

    def load(self, feeds: Mapping[str, Array]) -> None:
        tensors = to_torch(feeds, {name: t.dtype for name, t in self.inputs.items()}, self._owner.name)
        if wrong := [
            f"{name} is {list(tensor.shape)}, not {list(self.inputs[name].shape)}"
            for name, tensor in tensors.items()
            if tensor.shape != self.inputs[name].shape  # copying would broadcast it
        ]:
            raise UserError(f"inputs have other shapes than those that are bound: {', '.join(wrong)}")
        with self._torch.cuda.stream(self.stream):
            for name, tensor in tensors.items():
                self.inputs[name].copy_(tensor)
            for buffer in self.outputs.values():
                buffer.copy_(make_poisoned(tuple(buffer.shape), buffer.dtype, DEVICE))
            self.stream.synchronize()

    def read(self) -> Arrays:
        with self._torch.cuda.stream(self.stream):
            self.stream.synchronize()
            return {name: to_numpy(buffer) for name, buffer in self.outputs.items()}

    def close(self) -> None:
        self.stream.synchronize()
        self._graph = self._context = None
        self.inputs, self.outputs = {}, {}

    def _capture(self, what: str) -> Any:
        torch, context = self._torch, self._context
        where = f"{self._owner.name} at {what}"
        graph, enqueued = torch.cuda.CUDAGraph(), False
        try:
            # thread_local: compiler threads of the backend may allocate meanwhile
            with capture_graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                enqueued = context.execute_async_v3(self.stream.cuda_stream)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:200]
            self._owner.notes.append(f"{where} runs without a CUDA graph: capturing fails ({reason})")
            return None
        if not enqueued:
            raise CheckFailed(f"{where}: the engine fails to run while it is captured")
        self.stream.synchronize()
        return graph


class RuntimeCache:
    def __init__(self, engine: Any, file: CacheFile) -> None:
        self._file = file
        runtime_config = engine.create_runtime_config()
        runtime_cache = runtime_config.create_runtime_cache()
        if file.blob and not runtime_cache.deserialize(file.blob):
            file.ignore("the runtime refuses it")
        self._cache: Any = runtime_cache

    def config(self, trt: Any, engine: Any) -> Any:
        """Return the settings of one execution context, which shares this cache."""
        runtime_config = engine.create_runtime_config()
        # LAZY runs fallback kernels until those of a new shape are compiled; a CUDA graph would keep them
        strategy = trt.DynamicShapesKernelSpecializationStrategy.EAGER
        runtime_config.dynamic_shapes_kernel_specialization_strategy = strategy
        runtime_config.cuda_graph_strategy = trt.CudaGraphStrategy.DISABLED  # graphs are captured by torch
        if not runtime_config.set_runtime_cache(self._cache):
            raise UserError("tensorrt_rtx refuses its own runtime cache; reinstall it")
        return runtime_config

    def save(self) -> None:
        runtime_cache, self._cache = self._cache, None
        if runtime_cache is not None:
            self._file.keep(runtime_cache.serialize())


@dataclass(frozen=True)
class EngineMemory:
    engine_bytes: int  # the file
    weights_and_code_bytes: int  # free memory before loading minus after
    activation_bytes: int  # of one execution context: the largest of its profiles
    activation_bytes_per_profile: tuple[int, ...]

    def __str__(self) -> str:
        profiles = ", ".join(f"{size / 1e6:.1f}" for size in self.activation_bytes_per_profile)
        return (
            f"GPU memory {self.weights_and_code_bytes / 1e6:.1f} MB for weights and code, {profiles} MB for "
            f"activations by profile; file {self.engine_bytes / 1e6:.1f} MB"
        )


class Engine(AbstractContextManager["Engine"]):
    """A deserialized engine on the GPU; close it, or use it in a `with` statement.

    UserError: its sidecar is for another machine, version or ONNX file; MissingDevice: it cannot be loaded.
    `runtime_cache` is a file for kernels compiled just in time (TensorRT-RTX only).
    """

    def __init__(
        self, path: Path, onnx_path: Path | None = None, *, runtime_cache: Path | None = None
    ) -> None:
        sidecar = check_sidecar(path, onnx_path)
        import torch

        if not torch.cuda.is_available():
            raise MissingDevice(
                "engines run on torch CUDA buffers, and this torch has no CUDA; install a CUDA build"
            )
        self.torch: Any = torch
        gpu = find_gpu()
        backend = choose_backend(sidecar.backend)  # type: ignore[arg-type]
        trt = self._trt = backend.module
        self.name, self.profiles = path.name, sidecar.profiles
        self.notes = note_sidecar(sidecar, gpu)
        self._contexts: dict[int, Any] = {}
        self._bound: weakref.WeakSet[BoundRun] = weakref.WeakSet()
        self._jit: RuntimeCache | None = None
        free = self.torch.cuda.mem_get_info()[0]
        with capture(trt) as (logger, log):
            runtime = trt.Runtime(logger)
            engine = runtime.deserialize_cuda_engine(path.read_bytes())
            if engine is None:
                here = f"{backend.name} {backend.version} on {gpu.name if gpu else 'this GPU'}"
                why = log.errors() or "it gives no reason"
                raise MissingDevice(f"{here} cannot load {path} ({why}); use a version that supports it")
        used = max(0, free - self.torch.cuda.mem_get_info()[0])
        self._runtime, self._engine = runtime, engine
        count = range(engine.num_optimization_profiles)
        sizes = tuple(int(engine.get_device_memory_size_for_profile_v2(index)) for index in count)
        self.memory = EngineMemory(sidecar.engine_bytes, used, max(sizes, default=0), sizes)
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        modes = {name: engine.get_tensor_mode(name) for name in names}
        self.inputs = [name for name in names if modes[name] == trt.TensorIOMode.INPUT]
        self.outputs = [name for name in names if modes[name] == trt.TensorIOMode.OUTPUT]
        self.dtypes = {name: torch_dtype(engine.get_tensor_dtype(name).name) for name in names}
        self.shapes = {name: tuple(engine.get_tensor_shape(name)) for name in names}
        self._ranges = [
            {name: tuple(map(tuple, engine.get_tensor_profile_shape(name, index))) for name in self.inputs}
            for index in count
        ]
        if backend.name == "tensorrt_rtx":
            file = CacheFile(runtime_cache, backend.name, backend.version, gpu)
            self._jit = RuntimeCache(engine, file)
            file.notes = self.notes = [*self.notes, *file.notes]
        self.stream: torch.cuda.Stream = self.torch.cuda.Stream()

    def run(self, feeds: Mapping[str, Array]) -> Arrays:
        """Run once and wait; what the engine did not write is NaN, bfloat16 and FP8 come back as float32.

        Inputs of another kind raise UserError, shapes that no profile takes CheckFailed.
        """
        tensors, profile = self._fit(feeds)
        if profile not in self._contexts:
            self._contexts[profile] = self.new_context(profile, self.stream)
        context = self._contexts[profile]
        with self.torch.cuda.stream(self.stream):
            inputs = {name: buffer.to(DEVICE) for name, buffer in tensors.items()}
            outputs = self.attach(context, inputs)
            self.enqueue(context, self.stream)
            self.stream.synchronize()
            return {name: to_numpy(buffer) for name, buffer in outputs.items()}

    def bind(self, batch: int, length: int, *, stream: Any = None, graph: bool = True) -> "BoundRun":
        """Return one fixed shape, with activation memory of its own, by default as a CUDA graph."""
        bound = BoundRun(self, batch, length, stream=stream, graph=graph)
        self._bound.add(bound)
        return bound

    def kernel_times(self, feeds: Mapping[str, Array], repeats: int = 20) -> dict[str, float]:
        """Return mean milliseconds by kernel of the layer table; their sum is more than a run takes."""
        tensors, profile = self._fit(feeds)
        profiler = _profiler(self._trt)
        context = self.new_context(profile, self.stream)
        with self.torch.cuda.stream(self.stream):
            inputs = {name: buffer.to(DEVICE) for name, buffer in tensors.items()}
            outputs = self.attach(context, inputs)
            self.enqueue(context, self.stream)  # compiles what is compiled at first use
            self.stream.synchronize()
            context.profiler = profiler
            for number in range(repeats + 1):
                self.enqueue(context, self.stream)
                self.stream.synchronize()
                if number == 0:
                    profiler.total_ms.clear()  # the first one sets up the timers
        del outputs, context
        if not profiler.total_ms:
            raise CheckFailed(f"{self.name} reports no kernel times, though a profiler was set")
        # the kernels of the other profiles are reported too, with no time
        return {name: total / repeats for name, total in profiler.total_ms.items() if total > 0}

    def new_context(self, profile: int, stream: Any) -> Any:
        engine = self._engine
        with capture(self._trt) as (_, log):
            if self._jit is not None:
                runtime_config = self._jit.config(self._trt, engine)
                context = engine.create_execution_context(runtime_config)
            else:
                context = engine.create_execution_context()
            if context is None or not context.set_optimization_profile_async(profile, stream.cuda_stream):
                size, why = self.memory.activation_bytes / 1e6, log.errors() or "it gives no reason"
                raise CheckFailed(
                    f"{self.name} has no execution context for profile {profile}, which takes {size:.1f} MB "
                    f"of GPU memory ({why})"
                )
        stream.synchronize()
        return context

    def attach(self, context: Any, inputs: Mapping[str, Any]) -> "dict[str, torch.Tensor]":
        for name, buffer in inputs.items():
            if not context.set_input_shape(name, tuple(buffer.shape)):
                raise CheckFailed(f"{self.name} does not take {name} of shape {tuple(buffer.shape)}")
            context.set_tensor_address(name, buffer.data_ptr())
        if unknown := context.infer_shapes():
            raise CheckFailed(f"{self.name} cannot tell the shapes of {', '.join(unknown)}")
        outputs = {}
        for name in self.outputs:
            shape = tuple(context.get_tensor_shape(name))
            if min(shape, default=0) < 0:
                raise CheckFailed(f"{self.name} has output {name} whose shape depends on the data: {shape}")
            outputs[name] = make_poisoned(shape, self.dtypes[name], DEVICE)
            context.set_tensor_address(name, outputs[name].data_ptr())
        return outputs

    def enqueue(self, context: Any, stream: Any) -> None:
        with capture(self._trt) as (_, log):
            if not context.execute_async_v3(stream.cuda_stream):
                raise CheckFailed(f"{self.name} fails to run ({log.errors() or 'it gives no reason'})")

    def _fit(self, feeds: Mapping[str, Array]) -> "tuple[dict[str, torch.Tensor], int]":
        """Return host tensors of inputs, and the profile that takes them."""
        tensors = to_torch(feeds, {name: self.dtypes[name] for name in self.inputs}, self.name)
        shapes = {name: tuple(buffer.shape) for name, buffer in tensors.items()}
        costs = {}
        for index, ranges in enumerate(self._ranges):
            pairs = [(ranges[name], shapes[name]) for name in self.inputs]
            if all(
                len(shape) == len(low) and all(a <= n <= b for a, n, b in zip(low, shape, high, strict=True))
                for (low, _, high), shape in pairs
            ):
                costs[index] = sum(measure_distance(opt, shape) for (_, opt, _), shape in pairs)
        if not costs:
            listed = ", ".join(f"{name} {list(shapes[name])}" for name in self.inputs)
            takes = " or ".join(map(str, self.profiles)) or "its fixed shapes"
            raise CheckFailed(
                f"no profile of {self.name} takes {listed}; it takes {takes}: change engine.shapes in the "
                "recipe and build again"
            )
        return tensors, min(costs, key=lambda index: costs[index])

    def close(self) -> None:
        for bound in list(self._bound):
            bound.close()
        self._contexts.clear()
        if self._jit is not None:
            self._jit.save()
        # TensorRT wants contexts gone before engines, and engines before the runtime
        self._jit = self._engine = self._runtime = None

    def __exit__(self, *_: object) -> None:
        self.close()


def _profiler(trt: Any) -> Any:
    class Profiler(trt.IProfiler):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProfiler.__init__(self)
            self.total_ms: dict[str, float] = {}

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            self.total_ms[layer_name] = self.total_ms.get(layer_name, 0.0) + ms

    return Profiler()
