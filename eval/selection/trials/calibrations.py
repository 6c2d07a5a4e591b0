"""One calibration pass shared by recipes that differ in the method of activations only."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from qdqbench.quantize.calibration import ptq
from qdqbench.quantize.calibration.fakequant import quantizers
from qdqbench.quantize.calibration.fakequant.quantizers import get_quantizer_kind
from qdqbench.quantize.calibration.qkv_bias_folding import share_scales
from qdqbench.quantize.calibration.record import QuantizerState, require_plausible
from qdqbench.quantize.recipe.plan import Plan
from qdqbench.quantize.recipe.sections import Calibration
from qdqbench.quantize.utils.arrays import Batch

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from transformers import PreTrainedModel

SHARED_METHOD = "percentile/99.9"  # of the shared pass itself; plausible whatever the outliers are


@dataclass(frozen=True)
class SharedCalibration:
    """A model calibrated with histograms, which answer every method after one pass."""

    model: "PreTrainedModel"
    states: dict[str, QuantizerState]
    notes: list[str]


def collect_ranges(
    model: "PreTrainedModel",
    plan: Plan,
    batches: "Iterable[Batch]",
    settings: Calibration,
    progress: Callable[[int], None] = lambda _: None,
) -> SharedCalibration:
    """Calibrate `model`, in place, for all plans that differ from `plan` in the methods of activations only.

    Arguments and errors as of `ptq.calibrate`; biases are not corrected.
    """
    scaling = {name: replace(each, method=SHARED_METHOD) for name, each in plan.scaling.items()}
    unbiased = settings.model_copy(update={"bias_correction": False})
    record = ptq.calibrate(model, replace(plan, scaling=scaling), batches, unbiased, progress)
    return SharedCalibration(model, record.quantizers, record.notes)


def apply_methods(
    shared: SharedCalibration, plan: Plan
) -> tuple["PreTrainedModel", dict[str, QuantizerState]]:
    """Return a copy of the model with every amax by the methods of `plan`, and its quantizers.

    Scales are those of `ptq.calibrate` with that plan, bit for bit.

    Raises:
        CheckFailed: an amax that is not plausible.
    """
    from qdqbench.quantize.calibration.fakequant.modelopt import get_calibrator

    model = copy.deepcopy(shared.model)
    states, enabled = dict(shared.states), quantizers.list_quantizers(model)
    known: dict[Any, Any] = {}  # q, k and v read one tensor, and entropy searches long
    for name, quantizer in enabled.items():
        if get_quantizer_kind(name) in ("weight", "softmax"):
            continue
        seen, method = get_calibrator(quantizer), plan.scaling_of(name.rpartition(".")[0]).method
        key = method, seen.largest, seen.limit, seen.counts.tobytes()
        amax = known[key] = known[key] if key in known else _amax_by(seen, method)
        quantizer.amax = amax.to(quantizer.amax.device)
    share_scales(plan, enabled)
    for name, quantizer in enabled.items():
        if get_quantizer_kind(name) != "weight":
            states[name] = states[name].model_copy(update={"amax": float(quantizer.amax)})
    require_plausible(states)
    return model, states


def _amax_by(seen: Any, method: str) -> "torch.Tensor":
    """Return the amax by any method from the histogram of an `ActivationCalibrator`, float32 scalar."""
    import torch

    from qdqbench.quantize.calibration.histograms import ActivationCalibrator

    if method == "max":
        return torch.tensor(seen.largest, dtype=torch.float32)
    calibrator = ActivationCalibrator(method)
    calibrator.counts, calibrator.limit, calibrator.largest = seen.counts, seen.limit, seen.largest
    amax = calibrator.compute_amax()
    assert amax is not None  # the shared pass refused what is zero everywhere
    return amax


def widest_activation(states: dict[str, QuantizerState]) -> tuple[str, float] | None:
    """Return the activation quantizer with the largest amax / rms, and that ratio."""
    ratios = {
        name: state.amax / state.rms
        for name, state in states.items()
        if state.kind not in ("weight", "softmax") and state.rms and isinstance(state.amax, float)
    }
    return max(ratios.items(), key=lambda item: item[1]) if ratios else None
