"""The recipe that sensitivity writes: how many of the worst linears stay out of INT8, and its YAML."""

from collections.abc import Callable, Mapping
from typing import Any

import yaml

from qdqbench.eval.metrics import gate
from qdqbench.eval.reporting.formats import count_of
from qdqbench.eval.selection.sensitivity.candidates import Choices
from qdqbench.eval.selection.sensitivity.results import CurvePoint
from qdqbench.quantize.models.modules import ModuleInfo
from qdqbench.quantize.recipe.plan import match_modules, resolve, short_name
from qdqbench.quantize.recipe.schema import Recipe, dump_recipe, parse_recipe
from qdqbench.quantize.recipe.sections import Rule
from qdqbench.quantize.utils.comparison import Comparison

CHOICE_FILE = "recipe.yaml"
SHARE = 0.5  # of the divergence of everything in INT8 that may be left


def kept_counts(linears: int) -> list[int]:
    """0, 1, 2, 4, 8, ... linears, one at least left in INT8."""
    return [0, *(1 << power for power in range(linears.bit_length()) if 1 << power < linears)]


def measure_curve(linears: int, measure: Callable[[int], CurvePoint], max_drop: float) -> list[CurvePoint]:
    """Return points of the curve: powers of two, then a bisection to the first one that holds."""
    points = {kept: measure(kept) for kept in kept_counts(linears)}
    while True:
        full = points[0].comparison
        good = min((k for k, point in points.items() if point_holds(point, full, max_drop)), default=0)
        below = max((k for k in points if k < good), default=good)
        if good - below < 2:
            return [points[kept] for kept in sorted(points)]
        middle = (good + below) // 2
        points[middle] = measure(middle)


def point_holds(point: CurvePoint, full: Comparison, max_drop: float) -> bool:
    """Return whether a point is good enough; without a kept linear, a drop that may be noise is."""
    own = point.comparison
    if point.kept == 0:
        return gate.judge(own.drop, own.drop_stderr, 0.0) != "fails"
    holds = gate.judge(own.drop, own.drop_stderr, max_drop) != "fails"
    return holds and own.distance <= SHARE * full.distance


def choose_point(curve: list[CurvePoint], max_drop: float) -> tuple[CurvePoint, bool]:
    """Return the first point that holds, else the one with the least divergence; and whether it holds."""
    full = curve[0].comparison
    good = next((point for point in curve if point_holds(point, full, max_drop)), None)
    return good or min(curve, key=lambda point: point.comparison.distance), good is not None


def attention_of(linears: list[str], found: Choices) -> list[str]:
    """Return attention modules that leave INT8 with these linears: they would lose their fusion."""
    family = found.base.family
    return [name for name in found.base.attention if family.require_beside(name, "output") in linears]


def write_up(
    recipe: Recipe, point: CurvePoint, found: Choices, modules: Mapping[str, ModuleInfo], prefix: str
) -> tuple[Recipe, str]:
    """Return the recipe of a point of the curve, and its YAML; both were resolved against the model.

    Raises:
        UserError: it does not resolve, which would be a fault of this function.
    """
    kept = {*point.linears, *point.attention}
    int8 = found.everything - kept
    rules = [each for rule in recipe.rules if (each := _not_idle(rule, int8, modules, prefix))]
    for name in found.plan.int8:
        if name in int8 and name not in found.base.int8:
            own = found.plan.scaling_of(name).smoothing
            smoothing = own if own != recipe.calibration.smoothing else None
            match = short_name(name, prefix)
            fields: Any = {"weights": "int8/per-channel", "input": "int8/per-tensor", "smoothing": smoothing}
            rules.append(Rule(match=match, **fields))
    for name in point.linears:
        precision = "fp32" if name in found.base.fp32 else recipe.precision.compute
        rules.append(Rule(match=short_name(name, prefix), type="Linear", precision=precision))
    for name in point.attention:
        rules.append(Rule(match=short_name(name, prefix), type="Attention", precision="fp16"))
    calibration = recipe.calibration
    if not found.base.family.splittable(name for name in int8 if name in found.plan.int8):
        calibration = calibration.model_copy(
            update={"outlier_channel_splitting": 0}
        )  # nothing is left to split
    count = len(point.linears)
    chosen = Recipe.model_validate(
        recipe.model_dump(mode="json")
        | {
            "name": f"{recipe.name.removesuffix('-sensitivity')}-sensitivity",
            "description": f"{recipe.name}, {count_of(count, 'linear')} kept out of INT8 by sensitivity.",
            "rules": [rule.model_dump(mode="json") for rule in rules],
            "calibration": calibration.model_dump(mode="json"),
        }
    )
    short_form = chosen.model_dump(mode="json", exclude_defaults=True)
    text = yaml.safe_dump({"version": 1, **short_form}, sort_keys=False, allow_unicode=True, width=100)
    again = parse_recipe(text, CHOICE_FILE)
    if again != chosen:
        raise AssertionError(f"{CHOICE_FILE} does not hold the recipe that was chosen: {dump_recipe(again)}")
    plan = resolve(again, modules, prefix)
    if {*plan.int8, *plan.attention} != int8:
        raise AssertionError(f"{CHOICE_FILE} puts other modules into INT8 than were measured")
    return again, text


def _not_idle(
    rule: Rule, int8: frozenset[str], modules: Mapping[str, ModuleInfo], prefix: str
) -> Rule | None:
    """Return the rule without what it says on the calibration of linears that are no longer in INT8."""
    if not rule.refines or any(name in int8 for name in match_modules(rule, modules, prefix)):
        return rule
    if rule.weights is None and rule.precision is None:
        return None
    return rule.model_copy(update={"method": None, "weights_method": None, "smoothing": None})
