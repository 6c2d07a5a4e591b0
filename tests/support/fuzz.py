"""Files that are broken in ways that happen, and in ways that someone thinks of."""

import json
import random
import struct

from .build_logs import POLYGRAPHY, missing_scale, trtexec
from .foreign_layer import float_layer
from .layer_tables import bert, inspector_json
from .tiny_layer import healthy

NAMES = "../../../etc/passwd", "<script>alert(1)</script>", "\\u0000", "\x1b[31m", "'; rm -rf /; '", "${HOME}"
HOSTILE = [*(text.encode() for text in (*NAMES, "%s%n", "\u202e\u0645", "A" * 5000)), b"\xff\xfe"]
ODD = "1e999", "-1e999", "9" * 400, "NaN", "-Infinity", "nan(0x8)", "0x10", "1e-400", "-0", "null"
NUMBERS = [text.encode() for text in ODD]
NESTED = [b"[" * 3000, b'{"a":' * 3000, b"[" * 300 + b"]" * 300, b'[{"name":[' * 500]


def profile():
    rows = [{"name": row.name, "timeMs": 1.0, "averageMs": 0.1, "percentage": 1.0} for row in bert()]
    return json.dumps([{"count": 9}, *rows]).encode()


def cache():
    lines = [f"/layer.{n}/MatMul: {struct.pack('>f', 0.1 + n).hex()}" for n in range(30)]
    return "\n".join(["TRT-8601-EntropyCalibration2", *lines, ""]).encode()


def engine():
    return b"ptrt" + bytes(20) + bytes([10, 0, 0, 6]) + bytes(200)


BASES = {
    "onnx": lambda: [healthy("fp16").SerializeToString(), float_layer().SerializeToString()],
    "log": lambda: [trtexec(*missing_scale("a", "b")).encode(), POLYGRAPHY.encode()],
    "table": lambda: [inspector_json(bert(layers=1), schema).encode() for schema in (10, 11)],
    "profile": lambda: [profile()],
    "cache": lambda: [cache()],
    "engine": lambda: [engine()],
}


def broken(samples, count, seed=0):
    """`count` variants of good files: cut off, flipped bits, parts moved, hostile numbers, names, depth."""
    chance = random.Random(seed)
    ways = [_cut, _flipped, _spliced, _number, _name, _nested, _noise, _doubled]
    for _ in range(count):
        data = chance.choice(samples)
        for _ in range(chance.randint(1, 3)):
            data = chance.choice(ways)(data, chance)
        yield data


def _place(data, chance):
    return chance.randrange(len(data) + 1)


def _cut(data, chance):
    return data[: _place(data, chance)]


def _flipped(data, chance):
    flipped = bytearray(data)
    for _ in range(chance.randint(1, 8) if data else 0):
        flipped[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(flipped)


def _spliced(data, chance):
    low, high = sorted((_place(data, chance), _place(data, chance)))
    where = _place(data, chance)
    return data[:where] + data[low : min(high, low + 4000)] + data[where:]


def _number(data, chance):
    """A number of the file becomes another one, or something that looks like one."""
    digits = [place for place, byte in enumerate(data) if 48 <= byte <= 57]
    if not digits:
        return data
    where = chance.choice(digits)
    return data[:where] + chance.choice(NUMBERS) + data[where + 1 :]


def _name(data, chance):
    where = _place(data, chance)
    return data[:where] + chance.choice(HOSTILE) + data[where:]


def _nested(data, chance):
    where = _place(data, chance)
    return data[:where] + chance.choice(NESTED) + data[where:]


def _noise(data, chance):
    where = _place(data, chance)
    return data[:where] + chance.randbytes(chance.randint(1, 64)) + data[where:]


def _doubled(data, chance):
    return data + data if len(data) < 1 << 20 else data
