"""What makes results comparable beside their inputs: this code, and the libraries under it."""

import functools
import hashlib
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import Any

VERSIONED = ("qdqbench", "torch", "transformers", "nvidia-modelopt", "onnx", "onnxruntime")


def made_with() -> dict[str, Any]:
    """Code and library versions, as JSON: part of the identity of all that is reused or resumed."""
    return {"versions": versions(), "code": _code_hash()}


def versions() -> dict[str, str]:
    """Installed versions that outputs depend on."""
    return {name: metadata.version(name) for name in VERSIONED}


@functools.lru_cache
def _code_hash() -> str:
    """SHA-256 over this package's source."""
    digest = hashlib.sha256()
    for package in ("qdqbench.quantize", "qdqbench.eval"):
        root = Path(str(files(package)))
        for path in sorted(root.rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()
