"""The command lines of trtexec, of TensorRT 10.14 to 11, for a graph and its shapes.

Options are those of `sampleOptions.cpp` in TensorRT's open sources. trtexec 11 does by itself what trtexec 10
is asked by --useCudaGraph, --noDataTransfers, --useSpinWait and --separateProfileRun: it warns and goes on.
"""

import re
from collections.abc import Mapping, Sequence

from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.engine.profiles import Profile, concrete

Inputs = Mapping[str, Sequence[int]]  # shape of each input; -1: a dynamic axis
WARM_UP_MS, SECONDS = 500, 5  # of a measurement
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


def answer_options(stem: str, profile: str, shapes: str, inputs: str, output: str) -> list[str]:
    """Run an engine once on inputs from files, and write its outputs."""
    return [
        f"--loadEngine={stem}.engine",
        f"--useProfile={profile}",
        f"--shapes={shapes}",
        f"--loadInputs={inputs}",
        "--iterations=1",
        "--duration=0",
        "--warmUp=0",
        f"--exportOutput={output}",
    ]


def time_options(stem: str, profile: str, shapes: str, inputs: str, name: str) -> list[str]:
    """Measure an engine as a CUDA graph without copies, then each of its kernels in a run of their own."""
    return [
        f"--loadEngine={stem}.engine",
        f"--useProfile={profile}",
        f"--shapes={shapes}",
        f"--loadInputs={inputs}",
        "--useCudaGraph",
        "--noDataTransfers",
        "--useSpinWait",
        f"--warmUp={WARM_UP_MS}",
        f"--duration={SECONDS}",
        "--separateProfileRun",
        "--profilingVerbosity=detailed",
        f"--exportTimes=times/{name}.json",
        f"--exportProfile=profile/{name}.json",
    ]


def shapes_text(inputs: Inputs, size: tuple[int, int]) -> str:
    """`input_ids:32x128,attention_mask:32x128`: inputs at (batch, length)."""
    return ",".join(
        f"{quoted(name)}:{'x'.join(map(str, concrete(shape, size)))}" for name, shape in inputs.items()
    )


def inputs_text(paths: Mapping[str, str]) -> str:
    """`input_ids:inputs/0000.input_ids.bin,...`: the files of the inputs."""
    return ",".join(f"{quoted(name)}:{path}" for name, path in paths.items())


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
