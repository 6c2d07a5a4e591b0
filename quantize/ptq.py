"""Post-training quantization: ModelOpt's quantizers where the plan asks for INT8, and their calibration."""

import contextlib
import io
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError

from qdqbench.eval.results import QuantizerRow
from qdqbench.quantize import files
from qdqbench.quantize.errors import CheckFailed, UserError
from qdqbench.quantize.matching import Plan, name_list
from qdqbench.quantize.recipe import Calibration

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

Batch = dict[str, npt.NDArray[np.int64]]
Kind = Literal["weight", "input", "query", "key", "value", "softmax"]

# An amax outside these bounds is a fault of the data or the weights, never a property of a working model.
# Activations are FP16 tensors in the engine, so they end at 65504, and below 1e-6 FP16 holds no seven bits.
AMAX_BOUNDS = {"weight": (1e-8, 65504.0), "activation": (1e-6, 65504.0)}
MAX_AMAX_OVER_RMS = 5000.0  # BERT outliers reach 90; a value like this leaves the other codes at zero
INT8_MAX = 127
FP16_BITS = 11  # significant bits, the hidden one included
SOFTMAX_AMAX = 1.0  # probabilities; scale 1/127

_KINDS: dict[str, Kind] = {
    "weight_quantizer": "weight",
    "input_quantizer": "input",
    "q_bmm_quantizer": "query",
    "k_bmm_quantizer": "key",
    "v_bmm_quantizer": "value",
    "p_bmm_quantizer": "softmax",
}


class QuantizerState(BaseModel):
    """One quantizer: enough to rebuild it with a bit-identical scale."""

    model_config = ConfigDict(extra="forbid")

    kind: Kind
    axis: int | None
    amax: float | list[float]  # a list when per-channel; float32 values, exact in JSON
    rms: float | None = None  # of an activation while calibrating


class CalibrationRecord(BaseModel):
    """`calibration.json`: every amax, and the data that it came from."""

    model_config = ConfigDict(extra="forbid")

    schema_version: Literal[1] = 1
    method: str
    seed: int
    data: dict[str, Any]  # source, split, fingerprint, samples, tokens, lengths
    notes: list[str]
    quantizers: dict[str, QuantizerState]

    def rows(self) -> list[QuantizerRow]:
        """The quantizers as rows of results.json."""
        return [_row(name, state) for name, state in self.quantizers.items()]


def modelopt_config(plan: Plan) -> dict[str, Any]:
    """ModelOpt configuration for a plan: everything denied, then exact quantizer names.

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
        softmax = {**per_tensor, "constant_amax": SOFTMAX_AMAX}
        entries.append({"quantizer_name": f"{name}.p_bmm_quantizer", "cfg": softmax})
    return {"quant_cfg": entries, "algorithm": None}


def insert_quantizers(model: "PreTrainedModel", plan: Plan) -> dict[str, Any]:
    """Insert ModelOpt's fake quantizers into `model`, in place, without calibrating them.

    Returns:
        The enabled quantizers by full name.

    Raises:
        CheckFailed: ModelOpt enabled other quantizers than the plan names.
    """
    mtq = import_modelopt()
    with _silent():
        mtq.quantize(model, modelopt_config(plan), None)
    found = enabled_quantizers(model)
    wanted = {f"{name}.{kind}" for name in plan.int8 for kind in ("weight_quantizer", "input_quantizer")}
    wanted |= {f"{name}.{x}_bmm_quantizer" for name in plan.attention for x in "qkvp"}
    if wanted != set(found):
        raise CheckFailed(
            f"ModelOpt enabled other quantizers than the recipe asks for: missing "
            f"{name_list(sorted(wanted - set(found))) or 'none'}; surplus "
            f"{name_list(sorted(set(found) - wanted)) or 'none'}"
        )
    return found


def enabled_quantizers(model: "PreTrainedModel") -> dict[str, Any]:
    """Enabled TensorQuantizer modules by full name, in model order."""
    from modelopt.torch.quantization.nn import TensorQuantizer

    return {n: m for n, m in model.named_modules() if isinstance(m, TensorQuantizer) and m.is_enabled}


def calibrate(
    model: "PreTrainedModel",
    plan: Plan,
    batches: Iterable[Batch],
    settings: Calibration,
    progress: Callable[[int], None] = lambda _: None,
) -> CalibrationRecord:
    """Insert quantizers and calibrate them in one pass; memory does not grow with the samples.

    Args:
        model: FP32 model, changed in place.
        plan: what becomes INT8.
        batches: int64 [B, L] arrays input_ids, attention_mask and token_type_ids. Batches of equal length
            hold no padding, so no quantizer sees a padded position (Model-Optimizer issue 1261).
        settings: the recipe's calibration section.
        progress: called with the number of samples of each batch.

    Raises:
        UserError: no batches.
        CheckFailed: weights or an amax that are not finite, positive and plausible; names every layer.
    """
    mtq = import_modelopt()
    _require_finite_weights(model)
    quantizers = insert_quantizers(model, plan)
    lengths: list[int] = []

    def forward_loop(inner: "PreTrainedModel") -> None:
        for batch in batches:
            forward(inner, batch)
            lengths.extend(batch["attention_mask"].sum(axis=1).tolist())
            progress(len(batch["input_ids"]))

    with _silent(), _moments(quantizers) as moments:
        mtq.calibrate(model, settings.method, forward_loop=forward_loop)
    if not lengths:
        raise UserError(f"calibration saw no samples of split {settings.split!r}; give a split that has rows")
    notes = _revive_dead_channels(model, quantizers)
    _round_weight_scales(quantizers)
    states = {name: _state(name, q, moments.get(name)) for name, q in quantizers.items()}
    require_plausible(states)
    return CalibrationRecord(
        method=settings.method,
        seed=settings.seed,
        data={"samples": len(lengths), **_lengths(lengths)},
        notes=notes,
        quantizers=states,
    )


def restore(model: "PreTrainedModel", plan: Plan, record: CalibrationRecord) -> None:
    """Rebuild the calibrated fake-quant model from `calibration.json`, scales bit for bit.

    Raises:
        UserError: the record is of another recipe or model.
    """
    import torch

    quantizers = insert_quantizers(model, plan)
    if set(quantizers) != set(record.quantizers):
        raise UserError("calibration.json is of another recipe or model; run `qdqbench quantize` again")
    device = next(model.parameters()).device
    for name, quantizer in quantizers.items():
        state = record.quantizers[name]
        amax = torch.tensor(state.amax, dtype=torch.float32, device=device)
        quantizer.amax = amax.reshape(-1, 1) if state.axis is not None else amax


def read_record(path: Path) -> CalibrationRecord:
    """Read `calibration.json`.

    Raises:
        UserError: missing or not of this schema.
    """
    try:
        return CalibrationRecord.model_validate(files.read_json(path))
    except ValidationError as error:
        raise UserError(f"{path} is not a calibration record of this version; quantize again") from error


def write_record(path: Path, record: CalibrationRecord) -> None:
    """Write `calibration.json` atomically."""
    files.write_text(path, record.model_dump_json() + "\n")


def require_plausible(states: dict[str, QuantizerState]) -> None:
    """Hold every amax to be finite, positive and plausible.

    Raises:
        CheckFailed: names every offender with its value.
    """
    problems = [f"{name}: {why}" for name, state in states.items() if (why := _implausible(state))]
    if problems:
        raise CheckFailed(
            f"calibration gave {len(problems)} unusable amax values ({'; '.join(problems)}); check the "
            f"weights for NaN and the calibration data, or keep these layers in FP16 with a rule"
        )


def _require_finite_weights(model: "PreTrainedModel") -> None:
    import torch

    bad = [name for name, value in model.named_parameters() if not torch.isfinite(value).all()]
    if bad:
        raise CheckFailed(
            f"the model's weights hold NaN or infinity in {name_list(bad)}; train or save it again"
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


def forward(model: "PreTrainedModel", batch: Batch) -> "torch.Tensor":
    """Logits [B, num_labels] of one batch, on the model's device, without gradients."""
    import torch

    device = next(model.parameters()).device
    with torch.inference_mode():
        output = model(**{name: torch.from_numpy(array).to(device) for name, array in batch.items()})
    return output.logits  # type: ignore[no-any-return]


def import_modelopt() -> Any:
    """`modelopt.torch.quantization`, without its warning on transformers versions that it did not test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import modelopt.torch.quantization as mtq
    return mtq


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """ModelOpt prints what it registers and inserts."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


@contextlib.contextmanager
def _moments(quantizers: dict[str, Any]) -> Iterator[dict[str, float]]:
    """Root mean square of everything that each activation quantizer sees; filled when the block ends."""
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    result: dict[str, float] = {}

    def watch(name: str) -> Callable[[Any, tuple[Any, ...]], None]:
        def hook(_: Any, inputs: tuple[Any, ...]) -> None:
            power = float(inputs[0].double().square().sum())
            if not math.isfinite(power):  # ModelOpt would fail here without naming the layer
                raise CheckFailed(f"calibration met NaN or infinity at {name}; look at the layers before it")
            sums[name] = sums.get(name, 0.0) + power
            counts[name] = counts.get(name, 0) + inputs[0].numel()

        return hook

    hooks = [q.register_forward_pre_hook(watch(n)) for n, q in quantizers.items() if _kind(n) != "weight"]
    try:
        yield result
    finally:
        for hook in hooks:
            hook.remove()
        result.update({name: math.sqrt(sums[name] / counts[name]) for name in sums})


def _revive_dead_channels(model: "PreTrainedModel", quantizers: dict[str, Any]) -> list[str]:
    """Give all-zero weight channels (pruned heads) their layer's scale: their codes are 0 anyway."""
    import torch

    notes = []
    for name, quantizer in quantizers.items():
        amax = quantizer.amax
        if _kind(name) != "weight" or amax is None or amax.numel() == 1 or not torch.isfinite(amax).all():
            continue
        dead = amax == 0
        if dead.any() and not dead.all():
            quantizer.amax = torch.where(dead, amax.max(), amax)
            notes.append(f"{name}: {int(dead.sum())} output channels are all zero")
    return notes


def _round_weight_scales(quantizers: dict[str, Any]) -> None:
    """Round weight scales up to FP16's 11 significant bits, so that none of it is lost in FP16.

    The factored form multiplies by the scales in FP16: with these that product rounds once and not twice. A
    scale grows by at most one part in 1,024, so nothing is clipped.
    """
    import torch

    for name, quantizer in quantizers.items():
        if _kind(name) != "weight" or not torch.isfinite(quantizer.amax).all():
            continue
        mantissa, exponent = torch.frexp(quantizer.amax / INT8_MAX)
        scale = torch.ldexp(torch.ceil(mantissa * 2**FP16_BITS), exponent - FP16_BITS)
        quantizer.amax = scale * INT8_MAX  # 7 and 11 bits: exact in FP32


def _state(name: str, quantizer: Any, rms: float | None) -> QuantizerState:
    amax = quantizer.amax
    values = [] if amax is None else amax.detach().float().cpu().flatten().tolist()
    scalar = amax is not None and quantizer.axis is None
    return QuantizerState(
        kind=_kind(name), axis=quantizer.axis, amax=values[0] if scalar else values, rms=rms
    )


def _kind(name: str) -> Kind:
    return _KINDS[name.rpartition(".")[2]]


def _row(name: str, state: QuantizerState) -> QuantizerRow:
    values = np.atleast_1d(np.asarray(state.amax, dtype=np.float64))
    return QuantizerRow(
        name=name,
        module=name.rpartition(".")[0],
        kind=state.kind,
        axis=state.axis,
        amax=float(values.max()),
        amax_min=float(values.min()),
        amax_over_rms=float(values.max() / state.rms) if state.rms else None,
    )


def _lengths(lengths: list[int]) -> dict[str, Any]:
    values = np.array(lengths)
    quantiles = {f"p{q}": int(np.percentile(values, q, method="lower")) for q in (50, 90, 99)}
    return {
        "tokens": int(values.sum()),
        "lengths": {
            "min": int(values.min()),
            **quantiles,
            "max": int(values.max()),
            "mean": float(values.mean()),
        },
    }
