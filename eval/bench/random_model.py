"""A model of a published size with random weights, and scales from random token ids: for latency alone."""

from pathlib import Path
from typing import Any

from qdqbench.eval.accuracy.runners import placed
from qdqbench.eval.bench.lanes import session_sets
from qdqbench.quantize.calibrate import ptq
from qdqbench.quantize.calibrate.record import CalibrationRecord
from qdqbench.quantize.core import files
from qdqbench.quantize.encoders.identity import says_pooling
from qdqbench.quantize.encoders.load import load_model
from qdqbench.quantize.encoders.pooling import Pooling
from qdqbench.quantize.machine.quiet import quiet
from qdqbench.quantize.rundir.session import Session
from qdqbench.quantize.tasks.task import EMBED, Task

RANDOM_SAMPLES, RANDOM_BATCH = 32, 8  # of random ids: only latency is measured, so few are enough


def random_ids_task(model: str | None, pooling: Pooling | None = None) -> Task:
    """A task without data for a model folder; None: for a model of `write_random_model`."""
    if pooling or (model is not None and says_pooling(model)):
        return EMBED.model_copy(update={"name": "random-token-ids"})
    labels = int(load_model(model).config.num_labels or 0) if model else 2
    metrics = ("pearson",) if labels == 1 else ("accuracy",)
    return Task(name="random-token-ids", text_columns=("sentence",), num_labels=labels, metrics=metrics)


def calibrate_random_ids(session: Session, longest: int = 0) -> CalibrationRecord:
    """A record from random token ids; for latency alone, any finite scales make the same kernels.

    Samples have the recipe's `export.max_length` tokens, or `longest` where that is more: a softmax over them
    is nearly even, and INT8 with scale 1/127 makes it zero from 255 tokens on. Biases are not corrected: that
    changes no kernel and took two thirds of the time.
    """
    model, recipe = placed(session.new_int8_model()), session.recipe
    length = min(max(recipe.export.max_length, longest), session.plan.family.positions(model.config))
    batches = session_sets(session, RANDOM_BATCH, length, RANDOM_SAMPLES // RANDOM_BATCH)
    settings = recipe.calibration.model_copy(update={"bias_correction": False})
    return ptq.calibrate(model, session.plan, batches, settings)


def write_random_model(folder: Path, shape: dict[str, Any], seed: int) -> None:
    """Save a classifier of a shape with seeded random weights; an existing one is kept."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    stamp = folder / "seed.json"
    wanted = {**shape, "seed": seed}
    if stamp.is_file() and files.read_json(stamp) == wanted:
        return
    stamp.unlink(missing_ok=True)
    with torch.random.fork_rng(devices=[]), quiet("transformers"):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(**shape, num_labels=2)
        classifier: Any = AutoModelForSequenceClassification
        classifier.from_config(config).save_pretrained(folder)
    files.write_json(stamp, wanted)
