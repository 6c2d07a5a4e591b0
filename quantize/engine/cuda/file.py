"""An engine file: one safetensors file with plan, arrays and cubins, built without a GPU."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from qdqbench.quantize.engine.cuda.compile import compile_kernels, find_products, get_version
from qdqbench.quantize.engine.cuda.match import match_graph
from qdqbench.quantize.engine.cuda.names import choose_targets, is_ptx
from qdqbench.quantize.engine.cuda.pack import pack
from qdqbench.quantize.engine.cuda.plan import Attention, Embed, Linear, Norm, Operation, Plan
from qdqbench.quantize.engine.cuda.reader import CODE, TYPES, EngineFile, check_symbols, parse_engine
from qdqbench.quantize.engine.layers import ATTENTION, is_product
from qdqbench.quantize.engine.results import LayerRow
from qdqbench.quantize.utils.arrays import Array
from qdqbench.quantize.utils.errors import QdqError, UserError

_PRODUCTS = {"gemm": {"IGMMA"}, "gemm_mma": {"IMMA"}, "attention": {"IMMA"}}  # instructions by source file
_TYPES = {"int8": "Int8", "fp16": "Half"}


def build_file(
    model: onnx.ModelProto, wanted: Sequence[str] = (), here: str | None = None
) -> tuple[bytes, list[LayerRow], list[str], float]:
    """Return an engine file, the layer table that its plan proves, its targets, and the seconds it took.

    Args:
        wanted: targets, by compute capability; none: the GPU that is `here`, or all.

    Raises:
        UserError: a node that no kernel covers, or a target that cannot be built.
        MissingDevice: NVRTC is not installed.
    """
    started = time.perf_counter()
    plan, arrays = pack(match_graph(model))
    targets = choose_targets(wanted, here, plan)
    codes = compile_kernels(plan, targets)
    check_symbols(plan, codes)
    for target in targets:
        if not is_ptx(target):  # that has no instructions of a GPU
            _check_products(codes[target.name])
    stored = {
        f"{CODE}{target}.{source}": np.frombuffer(code, np.uint8)
        for target, sources in codes.items()
        for source, code in sources.items()
    }
    told = {"qdqbench": metadata.version("qdqbench"), "version": get_version()}
    data = write_safetensors(arrays | stored, told | {"plan": json.dumps(asdict(plan))})
    return data, list_rows(plan), [*codes], time.perf_counter() - started


def write_safetensors(arrays: Mapping[str, Array], told: Mapping[str, str]) -> bytes:
    """Return the same bytes for the same engine each time, which safetensors' own writer does not."""
    kinds = {np.dtype(kind): name for name, kind in TYPES.items()}
    header: dict[str, Any] = {"__metadata__": told}
    parts, end = [], 0
    for name, array in sorted(arrays.items(), key=lambda item: -item[1].itemsize):  # so all are aligned
        places = [end, end := end + array.nbytes]
        header[name] = {"dtype": kinds[array.dtype], "shape": array.shape, "data_offsets": places}
        parts.append(array.tobytes())
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def read_file(path: Path) -> EngineFile:
    """Read an engine file; UserError where it is damaged, or of another version."""
    if not path.is_file():  # a pipe would wait for its writer
        raise UserError(f"{path} is no regular file; give an engine")
    try:
        with path.open("rb") as stream:
            data = mmap(stream.fileno(), 0, access=ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: it is empty
        raise UserError(f"{path} is no whole engine of backend cuda ({error}); build it again") from error
    return parse_engine(data, path, get_version())


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
            # one ONNX product, or those of merged q, k and v
            name, kind = "+".join(filter(is_product, operation.nodes)) or name, "gemm"
            constants = ["Int8", "Float"] if operation.weight == "int8" else ["Half"]
        case Attention():
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
