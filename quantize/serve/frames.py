"""Messages between the server and its workers: a JSON head, and arrays as they lie in memory. No pickle."""

import json
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np

from qdqbench.quantize.core.arrays import Array

SIZES = struct.Struct("<IQ")  # bytes of the head, bytes of the arrays behind it
Head = dict[str, Any]
_ARRAYS = "arrays"  # key of the head: name, datatype and shape of each array, in their order


def packed(head: Head, arrays: Mapping[str, Array] | None = None) -> bytes:
    """A message of a head (JSON values) and arrays of numbers."""
    whole = {name: np.ascontiguousarray(array) for name, array in (arrays or {}).items()}
    told = [[name, array.dtype.str, array.shape] for name, array in whole.items()]
    first = json.dumps(head | {_ARRAYS: told}).encode()
    data = b"".join(array.tobytes() for array in whole.values())
    return SIZES.pack(len(first), len(data)) + first + data


def unpacked(first: bytes, data: bytes) -> tuple[Head, dict[str, Array]]:
    """Head and arrays (read-only) of a message's two parts, whose lengths `SIZES` said."""
    head, arrays, at = json.loads(first), dict[str, Array](), 0
    for name, kind, shape in head.pop(_ARRAYS):
        count, dtype = int(np.prod(shape, dtype=np.int64)), np.dtype(kind)
        arrays[name] = np.frombuffer(data, dtype, count, at).reshape(shape)
        at += count * dtype.itemsize
    return head, arrays


def read(stream: BinaryIO) -> tuple[Head, dict[str, Array]] | None:
    """The next message of a blocking stream; None where it ended."""
    sizes = stream.read(SIZES.size)
    if len(sizes) < SIZES.size:
        return None
    first, behind = SIZES.unpack(sizes)
    parts = stream.read(first), stream.read(behind)
    return unpacked(*parts) if len(parts[0]) == first and len(parts[1]) == behind else None
