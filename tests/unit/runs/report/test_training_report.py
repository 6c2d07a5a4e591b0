"""Reports of training: fine-tuning over seeds, and QAT in the report of a run."""

import pytest

from qdqbench.eval.runs.report import training
from qdqbench.eval.runs.results import BEFORE_TRAINING, STAGES
from qdqbench.quantize.report.document import Columns
from qdqbench.quantize.utils.trackers import LogRow

from ....support.pages import on_terminal
from ....support.runs import sample as sample_run
from ....support.trainings import failed_run, finetuning, qat_run, reconstruction, run_of


def test_a_failure_is_told_once_and_other_warnings_stay():
    result = finetuning([run_of(0), failed_run(1)])
    result.warnings.append("--limit 64: a part of the train split only")
    assert training.finetuning_report(result).warnings == ["--limit 64: a part of the train split only"]


def test_the_terminal_fits_one_screen():
    five = finetuning([run_of(seed) for seed in range(4)] + [failed_run(4)])
    text = on_terminal(training.finetuning_report(five), 110)
    assert len(text.splitlines()) <= 24
    assert "4 seeds" in text


@pytest.mark.parametrize(
    ("values", "score", "name"),
    [
        ({"loss": 0.4, "f1": 0.9}, 0.9, "f1"),
        ({"divergence": 0.25, "f1": 0.9}, -0.25, "divergence"),
        ({"loss": 0.4}, 0.7, "score"),
        ({}, 0.7, "score"),
    ],
)
def test_the_score_is_named_after_the_measure_that_it_is(values, score, name):
    row = LogRow(step=5, epoch=1, score=score, values=values)
    run = run_of(0, log=[row])
    assert training.score_name([run]) == name
    assert training.points_of(run, name) == [(5, values.get(name, score))]
    *_, ((pairs,), _) = (each.parts for each in training.training_blocks(run) if isinstance(each, Columns))
    assert dict(pairs.rows)[f"held-out {training.labelled_measure(name)}"] == f"{values.get(name, score):.4f}"


def test_stages_before_training_are_expected_only_with_one():
    without = qat_run(stages=sample_run().stages)
    assert sample_run().expected_stages == STAGES
    assert without.expected_stages == ("fp32", "ptq", *STAGES[1:])
    both = without.model_copy(update={"reconstruction": reconstruction()})
    assert both.expected_stages == ("fp32", *BEFORE_TRAINING, *STAGES[1:])
