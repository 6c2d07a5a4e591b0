"""One calibration pass shared by recipes that differ in the method of activations only."""

import copy
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from qdqbench.eval.metrics.runners import placed
from qdqbench.eval.selection.trials.results import EMBEDDINGS, LAYERNORMS, CalibrationCost
from qdqbench.quantize.calibration import ptq
from qdqbench.quantize.calibration.fakequant import quantizers
from qdqbench.quantize.calibration.fakequant.quantizers import (
    INT8_MAX,
    get_quantizer_kind,
    list_quantizers,
    round_weight,
)
from qdqbench.quantize.calibration.record import CalibrationRecord, QuantizerState, require_plausible
from qdqbench.quantize.calibration.techniques.centering import Centering, give_zero_a_code
from qdqbench.quantize.calibration.techniques.qkv_bias_folding import share_scales
from qdqbench.quantize.pipeline.session import Session
from qdqbench.quantize.recipe.plan import Plan
from qdqbench.quantize.recipe.sections import Calibration, Reconstruction
from qdqbench.quantize.utils.arrays import Batch

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

SHARED_METHOD = "percentile/99.9"  # of the shared pass itself; plausible whatever the outliers are


@dataclass(frozen=True)
class SharedCalibration:
    """A model calibrated with histograms, which answer every method after one pass."""

    model: "PreTrainedModel"
    states: dict[str, QuantizerState]
    centering: Centering
    notes: list[str]
    seconds: float


def collect_ranges(
    model: "PreTrainedModel", plan: Plan, batches: Iterable[Batch], settings: Calibration
) -> SharedCalibration:
    """Calibrate `model`, in place, for all plans that differ from `plan` in methods of activations only."""
    start = time.perf_counter()
    scaling = {name: replace(each, method=SHARED_METHOD) for name, each in plan.scaling.items()}
    unbiased = settings.model_copy(update={"bias_correction": False})
    record = ptq.calibrate(model, replace(plan, scaling=scaling), batches, unbiased)
    seconds = time.perf_counter() - start
    return SharedCalibration(model, record.quantizers, record.centering, record.notes, seconds)


def apply_methods(
    shared: SharedCalibration, plan: Plan
) -> tuple["PreTrainedModel", dict[str, QuantizerState]]:
    """Return a copy of the model with every amax by the methods of `plan`, and its quantizers.

    Scales are those of `ptq.calibrate` with that plan, bit for bit.
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
        amax = known[key] = known[key] if key in known else seen.compute_amax_by(method)
        quantizer.amax = amax.to(quantizer.amax.device)
    share_scales(plan, enabled)
    give_zero_a_code(model, shared.centering)
    for name, quantizer in enabled.items():
        if get_quantizer_kind(name) != "weight":
            states[name] = states[name].model_copy(update={"amax": float(quantizer.amax)})
    require_plausible(states)
    return model, states


def describe_cost(
    seconds: float, states: dict[str, QuantizerState], notes: Sequence[str] = ()
) -> CalibrationCost:
    ratios = [
        (state.amax / state.rms, name)
        for name, state in states.items()
        if state.kind not in ("weight", "softmax") and state.rms and isinstance(state.amax, float)
    ]
    ratio, name = max(ratios, key=itemgetter(0), default=(None, None))
    return CalibrationCost(seconds=seconds, amax_over_rms=ratio, amax_over_rms_at=name, notes=[*notes])


def reconstruct_calibrated(
    session: Session, settings: Reconstruction, plan: Plan, record: CalibrationRecord, judged: int
) -> "tuple[PreTrainedModel, list[str]]":
    """Reconstruct without the rows that trials are judged on; return the model and notes."""
    from qdqbench.quantize.training.reconstruct import read_rows, reconstruct

    model, teacher = placed(session.new_int8_model()), placed(session.new_model())
    ptq.restore(model, plan, record)
    rows, _ = read_rows(session, settings, judged=judged)
    return model, reconstruct(model, teacher, plan, record, rows, settings).notes


class QuantizerToggles:
    """Switches of a model's INT8, unit by unit: linears, attention modules, LayerNorm inputs, embeddings.

    Scales come from unquantized tensors, so they are the same whatever is switched on. Weights are rounded
    once, here; a switch then only swaps them.
    """

    def __init__(self, model: "PreTrainedModel", plan: Plan, norms: dict[str, "torch.Tensor"]) -> None:
        """Take over a model that `ptq.calibrate` has calibrated with `plan`; everything starts in FP32.

        `norms` holds the amax of the input of each LayerNorm, from `watch_norms`.
        """
        import torch

        from qdqbench.quantize.calibration.fakequant.modelopt import quantize_exactly, use_backend

        self.on: frozenset[str] = frozenset()
        self._weights: dict[str, list[tuple[Any, torch.Tensor, torch.Tensor]]] = {}
        self._activations: dict[str, list[Any]] = {LAYERNORMS: []}
        with torch.inference_mode():
            for name in plan.int8:
                linear: Any = model.get_submodule(name)
                rounded = round_weight(linear.weight.detach(), linear.weight_quantizer)
                self._weights[name] = [(linear.weight, linear.weight.detach(), rounded)]
                self._activations[name] = [linear.input_quantizer]
            tables = [m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)]
            self._weights[EMBEDDINGS] = [(w, w.detach(), _round_table(w.detach())) for w in tables]
        for name in plan.attention:
            module = model.get_submodule(name)
            self._activations[name] = [getattr(module, f"{x}_bmm_quantizer") for x in "qkvp"]
        for name in plan.residual:
            residual: Any = model.get_submodule(name)
            self._activations[name] = [residual.residual_quantizer]
        for quantizer in list_quantizers(model).values():
            quantizer.disable()
        for name, amax in norms.items():
            norm: Any = model.get_submodule(name)
            norm.input_quantizer.amax = amax.to(model.device)
            self._activations[LAYERNORMS].append(norm.input_quantizer)
        # ModelOpt's own arithmetic copies on a CPU, and compiles its kernels for a minute on a GPU
        activations = (quantizer for group in self._activations.values() for quantizer in group)
        use_backend("qdqbench_exact", quantize_exactly, activations)

    def set(self, on: Collection[str]) -> None:
        wanted = frozenset(on)
        for unit in wanted ^ self.on:
            for parameter, plain, rounded in self._weights.get(unit, ()):
                parameter.data = rounded if unit in wanted else plain
            for quantizer in self._activations.get(unit, ()):
                quantizer.enable() if unit in wanted else quantizer.disable()
        self.on = wanted


def _round_table(table: "torch.Tensor") -> "torch.Tensor":
    scale = INT8_MAX / table.abs().max()
    return (table * scale).round_().clamp_(-INT8_MAX, INT8_MAX).div_(scale)
