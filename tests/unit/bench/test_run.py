"""A whole bench with fake systems: configs, errors, speed-ups, files after every config."""

from contextlib import ExitStack, nullcontext

import numpy as np
import pytest

from qdqbench.eval.bench import run as bench_run
from qdqbench.eval.bench.results import BenchKernels, BenchRow, compute_speedups
from qdqbench.eval.bench.run import run_bench
from qdqbench.eval.bench.systems import Config, Preparation, Work
from qdqbench.quantize.engine.results import LayerRow
from qdqbench.quantize.utils.errors import CheckFailed, MissingDevice, UserError

from ...support.fake_bench import (
    CLOCKS,
    PLAN,
    FakeLane,
    FakeMonitor,
    fake_device,
    fake_system,
    fake_target,
    missing_system,
    split_of,
)

ONE = PLAN.model_copy(update={"batches": [1]})
COMPILED = "compile-fp16"
MS = {"int8": 1.0, "fp16": 1.5, "fp32": 4.0, COMPILED: 1.25}
KERNEL = LayerRow(name="gemm", kind="gemm", onnx=["/a"], inputs=["Int8"], constants=[], outputs=["Half"])


def measure(options=PLAN, ms=MS, *, target=None, device=None, save=lambda bench: None, **others):
    """Return a bench of systems with these times, and of others by their names in place of them."""

    def prepare(_):
        return [others[name]() if name in others else fake_system(name, each) for name, each in ms.items()]

    return run_bench(target or fake_target(), options, device or fake_device(prepare), command="", save=save)


def row(cell, name):
    return next(one for one in cell.rows if one.system == name)


def run_of(batches):
    session = {"calibration_batches": batches, "unnoted": nullcontext}
    return fake_target(kind="run", **session)


def test_a_run_is_timed_on_its_texts_and_all_else_on_random_token_ids():
    assert measure(ONE).settings.inputs == "random token ids"
    ids = np.array([[5, 6, 7], [8, 9, 4], [5, 6, 7]])
    run = run_of(lambda: [{"input_ids": ids}])
    assert [text.tolist() for text in run.texts] == ids.tolist()
    assert measure(ONE, target=run).settings.inputs == "texts of split train"
    here = Preparation(run, ONE, Config(2, 4, None), Work(list), ExitStack())
    assert {tuple(row[:2]) for batch in here.batches for row in batch["input_ids"]} <= {(5, 6), (8, 9)}


def test_a_run_without_its_data_is_timed_on_random_token_ids():
    def fail():
        raise UserError("data/glue does not exist")

    made = measure(ONE, target=run_of(fail))
    assert made.settings.inputs == "random token ids"
    told = "inputs are random token ids: the run's data do not load: data/glue does not exist"
    assert made.notes[0] == told


def test_numbers_of_every_contestant():
    found = measure()
    assert found.complete
    assert (found.errors, found.warnings) == ([], [])
    assert any("random weights" in note for note in found.notes)
    assert any("9.0" in note and "not officially supported" in note for note in found.notes)
    assert [(cell.batch, cell.length) for cell in found.configs] == [(1, 128), (8, 128)]
    for cell in found.configs:
        for name, ms in MS.items():
            made, rate = row(cell, name), pytest.approx(1000 * cell.batch / ms)
            assert (made.status, made.launches) == ("done", 5 * 30)
            assert (made.median_ms, made.p50_ms, made.p90_ms, made.p99_ms) == (ms, ms, ms, ms)
            assert made.sequences_per_s == rate
            by_streams = {each.streams: each.sequences_per_s for each in made.throughput}
            assert by_streams == {1: rate, 2: pytest.approx(2000 * cell.batch / ms)}
            assert made.model_dump(include={*CLOCKS}) == CLOCKS
        values = {(s.system, s.baseline): s.value for s in cell.speedups}
        assert values == {
            ("int8", "fp16"): pytest.approx(1.5),
            ("int8", "fp32"): pytest.approx(4.0),
            ("int8", COMPILED): pytest.approx(1.25),
            ("fp32", "fp16"): pytest.approx(0.375),
            (COMPILED, "fp16"): pytest.approx(1.2),
        }
        best = cell.headline
        assert (best.system, best.baseline, best.value) == ("int8", COMPILED, pytest.approx(1.25))
        assert cell.elapsed_s >= 0
        assert (cell.reference, row(cell, "int8").rel_error) == ("fp32", 0)


def test_kernels_of_peers_are_read_and_what_they_show_is_warned_about():
    def unread():
        raise RuntimeError("CUPTI is busy")

    unfused = BenchKernels(names={"ampere_sgemm": 24}, fused_attention=0, fp32_gemms=24)
    kernels = {COMPILED: lambda: unfused, "fp16": unread}
    systems = lambda _: [fake_system(name, kernels=read) for name, read in kernels.items()]  # noqa: E731
    found = measure(ONE, device=fake_device(systems))
    assert [row(found.configs[0], name).kernels for name in kernels] == [unfused, None]
    assert found.warnings == [
        "1 x 128: kernels of fp16 were not read: CUPTI is busy",
        "1 x 128: torch.compile FP16, CUDA graph is not in its best form: no fused attention kernel ran, 24 "
        "GEMMs in FP32",
    ]


@pytest.mark.parametrize("after", [0, 30])
def test_nan_is_an_error_and_never_a_number(after):
    """From the start, and after launches that were fine when they were first looked at."""
    found = measure(int8=lambda: fake_system("int8", lane=FakeLane(broken_after=after)))
    for cell in found.configs:
        made = row(cell, "int8")
        assert made.status == "error"
        assert "NaN" in made.reason
        assert made.median_ms is made.sequences_per_s is None
        assert made.round_ms == made.throughput == []
        assert all("int8" not in (s.system, s.baseline) for s in cell.speedups)
        assert row(cell, "fp16").status == "done"
    assert len(found.errors) == 2
    assert found.errors[0].startswith("1 x 128: INT8 engine, exact shape: NaN or infinite logits")


def test_missing_peers_are_warnings_and_missing_engines_errors():
    absent = {"fp32": lambda: missing_system("fp32", "error", "out of memory")}
    absent[COMPILED] = lambda: missing_system(COMPILED, "skipped", "no C compiler")
    found = measure(ONE, **absent)
    assert found.warnings == ["1 x 128: torch.compile FP16, CUDA graph: no C compiler (not measured)"]
    assert found.errors == ["1 x 128: FP32 engine, exact shape: out of memory"]
    assert {s.baseline for s in found.configs[0].speedups} == {"fp16"}
    all_of_them = lambda _: [missing_system(name, "error", "no") for name in MS]  # noqa: E731
    found = measure(ONE, device=fake_device(all_of_them))
    assert (len(found.errors), found.configs[0].speedups) == (len(MS), [])


def test_a_slow_int8_engine_gets_its_reasons_from_the_layers():
    counts = {"int8": 2, "fp16": 1}
    slow = {name: lambda n=name: fake_system(n, 2.0 if n == "int8" else 1.5, layers=[KERNEL] * counts[n])
            for name in counts}  # fmt: skip
    (cell,) = measure(ONE, **slow).configs
    by_over = {s.baseline: s.verdict for s in cell.speedups if s.system == "int8"}
    assert by_over == {"fp16": "slower", COMPILED: "slower", "fp32": "faster"}
    (reason,) = cell.slow_reasons
    assert "2" in reason
    assert measure(ONE, fp16=slow["fp16"]).configs[0].slow_reasons == []


def test_gemms_that_are_not_int8_are_warned_about():
    bad = lambda: missing_system("int8", "error", "x", expected_int8_gemms=2, not_int8=["/a/MatMul"])  # noqa: E731
    expected = ["1 x 128: 1 GEMM that should be in INT8 is not: /a/MatMul"]
    assert measure(ONE, int8=bad).warnings == expected


def test_clocks_that_nothing_reads_are_null_and_said():
    reason = "NVML does not start (NVML Shared Library Not Found)"
    blind = fake_device(lambda _: [fake_system("int8")], monitor=FakeMonitor(reason))
    found = measure(device=blind)
    assert row(found.configs[0], "int8").clock_mhz is None
    assert found.warnings == [f"clock, power and temperature were not read: {reason}"]


def test_every_finished_cell_is_saved():
    saved = []
    measure(save=lambda found: saved.append((found.complete, len(found.configs))))
    assert saved == [(False, 1), (True, 2), (True, 2)]


def test_a_device_error_ends_the_bench_and_keeps_what_was_saved():
    saved, lost = [], RuntimeError("CUDA error")
    broken = lambda: fake_system("int8", error=lost if saved else None)  # noqa: E731
    with pytest.raises(CheckFailed, match="int8 failed"):
        measure(int8=broken, save=lambda found: saved.append(found.model_copy(deep=True)))
    assert [each.complete for each in saved] == [False]


@pytest.mark.parametrize(("device", "streams"), [("gpu", []), ("cpu", [1, 2])])
def test_dataset_are_a_cell_of_the_whole_split(device, streams):
    shapes = (32, 48), (32, 24), (32, 24), (8, 16)
    split = split_of(*shapes, tokens=2000, bucketed=True)
    changes = {"batches": [1], "dataset": "sst2", "splits": (split,), "device": device}
    work = Work(lambda _: [fake_system("int8", precision="int8")])
    found = measure(PLAN.model_copy(update=changes), device=work)
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
