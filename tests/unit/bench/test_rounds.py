"""The measuring loop and its statistics, with contestants and timers whose times are known."""

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdqbench.eval.bench import measure as loop
from qdqbench.eval.bench.results import BenchRow, compare_rounds
from qdqbench.eval.bench.run import fill_row
from qdqbench.quantize.utils.errors import CheckFailed
from qdqbench.quantize.utils.progress import Reporter, reporting_to

from ...support.fake_bench import FakeClock, FakeLane, fake_system


@given(count=st.integers(1, 9), cycles=st.integers(1, 3))
def test_rotation_is_balanced_by_place_and_by_neighbor(count, cycles):
    period = count if count % 2 == 0 else 2 * count
    rows = loop.rotation(count, cycles * period)
    assert all(sorted(row) == list(range(count)) for row in rows)
    places = Counter((place, who) for row in rows for place, who in enumerate(row))
    assert set(places.values()) == {cycles * period // count}
    assert len(places) == count * count
    neighbors = Counter(pair for row in rows for pair in pairwise(row))
    assert len(neighbors) == count * (count - 1)
    assert len(set(neighbors.values())) <= 1


@given(count=st.integers(1, 9), rounds=st.integers(1, 40))
def test_rotation_is_never_off_by_more_than_the_last_cycle(count, rounds):
    rows = loop.rotation(count, rounds)
    assert len(rows) == rounds
    firsts = Counter(row[0] for row in rows)
    assert max(firsts.values()) - min(firsts[who] for who in range(count)) <= 2


TIMES = st.floats(0.01, 1000)


def ratio_of(baseline, system, seed=0):
    return compare_rounds(system, baseline, seed)


@given(base=st.lists(TIMES, min_size=1, max_size=15), factor=st.floats(0.1, 10), seed=st.integers(0, 9))
def test_speedup_of_a_constant_factor_is_that_factor(base, factor, seed):
    ratio = ratio_of(base, [time / factor for time in base], seed)
    assert ratio.value == pytest.approx(factor)
    if len(base) < 5:  # of 3 or 4 rounds it would hold 78% or 89% of the time
        assert ratio.ci95_low is None
        assert ratio.ci95_high is None
    else:  # paired: a factor that every round shows has no spread, however the rounds differ
        assert ratio.ci95_low == pytest.approx(factor)
        assert ratio.ci95_high == pytest.approx(factor)


@given(rounds=st.lists(st.tuples(TIMES, TIMES), min_size=5, max_size=15))
def test_speedup_is_the_ratio_of_medians_inside_its_interval(rounds):
    base, own = zip(*rounds, strict=True)
    ratio = ratio_of(base, own)
    assert ratio.value == pytest.approx(np.median(base) / np.median(own))
    assert ratio.ci95_low <= ratio.value <= ratio.ci95_high
    assert min(base) / max(own) <= ratio.ci95_low * (1 + 1e-9)
    assert ratio.ci95_high <= max(base) / min(own) * (1 + 1e-9)
    assert ratio == ratio_of(base, own)  # seeded


def test_interval_of_noisy_equals_holds_one_and_of_a_clear_winner_does_not():
    rng = np.random.default_rng(0)
    base, same, faster = (scale * (1 + 0.02 * rng.normal(size=12)) for scale in (2.0, 2.0, 1.0))
    assert ratio_of(base, same).ci95_low < 1 < ratio_of(base, same).ci95_high
    assert ratio_of(base, faster).ci95_low > 1.9


def row_of(rounds):
    row = BenchRow(system="a", status="done")
    fill_row(row, [loop.Burst(values, {1: 2.0}, 0.0, 1.0) for values in rounds], 4, (1, 2))
    return row


@given(st.lists(st.lists(TIMES, min_size=1, max_size=20), min_size=1, max_size=8))
def test_statistics_are_those_of_numpy_over_all_launches(rounds):
    row, flat = row_of(rounds), [value for values in rounds for value in values]
    assert row.launches == len(flat)
    assert (row.p50_ms, row.p90_ms) == pytest.approx(tuple(np.percentile(flat, [50, 90])))
    assert row.p99_ms == (pytest.approx(np.percentile(flat, 99)) if len(flat) >= 100 else None)
    assert row.median_ms == pytest.approx(np.median([np.median(values) for values in rounds]))
    assert [(rate.streams, rate.sequences_per_s) for rate in row.throughput] == [(1, 8.0)]


def test_one_disturbed_round_moves_nothing():
    rounds = [[1.0] * 5] * 6 + [[50.0] * 5]
    assert row_of(rounds).median_ms == 1.0


def rounds_of(*systems, rounds=2, duration_s=1.0, **more):
    return loop.measure_rounds(systems, loop.Effort(rounds, duration_s, **more))


def test_rounds_interleave_all_contestants_in_the_balanced_order():
    log, names = [], ["a", "b", "c", "d"]
    systems = [fake_system(name, log=log) for name in names]
    found = rounds_of(*systems, rounds=4, iterations=7, streams=(1, 2))
    timed = [name for name, count in log if count == 7]
    assert timed == [names[who] for row in loop.rotation(4, 4) for who in row]
    assert {name: len(bursts) for name, bursts in found.items()} == dict.fromkeys(names, 4)
    assert found["a"][0].latencies_ms == [1.0] * 7


@pytest.mark.parametrize(
    ("ms", "effort", "launches"),
    [
        (1.0, {"iterations": 9}, [1, 3, 3, 9, 3, 9]),  # warm ones before every burst are not counted
        (1000.0, {"least": 1}, [1, 1, 1]),  # slow ones are not wasted on warming up
    ],
)
def test_launches_of_every_burst(ms, effort, launches):
    log = []
    rounds_of(fake_system("a", ms, log=log), **effort)
    assert [count for _, count in log] == launches


@pytest.mark.parametrize(
    ("ms", "seconds", "expected"),
    [
        (1.0, 1.0, 100),
        (0.001, 1.0, loop.MOST_LAUNCHES),
        (30.0, 1.0, 5),
        (500.0, 1.0, 2),
        (3.0, 0.3, 10),
    ],
)
def test_launches_follow_from_the_time_asked_for(ms, seconds, expected):
    found = rounds_of(fake_system("a", ms), rounds=10, duration_s=seconds)
    assert [len(burst.latencies_ms) for burst in found["a"]] == [expected] * 10


def test_throughput_counts_every_stream():
    (burst,) = rounds_of(fake_system("a", 2.0), rounds=1, duration_s=0.1, streams=(1, 2))["a"]
    assert burst.launches_per_s == {1: pytest.approx(500), 2: pytest.approx(1000)}


def test_lanes_that_share_threads_are_those_of_their_number():
    shared = {2: [FakeLane(ms=4.0), FakeLane(ms=4.0)]}
    one = fake_system("a", lanes=[FakeLane(ms=2.0)], shared=shared)
    for burst in rounds_of(one, duration_s=0.1, streams=(1, 2, 3))["a"]:  # it has no three
        assert burst.launches_per_s == {1: pytest.approx(500), 2: pytest.approx(500)}
        assert burst.cpu_ms >= 0
    shared[2][1].logits = NAN
    assert "NaN" in loop.check_outputs([one], [])[0]["a"]


def test_compilations_take_turns_by_round():
    lane = FakeLane(ms=5.0)
    one = fake_system("a", 1.0, again=[[FakeLane(ms=3.0)], [lane]])
    found = rounds_of(one, rounds=4, duration_s=0.1)["a"]
    assert [burst.median_ms for burst in found] == [1.0, 3.0, 5.0, 1.0]
    lane.logits = NAN
    assert "NaN" in loop.check_outputs([one], [])[0]["a"]


def test_a_round_is_told_rests_and_is_timed(monkeypatch):
    seen = []

    class Told(Reporter):
        def advance(self, done=0, total=0, phase="", row=None):
            seen.append((phase, done, total))

    monkeypatch.setattr(loop, "time", FakeClock(seen))
    with reporting_to(Told()):
        found = rounds_of(fake_system("a"), rounds=3, iterations=1, rest_s=0.02)
    assert seen == [step for at in range(3) for step in (("rounds", at, 3), 0.02, "timed", "timed")]
    assert [(burst.start, burst.end) for burst in found["a"]] == [(0, 1), (2, 3), (4, 5)]


def test_nobody_to_measure():
    assert rounds_of() == {}


def test_a_failing_contestant_is_named():
    broken = fake_system("int8", error=RuntimeError("CUDA error: an illegal memory access"))
    with pytest.raises(CheckFailed, match="int8 failed while it was measured: CUDA error"):
        rounds_of(fake_system("fp16"), broken)


def noisy(error, seed=1):
    """Logits that are `error` (relative) from those of a FakeLane."""
    reference = FakeLane().logits
    noise = np.random.default_rng(seed).normal(size=(2, 2, 3))
    scale = error * np.linalg.norm(reference) / np.linalg.norm(noise)
    return FakeLane([values + scale * more for values, more in zip(reference, noise, strict=True)])


NAN = [np.full((2, 3), 1.0), np.array([[1.0, 2.0, 3.0], [0.0, math.nan, 0.0]])]
INF = [np.full((2, 3), 1.0), np.array([[1.0, 2.0, 3.0], [0.0, math.inf, 0.0]])]


def checked(*systems, references=("torch-fp32", "fp32")):
    return loop.check_outputs(systems, references)


@pytest.mark.parametrize(
    ("precision", "lane", "message"),
    [
        ("int8", FakeLane(NAN), "NaN or infinite logits for 1 of 4 inputs"),
        ("fp16", FakeLane(INF), "NaN or infinite logits for 1 of 4 inputs"),
        ("int8", FakeLane([np.ones((2, 3))]), "the same logits for all of 4 different inputs"),
        ("int8", noisy(0.8), "its logits are 0.8"),  # as with INT8 q, k, v and no INT8 softmax
        ("fp16", noisy(0.2), "its logits are 0.2"),
    ],
)
@pytest.mark.parametrize("lanes", [[], [FakeLane()]], ids=["every stream", "the second stream only"])
def test_wrong_outputs_are_errors(precision, lane, message, lanes):
    wrong = fake_system("x", lanes=[*lanes, lane], precision=precision)
    errors, differences, reference = checked(fake_system("fp32"), wrong)
    assert message in errors["x"]
    assert ([*errors], reference) == (["x"], "fp32")
    assert set(differences) <= {"x"}


def test_two_rows_with_the_same_logits_are_no_error_where_others_differ():
    lane = FakeLane([np.array([[1.0, 2.0]])] * 2 + [np.array([[3.0, 4.0]])] * 2)
    lane.input_sets = 4
    assert checked(fake_system("x", lane=lane))[0] == {}


@pytest.mark.parametrize(("precision", "error"), [("int8", 0.035), ("int8", 0.3), ("fp16", 0.004)])
def test_sound_outputs_have_their_distance_recorded(precision, error):
    own = fake_system("x", lane=noisy(error), precision=precision)
    assert checked(fake_system("fp32"), own)[:2] == ({}, {"x": pytest.approx(error, rel=1e-3)})


def test_a_reference_that_is_broken_is_passed_over():
    broken = fake_system("torch-fp32", lane=FakeLane(NAN), precision="fp32")
    second = fake_system("torch-fp32", lanes=[FakeLane(), noisy(0.8)], precision="fp32")  # of its streams
    for wrong, left in ((broken, "fp32"), (second, "torch-fp32")):
        errors, _, reference = checked(wrong, fake_system("fp32"))
        assert ([*errors], reference) == (["torch-fp32"], left)
    assert checked(broken)[2] is None


def test_wall_timer_feeds_outside_of_the_time():
    clock = iter([0.0, 0.5, 10.0, 10.25])
    lane = FakeLane()
    assert loop.WallTimer(lambda: next(clock)).latencies(lane, 2) == [500.0, 250.0]
    assert lane.fed == [0, 1]
    assert lane.launches == 2
    assert loop.WallTimer(iter([1.0, 4.0]).__next__).wall([lane, lane], 3) == 3.0
    assert lane.launches == 8
