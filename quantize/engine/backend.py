"""One code path over TensorRT 10.x, TensorRT 11.x and TensorRT-RTX: ONNX file in, serialized engine out.

The only module that imports tensorrt or tensorrt_rtx. Networks are strongly typed, and enum members are taken
by name, because their integers moved between TensorRT 10 and 11. `tests/unit/engine/test_backend_bindings.py`
holds what is used here to all three bindings; it knows a class by the variable (builder, network, ...).
"""

import importlib
import json
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from qdqbench.quantize.engine.cuda.compile import get_version, load_nvrtc
from qdqbench.quantize.engine.layers import parse_inspector_json, parse_log
from qdqbench.quantize.engine.profiles import Profile, add_profiles
from qdqbench.quantize.engine.results import LayerRow
from qdqbench.quantize.standalone.runtimes import load_openvino
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import MissingDevice, UserError
from qdqbench.quantize.utils.limits import CPU_BACKENDS, BackendChoice, BackendName
from qdqbench.quantize.utils.names import install_command
from qdqbench.quantize.utils.system.cpu import find_cpu
from qdqbench.quantize.utils.system.gpu import Gpu, find_gpu
from qdqbench.quantize.utils.system.process import interruption

BuildProgress = Callable[[str, float], None]  # phase of the builder, fraction of it done in [0, 1]

_HINTS = {  # part of a message: what to do
    "same input types": "a strongly typed network takes one type per operator, so export without mixes",
    "cale coefficient": "scales must be finite and positive, so calibrate again",
    "Plugin not found": "the operator is not supported, so export with standard ONNX operators",
    "Failed to parse": "the file is truncated or not ONNX, so export it again",
    "no graph outputs": "the file is empty or not ONNX, so export it again",
    "not support this compute capability": "name another target, such as compute capability 8.9",
    "Cuda Runtime": "this version builds only where a GPU is, so upgrade TensorRT-RTX or build there",
}


@dataclass
class BuildLog:
    table: list[str] = field(default_factory=list)
    messages: deque[str] = field(default_factory=lambda: deque(maxlen=200))

    def add(self, severity: str, text: str) -> None:
        if severity in ("ERROR", "INTERNAL_ERROR"):
            self.messages.append(text)
        elif "LayerType: " in text:  # TensorRT-RTX prints the whole table as one message
            self.table += [line for line in text.split("\n") if "LayerType: " in line]

    def errors(self) -> str:
        return one_line(self.messages)


@cache
def _logger(trt: Any) -> Any:
    """Return the one logger of this process for a backend; its `sink` is the running build's log."""

    class Logger(trt.ILogger):  # type: ignore[misc]
        sink: BuildLog | None = None

        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, msg: str) -> None:
            if self.sink is not None:
                self.sink.add(severity.name, msg)

    return Logger()


@contextmanager
def capture(trt: Any) -> Iterator[tuple[Any, BuildLog]]:
    """Send the backend's log to a new `BuildLog` for the length of one build."""
    logger, log = _logger(trt), BuildLog()
    logger.sink = log
    try:
        yield logger, log
    finally:
        logger.sink = None


def progress_monitor(trt: Any, progress: BuildProgress) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.steps: dict[str, int] = {}
            self.error: BaseException | None = None

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self.steps[phase_name] = max(num_steps, 1)

        def step_complete(self, phase_name: str, step: int) -> bool:
            try:
                progress(phase_name, min(1.0, (step + 1) / self.steps.get(phase_name, 1)))
            except BaseException as error:  # an exception must not cross the library's frames
                self.error = error
            return self.error is None

        def phase_finish(self, phase_name: str) -> None:
            self.steps.pop(phase_name, None)

    return Monitor()


def one_line(messages: Iterable[str]) -> str:
    """Join messages in one line, without what the library says about the missing GPU after each of them."""
    lines = (line.strip() for message in messages for line in message.split("\n"))
    return "; ".join(line for line in lines if line and "catchCudaError" not in line)


_FORMAT = "qdqbench cache 1"
_MAX_HEADER = 4096


class CacheFile:
    """Cache of earlier builds or runs; it only saves time, so faults of the file are notes.

    Not every version of a backend refuses a cache of another version, GPU or driver: the header says them.
    """

    def __init__(self, path: Path | None, backend: str, version: str, gpu: Gpu | None) -> None:
        self.path, self.blob, self.notes = path, b"", list[str]()
        self._origin = {
            "backend": backend,
            "version": version,
            "gpu": gpu.name if gpu else "none",
            "compute_capability": gpu.compute_capability if gpu else "none",
            "driver": (gpu.driver if gpu else None) or "unknown",
        }
        if path is None:
            return
        try:
            self._take(path.read_bytes())
        except FileNotFoundError:
            return
        except OSError as error:
            self.ignore(f"it cannot be read ({error.strerror})")

    def _take(self, data: bytes) -> None:
        line, _, blob = data.partition(b"\n")
        try:
            header = json.loads(line[:_MAX_HEADER])
            there = dict(header.pop("origin"))
        except (ValueError, KeyError, TypeError, AttributeError):
            return self.ignore("it is not a cache of qdqbench")
        if header != {"format": _FORMAT, "bytes": len(blob)}:
            return self.ignore("it is not whole, or of another format")
        if there == self._origin:
            self.blob = blob
            return None
        names = [name for name in self._origin | there if self._origin.get(name) != there.get(name)]
        changes = (f"{name} was {there.get(name)} and is {self._origin.get(name)}" for name in names)
        return self.ignore(", ".join(changes))

    def ignore(self, why: str) -> None:
        assert self.path is not None
        self.blob = b""
        self.notes.append(f"{self.path.name} is ignored and made again: {why}")

    def keep(self, memory: Any) -> None:
        blob = bytes(memory) if memory is not None else b""
        if self.path is None or not blob or blob == self.blob:
            return
        header = {"format": _FORMAT, "bytes": len(blob), "origin": self._origin}
        try:
            files.write_bytes(self.path, json.dumps(header).encode() + b"\n" + blob)
        except (OSError, UserError) as error:  # the result is there already
            self.notes.append(f"{self.path.name} is not kept: {error}")


def set_timings(config: Any, timings: CacheFile) -> Any:
    """Return the cache of kernel timings that a builder takes; it must live until the engine is built."""
    timing_cache = config.create_timing_cache(timings.blob)
    if timings.blob and (timing_cache is None or not config.set_timing_cache(timing_cache, False)):
        timings.ignore("the builder refuses it")
        timing_cache = config.create_timing_cache(b"")
    if not timings.blob:
        config.set_timing_cache(timing_cache, False)
    return timing_cache


# Ada (L4, L40S, RTX 40): the common INT8 inference boards that RTX supports
DEFAULT_COMPUTE_CAPABILITY = "8.9"
_BUILD_LOCK = threading.Lock()  # the logger is process-global while any builder lives
INSTALL: dict[BackendName, str] = {
    "tensorrt": f"{install_command('tensorrt')} on a machine with an NVIDIA GPU, or build there with "
    "trtexec: `qdqbench deploy RUN --out DIR` writes its script",
    "tensorrt_rtx": f"{install_command('rtx')}, which builds without a GPU too",
    "cuda": install_command("hopper"),
    "openvino": install_command("openvino"),
    "onnxruntime": "pip install onnxruntime",
}
WITHOUT_GPU = CPU_BACKENDS  # what "auto" may become there; a preference


@dataclass(frozen=True)
class Backend:
    name: BackendName
    version: str
    module: Any = field(repr=False)
    gpu: Gpu | None


@dataclass
class BuiltEngine:
    data: bytes
    layers: list[LayerRow]  # by the inspector, which needs the GPU that the engine is for; else by the log
    backend: BackendName
    version: str
    compute_capability: list[str]
    ahead_of_time: bool
    seconds: float
    streams: int = 1  # on a CPU: of most batches a second
    notes: list[str] = field(default_factory=list)  # what the user must hear about, such as an ignored cache


def _import(name: BackendName) -> Any | None:
    """Return the module, or None where it is not installed; any other import error becomes MissingDevice."""
    if name == "cuda":
        return SimpleNamespace(__version__=get_version())
    try:
        return load_openvino() if name == "openvino" else importlib.import_module(name)
    except Exception as error:  # a broken install raises ImportError, OSError, RuntimeError, ...
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            return None
        interruption.raise_if_pending()  # Ctrl-C, which a module in C++ may make an ImportError of
        why = f"{name} is installed but does not import ({type(error).__name__}: {error})"
        raise MissingDevice(f"{why}; reinstall it: {INSTALL[name]}") from error


def _version(module: Any) -> str:
    """Return a version without the commit that OpenVINO adds: 2026.4.1-22982-e213a147257-releases/2026/4."""
    return "-".join(str(module.__version__).split("-")[:2])


def available_backends() -> dict[str, str]:
    versions: dict[str, str] = {}
    for name in INSTALL:
        try:
            if module := _import(name):
                versions[name] = _version(module)
        except MissingDevice as error:
            warnings.warn(str(error), RuntimeWarning, stacklevel=2)
    return versions


def preferred_backend(name: BackendChoice) -> BackendName:
    """Name behind a choice; "auto": TensorRT or TensorRT-RTX for a GPU, else the best of WITHOUT_GPU."""
    if name != "auto":
        return name
    if find_gpu():
        return gpu_backend()
    return find_best(WITHOUT_GPU)


def find_best(backends: Sequence[BackendName]) -> BackendName:
    """Return the first installed backend, or the last where OpenVINO's INT8 saturates on this CPU."""
    wanted = backends if find_cpu().int8_dot else backends[::-1]
    return next((each for each in wanted if find_spec(each)), wanted[-1])


def gpu_backend() -> BackendName:
    return "tensorrt" if find_gpu() and "tensorrt" in available_backends() else "tensorrt_rtx"


def choose_backend(name: BackendChoice) -> Backend:
    """Return the backend to build with; MissingDevice says what to install, or that TensorRT needs a GPU."""
    gpu = find_gpu()
    name = preferred_backend(name)
    if name not in INSTALL:
        raise UserError(f"engine backend {name!r} is unknown; use auto, {' or '.join(INSTALL)}")
    module = _import(name)
    if module is None:
        raise MissingDevice(f"{name} is not installed; {INSTALL[name]}")
    if name == "tensorrt" and gpu is None:
        raise MissingDevice(
            "tensorrt builds engines only on the GPU that runs them and CUDA shows none here; "
            f"use backend tensorrt_rtx ({INSTALL['tensorrt_rtx']})"
        )
    return Backend(name, _version(module), module, gpu)


def find_missing_builder(name: BackendChoice) -> str | None:
    """Return what is missing to build engines of a backend here; None where one may be built."""
    try:
        if choose_backend(name).name == "cuda":
            load_nvrtc()
    except MissingDevice as error:
        return str(error)
    return None


def build_engine(  # noqa: PLR0913  the options are keywords
    onnx_path: Path,
    backend: Backend,
    profiles: Sequence[Profile],
    *,
    graph: bytes | None = None,
    compute_capability: str | None = None,
    timing_cache: Path | None = None,
    progress: BuildProgress | None = None,
) -> BuiltEngine:
    """Build a strongly typed engine from an ONNX file, or from `graph` in its place.

    TensorRT-RTX builds for the GPU at hand, or ahead of time where `compute_capability` ("8.9") names another
    or there is no GPU. One target at a time: the log shows the layers of one target only. TensorRT
    reads and writes `timing_cache`, kernel timings that make the next build quicker. What parser or builder
    refuse raises UserError with every message, a GPU that is not there MissingDevice.
    """
    if not onnx_path.is_file():
        raise UserError(f"{onnx_path} does not exist; export the model first")
    trt, started = backend.module, time.perf_counter()
    with _BUILD_LOCK, capture(trt) as (logger, log):
        builder = _start(backend, logger, log)
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        parser = trt.OnnxParser(network, logger)
        _parse(parser, network, onnx_path, graph, backend)
        config = builder.create_builder_config()
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # datatypes in the layer table
        targets, ahead_of_time = _set_target(config, backend, compute_capability)
        add_profiles(builder, network, config, profiles)
        timings = CacheFile(
            timing_cache if backend.name == "tensorrt" else None, backend.name, backend.version, backend.gpu
        )
        kernel_times = set_timings(config, timings) if timings.path else None
        config.progress_monitor = monitor = progress_monitor(trt, progress) if progress else None
        serialized = builder.build_serialized_network(network, config)
        config.progress_monitor = None
        if monitor is not None and monitor.error is not None:  # Ctrl-C, or an error of the caller's
            raise monitor.error
        if serialized is None:
            raise _refused(f"cannot build an engine from {onnx_path}", log.errors(), backend)
        data = bytes(serialized)
        if kernel_times is not None:
            timings.keep(kernel_times.serialize())
        del (serialized, kernel_times, parser, config, network, builder)  # children first
        seconds = time.perf_counter() - started
        table = None if ahead_of_time else inspect_engine(trt, logger, data)
    return BuiltEngine(
        data=data,
        layers=parse_inspector_json(table) if table else parse_log(log.table),
        backend=backend.name,
        version=backend.version,
        compute_capability=targets,
        ahead_of_time=ahead_of_time,
        seconds=seconds,
        notes=timings.notes,
    )


def _start(backend: Backend, logger: Any, log: BuildLog) -> Any:
    """Return a builder; without a usable GPU TensorRT returns none and its bindings raise TypeError."""
    trt = backend.module
    try:
        return trt.Builder(logger)
    except TypeError as error:
        why = f"{backend.name} {backend.version} cannot start a builder here ({log.errors() or error})"
        raise MissingDevice(f"{why}; it needs a supported GPU and driver") from error


def _refused(what: str, text: str, backend: Backend) -> UserError:
    hint = next((hint for sign, hint in _HINTS.items() if sign in text), "run `qdqbench check` on the file")
    return UserError(f"{backend.name} {backend.version} {what}: {text or 'it gives no reason'}; {hint}")


def _parse(parser: Any, network: Any, path: Path, graph: bytes | None, backend: Backend) -> None:
    parsed = parser.parse_from_file(str(path)) if graph is None else parser.parse(graph)
    errors = [parser.get_error(index) for index in range(parser.num_errors)]
    if not parsed or errors or not network.num_outputs:
        lines = []
        for parser_error in errors:
            node = parser_error.node_name()
            where = f"{node} ({parser_error.node_operator()}): " if node else ""
            lines.append(where + one_line([parser_error.desc()]))
        raise _refused(f"refuses {path}", " | ".join(lines) or "the file holds no graph outputs", backend)


def _set_target(config: Any, backend: Backend, wanted: str | None) -> tuple[list[str], bool]:
    """Choose the GPU architecture; return compute capabilities, and whether it is ahead of time."""
    here = backend.gpu.compute_capability if backend.gpu else None
    ahead_of_time = here is None or wanted not in (None, here)
    if backend.name == "tensorrt":
        if ahead_of_time:
            here_only = f"tensorrt builds only for the GPU at hand ({here})"
            raise UserError(f"{here_only}, not for {wanted}; use tensorrt_rtx")
        return [str(here)], False
    trt = backend.module
    target = trt.ComputeCapability.CURRENT
    if ahead_of_time:
        here = wanted or DEFAULT_COMPUTE_CAPABILITY
        members = trt.ComputeCapability.__members__
        known = {f"{name[2:-1]}.{name[-1]}": sm for name, sm in members.items() if name.startswith("SM")}
        if here not in known:
            title = f"{backend.name} {backend.version} cannot build for compute capability {here!r}"
            raise UserError(f"{title}; it builds for {', '.join(known)}")
        target = known[here]
    config.num_compute_capabilities = 1
    config.set_compute_capability(target, 0)
    return [str(here)], ahead_of_time


def inspect_engine(trt: Any, logger: Any, data: bytes) -> str | None:
    """Return the layer table of an engine for this machine's GPU, as JSON; None if it cannot be loaded."""
    runtime = trt.Runtime(logger)
    engine = runtime.deserialize_cuda_engine(data)
    if engine is None:
        return None  # the build log has the table too
    inspector = engine.create_engine_inspector()
    text = str(inspector.get_engine_information(trt.LayerInformationFormat.JSON))
    del inspector, engine, runtime
    return text
