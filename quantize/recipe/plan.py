"""Resolve a recipe's rules against the modules of a model: which linear becomes what."""

import difflib
import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from qdqbench.quantize.models.families.family import SMOOTHED, Family, Role
from qdqbench.quantize.models.families.known import BERT, family_named
from qdqbench.quantize.models.modules import ModuleInfo
from qdqbench.quantize.recipe.schema import Recipe
from qdqbench.quantize.recipe.sections import Rule
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.limits import HEAD_SIZES_TEXT, INT8_HEAD_SIZES, MOST_KERNEL_HEAD
from qdqbench.quantize.utils.names import count_of, name_list

FLOATS = ("fp16", "fp32")
Matched = list[tuple[Rule, list[str]]]  # rules, with the modules that they name
QKV_ROLES: tuple[Role, ...] = ("query", "key", "value")


@dataclass(frozen=True)
class Scaling:
    """Calibration of the scales of one INT8 linear or attention."""

    method: str = "max"  # of activations
    weights: str = "max"
    smoothing: float | str = "none"


@dataclass(frozen=True)
class Plan:
    """A recipe resolved for one model. Names are full module paths, in model order."""

    int8: dict[str, str] = field(default_factory=dict)  # linear -> "channel" or "tensor" weight scales
    high: tuple[str, ...] = ()  # linears that stay in FP16 or FP32
    attention: tuple[str, ...] = ()  # attention modules in INT8
    residual: tuple[str, ...] = ()  # modules whose residual is INT8: bert.encoder.layer.0.attention.output
    fp32: tuple[str, ...] = ()  # modules (linears, LayerNorms, softmax, ...) that compute in FP32
    scaling: dict[str, Scaling] = field(default_factory=dict)  # of every INT8 linear, attention and residual
    merge_qkv: bool = False  # an engine should make one GEMM of q, k and v of INT8 attentions
    family: Family = BERT  # of the model

    def scaling_of(self, name: str) -> Scaling:
        return self.scaling.get(name, Scaling())


def resolve(recipe: Recipe, modules: Mapping[str, ModuleInfo], prefix: str = "") -> Plan:
    """Apply the recipe's rules in order, the later wins; what they cannot do to this model is a `UserError`.

    `prefix` names the base model inside the model (`bert`); patterns match names with or without it.
    """
    family = family_named(recipe.model.family)
    matched = [(rule, match_modules(rule, modules, family, prefix)) for rule in recipe.rules]
    if unmatched := [rule for rule, names in matched if not names]:
        raise UserError("; ".join(_unmatched(rule, modules, family, prefix) for rule in unmatched))
    formats: dict[str, str] = {}
    if recipe.attention == "int8":
        formats.update(dict.fromkeys((n for n, i in modules.items() if i.kind == "Attention"), "int8"))
    for rule, names in matched:
        target = rule.precision or (rule.weights and rule.weights.removeprefix("int8/per-"))
        if target and (rule.type, target) != ("Residual", "int8"):  # that is nothing for the modules inside
            formats.update(dict.fromkeys(names, target))
    linears = [name for name, info in modules.items() if info.kind == "Linear"]
    family.require_known(linears)
    inherited = {name: _inherited(name, formats) for name in modules}
    int8 = {name: formats[name] for name in linears if formats.get(name) in ("channel", "tensor")}
    attention = _int8_attention(recipe, modules, formats)
    residual = _int8_residuals(recipe, modules, family, matched)
    scaling = _scaling(recipe, modules, family, matched, {*int8, *attention})
    readers = {name: family.residual_readers(name) for name in residual}
    _require_int8_readers(readers, int8, scaling)
    if recipe.calibration.outlier_channel_splitting:
        _require_splittable(family.splittable(int8), scaling)
    plan = Plan(
        int8=int8,
        high=tuple(name for name in linears if name not in int8),
        attention=attention,
        residual=residual,
        fp32=tuple(n for n, info in modules.items() if inherited[n] == "fp32" or info.kind == "Pooling"),
        scaling=scaling | {name: scaling[first] for name, (first, *_) in readers.items()},
        merge_qkv=bool(attention) and recipe.export.qkv_scales == "shared",
        family=family,
    )
    # the fusion of an attention needs a Q after its second matmul
    outputs = [family.require_beside(name, "output") for name in attention]
    if lost := [name for name in outputs if name not in int8]:
        raise UserError(
            f"attention: int8 needs INT8 at the output linear too (else it is not fused, "
            f"and slower than FP16); add a rule for {name_list(lost)} or set attention: fp16"
        )
    return plan


def _scaling(
    recipe: Recipe, modules: Mapping[str, ModuleInfo], family: Family, matched: Matched, int8: set[str]
) -> dict[str, Scaling]:
    section = recipe.calibration
    scalings = {name: Scaling(section.method, section.weights_method) for name in modules if name in int8}
    # not the others: outliers of GELU are rare, and factors from them fail on data that has more
    smoothed = [n for n in scalings if modules[n].kind == "Attention" or family.kind(n) in SMOOTHED]
    scalings |= {name: replace(scalings[name], smoothing=section.smoothing) for name in smoothed}
    idle = []
    for rule, names in matched:
        changes = {"method": rule.method, "weights": rule.weights_method, "smoothing": rule.smoothing}
        given: Any = {key: value for key, value in changes.items() if value is not None}
        refined = [name for name in names if name in scalings]
        idle += [rule.target] if given and not refined else []
        scalings.update({name: replace(scalings[name], **given) for name in refined})
    if idle:
        raise UserError(
            f"rules {', '.join(idle)} say how to calibrate, but nothing that they match is INT8; "
            "quantize it with a rule before, or drop them"
        )
    return scalings


def match_modules(
    rule: Rule, modules: Mapping[str, ModuleInfo], family: Family, prefix: str = ""
) -> list[str]:
    """Return the modules that a rule names, and what is inside of those that it keeps in FP16 or FP32."""
    named = {
        name
        for name, info in modules.items()
        if rule.kind in (None, info.kind)
        and (rule.role is None or family.has_role(name, rule.role))
        and any(fnmatch.fnmatchcase(form, rule.match or "*") for form in (name, short_name(name, prefix)))
    }
    kept = rule.precision in FLOATS
    around = tuple(f"{name}." for name in named if kept and modules[name].kind == "other")
    return [name for name in modules if name in named or name.startswith(around)]


def short_name(name: str, prefix: str) -> str:
    return name.removeprefix(f"{prefix}.") if prefix else name


def _inherited(name: str, formats: Mapping[str, str]) -> str | None:
    """Return the format of a module: its own, or else that of the nearest module around it."""
    while name not in formats and name:
        name = name.rpartition(".")[0]
    return formats.get(name)


def _unmatched(rule: Rule, modules: Mapping[str, ModuleInfo], family: Family, prefix: str) -> str:
    what = f"rule {rule.target} matches no {rule.kind or 'module'}"
    if rule.match is None:
        known = (f"{path} ({role})" for path, role in (*family.linears.items(), *family.outside.items()))
        return f"{what} of this model; family {family.name} has {', '.join(known)}"
    # numbers are folded so that twelve layers give one near name
    shapes = {
        re.sub(r"\.\d+\.", ".*.", short_name(name, prefix)): None
        for name, info in modules.items()
        if name and rule.kind in (None, info.kind)
    }
    near = difflib.get_close_matches(rule.match, shapes, n=3, cutoff=0.3) or list(shapes)[:3]
    return f"{what} of this model; near names: {', '.join(near)}" if near else f"{what}: it has none"


def _int8_attention(
    recipe: Recipe, modules: Mapping[str, ModuleInfo], formats: Mapping[str, str]
) -> tuple[str, ...]:
    known = {name: info for name, info in modules.items() if info.kind == "Attention"}
    if recipe.attention == "int8" and not known:
        raise UserError("attention: int8 is asked for, but the model has no self-attention known here")
    attentions = {name: info for name, info in known.items() if formats.get(name) == "int8"}
    cuda = recipe.engine.backend == "cuda"
    taken = {*range(1, MOST_KERNEL_HEAD + 1)} if cuda else {*INT8_HEAD_SIZES}
    if sizes := {info.head_size for info in attentions.values()} - taken:
        text = f"at most {MOST_KERNEL_HEAD}" if cuda else HEAD_SIZES_TEXT
        raise UserError(
            f"attention: int8 needs a head size of {text} to be fused, this model has "
            f"{', '.join(map(str, sorted(s or 0 for s in sizes)))}; set attention: fp16 in the recipe"
        )
    return tuple(attentions)


def _int8_residuals(
    recipe: Recipe, modules: Mapping[str, ModuleInfo], family: Family, matched: Matched
) -> tuple[str, ...]:
    known = [name for name, info in modules.items() if info.kind == "Residual"]
    if recipe.int8_residual and not known:
        why = (
            family.why_no_int8_residual or f"family {family.name} has no place for a quantizer in this model"
        )
        raise UserError(f"residual: int8 is asked for, but {why}; set residual: fp16")
    formats: dict[str, str] = dict.fromkeys(known, recipe.residual)
    for rule, names in matched:
        if rule.precision and rule.type in (None, "Residual"):
            formats.update(dict.fromkeys(names, rule.precision))
    return tuple(name for name in known if formats[name] == "int8")


def _require_int8_readers(
    readers: Mapping[str, tuple[str, ...]], int8: Mapping[str, str], scaling: Mapping[str, Scaling]
) -> None:
    """Require readers of an INT8 residual to be INT8, and to round it in one way: it is their tensor."""
    lost = dict.fromkeys(reader for linears in readers.values() for reader in linears if reader not in int8)
    ways = {n: {(scaling[r].method, scaling[r].smoothing) for r in readers[n] if r in int8} for n in readers}
    split, problems = [name for name, several in ways.items() if len(several) > 1], []
    if lost:
        problems.append(f"{name_list(lost)} to be INT8, as they read the same tensors")
    if split:
        problems.append(
            f"the linears that read the same tensor as the residual of {name_list(split)} to have one method "
            "and one smoothing"
        )
    if problems:
        raise UserError(
            f"residual: int8 needs {' and '.join(problems)}; change their rules, or keep these residuals out "
            "with a rule of type Residual and precision fp16"
        )


def _require_splittable(names: list[str], scaling: Mapping[str, Scaling]) -> None:
    """Require split layers to be second feed-forward linears in INT8, and divide their input themselves."""
    if not names:
        raise UserError(
            "calibration.outlier_channel_splitting is for the second linear of feed-forwards, and none of "
            "them is INT8; quantize them with a rule, or drop it"
        )
    if smoothed := [name for name in names if scaling[name].smoothing != "none"]:
        raise UserError(
            f"calibration.outlier_channel_splitting divides the input of {name_list(smoothed)}, and so would "
            "smoothing; drop one of them"
        )


def folds_kv_bias(plan: Plan) -> list[str]:
    """Return the INT8 attentions whose k and v have linears of their own with one weight scale."""
    return [] if plan.family.why_k_keeps_bias else _list_unscaled_kv(plan)


def folds_q_bias(plan: Plan) -> dict[str, str]:
    """Return those whose q has one weight scale too, with the module whose bias can shift their input."""
    linears = {*plan.int8, *plan.high}
    found = {name: plan.family.read_by(name, linears) for name in folds_kv_bias(plan)}
    return {name: by for name, by in found.items() if by and _one_scale(plan, name, "query")}


def shares_qkv_scales(plan: Plan) -> list[str]:
    """Return those whose q, k and v share all scales, so that an engine makes one GEMM of the three."""
    return [*folds_q_bias(plan)] if plan.merge_qkv else []


def list_bias_free_linears(plan: Plan) -> set[str]:
    """Return the linears that have neither scales nor a bias behind their GEMM."""
    found = {linear for name in folds_kv_bias(plan) for linear in get_linears(plan, name, "key", "value")}
    return found.union(*(get_linears(plan, name, "query") for name in folds_q_bias(plan)))


def note_kept_biases(plan: Plan) -> list[str]:
    """Note which of q, k and v have one weight scale and yet keep their biases, and why."""
    why, which, whole = plan.family.why_k_keeps_bias, "q, k and v", folds_q_bias(plan)
    lost = _list_unscaled_kv(plan)
    if not why:
        lost = [name for name in lost if _one_scale(plan, name, "query") and name not in whole]
        shared = "serves several runs of a layer" if plan.family.shared_layers else "is not known"
        which, why = "q", f"what makes its input {shared}"
    said = (
        f"{which} of {count_of(len(lost), 'INT8 attention')} with weights: int8/per-tensor keep their "
        f"biases, so that a kernel stands between GEMM and attention: {why}"
    )
    return [said] if lost else []


def get_linears(plan: Plan, attention: str, *roles: Role) -> list[str]:
    return [plan.family.made_by(attention, role).linear for role in roles]


def _list_unscaled_kv(plan: Plan) -> list[str]:
    return [name for name in plan.attention if all(_one_scale(plan, name, role) for role in ("key", "value"))]


def _one_scale(plan: Plan, attention: str, role: Role) -> bool:
    rows = plan.family.made_by(attention, role)
    return rows.parts == 1 and plan.int8.get(rows.linear) == "tensor"
