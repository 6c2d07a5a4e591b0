"""The samples that a choice of recipe is measured on: train rows that calibration does not see."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from qdqbench.quantize.tasks.rows import complete_samples, encode, load_split
from qdqbench.quantize.tasks.sources import Split
from qdqbench.quantize.tasks.types.encoded import Encoded
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.system.environment import describe_environment, now

if TYPE_CHECKING:
    from qdqbench.quantize.pipeline.session import Session


def draw_samples(session: "Session", samples: int, *, least: int = 2) -> tuple[Split, Encoded]:
    """Rows of the calibration split behind those that calibrate, in the same seeded order.

    Notes of the split, and that it has fewer rows, go to the session.

    Args:
        samples: rows to draw.
        least: rows without which nothing can be said, unless fewer were asked for.

    Raises:
        UserError: the calibration split is one that judges, or too few of its rows are left.
    """
    settings, task = session.recipe.calibration, session.config.task
    if settings.split in task.eval_splits:
        raise UserError(
            f"calibration.split is {settings.split!r}, the judge of task {task.name!r}; what is chosen is "
            f"measured beside the calibration data, so set calibration.split to {task.train_split}"
        )
    wanted = settings.samples + samples
    split = load_split(task, session.data_source, settings.split, limit=wanted, seed=settings.seed)
    known = [f"{wanted} samples asked for, split {settings.split!r} has {split.rows}", *session.notes]
    session.notes += [note for note in split.notes if note not in known]
    session.warnings += [line for line in split.warnings if line not in session.warnings]
    taken = complete_samples(split.dataset, task, settings.samples)
    left = len(split.dataset) - taken
    if left < min(samples, least):
        raise UserError(
            f"split {settings.split!r} of {split.source} has {split.rows} rows and calibration takes "
            f"{taken}, so {max(left, 0)} are left to measure on; lower calibration.samples in the "
            "recipe"
        )
    if left < samples:
        session.notes.append(
            f"measured on {left} samples, not {samples}: split {settings.split!r} has {split.rows} rows, and "
            f"calibration takes {taken}"
        )
    split = replace(split, dataset=split.dataset.select(range(taken, len(split.dataset))))
    encoded = encode(split, task, session.tokenizer, session.recipe.export.max_length)
    if encoded.truncated:
        session.notes.append(f"{encoded.truncated} samples were cut to export.max_length")
    return split, encoded


def described(session: "Session", split: Split, samples: int) -> dict[str, Any]:
    """Fields that results on such a draw share: what was measured, on what, where and when.

    Args:
        split: that `samples` were drawn from.
    """
    config, settings = session.config, session.recipe.calibration
    return {
        "created": now(),
        "command": config.command,
        "recipe": config.recipe.model_dump(mode="json"),
        "model": {"name": session.model_name, "sha256": session.model_sha256},
        "task": config.task.model_dump(mode="json"),
        "data": {
            "source": split.source,
            "fingerprint": split.fingerprint,
            "split": settings.split,
            "rows": split.rows,
            "calibration": settings.samples,
            "samples": samples,
            "seed": settings.seed,
        },
        "seed": config.seed,
        "batch_size": config.batch_size,
        "metric": config.task.metrics[0],
        "divergence": config.task.kind.divergence_name,
        "environment": describe_environment(),
    }
