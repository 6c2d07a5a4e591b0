"""One bench from target to `Bench`: cell by cell, saved after each, so that an interruption loses one."""

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import numpy as np

from qdqbench.eval.bench import loop
from qdqbench.eval.bench.cell import (
    INPUT_SETS,
    REFERENCES,
    BenchOptions,
    CellShape,
    Entry,
    Makers,
    shapes,
)
from qdqbench.eval.bench.clocks import Clocks, GpuMonitor, busy_notes, cpu_now, gpu_uuid, load_average
from qdqbench.eval.bench.loop import Effort, Measured
from qdqbench.eval.bench.results import (
    Bench,
    BenchCell,
    BenchRow,
    BenchSettings,
    BenchThroughput,
    cell_label,
    headline_of,
    peer_doubt,
    speedup_of,
    speedups,
)
from qdqbench.eval.bench.target import Target, softmax_notes
from qdqbench.quantize.core.errors import CheckFailed, MissingDevice
from qdqbench.quantize.engine.backend import choose_backend
from qdqbench.quantize.engine.hazards import hazards
from qdqbench.quantize.engine.inspection import slow_reasons
from qdqbench.quantize.machine.cpu import cpu_hazards, find_cpu
from qdqbench.quantize.machine.environment import environment, now
from qdqbench.quantize.machine.gpu import find_gpu

CPU_LEAST = 2  # launches per round; one may take seconds
CPU_REST_S = (
    0.02  # threads of PyTorch's OpenMP spin for 10 ms after their work (measured), of others not at all
)


def require_gpu(backend: Any) -> tuple[str, str]:
    """Backend and version of the engines to measure.

    Raises:
        MissingDevice: lists everything that is missing.
    """
    import torch

    missing, chosen = [], None
    if find_gpu() is None:
        missing.append("CUDA shows no NVIDIA GPU here")
    if not torch.cuda.is_available():
        missing.append(f"torch {torch.__version__} sees no CUDA device")
    try:
        chosen = choose_backend(backend)
    except MissingDevice as error:
        missing.append(str(error))
    if missing or chosen is None:
        raise MissingDevice(
            f"bench needs a GPU that runs engines: {'; '.join(missing)}; or measure what runs on the CPU "
            "with --cpu"
        )
    return chosen.name, chosen.version


def run_bench(  # noqa: PLR0913
    target: Target,
    options: BenchOptions,
    makers: Makers,
    *,
    command: str,
    backend: tuple[str, str] = ("", ""),
    save: Callable[[Bench], None] = lambda bench: None,
    announce: Callable[[str], None] = lambda text: None,
) -> Bench:
    """Measure every cell.

    Args:
        makers: of the contestants, on the device of the options.
        backend: on a GPU the builder of engines and its version.
        save: called after each cell with what is known so far.
        announce: called with what is being done.

    Raises:
        MissingDevice: the GPU or a runtime is not there; names all that is missing.
        CheckFailed: a contestant fails while it is measured; finished cells were saved.
    """
    gpu, clock = None if options.cpu else find_gpu(), time.monotonic()
    result = Bench(
        created=now(),
        command=command,
        complete=False,
        device="cpu" if options.cpu else "gpu",
        compute_capability=gpu.compute_capability if gpu else None,
        cpu=cpu_now() if options.cpu else None,
        target=target.about,
        recipe=target.session.recipe.model_dump(mode="json"),
        settings=_settings(options),
        contestants=makers.contestants(target, options),
        cells=[],
        notes=_notes(target, options, backend, gpu.compute_capability if gpu else None),
        warnings=[],
        errors=[],
        environment=environment(),
    )
    monitor = None if options.cpu else GpuMonitor(gpu_uuid())
    with monitor or nullcontext(), target.stack:
        makers.ahead(target, options, announce)
        result.ahead_s = round(time.monotonic() - clock, 1)
        for shape in shapes(options) if options.measured else ():
            _measure_cell(result, target, options, shape, makers, monitor, announce)
            if result.cpu:
                result.cpu.load_after = load_average()
            save(result)
    if monitor is not None and monitor.reason:
        result.warnings.append(f"clock, power and temperature were not read: {monitor.reason}")
    result.complete, result.created = options.measured, now()
    if options.measured:
        save(result)
    return result


def _measure_cell(  # noqa: PLR0913, PLR0917
    result: Bench,
    target: Target,
    options: BenchOptions,
    shape: CellShape,
    makers: Makers,
    monitor: GpuMonitor | None,
    announce: Callable[[str], None],
) -> None:
    """Prepare, verify, measure, verify again; adds the cell and what is wrong with it to the result."""
    effort = Effort(
        rounds=options.rounds,
        seconds=options.seconds,
        repeats=options.repeats,
        streams=() if shape.real else options.streams,
        least=(1 if shape.real else CPU_LEAST) if options.cpu else Effort.least,
        rest_s=CPU_REST_S if options.cpu else 0,
    )
    label = f"b{shape.batch} {'real lengths' if shape.real else f's{shape.length}'}"
    clock = time.monotonic()
    with ExitStack() as stack:
        stack.callback(gc.collect)
        announce(f"{label}: making contestants")
        entries = makers.prepare(target, options, shape, result.contestants, stack)
        announce(f"{label}: verifying outputs")
        reference = _judge(entries)
        ready = [entry.contestant for entry in entries if entry.contestant is not None]
        measured = loop.measure(
            ready, effort, progress=lambda done, total: announce(f"{label}: round {done} of {total}")
        )
        _judge(entries)  # several streams or a graph may have spoilt what was right before
        _read_kernels(result, entries, label)
        for entry in entries:
            if entry.row.status == "done":
                found = measured[entry.row.contestant]
                windows = [(burst.start, burst.end) for burst in found.bursts]
                clocks = monitor.during(windows) if monitor else Clocks()
                fill(entry.row, found, shape.sequences, effort.streams, clocks)
                entry.row.cpu_ms = float(np.median(found.cpu_ms)) if options.cpu else None
        cell = BenchCell(
            kind="real" if shape.real else "fixed",
            batch=shape.batch,
            length=shape.length,
            sequences=shape.sequences,
            shapes=len(shape.bound),
            padded_to=sorted({length for _, length in shape.bound}) if shape.real else [],
            real_tokens=shape.real.real_tokens if shape.real else shape.batch * (shape.length or 0),
            padded_tokens=shape.real.padded_tokens if shape.real else shape.batch * (shape.length or 0),
            reference=reference,
            rows=[entry.row for entry in entries],
            speedups=[],
            spent_s=round(time.monotonic() - clock, 1),
        )
        config = cell_label(cell, result.settings.real_lengths)
        cell.speedups = speedups(cell.rows, config, options.seed)
        cell.headline = headline_of(result.contestants, cell)
        cell.slow_reasons = _slow_reasons(cell, entries)
        for entry in entries:
            entry.contestant = entry.kernels = None  # lanes go before the engines that the stack closes
        ready.clear()
        measured.clear()
        gc.collect()
    result.cells.append(cell)
    _record_problems(result, cell)


def fill(row: BenchRow, found: Measured, sequences: int, streams: Sequence[int], clocks: Clocks) -> None:
    """Write a contestant's numbers into its row."""
    row.launches = len(found.launches)
    row.round_ms = found.round_ms
    row.median_ms = found.median_ms
    row.p50_ms, row.p90_ms = found.percentile(50), found.percentile(90)
    row.p99_ms = found.percentile(99) if row.launches >= loop.LEAST_FOR_P99 else None
    row.sequences_per_s = 1000 * sequences / found.median_ms
    measured = {count: found.throughput(count) for count in streams}
    rates = {count: [sequences * rate for rate in each] for count, each in measured.items() if each}
    row.throughput = [
        BenchThroughput(streams=count, sequences_per_s=float(np.median(each)), low=min(each), high=max(each))
        for count, each in rates.items()
    ]
    row.clock_mhz, row.power_w, row.temperature_c = clocks.clock_mhz, clocks.power_w, clocks.temperature_c


def _judge(entries: Sequence[Entry]) -> str | None:
    """Turn entries with unsound outputs into errors; returns the reference's name."""
    ready = [entry.contestant for entry in entries if entry.contestant is not None]
    errors, differences, reference = loop.judge_outputs(ready, REFERENCES)
    for entry in entries:
        name = entry.row.contestant
        if name in differences:
            entry.row.rel_error = differences[name]
        if name in errors:
            entry.row = BenchRow(
                contestant=name, status="error", reason=errors[name], detail=entry.row.detail
            )
            entry.contestant = None
    return reference


def _read_kernels(result: Bench, entries: Sequence[Entry], where: str) -> None:
    """Kernels of every peer, once all are measured: a profiler disturbs."""
    for entry in entries:
        if entry.kernels is None or entry.row.status != "done":
            continue
        try:
            entry.row.kernels = entry.kernels()
        except (CheckFailed, RuntimeError) as error:
            why = " ".join(f"{error}".split())[:300]
            result.warnings.append(f"{where}: kernels of {entry.row.contestant} were not read: {why}")


def _slow_reasons(cell: BenchCell, entries: Sequence[Entry]) -> list[str]:
    """Return why INT8 is slower than its FP16 twin; empty where it is not."""
    ratio = speedup_of(cell, "int8", "fp16")
    layers = {entry.row.contestant: entry.layers for entry in entries}
    int8, fp16 = layers.get("int8"), layers.get("fp16")
    slower = ratio is not None and ratio.verdict == "slower"
    return list(slow_reasons(int8, fp16)) if slower and int8 and fp16 else []


def _record_problems(result: Bench, cell: BenchCell) -> None:
    """Errors and gaps in words."""
    labels = {row.name: row.label for row in result.contestants}
    precision = {row.name: row.precision for row in result.contestants}
    where = cell_label(cell, result.settings.real_lengths)
    said = {(labels[row.contestant], row.reason) for before in result.cells[:-1] for row in before.rows}
    for row in cell.rows:
        line = f"{where}: {labels[row.contestant]}: {row.reason}"
        if row.status == "error":
            result.errors.append(line)
        elif row.status == "skipped" and (labels[row.contestant], row.reason) not in said:
            result.warnings.append(f"{line} (not measured)")
        if doubt := peer_doubt(row, precision[row.contestant]):
            result.warnings.append(f"{where}: {labels[row.contestant]} is not in its best form: {doubt}")
        if row.not_int8:
            result.warnings.append(
                f"{where}: {len(row.not_int8)} of {row.expected_int8_gemms} GEMMs do not run in INT8: "
                f"{', '.join(row.not_int8)}"
            )


def _settings(options: BenchOptions) -> BenchSettings:
    same = {name: value for name, value in vars(options).items() if name in BenchSettings.model_fields}
    return BenchSettings.model_validate(
        same
        | {
            "threads": options.threads if options.cpu else None,
            "real_lengths": options.real[0].task if options.real else None,
            "input_sets": INPUT_SETS,
            "peers_masked": True,
        }
    )


def _notes(
    target: Target, options: BenchOptions, backend: tuple[str, str], capability: str | None
) -> list[str]:
    notes = softmax_notes(target, options.lengths)
    if target.about.random_weights:
        notes.append("random weights: latency is that of the shape, accuracy means nothing")
    if options.cpu:
        return [
            *notes,
            *cpu_hazards(find_cpu()),
            "measured on a CPU: says nothing about a GPU",
            *busy_notes(),
        ]
    return notes + hazards(*backend, capability)
