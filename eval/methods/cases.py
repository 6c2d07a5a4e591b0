"""The rows of a comparison: calibration sections with their plans, and what they share."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from qdqbench.eval.methods.sections import sections
from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.encoders.modules import module_table
from qdqbench.quantize.recipe.plan import Plan, resolve
from qdqbench.quantize.recipe.schema import Recipe
from qdqbench.quantize.recipe.sections import Calibration
from qdqbench.quantize.rundir.session import Session


@dataclass(frozen=True)
class Case:
    """A row."""

    section: Calibration
    plan: Plan

    @property
    def key(self) -> str:
        """Its name in the ledger."""
        return self.section.model_dump_json()

    @property
    def passes(self) -> tuple[Any, ...]:
        """What rows that share a pass over the data have in common."""
        each = tuple((name, each.weights, each.smooth) for name, each in self.plan.scaling.items())
        return self.section.split_outliers, each

    @property
    def prepares(self) -> bool:
        """Whether calibration goes through the data once before."""
        smooths = any(each.smooth != "none" for each in self.plan.scaling.values())
        return smooths or self.section.split_outliers > 0


def cases_of(session: Session, methods: Sequence[str], smooths: Sequence[str]) -> list[Case]:
    """Sections with their plans; of those that come to the same for this recipe, the first.

    Raises:
        UserError: a wrong name, or a recipe that puts nothing into INT8.
    """
    recipe = session.recipe
    listed = sections(recipe.calibration, methods, smooths)
    require_quantized(recipe)
    model = session.fp32_model
    modules, prefix = module_table(model), model.base_model_prefix
    cases: dict[Any, Case] = {}
    plan = resolve(recipe, modules, prefix)
    if not plan.family.splittable(plan.int8):
        listed = [section for section in listed if not section.split_outliers]  # nothing to split
    for section in listed:
        plan = resolve(recipe.model_copy(update={"calibration": section}), modules, prefix)
        key = tuple(plan.scaling.items()), section.bias_correction, section.split_outliers
        cases.setdefault(key, Case(section, plan))
    if same := len(listed) - len(cases):
        session.notes.append(
            f"{same} combinations come to the same as another under the rules of recipe "
            f"{recipe.name} and are left out"
        )
    return list(cases.values())


def groups_of(cases: list[Case]) -> Iterator[list[int]]:
    """Numbers of the cases that share passes over the data."""
    groups: dict[Any, list[int]] = {}
    for at, case in enumerate(cases):
        groups.setdefault(case.passes, []).append(at)
    yield from groups.values()


def require_quantized(recipe: Recipe) -> None:
    """The recipe has something to calibrate.

    Raises:
        UserError: it has not.
    """
    if not recipe.quantizes:
        raise UserError(
            f"recipe {recipe.name} puts nothing into INT8, so there is nothing to calibrate; take another"
        )
