"""Cache files of the engine builder and runtime, which a run directory keeps between runs.

TensorRT keeps kernel timings (`timing.cache`), TensorRT-RTX the kernels that it compiles just in time
(`runtime.cache`). A file starts with a line of JSON that says where it is from: what another version, GPU or
driver wrote is ignored, with a note, because not every version of the backends refuses it itself. Both files
save time only. Stages do not list them as outputs: they change with every run, and losing them costs nothing.
"""

import json
from pathlib import Path
from typing import Any

from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.system.gpu import Gpu

_FORMAT = "qdqbench cache 1"
_MAX_HEADER = 4096


def describe_origin(backend: str, version: str, gpu: Gpu | None) -> dict[str, str]:
    """Return the conditions that must be the same for a cache to be used."""
    return {
        "backend": backend,
        "version": version,
        "gpu": gpu.name if gpu else "none",
        "compute_capability": gpu.compute_capability if gpu else "none",
        "driver": (gpu.driver if gpu else None) or "unknown",
    }


def read_cache(path: Path, here: dict[str, str]) -> tuple[bytes, str | None]:
    """Return the content of a cache and a note on why it is not used.

    Args:
        here: the present `describe_origin`.

    Returns:
        The blob (empty where there is none to use), and one sentence where a file was ignored.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return b"", None
    except OSError as error:
        return b"", note_ignored(path, f"it cannot be read ({error.strerror})")
    line, _, blob = data.partition(b"\n")
    try:
        header = json.loads(line[:_MAX_HEADER])
        there = dict(header.pop("origin"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return b"", note_ignored(path, "it is not a cache of qdqbench")
    if header != {"format": _FORMAT, "bytes": len(blob)}:
        return b"", note_ignored(path, "it is not whole, or of another format")
    if there != here:
        names = [name for name in {**here, **there} if here.get(name) != there.get(name)]
        changed = ", ".join(f"{name} was {there.get(name)} and is {here.get(name)}" for name in names)
        return b"", note_ignored(path, changed)
    return blob, None


def write_cache(path: Path, here: dict[str, str], blob: bytes) -> None:
    """Write a cache and where it is from, atomically."""
    header = {"format": _FORMAT, "bytes": len(blob), "origin": here}
    files.write_bytes(path, json.dumps(header).encode() + b"\n" + blob)


def note_ignored(path: Path, why: str) -> str:
    """Return the note on a cache that is not used."""
    return f"{path.name} is ignored and made anew: {why}"


class TimingCache:
    """Kernel timings of earlier builds, given to a TensorRT builder and kept after the build."""

    def __init__(self, config: Any, path: Path, here: dict[str, str]) -> None:
        self.path, self.here = path, here
        self._found, note = read_cache(path, here)
        timing_cache = config.create_timing_cache(self._found)
        if self._found and (timing_cache is None or not config.set_timing_cache(timing_cache, False)):
            self._found, note = b"", note_ignored(path, "the builder refuses it")
            timing_cache = config.create_timing_cache(b"")
        if not self._found:
            config.set_timing_cache(timing_cache, False)
        self._cache: Any = timing_cache  # must live until the engine is built
        self.notes = [note] if note else []

    def save(self) -> list[str]:
        """Write the cache if it changed; returns notes for the user."""
        timing_cache, self._cache = self._cache, None
        self.notes += keep(self.path, self.here, timing_cache.serialize(), self._found)
        return self.notes


def keep(path: Path, here: dict[str, str], memory: Any, found: bytes) -> list[str]:
    """Write what a backend serialized, where it differs from what was found; returns notes for the user."""
    blob = bytes(memory) if memory is not None else b""
    if not blob or blob == found:
        return []
    try:
        write_cache(path, here, blob)
    except (OSError, UserError) as error:  # a cache only saves time; the result is there already
        return [f"{path.name} is not kept: {error}"]
    return []
