"""Processes beside each other take their time: each has its own, and none outlives the bench."""

import json
import os
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from qdqbench.eval.bench import gpu
from qdqbench.eval.bench.gpu import EngineSpec, background, build_engine, main, marker
from qdqbench.eval.bench.target import model_target, random_ids_task, recipe_for
from qdqbench.quantize.engine.profiles import Profile
from qdqbench.quantize.pipeline.pipeline import open_run
from qdqbench.quantize.pipeline.session import RunConfig
from qdqbench.quantize.recipe.schema import load_recipe
from qdqbench.quantize.utils.errors import UserError

from ...support.records import engine_result

# what the last argument says: to answer with an error or without, to sleep, or to end
CHILD = """
import json, sys, time
print("noise of a library", flush=True)
what = sys.argv[-1]
if what == "sleep":
    time.sleep(60)
if what == "end":
    sys.exit("no module")
print(json.dumps({"error": what}), flush=True)
"""


@pytest.fixture(autouse=True)
def child(monkeypatch):
    monkeypatch.setattr(gpu, "START_S", 0.0)
    monkeypatch.setattr(gpu, "COMMAND", (sys.executable, "-c", CHILD))


def test_tasks_that_fail_or_take_too_long_say_so_and_take_no_other_with_them():
    with background(3) as work:
        for task, what in {"fine": "", "failed": "no C compiler", "ended": "end", "late": "sleep"}.items():
            work.add(task, [what], 0.5 if task == "late" else 20)
        work.add("fine", ["sleep"], 20)  # is under way already
        assert work.left > 0
        for task in ("fine", "failed", "ended", "late"):
            work.wait_for(task)
        assert work.left == 0
    assert work.failed == {
        "failed": "no C compiler",
        "ended": "its process ended: no module",
        "late": "it took over 0.5 s",
    }


def test_nothing_is_left_running(monkeypatch, tmp_path):
    written = tmp_path / "pid"
    script = f"import os, time; open({str(written)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    monkeypatch.setattr(gpu, "COMMAND", (sys.executable, "-c", script))
    begun = time.monotonic()
    with background(1) as work:
        work.add("first", [], 60)
        work.add("never begun", [], 60)
        while not (written.is_file() and written.read_text()) and time.monotonic() < begun + 10:
            time.sleep(0.02)
    with pytest.raises(ProcessLookupError):
        os.kill(int(written.read_text()), 0)
    assert time.monotonic() < begun + 20


@pytest.fixture
def run(tiny_bert, tmp_path):
    task = random_ids_task(str(tiny_bert))
    config = RunConfig(recipe=load_recipe("bert-fp16"), model=str(tiny_bert), task=task, data="none")
    open_run(config, tmp_path / "run")
    return tmp_path / "run"


def test_a_child_compiles_every_shape_and_marks_what_is_done(run, monkeypatch, capsys):
    asked = []

    def compiled(model, mode, *, dynamic):
        def forward(*, input_ids, attention_mask, token_type_ids):
            asked.append((mode, dynamic, tuple(input_ids.shape), model.dtype, bool(attention_mask.all())))
            if len(input_ids) == 3:
                raise RuntimeError("out of\n memory")

        return forward

    monkeypatch.setattr(gpu.peers, "compiled_forward", compiled)
    main(["compile", str(run), "default", json.dumps([[2, 8], [2, 16]])])
    main(["compile", str(run), "default", json.dumps([[3, 8]])])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [{"error": ""}, {"error": "out of memory"}]
    assert [shape for _, _, shape, _, _ in asked] == [(2, 8), (2, 16), (3, 8)]
    assert {row[:2] + row[3:] for row in asked} == {("default", False, torch.float16, True)}
    assert marker(run / "bench", "default", (2, 16)).is_file()
    assert not marker(run / "bench", "default", (3, 8)).is_file()


def test_a_child_exports_what_the_bench_takes_up(tiny_bert, tmp_path, capsys):
    folder = tmp_path / "work"
    main(["export", str(folder), str(tiny_bert), "bert-fp16", "0", "16"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"error": ""}
    made = (folder / "model.fp16.onnx").stat().st_mtime_ns
    target = model_target(str(tiny_bert), recipe_for(str(tiny_bert), "bert-fp16"), folder, 0, 16)
    assert target.graphs["fp16"].stat().st_mtime_ns == made


def test_graphs_that_no_system_reads_are_not_written(tiny_bert, tmp_path):
    given = str(tiny_bert), recipe_for(str(tiny_bert), "bert-int8-linears"), tmp_path / "work", 0, 16
    assert [*model_target(*given, twins=False).graphs] == ["int8"]
    assert not (tmp_path / "work" / "model.fp32.onnx").exists()
    assert [*model_target(*given).graphs] == ["int8", "fp16", "fp32"]


def engine_spec(folder):
    return EngineSpec(
        onnx=folder / "model.onnx", engine=folder / "a.engine", backend="tensorrt_rtx",
        profile=Profile((1, 8), (2, 8), (4, 8)), gemms=["/a/MatMul"], attention=1, compute="fp32",
        shapes=[(2, 8), (4, 8)],
    )  # fmt: skip


def test_a_child_builds_an_engine_and_runs_its_shapes(tmp_path, monkeypatch, capsys):
    happened = []

    class Loaded:
        def __init__(self, path, onnx, *, runtime_cache):
            happened.append((path.name, runtime_cache.name))

        def __enter__(self):
            return self

        def __exit__(self, *_):
            happened.append("closed")

        def bind(self, batch, length, *, graph):
            happened.append((batch, length, graph))
            return self

        def close(self):
            happened.append("freed")

    spec = engine_spec(tmp_path)
    assert EngineSpec.model_validate_json(spec.model_dump_json()) == spec
    monkeypatch.setattr(gpu, "build_engine", lambda given: happened.append(given == spec))
    monkeypatch.setattr(gpu, "Engine", Loaded)
    main(["engine", spec.model_dump_json()])
    assert json.loads(capsys.readouterr().out) == {"error": ""}
    runs = [(2, 8, False), "freed", (4, 8, False), "freed"]
    assert happened == [True, ("a.engine", "a.cache"), *runs, "closed"]


@pytest.fixture
def machine(monkeypatch):
    """Builds, and whether an engine fits this machine."""
    given = SimpleNamespace(builds=[], fits=False)

    def build(onnx, engine, **options):
        given.builds.append(options)
        engine.write_bytes(b"engine")
        return engine_result(1, file=engine.name)

    def check(engine, onnx):
        if not given.fits:
            raise UserError("it was built from another model.onnx")

    monkeypatch.setattr(gpu, "build", build)
    monkeypatch.setattr(gpu, "check_sidecar", check)
    return given


def test_an_engine_is_reused_only_where_it_fits(machine, tmp_path):
    spec = engine_spec(tmp_path)
    first = build_engine(spec)
    assert machine.builds[0]["profiles"] == [spec.profile]
    assert build_engine(spec) == first
    assert len(machine.builds) == 2  # it did not fit
    machine.fits = True
    assert build_engine(spec) == first
    assert len(machine.builds) == 2
    spec.proof.unlink()
    build_engine(spec)
    assert len(machine.builds) == 3
