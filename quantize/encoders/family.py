"""Which part of a BERT encoder a module is: what sensitivity and search move between precisions."""

import re
from collections.abc import Iterable

KINDS = ("qkv", "output", "ffn-in", "ffn-out", "pooler", "classifier")
_PATTERNS = {
    "qkv": r"\.layer\.\d+\.attention\.self\.(query|key|value)$",
    "output": r"\.layer\.\d+\.attention\.output\.dense$",
    "ffn-in": r"\.layer\.\d+\.intermediate\.dense$",
    "ffn-out": r"\.layer\.\d+\.output\.dense$",
    "pooler": r"(^|\.)pooler\.dense$",
    "classifier": r"(^|\.)classifier$",
}
SMOOTHED = ("qkv", "ffn-in")  # what `smooth` of the calibration section means: linears that read a LayerNorm

# ends of the names of modules that add a residual -> of the linears that read the same tensor
_RESIDUALS = {
    ".attention.output": (".attention.self.query", ".attention.self.key", ".attention.self.value"),
    ".output": (".intermediate.dense",),
}


def linear_kind(name: str) -> str | None:
    """Kind of a linear by its full name; None for one that BERT does not have."""
    return next((kind for kind, pattern in _PATTERNS.items() if re.search(pattern, name)), None)


def splittable(linears: Iterable[str]) -> list[str]:
    """Second feed-forward linears, whose outlier channels can be split."""
    return [name for name in linears if linear_kind(name) == "ffn-out"]


def layer_of(name: str) -> int | None:
    """Number of the encoder layer that a module is in; None outside of the encoder."""
    found = re.search(r"\.layer\.(\d+)(\.|$)", name)
    return int(found[1]) if found else None


def residual_readers(name: str) -> tuple[str, ...]:
    """Linears that read the residual of a module such as `bert.encoder.layer.0.output`; none of any other."""
    if layer_of(name) is not None:
        for end, ends in _RESIDUALS.items():
            if name.endswith(end):
                return tuple(name.removesuffix(end) + other for other in ends)
    return ()


def residual_read_by(linear: str) -> str | None:
    """The module whose residual a linear reads; None where that is none, or known by another linear."""
    for end, ends in _RESIDUALS.items():
        if linear.endswith(ends[0]):
            return linear.removesuffix(ends[0]) + end
    return None
