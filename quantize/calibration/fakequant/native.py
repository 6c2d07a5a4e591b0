"""Fake quantization for training: torch's own kernels, one forward and one backward for each quantizer.

ModelOpt's quantizers keep the model's scales; what computes with them is replaced while training, and put
back afterwards. What is replaced, and why:

- The arithmetic, by a quant backend that ModelOpt calls. Its own compiles a CUDA extension on each new
  machine, and is a chain of small operations without one.
- The gradient. ModelOpt 0.47 lets it through where a value was clipped; here it is 0 there (Bengio et al.
  2013, arXiv 1308.3432; with clipping: Krishnamoorthi 2018, arXiv 1806.08342, section 2.4).
- The classes around it, whose Python takes longer than the kernels of a small layer. A linear is run by a
  class of one line, and a module that has nothing to quantize is what it was before ModelOpt.

`tests/tools/benchmark_qat.py` measures all three together. In which type is rounded, and how: `modelopt.py`.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from qdqbench.quantize.calibration.fakequant.learned_scales import LOWEST_RATIO, Learned, ScaleTable
from qdqbench.quantize.calibration.fakequant.modelopt import (
    ShortQuantizer,
    fake_quantize,
    forget_scale,
    get_lowest_code,
    prepare_scales,
)
from qdqbench.quantize.calibration.fakequant.onednn import use_quick_linears
from qdqbench.quantize.calibration.fakequant.quantizers import (
    RESIDUAL_QUANTIZER,
    get_quantizer_kind,
    import_modelopt,
    list_quantizers,
    quantize_residual,
    round_weight_scales,
    use_rounded_weights,
)
from qdqbench.quantize.models.families.known import family_of
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.names import name_list

import_modelopt()

from modelopt.torch.quantization.nn import QuantModule, TensorQuantizer  # noqa: E402

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class FakeQuantLinear(nn.Linear):
    """A linear whose input and weight are quantized."""

    input_quantizer: TensorQuantizer
    weight_quantizer: TensorQuantizer

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the output of the linear."""
        return functional.linear(self.input_quantizer(inputs), self.weight_quantizer(self.weight), self.bias)


@functools.cache
def _residual_class(original: type[nn.Module]) -> type[nn.Module]:
    """Return the class of a module that adds a residual, and quantizes it before."""

    def forward(self: Any, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> Any:
        rounded = quantize_residual(self.residual_quantizer, input_tensor)
        return original.forward(self, hidden_states, rounded)

    return type(f"Native{original.__name__}", (original,), {"forward": forward})


class _Last:
    """The tensor that was quantized last."""

    inputs: torch.Tensor | None = None
    output: torch.Tensor | None = None
    state: Any = None
    served: frozenset[int] = frozenset()

    def __deepcopy__(self, _: Any) -> "_Last":
        """Copy a model; the copy has quantized nothing yet."""
        return _Last()


class SharedQuantizer:
    """Quantizes a tensor once for several quantizers of equal scale, as an engine does.

    It saves their kernels, and the copies that they would keep for the backward pass.
    """

    def __init__(self, readers: int) -> None:
        self.readers = readers
        self.last = _Last()

    def quantized(self, inputs: torch.Tensor, quantizer: Any) -> torch.Tensor:
        """Quantize `inputs`; return the same tensor again for another reader of it."""
        if torch.compiler.is_compiling():
            return quantizer.quantized(inputs)  # type: ignore[no-any-return]
        learned, last = quantizer.__dict__.get("learned"), self.last
        scale = prepare_scales(quantizer).version if learned is None else learned.seen
        version = None if inputs.is_inference() else inputs._version  # which inference tensors do not count
        state = (version, torch.is_grad_enabled(), scale)
        if inputs is not last.inputs or state != last.state or id(quantizer) in last.served:
            last.inputs, last.state, last.served = inputs, state, frozenset()
            last.output = quantizer.quantized(inputs)
        output = last.output
        last.served |= {id(quantizer)}
        if len(last.served) == self.readers:
            last.inputs = last.output = None  # not held for longer than needed
        return output  # type: ignore[return-value]


def shorten(module: nn.Module) -> None:
    """Give a module the shortest class that does what it does now."""
    short: type[nn.Module] | None = None
    if type(module) is TensorQuantizer:
        short = ShortQuantizer
    elif isinstance(module, QuantModule):
        quantizers = {n: m for n, m in module.named_children() if isinstance(m, TensorQuantizer)}
        active = {name for name, quantizer in quantizers.items() if quantizer.is_enabled}
        original = module.get_original_cls_by_level(level=0)
        scaled = any(quantizer.pre_quant_scale is not None for quantizer in quantizers.values())
        if not active and not scaled:
            short = original
        elif original is nn.Linear and active <= {"input_quantizer", "weight_quantizer"}:
            short = FakeQuantLinear
        elif active == {RESIDUAL_QUANTIZER}:
            short = _residual_class(original)
    if short is not None:
        module.__dict__["_modelopt_class"] = type(module)
        module.__class__ = short  # as ModelOpt itself made it what it is


def lengthen(module: nn.Module) -> None:
    """Undo `shorten`."""
    original = module.__dict__.pop("_modelopt_class", None)
    if original is not None:
        module.__class__ = original
    if isinstance(module, TensorQuantizer):
        forget_scale(module)
        module.__dict__.pop("shared", None)
        module.__dict__.pop("exact", None)


def group_readers(model: "PreTrainedModel") -> Iterator[list[Any]]:
    """Return the quantizers of one tensor with equal scales and factors: q, k, v and an INT8 residual."""
    found, family = list_quantizers(model), family_of(model.config)
    for name, _ in model.named_modules():
        readers = [f"{linear}.input_quantizer" for linear in family.residual_readers(name)]
        group = [found[key] for key in (*readers, f"{name}.{RESIDUAL_QUANTIZER}") if key in found]
        if len(group) > 1 and set(readers) <= set(found) and all(_equal(group[0], q) for q in group[1:]):
            yield group


def _equal(one: Any, other: Any) -> bool:
    pairs = [(one.amax, other.amax), (one.pre_quant_scale, other.pre_quant_scale)]
    return all((a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in pairs)


BACKEND = "qdqbench_native"
PARAMETER = "amax_ratio"


def use_native(model: "PreTrainedModel") -> None:
    """Let torch's kernels do the fake quantization of a calibrated model, in place.

    Scales are prepared now, and anew after `amax` was set or loaded or the model was moved. Quantizers that
    are enabled later need another call. Do not export the model like this: `use_modelopt` first.
    """
    from modelopt.torch.quantization.nn.modules import tensor_quantizer

    if not tensor_quantizer.is_registered_quant_backend(BACKEND):
        tensor_quantizer.register_quant_backend(BACKEND, fake_quantize)
    _undo(model)
    for quantizer in list_quantizers(model).values():
        quantizer.backend = BACKEND
        prepare_scales(quantizer)
    groups = list(group_readers(model))
    for module in model.modules():
        shorten(module)
    for group in groups:
        shared = SharedQuantizer(len(group))
        for quantizer in group:
            quantizer.shared = shared


def use_modelopt(model: "PreTrainedModel") -> None:
    """Undo `use_native`: ModelOpt's modules and arithmetic, same scales; call `settle_learned` first."""
    if list_learned(model):
        raise RuntimeError(
            "ModelOpt's quantizers know no ratios; settle_learned(model) writes them into amax"
        )
    _undo(model)


@contextmanager
def use_evaluation(model: "PreTrainedModel") -> Iterator[None]:
    """Fake-quantize without gradients: by torch's kernels on a GPU, ModelOpt's results to the bit on a CPU.

    On a GPU ModelOpt would first compile its own kernels, on each new machine. On a CPU its arithmetic takes
    fewer steps here.
    """
    use_native(model)
    for quantizer in list_quantizers(model).values():
        quantizer.exact = quantizer.amax.device.type == "cpu"
    try:
        yield
    finally:
        use_modelopt(model)


@contextmanager
def use_frozen_weights(model: "PreTrainedModel") -> Iterator[None]:
    """Do as `use_evaluation`, with weights rounded and laid out once: the model only runs meanwhile."""
    with use_evaluation(model), use_rounded_weights(model), use_quick_linears(model.device.type, again=True):
        yield


def learn_amax(
    model: "PreTrainedModel", names: Iterable[str] | None = None, together: Iterable[Sequence[str]] = ()
) -> list[nn.Parameter]:
    """Give quantizers a learnable ratio to their calibrated amax, that starts at 1 (`learned_scales.py`).

    A ratio is the parameter `amax_ratio` of its quantizer, () or [channels], FP32; it should not decay.
    Quantizers of one tensor share one, that of the first of them, if they have equal scales: q, k and v,
    whose GEMMs could not be merged otherwise, and an INT8 residual. The softmax output, whose range is
    known, has none. The model runs with `use_native` from here on.

    Args:
        model: calibrated fake-quant model.
        names: quantizers, by full name; all if None.
        together: groups of quantizers with one amax that stays one.

    Returns:
        The parameters, in model order; they stay positive only if `keep_positive` sees to it.

    Raises:
        UserError: names that are no enabled quantizer, or the softmax output's.
    """
    use_native(model)
    possible = {
        name: q for name, q in list_quantizers(model).items() if get_quantizer_kind(name) != "softmax"
    }
    wanted = set(possible if names is None else names)
    if lost := sorted(wanted - set(possible)):
        raise UserError(
            f"no scale to learn at {name_list(lost)}; name quantizers that the recipe makes INT8, other than "
            "the softmax output's"
        )
    equal = [*group_readers(model), *([possible[name] for name in group] for group in together)]
    groups = {id(quantizer): group for group in equal for quantizer in group}
    chosen = {id(member) for name in wanted for member in groups.get(id(possible[name]), [possible[name]])}
    items: list[Learned] = []
    for name, quantizer in possible.items():
        if id(quantizer) in chosen and "learned" not in quantizer.__dict__:
            items.append(item := _learned(model, name, quantizer))
            quantizer.register_parameter(PARAMETER, item.ratio)
            for member in groups.get(id(quantizer), [quantizer]):
                member.learned = item
    if items:
        model.register_forward_pre_hook(ScaleTable(items).expire)
    return [item.ratio for item in items]


def list_learned(model: "PreTrainedModel") -> list[nn.Parameter]:
    """Return the ratios of `learn_amax`, in model order."""
    return [value for name, value in model.named_parameters() if name.rpartition(".")[2] == PARAMETER]


def keep_positive(model: "PreTrainedModel") -> None:
    """Hold learned ratios at or above 2^-7, in place, after a step of the optimizer; no host sync."""
    ratios: list[torch.Tensor] = [item.ratio for table in _tables(model).values() for item in table.items]
    if ratios:
        with torch.no_grad():
            torch._foreach_clamp_min_(ratios, LOWEST_RATIO)


def settle_learned(model: "PreTrainedModel") -> None:
    """Write learned ratios into amax and remove them: a plain ModelOpt model with the scales of training.

    Bit for bit, as a weight's scale was rounded up to 11 significant bits all along; its amax is 127 times
    that, as calibration makes it. Without learned ratios this is `use_modelopt`.
    """
    changed = {name: q for name, q in list_quantizers(model).items() if "learned" in q.__dict__}
    with torch.no_grad():
        values = {name: q.learned.ratio * q.learned.amax for name, q in changed.items()}
    for name, quantizer in changed.items():
        quantizer.amax = values[name].reshape(quantizer.amax.shape)
    round_weight_scales(changed)
    for quantizer in changed.values():
        quantizer._parameters.pop(PARAMETER, None)
        del quantizer.__dict__["learned"]
    for key in _tables(model):
        del model._forward_pre_hooks[key]
    use_modelopt(model)


def _learned(model: "PreTrainedModel", name: str, quantizer: Any) -> Learned:
    """Return a ratio of 1 for a quantizer."""
    kind, module = get_quantizer_kind(name), model.get_submodule(name.rpartition(".")[0])
    per_channel = quantizer.axis is not None
    if kind == "weight":
        weight: Any = module.weight
        count = weight.numel() // (len(weight) if per_channel else 1)
    else:
        count = getattr(module, "in_features", model.config.hidden_size)
    shape = (quantizer.amax.numel(),) if per_channel else ()
    return Learned(
        nn.Parameter(torch.ones(shape, device=quantizer.amax.device)),
        quantizer,
        rounded=kind == "weight",
        low=get_lowest_code(quantizer),
        axis=int(quantizer.axis) if per_channel else None,
        count=count,
    )


def _tables(model: "PreTrainedModel") -> dict[int, ScaleTable]:
    """Return the tables of learned scales, by the key of their hook on the model."""
    owners = {key: getattr(hook, "__self__", None) for key, hook in model._forward_pre_hooks.items()}
    return {key: owner for key, owner in owners.items() if isinstance(owner, ScaleTable)}


def _undo(model: "PreTrainedModel") -> None:
    for module in model.modules():
        lengthen(module)
    for quantizer in list_quantizers(model).values():
        if quantizer.backend == BACKEND:
            quantizer.backend = None
