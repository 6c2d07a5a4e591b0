"""Engines and peers of a cell on a GPU that is not there: what is built, loaded, kept and freed."""

import json
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest

from qdqbench.eval.bench.cell import CellShape
from qdqbench.eval.gpubench import cell as gpu_cell
from qdqbench.eval.gpubench.cell import gpu_makers
from qdqbench.eval.gpubench.engines import EngineSpec, marker
from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.engine import backend
from qdqbench.quantize.engine.profiles import Profile
from qdqbench.quantize.recipe.schema import load_recipe

from ...support.tiny_bert import LINEARS
from ..bench.test_run import OPTIONS
from ..cli.test_bench import some_target, split_of

BACKEND = ("tensorrt_rtx", "1.4")


class FakeBound:
    captured = True

    def __init__(self, batch, length, stream):
        self.shape, self.stream = (batch, length), stream or object()


class FakeEngine:
    """Stands in for runtime.engine.Engine."""

    opened: ClassVar[list["FakeEngine"]] = []

    def __init__(self, path, onnx_path, *, runtime_cache):
        assert path.is_file()
        self.path, self.bounds, self.closed = path, [], False
        self.memory = SimpleNamespace(engine_bytes=11, activation_bytes=22)
        FakeEngine.opened.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        assert self.path.is_file()  # closed before its file goes
        self.closed = True

    def bind(self, batch, length, *, stream, graph):
        assert graph
        self.bounds.append(FakeBound(batch, length, stream))
        return self.bounds[-1]


class Peer:
    """Stands in for peers.TorchRun."""

    def __init__(self, forward, batch, length, *, inputs, how, graph, stream):
        self.forward, self.stream = forward, stream or object()
        self.detail = f"{how}, {'CUDA graph' if graph else 'no CUDA graph'}"


class FakeBackground:
    """Does nothing of what it is given."""

    def __init__(self):
        self.tasks, self.failed, self.left, self.ended = {}, {}, 0, False

    def add(self, task, arguments, seconds):
        self.tasks.setdefault(task, (arguments, seconds))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.ended = True


@pytest.fixture
def device(monkeypatch):
    """Everything of a GPU that a cell asks for; what was built, loaded and compiled."""
    from qdqbench.quantize.rundir import artifacts

    asked = SimpleNamespace(specs=[], models=[], compiled=[], background=FakeBackground())

    def make(spec):
        asked.specs.append(spec)
        if spec.onnx.name == "model.fp32.onnx":
            raise UserError("tensorrt_rtx refuses model.fp32.onnx")
        spec.engine.parent.mkdir(exist_ok=True)
        for path in (spec.engine, spec.proof, spec.cache):
            path.write_bytes(b"engine")
        return SimpleNamespace(int8_gemms=11, expected_int8_gemms=12, not_int8=[LINEARS[0]], layers=[])

    def compiled(model, mode, *, dynamic):
        asked.compiled.append((model, mode, dynamic))
        return mode

    FakeEngine.opened = []
    monkeypatch.setattr(backend, "WITHOUT_GPU", ("tensorrt_rtx",))
    monkeypatch.setattr(gpu_cell, "make", make)
    monkeypatch.setattr(gpu_cell, "Engine", FakeEngine)
    monkeypatch.setattr(artifacts, "expected_gemms", lambda session: ["/a/MatMul"])
    monkeypatch.setattr(gpu_cell, "CudaTimer", lambda: "timer")
    monkeypatch.setattr(gpu_cell, "to_device", dict)
    monkeypatch.setattr(gpu_cell, "DeviceLane", lambda bound, sets: SimpleNamespace(bound=bound, sets=sets))
    monkeypatch.setattr(
        gpu_cell, "SplitLane", lambda bounds, batches: SimpleNamespace(bounds=bounds, batches=batches)
    )
    monkeypatch.setattr(gpu_cell, "background", lambda workers: asked.background)
    monkeypatch.setattr(
        gpu_cell.peers, "sdpa_model", lambda model, precision, _: asked.models.append(precision) or precision
    )
    monkeypatch.setattr(gpu_cell.peers, "eager_forward", lambda model: f"eager {model}")
    monkeypatch.setattr(gpu_cell.peers, "compiled_forward", compiled)
    monkeypatch.setattr(gpu_cell.peers, "TorchRun", Peer)
    return asked


@pytest.fixture
def stack():
    with ExitStack() as made:
        yield made


def a_target(tmp_path, recipe="bert-int8-linears"):
    target = some_target(tmp_path, recipe)
    target.session.new_model = object
    return target


def test_who_takes_part(tmp_path, stack):
    target, makers = a_target(tmp_path), gpu_makers(BACKEND, stack)

    def names(target, **changes):
        return [about.name for about in makers.contestants(target, replace(OPTIONS, **changes))]

    engines = ["int8", "int8-exact", "fp16", "fp16-exact", "fp32"]
    torch = ["torch-fp32", "torch-fp16-eager", "torch-fp16"]
    torch += ["compile-fp16-eager", "compile-fp16", "autotune-fp16"]
    assert names(target, profile="both") == engines + torch
    assert names(target, profile="both", peers=False, fp32=False) == engines[:4]
    assert names(target, profile="recipe", peers=False) == ["int8", "fp16", "fp32"]
    assert names(a_target(tmp_path, "bert-fp16"), profile="both")[:3] == ["fp16", "fp16-exact", "fp32"]
    listed = makers.contestants(target, replace(OPTIONS, profile="static"))
    assert {about.name: about.label for about in listed}["int8"] == "INT8 engine, exact shape"
    assert len({about.label for about in listed}) == len(listed)
    assert {about.backend for about in listed if about.name.startswith("int8")} == {"tensorrt_rtx 1.4"}
    target.also["mine"] = target  # another recipe's engine takes the same shapes as the others'
    for profile, label in {"static": "INT8 engine, mine, exact shape", "both": "INT8 engine, mine"}.items():
        listed = makers.contestants(target, replace(OPTIONS, profile=profile))
        assert {about.name: about.label for about in listed}["int8-mine"] == label


def test_engines_of_a_cell(device, tmp_path, stack):
    target, shape, makers = a_target(tmp_path), CellShape(8, 128, None), gpu_makers(BACKEND, stack)
    options = replace(OPTIONS, profile="both", batches=(8,))
    makers.ahead(target, options, lambda text: None)
    with ExitStack() as cell:
        listed = makers.contestants(target, options)
        entries = {e.row.contestant: e for e in makers.prepare(target, options, shape, listed, cell)}
        int8 = entries["int8"]
        assert int8.contestant is not None
        assert len(int8.contestant.lanes) == 2  # one per stream
        streams = [lane.bound.stream for lane in int8.contestant.lanes]
        assert streams[0] is not streams[1]
        assert all(lane.bound.shape == (8, 128) for lane in int8.contestant.lanes)
        assert int8.contestant.timer == "timer"
        row = int8.row
        assert (row.int8_gemms, row.expected_int8_gemms, row.not_int8) == (11, 12, [LINEARS[0]])
        assert (row.engine_bytes, row.activation_bytes) == (11, 22)
        assert row.detail == "CUDA graph, recipe profile"
        assert entries["int8-exact"].row.detail == "CUDA graph, static profile"
        assert entries["fp16"].row.expected_int8_gemms is None
        assert entries["fp32"].row.reason == "tensorrt_rtx refuses model.fp32.onnx"
        assert int8.kernels is None  # engines have layer tables
    assert all(engine.closed for engine in FakeEngine.opened)
    by_kind = {(spec.onnx.name, spec.profile.min == spec.profile.max): spec for spec in device.specs}
    assert len(by_kind) == len(device.specs) == 5
    shipped, exact = by_kind["model.int8.onnx", False], by_kind["model.int8.onnx", True]
    assert exact.profile == Profile(min=(8, 128), opt=(8, 128), max=(8, 128))
    assert shipped.profile == Profile(min=(5, 128), opt=(32, 128), max=(64, 128))  # the recipe's for batch 8
    assert (shipped.gemms, by_kind["model.fp16.onnx", False].gemms) == (["/a/MatMul"], [])
    target.stack.close()
    assert list((tmp_path / "bench").iterdir()) == []  # engines are gone after the bench


def test_what_can_be_done_before_is_done_side_by_side_and_once(device, tmp_path, stack):
    target, makers = a_target(tmp_path), gpu_makers(BACKEND, stack)
    options = replace(OPTIONS, profile="both", fp32=False, batches=(1, 8, 32), keep_engines=True)
    makers.start(tmp_path, options)
    tasks = device.background.tasks
    assert [arguments[2] for arguments, _ in tasks.values()] == ["max-autotune-no-cudagraphs"] * 3 + [
        "default"
    ] * 3
    assert {arguments[3] for arguments, _ in tasks.values()} == {"[[1, 128]]", "[[8, 128]]", "[[32, 128]]"}
    assert {seconds for _, seconds in tasks.values()} == {options.compile_seconds}
    makers.ahead(target, options, lambda text: None)
    specs = [EngineSpec.model_validate_json(args[1]) for args, _ in tasks.values() if args[0] == "engine"]
    assert len(specs) == 2 * (2 + 3)  # batches 8 and 32 take the same profile of the recipe
    assert sorted(len(spec.shapes) for spec in specs) == [1] * 8 + [2] * 2
    for batch in options.batches:
        with ExitStack() as cell:
            listed = makers.contestants(target, options)
            entries = makers.prepare(target, options, CellShape(batch, 128, None), listed, cell)
            assert all(entry.row.status == "done" for entry in entries)
    assert sorted(device.models) == ["fp16", "fp32"]
    modes = ["default", "max-autotune-no-cudagraphs"]
    assert device.compiled == [("fp16", mode, False) for mode in modes] * 3
    target.stack.close()
    assert len(list((tmp_path / "bench").glob("*.engine"))) == 10  # kept
    marker(tmp_path / "bench", "default", (1, 128)).touch()
    tasks.clear()
    makers.start(tmp_path, options)
    makers.ahead(target, options, lambda text: None)
    assert len(tasks) == 5  # nothing that is there
    stack.close()
    assert device.background.ended


def test_another_recipe_of_the_model_is_an_engine_more(device, tmp_path, stack):
    target, makers = a_target(tmp_path), gpu_makers(BACKEND, stack)
    target.also["mine"] = a_target(tmp_path / "mine", "bert-int8-attention")
    (tmp_path / "mine").mkdir()
    options = replace(OPTIONS, profile="both", peers=False)
    listed = makers.contestants(target, options)
    assert (listed[-1].name, listed[-1].label) == ("int8-mine", "INT8 engine, mine")
    assert listed[-1].recipe == load_recipe("bert-int8-attention").model_dump(mode="json")
    assert {about.recipe is None for about in listed[:-1]} == {True}
    makers.ahead(target, options, lambda text: None)
    with ExitStack() as cell:
        entries = makers.prepare(target, options, CellShape(8, 128, None), listed, cell)
    assert entries[-1].row.status == "done"
    assert [spec.onnx.parent for spec in device.specs if "int8" in spec.onnx.name] == [
        tmp_path,
        tmp_path,
        tmp_path / "mine",
    ]
    target.stack.close()
    assert list((tmp_path / "mine" / "bench").iterdir()) == []


def test_peers_run_as_their_names_say(device, tmp_path, stack):
    target, makers = a_target(tmp_path), gpu_makers(BACKEND, stack)
    with ExitStack() as cell:
        listed = makers.contestants(target, OPTIONS)
        entries = makers.prepare(target, OPTIONS, CellShape(1, 16, None), listed, cell)
    found = {e.row.contestant: e for e in entries if e.kernels}
    assert {name: entry.row.detail for name, entry in found.items()} == {
        "torch-fp32": "eager, SDPA, TF32 allowed, CUDA graph",
        "torch-fp16-eager": "eager, SDPA, no CUDA graph",
        "torch-fp16": "eager, SDPA, CUDA graph",
        "compile-fp16-eager": "torch.compile mode default, no CUDA graph",
        "compile-fp16": "torch.compile mode default, CUDA graph",
        "autotune-fp16": "torch.compile mode max-autotune-no-cudagraphs, CUDA graph",
    }
    lanes = {name: entry.contestant.lanes[0] for name, entry in found.items()}
    assert lanes["compile-fp16-eager"].bound.forward is lanes["compile-fp16"].bound.forward  # compiled once


def test_an_engine_that_is_not_built_is_an_error_and_a_peer_that_does_not_run_is_skipped(
    device, tmp_path, stack, monkeypatch
):
    def no_compiler(*_, **__):
        raise AttributeError("no C compiler")

    monkeypatch.setattr(gpu_cell.peers, "compiled_forward", no_compiler)
    target, makers = a_target(tmp_path), gpu_makers(BACKEND, stack)
    options = replace(OPTIONS, batches=(1,), lengths=(16,))
    makers.start(tmp_path, options)
    makers.ahead(target, options, lambda text: None)
    device.background.failed["max-autotune-no-cudagraphs [(1, 16)]"] = "it took over 90 s"
    with ExitStack() as cell:
        listed = makers.contestants(target, options)
        rows = [e.row for e in makers.prepare(target, options, CellShape(1, 16, None), listed, cell)]
    found = {row.contestant: (row.status, row.reason) for row in rows}
    assert found["fp32"] == ("error", "tensorrt_rtx refuses model.fp32.onnx")
    assert found["compile-fp16"] == ("skipped", "no C compiler")
    assert found["autotune-fp16"] == ("skipped", "torch.compile: it took over 90 s")
    assert found["int8"][0] == found["torch-fp16"][0] == "done"


def test_all_shapes_of_a_split_share_a_stream_and_each_is_compiled(device, tmp_path, stack):
    target, makers = a_target(tmp_path), gpu_makers(BACKEND, stack)
    split = split_of((32, 64), (32, 40), (8, 40))
    options = replace(OPTIONS, real=(split,))
    makers.ahead(target, options, lambda text: None)
    compiled = [args for args, _ in device.background.tasks.values() if args[0] == "compile"]
    assert [json.loads(args[3]) for args in compiled] == [[[32, 64], [32, 40], [8, 40]]] * 2
    with ExitStack() as cell:
        listed = makers.contestants(target, options)
        entries = makers.prepare(target, options, CellShape(32, None, split), listed, cell)
        (lane,) = entries[0].contestant.lanes
        assert list(lane.bounds) == [(32, 64), (32, 40), (8, 40)]
        assert len({id(bound.stream) for bound in lane.bounds.values()}) == 1
    assert {dynamic for _, _, dynamic in device.compiled} == {False}
