"""Files of one build, each recognised by its content and read by the reader of its format."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.core.results import LayerRow
from qdqbench.quantize.diagnose.engine_file import EngineFile, is_engine, read_engine
from qdqbench.quantize.diagnose.log_file import BuildLog, is_log, read_log
from qdqbench.quantize.diagnose.onnx_file import OnnxFile, read_onnx
from qdqbench.quantize.engine.layers import read_table
from qdqbench.quantize.legacy.cache_file import CalibrationCache, is_cache, read_cache_file
from qdqbench.quantize.trtexec.read import Times, kernel_ms, read_profile, read_times

_START = 1 << 16  # bytes that decide what a file is
# What is never read, however it is called: to open these runs code, or unpacks what somebody else packed.
_REFUSED = {
    b"PK\x03\x04": "a zip archive (a PyTorch checkpoint or a package); export the model to ONNX",
    b"PK\x05\x06": "an empty zip archive; export the model to ONNX",
    b"\x1f\x8b": "a gzip archive; unpack it",
    b"\x80": "a pickle, which is never loaded here; export the model to ONNX",
    b"\x89HDF": "an HDF5 file; export the model to ONNX",
    b"\x7fELF": "a program or library; give files of a build",
}
_JSON_KINDS = (  # the first key that is found in the start of the file decides
    ("layers", re.compile(r'"[Ll]ayers"\s*:')),
    ("times", re.compile(r'"(?:startComputeMs|computeMs|latencyMs)"\s*:')),
    ("profile", re.compile(r'"(?:averageMs|medianMs|ms)"\s*:')),
    ("outputs", re.compile(r'"values"\s*:')),
)
_KINDS = {
    "onnx": "ONNX file",
    "log": "build log",
    "layers": "layer table",
    "profile": "kernel profile",
    "times": "query times",
    "engine": "engine",
    "cache": "calibration cache",
}


@dataclass
class Sources:
    """What was read; at most one of each kind, as the files are of one build."""

    paths: dict[str, Path] = field(default_factory=dict)  # by kind
    onnx: OnnxFile | None = None
    log: BuildLog | None = None
    layers: list[LayerRow] = field(default_factory=list)  # of a table, or of the log
    profile: dict[str, float] = field(default_factory=dict)  # milliseconds by kernel
    times: Times | None = None
    engine: EngineFile | None = None
    cache: CalibrationCache | None = None

    def name(self, kind: str) -> str:
        """Name of the file of a kind, or of what stands for it."""
        path = self.paths.get(kind) or (self.paths.get("log") if kind == "layers" else None)
        return path.name if path else ""


def read_sources(paths: list[Path]) -> Sources:
    """Read every file.

    Raises:
        UserError: one that is none of the formats, is damaged, or is the second of its kind.
    """
    found = Sources()
    for path in paths:
        kind = recognise(path)
        if kind in found.paths:
            raise UserError(
                f"{found.paths[kind]} and {path} are both a {_KINDS[kind]}; the files of one call are read "
                "together as one build, so diagnose these one by one"
            )
        found.paths[kind] = path
        if kind == "onnx":
            found.onnx = read_onnx(path)
        elif kind == "log":
            found.log = read_log(path)
        elif kind == "layers":
            found.layers = read_table(path)
        elif kind == "profile":
            found.profile = kernel_ms(read_profile(path))
        elif kind == "times":
            found.times = read_times(path)
        elif kind == "engine":
            found.engine = read_engine(path)
        else:
            found.cache = read_cache_file(path)
    if found.log and not found.layers:
        found.layers = found.log.layers
    return found


def kind_text(kind: str) -> str:
    """`build log` for `log`."""
    return _KINDS[kind]


def recognise(path: Path) -> str:
    """Which of the formats a file is, by its first bytes.

    Raises:
        UserError: it cannot be read, or is none of them.
    """
    try:
        if not path.is_file():
            raise UserError(f"{path} is not a file; give files of a build, such as model.onnx or build.log")
        with path.open("rb") as stream:
            start = stream.read(_START)
    except (OSError, ValueError) as error:  # ValueError: no possible path
        why = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read {path}: {why}; check the path and its permissions") from error
    if not start:
        raise UserError(f"{path} is empty; give files of a build, such as model.onnx or build.log")
    for magic, what in _REFUSED.items():
        if start.startswith(magic):
            raise UserError(f"{path} is {what}")
    if is_engine(start):
        return "engine"
    if is_cache(start):
        return "cache"
    if start.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"["):
        text = start.decode("utf-8", errors="replace")
        if not is_log(start):  # a log may start with [date]
            return _json_kind(path, text)
    return "log" if is_log(start) else _onnx_or_nothing(path, start)


def _json_kind(path: Path, text: str) -> str:
    found = [(match.start(), kind) for kind, pattern in _JSON_KINDS if (match := pattern.search(text))]
    kind = min(found)[1] if found else ""
    if kind == "outputs":
        raise UserError(
            f"{path} holds outputs of an engine, which `qdqbench verify` compares; give its layers"
        )
    if not kind:
        raise UserError(
            f"{path} is JSON and neither a layer table, a kernel profile nor query times; give what trtexec "
            "wrote with --exportLayerInfo, --exportProfile or --exportTimes, or the inspector's JSON"
        )
    return kind


def _onnx_or_nothing(path: Path, start: bytes) -> str:
    """A protobuf message that can start a ModelProto; the reader of ONNX says what is wrong with it."""
    text = sum(32 <= byte < 127 or byte in (9, 10, 13) for byte in start[:4096])
    if text == len(start[:4096]):
        raise UserError(
            f"{path} is text, and neither a build log, JSON nor a calibration cache; give a file of a build"
        )
    return "onnx"
