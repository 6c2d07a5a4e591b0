"""The gate's `max_drop`: what it means, for every command that judges a drop by it."""

import math
from collections.abc import Sequence
from typing import Any, Literal

from qdqbench.eval.metrics.results import Comparison, GateIssue, Speedup, SpeedVerdict
from qdqbench.quantize.tasks.metrics import NOISE, RULE_OF_THREE

LEAST_SAMPLES = 10  # a correlation of two is 1 or -1 and has no standard error
SPEED_RANKS: tuple[SpeedVerdict, ...] = ("slower", "inconclusive", "as fast", "faster")  # worst first
MOST_SAMPLES = 10**9  # that are asked for: a drop at `max_drop` itself takes any number


def limit(stderr: float, max_drop: float) -> float:
    """Return the largest drop that does not fail: `max_drop` and two of its paired standard errors."""
    return max_drop + NOISE * stderr


def judge(drop: float, stderr: float, max_drop: float) -> Literal["failed", "within_noise"] | None:
    """Judge a drop, the reference's metric minus the model's; None: it is not above `max_drop`."""
    if drop <= max_drop:
        return None
    return "within_noise" if drop <= limit(stderr, max_drop) else "failed"


def samples_to_tell(drop: float, stderr: float, max_drop: float, n: int, *, counted: bool) -> int | None:
    """Return how many of paired samples can tell whether a drop is within `max_drop`; None where n do.

    They do where two standard errors are at most `max_drop`, and the drop is not between that and noise.
    A standard error shrinks with the root of n. Where samples are counted right or wrong and none of n
    differed, as many as three in n may: it is at least the root of 3 over n.
    """
    room = drop - max_drop if max_drop < drop <= limit(stderr, max_drop) else max_drop
    if room <= 0:  # no drop is allowed, so that noise judges alone
        return None
    room = max(room, 1e-9)
    needed = [n * (NOISE * stderr / room) ** 2, LEAST_SAMPLES]
    if counted:
        needed.append(NOISE * RULE_OF_THREE**0.5 / room)
    return math.ceil(min(max(needed), MOST_SAMPLES)) if max(needed) > n else None


def drop_issue(comparison: Comparison, max_drop: float, **where: Any) -> GateIssue:
    """Return a drop above `max_drop` as an issue, failed unless `where` has another state."""
    score = {"value": comparison.drop, "stderr": comparison.drop_stderr, "n": comparison.n}
    return GateIssue(**{"code": "accuracy", "state": "failed", "limit": max_drop, **score, **where})


def missing_db(comparison: Comparison, least_db: float | None) -> float:
    """Return how far SQNR and two of its standard errors are below `min_sqnr_db`; 0: it does not fail."""
    if least_db is None or comparison.sqnr_db is None:
        return 0.0
    return max(0.0, least_db - comparison.sqnr_db - NOISE * (comparison.sqnr_db_stderr or 0.0))


def sqnr_issues(comparison: Comparison, least_db: float | None, **where: Any) -> list[GateIssue]:
    """Return an SQNR below `min_sqnr_db` as an issue; answers that equal FP32's have none."""
    value, error = comparison.sqnr_db, comparison.sqnr_db_stderr or 0.0
    if least_db is None or value is None or value >= least_db:
        return []
    state = "failed" if missing_db(comparison, least_db) else "within_noise"
    told = {"value": value, "stderr": error, "limit": least_db, "n": comparison.n}
    return [GateIssue(**{"code": "min_sqnr_db", "state": state, **told, **where})]


def slow_issues(speedup: Speedup | None, min_speedup: float | None) -> list[GateIssue]:
    """Return a speed-up below `min_speedup`, or one that could not be measured (None), as an issue."""
    if min_speedup is None or (speedup is not None and speedup.leading.value >= min_speedup):
        return []
    issue = GateIssue(code="min_speedup", state="failed", limit=min_speedup)
    if speedup is not None:
        value = speedup.leading.value
        issue.value, issue.config, issue.baseline = value, speedup.config, speedup.baseline
    return [issue]


def judge_shapes(speed: Sequence[Speedup]) -> list[Speedup]:
    """Return the measurement that tells the speed at each shape, the worst first.

    Of several at a shape the slowest conclusive one counts, whatever was measured later.
    """
    shapes: dict[str, Speedup] = {}
    for row in sorted(speed, key=lambda row: (row.leading.verdict == "inconclusive", row.leading.value)):
        shapes.setdefault(row.config, row)
    return sorted(
        shapes.values(), key=lambda row: (SPEED_RANKS.index(row.leading.verdict), row.leading.value)
    )
