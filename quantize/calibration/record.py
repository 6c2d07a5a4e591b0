"""The record of a calibration, `calibration.json`: every amax and scale, and whether they are plausible."""

import math
import statistics
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np

from qdqbench.quantize.calibration.fakequant import quantizers as fake
from qdqbench.quantize.calibration.techniques.centering import Centering, Shift, add_rounding, compute_biases
from qdqbench.quantize.calibration.techniques.channel_splitting import ChannelSplit
from qdqbench.quantize.calibration.techniques.smoothing import Smoothing
from qdqbench.quantize.calibration.techniques.softmax_scale import SoftmaxRow
from qdqbench.quantize.models.rounding import ROUNDING
from qdqbench.quantize.recipe.plan import Plan
from qdqbench.quantize.recipe.schema import Recipe
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import CheckFailed, UserError
from qdqbench.quantize.utils.limits import FP16_MAX
from qdqbench.quantize.utils.schema import Strict, Tabular, field, read

# An amax outside these bounds is a fault of the data or the weights, never a property of a working model.
# Activations are FP16 tensors in the engine, so they end with it, and below 1e-6 it holds no seven bits.
AMAX_BOUNDS = {"weight": (1e-8, FP16_MAX), "activation": (1e-6, FP16_MAX)}

MAX_AMAX_OVER_RMS = 5000.0  # BERT outliers reach 90; a value like this leaves the other codes at zero


class QuantizerRow(Strict):
    """One calibrated quantizer."""

    name: str = field("Path of the quantizer.")
    module: str = field("Path of the layer that it belongs to.")
    kind: Literal["weight", "input", "query", "key", "value", "softmax", "residual"] = field(
        "Kind of tensor; `query`, `key`, `value` and `softmax` of an INT8 attention, `residual` of an INT8 "
        "residual stream."
    )
    axis: int | None = field("Channel axis; null when one scale serves the whole tensor.")
    amax: float = field("Largest magnitude that is representable: scale x 127; largest channel.")
    amax_min: float = field("Smallest amax of all channels; equal to `amax` per tensor.")
    amax_over_rms: float | None = field("Outlier measure of an activation (amax / rms), or null.")
    calibrated_amax: float | None = field("Calibration's own, if the recipe gives the amax.", default=None)
    amax_spread: float | None = field(
        "Largest magnitudes of four parts of the calibration rows: standard deviation / mean. Null for "
        "weights and the softmax, and for an amax that the recipe gives or training changed.",
        default=None,
    )


def describe_spread(quantizers: Sequence[QuantizerRow]) -> str:
    """Return the median and the largest `amax_spread` in words; empty if there is none."""
    spread = summarize_spread(quantizers)
    return f"median {spread[0]:.1%}, largest {spread[1].amax_spread:.1%}" if spread else ""


def summarize_spread(quantizers: Sequence[QuantizerRow]) -> tuple[float, QuantizerRow] | None:
    """Return the median of all `amax_spread`, and the quantizer with the largest; None if there is none."""
    spreads = [(row.amax_spread, row) for row in quantizers if row.amax_spread is not None]
    widest = max(spreads, key=itemgetter(0), default=None)
    return (statistics.median(map(itemgetter(0), spreads)), widest[1]) if widest else None


class QuantizerState(Strict):
    """One quantizer: enough to rebuild it with a bit-identical scale."""

    kind: fake.QuantizerKind
    axis: int | None
    amax: float | list[float]  # a list when per-channel; float32 values, exact in JSON
    rms: float | None = None  # of an activation while calibrating
    # standard deviation over mean of the largest magnitudes of four parts of the rows; None if amax is given
    spread: float | None = None


class CalibrationRecord(Tabular):
    """`calibration.json`: every amax, and the data that it came from."""

    schema_version: Literal[3] = 3
    method: str  # of the calibration section; rules may refine it
    methods: dict[str, str] = {}  # linear or attention -> method, where it differs
    # second linear of a feed-forward -> its copies, made after smoothing
    splits: dict[str, ChannelSplit] = {}
    shifts: dict[str, Shift] = {}  # by attention whose q lost its bias, or by first reader
    centering: Centering = Centering()
    smoothing: Smoothing = Smoothing()
    # linear -> what centering the values of an INT8 attention added to its bias, float32 values
    centers: dict[str, list[float]] = {}
    biases: dict[str, list[float]] = {}  # linear -> what bias correction added, float32 values
    softmax: list[SoftmaxRow] = []  # of INT8 attentions
    replaced: dict[str, float] = {}  # quantizer whose amax the recipe gives -> what calibration found
    seed: int
    data: dict[str, Any]  # source, split, fingerprint, samples, tokens, lengths
    notes: list[str]
    warnings: list[str] = []
    quantizers: dict[str, QuantizerState]

    def rows(self) -> list[QuantizerRow]:
        values = {n: np.atleast_1d(np.asarray(q.amax, dtype=np.float64)) for n, q in self.quantizers.items()}
        return [
            QuantizerRow(
                name=name,
                module=name.rpartition(".")[0],
                kind=state.kind,
                axis=state.axis,
                amax=float(values[name].max()),
                amax_min=float(values[name].min()),
                amax_over_rms=float(values[name].max() / state.rms) if state.rms else None,
                calibrated_amax=self.replaced.get(name),
                amax_spread=state.spread,
            )
            for name, state in self.quantizers.items()
        ]


def read_quantizer_state(
    name: str, quantizer: Any, rms: float | None, spread: float | None = None
) -> QuantizerState:
    amax = quantizer.amax
    values = [] if amax is None else amax.detach().float().cpu().flatten().tolist()
    scalar = amax is not None and quantizer.axis is None
    amax = values[0] if scalar else values
    kind = fake.get_quantizer_kind(name)
    return QuantizerState(kind=kind, axis=quantizer.axis, amax=amax, rms=rms, spread=spread)


def trained_record(model: Any, record: CalibrationRecord) -> CalibrationRecord:
    """Return the record of a model that was trained since: its biases have what calibration added.

    Rounding of its new weights makes something else of the constants of centering. Biases make up for the
    difference, in place, since training saw the weights with what calibration found.
    """
    states = {
        name: read_quantizer_state(name, quantizer, record.quantizers[name].rms)
        for name, quantizer in fake.list_quantizers(model).items()
    }
    for name, state in states.items():
        if state.amax == record.quantizers[name].amax:  # else training made it
            state.spread = record.quantizers[name].spread
    require_plausible(states)
    changed: dict[str, Any] = {"quantizers": states, "shifts": {}, "centers": {}, "biases": {}}
    linears = [model.get_submodule(name) for name in record.centering.inputs]
    trained_with = [getattr(linear, ROUNDING) for linear in linears]
    changed["centering"] = add_rounding(model, compute_biases(model, record.centering.inputs))
    for linear, rounding in zip(linears, trained_with, strict=True):
        linear.bias.data += rounding - getattr(linear, ROUNDING)
    return record.model_copy(update=changed)


def read_record(path: Path) -> CalibrationRecord:
    """Read a record and hold it to what a calibration may give; a `UserError` names what does not."""
    record = read(path, CalibrationRecord, "calibration record", "quantize again")
    if not _is_finite(record.model_dump()):
        raise UserError(f"{path} has numbers that are not finite; quantize again")
    try:
        require_plausible(record.quantizers)
    except CheckFailed as error:
        raise UserError(f"{path} cannot be used: {error}") from error
    return record


def _is_finite(value: Any) -> bool:
    if isinstance(value, (dict, list)):
        return all(map(_is_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


def write_record(path: Path, record: CalibrationRecord) -> None:
    files.write_text(path, record.model_dump_json() + "\n")


def require_plausible(states: dict[str, QuantizerState]) -> None:
    """Hold every amax to be finite, positive and plausible; CheckFailed names every other with its value."""
    problems = [f"{name}: {why}" for name, state in states.items() if (why := _implausible(state))]
    if problems:
        raise CheckFailed(
            f"calibration gave {len(problems)} unusable amax values ({'; '.join(problems)}); check the "
            f"weights for NaN and the calibration data, or keep these layers in FP16 with a rule"
        )


def _implausible(state: QuantizerState) -> str | None:
    values = np.atleast_1d(np.asarray(state.amax, dtype=np.float64))
    low, high = AMAX_BOUNDS["weight" if state.kind == "weight" else "activation"]
    if not values.size or not np.isfinite(values).all():
        return "not finite"
    if (values <= 0).any():
        return f"not positive ({values.min():g})"
    if values.min() < low or values.max() > high:
        return f"{values.min():g} to {values.max():g}, outside {low:g} to {high:g}"
    if state.rms and state.kind != "softmax" and values.max() / state.rms > MAX_AMAX_OVER_RMS:
        return f"{values.max() / state.rms:.0f} times its root mean square"
    return None


def get_state_shifts(record: CalibrationRecord) -> dict[int, list[float]]:
    """Return what shifts add to hidden states, [hidden], by number: 0 is that after the embeddings."""
    shifts = record.shifts.values()
    return {shift.state: shift.added[shift.maker] for shift in shifts if shift.state is not None}


def require_shared(states: Mapping[str, QuantizerState], plan: Plan) -> None:
    """Hold residuals to the amax of linears that read the same tensor; CheckFailed names all that differ."""
    lost = []
    for name in plan.residual:
        readers = [f"{linear}.input_quantizer" for linear in plan.family.residual_readers(name)]
        amax = [states[key].amax for key in (f"{name}.{fake.RESIDUAL_QUANTIZER}", *readers)]
        if len(set(amax)) > 1:
            lost.append(f"{name}.{fake.RESIDUAL_QUANTIZER} ({', '.join(f'{value:g}' for value in amax)})")
    if lost:
        raise CheckFailed(
            f"an INT8 residual and the linears that read the same tensor need one amax, and these differ: "
            f"{'; '.join(lost)}; calibrate again, or train them as one number"
        )


def select_record(plan: Plan, plain: CalibrationRecord, fused: CalibrationRecord) -> CalibrationRecord:
    """Select a plan's record from records with all linears in INT8, without (`plain`) and with attentions.

    An amax is measured in full precision, so it does not depend on what else is INT8, and smoothing looks at
    one layer alone. Only what a layer's attention is has a say there: an INT8 one is smoothed too.
    """
    family = plan.family
    inside = {family.layer_of(name) for name in plan.attention}
    wanted = [f"{name}.{kind}_quantizer" for name in plan.int8 for kind in ("weight", "input")]
    wanted += [f"{name}.{x}_bmm_quantizer" for name in plan.attention for x in "qkvp"]

    def of(name: str) -> CalibrationRecord:
        return fused if family.layer_of(name) in inside else plain

    smoothing = Smoothing()
    for record in (plain, fused):
        factors = record.smoothing
        for name, values in factors.columns.items():
            if of(name) is record and (name in plan.int8 or name not in factors.inputs):
                smoothing.columns[name] = values
        smoothing.inputs |= {n: v for n, v in factors.inputs.items() if of(n) is record and n in plan.int8}
        smoothing.rows |= {n: v for n, v in factors.rows.items() if of(n) is record}
    centers = {n: v for record in (plain, fused) for n, v in record.centers.items() if of(n) is record}
    shifts = {n: v for record in (plain, fused) for n, v in record.shifts.items() if of(n) is record}
    parts: dict[str, dict[str, Any]] = dict(fused.centering)
    centering = Centering(
        **{part: {n: kept[n] for n in plan.int8 if n in kept} for part, kept in parts.items()}
    )
    softmax = [row for row in fused.softmax if row.module in plan.attention]
    quantizers = {name: of(name).quantizers[name] for name in wanted}
    splits = {name: of(name).splits[name] for name in fused.splits if name in plan.int8}
    for name, choice in fused.splits.items():
        rows = f"{family.beside(name, 'ffn-in')}.weight_quantizer"
        if name not in splits and rows in quantizers and isinstance(amax := quantizers[rows].amax, list):
            # the model's own rows come first: of the channels, and of their gates
            width = len(amax) // (1 + family.gated)
            own = [value for n, value in enumerate(amax) if n % width < width - choice.extra]
            quantizers[rows] = quantizers[rows].model_copy(update={"amax": own})
    changed = {"shifts": shifts, "smoothing": smoothing, "splits": splits, "centers": centers}
    changed |= {"centering": centering, "softmax": softmax, "quantizers": quantizers}
    return fused.model_copy(update=changed)


def disable_bias_correction(recipe: Recipe) -> Recipe:
    section = recipe.calibration.model_copy(update={"bias_correction": False})
    return recipe.model_copy(update={"calibration": section})
