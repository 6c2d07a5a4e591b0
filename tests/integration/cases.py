"""Whole runs as data: `tests/runs/*.yaml` says what a user brings, and what must come out."""

import re
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from qdqbench.quantize.recipe.schema import load_recipe

from .tiny import call_alone, one_profile

RUNS = Path(__file__).parents[1] / "runs"


def edited(path, change, name="bert-int8-linears"):
    """A shipped recipe as a file, with other fields; of a section the fields that are not given stay."""
    recipe = load_recipe(name).model_dump(mode="json")
    for key, value in change.items():
        recipe[key] = recipe[key] | value if isinstance(value, dict) and recipe[key] else value
    path.write_text(yaml.safe_dump(recipe))
    return path


@dataclass(frozen=True)
class Case:
    """One run; a file gives its cases `defaults`."""

    name: str
    int8: tuple[int, int, int]  # products, attentions and residuals in INT8
    brings: str = "sst2"  # model and data, by a name that `brought` knows
    command: str = "run"
    recipe: str = ""  # the name, if not given
    change: dict[str, Any] = field(default_factory=dict)  # of the recipe
    options: tuple[str, ...] = ()
    backend: str = ""  # cuda has no compiler and no GPU, "hopper" an interpreter in their place
    every_profile: bool = False  # that the recipe names, else the one that takes every input
    runs: bool = False  # the engine runs here, so it is verified and evaluated
    exit: int = 0
    stages: tuple[str, ...] = ("fp32", "fake_quant", "onnxruntime")  # that have answers
    long: bool = False

    def words(self, given, folder):
        """The command line but for `--out`."""
        recipe = self.recipe or self.name
        if self.change:
            path = folder / f"{recipe}.yaml"
            recipe = str(path if path.exists() else edited(path, self.change, recipe))
        backend = {"": [], "hopper": ["--backend", "cuda"]}.get(self.backend, ["--backend", self.backend])
        return [self.command, recipe, *given.options, *self.options, *backend]

    def pretend(self, patch):
        """Let devices be there, or skip the case."""
        from ..support import interpreted  # loads torch

        if self.backend in ("cuda", "hopper"):
            {"cuda": interpreted.use_no_nvrtc, "hopper": interpreted.use_hopper}[self.backend](patch)
        else:
            pytest.importorskip(self.backend or "tensorrt_rtx")

    def run(self, given, folder):
        """Run it in `folder / "run"`, in this process."""
        with nullcontext() if self.every_profile else one_profile():
            done = call_alone(*self.words(given, folder), "--out", folder / "run")
        done = replace(done, err=re.sub(r"^Short trainings changed .*\n", "", done.err))  # of a training
        assert (done.code, done.err if done.code == 0 else "") == (self.exit, ""), done
        return done


def read_cases():
    """Every case by its name."""
    found = {}
    for path in sorted(RUNS.glob("*.yaml")):
        cases = yaml.safe_load(path.read_text())
        defaults = cases.pop("defaults", {})
        for name, case in cases.items():
            given = {key: tuple(v) if isinstance(v, list) else v for key, v in (defaults | case).items()}
            assert name not in found, name
            found[name] = Case(name, **given)
    return found


CASES = read_cases()
MARKED = [
    pytest.param(each, id=each.name, marks=pytest.mark.long if each.long else ()) for each in CASES.values()
]
