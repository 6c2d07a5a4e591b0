"""The calibration cache of TensorRT 5 to 10: the scale that a calibrator found for each tensor, by its name.

The first line says which version and calibrator wrote it (`TRT-8601-EntropyCalibration2`); any other line is
a tensor's name, a colon and eight hex digits, the scale as float32 with the most significant byte first.
The scale is amax / 127. TensorRT 11 and TensorRT-RTX have no calibrators and read none.
"""

import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path

from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.names import name_list

MAX_CACHE_BYTES = 16 << 20  # BERT-large has some 2,000 tensors and 150 KB
MAX_NAME = 4096
_HEAD = re.compile(r"TRT-(\d{1,9})-(\w{1,64})")
_SCALE = re.compile(r"[0-9a-fA-F]{8}")


@dataclass(frozen=True)
class CalibrationCache:
    """What implicit calibration knows of a network."""

    version: str  # of TensorRT, such as 8.6.1
    calibrator: str  # EntropyCalibration2, MinMaxCalibration, ...
    scales: dict[str, float]  # by tensor; amax / 127, finite and at least 0 (0: it saw zeros alone)

    @property
    def amax(self) -> dict[str, float]:
        """Largest absolute value that each tensor's INT8 codes reach."""
        return {name: scale * 127 for name, scale in self.scales.items()}


def is_cache(start: bytes) -> bool:
    """Whether a file that starts with these bytes (at least its first line) is a calibration cache."""
    return _HEAD.match(start.partition(b"\n")[0].decode("latin-1")) is not None


def read_cache_file(path: Path) -> CalibrationCache:
    """Read a calibration cache; memory is bounded whatever the file holds.

    Raises:
        UserError: missing, too large, or not a calibration cache; names the first lines at fault.
    """
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_CACHE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: no possible path
        why = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read {path}: {why}; give a calibration cache") from error
    if len(data) > MAX_CACHE_BYTES:
        raise UserError(f"{path} has over {MAX_CACHE_BYTES} bytes, and no calibration cache is so large")
    head, *lines = data.decode("utf-8", errors="surrogateescape").splitlines() or [""]
    known = _HEAD.fullmatch(head.strip())
    if known is None:
        raise UserError(
            f"{path} is no calibration cache: its first line is not like TRT-8601-EntropyCalibration2"
        )
    scales: dict[str, float] = {}
    wrong = []
    for number, line in enumerate(lines, 2):
        if not line.strip():
            continue
        name, colon, text = line.rpartition(":")  # a name may hold colons
        scale = _scale(text.strip())
        if not colon or not name.strip() or len(name) > MAX_NAME or scale is None or not name.isprintable():
            wrong.append(f"line {number}")
        else:
            scales[name.strip()] = scale
    if wrong:
        raise UserError(
            f"{path} is no calibration cache, or damaged: {name_list(wrong)} must be a name, a colon and the "
            "eight hex digits of a scale; calibrate again"
        )
    if not scales:
        raise UserError(f"{path} is a calibration cache without tensors; calibrate again")
    return CalibrationCache(_version(int(known[1])), known[2], scales)


def _scale(text: str) -> float | None:
    if not _SCALE.fullmatch(text):
        return None
    value = float(struct.unpack(">f", bytes.fromhex(text))[0])
    return value if math.isfinite(value) and value >= 0 else None


def _version(number: int) -> str:
    """`8.6.1` of 8601 and `10.6.0` of 100600: TensorRT 10 gives the minor version two digits more."""
    major = number // (10_000 if number >= 100_000 else 1_000)
    rest = number % (10_000 if number >= 100_000 else 1_000)
    return f"{major}.{rest // 100}.{rest % 100}"
