"""Files that are broken in ways that happen, and in ways that someone thinks of."""

import random
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from qdqbench.quantize.utils.errors import UserError

HOSTILE = [
    b"../../../etc/passwd",
    b"<script>alert(1)</script>",
    b"\\u0000",
    b"\x1b[31m",
    b"\xff\xfe",
    b"'; rm -rf /; '",
    b"${HOME}",
    b"%s%n",
    "\u202e\u0645".encode(),
    b"A" * 5000,
]
NUMBERS = [
    b"1e999",
    b"-1e999",
    b"9" * 400,
    b"NaN",
    b"-Infinity",
    b"nan(0x8)",
    b"0x10",
    b"1e-400",
    b"-0",
    b"null",
]
NESTED = [b"[" * 3000, b'{"a":' * 3000, b"[" * 300 + b"]" * 300, b'[{"name":[' * 500]


def hold_to_one_sentence(
    reader: Callable[[Path], object], samples: list[bytes], path: Path, count: int = 10_000
) -> None:
    """Broken files are read, or end in a UserError of one sentence: in bounded time and memory.

    Args:
        path: where each of them is written.
    """
    before, good, slowest, said = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0, 0.0, ""
    for data in broken(samples, count):
        path.write_bytes(data)
        start = time.process_time()
        try:
            reader(path)
            good += 1
        except UserError as error:
            said = max(said, str(error), key=lambda text: (not text.isprintable(), len(text)))
        slowest = max(slowest, time.process_time() - start)
    assert 0 < good < count
    assert said.isprintable(), repr(said)
    assert len(said) < 600 + 2 * len(str(path)), said
    assert slowest < 2, f"{slowest} s of CPU for one file"
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 200_000, f"{grown} kB more memory"


def broken(samples: list[bytes], count: int, seed: int = 0) -> Iterator[bytes]:
    """`count` variants of good files: cut off, flipped bits, parts moved, hostile numbers, names, depth."""
    chance = random.Random(seed)
    ways = [_cut, _flipped, _spliced, _number, _name, _nested, _noise, _doubled]
    for _ in range(count):
        data = chance.choice(samples)
        for _ in range(chance.randint(1, 3)):
            data = chance.choice(ways)(data, chance)
        yield data


def _place(data: bytes, chance: random.Random) -> int:
    return chance.randrange(len(data) + 1)


def _cut(data: bytes, chance: random.Random) -> bytes:
    return data[: _place(data, chance)]


def _flipped(data: bytes, chance: random.Random) -> bytes:
    flipped = bytearray(data)
    for _ in range(chance.randint(1, 8) if data else 0):
        flipped[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(flipped)


def _spliced(data: bytes, chance: random.Random) -> bytes:
    low, high = sorted((_place(data, chance), _place(data, chance)))
    where = _place(data, chance)
    return data[:where] + data[low : min(high, low + 4000)] + data[where:]


def _number(data: bytes, chance: random.Random) -> bytes:
    """A number of the file becomes another one, or something that looks like one."""
    digits = [place for place, byte in enumerate(data) if 48 <= byte <= 57]
    if not digits:
        return data
    where = chance.choice(digits)
    return data[:where] + chance.choice(NUMBERS) + data[where + 1 :]


def _name(data: bytes, chance: random.Random) -> bytes:
    where = _place(data, chance)
    return data[:where] + chance.choice(HOSTILE) + data[where:]


def _nested(data: bytes, chance: random.Random) -> bytes:
    where = _place(data, chance)
    return data[:where] + chance.choice(NESTED) + data[where:]


def _noise(data: bytes, chance: random.Random) -> bytes:
    where = _place(data, chance)
    return data[:where] + chance.randbytes(chance.randint(1, 64)) + data[where:]


def _doubled(data: bytes, chance: random.Random) -> bytes:
    return data + data if len(data) < 1 << 20 else data
