"""Progress: bars on a terminal, a line every half minute in a log, nothing where it is unwanted."""

import re
from types import SimpleNamespace

import pytest

from qdqbench.eval.runs.run import follow
from qdqbench.quantize.cli import progress
from qdqbench.quantize.core.training_results import LogRow

ROW = LogRow(step=7, epoch=0.5, learning_rate=1e-5, loss=0.25)


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(progress.time, "monotonic", made)
    return made


def test_a_log_gets_a_line_in_half_a_minute_at_most(clock, capsys):
    log = progress.Log()
    for second in range(100):
        clock.now = second
        log(f"at {second}")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == ["at 30", "at 60", "at 90"]
    assert all(re.fullmatch(r"\d\d:\d\d:\d\d at \d+", line) for line in lines)


def test_quick_commands_and_unwanted_progress_are_silent(clock, capsys):
    with progress.status(quiet=False) as say:
        clock.now = 29
        say("building")
    with progress.status(quiet=True) as say:
        clock.now = 200
        say("building")
    assert capsys.readouterr().err == ""


def test_a_log_says_what_each_display_says(clock, capsys):
    session = SimpleNamespace(progress=None, report=None)
    with (
        progress.stages(quiet=False) as stages,
        progress.seeds(3, quiet=False) as show,
        progress.time_left(quiet=False) as left,
        progress.trials(40, quiet=False) as trials,
    ):
        follow(session, stages)("qat", False)
        for n, call in enumerate(
            (
                lambda: session.report(ROW, 90),
                lambda: session.progress(3, 12),
                lambda: show(2, ROW, 90),
                lambda: left(1, 4, "one linear"),
                lambda: trials.say("calibrating"),
                lambda: trials.trial(8, 40, "best so far: trial 3"),
            )
        ):
            clock.now = 31 * (n + 1)
            call()
    said = [line.split(" ", 1)[1] for line in capsys.readouterr().err.splitlines()]
    assert said == [
        "qat: step 7 of 90, loss 0.25",
        "qat: 3 of 12",
        "seed 2: step 7 of 90, loss 0.25",
        "25% one linear",
        "calibrating",
        "8 of 40 trials; best so far: trial 3",
    ]


def test_a_terminal_gets_bars(monkeypatch, capsys):
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    session = SimpleNamespace(progress=None, report=None)
    with progress.stages(quiet=False) as stages:
        announce = follow(session, stages)
        announce("fp32", True)
        announce("qat", False)
        session.progress(1, 2)
        session.report(ROW, 90)
    with progress.seeds(2, quiet=False) as show:
        show(1, ROW, 90)
        show(1, LogRow(step=8, epoch=0.5, learning_rate=1e-5, score=0.5, values={"f1": 0.5}), 90)
    with progress.time_left(quiet=False) as left:
        left(1, 4, "one [linear]")
    with progress.trials(40, quiet=False) as trials:
        trials.say("calibrating")
        trials.trial(8, 40, "best so far: trial 3")
    with progress.status(quiet=False) as say:
        say("building [engine]")
    said = capsys.readouterr().err
    for part in (
        "fp32 (unchanged)",
        "qat 7/90 loss 0.25",
        "seed 1",
        "loss 0.2500",
        "held out: f1 0.5000",
        "one [linear]",
        "trial 9 of 40",
        "best so far: trial 3",
    ):
        assert part in said, part
