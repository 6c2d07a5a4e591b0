"""Build logs of trtexec, Polygraphy and TensorRT: versions, options, shapes, medians and telling lines."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path

from qdqbench.quantize.engine.hazards import version_text
from qdqbench.quantize.engine.layers import MAX_TABLE_LAYERS, parse_log
from qdqbench.quantize.engine.results import LayerRow
from qdqbench.quantize.lint.findings import read_kinds
from qdqbench.quantize.utils.errors import UserError

MAX_LOG_BYTES = 256 << 20  # a verbose build of BERT-large has some 100 MB
MAX_LINE = 32_768  # characters; longer ones are cut
MAX_TABLE_CHARACTERS = 16 << 20
MAX_SHAPE_LINES, MAX_SHAPE_LINE = 2_000, 8_192  # those with shapes or options, which are searched further
MAX_NAME = 200
KEPT = 200  # names and errors of each kind

# Lines that other rules ask for, as those of `findings.yaml`: the texts, and where the name stands.
_SIGNS: dict[str, tuple[Sequence[str], str]] = {
    "missing-scale": (("Missing scale and zero-point for tensor",), r"for tensor (.{1,500}?), expect"),
    "calibrates": (
        ("Starting Calibration", "Calibrator is not being used", "mplicit quantization has been deprecated"),
        "",
    ),
    "explicit": (("in explicit quantization mode", "in explicit precision mode"), ""),
    "unknown-option": (("Unknown option",), r"Unknown option:? ?(--\w{1,60})"),
}


@cache
def list_signs() -> dict[str, tuple[Sequence[str], re.Pattern[str] | None]]:
    """Return what a line of a log says, by code: texts of which it holds one, and where a name stands."""
    signs = _SIGNS | {code: (kind.signs, kind.named) for code, kind in read_kinds("log").items()}
    return {code: (texts, re.compile(name) if name else None) for code, (texts, name) in signs.items()}


_TRTEXEC = re.compile(r"&&&& (RUNNING|PASSED|FAILED) TensorRT\.trtexec(?: \[TensorRT v(\d{4,7})\])?")
_VERSION = re.compile(r"TensorRT[- ](?:version|RTX version)?:? ?v?(\d{1,3}(?:\.\d{1,5}){1,3})\b")
_OPTION = re.compile(r"(?<!\S)--(\w{1,60})(?:[= ]([^\s-]\S{0,2000})?)?")
_SEVERITY = re.compile(r"\[(?:TRT\] \[)?([EFW])\]|\b(E)RROR\b[:\]]")
_COLOR = re.compile(r"\x1b\[[\d;]{0,20}m")
_SHAPE = re.compile(r"\d[\dx+]{0,200}")
_SIZES = r"[\[(]([\d, ]{1,80})[\])]"
_TRIPLE = re.compile(rf" \[min={_SIZES}, opt={_SIZES}, max={_SIZES}\]")
_MEDIAN = re.compile(
    r"(GPU Compute Time|Enqueue Time|H2D Latency|D2H Latency|Latency): .{0,200}?"
    r"median = (\d{1,12}(?:\.\d{1,12})?) ms"
)
_TOOLS = {"TensorRT.trtexec": "trtexec", "polygraphy": "Polygraphy"}  # else TensorRT itself
# TensorRT also speaks through ONNX Runtime, Torch-TensorRT and Triton.
_MARKS = (
    *_TOOLS,
    "[TRT]",
    "[TensorRT]",
    "TensorRT TorchScript",
    "tensorrt_execution_",
    "Error Code ",
    "LayerType: ",
)
_UTF16 = (b"\xff\xfe", b"\xfe\xff")  # as PowerShell redirects
_JSON = re.compile(r"\s*(?:\{|\[\s*[\[{\"])")

Shape = tuple[int, ...]


@dataclass
class LogFile:
    tool: str  # trtexec, Polygraphy or TensorRT
    version: str | None = None  # of TensorRT
    options: dict[str, str] = field(default_factory=dict)  # of the command line, without dashes
    precision: str = ""  # FP32+INT8, or Polygraphy's flags
    device: str = ""
    passed: bool | None = None  # trtexec's own verdict; None: it gave none
    signs: Counter[str] = field(default_factory=Counter)  # lines by code
    names: dict[str, list[str]] = field(default_factory=dict)  # what those lines name
    errors: list[str] = field(default_factory=list)
    profiles: list[dict[str, tuple[Shape, Shape, Shape]]] = field(default_factory=list)  # min, opt, max
    load: dict[str, Shape] = field(default_factory=dict)  # shapes that were timed
    medians: dict[str, float] = field(default_factory=dict)  # milliseconds, by trtexec's names
    layers: list[LayerRow] = field(default_factory=list)  # where the log has the table of a DETAILED build


def is_log(start: bytes) -> bool:
    text = start.decode("utf-16" if start[:2] in _UTF16 else "utf-8", errors="replace")
    text = _COLOR.sub("", text).removeprefix("\ufeff")
    if _JSON.match(text):
        return False
    strange = sum(not (c.isprintable() or c.isspace() or c == "\x1f") for c in text)
    return strange <= len(text) // 50 and any(mark in text for mark in (*_MARKS, "[I] ", "[W] "))


def read_log(path: Path) -> LogFile:
    """Read a build log; memory is bounded whatever the file holds, UserError where it is none of a build."""
    found = LogFile("")
    table: list[str] = []
    room, searched = MAX_TABLE_CHARACTERS, 0
    for line in _lines(path):
        if "LayerType: " in line:
            if len(table) < MAX_TABLE_LAYERS and room > len(line) and (row := _row(line)):
                table.append(row)
                room -= len(line)
            continue
        _take(found, line)
        if searched < MAX_SHAPE_LINES and len(line) <= MAX_SHAPE_LINE:
            searched += _take_shapes(found, line)
    found.layers = parse_log(table)
    if not (found.tool or found.layers):
        raise UserError(
            f"{path} is text, and no build log of trtexec, Polygraphy or TensorRT; give the whole log, or "
            "JSON"
        )
    found.tool = found.tool or "TensorRT"
    return found


def _row(line: str) -> str:
    """Return the part of a line that `parse_log` takes at its first try, in little time; else ''."""
    start = line.find("Name: ")
    _, kind, rest = line[max(start, 0) :].partition(", LayerType: ")
    word, inputs, rest = rest.partition(", Inputs: [")
    whole = kind and inputs and word.isidentifier() and "], Outputs: [" in rest
    once = line.count("LayerType: ") == 1 and rest.count(", Constants: [") <= 1
    return line[start:] if 0 <= start < 200 and whole and once else ""


def _lines(path: Path) -> Iterator[str]:
    try:
        if path.stat().st_size > MAX_LOG_BYTES:
            raise UserError(f"{path} has over {MAX_LOG_BYTES} bytes; give the part from the build on")
        with path.open("rb") as start:
            encoding = "utf-16" if start.read(2) in _UTF16 else "utf-8-sig"
        with path.open(encoding=encoding, errors="replace", newline=None) as stream:
            while line := stream.readline(MAX_LINE):
                yield _COLOR.sub("", line.rstrip("\n"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check the path") from error


def _take(found: LogFile, line: str) -> None:
    for mark in _MARKS:
        if mark in line and found.tool in ("", "TensorRT"):
            found.tool = _TOOLS.get(mark, "TensorRT")
    if match := _TRTEXEC.search(line):
        found.passed = found.passed if match[1] == "RUNNING" else match[1] == "PASSED"
        found.version = version_text(int(match[2])) if match[2] else found.version
    if not found.version and (version := _VERSION.search(line)):
        found.version = version[1]
    for code, (texts, pattern) in list_signs().items():
        if any(text in line for text in texts):
            found.signs[code] += 1
            if pattern and (name := pattern.search(line)):
                _keep(found.names.setdefault(code, []), name[1])
    severity = _SEVERITY.search(line[:80])
    if severity and (severity[1] or severity[2]) in "EF":
        _keep(found.errors, line[severity.end() :].strip().removeprefix("[TRT]").strip()[:400])


def _take_shapes(found: LogFile, line: str) -> bool:
    """Read options, shapes and times; return whether the line may have any."""
    _, _, told = line.partition("] ")
    if ("trtexec" in line or "polygraphy" in line) and "--" in line:
        found.options |= {name: value or "" for name, value in _OPTION.findall(line)[:KEPT]}
        return True
    if "median = " in line:
        found.medians |= {name: float(ms) for name, ms in _MEDIAN.findall(line)}
        return True
    if "Precision: " in line:
        found.precision = line.partition("Precision: ")[2][:100].strip()
    elif "Flags " in line and "|" in line:
        found.precision = line.partition("|")[2].strip()[:200]
    elif "Selected Device: " in line:
        found.device = line.partition("Selected Device: ")[2][:100].strip()
    elif "Input build shape" in line:
        for name, text in _named_shapes(told):
            sizes = [_sizes(part, "x") for part in text.split("+")]
            if len(sizes) == 3:
                _add_profile(found, name, (sizes[0], sizes[1], sizes[2]))
    elif "Input inference shape" in line:
        found.load |= {name: _sizes(text, "x") for name, text in _named_shapes(told)}
    elif "min=" in line and "opt=" in line:
        for match in islice(_TRIPLE.finditer(line), KEPT):
            low, opt, high = (_sizes(text, ",") for text in match.groups())
            before = line[max(0, match.start() - MAX_NAME) : match.start()].split()
            _add_profile(found, before[-1].lstrip("{") if before else "", (low, opt, high))
    else:
        return False
    return True


def _named_shapes(told: str) -> Iterator[tuple[str, str]]:
    for word in told.replace(",", " ").split()[:KEPT]:
        name, _, text = word.rpartition("=")
        if 0 < len(name) <= MAX_NAME and _SHAPE.fullmatch(text):
            yield name, text


def _add_profile(found: LogFile, name: str, sizes: tuple[Shape, Shape, Shape]) -> None:
    """Add to the first profile that does not have this input; a repeated line is no other profile."""
    if any(profile.get(name) == sizes for profile in found.profiles):
        return
    profile = next((each for each in found.profiles if name not in each), None)
    if profile is not None:
        profile[name] = sizes
    elif len(found.profiles) < KEPT:
        found.profiles.append({name: sizes})


def _keep(known: list[str], text: str) -> None:
    if text and len(known) < KEPT and text not in known:
        known.append(text)


def _sizes(text: str, separator: str) -> Shape:
    return tuple(int(part) for part in text.split(separator) if part.strip().isdecimal() and len(part) < 19)
