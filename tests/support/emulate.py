"""The kernels of backend cuda compiled for this CPU, and an engine that launches them."""

import ctypes as c
import math
import re
import shutil
import struct
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from qdqbench.quantize.engine.cuda import compile
from qdqbench.quantize.engine.cuda.compile import list_lines, read_source
from qdqbench.quantize.engine.cuda.driver import TensorMap
from qdqbench.quantize.engine.cuda.names import TARGETS, Target
from qdqbench.quantize.engine.cuda.plan import Attention, Plan
from qdqbench.quantize.engine.cuda.runtime import CudaEngine

FOLDER = Path(__file__).with_name("emulator")
COMPILER = shutil.which("g++")
KERNELS = Path(compile.__file__).with_name("kernels")
FLAGS = ["-std=c++20", "-O1", "-w", "-fPIC", "-shared", "-U_FORTIFY_SOURCE", f"-I{FOLDER}", f"-I{KERNELS}"]
HOPPER = next(target for target in TARGETS if target.wgmma)


def compile_kernels(
    plans: Iterable[Plan], folder: Path, target: Target = HOPPER, only: str | None = None
) -> None:
    """Write a library for each source file that plans need, or for one of them."""
    lines = list_lines(plans, target)
    ampere, machine = f"-DAMPERE={int(target.name != '7.5')}", str(folder / "machine.o")
    _compile([*FLAGS, ampere, "-c", str(FOLDER / "machine.cpp"), "-o", machine])
    for source, instances in lines.items() if only is None else [(only, lines[only])]:
        text = "\n".join([read_source(f"{source}.cu"), *instances, ""])
        compile_text(text, folder / source, machine, ampere)


def compile_text(text: str, at: Path, machine: str, *more: str) -> None:
    """Write the library of a source file, with a function that takes pointers for each of its kernels."""
    made = at.with_suffix(".cpp")
    made.write_text(text)
    # shared memory of a known size is a static array, and all other is the machine's
    flags = [*FLAGS, *more, f"-D__shared__={'' if 'extern __shared__' in text else 'static'}"]
    names = re.findall(r'extern "C"\s+void\s+(\w+)\(', _compile([*flags, "-E", "-P", str(made)]))
    with made.open("a") as file:
        for name in names:
            file.write(f'extern "C" void run_{name}(void** all) {{ call({name}, all); }}\n')
    _compile([*flags, str(made), machine, "-o", str(at.with_suffix(".so"))])


def _compile(options: list[str]) -> str:
    assert COMPILER is not None
    done = subprocess.run([COMPILER, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:3000]
    return done.stdout


class Emulator:
    """What `driver.Kernels` is, on arrays of the CPU; of the libraries in folders, the first of a kernel."""

    def __init__(self, *folders: Path) -> None:
        self.folder = folders[0]
        self._libraries = [c.CDLL(str(path)) for folder in folders for path in sorted(folder.glob("*.so"))]
        for library in self._libraries:
            library.launch.restype = c.c_char_p

    def launch(
        self, name: str, grid: tuple[int, int], block: int, arguments: Sequence[Any], shared: int = 0
    ) -> None:
        library = next(each for each in self._libraries if hasattr(each, f"run_{name}"))
        pointers = (c.c_void_p * len(arguments))(*[c.addressof(each) for each in arguments])
        wrong = library.launch(getattr(library, f"run_{name}"), pointers, *grid, block, shared)
        assert not wrong, f"{name}: {wrong.decode()}"


def map_tiles(matrix: torch.Tensor, rows: int) -> TensorMap:
    """Return what `driver.map_tiles` does, as the emulator reads it."""
    fields = matrix.data_ptr(), matrix.stride(0), *matrix.shape, rows
    return TensorMap.from_buffer_copy(struct.pack("<QQiii", *fields).ljust(128, b"\0"))


class EmulatedEngine(CudaEngine):
    """An engine on the CPU. FP16 attention, which a GPU does by PyTorch's own kernel, is plain here."""

    device = "cpu"

    def __init__(
        self,
        plan: Plan,
        arrays: Mapping[str, Any],
        emulator: Emulator,
        multiprocessors: int = 2,
        target: Target = HOPPER,
    ) -> None:
        self._kernels: Any = emulator
        self._multiprocessors = multiprocessors
        super().__init__(plan, arrays, {}, target)

    def _load(self, codes: Mapping[str, bytes]) -> None:
        """Keep the emulator."""

    def _attention(self, operation: Attention, values: dict[str, Any], rows: Any) -> None:
        if operation.probability_multiplier is not None:
            super()._attention(operation, values, rows)
            return
        heads, size = operation.heads, operation.head_size
        q, k, v = (
            values[view.tensor][:, view.column : view.column + heads * size]
            .float()
            .view(-1, heads, size)
            .transpose(0, 1)
            for view in (operation.query, operation.key, operation.value)
        )
        place = torch.arange(len(rows.ids))
        own = (place >= rows.start[:, None]) & (place < rows.end[:, None])
        if operation.window is not None:
            own &= (place - place[:, None]).abs() <= operation.window
        scores = (q @ k.transpose(1, 2) * operation.score_scale).masked_fill(~own, -math.inf)
        context = (scores.softmax(2) @ v).transpose(0, 1).reshape(-1, heads * size).half()
        coded = self.plan.tensors[operation.output].kind == "int8"
        scale = f"{operation.name}.scale"
        values[operation.output] = self._codes(context, operation.output, scale) if coded else context
