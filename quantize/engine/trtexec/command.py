"""The command line of trtexec, of TensorRT 10.14 to 11, that builds an engine of a graph.

Options are those of `sampleOptions.cpp` in TensorRT's open sources.
"""

import re
from collections.abc import Mapping, Sequence

from qdqbench.quantize.engine.profiles import Profile, fill_shape
from qdqbench.quantize.utils.errors import UserError

Inputs = Mapping[str, Sequence[int]]  # shape of each input; -1: a dynamic axis
_PLAIN = re.compile(r"[\w./:-]+")  # of a name that needs no quotes of trtexec's own


def build_options(onnx: str, stem: str, inputs: Inputs, profiles: Sequence[Profile]) -> list[str]:
    """Build a strongly typed engine STEM.engine with every profile, and write its layer table.

    Raises:
        UserError: names of inputs that trtexec cannot be told.
    """
    shapes = []
    for number, profile in enumerate(profiles):
        shapes.append(f"--profile={number}")
        shapes += [
            f"--{end}Shapes={shapes_text(inputs, getattr(profile, end))}" for end in ("min", "opt", "max")
        ]
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


def shapes_text(inputs: Inputs, size: tuple[int, int]) -> str:
    """`input_ids:32x128,attention_mask:32x128`: inputs at (batch, length)."""
    return ",".join(
        f"{quoted(name)}:{'x'.join(map(str, fill_shape(shape, size)))}" for name, shape in inputs.items()
    )


def quoted(name: str) -> str:
    """A tensor's name as trtexec takes it; one with a colon in its own quotes.

    Raises:
        UserError: trtexec splits at commas, quotes and spaces, whatever stands around them.
    """
    if not _PLAIN.fullmatch(name):
        raise UserError(
            f"trtexec cannot be told of an input named {name[:80]!r}; rename it with letters, digits, _ and ."
        )
    return f"'{name}'" if ":" in name else name
