"""What one choice of INT8 tensors costs, and how far that can be trusted."""

import numpy as np

from qdqbench.eval.accuracy.compare import compare
from qdqbench.eval.accuracy.divergence import divergence
from qdqbench.eval.report.formats import count_of
from qdqbench.eval.sensitivity.results import Effect
from qdqbench.quantize.core.arrays import Float32
from qdqbench.quantize.recipe.schema import Recipe
from qdqbench.quantize.tasks import metrics
from qdqbench.quantize.tasks.task import Task

FEW = 64  # samples; below it the standard error of a metric means little


def effect_of(task: Task, reference: Float32, logits: Float32, gold: metrics.Gold, seed: int) -> Effect:
    """Everything that is reported of one choice of INT8 tensors; arguments as of `eval.compare.compare`.

    Raises:
        CheckFailed: NaN or infinite logits.
    """
    found = compare(task, reference, logits, gold, seed=seed)
    primary = task.metrics[0]
    each = divergence(task, reference, logits, gold)
    return Effect(
        metric=metrics.compute(task, logits, metrics.against(task, gold, reference))[primary],
        drop=-found.delta[primary] + 0.0,  # no negative zero
        drop_stderr=found.delta_stderr[primary],
        within_noise=found.within_noise,
        disagreements=found.disagreements,
        divergence=float(each.mean()),
        divergence_stderr=float(each.std(ddof=1) / np.sqrt(len(each))) if len(each) > 1 else 0.0,
        sqnr_db=found.sqnr_db,
    )


def limits_noted(recipe: Recipe, samples: int) -> list[str]:
    """What a reader must know of figures of a recipe on so many samples."""
    notes = []
    if samples < FEW:
        notes.append(
            f"{count_of(samples, 'sample')}: too few to judge a drop: a standard error of 0 says that no "
            f"answer changed, not that none would; take {FEW} or more"
        )
    if recipe.export.gelu == "tanh":
        notes.append(
            "FP32 is the recipe's model without quantizers; its GELU has the tanh form of the INT8 graph"
        )
    if recipe.calibration.bias_correction:
        notes.append(
            "measured without bias correction, which depends on everything that is in INT8; the written "
            "recipe has it"
        )
    smooths = {recipe.calibration.smooth, *(rule.smooth for rule in recipe.rules)} - {None, "none"}
    if smooths:
        notes.append(
            "the factors of smoothing are those of everything in INT8; a recipe that keeps a linear in FP16 "
            "finds its own"
        )
    return notes
