"""The recipe: YAML that says per layer what becomes INT8, and its calibration, export and evaluation."""

import difflib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, ValidationError, model_validator

from qdqbench.quantize.models.families.family import Family
from qdqbench.quantize.models.families.known import BERT, FAMILIES, family_named, family_of
from qdqbench.quantize.models.load import load_config
from qdqbench.quantize.recipe import sections
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.limits import INT8_ATTENTION_LENGTH, BackendName
from qdqbench.quantize.utils.names import DEFAULT_RECIPE, MAX_NAMED
from qdqbench.quantize.utils.schema import Frozen, field

MAX_RECIPE_BYTES = 64 * 1024  # a recipe is one screen; a larger file is a mistake or an attack
# Nothing forbids them in the other families that could have them, but nobody measured them there.
MEASURED = {
    "int8-linears-per-tensor": ("bert",),
    "int8-linears-per-tensor-qat": ("bert",),
    "int8-residual-qat": ("bert", "distilbert", "mpnet", "deberta-v2"),
}
LONGEST = 200  # characters of a key or of what is wrong with it, in an error


class Recipe(Frozen):
    """A whole recipe, validated without loading a model."""

    version: Literal[1] = field("Version of this format.")
    name: str = field("Names run folders, files and rows of tables.", pattern=r"^[a-z0-9][a-z0-9._-]*$")
    description: str = field("One line for `qdqbench recipes list`.", default="")
    model: sections.ModelSection = field("Which models the recipe is for.", default=sections.ModelSection())
    precision: sections.Precision = field(
        "Compute precision, and what stays out of INT8.", default=sections.Precision()
    )
    rules: tuple[sections.Rule, ...] = field("What becomes INT8; the later rule wins.", default=())
    attention: Literal["fp16", "int8"] = field(
        "Precision of attentions that no rule matches.", default="fp16"
    )
    residual: Literal["fp16", "int8"] = field("Precision of residuals that no rule matches.", default="fp16")
    calibration: sections.Calibration = field("Data and method of each amax.", default=sections.Calibration())
    export: sections.Export = field("Form of the ONNX file.", default=sections.Export())
    engine: sections.EngineSettings = field(
        "Where the ONNX file is built, and for which shapes.", default=sections.EngineSettings()
    )
    reconstruction: sections.Reconstruction | None = field(
        "Training layer by layer; null: none.", default=None
    )
    qat: sections.Qat | None = field("Training after PTQ, with its Q/DQ in place; null: none.", default=None)
    gate: sections.GateSettings = field("What must hold for exit status 0.", default=sections.GateSettings())

    @model_validator(mode="after")
    def _consistent(self) -> "Recipe":
        longest = max((shapes.length[2] for shapes in self.engine.profiles), default=0)
        if longest > self.export.max_length:
            raise ValueError(
                f"engine.shapes.length goes to {longest}, but export.max_length "
                f"truncates at {self.export.max_length}; make them agree"
            )
        if self.int8_attention and "softmax" in self.precision.never_quantize:
            raise ValueError(
                "attention: int8 quantizes the softmax output, but precision.never_quantize protects "
                "softmax; set never_quantize: [layernorm] or attention: fp16"
            )
        if self.int8_attention and self.export.max_length > INT8_ATTENTION_LENGTH:
            raise ValueError(
                f"attention: int8 is fused for lengths up to {INT8_ATTENTION_LENGTH} only, and "
                f"export.max_length is {self.export.max_length}; shorten it or set attention: fp16"
            )
        if "layernorm" not in self.precision.never_quantize:
            raise ValueError(
                "LayerNorm always computes in floating point, also where the residual that it reads is INT8; "
                "add layernorm to precision.never_quantize"
            )
        if self.int8_residual and not self.quantizes:
            raise ValueError(
                "residual: int8 needs INT8 linears that read the same tensors; give a rule with weights and "
                "input, or set residual: fp16"
            )
        return self

    @property
    def int8_attention(self) -> bool:
        return self.attention == "int8" or self._asks_int8("Attention")

    @property
    def int8_residual(self) -> bool:
        return self.residual == "int8" or self._asks_int8("Residual")

    def calibration_for(self, backend: BackendName) -> sections.Calibration:
        """Return the calibration section with what `auto` means for a backend."""
        section, cuda = self.calibration, backend == "cuda"
        changes: dict[str, Any] = {}
        if section.centering == "auto":
            changes["centering"] = backend != "onnxruntime" and not section.amax
        if section.softmax_scale == "auto" and cuda and self.int8_attention:
            changes["softmax_scale"] = "row-max"
        return section.model_copy(update=changes)

    def computes_tanh_on(self, backend: str) -> bool:
        """Return whether GELU has its tanh form in the graph for a backend."""
        gelu = self.export.gelu
        return gelu == "tanh" or (gelu == "auto" and backend != "openvino")

    def _asks_int8(self, kind: str) -> bool:
        return any(rule.type == kind and rule.precision == "int8" for rule in self.rules)

    @property
    def auto_shapes(self) -> bool:
        return self.engine.shapes == sections.AUTO

    @property
    def ptq(self) -> "Recipe":
        return self.model_copy(update=dict.fromkeys(self.trainings))

    @property
    def trainings(self) -> tuple[str, ...]:
        """Return the sections of trainings that it has, in the order in which they run."""
        return tuple(name for name in ("reconstruction", "qat") if getattr(self, name) is not None)

    @property
    def quantizes(self) -> bool:
        return any(rule.weights for rule in self.rules)


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses duplicate keys (silent loss), aliases (expansion bombs) and tags.

    PyYAML fails in a dozen ways on a tag that does not fit its value, such as `!!int ""`. It stays because
    transformers and ModelOpt bring it; ruamel.yaml refuses neither aliases nor tags either.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError(f"aliases (*{event.anchor}) are not allowed in a recipe")
        if getattr(event, "tag", None):
            raise yaml.YAMLError(f"tags ({event.tag}) are not allowed in a recipe")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"key {key!r} stands twice, line {node.start_mark.line + 1}")
        return super().construct_mapping(node, deep)


def parse_recipe(text: str, source: str) -> Recipe:
    """Validate recipe YAML; `source` names it in the `UserError`, which names unknown keys and near ones."""
    try:
        data = yaml.load(text, _Loader)  # noqa: S506  (_Loader is a SafeLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # impossible dates, long numbers
        raise UserError(f"{source} is not valid recipe YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise UserError(f"{source} holds no recipe: expected keys like version, name and rules at top level")
    return validate_recipe(data, source)


def validate_recipe(data: Any, source: str) -> Recipe:
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise UserError(f"{source}: {_explain(error)}") from error


def load_recipe(name_or_path: str, family: Callable[[], Family] | None = None) -> Recipe:
    """Load "bert-int8-linears", shipped, or "int8-linears" of a family, or a YAML file; else a UserError."""
    path = Path(name_or_path)
    if split_name(name_or_path) or not os.path.isfile(path):  # Path.is_file raises on names that are too long
        return _load_shipped(*_find_shipped(name_or_path, family))
    if path.stat().st_size > MAX_RECIPE_BYTES:
        raise UserError(f"{path} is {path.stat().st_size} bytes; a recipe has at most {MAX_RECIPE_BYTES}")
    try:
        return parse_recipe(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text, so it is no recipe") from error


def find_recipe(name: str, model: str | None, revision: str | None = None) -> Recipe:
    """Load a recipe as `load_recipe`, for the family of a model; None: the built-in BERT."""
    return load_recipe(name, lambda: BERT if model is None else family_of(load_config(model, revision)))


def adapt_recipe(  # noqa: PLR0913  a keyword each
    recipe: Recipe,
    *,
    fields: Mapping[str, Any] | None = None,  # by path: calibration.samples, rules.0.precision
    max_length: int | None = None,  # tokens of a sample, which is cut there; the longest profiles end there
    backend: str | None = None,
    target: Sequence[str] | None = None,  # compute capabilities
    shapes: Literal["auto"] | None = None,  # profiles follow the data
) -> Recipe:
    """Return a recipe with other values in some fields; None: as the recipe has it."""
    named: dict[str, Any] = {"engine.shapes": shapes, "engine.backend": backend}
    named |= {"engine.compute_capability": target, "export.max_length": max_length}
    changes = {**(fields or {}), **{path: value for path, value in named.items() if value is not None}}
    if not changes:
        return recipe
    data = recipe.model_dump(mode="json")
    for path, value in changes.items():  # validation names a key that does not exist
        *parents, last = [int(part) if part.isdecimal() else part for part in path.split(".")]
        section: Any = data
        try:
            for part in parents:
                if isinstance(section, dict) and section.get(part) is None:
                    section[part] = {}
                section = section[part]
            section[last] = value
        except (TypeError, IndexError) as error:
            told = "a recipe has no such path; `qdqbench recipes show RECIPE --resolved` prints all"
            raise UserError(f"--set {path}: {told}") from error
    if max_length is not None:
        longest = max((each.length[2] for each in recipe.engine.profiles), default=max_length)
        with suppress(KeyError, TypeError):  # of shapes that validation names
            kept = data["engine"]["shapes"]
            for each in [] if kept == sections.AUTO else [kept] if isinstance(kept, dict) else kept:
                each["length"] = [
                    max_length if size == longest else min(size, max_length) for size in each["length"]
                ]
    told = ", ".join(f"{path}={value}" for path, value in changes.items())
    return validate_recipe(data, f"recipe {recipe.name} with {told}")


def require_qat(recipe: Recipe) -> sections.Qat:
    if recipe.qat is None:
        raise UserError(
            f"recipe {recipe.name} has no qat section; add one such as `qat: {{epochs: 3}}`, or take a "
            "shipped recipe whose name ends in -qat"
        )
    if not recipe.quantizes:
        raise UserError(f"recipe {recipe.name} quantizes nothing, so its qat section has no object")
    return recipe.qat


@functools.cache
def shipped_files() -> dict[str, Any]:
    """Return the file of each recipe by its name without family, of which its text says only `FAMILY`."""
    files = {file.name: file for file in resources.files("qdqbench.recipes").iterdir()}
    names = sorted(name.removesuffix(".yaml") for name in files if name.endswith(".yaml"))
    return {name: files[f"{name}.yaml"] for name in names}


def family_free_recipes() -> dict[str, list[str]]:
    """Return the families that have a recipe, by its name without family."""
    return {name: [each.name for each in FAMILIES if not why_not(name, each)] for name in shipped_files()}


def shipped_recipes() -> list[str]:
    return sorted(f"{family}-{name}" for name, having in family_free_recipes().items() for family in having)


def split_name(recipe: str) -> tuple[str, Family] | None:
    """Return the name without family, and the family, of what a shipped recipe could be called."""
    names = ((recipe.removeprefix(f"{family.name}-"), family) for family in FAMILIES)
    return next(
        ((name, family) for name, family in names if name != recipe and name in shipped_files()), None
    )


def shipped_text(name: str, family: Family) -> str:
    text: str = shipped_files()[name].read_text(encoding="utf-8")
    return text.replace("FAMILY", family.name).replace("SHARE", family.feed_forward_share)


def read_source(recipe: str, loaded: Recipe) -> tuple[Path, str]:
    """Return the file that a recipe was loaded from, and its text."""
    if split_name(recipe) is None and os.path.isfile(recipe):
        return Path(recipe), Path(recipe).read_text(encoding="utf-8")
    name = loaded.name.removeprefix(f"{loaded.model.family}-")
    return Path(shipped_files()[name]), shipped_text(name, family_named(loaded.model.family))


@functools.cache  # commands read them again and again
def _load_shipped(name: str, family: str) -> Recipe:
    return parse_recipe(shipped_text(name, family_named(family)), f"{family}-{name}")


def why_not(name: str, family: Family) -> str:
    """Say why a family has no shipped recipe of a name; empty where it has."""
    recipe = _load_shipped(name, BERT.name)
    if recipe.int8_residual and family.why_no_int8_residual:
        return family.why_no_int8_residual
    straight = any((rule.role, rule.weights) == ("qkv", "int8/per-tensor") for rule in recipe.rules)
    if straight and family.why_k_keeps_bias:
        return f"{family.why_k_keeps_bias}, so these cannot come straight from their GEMMs"
    if family.name in MEASURED.get(name, (family.name,)):
        return ""
    shown = f"qdqbench recipes show {BERT.name}-{name}"
    return f"it was not measured there; to try it, change the name and family in what `{shown}` prints"


def _find_shipped(recipe: str, family: Callable[[], Family] | None) -> tuple[str, str]:
    """Return name and family of a shipped recipe; a UserError says why there is none."""
    name, own = split_name(recipe) or (recipe, None)
    free = family_free_recipes()
    if name not in free:
        near = difflib.get_close_matches(name, [*shipped_recipes(), *(free if family else ())], n=1)
        nearest = f"; the nearest is {near[0]!r}" if near else ""
        kind = "for a model" if family else f"after a family, as in {FAMILIES[0].name}-{DEFAULT_RECIPE}"
        raise UserError(
            f"no recipe or file is called {name!r}{nearest} (names {kind}: {', '.join(free)}; "
            "`qdqbench recipes list` says which family has which)"
        )
    if own is None:
        if family is None:
            raise UserError(
                f"recipe {name!r} is another one in each family ({', '.join(free[name])}); name one, such as "
                f"{free[name][0]}-{name}, or give the model (--model)"
            )
        own = family()
    if why := why_not(name, own):
        theirs = ", ".join(each for each, families in free.items() if own.name in families)
        raise UserError(f"family {own.name} has no recipe {name!r}: {why}; its own: {theirs or 'none'}")
    return name, own.name


def dump_recipe(recipe: Recipe) -> str:
    """Return YAML text with every default written out; parses back to the same recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=100)


def dump_short_recipe(recipe: Recipe) -> str:
    """Return YAML text of the differences from the defaults; parses back to the same recipe."""
    data = recipe.model_dump(mode="json", exclude_defaults=True)
    whole, kept = recipe.model_dump(mode="json"), dict[str, Any]()
    # written out though they may be defaults: what the search decided, and what decides about it
    always = {"version", "name", "rules", "attention", "calibration", "gate"}
    for name in Recipe.model_fields:
        if name in always or name in data:
            kept[name] = data[name] if name in ("description", "model", "precision") else whole[name]
    kept["rules"] = [rule.model_dump(mode="json", exclude_none=True) for rule in recipe.rules]
    text: str = yaml.safe_dump(kept, sort_keys=False, allow_unicode=True, width=110, default_flow_style=None)
    return text


def _explain(error: ValidationError) -> str:
    parts = []
    for item in error.errors():
        location = tuple(part for part in item["loc"] if part not in sections.FORMS)
        where = ".".join(str(part) for part in location)
        if item["type"] == "extra_forbidden":
            section: Any = Recipe
            for part in (part for part in location[:-1] if not isinstance(part, int)):
                section = next(_sections(section.model_fields[part].annotation))
            keys = list(section.model_fields)
            near = difflib.get_close_matches(str(location[-1]), keys, n=1, cutoff=0.3)
            fix = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(keys)}"
            parts.append(f"unknown key {where[:LONGEST]!r}, {fix}")
        else:
            message = item["msg"].removeprefix("Value error, ")
            parts.append(f"{where[:LONGEST] or 'recipe'}: {message[:LONGEST]}")
    more = f"; and {len(parts) - MAX_NAMED} more" if len(parts) > MAX_NAMED else ""
    return "; ".join(parts[:MAX_NAMED]) + more


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _sections(inner)
