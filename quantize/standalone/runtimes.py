"""The runtimes of a deployed folder: each opens its model as a function of tokens, int64 arrays by name."""

import hashlib
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from .texts import fit_profile, pad_batch

Arrays = Mapping[str, npt.NDArray[Any]]
Infer = Callable[[Arrays], npt.NDArray[Any]]  # the answers [rows, width], or [rows, length, width]
Told = Mapping[str, Any]  # model.json
CPU = Path("/proc/cpuinfo")
STEP = 16  # tokens: lengths that TensorRT meets are padded to multiples of it
LENGTH_STEP = 2  # the same of the other runtimes


class Launched(Protocol):
    """A batch under way."""

    def query(self) -> bool:
        """Return whether it is done."""

    def read(self) -> npt.NDArray[Any]:
        """Wait, and return the answers [rows, width], or [tokens, width] of all rows in a line."""


class Done(NamedTuple):
    """A batch that is answered."""

    answers: npt.NDArray[Any]

    def query(self) -> bool:
        return True

    def read(self) -> npt.NDArray[Any]:
        return self.answers


class Awaited(NamedTuple):
    """A batch that a thread answers."""

    future: "Future[npt.NDArray[Any]]"
    finish: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]

    def query(self) -> bool:
        return self.future.done()

    def read(self) -> npt.NDArray[Any]:
        return self.finish(self.future.result())


class Streams:
    """A model in several streams for batches at once, and in one of all threads for a batch that is alone.

    Args:
        open_infer: opens the model in a number of streams, which as many threads may call at once.
    """

    def __init__(self, open_infer: Callable[[int], Infer], streams: int) -> None:
        self.streams, self._open = streams, open_infer
        self._opened, self._pool = dict[int, Infer](), ThreadPoolExecutor(streams)

    def open(self, streams: int) -> Infer:
        if streams not in self._opened:
            self._opened[streams] = self._open(streams)
        return self._opened[streams]

    def __call__(self, tokens: Arrays) -> npt.NDArray[Any]:
        return self.open(min(self._opened, default=1))(tokens)  # one batch is not worth a second model

    def submit(self, tokens: Arrays) -> "Future[npt.NDArray[Any]]":
        return self._pool.submit(self.open(self.streams), tokens)


class Flight(NamedTuple):
    """A batch that the device computes, while the host does something else."""

    batch: Any
    outputs: Sequence[str]

    def query(self) -> bool:
        return bool(self.batch.query())

    def read(self) -> npt.NDArray[Any]:
        made = self.batch.read()
        return join([made[name] for name in self.outputs]).astype(np.float32, copy=False)


def launch(  # noqa: PLR0913
    infer: Any, told: Told, ids: Any, types: Any, lengths: Any, *, alone: bool = False
) -> Launched:
    """Start rows of lengths [B] whose tokens stand in a line [T], as an engine without padding takes them.

    Args:
        alone: no other batch is under way or waits.
    """
    if packed := getattr(infer, "launch", None):
        return packed(ids, types.astype(np.int32), lengths)  # type: ignore[no-any-return]
    mask = np.arange(pad_length(int(lengths.max()), told["max_length"])) < lengths[:, None]
    tokens = {"attention_mask": mask.astype(np.int64)}
    for name, line, fill in (("input_ids", ids, told["pad_id"]), ("token_type_ids", types, 0)):
        tokens[name] = np.full(mask.shape, fill, np.int64)
        tokens[name][mask] = line
    given = {name: tokens[name] for name in told["inputs"]}

    def finish(made: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return made[:, : mask.shape[1]][mask] if told["over_tokens"] else made

    at_once = isinstance(infer, Streams) and not alone
    return Awaited(infer.submit(given), finish) if at_once else Done(finish(infer(given)))


def pad_length(longest: int, most: int) -> int:
    """Return the length that a batch is padded to: of few shapes, since a runtime prepares each new one."""
    return min(-(-longest // LENGTH_STEP) * LENGTH_STEP, most)


def open_runtime(name: str, folder: Path, told: Told) -> Infer:
    """Return the model of a folder in a runtime; SystemExit with a sentence where it cannot run here."""
    return OPEN[name](folder, told)


def join(outputs: Sequence[Any]) -> npt.NDArray[Any]:
    """Return a model's outputs as one array; several are stacked along a new last axis."""
    return np.asarray(outputs[0]) if len(outputs) == 1 else np.stack(outputs, axis=-1)


def open_onnxruntime(folder: Path, told: Told) -> Infer:
    """Open the graph on a CPU, with ONNX Runtime's optimizations if the run found them harmless."""
    ort: Any = import_module("onnxruntime")
    features = set(CPU.read_text(errors="replace").split()) if CPU.is_file() else set()
    options, level, names = ort.SessionOptions(), told["onnxruntime"], [*told["outputs"]]
    if "avx2" in features and features.isdisjoint(told["int8_dot"]):  # UINT8 x INT8 saturates
        if told["shared_layers"]:
            level = "ORT_DISABLE_ALL"  # ONNX Runtime makes no UINT8 of weights that layers share
        else:
            options.add_session_config_entry("session.x64quantprecision", "1")  # UINT8 weights
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    session = ort.InferenceSession(read(folder, "model.onnx"), options, providers=["CPUExecutionProvider"])
    return lambda tokens: join(session.run(names, dict(tokens)))


def load_openvino() -> Any:
    """Return OpenVINO's module, which tells Google Analytics nothing: it takes its own stub of telemetry."""
    name = "openvino_telemetry"
    if "openvino" not in sys.modules and name not in sys.modules:
        sys.modules[name] = None  # type: ignore[assignment]  # its import fails, and nothing else's after this
        try:
            return importlib.import_module("openvino")
        finally:
            sys.modules.pop(name, None)
    return importlib.import_module("openvino")


def open_openvino(folder: Path, told: Told) -> Infer:
    """Compile the graph for a CPU, as the engine of the run was, in as many streams."""
    core, parts = load_openvino().Core(), ("openvino/openvino_model.xml", "openvino/openvino_model.bin")
    # the IR has what the engine's graph had rewritten, model.onnx not
    names = parts if (folder / parts[0]).is_file() else ("model.onnx",)
    graph = core.read_model(*(read(folder, name) for name in names))

    def compiled(streams: int) -> Infer:
        model = core.compile_model(graph, "CPU", told["openvino"] | {"NUM_STREAMS": streams})
        free: SimpleQueue[Any] = SimpleQueue()
        for _ in range(streams):
            free.put(model.create_infer_request())

        def infer(tokens: Arrays) -> npt.NDArray[Any]:
            request = free.get()
            try:
                made = request.infer(dict(tokens))
                return join([made[name].copy() for name in told["outputs"]])
            finally:
                free.put(request)

        return infer

    streams = min(told["streams"], count_cores())
    return compiled(1) if streams == 1 else Streams(compiled, streams)


def count_cores() -> int:
    """Return the cores that this process may use."""
    allowed = getattr(os, "sched_getaffinity", None)  # on Linux
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def open_cuda(folder: Path, told: Told) -> Infer:
    """Load the kernels and the plan of backend cuda, for a GPU that they were built for."""
    modules = (import_module(f"cuda_engine.{name}") for name in ("errors", "reader", "runtime"))
    errors, reader, kernels = modules

    def refuse(function: Callable[..., Any], *given: Any) -> Any:
        try:
            return function(*given)
        except errors.QdqError as error:
            raise SystemExit(str(error)) from error

    data = read(folder, "cuda.engine")
    file = refuse(reader.parse_engine, data, "cuda.engine", told["cuda"])
    model = refuse(kernels.load_engine, file, kernels.CudaEngine, folder / "cuda.engine.tiles.json")

    outputs = [*told["outputs"]]

    class Kernels:
        def __call__(self, tokens: Arrays) -> npt.NDArray[Any]:
            made = refuse(model.run, tokens)
            return join([made[name] for name in outputs])

        def launch(self, *rows: Any) -> Flight:
            return Flight(refuse(model.launch, *rows), outputs)

    return Kernels()


def open_tensorrt(module: str, folder: Path, told: Told) -> Infer:
    """Load an engine of TensorRT or TensorRT-RTX on the GPU that it is for."""
    trt: Any = import_module(module)
    torch: Any = import_module("torch")
    file, names, mark = f"{module}.engine", [*told["outputs"]], "input_ids"
    if not (folder / file).is_file():
        raise SystemExit(f"{folder / file} is not there: build it with build_tensorrt.sh")
    runtime = trt.Runtime(trt.Logger(trt.Logger.WARNING))
    engine = runtime.deserialize_cuda_engine(read(folder, file))
    if engine is None:
        raise SystemExit(f"{file} is for another GPU or version of {module}: see README.md")
    context, stream = engine.create_execution_context(), torch.cuda.Stream()
    numbers = range(engine.num_optimization_profiles)
    profiles = [engine.get_tensor_profile_shape(mark, number) for number in numbers]

    def infer(tokens: Arrays) -> npt.NDArray[Any]:
        rows, longest = tokens[mark].shape
        found = fit_profile(profiles, rows, longest, STEP)
        assert found is not None  # batches of model.json are no larger than profiles
        number, most, length = found
        padded = pad_batch(tokens, length, told["pad_id"], most)
        with torch.cuda.stream(stream):
            context.set_optimization_profile_async(number, stream.cuda_stream)
            buffers = {name: torch.from_numpy(array).cuda() for name, array in padded.items()}
            for name, buffer in buffers.items():
                context.set_input_shape(name, tuple(buffer.shape))
            for name in names:
                shape, dtype = tuple(context.get_tensor_shape(name)), getattr(torch, told["outputs"][name])
                buffers[name] = torch.empty(shape, dtype=dtype, device="cuda")
            for name, buffer in buffers.items():
                context.set_tensor_address(name, buffer.data_ptr())
            if not context.execute_async_v3(stream.cuda_stream):
                raise RuntimeError("the engine failed to run")
            stream.synchronize()
        return join([buffers[name].cpu().numpy()[:rows] for name in names])

    return infer


def read(folder: Path, name: str) -> bytes:
    """Read a file, which must be the one of SHA256SUMS, or of build_tensorrt.sh."""
    built = folder / f"{name}.sha256"
    sums = built if built.is_file() else folder / "SHA256SUMS"
    try:
        data, known = (folder / name).read_bytes(), sums.read_text("utf-8", "replace").splitlines()
    except OSError as error:
        raise SystemExit(f"{error.filename}: {error.strerror}; deploy the run again") from error
    if f"{hashlib.sha256(data).hexdigest()}  {name}" not in known:
        why = f"is not what was deployed or built here: see {sums.name}; deploy the run again"
        raise SystemExit(f"{name} {why}")
    return data


OPEN: dict[str, Callable[[Path, Told], Infer]] = {
    "onnxruntime": open_onnxruntime,
    "openvino": open_openvino,
    "tensorrt": partial(open_tensorrt, "tensorrt"),
    "tensorrt_rtx": partial(open_tensorrt, "tensorrt_rtx"),
    "cuda": open_cuda,
}
