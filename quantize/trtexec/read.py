"""Files that trtexec of TensorRT 10 and 11 writes: --exportTimes, --exportProfile and --exportOutput.

The formats are those of `sampleReporting.cpp` in TensorRT's open sources. trtexec writes what C++ streams
print: names without escapes, `nan` and `inf` where JSON has no such number, and six digits of a float. The
file of --exportLayerInfo is the engine inspector's JSON: `engine/layers.py` reads it.
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qdqbench.quantize.core.arrays import Float64
from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.core.files import read_bounded

MAX_BYTES = 64 << 20  # of a file; 300,000 queries in exported times have 60 MB
MAX_PARTS = 2_000_000  # lists and objects of a file, each of which takes far more memory than its text
MAX_KERNELS = 20_000  # BERT-large with four profiles has 1,400
MAX_QUERIES = 1_000_000
MAX_OUTPUTS = 1_000
MAX_RANK = 8  # of a tensor in TensorRT
MAX_MS = 1e9  # of a kernel or a query
# A string may lack its end, and what follows `nan(` is short: each character is looked at once.
_NOT_A_NUMBER = re.compile(
    r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|([-+]?)\b(nan|inf)\b(?:\([^)\s]{0,64}\))?', re.IGNORECASE | re.DOTALL
)
_DIMENSIONS = re.compile(r"\(?\s*(\d{1,18}(?:\s*[x,]\s*\d{1,18})*)?\s*,?\s*\)?")


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


def read_outputs(path: Path) -> dict[str, Float64]:
    """Output tensors of a file of `trtexec --exportOutput`, by name; NaN and infinity are kept.

    Raises:
        UserError: anything else, or values that do not fill their dimensions.
    """
    rows = read_json(path, "exported outputs")
    if not isinstance(rows, list) or not rows or len(rows) > MAX_OUTPUTS:
        raise UserError(
            f"{path} must be a list of 1 to {MAX_OUTPUTS} outputs; write it with trtexec --exportOutput"
        )
    found: dict[str, Float64] = {}
    for number, row in enumerate(rows):
        fields: dict[str, Any] = row if isinstance(row, dict) else {}
        name, values = fields.get("name"), fields.get("values")
        shape = _shape(fields.get("dimensions"))
        if not isinstance(name, str) or not isinstance(values, list) or shape is None:
            raise UserError(
                f"output {number} of {path} must have a name, dimensions such as 32x2, and a list of values; "
                "write it with trtexec --exportOutput"
            )
        if name in found:
            raise UserError(f"{path} has output {name[:80]!r} twice; write it again")
        if math.prod(shape) != len(values):
            sizes = "x".join(map(str, shape))
            raise UserError(
                f"output {name[:80]!r} of {path} has {len(values)} values and dimensions {sizes}; "
                "write it again"
            )
        found[name] = _floats(values, f"output {name[:80]!r} of {path}").reshape(shape)
    return found


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


def _shape(text: Any) -> tuple[int, ...] | None:
    """`32x2` and `(32, 2)` as (32, 2); of a scalar nothing. None for anything else."""
    if not isinstance(text, str) or len(text) > 200:
        return None
    found = _DIMENSIONS.fullmatch(text.strip())
    if found is None:
        return None
    sizes = tuple(int(size) for size in re.findall(r"\d+", text))
    return sizes if len(sizes) <= MAX_RANK else None


def _floats(values: list[Any], what: str) -> Float64:
    if not all(isinstance(value, int | float) for value in values):
        raise UserError(f"{what} holds other things than numbers; write it with trtexec --exportOutput")
    try:
        return np.array(values, dtype=np.float64)
    except OverflowError as error:
        raise UserError(f"{what} holds integers that no tensor has; write it again") from error
