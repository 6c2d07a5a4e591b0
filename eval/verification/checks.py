"""Is what an engine computes what its recipe means? Judged block by block, and whole on real samples.

Rounding flips grow from layer to layer, so the difference of the logits cannot tell a correct engine from a
wrong one by itself. Each block therefore gets the reference's own input, and its error is held against what
quantization itself costs in that block. A fault that is smaller than that cost shows in what an offset and a
factor per channel explain of the error: rounding noise has no such part, a lost bias or a wrong scale is one.
docs/explanation/the-graph.md has the parity of the ONNX file, this is the same question about the engine.

This module judges arrays and needs no GPU; `engine.py` runs it.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np

from qdqbench.eval.metrics import gate
from qdqbench.eval.metrics.compare import compare
from qdqbench.eval.verification.results import (
    BlockCheck,
    PaddingCheck,
    PredictionsCheck,
    ShapeCheck,
    Verification,
)
from qdqbench.quantize.tasks import metrics
from qdqbench.quantize.tasks.task import Task
from qdqbench.quantize.utils.arrays import Array, Floats, Int64
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.schema import Strict

MIN_LIMIT = 0.01  # relative error that FP16 alone may have; measured 0.004 end to end
BF16_LIMIT = 0.02  # that BF16 alone may have
POSITION_FACTOR = 5.0  # of these, at one position
NOISE_FACTOR = 3.0  # standard errors; positions of one sentence go together
# Two roundings of one recipe are each as far from FP32 as quantization costs: from one another at most
# sqrt(2) of it on average when independent, twice it at the worst.
TWO_ROUNDINGS = 2.0
# Each rounding has another worst position, and none bounds the other. A correct engine of BERT-base reached
# 2.2 of quantization's own (real-size.md). A fault at one position is about as large as the values there.
WORST_OF_TWO = 4.0
# The spread of three roundings is larger than that of two: 1.693 and 1.128 standard deviations on average
SPREAD_FACTOR = TWO_ROUNDINGS * 1.693 / 1.128
FALSE_ALARM = 1e-3  # how often chance alone may pass a limit of answers; of all labels together
SAME_SHARE = 1e-3  # of what quantization costs: logits of one text differ less between batches


class BlockSums:
    """Sums over the positions of one block, from which its check is made."""

    def __init__(self, name: str) -> None:
        self.name, self.n, self.nonfinite = name, 0, 0
        self.shapes: list[list[int]] = []
        self.error2 = self.cost2 = self.power = 0.0
        self.norms: list[Floats] = []  # of error, cost and reference, [3, positions]
        self.is_head = name.startswith("head")
        # by channel: sums of the error, of the reference, of their product, and of the reference's square
        self.sums: Any = np.zeros((4, 1))

    def add(self, got: Floats, reference: Floats, unquantized: Floats, mask: Array) -> None:
        """Add what became of the same input in one batch, without padding as `kept_positions` leaves it out.

        Args:
            reference: of the fake-quant model.
            unquantized: of the FP32 model.
            mask: [batch, length], 0 where padded.
        """
        kept = (kept_positions(a, np.asarray(mask, bool)) for a in (got, reference, unquantized))
        made, truth, plain = (values.reshape(len(values), -1) for values in kept)  # [positions, channels]
        if bad := int((~np.isfinite(made)).sum()):
            self.nonfinite += bad
            self.shapes.append(list(mask.shape))
        with np.errstate(invalid="ignore", over="ignore"):
            error, cost = made - truth, plain - truth
            self.n += len(made)
            self.error2 += float((error**2).sum())
            self.cost2 += float((cost**2).sum())
            self.power += float((truth**2).sum())
            self.norms.append(np.stack([np.linalg.norm(a, axis=1) for a in (error, cost, truth)]))
            self.sums = self.sums + np.stack([a.sum(0) for a in (error, truth, error * truth, truth**2)])

    @property
    def relative_error(self) -> float | None:
        """Return the norm of the error over the reference's; None where that is 0 or one is not finite."""
        sums = self.error2, self.power
        return float(np.sqrt(self.error2 / self.power)) if self.power and np.isfinite(sums).all() else None

    def systematic2(self) -> float:
        """Return the square of the error's part that an offset and a factor per channel explain."""
        error, truth, product, square = self.sums
        spread = square - truth**2 / self.n
        slope = product - error * truth / self.n
        with np.errstate(invalid="ignore", over="ignore"):
            factor = np.divide(slope, spread, out=np.zeros_like(slope), where=spread > 1e-9 * square)
            return float((error**2 / self.n + factor * slope).sum())

    def worst_position(self) -> tuple[float, float]:
        """Return the error and the cost at their worst positions, relative to the reference there.

        Logits near 0 are small differences of large terms, which rounding is relative to. Those of a head are
        relative to the root mean square over all positions where that is larger.
        """
        error, cost, size = np.concatenate([np.zeros((3, 0)), *self.norms], axis=1)
        least = np.sqrt(self.power / max(self.n, 1)) if self.is_head else 0.0
        size = np.maximum(size, max(least, float(np.finfo(np.float32).tiny)))
        return float(np.max(error / size, initial=0)), float(np.max(cost / size, initial=0))

    def check(self, rounding: float = MIN_LIMIT) -> BlockCheck:
        """Compare the errors with their limits; `rounding` is what the datatype of the engine may cost."""
        with np.errstate(divide="ignore", invalid="ignore"):
            power = max(self.power, float(np.finfo(np.float32).tiny))
            error, cost = np.sqrt(self.error2 / power), np.sqrt(self.cost2 / power)
            systematic2 = self.systematic2() / power
            noise = np.sqrt(max(error**2 - systematic2, 0.0)) if np.isfinite(error) else 0.0
            worst, worst_cost = self.worst_position()

        def finite(value: float) -> float | None:  # JSON has no NaN
            return float(value) if not self.nonfinite and np.isfinite(value) else None

        return BlockCheck(
            name=self.name,
            n=self.n,
            error=finite(error),
            quantization_error=float(cost),
            limit=float(np.hypot(rounding, cost)),  # independent errors
            position_error=finite(worst),
            position_limit=max(POSITION_FACTOR * rounding, WORST_OF_TWO * worst_cost),
            systematic_error=finite(np.sqrt(max(systematic2, 0.0))),
            systematic_limit=max(MIN_LIMIT, float(NOISE_FACTOR * noise * np.sqrt(2 / max(self.n, 1)))),
            nonfinite=self.nonfinite,
            nonfinite_shapes=self.shapes,
        )


@dataclass
class QuantizationCost:
    """Most that quantization may cost in logits, fake-quant against FP32, but never under FP16's own noise.

    The fewer the samples, the more the cost of others may differ from theirs: of two normal errors on n
    samples each, the ratio of mean squares has an F distribution.
    """

    mean: float
    worst: float
    deviation: float  # of an answer's mean, over the answers

    @classmethod
    def of(
        cls, reference: Floats, fp32: Floats, samples: int, rounding: float = MIN_LIMIT
    ) -> "QuantizationCost":
        """Measure on answers [answers, width]; the floor is `rounding` of the logits' root mean square."""
        from scipy import stats

        few = float(np.sqrt(stats.f.isf(FALSE_ALARM, samples, samples)))
        difference = few * np.abs(reference.astype(np.float64) - fp32)
        floor = rounding * float(np.sqrt(np.mean(np.square(reference.astype(np.float64)))))
        return cls(
            max(float(difference.mean()), floor),
            max(float(difference.max()), POSITION_FACTOR * floor),
            float(difference.mean(axis=1).std()),
        )


def check_shape(got: Floats, reference: Floats, shape: tuple[int, int], what: str) -> ShapeCheck:
    good = np.isfinite(got).all(axis=1)
    difference = np.abs(got[good].astype(np.float64) - reference[good])
    return ShapeCheck(
        batch=shape[0],
        length=shape[1],
        what=what,
        nonfinite=int((~good).sum()),
        max_abs_logit_diff=float(difference.max()) if good.any() else None,
    )


def check_padding(answers: Floats, cost: QuantizationCost) -> PaddingCheck:
    """Compare the same samples in three settings: answers [3, answers, width] agree within noise.

    The samples are few, and quantization changes some answers much more than most. One of those moves the
    mean, so the limit allows for NOISE_FACTOR standard errors of a mean over so few.
    """
    expected = cost.mean + NOISE_FACTOR * cost.deviation / np.sqrt(max(answers.shape[1], 1))
    good = np.isfinite(answers).all(axis=(0, 2))
    spread = np.ptp(answers[:, good].astype(np.float64), axis=0)
    return PaddingCheck(
        n=answers.shape[1],
        nonfinite=int((~good).sum()),
        mean_abs_logit_diff=float(spread.mean()) if good.any() else None,
        mean_limit=float(SPREAD_FACTOR * expected),
        max_abs_logit_diff=float(spread.max()) if good.any() else None,
        max_limit=TWO_ROUNDINGS * cost.worst,
    )


def one_of_each(samples: Int64, seed: int) -> Int64:
    """Draw one answer of each sample that has any; `samples` is the sample of each answer."""
    shuffled = np.random.default_rng(seed).permutation(len(samples))
    _, first = np.unique(samples[shuffled], return_index=True)
    return np.asarray(shuffled[first])


def group_equal(logits: Floats, step: float) -> Int64:
    """Return a group for each row, [rows]: rows of one group are equal to the nearest `step`."""
    rounded = np.round(logits.astype(np.float64) / step) if step > 0 else logits
    _, groups = np.unique(rounded, axis=0, return_inverse=True)
    return np.asarray(groups.reshape(-1))


def check_answers(  # noqa: PLR0913
    task: Task,
    got: Floats,
    reference: Floats,
    fp32: Floats,
    gold: metrics.Gold,
    *,
    samples: Int64,
    cost: QuantizationCost,
    max_drop: float,
    seed: int,
) -> PredictionsCheck:
    """Compare the engine's answers to real samples with the reference's, [answers, width].

    Where samples are enough, the drop of the primary metric may be `max_drop`. So may the share of answers
    that differ, beyond those that quantization itself changes. How many it changes is an estimate too.
    Distribution: two-sample Kolmogorov-Smirnov per label, Bonferroni over the labels, on one drawn answer of
    each sample: the tokens of a text depend on one another, and the test takes its answers to be independent.
    Equal texts count once, since the engine rounds all of them alike.
    That both sides answer the same samples brings them closer, so that p is too large rather than too small.

    Args:
        samples: the sample of each answer, [answers]; `gold` is as long as there are samples.
    """
    from scipy import stats

    metric, n = task.metrics[0], len(gold)
    known = {
        "n": n,
        "nonfinite": int((~np.isfinite(got)).any(axis=1).sum()),
        "metric": metric,
        "quantization_mean_abs_logit_diff": float(np.abs(reference.astype(np.float64) - fp32).mean()),
        "mean_limit": TWO_ROUNDINGS * cost.mean,
        "ks_p_limit": FALSE_ALARM / got.shape[1],
    }
    check = PredictionsCheck.model_validate(dict.fromkeys(PredictionsCheck.model_fields) | known)
    if check.nonfinite:
        return check
    drawn = one_of_each(samples, seed)
    drawn = drawn[one_of_each(group_equal(reference[drawn], SAME_SHARE * cost.mean), seed)]
    columns = range(got.shape[1]) if len(drawn) >= gate.LEAST_SAMPLES else ()  # fewer have no distribution
    tests = [stats.ks_2samp(reference[drawn, i], got[drawn, i], method="asymp") for i in columns]
    statistic, p = min(((t.statistic, t.pvalue) for t in tests), key=itemgetter(1), default=(0.0, 1.0))
    check.ks_statistic, check.ks_p = float(statistic), float(p)
    check.mean_abs_logit_diff = float(np.abs(got.astype(np.float64) - reference).mean())
    gold = metrics.select_reference(task, gold, reference)
    with suppress(UserError):  # labels that are all alike have no score
        if n >= gate.LEAST_SAMPLES:
            found = compare(task, reference, got, gold, seed=seed)
            check.drop = -found.delta[metric]
            check.drop_limit = max_drop + float(stats.norm.isf(FALSE_ALARM)) * found.delta_stderr[metric]
    made, truth, plain = (metrics.predict(task, answers, gold) for answers in (got, reference, fp32))
    if task.kind.right(task.kind.table(truth, gold)) is not None:
        # what another rounding of the recipe would flip, told from the flips of one: a beta-binomial
        flips = min(float((truth != plain).sum()) + n * max_drop, n)
        check.disagreements = int((made != truth).sum())
        check.disagreement_limit = float(stats.betabinom.isf(FALSE_ALARM, n, flips + 1, n - flips + 1))
    return check


def verification_failures(found: Verification, run: str) -> list[str]:
    """Return why an engine is wrong, one sentence each; `run` is the run directory, for the advice."""
    advice = f"run `qdqbench inspect {run} --bisect`"
    lines = [f"{_block_failure(row)}; {advice}" for row in found.blocks if not row.holds]
    bad = [f"{s.what} {s.batch} x {s.length}" for s in found.shapes if s.nonfinite]
    if bad:
        lines.append(f"engine: NaN or infinite logits for batches of shape {', '.join(bad)}; {advice}")
    for part in (found.padding, found.predictions):
        if part.nonfinite:
            lines.append(f"engine: NaN or infinite logits for {part.nonfinite} of {part.n} samples; {advice}")
        elif not part.holds:
            lines.append(f"engine: {'; '.join(_failures(part, found.reference))}; {advice}")
    return lines


def _block_failure(row: BlockCheck) -> str:
    if row.nonfinite or row.error is None:
        shapes = ", ".join(f"{b} x {length}" for b, length in row.nonfinite_shapes)
        return f"engine: {row.name} makes {row.nonfinite} NaN or infinite numbers in batches of {shapes}"
    parts = [
        f"{what} {error:.3g} is over {limit:.3g}"
        for what, error, limit in (
            ("relative error", row.error, row.limit),
            ("relative error of one position", row.position_error, row.position_limit),
            ("systematic error", row.systematic_error, row.systematic_limit),
        )
        if error is None or error > limit
    ]
    cost = f"quantization itself costs {row.quantization_error:.3g}"
    return f"engine: {row.name} is wrong for the reference's own input: {', '.join(parts)} ({cost})"


def _failures(row: PaddingCheck | PredictionsCheck, reference: str) -> Iterator[str]:
    assert row.mean_abs_logit_diff is not None
    difference = row.mean_abs_logit_diff
    if isinstance(row, PaddingCheck):
        yield (
            f"the same sample alone, padded and in a large batch differs by {difference:.3g} in the mean "
            f"logit, {row.max_abs_logit_diff:.3g} at worst (limits {row.mean_limit:.3g}, {row.max_limit:.3g})"
        )
        return
    if row.drop is not None and row.drop > (limit := row.drop_limit or 0):
        yield f"{row.metric} is {row.drop:.4f} below {reference} on {row.n} samples, limit {limit:.4f}"
    if row.disagreements is not None and row.disagreements > (limit := row.disagreement_limit or 0):
        yield f"{row.disagreements} of {row.n} answers differ from {reference}, limit {limit:.1f}"
    if difference > row.mean_limit:
        yield f"mean logit difference from {reference} is {difference:.3g}, limit {row.mean_limit:.3g}"
    if row.ks_p is not None and row.ks_p < row.ks_p_limit:
        yield f"logits are distributed otherwise than those of {reference} (p {row.ks_p:.2g})"


class TensorError(Strict):
    """Relative error of a tensor, ||engine - reference|| / ||reference||; None: not finite."""

    tensor: str
    error: float | None
    limit: float
    systematic: float = 0.0  # the part that one offset and factor per channel explain
    systematic_limit: float = float("inf")

    @property
    def holds(self) -> bool:
        within = self.error is not None and self.error <= self.limit
        return within and self.systematic <= self.systematic_limit


def compare_tensors(tensor: str, got: Array, expected: Array, mask: Array, limit: float) -> TensorError:
    """Compare one tensor with the reference's, without padding."""
    sums = BlockSums(tensor)
    sums.add(got, expected, expected, mask)
    found = sums.check()
    if found.error is None or found.systematic_error is None:
        return TensorError(tensor=tensor, error=None, limit=limit)
    return TensorError(
        tensor=tensor,
        error=found.error,
        limit=limit,
        systematic=found.systematic_error,
        systematic_limit=found.systematic_limit,
    )


def kept_positions(array: Array, mask: Array) -> Array:
    """Return float64 values of the positions that are not padding.

    Handles [B, L, ...], [L, B, ...], attention tensors [B, heads, L, ...], and anything else as a whole.
    Scores of masked keys are left out: they are about -1e4, which would hide everything else.
    """
    values = array.astype(np.float64)
    batch, length = mask.shape
    if values.ndim >= 3 and values.shape[:2] == (batch, length):
        return values[mask]
    if values.ndim >= 3 and values.shape[:2] == (length, batch):
        return values[mask.T]
    if values.ndim == 4 and values.shape[0] == batch and values.shape[2] == length:
        rows = np.moveaxis(values, 1, 2)
        if values.shape[3] == length:
            both = mask[:, :, None, None] & mask[:, None, None, :]
            return rows[np.broadcast_to(both, rows.shape)]
        return rows[mask]
    return values
