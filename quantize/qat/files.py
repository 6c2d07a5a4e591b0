"""What QAT leaves in a run: an ordinary model folder, its scales, and the same in ModelOpt's own form."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from qdqbench.quantize.calibrate.record import (
    CalibrationRecord,
    quantizer_state,
    require_plausible,
    write_record,
)
from qdqbench.quantize.calibrate.smoothing import take_back
from qdqbench.quantize.calibrate.splitting import merge
from qdqbench.quantize.core import files
from qdqbench.quantize.core.errors import CheckFailed
from qdqbench.quantize.core.names import name_list
from qdqbench.quantize.core.training_results import TrainingRun
from qdqbench.quantize.fakequant.quantizers import enabled_quantizers
from qdqbench.quantize.families.known import family_of
from qdqbench.quantize.machine.quiet import quiet
from qdqbench.quantize.qat.modelopt import save_modelopt
from qdqbench.quantize.rundir.session import QAT, Session
from qdqbench.quantize.train.record import CHECKPOINTS, RECORD

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def write_trained(
    session: Session, model: "PreTrainedModel", record: CalibrationRecord, run: TrainingRun
) -> list[Path]:
    """Write model, record and training log, and prove that they rebuild the trained model."""
    folder = session.folder / QAT
    trained = trained_record(model, record)
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
    """Once the stage is recorded: killed before, it goes on from the last one and trains no step again."""
    shutil.rmtree(session.folder / QAT / CHECKPOINTS, ignore_errors=True)


def trained_record(model: "PreTrainedModel", record: CalibrationRecord) -> CalibrationRecord:
    """The calibration record with the final amax; what was added to biases is in the trained ones.

    Raises:
        CheckFailed: an amax that is no longer plausible.
    """
    states = {
        name: quantizer_state(name, quantizer, record.quantizers[name].rms)
        for name, quantizer in enabled_quantizers(model).items()
    }
    require_plausible(states)
    return record.model_copy(update={"quantizers": states, "shifts": {}, "centers": {}, "biases": {}})


def _save_plain(session: Session, model: "PreTrainedModel", record: CalibrationRecord, folder: Path) -> None:
    """An ordinary Hugging Face folder: no quantizers, no smoothing factors in the weights, no copies."""
    plain = session.new_model()
    weights = merge(take_back(model, record.smoothing), record.splits, family_of(model.config))
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
