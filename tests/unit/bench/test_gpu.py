"""Engines and peers of a cell on a GPU that is not there: what is built, loaded, kept and freed."""

import json
import os
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest
from torch import nn

from qdqbench.eval.bench import gpu, peers
from qdqbench.eval.bench import target as bench_target
from qdqbench.eval.bench.gpu import EngineSpec, marker, prebuild, prepare_on_gpu, start_compiles
from qdqbench.eval.bench.results import TENSORRT_SYSTEMS
from qdqbench.eval.bench.systems import Config, Preparation, describe_systems
from qdqbench.quantize.engine import backend
from qdqbench.quantize.engine.profiles import Profile
from qdqbench.quantize.pipeline import graphs
from qdqbench.quantize.recipe.schema import load_recipe
from qdqbench.quantize.utils.errors import MissingDevice, UserError
from qdqbench.quantize.utils.system.gpu import Gpu

from ...support import fake_cuda
from ...support.fake_bench import PLAN, fake_device, fake_target, split_of
from ...support.interpreted import H200
from ...support.tiny_bert import LINEARS

CONFIG = Config(8, 128, None)


class FakeBound:
    captured, outputs = True, {}

    def __init__(self, batch, length, stream):
        self.shape, self.stream = (batch, length), stream or object()
        self.inputs = peers.example(["input_ids", "attention_mask"], batch, length, "cuda")


class FakeEngine:
    """Stands in for runtime.engine.Engine."""

    memory = SimpleNamespace(engine_bytes=11, activation_bytes=22)

    def __init__(self, path, onnx_path, *, runtime_cache):
        assert path.is_file()
        self.path = path

    def __enter__(self):
        return self

    def __exit__(self, *_):
        assert self.path.is_file()  # closed before its file goes
        Device.closed.append(self.path)

    def bind(self, batch, length, *, stream, graph):
        assert graph
        return FakeBound(batch, length, stream)


class FakeEncoder(peers.UnpaddedEncoder):
    """Computes nothing: a launch of many tokens takes longer than its share."""

    of_tokens = False

    def __init__(self, model):
        self.model = model

    @staticmethod
    def positions_of(ids):
        return np.arange(len(ids))

    def use_fp8(self, packing):
        Device.rounded.append(packing.tokens)

    def forward(self, packed, *, tokens, longest):
        return packed


class Timer:
    @staticmethod
    def latencies(lane, count):
        return [sum(1 + (len(step.inputs["packed"]) // 2000) ** 2 for step in lane.steps)] * count


class Device:
    """Everything of a GPU that a cell asks for; what was built, loaded and compiled. Runs no task."""

    closed, rounded = [], []

    def __init__(self):
        self.specs, self.models, self.compiled, self.forwards = [], [], [], {}
        self.tasks, self.failed, self.left = {}, {}, 0
        self.work = fake_device(prepare_on_gpu, background=self)
        Device.closed, Device.rounded = [], []

    def add(self, task, arguments, seconds):
        self.tasks.setdefault(task, (arguments, seconds))

    def build(self, spec):
        self.specs.append(spec)
        if spec.onnx.name == "model.fp32.onnx":
            raise UserError("tensorrt_rtx refuses model.fp32.onnx")
        spec.engine.parent.mkdir(exist_ok=True)
        for path in (spec.engine, spec.proof, spec.cache):
            path.write_bytes(b"engine")
        return SimpleNamespace(int8_gemms=11, expected_int8_gemms=12, not_int8=[LINEARS[0]], layers=[])

    def load(self, model, precision, _):
        self.models.append(precision)
        return precision

    def compile(self, model, mode, *, dynamic):
        self.compiled.append((model, mode, dynamic))
        return self.forwards.setdefault(mode, lambda **inputs: inputs["input_ids"])

    def prebuild(self, target, **changes):
        prebuild(self.work, target, options(**changes))

    def start(self, target, **changes):
        start_compiles(self.work, target.session.folder, options(**changes))

    def prepare(self, target, config=CONFIG, **changes):
        """Runs by the name of their system."""
        with ExitStack() as stack:
            runs = prepare_on_gpu(Preparation(target, options(**changes), config, self.work, stack))
        return {run.name: run for run in runs}


def options(**changes):
    return PLAN.model_copy(update={"engine_shapes": "both", "batches": [8]} | changes)


@pytest.fixture
def device(monkeypatch):
    made = Device()
    fake_cuda.install(monkeypatch)
    eager = lambda model: lambda **inputs: inputs["input_ids"]  # noqa: E731
    for module, fakes in (
        (backend, {"WITHOUT_GPU": ("tensorrt_rtx",)}),
        (graphs, {"list_expected_gemms": lambda graph, plan: ["/a/MatMul"]}),
        (gpu.measure, {"CudaTimer": lambda: Timer}),
        (gpu, {"build_engine": made.build, "Engine": FakeEngine, "find_gpu": lambda: None}),
        (peers, {"sdpa_model": made.load, "compiled_forward": made.compile, "eager_forward": eager}),
        (peers, {"UnpaddedEncoder": FakeEncoder}),
    ):
        for name, fake in fakes.items():
            monkeypatch.setattr(module, name, fake)
    return made


def a_target(tmp_path, recipe="bert-int8-linears", model_type="bert"):
    """Return a target whose graph can be written in other forms."""
    config, kind = SimpleNamespace(model_type=model_type), SimpleNamespace(outputs=())
    model = {
        "new_model": object,
        "fp32_model": SimpleNamespace(config=config),
        "fake_quant_model": nn.Identity(),
    }
    return fake_target(recipe, tmp_path, config=SimpleNamespace(task=SimpleNamespace(kind=kind)), **model)


def test_engines_of_a_config(device, tmp_path):
    target = a_target(tmp_path)
    device.prebuild(target)
    runs = device.prepare(target)
    int8, row = runs["int8"], runs["int8"].row
    assert len({id(lane.bound.stream) for lane in int8.lanes}) == 2  # one per stream
    assert all(lane.bound.shape == (8, 128) for lane in int8.lanes)
    assert (row.int8_gemms, row.expected_int8_gemms, row.not_int8) == (11, 12, [LINEARS[0]])
    assert (row.engine_bytes, row.activation_bytes) == (11, 22)
    assert row.detail == "CUDA graph, recipe profile"
    assert runs["int8-exact"].row.detail == "CUDA graph, exact profile"
    assert runs["fp16"].row.expected_int8_gemms is None
    assert runs["fp32"].row.reason == "tensorrt_rtx refuses model.fp32.onnx"
    assert int8.kernels is None  # engines have layer tables
    assert len(device.closed) == 4
    by_kind = {(spec.onnx.name, spec.profile.min == spec.profile.max): spec for spec in device.specs}
    assert len(by_kind) == len(device.specs) == 5
    shipped, exact = by_kind["model.int8.onnx", False], by_kind["model.int8.onnx", True]
    assert exact.profile == Profile(min=(8, 128), opt=(8, 128), max=(8, 128))
    assert shipped.profile == Profile(min=(5, 128), opt=(32, 128), max=(64, 128))  # the recipe's for batch 8
    assert (shipped.gemms, by_kind["model.fp16.onnx", False].gemms) == (["/a/MatMul"], [])
    target.stack.close()
    assert list((tmp_path / "bench").iterdir()) == []  # engines are gone after the bench


def test_what_can_be_done_before_is_done_in_processes_and_once(device, tmp_path):
    target, tasks, batches = a_target(tmp_path), device.tasks, [1, 8, 32]
    changes = {"fp32": False, "batches": batches, "keep_engines": True, "exclude": ("int8-cuda",)}
    device.start(target, **changes)
    modes = ["max-autotune-no-cudagraphs"] * 3 + ["default"] * 3
    assert [arguments[2] for arguments, _ in tasks.values()] == modes
    assert {arguments[3] for arguments, _ in tasks.values()} == {"[[1, 128]]", "[[8, 128]]", "[[32, 128]]"}
    assert {seconds for _, seconds in tasks.values()} == {PLAN.compile_seconds}
    device.prebuild(target, **changes)
    specs = [EngineSpec.model_validate_json(args[1]) for args, _ in tasks.values() if args[0] == "engine"]
    assert len(specs) == 2 * (2 + 3)  # batches 8 and 32 take the same profile of the recipe
    assert sorted(len(spec.shapes) for spec in specs) == [1] * 8 + [2] * 2
    for batch in batches:
        runs = device.prepare(target, Config(batch, 128, None), **changes)
        skipped = [name for name, run in runs.items() if run.row.status != "done"]
        assert skipped == ["unpadded-fp8"]  # no GPU here has it
    assert sorted(device.models) == ["fp16", "fp16", "fp32"]  # the unpadded one has a model of its own
    modes = ["default", "max-autotune-no-cudagraphs"]
    assert device.compiled == [("fp16", mode, False) for mode in modes] * 3
    target.stack.close()
    assert len(list((tmp_path / "bench").glob("*.engine"))) == 10  # kept
    marker(tmp_path / "bench", "default", (1, 128)).touch()
    tasks.clear()
    device.start(target, **changes)
    device.prebuild(target, **changes)
    assert len(tasks) == 5  # nothing that is there


def test_another_recipe_of_the_model_is_an_engine_more(device, tmp_path):
    target, changes = a_target(tmp_path), {"baselines": False}
    target.extra["mine"] = a_target(tmp_path / "mine", "bert-int8-attention")
    *others, last = describe_systems(target, options(**changes), "")
    assert (last.name, last.label) == ("int8-mine", "INT8 engine, mine")
    assert last.recipe == load_recipe("bert-int8-attention").model_dump(mode="json")
    assert {about.recipe for about in others} == {None}
    device.prebuild(target, **changes)
    assert device.prepare(target, **changes)["int8-mine"].row.status == "done"
    folders = [spec.onnx.parent for spec in device.specs if "int8" in spec.onnx.name]
    assert folders == [tmp_path, tmp_path, tmp_path / "mine"]
    target.stack.close()
    assert list((tmp_path / "mine" / "bench").iterdir()) == []


@pytest.fixture
def hopper(device, monkeypatch):
    """A GPU that our kernels run on; the graphs that are written for them."""
    written = []

    def write(traced, plan, settings, path):
        written.append((settings.weights, settings.for_gpu, path.name))
        path.write_bytes(b"graph")

    fakes = {"find_gpu": lambda: H200, "load_nvrtc": lambda: None, "load_kernels": lambda path: (path, 1)}
    for name, fake in (fakes | {"PackedKernels": FakeEncoder}).items():
        monkeypatch.setattr(gpu, name, fake)
    monkeypatch.setattr(bench_target, "trace", lambda *_: "traced")
    monkeypatch.setattr(bench_target, "write_graph", write)
    return written


def test_a_form_that_a_bench_left_is_written_again_only_after_its_graph(hopper, tmp_path):
    own, form = tmp_path / "model.int8.onnx", a_target(tmp_path).int8_graph("cuda")
    own.touch()
    for age, count in ((-1, 1), (1, 2)):
        os.utime(own, (at := form.stat().st_mtime + age, at))
        assert a_target(tmp_path).int8_graph("cuda") == form
        assert len(hopper) == count


def test_our_kernels_run_beside_an_engine_of_tensorrt(device, hopper, tmp_path):
    target, changes = a_target(tmp_path), {"baselines": False, "engine_shapes": "exact"}
    device.work.backend = ("tensorrt", "10.9")
    device.prebuild(target, **changes)
    assert [args[0] for args, _ in device.tasks.values()] == ["engine"]  # TensorRT builds alone
    run = device.prepare(target, **changes)["int8-cuda"]
    row = run.row
    assert (row.status, row.int8_gemms, row.expected_int8_gemms, row.engine_bytes) == ("done", 11, 12, 6)
    assert row.detail == "packed tokens, varlen attention, torch.compile, 1024 tokens a launch, CUDA graph"
    assert (len(run.lanes), run.kernels is None) == (2, False)
    assert hopper == [("channel", False, "model.int8.cuda.onnx")]
    (spec,) = (spec for spec in device.specs if spec.backend == "cuda")
    assert (spec.onnx.name, spec.engine.name, spec.gemms) == (
        "model.int8.cuda.onnx", "int8.cuda.engine", ["/a/MatMul"],
    )  # fmt: skip
    target.stack.close()
    assert not spec.engine.is_file()
    assert not device.work.models  # nor is it on the GPU


def test_engines_of_tensorrt_run_beside_our_kernels(device, hopper, tmp_path, monkeypatch):
    recipe = load_recipe("bert-int8-linears")
    engine = recipe.engine.model_copy(update={"backend": "cuda"})
    target = a_target(tmp_path, recipe.model_copy(update={"engine": engine}))
    listed = {about.name: about for about in describe_systems(target, options(baselines=False), "")}
    names = ["int8", "int8-tensorrt_rtx", "int8-tensorrt_rtx-exact", "fp16", "fp16-exact", "fp32"]
    assert [*listed] == names
    labels = [listed[name].label for name in names[:3]]
    assert labels == ["INT8 CUDA kernels", "INT8 TensorRT-RTX", "INT8 TensorRT-RTX, exact shape"]
    assert {*names[1:3]} <= {*TENSORRT_SYSTEMS}
    device.prebuild(target, baselines=False)
    runs = device.prepare(target, baselines=False)
    assert [runs[name].row.status for name in names] == ["done"] * 5 + ["skipped"]
    assert hopper == [("factored", True, "model.int8.tensorrt_rtx.onnx")]
    assert {(spec.backend, spec.onnx.name) for spec in device.specs} == {
        ("cuda", "model.int8.onnx"),
        *(("tensorrt_rtx", f"model.{name}.onnx") for name in ("int8.tensorrt_rtx", "fp16", "fp32")),
    }
    assert {spec.profile.max[0] for spec in device.specs if spec.onnx.name == "model.fp16.onnx"} == {8, 64}

    def missing():
        raise MissingDevice("NVRTC is not here")

    monkeypatch.setattr(gpu, "load_nvrtc", missing)
    with pytest.raises(MissingDevice, match="NVRTC is not here"):
        device.prepare(target, baselines=False)


def test_kernels_that_cannot_run_here_are_skipped_by_reason(device, hopper, tmp_path, monkeypatch):
    def refuse(*_):
        raise UserError("backend cuda has no kernel for /a (Sin)")

    def row():
        found = device.prepare(a_target(tmp_path), baselines=False)["int8-cuda"].row
        return found.status, found.reason

    monkeypatch.setattr(bench_target, "write_graph", refuse)
    assert row() == ("skipped", "backend cuda has no kernel for /a (Sin)")
    monkeypatch.setattr(gpu, "find_gpu", lambda: Gpu("NVIDIA V100", "7.0", None))
    assert row() == ("skipped", "backend cuda runs on compute capability 7.5 and newer, not on 7.0")


def test_baselines_run_as_their_names_say(device, tmp_path):
    runs = device.prepare(a_target(tmp_path), Config(1, 16, None))
    found = {name: run for name, run in runs.items() if run.kernels}
    single = "no CUDA graph (launched one by one)"
    assert {name: run.row.detail for name, run in found.items()} == {
        "torch-fp32": "eager, SDPA, TF32 allowed, with the mask, CUDA graph",
        "torch-fp16-eager": f"eager, SDPA, with the mask, {single}",
        "torch-fp16": "eager, SDPA, with the mask, CUDA graph",
        "compile-fp16-eager": f"torch.compile mode default, with the mask, {single}",
        "compile-fp16": "torch.compile mode default, with the mask, CUDA graph",
        "autotune-fp16": "torch.compile mode max-autotune-no-cudagraphs, with the mask, CUDA graph",
        "unpadded-fp16": "packed tokens, varlen attention, torch.compile, 64 tokens a launch, CUDA graph",
    }
    lanes = {name: run.lanes[0] for name, run in found.items()}
    assert lanes["compile-fp16-eager"].bound.forward is lanes["compile-fp16"].bound.forward  # compiled once
    assert [len(each["packed"]) for each in lanes["unpadded-fp16"].sets] == [3 * 64 + 2] * 8


def test_a_split_is_packed_across_batches_into_launches_of_the_fastest_size(device, tmp_path):
    split = split_of((32, 64), (32, 40), (9, 40), rows=(32, 32, 8))
    for batch in split.batches:
        batch["attention_mask"][:, 32:] = 0  # 32 tokens a row
    run = device.prepare(a_target(tmp_path), Config(32, None, split), splits=(split,))["unpadded-fp16"]
    (lane,) = run.lanes
    assert [len(step.rows) for step in lane.steps] == [36, 36]  # 72 rows, without the copy
    assert {int(step.inputs["packed"][-1]) for step in lane.steps} == {36 * 32}
    assert "2 launches of 1152 tokens" in run.row.detail
    assert run.row.detail.endswith("the fastest size")


def test_a_family_without_an_unpadded_form_is_skipped_by_name(device, tmp_path):
    target = a_target(tmp_path, "deberta-v2-int8-linears", "deberta-v2")
    row = device.prepare(target, Config(1, 16, None))["unpadded-fp16"].row
    assert row.status == "skipped"
    assert row.reason.startswith("no unpadded form for deberta-v2: its ")


def test_fp8_takes_part_where_a_gpu_has_it(device, tmp_path, monkeypatch):
    target = a_target(tmp_path)
    for capability, status in (("8.6", "skipped"), ("8.9", "done"), ("12.0", "done")):
        monkeypatch.setattr(gpu, "find_gpu", lambda has=capability: Gpu("any", has, None))
        row = device.prepare(target, Config(1, 16, None))["unpadded-fp8"].row
        assert row.status == status
        assert status == "done" or row.reason.endswith("multiply FP8, and this one has 8.6")
    assert device.rounded == [8 * 16]  # once, with rows of all inputs


def test_an_engine_that_is_not_built_is_an_error_and_a_baseline_that_does_not_run_is_skipped(
    device, tmp_path, monkeypatch
):
    def no_compiler(*_, **__):
        raise AttributeError("no C compiler")

    monkeypatch.setattr(peers, "compiled_forward", no_compiler)
    target, changes = a_target(tmp_path), {"batches": [1], "lengths": [16]}
    device.start(target, **changes)
    device.prebuild(target, **changes)
    device.failed["max-autotune-no-cudagraphs [(1, 16)]"] = "it took over 90 s"
    runs = device.prepare(target, Config(1, 16, None), **changes)
    found = {name: (run.row.status, run.row.reason) for name, run in runs.items()}
    assert found["fp32"] == ("error", "tensorrt_rtx refuses model.fp32.onnx")
    assert found["compile-fp16"] == ("skipped", "no C compiler")
    assert found["autotune-fp16"] == ("skipped", "torch.compile: it took over 90 s")
    assert found["int8"][0] == found["torch-fp16"][0] == "done"


def test_all_shapes_of_a_split_share_a_stream_and_each_is_compiled(device, tmp_path):
    target, split = a_target(tmp_path), split_of((32, 64), (32, 40), (8, 40))
    device.prebuild(target, splits=(split,))
    compiled = [args for args, _ in device.tasks.values() if args[0] == "compile"]
    assert [json.loads(args[3]) for args in compiled] == [[[32, 64], [32, 40], [8, 40]]] * 2
    (lane,) = device.prepare(target, Config(32, None, split), splits=(split,))["int8"].lanes
    assert [step.bound.shape for step in lane.steps] == [(32, 64), (32, 40), (8, 40)]
    assert len({id(step.bound.stream) for step in lane.steps}) == 1
    assert {dynamic for _, _, dynamic in device.compiled} == {False}
