"""The order of the steps, and which of them are taken: each only where it is needed, can help and fits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from qdqbench.eval.auto.results import Kind, Measured, Step
from qdqbench.eval.report.formats import seconds
from qdqbench.quantize.core.errors import CheckFailed, UserError


@dataclass(frozen=True)
class Rung:
    """A step that can be taken.

    Both functions get the steps before and the seconds that are left. `estimate` gives the seconds that it
    will take; `take` returns how its recipe was found and what a run of that says. Their UserError and
    CheckFailed say why it does not fit here, or what failed.
    """

    name: str
    kind: Kind
    take: Callable[[Sequence[Step], float], tuple[list[str], Measured]]
    estimate: Callable[[Sequence[Step], float], float]


def climb(
    rungs: Sequence[Rung],
    budget_s: float,
    known: dict[str, Step],
    timed: Callable[[], float],
    save: Callable[[list[Step]], None],
) -> list[Step]:
    """Take rungs in their order until one holds.

    A rung is skipped, with its reason, where an earlier one holds the gate, where it cannot mend what is
    lacking, or where its estimate does not fit into what is left of the budget. The first one that can be
    taken is always taken: without it nothing is known.

    Args:
        budget_s: seconds of all steps, those of interrupted calls included.
        known: steps that an interrupted call finished.
        timed: a clock, in seconds.
        save: called with all steps after each one that was taken.
    """
    steps: list[Step] = []
    for rung in rungs:
        if rung.name in known:
            steps.append(known[rung.name])
            continue
        step = Step(name=rung.name, kind=rung.kind, status="skipped")
        steps.append(step)
        before = steps[:-1]
        if reason := needless(rung, before):
            step.reason = reason
            continue
        left = budget_s - sum(each.seconds for each in before)
        try:
            step.estimate_s = rung.estimate(before, left)
        except (UserError, CheckFailed) as error:
            step.reason = str(error)
            continue
        if step.estimate_s > left and any(each.measured for each in before):
            step.reason = (
                f"it needs about {seconds(step.estimate_s)}, and {seconds(max(left, 0))} of "
                f"{seconds(budget_s)} are left; give a larger --budget, and the same command goes on"
            )
            continue
        start = timed()
        try:
            step.proposal, step.measured = rung.take(before, left)
            step.status = "done"
        except (UserError, CheckFailed) as error:
            step.status, step.reason = "failed", str(error)
            step.again = isinstance(error, UserError)
        step.seconds = timed() - start
        save(steps)
    return steps


def needless(rung: Rung, before: Sequence[Step]) -> str:
    """Why a rung is not worth climbing; empty where it is."""
    if held := next((step for step in before if step.holds), None):
        return f"{held.name} holds the gate"
    done = [step.measured for step in before if step.measured]
    if not done:
        return "" if rung.kind == "shipped" else "no shipped recipe came to an end that it could go on from"
    if rung.kind == "shipped":
        return ""
    last = done[-1].missing
    if last.other and not (last.accuracy or last.speed):
        return f"it changes nothing about what is lacking: {last.other[0]}"
    if rung.kind != "search" and not any(found.missing.accuracy for found in done):
        what = {"methods": "scales", "islands": "less INT8", "qat": "weights"}[rung.kind]
        return f"only speed is lacking, and {what} cannot give it"
    return ""


def chosen(steps: Sequence[Step], metric: str) -> Step | None:
    """The first step that holds, else the one that is nearest to FP32; None where none was measured."""
    done = [step for step in steps if step.measured]
    if held := next((step for step in done if step.holds), None):
        return held
    return min(done, key=lambda step: worst_drop(step, metric), default=None)


def worst_drop(step: Step, metric: str) -> float:
    """The largest drop of the primary metric over evaluation splits."""
    assert step.measured is not None
    return max(-versus.delta[metric] for versus in step.measured.vs_fp32.values())
