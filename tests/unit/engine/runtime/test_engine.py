"""The runtime on a fake GPU: shapes, profiles, graphs, caches and errors. Real engines: tests/gpu."""

import gc
import hashlib
import json

import numpy as np
import pytest
import torch

from qdqbench.eval.metrics.runners import predict
from qdqbench.quantize.engine import sidecar
from qdqbench.quantize.engine.backend import Backend
from qdqbench.quantize.engine.profiles import Profile, bucket_profiles
from qdqbench.quantize.engine.runtime import engine as engine_core
from qdqbench.quantize.engine.runtime import runners
from qdqbench.quantize.engine.runtime.engine import Engine
from qdqbench.quantize.engine.runtime.runners import open_runner
from qdqbench.quantize.engine.sidecar import Sidecar, sidecar_path
from qdqbench.quantize.tasks.kinds.encoded import Encoded
from qdqbench.quantize.utils.errors import CheckFailed, MissingDevice, UserError
from qdqbench.quantize.utils.system.gpu import Gpu

from ....support import fake_gpu

SMALL, LARGE = Profile((1, 16), (1, 16), (4, 64)), Profile((2, 16), (32, 64), (64, 100))
HERE = Gpu("H200", "9.0", "580.10")


@pytest.fixture(params=["tensorrt_rtx", "tensorrt"])
def backend(request):
    return request.param


@pytest.fixture
def gpu(monkeypatch, backend):
    """The fake GPU's state; engines have two profiles."""
    state = fake_gpu.install(monkeypatch, [(p.min, p.opt, p.max) for p in (SMALL, LARGE)])
    monkeypatch.setattr(engine_core, "DEVICE", "cpu")
    for module in (engine_core, sidecar):
        monkeypatch.setattr(module, "find_gpu", lambda: HERE)
    monkeypatch.setattr(sidecar, "available_backends", lambda: {backend: "1.6.1"})
    made = Backend(backend, "1.6.1", fake_gpu.module(backend), HERE)
    monkeypatch.setattr(engine_core, "choose_backend", lambda name: made)
    return state


@pytest.fixture
def engine_file(tmp_path, backend):
    """An engine, its ONNX file and its sidecar in a run directory."""
    folder = tmp_path / "a run" / "engine"
    folder.mkdir(parents=True)
    (folder.parent / "run.json").write_text("{}")
    onnx = folder.parent / "x.onnx"
    onnx.write_bytes(b"graph")
    return write(folder / "x.engine", onnx, b"engine", backend)


@pytest.fixture
def engine(gpu, engine_file):
    with Engine(*engine_file) as made:
        yield made


@pytest.fixture
def runner(gpu, engine_file):
    with open_runner(*engine_file, pad_id=0) as made:
        yield made


def write(path, onnx, data, backend, **changes):
    path.write_bytes(data)
    sidecar = Sidecar(
        qdqbench="0",
        backend=backend,
        version="1.6.1",
        compute_capability=["9.0"],
        ahead_of_time=False,
        gpu="H200",
        driver="580.10",
        profiles=[SMALL, LARGE],
        onnx=onnx.name,
        onnx_sha256=hashlib.sha256(onnx.read_bytes()).hexdigest(),
        engine_bytes=len(data),
        engine_sha256=hashlib.sha256(data).hexdigest(),
        build_seconds=1.0,
    )
    sidecar_path(path).write_text(sidecar.model_copy(update=changes).model_dump_json())
    return path, onnx


def batch(rows, length, seed=0):
    ids = np.random.default_rng(seed).integers(1, 9, (rows, length))
    mask = np.ones_like(ids)
    mask[::2, length // 2 :] = 0
    return {"ids": ids, "mask": mask}


def expected(feeds):
    return (feeds["ids"] * feeds["mask"]).sum(axis=1)


def test_what_an_engine_says_of_itself(engine):
    assert (engine.inputs, engine.outputs) == (["ids", "mask"], ["logits"])
    assert engine.profiles == [SMALL, LARGE]
    memory = engine.memory
    assert (memory.engine_bytes, memory.weights_and_code_bytes) == (6, 300_000)
    assert (memory.activation_bytes, memory.activation_bytes_per_profile) == (64_000, (4000, 64_000))
    assert "0.3 MB for weights and code, 0.0, 0.1 MB for activations" in str(memory)
    assert engine.notes == []


@pytest.mark.parametrize(
    ("rows", "length", "profile"), [(1, 16, 0), (2, 20, 0), (4, 64, 1), (5, 16, 1), (2, 100, 1)]
)
def test_run_takes_the_profile_that_holds_the_shape(gpu, engine_file, rows, length, profile):
    feeds = batch(rows, length)
    with Engine(*engine_file) as engine:
        made = engine.run(feeds)
        assert set(engine._contexts) == {profile}
        engine.run(feeds)
        assert gpu.contexts == 1  # one context per profile
    assert made["logits"].dtype == np.float32
    assert made["logits"][:, 0].tolist() == expected(feeds).tolist()
    assert set(made["logits"][:, 1]) == {length}


def test_profiles_share_nothing(gpu, engine):
    small, large = batch(1, 16), batch(64, 100)
    first = engine.run(small)["logits"]
    engine.run(large)
    assert engine.run(small)["logits"].tolist() == first.tolist()
    assert gpu.contexts == 2


@pytest.mark.parametrize(("rows", "length"), [(65, 16), (1, 101), (1, 8), (1, 100)])
def test_a_shape_of_no_profile_is_refused_with_those_that_are_taken(engine, rows, length):
    for refused in (lambda: engine.run(batch(rows, length)), lambda: engine.bind(rows, length)):
        with pytest.raises(CheckFailed, match=r"batch: \[2, 32, 64\], length: \[16, 64, 100\]"):
            refused()


def test_an_output_that_the_engine_does_not_write_is_nan(gpu, engine):
    engine.run(batch(2, 16))  # the same memory may come back with the old answer
    bound = engine.bind(2, 16)
    gpu.unwritten = True
    assert np.isnan(engine.run(batch(2, 16))["logits"][:, 1]).all()
    bound.load(batch(2, 16))
    bound.launch()
    assert np.isnan(bound.read()["logits"]).tolist() == [[False, True], [False, True]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda feeds: feeds.pop("mask"), "mask is missing"),
        (lambda feeds: feeds.update(other=feeds["ids"]), "other is unknown"),
        (lambda feeds: feeds.update(ids=feeds["ids"].astype(np.float32)), "ids is float32 .* takes int64"),
        (lambda feeds: feeds.update(ids=feeds["ids"].astype(str)), "ids is <U"),
    ],
)
def test_wrong_inputs_are_named(gpu, engine_file, change, message):
    feeds = batch(1, 16)
    change(feeds)
    with Engine(*engine_file) as engine, pytest.raises(UserError, match=message):
        engine.run(feeds)


def test_inputs_of_another_width_or_layout_are_converted(engine):
    feeds = {name: np.asfortranarray(array.astype(np.int32)) for name, array in batch(3, 20).items()}
    for array in feeds.values():
        array.setflags(write=False)
    assert engine.run(feeds)["logits"][:, 0].tolist() == expected(feeds).tolist()


def test_a_bound_run_is_a_graph_on_its_own_buffers_and_context(gpu, engine):
    one, two = engine.bind(2, 16), engine.bind(2, 16)
    assert (gpu.contexts, gpu.captures) == (2, 2)
    assert gpu.enqueued == 6  # two warm-ups and the capture, each
    first, second = batch(2, 16, 1), batch(2, 16, 2)
    for bound, feeds in ((one, first), (two, second)):
        bound.load(feeds)
    for bound in (one, two):
        assert bound.captured
        bound.launch()
    assert gpu.replays == 2
    assert gpu.enqueued == 6
    assert one.read()["logits"][:, 0].tolist() == expected(first).tolist()
    assert two.read()["logits"][:, 0].tolist() == expected(second).tolist()
    assert one.inputs["ids"].data_ptr() != two.inputs["ids"].data_ptr()


def test_inputs_of_a_bound_run_may_be_written_in_place(engine):
    bound = engine.bind(4, 32, graph=False)
    assert bound.inputs["mask"].min() == 1  # padding everywhere would be 0 / 0 in a softmax
    bound.inputs["ids"].fill_(3)
    bound.launch()
    assert not bound.captured
    assert bound.outputs["logits"][:, 0].tolist() == [96.0] * 4
    with pytest.raises(UserError, match=r"ids is \[1, 32\], not \[4, 32\]"):
        bound.load(batch(1, 32))


def test_a_bound_run_takes_a_stream(gpu, engine_file):
    stream = fake_gpu.Stream()
    with Engine(*engine_file) as engine:
        assert engine.bind(1, 16, stream=stream).stream is stream
        assert engine.bind(1, 16).stream is not engine.stream


@pytest.mark.parametrize("backend", ["tensorrt_rtx"], indirect=True)
def test_what_cannot_be_captured_runs_without_a_graph_and_is_noted(gpu, engine_file, monkeypatch):
    def broken(graph, **_):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "graph", broken)
    with Engine(*engine_file) as engine:
        bound = engine.bind(2, 16)
        assert (bound.captured, gpu.captures) == (False, 0)
        bound.load(batch(2, 16))
        bound.launch()
        assert bound.read()["logits"][:, 1].tolist() == [16, 16]
        assert "length 16 runs without a CUDA graph: capturing fails (operation not" in engine.notes[-1]


def test_failures_of_the_engine_are_check_failures(gpu, engine):
    bound = engine.bind(1, 16, graph=False)
    gpu.fails = True
    for failing in (lambda: engine.run(batch(1, 16)), bound.launch, lambda: engine.bind(1, 16)):
        with pytest.raises(CheckFailed, match="fails to run"):
            failing()


def test_kernel_times_are_means_per_inference_without_the_first(gpu, engine):
    times = engine.kernel_times(batch(1, 16), repeats=4)
    assert times == {"gemm": 2.5, "norm": 0.5}
    gpu.silent = True
    with pytest.raises(CheckFailed, match="reports no kernel times"):
        engine.kernel_times(batch(1, 16))


def test_contexts_go_before_the_engine_and_the_engine_before_the_runtime(gpu, engine_file):
    engine = Engine(*engine_file)
    engine.run(batch(1, 16))
    bound = engine.bind(1, 16)
    engine.close()
    gc.collect()
    assert gpu.order == ["context", "context", "engine", "runtime"]
    assert bound.inputs == {}


def test_a_file_that_the_backend_refuses_is_a_missing_device(gpu, engine_file, backend):
    path, onnx = write(*engine_file, b"foreign", backend)
    with pytest.raises(MissingDevice, match=r"on H200 cannot load .*serialized for another device"):
        Engine(path, onnx)


def test_torch_without_cuda_is_a_missing_device(gpu, engine_file, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MissingDevice, match="install a CUDA build"):
        Engine(*engine_file)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": "1.4.0"}, "needs tensorrt.* 1.4.0 and tensorrt.* has version 1.6.1"),
        ({"compute_capability": ["8.9"]}, "compute capability 8.9 and the H200 has 9.0"),
        ({"driver": "590.1"}, "built with driver 590.1 and the older 580.10 runs here"),
        ({"onnx_sha256": "0"}, "another x.onnx"),
        ({"engine_sha256": "0"}, "not the one that was built"),
    ],
)
def test_the_sidecar_is_checked_before_anything_is_loaded(gpu, engine_file, backend, changes, message):
    path, onnx = write(*engine_file, b"engine", backend, **changes)
    with pytest.raises(UserError, match=message) as caught:
        Engine(path, onnx)
    assert f"`qdqbench build '{path.parent.parent}'`" in str(caught.value)
    assert gpu.free == 1_000_000


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"driver": "570.9"}, "driver 570.9 and runs on the newer 580.10"),
        ({"gpu": "H100"}, "tuned on H100 and runs on H200"),
        ({"gpu": None, "driver": None, "ahead_of_time": True}, None),
    ],
)
def test_what_differs_and_does_no_harm_is_noted(gpu, engine_file, backend, changes, note):
    path, onnx = write(*engine_file, b"engine", backend, **changes)
    with Engine(path, onnx) as engine:
        assert len(engine.notes) == (note is not None)
        assert note is None or note in engine.notes[0]


@pytest.mark.parametrize("backend", ["tensorrt_rtx"], indirect=True)
def test_compiled_kernels_are_kept(gpu, engine_file, tmp_path):
    cache = tmp_path / "cache" / "runtime.cache"
    with Engine(*engine_file, runtime_cache=cache) as engine:
        engine.run(batch(1, 16))
        assert (gpu.loaded, gpu.strategy.name) == (b"", "EAGER")
        assert engine.notes == []
    header, _, blob = cache.read_bytes().partition(b"\n")
    assert json.loads(header)["origin"]["version"] == "1.6.1"
    assert blob == b"kernels of [(1, 16)]"
    written = cache.stat().st_mtime_ns
    with Engine(*engine_file, runtime_cache=cache) as engine:
        engine.run(batch(1, 16))
        assert (gpu.loaded, gpu.strategy.name) == (blob, "EAGER")
    assert cache.stat().st_mtime_ns == written  # nothing new
    assert [path.name for path in cache.parent.iterdir()] == ["runtime.cache"]


@pytest.mark.parametrize("backend", ["tensorrt_rtx"], indirect=True)
@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda data: data.replace(b"580.10", b"570.10"), "driver was 570.10 and is 580.10"),
        (lambda data: data.replace(b"1.6.1", b"1.4.0"), "version was 1.4.0 and is 1.6.1"),
        (lambda data: data.replace(b"H200", b"L4"), "gpu was L4 and is H200"),
        (lambda data: data[:-1], "not whole"),
        (lambda data: b"\x00\xff", "not a cache of qdqbench"),
        (lambda data: b"[1]\nx", "not a cache of qdqbench"),
        (lambda data: data, "the runtime refuses it"),
    ],
)
def test_a_cache_of_another_place_is_ignored_noted_and_replaced(gpu, engine_file, tmp_path, damage, why):
    cache = tmp_path / "runtime.cache"
    with Engine(*engine_file, runtime_cache=cache) as engine:
        engine.run(batch(1, 16))
    cache.write_bytes(damage(cache.read_bytes()))
    gpu.loaded, gpu.refuses_cache = b"", why == "the runtime refuses it"
    with Engine(*engine_file, runtime_cache=cache) as engine:
        engine.run(batch(1, 32))
        assert why in engine.notes[0]
        assert engine.notes[0].startswith("runtime.cache is ignored and made again")
        assert bool(gpu.loaded) == gpu.refuses_cache
    gpu.refuses_cache = False
    with Engine(*engine_file, runtime_cache=cache) as engine:
        assert engine.notes == []
        assert b"(1, 32)" in gpu.loaded


@pytest.mark.parametrize("backend", ["tensorrt_rtx"], indirect=True)
def test_a_cache_that_cannot_be_written_is_a_note(gpu, engine_file, tmp_path):
    (tmp_path / "file").write_text("")
    with Engine(*engine_file, runtime_cache=tmp_path / "file" / "runtime.cache") as engine:
        engine.run(batch(1, 16))
    assert any("runtime.cache is not kept" in note for note in engine.notes)


@pytest.mark.parametrize("backend", ["tensorrt"], indirect=True)
def test_tensorrt_has_no_runtime_cache(gpu, engine_file, tmp_path):
    with Engine(*engine_file, runtime_cache=tmp_path / "runtime.cache") as engine:
        engine.run(batch(1, 16))
        assert gpu.strategy is None
    assert not (tmp_path / "runtime.cache").exists()


@pytest.mark.parametrize(
    ("rows", "length", "padded"),
    [(1, 16, 16), (1, 3, 16), (3, 33, 48), (5, 90, 96), (5, 97, 100), (64, 100, 100), (1, 70, 80)],
)
def test_runner_pads_to_shapes_that_repeat(runner, rows, length, padded):
    feeds = batch(rows, length)
    assert runner.max_batch == 64
    for _ in range(3):  # run, captured, replayed
        logits = runner(feeds)
        assert logits.dtype == np.float32
        assert logits[:, 0].tolist() == expected(feeds).tolist()
        assert logits[:, 1].tolist() == [padded] * rows


def test_answers_in_length_buckets_are_those_of_any_batches_in_the_same_order(gpu, engine_file):
    random, edges = np.random.default_rng(0), [16, 40, 64]
    ids = [random.integers(1, 99, length) for length in random.integers(1, 60, 37)]
    encoded = Encoded(ids, [np.zeros_like(each) for each in ids], np.zeros(37), truncated=0)
    gpu.profiles = [((1, edge), (8, edge), (128, edge)) for edge in edges]
    with open_runner(*engine_file, pad_id=0) as runner, pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner.engine, "profiles", bucket_profiles(edges, 64, 8))

        def run(batch):
            return runner({"ids": batch["input_ids"], "mask": batch["attention_mask"]})

        settings = {"pad_id": 0, "batch_size": 8, "stage": "engine"}
        plain = predict(run, encoded, **settings)
        gpu.compiled.clear()
        bucketed = predict(run, encoded, **settings, edges=edges)
    assert plain[:, 0].tolist() == bucketed[:, 0].tolist() == [each.sum() for each in ids]
    assert sorted(length for _, length in gpu.compiled) == edges  # one shape each
    assert bucketed[:, 1].tolist() == [min(edge for edge in edges if edge >= len(each)) for each in ids]


def test_runner_pads_with_the_pad_token(gpu, engine_file, monkeypatch):
    fed = []
    with open_runner(*engine_file, pad_id=5) as runner:
        runner.engine.inputs = ("input_ids", "attention_mask")
        monkeypatch.setattr(runner, "_run", lambda feeds: fed.append(feeds) or {"logits": np.zeros((1, 2))})
        runner({name: np.ones((1, 15), np.int64) for name in ("input_ids", "attention_mask", "unused")})
    assert {name: array[0, -2:].tolist() for name, array in fed[0].items()} == {
        "input_ids": [1, 5],
        "attention_mask": [1, 0],
    }


def test_runner_captures_a_shape_at_its_second_batch(gpu, engine_file):
    with open_runner(*engine_file, pad_id=0) as runner:
        counts = []
        for length in (16, 30, 32, 20, 16):
            runner(batch(2, length))
            counts.append((gpu.captures, gpu.replays))
    assert counts == [(0, 0), (0, 0), (1, 1), (1, 2), (2, 3)]


def test_runner_drops_the_least_recently_used_graph(gpu, engine_file, monkeypatch):
    monkeypatch.setattr(runners, "MAX_GRAPHS", 2)
    with open_runner(*engine_file, pad_id=0) as runner:
        for length in (16, 32, 48):
            for _ in range(2):
                runner(batch(1, length))
        assert list(runner._graphs) == [(1, 32), (1, 48)]
        runner(batch(1, 32))
        runner(batch(1, 16))
        assert list(runner._graphs) == [(1, 32), (1, 16)]
        gc.collect()
        assert gpu.order.count("context") == 2
        assert gpu.captures == 4


@pytest.mark.parametrize(("free", "kept"), [(300_000 + 1_000, 0), (300_000 + 400_000, 3)])
def test_runner_keeps_no_more_graphs_than_fit_into_half_of_the_free_memory(gpu, engine_file, free, kept):
    gpu.free = free
    with open_runner(*engine_file, pad_id=0) as runner:
        for length in (16, 32, 48, 64):
            for _ in range(3):
                assert runner(batch(1, length))[:, 1].tolist() == [length]
        assert len(runner._graphs) == kept


def test_runner_wants_logits(gpu, engine_file, monkeypatch):
    monkeypatch.setattr(fake_gpu.CudaEngine, "names", ("ids", "mask", "scores"))
    monkeypatch.setattr(
        fake_gpu.CudaEngine,
        "get_tensor_mode",
        lambda self, name: fake_gpu.TensorIOMode.OUTPUT if name == "scores" else fake_gpu.TensorIOMode.INPUT,
    )
    with pytest.raises(UserError, match="no output logits but scores"):
        open_runner(*engine_file, pad_id=0)


def test_four_bit_tensors_are_refused(gpu, engine_file, monkeypatch):
    monkeypatch.setattr(fake_gpu.CudaEngine, "output_type", fake_gpu.DataType.FP4)
    with pytest.raises(UserError, match="type FP4"):
        Engine(*engine_file)


@pytest.mark.parametrize("name", list(engine_core._DTYPES))
def test_buffers_of_every_type(name):
    dtype = engine_core.torch_dtype(name)
    buffer = engine_core.make_poisoned((2, 3), dtype, "cpu")
    array = engine_core.to_numpy(buffer)
    assert (buffer.dtype, array.shape) == (dtype, (2, 3))
    if dtype.is_floating_point:
        assert np.isnan(array).all()
