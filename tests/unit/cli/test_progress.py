"""Progress: bars on a terminal, a line every half minute in a log."""

import re
from types import SimpleNamespace

import pytest

from qdqbench.cli import progress
from qdqbench.eval.runs import run
from qdqbench.quantize.pipeline.pipeline import Stage
from qdqbench.quantize.utils.progress import report_phase
from qdqbench.quantize.utils.trackers import LogRow

ROW = LogRow(step=7, epoch=0.5, learning_rate=1e-5, loss=0.25)
STAGES = ["baseline", "quantize", "qat", "export"]


@pytest.fixture
def session(monkeypatch):
    """Of a run with a few stages."""
    stages = [SimpleNamespace(name=name) for name in STAGES]
    monkeypatch.setattr(run, "planned", lambda session, until: stages)
    return SimpleNamespace(progress=None, report=None, alarm=None, say=None)


def test_quick_commands_and_other_processes_are_silent(clock, capsys):
    with progress.status() as say:
        clock.now = 24
        say("building")
    with progress.seeds(3, quiet=True) as show:
        clock.now = 200
        show(1, ROW, 90)
        report_phase("answering")
    assert capsys.readouterr() == ("", "")


def test_a_log_says_what_each_display_says(clock, session, capsys):
    def later(call, *given):
        clock.now += 31
        call(*given)

    with progress.stages() as stages:
        announce = run.follow(session, stages)
        later(announce, "baseline", False)
        later(report_phase, "answering", 32, 64)
        announce("qat", False)
        later(session.report, ROW, 90)
        later(session.report, ROW.model_copy(update={"step": 38}), 90)
        later(session.progress, 3, 12)
    with progress.seeds(3, quiet=False) as show:
        later(show, 2, ROW, 90)
    with progress.time_left() as left:
        left(0, 4, "FP32")
        later(left, 1, 4, "one linear")
    with progress.trials(40) as (say, trial):
        later(say, "calibrating")
        trial(0, 40, "none holds")
        later(trial, 8, 40, "best so far: trial 3")
        later(say, "building")
    said = capsys.readouterr().err.splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in said)
    assert [line.split(" ", 1)[1] for line in said] == [
        "stage 1 of 5: baseline",
        "stage 1 of 5: baseline: answering, 32 of 64",
        "stage 3 of 5: qat, loss 0.25: 7 of 90",
        "stage 3 of 5: qat, loss 0.25: 38 of 90, 52 s left",
        "stage 3 of 5: qat, loss 0.25: 3 of 12",
        "8%: seed 2: step 7 of 90, loss 0.25",
        "25%, 93 s left: one linear",
        "preparing: calibrating",
        "20%, 2 min left: 8 of 40 trials; best so far: trial 3",
        "20%, 93 s left: 8 of 40 trials; best so far: trial 3: building",
    ]


@pytest.mark.parametrize("terminal", [False, True])
def test_what_makes_a_run_worth_nothing_is_said_and_stays(terminal, monkeypatch, session, capsys):
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: terminal, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    with progress.stages() as stages:
        announce = run.follow(session, stages)
        session.say("a, c made again")
        announce("baseline", False)
        session.alarm("FP32 accuracy 0.1 against 0.5 of always class 1: the labels are in another order")
    said = " ".join(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err).split())
    assert "✗ FP32 accuracy 0.1 against 0.5 of always class 1: the labels are in another order." in said
    assert "Ctrl-C ends it" in said
    assert "a, c made again" in said.partition("✗")[0]


@pytest.mark.parametrize("reused", [False, True])
def test_it_is_said_once_the_baseline_is_there(reused, monkeypatch, tmp_path):
    told = []

    def run_stages(session, stages, announce):
        for stage in stages:
            announce(stage.name, reused)
            stage.recorded(session)
        return {}

    monkeypatch.setattr(run.pipeline, "run_stages", run_stages)
    for name in ("remove_other_stages", "explain_stale"):
        monkeypatch.setattr(run.pipeline, name, lambda *arguments: None)
    for name in ("remove", "cannot_hold", "stages"):
        monkeypatch.setattr(run, name, lambda *arguments: None)
    monkeypatch.setattr(run, "dump_recipe", str)
    monkeypatch.setattr(run, "score_stage", lambda session, name: None)
    monkeypatch.setattr(run, "judge_baseline", lambda session, score: SimpleNamespace(state="failed"))
    monkeypatch.setattr(run, "issue_sentence", lambda issue: "wrong")
    monkeypatch.setattr(run, "_require_room", lambda session, names: None)
    stages = [Stage(name, lambda session: [], (), lambda session: None) for name in STAGES]
    monkeypatch.setattr(run, "planned", lambda session, until: stages)
    config = SimpleNamespace(model_dump=lambda mode: {})
    session = SimpleNamespace(folder=tmp_path, alarm=told.append, config=config, recipe=None)
    run.run_to(session, None, lambda name, reused: told.append(name))
    assert told == ["baseline", "wrong", *STAGES[1:]]


def test_a_terminal_gets_bars(monkeypatch, session, capsys):
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(progress, "REDRAWN_S", 0.0)  # each event is drawn
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    with progress.stages() as stages:
        announce = run.follow(session, stages)
        announce("baseline", True)
        announce("qat", False)
        report_phase("training")
        session.progress(1, 2)
        session.report(ROW, 90)
    with progress.seeds(2, quiet=False) as show:
        show(1, ROW, 90)
        show(1, LogRow(step=8, epoch=0.5, learning_rate=1e-5, score=0.5, values={"f1": 0.5}), 90)
    with progress.time_left() as left:
        left(1, 4, "one [linear]")
    with progress.trials(40) as (say, trial):
        say("calibrating")
        trial(8, 40, "best so far: trial 3")
        say("building")
    with progress.status() as say:
        say("building [engine]")
    said = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    for part in (
        "stage 1 of 5: baseline (unchanged)",
        "stage 3 of 5: qat",
        "training, 1 of 2",
        "loss 0.25",
        "seed 1",
        "loss 0.2500",
        "held out: f1 0.5000",
        "one [linear]",
        "trial 9 of 40",
        "best so far: trial 3",
        "building [engine]",
    ):
        assert part in said, part
    assert max(map(len, said.replace("\r", "\n").split("\n"))) <= 80


def test_one_changing_line_is_gone_when_it_ends(monkeypatch, capsys):
    """A spinner that stands still above the result would look as if something were stuck."""
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with progress.status() as say:
        say("comparing")
    drawn = capsys.readouterr().err
    assert "comparing" in drawn
    assert re.sub(r"(\x1b\[\?25h|\r|\n)", "", drawn).endswith("\x1b[2K")  # the line is erased


def test_the_first_numbered_stage_is_one_of_the_way(session):
    seen = []
    announce = run.follow(session, seen.append, "export")
    announce("quantize", False)
    session.progress(2, 4)
    assert [(now.stage, now.number, now.of, now.done, now.total) for now in seen] == [
        ("quantize", 2, 4, 0, 0),
        ("quantize", 2, 4, 2, 4),
    ]
