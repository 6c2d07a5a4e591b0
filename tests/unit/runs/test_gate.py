"""One meaning of `max_drop`: what one command lets pass, no other fails."""

from types import SimpleNamespace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdqbench.eval.metrics.gate import MOST_SAMPLES, judge, samples_to_tell
from qdqbench.eval.metrics.results import Gate
from qdqbench.eval.runs.gate import cannot_hold, issue_sentence, judge_speed, judge_stages
from qdqbench.eval.selection.search.confirm import judge_confirmed
from qdqbench.eval.selection.search.results import ConfirmedRecipe
from qdqbench.eval.selection.sensitivity.measure import choose_point
from qdqbench.eval.selection.sensitivity.results import CurvePoint
from qdqbench.quantize.recipe.schema import load_recipe
from qdqbench.quantize.recipe.sections import GateSettings as Asked
from qdqbench.quantize.utils.limits import CPU_BACKENDS, BackendName

from ...support import records
from ...support.compared import sample_comparison
from ...support.runs import built, finding, parity_of, parity_row, run_gate


def comparison(**drops):
    """Of a drop and its standard error by metric."""
    deltas = {name: -drop for name, (drop, _) in drops.items()}
    return records.comparison(deltas, {name: error for name, (_, error) in drops.items()}, n=277)


def confirmation(max_drop, **stages):
    """States of the same differences where a search confirms its choice."""
    engine = {"validation": stages["engine"]} if "engine" in stages else {}
    scores = {"validation": stages["fake_quant"]}
    row = ConfirmedRecipe(name="found", recipe=None, origin="tpe", scores=scores, engine=engine)
    return [issue.state for issue in judge_confirmed(row, Asked(max_drop=max_drop), "accuracy")]


def test_what_a_search_confirms_a_run_does_not_fail():
    """Seen on a held-out task: the search confirmed both drops as noise, and `run` then failed the second."""
    drops = {"engine": (0.0084, 0.0112), "fake_quant": (0.0115, 0.0113)}
    stages = {name: comparison(accuracy=drop) for name, drop in drops.items()}
    assert confirmation(0.01, **stages) == ["within_noise"]
    gate = run_gate("rte", 0.01, **stages)
    assert gate.passed
    assert gate.failures == []
    assert [issue.state for issue in gate.issues] == ["within_noise", "inconclusive"]
    assert issue_sentence(gate.issues[0]) == (
        "fake_quant: accuracy is 0.0115 below FP32 (paired standard error 0.0113), the gate allows 0.01; it "
        "holds within noise (two standard errors)"
    )


def test_noise_of_a_drop_counts_from_max_drop():
    assert judge(0.01, 0.0, 0.01) is None
    assert judge(0.0299, 0.01, 0.01) == "within_noise"  # beyond noise from 0, but not from max_drop
    assert judge(0.0301, 0.01, 0.01) == "failed"
    assert judge(0.0101, 0.0, 0.01) == "failed"
    assert judge(-0.5, 0.1, 0.0) is None


@given(drop=st.floats(-0.2, 0.2), error=st.floats(0, 0.05), max_drop=st.sampled_from([0.0, 0.003, 0.01, 0.1]))
def test_every_command_judges_alike(drop, error, max_drop):
    expected = judge(drop, error, max_drop) != "failed"
    versus = comparison(accuracy=(drop, error))
    assert run_gate("sst2", max_drop, fake_quant=versus).passed == expected
    assert ("failed" not in confirmation(max_drop, fake_quant=versus)) == expected
    trial = records.search_trial(0, 0.1, 1.0, drop, error)
    assert (not trial.violation(Asked(max_drop=max_drop))) == expected
    everything = _point(0, 1.0, 1.0, 0.0)
    assert choose_point([everything, _point(1, 0.1, drop, error)], max_drop)[1] == expected


def _point(kept, noise, drop, error):
    compared = records.comparison({"accuracy": -drop}, error, **records.sqnr(noise))
    return CurvePoint(kept=kept, linears=["a"] * kept, attention=[], comparison=compared)


@pytest.mark.parametrize("stage", ["fake_quant", "onnxruntime", "engine"])
def test_every_stage_and_split_is_judged_but_ptq_before_training(stage):
    bad = comparison(accuracy=(0.0, 0.001), accuracy_mm=(0.05, 0.001))
    found = run_gate("mnli", 0.01, ptq=bad, **{stage: bad}).failures
    assert [(issue.code, issue.stage, issue.metric) for issue in found] == [
        ("accuracy", stage, "accuracy_mm")
    ]


@pytest.mark.parametrize(
    ("least", "found"),
    [(None, []), (25.0, []), (26.0, [("min_sqnr_db", "within_noise")]), (27.0, [("min_sqnr_db", "failed")])],
)
def test_a_gate_can_ask_for_an_sqnr(least, found):
    versus = comparison(accuracy=(0.0, 0.001)).model_copy(update={"sqnr_db": 25.2, "sqnr_db_stderr": 0.5})
    gate = run_gate("sst2", 0.01, min_sqnr_db=least, engine=versus)
    noise = [issue for issue in gate.issues if issue.code == "min_sqnr_db"]
    assert [(issue.code, issue.state) for issue in noise] == found
    assert gate.passed == (least != 27)
    trial = records.search_trial(0, 0.1, 1.0)
    trial.scores["draw"] = versus
    assert (not trial.violation(Asked(min_sqnr_db=least))) == gate.passed
    for issue in noise:
        assert "engine: SQNR is 25.2 dB (standard error 0.5), the gate asks for 2" in issue_sentence(issue)


def test_metrics_beside_the_primary_one_are_not_judged():
    assert run_gate("mrpc", 0.01, fake_quant=comparison(f1=(0.0, 0.0), accuracy=(0.3, 0.0))).passed


def test_twenty_samples_cannot_tell_a_drop_of_a_point_though_none_differs():
    assert samples_to_tell(0.0, 0.0, 0.01, 20, counted=True) == 347
    assert samples_to_tell(0.0, 0.0, 0.01, 872, counted=True) is None
    assert samples_to_tell(0.0, 0.0, 0.01, 20, counted=False) is None  # a correlation that did not change
    assert samples_to_tell(0.0, 0.0, 0.01, 2, counted=False) == 10  # nor can that of two


@given(
    drop=st.floats(-0.2, 0.2),
    error=st.floats(0, 0.05),
    max_drop=st.sampled_from([0.003, 0.01, 0.1]),
    n=st.integers(2, 10_000),
)
def test_as_many_samples_as_it_asks_for_can_tell(drop, error, max_drop, n):
    needed = samples_to_tell(drop, error, max_drop, n, counted=False)
    shrunk = error if needed is None else error * (n / needed) ** 0.5
    assert needed is None or needed > n
    # at the edge itself rounding decides, and nothing asks for more than that many samples
    at_the_edge = 2 * shrunk == pytest.approx(drop - max_drop, abs=1e-8) or needed == MOST_SAMPLES
    assert at_the_edge or judge(drop, shrunk, max_drop) != "within_noise"


@pytest.mark.parametrize(("drop", "error"), [(0.002, 0.006), (0.0115, 0.0113)])
def test_a_drop_that_these_samples_cannot_tell_is_open(drop, error):
    gate = run_gate("sst2", 0.01, fake_quant=comparison(accuracy=(drop, error)))
    assert (gate.passed, gate.state) == (True, "inconclusive")
    issue = gate.having("inconclusive")[0]
    assert (issue.code, issue.n) == ("accuracy", 277)
    assert "samples, there are 277." in issue_sentence(issue)


def test_speed_is_open_until_it_is_measured_and_then_judged_cell_by_cell():
    asked = Gate(passed=True, max_drop=0.01, min_speedup=1.2)
    before = judge_speed(asked, [])
    assert before.state == "not_evaluated"
    assert "; run `qdqbench bench RUN` where" in issue_sentence(before.issues[0])
    fast = records.speedup(1.4, 1.3, 1.5)
    slow = fast.model_copy(update={"config": "1 x 128", "value": 0.74})
    after = judge_speed(before, [fast, slow])
    assert (after.state, after.issues) == ("failed", after.failures)
    assert [*map(issue_sentence, after.failures)] == [
        "min_speedup 1.2 is asked, INT8 is 0.74x as fast as FP16 engine at 1 x 128"
    ]
    assert judge_speed(after, [fast]).state == "passed"  # measured again
    quick = slow.model_copy(update={"quick": True})
    assert judge_speed(asked, [quick]).issues == before.issues  # a quick bench is not what decides


def test_of_two_benches_of_a_shape_a_table_of_runs_has_the_latest():
    found = sample_comparison()
    found.runs[0].speed = [records.speedup(1.2, ms=ms) for ms in (1.0, 3.0)]  # the latest first
    assert next(found.rows())["ms at 32 x 128"] == 1.0


def failures_of(until, require_int8="all", **parts):
    """What does not hold of a run up to a stage, in sentences."""
    nothing = {"findings": [], "stages": {}, "until": until}
    nothing |= dict.fromkeys(("parity", "verification", "engine", "gpu_engine"))
    recipe = SimpleNamespace(gate=SimpleNamespace(require_int8=require_int8, max_drop=0.01))
    judged = judge_stages(SimpleNamespace(recipe=recipe), SimpleNamespace(**nothing | parts))
    assert judged.passed == (not judged.issues)
    return [*map(issue_sentence, judged.failures)]


def test_what_does_not_hold_of_stages_is_named():
    errors = [finding(severity="error", code="wrong-axis", node="/a", why="so"), finding()]
    parity = parity_of([parity_row("a", 1000, 0), parity_row("b", 1000, 9)])
    lost = {"engine": built(int8_gemms=35, not_int8=["/a/MatMul"])}
    check, odd, last = failures_of("build", findings=errors, parity=parity, **lost)
    assert check == "check: wrong-axis at /a: so"
    assert odd == "ONNX Runtime does not follow the fake-quant model in b"
    assert "1 GEMM that should be in INT8 is not" in last
    assert failures_of("build", engine=built(), parity=parity_of(parity.rows[:1])) == []
    # a recipe may ask for no INT8; who builds the engine asks whether it has it
    assert failures_of("engine", None, **lost) == []
    assert len(failures_of("verify", None, **lost)) == 1


@pytest.mark.parametrize("backend", get_args(BackendName))
def test_a_gate_that_cannot_hold_is_known_before_anything_is_computed(backend):
    recipe = load_recipe("bert-int8-residual")
    there = recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"backend": backend})})
    assert bool(cannot_hold(there)) == (backend in CPU_BACKENDS)
    if backend in CPU_BACKENDS:
        assert f"no kernel of {backend} reads" in cannot_hold(there)
    assert cannot_hold(there.model_copy(update={"residual": "fp16"})) == ""
    accuracy_alone = there.gate.model_copy(update={"require_int8": False})
    assert cannot_hold(there.model_copy(update={"gate": accuracy_alone})) == ""
