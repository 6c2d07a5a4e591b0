"""Machines by name, of `machines.yaml`: what INT8 can bring, what to start with, who measured what."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml
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
from qdqbench.quantize.recipe.schema import Recipe
from qdqbench.quantize.recipe.shipped import backends_of, choose_start
from qdqbench.quantize.utils.limits import BackendName
from qdqbench.quantize.utils.schema import Frozen
from qdqbench.quantize.utils.system.cpu import Cpu, find_cpu
from qdqbench.quantize.utils.system.gpu import Gpu, find_gpu

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Machine(Frozen):
    """A row of the table."""

    names: str
    match: tuple[str, ...]  # compute capabilities, or instruction sets; none: any other CPU
    ran: bool  # by us, with what is recommended
    backend: BackendName
    recipe: str = ""  # where it is not the one to start with on a GPU or CPU
    brings: str  # by INT8
    ours: str  # what this project measured, only built, or never ran
    others: str = ""  # what others measured, with the source

    @property
    def start(self) -> str:
        """The recipe to start with."""
        return self.recipe or choose_start()[backends_of(self.backend)]


@cache
def read_machines() -> tuple[Machine, ...]:
    text = Path(__file__).with_name("machines.yaml").read_text(encoding="utf-8")
    return TypeAdapter(tuple[Machine, ...]).validate_python(yaml.load(text, _LOADER))  # noqa: S506


def find_machine(gpu: Gpu | None, cpu: Cpu) -> Machine | None:
    """Return the row of a GPU, else of a CPU; None for a GPU that the table does not have."""
    has = {gpu.compute_capability} if gpu else {*cpu.features}
    rows = read_machines()
    found = next((row for row in rows if not has.isdisjoint(row.match)), None)
    return found or (None if gpu else rows[-1])


def explain_kernels(recipe: Recipe, family: str, config: Any) -> str:
    """Return why `auto` takes backend cuda here, for a model of a family; empty where it does not."""
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
    return next((f"auto takes cuda: {text}" for text in known if "refuses" in text), "")


def describe_gain(gpu: Gpu | None, cpu: Cpu) -> str:
    """Return what INT8 can bring on a machine, before anything is measured."""
    name, row = gpu.name if gpu else str(cpu), find_machine(gpu, cpu)
    return f"what INT8 can bring on {name}: {row.brings if row else 'not known'}"
