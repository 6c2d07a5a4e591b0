"""The measuring loop and its statistics, with contestants and timers whose times are known."""

import math
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdqbench.eval.bench import measure as loop
from qdqbench.eval.bench.results import BenchRow, compare_rounds
from qdqbench.eval.bench.run import fill_row
from qdqbench.quantize.utils.errors import CheckFailed


class FakeLane:
    """Gives the logits of the input set that it was fed."""

    input_sets = 2

    def __init__(self, logits=None):
        rng = np.random.default_rng(0)
        self.logits = [rng.normal(size=(2, 3)) for _ in range(2)] if logits is None else logits
        self.fed, self.launches = [], 0

    def feed(self, number):
        self.fed.append(number)

    def launch(self):
        self.launches += 1

    def fetch(self):
        return np.asarray(self.logits[self.fed[-1] % len(self.logits)], dtype=np.float32)


class FakeTimer:
    """Each launch takes `ms`; writes down who ran."""

    def __init__(self, ms, log=None, name=""):
        self.ms, self.log, self.name = ms, [] if log is None else log, name

    def latencies(self, lane, count):
        self.log.append((self.name, count))
        return [self.ms] * count

    def wall(self, lanes, count):
        return count * self.ms / 1000  # lanes run at the same time


def contestant(name, ms=1.0, lane=None, log=None, precision="fp16"):
    return loop.ReadySystem(name, precision, [lane or FakeLane()] * 2, FakeTimer(ms, log, name))


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


def test_rounds_interleave_all_contestants_in_the_balanced_order():
    log = []
    names = ["a", "b", "c", "d"]
    found = loop.measure_rounds(
        [contestant(name, log=log) for name in names],
        loop.Effort(rounds=4, duration_s=1, iterations=7, streams=(1, 2)),
    )
    timed = [name for name, count in log if count == 7]
    assert timed == [names[who] for row in loop.rotation(4, 4) for who in row]
    assert {name: len(bursts) for name, bursts in found.items()} == dict.fromkeys(names, 4)
    assert all(found["a"][0].latencies_ms == [1.0] * 7 for _ in range(4))


def test_every_burst_is_preceded_by_warm_launches_that_are_not_counted():
    log = []
    loop.measure_rounds([contestant("a", log=log)], loop.Effort(rounds=2, duration_s=1, iterations=9))
    assert [count for _, count in log] == [1, 3, 3, 9, 3, 9]


def test_a_contestant_rests_before_each_burst(monkeypatch):
    rests = []
    monkeypatch.setattr("time.sleep", rests.append)
    loop.measure_rounds(
        [contestant("a"), contestant("b")], loop.Effort(rounds=2, duration_s=1, iterations=1, rest_s=0.02)
    )
    assert rests == [0.02] * 4


def test_slow_launches_are_not_wasted_on_warming_up():
    log = []
    loop.measure_rounds([contestant("a", 1000.0, log=log)], loop.Effort(rounds=2, duration_s=1, least=1))
    assert [count for _, count in log] == [1, 1, 1]


@pytest.mark.parametrize(
    ("ms", "seconds", "rounds", "expected"),
    [
        (1.0, 1.0, 10, 100),
        (0.001, 1.0, 10, loop.MOST_LAUNCHES),
        (30.0, 1.0, 10, 5),
        (500.0, 1.0, 10, 2),
        (3.0, 0.3, 10, 10),
    ],
)
def test_launches_follow_from_the_time_asked_for(ms, seconds, rounds, expected):
    found = loop.measure_rounds([contestant("a", ms)], loop.Effort(rounds=rounds, duration_s=seconds))
    assert [len(burst.latencies_ms) for burst in found["a"]] == [expected] * rounds


def test_throughput_counts_every_stream():
    found = loop.measure_rounds([contestant("a", 2.0)], loop.Effort(rounds=1, duration_s=0.1, streams=(1, 2)))
    assert found["a"][0].launches_per_s == {1: pytest.approx(500), 2: pytest.approx(1000)}


def test_lanes_that_share_threads_are_those_of_their_number():
    alone, shared = FakeLane(), {2: [FakeLane(), FakeLane()]}
    one = loop.ReadySystem("a", "fp32", [alone], FakeTimer(2.0), shared)
    assert (one.at(1), one.at(2)) == ([alone], shared[2])
    found = loop.measure_rounds([one], loop.Effort(rounds=2, duration_s=0.1, streams=(1, 2, 3)))["a"]
    assert [burst.launches_per_s[2] for burst in found] == [pytest.approx(1000)] * 2
    assert all(3 not in burst.launches_per_s and burst.cpu_ms >= 0 for burst in found)  # it has no three
    shared[2][1].logits = NAN
    errors, _, _ = loop.check_outputs([one], [])
    assert "NaN" in errors["a"]


def test_compilations_take_turns_by_round():
    lane = FakeLane()
    one = replace(contestant("a", 1.0), again=[contestant("a", 3.0), contestant("a", 5.0, lane)])
    found = loop.measure_rounds([one], loop.Effort(rounds=4, duration_s=0.1))["a"]
    assert [burst.median_ms for burst in found] == [1.0, 3.0, 5.0, 1.0]
    lane.logits = NAN
    assert "NaN" in loop.check_outputs([one], [])[0]["a"]


def test_progress_and_windows(monkeypatch):
    seen, clock = [], iter(range(100))

    def now() -> float:
        seen.append("timed")
        return float(next(clock))

    clocks = SimpleNamespace(monotonic=now, sleep=time.sleep, process_time=time.process_time)
    monkeypatch.setattr(loop, "time", clocks)
    effort = loop.Effort(rounds=3, duration_s=1, iterations=1)
    monkeypatch.setattr(loop, "report_phase", lambda *begun: seen.append(begun))
    found = loop.measure_rounds([contestant("a")], effort)
    timed = ["timed"] * 2  # a round is told before it is timed
    assert seen == [step for number in range(3) for step in (("rounds", number, 3), *timed)]
    assert [(burst.start, burst.end) for burst in found["a"]] == [(0, 1), (2, 3), (4, 5)]


def test_nobody_to_measure():
    assert loop.measure_rounds([], loop.Effort(rounds=3, duration_s=1)) == {}


def test_a_failing_contestant_is_named():
    class Broken(FakeTimer):
        def latencies(self, lane, count):
            raise RuntimeError("CUDA error: an illegal memory access")

    broken = loop.ReadySystem("int8", "int8", [FakeLane()], Broken(1.0))
    with pytest.raises(CheckFailed, match="int8 failed while it was measured: CUDA error"):
        loop.measure_rounds([contestant("fp16"), broken], loop.Effort(rounds=1, duration_s=1))


def noisy(error, seed=1):
    """Logits that are `error` (relative) from those of a FakeLane."""
    reference = FakeLane().logits
    noise = np.random.default_rng(seed).normal(size=(2, 2, 3))
    scale = error * np.linalg.norm(reference) / np.linalg.norm(noise)
    return FakeLane([values + scale * more for values, more in zip(reference, noise, strict=True)])


NAN = [np.full((2, 3), 1.0), np.array([[1.0, 2.0, 3.0], [0.0, math.nan, 0.0]])]
INF = [np.full((2, 3), 1.0), np.array([[1.0, 2.0, 3.0], [0.0, math.inf, 0.0]])]


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
def test_wrong_outputs_are_errors(precision, lane, message):
    errors, differences, reference = loop.check_outputs(
        [contestant("fp32", precision="fp32"), contestant("x", lane=lane, precision=precision)], ["fp32"]
    )
    assert message in errors["x"]
    assert list(errors) == ["x"]
    assert reference == "fp32"
    assert set(differences) <= {"x"}


def test_two_rows_with_the_same_logits_are_no_error_where_others_differ():
    lane = FakeLane([np.array([[1.0, 2.0]])] * 2 + [np.array([[3.0, 4.0]])] * 2)
    lane.input_sets = 4
    assert loop.check_outputs([contestant("x", lane=lane)], ["x"])[0] == {}


@pytest.mark.parametrize(("precision", "error"), [("int8", 0.035), ("int8", 0.3), ("fp16", 0.004)])
def test_sound_outputs_have_their_distance_recorded(precision, error):
    errors, differences, _ = loop.check_outputs(
        [contestant("fp32"), contestant("x", lane=noisy(error), precision=precision)], ["fp32"]
    )
    assert errors == {}
    assert differences == {"x": pytest.approx(error, rel=1e-3)}


@pytest.mark.parametrize("name", ["int8", "fp32"])
@pytest.mark.parametrize(("lane", "message"), [(FakeLane(NAN), "NaN"), (noisy(0.8), "its logits are 0.8")])
def test_what_is_wrong_on_the_second_stream_only_is_found(lane, message, name):
    two = loop.ReadySystem(name, name, [FakeLane(), lane], FakeTimer(1.0))
    errors, _, _ = loop.check_outputs(
        [two, contestant("torch-fp32", precision="fp32")], ["fp32", "torch-fp32"]
    )
    assert [*errors] == [name]
    assert message in errors[name]


def test_a_reference_that_is_broken_is_passed_over():
    broken = contestant("torch-fp32", lane=FakeLane(NAN), precision="fp32")
    errors, _, reference = loop.check_outputs([broken, contestant("fp32")], ["torch-fp32", "fp32"])
    assert reference == "fp32"
    assert set(errors) == {"torch-fp32"}
    assert loop.check_outputs([broken], ["torch-fp32"])[2] is None


def test_wall_timer_feeds_outside_of_the_time():
    clock = iter([0.0, 0.5, 10.0, 10.25])
    lane = FakeLane()
    assert loop.WallTimer(lambda: next(clock)).latencies(lane, 2) == [500.0, 250.0]
    assert lane.fed == [0, 1]
    assert lane.launches == 2
    assert loop.WallTimer(iter([1.0, 4.0]).__next__).wall([lane, lane], 3) == 3.0
    assert lane.launches == 8
