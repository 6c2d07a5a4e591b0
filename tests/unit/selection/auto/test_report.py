"""What a report of `auto` shows, of made-up steps."""

from qdqbench.eval.selection.auto.report import auto_report, unmet_lines
from qdqbench.eval.selection.auto.results import AutoChoice, AutoStep
from qdqbench.eval.selection.trials.results import Failure

from ....support.choices import sample_auto


def test_a_table_of_the_steps():
    table = sample_auto().to_frame().set_index("step")
    assert table.loc["methods", "delta"] == -0.002
    assert list(table.status) == ["done", "done", "skipped", "failed", "skipped"]


def test_no_finished_step_names_each_reason_once():
    auto = sample_auto()
    auto.choice = AutoChoice(passed=False, step=None)
    failed = {"origin": "shipped", "kind": "shipped", "status": "failed"}
    failed["failure"] = Failure(code="check", text="FP32 is wrong")
    auto.steps = [AutoStep(recipe=None, name=name, **failed) for name in ("one", "two")]
    assert unmet_lines(auto) == ["no step finished: one, two: FP32 is wrong"]
    assert auto_report(auto).verdict.failures == unmet_lines(auto)
