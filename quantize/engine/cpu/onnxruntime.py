"""ONNX Runtime's CPU provider: graphs that it optimized for this CPU, and the kernels that they run."""

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from qdqbench.quantize.engine.cpu.compiled import FREE, Compute, Kernel, Run, Signature, Sizes
from qdqbench.quantize.utils.arrays import Array
from qdqbench.quantize.utils.errors import MissingDevice, UserError
from qdqbench.quantize.utils.results import LayerRow
from qdqbench.quantize.utils.system.cpu import find_cpu, quota

_TYPES = {
    "int8": "Int8",
    "uint8": "UInt8",
    "float": "Float",
    "float16": "Half",
    "int32": "Int32",
    "int64": "Int64",
    "bool": "Bool",
}
_GEMMS = re.compile(r"MatMul|Gemm")  # MatMulIntegerToFloat, QLinearMatMul, FusedMatMul, QGemm, ...


class OnnxRuntimeModel:
    """A graph that ONNX Runtime optimized for this CPU; arguments and errors as `runtimes.compile_model`."""

    def __init__(  # noqa: PLR0913
        self,
        data: bytes,
        *,
        blob: bool,
        compute: Compute,
        fixed: Sizes = FREE,
        threads: int | None = None,
        streams: int = 1,
        profile: bool = False,
    ) -> None:
        assert compute == "fp32"
        self._threads = max(1, threads // streams) if threads else None
        self._data = data if blob else _optimized(data)
        self._session = _session(self._data, self._threads)
        # a session of one thread has no pool: whoever calls it computes, so that all streams can share it
        more = 0 if self._threads == 1 else streams - 1
        self._sessions = [self._session, *(_session(self._data, self._threads) for _ in range(more))]
        self._sessions *= streams - more
        self.inputs = {each.name: _signature(each) for each in self._session.get_inputs()}
        self.outputs = [each.name for each in self._session.get_outputs()]
        self._last: dict[str, Array] = {}

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run once; every output by name."""
        self._last = {name: feeds[name] for name in self.inputs}
        return self._infer(self._session, feeds)

    def lanes(self) -> list[Run]:
        """Return one function a stream, each as `run`; they may run at once."""
        return [partial(self._infer, session) for session in self._sessions]

    def _infer(self, session: Any, feeds: Mapping[str, Array]) -> dict[str, Array]:
        taken = {name: feeds[name] for name in self.inputs}
        return dict(zip(self.outputs, session.run(self.outputs, taken), strict=True))

    def blob(self) -> bytes:
        """Return the optimized graph, for this version of ONNX Runtime and this kind of CPU."""
        return self._data

    def kernels(self) -> list[Kernel]:
        """Return the executed kernels in their order, with the milliseconds of one run of the last inputs."""
        with tempfile.TemporaryDirectory(prefix="qdqbench-profile-") as folder:
            session = _session(self._data, self._threads, profile=Path(folder) / "run")
            session.run(self.outputs, self._last)
            events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
        return list(_kernels(onnx.load_from_string(self._data).graph, events))


def _session(data: bytes, threads: int | None, *, profile: Path | None = None) -> Any:
    """Return the session of an optimized graph, as it is."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    # threads spin inside of a run, as ONNX Runtime does it, but not behind it, where they hold up others
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.intra_op_num_threads = threads or quota() or 0  # 0: as many as it chooses
    if profile:
        options.enable_profiling, options.profile_file_prefix = True, str(profile)
    try:
        return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        why = " ".join(str(error).split())[:300]
        raise MissingDevice(f"ONNX Runtime {ort.__version__} cannot load this engine here: {why}") from error


def _signature(given: Any) -> Signature:
    """Return the signature of a session's input: type `tensor(int64)`, names for free sizes."""
    kind = given.type.removeprefix("tensor(").removesuffix(")")
    sizes = tuple(size if isinstance(size, int) else None for size in given.shape)
    return Signature(np.dtype({"float": "float32"}.get(kind, kind)), sizes)


def _optimized(data: bytes) -> bytes:
    """Return the graph after ONNX Runtime's fusions; doc strings of nodes list the nodes they stand for."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 3
    if not find_cpu().int8_dot:  # its kernels for UINT8 x INT8 would saturate: weights become UINT8
        options.add_session_config_entry("session.x64quantprecision", "1")
    with tempfile.TemporaryDirectory(prefix="qdqbench-optimized-") as folder:
        path = Path(folder) / "optimized.onnx"
        options.optimized_model_filepath = str(path)
        try:
            ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            why = " ".join(str(error).split())[:300]
            raise UserError(f"ONNX Runtime {ort.__version__} refuses this graph: {why}") from error
        made = onnx.load(path)
    _trace(onnx.load_from_string(data).graph, made.graph)
    optimized: bytes = made.SerializeToString()
    return optimized


def _trace(before: onnx.GraphProto, after: onnx.GraphProto) -> None:
    """Write into each node of an optimized graph the names of the nodes that it stands for.

    Those are the nodes between its outputs and the nearest tensors that the optimized graph has too.
    """
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
    constants = {tensor.name: _name_of(tensor.data_type) for tensor in graph.initializer}
    constants |= {
        node.output[0]: "Float" for node in graph.node if node.op_type in ("Constant", "ConstantOfShape")
    }
    ran = {}
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            ran[event["name"].removesuffix("_kernel_time"), event["args"]["op_name"]] = event
    types: dict[str, str] = {value.name: "Int64" for value in graph.input}
    for node in graph.node:
        known = ran.get((node.name, node.op_type))
        told = known["args"].get("output_type_shape", []) if known else []
        names = [_TYPES.get(next(iter(each)), next(iter(each))) for each in told]
        types |= dict(zip(node.output, names, strict=False))
        stands_for = node.doc_string.split("\n")
        products = [name for name in stands_for if _GEMMS.match(name.rpartition("/")[2])]
        gemm = bool(_GEMMS.search(node.op_type))
        row = LayerRow(
            name=products[0] if gemm and len(products) == 1 else node.name,
            kind="gemm" if gemm else node.op_type,
            onnx=stands_for,
            inputs=[types.get(name, "Float") for name in node.input if name and name not in constants],
            constants=[constants[name] for name in node.input if name in constants],
            outputs=[types.get(name, "Float") for name in node.output],
            kernel=node.op_type,
        )
        yield Kernel(row, known["dur"] / 1000 if known else 0.0)


def _name_of(kind: int) -> str:
    name = str(onnx.TensorProto.DataType.Name(kind)).lower()
    return _TYPES.get(name, name)
