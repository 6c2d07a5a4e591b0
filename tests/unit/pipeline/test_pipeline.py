"""Stages: what is reused, what runs again, and what an interruption leaves."""

import contextlib
import dataclasses
import json
import os

import pytest

from qdqbench.quantize.pipeline.pipeline import (
    MADE,
    STAGES_FILE,
    Stage,
    explain_stale,
    open_run,
    remove_other_stages,
    require_recorded,
    run_stages,
    select_stages,
)
from qdqbench.quantize.pipeline.session import CONFIG, RunConfig, Session, read_config
from qdqbench.quantize.recipe.schema import load_recipe
from qdqbench.quantize.tasks.task import GLUE
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.system.process import interruption


def config(**changes):
    values = {"recipe": load_recipe("bert-fp16"), "model": "m", "task": GLUE["sst2"], "data": "d"}
    return RunConfig(**values | changes)


class Line:
    """Three stages a -> b -> c that write what they read; their inputs are plain values to change."""

    def __init__(self, folder):
        self.session = open_run(config(), folder)
        self.inputs = {"a": 1, "b": 1, "c": 1}
        self.ran = []
        self.fail_in = None
        self.stages = [
            Stage("a", self.writer("a"), (), lambda _: self.inputs["a"]),
            Stage("b", self.writer("b", "a"), ("a",), lambda _: self.inputs["b"]),
            Stage("c", self.writer("c", "b"), ("b",), lambda _: self.inputs["c"]),
        ]

    def path(self, name):
        return self.session.folder / f"model.{name}.onnx"

    def writer(self, name, source=None):
        def run(session):
            self.ran.append(name)
            session.notes.append(f"note of {name}")
            session.warnings.append(f"warning of {name}")
            text = f"{name}{self.inputs[name]}" + (self.path(source).read_text() if source else "")
            with files.atomic_path(self.path(name)) as temporary:
                temporary.write_text(text[:1])
                if self.fail_in == name:
                    raise KeyboardInterrupt
                temporary.write_text(text)
            return [self.path(name)]

        return run

    def run(self, *names):
        """Names of the stages that ran."""
        self.ran.clear()
        self.session = Session(self.session.config, self.session.folder)
        self.timings = run_stages(self.session, [s for s in self.stages if not names or s.name in names])
        return list(self.ran)


@pytest.fixture(autouse=True)
def _model(monkeypatch):
    monkeypatch.setattr(Session, "model_sha256", "of the model")


@pytest.fixture
def line(tmp_path):
    line = Line(tmp_path / "run")
    assert line.run() == ["a", "b", "c"]
    return line


def test_nothing_runs_when_nothing_changed(line):
    first = {name: timing.wall_s for name, timing in line.timings.items()}
    assert not any(timing.reused for timing in line.timings.values())
    assert line.run() == []
    assert all(timing.reused for timing in line.timings.values())
    assert {name: timing.wall_s for name, timing in line.timings.items()} == first
    assert line.session.notes == ["note of a", "note of b", "note of c"]
    assert line.session.warnings == ["warning of a", "warning of b", "warning of c"]


def test_what_other_code_made_is_told_before_it_is_made_again(line):
    folder, path = line.session.folder, line.session.folder / "stages.json"
    assert explain_stale(folder, ["a", "b", "c"]) == ""
    known = json.loads(path.read_text())
    known["stages"]["a"]["made_with"]["code"] = "another"
    known["stages"]["c"]["made_with"]["code"] = "another"
    path.write_text(json.dumps(known))
    said = "a, c made again: what is there was made with other code of qdqbench"
    assert explain_stale(folder, ["a", "b", "c", "d"]) == said
    known["stages"]["a"]["made_with"]["versions"]["torch"] = "1.0"
    path.write_text(json.dumps(known))
    assert "a, c made again: what is there was made with torch 1.0 (now " in explain_stale(folder, ["a", "c"])


def test_what_is_handed_on_is_what_was_recorded(line):
    graph, session, results = line.path("b"), line.session, line.session.folder / "results.json"
    require_recorded(session, graph)
    for name, damage in (("a", b"other"), ("b", b"other"), ("c", b"")):
        kept = line.path(name).read_bytes()
        line.path(name).write_bytes(damage)
        with pytest.raises(
            UserError, match=rf"{name}\.onnx changed since .*; `qdqbench report .*run` makes it"
        ):
            require_recorded(session, graph)
        line.path(name).write_bytes(kept)
    with pytest.raises(UserError, match=r"stages\.json has no record of other\.onnx; `qdqbench report"):
        require_recorded(session, session.folder / "other.onnx")
    line.path("c").unlink()  # whoever needs it says so
    for made, kept, good in (("another", None, False), (None, "of the model", True), (None, None, False)):
        stages = json.loads((session.folder / STAGES_FILE).read_text())
        stages["stages"]["b"]["model_sha256"] = made
        (session.folder / STAGES_FILE).write_text(json.dumps(stages))
        results.write_text(json.dumps({"model": {"sha256": kept} if kept else {}}))
        with (
            contextlib.nullcontext() if good else pytest.raises(UserError, match=r"model m .* is not the one")
        ):
            require_recorded(session, graph)


@pytest.mark.parametrize(("changed", "runs"), [("a", ["a", "b", "c"]), ("b", ["b", "c"]), ("c", ["c"])])
def test_a_changed_input_runs_the_stage_and_what_reads_it(line, changed, runs):
    line.inputs[changed] = 2
    assert line.run() == runs
    assert line.run() == []


def test_the_same_output_stops_the_wave(line):
    line.stages[0] = Stage("a", line.stages[0].run, (), lambda _: "another input, the same output")
    assert line.run() == ["a"]


@pytest.mark.parametrize(
    "damage", [os.unlink, lambda path: path.write_text("tampered")], ids=["deleted", "tampered"]
)
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_a_damaged_output_is_made_again(line, name, damage):
    before = {n: line.path(n).read_text() for n in "abc"}
    damage(line.path(name))
    assert line.run() == [name]
    assert {n: line.path(n).read_text() for n in "abc"} == before


def test_an_output_that_is_now_a_folder(line):
    line.path("c").unlink()
    line.path("c").mkdir()
    with pytest.raises(OSError, match="directory"):
        line.run()


def test_outputs_that_are_no_longer_made_are_removed(line):
    other = line.session.folder / "new" / "c.txt"

    def moved(_):
        files.write_text(other, "x")
        return [other]

    line.stages[2] = Stage("c", moved, ("b",), lambda _: "elsewhere")
    line.run()
    assert other.is_file()
    assert not line.path("c").exists()


def test_an_interrupted_stage_leaves_nothing_half_written(line):
    line.inputs["b"] = 2
    before = line.path("b").read_text()
    line.fail_in = "b"
    with pytest.raises(KeyboardInterrupt):
        line.run()
    assert line.path("b").read_text() == before
    made = {line.path(name) for name in "abc"}
    assert {*line.session.folder.iterdir()} == made | {line.session.folder / n for n in (CONFIG, STAGES_FILE)}
    line.fail_in = None
    assert line.run() == ["b", "c"]
    assert line.path("c").read_text() == "c1b2a1"


@pytest.mark.parametrize("before", [False, True])
def test_a_folder_that_vanished_under_a_run_is_taken_again(line, tmp_path, before):
    stage = line.stages[1]

    def vanish():
        line.session.folder.rename(tmp_path / "gone")
        line.session.folder.mkdir()
        line.path("a").write_text("a")

    def vanishing(session):
        if not before:
            vanish()
        return stage.run(session)

    if before:
        vanish()

    line.inputs["b"] = 2
    line.stages[1] = dataclasses.replace(stage, run=vanishing)
    line.run()
    line.stages[1] = stage
    open_run(config(), line.session.folder)
    assert line.run() == ([] if before else ["a"])


def test_ctrl_c_that_a_library_swallows_ends_the_run_after_the_stage(line):
    stage = line.stages[1]

    def swallowing(session):
        with contextlib.suppress(KeyboardInterrupt):
            interruption.receive(2, None)
        return stage.run(session)

    line.inputs["b"] = 2
    line.stages[1] = dataclasses.replace(stage, run=swallowing)
    with pytest.raises(KeyboardInterrupt):
        line.run()
    assert line.ran == ["b"]
    line.stages[1] = stage
    assert line.run() == ["c"]


def test_another_version_of_a_library_runs_all(line, monkeypatch):
    monkeypatch.setattr("qdqbench.quantize.utils.system.environment.versions", lambda: {"torch": "0"})
    assert line.run() == ["a", "b", "c"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema_version": 2}', '{"stages": {"a": {}}}', "\x00"])
def test_an_unreadable_manifest_runs_all(line, content):
    (line.session.folder / STAGES_FILE).write_text(content)
    assert line.run() == ["a", "b", "c"]
    assert line.run() == []


def test_the_manifest_never_deletes_outside_the_run(line, tmp_path):
    outside = tmp_path / "precious.txt"
    outside.write_text("x")
    path = line.session.folder / STAGES_FILE
    manifest = json.loads(path.read_text())
    manifest["stages"]["c"]["outputs"] |= {"../precious.txt": "0", str(outside): "0"}
    path.write_text(json.dumps(manifest))
    assert line.run() == ["c"]
    assert outside.is_file()


def test_an_outcome_that_no_longer_holds_is_made_again(line):
    missing = True
    line.stages[1] = dataclasses.replace(line.stages[1], holds=lambda _: missing)
    assert line.run() == []
    missing = False
    assert line.run() == ["b"]  # it left the same, so "c" is reused


def test_announced_before_it_runs(line):
    line.inputs["b"] = 2
    told = []
    run_stages(line.session, line.stages, lambda name, reused: told.append((name, reused)))
    assert told == [("a", True), ("b", False), ("c", False)]


def test_ancestors():
    needs = {"data": (), "a": ("data",), "b": ("a",), "c": ("data",), "d": ("b", "c"), "e": ()}
    stages = {name: Stage(name, lambda _: [], need, lambda _: 0) for name, need in needs.items()}
    assert [s.name for s in select_stages(stages, ["b"])] == ["data", "a", "b"]
    assert [s.name for s in select_stages(stages, ["d"])] == ["data", "a", "b", "c", "d"]
    assert [s.name for s in select_stages(stages, [])] == []
    assert [s.name for s in select_stages(stages, list(stages))] == list(stages)


class TestOpening:
    def test_a_folder_new_or_an_existing_run(self, tmp_path):
        session = open_run(config(limit=5), tmp_path / "deep" / "run")
        assert read_config(session.folder) == session.config == config(limit=5)
        open_run(config(), tmp_path / "run")
        open_run(config(limit=5), tmp_path / "run")
        assert read_config(tmp_path / "run").limit == 5

    def test_a_foreign_folder_or_file_is_refused_and_untouched(self, tmp_path):
        (tmp_path / "f").write_text("x")
        for path, told in ((tmp_path, "other files than a run; give"), (tmp_path / "f", "is a file; give")):
            with pytest.raises(UserError, match=f"{told} --out an?"):
                open_run(config(), path)
        assert os.listdir(tmp_path) == ["f"]

    def test_no_run_of_this_version(self, tmp_path):
        with pytest.raises(UserError, match=r"is no run directory \(it has no run\.json\)"):
            read_config(tmp_path)
        open_run(config(), tmp_path / "a")
        with pytest.raises(UserError, match=r"or give one of \S+/a$"):
            read_config(tmp_path / "b")
        known = json.loads((tmp_path / "a" / CONFIG).read_text())
        (tmp_path / "a" / CONFIG).write_text(json.dumps(known | {"schema_version": 2}))
        with pytest.raises(UserError, match="is no run configuration of this version of qdqbench"):
            read_config(tmp_path / "a")


def test_files_of_stages_that_this_run_does_not_have_are_removed(tmp_path):
    line = Line(tmp_path)
    run_stages(line.session, line.stages)
    remove_other_stages(tmp_path, ["a", "b"])
    assert [line.path(name).exists() for name in "abc"] == [True, True, False]
    assert set(json.loads((tmp_path / STAGES_FILE).read_text())["stages"]) == {"a", "b"}


@pytest.mark.parametrize("name", ["notes.txt", "thesis/notes.txt", "report.json", "../notes.txt"])
def test_a_file_that_no_stage_can_have_made_is_kept(name, line):
    mine, path = line.session.folder / name, line.session.folder / STAGES_FILE
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("years of work")
    stages = json.loads(path.read_text())
    stages["stages"]["b"]["outputs"][name] = "0" * 64
    path.write_text(json.dumps(stages))
    assert "b" in line.run()
    assert mine.read_text() == "years of work"


def test_what_stages_make_has_names_that_may_be_removed():
    names = (
        "embedded/model/config.json qat/training.json logits/fp32.npz gpu/build.json "
        "engine/model.int8.engine model.int8.onnx calibration.json check.json layers.json build.json "
        "verify.json engine.json onnxruntime.json parity.json layer_errors.json rewrites.json"
    )
    assert [name for name in names.split() if not MADE.fullmatch(name)] == []
