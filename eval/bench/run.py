"""One bench from target to `Bench`: config by config, saved after each, so that an interruption loses one."""

import gc
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pynvml

from qdqbench.eval.bench.cpu import prepare_on_cpu
from qdqbench.eval.bench.gpu import background, prebuild, prepare_on_gpu, require_kernels
from qdqbench.eval.bench.measure import (
    LEAST_FOR_P99,
    Burst,
    Effort,
    SystemRun,
    check_outputs,
    gpu_uuid,
    measure_rounds,
)
from qdqbench.eval.bench.results import (
    Bench,
    BenchConfig,
    BenchCpu,
    BenchRow,
    BenchSettings,
    BenchThroughput,
    compute_speedups,
    config_label,
    headline_of,
    speedup_of,
)
from qdqbench.eval.bench.systems import BenchPlan, Preparation, Work, configs_of, describe_systems
from qdqbench.eval.bench.target import Target, softmax_notes
from qdqbench.quantize.engine.backend import choose_backend, gpu_backend
from qdqbench.quantize.engine.hazards import find_hazards
from qdqbench.quantize.lint.inspection import explain_slowdown
from qdqbench.quantize.lint.machines import describe_gain, find_machine
from qdqbench.quantize.report.coverage import uncovered
from qdqbench.quantize.utils.errors import CheckFailed, MissingDevice
from qdqbench.quantize.utils.progress import report_phase, reporter
from qdqbench.quantize.utils.system.cpu import CpuUse, cpu_hazards, find_cpu
from qdqbench.quantize.utils.system.environment import describe_environment, now
from qdqbench.quantize.utils.system.gpu import find_gpu

CLOCK_INTERVAL_S = 0.1
BUSY = 0.5  # load average of a machine on which something else runs
CPU_LEAST = 2  # launches per round; one may take seconds
# threads of PyTorch's OpenMP spin for 10 ms after their work (measured), of others not at all
CPU_REST_S = 0.02
# whose logits are trusted, best first
REFERENCES = ("torch-fp32", "fp32", "fp16", "fp32-onnxruntime", "fp32-openvino")
CLOCKS: dict[str, Callable[[Any], float]] = {  # fields of a row, by what NVML answers of a GPU
    "clock_mhz": lambda gpu: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM),
    "power_w": lambda gpu: pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
    "temperature_c": lambda gpu: pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU),
}


class GpuMonitor:
    """A thread that reads the GPU while the context is open; `reason` says why nothing was read.

    A reading takes 0.07 ms: on an H100 a CUDA graph of 0.27 ms ran as long with it as without. NVML does not
    heed CUDA_VISIBLE_DEVICES; without a UUID its first GPU is read.
    """

    def __init__(self, gpu_uuid: str | None) -> None:
        self.samples: list[tuple[float, dict[str, float]]] = []  # time.monotonic(), fields of a row
        self.reason: str | None = None
        self._uuid, self._ended = gpu_uuid, threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "GpuMonitor":
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self.reason = f"NVML does not start ({error})"
            return self
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is None:
            return
        self._ended.set()
        self._thread.join()
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
        if self.samples:
            self.reason = None

    def during(self, windows: Sequence[tuple[float, float]]) -> dict[str, float]:
        inside = [
            reading
            for when, reading in list(self.samples)
            if any(start <= when <= end for start, end in windows)
        ]
        columns = {name: [reading[name] for reading in inside if name in reading] for name in CLOCKS}
        return {name: float(statistics.median(values)) for name, values in columns.items() if values}

    def _read(self) -> None:
        self.reason, uuid = "NVML gave no reading", self._uuid
        try:
            gpu = pynvml.nvmlDeviceGetHandleByUUID(uuid) if uuid else pynvml.nvmlDeviceGetHandleByIndex(0)
        except pynvml.NVMLError as error:
            self.reason = f"NVML gave no reading: {error}"
            return
        while not self._ended.is_set():
            when, reading = time.monotonic(), dict[str, float]()
            for name, ask in CLOCKS.items():
                try:
                    reading[name] = float(ask(gpu))
                except pynvml.NVMLError as error:  # this GPU does not tell
                    self.reason = f"NVML gave no reading: {error}"
            if reading:
                self.samples.append((when, reading))
            self._ended.wait(CLOCK_INTERVAL_S)


def cpu_now() -> BenchCpu:
    cpu, load = find_cpu(), load_average()
    features = list(cpu.features)
    return BenchCpu(name=cpu.name, cores=cpu.cores, features=features, load_before=load, load_after=load)


def load_average() -> float | None:
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def busy_notes() -> list[str]:
    if (load := load_average() or 0.0) < BUSY:
        return []
    return [
        f"load average {load:g} before it began: something else ran here, and wall times include it; "
        "CPU times with --threads 1 are steadier, because no thread waits for another"
    ]


def require_gpu(backend: Any) -> tuple[str, str]:
    """Return name and version of the TensorRT to measure; MissingDevice lists all that is missing.

    With a recipe of backend cuda TensorRT may be missing: its version is empty then.
    """
    import torch

    missing, name, version = [], gpu_backend() if backend == "cuda" else backend, ""
    if find_gpu() is None:
        missing.append("CUDA shows no NVIDIA GPU here")
    if not torch.cuda.is_available():
        missing.append(f"torch {torch.__version__} sees no CUDA device")
    try:
        if backend == "cuda":
            require_kernels()
    except MissingDevice as error:
        missing.append(str(error))
    try:
        chosen = choose_backend(name)
        name, version = chosen.name, chosen.version
    except MissingDevice as error:
        missing += [str(error)] if backend != "cuda" else []
    if missing:
        raise MissingDevice(
            f"bench needs a GPU that runs engines: {'; '.join(missing)}; or measure what runs on the CPU "
            "with --cpu"
        )
    return name, version


def open_work(backend: tuple[str, str] | None, stack: ExitStack) -> Work:
    """Return the GPU with this TensorRT, until the stack closes; None: the CPU."""
    if backend is None:
        return Work(prepare_on_cpu)
    processes = stack.enter_context(background(os.cpu_count() or 1))
    return Work(prepare_on_gpu, backend, find_gpu(), GpuMonitor(gpu_uuid()), processes)


def run_bench(  # noqa: PLR0913
    target: Target,
    options: BenchPlan,
    work: Work,
    *,
    command: str,
    save: Callable[[Bench], None] = lambda bench: None,
    earlier: Sequence[Bench] = (),
) -> Bench:
    """Measure every config; `save` gets what is known after each."""
    on_cpu, clock, monitor = options.device == "cpu", time.monotonic(), work.monitor
    settings = BenchSettings(**options.model_dump(include={*BenchSettings.model_fields}))
    if options.batches and not options.build_only:
        split = target.session.recipe.calibration.split
        settings.inputs = f"texts of split {split}" if target.texts else "random token ids"
    result = Bench(
        created=now(),
        command=command,
        complete=False,
        device=options.device,
        compute_capability=work.gpu.compute_capability if work.gpu else None,
        cpu=cpu_now() if on_cpu else None,
        target=target.about,
        recipe=target.session.recipe.model_dump(mode="json"),
        settings=settings,
        systems=describe_systems(target, options, " ".join(work.backend)),
        configs=[],
        notes=_notes(target, options, work),
        warnings=[],
        errors=[],
        environment=describe_environment(),
        earlier=[*earlier],
    )
    if not options.keep_engines:
        target.stack.callback(target.drop_forms)
    with monitor or nullcontext(), target.stack:
        if work.background is not None:
            prebuild(work, target, options)
        result.prepare_s = round(time.monotonic() - clock, 1)
        configs = () if options.build_only else configs_of(options)
        for number, config in enumerate(configs, start=1):
            here = Preparation(target, options, config, work, ExitStack())
            label = f"{config.batch} x {'data set' if config.split else config.length}"
            reporter().begin(label, number - 1, len(configs))
            with here.stack as stack:
                stack.callback(gc.collect)
                row = _measure_config(result, here, label)
                gc.collect()  # lanes go before the engines that the stack closes
            result.configs.append(row)
            _record_problems(result, row)
            if result.cpu:
                result.cpu.load_after = load_average()
            result.complete = number == len(configs)  # what follows frees the engines, for seconds
            save(result)
    if monitor and monitor.reason:
        result.warnings.append(f"clock, power and temperature were not read: {monitor.reason}")
    result.created = now()
    if result.complete:
        save(result)
    return result


def _measure_config(result: Bench, here: Preparation, label: str) -> BenchConfig:
    """Prepare, verify, measure, verify again."""
    options, config, split, monitor = here.options, here.config, here.config.split, here.work.monitor
    on_cpu, clock = options.device == "cpu", time.monotonic()
    streams = () if split and not on_cpu else tuple(options.streams)
    least, rest_s = (1 if split else CPU_LEAST, CPU_REST_S) if on_cpu else (Effort.least, 0.0)
    effort = Effort(options.rounds, options.duration_s, options.iterations, streams, least, rest_s)
    if options.quick and on_cpu:
        effort = replace(effort, least=1, warm=1)
    runs = here.work.prepare(here)
    report_phase("verifying outputs")
    reference = _check(runs)
    before = CpuUse.read()
    measured = measure_rounds([run for run in runs if run.lanes], effort)
    others = CpuUse.read().others_since(before) if on_cpu else None
    _check(runs)  # several streams or a graph may have spoilt what was right before
    _read_kernels(result, runs, label)
    for row, bursts in ((run.row, measured[run.name]) for run in runs if run.lanes):
        fill_row(row, bursts, config.sequences, effort.streams)
        if on_cpu:
            row.round_cpu_ms = [burst.cpu_ms for burst in bursts]
            row.cpu_ms = float(np.median(row.round_cpu_ms))
        windows = [(burst.start, burst.end) for burst in bursts]
        for name, value in (monitor.during(windows) if monitor else {}).items():
            setattr(row, name, value)
    tokens = config.batch * (config.length or 0)
    found = BenchConfig(
        kind="dataset" if split else "fixed",
        batch=config.batch,
        length=config.length,
        sequences=config.sequences,
        shapes=len(config.shapes),
        padded_to=sorted({length for _, length in config.shapes}) if split else [],
        real_tokens=split.real_tokens if split else tokens,
        padded_tokens=split.padded_tokens if split else tokens,
        reference=reference,
        rows=[run.row for run in runs],
        speedups=[],
        elapsed_s=round(time.monotonic() - clock, 1),
        other_cores=others,
    )
    where = config_label(found, result.settings.dataset)
    found.speedups = compute_speedups(found.rows, where, options.seed, others)
    found.headline = headline_of(result.systems, found)
    found.slow_reasons = _slow_reasons(found, runs)
    return found


def fill_row(row: BenchRow, bursts: Sequence[Burst], sequences: int, streams: Sequence[int]) -> None:
    latencies = [value for burst in bursts for value in burst.latencies_ms]
    row.launches, row.round_ms = len(latencies), [burst.median_ms for burst in bursts]
    row.median_ms = float(np.median(row.round_ms))  # one disturbed round moves nothing
    row.p50_ms, row.p90_ms, p99_ms = (float(np.percentile(latencies, at)) for at in (50, 90, 99))
    row.p99_ms = p99_ms if row.launches >= LEAST_FOR_P99 else None
    row.sequences_per_s = 1000 * sequences / row.median_ms
    for count in streams:
        rates = [burst.launches_per_s[count] * sequences for burst in bursts if count in burst.launches_per_s]
        if rates:
            median, low, high = float(np.median(rates)), min(rates), max(rates)
            row.throughput.append(BenchThroughput(streams=count, sequences_per_s=median, low=low, high=high))


def _check(runs: Sequence[SystemRun]) -> str | None:
    errors, differences, reference = check_outputs([run for run in runs if run.lanes], REFERENCES)
    for run in runs:
        run.row.rel_error = differences.get(run.name, run.row.rel_error)
        if run.name in errors:
            run.fail(errors[run.name])
    return reference


def _read_kernels(result: Bench, runs: Sequence[SystemRun], where: str) -> None:
    """Read the kernels of every baseline, once all are measured: a profiler disturbs."""
    for run in runs:
        try:
            run.row.kernels = run.kernels() if run.kernels else None
        except (CheckFailed, RuntimeError) as error:
            why = " ".join(f"{error}".split())[:300]
            result.warnings.append(f"{where}: kernels of {run.name} were not read: {why}")


def _slow_reasons(config: BenchConfig, runs: Sequence[SystemRun]) -> list[str]:
    ratio = speedup_of(config, "int8", "fp16")
    layers = {run.name: run.layers for run in runs}
    int8, fp16 = layers.get("int8"), layers.get("fp16")
    slower = ratio is not None and ratio.leading.verdict == "slower"
    return list(explain_slowdown(int8, fp16)) if slower and int8 and fp16 else []


def _record_problems(result: Bench, config: BenchConfig) -> None:
    systems = {system.name: system for system in result.systems}
    where = config_label(config, result.settings.dataset)
    known = {(row.system, row.reason) for before in result.configs[:-1] for row in before.rows}
    for row in config.rows:
        system = systems[row.system]
        line = f"{where}: {system.label}: {row.reason}"
        if row.status == "error":
            result.errors.append(line)
        elif row.status == "skipped" and (row.system, row.reason) not in known:
            result.warnings.append(f"{line} (not measured)")
        doubts = [] if row.in_best_form else ["no fused attention kernel ran"]
        doubts += [f"{count} GEMMs in FP32"] if (count := row.fp32_gemms(system.precision)) else []
        if doubts:
            result.warnings.append(f"{where}: {system.label} is not in its best form: {', '.join(doubts)}")
        if row.not_int8:
            result.warnings.append(f"{where}: {uncovered(len(row.not_int8))}: {', '.join(row.not_int8)}")


def _notes(target: Target, options: BenchPlan, work: Work) -> list[str]:
    notes = [*target.notes, *softmax_notes(target, options.lengths)]
    if target.about.random_weights:
        notes.append("random weights: latency is that of the shape, accuracy means nothing")
    if options.device == "gpu":
        gpu, cpu = work.gpu, find_cpu()
        row = find_machine(gpu, cpu)
        notes += [describe_gain(gpu, cpu)] if row and row.peaks else []
        capability = gpu.compute_capability if gpu else None
        return notes + (find_hazards(*work.backend, capability) if work.backend[1] else [])
    on_cpu = "measured on a CPU: says nothing about a GPU"
    busy = [] if options.quick else busy_notes()  # after the stages of a run any CPU was busy
    return [*notes, *cpu_hazards(find_cpu()), on_cpu, *busy]
