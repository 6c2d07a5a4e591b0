"""Machines by name, of `machines.yaml`: what INT8 can bring, what to start with, who measured what."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from qdqbench.quantize.recipe.shipped import choose_start
from qdqbench.quantize.utils.limits import CPU_BACKENDS, BackendName
from qdqbench.quantize.utils.schema import Frozen
from qdqbench.quantize.utils.system.cpu import Cpu
from qdqbench.quantize.utils.system.gpu import Gpu

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
        return self.recipe or choose_start()["cpu" if self.backend in CPU_BACKENDS else "gpu"]


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


def describe_gain(gpu: Gpu | None, cpu: Cpu) -> str:
    """Return what INT8 can bring on a machine, before anything is measured."""
    name, row = gpu.name if gpu else str(cpu), find_machine(gpu, cpu)
    return f"what INT8 can bring on {name}: {row.brings if row else 'not known'}"
