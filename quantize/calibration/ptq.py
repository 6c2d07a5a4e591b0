"""Post-training quantization: ModelOpt's quantizers where the plan asks for INT8, and their calibration."""

import difflib
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from qdqbench.quantize.calibration import record as records
from qdqbench.quantize.calibration.fakequant import quantizers as fake
from qdqbench.quantize.calibration.techniques import centering, channel_splitting, qkv_bias_folding, smoothing
from qdqbench.quantize.calibration.techniques import softmax_scale as softmax
from qdqbench.quantize.calibration.techniques.bias_correction import (
    apply_biases,
    correct_biases,
    note_missing_biases,
)
from qdqbench.quantize.calibration.techniques.centering import Centering, Shift
from qdqbench.quantize.calibration.techniques.channel_splitting import ChannelSplit
from qdqbench.quantize.calibration.techniques.smoothing import Smoothing
from qdqbench.quantize.models.families.known import family_of
from qdqbench.quantize.recipe import plan as plans
from qdqbench.quantize.recipe.plan import Plan
from qdqbench.quantize.recipe.sections import Calibration
from qdqbench.quantize.utils.arrays import Batch, Int64
from qdqbench.quantize.utils.errors import CheckFailed, UserError
from qdqbench.quantize.utils.names import name_list
from qdqbench.quantize.utils.progress import report_phase, reporter, track

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

PARTS = 4  # of the calibration rows, whose largest values are compared
WIDE = 0.4  # spread above which an amax is named: that of one part with twice the largest value of the others
FAR = 2.0  # times what calibration found, or a part of it, from which on an amax is named


def _resolve_overrides(
    overrides: Mapping[str, float], names: Collection[str], plan: Plan, prefix: str
) -> dict[str, float]:
    """Return the amax that the recipe gives, by the full names of quantizers.

    Names may lack `prefix`, such as `bert`. UserError lists those that no quantizer has, or whose tensor is
    changed before.
    """
    attentions = plans.folds_kv_bias(plan)
    folded = {f"{name}.{x}_bmm_quantizer" for name in attentions for x in "qkv"}
    for names_of, roles in ((plans.folds_q_bias(plan), plans.QKV_ROLES), (attentions, ("output",))):
        linears = [linear for name in names_of for linear in plans.get_linears(plan, name, *roles)]
        folded.update(f"{linear}.input_quantizer" for linear in linears)
    known = {name for name in names if fake.get_quantizer_kind(name) not in ("weight", "softmax")}
    amax_by_name: dict[str, float] = {}
    wrong = []
    for name, amax in overrides.items():
        full = name if name in known else f"{prefix}.{name}"
        if full not in known:
            near = "".join(f" (near: {match})" for match in difflib.get_close_matches(full, known, 1))
            wrong.append(f"{name} is no quantizer of an INT8 activation{near}")
        elif plan.scaling_of(full.rpartition(".")[0]).smoothing != "none":
            wrong.append(f"{name} is smoothed, which changes its range")
        elif full in folded:
            wrong.append(
                f"{name} is given another range, so that k, v and q come straight from their GEMMs (weights: "
                "int8/per-tensor in an INT8 attention)"
            )
        else:
            amax_by_name[full] = amax
    if wrong:
        raise UserError(f"calibration.amax cannot be used: {name_list(wrong)}; change the recipe")
    return amax_by_name


def _apply_overrides(
    quantizers: Mapping[str, Any], overrides: Mapping[str, float]
) -> tuple[dict[str, float], list[str], list[str]]:
    """Set the given amax; return what calibration found instead, a note, and a warning of those far off."""
    calibrated = {name: float(quantizers[name].amax) for name in overrides}
    for name, amax in overrides.items():
        quantizers[name].amax = quantizers[name].amax.new_tensor(amax)
    usable = {name: amax for name, amax in calibrated.items() if amax > 0 and math.isfinite(amax)}
    ratios = {name: overrides[name] / amax for name, amax in usable.items()}
    if not ratios:
        return calibrated, [], []
    found = ratios.values()
    note = (
        f"{len(overrides)} amax are given by the recipe: {min(found):.2f} to {max(found):.2f} times what "
        f"calibration found (median {statistics.median_high(found):.2f})"
    )
    far = [name for name, ratio in ratios.items() if not 1 / FAR < ratio < FAR]
    far.sort(key=lambda name: -abs(math.log(ratios[name])))
    listed = name_list([f"{name} ({overrides[name]:.3g} for {calibrated[name]:.3g})" for name in far])
    off = f"{len(far)} of {len(overrides)} amax that the recipe gives are off by more than a factor {FAR:g}"
    return calibrated, [note], [f"{off}: {listed}"] if far else []


def _make_modelopt_config(plan: Plan) -> dict[str, dict[str, Any]]:
    """Return ModelOpt's configuration of each quantizer of a plan, by its exact name.

    `INT8_DEFAULT_CFG` would also quantize the input of every LayerNorm, and patterns that match nothing
    are silent in ModelOpt, so neither is used.
    """
    config: dict[str, dict[str, Any]] = {}
    per_tensor = {"num_bits": 8, "axis": None}
    for name, scales in plan.int8.items():
        config[f"{name}.weight_quantizer"] = {"num_bits": 8, "axis": 0 if scales == "channel" else None}
        config[f"{name}.input_quantizer"] = per_tensor
    for name in plan.attention:
        config |= {f"{name}.{x}_bmm_quantizer": per_tensor for x in "qkv"}
        # until `calibrate` chooses another
        config[f"{name}.p_bmm_quantizer"] = {**per_tensor, "constant_amax": softmax.PLAIN}
    return config | {f"{name}.{fake.RESIDUAL_QUANTIZER}": per_tensor for name in plan.residual}


def insert_quantizers(model: "PreTrainedModel", plan: Plan) -> dict[str, Any]:
    """Insert ModelOpt's fake quantizers, in place and not calibrated; return those of the plan by name."""
    mtq = fake.import_modelopt()
    config = _make_modelopt_config(plan)
    entries = [{"quantizer_name": name, "cfg": cfg} for name, cfg in config.items()]
    denied = {"quantizer_name": "*", "enable": False}
    with fake._silent(), fake.register_residuals(model, plan.residual):
        mtq.quantize(model, {"quant_cfg": [denied, *entries], "algorithm": None}, None)
    inserted = fake.list_quantizers(model)
    if set(config) != set(inserted):
        raise CheckFailed(
            f"ModelOpt enabled other quantizers than the recipe asks for: missing "
            f"{name_list(sorted(set(config) - set(inserted))) or 'none'}; surplus "
            f"{name_list(sorted(set(inserted) - set(config))) or 'none'}"
        )
    return inserted


def calibrate(
    model: "PreTrainedModel", plan: Plan, batches: Iterable[Batch], settings: Calibration
) -> records.CalibrationRecord:
    """Insert quantizers and calibrate them, in place; memory does not grow with the samples.

    Args:
        batches: int64 [B, L] arrays with attention_mask, of equal length, so that no quantizer sees padding
            (Model-Optimizer issue 1261). One pass, and more as the plan needs.

    Raises:
        UserError: no batches, or given amax of quantizers that are not there.
        CheckFailed: weights or an amax that are not finite, positive and plausible, or that an INT8 residual
            and the linears that read the same tensor do not share; names every layer.
    """
    from qdqbench.quantize.calibration import histograms

    mtq = fake.import_modelopt()
    _require_finite_weights(model)
    lengths: list[int] = []
    total = getattr(batches, "rows", 0)  # known of a split

    def forward_loop(inner: "PreTrainedModel") -> None:
        lengths.clear()
        for batch in batches:
            fake.forward(inner, batch)
            lengths.extend(batch["attention_mask"].sum(axis=1).tolist())
            reporter().advance(len(lengths), total)
        if not lengths:
            raise UserError(
                f"calibration saw no samples of split {settings.split!r}; give a split that has rows"
            )

    quantizers = insert_quantizers(model, plan)
    fixed = _resolve_overrides(settings.amax, quantizers, plan, model.base_model_prefix)
    report_phase("looking at ranges")
    shifts, moved, splits, centered, warnings = _prepare(model, plan, settings, forward_loop)
    without = qkv_bias_folding.compute_moved_biases(model, plan)
    apply_biases(model, without)
    report_phase("looking at softmax")
    chosen = softmax.choose_softmax_scales(model, plan, forward_loop, settings.softmax_scale)
    of_values = softmax.get_bias_deltas(model, plan, chosen.centers)
    apply_biases(model, of_values)
    softmax.apply_forms(model, chosen.forms)
    histograms.install_calibrators(quantizers, plan)
    report_phase("calibrating")
    with fake._silent(), _watch_inputs(model, lengths, fixed, plan) as seen:
        mtq.calibrate(model, "max", forward_loop=forward_loop)
    notes = [*_note_shared(model, plan), *plans.note_kept_biases(plan), *chosen.notes]
    if settings.centering is True and not (shifts or centered.inputs):
        notes.append("nothing was centered: no one-sided input of an INT8 linear can go into a bias")
    notes += _revive_dead_channels(model, quantizers)
    for name in track("scales of weights", plan.int8):
        if plan.scaling_of(name).weights == "mse":
            linear: Any = model.get_submodule(name)
            histograms.clip_weight(linear.weight_quantizer, linear.weight.detach())
    qkv_bias_folding.share_scales(plan, quantizers)
    fake.round_weight_scales(quantizers)
    centering.give_zero_a_code(model, centered)
    centered = centering.add_rounding(model, centered)
    replaced, of_overrides, far_off = _apply_overrides(quantizers, fixed)
    notes, warnings = notes + of_overrides, warnings + far_off
    states = {
        n: records.read_quantizer_state(n, q, *seen.get(n, (None, None))) for n, q in quantizers.items()
    }
    records.require_plausible(states)
    records.require_shared(states, plan)
    biases, without_bias = correct(model, plan, batches) if settings.bias_correction else ({}, [])
    return records.CalibrationRecord(
        method=settings.method,
        methods={n: s.method for n, s in plan.scaling.items() if s.method != settings.method},
        shifts=shifts,
        splits=splits,
        smoothing=moved,
        centers=without | of_values,
        centering=centered,
        biases=biases,
        softmax=chosen.loss,
        replaced=replaced,
        seed=settings.seed,
        data=_summarize_lengths(np.array(lengths)),
        notes=[*notes, *without_bias],
        warnings=[*warnings, *_warn_of_spread(states, plan)],
        quantizers=states,
    )


def correct(
    model: "PreTrainedModel", plan: Plan, batches: Iterable[Batch]
) -> tuple[dict[str, list[float]], list[str]]:
    """Correct biases in place, but those that an engine folds away; return the additions, and notes."""
    from qdqbench.quantize.calibration.fakequant.native import use_evaluation

    corrected = [name for name in plan.int8 if name not in plans.list_bias_free_linears(plan)]
    with use_evaluation(model):
        return correct_biases(model, corrected, batches), note_missing_biases(model, corrected)


def _prepare(
    model: "PreTrainedModel",
    plan: Plan,
    settings: Calibration,
    forward_loop: Callable[["PreTrainedModel"], None],
) -> tuple[dict[str, Shift], Smoothing, dict[str, ChannelSplit], Centering, list[str]]:
    """Shift, smooth, split outlier channels and center, in one pass over the data; what the plan asks for."""
    extra, center = settings.outlier_channel_splitting, settings.centering is True
    seconds = plan.family.splittable(plan.int8) if extra or center else []
    tensors = centering.list_centered(model, plan) if center else {}
    readers = [name for tensor in tensors.values() for name in tensor.readers]
    with qkv_bias_folding.record_inputs(model, plan) as seen:
        ranges = smoothing.measure_ranges(model, plan, forward_loop, [*seconds, *readers])
    shifts, warnings = qkv_bias_folding.choose_shifts(model, plan, seen, ranges, centered=center)
    shifts |= centering.center_norms(model, tensors, ranges)
    for shift in shifts.values():
        apply_biases(model, shift.added)
    moved = smoothing.smooth(model, plan, ranges)
    moved = qkv_bias_folding.equalize(model, plan, moved, ranges)
    constants = centering.choose_constants(model, seconds, ranges) if center else {}
    splits: dict[str, ChannelSplit] = {}
    for name in seconds if extra else ():
        second: Any = model.get_submodule(name)
        if plan.int8[name] == "channel":  # a massive weight is in few rows, and has their scales to itself
            weights = np.ones(second.in_features)
        else:
            weights = smoothing.column_ranges(second.weight)
        splits[name] = channel_splitting.choose_channels(ranges.inputs[name].max(axis=0), weights, extra)
    channel_splitting.apply_copies(model, splits)
    centered = centering.compute_biases(model, constants)
    centering.apply_centering(model, centered)
    return shifts, moved, splits, centered, warnings


def restore(model: "PreTrainedModel", plan: Plan, record: records.CalibrationRecord) -> None:
    """Rebuild the calibrated fake-quant model from `calibration.json`, scales bit for bit.

    Copies of outlier channels are part of it, so `model` may come out wider than it was.
    """
    quantizers = insert_quantizers(model, plan)
    if {n: q.axis for n, q in quantizers.items()} != {n: s.axis for n, s in record.quantizers.items()}:
        raise UserError("calibration.json is of another recipe or model; run `qdqbench quantize` again")
    records.require_shared(record.quantizers, plan)
    for shift in record.shifts.values():
        apply_biases(model, shift.added)
    smoothing.apply_factors(model, record.smoothing)
    channel_splitting.apply_copies(model, record.splits)
    centering.apply_centering(model, record.centering)
    apply_biases(model, record.centers)
    apply_biases(model, record.biases)
    softmax.apply_forms(model, {row.module: "row-max" for row in record.softmax if row.row_max})
    like = next(model.parameters())  # FP32
    for name, quantizer in quantizers.items():
        state = record.quantizers[name]
        amax = like.new_tensor(state.amax)
        quantizer.amax = amax.reshape(-1, 1) if state.axis is not None else amax


def take_out(model: "PreTrainedModel", record: records.CalibrationRecord) -> "dict[str, torch.Tensor]":
    """Return the weights from which `restore` makes a fake-quant model again, bit for bit: a state dict.

    Without quantizers both compute the same. Biases of the model may change in the last bit, in place.
    """
    weights = smoothing.remove_factors(model, record.smoothing)
    weights = channel_splitting.remove_copies(weights, record.splits, family_of(model.config))
    return centering.take_out_biases(model, record.centering, weights)


def _require_finite_weights(model: "PreTrainedModel") -> None:
    bad = [name for name, value in model.named_parameters() if not value.isfinite().all()]
    if bad:
        raise CheckFailed(
            f"the model's weights hold NaN or infinity in {name_list(bad)}; train or save it again"
        )


@contextmanager
def _watch_inputs(
    model: "PreTrainedModel", before: Sequence[int], given: Collection[str], plan: Plan
) -> Iterator[dict[str, tuple[float, float | None]]]:
    """Record the root mean square of all that each activation quantizer sees, and the spread of its amax.

    Filled when the block ends. Rows go to the parts in turn, in the order of their batches and counted from
    the length of `before`: whole batches would differ, since each has rows of one length. A given amax has
    no spread. Quantizers that share an amax share its parts.
    """
    sums: dict[str, float] = defaultdict(float)
    counts = Counter[str]()
    largest: dict[str, list[float]] = {}
    seen: dict[str, tuple[float, float | None]] = {}

    def watch(name: str, quantizer: Any, inputs: tuple[Any, ...]) -> None:
        value = fake.smooth_input(quantizer, inputs[0])
        power = float(value.double().square().sum())
        if not math.isfinite(power):  # ModelOpt would fail here without naming the layer
            raise CheckFailed(f"calibration met NaN or infinity at {name}; look at the layers before it")
        sums[name] += power
        counts[name] += inputs[0].numel()
        if name in given or fake.get_quantizer_kind(name) == "softmax":
            return
        rest = tuple(range(1, value.dim()))
        tops = value.amax(rest).maximum(-value.amin(rest)).tolist()
        parts = largest.setdefault(name, [0.0] * PARTS)
        for row, top in enumerate(tops, len(before)):
            parts[row % PARTS] = max(parts[row % PARTS], top)

    activations = [n for n in fake.list_quantizers(model) if fake.get_quantizer_kind(n) != "weight"]
    with fake.hooked(model, activations, watch, before=True):
        yield seen
    for group in qkv_bias_folding.group_shared_scales(plan):
        if all(name in largest for name in group):  # no group of weights
            largest |= dict.fromkeys(group, np.max([largest[name] for name in group], axis=0).tolist())
    for name, total in sums.items():
        parts = np.array(largest.get(name, [0.0]))
        spread = float(parts.std(ddof=1) / parts.mean()) if parts.all() else None
        seen[name] = math.sqrt(total / counts[name]), spread


def _warn_of_spread(states: Mapping[str, records.QuantizerState], plan: Plan) -> list[str]:
    """Name quantizers whose largest values differ much; methods that clip do not follow those."""
    whole = [name for name in states if plan.scaling_of(name.rpartition(".")[0]).method == "max"]
    ordered = sorted(((n, states[n].spread or 0.0) for n in whole), key=itemgetter(1), reverse=True)
    wide = name_list([f"{name} ({spread:.0%})" for name, spread in ordered if spread > WIDE])
    warning = (
        f"the amax spread between parts of the calibration rows is above {WIDE:.0%} at {wide}; calibrate "
        "on more rows, or choose a method with `qdqbench compare-calibration`"
    )
    return [warning] if wide else []


def _note_shared(model: "PreTrainedModel", plan: Plan) -> list[str]:
    layers, runs = len(plan.family.layer_names(model)), len(plan.family.runs(model))
    note = (
        f"{runs} layers share the weights of {layers}: every amax, smoothing factor, split channel and bias "
        "correction in them is one for all of its runs"
    )
    return [note] if runs != layers else []


def _revive_dead_channels(model: "PreTrainedModel", quantizers: dict[str, Any]) -> list[str]:
    """Give all-zero weight channels (pruned heads) their layer's scale: their codes are 0 anyway."""
    notes = []
    for name, quantizer in quantizers.items():
        amax = quantizer.amax
        if fake.get_quantizer_kind(name) != "weight" or amax is None or not amax.isfinite().all():
            continue
        dead = amax == 0
        if dead.any() and not dead.all():
            quantizer.amax = amax.where(~dead, amax.max())
            notes.append(f"{name}: {int(dead.sum())} output channels are all zero")
    return notes


def _summarize_lengths(lengths: Int64) -> dict[str, Any]:
    quantiles = {f"p{q}": int(np.percentile(lengths, q, method="lower")) for q in (50, 90, 99)}
    spread: dict[str, float] = {"min": int(lengths.min()), **quantiles, "max": int(lengths.max())}
    spread["mean"] = float(lengths.mean())
    return {"samples": len(lengths), "tokens": int(lengths.sum()), "lengths": spread}
