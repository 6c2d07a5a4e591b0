"""How each contestant is made: what it runs, with how many threads, and what proves its INT8.

All twins and peers but PyTorch's start from one FP32 export. All take any shape, as engines do on a CPU.
"""

import contextlib
import io
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qdqbench.eval.bench import peers
from qdqbench.eval.bench.cell import BenchOptions, CellShape, profiles_of
from qdqbench.eval.bench.lanes import session_sets
from qdqbench.eval.bench.random_model import RANDOM_BATCH, RANDOM_SAMPLES
from qdqbench.eval.bench.target import Target
from qdqbench.quantize.core.arrays import Batch, Float32
from qdqbench.quantize.core.limits import CPU_BACKENDS, BackendName
from qdqbench.quantize.cpu import openvino
from qdqbench.quantize.cpu.compiled import Compute, Run
from qdqbench.quantize.cpu.runtimes import compiled, compute_type
from qdqbench.quantize.encoders.inputs import MASK
from qdqbench.quantize.engine.build import attention_count, build, gemm_names
from qdqbench.quantize.engine.sidecar import sidecar_path
from qdqbench.quantize.graph.export import ExportSettings, trace, write_graph
from qdqbench.quantize.graph.index import module_of
from qdqbench.quantize.kinds.kind import joined
from qdqbench.quantize.machine.cpu import find_cpu
from qdqbench.quantize.rundir.artifacts import expected_modules

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from qdqbench.quantize.core.results import EngineResult

Answer = Callable[[Batch], Float32]  # int64 [B, L] inputs to float32 [B, width] or [B, L, width]
NNCF_LONGEST = 128  # tokens of a random calibration sample


@dataclass
class Made:
    """A contestant that can run."""

    lanes: Callable[[int], Sequence[Answer]]  # for a number of streams, all threads together; may be fewer
    detail: str
    built: "EngineResult | None" = None


@dataclass
class Shared:
    """What all cells of a bench share."""

    graphs: dict[str, Path] = field(default_factory=dict)  # INT8, in the form of each backend
    models: dict[str, Any] = field(default_factory=dict)  # quantized by others


@dataclass(frozen=True)
class Work:
    """One cell to make contestants for."""

    target: Target
    options: BenchOptions
    shape: CellShape
    shared: Shared
    stack: ExitStack  # frees what the cell holds
    torch_models: "dict[str, PreTrainedModel]" = field(default_factory=dict)  # by precision

    @property
    def folder(self) -> Path:
        """For files of the bench."""
        return self.target.session.folder / "bench"


def engine(backend: BackendName, work: Work) -> Made:
    """INT8 engine of a runtime, from a graph in its own form; its kernels prove what runs in INT8."""
    session = work.target.session
    graph = _int8_graph(backend, work)
    path = work.folder / f"int8.{backend}.{work.shape.stem}.engine"
    if not work.options.keep_engines:
        layers = path.with_suffix(".layers.json")
        for file in (path, sidecar_path(path), layers):
            work.stack.callback(file.unlink, missing_ok=True)
    modules = expected_modules(session)
    gemms = [name for name in gemm_names(graph) if module_of(name) in modules]
    compute = compute_type(backend, find_cpu(), session.recipe.precision.compute)
    built = build(
        graph,
        path,
        backend=backend,
        profiles=profiles_of(work.target, work.options.profile, work.shape),
        expected_gemms=gemms,
        expected_attention=attention_count(gemms, session.plan.attention),
        layers_path=path.with_suffix(".layers.json"),
        compute=compute,
    )
    lanes = _compiled_lanes(work, backend, path.read_bytes(), compute, blob=True)
    return Made(lanes, f"{compute.upper()} where not INT8", built)


def twin(backend: BackendName, compute: Compute, work: Work) -> Made:
    """The FP32 export in a runtime, computed in FP32 or BF16."""
    data = work.target.twins["fp32"].read_bytes()
    return Made(_compiled_lanes(work, backend, data, compute), f"FP32 export, {compute.upper()} compute")


def dynamic(work: Work) -> Made:
    """The FP32 export after ONNX Runtime's dynamic quantization: INT8 weights, activations as they come."""
    if "dynamic" not in work.shared.models:
        from onnxruntime.quantization import QuantType, quantize_dynamic

        path = work.folder / "model.dynamic.onnx"
        path.parent.mkdir(exist_ok=True)
        work.stack.callback(path.unlink, missing_ok=True)
        with _silent():
            quantize_dynamic(work.target.twins["fp32"], path, weight_type=QuantType.QInt8, per_channel=True)
        work.shared.models["dynamic"] = path.read_bytes()
    lanes = _compiled_lanes(work, "onnxruntime", work.shared.models["dynamic"], "fp32")
    return Made(lanes, "onnxruntime.quantization.quantize_dynamic, QInt8 weights per channel")


def nncf(work: Work) -> Made:
    """The FP32 export after `nncf.quantize`, calibrated on the samples of the run one by one."""
    if "nncf" not in work.shared.models:
        import nncf as library

        rows = list(_calibration_rows(work.target))
        model = openvino.read_model(work.target.twins["fp32"].read_bytes())
        with _silent():
            work.shared.models["nncf"] = library.quantize(
                model,
                library.Dataset(rows),
                model_type=library.ModelType.TRANSFORMER,
                preset=library.QuantizationPreset.MIXED,
                subset_size=len(rows),
            )
    compute: Compute = "bf16" if find_cpu().bf16 else "fp32"
    lanes = _compiled_lanes(work, "openvino", work.shared.models["nncf"], compute)
    return Made(lanes, f"nncf.quantize, transformer, mixed preset; {compute.upper()} where not INT8")


def torch_eager(precision: peers.PeerPrecision, work: Work) -> Made:
    """The model as it is in PyTorch, SDPA attention."""
    forward = peers.eager_forward(_torch_model(precision, work))
    return Made(lambda streams: [_torch_lane(forward, work, streams)] * streams, "eager, SDPA, with the mask")


def torch_compiled(precision: peers.PeerPrecision, work: Work) -> Made:
    """The model through Inductor; its loops have their number of threads compiled in, so one stream only."""
    dynamic_shapes = work.shape.real is not None
    forward = peers.compiled_forward(_torch_model(precision, work), "default", dynamic=dynamic_shapes)
    shapes = ", dynamic shapes" if dynamic_shapes else ""
    return Made(
        lambda _: [_torch_lane(forward, work, 1)],
        f"torch.compile{shapes}, SDPA, with the mask",
    )


def _torch_model(precision: peers.PeerPrecision, work: Work) -> "PreTrainedModel":
    if precision not in work.torch_models:
        model = work.target.session.new_model()
        work.torch_models[precision] = peers.sdpa_model(model, precision, "cpu")
    return work.torch_models[precision]


def _torch_lane(forward: "Callable[..., Any]", work: Work, streams: int) -> Answer:
    import torch

    threads, names = max(1, work.options.threads // streams), work.target.family.inputs

    def run(batch: Batch) -> Float32:
        if torch.get_num_threads() != threads:  # each thread has a number of its own
            torch.set_num_threads(threads)
        with torch.inference_mode():
            made = forward(**{name: torch.from_numpy(batch[name]) for name in names})
        answers: Float32 = made.float().numpy()
        return answers

    return run


def _compiled_lanes(
    work: Work, backend: BackendName, model: Any, compute: Compute, *, blob: bool = False
) -> Callable[[int], Sequence[Answer]]:
    outputs = list(work.target.session.config.task.kind.outputs)

    def lanes(streams: int) -> Sequence[Answer]:
        made = compiled(
            backend, model, blob=blob, compute=compute, threads=work.options.threads, streams=streams
        )
        return [partial(_answers, run, outputs) for run in made.lanes()]

    return lanes


def _answers(run: Run, outputs: Sequence[str], batch: Batch) -> Float32:
    return np.asarray(joined(run(batch), outputs), dtype=np.float32)


def _int8_graph(backend: BackendName, work: Work) -> Path:
    """The INT8 graph in the form that a runtime wants; traced once for all runtimes."""
    session, graphs = work.target.session, work.shared.graphs
    if not graphs:
        recipe = session.recipe
        traced = trace(session.fake_quant_model, recipe.export.opset, session.config.task.kind.outputs)
        for name in CPU_BACKENDS:
            graphs[name] = path = work.folder / f"model.int8.{name}.onnx"
            path.parent.mkdir(exist_ok=True)
            write_graph(traced, session.plan, ExportSettings.of(recipe, name), path)
            if not work.options.keep_engines:
                work.target.stack.callback(path.unlink, missing_ok=True)
    return graphs[backend]


def _calibration_rows(target: Target) -> Iterator[Batch]:
    """The run's calibration samples one by one without padding; random token ids for a model without data."""
    session = target.session
    if target.about.kind == "run":
        batches: Any = session.calibration_batches()
    else:
        length = min(NNCF_LONGEST, session.recipe.export.max_length)
        batches = session_sets(session, RANDOM_BATCH, length, RANDOM_SAMPLES // RANDOM_BATCH)
    for batch in batches:
        for row, length in enumerate(batch[MASK].sum(axis=1)):
            yield {name: batch[name][row : row + 1, :length] for name in target.family.inputs}


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """No bars, advice or log lines of a library that has no switch for all of them."""
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)
