"""Reads an engine file, safetensors with plan, arrays and cubins, and checks it before anything is used."""

import json
from collections.abc import Mapping
from math import prod
from mmap import mmap
from typing import Any, NamedTuple

import numpy as np

from qdqbench.quantize.engine.cuda.check import check_arrays, require_kernels
from qdqbench.quantize.engine.cuda.names import TARGETS, find_symbols, list_kernels
from qdqbench.quantize.engine.cuda.plan import Head, Plan, parse
from qdqbench.quantize.utils.arrays import Array
from qdqbench.quantize.utils.errors import QdqError, UserError

CODE = "code."  # before a target and the name of a source file
_MOST_HEADER = 4 << 20  # bytes; BERT-large's has half a million, its plan included
TYPES = {"I8": np.int8, "U8": np.uint8, "F16": np.float16, "F32": np.float32}


class EngineFile(NamedTuple):
    plan: Plan
    arrays: dict[str, Array]  # views of the file
    codes: dict[str, dict[str, bytes]]  # cubins or PTX, by target and source file


def parse_engine(data: bytes | mmap, name: object, version: str) -> EngineFile:
    """Return the parts of an engine file; UserError where it is damaged, or of another version."""
    again = "build it again, or take backend tensorrt_rtx or tensorrt"
    try:
        size = int.from_bytes(data[:8], "little")
        if not size <= min(_MOST_HEADER, len(data) - 8):
            raise ValueError(f"a header of {size} bytes")
        header = _read_json(data[8 : 8 + size].decode())
        told = {**header.pop("__metadata__", {})}
        other = told.get("version") != version
        if not other:
            arrays = _find_arrays(header, memoryview(data)[8 + size :])
            plan = parse(Plan, _read_json(told["plan"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, UserError) as error:
        why = _shown(error)[:100]
        raise UserError(f"{name} is no whole engine of backend cuda ({why}); {again}") from error
    if other:
        found = _shown(told.get("version"))[:40]
        raise UserError(f"{name} has version {found}, and this one is {version}; {again}")
    if not plan.operations or not isinstance(plan.operations[-1], Head):
        raise UserError(f"{name} has a plan that ends without a head; {again}")
    codes: dict[str, dict[str, bytes]] = {}
    for key in [key for key in arrays if key.startswith(CODE)]:
        target, _, source = key.removeprefix(CODE).rpartition(".")
        codes.setdefault(target, {})[source] = arrays.pop(key).tobytes()
    try:
        check_arrays(plan, arrays)
        require_kernels(plan)
        check_symbols(plan, codes)
    except QdqError as error:
        raise type(error)(_shown(error)) from error
    return EngineFile(plan, arrays, codes)


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


def check_symbols(plan: Plan, codes: Mapping[str, Mapping[str, bytes]]) -> None:
    """Raise QdqError where a kernel that the plan launches is not in the code of a target."""
    targets = {target.name: target for target in TARGETS}
    if not codes or codes.keys() - targets:
        raise QdqError(f"the engine is for {', '.join(sorted(codes)) or 'no GPU'}; build the engine again")
    for name, sources in codes.items():
        there = {symbol for code in sources.values() for symbol in find_symbols(code)}
        if missing := list_kernels(plan, targets[name]) - there:
            raise QdqError(
                f"the code for {name} lacks the kernels {', '.join(sorted(missing))}; build the engine again"
            )
