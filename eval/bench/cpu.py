"""Systems of one config on a CPU: models with their threads pinned, and the proof of INT8."""

import contextlib
import io
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from qdqbench.eval.bench import measure, systems
from qdqbench.eval.bench.target import RANDOM_BATCH, RANDOM_SAMPLES, Target
from qdqbench.quantize.engine import cpu_runtimes
from qdqbench.quantize.engine.results import EngineResult
from qdqbench.quantize.engine.sidecar import sidecar_path
from qdqbench.quantize.models.inputs import MASK
from qdqbench.quantize.pipeline import outcomes
from qdqbench.quantize.standalone.runtimes import load_openvino
from qdqbench.quantize.tasks.kinds.kind import join_outputs
from qdqbench.quantize.utils.arrays import Batch, Float32
from qdqbench.quantize.utils.limits import BackendName
from qdqbench.quantize.utils.system.cpu import find_cpu

Answer = Callable[[Batch], Float32]  # int64 [B, L] inputs to float32 [B, width] or [B, L, width]
NNCF_LONGEST = 128  # tokens of a random calibration sample
COMPILED = 3  # times, as one of six compilations of an engine was 8 % slower than the others


# answers for a number of streams, all threads together, that may be fewer; how; and what was built
CpuRuns = tuple[Callable[[int], Sequence[Answer]], str, EngineResult | None]


def prepare_on_cpu(here: systems.Preparation) -> list[measure.SystemRun]:
    import torch

    here.stack.callback(torch.set_num_threads, torch.get_num_threads())
    pool = ThreadPoolExecutor(max((1, *here.options.streams)))
    here.stack.callback(pool.shutdown)
    timer, split = measure.WallTimer(pool=pool), here.config.split
    sets = [here.batches] if split else [[batch] for batch in here.batches]

    def prepare(system: systems.System, run: measure.SystemRun) -> None:
        answers, run.row.detail, built = RUNS[system.kind](here, system)

        def compiled(streams: int) -> list[measure.HostLane]:
            lanes = [measure.HostLane(answer, sets) for answer in answers(streams)]
            lanes[0].launch()  # what compiles when it first runs fails here, as a gap and not in a round
            return lanes

        lanes = {count: compiled(count) for count in dict.fromkeys((1, *here.options.streams))}
        run.lanes = lanes[1]
        run.shared = {count: each for count, each in lanes.items() if count > 1 and len(each) == count}
        run.again = [compiled(1) for _ in range(0 if here.options.quick else COMPILED - 1)]
        if built:
            run.row.int8_gemms, run.row.expected_int8_gemms = built.int8_gemms, built.expected_int8_gemms
            run.row.not_int8, run.row.engine_bytes = built.not_int8, built.bytes
            run.layers = built.layers

    return systems.prepare_each(here, timer, prepare)


def _int8_runs(here: systems.Preparation, system: systems.System) -> CpuRuns:
    target, config = here.target.extra.get(system.recipe, here.target), here.config
    session, backend = target.session, cast("BackendName", system.library)
    if here.options.quick:
        built: Any = outcomes.read_built(session.folder)
        assert isinstance(built, EngineResult)  # else there is no quick bench
        compute, path = session.target.compute, outcomes.engine_file(session.folder, built)
        origin = "engine of the run, "
    else:
        graph = target.int8_graph(backend)
        shape, origin = config.split.task if config.split else f"s{config.length}", ""
        path = session.folder / "bench" / f"int8.{backend}.b{config.batch}.{shape}.engine"
        if not here.options.keep_engines:
            for file in (path, sidecar_path(path), path.with_suffix(".layers.json")):
                here.stack.callback(file.unlink, missing_ok=True)
        compute = cpu_runtimes.choose_compute(backend, find_cpu(), session.recipe.precision.compute)
        profiles = systems.profiles_of(target, here.options.engine_shapes, config)
        built = measure.build_planned(graph, session.plan, path, backend, profiles, compute)
    lanes = _compiled_lanes(here, backend, path.read_bytes(), compute, blob=True)
    return lanes, f"{origin}{compute.upper()} where not INT8", built


def _export_runs(here: systems.Preparation, system: systems.System) -> CpuRuns:
    backend, compute = cast("BackendName", system.library), cast("cpu_runtimes.Compute", system.precision)
    data = here.target.graphs["fp32"].read_bytes()
    lanes = _compiled_lanes(here, backend, data, compute)
    return lanes, f"FP32 export, {compute.upper()} compute", None


def _dynamic_runs(here: systems.Preparation, _: systems.System) -> CpuRuns:
    model = here.shared("dynamic", lambda: quantize_dynamically(here.target))
    lanes = _compiled_lanes(here, "onnxruntime", model, "fp32")
    return lanes, "onnxruntime.quantization.quantize_dynamic, QInt8 weights per channel", None


def _nncf_runs(here: systems.Preparation, _: systems.System) -> CpuRuns:
    model = here.shared("nncf", lambda: quantize_with_nncf(here.target))
    compute: cpu_runtimes.Compute = "bf16" if find_cpu().bf16 else "fp32"
    lanes = _compiled_lanes(here, "openvino", model, compute)
    return lanes, f"nncf.quantize, transformer, mixed preset; {compute.upper()} where not INT8", None


def quantize_dynamically(target: Target) -> bytes:
    """Return the FP32 export in ONNX Runtime's dynamic INT8, with weights per channel."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with tempfile.TemporaryDirectory(prefix="qdqbench-dynamic-") as folder, _silent():
        path = Path(folder) / "model.onnx"
        quantize_dynamic(target.graphs["fp32"], path, weight_type=QuantType.QInt8, per_channel=True)
        return path.read_bytes()


def quantize_with_nncf(target: Target) -> Any:
    """Return the FP32 export as NNCF quantizes it for OpenVINO, on the run's calibration samples."""
    import nncf

    rows = list(_calibration_rows(target))
    model = load_openvino().Core().read_model(target.graphs["fp32"].read_bytes())
    with _silent():
        return nncf.quantize(
            model,
            nncf.Dataset(rows),
            model_type=nncf.ModelType.TRANSFORMER,
            preset=nncf.QuantizationPreset.MIXED,
            subset_size=len(rows),
        )


def _calibration_rows(target: Target) -> Iterator[Batch]:
    """Yield the run's calibration samples without padding; random token ids for a model without data."""
    session = target.session
    if target.about.kind == "run":
        batches: Any = session.calibration_batches()
    else:
        length = min(NNCF_LONGEST, session.recipe.export.max_length)
        batches = measure.session_sets(session, RANDOM_BATCH, length, RANDOM_SAMPLES // RANDOM_BATCH)
    for batch in batches:
        for row, length in enumerate(batch[MASK].sum(axis=1)):
            yield {name: batch[name][row : row + 1, :length] for name in target.family.inputs}


def _torch_runs(here: systems.Preparation, system: systems.System) -> CpuRuns:
    import torch

    forward, names = here.forward(system), here.target.family.inputs

    def run(batch: Batch, threads: int) -> Float32:
        if torch.get_num_threads() != threads:  # each thread has a number of its own
            torch.set_num_threads(threads)
        with torch.inference_mode():
            answers = forward(**{name: torch.from_numpy(batch[name]) for name in names})
        return cast("Float32", answers.float().numpy())

    def lanes(streams: int) -> Sequence[Answer]:
        count = 1 if system.mode else streams  # Inductor's loops have their number of threads compiled in
        return [partial(run, threads=max(1, (here.options.threads or 1) // count))] * count

    shapes = ", dynamic shapes" if here.config.split else ""
    how = f"torch.compile{shapes}" if system.mode else "eager"
    return lanes, f"{how}, SDPA, with the mask", None


RUNS: dict[str, Callable[[systems.Preparation, systems.System], CpuRuns]] = {
    "int8": _int8_runs,
    "export": _export_runs,
    "dynamic": _dynamic_runs,
    "nncf": _nncf_runs,
    "torch": _torch_runs,
    "compile": _torch_runs,
}


def _compiled_lanes(
    here: systems.Preparation,
    backend: BackendName,
    model: Any,
    compute: cpu_runtimes.Compute,
    *,
    blob: bool = False,
) -> Callable[[int], Sequence[Answer]]:
    outputs, threads = list(here.target.session.config.task.kind.outputs), here.options.threads or 1

    def answer(run: cpu_runtimes.Run, batch: Batch) -> Float32:
        return np.asarray(join_outputs(run(batch), outputs), dtype=np.float32)

    def lanes(streams: int) -> Sequence[Answer]:
        how: Any = {"blob": blob, "compute": compute, "threads": threads, "streams": streams}
        return [partial(answer, run) for run in cpu_runtimes.compile_model(backend, model, **how).lanes]

    return lanes


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Drop bars, advice and log lines of a library that has no switch for all of them."""
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)
