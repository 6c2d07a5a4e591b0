"""Which part of a BERT encoder a module is: what sensitivity and search move between precisions."""

import re

KINDS = ("qkv", "output", "ffn-in", "ffn-out", "pooler", "classifier")
_PATTERNS = {
    "qkv": r"\.layer\.\d+\.attention\.self\.(query|key|value)$",
    "output": r"\.layer\.\d+\.attention\.output\.dense$",
    "ffn-in": r"\.layer\.\d+\.intermediate\.dense$",
    "ffn-out": r"\.layer\.\d+\.output\.dense$",
    "pooler": r"(^|\.)pooler\.dense$",
    "classifier": r"(^|\.)classifier$",
}


def linear_kind(name: str) -> str | None:
    """Kind of a linear by its full name; None for one that BERT does not have."""
    return next((kind for kind, pattern in _PATTERNS.items() if re.search(pattern, name)), None)


def layer_of(name: str) -> int | None:
    """Number of the encoder layer that a module is in; None outside of the encoder."""
    found = re.search(r"\.layer\.(\d+)(\.|$)", name)
    return int(found[1]) if found else None
