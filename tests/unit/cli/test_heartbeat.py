"""Progress with a clock that is set by hand: time that is left, signs of life, and silence while timing."""

import re
import threading
import time

import pytest

from qdqbench.cli import progress as display
from qdqbench.quantize.utils import progress


def said(capsys):
    lines = capsys.readouterr().err.splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in lines)
    return [line.split(" ", 1)[1] for line in lines]


def test_the_time_left_follows_from_what_was_done_since_counting_began(clock):
    count = display.Eta()
    assert count.left() is None
    count.tell(500, 1000)  # an earlier call did these
    assert count.left() is None
    clock.now += 1
    count.tell(501, 1000)
    assert count.left() is None, "a second says nothing of the pace"
    clock.now += 9
    count.tell(510, 1000)
    assert count.left() == pytest.approx(490)
    clock.now += 90
    assert count.left() == pytest.approx(400), "time passes while nothing is told"
    clock.now += 1000
    assert count.left() is None, "longer than at the pace before"
    count.tell(1000, 1000)
    assert count.left() is None
    count.tell(3, 10)
    assert count.left() is None, "something else is counted"


def test_a_log_says_stage_phase_count_and_time_left(clock, capsys):
    now = display.Status()
    log = display.log_heartbeat(now.line)
    now.begin("stage 3 of 10: quantize")
    with progress.subscribe(now.hear):
        for batch in progress.track("calibrating", range(16)):
            clock.now += 4
            log.tick()
            assert batch < 16
        progress.report_phase("bias correction")
        clock.now += display.EVERY_S
        log.tick()
    assert said(capsys) == [
        "stage 3 of 10: quantize: calibrating, 6 of 16, 36 s left",
        "stage 3 of 10: quantize: calibrating, 13 of 16, 8 s left",
        "stage 3 of 10: quantize: bias correction, nothing new for 25 s",
    ]


def test_a_phase_that_says_nothing_has_a_line_every_half_minute(clock, capsys):
    now = display.Status()
    log = display.log_heartbeat(now.line)
    now.begin("stage 8 of 10: build")
    now.hear("compiling")
    times = []
    for _ in range(700):
        clock.now += display.BEAT_S
        log.tick()
        if capsys.readouterr().err:
            times.append(clock.now - 1000)
    assert len(times) == 14
    gaps = [after - before for before, after in zip([0, *times], times, strict=False)]
    assert max(gaps) <= 30


def test_what_came_before_a_display_counts(clock, capsys):
    """Libraries are loaded before anything is shown, and one display follows another."""
    clock.now += 29
    first, now = display.Status(), display.Status()
    log = display.log_heartbeat(first.line)
    first.begin("planning")
    log.tick()
    assert said(capsys) == ["planning"]
    clock.now += 20
    log = display.log_heartbeat(now.line)
    now.begin("training")
    log.tick()
    assert said(capsys) == []
    clock.now += 5
    log.tick()
    assert said(capsys) == ["training"]


def test_quick_work_is_silent(clock, capsys):
    now = display.Status()
    log = display.log_heartbeat(now.line)
    for _ in range(49):
        clock.now += 0.5
        now.begin("checking")
        log.tick()
    assert said(capsys) == []


def test_what_is_timed_is_not_disturbed_and_still_not_silent(clock, capsys):
    """Windows of any length, one after the other: at most one line in each, and a line in half a minute."""
    for window in (0.1, 1.0, 3.9, 60.0):
        start = clock.now
        now, lines = display.Status(), []
        display.reset_clock()
        log = display.log_heartbeat(now.line)
        with progress.subscribe(lambda *heard: (now.hear(*heard), log.tick())):  # noqa: B023
            while clock.now < start + 120:
                progress.report_phase("rounds", 1, 12)  # between the windows, where nothing is timed
                between = capsys.readouterr().err
                with progress.measuring():
                    opened = clock.now
                    while clock.now < opened + window - 1e-9:
                        clock.now += 0.1
                        log.tick()
                inside = capsys.readouterr().err
                assert not inside or window > display.HOLD_S
                assert inside.count("\n") <= 1 + window / display.EVERY_S
                lines += [clock.now] * (between + inside).count("\n")
        assert len(lines) >= 3, window
    assert progress.measuring_since() is None


def test_share_whole_and_words(clock):
    now = display.Status()
    now.begin("one linear")
    now.whole.tell(0, 8)
    clock.now += 10
    now.whole.tell(2, 8)
    now.hear("building", 0.25, 1)
    assert now.line() == "25%, 30 s left: one linear: building, 25%"
    now.hear("", 3, 4)
    assert now.line() == "25%, 30 s left: one linear: building, 3 of 4"
    now.begin("another")
    assert now.line() == "25%, 30 s left: another"
    texts = [progress.duration(seconds) for seconds in (0, 59.6, 99, 100, 5900, 5940, 40_000)]
    assert texts == ["0 s", "60 s", "99 s", "2 min", "98 min", "1.6 h", "11.1 h"]


def test_only_the_innermost_display_hears():
    outer, inner = [], []
    progress.report_phase("nobody hears")
    with progress.subscribe(lambda *heard: outer.append(heard)):
        progress.report_phase("a")
        with progress.subscribe(lambda *heard: inner.append(heard)):
            progress.report_phase("b", 1, 2)
        progress.report_phase("c")
    assert (outer, inner) == ([("a", 0, 0), ("c", 0, 0)], [("b", 1, 2)])


def test_the_thread_beats_until_the_block_ends_and_survives_a_closed_file():
    beats = threading.Semaphore(0)

    def beat():
        beats.release()
        raise ValueError("I/O operation on closed file")

    before = threading.active_count()
    with display.ticking(beat, 0.001):
        assert beats.acquire(timeout=10)
        assert beats.acquire(timeout=10)
    assert threading.active_count() == before
    assert time.monotonic() > 0
