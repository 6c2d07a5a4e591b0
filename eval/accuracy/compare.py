"""A stage against FP32 on the same samples."""

import numpy as np
import numpy.typing as npt

from qdqbench.eval.accuracy.gate import NOISE
from qdqbench.quantize.core.arrays import Array, Floats
from qdqbench.quantize.core.results import Comparison
from qdqbench.quantize.tasks import metrics
from qdqbench.quantize.tasks.task import Task


def compare(
    task: Task,
    reference_logits: Floats,
    logits: Floats,
    labels: metrics.Labels,
    *,
    seed: int,
) -> Comparison:
    """Paired comparison of a stage with FP32.

    Both stages answer the same samples, so their errors go together and the difference is known far better
    than either metric; unpaired tests would call real drops noise (Dror et al. 2018, "The Hitchhiker's Guide
    to Testing Statistical Significance in NLP"). Classes: exact McNemar test (McNemar 1947), the two-sided
    binomial test on the samples that one stage alone gets right. Every metric: paired bootstrap (Efron and
    Tibshirani 1993), both stages scored on the same resamples.

    Args:
        reference_logits: float32 [n, num_labels] of FP32.
        logits: The same of the stage.
        labels: int64 classes or float32 scores, [n].

    Raises:
        CheckFailed: wrong shape, NaN or infinite logits.
        UserError: regression labels that are all equal.
    """
    before = metrics.compute(task, reference_logits, labels)
    after = metrics.compute(task, logits, labels)
    delta = {name: after[name] - before[name] for name in task.metrics}
    systems = [metrics.predictions(task, each, labels) for each in (reference_logits, logits)]
    found = metrics.bootstrap(task, labels, systems, seed=seed, resamples=metrics.RESAMPLES)
    errors = {name: float(np.std(values[1] - values[0], ddof=1)) for name, values in found.items()}
    primary, counted = task.metrics[0], task.kind.right_or_wrong
    difference = logits.astype(np.float64) - reference_logits.astype(np.float64)
    return Comparison(
        delta=delta,
        delta_stderr=errors,
        n=len(labels),
        disagreements=int((systems[0] != systems[1]).sum()) if counted else None,
        mcnemar_p=_mcnemar(systems[0] == labels, systems[1] == labels) if counted else None,
        within_noise=abs(delta[primary]) <= NOISE * errors[primary],
        mean_abs_logit_diff=float(np.abs(difference).mean()),
        sqnr_db=_sqnr_db(reference_logits.astype(np.float64), difference),
    )


def _mcnemar(before: npt.NDArray[np.bool_], after: npt.NDArray[np.bool_]) -> float:
    """Two-sided p of the samples that one stage alone gets right; 1 when there is none."""
    from scipy import stats

    lost, won = int((before & ~after).sum()), int((~before & after).sum())
    return float(stats.binomtest(lost, lost + won).pvalue) if lost + won else 1.0


def _sqnr_db(reference: Array, difference: Array) -> float | None:
    """Signal to noise in dB; None when there is no noise, or no signal."""
    signal, noise = float((reference**2).sum()), float((difference**2).sum())
    return float(10 * (np.log10(signal) - np.log10(noise))) if signal and noise else None
