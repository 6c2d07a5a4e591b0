"""What a report of `auto` shows, of made-up steps."""

import pytest
from rich.console import Console

from qdqbench.eval.metrics.results import GateIssue
from qdqbench.eval.selection.auto.report import auto_report, explain_step, unmet_lines
from qdqbench.eval.selection.auto.results import AutoChoice, AutoStep
from qdqbench.eval.selection.trials.results import Failure
from qdqbench.quantize.report.render import render_screen, write_report

from ....support.choices import sample_auto

LATE = "it needs about 71.5 s, as the last step did, and"


def pages(folder, **how):
    write_report(auto_report(sample_auto(**how)), folder, "auto")
    return [(folder / f"auto.{kind}").read_text() for kind in ("html", "md")]


def test_the_report_tells_the_story(tmp_path):
    for text in pages(tmp_path):
        said = text.replace("\\", "")
        for each in (
            "Deploy methods: Matthews -0.20 ± 0.60 points (within noise) against FP32, 1.40x.",
            "by the choice of the others (5 folds) the result is -0.40 ± 0.70 points (within",
            "engine: matthews is 0.0290 below FP32",
            "percentile/99.99, 40% of the divergence of bert-int8-linears on 512 train rows",
            "+2.00 ± 0.40",
            "60.0 s estimated, 71.5 s taken",
            f"Skipped: {LATE} 17.0 s of 2 min 40 s are left",
            "runs/a/methods/run/engine/model.engine",
            "qdqbench run runs/a/best.yaml",
        ):
            assert each in said, each


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


def test_none_that_holds_is_said_with_what_the_best_lacks(tmp_path):
    for text in pages(tmp_path, passed=False):
        said = text.replace("\\", "")
        assert "No recipe holds. The best that was found is methods" in said
        assert "matthews is 0.0200 below FP32 (paired standard error 0.0060)" in said


def test_the_terminal_tells_a_reason_beside_its_step(capsys):
    Console(width=80).print(render_screen(auto_report(sample_auto())))
    assert f"islands: Skipped: {LATE}" in " ".join(capsys.readouterr().out.split())


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
