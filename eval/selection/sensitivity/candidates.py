"""What sensitivity switches: every linear, attention, layer and kind of a model, and what "everything" is."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from qdqbench.eval.metrics.switches import EMBEDDINGS, LAYERNORMS
from qdqbench.eval.selection.sensitivity.results import Group
from qdqbench.quantize.models.families.family import ENCODER_KINDS, KINDS, SMOOTHED, Family
from qdqbench.quantize.models.modules import ModuleInfo
from qdqbench.quantize.recipe.plan import Plan, Scaling, resolve, short_name
from qdqbench.quantize.recipe.schema import Recipe
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
        """The same for candidates that switch the same: the linear `classifier` and the kind of that name."""
        return next(iter(self.units)) if len(self.units) == 1 else f"{self.group} {self.name}"


@dataclass(frozen=True)
class Choices:
    """What of a model can be switched."""

    base: Plan  # of the recipe as it is
    plan: Plan  # every linear and every attention that can be fused
    everything: frozenset[str]  # linears and attention modules of "everything in INT8"
    candidates: list[Candidate]
    notes: list[str]


def choices(recipe: Recipe, modules: Mapping[str, ModuleInfo], prefix: str) -> Choices:
    """Candidates of a model, and the plan that calibrates all of them.

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
    """Calibration of a linear that the recipe has not in INT8: its section, which smooths some only."""
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
