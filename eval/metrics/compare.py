"""A stage against FP32 on the same samples."""

from typing import NamedTuple

import numpy as np

from qdqbench.eval.metrics.results import COSINE_EDGES, Agreement, Comparison
from qdqbench.quantize.tasks import metrics
from qdqbench.quantize.tasks.kinds.embedding import NEIGHBORS
from qdqbench.quantize.tasks.kinds.kind import TaskKind
from qdqbench.quantize.tasks.metrics import NOISE, RULE_OF_THREE, Gold
from qdqbench.quantize.tasks.task import EMBED, Task
from qdqbench.quantize.utils.arrays import Array, Float64, Floats
from qdqbench.quantize.utils.errors import CheckFailed


class Powers(NamedTuple):
    """Powers by sample of FP32's answers and of the difference from them, in units of FP32's mean power."""

    signal: Float64  # [samples]
    noise: Float64  # [samples]
    output: str | None  # that they are of, the worst; None where the model has one


def measure_powers(kind: TaskKind, reference: Floats, answers: Floats, gold: Gold) -> Powers:
    """Return the powers of FP32's answers and of the difference, both [answers, width].

    SQNR is -10 log10 of the mean of `noise`. A sample has the sum over its answers.

    Raises:
        CheckFailed: FP32 answers 0 to every sample.
    """
    outputs, samples = [*kind.outputs], kind.answer_samples(gold)

    def by_sample(values: Floats) -> Float64:
        squares = np.square(values.astype(np.float64))
        columns = squares.T if len(outputs) > 1 else squares.sum(axis=1)[None]  # outputs are the last axis
        return np.array([np.bincount(samples, column, len(gold)) for column in columns])

    signals, noises = by_sample(reference), by_sample(answers.astype(np.float64) - reference)
    means = signals.mean(axis=1, keepdims=True)
    if not means.all():
        raise CheckFailed("FP32 answers 0 to every sample; the model or the data is broken")
    worst = int((noises / means).mean(axis=1).argmax())
    output = outputs[worst] if len(outputs) > 1 else None
    return Powers(signals[worst] / means[worst], noises[worst] / means[worst], output)


def compute_decibels(above: Float64, below: Float64) -> tuple[float | None, float | None]:
    """Return 10 log10 of the ratio of two sums over samples, and its standard error by the delta method.

    Both are None where a sum is 0.
    """
    one, other = float(above.sum()), float(below.sum())
    if not (one and other):
        return None, None
    error = float(np.sqrt(np.square(below / other - above / one).sum()))
    return float(10 * (np.log10(one) - np.log10(other))), 10 / float(np.log(10)) * error


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
        CheckFailed: wrong shape, NaN or infinite answers; FP32's are all 0.
        UserError: regression labels that are all equal.
    """
    gold = metrics.select_reference(task, gold, reference_answers)
    kind, both = task.kind, (reference_answers, answers)
    before, after = (metrics.compute(task, each, gold) for each in both)
    # 0.9 - 0.89 is a little over 0.01, which is no more than a limit of 0.01
    delta = {name: round(after[name] - before[name], 12) for name in task.metrics}
    systems = [metrics.predict(task, each, gold) for each in both]
    found = metrics.bootstrap(task, gold, systems, seed=seed, resamples=metrics.RESAMPLES)
    errors = {name: float(np.std(values[1] - values[0], ddof=1)) for name, values in found.items()}
    for name, error in errors.items():
        if delta[name] and not error:  # all changed alike, as one sample does: no resample tells of others
            errors[name] = RULE_OF_THREE**0.5 / len(gold)
    right = [hits for each in systems if (hits := kind.right(kind.table(each, gold))) is not None]
    primary = task.metrics[0]
    powers = measure_powers(kind, reference_answers, answers, gold)
    sqnr, sqnr_error = compute_decibels(powers.signal, powers.noise)
    return Comparison(
        delta=delta,
        delta_stderr=errors,
        n=len(gold),
        disagreements=int((systems[0] != systems[1]).sum()) if right else None,
        mcnemar_p=_mcnemar(*right) if right else None,
        within_noise=abs(delta[primary]) <= NOISE * errors[primary],
        mean_abs_logit_diff=float(np.abs(answers.astype(np.float64) - reference_answers).mean()),
        sqnr_db=sqnr,
        sqnr_db_stderr=sqnr_error,
        sqnr_output=powers.output,
        agreement=agreement_of(reference_answers, answers, seed=seed) if kind.embeds else None,
    )


def _mcnemar(before: Array, after: Array) -> float:
    """Return the two-sided p-value of the samples that one stage alone gets right."""
    from scipy import stats

    lost, won = int((before & ~after).sum()), int((~before & after).sum())
    return float(stats.binomtest(lost, lost + won).pvalue) if lost + won else 1.0
