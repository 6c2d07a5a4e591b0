"""The sections of a recipe; docs/reference/recipe.md is generated from these descriptions."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, WithJsonSchema, model_validator

from qdqbench.quantize.models.families.family import Family, Norm, Residual, Role
from qdqbench.quantize.models.families.known import FAMILIES, known_family, register_family
from qdqbench.quantize.utils.limits import FP16_MAX, BackendChoice
from qdqbench.quantize.utils.schema import Frozen, Positive, field

Range = tuple[Positive, Positive, Positive]
AUTO = "auto"
RuleRole = Literal["encoder", "qkv", Role]
# tags keep pydantic from reporting a wrong key once for each form
FORMS = ("mapping", "list", "word")


class Shapes(Frozen):
    """Minimum, optimum and maximum of the optimization profile."""

    batch: Range = field("Samples: [min, opt, max] in rising order.", default=(1, 32, 128))
    length: Range = field("Tokens of a sample: [min, opt, max] in rising order.", default=(16, 128, 128))

    @model_validator(mode="after")
    def _ordered(self) -> "Shapes":
        for name, values in (("batch", self.batch), ("length", self.length)):
            if list(values) != sorted(values):
                raise ValueError(f"{name} must be [min, opt, max] in rising order, not {list(values)}")
        return self


def _form(value: object) -> str:
    return "list" if isinstance(value, (list, tuple)) else "word" if isinstance(value, str) else "mapping"


ShapesForm = Annotated[
    Annotated[Shapes, Tag("mapping")]
    | Annotated[tuple[Shapes, ...], Tag("list")]
    | Annotated[Literal["auto"], Tag("word")],
    Discriminator(_form),
]


class FamilyLayout(Frozen):
    """Layout of the models of a family; `qdqbench recipes new` writes it. Paths are inside a layer."""

    layers: str = field("Path of the layers inside the base model; `*` stands for a number.")
    linears: dict[str, Role] = field("Role of every linear of a layer; `other`: not recognized.")
    outside: dict[str, Role] = field("Roles of linears in no layer, by the ends of their names.")
    attention: str | None = field("Module with transformers' AttentionInterface, or null.", default=None)
    head_size: str = field("Attribute of the attention.", default="head_dim")
    residuals: dict[str, tuple[Role, ...]] = field("Modules that add a residual, with readers.", default={})
    norms: dict[str, Norm] = field("Tensor that each LayerNorm of a layer normalizes.")
    embeddings: str = field("In the base model.")
    embeddings_norm: str = field("In the base model; empty: none.", default="")
    embeddings_linear: str | None = field("In the base model, before the layers.", default=None)
    layers_return_tuples: bool = field("Whether a layer returns more than one tensor.", default=False)
    pooler: str | None = field("In the base model.", default=None)
    dropouts: tuple[str, ...] = field("Fields of the configuration.", default=())
    activation: str = field("Field of the configuration: that of the feed-forward.")
    intermediate: str = field("Field of the configuration: width of the feed-forward.")
    inputs: tuple[str, ...] = field("Of the model, in the order of the graph's.", min_length=1)
    positions_follow_padding: bool = field("The first token has position `pad_token_id` + 1.", default=False)

    def family(self, name: str) -> Family:
        added = tuple(Residual(*each) for each in self.residuals.items())
        return Family(name=name, model_types=(name,), **(dict(self) | {"residuals": added}))

    @classmethod
    def of(cls, family: Family) -> "FamilyLayout":
        fields = {name: getattr(family, name) for name in cls.model_fields}
        return cls(**(fields | {"residuals": {each.module: each.readers for each in family.residuals}}))


WeightMethod = Literal["max", "mse"]
METHOD_PATTERN = r"^(max|mse|entropy|percentile/[0-9.]+)$"  # for editors; _method judges
# strict, as YAML reads `no` as false, which is not alpha 0
Smooth = Annotated[float, Field(ge=0, le=1, strict=True)] | Literal["gain", "none"]


def parse_percentile(method: str) -> float | None:
    """Return 99.99 of "percentile/99.99", None of another method."""
    kind, _, value = method.partition("/")
    try:
        return float(value) if kind == "percentile" else None
    except ValueError:
        return None


def _method(text: str) -> str:
    percentile = parse_percentile(text)
    if text not in ("max", "mse", "entropy") and not (percentile and 50 < percentile <= 100):
        raise ValueError(
            f"method {text!r} is none of max, mse, entropy and percentile/P with P from 50 to 100, such as "
            "percentile/99.99"
        )
    return text


Method = Annotated[
    str, AfterValidator(_method), WithJsonSchema({"type": "string", "pattern": METHOD_PATTERN})
]


class ModelSection(Frozen):
    """Models that the recipe is for."""

    family: str = field(
        "Encoder family, as `qdqbench recipes list` has it; with `layout` the model type.",
        default="bert",
        json_schema_extra={"examples": [family.name for family in FAMILIES]},
    )
    layout: FamilyLayout | None = field("Layout by `recipes new`; null: a known family.", default=None)

    @model_validator(mode="after")
    def _known(self) -> "ModelSection":
        names = [family.name for family in FAMILIES]
        if self.layout is None and self.family not in names:
            raise ValueError(
                f"{self.family!r} is no family that is known here; choose from {', '.join(names)}, or give "
                "its layout, as `qdqbench recipes new` writes it"
            )
        if self.layout is not None and known_family(self.family):
            raise ValueError(f"{self.family!r} is known here; drop its layout")
        self.describe()
        return self

    def describe(self) -> None:
        if self.layout is not None:
            register_family(self.layout.family(self.family))


class Precision(Frozen):
    """Compute precision, and what a recipe promises to leave without Q/DQ."""

    compute: Literal["fp16", "fp32"] = field("Datatype of what is not INT8; scales are FP32.", default="fp16")
    never_quantize: tuple[Literal["layernorm", "softmax"], ...] = field(
        "Operators that must never be quantized: a constraint, not a setting; recipes that violate it are "
        "rejected. Must include `layernorm`; leave `softmax` out to allow INT8 attention.",
        default=("layernorm", "softmax"),
    )


class Rule(Frozen):
    """Quantize the matched linears, keep the matched modules in FP16 or FP32, or change their calibration."""

    match: str | None = field(
        "Glob on the module's name, with or without the base model's; `*` crosses dots. A rule that matches "
        "nothing is an error.",
        default=None,
        min_length=1,
    )
    role: RuleRole | None = field(
        "Role of the linear, whatever its family calls it; `encoder`: every module in a layer. With `match` "
        "only modules that both name.",
        default=None,
    )
    type: Literal["Linear", "LayerNorm", "Embedding", "Softmax", "Attention", "Residual"] | None = field(
        "Only modules of this class; null: of any.", default=None
    )
    weights: Literal["int8/per-channel", "int8/per-tensor"] | None = field(
        "INT8 weights with a scale per output channel, or one in all; with `input`.", default=None
    )
    input: Literal["int8/per-tensor"] | None = field("INT8 input with one scale; with weights.", default=None)
    precision: Literal["int8", "fp16", "fp32"] | None = field(
        "fp16 or fp32: the matched modules, and those inside of a layer or block, stay out of INT8; int8: an "
        "Attention or a Residual.",
        default=None,
    )
    method: Method | None = field("Method for these activations; null: `calibration`'s.", default=None)
    weights_method: WeightMethod | None = field("Of these linears; null: `calibration`'s.", default=None)
    smoothing: Smooth | None = field("As in `calibration`, of attention outputs too; or null.", default=None)

    @model_validator(mode="after")
    def _one_intent(self) -> "Rule":
        if self.match is None and self.role is None:
            raise ValueError("say which modules: give match, role or both")
        if (self.weights is None) != (self.input is None):
            raise ValueError("give both weights and input: a GEMM with one INT8 operand runs in FP16")
        if self.weights is not None and self.precision is not None:
            raise ValueError("give either weights and input (INT8) or precision (fp16 or fp32)")
        if self.weights is None and self.precision is None and not self.refines:
            raise ValueError(
                "give weights and input (INT8), precision (fp16 or fp32), or how to calibrate: method, "
                "weights_method, smoothing"
            )
        if self.weights is not None and self.type not in (None, "Linear"):
            raise ValueError(f"type {self.type} is protected from Q/DQ by class; only Linear becomes INT8")
        if self.precision == "int8" and self.type not in ("Attention", "Residual"):
            raise ValueError(
                "precision int8 is for type Attention and type Residual; a Linear takes weights and input"
            )
        if self.refines and self.precision in ("fp16", "fp32"):
            raise ValueError(f"precision {self.precision} needs no calibration; drop method and smoothing")
        if self.refines and self.type == "Residual":
            raise ValueError("a Residual is calibrated as the linears that read the same tensor; name those")
        if self.refines and self.type not in (None, "Linear", "Attention"):
            raise ValueError(f"type {self.type} is never quantized, so it has no calibration")
        return self

    @property
    def target(self) -> str:
        """Return what names its modules, for a message."""
        named = f"role {self.role}" if self.role else ""
        return f"{self.match!r}{named and f' with {named}'}" if self.match else named

    @property
    def kind(self) -> str | None:
        return self.type or ("Linear" if self.weights else None)

    @property
    def refines(self) -> bool:
        return any(value is not None for value in (self.method, self.weights_method, self.smoothing))


class Calibration(Frozen):
    """Data and method that set each amax."""

    split: str = field("Split that the samples are drawn from.", default="train")
    samples: Positive = field("Samples, drawn without replacement.", default=512)
    batch_size: Positive = field("Samples of a batch at most, all of one length, unpadded.", default=32)
    method: Method = field("Amax of an activation: max, mse, entropy, percentile/P (over 50).", default="max")
    weights_method: WeightMethod = field("Amax of weights: max, or mse (least squared error).", default="max")
    smoothing: Smooth = field(
        "SmoothQuant with this alpha (0 to 1), gain (that of the LayerNorm before moves into the linear) or "
        "none. It is for linears that read a LayerNorm, and for q against k in an INT8 attention. Factors "
        "are powers of two.",
        default="none",
    )
    outlier_channel_splitting: Annotated[int, Field(ge=0, le=1024, multiple_of=32)] = field(
        "Channels of each feed-forward for copies of its outlier channels; by 32, which kernels need.",
        default=0,
    )
    centering: bool | Literal["auto"] = field(
        "Move the middles of one-sided ranges to zero: of LayerNorm channels by biases, and of what the "
        "second feed-forward linear reads by a constant that is subtracted before its Q. auto: true, but "
        "false for backend onnxruntime and where `amax` is given.",
        default="auto",
    )
    bias_correction: bool = field("Add mean errors of INT8 linears to biases where it helps.", default=False)
    softmax_scale: Literal["auto", "fixed", "min-error", "row-max"] = field(
        "Scale of the INT8 softmax: fixed (1/127), min-error, row-max or auto. min-error: mean-centered V, "
        "and the amax per layer with the least error of the attention output. row-max, for backend cuda: 255 "
        "codes up to the largest probability of each row, and the attention over the sum of the codes. auto: "
        "row-max for backend cuda, else min-error.",
        default="auto",
    )
    amax: dict[str, Annotated[float, Field(gt=0, le=FP16_MAX)]] = field(
        "Amax that are given, by quantizer (MODULE.input_quantizer); the others follow from data.", default={}
    )
    seed: Annotated[int, Field(ge=0)] = field("Seed of the draw.", default=0)

    @model_validator(mode="after")
    def _given_as_it_is(self) -> "Calibration":
        changed = self.smoothing != "none" or self.outlier_channel_splitting or self.centering is True
        if self.amax and changed:
            raise ValueError(
                "amax is of tensors that nothing changed; with it set smoothing to none, "
                "outlier_channel_splitting to 0 and centering to false"
            )
        return self


class Export(Frozen):
    """Form of the ONNX file."""

    opset: Annotated[int, Field(ge=20, le=22)] = field("ONNX opset.", default=20)
    max_length: Annotated[int, Field(ge=8, le=8192)] = field(
        "Tokens of a sample, special tokens included; longer ones are cut in every stage.", default=128
    )
    weight_scales: Literal["auto", "channel", "factored"] = field(
        "Form of per-channel weights. channel: a DQ with one scale per output channel. factored: a DQ with "
        "one scale and a Mul after the MatMul; the codes are the same. auto: factored for TensorRT-RTX, "
        "channel for TensorRT.",
        default="auto",
    )
    qkv_scales: Literal["shared", "separate"] = field(
        "Scale factors of q, k and v with factored weights. shared: one factor, so the engine can fuse the "
        "GEMMs; separate: one each. With per-tensor q, k, v in an INT8 attention, shared also shares weight "
        "and output scales.",
        default="shared",
    )
    gelu: Literal["auto", "exact", "tanh"] = field(
        "GELU: the model's own, or its tanh form. auto: exact in OpenVINO, tanh elsewhere.", default="exact"
    )


class EngineSettings(Frozen):
    """Backend of the engine and its shapes: one optimization profile, several, or auto."""

    backend: BackendChoice = field(
        "Library that builds and runs the engine. auto, with a GPU: TensorRT, or TensorRT-RTX if that is "
        "not installed; `run` takes cuda where that is known to be the fastest. auto, without a GPU: "
        "OpenVINO, or ONNX Runtime if that is not installed; TensorRT-RTX builds ahead of time as well, as a "
        "proof for a GPU.",
        default="auto",
    )
    shapes: ShapesForm = field(
        "Shapes of one optimization profile, a list of several, or auto: a profile for each of a few "
        "lengths that pad the run's evaluation data least (docs/how-to/real-lengths.md).",
        default=Shapes(),
    )
    compute_capability: str | tuple[str, ...] | None = field(
        'Target of a build, as "8.9", or a list for backend cuda; null: the GPU here. Without a GPU null is '
        "8.9 for TensorRT-RTX, and for cuda all that it has.",
        default=None,
    )

    @model_validator(mode="after")
    def _some(self) -> "EngineSettings":
        if not self.shapes:
            raise ValueError("shapes is an empty list; give a mapping of batch and length, several, or auto")
        return self

    @property
    def profiles(self) -> tuple[Shapes, ...]:
        if isinstance(self.shapes, str):
            return ()
        return (self.shapes,) if isinstance(self.shapes, Shapes) else self.shapes


class GateSettings(Frozen):
    """Conditions for exit status 0."""

    max_drop: Annotated[float, Field(ge=0, le=1)] = field(
        "Largest drop of the primary metric, absolute (0.01: one point), plus two standard errors.",
        default=0.01,
    )
    min_sqnr_db: Annotated[float, Field(gt=0)] | None = field(
        "Least SQNR of the answers in every stage, dB, less two standard errors; it tells recipes apart "
        "where a metric cannot.",
        default=None,
    )
    require_int8: bool = field("Fail where a layer runs in another precision than asked.", default=True)
    min_speedup: Annotated[float, Field(gt=0)] | None = field(
        "Least speed-up over the fastest contestant without INT8, a factor, in every cell of the run's "
        "bench; not judged before `bench`. `search` judges it over the twin.",
        default=None,
    )


Weight = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Rate = Annotated[float, Field(gt=0, lt=1)]


class Training(Frozen):
    """Optimization by AdamW, and what it is judged on while it runs; the settings of `finetune`."""

    epochs: Annotated[float, Field(gt=0, le=1000)] = field("Passes over the training rows.", default=4)
    max_steps: Positive | None = field("Steps after which training ends early; null: no limit.", default=None)
    learning_rate: Rate = field("Learning rate of AdamW, after warm-up.", default=5e-5)
    batch_size: Positive = field("Samples of a step, over all GPUs and accumulated parts.", default=32)
    gradient_accumulation_steps: Positive = field("Parts of a GPU's share of the batch.", default=1)
    warmup_ratio: Fraction = field("Share of the steps in which the learning rate rises.", default=0.1)
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = field(
        "Learning rate schedule.", default="linear"
    )
    weight_decay: Weight = field("AdamW weight decay (weight matrices only).", default=0.01)
    max_grad_norm: Annotated[float, Field(gt=0)] = field("Norm that gradients are clipped to.", default=1.0)
    dropout: Fraction | None = field("Dropout of states and attention; null: the model's.", default=None)
    precision: Literal["auto", "bf16", "tf32", "fp32"] = field(
        "Arithmetic: bf16 (autocast), tf32 (where the GPU has it, else fp32), fp32, or auto (bf16 where the "
        "GPU has it). bf16 rounds as coarsely as INT8.",
        default="auto",
    )
    num_evals: Positive = field("Evaluations on the held-out rows, each with a checkpoint.", default=10)
    patience: Positive | None = field("Evaluations without gain that end it; null: none.", default=None)
    holdout: float = field("Share of the train split to evaluate on, to 1,000.", default=0.1, gt=0, le=0.5)
    seed: Annotated[int, Field(ge=0)] = field("Seed of head, held-out rows, order, dropout.", default=0)


class Distill(Frozen):
    """Weights of the parts of the loss, which compare with the FP32 model, and with the labels."""

    logits: Weight = field("Weight of the squared error of the answers, relative to their power.", default=1)
    hidden: Weight = field("Weight of layer outputs' squared error, over their power.", default=1)
    labels: Weight = field("Weight of the cross entropy with the labels, or squared error.", default=0)

    @model_validator(mode="after")
    def _some(self) -> "Distill":
        if not (self.logits or self.hidden or self.labels):
            raise ValueError("logits, hidden and labels are all 0, so there is nothing to learn from")
        return self


class Qat(Training):
    """Quantization-aware training after PTQ, with its placement; the `qat` section of a recipe."""

    epochs: Annotated[float, Field(gt=0, le=1000)] = field("Passes over the training rows.", default=3)
    max_steps: Positive | None = field("Steps after which training ends early; null: no limit.", default=1000)
    learning_rate: Rate | Literal["auto"] = field(  # type: ignore[assignment]  # one more than finetune has
        "Learning rate of AdamW, after warm-up. auto: the best of a few short trainings, each from the PTQ "
        "model; where none wins anything, the PTQ model is kept.",
        default="auto",
    )
    precision: Literal["auto", "bf16", "tf32", "fp32"] = field(
        "Arithmetic: tf32 (where the GPU has it, else fp32), fp32, bf16 (autocast), or auto (bf16 where the "
        "GPU has it). bf16 rounds as coarsely as INT8.",
        default="tf32",
    )
    dropout: Fraction | None = field("Dropout; null: the model's own. 0 suits distillation.", default=0.0)
    amax: Literal["frozen", "learned"] = field("frozen, or learned with a ratio (LSQ).", default="frozen")
    amax_learning_rate: Rate = field("Of learned amax, relative to its value.", default=1e-3)
    distill: Distill = field("Parts of the loss.", default=Distill())
    texts: str | None = field(
        "Folder, or `hub:OWNER/NAME`, whose train split is read instead of the task's, without labels.",
        default=None,
    )

    @model_validator(mode="after")
    def _no_labels(self) -> "Qat":
        if self.texts and self.distill.labels:
            raise ValueError("texts have no labels; set distill.labels to 0, or drop texts")
        return self


class Reconstruction(Frozen):
    """Training of each encoder layer to give what its FP32 original gives; the `reconstruction` section."""

    texts: str | None = field(
        "Folder, or `hub:OWNER/NAME`, whose train split is read instead of the calibration split; rows that "
        "the evaluation has are left out.",
        default=None,
    )
    samples: Positive = field("Samples of the calibration split; texts alone are read.", default=4096)
    holdout: float = field("Share that evaluates, and is never learned.", default=0.125, gt=0, le=0.5)
    batch_size: Positive = field("Samples of one step, of similar length.", default=32)
    steps: Positive = field("Steps of Adam for each layer.", default=300)
    learning_rate: Annotated[float, Field(ge=0, lt=1)] = field(
        "Learning rate, relative to the root mean square of each tensor, rounded to a power of two.",
        default=1e-3,
    )
    amax_learning_rate: Annotated[float, Field(ge=0, lt=1)] = field(
        "Of learned amax, relative to its value; 0: calibrated scales.", default=3e-3
    )
    precision: Literal["tf32", "fp32"] = field("Arithmetic; tf32 where the GPU has it.", default="tf32")
    seed: Annotated[int, Field(ge=0)] = field("Seed of the draw and of the order.", default=0)
