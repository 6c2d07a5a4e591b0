"""The CPU runtimes: OpenVINO's plugin and ONNX Runtime's provider, their compiled models and kernels."""

import json
import re
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import onnx

from qdqbench.quantize.engine.layers import ATTENTION, is_product
from qdqbench.quantize.engine.results import LayerRow
from qdqbench.quantize.graph.index import MATMULS, GraphIndex, type_name
from qdqbench.quantize.graph.rewrites import fuse_for_openvino
from qdqbench.quantize.standalone.runtimes import load_openvino
from qdqbench.quantize.utils.arrays import Array
from qdqbench.quantize.utils.errors import MissingDevice, UserError
from qdqbench.quantize.utils.limits import BackendName
from qdqbench.quantize.utils.system.cpu import Cpu, find_cpu, quota

Compute = Literal["fp32", "bf16"]  # datatype of what is not quantized
Run = Callable[[Mapping[str, Array]], dict[str, Array]]
Sizes = tuple[int | None, int | None]  # batch and length; None: free
FREE: Sizes = (None, None)
STREAM_ROWS, STREAM_BATCHES, STREAM_TRIALS, STREAM_S, STREAMS_WON = 16, 2, 6, 0.5, 1.05
MOST_ROWS = 32  # of a batch, which a few rows fill
_TYPES = {  # by the names of OpenVINO, ONNX Runtime and ONNX
    **dict.fromkeys(("i8", "int8"), "Int8"),
    **dict.fromkeys(("u8", "uint8"), "UInt8"),
    **dict.fromkeys(("f32", "float"), "Float"),
    **dict.fromkeys(("f16", "float16"), "Half"),
    **dict.fromkeys(("i32", "int32"), "Int32"),
    **dict.fromkeys(("i64", "int64"), "Int64"),
    **dict.fromkeys(("boolean", "bool"), "Bool"),
    "bf16": "BFloat16",
}


class Kernel(NamedTuple):
    row: LayerRow
    ms: float  # 0 where it was not measured


class Signature(NamedTuple):
    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]  # None: free, the batch on axis 0 and the length on the others


class CompiledModel(ABC):
    inputs: dict[str, Signature]
    outputs: list[str]
    lanes: list[Run]  # one a stream, each as `run`; they may run at once

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        return self.lanes[0](feeds)

    @abstractmethod
    def blob(self) -> bytes:
        """Return the compiled model, for this version of its runtime and this kind of CPU."""

    @abstractmethod
    def kernels(self) -> list[Kernel]:
        """Return the executed kernels in their order; the model must have run."""


def compile_model(  # noqa: PLR0913
    backend: BackendName,
    data: Any,
    *,
    blob: bool,
    compute: Compute,
    fixed: Sizes = FREE,
    threads: int | None = None,
    streams: int = 1,
    profile: bool = False,
) -> CompiledModel:
    """Return a model that a CPU runtime compiled, from its ONNX file or from an engine that it made.

    `data` is the ONNX file (UserError: the runtime refuses it), or with `blob` the engine (MissingDevice: it
    cannot be loaded here); for OpenVINO also a model in its memory. `fixed` is for a file of one shape only,
    `threads` are of all streams together, `profile` measures each kernel.
    """
    if backend == "onnxruntime":
        assert compute == "fp32"
        return _OnnxRuntimeModel(data if blob else _optimized(data), threads, streams)
    precision = {"fp32": "f32", "bf16": "bf16"}[compute]
    # one stream runs a batch by all threads, as a latency is measured
    config = {"INFERENCE_PRECISION_HINT": precision, "PERF_COUNT": profile, "NUM_STREAMS": streams}
    if most := threads or quota():
        config["INFERENCE_NUM_THREADS"] = most
    return _OpenVinoModel(data, blob, fixed, config)


class _OnnxRuntimeModel(CompiledModel):
    def __init__(self, data: bytes, threads: int | None, streams: int) -> None:
        self._threads = max(1, threads // streams) if threads else None
        self._data, self._last = data, dict[str, Array]()
        session = _session(data, self._threads)
        # a session of one thread has no pool: whoever calls it computes, so that all streams can share it
        more = 0 if self._threads == 1 else streams - 1
        sessions = [session, *(_session(data, self._threads) for _ in range(more))] * (streams - more)
        self.lanes = [partial(self._infer, each) for each in sessions]
        self.inputs = {each.name: _session_signature(each) for each in session.get_inputs()}
        self.outputs = [each.name for each in session.get_outputs()]

    def _infer(self, session: Any, feeds: Mapping[str, Array]) -> dict[str, Array]:
        self._last = {name: feeds[name] for name in self.inputs}
        return dict(zip(self.outputs, session.run(self.outputs, self._last), strict=True))

    def blob(self) -> bytes:
        return self._data

    def kernels(self) -> list[Kernel]:
        with tempfile.TemporaryDirectory(prefix="qdqbench-profile-") as folder:
            session = _session(self._data, self._threads, profile=Path(folder) / "run")
            for _ in range(3):  # the last one's events count: one plans memory, one allocates it
                session.run(self.outputs, self._last)
            events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
        return list(_kernels(onnx.load_from_string(self._data).graph, events))


def _session(
    data: bytes, threads: int | None = None, *, profile: Path | None = None, optimized: Path | None = None
) -> Any:
    """Return the session of an optimized graph, as it is; or of one that is `optimized` into a file."""
    import onnxruntime as ort

    options, level = ort.SessionOptions(), ort.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimized else level.ORT_DISABLE_ALL
    options.log_severity_level = 3
    # threads spin inside of a run, as ONNX Runtime does it, but not behind it, where they hold up others
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.intra_op_num_threads = threads or quota() or 0  # 0: as many as it chooses
    if profile:
        options.enable_profiling, options.profile_file_prefix = True, str(profile)
    if optimized:
        options.optimized_model_filepath = str(optimized)
    saturates = optimized and not find_cpu().int8_dot  # UINT8 x INT8; UINT8 weights do not
    if saturates:
        options.add_session_config_entry("session.x64quantprecision", "1")
    try:
        data = _unshare_weights(data) if saturates else data
        return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        who, why = f"ONNX Runtime {ort.__version__}", _first_words(error)
        if optimized:
            raise UserError(f"{who} refuses this graph: {why}") from error
        raise MissingDevice(f"{who} cannot load this engine here: {why}") from error


def _first_words(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _session_signature(given: Any) -> Signature:
    kind = given.type.removeprefix("tensor(").removesuffix(")")
    sizes = tuple(size if isinstance(size, int) else None for size in given.shape)
    return Signature(np.dtype({"float": "float32"}.get(kind, kind)), sizes)


def _optimized(data: bytes) -> bytes:
    """Return the graph after ONNX Runtime's fusions; doc strings of nodes list the nodes they stand for."""
    with tempfile.TemporaryDirectory(prefix="qdqbench-optimized-") as folder:
        _session(data, optimized=(path := Path(folder) / "optimized.onnx"))
        model = onnx.load(path)
    _trace(onnx.load_from_string(data).graph, model.graph)
    optimized: bytes = model.SerializeToString()
    return optimized


def _unshare_weights(data: bytes) -> bytes:
    """Return a graph in which each DequantizeLinear has INT8 initializers of its own.

    Layers of ALBERT share theirs. ONNX Runtime 1.31 makes a weight UINT8 once for each node, and fails with
    "Attempt to replace the existing tensor" at the second.
    """
    model = onnx.load_from_string(data)
    known = {each.name: each for each in model.graph.initializer if each.data_type == onnx.TensorProto.INT8}
    taken = set()
    for node in model.graph.node:
        for place, name in enumerate(node.input if node.op_type == "DequantizeLinear" else ()):
            if name in known and name in taken:
                copied = onnx.TensorProto.FromString(known[name].SerializeToString())
                copied.name = node.input[place] = f"{name} of {node.name}"
                model.graph.initializer.append(copied)
            taken.add(name)
    own: bytes = model.SerializeToString()
    return own


def _trace(before: onnx.GraphProto, after: onnx.GraphProto) -> None:
    """Write into each optimized node the names of those from its outputs back to tensors that both have."""
    producers = {tensor: node for node in before.node for tensor in node.output}
    known = {tensor for node in after.node for tensor in node.output}
    for node in after.node:
        sources: dict[str, None] = {}
        waiting = [tensor for tensor in node.output if tensor in producers]
        while waiting:
            source = producers[waiting.pop()]
            if source.name in sources:
                continue
            sources[source.name] = None
            waiting += [tensor for tensor in source.input if tensor in producers and tensor not in known]
        node.doc_string = "\n".join(sources) or node.name


def _kernels(graph: onnx.GraphProto, events: list[dict[str, Any]]) -> Iterator[Kernel]:
    def named(elem_type: int) -> str:
        name = type_name(elem_type).lower()
        return _TYPES.get(name, name)

    constants = {tensor.name: named(tensor.data_type) for tensor in graph.initializer}
    types = {value.name: named(value.type.tensor_type.elem_type) for value in graph.input}
    made = ("Constant", "ConstantOfShape")
    constants |= {node.output[0]: "Float" for node in graph.node if node.op_type in made}
    ran = {
        (event["name"].removesuffix("_kernel_time"), event["args"]["op_name"]): event
        for event in events
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")
    }
    for node in graph.node:
        event = ran.get((node.name, node.op_type))
        shapes = event["args"].get("output_type_shape", []) if event else []
        for tensor, (kind, *_) in zip(node.output, shapes, strict=False):
            types[tensor] = _TYPES.get(kind, kind)
        stands_for = node.doc_string.split("\n")
        # MatMulIntegerToFloat, QLinearMatMul, FusedMatMul, QGemm, ...
        gemm = bool(re.search(r"MatMul|Gemm", node.op_type))
        products = [*filter(is_product, stands_for)]
        row = LayerRow(
            name=products[0] if gemm and len(products) == 1 else node.name,
            kind="gemm" if gemm else node.op_type,
            onnx=stands_for,
            inputs=[types.get(name, "Float") for name in node.input if name and name not in constants],
            constants=[constants[name] for name in node.input if name in constants],
            outputs=[types.get(name, "Float") for name in node.output],
            kernel=node.op_type,
        )
        yield Kernel(row, event["dur"] / 1000 if event else 0.0)


_SPLIT = re.compile(r"/(DequantizationMultiply|DequantizationSubtract|WithoutBiases)$")
_MADE = re.compile(r"[A-Z][A-Za-z]*_[0-9]+$")  # an operator that OpenVINO made, such as Multiply_93600
_CONSTANTS = ("Const", "Constant")


class _OpenVinoModel(CompiledModel):
    def __init__(self, data: Any, blob: bool, fixed: Sizes, config: dict[str, Any]) -> None:
        ov = load_openvino()
        core = ov.Core()
        try:
            if blob:
                self._model = core.import_model(data, "CPU", config)
            else:
                graph = core.read_model(fuse_for_openvino(data)) if isinstance(data, bytes) else data
                if fixed != FREE:  # kernels for one shape are faster: docs/explanation/why-it-is-fast.md
                    graph.reshape({port: _fixed_shape(port, fixed) for port in graph.inputs})
                self._model = core.compile_model(graph, "CPU", config)
        except RuntimeError as error:
            who, why = f"OpenVINO {ov.__version__}", _first_words(error)
            if blob:
                raise MissingDevice(f"{who} cannot load this engine here: {why}") from error
            raise UserError(
                f"{who} refuses this graph, which ONNX Runtime may take (--backend onnxruntime): {why}"
            ) from error
        requests = [self._model.create_infer_request() for _ in range(config["NUM_STREAMS"])]
        self.lanes = [partial(self._infer, request) for request in requests]
        # folding an operator into an input adds a name to its tensor; the node keeps the name of the file
        self.inputs = {
            port.get_node().get_friendly_name(): _port_signature(port) for port in self._model.inputs
        }
        self.outputs = [port.get_any_name() for port in self._model.outputs]

    def _infer(self, request: Any, feeds: Mapping[str, Array]) -> dict[str, Array]:
        results = request.infer({name: feeds[name] for name in self.inputs}, share_inputs=True)
        return {name: results[index].copy() for index, name in enumerate(self.outputs)}

    def blob(self) -> bytes:
        data: bytes = self._model.export_model().getvalue()
        return data

    def kernels(self) -> list[Kernel]:
        executed = []
        for node in self._model.get_runtime_model().get_ordered_ops():
            facts = {name: str(value.astype(str)) for name, value in node.get_rt_info().items()}
            kind = facts["layerType"]
            if kind in (*_CONSTANTS, "Result", "Output"):
                continue
            inputs: list[str] = []
            constants: list[str] = []
            weights: list[str] = []
            for port in node.inputs():
                source = port.get_source_output()
                maker = str(source.get_node().get_rt_info()["layerType"].astype(str))
                (constants if maker in _CONSTANTS else inputs).append(_port_type(source))
                weights += [source.get_node().get_friendly_name()] if maker in _CONSTANTS else []
            # a node that OpenVINO split to move its scales has another name there
            names = [_SPLIT.sub("", name) for name in facts.get("originalLayersNames", "").split(",") if name]
            if kind in ("FullyConnected", "MatMul"):
                kind = "gemm"
                if all(map(_MADE.match, names)):  # its first constant is the weight, whose name stays
                    names = weights[:1] or names
            elif kind == "Subgraph" and any(name.rpartition("/")[2].startswith("Softmax") for name in names):
                kind = ATTENTION
            row = LayerRow(
                name=_SPLIT.sub("", node.get_friendly_name()),
                kind=kind,
                onnx=names,
                inputs=inputs,
                constants=constants,
                outputs=[_port_type(port) for port in node.outputs()],
                kernel=facts.get("primitiveType"),
            )
            time = facts.get("execTimeMcs", "")
            executed.append(Kernel(row, int(time) / 1000 if time.isdecimal() else 0.0))
        return executed


def write_openvino_ir(graph: Path, target: Path) -> None:
    """Write a graph as an .xml and its .bin, as OpenVINO keeps it; equal graphs give equal files."""
    ov = load_openvino()
    try:
        model = ov.Core().read_model(fuse_for_openvino(graph.read_bytes()))
    except RuntimeError as error:
        raise UserError(f"OpenVINO {ov.__version__} refuses this graph: {_first_words(error)}") from error
    for number, node in enumerate(model.get_ordered_ops()):
        if _MADE.match(node.get_friendly_name()):  # counts the operators of this process
            node.set_friendly_name(f"{node.get_type_name()}_{number}")
    ov.save_model(model, target, compress_to_fp16=False)


def _fixed_shape(port: Any, fixed: Sizes) -> list[int]:
    known = [-1 if size.is_dynamic else size.get_length() for size in port.get_partial_shape()]
    return [size or old for size, old in zip(fixed, known, strict=False)] + known[2:]


def _port_signature(port: Any) -> Signature:
    sizes = (None if size.is_dynamic else size.get_length() for size in port.get_partial_shape())
    return Signature(np.dtype(port.get_element_type().to_dtype()), tuple(sizes))


def _port_type(port: Any) -> str:
    name = str(port.get_element_type().get_type_name())
    return _TYPES.get(name, name)


def choose_compute(backend: BackendName, cpu: Cpu, precision: str) -> Compute:
    """Return the datatype of what is not quantized: BF16 where recipe, runtime and CPU allow it."""
    return "bf16" if backend == "openvino" and precision == "fp16" and cpu.bf16 else "fp32"


def warm_up(model: CompiledModel, shape: tuple[int, int]) -> None:
    """Run a model once on inputs that say nothing, of (batch, length); that decides its kernels."""
    model.run(make_feeds(model, shape))


def make_feeds(model: CompiledModel, shape: tuple[int, int]) -> dict[str, Array]:
    """Return inputs that say nothing, of (batch, length)."""
    feeds = {}
    for name, takes in model.inputs.items():
        sizes = [shape[min(axis, 1)] if size is None else size for axis, size in enumerate(takes.shape)]
        feeds[name] = np.full(sizes, name == "attention_mask", takes.dtype)
    return feeds


def choose_streams(open_model: Callable[[int], CompiledModel], shape: tuple[int, int], cores: int) -> int:
    """Return how many streams, of all cores together, answer most batches of (rows, length) a second.

    `open_model` returns a model of so many streams. One, unless others are `STREAMS_WON` times as fast.
    """
    rates = dict[int, float]()
    for count in (1 << place for place in range(cores.bit_length())):
        model = open_model(count)
        model.run(feeds := make_feeds(model, shape))
        with ThreadPoolExecutor(count) as pool:
            times = list[float]()
            while len(times) < STREAM_TRIALS and sum(times) < STREAM_S:
                started = time.perf_counter()
                list(pool.map(_repeat, model.lanes, [feeds] * count))
                times.append(time.perf_counter() - started)
        rates[count] = count * STREAM_BATCHES / min(times)
    best = max(rates, key=lambda count: rates[count])
    return best if rates[best] >= STREAMS_WON * rates[1] else 1


def _repeat(run: Run, feeds: Mapping[str, Array]) -> None:
    for _ in range(STREAM_BATCHES):
        run(feeds)


def name_products(rows: Sequence[LayerRow], model: onnx.ModelProto) -> None:
    """Add each product that no row names to the row that computes what it feeds first, in place.

    OpenVINO names an FP32 product after its bias, and q k^T inside of a fused attention after its scale.
    Where it moved the scale past a residual, `kernels` gives the row the name of its weight.
    """
    index = GraphIndex(model)
    places = {name: row for row in rows if row.kind in ("gemm", ATTENTION) for name in row.onnx}
    for node in model.graph.node:
        if node.op_type not in MATMULS or node.name in places:
            continue
        _, weight = index.origin(node.input[1], ("Transpose", "DequantizeLinear"))
        named = (row for row in rows if row.kind == "gemm" and weight in row.onnx)
        if (row := next(named, None)) is not None:
            row.onnx.remove(weight)
            row.onnx.append(node.name)
            continue
        behind = index.forward(
            node.output[0], lambda other: () if other.op_type in MATMULS else other.output, sys.maxsize
        )
        # the last product of a graph is named after its output
        found = (places.get(other.name) or places.get(other.output[0]) for other in (node, *behind))
        if (row := next(filter(None, found), None)) is not None:
            row.onnx.append(node.name)
