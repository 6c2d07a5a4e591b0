"""The command line of trtexec (TensorRT 10.14 to 11), and a reader of its --exportProfile.

Options and formats are those of `sampleOptions.cpp` and `sampleReporting.cpp` in TensorRT's open sources.
trtexec writes what C++ streams print: names without escapes, and six digits of a float.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qdqbench.quantize.engine.profiles import Profile, fill_shape
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.files import read_bounded

MAX_BYTES = 64 << 20  # of a file
MAX_PARTS = 2_000_000  # lists and objects of a file, each of which takes far more memory than its text
MAX_KERNELS = 20_000  # BERT-large with four profiles has 1,400
MAX_MS = 1e9  # of a kernel


def read_profile(path: Path) -> dict[str, float]:
    """Return mean ms of kernels by name of `trtexec --exportProfile`, or of a list of {"name", "ms"}."""
    wrong = UserError(
        f"{path} is no kernel profile: it must be a list of objects with name and ms (or averageMs), at most "
        f"{MAX_KERNELS}; write it with trtexec --exportProfile"
    )
    what = "a kernel profile"
    text = read_bounded(path, MAX_BYTES, what, f"{what} that trtexec wrote")
    if text.count("[") + text.count("{") > MAX_PARTS:
        raise UserError(f"{path} has more than {MAX_PARTS} lists and objects, which {what} has not")
    try:
        rows = json.loads(text, strict=False)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path} is not JSON ({' '.join(str(error).split())[:100]}); give {what} that trtexec wrote"
        ) from error
    if not isinstance(rows, list) or len(rows) > MAX_KERNELS + 1:
        raise wrong
    times: dict[str, float] = {}
    for row in rows:
        if not isinstance(row, dict):
            raise wrong
        if set(row) == {"count"}:
            continue  # the head of an exported profile
        average = _number(row.get("ms", row.get("averageMs")))
        if not isinstance(row.get("name"), str) or average is None:
            raise wrong
        times[row["name"]] = times.get(row["name"], 0.0) + average
    if not times:
        raise UserError(f"{path} has no kernels; profile an engine that ran")
    return times


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < MAX_MS:
        return None
    return float(value)


Inputs = Mapping[str, Sequence[int]]  # shape of each input; -1: a dynamic axis
_PLAIN = re.compile(r"[\w./:-]+")  # of a name that needs no quotes of trtexec's own


def build_options(onnx: str, stem: str, inputs: Inputs, profiles: Sequence[Profile]) -> list[str]:
    shapes = []
    for number, profile in enumerate(profiles):
        shapes.append(f"--profile={number}")
        for end, size in (("min", profile.min), ("opt", profile.opt), ("max", profile.max)):
            sizes = {name: "x".join(map(str, fill_shape(shape, size))) for name, shape in inputs.items()}
            shapes.append(f"--{end}Shapes={','.join(f'{_quoted(name)}:{sizes[name]}' for name in sizes)}")
    return [
        f"--onnx={onnx}",
        "--stronglyTyped",
        *shapes,
        "--profilingVerbosity=detailed",
        "--dumpLayerInfo",
        f"--exportLayerInfo={stem}.layers.json",
        "--timingCacheFile=timing.cache",
        f"--saveEngine={stem}.engine",
        "--skipInference",
    ]


def _quoted(name: str) -> str:
    """Return a tensor's name as trtexec takes it; one with a colon in its own quotes."""
    if not _PLAIN.fullmatch(name):
        raise UserError(
            f"trtexec cannot be told of an input named {name[:80]!r}; rename it with letters, digits, _ and ."
        )
    return f"'{name}'" if ":" in name else name
