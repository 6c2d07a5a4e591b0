"""Files that trtexec of TensorRT 10 and 11 writes: --exportTimes and --exportProfile.

The formats are those of `sampleReporting.cpp` in TensorRT's open sources. trtexec writes what C++ streams
print: names without escapes, `nan` and `inf` where JSON has no such number, and six digits of a float. The
file of --exportLayerInfo is the engine inspector's JSON: `engine/layers.py` reads it.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qdqbench.quantize.utils.arrays import Float64
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.files import read_bounded

MAX_BYTES = 64 << 20  # of a file; 300,000 queries in exported times have 60 MB
MAX_PARTS = 2_000_000  # lists and objects of a file, each of which takes far more memory than its text
MAX_KERNELS = 20_000  # BERT-large with four profiles has 1,400
MAX_QUERIES = 1_000_000
MAX_MS = 1e9  # of a kernel or a query
# A string may lack its end, and what follows `nan(` is short: each character is looked at once.
_NOT_A_NUMBER = re.compile(
    r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|([-+]?)\b(nan|inf)\b(?:\([^)\s]{0,64}\))?', re.IGNORECASE | re.DOTALL
)


@dataclass(frozen=True)
class KernelTime:
    """One kernel of `--exportProfile`, milliseconds."""

    name: str
    average_ms: float
    median_ms: float | None  # older versions do not write it


@dataclass(frozen=True)
class Times:
    """What `--exportTimes` has of each query after the warm-up; float64 [queries], milliseconds."""

    start: Float64  # of its work on the GPU; six digits, so after seconds good to 0.1 ms only
    h2d: Float64  # copies to the device; 0 without data transfers
    compute: Float64  # of the GPU
    d2h: Float64
    latency: Float64  # the three together


def read_profile(path: Path) -> list[KernelTime]:
    """Kernels of a file of `trtexec --exportProfile`, or of a list of {"name", "ms"}, in their order.

    Raises:
        UserError: anything else.
    """
    wrong = UserError(
        f"{path} is no kernel profile: it must be a list of objects with name and ms (or averageMs), at most "
        f"{MAX_KERNELS}; write it with trtexec --exportProfile"
    )
    rows = read_json(path, "a kernel profile")
    if not isinstance(rows, list) or len(rows) > MAX_KERNELS + 1:
        raise wrong
    found = []
    for row in rows:
        if not isinstance(row, dict):
            raise wrong
        if set(row) == {"count"}:
            continue  # the head of an exported profile
        average = _number(row.get("ms", row.get("averageMs")))
        if not isinstance(row.get("name"), str) or average is None:
            raise wrong
        found.append(KernelTime(row["name"], average, _number(row.get("medianMs"))))
    if not found:
        raise UserError(f"{path} has no kernels; profile an engine that ran")
    return found


def kernel_ms(profile: list[KernelTime]) -> dict[str, float]:
    """Mean milliseconds by kernel; kernels of one name together."""
    times: dict[str, float] = {}
    for kernel in profile:
        times[kernel.name] = times.get(kernel.name, 0.0) + kernel.average_ms
    return times


def read_times(path: Path) -> Times:
    """Queries of a file of `trtexec --exportTimes`.

    Raises:
        UserError: anything else, or no query.
    """
    fields = {
        "start": "startComputeMs",
        "h2d": "h2dMs",
        "compute": "computeMs",
        "d2h": "d2hMs",
        "latency": "latencyMs",
    }
    rows = read_json(path, "exported times")
    if not isinstance(rows, list) or not rows or len(rows) > MAX_QUERIES:
        raise UserError(
            f"{path} must be a list of 1 to {MAX_QUERIES} queries; write it with trtexec --exportTimes"
        )
    columns: dict[str, list[float]] = {name: [] for name in fields}
    for number, row in enumerate(rows):
        for name, field in fields.items():
            value = _number(row.get(field)) if isinstance(row, dict) else None
            if value is None:
                raise UserError(
                    f"query {number} of {path} has no {field} from 0 to {MAX_MS:g}, so these are no times of "
                    "trtexec 10 or 11; write them with trtexec --exportTimes"
                )
            columns[name].append(value)
    return Times(**{name: np.array(values) for name, values in columns.items()})


def read_json(path: Path, what: str) -> Any:
    """What a JSON file holds, with the NaN and infinities of C++ streams; memory is bounded.

    Args:
        what: it should be, in errors.

    Raises:
        UserError: missing, too large, or not JSON.
    """
    text = read_bounded(path, MAX_BYTES, what, f"{what} that trtexec wrote")
    if text.count("[") + text.count("{") > MAX_PARTS:
        raise UserError(f"{path} has more than {MAX_PARTS} lists and objects, which {what} has not")
    try:
        try:
            return json.loads(text, strict=False)
        except ValueError:
            return json.loads(_NOT_A_NUMBER.sub(_spelled, text), strict=False)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path} is not JSON ({' '.join(str(error).split())[:100]}); give {what} that trtexec wrote"
        ) from error


def _spelled(found: re.Match[str]) -> str:
    """`nan`, `-nan`, `inf` and `-inf` as Python's JSON spells them; strings stay."""
    if found[2] is None:
        return found[0]
    if found[2].lower() == "nan":
        return "NaN"
    return "-Infinity" if found[1] == "-" else "Infinity"


def _number(value: Any) -> float | None:
    """Milliseconds; None for anything that is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < MAX_MS:
        return None
    return float(value)
