"""Error of an INT8 softmax by layer and length, and the form with the smallest error.

With scale 1/127 probabilities under 1/254 become zero, and the longer the input, the more of the attention
they hold. Chosen by the error of P v over the calibration data, at no cost in time (int8-softmax.md):

- centered values: P (v - m) + m = P v for any m of each channel, as rows of P sum to 1. With m the mean of
  v less is lost; -m goes into the bias of the value projection, m times its weight into the output
  projection's;
- the amax of the softmax output, per layer;
- row-max: P over the largest of its row, whose code is 255; P v is divided by the sum of the codes. Zhang
  et al. 2024, "SageAttention" (arXiv 2410.02367), section 4.3, quantize FlashAttention so, with 127 codes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from qdqbench.quantize.calibration.fakequant.quantizers import INT8_MAX, UINT8_MAX, hooked, quantizers_off
from qdqbench.quantize.calibration.techniques import Change
from qdqbench.quantize.models.attention import ROW_MAX
from qdqbench.quantize.recipe.plan import Plan, folds_kv_bias
from qdqbench.quantize.utils.arrays import Float64
from qdqbench.quantize.utils.names import name_list
from qdqbench.quantize.utils.schema import Strict, field

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

PLAIN = 1.0  # amax of probabilities; scale 1/127
Form = Literal["row-max"] | float  # an amax for all rows, or that of each
FORMS: dict[str, tuple[Form, ...]] = {  # that `calibration.softmax_scale` tries
    "fixed": (PLAIN,),
    "min-error": tuple(2 ** (-half / 2) for half in range(9)),  # 1 to 1/16
    "row-max": ("row-max",),
}
LONG = 128  # tokens; a warning counts rows that are longer, unless calibration saw such rows
LENGTHS = (64, 128, 256, 384, 512)  # upper edges of the rows in the record
CHUNK = 2**23  # probabilities that are rounded at a time


class SoftmaxRow(Strict):
    """Cost of INT8 in the softmax of one attention, alone in INT8, on calibration samples of some lengths."""

    module: str = field("Path of the attention.")
    length: int = field("Longest sample of this row in tokens; shorter ones have rows of their own.")
    amax: float = field("Amax of the softmax output; the scale is amax / 127, or amax / 255 with `row_max`.")
    row_max: bool = field("Whether the softmax is divided by the largest of its row.", default=False)
    centered: bool = field("Whether values are centered: a row that loses mass gets their mean.")
    zeroed: float = field("Share of the attention that rounds to zero.")
    clipped: float = field("Share of the attention above the amax.")
    error: float = field("Relative error of the attention's output, by norm.")


def list_changes(rows: Sequence[SoftmaxRow]) -> list[Change]:
    return [
        (
            "softmax of each row",
            len({row.module for row in rows if row.row_max}),
            "INT8 attention",
            "The softmax of {} has codes up to the largest of each row; their sum divides the result.",
        ),
        (
            "centered values",
            len({row.module for row in rows if row.centered}),
            "INT8 attention",
            "The values of {} are centered, so that a softmax that rounds to zero loses little; their mean "
            "is in the attention's output.",
        ),
    ]


def get_amax(form: Form) -> float:
    return PLAIN if form == "row-max" else form


@dataclass(frozen=True)
class Softmax:
    forms: dict[str, Form]  # of the softmax output, by attention
    centers: dict[str, Float64]  # mean of v, [heads * head size], where centering it helps
    loss: list[SoftmaxRow]  # in that form
    notes: list[str]


@dataclass
class _SoftmaxSums:
    """Of one attention and one range of lengths; tensors are float64 on the model's device."""

    tries: dict[Form, "_Try"]
    rows: int = 0
    power: Any = 0.0  # of P v
    values: Any = 0.0  # sum of v over tokens, [heads, head size]
    tokens: int = 0

    def add(self, p: "torch.Tensor", v: "torch.Tensor") -> None:
        """Add some inputs: probabilities [B, heads, L, L] and values [B, heads, L, head size]."""
        exact = p @ v
        self.rows += p.shape[0] * p.shape[1] * p.shape[2]
        self.tokens += v.shape[0] * v.shape[2]
        self.power = self.power + exact.square().double().sum()
        self.values = self.values + v.double().sum((0, 2))
        for form, tried in self.tries.items():
            if form == "row-max":
                scale, rounded = PLAIN / UINT8_MAX, (p / p.amax(-1, keepdim=True) * UINT8_MAX).round_()
                rounded /= rounded.sum(-1, keepdim=True)
            else:
                scale = form / INT8_MAX
                rounded = (p / scale).round_().clamp_(max=INT8_MAX).mul_(scale)
            lost = exact - rounded @ v
            mass = 1 - rounded.sum(-1)
            tried.zeroed = tried.zeroed + p[rounded == 0].double().sum()
            tried.clipped = tried.clipped + (p - get_amax(form)).clamp_(min=0).double().sum()
            tried.rr = tried.rr + lost.square().double().sum()
            tried.dr = tried.dr + (mass[..., None] * lost).double().sum((0, 2))
            tried.dd = tried.dd + mass.square().double().sum((0, 2))

    def relative_error(self, form: Form, center: "torch.Tensor | None") -> float:
        return self.tries[form].error(center) / max(float(self.power), 1e-30)

    def make_row(self, name: str, length: int, form: Form, center: "torch.Tensor | None") -> SoftmaxRow:
        tried = self.tries[form]
        return SoftmaxRow(
            module=name,
            length=length,
            amax=get_amax(form),
            row_max=form == "row-max",
            centered=center is not None,
            zeroed=float(tried.zeroed) / self.rows,
            clipped=float(tried.clipped) / self.rows,
            error=float(np.sqrt(self.relative_error(form, center))),
        )


@dataclass
class _Try:
    """Of one form: d is what a row of P loses in all, r is what P v loses by it."""

    zeroed: Any = 0.0  # mass that becomes 0
    clipped: Any = 0.0  # mass above the amax
    rr: Any = 0.0
    dr: Any = 0.0  # [heads, head size]
    dd: Any = 0.0  # [heads]

    def error(self, center: "torch.Tensor | None") -> float:
        """Return the sum of |r - d m|^2: what is lost of v - m."""
        total = self.rr
        if center is not None:
            total = total - 2 * (center * self.dr).sum() + (center.square().sum(-1) * self.dd).sum()
        return max(float(total), 0.0)


def choose_softmax_scales(
    model: "PreTrainedModel", plan: Plan, run: Callable[["PreTrainedModel"], None], setting: str
) -> Softmax:
    """Choose the form of every INT8 softmax from one pass over the data, without quantization.

    The error that is compared is the mean of the relative squared errors over the ranges of `LENGTHS`, so
    that short inputs count even where most are long.

    Args:
        run: passes batches without padding through the model, which is left as it is.
        setting: of `FORMS`, or `auto` for `min-error`; values are centered with that alone, and only where
            something can be added behind their GEMM.
    """
    if not plan.attention:
        note = f"calibration.softmax_scale: {setting} changes nothing: no attention is in INT8"
        return Softmax({}, {}, [], [] if setting in ("auto", "fixed") else [note])
    choices = Softmax({}, {}, [], [])
    setting = "min-error" if setting == "auto" else setting
    without_bias: list[str] = []
    folded = folds_kv_bias(plan)
    for name, by_length in _sum_up(model, plan.attention, run, FORMS[setting]).items():
        means: list[Any] = [None]
        if setting == "min-error" and name not in folded:
            linears = [plan.family.made_by(name, role).linear for role in ("value", "output")]
            lacking = [each for each in linears if getattr(model.get_submodule(each), "bias", None) is None]
            without_bias += lacking
            if not lacking:
                parts = list(by_length.values())
                means.append(sum(part.values for part in parts) / sum(part.tokens for part in parts))
        # a tie goes to the form that changes less
        errors = {
            (form, at): float(np.mean([part.relative_error(form, center) for part in by_length.values()]))
            for form in FORMS[setting]
            for at, center in enumerate(means)
        }
        form, at = min(errors, key=errors.__getitem__)
        choices.forms[name] = form
        rows = (part.make_row(name, edge, form, means[at]) for edge, part in sorted(by_length.items()))
        choices.loss.extend(rows)
        if at:
            choices.centers[name] = means[at].flatten().cpu().numpy()
    if without_bias:
        lost = name_list(without_bias)
        choices.notes.append(
            f"values of INT8 attentions were not centered where {lost} have no bias to take it"
        )
    return choices


def apply_forms(model: "PreTrainedModel", forms: Mapping[str, Form]) -> None:
    """Let attentions divide as their forms say, and set the quantizers of their softmax."""
    for name, form in forms.items():
        attention: Any = model.get_submodule(name)
        setattr(attention, ROW_MAX, form == "row-max")
        attention.p_bmm_quantizer.unsigned = form == "row-max"
        attention.p_bmm_quantizer.amax = get_amax(form)


def leave_row_max(model: "PreTrainedModel") -> None:
    """Give attentions whose softmax is over the largest of each row the amax 1, for other engines."""
    named = model.named_modules()
    apply_forms(model, {name: PLAIN for name, module in named if getattr(module, ROW_MAX, False)})


def get_bias_deltas(
    model: "PreTrainedModel", plan: Plan, centers: dict[str, Float64]
) -> dict[str, list[float]]:
    """Return what centering adds to the biases of a model, float32 values by linear."""
    added: dict[str, list[float]] = {}
    for name, center in centers.items():
        value, output = (plan.family.made_by(name, role) for role in ("value", "output"))
        linear: Any = model.get_submodule(output.linear)
        weight = linear.weight.detach().double()
        moved = weight @ weight.new_tensor(center)
        rows = np.zeros((value.parts, len(center)), np.float32)
        rows[value.part] = -center
        added |= {value.linear: rows.ravel().tolist(), output.linear: moved.float().cpu().tolist()}
    return added


def _sum_up(
    model: "PreTrainedModel",
    attentions: Iterable[str],
    run: Callable[["PreTrainedModel"], None],
    forms: tuple[Form, ...],
) -> dict[str, dict[int, _SoftmaxSums]]:
    """Return the sums of each attention by the upper edge of its lengths."""
    import torch

    sums: dict[str, dict[int, _SoftmaxSums]] = {name: {} for name in attentions}
    values: dict[str, torch.Tensor] = {}

    def keep(name: str, _: Any, inputs: tuple[Any, ...]) -> None:
        values[name.rpartition(".")[0]] = inputs[0].detach()

    def add(name: str, _: Any, inputs: tuple[Any, ...]) -> None:
        attention = name.rpartition(".")[0]
        value, weights = values.pop(attention), inputs[0].detach()
        length = value.shape[-2]
        edge = next((edge for edge in LENGTHS if length <= edge), length)
        part = sums[attention].setdefault(edge, _SoftmaxSums({form: _Try() for form in forms}))
        some = max(1, CHUNK // weights[0].numel())
        for p, v in zip(torch.split(weights, some), torch.split(value, some), strict=True):
            part.add(p, v)

    of_values, of_softmax = ([f"{name}.{x}_bmm_quantizer" for name in sums] for x in "vp")
    hooks = hooked(model, of_values, keep, before=True), hooked(model, of_softmax, add, before=True)
    with hooks[0], hooks[1], quantizers_off(model):
        run(model)
    return sums
