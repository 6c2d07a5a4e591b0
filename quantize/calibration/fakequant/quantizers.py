"""ModelOpt's quantizers in a model: their names, what each rounds, and running a model with them."""

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from qdqbench.quantize.models.attention import UNROUNDED
from qdqbench.quantize.models.families.known import family_of
from qdqbench.quantize.models.inputs import select_inputs, to_device
from qdqbench.quantize.tasks.kinds.kind import LOGITS, join_outputs
from qdqbench.quantize.tasks.task import kind_of
from qdqbench.quantize.utils.arrays import Batch
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.system.quiet import unprinted

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

INT8_MAX, UINT8_MAX = 127, 255
MODELOPT = "0.47"  # `modelopt.py` in this folder uses private names of it
FP16_BITS = 11  # significant bits, the hidden one included


def list_quantizers(model: "PreTrainedModel") -> dict[str, Any]:
    """Return the enabled TensorQuantizer modules by full name, in model order."""
    from modelopt.torch.quantization.nn import TensorQuantizer

    return {n: m for n, m in model.named_modules() if isinstance(m, TensorQuantizer) and m.is_enabled}


def smooth_input(quantizer: Any, value: "torch.Tensor") -> "torch.Tensor":
    """Return what a quantizer rounds: its input, times the factors of smoothing where it has them."""
    factors = quantizer.pre_quant_scale
    return value if factors is None else value * factors


def forward(model: "PreTrainedModel", batch: Batch) -> "torch.Tensor":
    """Return answers [B, width] or [B, L, width] of one batch, on the model's device, without gradients."""
    import torch

    with torch.inference_mode():
        output = model(**to_device(select_inputs(model, batch), next(model.parameters()).device))
    return join_outputs(output, name_outputs(model))  # type: ignore[no-any-return]


@contextmanager
def hooked(
    model: "PreTrainedModel",
    names: Iterable[str],
    hook: Callable[..., Any],
    *,
    before: bool = False,
    with_kwargs: bool = False,
) -> Iterator[None]:
    """Call `hook` after each run of the named modules, or before it; its first argument is the name."""
    with ExitStack() as hooks:
        for name in names:
            module = model.get_submodule(name)
            register: Any = module.register_forward_pre_hook if before else module.register_forward_hook
            hooks.enter_context(register(partial(hook, name), with_kwargs=with_kwargs))
        yield


def name_outputs(model: "PreTrainedModel") -> Mapping[str, tuple[str, ...]]:
    name = type(model).__name__
    if name.endswith("ForMaskedLM"):
        return {"logits": ("batch", "length", "label")}
    kind = kind_of(name)
    return LOGITS if kind is None else kind.outputs


def import_modelopt() -> Any:
    """Import `modelopt.torch.quantization` without its warning on untested transformers versions.

    `torch.compile` does nothing meanwhile: to have parts for FP8 compiled would load Inductor for a second.
    UserError: another version of ModelOpt.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import modelopt
        import torch

        compiled = torch.compile
        torch.compile = _as_it_is  # type: ignore[assignment]
        try:
            import modelopt.torch.quantization as mtq
        finally:
            torch.compile = compiled
    if not modelopt.__version__.startswith(f"{MODELOPT}."):
        raise UserError(
            f"nvidia-modelopt {modelopt.__version__} is installed and qdqbench is made for {MODELOPT}: it "
            f"builds on its inside; run pip install 'nvidia-modelopt~={MODELOPT}.0'"
        )
    return mtq


def _as_it_is(function: Any = None, **_: Any) -> Any:
    """Stand in for `torch.compile`; compile nothing."""
    return _as_it_is if function is None else function


@contextmanager
def _silent() -> Iterator[None]:
    """Silence what ModelOpt prints, and its warning where several processes train together."""
    with unprinted():
        warnings.filterwarnings("ignore", message="Distributed training is initialized")
        yield


def round_weight_scales(quantizers: dict[str, Any]) -> None:
    """Round weight scales up to FP16's 11 significant bits, so that none of it is lost in FP16.

    The factored form multiplies by the scales in FP16: with these that product rounds once and not twice. A
    scale grows by at most one part in 1,024, so nothing is clipped.
    """
    for name, quantizer in quantizers.items():
        if get_quantizer_kind(name) == "weight" and quantizer.amax.isfinite().all():
            mantissa, exponent = (quantizer.amax / INT8_MAX).frexp()
            scale = (mantissa * 2**FP16_BITS).ceil().ldexp(exponent - FP16_BITS)
            quantizer.amax = scale * INT8_MAX  # 7 and 11 bits: exact in FP32


QuantizerKind = Literal["weight", "input", "query", "key", "value", "softmax", "residual"]

_KINDS: dict[str, QuantizerKind] = {
    "weight_quantizer": "weight",
    "input_quantizer": "input",
    "q_bmm_quantizer": "query",
    "k_bmm_quantizer": "key",
    "v_bmm_quantizer": "value",
    "p_bmm_quantizer": "softmax",
    "residual_quantizer": "residual",
}


def get_quantizer_kind(name: str) -> QuantizerKind:
    return _KINDS[name.rpartition(".")[2]]


@contextmanager
def quantizers_off(model: "PreTrainedModel") -> Iterator[None]:
    """Run the model unquantized; without an amax ModelOpt would quantize by each batch's own range."""
    enabled = list(list_quantizers(model).values())
    for quantizer in enabled:
        quantizer.disable()
    try:
        yield
    finally:
        for quantizer in enabled:
            quantizer.enable()


@contextmanager
def use_rounded_weights(model: "PreTrainedModel", linears: Iterable[str] | None = None) -> Iterator[None]:
    """Round the weights of quantized linears (all, if None) once, and to the codes that the graph stores.

    ModelOpt multiplies by a reciprocal where the graph divides: FP16 weights are often halfway between two
    codes, and hundreds of them got the other code. What reads a weight past its quantizer, as DeBERTa's
    relative positions do, finds it as it was.
    """
    import torch

    names = [n.rpartition(".")[0] for n in list_quantizers(model) if get_quantizer_kind(n) == "weight"]
    chosen = set(names if linears is None else linears)
    modules: list[Any] = [model.get_submodule(name) for name in names if name in chosen]
    plain = [linear.weight.data for linear in modules]
    with torch.inference_mode():
        for linear in modules:
            linear.__dict__[UNROUNDED] = linear.weight.data
            linear.weight.data = round_weight(linear.weight.detach(), linear.weight_quantizer)
            linear.weight_quantizer.disable()
    try:
        yield
    finally:
        for linear, weight in zip(modules, plain, strict=True):
            linear.weight.data = weight
            linear.__dict__.pop(UNROUNDED, None)
            linear.weight_quantizer.enable()


def round_weight(weight: "torch.Tensor", quantizer: Any) -> "torch.Tensor":
    """Round a weight [N, K] to the codes of the graph, without the kernels that ModelOpt compiles."""
    if "learned" in quantizer.__dict__:
        return quantizer(weight).clone()  # type: ignore[no-any-return]
    amax = quantizer.amax.float()
    held = amax.where(amax > 2**-24, math.inf)  # else codes of 0, as ModelOpt's
    codes = (weight / (held / INT8_MAX)).round_().clamp_(-INT8_MAX - 1, INT8_MAX)
    steps = amax.new_full(amax.shape, INT8_MAX).div_(amax)  # a number divided by a tensor is rounded twice
    rounded: torch.Tensor = codes.div_(steps.masked_fill_(held.isinf(), 1.0)).to(weight.dtype)
    return rounded


RESIDUAL_QUANTIZER = "residual_quantizer"


@contextmanager
def register_residuals(model: "PreTrainedModel", wanted: Collection[str] = ("all",)) -> Iterator[None]:
    """Let ModelOpt give a model's residuals a quantizer while the block runs, and keep its own attention.

    In `LayerNorm(dense(h) + x)` the tensor x is also the input of other linears: of q, k and v, or of the
    first feed-forward linear. Its quantizer rounds x exactly as theirs do, with the same amax and the same
    factors of smoothing, which are divided out after it. So all of them read one INT8 tensor, the only one
    that the LayerNorm before has to write; the placement is that of NVIDIA's BERT QAT. A scale of its own
    would leave the engine with two tensors (docs/explanation/the-graph.md).

    Not for good: every such model that the process quantizes later would get them, and ModelOpt restores a
    saved state only where the same classes are registered. So restore one with this too.
    Nothing is registered where no module's residual is `wanted` in INT8. ModelOpt rewrites the source of an
    attention that transformers' interface does not call, and fails on some: such a one stays as it is.
    """
    mtq, family = import_modelopt(), family_of(model.config)
    from modelopt.torch.quantization.nn import TensorQuantizer
    from modelopt.torch.quantization.plugins.custom import CUSTOM_MODEL_PLUGINS
    from modelopt.torch.quantization.plugins.huggingface import register_hf_attentions_on_the_fly

    class QuantResidual:
        def _setup(self) -> None:
            self.residual_quantizer = TensorQuantizer()

        def forward(self, hidden_states: "torch.Tensor", input_tensor: "torch.Tensor") -> "torch.Tensor":
            rounded = quantize_residual(self.residual_quantizer, input_tensor)
            return super().forward(hidden_states, rounded)  # type: ignore[misc,no-any-return]

    classes = family.residual_classes(model) if wanted else ()
    if family.attention is None:
        CUSTOM_MODEL_PLUGINS.discard(register_hf_attentions_on_the_fly)
    for adder in classes:
        mtq.register(adder, QuantResidual)
    try:
        yield
    finally:
        CUSTOM_MODEL_PLUGINS.add(register_hf_attentions_on_the_fly)
        for adder in classes:
            mtq.unregister(adder)


def quantize_residual(quantizer: Any, value: "torch.Tensor") -> "torch.Tensor":
    """Quantize a residual and take the factors of smoothing out: powers of two, so both are exact."""
    rounded: torch.Tensor = quantizer(value)
    factors = quantizer.pre_quant_scale
    return rounded if factors is None else rounded * (1 / factors)
