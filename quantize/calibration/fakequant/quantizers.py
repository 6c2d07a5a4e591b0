"""ModelOpt's quantizers in a model: which there are, what each rounds, and how a model runs with them."""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from qdqbench.quantize.models.attention import UNROUNDED
from qdqbench.quantize.models.inputs import select_inputs
from qdqbench.quantize.tasks.task import kind_of
from qdqbench.quantize.tasks.types.kind import LOGITS, join_outputs
from qdqbench.quantize.utils.arrays import Batch
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.system.quiet import unprinted

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

INT8_MAX = 127
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

    from qdqbench.quantize.calibration.fakequant.onednn import use_quick_linears

    device = next(model.parameters()).device
    with torch.inference_mode(), use_quick_linears(device.type):
        output = model(
            **{
                name: torch.from_numpy(array).to(device)
                for name, array in select_inputs(model, batch).items()
            }
        )
    return join_outputs(output, name_outputs(model))  # type: ignore[no-any-return]


def name_outputs(model: "PreTrainedModel") -> Mapping[str, tuple[str, ...]]:
    """Return the names of a model's outputs, and of their axes."""
    kind = kind_of(type(model).__name__)
    return LOGITS if kind is None else kind.outputs


def import_modelopt() -> Any:
    """Import `modelopt.torch.quantization` without its warning on untested transformers versions.

    What it has for FP8 is not compiled by torch: to say so would load Inductor, which takes a second.

    Raises:
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
    import torch

    for name, quantizer in quantizers.items():
        if get_quantizer_kind(name) != "weight" or not torch.isfinite(quantizer.amax).all():
            continue
        mantissa, exponent = torch.frexp(quantizer.amax / INT8_MAX)
        scale = torch.ldexp(torch.ceil(mantissa * 2**FP16_BITS), exponent - FP16_BITS)
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
    """Return the purpose of a quantizer, by its full name."""
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
    """Round the weights of quantized linears (all, if None) once, and not at every batch.

    What reads a weight past its quantizer, as DeBERTa's relative positions do, finds it as it was.
    """
    import torch

    names = [n.rpartition(".")[0] for n in list_quantizers(model) if get_quantizer_kind(n) == "weight"]
    wanted = set(names if linears is None else linears)
    found: list[Any] = [model.get_submodule(name) for name in names if name in wanted]
    plain = [linear.weight.data for linear in found]
    with torch.inference_mode():
        for linear in found:
            linear.__dict__[UNROUNDED] = linear.weight.data
            linear.weight.data = linear.weight_quantizer(linear.weight.detach()).clone()
            linear.weight_quantizer.disable()
    try:
        yield
    finally:
        for linear, weight in zip(found, plain, strict=True):
            linear.weight.data = weight
            linear.__dict__.pop(UNROUNDED, None)
            linear.weight_quantizer.enable()
