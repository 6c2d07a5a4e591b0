"""What a comparison keeps as it goes, so that one that is killed goes on: rows, and answers of FP32."""

import json
from pathlib import Path

import numpy as np

from qdqbench.quantize.core import files
from qdqbench.quantize.core.arrays import Float32
from qdqbench.quantize.machine.environment import made_with
from qdqbench.quantize.rundir.ledger import Ledger
from qdqbench.quantize.rundir.session import Session

PARTIAL, ANSWERS = "methods.partial.jsonl", "methods.fp32.npz"
FP32 = "fp32"  # in the ledger


def open_ledger(session: Session, samples: int, fingerprints: list[str]) -> Ledger:
    """Finished rows of earlier calls; which methods are asked for may differ.

    Args:
        fingerprints: of the data that are measured on.
    """
    config = session.config
    settings = {
        "model": session.model_sha256,
        "recipe": config.recipe.model_dump(mode="json"),
        "task": config.task.model_dump(mode="json"),
        "data": fingerprints,
        "samples": samples,
        "limit": config.limit,
        "batch_size": config.batch_size,
        "seed": config.seed,
        **made_with(),
    }
    return Ledger(session.folder / PARTIAL, json.loads(json.dumps(settings)))


def kept_answers(folder: Path, ledger: Ledger) -> dict[str, Float32] | None:
    """Answers of FP32 by split; None where they are not there as they were written."""
    path, known = folder / ANSWERS, ledger.found.get(FP32)
    if known is None or not path.is_file() or files.sha256(path) != known["value"]["sha256"]:
        return None
    with np.load(path, allow_pickle=False) as kept:
        return {name.removeprefix("of "): kept[name] for name in kept.files}


def keep_answers(folder: Path, ledger: Ledger, answers: dict[str, Float32], seconds: float) -> None:
    """Write answers of FP32 by split.

    Raises:
        UserError: they cannot be written.
    """
    path = folder / ANSWERS
    with files.atomic_path(path) as temporary, temporary.open("wb") as stream:
        np.savez(stream, **{f"of {name}": each for name, each in answers.items()})  # type: ignore[arg-type]
    ledger.append(FP32, {"sha256": files.sha256(path)}, seconds)
