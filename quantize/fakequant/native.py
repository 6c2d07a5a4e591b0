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

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.core.names import name_list
from qdqbench.quantize.fakequant.learnt_scales import LOWEST_RATIO, Learnt, Table
from qdqbench.quantize.fakequant.modelopt import fake_quantize, lowest_code, prepared
from qdqbench.quantize.fakequant.native_modules import (
    SharedQuantizer,
    lengthen,
    readers_of_one_tensor,
    shorten,
)
from qdqbench.quantize.fakequant.onednn import quick_linears
from qdqbench.quantize.fakequant.quantizers import (
    enabled_quantizers,
    quantizer_kind,
    round_weight_scales,
    rounded_weights,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
    for quantizer in enabled_quantizers(model).values():
        quantizer.backend = BACKEND
        prepared(quantizer)
    groups = list(readers_of_one_tensor(model))
    for module in model.modules():
        shorten(module)
    for group in groups:
        shared = SharedQuantizer(len(group))
        for quantizer in group:
            quantizer.shared = shared


def use_modelopt(model: "PreTrainedModel") -> None:
    """Undo `use_native`: ModelOpt's modules and arithmetic, same scales; `settle` learnt ones first."""
    if learnt(model):
        raise RuntimeError("ModelOpt's quantizers know no ratios; settle(model) writes them into amax")
    _undo(model)


@contextmanager
def evaluated(model: "PreTrainedModel") -> Iterator[None]:
    """Fake quantization without gradients: torch's kernels on a GPU, ModelOpt's results to the bit on a CPU.

    On a GPU ModelOpt would first compile its own kernels, on each new machine. On a CPU its arithmetic takes
    fewer steps here.
    """
    use_native(model)
    for quantizer in enabled_quantizers(model).values():
        quantizer.exact = quantizer.amax.device.type == "cpu"
    try:
        yield
    finally:
        use_modelopt(model)


@contextmanager
def frozen(model: "PreTrainedModel") -> Iterator[None]:
    """`evaluated`, and weights rounded and laid out once: a model that only runs meanwhile."""
    with evaluated(model), rounded_weights(model), quick_linears(model.device.type, again=True):
        yield


def learn_amax(
    model: "PreTrainedModel", names: Iterable[str] | None = None, together: Iterable[Sequence[str]] = ()
) -> list[nn.Parameter]:
    """Give quantizers a learnable ratio to their calibrated amax, that starts at 1 (LSQ: `learnt_amax.py`).

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
    possible = {name: q for name, q in enabled_quantizers(model).items() if quantizer_kind(name) != "softmax"}
    wanted = set(possible if names is None else names)
    if lost := sorted(wanted - set(possible)):
        raise UserError(
            f"no scale to learn at {name_list(lost)}; name quantizers that the recipe makes INT8, other than "
            "the softmax output's"
        )
    equal = [*readers_of_one_tensor(model), *([possible[name] for name in group] for group in together)]
    groups = {id(quantizer): group for group in equal for quantizer in group}
    chosen = {id(member) for name in wanted for member in groups.get(id(possible[name]), [possible[name]])}
    items: list[Learnt] = []
    for name, quantizer in possible.items():
        if id(quantizer) in chosen and "learnt" not in quantizer.__dict__:
            items.append(item := _learnt(model, name, quantizer))
            quantizer.register_parameter(PARAMETER, item.ratio)
            for member in groups.get(id(quantizer), [quantizer]):
                member.learnt = item
    if items:
        model.register_forward_pre_hook(Table(items).expire)
    return [item.ratio for item in items]


def learnt(model: "PreTrainedModel") -> list[nn.Parameter]:
    """The ratios of `learn_amax`, in model order."""
    return [value for name, value in model.named_parameters() if name.rpartition(".")[2] == PARAMETER]


def keep_positive(model: "PreTrainedModel") -> None:
    """Hold learnt ratios at or above 2^-7, in place, after a step of the optimizer; no host sync."""
    ratios: list[torch.Tensor] = [item.ratio for table in _tables(model).values() for item in table.items]
    if ratios:
        with torch.no_grad():
            torch._foreach_clamp_min_(ratios, LOWEST_RATIO)


def settle(model: "PreTrainedModel") -> None:
    """Write learnt ratios into amax and remove them: a plain ModelOpt model with the scales of training.

    Bit for bit, as a weight's scale was rounded up to 11 significant bits all along; its amax is 127 times
    that, as calibration makes it. Without learnt ratios this is `use_modelopt`.
    """
    changed = {name: q for name, q in enabled_quantizers(model).items() if "learnt" in q.__dict__}
    with torch.no_grad():
        values = {name: q.learnt.ratio * q.learnt.amax for name, q in changed.items()}
    for name, quantizer in changed.items():
        quantizer.amax = values[name].reshape(quantizer.amax.shape)
    round_weight_scales(changed)
    for quantizer in changed.values():
        quantizer._parameters.pop(PARAMETER, None)
        del quantizer.__dict__["learnt"]
    for key in _tables(model):
        del model._forward_pre_hooks[key]
    use_modelopt(model)


def _learnt(model: "PreTrainedModel", name: str, quantizer: Any) -> Learnt:
    """A ratio of 1 for a quantizer."""
    kind, module = quantizer_kind(name), model.get_submodule(name.rpartition(".")[0])
    per_channel = quantizer.axis is not None
    if kind == "weight":
        weight: Any = module.weight
        count = weight.numel() // (len(weight) if per_channel else 1)
    else:
        count = getattr(module, "in_features", model.config.hidden_size)
    shape = (quantizer.amax.numel(),) if per_channel else ()
    return Learnt(
        nn.Parameter(torch.ones(shape, device=quantizer.amax.device)),
        quantizer,
        rounded=kind == "weight",
        low=lowest_code(quantizer),
        axis=int(quantizer.axis) if per_channel else None,
        count=count,
    )


def _tables(model: "PreTrainedModel") -> dict[int, Table]:
    """Tables of learnt scales, by the key of their hook on the model."""
    owners = {key: getattr(hook, "__self__", None) for key, hook in model._forward_pre_hooks.items()}
    return {key: owner for key, owner in owners.items() if isinstance(owner, Table)}


def _undo(model: "PreTrainedModel") -> None:
    for module in model.modules():
        lengthen(module)
    for quantizer in enabled_quantizers(model).values():
        if quantizer.backend == BACKEND:
            quantizer.backend = None
