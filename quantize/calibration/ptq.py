"""Post-training quantization: ModelOpt's quantizers where the plan asks for INT8, and their calibration."""

import contextlib
import difflib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from qdqbench.quantize.calibration import smoothing, softmax, splitting
from qdqbench.quantize.calibration.bias import apply_biases, correct_biases, note_missing_biases
from qdqbench.quantize.calibration.fakequant import quantizers
from qdqbench.quantize.calibration.fakequant.quantizers import (
    _silent,
    forward,
    get_quantizer_kind,
    import_modelopt,
    list_quantizers,
    round_weight_scales,
    smooth_input,
)
from qdqbench.quantize.calibration.qkv_bias_folding import (
    choose_shifts,
    compute_moved_biases,
    equalize,
    record_inputs,
    share_scales,
)
from qdqbench.quantize.calibration.record import (
    CalibrationRecord,
    ChannelSplit,
    Shift,
    Smoothing,
    read_quantizer_state,
    require_plausible,
    require_shared,
)
from qdqbench.quantize.recipe.plan import (
    Plan,
    folds_kv_bias,
    folds_q_bias,
    get_linears,
    list_bias_free_linears,
    note_kept_biases,
)
from qdqbench.quantize.recipe.sections import Calibration
from qdqbench.quantize.utils.arrays import Batch
from qdqbench.quantize.utils.errors import CheckFailed, UserError
from qdqbench.quantize.utils.names import name_list
from qdqbench.quantize.utils.progress import report_phase, track

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FAR = 2.0  # times what calibration found, or a part of it, from which on an amax is named


def name_overrides(
    overrides: Mapping[str, float], names: Collection[str], plan: Plan, prefix: str
) -> dict[str, float]:
    """Return the given amax by the full names of quantizers.

    Args:
        overrides: by quantizer, with or without the prefix of the base model.
        names: of all quantizers.
        prefix: `bert` in `bert.encoder.layer.0`.

    Raises:
        UserError: names that no quantizer has, or whose tensor is changed before; lists all of them.
    """
    straightened = _list_folded(plan)
    known = {name for name in names if get_quantizer_kind(name) not in ("weight", "softmax")}
    amax_by_name: dict[str, float] = {}
    wrong = []
    for name, amax in overrides.items():
        full = name if name in known else f"{prefix}.{name}"
        module = full.rpartition(".")[0]
        if full not in known:
            near = difflib.get_close_matches(full, known, 1)
            wrong.append(
                f"{name} is no quantizer of an INT8 activation" + (f" (near: {near[0]})" if near else "")
            )
        elif plan.scaling_of(module).smoothing != "none":
            wrong.append(f"{name} is smoothed, which changes its range")
        elif full in straightened:
            wrong.append(
                f"{name} is given another range, so that k, v and q come straight from their GEMMs (weights: "
                "int8/per-tensor in an INT8 attention)"
            )
        else:
            amax_by_name[full] = amax
    if wrong:
        raise UserError(f"calibration.amax cannot be used: {name_list(wrong)}; change the recipe")
    return amax_by_name


def _list_folded(plan: Plan) -> set[str]:
    """Return the quantizers of tensors that `qkv_bias_folding.py` changes."""
    attentions, linears = folds_kv_bias(plan), list[str]()
    for name in folds_q_bias(plan):
        linears += get_linears(plan, name, "query", "key", "value")
    for name in attentions:
        linears += get_linears(plan, name, "output")
    return {f"{linear}.input_quantizer" for linear in linears} | {
        f"{name}.{x}_bmm_quantizer" for name in attentions for x in "qkv"
    }


def apply_overrides(quantizers: Mapping[str, Any], overrides: Mapping[str, float]) -> dict[str, float]:
    """Set the given amax; what calibration found for them, by quantizer."""
    import torch

    found = {}
    for name, amax in overrides.items():
        quantizer = quantizers[name]
        found[name] = float(quantizer.amax)
        quantizer.amax = torch.tensor(amax, dtype=torch.float32, device=quantizer.amax.device)
    return found


def compare_overrides(
    overrides: Mapping[str, float], calibrated: Mapping[str, float]
) -> tuple[list[str], list[str]]:
    """Compare given amax with what calibration found: a note, and a warning of those that are far off."""
    ratios = {
        name: overrides[name] / amax for name, amax in calibrated.items() if amax > 0 and math.isfinite(amax)
    }
    if not ratios:
        return [], []
    ordered = sorted(ratios.values())
    far = [name for name, ratio in ratios.items() if not 1 / FAR < ratio < FAR]
    note = (
        f"{len(overrides)} amax are given by the recipe: {ordered[0]:.2f} to {ordered[-1]:.2f} times what "
        f"calibration found (median {ordered[len(ordered) // 2]:.2f})"
    )
    if not far:
        return [note], []
    far.sort(key=lambda name: -abs(math.log(ratios[name])))
    listed = [f"{name} ({overrides[name]:.3g} for {calibrated[name]:.3g})" for name in far]
    return [note], [
        f"{len(far)} of {len(overrides)} amax that the recipe gives are off by more than a factor {FAR:g}: "
        f"{name_list(listed)}"
    ]


def make_modelopt_config(plan: Plan) -> dict[str, Any]:
    """Return the ModelOpt configuration for a plan: everything denied, then exact quantizer names.

    `INT8_DEFAULT_CFG` would also quantize the input of every LayerNorm, and patterns that match nothing
    are silent in ModelOpt, so neither is used.
    """
    entries: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    per_tensor = {"num_bits": 8, "axis": None}
    for name, scales in plan.int8.items():
        weight = {"num_bits": 8, "axis": 0 if scales == "channel" else None}
        entries.append({"quantizer_name": f"{name}.weight_quantizer", "cfg": weight})
        entries.append({"quantizer_name": f"{name}.input_quantizer", "cfg": per_tensor})
    for name in plan.attention:
        entries += [{"quantizer_name": f"{name}.{x}_bmm_quantizer", "cfg": per_tensor} for x in "qkv"]
        given = {**per_tensor, "constant_amax": softmax.PLAIN}  # until `calibrate` chooses another
        entries.append({"quantizer_name": f"{name}.p_bmm_quantizer", "cfg": given})
    entries += [
        {"quantizer_name": f"{n}.{quantizers.RESIDUAL_QUANTIZER}", "cfg": per_tensor} for n in plan.residual
    ]
    return {"quant_cfg": entries, "algorithm": None}


def insert_quantizers(model: "PreTrainedModel", plan: Plan) -> dict[str, Any]:
    """Insert ModelOpt's fake quantizers into `model`, in place, without calibrating them.

    Returns:
        The enabled quantizers by full name.

    Raises:
        CheckFailed: ModelOpt enabled other quantizers than the plan names.
    """
    mtq = import_modelopt()
    config = make_modelopt_config(plan)
    with _silent(), quantizers.register_residuals(model, plan.residual):
        mtq.quantize(model, config, None)
    inserted = list_quantizers(model)
    wanted = {entry["quantizer_name"] for entry in config["quant_cfg"] if "cfg" in entry}
    if wanted != set(inserted):
        raise CheckFailed(
            f"ModelOpt enabled other quantizers than the recipe asks for: missing "
            f"{name_list(sorted(wanted - set(inserted))) or 'none'}; surplus "
            f"{name_list(sorted(set(inserted) - wanted)) or 'none'}"
        )
    return inserted


def calibrate(
    model: "PreTrainedModel",
    plan: Plan,
    batches: Iterable[Batch],
    settings: Calibration,
    progress: Callable[[int], None] = lambda _: None,
) -> CalibrationRecord:
    """Insert quantizers and calibrate them; memory does not grow with the samples.

    Args:
        model: FP32 model, changed in place.
        plan: what becomes INT8, and how its scales are found.
        batches: int64 [B, L] arrays with attention_mask, of equal length, so that no quantizer sees padding
            (Model-Optimizer issue 1261). One pass, and more as the plan needs.
        settings: the recipe's calibration section.
        progress: called with the number of samples of each batch.

    Raises:
        UserError: no batches, or given amax of quantizers that are not there.
        CheckFailed: weights or an amax that are not finite, positive and plausible, or that an INT8 residual
            and the linears that read the same tensor do not share; names every layer.
    """
    from qdqbench.quantize.calibration import histograms
    from qdqbench.quantize.calibration.fakequant.onednn import use_quick_linears

    mtq = import_modelopt()
    _require_finite_weights(model)
    lengths: list[int] = []

    def forward_loop(inner: "PreTrainedModel") -> None:
        lengths.clear()
        with use_quick_linears(inner.device.type, again=True):
            for batch in batches:
                forward(inner, batch)
                lengths.extend(batch["attention_mask"].sum(axis=1).tolist())
                progress(len(batch["input_ids"]))
        if not lengths:
            raise UserError(
                f"calibration saw no samples of split {settings.split!r}; give a split that has rows"
            )

    quantizers = insert_quantizers(model, plan)
    fixed = name_overrides(settings.amax, quantizers, plan, model.base_model_prefix)
    report_phase("looking at ranges")
    shifts, moved, splits, warnings = _prepare(model, plan, settings.outlier_channel_splitting, forward_loop)
    without = compute_moved_biases(model, plan)
    apply_biases(model, without)
    report_phase("looking at softmax")
    by_error = _choose_softmax(settings, plan, batches)
    chosen = softmax.choose_softmax_scales(model, plan, forward_loop, folds_kv_bias(plan), by_error=by_error)
    centered = softmax.get_bias_deltas(model, plan, chosen.centers)
    apply_biases(model, centered)
    for name, amax in chosen.amax.items():
        quantizers[f"{name}.p_bmm_quantizer"].amax = amax
    histograms.install_calibrators(quantizers, plan)
    report_phase("calibrating")
    with _silent(), _record_rms(quantizers) as moments:
        mtq.calibrate(model, "max", forward_loop=forward_loop)
    notes = [*_note_shared(model, plan), *note_kept_biases(plan), *chosen.notes]
    notes += _revive_dead_channels(model, quantizers)
    for name in track("scales of weights", plan.int8):
        if plan.scaling_of(name).weights == "mse":
            linear: Any = model.get_submodule(name)
            histograms.clip_weight(linear.weight_quantizer, linear.weight.detach())
    share_scales(plan, quantizers)
    round_weight_scales(quantizers)
    replaced = apply_overrides(quantizers, fixed)
    told, far_off = compare_overrides(fixed, replaced)
    notes, warnings = notes + told, warnings + far_off
    states = {name: read_quantizer_state(name, q, moments.get(name)) for name, q in quantizers.items()}
    require_plausible(states)
    require_shared(states, plan)
    biases: dict[str, list[float]] = {}
    corrected = [name for name in plan.int8 if name not in list_bias_free_linears(plan)]
    if settings.bias_correction:
        from qdqbench.quantize.calibration.fakequant.native import use_evaluation

        with use_evaluation(model):
            biases = correct_biases(model, corrected, batches)
        notes += note_missing_biases(model, corrected)
    return CalibrationRecord(
        method=settings.method,
        methods={n: s.method for n, s in plan.scaling.items() if s.method != settings.method},
        shifts=shifts,
        splits=splits,
        smoothing=moved,
        centers=without | centered,
        biases=biases,
        softmax=chosen.loss,
        replaced=replaced,
        seed=settings.seed,
        data={"samples": len(lengths), **_lengths(lengths)},
        notes=notes,
        warnings=warnings,
        quantizers=states,
    )


def _prepare(
    model: "PreTrainedModel", plan: Plan, extra: int, forward_loop: Callable[["PreTrainedModel"], None]
) -> tuple[dict[str, Shift], Smoothing, dict[str, ChannelSplit], list[str]]:
    """Shift, smooth, and split outlier channels, in one pass over the data; only what the plan asks for."""
    seconds = plan.family.splittable(plan.int8) if extra else []
    with record_inputs(model, plan) as seen:
        ranges = smoothing.measure_ranges(model, plan, forward_loop, seconds, always=bool(seen))
    shifts, warnings = choose_shifts(model, plan, seen, ranges)
    for each in shifts.values():
        apply_biases(model, each.added)
    moved = equalize(model, plan, smoothing.smooth(model, plan, ranges, folds_kv_bias(plan)))
    splits = splitting.split_outliers(model, {name: ranges.inputs[name] for name in seconds}, extra)
    return shifts, moved, splits, warnings


def _choose_softmax(settings: Calibration, plan: Plan, batches: Iterable[Batch]) -> bool:
    """Return whether the form of the INT8 softmax is chosen; read the lengths first for `auto`."""
    if settings.softmax_scale != "auto" or not plan.attention:
        return settings.softmax_scale == "min-error"
    return any(batch["input_ids"].shape[1] > softmax.LONG for batch in batches)


def restore(model: "PreTrainedModel", plan: Plan, record: CalibrationRecord) -> None:
    """Rebuild the calibrated fake-quant model from `calibration.json`, scales bit for bit.

    Copies of outlier channels are part of it, so `model` may come out wider than it was.

    Raises:
        UserError: the record is of another recipe or model.
        CheckFailed: an INT8 residual has another amax than the linears that read the same tensor.
    """
    import torch

    quantizers = insert_quantizers(model, plan)
    if set(quantizers) != set(record.quantizers):
        raise UserError("calibration.json is of another recipe or model; run `qdqbench quantize` again")
    require_shared(record.quantizers, plan)
    for each in record.shifts.values():
        apply_biases(model, each.added)
    smoothing.apply_factors(model, record.smoothing)
    splitting.apply_copies(model, record.splits)
    apply_biases(model, record.centers)
    apply_biases(model, record.biases)
    device = next(model.parameters()).device
    for name, quantizer in quantizers.items():
        state = record.quantizers[name]
        amax = torch.tensor(state.amax, dtype=torch.float32, device=device)
        quantizer.amax = amax.reshape(-1, 1) if state.axis is not None else amax


def _require_finite_weights(model: "PreTrainedModel") -> None:
    import torch

    bad = [name for name, value in model.named_parameters() if not torch.isfinite(value).all()]
    if bad:
        raise CheckFailed(
            f"the model's weights hold NaN or infinity in {name_list(bad)}; train or save it again"
        )


@contextlib.contextmanager
def _record_rms(quantizers: dict[str, Any]) -> Iterator[dict[str, float]]:
    """Record the root mean square of all that each activation quantizer sees; filled when the block ends."""
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    result: dict[str, float] = {}

    def watch(name: str, quantizer: Any, inputs: tuple[Any, ...]) -> None:
        power = float(smooth_input(quantizer, inputs[0]).double().square().sum())
        if not math.isfinite(power):  # ModelOpt would fail here without naming the layer
            raise CheckFailed(f"calibration met NaN or infinity at {name}; look at the layers before it")
        sums[name] = sums.get(name, 0.0) + power
        counts[name] = counts.get(name, 0) + inputs[0].numel()

    with contextlib.ExitStack() as hooks:
        for name, quantizer in quantizers.items():
            if get_quantizer_kind(name) != "weight":
                hooks.enter_context(quantizer.register_forward_pre_hook(partial(watch, name)))
        yield result
    result.update({name: math.sqrt(sums[name] / counts[name]) for name in sums})


def _note_shared(model: "PreTrainedModel", plan: Plan) -> list[str]:
    """Return a note where linears run several times."""
    layers, runs = len(plan.family.layer_names(model)), len(plan.family.runs(model))
    if runs == layers:
        return []
    return [
        f"{runs} layers share the weights of {layers}: every amax, smoothing factor, split channel and bias "
        "correction in them is one for all of its runs"
    ]


def _revive_dead_channels(model: "PreTrainedModel", quantizers: dict[str, Any]) -> list[str]:
    """Give all-zero weight channels (pruned heads) their layer's scale: their codes are 0 anyway."""
    import torch

    notes = []
    for name, quantizer in quantizers.items():
        amax = quantizer.amax
        if get_quantizer_kind(name) != "weight" or amax is None or not torch.isfinite(amax).all():
            continue
        dead = amax == 0
        if dead.any() and not dead.all():
            quantizer.amax = torch.where(dead, amax.max(), amax)
            notes.append(f"{name}: {int(dead.sum())} output channels are all zero")
    return notes


def _lengths(lengths: list[int]) -> dict[str, Any]:
    values = np.array(lengths)
    quantiles = {f"p{q}": int(np.percentile(values, q, method="lower")) for q in (50, 90, 99)}
    spread = {"min": int(values.min()), **quantiles, "max": int(values.max()), "mean": float(values.mean())}
    return {"tokens": int(values.sum()), "lengths": spread}
