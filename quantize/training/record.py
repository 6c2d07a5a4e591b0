"""What a training leaves behind: its record, kept beside the model, and the spread over seeds."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qdqbench.quantize.recipe.training import Training
from qdqbench.quantize.training.loop import Trained
from qdqbench.quantize.training.processes import resolve_precision
from qdqbench.quantize.training.rows import TrainingData, total_steps
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import CheckFailed, UserError
from qdqbench.quantize.utils.results import Spread, TrainingRun
from qdqbench.quantize.utils.schema import Strict, read

if TYPE_CHECKING:
    from accelerate import Accelerator

RECORD = "training.json"
CHECKPOINTS = "checkpoints"


def start_record(settings: Training, data: TrainingData, accelerator: "Accelerator") -> TrainingRun:
    """Return the record of a run that is about to begin."""
    import torch

    cuda = accelerator.device.type == "cuda"
    return TrainingRun(
        seed=settings.seed,
        status="done",
        settings=settings.model_dump(mode="json"),
        precision=resolve_precision(settings.precision),
        device=torch.cuda.get_device_name(accelerator.device) if cuda else "CPU",
        processes=accelerator.num_processes,
        rows=len(data.rows),
        held_out=len(data.held_out),
        planned_steps=total_steps(data, settings),
    )


def complete_record(run: TrainingRun, outcome: Trained) -> TrainingRun:
    """Return the record with what came of it."""
    return run.model_copy(
        update={
            "steps": outcome.steps,
            "best_step": outcome.best_step,
            "stopped": outcome.stopped,
            "seconds": outcome.seconds,
            "samples_per_s": outcome.samples / outcome.seconds if outcome.seconds else None,
            "log": outcome.log,
        }
    )


class _Finished(Strict):
    identity: dict[str, Any]
    run: TrainingRun


def write_finished(path: Path, identity: dict[str, Any], run: TrainingRun) -> None:
    """Keep the record of a finished run beside its model."""
    files.write_json(path, _Finished(identity=identity, run=run).model_dump(mode="json"))


def read_finished(path: Path, identity: dict[str, Any]) -> TrainingRun | None:
    """Read the record of an earlier call, if it finished.

    Raises:
        UserError: it is of another model, task or setting.
    """
    if not path.is_file():
        return None
    stored = read(path, _Finished, "finished training", "give another --out folder")
    known = stored.identity
    if differing := sorted(key for key in {**known, **identity} if known.get(key) != identity.get(key)):
        raise UserError(
            f"{path.parent} holds a finished training of another {', '.join(differing)}; give another --out, "
            "or --overwrite to begin again"
        )
    return stored.run


def require_all(failed: list[str], path: Path) -> None:
    """End a command over seeds, after its report is written to `path`.

    Raises:
        CheckFailed: there are seeds that were not trained to their end, in words.
    """
    if failed:
        raise CheckFailed(
            f"not trained to the end: {', '.join(failed)}; {path} has the reasons, and the others"
        )


def held_out_score(run: TrainingRun) -> float:
    """Score of the weights that were kept, on the held-out rows."""
    return max((row.score for row in run.log if row.score is not None), default=float("-inf"))


def spread(found: list[dict[str, float]]) -> dict[str, Spread]:
    """Return the mean and standard deviation of every metric over runs."""
    result = {}
    for name in found[0] if found else ():
        values = np.array([metrics[name] for metrics in found])
        sd = float(np.std(values, ddof=1)) if len(values) > 1 else None
        result[name] = Spread(mean=float(values.mean()), sd=sd, n=len(values))
    return result
