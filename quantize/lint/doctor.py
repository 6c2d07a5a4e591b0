"""Facts about this machine that decide what can run on it."""

import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import requests
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from pydantic import Field

from qdqbench.quantize.engine.backend import INSTALL, preferred_backend
from qdqbench.quantize.engine.cuda.compile import get_version, load_nvrtc
from qdqbench.quantize.engine.cuda.names import explain_misfit, find_target
from qdqbench.quantize.engine.hazards import RTX_WITHOUT_GPU, find_hazards, is_older
from qdqbench.quantize.lint.machines import Machine, find_machine
from qdqbench.quantize.report.formats import size
from qdqbench.quantize.utils.errors import MissingDevice
from qdqbench.quantize.utils.limits import CPU_BACKENDS, BackendName
from qdqbench.quantize.utils.schema import Strict
from qdqbench.quantize.utils.system.cpu import cpu_hazards, find_cpu
from qdqbench.quantize.utils.system.environment import describe_environment
from qdqbench.quantize.utils.system.gpu import Gpu, find_gpu

TIMEOUT_S = 90.0  # for all; torch takes seconds, on a busy machine many
MAX_SAID = 300
_ASK = """
import json, sys
sys.modules["openvino_telemetry"] = None  # see load_openvino
name = sys.argv[1]
module = __import__(name)
found = {"version": str(getattr(module, "__version__", "unknown"))}
if name == "torch":
    found["cuda"] = module.version.cuda
    found["devices"] = module.cuda.device_count() if module.cuda.is_available() else 0
print("\\n" + json.dumps(found))
"""


class Library(Strict):
    version: str | None  # None: not there, or not working
    error: str | None = None  # why it does not work
    detail: str | None = None  # of torch: its CUDA and GPUs
    devices: int = Field(default=0, exclude=True)  # GPUs that torch sees

    @property
    def text(self) -> str:
        if self.version is None:
            return self.error or "not installed"
        return ", ".join(filter(None, [self.version, self.detail]))


def probe(names: Iterable[str], timeout_s: float = TIMEOUT_S) -> dict[str, Library]:
    """Import each of some libraries; all at once, and no longer than `timeout_s` together."""
    with tempfile.TemporaryDirectory(prefix="qdqbench-doctor-") as folder:  # nothing here can be imported
        pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        running = {
            name: subprocess.Popen([sys.executable, "-c", _ASK, name], cwd=folder, **pipes)  # noqa: S603
            for name in names
        }
        found, deadline = {}, time.monotonic() + timeout_s
        for name, process in running.items():
            try:
                out, err = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                found[name] = Library(version=None, error=f"did not import within {timeout_s:g} s")
                continue
            found[name] = _result(name, process.returncode, out, err.decode(errors="replace"))
    return found


def _result(name: str, code: int, out: bytes, err: str) -> Library:
    if code == 0:
        facts: dict[str, Any] = json.loads(out.decode(errors="replace").rstrip().rpartition("\n")[2])
        version = "-".join(facts["version"].split("-")[:2])  # without the commit that OpenVINO adds
        if name != "torch":
            return Library(version=version)
        cuda, devices = facts["cuda"], facts["devices"]
        detail = f"CUDA {cuda}, {devices or 'no'} GPU{'s' if devices > 1 else ''}" if cuda else "CPU build"
        return Library(version=version, detail=detail, devices=devices)
    last = next((line.strip() for line in reversed(err.splitlines()) if line.strip()), "")
    if last == f"ModuleNotFoundError: No module named '{name}'":
        return Library(version=None)
    if code < 0:
        last = f"crashed with signal {-code}" + (f" after: {last}" if last else "")
    return Library(version=None, error=anonymous(last)[:MAX_SAID] or f"exit status {code}")


def anonymous(text: str) -> str:
    """Remove control characters, the user's name and folders: the text goes into a bug report."""
    text = text.replace(sys.prefix, "PYTHON").replace(sys.base_prefix, "PYTHON")
    text = text.replace(str(Path.home()), "~").replace(str(Path.cwd()), ".")
    text = re.sub(r"(?:/home|/Users|/root|[A-Z]:\\Users)(?:[/\\][^\s/\\'\"]+)?", "~", text)
    return "".join(c if c.isprintable() else " " for c in text)


PACKAGE = "qdqbench"
LEAST_FREE = 4 << 30  # bytes of memory and of disk, under which it is told
HUB_TIMEOUT_S = 8.0


class BackendState(Strict):
    runs: bool  # builds engines and runs them
    builds: bool  # builds them at least
    why: str | None = None  # it does not run, and what to do


class Doctor(Strict):
    """Capabilities of this machine; nothing in it names a user or a folder."""

    qdqbench: str
    git: str | None
    python: str
    platform: str
    cpu: str
    cpu_features: list[str]
    cores: int
    gpu: Gpu | None
    memory_bytes: int
    memory_free_bytes: int
    disk_free_bytes: int  # of the present folder
    packages: dict[str, str]  # required ones that are there
    unmet: list[str]  # requirements that do not hold, and what to install
    libraries: dict[str, Library]
    backends: dict[BackendName, BackendState]
    auto: BackendName  # what `auto` would take
    hub: str
    hazards: list[str]
    machine: Machine | None  # what to start with here; None for a GPU of another kind

    @property
    def gpu_text(self) -> str:
        if (gpu := self.gpu) is None:
            return "none"
        return f"{gpu.name}, compute capability {gpu.compute_capability}, driver {gpu.driver or 'unknown'}"


def look(*, offline: bool = False) -> Doctor:
    """Look at this machine; takes seconds, because libraries are imported, and two minutes at most."""
    import psutil

    answers: SimpleQueue[str] = SimpleQueue()
    if offline:
        answers.put("not asked")
    else:
        threading.Thread(target=lambda: answers.put(_ask_hub()), daemon=True).start()
    libraries = probe(["torch", *(name for name in INSTALL if name != "cuda")]) | {"cuda": _find_nvrtc()}
    gpu, cpu, memory = find_gpu(), find_cpu(), psutil.virtual_memory()
    environment, packages = describe_environment(), installed()
    disk = shutil.disk_usage(Path.cwd()).free
    versions = packages | {name: each.version for name, each in libraries.items() if each.version}
    capability = gpu.compute_capability if gpu else None
    hazards = [text for name in versions for text in find_hazards(name, versions[name], capability)]
    rooms = {"memory": memory.available, "disk space in this folder": disk}
    low = {what: size(room) for what, room in rooms.items() if room < LEAST_FREE}
    few = [f"only {room} of {what} are free: large models may not fit" for what, room in low.items()]
    try:
        hub = answers.get(timeout=2 * HUB_TIMEOUT_S)
    except Empty:
        hub = f"no answer within {2 * HUB_TIMEOUT_S:g} s: give folders as --model and --data"
    return Doctor(
        qdqbench=environment["versions"]["qdqbench"],
        git=environment["git"],
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=cpu.name,
        cpu_features=[*cpu.features],
        cores=cpu.cores,
        gpu=gpu,
        memory_bytes=memory.total,
        memory_free_bytes=memory.available,
        disk_free_bytes=disk,
        packages=packages,
        unmet=unmet(),
        libraries=libraries,
        backends={name: state_of(name, libraries[name], libraries["torch"], gpu) for name in INSTALL},
        auto=preferred_backend("auto"),
        hub=hub,
        hazards=[*hazards, *cpu_hazards(cpu), *few],
        machine=find_machine(gpu, cpu),
    )


def _ask_hub() -> str:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "not asked: HF_HUB_OFFLINE is set"
    start = time.perf_counter()
    try:
        status = requests.head(constants.ENDPOINT, timeout=HUB_TIMEOUT_S).status_code
    except (requests.RequestException, OSError, ValueError) as error:
        return f"not reached ({type(error).__name__}): give folders as --model and --data"
    return f"reached in {time.perf_counter() - start:.1f} s (status {status})"


def _find_nvrtc() -> Library:
    try:
        load_nvrtc()
    except MissingDevice:
        return Library(version=None)
    return Library(version=get_version())


def state_of(name: BackendName, own: Library, torch: Library, gpu: Gpu | None) -> BackendState:
    if refusal := _refuse(name, own.version, gpu):
        return BackendState(runs=False, builds=name == "cuda" and own.version is not None, why=refusal)
    if own.version is None:
        why = f"it does not import ({own.error}); reinstall it" if own.error else "it is not installed"
        return BackendState(runs=False, builds=False, why=f"{why}: {INSTALL[name]}")
    if name in CPU_BACKENDS:
        return BackendState(runs=True, builds=True)
    if gpu is None:
        ahead = name == "cuda" or (name == "tensorrt_rtx" and not is_older(own.version, RTX_WITHOUT_GPU))
        other = f"tensorrt_rtx from {RTX_WITHOUT_GPU} on builds without one"
        builds = "it builds ahead of time only" if ahead else f"it builds no engine; {other}"
        return BackendState(runs=False, builds=ahead, why=f"CUDA shows no GPU here, and without one {builds}")
    if not torch.devices:
        build = f"torch {torch.version} ({torch.detail})" if torch.version else "torch does not import"
        why = (
            f"engines run on torch's CUDA buffers, and there are none: {build}; install a CUDA build of torch"
        )
        return BackendState(runs=False, builds=True, why=why)
    return BackendState(runs=True, builds=True)


def _refuse(name: BackendName, version: str | None, gpu: Gpu | None) -> str:
    """Say why a backend never runs on a GPU; empty where it may."""
    if gpu is None:
        return ""
    if name == "cuda" and not find_target(gpu.compute_capability):
        return explain_misfit(gpu.compute_capability)
    known = find_hazards(name, version, gpu.compute_capability) if version else []
    return next((text for text in known if "refuses" in text), "")


def installed() -> dict[str, str]:
    names = (need.name for need in _requirements())
    return {name: metadata.version(name) for name in names if [*metadata.distributions(name=name)]}


def unmet() -> list[str]:
    there, problems = installed(), []
    for need in _requirements():
        version = there.get(need.name)
        if version is None or not need.specifier.contains(version, prereleases=True):
            has = f"is {version}" if version else "is not installed"
            problems.append(f"{need.name} {has}: pip install '{need.name}{need.specifier}'")
    asks, here = metadata.metadata(PACKAGE)["Requires-Python"], platform.python_version()
    if asks and not SpecifierSet(asks).contains(here, prereleases=True):
        problems.append(f"Python is {here}: install one that is {asks}")
    return problems


def _requirements() -> list[Requirement]:
    listed = [Requirement(text) for text in metadata.requires(PACKAGE) or []]
    return [need for need in listed if need.marker is None or need.marker.evaluate({"extra": ""})]
