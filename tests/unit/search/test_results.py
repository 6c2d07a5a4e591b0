"""Choosing a recipe, the front, domination, reports, and the schema's document."""

import re
from types import SimpleNamespace

import pytest

from qdqbench.eval.bench.engines import Latency
from qdqbench.eval.search import finish
from qdqbench.eval.search.confirm import agreement, gate_failures, rivals_of
from qdqbench.eval.search.finish import rule
from qdqbench.eval.search.report import front_svg, search_headline, search_summary, write_search_reports
from qdqbench.eval.search.results import (
    Accuracy,
    Answer,
    Confirmed,
    Search,
    Source,
    Trial,
    choose_trial,
    dominates,
    mark_front,
    read_search,
    trial_holds,
)
from qdqbench.quantize.core.errors import CheckFailed, UserError
from qdqbench.quantize.recipe.schema import load_recipe
from qdqbench.quantize.recipe.sections import GateSettings

from ...support import records
from ...support.pages import offline, plain


def accuracy_of(drop, divergence, stderr=0.001):
    return Accuracy(
        divergence=divergence,
        metric="accuracy",
        value=0.9 - drop,
        drop=drop,
        drop_stderr=stderr,
        within_noise=abs(drop) <= 2 * stderr,
        disagreements=3,
        n=1000,
    )


def trial_of(number, drop, divergence, ms, gate=GateSettings(max_drop=0.003), **changes):  # noqa: B008
    accuracy = accuracy_of(drop, divergence, changes.pop("stderr", 0.0001))
    latency = Latency(ms=ms, twin_ms=2.0, speedup=2.0 / ms)
    return Trial(
        number=number,
        state="complete",
        origin=changes.pop("origin", "TPE"),
        params={"keep": number},
        recipe="version: 1\nname: found\n",
        int8_linears=4,
        accuracy=accuracy,
        latency=latency,
        holds=trial_holds(accuracy, latency, gate),
        **changes,
    )


def comparison(drop, stderr=0.001):
    return records.comparison({"accuracy": -drop}, stderr)


def confirmed(name, value, ms, drop=0.0, **changes):
    return Confirmed(
        name=name,
        shipped=changes.pop("shipped", True),
        status="done",
        fake_quant={"validation": comparison(drop)},
        metrics={"accuracy": value},
        latency=Latency(ms=ms, twin_ms=2.0, speedup=2.0 / ms),
        **changes,
    )


def test_the_fastest_that_holds_is_chosen():
    trials = [trial_of(0, 0.001, 0.1, 1.5), trial_of(1, 0.002, 0.2, 1.2), trial_of(2, 0.02, 0.5, 1.0)]
    mark_front(trials, "divergence")
    chosen, why = choose_trial(trials, GateSettings(max_drop=0.003))
    assert chosen.number == 1
    assert "fastest of 2" in why


def test_what_only_a_failing_trial_beats_is_chosen():
    trials = [trial_of(0, 0.0, 0.0, 2.0), trial_of(1, 0.006, 0.010, 1.0), trial_of(2, 0.001, 0.012, 1.05)]
    mark_front(trials, "divergence")
    assert [trial.on_front for trial in trials] == [True, True, False]
    assert choose_trial(trials, GateSettings(max_drop=0.003))[0].number == 2


def test_milliseconds_of_another_hour_do_not_decide():
    trials = [trial_of(0, 0.001, 0.1, 1.00), trial_of(1, 0.001, 0.1, 0.97)]
    slow, fast = (trial.latency for trial in trials)
    trials[1].latency = fast.model_copy(update={"twin_ms": 1.85, "speedup": 1.85 / 0.97})
    assert slow.speedup > trials[1].latency.speedup
    mark_front(trials, "divergence")
    assert choose_trial(trials, GateSettings(max_drop=0.003))[0].number == 0
    assert [trial.on_front for trial in trials] == [True, False]


def test_equal_latency_goes_to_the_most_accurate():
    trials = [trial_of(0, 0.001, 0.3, 1.000), trial_of(1, 0.001, 0.1, 1.005), trial_of(2, 0.0, 0.01, 1.2)]
    mark_front(trials, "divergence")
    chosen, why = choose_trial(trials, GateSettings(max_drop=0.003))
    assert chosen.number == 1
    assert "the 2 within 1%" in why


def test_a_drop_within_noise_holds_and_is_said():
    trials = [trial_of(0, 0.004, 0.1, 1.0, stderr=0.003)]
    mark_front(trials, "divergence")
    chosen, why = choose_trial(trials, GateSettings(max_drop=0.003))
    assert chosen is not None
    assert "within noise" in why


def test_the_most_accurate_that_is_fast_enough():
    gate = GateSettings(max_drop=0.0, min_speedup=1.4)
    speedups = {0: 1.3, 1: 1.41, 2: 1.9}
    trials = [trial_of(n, 0.1, 0.1 * n, 2.0 / s, gate) for n, s in speedups.items()]
    mark_front(trials, "divergence")
    chosen, why = choose_trial(trials, gate)
    assert chosen.number == 1
    assert "1.4x" in why


@pytest.mark.parametrize("gate", [GateSettings(max_drop=0.0001), GateSettings(min_speedup=9.0)])
def test_nothing_holds_and_the_best_is_said(gate):
    trials = [trial_of(0, 0.05, 0.1, 1.0, gate), trial_of(1, 0.04, 0.2, 1.1, gate)]
    mark_front(trials, "divergence")
    chosen, why = choose_trial(trials, gate)
    assert chosen is None
    assert re.search(r"the best was trial \d with a drop of \d", why)
    assert choose_trial([], gate)[0] is None


@pytest.mark.parametrize("objective", ["divergence", "drop"])
def test_the_front_holds_what_nothing_beats(objective):
    trials = [
        trial_of(0, 0.00, 0.0, 2.0),
        trial_of(1, 0.01, 0.1, 1.0),
        trial_of(2, 0.02, 0.2, 1.5),  # beaten by 1
        trial_of(3, 0.01, 0.1, 1.0, duplicate_of=1),
        Trial(number=4, state="failed", origin="TPE", reason="no", params={}),
    ]
    mark_front(trials, objective)
    assert [trial.number for trial in trials if trial.on_front] == [0, 1]


@pytest.mark.parametrize(
    ("value", "ms", "expected"),
    [
        (0.9, 1.0, False),
        (0.91, 1.0, True),
        (0.9, 0.9, True),
        (0.91, 1.1, False),
        (0.89, 0.9, False),
        (0.9, 0.995, False),  # within 1%
        (0.91, 1.005, True),
    ],
)
def test_domination_is_at_least_as_good_in_both_and_better_in_one(value, ms, expected):
    assert dominates(confirmed("a", value, ms), confirmed("chosen", 0.9, 1.0), "accuracy") is expected


def test_agreement_allows_for_both_errors():
    trial = trial_of(0, 0.0, 0.1, 1.0, stderr=0.003)
    assert agreement(trial.accuracy, confirmed("x", 0.9, 1.0, drop=0.006)).within_noise
    assert not agreement(trial.accuracy, confirmed("x", 0.9, 1.0, drop=0.0064)).within_noise


@pytest.mark.parametrize(("backend", "residuals"), [("tensorrt_rtx", True), ("onnxruntime", False)])
def test_rivals_are_of_the_family_and_can_run_there(backend, residuals):
    base = load_recipe("bert-int8-linears")
    engine = base.engine.model_copy(update={"backend": backend})
    found = rivals_of(base.model_copy(update={"engine": engine}))
    assert {each.model.family for each in found} == {"bert"}
    assert not any(each.qat for each in found)
    assert any(each.int8_residual for each in found) == residuals


def test_confirmation_holds_or_says_why():
    gate = GateSettings(max_drop=0.003, min_speedup=1.5)
    assert gate_failures(confirmed("x", 0.9, 1.0, drop=0.002), gate, "accuracy") == ([], [])
    bad, noted = gate_failures(confirmed("x", 0.9, 1.9, drop=0.01), gate, "accuracy")
    assert not noted
    assert "1.00 points" in bad[0]
    assert "1.05x" in bad[1]
    row = confirmed("x", 0.9, 1.0)
    row.fake_quant["validation"] = comparison(0.004, stderr=0.002)
    bad, noted = gate_failures(row, gate, "accuracy")
    assert not bad
    assert "within noise" in noted[0]
    row.engine["validation"] = comparison(0.02)
    assert "the engine" in gate_failures(row, gate, "accuracy")[0][0]


def test_a_chosen_recipe_that_fails_is_a_failure_with_its_reason(tmp_path):
    row = Confirmed(name="found", shipped=False, status="failed", reason="2 layers are not in INT8")
    assert gate_failures(row, GateSettings(), "accuracy") == (
        ["the chosen recipe failed: 2 layers are not in INT8"],
        [],
    )
    outcome = Answer(passed=False, rule="r", chosen=1, why="w", failures=["the chosen recipe failed: x"])
    found = sample_search(confirmed=[row], agreement=None, outcome=outcome)
    for path in write_search_reports(found, tmp_path):
        assert "2 layers are not in INT8" in path.read_text()
    search_summary(found)


def test_rules_in_words():
    measured = Source(mode="engine", label="", backend="b", version="v", batch=1, length=1, twin="BF16")
    assert rule(GateSettings(max_drop=0.003), measured) == "at most 0.3 points lost, fastest"
    assert rule(GateSettings(max_drop=0.01), measured) == "at most 1 point lost, fastest"
    assert "1.4x as fast as the BF16 twin" in rule(GateSettings(min_speedup=1.4), measured)
    modelled = measured.model_copy(update={"mode": "model"})
    assert rule(GateSettings(), modelled).endswith(", by modelled latency")


def test_reports_name_the_twin(tmp_path):
    source = sample_search().source.model_copy(update={"mode": "engine", "cpu": "c", "twin": "BF16"})
    versions = dict.fromkeys(("torch", "transformers", "nvidia-modelopt"), "1")
    found = sample_search(source=source, environment={"versions": versions})
    for path in write_search_reports(found, tmp_path):
        text = path.read_text()
        assert "over BF16" in text
        assert "over FP16" not in text


def sample_search(**changes):
    trials = [
        trial_of(0, 0.001, 0.1, 1.5, origin="given recipe"),
        trial_of(1, 0.002, 0.2, 1.2),
        trial_of(2, 0.002, 0.2, 1.3, origin="shipped bert-int8-ffn"),
        Trial(number=3, state="failed", origin="TPE", reason="out of <memory> | bar", params={"keep": 1}),
    ]
    mark_front(trials, "divergence")
    chosen, why = choose_trial(trials, GateSettings(max_drop=0.003))
    values = {
        "created": "2026-01-01T00:00:00+00:00",
        "command": "qdqbench search",
        "recipe": load_recipe("bert-int8-linears").model_dump(mode="json"),
        "model": "folder/my-model",
        "task": "sst2",
        "metric": "accuracy",
        "settings": {"samples": 1024},
        "study": "x",
        "objective": "divergence",
        "ranking": {"units": [[0, "qkv"], [1, "ffn-in"]], "attention": [1, 0]},
        "ranking_source": "sensitivity file x.json",
        "source": Source(
            mode="model",
            label="modelled, not measured: fitted to 3 engines",
            gpu="g",
            backend="b",
            version="v",
            batch=32,
            length=128,
            error={"ms_median": 0.01, "ms_p90": 0.1, "speedup_median": 0.02, "speedup_p90": 0.2},
        ),
        "fp32": {"accuracy": 0.9},
        "trials": trials,
        "outcome": Answer(passed=True, rule="r", chosen=chosen.number, why=why, failures=[]),
        "confirmed": [
            confirmed("found", 0.9, 1.2, shipped=False),
            confirmed("bert-int8-ffn", 0.91, 1.1, dominates=True),
        ],
        "agreement": agreement(chosen.accuracy, confirmed("found", 0.9, 1.2)),
        "warnings": ["latency is modelled, not measured"],
        "environment": {"gpu": "none"},
    }
    return Search.model_validate(values | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "outcome": Answer(passed=False, rule="r", chosen=None, why="none", failures=["none"]),
            "confirmed": [],
            "agreement": None,
        },
        {"outcome": Answer(passed=False, rule="r", chosen=1, why="w", failures=["too slow"])},
        {
            "trials": [],
            "outcome": Answer(passed=False, rule="r", chosen=None, why="none", failures=["none"]),
        },
    ],
)
def test_reports_say_what_is_modelled_and_stay_offline(tmp_path, changes):
    found = sample_search(**changes)
    markdown, page = paths = write_search_reports(found, tmp_path)
    plain(markdown.read_text())
    offline(page.read_text())
    for path in paths:
        text = path.read_text()
        assert "modelled, not measured" in text
        assert "<memory>" not in text.replace("\\<memory>", "") or path.suffix == ".md"
    assert search_headline(found)
    search_summary(found)
    if found.trials:
        svg = front_svg(found)
        assert "modelled" in svg
        assert "shipped recipe" in svg


def test_search_json_is_read_back(tmp_path):
    path = tmp_path / "search.json"
    found = sample_search()
    path.write_text(found.model_dump_json())
    assert read_search(path) == found
    path.write_text("{}")
    with pytest.raises(UserError, match="no search of this version"):
        read_search(path)


def test_hours_of_trials_do_not_end_without_a_report_for_lack_of_an_agreement(monkeypatch):
    def broken(*_):
        raise CheckFailed("the GPU is gone")

    rows = [confirmed("found", 0.9, 1.0), confirmed("bert-int8-ffn", 0.9, 1.1, shipped=True)]
    monkeypatch.setattr(finish.confirm, "confirm", lambda *_: (rows, {"accuracy": 0.9}))
    monkeypatch.setattr(finish, "_whole", broken)
    task = SimpleNamespace(metrics=["accuracy"])
    session = SimpleNamespace(config=SimpleNamespace(task=task))
    worker = SimpleNamespace(work=SimpleNamespace(session=session), gate=GateSettings(max_drop=0.01))
    trial = trial_of(3, 0.0, 0.1, 1.0)
    judged = finish._judge(worker, [trial], trial, lambda text: None)
    assert judged.rows == rows
    assert judged.agreement is None
    assert judged.failures == []
    assert any("agree is not known: the GPU is gone" in line for line in judged.warnings)


@pytest.mark.parametrize(
    ("tried", "confirmed_ms", "expected"),
    [
        (None, 1.0, "no recipe with INT8 was tried"),
        (4.0, 3.0, "no recipe with INT8 is faster than BF16"),
        (1.5, 3.0, "none of the 1 tried with INT8"),
        (4.0, 1.0, "none of the 1 tried with INT8"),
    ],
)
def test_why_nothing_in_int8_was_chosen_is_what_was_measured(tried, confirmed_ms, expected):
    half = trial_of(1, 0.0, 0.0, 2.0).model_copy(update={"int8_linears": 0})
    trials = [half] if tried is None else [half, trial_of(2, 0.0, 0.1, tried)]
    said = finish._without_int8(trials, [confirmed("bert-int8-ffn", 0.9, confirmed_ms)], "BF16")
    assert expected in said


def test_both_splits_of_mnli_are_shown(tmp_path):
    row = confirmed("found", 0.9, 1.0)
    row.fake_quant = {"validation_matched": comparison(0.01), "validation_mismatched": comparison(0.05)}
    found = sample_search(confirmed=[row])
    for path in write_search_reports(found, tmp_path):
        assert "mismatched: drop" in path.read_text()
        assert "5.00" in path.read_text()
