"""Sidecar of an engine, checked against the files and the machine at hand before it is loaded."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from qdqbench.quantize.engine.backend import available_backends
from qdqbench.quantize.engine.cpu_runtimes import Compute
from qdqbench.quantize.engine.cuda.names import explain_misfit, find_target
from qdqbench.quantize.engine.hazards import is_older
from qdqbench.quantize.engine.profiles import Profile
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.limits import has_profiles
from qdqbench.quantize.utils.schema import Strict, read
from qdqbench.quantize.utils.system.cpu import find_cpu
from qdqbench.quantize.utils.system.gpu import Gpu, find_gpu


class Sidecar(Strict):
    """Conditions for an engine to load, and its sources: `FILE.engine.json`."""

    qdqbench: str
    backend: str
    version: str
    compute_capability: list[str]
    ahead_of_time: bool
    gpu: str | None  # the GPU that it was built on
    driver: str | None
    cpu: str | None = None  # the CPU that it was built on, and is for
    cpu_features: list[str] = []
    compute: Compute | None = None  # on a CPU: datatype of what is not quantized
    streams: int = 1  # on a CPU: that answered most batches a second, all cores together
    profiles: list[Profile]
    onnx: str
    onnx_sha256: str
    engine_bytes: int
    engine_sha256: str
    build_seconds: float


def sidecar_path(engine_path: Path) -> Path:
    return engine_path.with_name(engine_path.name + ".json")


def read_sidecar(engine_path: Path) -> Sidecar:
    again = _how_to_rebuild(engine_path)
    if not sidecar_path(engine_path).is_file():
        missing = f"{sidecar_path(engine_path)} does not exist"
        raise UserError(f"{missing}, so nothing vouches for the engine; {again}")
    return read(sidecar_path(engine_path), Sidecar, "engine sidecar", again)


def read_own_sidecar(engine_path: Path) -> Sidecar:
    """Return the sidecar of an engine; UserError where the engine changed after its build."""
    sidecar = read_sidecar(engine_path)
    there = engine_path.is_file()
    if not there or files.sha256(engine_path) != sidecar.engine_sha256:
        wrong = "is not the file that was built" if there else "does not exist"
        raise UserError(f"{engine_path} {wrong}; {_how_to_rebuild(engine_path)}")
    return sidecar


def check_sidecar(engine_path: Path, onnx_path: Path | None = None) -> Sidecar:
    """Hold an engine to its sidecar, its ONNX file and this machine, before it is loaded.

    The backend refuses an engine of another version or GPU with an error that names neither; the UserError
    here lists every difference and how to rebuild.
    """
    again, sidecar = _how_to_rebuild(engine_path), read_sidecar(engine_path)
    if not engine_path.is_file():
        raise UserError(f"{engine_path} does not exist; {again}")
    gpu = find_gpu()
    messages = []
    if files.sha256(engine_path) != sidecar.engine_sha256:
        messages.append("the file is not the one that was built")
    if onnx_path is not None and not onnx_path.is_file():
        messages.append(f"{onnx_path.name}, which it was built from, does not exist")
    elif onnx_path is not None and files.sha256(onnx_path) != sidecar.onnx_sha256:
        messages.append(f"it was built from another {onnx_path.name}")
    version = available_backends().get(sidecar.backend)
    if version != sidecar.version:
        here = f"has version {version}" if version else "is not installed"
        messages.append(f"it needs {sidecar.backend} {sidecar.version} and {sidecar.backend} {here}")
    if sidecar.cpu is not None:
        if lost := sorted({*sidecar.cpu_features} - {*find_cpu().features}):
            messages.append(f"it was built on {sidecar.cpu} and this CPU lacks {', '.join(lost)}")
    elif gpu is not None:
        if why := find_misfit(sidecar.backend, sidecar.compute_capability, gpu):
            messages.append(why)
            if sidecar.ahead_of_time:
                again += (
                    " (with engine.compute_capability: null in the recipe)"
                    if has_profiles(sidecar.backend)
                    else " (on this GPU, or with --target for it)"
                )
        if sidecar.driver and gpu.driver and is_older(gpu.driver, sidecar.driver):
            built = f"it was built with driver {sidecar.driver}"
            messages.append(f"{built} and the older {gpu.driver} runs here")
    if messages:
        raise UserError(f"{engine_path} cannot be used here: {'; '.join(messages)}; {again}")
    return sidecar


def find_misfit(backend: str, targets: Sequence[str], gpu: Gpu) -> str | None:
    """Return why an engine cannot run on a GPU that it is not for; None if it is for it."""
    has = gpu.compute_capability
    if find_target(has, targets) if backend == "cuda" else has in targets:
        return None
    if backend == "cuda" and not find_target(has):
        return explain_misfit(has)
    return f"it is for compute capability {', '.join(targets)} and the {gpu.name} has {has}"


def note_sidecar(sidecar: Sidecar, gpu: Gpu | None) -> list[str]:
    if sidecar.cpu is not None:
        here = find_cpu().name
        other = f"the engine was built on {sidecar.cpu} and runs on {here}: latency may not be the best"
        return [other] if here != sidecar.cpu else []
    if gpu is None:
        return []
    notes = []
    if sidecar.driver and gpu.driver and sidecar.driver != gpu.driver:
        notes.append(f"the engine was built with driver {sidecar.driver} and runs on the newer {gpu.driver}")
    if not sidecar.ahead_of_time and sidecar.gpu != gpu.name:
        notes.append(f"the engine was tuned on {sidecar.gpu} and runs on {gpu.name}: latency is not the best")
    return notes


def _how_to_rebuild(engine_path: Path) -> str:
    folder = engine_path.parent.parent
    run = shlex.quote(str(folder)) if (folder / "run.json").is_file() else "RUN"
    return f"build it again with `qdqbench build {run}`"
