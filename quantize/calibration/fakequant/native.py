"""Fake quantization for training: torch's own kernels, one forward and one backward for each quantizer.

ModelOpt's quantizers keep the model's scales. Replaced while training, and put back afterwards, are:

- the arithmetic, by a quant backend that ModelOpt calls. Its own compiles a CUDA extension on each machine;
- the gradient. ModelOpt 0.47 lets it through where a value was clipped; here it is 0 there (Bengio et al.
  2013, arXiv 1308.3432; with clipping: Krishnamoorthi 2018, arXiv 1806.08342, section 2.4);
- the classes around it, whose Python takes longer than the kernels of a small layer.

Learned scales are LSQ (Esser et al. 2020, arXiv 1902.08153) on the ratio of a scale to its calibrated one.
With v the input and s the scale, the gradient of the output to s is (output - v * inside) / s (equation 3).
For a ratio r it is times s / r, and 1 / sqrt(N * high) (section 2.2). N is the number of values that share
the scale in a weight, and of the features of one token in an activation. So nothing depends on how a
batch is spread over devices. Rounding a weight's scale up is passed straight through.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from qdqbench.quantize.calibration.fakequant import modelopt
from qdqbench.quantize.calibration.fakequant import quantizers as fake
from qdqbench.quantize.models.families.known import family_of

fake.import_modelopt()

from modelopt.torch.quantization.nn import QuantModule, TensorQuantizer  # noqa: E402

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DROPPED_BITS = 24 - fake.FP16_BITS  # of FP32's significant bits
LOWEST_RATIO = 2.0**-7  # one code of the calibrated scale
BACKEND = "qdqbench_native"
PARAMETER = "amax_ratio"
MEAN = "input_mean"  # buffer of a linear in training, [K]


def round_up(scale: torch.Tensor) -> torch.Tensor:
    """Round positive FP32 scales up, in place, to 11 significant bits, as `round_weight_scales` does."""
    low = (1 << DROPPED_BITS) - 1
    scale.view(torch.int32).add_(low).bitwise_and_(~low)
    return scale


@torch.inference_mode(False)
def _make_constant(value: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((1,), value, dtype=dtype, device=device)


_known_constant = functools.cache(_make_constant)


def _constant(value: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    make = _make_constant if torch.compiler.is_compiling() else _known_constant
    return make(value, dtype, device)


class _LearnedQuantize(torch.autograd.Function):
    """Fake quantization with a gradient to the input and to the ratio of the scale."""

    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917  (tensors first, and no objects: torch.compile)
        ctx: Any,
        inputs: torch.Tensor,
        ratio: torch.Tensor,
        scale: torch.Tensor,
        gain: torch.Tensor,
        axis: int | None,
        low: int,
    ) -> torch.Tensor:
        if axis is None:
            zero = _constant(0, torch.int32, scale.device)
            on = _constant(1, torch.int64, scale.device)
            output, inside = torch._fake_quantize_per_tensor_affine_cachemask_tensor_qparams(
                inputs, scale, zero, on, low, fake.INT8_MAX
            )
        else:  # an integer zero point is checked by the host
            zero = _constant(0, torch.float32, scale.device).expand_as(scale)
            output, inside = torch.ops.aten.fake_quantize_per_channel_affine_cachemask(
                inputs, scale, zero, axis, low, fake.INT8_MAX
            )
        ctx.save_for_backward(inputs, output, inside, gain)
        ctx.axis = axis
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        inputs, output, inside, gain = ctx.saved_tensors
        to_inputs = gradient * inside if ctx.needs_input_grad[0] else None
        to_ratio = None
        if ctx.needs_input_grad[1]:
            terms = gradient * torch.addcmul(output, inputs, inside, value=-1)
            if ctx.axis is None:
                total = terms.sum(dtype=torch.float32)
            else:
                others = [axis for axis in range(terms.ndim) if axis != ctx.axis]
                total = terms.sum(dim=others, dtype=torch.float32)
            to_ratio = total * gain
        return to_inputs, to_ratio, None, None, None, None


_quantize: Any = _LearnedQuantize.apply


@dataclass(eq=False)
class Learned:
    """One learned ratio, of a quantizer or of several that must stay equal."""

    ratio: nn.Parameter  # () or [channels]
    quantizer: Any  # that holds the calibrated amax
    rounded: bool  # a weight's
    low: int
    axis: int | None
    count: int  # N of the paper

    @property
    def amax(self) -> torch.Tensor:
        """As calibrated, of the ratio's shape."""
        return modelopt.get_stored_amax(self.quantizer).float().reshape(self.ratio.shape)

    def quantized(self, inputs: torch.Tensor) -> torch.Tensor:
        gain = (self.count * fake.INT8_MAX) ** -0.5 / self.ratio.detach()  # gradient scale of the paper
        output: torch.Tensor = _quantize(inputs, self.ratio, self.scale, gain, self.axis, self.low)
        return output

    @property
    def scale(self) -> torch.Tensor:
        """The present scale, of the ratio's shape."""
        scale = self.ratio.detach() * self.amax / fake.INT8_MAX
        return round_up(scale) if self.rounded else scale

    @property
    def seen(self) -> tuple[int, int]:
        """Changes when the ratio is loaded, moved or stepped; a fused optimizer leaves no trace, though."""
        return self.ratio._version, self.ratio.data_ptr()


class FakeQuantLinear(nn.Linear):
    input_quantizer: TensorQuantizer
    weight_quantizer: TensorQuantizer

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs, mean = self.input_quantizer(inputs), self._buffers.get(MEAN)
        inputs = inputs if mean is None else inputs - mean
        return functional.linear(inputs, self.weight_quantizer(self.weight), self.bias)


@torch.no_grad()
def take_means(model: "PreTrainedModel", run: Callable[[], object]) -> None:
    """Let the biases of linears have what their weights make of the mean of their inputs, in place.

    Weights are then trained on what differs from the mean: neither a step nor the rounding of a row of
    weights moves the mean of its output. Inputs that are far from zero, as after centering, would else
    drown all other gradients. `run` runs the model on samples; `use_native` before, `give_means` afterwards.
    """
    sums: dict[FakeQuantLinear, tuple[torch.Tensor, int]] = {}

    def add(_: str, linear: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        values = linear.input_quantizer(inputs[0]).flatten(0, -2)
        total, count = sums.get(linear, (0.0, 0))
        sums[linear] = total + values.sum(dim=0), count + len(values)

    linears: dict[str, Any] = {n: m for n, m in model.named_modules() if isinstance(m, FakeQuantLinear)}
    names = [n for n, m in linears.items() if m.bias is not None and m.bias.requires_grad]
    with fake.hooked(model, names, add, before=True):
        run()
    for linear, (total, count) in sums.items():
        linear.register_buffer(MEAN, total / count, persistent=False)
        linear.bias.add_(linear.weight_quantizer(linear.weight) @ linear.get_buffer(MEAN))


@torch.no_grad()
def give_means(model: "PreTrainedModel") -> None:
    """Undo `take_means`, of the weights that there are now."""
    for linear in model.modules():
        if isinstance(linear, FakeQuantLinear) and MEAN in linear._buffers:
            linear.bias.sub_(linear.weight_quantizer(linear.weight) @ linear.get_buffer(MEAN))
            del linear._buffers[MEAN]
            linear._non_persistent_buffers_set.discard(MEAN)


@functools.cache
def _residual_class(original: type[nn.Module]) -> type[nn.Module]:

    def forward(self: Any, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> Any:
        rounded = fake.quantize_residual(self.residual_quantizer, input_tensor)
        return original.forward(self, hidden_states, rounded)

    return type(f"Native{original.__name__}", (original,), {"forward": forward})


class SharedQuantizer:
    """Quantizes a tensor once for several quantizers of equal scale, as an engine does; saves kernels."""

    def __init__(self, readers: int) -> None:
        self.readers = readers
        self.inputs: torch.Tensor | None = None  # quantized last
        self.output: torch.Tensor | None = None
        self.state: Any = None
        self.served: frozenset[int] = frozenset()

    def __deepcopy__(self, _: Any) -> "SharedQuantizer":
        return SharedQuantizer(self.readers)

    def quantized(self, inputs: torch.Tensor, quantizer: Any) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return quantizer.quantized(inputs)  # type: ignore[no-any-return]
        learned = quantizer.__dict__.get("learned")
        scale = modelopt.prepare_scales(quantizer).version if learned is None else learned.seen
        version = None if inputs.is_inference() else inputs._version  # which inference tensors do not count
        state = (version, torch.is_grad_enabled(), scale)
        if inputs is not self.inputs or state != self.state or id(quantizer) in self.served:
            self.inputs, self.state, self.served = inputs, state, frozenset()
            self.output = quantizer.quantized(inputs)
        output = self.output
        self.served |= {id(quantizer)}
        if len(self.served) == self.readers:
            self.inputs = self.output = None  # not held for longer than needed
        return output  # type: ignore[return-value]


def _shorten(module: nn.Module) -> None:
    """Give a module the shortest class that does what it does now."""
    short: type[nn.Module] | None = None
    if type(module) is TensorQuantizer:
        short = modelopt.ShortQuantizer
    elif isinstance(module, QuantModule):
        quantizers = {n: m for n, m in module.named_children() if isinstance(m, TensorQuantizer)}
        active = {name for name, quantizer in quantizers.items() if quantizer.is_enabled}
        original = module.get_original_cls_by_level(level=0)
        scaled = any(quantizer.pre_quant_scale is not None for quantizer in quantizers.values())
        if not active and not scaled:
            short = original
        elif original is nn.Linear and active <= {"input_quantizer", "weight_quantizer"}:
            short = FakeQuantLinear
        elif active == {fake.RESIDUAL_QUANTIZER}:
            short = _residual_class(original)
    if short is not None:
        module.__dict__["_modelopt_class"] = type(module)
        module.__class__ = short  # as ModelOpt itself made it what it is


def _group_readers(model: "PreTrainedModel") -> Iterator[list[Any]]:
    """Return the quantizers of one tensor with equal scales and factors: q, k, v and an INT8 residual."""
    enabled, family = fake.list_quantizers(model), family_of(model.config)
    for name, _ in model.named_modules():
        readers = [f"{linear}.input_quantizer" for linear in family.residual_readers(name)]
        group = [enabled[key] for key in (*readers, f"{name}.{fake.RESIDUAL_QUANTIZER}") if key in enabled]
        if len(group) > 1 and set(readers) <= set(enabled) and all(_equal(group[0], q) for q in group[1:]):
            yield group


def _equal(one: Any, other: Any) -> bool:
    pairs = [(one.amax, other.amax), (one.pre_quant_scale, other.pre_quant_scale)]
    return all((a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in pairs)


def use_native(model: "PreTrainedModel") -> None:
    """Let torch's kernels do the fake quantization of a calibrated model, in place.

    Scales are prepared now, and again after `amax` was set or loaded or the model was moved. Quantizers that
    are enabled later need another call. Do not export the model like this: `use_modelopt` first.
    """
    _undo(model)
    quantizers = fake.list_quantizers(model).values()
    modelopt.use_backend(BACKEND, modelopt.fake_quantize, quantizers)
    for quantizer in quantizers:
        modelopt.prepare_scales(quantizer)
    groups = list(_group_readers(model))
    for module in model.modules():
        _shorten(module)
    for group in groups:
        shared = SharedQuantizer(len(group))
        for quantizer in group:
            quantizer.shared = shared


def use_modelopt(model: "PreTrainedModel") -> None:
    """Undo `use_native`: ModelOpt's modules and arithmetic, same scales; call `settle_learned` first."""
    if list_learned(model) or any(MEAN in module._buffers for module in model.modules()):
        raise RuntimeError(
            "ModelOpt's modules know no ratios and no means; settle_learned(model) writes them into amax "
            "and biases"
        )
    _undo(model)


def _undo(model: "PreTrainedModel") -> None:
    for module in model.modules():
        original = module.__dict__.pop("_modelopt_class", None)
        if original is not None:
            module.__class__ = original
        if isinstance(module, TensorQuantizer):
            modelopt.forget_scale(module)
            module.__dict__.pop("shared", None)
            module.__dict__.pop("exact", None)
            module.backend = None if module.backend == BACKEND else module.backend


@contextmanager
def use_evaluation(model: "PreTrainedModel") -> Iterator[None]:
    """Fake-quantize without gradients: by torch's kernels on a GPU, ModelOpt's results to the bit on a CPU.

    ModelOpt itself would first compile its own kernels on a GPU, and takes more steps on a CPU.
    """
    use_native(model)
    for quantizer in fake.list_quantizers(model).values():
        quantizer.exact = quantizer.amax.device.type == "cpu"
    try:
        yield
    finally:
        use_modelopt(model)


@contextmanager
def use_frozen_weights(model: "PreTrainedModel") -> Iterator[None]:
    """Do as `use_evaluation`, with weights rounded once: the model only runs meanwhile."""
    with use_evaluation(model), fake.use_rounded_weights(model):
        yield


def learn_amax(model: "PreTrainedModel", together: Iterable[Sequence[str]] = ()) -> list[nn.Parameter]:
    """Give the quantizers of a calibrated model a learnable ratio to their amax, that starts at 1.

    A ratio is the parameter `amax_ratio` of its quantizer, () or [channels], FP32; it should not decay.
    Quantizers of one tensor share one, that of the first of them, if they have equal scales: q, k and v,
    whose GEMMs could not be merged otherwise, and an INT8 residual; so do the groups of names in `together`.
    The softmax output, whose range is known, has none. The model runs with `use_native` from here on.
    Returns the parameters, in model order; they stay positive only if `keep_positive` sees to it.
    """
    use_native(model)
    possible = {
        n: q for n, q in fake.list_quantizers(model).items() if fake.get_quantizer_kind(n) != "softmax"
    }
    given = ([possible[name] for name in names if name in possible] for names in together)
    equal = [*_group_readers(model), *given]
    groups = {id(quantizer): group for group in equal for quantizer in group}
    for name, quantizer in possible.items():
        if "learned" not in quantizer.__dict__:
            learned = _make_learned(model, name, quantizer)
            quantizer.register_parameter(PARAMETER, learned.ratio)
            for member in groups.get(id(quantizer), [quantizer]):
                member.learned = learned
    return list_learned(model)


def _make_learned(model: "PreTrainedModel", name: str, quantizer: Any) -> Learned:
    kind, module = fake.get_quantizer_kind(name), model.get_submodule(name.rpartition(".")[0])
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
        low=modelopt.get_lowest_code(quantizer),
        axis=int(quantizer.axis) if per_channel else None,
        count=count,
    )


def list_learned(model: "PreTrainedModel") -> list[nn.Parameter]:
    return [value for name, value in model.named_parameters() if name.rpartition(".")[2] == PARAMETER]


@torch.no_grad()
def keep_positive(model: "PreTrainedModel") -> None:
    """Hold learned ratios at or above 2^-7, in place, after a step of the optimizer; no host sync."""
    ratios: list[torch.Tensor] = [*list_learned(model)]
    if ratios:
        torch._foreach_clamp_min_(ratios, LOWEST_RATIO)


@torch.no_grad()
def settle_learned(model: "PreTrainedModel") -> None:
    """Write learned ratios into amax and remove them: a plain ModelOpt model with the scales of training.

    Bit for bit, as a weight's scale was rounded up to 11 significant bits all along; its amax is 127 times
    that, as calibration makes it. Without learned ratios this is `use_modelopt`. Biases are those of before
    `take_means`.
    """
    give_means(model)
    changed = {name: q for name, q in fake.list_quantizers(model).items() if "learned" in q.__dict__}
    values = {name: q.learned.ratio * q.learned.amax for name, q in changed.items()}
    for name, quantizer in changed.items():
        quantizer.amax = values[name].reshape(quantizer.amax.shape)
    fake.round_weight_scales(changed)
    for quantizer in changed.values():
        quantizer._parameters.pop(PARAMETER, None)
        del quantizer.__dict__["learned"]
    use_modelopt(model)
