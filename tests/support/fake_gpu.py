"""A GPU and an engine backend that are not there: CPU tensors as buffers, contexts that read their addresses.

The fake engine computes logits [sum of ids under the mask, length] of int64 inputs [batch, length]. The names
that the code uses are held to the real bindings by tests/unit/engine/test_backend_bindings.py.
"""

import contextlib
import ctypes
import enum
import types
from dataclasses import dataclass, field

import numpy as np
import torch

TensorIOMode = enum.Enum("TensorIOMode", ["NONE", "INPUT", "OUTPUT"])
DataType = enum.Enum("DataType", ["FLOAT", "HALF", "INT64", "FP4"])
Strategy = enum.Enum("DynamicShapesKernelSpecializationStrategy", ["LAZY", "EAGER", "NONE"])
GraphStrategy = enum.Enum("CudaGraphStrategy", ["DISABLED", "WHOLE_GRAPH_CAPTURE"])


NAMES = {"input_ids": "ids", "attention_mask": "mask"}  # in models of deployed folders


class Stream:
    cuda_stream = 7

    def synchronize(self):
        state.syncs += 1


class Graph:
    def __init__(self):
        self.work = []

    def replay(self):
        assert state.stream is not None, "replayed on the default stream"
        state.replays += 1
        for work in self.work:
            work()


@dataclass
class State:
    """What happened on the GPU."""

    profiles: list = field(default_factory=list)  # (min, opt, max) of each
    capturing: Graph | None = None
    stream: Stream | None = None
    syncs: int = 0
    replays: int = 0
    enqueued: int = 0
    contexts: int = 0
    captures: int = 0
    compiled: set = field(default_factory=set)  # shapes that the cache was asked to hold
    loaded: bytes = b""
    strategy: Strategy | None = None
    free: int = 1000_000
    fails: bool = False
    refuses_cache: bool = False
    unwritten: bool = False
    silent: bool = False
    order: list = field(default_factory=list)


state = State()


class Context:
    def __init__(self, name):
        self.shapes, self.addresses, self.profile, self.profiler, self.name = {}, {}, 0, None, name
        state.contexts += 1

    def __del__(self):
        state.order.append("context")

    def set_optimization_profile_async(self, index, stream):
        assert stream == Stream.cuda_stream
        self.profile = index
        return index < len(state.profiles)

    def set_input_shape(self, name, shape):
        low, _, high = state.profiles[self.profile]
        self.shapes[NAMES.get(name, name)] = shape
        return all(a <= n <= b for a, n, b in zip(low, shape, high, strict=True))

    def set_tensor_address(self, name, address):
        assert address
        self.addresses[NAMES.get(name, name)] = address
        return True

    def infer_shapes(self):
        return [name for name in ("ids", "mask") if name not in self.shapes]

    def get_tensor_shape(self, name):
        return (self.shapes["ids"][0], 2) if name == "logits" else self.shapes[name]

    def execute_async_v3(self, stream):
        assert stream == Stream.cuda_stream
        state.enqueued += 1
        state.compiled.add(self.shapes["ids"])
        if state.fails:
            return False
        if state.capturing is not None:
            state.capturing.work.append(self.compute)
        else:
            self.compute()
        return True

    def compute(self):
        shape = self.shapes["ids"]
        ids, mask = (view(self.addresses[name], shape, ctypes.c_int64) for name in ("ids", "mask"))
        logits = view(self.addresses["logits"], (shape[0], 2), ctypes.c_float)
        logits[:, 0] = (ids * mask).sum(axis=1)
        if not state.unwritten:
            logits[:, 1] = shape[1]
        if self.profiler is not None and not state.silent:
            self.profiler.report_layer_time("gemm", 1.0 + state.enqueued % 2)
            self.profiler.report_layer_time("gemm", 1.0)
            self.profiler.report_layer_time("norm", 0.5)


def view(address, shape, kind):
    count = int(np.prod(shape))
    return np.ctypeslib.as_array((kind * count).from_address(address)).reshape(shape)


class RuntimeCache:
    def deserialize(self, blob):
        state.loaded = bytes(blob)
        return not state.refuses_cache

    def serialize(self):
        return b"kernels of " + str(sorted(state.compiled)).encode()


class RuntimeConfig:
    def create_runtime_cache(self):
        return RuntimeCache()

    def set_runtime_cache(self, cache):
        return isinstance(cache, RuntimeCache)


class CudaEngine:
    names = ("ids", "mask", "logits")
    num_io_tensors = 3
    output_type = DataType.FLOAT

    def __del__(self):
        state.order.append("engine")

    @property
    def num_optimization_profiles(self):
        return len(state.profiles)

    def get_tensor_name(self, index):
        return self.names[index]

    def get_tensor_mode(self, name):
        return TensorIOMode.OUTPUT if name == "logits" else TensorIOMode.INPUT

    def get_tensor_dtype(self, name):
        return self.output_type if name == "logits" else DataType.INT64

    def get_tensor_shape(self, name):
        return (-1, 2) if name == "logits" else (-1, -1)

    def get_tensor_profile_shape(self, name, index):
        return list(state.profiles[index])

    def get_device_memory_size_for_profile_v2(self, index):
        return 1000 * state.profiles[index][2][0]

    def create_runtime_config(self):
        return RuntimeConfig()

    def create_execution_context(self, runtime_config=None):
        if runtime_config is not None:
            state.strategy = runtime_config.dynamic_shapes_kernel_specialization_strategy
            assert runtime_config.cuda_graph_strategy == GraphStrategy.DISABLED
        return Context("jit" if runtime_config else "plain")


class Runtime:
    def __init__(self, logger):
        self.logger = logger

    def __del__(self):
        state.order.append("runtime")

    def deserialize_cuda_engine(self, data):
        if data == b"foreign":
            self.logger.log(types.SimpleNamespace(name="ERROR"), "serialized for another device")
            return None
        state.free -= 300_000
        return CudaEngine()


class ILogger:
    pass


class IProfiler:
    pass


def module(name):
    """The module `tensorrt` or `tensorrt_rtx`."""
    found = types.ModuleType(name)  # hashable, as a module is
    found.ILogger, found.IProfiler = ILogger, IProfiler
    found.Runtime, found.TensorIOMode = Runtime, TensorIOMode
    if name == "tensorrt_rtx":
        found.DynamicShapesKernelSpecializationStrategy = Strategy
        found.CudaGraphStrategy = GraphStrategy
    return found


@contextlib.contextmanager
def on_stream(stream):
    before, state.stream = state.stream, stream
    yield
    state.stream = before


@contextlib.contextmanager
def capture(graph, stream, capture_error_mode):
    assert capture_error_mode == "thread_local"
    state.captures += 1
    state.capturing = graph
    yield
    state.capturing = None


def install(monkeypatch, profiles):
    """Put the fake GPU into torch and forget what happened on it."""
    state.__dict__.update(State(profiles=list(profiles)).__dict__)
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "mem_get_info", lambda: (state.free, 10_000_000))
    monkeypatch.setattr(cuda, "Stream", Stream)
    monkeypatch.setattr(cuda, "stream", on_stream)
    monkeypatch.setattr(cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(cuda, "graph", capture)
    return state
