"""Reads an engine file, safetensors with plan, arrays and cubins, and checks it before anything is used."""

import json
from collections.abc import Mapping
from math import prod
from mmap import mmap
from typing import Any, NamedTuple

import numpy as np

from qdqbench.quantize.engine.cuda.check import check_arrays, require_kernels
from qdqbench.quantize.engine.cuda.names import CAPABILITY, find_symbols, list_kernels
from qdqbench.quantize.engine.cuda.plan import Head, Plan, parse
from qdqbench.quantize.utils.arrays import Array
from qdqbench.quantize.utils.errors import QdqError, UserError

CUBIN = "cubin."  # before the name of a source file
_MOST_HEADER = 4 << 20  # bytes; BERT-large's has half a million, its plan included
TYPES = {"I8": np.int8, "U8": np.uint8, "F16": np.float16, "F32": np.float32}


class EngineFile(NamedTuple):
    plan: Plan
    arrays: dict[str, Array]  # views of the file
    cubins: dict[str, bytes]  # by the name of their source file


def parse_engine(data: bytes | mmap, name: object, version: str) -> EngineFile:
    """Return the parts of an engine file; UserError where it is damaged, or of another version or GPU."""
    again = "build it again, or take backend tensorrt_rtx or tensorrt"
    try:
        size = int.from_bytes(data[:8], "little")
        if not size <= min(_MOST_HEADER, len(data) - 8):
            raise ValueError(f"a header of {size} bytes")
        header = _read_json(data[8 : 8 + size].decode())
        told = {**header.pop("__metadata__", {})}
        needed = {"version": version, "capability": CAPABILITY}
        other = next((key for key in needed if told.get(key) != needed[key]), None)
        if other is None:
            arrays = _find_arrays(header, memoryview(data)[8 + size :])
            plan = parse(Plan, _read_json(told["plan"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, UserError) as error:
        why = _shown(error)[:100]
        raise UserError(f"{name} is no whole engine of backend cuda ({why}); {again}") from error
    if other is not None:
        found = _shown(told.get(other))[:40]
        raise UserError(f"{name} has {other} {found}, and this one is {needed[other]}; {again}")
    if not plan.operations or not isinstance(plan.operations[-1], Head):
        raise UserError(f"{name} has a plan that ends without a head; {again}")
    cubins = {
        key.removeprefix(CUBIN): arrays.pop(key).tobytes() for key in [*arrays] if key.startswith(CUBIN)
    }
    try:
        check_arrays(plan, arrays)
        require_kernels(plan)
        check_symbols(plan, cubins)
    except QdqError as error:
        raise type(error)(_shown(error)) from error
    return EngineFile(plan, arrays, cubins)


def _read_json(text: str) -> Any:
    """Return JSON whose keys are there once each: readers differ in which of two they take."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(pairs)) < len(pairs):
            raise ValueError("a key that is there twice")
        return found

    return json.loads(text, object_pairs_hook=unique)


def _shown(text: object) -> str:
    """Return text of a file without what a terminal would obey."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(str(text).split()))


def _find_arrays(header: Mapping[str, Any], data: memoryview) -> dict[str, Array]:
    """Return the arrays of a file, which lie in it one after the other without a gap."""
    arrays, end = dict[str, Array](), 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        if entry["dtype"] not in TYPES:
            raise ValueError(f"the type of {name[:40]}")
        (start, stop), shape, kind = entry["data_offsets"], entry["shape"], np.dtype(TYPES[entry["dtype"]])
        sizes = [size for size in shape if type(size) is int and size >= 0]
        if sizes != shape or start != end or stop - start != prod(sizes) * kind.itemsize:
            raise ValueError(f"the place of {name[:40]}")
        arrays[name], end = np.frombuffer(data[start:stop], kind).reshape(shape), stop
    if end != len(data):
        raise ValueError(f"{len(data)} bytes of arrays, expected {end}")
    return arrays


def check_symbols(plan: Plan, cubins: Mapping[str, bytes]) -> None:
    """Raise QdqError where a kernel that the plan launches is in no cubin."""
    there = {name for cubin in cubins.values() for name in find_symbols(cubin)}
    if missing := list_kernels(plan) - there:
        raise QdqError(f"no cubin holds the kernels {', '.join(sorted(missing))}; build the engine again")
