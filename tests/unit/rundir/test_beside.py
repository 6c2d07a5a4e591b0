"""Stages beside others: what they leave is what they leave in order, and nothing goes on alone."""

import dataclasses
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from qdqbench.eval.stages.stages import FP16_STAGE, stages
from qdqbench.quantize.activity import told
from qdqbench.quantize.core.errors import CheckFailed
from qdqbench.quantize.machine.process import shares_cores
from qdqbench.quantize.recipe.schema import load_recipe, shipped_recipes
from qdqbench.quantize.rundir import pipeline
from qdqbench.quantize.rundir.pipeline import STAGES_FILE, Stage, open_run, run_stages
from qdqbench.quantize.rundir.session import RunConfig, Session
from qdqbench.quantize.tasks.task import GLUE

LONG_S = 20.0  # nothing here takes so long


def config(recipe: str = "bert-fp16") -> RunConfig:
    return RunConfig(recipe=load_recipe(recipe), model="m", task=GLUE["sst2"], data="d")


class Line:
    """Stages a, b and c; a may run beside b, and c reads both. `does` is what a stage does beside writing."""

    def __init__(self, folder: Path, **does: Any) -> None:
        self.session = open_run(config(), folder)
        self.session.__dict__["eval_splits"] = {}
        self.does, self.threads = does, dict[str, str]()
        self.stages = [
            Stage("a", self.writer("a"), (), lambda _: 1, beside=("b",)),
            Stage("b", self.writer("b"), (), lambda _: 1),
            Stage("c", self.writer("c"), ("a", "b"), lambda _: 1),
        ]

    def writer(self, name: str) -> Any:
        def run(session: Session) -> list[Path]:
            self.threads[name] = threading.current_thread().name
            self.does.get(name, lambda _: None)(session)
            session.notes.append(f"note of {name}")
            path = session.folder / f"{name}.txt"
            read = ("a", "b") if name == "c" else ()
            path.write_text("".join((session.folder / f"{each}.txt").read_text() for each in read) + name)
            return [path]

        return run

    def kept(self) -> dict[str, Any]:
        path = self.session.folder / STAGES_FILE
        return json.loads(path.read_text())["stages"] if path.is_file() else {}


@pytest.fixture(autouse=True)
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "has_room", lambda: True)


def test_what_is_left_is_the_same_as_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()
    both = Line(tmp_path / "beside", a=lambda _: begun.wait(LONG_S), b=lambda _: begun.set())
    timings = run_stages(both.session, both.stages)
    assert begun.is_set()
    monkeypatch.setattr(pipeline, "has_room", lambda: False)
    one = Line(tmp_path / "ordered")
    ordered = run_stages(one.session, one.stages)
    assert both.threads["a"] != both.threads["b"] == one.threads["a"]
    assert [*timings] == [*ordered] == ["a", "b", "c"]
    for name in "abc":
        mine, theirs = both.kept()[name], one.kept()[name]
        assert all(mine[key] == theirs[key] for key in ("key", "notes", "outputs"))
    assert both.session.notes == one.session.notes == [f"note of {name}" for name in "abc"]
    assert (both.session.folder / "c.txt").read_text() == "abc"
    assert all(timing.reused for timing in run_stages(both.session, both.stages).values())


def fail(name: str) -> Any:
    def raising(session: Session) -> None:
        raise CheckFailed(f"{name} failed")

    return raising


@pytest.mark.parametrize(
    ("failing", "told_of", "kept"),
    [("a", "a", []), ("b", "b", ["a"]), ("ab", "a", []), ("c", "c", ["a", "b"])],
)
def test_the_first_that_fails_is_told_and_what_is_done_is_kept(
    failing: str, told_of: str, kept: list[str], tmp_path: Path
) -> None:
    line = Line(tmp_path / "run", **{name: fail(name) for name in failing})
    with pytest.raises(CheckFailed, match=f"^{told_of} failed$"):
        run_stages(line.session, line.stages)
    assert (
        sorted({*line.kept()} - {"b"} if failing == "a" else line.kept()) == kept
    )  # b may have begun, or not


def test_what_fails_beside_ends_what_is_done_here(tmp_path: Path) -> None:
    begun = threading.Event()

    def failing(session: Session) -> None:
        assert begun.wait(LONG_S)
        raise CheckFailed("the labels are in another order")

    def endless(session: Session) -> None:
        begun.set()
        end = time.monotonic() + LONG_S
        while time.monotonic() < end:
            told.doing("calibrating")
        raise CheckFailed("b was not ended")

    line = Line(tmp_path / "run", b=endless)
    line.stages[0] = dataclasses.replace(line.stages[0], recorded=failing)  # as the alarm of `auto`
    with pytest.raises(CheckFailed, match="another order"):
        run_stages(line.session, line.stages)
    assert [*line.kept()] == ["a"]
    told.doing("nothing ends this any more")


def test_ctrl_c_ends_both(tmp_path: Path) -> None:
    begun, ended = threading.Event(), threading.Event()

    def endless(session: Session) -> None:
        try:
            while not ended.wait(0.001):
                begun.set()
                session.progress(1, 2)
        finally:
            ended.set()

    def interrupted(session: Session) -> None:
        assert begun.wait(LONG_S)
        raise KeyboardInterrupt

    line = Line(tmp_path / "run", a=endless, b=interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_stages(line.session, line.stages)
    assert ended.is_set()
    assert line.kept() == {}
    assert not any(thread.name == line.threads["a"] for thread in threading.enumerate())


def test_each_has_its_own_cpu_time_progress_and_no_say_in_what_is_done(tmp_path: Path) -> None:
    heard: list[str] = []
    progress: list[tuple[str, float]] = []

    def busy(name: str, seconds: float) -> Any:
        def run(session: Session) -> None:
            told.doing(name)
            end = time.thread_time() + seconds
            while time.thread_time() < end:
                pass
            session.progress(seconds, 1)

        return run

    line = Line(tmp_path / "run", a=busy("a", 0.3), b=busy("b", 0.1))

    def announce(name: str, reused: bool) -> None:
        line.session.progress = lambda done, total: progress.append((name, done))

    with told.listening(lambda phase, done, total: heard.append(phase)):
        timings = run_stages(line.session, line.stages, announce)
    assert sorted(progress) == [("a", 0.3), ("b", 0.1)]
    assert "a" not in heard
    assert {"b", "waiting for a"} <= {*heard}
    assert timings["a"].cpu_s is not None
    assert timings["b"].cpu_s is not None
    assert 0.3 <= timings["a"].cpu_s < 0.38
    assert 0.08 <= timings["b"].cpu_s < 0.2


def test_torch_has_each_core_once(tmp_path: Path) -> None:
    cores, threads, shared = torch.get_num_threads(), dict[str, int](), dict[str, bool]()
    both = threading.Barrier(2)

    def count(name: str) -> Any:
        def run(session: Session) -> None:
            if name != "c":
                both.wait(LONG_S)
            threads[name], shared[name] = torch.get_num_threads(), shares_cores()

        return run

    torch.set_num_threads(3)
    try:
        line = Line(tmp_path / "run", **{name: count(name) for name in "abc"})
        run_stages(line.session, line.stages)
        assert threads == {"a": 1, "b": 2, "c": 3}
        assert shared == {"a": True, "b": True, "c": False}
        line = Line(tmp_path / "failed", b=fail("b"))
        with pytest.raises(CheckFailed):
            run_stages(line.session, line.stages)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(cores)


def test_what_is_done_is_kept_and_told_at_once(tmp_path: Path) -> None:
    recorded = threading.Event()

    def later(session: Session) -> None:
        assert recorded.wait(LONG_S)
        assert [*line.kept()] == ["a"]

    line = Line(tmp_path / "run", b=later)
    line.stages[0] = dataclasses.replace(line.stages[0], recorded=lambda _: recorded.set())
    run_stages(line.session, line.stages)
    assert {*line.kept()} == {*"abc"}


@pytest.mark.parametrize("name", shipped_recipes())
def test_no_stage_runs_beside_what_it_is_made_from(name: str, tmp_path: Path) -> None:
    listed = stages(Session(config(name), tmp_path))
    listed.pop(FP16_STAGE, None)  # runs only where it is asked for, and then between two that else overlap
    order, meanwhile = [*listed], 0
    for place, stage in enumerate(listed.values()):
        others = [listed[each] for each in stage.beside if each in listed]
        meanwhile += len(others)
        # one between them would be waited for, and they would not run beside it
        assert [each.name for each in others] == order[place + 1 : place + 1 + len(others)]
        assert not [each.name for each in others if stage.name in each.needs]
    assert meanwhile
