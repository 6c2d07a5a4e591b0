"""A whole bench with fake systems: configs, errors, speed-ups, files after every config."""

import math
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from qdqbench.eval.bench import run as bench_run
from qdqbench.eval.bench.gpu import GpuWork
from qdqbench.eval.bench.measure import ReadySystem
from qdqbench.eval.bench.results import BenchKernels, BenchRow, BenchSystem, BenchTarget, compute_speedups
from qdqbench.eval.bench.run import run_bench
from qdqbench.eval.bench.systems import BenchPlan, Config, Entry, Preparation, Work
from qdqbench.eval.bench.target import BatchedSplit, Target
from qdqbench.quantize.engine.results import LayerRow
from qdqbench.quantize.recipe.schema import load_recipe
from qdqbench.quantize.utils.errors import CheckFailed, MissingDevice, UserError
from qdqbench.quantize.utils.system.gpu import Gpu

from .test_rounds import FakeLane, FakeTimer

OPTIONS = BenchPlan(
    device="gpu",
    batches=[1, 8],
    lengths=[128],
    dataset=None,
    input_sets=8,
    splits=(),
    streams=[1, 2],
    rounds=5,
    duration_s=0.1,
    iterations=30,
    baselines=True,
    fp32=True,
    engine_shapes="exact",
    seed=0,
)
ONE = OPTIONS.model_copy(update={"batches": [1]})
COMPILED = "compile-fp16"
MS = {"int8": 1.0, "fp16": 1.5, "fp32": 4.0, COMPILED: 1.25}
SHAPE = {"layers": 12, "hidden": 768, "intermediate": 3072, "parameters": 109_000_000}
KERNEL = LayerRow(name="gemm", kind="gemm", onnx=["/a"], inputs=["Int8"], constants=[], outputs=["Half"])


class Lane(FakeLane):
    """Logits that become NaN after `broken_after` launches."""

    def __init__(self, broken_after=math.inf):
        super().__init__([[[1.0, 2.0]], [[1.0, 3.0]]])
        self.broken_after = broken_after

    def fetch(self):
        return super().fetch() * (math.nan if self.launches > self.broken_after else 1)


class Timer(FakeTimer):
    def latencies(self, lane, count):
        lane.launches += count
        return super().latencies(lane, count)


class Monitor:
    """A GPU that is read, or not."""

    reason = None

    def __init__(self, uuid):
        self.windows = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def during(self, windows):
        self.windows += windows
        return {"clock_mhz": 1980.0, "power_w": 512.5, "temperature_c": 41.0}


class Blind(Monitor):
    reason = "NVML does not start (NVML Shared Library Not Found)"

    def during(self, windows):
        return {}


@pytest.fixture
def target():
    about = BenchTarget(
        kind="shape", name="bert-base", random_weights=True, calibration="random", shape=SHAPE, files={}
    )
    session = SimpleNamespace(recipe=load_recipe("bert-int8-linears"))
    return Target(session, about)


@pytest.fixture
def machine(monkeypatch):
    """A GPU, and systems that `entries` makes for each shape; tests change both."""
    given = SimpleNamespace(ms=dict(MS), broken={}, entries={}, monitor=Monitor)

    def precision_of(name):
        return name if name in ("int8", "fp32") else "fp16"

    def describe(target, options, backend):
        return [
            BenchSystem(name=name, label=name.upper(), precision=precision_of(name), backend="fake 1.0")
            for name in given.ms
        ]

    def prepare(_here):
        made = []
        for name, ms in given.ms.items():
            if name in given.entries:
                made.append(Entry(given.entries[name].model_copy()))
                continue
            lanes = [Lane(given.broken.get(name, math.inf)) for _ in range(2)]
            ready = ReadySystem(name, precision_of(name), lanes, Timer(ms))
            made.append(Entry(BenchRow(system=name, status="done"), ready, [KERNEL]))
        return made

    given.prepare = prepare
    monkeypatch.setattr(bench_run, "describe_systems", describe)
    monkeypatch.setattr(bench_run, "prepare_on_gpu", lambda *arguments: given.prepare(*arguments))  # noqa: PLW0108  (tests change it)
    monkeypatch.setattr(bench_run, "prebuild", lambda *_: None)
    monkeypatch.setattr(bench_run, "find_gpu", lambda: Gpu("NVIDIA H200", "9.0", "570.1"))
    monkeypatch.setattr(bench_run, "GpuMonitor", lambda uuid: given.monitor(uuid))  # noqa: PLW0108  (tests change it)
    monkeypatch.setattr(bench_run, "gpu_uuid", lambda: "GPU-1")
    return given


def measure(target, options, **more):
    backend = ("tensorrt_rtx", "1.4.0.76")
    return run_bench(target, options, GpuWork(None), command="", backend=backend, **more)


def row(cell, name):
    return next(one for one in cell.rows if one.system == name)


def test_a_run_is_timed_on_its_texts_and_all_else_on_random_token_ids(machine, target):
    assert measure(target, ONE).settings.inputs == "random token ids"
    ids = np.array([[5, 6, 7], [8, 9, 4], [5, 6, 7]])
    session = SimpleNamespace(
        recipe=target.session.recipe,
        calibration_batches=lambda: [{"input_ids": ids}],
        unnoted=nullcontext,
    )
    run = Target(session, target.about.model_copy(update={"kind": "run"}))
    assert [text.tolist() for text in run.texts] == ids.tolist()
    made = measure(run, ONE)
    assert made.settings.inputs == "texts of split train"
    here = Preparation(run, ONE, Config(2, 4, None), Work(), ExitStack())
    assert {tuple(row[:2]) for batch in here.batches for row in batch["input_ids"]} <= {(5, 6), (8, 9)}


def test_a_run_without_its_data_is_timed_on_random_token_ids(machine, target):
    def fail():
        raise UserError("data/glue does not exist")

    session = SimpleNamespace(recipe=target.session.recipe, calibration_batches=fail, unnoted=nullcontext)
    made = measure(Target(session, target.about.model_copy(update={"kind": "run"})), ONE)
    assert made.settings.inputs == "random token ids"
    told = "inputs are random token ids: the run's data do not load: data/glue does not exist"
    assert made.notes[0] == told


def test_numbers_of_every_contestant(machine, target):
    found = measure(target, OPTIONS)
    assert found.complete
    assert (found.errors, found.warnings) == ([], [])
    assert any("random weights" in note for note in found.notes)
    assert any("9.0" in note and "not officially supported" in note for note in found.notes)
    assert [(cell.batch, cell.length) for cell in found.configs] == [(1, 128), (8, 128)]
    for cell in found.configs:
        for name, ms in MS.items():
            made = row(cell, name)
            assert made.status == "done"
            assert (made.median_ms, made.p50_ms, made.p90_ms, made.p99_ms) == (ms, ms, ms, ms)
            assert made.launches == 5 * 30
            assert made.sequences_per_s == pytest.approx(1000 * cell.batch / ms)
            by_streams = {rate.streams: rate.sequences_per_s for rate in made.throughput}
            assert by_streams == {
                1: pytest.approx(1000 * cell.batch / ms),
                2: pytest.approx(2000 * cell.batch / ms),
            }
            assert (made.clock_mhz, made.power_w, made.temperature_c) == (1980.0, 512.5, 41.0)
        values = {(s.system, s.baseline): s.value for s in cell.speedups}
        assert values == {
            ("int8", "fp16"): pytest.approx(1.5),
            ("int8", "fp32"): pytest.approx(4.0),
            ("int8", COMPILED): pytest.approx(1.25),
            ("fp32", "fp16"): pytest.approx(0.375),
            (COMPILED, "fp16"): pytest.approx(1.2),
        }
        assert (cell.headline.system, cell.headline.baseline) == ("int8", COMPILED)
        assert cell.headline.value == pytest.approx(1.25)
        assert cell.elapsed_s >= 0
        assert cell.reference == "fp32"
        assert row(cell, "int8").rel_error == 0


def test_kernels_of_peers_are_read_and_what_they_show_is_warned_about(machine, target):
    def entry(name, kernels):
        ready = ReadySystem(name, "fp16", [Lane(), Lane()], Timer(1.0))
        return Entry(BenchRow(system=name, status="done"), ready, kernels=kernels)

    def unread():
        raise RuntimeError("CUPTI is busy")

    unfused = BenchKernels(names={"ampere_sgemm": 24}, fused_attention=0, fp32_gemms=24)
    machine.prepare = lambda *_: [entry(COMPILED, lambda: unfused), entry("fp16", unread)]
    found = measure(target, ONE)
    assert row(found.configs[0], COMPILED).kernels == unfused
    assert row(found.configs[0], "fp16").kernels is None
    assert found.warnings == [
        "1 x 128: kernels of fp16 were not read: CUPTI is busy",
        "1 x 128: COMPILE-FP16 is not in its best form: no fused attention kernel ran, 24 GEMMs in FP32",
    ]


@pytest.mark.parametrize("after", [0, 30])
def test_nan_is_an_error_and_never_a_number(machine, target, after):
    """From the start, and after launches that were fine when they were first looked at."""
    machine.broken = {"int8": after}
    found = measure(target, OPTIONS)
    for cell in found.configs:
        made = row(cell, "int8")
        assert made.status == "error"
        assert "NaN" in made.reason
        assert made.median_ms is made.sequences_per_s is None
        assert made.round_ms == made.throughput == []
        assert all("int8" not in (s.system, s.baseline) for s in cell.speedups)
        assert row(cell, "fp16").status == "done"
    assert len(found.errors) == 2
    assert found.errors[0].startswith("1 x 128: INT8: NaN or infinite logits")


def test_missing_peers_are_warnings_and_missing_engines_errors(machine, target):
    machine.entries = {
        COMPILED: BenchRow(system=COMPILED, status="skipped", reason="no C compiler"),
        "fp32": BenchRow(system="fp32", status="error", reason="out of memory"),
    }
    found = measure(target, ONE)
    assert found.warnings == ["1 x 128: COMPILE-FP16: no C compiler (not measured)"]
    assert found.errors == ["1 x 128: FP32: out of memory"]
    assert {s.baseline for s in found.configs[0].speedups} == {"fp16"}


def test_all_contestants_failing_is_a_cell_of_errors(machine, target):
    machine.entries = {name: BenchRow(system=name, status="error", reason="no") for name in MS}
    found = measure(target, ONE)
    assert len(found.errors) == len(MS)
    assert found.configs[0].speedups == []


def test_a_slow_int8_engine_gets_its_reasons_from_the_layers(machine, target, monkeypatch):
    asked = []
    monkeypatch.setattr(
        bench_run, "explain_slowdown", lambda *layers: asked.append(layers) or ["24 GEMMs in FP16"]
    )
    machine.ms = MS | {"int8": 2.0}
    found = measure(target, ONE)
    by_over = {s.baseline: s for s in found.configs[0].speedups if s.system == "int8"}
    assert found.configs[0].slow_reasons == ["24 GEMMs in FP16"]
    assert [by_over[name].verdict for name in ("fp16", COMPILED, "fp32")] == ["slower", "slower", "faster"]
    assert asked == [([KERNEL], [KERNEL])]


def test_gemms_that_are_not_int8_are_warned_about(machine, target):
    bad = BenchRow(system="int8", status="error", reason="x", expected_int8_gemms=2, not_int8=["/a/MatMul"])
    machine.entries = {"int8": bad}
    found = measure(target, ONE)
    assert found.warnings == ["1 x 128: 1 GEMM that should be in INT8 is not: /a/MatMul"]


def test_clocks_that_nothing_reads_are_null_and_said(machine, target):
    machine.monitor = Blind
    found = measure(target, OPTIONS)
    assert row(found.configs[0], "int8").clock_mhz is None
    assert found.warnings == [f"clock, power and temperature were not read: {Blind.reason}"]


def test_every_finished_cell_is_saved(machine, target):
    saved = []
    measure(target, OPTIONS, save=lambda found: saved.append((found.complete, len(found.configs))))
    assert saved == [(False, 1), (True, 2), (True, 2)]


def test_a_device_error_ends_the_bench_and_keeps_what_was_saved(machine, target, monkeypatch):
    saved = []

    def disturbed(*arguments, **options):
        if len(saved) == 1:
            raise CheckFailed("int8 failed while it was measured")
        return real(*arguments, **options)

    real = bench_run.measure_rounds
    monkeypatch.setattr(bench_run, "measure_rounds", disturbed)
    with pytest.raises(CheckFailed, match="int8 failed"):
        measure(target, OPTIONS, save=lambda found: saved.append(found.model_copy(deep=True)))
    assert len(saved) == 1
    assert not saved[0].complete


@pytest.mark.parametrize(("device", "streams"), [("gpu", []), ("cpu", [1, 2])])
def test_dataset_are_a_cell_of_the_whole_split(machine, target, monkeypatch, device, streams):
    monkeypatch.setattr(bench_run, "prepare_on_cpu", machine.prepare)
    batches = [
        {name: np.ones((rows, length), dtype=np.int64) for name in ("input_ids", "attention_mask")}
        for rows, length in ((32, 48), (32, 24), (32, 24), (8, 16))
    ]
    split = BatchedSplit("sst2", 32, batches, [32, 32, 32, 8], 104, 2000, bucketed=True)
    changes = {"batches": [1], "dataset": "sst2", "splits": (split,), "device": device}
    found = measure(target, OPTIONS.model_copy(update=changes))
    cell = found.configs[-1]
    assert (cell.kind, cell.batch, cell.length, cell.sequences, cell.shapes) == ("dataset", 32, None, 104, 3)
    assert cell.padded_to == [16, 24, 48]
    assert (cell.real_tokens, cell.padded_tokens) == (2000, 32 * 48 + 64 * 24 + 8 * 16)
    made = row(cell, "int8")
    assert made.sequences_per_s == pytest.approx(104 * 1000)
    assert [rate.streams for rate in made.throughput] == streams
    assert found.settings.dataset == "sst2"


def test_speedups_without_an_fp16_engine():
    rows = [
        BenchRow(system=name, status="done", median_ms=ms, round_ms=[ms] * 5)
        for name, ms in (("int8", 2.0), ("fp32", 3.0))
    ]
    (only,) = compute_speedups(rows, "1 x 16", 0)
    assert (only.system, only.baseline, only.value) == ("int8", "fp32", 1.5)


def test_no_gpu_lists_everything_that_is_missing(monkeypatch):
    def no_backend(name):
        raise MissingDevice("tensorrt_rtx is not installed; pip install 'qdqbench[rtx]'")

    monkeypatch.setattr(bench_run, "find_gpu", lambda: None)
    monkeypatch.setattr(bench_run, "choose_backend", no_backend)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(MissingDevice) as caught:
        bench_run.require_gpu("auto")
    for part in ("no NVIDIA GPU", "sees no CUDA device", "tensorrt_rtx is not installed", "--cpu"):
        assert part in str(caught.value)
