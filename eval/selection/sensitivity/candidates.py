"""What sensitivity switches: every linear, attention, layer and kind of a model, and what "everything" is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from qdqbench.eval.metrics import gate
from qdqbench.eval.reporting.formats import count_of
from qdqbench.eval.selection.sensitivity.results import CurvePoint, Group
from qdqbench.eval.selection.trials.calibrations import EMBEDDINGS, LAYERNORMS
from qdqbench.eval.selection.trials.store import named_by
from qdqbench.quantize.models.families.family import ENCODER_KINDS, KINDS, SMOOTHED, Family
from qdqbench.quantize.models.modules import ModuleInfo
from qdqbench.quantize.recipe.plan import Plan, Scaling, match_modules, resolve, short_name
from qdqbench.quantize.recipe.schema import Recipe
from qdqbench.quantize.recipe.sections import Rule
from qdqbench.quantize.utils.comparison import Comparison
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.limits import Limits, limits_of


@dataclass(frozen=True)
class Candidate:
    """Units that go into INT8, or out of it, together."""

    name: str
    group: Group
    kind: str
    layer: int | None
    modules: tuple[str, ...]  # full names
    units: frozenset[str]  # of Switches
    start: int | None  # encoder layer whose input they do not touch; None: only the tokens are such
    diagnostic: bool = False

    @property
    def key(self) -> str:
        """Return a name that candidates share which switch the same: a classifier and its kind."""
        return next(iter(self.units)) if len(self.units) == 1 else f"{self.group} {self.name}"


@dataclass(frozen=True)
class Choices:
    base: Plan  # of the recipe as it is
    plan: Plan  # every linear and every attention that can be fused
    everything: frozenset[str]  # linears and attention modules of "everything in INT8"
    candidates: list[Candidate]
    notes: list[str]


def choices(recipe: Recipe, modules: Mapping[str, ModuleInfo], prefix: str) -> Choices:
    """Return the candidates of a model, and the plan that calibrates all of them.

    Everything in INT8 is every linear of the encoder, per channel where the recipe has no INT8 rule for it,
    and the attention and other linears that the recipe has in INT8.

    Args:
        modules: every module by full name, in model order.
        prefix: name of the base model inside the model.

    Raises:
        UserError: as `matching.resolve`, or the recipe has INT8 residuals.
    """
    base = resolve(recipe, modules, prefix)
    if base.residual:
        raise UserError(
            f"sensitivity moves linears between FP16 and INT8, and the INT8 residuals of recipe "
            f"{recipe.name} need INT8 linears around them; set residual: fp16 in a copy of the recipe and "
            "measure that"
        )
    linears = [name for name, info in modules.items() if info.kind == "Linear"]
    known = [name for name, info in modules.items() if info.kind == "Attention"]
    limits = limits_of(recipe.engine.backend)
    attention = [name for name in known if modules[name].head_size in limits.int8_head_sizes]
    plan = Plan(
        int8={name: base.int8.get(name, "channel") for name in linears},
        attention=tuple(attention),
        scaling={n: base.scaling.get(n) or _scaling(recipe, n, base.family) for n in linears}
        | {n: base.scaling.get(n) or _of_section(recipe) for n in attention},
        family=base.family,
    )
    encoder = [name for name in linears if base.family.layer_of(name) is not None]
    everything = frozenset([*encoder, *base.int8, *base.attention])
    candidates = _candidates(plan, everything, modules, prefix)
    return Choices(base, plan, everything, candidates, _notes(plan, base, modules, limits))


def _scaling(recipe: Recipe, linear: str, family: Family) -> Scaling:
    """Return how to calibrate a linear that the recipe has not in INT8: by its section, if it smooths."""
    smoothing = recipe.calibration.smoothing if family.kind(linear) in SMOOTHED else "none"
    return replace(_of_section(recipe), smoothing=smoothing)


def _of_section(recipe: Recipe) -> Scaling:
    return Scaling(recipe.calibration.method, recipe.calibration.weights_method)


def _candidates(
    plan: Plan, everything: frozenset[str], modules: Mapping[str, ModuleInfo], prefix: str
) -> list[Candidate]:
    family = plan.family
    layers = sorted({layer for name in plan.int8 if (layer := family.layer_of(name)) is not None})
    found = []
    for name in plan.int8:
        layer = family.layer_of(name)
        kind = family.kind(name)
        start = layer if layer is not None else None if kind == "embeddings" else len(layers)
        short = short_name(name, prefix)
        found.append(Candidate(short, "linear", kind, layer, (name,), frozenset([name]), start))
    for name in plan.attention:
        layer = family.layer_of(name)
        short = short_name(name, prefix)
        found.append(Candidate(short, "attention", "attention", layer, (name,), frozenset([name]), layer))
    for layer in layers:
        inside = tuple(n for n in modules if n in everything and family.layer_of(n) == layer)
        place = family.place(short_name(inside[0], prefix))
        assert place is not None, inside
        name = f"{place.layers}.{layer}"
        found.append(Candidate(name, "block", "block", layer, inside, frozenset(inside), layer))
    return found + _kinds(plan, modules, len(layers))


def _kinds(plan: Plan, modules: Mapping[str, ModuleInfo], layers: int) -> list[Candidate]:
    found = []
    for kind in KINDS:
        names = tuple(name for name in plan.int8 if plan.family.kind(name) == kind)
        start = None if kind in ENCODER_KINDS else layers
        if names:
            found.append(Candidate(kind, "kind", kind, None, names, frozenset(names), start))
    if plan.attention:
        units = frozenset(plan.attention)
        found.append(Candidate("attention", "kind", "attention", None, plan.attention, units, None))
    norms = tuple(
        n for n, i in modules.items() if i.kind == "LayerNorm" and plan.family.layer_of(n) is not None
    )
    tables = tuple(name for name, info in modules.items() if info.kind == "Embedding")
    for unit, names in ((LAYERNORMS, norms), (EMBEDDINGS, tables)):
        found.append(Candidate(unit, "kind", unit, None, names, frozenset([unit]), None, diagnostic=True))
    return found


def _notes(plan: Plan, base: Plan, modules: Mapping[str, ModuleInfo], limits: Limits) -> list[str]:
    notes = [
        "LayerNorm input and embeddings are diagnostic: no recipe can put them into INT8 today (LayerNorm "
        "paths are protected, embeddings are looked up and not multiplied)"
    ]
    layer_of = plan.family.layer_of
    added = [name for name in plan.int8 if layer_of(name) is not None and name not in base.int8]
    if added:
        notes.append(
            f"{len(added)} linears of the encoder are not INT8 in the recipe; here they are, per channel, "
            "and so in the written recipe unless it keeps them out"
        )
    if any(i.kind == "Attention" and name not in plan.attention for name, i in modules.items()):
        sizes = limits.head_sizes_text
        notes.append(f"attention is not measured: INT8 attention is fused for head sizes {sizes} only")
    outside = [name for name in plan.int8 if layer_of(name) is None and name not in base.int8]
    if outside or not base.attention:
        names = [plan.family.kind(name) for name in outside]
        names += [] if base.attention else ["attention"]
        notes.append(
            f"{', '.join(dict.fromkeys(names))}: not INT8 in the recipe, so not part of everything, and "
            "measured alone only"
        )
    return notes


SHARE = 0.5  # of the divergence of everything in INT8 that may be left


def kept_counts(linears: int) -> list[int]:
    """Return 0, 1, 2, 4, 8, ... linears, one at least left in INT8."""
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


def make_recipe(
    recipe: Recipe, point: CurvePoint, found: Choices, modules: Mapping[str, ModuleInfo], prefix: str
) -> Recipe:
    """Return the recipe of a point of the curve, which was resolved against the model."""
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
            "name": named_by(recipe.name, "sensitivity"),
            "description": f"{recipe.name}, {count_of(count, 'linear')} kept out of INT8 by sensitivity.",
            "rules": [rule.model_dump(mode="json") for rule in rules],
            "calibration": calibration.model_dump(mode="json"),
        }
    )
    plan = resolve(chosen, modules, prefix)
    assert {*plan.int8, *plan.attention} == int8, "not the modules that were measured"
    return chosen


def _not_idle(
    rule: Rule, int8: frozenset[str], modules: Mapping[str, ModuleInfo], prefix: str
) -> Rule | None:
    """Return the rule without what it says on the calibration of linears that are no longer in INT8."""
    if not rule.refines or any(name in int8 for name in match_modules(rule, modules, prefix)):
        return rule
    if rule.weights is None and rule.precision is None:
        return None
    return rule.model_copy(update={"method": None, "weights_method": None, "smoothing": None})
