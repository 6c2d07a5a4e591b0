"""Linears and attentions of an encoder that enter or leave INT8 together, and recipes that say which do."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from qdqbench.quantize.models.families.family import ENCODER_KINDS, Family
from qdqbench.quantize.models.modules import ModuleInfo
from qdqbench.quantize.recipe.plan import Plan, match_modules, resolve, short_name
from qdqbench.quantize.recipe.schema import Recipe
from qdqbench.quantize.recipe.sections import Calibration, Rule
from qdqbench.quantize.utils.errors import UserError

Unit = tuple[int, str]  # layer and kind


@dataclass(frozen=True)
class Units:
    recipe: Recipe
    modules: Mapping[str, ModuleInfo]  # by full name, in model order
    prefix: str  # name of the base model inside the model

    @cached_property
    def plan(self) -> Plan:
        """Return the plan of the recipe as it is."""
        return resolve(self.recipe, self.modules, self.prefix)

    @property
    def family(self) -> Family:
        return self.plan.family

    @cached_property
    def linears(self) -> dict[Unit, tuple[str, ...]]:
        """Return the linears of a layer by kind: q, k and v are one unit."""
        units: dict[Unit, tuple[str, ...]] = {}
        for name, info in self.modules.items():
            layer = self.family.layer_of(name)
            if info.kind == "Linear" and layer is not None and self.family.kind(name) in ENCODER_KINDS:
                unit = layer, self.family.kind(name)
                units[unit] = (*units.get(unit, ()), name)
        return units

    @cached_property
    def attention(self) -> dict[int, str]:
        names = [name for name, info in self.modules.items() if info.kind == "Attention"]
        found = {self.family.layer_of(name): name for name in names}
        return {layer: name for layer, name in found.items() if layer is not None}

    def short(self, name: str) -> str:
        return short_name(name, self.prefix)

    def require_no_residual(self, command: str, verb: str) -> None:
        if self.plan.residual:
            raise UserError(
                f"{command} moves linears between FP16 and INT8, and the INT8 residuals of recipe "
                f"{self.recipe.name} need INT8 linears around them; set residual: fp16 in a copy of the "
                f"recipe and {verb} that"
            )

    def write(
        self,
        int8: Mapping[str, str],
        attention: Collection[str],
        section: Calibration | None = None,
        **fields: Any,
    ) -> Recipe:
        """Return the recipe with exactly these linears and attentions in INT8.

        Args:
            int8: weight scales by linear, `channel` or `tensor`.
            section: the calibration; without it that of the recipe, and of its rules for what is in INT8.
            fields: other fields of the recipe that change.
        """
        refined = section is None
        section = section or self.recipe.calibration
        if not self.family.splittable(int8):
            section = section.model_copy(update={"outlier_channel_splitting": 0})
        inside = {*int8, *attention}
        rules = [*self._linear_rules(int8), *self._attention_rules(attention), *self._fp32_rules(inside)]
        rules += self._refining_rules(inside) if refined else []
        whole = bool(attention) and 2 * len(attention) > len(self.attention)
        data = self.recipe.model_dump(mode="json") | {
            "rules": [rule.model_dump(mode="json", exclude_none=True) for rule in rules],
            "attention": "int8" if whole else "fp16",
            "calibration": section.model_dump(mode="json"),
            **fields,
        }
        data["precision"]["never_quantize"] = ["layernorm"] if attention else ["layernorm", "softmax"]
        recipe = Recipe.model_validate(data)
        plan = resolve(recipe, self.modules, self.prefix)
        assert plan.int8 == dict(int8), recipe
        assert {*plan.attention} == {*attention}, recipe
        return recipe

    def _linear_rules(self, int8: Mapping[str, str]) -> list[Rule]:
        """Return one INT8 rule for all and rules for exceptions, or INT8 rules where these are fewer."""
        inside = {name for names in self.linears.values() for name in names}
        chosen, kept = inside & {*int8}, inside - {*int8}
        scales, rules = "", list[Rule]()
        if chosen:
            scales = Counter(int8[name] for name in chosen).most_common(1)[0][0]
            rules = [Rule(**each, **_int8(scales)) for each in self._patterns(chosen)]
            out: dict[str, Any] = {"type": "Linear", "precision": self.recipe.precision.compute}
            but = [Rule(**each, **out) for each in self._patterns(kept)]
            rules = [Rule(role="encoder", **_int8(scales)), *but] if len(but) < len(rules) else rules
        others = {name: each for name, each in int8.items() if name not in inside or each != scales}
        return rules + [Rule(match=self.short(name), **_int8(each)) for name, each in others.items()]

    def _patterns(self, names: set[str]) -> list[dict[str, Any]]:
        """Return patterns of exactly these linears: kinds of all layers, layers, units, then single ones."""
        left = {unit for unit, of in self.linears.items() if names.issuperset(of)}
        single = names - {name for unit in left for name in self.linears[unit]}
        found: list[dict[str, Any]] = []
        for kind in ENCODER_KINDS:
            of_kind = {unit for unit in self.linears if unit[1] == kind}
            if of_kind and of_kind <= left:
                found.append({"role": kind})
                left -= of_kind
        for layer in sorted({layer for layer, _ in left}):
            of_layer = {unit for unit in self.linears if unit[0] == layer}
            if of_layer <= left:
                found.append({"match": self._inside(layer)})
                left -= of_layer
        found += [{"match": self._inside(layer), "role": kind} for layer, kind in sorted(left)]
        return found + [{"match": self.short(name)} for name in self.modules if name in single]

    def _inside(self, layer: int) -> str:
        name = self.short(next(of[0] for (at, _), of in self.linears.items() if at == layer))
        place = self.family.place(name)
        assert place is not None, name
        return f"{place.layers}.{layer}.*"

    def _attention_rules(self, attention: Collection[str]) -> list[Rule]:
        """Return rules for the smaller part: the others are as `attention` of the recipe says."""
        rest = [name for name in self.attention.values() if name not in attention]
        few, precision = (attention, "int8") if len(attention) <= len(rest) else (rest, "fp16")
        fields: Any = {"type": "Attention", "precision": precision}
        return [Rule(match=self.short(name), **fields) for name in self.modules if name in few]

    def _fp32_rules(self, int8: set[str]) -> list[Rule]:
        """Return the recipe's rules that keep modules in FP32, but those in INT8."""
        rules = []
        for rule in self.recipe.rules:
            matched = match_modules(rule, self.modules, self.family, self.prefix)
            if rule.precision == "fp32" and not int8 & {*matched}:
                rules.append(rule)
            elif rule.precision == "fp32":
                around = [f"{name}." for name in matched if self.modules[name].kind == "other"]
                split = {name[:-1] for name in around if any(each.startswith(name) for each in int8)}
                names = [self.short(name) for name in matched if name not in int8 | split]
                rules += [Rule(match=name, precision="fp32") for name in names]
        return rules

    def _refining_rules(self, int8: set[str]) -> list[Rule]:
        """Return what the recipe's rules say on the calibration of what is in INT8."""
        names = ("method", "weights_method", "smoothing")
        return [
            Rule.model_validate(rule.model_dump(include={"match", "role", *names}) | {"type": rule.kind})
            for rule in self.recipe.rules
            if rule.refines and int8 & {*match_modules(rule, self.modules, self.family, self.prefix)}
        ]


def _int8(scales: str) -> dict[str, Any]:
    return {"weights": f"int8/per-{scales}", "input": "int8/per-tensor"}
