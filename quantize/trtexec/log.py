"""Who built an engine, from what trtexec prints: its version, and the GPU."""

import re
from dataclasses import dataclass
from pathlib import Path

from qdqbench.quantize.core.errors import UserError

MAX_LOG = 256 << 20  # --verbose of a large network writes some 100 MB
MAX_LINE = 1 << 16
_VERSION = re.compile(r"\[TensorRT v(\d{5,7})\](?: \[b(\d{1,6})\])?")
_DEVICE = re.compile(r"\] Selected Device: (.{1,200})")
_SECONDS = re.compile(r"\] Engine built in (\d{1,9}(?:\.\d{1,9})?) sec")
_CAPABILITY = re.compile(r"\] Compute Capability: (\d{1,3}\.\d{1,3})")


@dataclass(frozen=True)
class Builder:
    """TensorRT and the GPU it built on."""

    version: str  # 10.14.1.48
    gpu: str
    compute_capability: str  # "8.9"
    seconds: float  # of the build; 0 where the log ends before


def read_builder(path: Path) -> Builder:
    """The builder of an engine, from the log of the trtexec that built it.

    Raises:
        UserError: missing, too large, or not such a log; names what it does not tell.
    """
    found: dict[str, str] = {}
    try:
        if (size := path.stat().st_size) > MAX_LOG:
            raise UserError(f"{path} has {size} bytes, and a log at most {MAX_LOG}")
        with path.open(encoding="utf-8", errors="replace") as stream:
            while line := stream.readline(MAX_LINE):
                if took := _SECONDS.search(line):
                    found["seconds"] = took[1]
                if (version := _VERSION.search(line)) and "version" not in found:
                    found["version"] = _version(version[1], version[2])
                if device := _DEVICE.search(line):
                    found.setdefault("GPU", device[1].strip())
                if capability := _CAPABILITY.search(line):
                    found.setdefault("compute capability", capability[1])
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read {path} ({why}); give the log of the trtexec that built") from error
    if lost := [name for name in ("version", "GPU", "compute capability") if name not in found]:
        raise UserError(
            f"{path} does not tell the {' and the '.join(lost)}; keep all that trtexec prints while it builds"
        )
    seconds = float(found.get("seconds", 0))
    return Builder(found["version"], found["GPU"], found["compute capability"], seconds)


def _version(number: str, build: str | None) -> str:
    """`10.14.1.48` of 101401 and build 48; before TensorRT 10 versions were shorter: 8.6.1 of 8601."""
    wide = len(number) > 5
    major, rest = divmod(int(number), 10_000 if wide else 1_000)
    parts = [major, rest // 100, rest % 100, *([int(build)] if build else [])]
    return ".".join(map(str, parts))
