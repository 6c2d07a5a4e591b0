"""The trials that every search starts with."""

from qdqbench.eval.search_space import Space, short_yaml
from qdqbench.eval.search_study import First
from qdqbench.eval.search_trial import Workspace
from qdqbench.quantize.errors import UserError
from qdqbench.quantize.matching import Plan
from qdqbench.quantize.recipe import Recipe, load_recipe, shipped_recipes

PREFIXES = (8, 4, 2)  # of the ranking: an eighth, a quarter and half of the units in FP16


def first_trials(work: Workspace, space: Space) -> list[First]:
    """The given recipe, the shipped ones in this space, everything in FP16, and prefixes of the ranking."""
    base = work.session.recipe
    given = space.project(work.plan(base), base)
    found = [("given recipe", given, {"recipe": short_yaml(base)})]
    for name in shipped_recipes():
        recipe = load_recipe(name)
        if recipe.model.family != base.model.family or not recipe.quantizes or recipe.qat:
            continue
        plan = _plan_or_none(work, recipe)
        if plan is not None:
            found.append((f"shipped {name}", space.project(plan, recipe), {}))
    count = len(space.units)
    everything = given | {"frame": "all", "keep": 0, "flip_1": 0, "flip_2": 0}
    high = {"attention_keep": len(space.attention)} if space.attention else {}
    found.append(("all FP16", everything | high | {"keep": count}, {}))
    for part in PREFIXES:
        prefix = everything | {"keep": max(1, round(count / part))}
        found.append(("ranking", prefix | high, {}))
    if space.attention:
        half = {"keep": max(1, round(count / 4)), "attention_keep": len(space.attention) // 2}
        found.append(("ranking", everything | half, {}))
    return found


def _plan_or_none(work: Workspace, recipe: Recipe) -> Plan | None:
    """A shipped recipe may ask for an attention that this model cannot have."""
    try:
        return work.plan(recipe)
    except UserError:
        return None
