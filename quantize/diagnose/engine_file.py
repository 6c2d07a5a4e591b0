"""A serialized engine of TensorRT, as far as its header tells without a GPU.

The first four bytes are the tag of a plan, and bytes 24 to 27 the version that wrote it (seen in engines of
TensorRT-RTX 1.7.1; TensorRT's plans since 8.6 have it there too). What it runs only TensorRT itself can tell.
"""

from dataclasses import dataclass
from pathlib import Path

from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.core.limits import BackendName

_TAGS: dict[bytes, BackendName] = {b"ptrt": "tensorrt", b"ftrt": "tensorrt", b"vtrt": "tensorrt_rtx"}
_HEADER = 64


@dataclass(frozen=True)
class EngineFile:
    """What the header says."""

    backend: BackendName
    version: str | None  # None: the header does not say, as those of TensorRT 8.5 and older
    bytes: int


def is_engine(start: bytes) -> bool:
    """Whether a file that starts with these bytes is a TensorRT engine."""
    return start[:4] in _TAGS


def read_engine(path: Path) -> EngineFile:
    """The header of an engine.

    Raises:
        UserError: it cannot be read, or is cut short.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            header = stream.read(_HEADER)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check the path") from error
    if len(header) < _HEADER or not is_engine(header):
        raise UserError(f"{path} is no whole engine: its header has {len(header)} bytes; build it again")
    parts = [*header[24:28]]
    known = 0 < parts[0] < 30 and any(parts)
    return EngineFile(_TAGS[header[:4]], ".".join(map(str, parts)) if known else None, size)
