"""A real engine on a real GPU: what it computes is what the fake-quant model computes."""

import json
import shutil

import numpy as np
import pytest

from qdqbench.eval.metrics.runners import onnxruntime_runner
from qdqbench.eval.runs.run import run_until
from qdqbench.quantize.engine.build import build, list_gemms
from qdqbench.quantize.engine.profiles import Profile, choose_profile
from qdqbench.quantize.engine.runtime.engine import Engine
from qdqbench.quantize.engine.runtime.runners import open_runner
from qdqbench.quantize.pipeline.pipeline import open_run
from qdqbench.quantize.utils.errors import CheckFailed
from qdqbench.quantize.utils.system.gpu import find_gpu

from ..integration.tiny import EVAL_ROWS, results


@pytest.fixture(scope="module")
def files(run):
    """The engine of a recipe and the ONNX file that it was built from."""
    recipe, folder = run
    name = "model.fp16" if recipe == "bert-fp16" else "model.int8"
    return folder / "engine" / f"{name}.engine", folder / f"{name}.onnx"


def logits(folder, stage):
    with np.load(folder / "logits" / f"{stage}.npz") as arrays:
        return arrays["validation.logits"]


def test_engine_is_built_for_this_gpu_and_evaluated(run):
    _, folder = run
    found = results(folder)
    assert found["engine"]["compute_capability"] == [find_gpu().compute_capability]
    assert not found["engine"]["ahead_of_time"]
    assert found["stages"]["engine"]["status"] == "done"
    assert found["stages"]["engine"]["n"] == EVAL_ROWS
    assert found["engine"]["int8_gemms"] == found["engine"]["expected_int8_gemms"]
    assert found["gate"]["passed"], found["gate"]["issues"]


def test_logits_are_those_of_the_recipe(run):
    """Facts: FP16 is within 0.004 of FP32, INT8 within 0.035 of the same recipe in PyTorch."""
    recipe, folder = run
    quantized = recipe != "bert-fp16"
    reference, made = logits(folder, "fake_quant" if quantized else "fp32"), logits(folder, "engine")
    assert made.dtype == np.float32
    assert np.isfinite(made).all()
    error = np.linalg.norm(made - reference) / np.linalg.norm(reference)
    assert error < (0.1 if quantized else 0.01)
    assert np.mean(made.argmax(1) == reference.argmax(1)) > 0.95


def batch(rng, rows, length, padding=0):
    """Random words; the last `padding` positions of every other row are masked."""
    ids = rng.integers(5, 20, (rows, length))
    mask = np.ones((rows, length), dtype=np.int64)
    if padding:
        ids[1::2, -padding:] = 0
        mask[1::2, -padding:] = 0
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}


@pytest.mark.parametrize(
    ("rows", "length", "padding"),
    [(1, 16, 0), (32, 128, 0), (128, 128, 0), (8, 64, 40), (5, 33, 17), (4, 9, 0), (4, 9, 5), (1, 1, 0)],
)
def test_any_shape_of_the_profile(files, rows, length, padding):
    """Shapes at the profile's corners, odd ones, and ones shorter than its minimum, against ONNX Runtime."""
    inputs = batch(np.random.default_rng(rows + length), rows, length, padding)
    expected = onnxruntime_runner(files[1])(inputs)
    with open_runner(*files, pad_id=0) as engine:
        assert engine.max_batch == 128
        made, again = engine(inputs), engine(inputs)
    assert made.shape == (rows, 2)
    assert np.isfinite(made).all()
    assert np.array_equal(made, again)
    assert np.linalg.norm(made - expected) / np.linalg.norm(expected) < 0.1


def test_padding_changes_nothing(files):
    """A sentence alone, and the same sentence padded to 128 in a batch of others."""
    rng = np.random.default_rng(0)
    alone, others = batch(rng, 1, 20), batch(rng, 4, 128)
    padded = {key: value.copy() for key, value in others.items()}
    for key, value in alone.items():
        padded[key][2] = 0
        padded[key][2, :20] = value[0]
    with open_runner(*files, pad_id=0) as engine:
        short, long = engine(alone)[0], engine(padded)[2]
    assert np.linalg.norm(short - long) / np.linalg.norm(short) < 0.1


def test_shapes_outside_of_the_profile_are_refused(files):
    with open_runner(*files, pad_id=0) as engine:
        for rows, length in ((129, 16), (1, 129)):
            with pytest.raises(CheckFailed, match="no profile of the engine takes"):
                engine(batch(np.random.default_rng(0), rows, length))


@pytest.fixture(scope="module")
def engine(files):
    """The engine of a recipe, loaded once."""
    with Engine(*files) as loaded:
        yield loaded


def test_memory_is_reported(run, engine):
    _, folder = run
    memory = engine.memory
    assert memory.engine_bytes == next((folder / "engine").glob("*.engine")).stat().st_size
    assert memory.weights_and_code_bytes > 0
    assert memory.activation_bytes == max(memory.activation_bytes_per_profile) > 0
    assert "GPU memory" in results(folder)["stages"]["engine"]["detail"]


def same(got, expected):
    """Equal but for rounding flips: contexts of one engine may compile other kernels for a dynamic shape."""
    return np.isfinite(got).all() and np.abs(got - expected).max() < 0.05


@pytest.mark.parametrize(("rows", "length"), [(1, 16), (32, 128), (7, 50)])
def test_a_graph_computes_what_a_run_computes(engine, rows, length):
    rng = np.random.default_rng(rows)
    bound = engine.bind(rows, length)
    assert bound.captured, engine.notes
    for padding in (0, length // 2):
        inputs = batch(rng, rows, length, padding)
        bound.load(inputs)
        bound.launch()
        assert same(bound.read()["logits"], engine.run(inputs)["logits"])
    bound.close()


def test_graphs_and_streams_do_not_mix(engine):
    """Four bound runs at once, replayed in turn, each with its own answer."""
    rng = np.random.default_rng(0)
    shapes = [(8, 64), (8, 64), (1, 128), (32, 16)]
    inputs = [batch(rng, rows, length, length // 4) for rows, length in shapes]
    expected = [engine.run(each)["logits"] for each in inputs]
    bound = [engine.bind(rows, length, graph=number != 1) for number, (rows, length) in enumerate(shapes)]
    for each, feeds in zip(bound, inputs, strict=True):
        each.load(feeds)
    for _ in range(20):
        for each in bound:
            each.launch()
    for each, logits in zip(bound, expected, strict=True):
        assert same(each.read()["logits"], logits)
        each.close()


def test_kernel_times_are_of_kernels_in_the_layer_table(run, engine):
    _, folder = run
    inputs = batch(np.random.default_rng(0), 8, 64)
    times = engine.kernel_times(inputs, repeats=5)
    assert all(ms > 0 for ms in times.values())
    assert 0.001 < sum(times.values()) < 1000
    names = {row["name"] for row in json.loads((folder / "layers.json").read_text())["layers"]}
    assert len(names & set(times)) > len(times) / 2


def test_the_runtime_cache_is_kept_in_the_run_directory(run, files, tmp_path):
    kept, path = files[0].with_name("runtime.cache"), tmp_path / "runtime.cache"
    if results(run[1])["engine"]["backend"] != "tensorrt_rtx":
        assert not kept.exists()
        return
    shutil.copy(kept, path)  # an engine writes to its cache
    before = path.read_bytes()
    inputs = batch(np.random.default_rng(0), 3, 32)
    with Engine(files[0], runtime_cache=path) as loaded:
        assert loaded.notes == []
        first = loaded.run(inputs)["logits"]
    path.write_bytes(before[:-10])
    with Engine(files[0], runtime_cache=path) as loaded:
        assert "ignored" in loaded.notes[0]
        assert np.array_equal(loaded.run(inputs)["logits"], first)


def test_several_profiles(linears, tmp_path):
    """Each shape in the profile that is made for it, against ONNX Runtime, with memory for each."""
    onnx = linears / "model.int8.onnx"
    profiles = [Profile((1, 16), (1, 32), (2, 128)), Profile((4, 16), (32, 128), (64, 128))]
    result = build(
        onnx,
        tmp_path / "x.engine",
        backend=results(linears)["engine"]["backend"],
        profiles=profiles,
        expected_gemms=list_gemms(onnx)[:1],
        expected_attention=0,
        timing_cache=tmp_path / "timing.cache",
    )
    assert result.not_int8 == []
    reference = onnxruntime_runner(onnx)
    with Engine(tmp_path / "x.engine", onnx) as loaded:
        shapes = ((1, 20), (2, 128), (4, 16), (64, 128))
        assert [choose_profile(loaded.profiles, *shape) for shape in shapes] == [0, 0, 1, 1]
        sizes = loaded.memory.activation_bytes_per_profile
        assert 0 < sizes[0] < sizes[1]
    with open_runner(tmp_path / "x.engine", onnx, pad_id=0) as runner:
        for rows, length in [(1, 20), (64, 128), (3, 40), (1, 20), (3, 40), (1, 20)]:  # 3 is between both
            inputs = batch(np.random.default_rng(rows), rows, length, length // 4)
            made, expected = runner(inputs), reference(inputs)
            assert np.linalg.norm(made - expected) / np.linalg.norm(expected) < 0.1


def test_second_run_reuses_the_engine_and_its_verification(run, sst2, tmp_path):
    recipe, folder = run
    again = shutil.copytree(folder, tmp_path / "run")
    timings = run_until(open_run(sst2.config(recipe), again), quick_bench=False).timings
    assert {"build", "verify", "engine"} <= set(timings)
    assert all(row.reused for row in timings.values())
