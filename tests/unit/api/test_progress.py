"""Progress with a clock that is set by hand: what a log, a terminal, a notebook and a callback get."""

import re
import sys
from types import SimpleNamespace

import pytest

from qdqbench import StageProgress, UserError
from qdqbench import _progress as display
from qdqbench.quantize.utils import progress
from qdqbench.quantize.utils.progress import Prefixed, Reporter, report_phase, reporter, reporting_to
from qdqbench.quantize.utils.trackers import LogRow

ROW = LogRow(step=7, epoch=0.5, learning_rate=1e-5, loss=0.25)
SCORED = LogRow(step=8, epoch=0.5, learning_rate=1e-5, score=0.5, values={"f1": 0.5})


def said(capsys):
    lines = capsys.readouterr().err.splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in lines)
    return [line.split(" ", 1)[1] for line in lines]


def shown(capsys):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)


def show_on_terminal(monkeypatch):
    """Let standard error be a terminal of 80 columns, on which each event is drawn."""
    monkeypatch.setattr(display.sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(display, "REDRAWN_S", 0.0)
    for name, value in {"FORCE_COLOR": "1", "COLUMNS": "80", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)


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


def test_a_log_says_step_phase_count_and_time_left(clock, capsys):
    with reporting_to(display.Display("stage")) as log:
        reporter().begin("quantize", 2, 10)
        for batch in progress.track("calibrating", range(16)):
            clock.now += 4
            log.tick()
            assert batch < 16
        report_phase("bias correction")
        clock.now += display.EVERY_S
        log.tick()
        report_phase("building", 0.25, 1)
        clock.now += display.EVERY_S
        log.tick()
    assert said(capsys) == [
        "stage 3 of 10: quantize: calibrating, 6 of 16, 36 s left",
        "stage 3 of 10: quantize: calibrating, 13 of 16, 8 s left",
        "stage 3 of 10: quantize: bias correction, nothing new for 25 s",
        "stage 3 of 10: quantize: building, 25%, nothing new for 25 s",
    ]


def test_a_log_says_what_each_kind_of_command_reports(clock, capsys):
    def later(call, *given, **named):
        clock.now += 31
        call(*given, **named)

    with display.displayed(noun="stage"):
        later(reporter().begin, "baseline", 0, 5)
        later(report_phase, "answering", 32, 64)
        reporter().begin("qat", 2, 5)
        later(reporter().advance, 7, 90, row=ROW)
        later(reporter().advance, 38, 90, row=ROW)
        later(reporter().advance, 38, 90, row=SCORED)
    with display.displayed():
        reporter().begin("FP32", 0, 4)
        later(reporter().begin, "one linear", 1, 4)
        with reporting_to(Prefixed("search")):
            later(reporter().begin, "8 of 40 trials; best so far: trial 3", 8, 40)
            later(report_phase, "calibrating")
    assert said(capsys) == [
        "stage 1 of 5: baseline",
        "stage 1 of 5: baseline: answering, 32 of 64",
        "stage 3 of 5: qat, loss 0.25: 7 of 90",
        "stage 3 of 5: qat, loss 0.25: 38 of 90, 52 s left",
        "stage 3 of 5: qat, held out: f1 0.5000: 38 of 90, 2 min left",
        "25%, 93 s left: one linear",
        "search: 8 of 40 trials; best so far: trial 3, 20%",
        "search: 8 of 40 trials; best so far: trial 3, 20%: calibrating",
    ]


def test_quick_commands_and_other_processes_are_silent(clock, monkeypatch, capsys):
    with display.displayed():
        for _ in range(48):
            clock.now += 0.5
            reporter().begin("checking")
    monkeypatch.setenv("RANK", "1")
    with display.displayed(noun="training"):
        clock.now = 2000
        reporter().begin("seed 1", 0, 3)
        reporter().log("moved")
    assert capsys.readouterr() == ("", "")


def test_a_phase_that_says_nothing_has_a_line_every_half_minute(clock, capsys):
    log, times = display.Display("stage"), []
    log.begin("build", 7, 10)
    log.advance(phase="compiling")
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
    display.Display().begin("planning")
    assert said(capsys) == ["planning"]
    clock.now += 20
    log = display.Display()
    log.begin("training")
    assert said(capsys) == []
    clock.now += 5
    log.tick()
    assert said(capsys) == ["training"]


def test_what_is_timed_is_not_disturbed_and_still_not_silent(clock, capsys):
    """Windows of any length, one after the other: at most one line in each, and a line in half a minute."""
    for window in (0.1, 1.0, 3.9, 60.0):
        start, lines = clock.now, list[float]()
        display.reset_clock()
        with reporting_to(display.Display()) as log:
            while clock.now < start + 120:
                report_phase("rounds", 1, 12)  # between the windows, where nothing is timed
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


def test_the_innermost_reporter_decides_what_the_others_hear():
    class Recorder(Reporter):
        def __init__(self):
            self.heard = []

        def advance(self, *told):
            self.heard.append(told)

    outer, inner = Recorder(), Recorder()
    report_phase("nobody hears")
    with reporting_to(outer):
        report_phase("a")
        with reporting_to(Prefixed("passes on")):
            report_phase("b", 1, 2)
        with reporting_to(inner):
            report_phase("c")
    assert outer.heard == [(0, 0, "a"), (1, 2, "b", None)]
    assert inner.heard == [(0, 0, "c")]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_what_makes_a_run_worth_nothing_is_said_and_stays(is_terminal, monkeypatch, capsys):
    monkeypatch.setattr(display.sys.stderr, "isatty", lambda: is_terminal, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    with display.displayed(noun="stage"):
        reporter().log("a, c made again")
        reporter().begin("baseline", 0, 5)
        reporter().log("FP32 accuracy 0.1 against 0.5 of always class 1: another order", alarm=True)
    before, _, after = " ".join(shown(capsys).split()).partition("✗")
    assert after.startswith(" FP32 accuracy 0.1 against 0.5 of always class 1: another order.")
    assert "Ctrl-C ends it" in after
    assert "a, c made again" in before


def test_a_terminal_gets_a_bar_for_each_stage(monkeypatch, capsys):
    show_on_terminal(monkeypatch)
    with display.displayed(noun="stage"):
        reporter().begin("baseline", 0, 5, reused=True)
        reporter().begin("qat", 2, 5)
        report_phase("training")
        reporter().advance(1, 2)
        reporter().advance(7, 90, row=ROW)
        reporter().advance(8, 90, row=SCORED)
    drawn = shown(capsys)
    parts = (
        "baseline (unchanged)",
        "stage 3 of 5: qat",
        "training, 1 of 2",
        "loss 0.25",
        "held out: f1 0.5000",
    )
    assert [part for part in parts if part not in drawn] == []
    assert max(map(len, drawn.replace("\r", "\n").split("\n"))) <= 80


def test_one_changing_line_is_gone_when_it_ends(monkeypatch, capsys):
    """A spinner that stands still above the result would look as if something were stuck."""
    show_on_terminal(monkeypatch)
    with display.displayed():
        reporter().begin("one [linear]", 1, 4)
        report_phase("answering", 3, 8)
    drawn = capsys.readouterr().err
    assert "25%: one [linear]" in drawn
    assert "answering, 3 of 8" in drawn
    assert re.sub(r"(\x1b\[\?25h|\r|\n)", "", drawn).endswith("\x1b[2K")  # the line is erased


def test_a_notebook_redraws_one_output(monkeypatch, capsys):
    outputs = []
    shell = type("ZMQInteractiveShell", (), {})
    handle = SimpleNamespace(update=lambda data, raw: outputs.append(data["text/plain"]))
    shows = SimpleNamespace(display=lambda data, raw, display_id: handle)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=shell, display=shows))
    monkeypatch.setattr(display, "REDRAWN_S", 0.0)
    with display.displayed(None, "stage"):
        reporter().begin("quantize", 2, 9)
        report_phase("bias correction", 3, 6)
        reporter().log("made again")
    assert any("stage 3 of 9: quantize" in text and "bias correction, 3 of 6" in text for text in outputs)
    assert "bias" not in outputs[-1]
    assert capsys.readouterr().err == "made again\n"
    with display.displayed(False, "stage"):
        reporter().begin("quantize", 2, 9)
    assert capsys.readouterr() == ("", "")


def test_a_function_is_called_as_steps_start_and_continue(capsys):
    told = []
    with display.displayed(told.append, "stage"):
        reporter().log("a made again")
        reporter().begin("quantize", 1, 4)
        report_phase("calibrating")
        reporter().advance(2, 4)
        report_phase("bias correction", 3, 6)
        reporter().begin("qat", 2, 4, reused=True)
        reporter().advance(7, 90, row=ROW)
    assert told == [
        StageProgress("", said="a made again"),
        StageProgress("quantize", number=2, of=4),
        StageProgress("quantize", 2, 4, number=2, of=4),
        StageProgress("quantize", 3, 6, number=2, of=4),
        StageProgress("qat", reused=True, number=3, of=4),
        StageProgress("qat", 7, 90, reused=True, row=ROW, number=3, of=4),
    ]
    with display.displayed(None):
        reporter().begin("nothing is asked for")
    assert capsys.readouterr() == ("", "")
    with pytest.raises(UserError, match="progress='bars' is no function"), display.displayed("bars"):
        pass


def test_durations():
    texts = [progress.duration(seconds) for seconds in (0, 59.6, 99, 100, 5900, 5940, 40_000)]
    assert texts == ["0 s", "60 s", "99 s", "2 min", "98 min", "1.6 h", "11.1 h"]
