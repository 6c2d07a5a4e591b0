"""Choosing a recipe, the front, domination, confirmation, and reports."""

from types import SimpleNamespace

import pytest

from qdqbench.eval.selection.search import confirm, report, results
from qdqbench.eval.selection.search.confirm import compare_drops, explain_no_int8, judge_confirmed, rivals_of
from qdqbench.eval.selection.search.report import search_report
from qdqbench.eval.selection.search.results import SearchOutcome
from qdqbench.quantize.recipe.sections import GateSettings
from qdqbench.quantize.report.render import write_report

from ....support import records
from ....support.choices import (
    GATE,
    LINEARS,
    NOTHING,
    chosen_by,
    confirmed,
    failed_trial,
    sample_search,
    trial_of,
)
from ....support.pages import offline, plain

NEAR = [(0.05, 0.1, 1.0), (0.04, 0.2, 1.1)]


@pytest.mark.parametrize(
    ("trials", "gate", "outcome"),
    [
        # drop, noise power, ms: the fastest that holds
        ([(0.001, 0.1, 1.5), (0.002, 0.2, 1.2), (0.02, 0.5, 1.0)], {}, {"chosen": 1, "holding": 2}),
        # what only a failing trial beats
        ([(0.0, 0.0, 2.0), (0.006, 0.010, 1.0), (0.001, 0.012, 1.05)], {}, {"chosen": 2, "holding": 2}),
        # equal latency goes to the most accurate
        (
            [(0.001, 0.3, 1.0), (0.001, 0.1, 1.005), (0.0, 0.01, 1.2)],
            {},
            {"chosen": 1, "holding": 3, "equal": 2},
        ),
        # a drop within noise holds; of those that are fast enough it is the most accurate
        ([(0.004, 0.1, 1.0, 0.003)], {}, {"chosen": 0, "holding": 1}),
        (
            [(0.1, 0.1 * n, 2.0 / speed) for n, speed in enumerate((1.3, 1.41, 1.9))],
            {"max_drop": 0.0, "min_speedup": 1.4},
            {"chosen": 1, "holding": 2, "equal": 2},
        ),
        # nothing holds, and the nearest is known
        (NEAR, {"max_drop": 0.0001}, {"best": 1}),
        (NEAR, {"min_speedup": 9.0}, {"best": 0}),
        (NEAR, {"max_drop": 0.1, "min_sqnr_db": 12.0}, {"best": 0}),
        ([], {}, {}),
    ],
)
def test_the_trial_that_the_gate_asks_for_is_chosen(trials, gate, outcome):
    made = [trial_of(n, *each[:3], error=(*each, 0.0001)[3]) for n, each in enumerate(trials)]
    asked = GateSettings(**{"max_drop": 0.003} | gate)
    assert chosen_by(made, asked) == SearchOutcome(**outcome)


def test_milliseconds_of_another_hour_do_not_decide():
    trials = [trial_of(0, 0.001, 0.1, 1.00), trial_of(1, 0.001, 0.1, 1.05)]
    trials[1].speedup.system_ms = 0.97
    assert chosen_by(trials).chosen == 0
    assert [trial.on_front for trial in trials] == [True, False]


def test_without_latencies_the_largest_int8_share_is_chosen():
    shares = {0: (0.0, 0.2), 1: (0.0, 0.7), 2: (0.1, 0.9)}
    trials = [trial_of(n, drop, 0.1 * n, 1.0, int8_share=share) for n, (drop, share) in shares.items()]
    for trial in trials:
        trial.speedup = None
    assert chosen_by(trials).chosen == 1
    assert [trial.on_front for trial in trials] == [True] * 3


@pytest.mark.parametrize("objective", ["sqnr", "drop"])
def test_the_front_holds_what_nothing_beats(objective):
    trials = [
        trial_of(0, 0.00, 0.0, 2.0),
        trial_of(1, 0.01, 0.1, 1.0),
        trial_of(2, 0.02, 0.2, 1.5),  # beaten by 1
        trial_of(3, 0.01, 0.1, 1.0, duplicate_of=1),
        failed_trial(4),
    ]
    results.mark_trials(trials, GATE, objective)
    assert [trial.number for trial in trials if trial.on_front] == [0, 1]
    assert [trial.number for trial in trials if trial.holds] == [0]


@pytest.mark.parametrize(
    ("gain", "ms", "expected"),
    [
        (0.0, 1.0, False),
        (0.01, 1.0, True),
        (0.0, 0.9, True),
        (0.01, 1.1, False),
        (-0.01, 0.9, False),
        (0.0, 0.995, False),  # within 1%
        (0.01, 1.005, True),
    ],
)
def test_domination_is_at_least_as_good_in_both_and_better_in_one(gain, ms, expected):
    assert results.dominates(confirmed("a", 0.1 - gain, ms), confirmed("chosen", 0.1, 1.0)) is expected


def test_agreement_allows_for_both_errors():
    searched = trial_of(0, 0.0, 0.1, 1.0, error=0.003)
    assert compare_drops(searched, confirmed("x", 0.006, 1.0)).within_noise
    assert not compare_drops(searched, confirmed("x", 0.0064, 1.0)).within_noise
    assert compare_drops(failed_trial(0), confirmed("x", 0.0, 1.0)) is None


@pytest.mark.parametrize(("backend", "residuals"), [("tensorrt_rtx", True), ("onnxruntime", False)])
def test_rivals_are_of_the_family_and_can_run_there(backend, residuals):
    engine = LINEARS.engine.model_copy(update={"backend": backend})
    found = rivals_of(LINEARS.model_copy(update={"engine": engine}))
    assert {each.model.family for each in found} == {"bert"}
    assert not any(each.qat for each in found)
    assert any(each.int8_residual for each in found) == residuals


def test_confirmation_holds_or_says_why():
    gate = GateSettings(max_drop=0.003, min_speedup=1.5)
    assert judge_confirmed(confirmed("x", 0.002, 1.0), gate, "accuracy") == []
    drop, slow = judge_confirmed(confirmed("x", 0.01, 1.9), gate, "accuracy")
    assert (drop.code, drop.state, drop.stage, drop.value) == ("accuracy", "failed", "fake_quant", 0.01)
    assert (slow.code, slow.state, slow.value) == ("min_speedup", "failed", pytest.approx(2 / 1.9))
    row = confirmed("x", 0.004, 1.0, error=0.002)
    row.engine["validation"] = records.comparison({"accuracy": -0.02}, 0.001)
    issues = judge_confirmed(row, gate, "accuracy")
    states = {each.stage: each.state for each in issues}
    assert states == {"fake_quant": "within_noise", "engine": "failed"}


# the front has no dB
FASTEST_IS_FP32 = [trial_of(0, 0.0, 0.0, 1.0, on_front=True), trial_of(1, 0.0, 0.1, 2.0, origin="shipped")]


@pytest.mark.parametrize(
    "changes", [{}, NOTHING, NOTHING | {"trials": []}, NOTHING | {"trials": FASTEST_IS_FP32}]
)
def test_reports_name_the_device_and_stay_offline(tmp_path, changes):
    found = sample_search(**changes)
    markdown, page = paths = write_report(search_report(found), tmp_path, "search")
    plain(markdown.read_text())
    offline(page.read_text())
    for path in paths:
        text = path.read_text()
        assert "measured on g, b v" in text.replace("\\", "")
        assert "<memory>" not in text.replace("\\<memory>", "") or path.suffix == ".md"
    if found.trials:
        assert "shipped recipe" in report.draw_front(found)


def test_a_recipe_that_cannot_be_confirmed_is_a_row_with_its_reason(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("the GPU is gone")

    monkeypatch.setattr(confirm, "_confirm", broken)
    work = SimpleNamespace(session=SimpleNamespace(recipe=LINEARS))
    rows = confirm.confirm_recipes(SimpleNamespace(work=work), trial_of(3, 0.0, 0.1, 1.0), LINEARS)
    assert len(rows) > 2
    assert {row.failure.text for row in rows} == {"RuntimeError: the GPU is gone"}


@pytest.mark.parametrize(
    ("tried", "confirmed_ms", "expected"),
    [
        (None, 1.0, "no recipe with INT8 was tried"),
        (4.0, 3.0, "no recipe with INT8 is faster than FP16"),
        (1.5, 3.0, "none of the 1 tried with INT8"),
        (4.0, 1.0, "none of the 1 tried with INT8"),
    ],
)
def test_why_nothing_in_int8_was_chosen_is_what_was_measured(tried, confirmed_ms, expected):
    high = trial_of(1, 0.0, 0.0, 2.0, int8_linears=0)
    trials = [high] if tried is None else [high, trial_of(2, 0.0, 0.1, tried)]
    found = sample_search(trials=trials, confirmed=[confirmed("bert-int8-ffn", 0.0, confirmed_ms)])
    assert expected in explain_no_int8(found)
