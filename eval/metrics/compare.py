"""A stage against FP32 on the same samples."""

from collections.abc import Iterable

import numpy as np

from qdqbench.eval.metrics.results import COSINE_EDGES, Agreement, Comparison
from qdqbench.quantize.tasks import metrics
from qdqbench.quantize.tasks.metrics import NOISE, RULE_OF_THREE, Gold
from qdqbench.quantize.tasks.task import EMBED, Task
from qdqbench.quantize.tasks.types.embedding import NEIGHBORS
from qdqbench.quantize.utils.arrays import Array, Float64, Floats


def divergence(task: Task, reference: Floats, answers: Floats, gold: Gold) -> Float64:
    """Return the divergence of answers [answers, width] from FP32's by sample, float64 [samples].

    Classes: KL(FP32 || candidate) of the probabilities, in nat; of a sample with several answers their mean.
    Regression: squared difference over the variance of FP32's outputs, which must not be zero.
    """
    return task.kind.divergence(reference.astype(np.float64), answers.astype(np.float64), gold)


def agreement_of(reference: Floats, answers: Floats, *, seed: int) -> Agreement:
    """Return cosine and neighbors of embeddings [texts, width] of FP32 and a stage.

    Errors are those of a bootstrap over texts with fixed neighbors.
    """
    table = metrics.predict(EMBED, answers, reference)
    drawn = metrics.bootstrap(EMBED, reference, [table], seed=seed, resamples=metrics.RESAMPLES)
    distances, kept = 1 - table[:, 0], np.rint(table[:, 1] * NEIGHBORS).astype(np.int64)
    return Agreement(
        n=len(table),
        values={name: EMBED.kind.metrics[name].value(table) for name in EMBED.metrics},
        stderr={name: float(np.std(values[0], ddof=1)) for name, values in drawn.items()},
        cosine_counts=np.bincount(
            np.searchsorted(COSINE_EDGES, distances), minlength=len(COSINE_EDGES) + 1
        ).tolist(),
        neighbor_counts=np.bincount(kept, minlength=NEIGHBORS + 1).tolist(),
    )


def compare(
    task: Task, reference_answers: Floats, answers: Floats, gold: metrics.Gold, *, seed: int
) -> Comparison:
    """Compare answers [answers, width] of a stage with FP32's, paired by sample.

    Paired errors are far smaller than those of either metric; unpaired tests would call real drops noise
    (Dror et al. 2018, "The Hitchhiker's Guide to Testing Statistical Significance in NLP"). Samples that are
    right or wrong: exact McNemar test (McNemar 1947). Every metric: paired bootstrap (Efron and Tibshirani
    1993), both stages scored on the same resamples.

    Raises:
        CheckFailed: wrong shape, NaN or infinite answers.
        UserError: regression labels that are all equal.
    """
    gold = metrics.select_reference(task, gold, reference_answers)
    kind, both = task.kind, (reference_answers, answers)
    before, after = (metrics.compute(task, each, gold) for each in both)
    delta = {name: after[name] - before[name] for name in task.metrics}
    systems = [metrics.predict(task, each, gold) for each in both]
    found = metrics.bootstrap(task, gold, systems, seed=seed, resamples=metrics.RESAMPLES)
    errors = {name: float(np.std(values[1] - values[0], ddof=1)) for name, values in found.items()}
    for name, error in errors.items():
        if delta[name] and not error:  # all changed alike, as one sample does: no resample tells of others
            errors[name] = RULE_OF_THREE**0.5 / len(gold)
    right = [hits for each in systems if (hits := kind.right(kind.table(each, gold))) is not None]
    primary = task.metrics[0]
    reference = reference_answers.astype(np.float64)
    difference = answers.astype(np.float64) - reference
    parts: Iterable[tuple[Array, Array, str | None]] = [(reference, difference, None)]
    if len(kind.outputs) > 1:  # along the last axis
        parts = zip(reference.T, difference.T, kind.outputs, strict=True)
    told = [(_compute_sqnr(one, apart), name) for one, apart, name in parts]
    (sqnr, sqnr_error), worst = min(told, key=lambda each: np.inf if each[0][0] is None else each[0][0])
    return Comparison(
        delta=delta,
        delta_stderr=errors,
        n=len(gold),
        disagreements=int((systems[0] != systems[1]).sum()) if right else None,
        mcnemar_p=_mcnemar(*right) if right else None,
        within_noise=abs(delta[primary]) <= NOISE * errors[primary],
        mean_abs_logit_diff=float(np.abs(difference).mean()),
        sqnr_db=sqnr,
        sqnr_db_stderr=sqnr_error,
        sqnr_output=worst,
        agreement=agreement_of(reference_answers, answers, seed=seed) if kind.embeds else None,
    )


def compare_with_divergence(
    task: Task, reference_answers: Floats, answers: Floats, gold: metrics.Gold, *, seed: int
) -> tuple[Comparison, Float64]:
    """Compare as `compare` does; return the divergence of each sample too, float64 [samples]."""
    comparison = compare(task, reference_answers, answers, gold, seed=seed)
    each = divergence(task, reference_answers, answers, gold)
    error = float(each.std(ddof=1) / np.sqrt(len(each))) if len(each) > 1 else 0.0
    update = {"divergence": float(each.mean()), "divergence_stderr": error}
    return comparison.model_copy(update=update), each


def _mcnemar(before: Array, after: Array) -> float:
    """Return the two-sided p-value of the samples that one stage alone gets right."""
    from scipy import stats

    lost, won = int((before & ~after).sum()), int((~before & after).sum())
    return float(stats.binomtest(lost, lost + won).pvalue) if lost + won else 1.0


def _compute_sqnr(reference: Array, difference: Array) -> tuple[float | None, float | None]:
    """Return 10 log10 of the ratio of powers, and its standard error over answers by the delta method; dB."""
    signals, noises = ((values**2).reshape(len(values), -1).sum(axis=1) for values in (reference, difference))
    signal, noise = float(signals.sum()), float(noises.sum())
    if not (signal and noise):
        return None, None
    error = float(np.sqrt(np.square(noises / noise - signals / signal).sum()))
    return float(10 * (np.log10(signal) - np.log10(noise))), 10 / float(np.log(10)) * error
