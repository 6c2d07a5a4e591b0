"""The gate's `max_drop`: what it means, for every command that judges a drop by it."""

from typing import Literal

NOISE = 2  # paired standard errors up to which a difference is noise

Judgement = Literal["holds", "holds within noise", "fails"]


def limit(stderr: float, max_drop: float) -> float:
    """The largest drop that does not fail: `max_drop` and two of the drop's paired standard errors."""
    return max_drop + NOISE * stderr


def judge(drop: float, stderr: float, max_drop: float) -> Judgement:
    """Hold a drop of the primary metric to `max_drop`.

    A drop of real samples is known no better than its standard error, so only what exceeds `max_drop` beyond
    noise fails, whichever command measured it. What holds within noise alone is said wherever it decides.

    Args:
        drop: the reference's metric minus the model's, on the same samples.
        stderr: paired standard error of the drop.
        max_drop: of the recipe's gate.
    """
    if drop <= max_drop:
        return "holds"
    return "holds within noise" if drop <= limit(stderr, max_drop) else "fails"
