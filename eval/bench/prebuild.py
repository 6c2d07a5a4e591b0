"""Work before a measurement, in several processes: torch.compile, and engines with their kernels.

Each takes long for each shape, on one core. Processes do it at once, and leave files from which the process
that measures takes it in seconds: Inductor's cache, engines, runtime caches. What takes too long is ended.

    python -m qdqbench.eval.bench.prebuild compile RUN MODE SHAPES
    python -m qdqbench.eval.bench.prebuild engine SPEC
    python -m qdqbench.eval.bench.prebuild export FOLDER MODEL RECIPE SEED LONGEST

Each prints a line of JSON, {"error": ""}.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from qdqbench.eval.bench import peers
from qdqbench.eval.bench.target import model_target, recipe_for
from qdqbench.quantize.engine.build import build
from qdqbench.quantize.engine.cpu.compiled import Compute
from qdqbench.quantize.engine.profiles import Profile
from qdqbench.quantize.engine.runtime.engine import Engine
from qdqbench.quantize.engine.sidecar import check_sidecar
from qdqbench.quantize.models.families.known import family_named
from qdqbench.quantize.pipeline.session import Session, read_config
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.limits import BackendChoice
from qdqbench.quantize.utils.results import EngineResult
from qdqbench.quantize.utils.schema import Strict, read

COMMAND = (sys.executable, "-m", "qdqbench.eval.bench.prebuild")
START_S = 60.0  # imports and the model
ANSWER = '{"error":'  # how the line that is for us begins
THREADS = 4  # compilers of a process that compiles
Pair = tuple[int, int]  # batch, length


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
    """Run tasks until the context ends, at most so many at once."""
    with ThreadPoolExecutor(workers) as pool:
        work = Background(pool)
        try:
            yield work
        finally:
            work.stop()
            pool.shutdown(wait=True, cancel_futures=True)


def _answer(printed: str) -> str:
    """Return what a process says went wrong; of one that says nothing, its last line."""
    lines = [line for line in printed.splitlines() if line.strip()]
    for line in reversed(lines):
        if line.startswith(ANSWER):
            return str(json.loads(line)["error"])
    return f"its process ended{f': {lines[-1].strip()[:200]}' if lines else ''}"


def _kill_group(process: "subprocess.Popen[str]") -> None:
    """End a process and the compilers that it started."""
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
    shapes: list[Pair]  # that it will run

    @property
    def cache(self) -> Path:
        """Return the file of kernels compiled just in time."""
        return self.engine.with_suffix(".cache")

    @property
    def proof(self) -> Path:
        return self.engine.with_suffix(".proof.json")


def build_engine(spec: EngineSpec) -> EngineResult:
    """Build an engine, or take one that is there from the same graph, version and machine."""
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
    )
    files.write_json(spec.proof, result.model_dump(mode="json"))
    return result


def marker(folder: Path, mode: str, pair: Pair) -> Path:
    """Return the file that says that Inductor's cache has a mode of torch.compile for a shape."""
    return folder / f"{mode}.{pair[0]}x{pair[1]}.compiled"


def compile_shapes(run: Path, mode: str, pairs: Sequence[Pair]) -> None:
    """Compile a run's model in FP16, as a bench does, for each (batch, length)."""
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


def prepare_engine(spec: EngineSpec) -> None:
    """Build an engine, and run every shape once, so that its runtime cache holds their kernels."""
    build_engine(spec)
    with Engine(spec.engine, spec.onnx, runtime_cache=spec.cache) as loaded:
        for batch, length in spec.shapes:
            loaded.bind(batch, length, graph=False).close()


def main(arguments: Sequence[str]) -> None:
    error, what = "", arguments[0]
    try:
        if what == "compile":
            compile_shapes(Path(arguments[1]), arguments[2], json.loads(arguments[3]))
        elif what == "export":
            folder, model, recipe, seed, longest = arguments[1:]
            model_target(model, recipe_for(model, recipe), Path(folder), int(seed), int(longest))
        else:
            prepare_engine(EngineSpec.model_validate_json(arguments[1]))
    except Exception as caught:  # compilers fail in a hundred ways; the bench says which
        error = " ".join(f"{caught}".split())[:300] or type(caught).__name__
    print(json.dumps({"error": error}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
