"""What a report of `auto` shows, of made-up steps."""

import pytest

from qdqbench.eval.metrics.results import GateIssue
from qdqbench.eval.selection.auto.report import auto_report, explain_step, unmet_lines
from qdqbench.eval.selection.auto.results import AutoChoice, AutoStep
from qdqbench.eval.selection.trials.results import Failure

from ....support.choices import sample_auto


def test_what_the_samples_cannot_tell_is_in_the_verdict():
    auto = sample_auto()
    few = GateIssue(
        code="accuracy",
        state="inconclusive",
        stage="engine",
        metric="matthews",
        limit=0.005,
        needed=3031,
        n=120,
    )
    auto.chosen.run.open.append(few)
    verdict = auto_report(auto).verdict
    assert (verdict.state, verdict.title) == ("unclear", "A recipe holds as far as 120 samples can tell")
    assert "Deploy" not in verdict.sentence
    assert "it takes about 3,031 samples, there are 120" in verdict.notes[0]
    first = auto.steps[0].run
    first.issues, first.open = [], [few]
    said = auto_report(auto).verdict.sentence
    assert "2 hold within noise; methods has the smallest upper bound of its loss, 1.40 points" in said


def test_a_table_of_the_steps():
    table = sample_auto().to_frame().set_index("step")
    assert table.loc["methods", "delta"] == -0.002
    assert list(table.status) == ["done", "done", "skipped", "failed", "skipped"]


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("holds", "methods holds the gate"),
        ("no_base", "no shipped recipe finished"),
        ("no_remedy", "it changes nothing about what is unmet: engine: matthews is 0.0290 below"),
        ("only_speed", "only speed is lacking, and weights cannot give it"),
    ],
)
def test_reasons_in_words(reason, words):
    auto = sample_auto()
    auto.steps[-1].skipped = reason
    assert words in explain_step(auto, auto.steps[-1])


def test_no_finished_step_names_each_reason_once():
    auto = sample_auto()
    auto.choice = AutoChoice(passed=False, step=None)
    failed = {"origin": "shipped", "kind": "shipped", "status": "failed"}
    failed["failure"] = Failure(code="check", text="FP32 is wrong")
    auto.steps = [AutoStep(recipe=None, name=name, **failed) for name in ("one", "two")]
    assert unmet_lines(auto) == ["no step finished: one, two: FP32 is wrong"]
    assert auto_report(auto).verdict.failures == unmet_lines(auto)
