"""OpenVINO's CPU plugin: compiled blobs, and the kernels that they run. Only this module imports openvino."""

import importlib
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from qdqbench.quantize.engine.cpu.compiled import ATTENTION, FREE, Compute, Kernel, Run, Signature, Sizes
from qdqbench.quantize.utils.arrays import Array
from qdqbench.quantize.utils.errors import MissingDevice, UserError
from qdqbench.quantize.utils.results import LayerRow
from qdqbench.quantize.utils.system.cpu import quota

DEVICE = "CPU"
_PRECISION = {"fp32": "f32", "bf16": "bf16"}  # of what is not quantized
_TYPES = {
    "i8": "Int8",
    "u8": "UInt8",
    "f32": "Float",
    "bf16": "BFloat16",
    "f16": "Half",
    "i32": "Int32",
    "i64": "Int64",
    "boolean": "Bool",
}
_GEMMS = ("FullyConnected", "MatMul")
_PARTS = re.compile(r"/(DequantizationMultiply|DequantizationSubtract|WithoutBiases)$")
_CONSTANTS = ("Const", "Constant")


class OpenVinoModel:
    """A model that OpenVINO compiled for this CPU; arguments and errors as `runtimes.compile_model`."""

    def __init__(  # noqa: PLR0913
        self,
        data: Any,
        *,
        blob: bool,
        compute: Compute,
        fixed: Sizes = FREE,
        threads: int | None = None,
        streams: int = 1,
        profile: bool = False,
    ) -> None:
        ov = importlib.import_module("openvino")
        config: dict[str, Any] = {"INFERENCE_PRECISION_HINT": _PRECISION[compute], "PERF_COUNT": profile}
        # one stream runs a batch by all threads, as a latency is measured
        most = threads or quota()
        config |= {"NUM_STREAMS": streams} | ({"INFERENCE_NUM_THREADS": most} if most else {})
        core = ov.Core()
        try:
            if blob:
                self._model = core.import_model(data, DEVICE, config)
            else:
                graph = core.read_model(data) if isinstance(data, bytes) else data
                if fixed != FREE:  # kernels for one shape are faster: docs/performance.md
                    graph.reshape({port: _sized(port, fixed) for port in graph.inputs})
                self._model = core.compile_model(graph, DEVICE, config)
        except RuntimeError as error:
            who, why = f"OpenVINO {ov.__version__}", " ".join(str(error).split())[:300]
            if blob:
                raise MissingDevice(f"{who} cannot load this engine here: {why}") from error
            raise UserError(
                f"{who} refuses this graph, which ONNX Runtime may take (--backend onnxruntime): {why}"
            ) from error
        self._requests = [self._model.create_infer_request() for _ in range(streams)]
        # folding an operator into an input adds a name to its tensor; the node keeps the name of the file
        self.inputs = {port.get_node().get_friendly_name(): _signature(port) for port in self._model.inputs}
        self.outputs = [port.get_any_name() for port in self._model.outputs]

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run once; every output by name."""
        return self._infer(self._requests[0], feeds)

    def lanes(self) -> list[Run]:
        """Return one function a stream, each as `run`; they may run at once."""
        return [partial(self._infer, request) for request in self._requests]

    def _infer(self, request: Any, feeds: Mapping[str, Array]) -> dict[str, Array]:
        made = request.infer({name: feeds[name] for name in self.inputs}, share_inputs=True)
        return {name: made[index].copy() for index, name in enumerate(self.outputs)}

    def blob(self) -> bytes:
        """Return the compiled model, for this version of OpenVINO and this kind of CPU."""
        data: bytes = self._model.export_model().getvalue()
        return data

    def kernels(self) -> list[Kernel]:
        """Return the executed kernels in their order; their implementations are known after the first run.

        Milliseconds are those of the last run, with `profile`.
        """
        executed = []
        for node in self._model.get_runtime_model().get_ordered_ops():
            facts = {name: str(value.astype(str)) for name, value in node.get_rt_info().items()}
            if facts["layerType"] in (*_CONSTANTS, "Result", "Output"):
                continue
            sources = [port.get_source_output() for port in node.inputs()]
            inputs: list[str] = []
            constants: list[str] = []
            for source in sources:
                kind = str(source.get_node().get_rt_info()["layerType"].astype(str))
                (constants if kind in _CONSTANTS else inputs).append(_type(source))
            names = [_onnx_name(name) for name in facts.get("originalLayersNames", "").split(",") if name]
            row = LayerRow(
                name=_onnx_name(node.get_friendly_name()),
                kind=_kind(facts["layerType"], names),
                onnx=names,
                inputs=inputs,
                constants=constants,
                outputs=[_type(port) for port in node.outputs()],
                kernel=facts.get("primitiveType"),
            )
            time = facts.get("execTimeMcs", "")
            executed.append(Kernel(row, int(time) / 1000 if time.isdecimal() else 0.0))
        return executed


def read_model(data: bytes) -> Any:
    """Return an ONNX file in OpenVINO's memory, for libraries that change it there."""
    return importlib.import_module("openvino").Core().read_model(data)


def _kind(layer_type: str, names: list[str]) -> str:
    """Return the kind of a node: a subgraph that holds a softmax is an attention."""
    if layer_type == "Subgraph" and any(name.rpartition("/")[2].startswith("Softmax") for name in names):
        return ATTENTION
    return "gemm" if layer_type in _GEMMS else layer_type


def _onnx_name(name: str) -> str:
    """Return the ONNX name of a node: one that OpenVINO split to move its scales has another there."""
    return _PARTS.sub("", name)


def _sized(port: Any, fixed: Sizes) -> list[int]:
    """Return the shape of an input with the batch on axis 0 and the length on axis 1 fixed; -1 is free."""
    known = [-1 if size.is_dynamic else size.get_length() for size in port.get_partial_shape()]
    return [size or old for size, old in zip(fixed, known, strict=False)] + known[2:]


def _signature(port: Any) -> Signature:
    sizes = (None if size.is_dynamic else size.get_length() for size in port.get_partial_shape())
    return Signature(np.dtype(port.get_element_type().to_dtype()), tuple(sizes))


def _type(port: Any) -> str:
    name = str(port.get_element_type().get_type_name())
    return _TYPES.get(name, name)
