"""An engine file: one safetensors file with plan, arrays and cubins, built without a GPU."""

import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
from pydantic import ValidationError

from qdqbench.quantize.engine.cuda.check import check_arrays
from qdqbench.quantize.engine.cuda.compile import (
    CAPABILITY,
    compile_kernels,
    find_products,
    find_symbols,
    get_version,
    list_kernels,
)
from qdqbench.quantize.engine.cuda.match import match_graph
from qdqbench.quantize.engine.cuda.pack import pack
from qdqbench.quantize.engine.cuda.plan import Attention, Embed, Head, Linear, Norm, Operation, Plan
from qdqbench.quantize.engine.layers import ATTENTION
from qdqbench.quantize.utils.arrays import Array
from qdqbench.quantize.utils.errors import QdqError, UserError
from qdqbench.quantize.utils.results import LayerRow

_CUBIN = "cubin."  # before the name of a source file
_MOST_PLAN = 16 << 20  # bytes of a plan as JSON; BERT-large's has half a million
_PRODUCTS = {"gemm": {"IGMMA"}, "attention": {"IMMA"}}  # instructions by source file
_TYPES = {"int8": "Int8", "fp16": "Half"}


class EngineFile(NamedTuple):
    plan: Plan
    arrays: dict[str, Array]
    cubins: dict[str, bytes]  # by the name of their source file


def build_file(model: onnx.ModelProto) -> tuple[bytes, list[LayerRow], float]:
    """Return an engine file, the layer table that its plan proves, and the seconds that it took.

    Raises:
        UserError: a node that no kernel covers.
        MissingDevice: NVRTC is not installed.
    """
    from safetensors.numpy import save

    started = time.perf_counter()
    plan, arrays = pack(match_graph(model))
    cubins = compile_kernels(plan)
    _check_symbols(plan, cubins)
    _check_products(cubins)
    stored = {f"{_CUBIN}{name}": np.frombuffer(cubin, np.uint8) for name, cubin in cubins.items()}
    told = {"qdqbench": metadata.version("qdqbench"), "version": get_version(), "capability": CAPABILITY}
    data = save(arrays | stored, told | {"plan": plan.model_dump_json()})
    return data, list_rows(plan), time.perf_counter() - started


def read_file(path: Path) -> EngineFile:
    """Read an engine file; UserError where it is damaged, or of another version or GPU."""
    from safetensors import SafetensorError, safe_open

    again = "build it again, or take backend tensorrt_rtx or tensorrt"
    try:
        with safe_open(path, "np") as stored:
            told = stored.metadata() or {}
            for key, needed in (("version", get_version()), ("capability", CAPABILITY)):
                if told.get(key) != needed:
                    raise UserError(f"{path} has {key} {told.get(key)}, and this one is {needed}; {again}")
            if len(told["plan"]) > _MOST_PLAN:
                raise UserError(f"{path} has a plan of more than {_MOST_PLAN} bytes; {again}")
            plan = Plan.model_validate_json(told["plan"])
            arrays = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118  no mapping
    except (SafetensorError, ValidationError, OSError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is no whole engine of backend cuda ({type(error).__name__}); {again}"
        ) from error
    if not plan.operations or not isinstance(plan.operations[-1], Head):
        raise UserError(f"{path} has a plan that ends without a head; {again}")
    cubins = {
        name.removeprefix(_CUBIN): arrays.pop(name).tobytes() for name in [*arrays] if name.startswith(_CUBIN)
    }
    check_arrays(plan, arrays)
    _check_symbols(plan, cubins)
    return EngineFile(plan, arrays, cubins)


def _check_symbols(plan: Plan, cubins: dict[str, bytes]) -> None:
    """Raise QdqError where a kernel that the plan launches is in no cubin."""
    there = {name for cubin in cubins.values() for name in find_symbols(cubin)}
    if missing := list_kernels(plan) - there:
        raise QdqError(f"no cubin holds the kernels {', '.join(sorted(missing))}; build the engine again")


def _check_products(cubins: dict[str, bytes]) -> None:
    """Raise QdqError where a kernel multiplies in anything but INT8, if nvdisasm is there to read them."""
    for source, expected in _PRODUCTS.items():
        for name, found in find_products(cubins[source]).items() if source in cubins else ():
            if found != expected:
                made, wanted = (" and ".join(sorted(each)) or "nothing" for each in (found, expected))
                raise QdqError(f"kernel {name} multiplies by {made}, and INT8 by {wanted} alone")


def list_rows(plan: Plan) -> list[LayerRow]:
    """Return the layer table: a row for each operation, with its ONNX nodes and datatypes."""
    residuals: dict[str, str] = {}  # by the sums that hold them
    rows = []
    for operation in plan.operations:
        rows.append(_row(operation, plan, residuals))
        if isinstance(operation, Linear) and rows[-1].residual is not None:
            residuals[operation.output] = rows[-1].residual
    return rows


def _row(operation: Operation, plan: Plan, residuals: dict[str, str]) -> LayerRow:
    kinds = {name: _TYPES[tensor.kind] for name, tensor in plan.tensors.items()}
    inputs, constants = [kinds[name] for name in operation.reads], list[str]()
    name, kind, residual = operation.name, str(operation.op), None
    match operation:
        case Linear():
            # an epilogue reads the residual: what is multiplied is the first input and the weight
            inputs, residual = inputs[:1], inputs[1] if len(inputs) > 1 else None
            name, kind = "+".join(_products(operation)) or name, "gemm"
            constants = ["Int8", "Float"] if operation.weight == "int8" else ["Half"]
        case Attention():
            inputs = [kinds[view.tensor] for view in (operation.query, operation.key, operation.value)]
            kind = ATTENTION
        case Embed():
            inputs, constants = ["Int32"] * 3, ["Half"]
        case Norm():
            constants, residual = ["Float"], residuals.get(operation.input)
    outputs = [kinds[made] for made in operation.writes] or ["Float"]
    return LayerRow(
        name=name,
        kind=kind,
        onnx=[*operation.nodes],
        inputs=inputs,
        constants=constants,
        outputs=outputs,
        residual=residual,
    )


def _products(operation: Linear) -> Iterator[str]:
    """Yield the ONNX products that a GEMM computes: one, or those of merged q, k and v."""
    return (node for node in operation.nodes if node.rpartition("/")[2].startswith(("MatMul", "Gemm")))
