"""The recipe: YAML that says per layer what becomes INT8, and how it is calibrated, exported and judged."""

import difflib
import os
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.recipe.training import Qat

MAX_RECIPE_BYTES = 64 * 1024  # a recipe is one screen; a larger file is a mistake or an attack
Positive = Annotated[int, Field(gt=0)]
Range = tuple[Positive, Positive, Positive]
# how the amax of an activation follows from what calibration saw: "percentile/99.99" clips 0.01% of it
Method = Annotated[str, AfterValidator(lambda text: _method(text))]  # noqa: PLW0108  (defined below)
WeightMethod = Literal["max", "mse"]
# SmoothQuant with this alpha; "gain" moves the gain of the LayerNorm before into the linear. Strict, as YAML
# reads `no` as false, which is not alpha 0.
Smooth = Annotated[float, Field(ge=0, le=1, strict=True)] | Literal["gain", "none"]


def percentile_of(method: str) -> float | None:
    """Percentile of a method such as "percentile/99.99", else None."""
    kind, _, value = method.partition("/")
    try:
        return float(value) if kind == "percentile" else None
    except ValueError:
        return None


def _method(text: str) -> str:
    percentile = percentile_of(text)
    if text not in ("max", "mse", "entropy") and not (percentile and 50 < percentile <= 100):
        raise ValueError(
            f"method {text!r} is none of max, mse, entropy and percentile/P with P from 50 to 100, such as "
            "percentile/99.99"
        )
    return text


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSection(_Section):
    """Which models the recipe is for."""

    family: Literal["bert"] = "bert"


class Precision(_Section):
    """Compute precision, and the classes that never see Q/DQ."""

    compute: Literal["fp16", "fp32"] = "fp16"
    keep: tuple[Literal["layernorm", "softmax"], ...] = ("layernorm", "softmax")


class Rule(_Section):
    """Quantize the matched linears, keep the matched modules in FP16 or FP32, or change their calibration."""

    match: str = Field(min_length=1)
    type: Literal["Linear", "LayerNorm", "Embedding", "Softmax", "Attention", "Residual"] | None = None
    weights: Literal["int8/channel", "int8/tensor"] | None = None
    input: Literal["int8/tensor"] | None = None
    precision: Literal["int8", "fp16", "fp32"] | None = None  # int8: of an Attention or a Residual
    method: Method | None = None  # of the activations; this and the next two refine the calibration section
    weights_method: WeightMethod | None = None
    smooth: Smooth | None = None

    @model_validator(mode="after")
    def _one_intent(self) -> "Rule":
        if (self.weights is None) != (self.input is None):
            raise ValueError("give both weights and input: a GEMM with one INT8 operand runs in FP16")
        if self.weights is not None and self.precision is not None:
            raise ValueError("give either weights and input (INT8) or precision (fp16 or fp32)")
        if self.weights is None and self.precision is None and not self.refines:
            raise ValueError(
                "give weights and input (INT8), precision (fp16 or fp32), or how to calibrate: method, "
                "weights_method, smooth"
            )
        if self.weights is not None and self.type not in (None, "Linear"):
            raise ValueError(f"type {self.type} is protected from Q/DQ by class; only Linear becomes INT8")
        if self.precision == "int8" and self.type not in ("Attention", "Residual"):
            raise ValueError(
                "precision int8 is for type Attention and type Residual; a Linear takes weights and input"
            )
        if self.refines and self.precision in ("fp16", "fp32"):
            raise ValueError(f"precision {self.precision} needs no calibration; drop method and smooth")
        if self.refines and self.type == "Residual":
            raise ValueError("a Residual is calibrated as the linears that read the same tensor; name those")
        if self.refines and self.type not in (None, "Linear", "Attention"):
            raise ValueError(f"type {self.type} is never quantized, so it has no calibration")
        return self

    @property
    def refines(self) -> bool:
        """Whether the rule says how to calibrate."""
        return any(value is not None for value in (self.method, self.weights_method, self.smooth))


class Calibration(_Section):
    """Data and method that set each amax."""

    split: str = "train"
    samples: Positive = 512
    batch_size: Positive = 32
    method: Method = "max"
    weights_method: WeightMethod = "max"
    smooth: Smooth = "none"  # of linears that read a LayerNorm, and of q against k; a rule can smooth others
    # channels that each feed-forward gets for copies of its outliers; by 32, as INT8 kernels need alignment
    split_outliers: Annotated[int, Field(ge=0, le=1024, multiple_of=32)] = 0
    bias_correction: bool = False  # of the INT8 linears of the encoder
    seed: Annotated[int, Field(ge=0)] = 0


class Export(_Section):
    """Form of the ONNX file."""

    opset: Annotated[int, Field(ge=20, le=22)] = 20
    max_length: Annotated[int, Field(ge=8, le=8192)] = 128
    weights: Literal["auto", "channel", "factored"] = "auto"
    qkv: Literal["merged", "separate"] = "merged"  # GEMMs of q, k and v in the factored form
    gelu: Literal["exact", "tanh"] = "exact"  # of the INT8 graph; tanh is off by 5e-4 at most, and faster


class Shapes(_Section):
    """Minimum, optimum and maximum of the optimization profile."""

    batch: Range = (1, 32, 128)
    length: Range = (16, 128, 128)

    @model_validator(mode="after")
    def _ordered(self) -> "Shapes":
        for name, values in (("batch", self.batch), ("length", self.length)):
            if list(values) != sorted(values):
                raise ValueError(f"{name} must be [min, opt, max] in rising order, not {list(values)}")
        return self


# tags keep pydantic from reporting a wrong key once for each form
_FORMS = ("mapping", "list")
_OneOrMore = Annotated[
    Annotated[Shapes, Tag("mapping")] | Annotated[tuple[Shapes, ...], Tag("list")],
    Discriminator(lambda value: "list" if isinstance(value, (list, tuple)) else "mapping"),
]


class Engine(_Section):
    """Where the ONNX file is built, and for which shapes: one optimization profile, or a list of them."""

    backend: Literal["auto", "tensorrt", "tensorrt_rtx"] = "auto"
    shapes: _OneOrMore = Shapes()
    compute_capability: str | None = None  # ahead-of-time builds; null: the GPU that is here

    @model_validator(mode="after")
    def _some(self) -> "Engine":
        if not self.profiles:
            raise ValueError("shapes is an empty list; give one mapping of batch and length, or several")
        return self

    @property
    def profiles(self) -> tuple[Shapes, ...]:
        """Shapes of every optimization profile."""
        return (self.shapes,) if isinstance(self.shapes, Shapes) else self.shapes


class Gate(_Section):
    """What must hold for exit status 0."""

    max_drop: Annotated[float, Field(ge=0, le=1)] = 0.01
    int8_layers: Literal["all"] | None = "all"
    min_speedup: Annotated[float, Field(gt=0)] | None = None  # over the FP16 twin; judged by `search`


class Recipe(_Section):
    """A whole recipe, validated without loading a model."""

    version: Literal[1]
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")
    description: str = ""
    model: ModelSection = ModelSection()
    precision: Precision = Precision()
    rules: tuple[Rule, ...] = ()
    attention: Literal["fp16", "int8"] = "fp16"
    residual: Literal["fp16", "int8"] = "fp16"  # what each LayerNorm of the encoder adds to a linear's output
    calibration: Calibration = Calibration()
    export: Export = Export()
    engine: Engine = Engine()
    qat: Qat | None = None
    gate: Gate = Gate()

    @model_validator(mode="after")
    def _consistent(self) -> "Recipe":
        longest = max(shapes.length[2] for shapes in self.engine.profiles)
        if longest > self.export.max_length:
            raise ValueError(
                f"engine.shapes.length goes to {longest}, but export.max_length "
                f"truncates at {self.export.max_length}; make them agree"
            )
        if self.int8_attention and "softmax" in self.precision.keep:
            raise ValueError(
                "attention: int8 quantizes the softmax output, but precision.keep protects softmax; "
                "set keep: [layernorm] or attention: fp16"
            )
        if self.int8_attention and self.export.max_length > 512:
            raise ValueError(
                f"attention: int8 is fused for lengths up to 512 only, and export.max_length is "
                f"{self.export.max_length}; shorten it or set attention: fp16"
            )
        if self.int8_residual and "layernorm" not in self.precision.keep:
            raise ValueError(
                "residual: int8 is what LayerNorm reads, and LayerNorm itself computes in floating point; "
                "add layernorm to precision.keep"
            )
        if self.int8_residual and not self.quantizes:
            raise ValueError(
                "residual: int8 needs INT8 linears that read the same tensors; give a rule with weights and "
                "input, or set residual: fp16"
            )
        return self

    @property
    def int8_attention(self) -> bool:
        """Whether any attention is asked for in INT8."""
        return self.attention == "int8" or any(
            rule.type == "Attention" and rule.precision == "int8" for rule in self.rules
        )

    @property
    def int8_residual(self) -> bool:
        """Whether any residual is asked for in INT8."""
        return self.residual == "int8" or any(
            rule.type == "Residual" and rule.precision == "int8" for rule in self.rules
        )

    @property
    def ptq(self) -> "Recipe":
        """The recipe without training."""
        return self.model_copy(update={"qat": None})

    @property
    def quantizes(self) -> bool:
        """Whether any rule asks for INT8."""
        return any(rule.weights for rule in self.rules)


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses duplicate keys (silent loss), aliases (expansion bombs) and tags.

    PyYAML fails in a dozen ways on a tag that does not fit its value, such as `!!int ""`.
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
    """Validate recipe YAML; `source` names it in errors.

    Raises:
        UserError: not YAML, an unknown key (named with its nearest key), or a bad value.
    """
    try:
        data = yaml.load(text, _Loader)  # noqa: S506  (_Loader is a SafeLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        # ValueError: PyYAML on impossible dates and on numbers of thousands of digits
        raise UserError(f"{source} is not valid recipe YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise UserError(f"{source} holds no recipe: expected keys like version, name and rules at top level")
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise UserError(f"{source}: {_explain(error)}") from error


def load_recipe(name_or_path: str) -> Recipe:
    """Load a shipped recipe by name, or a YAML file.

    Raises:
        UserError: no such recipe or file, or it does not validate.
    """
    shipped = shipped_recipes()
    if name_or_path in shipped:
        return parse_recipe(shipped[name_or_path].read_text(encoding="utf-8"), name_or_path)
    path = Path(name_or_path)
    if os.path.isfile(path):  # Path.is_file raises on names that are too long
        if path.stat().st_size > MAX_RECIPE_BYTES:
            raise UserError(f"{path} is {path.stat().st_size} bytes; a recipe has at most {MAX_RECIPE_BYTES}")
        try:
            return parse_recipe(path.read_text(encoding="utf-8"), str(path))
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not UTF-8 text, so it is no recipe") from error
    hint = f"no recipe or file is called {name_or_path!r}"
    near = difflib.get_close_matches(name_or_path, shipped, n=1)
    nearest = f"; the nearest is {near[0]!r}" if near else ""
    raise UserError(f"{hint}{nearest} (shipped: {', '.join(shipped)})")


def shipped_recipes() -> dict[str, Any]:
    """Shipped recipes: name to readable resource, sorted by name."""
    root = resources.files("qdqbench.recipes")
    families = [family for family in root.iterdir() if family.is_dir()]
    found = [file for family in families for file in family.iterdir() if file.name.endswith(".yaml")]
    return {file.name[:-5]: file for file in sorted(found, key=lambda file: file.name[:-5])}


def dump_recipe(recipe: Recipe) -> str:
    """YAML text with every default written out; parses back to the same recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=100)


def _explain(error: ValidationError) -> str:
    parts = []
    for item in error.errors():
        location = tuple(part for part in item["loc"] if part not in _FORMS)
        where = ".".join(str(part) for part in location)
        if item["type"] == "extra_forbidden":
            keys = _keys_at(location[:-1])
            near = difflib.get_close_matches(str(location[-1]), keys, n=1, cutoff=0.3)
            fix = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(keys)}"
            parts.append(f"unknown key {where!r}, {fix}")
        else:
            parts.append(f"{where or 'recipe'}: {item['msg'].removeprefix('Value error, ')}")
    return "; ".join(parts)


def _keys_at(location: tuple[int | str, ...]) -> list[str]:
    """Field names of the section at `location` in the schema."""
    section: Any = Recipe
    for part in location:
        if not isinstance(part, int):
            section = next(_sections(section.model_fields[part].annotation))
    return list(section.model_fields)


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """Sections within an annotation such as `A | tuple[B, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _sections(inner)
