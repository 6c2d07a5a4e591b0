"""Engines and peers of a cell on a GPU that is not there: what is built, loaded, kept and freed."""

import json
import os
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
from torch import nn

from qdqbench.eval.bench import gpu, peers
from qdqbench.eval.bench import target as bench_target
from qdqbench.eval.bench.gpu import EngineSpec, marker, prebuild, prepare_on_gpu, start_compiles
from qdqbench.eval.bench.results import TENSORRT_SYSTEMS
from qdqbench.eval.bench.systems import Config, Preparation, describe_systems
from qdqbench.quantize.engine import backend
from qdqbench.quantize.engine.cuda.compile import get_version
from qdqbench.quantize.engine.profiles import Profile
from qdqbench.quantize.pipeline import graphs
from qdqbench.quantize.recipe.schema import load_recipe
from qdqbench.quantize.utils.errors import MissingDevice, UserError
from qdqbench.quantize.utils.system.gpu import Gpu

from ...support import fake_cuda
from ...support.fake_bench import PLAN, fake_device, fake_target, split_of
from ...support.interpreted import H200
from ...support.tiny_bert import LINEARS

OPTIONS = PLAN.model_copy(update={"engine_shapes": "both"})


class FakeBound:
    captured, outputs = True, {}

    def __init__(self, batch, length, stream):
        self.shape, self.stream = (batch, length), stream or object()
        self.inputs = peers.example(["input_ids", "attention_mask"], batch, length, "cuda")


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


class FakeEncoder(peers.UnpaddedEncoder):
    """Computes nothing: a launch of many tokens takes longer than its share."""

    of_tokens, rounded = False, []

    def __init__(self, model):
        self.model = model

    @staticmethod
    def positions_of(ids):
        return np.arange(len(ids))

    def use_fp8(self, packing):
        self.rounded.append(packing.tokens)

    def forward(self, packed, *, tokens, longest):
        return packed


class Timer:
    @staticmethod
    def latencies(lane, count):
        return [sum(1 + (len(step.inputs["packed"]) // 2000) ** 2 for step in lane.steps)] * count


class FakeBackground:
    """Does nothing of what it is given."""

    def __init__(self):
        self.tasks, self.failed, self.left = {}, {}, 0

    def add(self, task, arguments, seconds):
        self.tasks.setdefault(task, (arguments, seconds))


@pytest.fixture
def device(monkeypatch):
    """Everything of a GPU that a cell asks for; what was built, loaded and compiled."""

    work = fake_device(prepare_on_gpu, background=FakeBackground())
    asked = SimpleNamespace(specs=[], models=[], compiled=[], work=work)

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
        return asked.forwards.setdefault(mode, lambda **inputs: inputs["input_ids"])

    def fp_model(model, precision, _):
        asked.models.append(precision)
        return precision

    FakeEngine.opened, asked.forwards = [], {}
    fake_cuda.install(monkeypatch)
    monkeypatch.setattr(backend, "WITHOUT_GPU", ("tensorrt_rtx",))
    monkeypatch.setattr(graphs, "list_expected_gemms", lambda graph, plan: ["/a/MatMul"])
    monkeypatch.setattr(gpu.measure, "CudaTimer", lambda: Timer)
    fakes = {"UnpaddedEncoder": FakeEncoder, "sdpa_model": fp_model, "compiled_forward": compiled}
    fakes["eager_forward"] = lambda model: lambda **inputs: inputs["input_ids"]
    for module, names in ((gpu, {"build_engine": make, "Engine": FakeEngine, "find_gpu": lambda: None}),
                          (gpu.peers, fakes)):  # fmt: skip
        for name, fake in names.items():
            monkeypatch.setattr(module, name, fake)
    return asked


def a_target(tmp_path, recipe="bert-int8-linears", model_type="bert"):
    config = SimpleNamespace(model_type=model_type)
    return fake_target(recipe, tmp_path, new_model=object, fp32_model=SimpleNamespace(config=config))


def systems_of(target, **changes):
    return describe_systems(target, OPTIONS.model_copy(update=changes), "tensorrt_rtx 1.4")


def prepare(device, target, options, config):
    """Entries by the name of their system."""
    with ExitStack() as stack:
        entries = prepare_on_gpu(Preparation(target, options, config, device.work, stack))
    return {entry.row.system: entry for entry in entries}


def test_who_takes_part(tmp_path):
    target = a_target(tmp_path)

    def names(target, **changes):
        return [about.name for about in systems_of(target, **changes)]

    engines = ["int8", "int8-exact", "int8-cuda", "fp16", "fp16-exact", "fp32"]
    torch = ["torch-fp32", "torch-fp16-eager", "torch-fp16"]
    torch += ["compile-fp16-eager", "compile-fp16", "autotune-fp16", "unpadded-fp16", "unpadded-fp8"]
    assert names(target) == engines + torch
    assert names(target, baselines=False, fp32=False) == engines[:5]
    assert names(target, engine_shapes="recipe", baselines=False) == ["int8", "int8-cuda", "fp16", "fp32"]
    assert names(a_target(tmp_path, "bert-fp16"))[:3] == ["fp16", "fp16-exact", "fp32"]
    assert "unpadded-fp16" not in names(target, exclude=("unpadded-fp16",))
    listed = systems_of(target, engine_shapes="exact")
    assert {about.name: about.label for about in listed}["int8"] == "INT8 engine, exact shape"
    assert len({about.label for about in listed}) == len(listed)
    backends = {about.name: about.backend for about in listed if about.name.startswith("int8")}
    assert backends == {"int8": "tensorrt_rtx 1.4", "int8-cuda": f"cuda {get_version()}"}
    target.extra["mine"] = target  # another recipe's engine takes the same shapes as the others'
    for shapes, label in {"exact": "INT8 engine, mine, exact shape", "both": "INT8 engine, mine"}.items():
        listed = systems_of(target, engine_shapes=shapes)
        assert {about.name: about.label for about in listed}["int8-mine"] == label


def test_engines_of_a_config(device, tmp_path):
    target, options = a_target(tmp_path), OPTIONS.model_copy(update={"batches": [8]})
    prebuild(device.work, target, options)
    with ExitStack() as stack:
        made = prepare_on_gpu(Preparation(target, options, Config(8, 128, None), device.work, stack))
        entries = {entry.row.system: entry for entry in made}
        int8 = entries["int8"]
        assert len({id(lane.bound.stream) for lane in int8.lanes}) == 2  # one per stream
        assert all(lane.bound.shape == (8, 128) for lane in int8.lanes)
        row = int8.row
        assert (row.int8_gemms, row.expected_int8_gemms, row.not_int8) == (11, 12, [LINEARS[0]])
        assert (row.engine_bytes, row.activation_bytes) == (11, 22)
        assert row.detail == "CUDA graph, recipe profile"
        assert entries["int8-exact"].row.detail == "CUDA graph, exact profile"
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


def test_what_can_be_done_before_is_done_in_processes_and_once(device, tmp_path):
    target = a_target(tmp_path)
    options = OPTIONS.model_copy(
        update={"fp32": False, "batches": [1, 8, 32], "keep_engines": True, "exclude": ("int8-cuda",)}
    )
    start_compiles(device.work, tmp_path, options)
    tasks = device.work.background.tasks
    modes = ["max-autotune-no-cudagraphs"] * 3 + ["default"] * 3
    assert [arguments[2] for arguments, _ in tasks.values()] == modes
    assert {arguments[3] for arguments, _ in tasks.values()} == {"[[1, 128]]", "[[8, 128]]", "[[32, 128]]"}
    assert {seconds for _, seconds in tasks.values()} == {options.compile_seconds}
    prebuild(device.work, target, options)
    specs = [EngineSpec.model_validate_json(args[1]) for args, _ in tasks.values() if args[0] == "engine"]
    assert len(specs) == 2 * (2 + 3)  # batches 8 and 32 take the same profile of the recipe
    assert sorted(len(spec.shapes) for spec in specs) == [1] * 8 + [2] * 2
    for batch in options.batches:
        entries = prepare(device, target, options, Config(batch, 128, None))
        skipped = [name for name, entry in entries.items() if entry.row.status != "done"]
        assert skipped == ["unpadded-fp8"]  # no GPU here has it
    assert sorted(device.models) == ["fp16", "fp16", "fp32"]  # the unpadded one has a model of its own
    modes = ["default", "max-autotune-no-cudagraphs"]
    assert device.compiled == [("fp16", mode, False) for mode in modes] * 3
    target.stack.close()
    assert len(list((tmp_path / "bench").glob("*.engine"))) == 10  # kept
    marker(tmp_path / "bench", "default", (1, 128)).touch()
    tasks.clear()
    start_compiles(device.work, tmp_path, options)
    prebuild(device.work, target, options)
    assert len(tasks) == 5  # nothing that is there


def test_another_recipe_of_the_model_is_an_engine_more(device, tmp_path):
    target, options = a_target(tmp_path), OPTIONS.model_copy(update={"baselines": False})
    target.extra["mine"] = a_target(tmp_path / "mine", "bert-int8-attention")
    listed = describe_systems(target, options, "")
    assert (listed[-1].name, listed[-1].label) == ("int8-mine", "INT8 engine, mine")
    assert listed[-1].recipe == load_recipe("bert-int8-attention").model_dump(mode="json")
    assert {about.recipe is None for about in listed[:-1]} == {True}
    prebuild(device.work, target, options)
    assert prepare(device, target, options, Config(8, 128, None))["int8-mine"].row.status == "done"
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

    monkeypatch.setattr(gpu, "find_gpu", lambda: H200)
    monkeypatch.setattr(gpu, "load_nvrtc", lambda: None)
    monkeypatch.setattr(gpu, "load_kernels", lambda path: (path, 1))
    monkeypatch.setattr(gpu, "PackedKernels", FakeEncoder)
    monkeypatch.setattr(bench_target, "trace", lambda *_: "traced")
    monkeypatch.setattr(bench_target, "write_graph", write)
    return written


def forms_of(target):
    """Give a session what the other form of its graph is written from."""
    target.session.fake_quant_model = nn.Identity()
    target.session.config = SimpleNamespace(task=SimpleNamespace(kind=SimpleNamespace(outputs=())))
    return target


def test_a_form_that_a_bench_left_is_written_again_only_after_its_graph(device, hopper, tmp_path):
    def write() -> Path:
        return forms_of(a_target(tmp_path)).int8_graph("cuda")

    own, form = tmp_path / "model.int8.onnx", write()
    own.touch()
    for age, count in ((-1, 1), (1, 2)):
        os.utime(own, (at := form.stat().st_mtime + age, at))
        assert write() == form
        assert len(hopper) == count


def test_our_kernels_run_beside_an_engine_of_tensorrt(device, hopper, tmp_path):
    target = forms_of(a_target(tmp_path))
    options = OPTIONS.model_copy(update={"batches": [8], "baselines": False, "engine_shapes": "exact"})
    device.work.backend = ("tensorrt", "10.9")
    prebuild(device.work, target, options)
    assert [args[0] for args, _ in device.work.background.tasks.values()] == [
        "engine"
    ]  # TensorRT builds alone
    entry = prepare(device, target, options, Config(8, 128, None))["int8-cuda"]
    row = entry.row
    assert (row.status, row.int8_gemms, row.expected_int8_gemms, row.engine_bytes) == ("done", 11, 12, 6)
    assert row.detail == "packed tokens, varlen attention, torch.compile, 1024 tokens a launch, CUDA graph"
    assert (len(entry.lanes), entry.kernels is None) == (2, False)
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
    target = forms_of(a_target(tmp_path, recipe.model_copy(update={"engine": engine})))
    listed = {about.name: about for about in systems_of(target, baselines=False)}
    names = ["int8", "int8-tensorrt_rtx", "int8-tensorrt_rtx-exact", "fp16", "fp16-exact", "fp32"]
    assert [*listed] == names
    labels = [listed[name].label for name in names[:3]]
    assert labels == ["INT8 CUDA kernels", "INT8 TensorRT-RTX", "INT8 TensorRT-RTX, exact shape"]
    assert {*names[1:3]} <= {*TENSORRT_SYSTEMS}
    options = OPTIONS.model_copy(update={"batches": [8], "baselines": False})
    prebuild(device.work, target, options)
    entries = prepare(device, target, options, Config(8, 128, None))
    assert [entries[name].row.status for name in names] == ["done"] * 5 + ["skipped"]
    assert hopper == [("factored", True, "model.int8.tensorrt_rtx.onnx")]
    specs = {(spec.backend, spec.onnx.name): spec.profile for spec in device.specs}
    assert specs.keys() == {
        ("cuda", "model.int8.onnx"),
        *(("tensorrt_rtx", f"model.{name}.onnx") for name in ("int8.tensorrt_rtx", "fp16", "fp32")),
    }
    assert {spec.profile.max[0] for spec in device.specs if spec.onnx.name == "model.fp16.onnx"} == {8, 64}

    def missing():
        raise MissingDevice("NVRTC is not here")

    monkeypatch.setattr(gpu, "load_nvrtc", missing)
    with pytest.raises(MissingDevice, match="NVRTC is not here"):
        prepare(device, target, options, Config(8, 128, None))


def test_kernels_that_cannot_run_here_are_skipped_by_reason(device, hopper, tmp_path, monkeypatch):
    target, options = forms_of(a_target(tmp_path)), OPTIONS.model_copy(update={"baselines": False})

    def refuse(*_):
        raise UserError("backend cuda has no kernel for /a (Sin)")

    monkeypatch.setattr(bench_target, "write_graph", refuse)
    row = prepare(device, target, options, Config(8, 128, None))["int8-cuda"].row
    assert (row.status, row.reason) == ("skipped", "backend cuda has no kernel for /a (Sin)")
    monkeypatch.setattr(gpu, "find_gpu", lambda: Gpu("NVIDIA V100", "7.0", None))
    row = prepare(device, target, options, Config(8, 128, None))["int8-cuda"].row
    assert row.reason == "backend cuda runs on compute capability 7.5 and newer, not on 7.0"


def test_baselines_run_as_their_names_say(device, tmp_path):
    entries = prepare(device, a_target(tmp_path), OPTIONS, Config(1, 16, None))
    found = {name: entry for name, entry in entries.items() if entry.kernels}
    single = "no CUDA graph (launched one by one)"
    assert {name: entry.row.detail for name, entry in found.items()} == {
        "torch-fp32": "eager, SDPA, TF32 allowed, with the mask, CUDA graph",
        "torch-fp16-eager": f"eager, SDPA, with the mask, {single}",
        "torch-fp16": "eager, SDPA, with the mask, CUDA graph",
        "compile-fp16-eager": f"torch.compile mode default, with the mask, {single}",
        "compile-fp16": "torch.compile mode default, with the mask, CUDA graph",
        "autotune-fp16": "torch.compile mode max-autotune-no-cudagraphs, with the mask, CUDA graph",
        "unpadded-fp16": "packed tokens, varlen attention, torch.compile, 64 tokens a launch, CUDA graph",
    }
    lanes = {name: entry.lanes[0] for name, entry in found.items()}
    assert lanes["compile-fp16-eager"].bound.forward is lanes["compile-fp16"].bound.forward  # compiled once
    assert [len(each["packed"]) for each in lanes["unpadded-fp16"].sets] == [3 * 64 + 2] * 8


def test_a_split_is_packed_across_batches_into_launches_of_the_fastest_size(device, tmp_path):
    target, split = a_target(tmp_path), split_of((32, 64), (32, 40), (9, 40), rows=(32, 32, 8))
    for batch in split.batches:
        batch["attention_mask"][:, 32:] = 0  # 32 tokens a row
    options = OPTIONS.model_copy(update={"splits": (split,)})
    entry = prepare(device, target, options, Config(32, None, split))["unpadded-fp16"]
    (lane,) = entry.lanes
    assert [len(step.rows) for step in lane.steps] == [36, 36]  # 72 rows, without the copy
    assert {int(step.inputs["packed"][-1]) for step in lane.steps} == {36 * 32}
    assert "2 launches of 1152 tokens" in entry.row.detail
    assert entry.row.detail.endswith("the fastest size")


def test_a_family_without_an_unpadded_form_is_skipped_by_name(device, tmp_path):
    target = a_target(tmp_path, "deberta-v2-int8-linears", "deberta-v2")
    row = prepare(device, target, OPTIONS, Config(1, 16, None))["unpadded-fp16"].row
    assert row.status == "skipped"
    assert row.reason.startswith("no unpadded form for deberta-v2: its ")


def test_fp8_takes_part_where_a_gpu_has_it(device, tmp_path, monkeypatch):
    target, config = a_target(tmp_path), Config(1, 16, None)
    monkeypatch.setattr(FakeEncoder, "rounded", [])
    for capability, status in (("8.6", "skipped"), ("8.9", "done"), ("12.0", "done")):
        monkeypatch.setattr(gpu, "find_gpu", lambda has=capability: Gpu("any", has, None))
        row = prepare(device, target, OPTIONS, config)["unpadded-fp8"].row
        assert row.status == status
        assert status == "done" or row.reason.endswith("multiply FP8, and this one has 8.6")
    assert FakeEncoder.rounded == [8 * 16]  # once, with rows of all inputs


def test_an_engine_that_is_not_built_is_an_error_and_a_baseline_that_does_not_run_is_skipped(
    device, tmp_path, monkeypatch
):
    def no_compiler(*_, **__):
        raise AttributeError("no C compiler")

    monkeypatch.setattr(gpu.peers, "compiled_forward", no_compiler)
    target, options = a_target(tmp_path), OPTIONS.model_copy(update={"batches": [1], "lengths": [16]})
    start_compiles(device.work, tmp_path, options)
    prebuild(device.work, target, options)
    device.work.background.failed["max-autotune-no-cudagraphs [(1, 16)]"] = "it took over 90 s"
    entries = prepare(device, target, options, Config(1, 16, None))
    found = {name: (entry.row.status, entry.row.reason) for name, entry in entries.items()}
    assert found["fp32"] == ("error", "tensorrt_rtx refuses model.fp32.onnx")
    assert found["compile-fp16"] == ("skipped", "no C compiler")
    assert found["autotune-fp16"] == ("skipped", "torch.compile: it took over 90 s")
    assert found["int8"][0] == found["torch-fp16"][0] == "done"


def test_all_shapes_of_a_split_share_a_stream_and_each_is_compiled(device, tmp_path):
    target, split = a_target(tmp_path), split_of((32, 64), (32, 40), (8, 40))
    options = OPTIONS.model_copy(update={"splits": (split,)})
    prebuild(device.work, target, options)
    compiled = [args for args, _ in device.work.background.tasks.values() if args[0] == "compile"]
    assert [json.loads(args[3]) for args in compiled] == [[[32, 64], [32, 40], [8, 40]]] * 2
    (lane,) = prepare(device, target, options, Config(32, None, split))["int8"].lanes
    assert [step.bound.shape for step in lane.steps] == [(32, 64), (32, 40), (8, 40)]
    assert len({id(step.bound.stream) for step in lane.steps}) == 1
    assert {dynamic for _, _, dynamic in device.compiled} == {False}
