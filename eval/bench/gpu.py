"""Systems of one config on a GPU: engines and PyTorch, bound to its shapes and ready to be measured.

Kernels are chosen for each profile by itself, so an engine of one profile runs what an engine of several runs
in that profile. These engines are built in processes at the same time, and models are compiled there.

    python -m qdqbench.eval.bench.gpu compile RUN MODE SHAPES
    python -m qdqbench.eval.bench.gpu engine SPEC
    python -m qdqbench.eval.bench.gpu export FOLDER MODEL RECIPE SEED LONGEST

Each prints a line of JSON, {"error": ""}.
"""

import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any, cast

import numpy as np

from qdqbench.eval.bench import measure, peers, systems
from qdqbench.eval.bench.results import BenchKernels, Shape
from qdqbench.eval.bench.target import Target, model_target, recipe_for
from qdqbench.quantize.engine.backend import gpu_backend
from qdqbench.quantize.engine.build import build
from qdqbench.quantize.engine.cpu_runtimes import Compute
from qdqbench.quantize.engine.cuda.compile import load_nvrtc
from qdqbench.quantize.engine.cuda.model import load_kernels, tiles_path
from qdqbench.quantize.engine.cuda.names import explain_misfit, find_target
from qdqbench.quantize.engine.cuda.runtime import PACKED, CudaEngine, choose_graph, fill
from qdqbench.quantize.engine.cuda.tokens import MOST_TOKENS, Tokens, count_positions
from qdqbench.quantize.engine.profiles import Profile, choose_profile
from qdqbench.quantize.engine.results import EngineResult
from qdqbench.quantize.engine.runtime.engine import Engine
from qdqbench.quantize.engine.sidecar import check_sidecar, sidecar_path
from qdqbench.quantize.models.families.known import family_named
from qdqbench.quantize.pipeline.session import Session, read_config
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.arrays import Int32, Int64
from qdqbench.quantize.utils.errors import CheckFailed, MissingDevice, QdqError, UserError
from qdqbench.quantize.utils.limits import BackendChoice, BackendName
from qdqbench.quantize.utils.progress import reporter
from qdqbench.quantize.utils.schema import Strict, read
from qdqbench.quantize.utils.system.gpu import find_gpu

COMMAND = (sys.executable, "-m", "qdqbench.eval.bench.gpu")
START_S = 60.0  # imports and the model
ANSWER = '{"error":'  # how the line that is for us begins
THREADS = 4  # compilers of a process that compiles
BUILD_S = 600.0  # of an engine with its kernels
SHAPES_AT_ONCE = 4  # of a split, that one process compiles
WAIT_S = 0.5
TRIED = 6  # launches of each size of packed tokens; the first one is not counted
LONGEST_NAME = 160  # templates of CUTLASS are named at length
# flash-attention, CUTLASS's memory-efficient one (fmha_cutlassF), cuDNN's (...sdpa_sm90_flash_fprop...), and
# Inductor's template of flex attention, and our own
ATTENTION = re.compile(r"flash_fwd|flash_fprop|fmha|sdpa|triton_tem\w*attention|^attention_\d", re.I)
# Inductor names pointwise kernels after the operators next to them, attention too
POINTWISE = re.compile(r"^triton_(poi|per|red|for)_")
GEMM = re.compile(r"gemm|nvjet|gemv", re.I)
HALF = re.compile(r"f16|h16|fp16|half|hgemm|hsh|hhh|tst|s16816|s161616|e4m3|int8", re.I)
ANY = Profile((1, 1), (1, 1), (1, 1))  # of kernels that take any shape


class Background:
    """Processes at work; one failing ends no other."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.failed: dict[str, str] = {}  # by task, why
        self._pool, self._lock, self._stopped = pool, threading.Lock(), False
        self._running: set[subprocess.Popen[str]] = set()
        self._waiting: dict[str, Future[None]] = {}

    def add(self, task: str, arguments: Sequence[str], seconds: float) -> None:
        """Start a task, once by its name; it may take `seconds` and the start of a process."""
        if task not in self._waiting:
            self._waiting[task] = self._pool.submit(self._run, task, arguments, seconds)

    def wait_for(self, task: str) -> None:
        self._waiting[task].result()

    @property
    def left(self) -> int:
        return sum(not task.done() for task in self._waiting.values())

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            for process in self._running:
                _kill_group(process)

    def _run(self, task: str, arguments: Sequence[str], seconds: float) -> None:
        with self._lock:
            if self._stopped:
                return
            process = subprocess.Popen(  # noqa: S603  (this module's own)
                [*COMMAND, *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
                env=os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": str(THREADS)},
            )
            self._running.add(process)
        with process:
            try:
                printed, _ = process.communicate(timeout=seconds + START_S)
            except subprocess.TimeoutExpired:
                self.failed[task] = f"it took over {seconds:g} s"
            else:
                if error := _answer(printed):
                    self.failed[task] = error
            finally:
                _kill_group(process)
        with self._lock:
            self._running.discard(process)


@contextmanager
def background(workers: int) -> Iterator[Background]:
    with ThreadPoolExecutor(workers) as pool:
        work = Background(pool)
        try:
            yield work
        finally:
            work.stop()
            pool.shutdown(wait=True, cancel_futures=True)


def _answer(printed: str) -> str:
    lines = [line for line in printed.splitlines() if line.strip()]
    if answers := [line for line in lines if line.startswith(ANSWER)]:
        return str(json.loads(answers[-1])["error"])
    return f"its process ended{f': {lines[-1].strip()[:200]}' if lines else ''}"


def _kill_group(process: "subprocess.Popen[str]") -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class EngineSpec(Strict):
    onnx: Path
    engine: Path
    backend: BackendChoice
    profile: Profile
    gemms: list[str]  # ONNX nodes that must run in INT8
    attention: int
    compute: Compute
    target: str | tuple[str, ...] | None = None  # GPUs that kernels of backend cuda are for
    shapes: list[Shape]  # that it will run

    @property
    def cache(self) -> Path:
        return self.engine.with_suffix(".cache")  # kernels compiled just in time

    @property
    def proof(self) -> Path:
        return self.engine.with_suffix(".proof.json")


def build_engine(spec: EngineSpec) -> EngineResult:
    with suppress(UserError):
        check_sidecar(spec.engine, spec.onnx)
        return read(spec.proof, EngineResult, "proof of an engine", "build it again")
    result = build(
        spec.onnx,
        spec.engine,
        backend=spec.backend,
        profiles=[spec.profile],
        expected_gemms=spec.gemms,
        expected_attention=spec.attention,
        layers_path=spec.engine.with_suffix(".layers.json"),
        compute=spec.compute,
        compute_capability=spec.target,
    )
    files.write_json(spec.proof, result.model_dump(mode="json"))
    return result


def marker(folder: Path, mode: str, shape: Shape) -> Path:
    return folder / f"{mode}.{shape[0]}x{shape[1]}.compiled"


def start_compiles(work: systems.Work, run: Path, options: systems.BenchPlan) -> None:
    """Start to compile for all shapes, the slowest mode first; of a split several in a process."""
    known = systems.systems_of(None, options).values() if work.background else ()
    modes = {system.mode for system in known if system.mode}
    for mode, config in product(sorted(modes, key=len, reverse=True), systems.configs_of(options)):
        size = SHAPES_AT_ONCE if config.split else 1
        left = [pair for pair in config.shapes if not marker(run / "bench", mode, pair).is_file()]
        for first in range(0, len(left), size):
            pairs = left[first : first + size]
            task, seconds = f"{mode} {pairs}", options.compile_seconds * len(pairs)
            work.compiles |= {(mode, pair): task for pair in pairs}
            work.background.add(task, ["compile", str(run), mode, json.dumps(pairs)], seconds)


def start_export(
    work: systems.Work, model: str, recipe: str, folder: Path, options: systems.BenchPlan
) -> Callable[[], None]:
    """Start to export a model by another recipe into a folder; returns a function that waits for it."""
    arguments = ["export", str(folder), model, recipe, str(options.seed), str(max(options.lengths))]
    work.background.add(f"export {folder}", arguments, BUILD_S)
    return partial(work.background.wait_for, f"export {folder}")


def prebuild(work: systems.Work, target: Target, options: systems.BenchPlan) -> None:
    """Build and compile in processes; waits for all of it. TensorRT times kernels: it builds alone, later."""
    target.stack.callback(work.models.clear)
    if options.splits:
        start_compiles(work, target.session.folder, options.model_copy(update={"lengths": []}))
    specs: dict[Path, EngineSpec] = {}
    engines = (system for system in systems.systems_of(target, options).values() if system.is_engine)
    for system, config in product(engines, systems.configs_of(options)):
        with suppress(QdqError):  # no profile takes it, or its backend is not here: the config says so
            for spec in specs_of(target, system, config).values():
                known = specs.setdefault(spec.engine, spec)
                known.shapes += [shape for shape in spec.shapes if shape not in known.shapes]
    if not options.keep_engines:
        target.stack.callback(_remove_files, target.session.folder / "bench", [*specs.values()])
    for spec in specs.values():
        cuda = spec.backend == "cuda"  # which compiles nothing when it first runs
        done = spec.proof.is_file() and (cuda or spec.cache.is_file())
        if (cuda or work.backend[0] != "tensorrt") and not done:
            spec.engine.parent.mkdir(parents=True, exist_ok=True)
            work.background.add(str(spec.engine), ["engine", spec.model_dump_json()], BUILD_S)
    while left := work.background.left:
        reporter().begin(f"{left} builds and compilations are under way or wait")
        time.sleep(WAIT_S)


def _remove_files(folder: Path, specs: Sequence[EngineSpec]) -> None:
    """Remove what a bench built and compiled; the layer tables stay."""
    made = ((each.engine, each.proof, each.cache, tiles_path(each.engine)) for each in specs)
    sidecars = (sidecar_path(each.engine) for each in specs)
    for path in (*sidecars, *chain.from_iterable(made), *folder.glob("*.compiled")):
        path.unlink(missing_ok=True)


def require_kernels() -> None:
    """Raise MissingDevice where the kernels of backend cuda cannot be compiled, or not run."""
    here = gpu.compute_capability if (gpu := find_gpu()) else "0.0"
    if not find_target(here):
        raise MissingDevice(explain_misfit(here))
    load_nvrtc()


def _backend_of(owner: Target, system: systems.System) -> BackendName:
    """Return the backend that builds a system's engine; MissingDevice where kernels of cuda cannot run."""
    if system.library == "cuda":
        require_kernels()
        return "cuda"
    return gpu_backend() if owner.runs_kernels else owner.session.target.backend


def specs_of(target: Target, system: systems.System, config: systems.Config) -> dict[Shape, EngineSpec]:
    owner, int8 = target.extra.get(system.recipe, target), system.kind == "int8"
    session, specs, backend = owner.session, dict[Shape, EngineSpec](), _backend_of(owner, system)
    graph = owner.int8_graph(backend) if int8 else owner.graphs[system.precision]
    cuda = backend == "cuda"  # one engine for all shapes
    profiles = [ANY] if cuda else systems.profiles_of(owner, system.shapes, config, backend)
    for pair in config.shapes:
        profile = ANY if cuda else profiles[choose_profile(profiles, *pair)]
        sizes = "-".join("x".join(map(str, size)) for size in (profile.min, profile.opt, profile.max))
        specs[pair] = EngineSpec(
            onnx=graph,
            engine=session.folder / "bench" / f"{system.precision}.{'cuda' if cuda else sizes}.engine",
            backend=backend,
            profile=profile,
            gemms=owner.gemms(graph) if int8 else [],
            attention=len(session.plan.attention) if int8 else 0,
            compute=session.target.compute,
            target=session.recipe.engine.compute_capability if cuda else None,
            shapes=[pair],
        )
    return specs


def prepare_on_gpu(here: systems.Preparation) -> list[measure.SystemRun]:
    import torch

    timer = measure.CudaTimer()
    here.stack.callback(torch.cuda.empty_cache)  # engines allocate outside of what torch keeps for later
    here.stack.enter_context(peers.tf32_allowed())

    def prepare(system: systems.System, run: measure.SystemRun) -> None:
        if system.is_engine:
            _open_engine(here, system, run)
        elif system.kind == "unpadded":
            run.lanes, run.row.detail = _packed_lanes(here, _unpadded_encoder(here, system), timer)
        else:
            run.lanes, run.row.detail = _padded_lanes(here, system)
        if not system.is_engine or system.library == "cuda":  # others have layer tables
            run.kernels = partial(kernels_of, run.lanes[0])

    return systems.prepare_each(here, timer, prepare)


def _open_engine(here: systems.Preparation, system: systems.System, run: measure.SystemRun) -> None:
    specs, row = specs_of(here.target, system, here.config), run.row
    single = {spec.engine: spec for spec in specs.values()}
    proofs = [build_engine(spec) for spec in single.values()]
    if system.library == "cuda":
        (path,) = single
        engine = here.shared(str(path), lambda: load_kernels(path)[0])
        run.lanes, row.detail = _packed_lanes(here, PackedKernels(engine), run.timer)
        row.engine_bytes = path.stat().st_size
    else:
        loaded = {
            path: here.stack.enter_context(Engine(path, spec.onnx, runtime_cache=spec.cache))
            for path, spec in single.items()
        }

        def bind(batch: int, length: int, stream: Any) -> Any:
            engine = loaded[specs[batch, length].engine]
            return engine.bind(batch, length, stream=stream, graph=True)

        run.lanes, detail = _bind_lanes(here, bind)
        row.detail, (first, *more) = f"{detail}, {system.shapes} profile", loaded.values()
        if not more:
            row.engine_bytes, row.activation_bytes = first.memory.engine_bytes, first.memory.activation_bytes
    if system.kind == "int8":
        row.int8_gemms = min(proof.int8_gemms for proof in proofs)
        row.expected_int8_gemms = proofs[0].expected_int8_gemms
    row.not_int8 = sorted({node for proof in proofs for node in proof.not_int8})
    run.layers = proofs[0].layers


def _bind_lanes(
    here: systems.Preparation, bind: Callable[[int, int, Any], Any]
) -> tuple[list[measure.Lane], str]:
    """Return one lane per stream from a function (batch, length, stream) -> Bound, and how it runs."""
    lanes: list[measure.Lane] = []
    detail, split = "", here.config.split
    for _ in range(1 if split else max(here.options.streams)):
        stream, bounds = None, dict[tuple[int, ...], Any]()
        for pair in here.config.shapes:
            bounds[pair] = bound = bind(*pair, stream)
            stream = bound.stream  # all shapes of a lane share one stream
            detail = getattr(bound, "detail", None) or ("" if bound.captured else "no ") + "CUDA graph"
        if split is None:
            lanes.append(measure.DeviceLane(bound, [measure.to_gpu(batch) for batch in here.batches]))
            continue
        steps = [
            measure.Step(bounds[batch["input_ids"].shape], measure.to_pinned(batch), np.arange(rows))
            for batch, rows in zip(here.batches, split.rows, strict=True)
        ]
        lanes.append(measure.SplitLane(steps))
    return lanes, detail


def _padded_lanes(here: systems.Preparation, system: systems.System) -> tuple[list[measure.Lane], str]:
    """Bind PyTorch to the shapes of a config; CheckFailed where it was not compiled in time."""
    failed = here.work.background.failed
    for pair in here.config.shapes:
        if (task := here.work.compiles.get((system.mode, pair), "")) in failed:
            raise CheckFailed(f"torch.compile: {failed[task]}")
    if system.mode:
        shapes = ", for each shape" if here.config.split else ""
        how = f"torch.compile mode {system.mode}{shapes}, with the mask"
    else:
        how = f"eager, SDPA{', TF32 allowed' if system.precision == 'fp32' else ''}, with the mask"
    forward = here.forward(system)

    def bind(batch: int, length: int, stream: Any) -> peers.TorchRun:
        inputs = peers.example(here.target.family.inputs, batch, length, "cuda")
        return peers.TorchRun(forward, inputs, how, graph=system.graph, stream=stream)

    return _bind_lanes(here, bind)


def _unpadded_encoder(here: systems.Preparation, system: systems.System) -> peers.UnpaddedEncoder:
    session = here.target.session
    if reason := peers.refusal(session.fp32_model.config.model_type, here.target.family.name):
        raise UserError(reason)
    found = gpu.compute_capability if (gpu := find_gpu()) else "0.0"
    if system.precision == "fp8" and tuple(map(int, found.split("."))) < peers.FIRST_FP8:
        raise UserError(f"GPUs of compute capability 8.9 and newer multiply FP8, and this one has {found}")

    def make() -> peers.UnpaddedEncoder:
        encoder = peers.UnpaddedEncoder(peers.sdpa_model(session.new_model(), "fp16", "cuda"))
        if system.precision == "fp8":
            rows = [row for batch in here.batches for row in peers.unpadded_rows(batch)]
            encoder.use_fp8(peers.pack_rows(rows[: peers.FP8_ROWS], 1, encoder.positions_of))
        return encoder

    return cast("peers.UnpaddedEncoder", here.shared(system.name, make))


class PackedKernels:
    """The engine of backend cuda, fed and bound as the unpadded encoder is."""

    how, most = "packed tokens", MOST_TOKENS

    def __init__(self, engine: CudaEngine) -> None:
        self.engine, self.of_tokens = engine, engine.plan.head.pooling == "tokens"

    def positions_of(self, ids: Int64) -> Int64:
        return cast("Int64", count_positions(ids, self.engine.plan.embed.padding))

    def feed(self, packing: peers.Packing) -> list[Int32]:
        fed = []
        for launch in packing.launches:
            fed.append(np.zeros(5 * packing.tokens + packing.sequences + 1, np.int32))
            fill(fed[-1], _tokens_of(launch, packing.tokens), packing.tokens, packing.sequences)
        return fed

    def bind(self, packing: peers.Packing, shape: Shape | None) -> Any:
        if packing.tokens > self.most:
            raise UserError(f"an engine takes {self.most} tokens at once, and a launch has {packing.tokens}")
        graphs = [choose_graph(_tokens_of(launch, packing.tokens)) for launch in packing.launches]
        reach = max(reach for *_, reach in graphs)
        bound = self.engine.bind(packing.tokens, packing.sequences, packing.longest, reach)
        if self.of_tokens and shape:
            outputs = bound.outputs.items()
            bound.outputs = {name: value[: math.prod(shape)].unflatten(0, shape) for name, value in outputs}
        return bound


def _tokens_of(launch: Int32, tokens: int) -> Tokens:
    starts = launch[3 * tokens :]
    ids, positions, types = launch[: 3 * tokens].reshape(3, tokens)[:, : starts[-1]]
    return Tokens(ids, positions, types, starts, np.ones(len(ids), bool), {})


def _packed_lanes(
    here: systems.Preparation,
    encoder: peers.UnpaddedEncoder | PackedKernels,
    timer: measure.Timer,
) -> tuple[list[measure.Lane], str]:
    """Bind what packs tokens to a config, a split in launches of the size that takes the least time."""
    config, split = here.config, here.config.split
    pack = partial(peers.pack_rows, positions_of=encoder.positions_of)
    if split is None:
        packings = [pack(peers.unpadded_rows(batch), 1) for batch in here.batches]
        sets = [measure.to_gpu({PACKED: fed}) for packing in packings for fed in encoder.feed(packing)]
        (shape,) = config.shapes
        runs = [encoder.bind(packings[0], shape) for _ in range(max(here.options.streams))]
        detail = f"{encoder.how}, {packings[0].tokens} tokens a launch, {runs[0].detail}"
        return [measure.DeviceLane(run, sets) for run in runs], detail
    counted = zip(here.batches, split.rows, strict=True)
    rows = [row for batch, count in counted for row in peers.unpadded_rows(batch)[:count]]
    best: tuple[float, measure.Lane, str] | None = None
    for packing in (pack(rows, count) for count in peers.launch_counts(split.real_tokens, len(rows))):
        if packing.tokens > encoder.most:
            continue
        run, steps = encoder.bind(packing, None), list[measure.Step]()
        for number, (fed, used) in enumerate(zip(encoder.feed(packing), packing.counts, strict=True)):
            answers = packing.first_tokens(number) if encoder.of_tokens else np.arange(used)
            steps.append(measure.Step(run, measure.to_pinned({PACKED: fed}), answers))
        lane = measure.SplitLane(steps)
        ms = statistics.median(timer.latencies(lane, TRIED)[1:])
        if best is None or ms < best[0]:
            size = f"{len(steps)} launch{'es' if len(steps) > 1 else ''} of {packing.tokens} tokens"
            best = (ms, lane, f"{encoder.how}, {size}, {run.detail}")
    assert best is not None
    return [best[1]], f"{best[2]}, the fastest size"


def is_fused_attention(name: str) -> bool:
    return bool(ATTENTION.search(name)) and not POINTWISE.match(name)


def is_fp32_gemm(name: str) -> bool:
    """Return whether a kernel multiplies in FP32 or TF32: cuBLAS and CUTLASS name their types."""
    return bool(GEMM.search(name)) and not HALF.search(name) and not is_fused_attention(name)


def kernels_in(names: "Counter[str]") -> BenchKernels:
    return BenchKernels(
        names={name[:LONGEST_NAME]: count for name, count in names.most_common()},
        fused_attention=sum(count for name, count in names.items() if is_fused_attention(name)),
        fp32_gemms=sum(count for name, count in names.items() if is_fp32_gemm(name)),
    )


def kernels_of(lane: measure.Lane) -> BenchKernels:
    """Profile the kernels of one inference, a replayed CUDA graph's too."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, acc_events=True) as profiled:  # or torch warns of further cycles
        lane.launch()
        torch.cuda.synchronize()
    names = Counter(
        event.name
        for event in profiled.events()
        if str(event.device_type).endswith("CUDA")
        and not getattr(event, "is_user_annotation", False)  # a range, no kernel
        and not event.name.startswith(("Memcpy", "Memset"))
    )
    if not names:
        raise CheckFailed("torch.profiler saw no kernel of it")
    return kernels_in(names)


def compile_shapes(run: Path, mode: str, pairs: Sequence[Shape]) -> None:
    import torch

    session = Session(read_config(run), run)
    inputs = family_named(session.recipe.model.family).inputs
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = peers.sdpa_model(session.new_model(), "fp16", device)
    with peers.tf32_allowed():
        for batch, length in pairs:
            forward = peers.compiled_forward(model, mode, dynamic=False)
            with torch.inference_mode():
                forward(**peers.example(inputs, batch, length, device))
            torch.compiler.reset()
            path = marker(run / "bench", mode, (batch, length))
            path.parent.mkdir(exist_ok=True)
            path.touch()


def main(arguments: Sequence[str]) -> None:
    error, what = "", arguments[0]
    try:
        if what == "compile":
            compile_shapes(Path(arguments[1]), arguments[2], json.loads(arguments[3]))
        elif what == "export":
            folder, model, recipe, seed, longest = arguments[1:]
            given = model, recipe_for(model, recipe), Path(folder), int(seed), int(longest)
            model_target(*given, twins=False)
        else:
            spec = EngineSpec.model_validate_json(arguments[1])
            build_engine(spec)
            if spec.backend != "cuda":
                with Engine(spec.engine, spec.onnx, runtime_cache=spec.cache) as loaded:
                    for batch, length in spec.shapes:  # its runtime cache then holds their kernels
                        loaded.bind(batch, length, graph=False).close()
    except Exception as caught:  # compilers fail in a hundred ways; the bench says which
        error = " ".join(f"{caught}".split())[:300] or type(caught).__name__
    print(json.dumps({"error": error}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
