"""Quantization-aware training: the PTQ model goes on learning from its FP32 original, with Q/DQ in place.

Placement and first scales are those of PTQ (`calibration.json`). The teacher is the FP32 model (Hinton et al.
2015, arXiv 1503.02531); its answers are computed once. What comes out is an ordinary Hugging Face folder, and
a calibration record: together they rebuild the trained fake-quant model bit for bit.
"""

import contextlib
import hashlib
import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qdqbench.quantize.calibration.fakequant import quantizers
from qdqbench.quantize.calibration.fakequant.quantizers import import_modelopt, list_quantizers
from qdqbench.quantize.calibration.record import (
    CalibrationRecord,
    read_quantizer_state,
    read_record,
    require_plausible,
    write_record,
)
from qdqbench.quantize.calibration.smoothing import remove_copies, remove_factors
from qdqbench.quantize.models.families.known import family_of
from qdqbench.quantize.models.load import load_model
from qdqbench.quantize.pipeline.session import QAT, Session
from qdqbench.quantize.recipe.training import Qat
from qdqbench.quantize.training.checkpoints import WEIGHTS
from qdqbench.quantize.training.loop import train
from qdqbench.quantize.training.processes import count_processes, join_group, leave_group, new_accelerator
from qdqbench.quantize.training.record import CHECKPOINTS, RECORD, complete_record, start_record
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import CheckFailed, UserError
from qdqbench.quantize.utils.names import name_list
from qdqbench.quantize.utils.results import TrainingRun
from qdqbench.quantize.utils.system.environment import get_code_identity
from qdqbench.quantize.utils.system.process import is_main_process
from qdqbench.quantize.utils.system.quiet import quiet

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel

STATE = "modelopt_state.pth"


def save_modelopt(model: "PreTrainedModel", folder: Path) -> None:
    """Write a calibrated fake-quant model as ModelOpt does; after `settle_learned` where it was trained.

    The folder is that of `mto.enable_huggingface_checkpointing()` and `save_pretrained`: config.json,
    model.safetensors with the quantizers' buffers (weights hold the factors of smoothing), and
    modelopt_state.pth. transformers is not patched for that. A script without qdqbench loads it with

        import modelopt.torch.opt as mto
        from transformers import AutoModelForSequenceClassification
        mto.enable_huggingface_checkpointing()
        model = AutoModelForSequenceClassification.from_pretrained(folder)

    and has every scale. It computes the same up to rounding if the recipe leaves attention in FP16, with any
    attention of transformers (`attn_implementation`). INT8 attention and residuals need `load_modelopt`:
    ModelOpt ignores a quantizer on the softmax output, and refuses quantizers in modules unknown to it.

    Raises:
        RuntimeError: its quantizers are those of training.
    """
    import torch
    from modelopt.torch.opt import modelopt_state
    from modelopt.torch.utils.serialization import safe_save

    from qdqbench.quantize.calibration.fakequant.native import BACKEND

    if any(quantizer.backend == BACKEND for quantizer in list_quantizers(model).values()):
        raise RuntimeError("the model computes as in training; settle_learned(model) before it is saved")
    with quiet("transformers"):
        model.save_pretrained(folder)
    with torch.no_grad():
        safe_save(modelopt_state(model), folder / STATE)


def load_modelopt(folder: Path) -> "PreTrainedModel":
    """Load the fake-quant model of `save_modelopt`, in FP32 and eval mode: every bit as it was saved.

    Runs no code from the files: the state is read with `weights_only`.

    Raises:
        UserError: not such a folder, or damaged.
    """
    from modelopt.torch.opt.conversion import ModeloptStateManager, restore_from_modelopt_state
    from safetensors.torch import load_file

    state = _read_state(folder / STATE)
    model = load_model(str(folder))
    names = [name for name in _quantizers(state) if name.endswith(quantizers.RESIDUAL_QUANTIZER)]
    try:
        if not ModeloptStateManager.is_converted(model):  # it is where transformers was patched
            with (
                contextlib.redirect_stdout(io.StringIO()),
                quantizers.register_residuals(model, names),
            ):
                restore_from_modelopt_state(model, state)
        model.load_state_dict(load_file(folder / WEIGHTS))
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"{folder / STATE} and {WEIGHTS} are not of one model: {type(error).__name__}: {reason}"
        ) from error
    return model


def _read_state(path: Path) -> dict[str, Any]:
    from modelopt.torch.opt.conversion import load_modelopt_state

    if not path.is_file():
        raise UserError(f"{path} does not exist; give a folder that holds a model saved by ModelOpt")
    import_modelopt()  # its modes
    try:
        state: dict[str, Any] = load_modelopt_state(path)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path} is not a ModelOpt state: {type(error).__name__}: {reason}") from error
    return state


def _quantizers(state: dict[str, Any]) -> list[str]:
    """Return the full names of the quantizers in a state."""
    return [
        name
        for _, mode in state["modelopt_state_dict"]
        for name in mode.get("metadata", {}).get("quantizer_state", {})
    ]


def train_qat(session: Session) -> list[Path]:
    """Run the stage: train, and write `qat/`."""
    if session.accelerator is None and count_processes() > 1:
        raise UserError(
            f"{count_processes()} processes would each go through this run; under a launcher use "
            "`-m qdqbench qat`"
        )
    session.before_training()
    return train_quantized(session, session.accelerator or new_accelerator(get_settings(session).precision))


def get_settings(session: Session) -> Qat:
    """Return the recipe's QAT section.

    Raises:
        UserError: it has none.
    """
    settings = session.recipe.qat
    if settings is None:
        raise UserError(
            f"recipe {session.recipe.name} has no qat section; add one such as `qat: {{epochs: 3}}`, or take "
            "a shipped recipe whose name ends in -qat"
        )
    if not session.recipe.quantizes:
        raise UserError(f"recipe {session.recipe.name} quantizes nothing, so its qat section has no object")
    return settings


def train_on_all(session: Session, lead: Callable[[str], object]) -> None:
    """Take a run up to its training, and train on all processes that a launcher started.

    The main process does PTQ alone, before the processes meet: ModelOpt's calibration would wait for the
    others. They wait where the process group is made, and end when there is nothing to train.

    Args:
        lead: runs the stages up to the named one; called in the main process.
    """
    from accelerate.utils import broadcast_object_list

    if is_main_process():
        lead("ptq")
    with join_group():
        accelerator = new_accelerator(get_settings(session).precision)
        if not is_main_process():
            if broadcast_object_list([None])[0]:
                train_quantized(session, accelerator)
            return
        warned = False

        def tell() -> None:
            nonlocal warned
            warned = True
            broadcast_object_list([True])

        session.accelerator, session.before_training = accelerator, tell
        try:
            lead("qat")
        finally:
            session.accelerator, session.before_training = None, lambda: None
            if not warned:
                broadcast_object_list([False])


def train_quantized(session: Session, accelerator: "Accelerator") -> list[Path]:
    """Train on every process; the main one writes the files.

    Raises:
        UserError: a checkpoint of another run.
        CheckFailed: the training diverged, or what was written does not rebuild the model.
    """
    from qdqbench.quantize.calibration.fakequant import native
    from qdqbench.quantize.training.qat.job import load_training_data, new_job, prepare_student

    settings = get_settings(session)
    record = read_record(session.folder / "calibration.json")
    data, fingerprint = load_training_data(session, settings)
    model = prepare_student(session, settings)
    job = new_job(session, settings, accelerator, model, data)
    job.identity = _identity(session, settings, record, fingerprint)
    run = start_record(settings, data, accelerator)
    run.parameters = sum(p.numel() for p in model.parameters())
    outcome = train(job, accelerator)
    leave_group()  # what follows is done by the main process alone
    native.settle_learned(model)
    native.use_modelopt(model)
    run = complete_record(run, outcome).model_copy(update={"folder": "model", "notes": job.notes})
    session.notes += job.notes
    return write_trained(session, model.cpu(), record, run) if accelerator.is_main_process else []


def _identity(session: Session, settings: Qat, record: CalibrationRecord, fingerprint: str) -> dict[str, Any]:
    """Return the identity of a run: equal for the same run; JSON values."""
    recipe = session.recipe
    placed = [rule.model_dump(mode="json") for rule in recipe.rules], recipe.attention, recipe.export.gelu
    return {
        "job": "qat",
        **get_code_identity(),
        "model": session.model_sha256,
        "task": session.config.task.model_dump(mode="json"),
        "data": fingerprint,
        "max_length": recipe.export.max_length,
        "recipe": hashlib.sha256(str(placed).encode()).hexdigest(),
        "calibration": hashlib.sha256(record.model_dump_json().encode()).hexdigest(),
        **settings.model_dump(mode="json"),
    }


def write_trained(
    session: Session, model: "PreTrainedModel", record: CalibrationRecord, run: TrainingRun
) -> list[Path]:
    """Write model, record and training log, and prove that they rebuild the trained model."""
    folder = session.folder / QAT
    trained = make_trained_record(model, record)
    with files.atomic_folder(folder / "model") as temporary, quiet("transformers"):
        _save_plain(session, model, trained, temporary)
    write_record(folder / "calibration.json", trained)
    with files.atomic_folder(folder / "modelopt") as temporary, quiet("transformers"):
        save_modelopt(model, temporary)
    require_rebuilt(session, model)
    files.write_text(folder / RECORD, run.model_dump_json(indent=2) + "\n")
    written = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in written if CHECKPOINTS not in path.relative_to(folder).parts)


def remove_checkpoints(session: Session) -> None:
    """Remove checkpoints once the stage is recorded; killed before, it resumes and trains no step again."""
    shutil.rmtree(session.folder / QAT / CHECKPOINTS, ignore_errors=True)


def make_trained_record(model: "PreTrainedModel", record: CalibrationRecord) -> CalibrationRecord:
    """Return the calibration record with the final amax; what was added to biases is in the trained ones.

    Raises:
        CheckFailed: an amax that is no longer plausible.
    """
    states = {
        name: read_quantizer_state(name, quantizer, record.quantizers[name].rms)
        for name, quantizer in list_quantizers(model).items()
    }
    require_plausible(states)
    return record.model_copy(update={"quantizers": states, "shifts": {}, "centers": {}, "biases": {}})


def _save_plain(session: Session, model: "PreTrainedModel", record: CalibrationRecord, folder: Path) -> None:
    """Save an ordinary Hugging Face folder: no quantizers, no smoothing factors in weights, no copies."""
    plain = session.new_model()
    weights = remove_copies(remove_factors(model, record.smoothing), record.splits, family_of(model.config))
    plain.load_state_dict({name: weights[name] for name in plain.state_dict()})
    plain.save_pretrained(folder)
    session.tokenizer.save_pretrained(folder)


def require_rebuilt(session: Session, model: "PreTrainedModel") -> None:
    """Rebuild the model from its files, and compare every weight and scale bit for bit.

    Raises:
        CheckFailed: names what differs.
    """
    import torch

    rebuilt = session.new_qat_model().state_dict()
    differing = [name for name, value in model.state_dict().items() if not torch.equal(value, rebuilt[name])]
    if differing:
        raise CheckFailed(
            f"{session.folder / QAT} does not rebuild the trained model: {name_list(differing)} differ"
        )
