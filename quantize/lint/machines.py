"""Machines by name, of `machines.yaml`: what INT8 can bring, what to start with, who measured what."""

from functools import cache
from typing import Any

from pydantic import TypeAdapter

from qdqbench.quantize.engine.backend import choose_backend, find_missing_builder, gpu_backend
from qdqbench.quantize.engine.cuda.match import BIASED, FAMILIES, UNTIMED
from qdqbench.quantize.engine.cuda.names import (
    ATTENTION_SIZES,
    CHANNEL_STEP,
    LINEAR_STEP,
    NORM_PARTS,
    find_target,
)
from qdqbench.quantize.engine.hazards import find_hazards
from qdqbench.quantize.lint.findings import read_yaml
from qdqbench.quantize.recipe.schema import Recipe
from qdqbench.quantize.recipe.shipped import backends_of, choose_start
from qdqbench.quantize.utils.limits import BackendName
from qdqbench.quantize.utils.schema import Frozen
from qdqbench.quantize.utils.system.cpu import Cpu, find_cpu
from qdqbench.quantize.utils.system.gpu import Gpu, find_gpu

_TOKENS, _ROW, _HIDDEN, _WIDE = 128 * 128, 128, 768, 3072  # of BERT-base in a batch of 128 x 128


class Peak(Frozen):
    """Dense peak rates of one GPU, as NVIDIA publishes them."""

    gpu: str
    int8: float  # 10^12 operations a second
    fp16: float  # the same, with sums in FP32
    memory: float  # GB a second

    @property
    def gain(self) -> float:
        """Least time of BERT-base's encoder in FP16 over that in INT8; sums before a norm stay FP16."""
        return self._least(self.fp16, 2) / self._least(self.int8, 1)

    def _least(self, rate: float, size: int) -> float:
        """Return the seconds of a layer if each kernel is at one of its two limits: operations or bytes."""
        gemms = (_HIDDEN, 3 * _HIDDEN), (_HIDDEN, _HIDDEN), (_HIDDEN, _WIDE), (_WIDE, _HIDDEN)
        summed = (size + 2) * _HIDDEN  # bytes of a token: a residual is read, and its sum is written or read
        moved = [size * 4 * _HIDDEN, size * _HIDDEN + summed, size * (_HIDDEN + _WIDE), size * _WIDE + summed]
        limits = [(2 * k * n, bytes_) for (k, n), bytes_ in zip(gemms, moved, strict=True)]
        limits += [(4 * _ROW * _HIDDEN, size * 4 * _HIDDEN), (0, summed), (0, summed)]  # attention, two norms
        return sum(_TOKENS * max(done / rate / 1e12, bytes_ / self.memory / 1e9) for done, bytes_ in limits)


class Machine(Frozen):
    """A row of the table."""

    names: str
    match: tuple[str, ...]  # compute capabilities, or instruction sets; none: any other CPU
    ran: bool  # by us, with what is recommended
    backend: BackendName
    recipe: str = ""  # where it is not the one to start with on a GPU or CPU
    brings: str  # by INT8
    peaks: tuple[Peak, ...] = ()  # of a GPU that we did not measure
    ours: str  # what this project measured, only built, or never ran
    others: str = ""  # what others measured, with the source

    @property
    def start(self) -> str:
        """The recipe to start with."""
        return self.recipe or choose_start()[backends_of(self.backend)]

    @property
    def gains(self) -> str:
        """Gain by INT8, with the estimate of a roofline where nothing is measured."""
        estimates = ", ".join(f"{each.gain:.1f}x on {each.gpu}" for each in self.peaks)
        return self.brings + (f"; roofline estimate {estimates}" if estimates else "")


@cache
def read_machines() -> tuple[Machine, ...]:
    return TypeAdapter(tuple[Machine, ...]).validate_python(read_yaml("machines.yaml"))


def find_machine(gpu: Gpu | None, cpu: Cpu) -> Machine | None:
    """Return the row of a GPU, else of a CPU; None for a GPU that the table does not have."""
    has = {gpu.compute_capability} if gpu else {*cpu.features}
    rows = read_machines()
    found = next((row for row in rows if not has.isdisjoint(row.match)), None)
    return found or (None if gpu else rows[-1])


def explain_kernels(recipe: Recipe, family: str, config: Any) -> str | None:
    """Return why `auto` takes backend cuda here, for a model of a family; empty where it does not.

    None where TensorRT builds too, and a measurement must decide.
    """
    gpu = find_gpu()
    if gpu is None or recipe.engine.backend != "auto" or not recipe.quantizes or family not in FAMILIES:
        return ""
    fits = config.hidden_size // config.num_attention_heads <= ATTENTION_SIZES[-1]
    step = CHANNEL_STEP if recipe.int8_attention else LINEAR_STEP
    fits = fits and config.hidden_size % step == 0
    fits = fits and config.hidden_size <= 128 * NORM_PARTS[-1]
    fits = fits and (recipe.int8_attention or family not in BIASED)
    if not fits or find_target(gpu.compute_capability) is None or find_missing_builder("cuda"):
        return ""
    row, name = find_machine(gpu, find_cpu()), gpu_backend()
    if row is not None and row.ran and row.backend == "cuda" and family not in UNTIMED:
        return (
            f"auto takes cuda, which was faster than TensorRT-RTX on {row.names} at every shape we measured"
        )
    if missing := find_missing_builder(name):
        return f"auto takes cuda, as there is no other builder here: {missing}"
    version = choose_backend(name).version
    known = find_hazards(name, version, gpu.compute_capability)
    return next((f"auto takes cuda: {text}" for text in known if "refuses" in text), None)


def describe_gain(gpu: Gpu | None, cpu: Cpu) -> str:
    """Return what INT8 can bring on a machine, before anything is measured."""
    name, row = gpu.name if gpu else str(cpu), find_machine(gpu, cpu)
    return f"what INT8 can bring on {name}: {row.gains if row else 'not known'}"
