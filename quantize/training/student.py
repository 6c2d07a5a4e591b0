"""A quantized model as a student: what is trained of it, and how it is written so that it can be rebuilt."""

import math
import shutil
from pathlib import Path

import torch
from transformers import PreTrainedModel

from qdqbench.quantize.calibration import ptq
from qdqbench.quantize.calibration import record as records
from qdqbench.quantize.calibration.fakequant import native
from qdqbench.quantize.calibration.fakequant.quantizers import forward, list_quantizers
from qdqbench.quantize.calibration.techniques import qkv_bias_folding
from qdqbench.quantize.models.families.known import family_of
from qdqbench.quantize.pipeline.session import CHECKPOINTS, Session
from qdqbench.quantize.recipe.plan import Plan, list_bias_free_linears
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.arrays import Batch
from qdqbench.quantize.utils.errors import CheckFailed, UserError
from qdqbench.quantize.utils.names import name_list
from qdqbench.quantize.utils.system.quiet import quiet

STATE = "modelopt_state.pth"
SMALLEST = 1e-12  # noise


def to_db(noise: float) -> float:
    """Return a noise, relative to its signal, as SQNR in dB; NaN of NaN."""
    return noise if math.isnan(noise) else -10 * math.log10(max(noise, SMALLEST))


def prepare(
    model: PreTrainedModel,
    plan: Plan,
    record: records.CalibrationRecord,
    batches: list[Batch],
    *,
    learns_amax: bool,
) -> PreTrainedModel:
    """Let a calibrated model be trained, in place: quantizers with gradients, and amax with ratios if asked.

    Biases have the means of inputs to `batches` until `native.settle_learned`.

    UserError: outlier channels are split in some layers alone, so that the model could not be saved.
    """
    layers = len(family_of(model.config).layer_names(model))
    if record.splits and len(record.splits) != layers:
        raise UserError(
            f"training with outlier_channel_splitting needs the second feed-forward linear of all {layers} "
            f"layers in INT8, and {len(record.splits)} are: a model whose layers differ in size cannot be "
            "saved; quantize the others, or drop outlier_channel_splitting"
        )
    for name in list_bias_free_linears(plan):  # a bias that comes back is a kernel again
        bias = model.get_submodule(name).bias
        if isinstance(bias, torch.Tensor):
            bias.requires_grad_(False)
    native.use_native(model)
    if learns_amax:
        native.learn_amax(model, together=qkv_bias_folding.group_shared_scales(plan))
    native.take_means(model, lambda: [forward(model, batch) for batch in batches])
    return model


def write_trained(
    session: Session, training: str, model: PreTrainedModel, record: records.CalibrationRecord
) -> None:
    """Write model and record into the folder of a training, and prove that they rebuild weights and scales.

    `record` is of the model before: that of PTQ, or of the training before.
    """
    folder, trained = session.folder / training, records.trained_record(model, record)
    plain = session.new_model()  # no quantizers, no smoothing factors in weights, no copies
    weights = ptq.take_out(model, trained)
    plain.load_state_dict({name: weights[name] for name in plain.state_dict()})
    with files.atomic_folder(folder / "model") as temporary, quiet("transformers"):
        plain.save_pretrained(temporary)
        session.tokenizer.save_pretrained(temporary)
    records.write_record(folder / "calibration.json", trained)
    if trained.centering.inputs:
        shutil.rmtree(folder / "modelopt", ignore_errors=True)  # of a training before
        session.notes.append(
            f"{folder / 'modelopt'} is left out: ModelOpt has no place for the constants of centering; with "
            "calibration.centering: false it is written"
        )
    else:
        with files.atomic_folder(folder / "modelopt") as temporary, quiet("transformers"):
            save_modelopt(model, temporary)
    rebuilt = session.new_trained_model(training).state_dict()
    differing = [name for name, value in model.state_dict().items() if not torch.equal(value, rebuilt[name])]
    if differing:
        raise CheckFailed(f"{folder} does not rebuild the trained model: {name_list(differing)} differ")


def list_written(folder: Path) -> list[Path]:
    """Return the files in the folder of a training, without its checkpoints."""
    written = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in written if CHECKPOINTS not in path.relative_to(folder).parts)


def save_modelopt(model: PreTrainedModel, folder: Path) -> None:
    """Write a calibrated fake-quant model as ModelOpt does; after `settle_learned` where it was trained.

    The folder is that of `mto.enable_huggingface_checkpointing()` and `save_pretrained` (how-to/qat.md), but
    transformers is not patched; weights hold the factors of smoothing. Plain ModelOpt ignores a quantizer on
    the softmax output, and refuses quantizers in modules unknown to it (residuals).
    """
    from modelopt.torch.opt import modelopt_state
    from modelopt.torch.utils.serialization import safe_save

    if any(quantizer.backend == native.BACKEND for quantizer in list_quantizers(model).values()):
        raise RuntimeError("the model computes as in training; settle_learned(model) before it is saved")
    with quiet("transformers"):
        model.save_pretrained(folder)
    with torch.no_grad():
        safe_save(modelopt_state(model), folder / STATE)
