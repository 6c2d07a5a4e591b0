"""Everything that decides what runs here, gathered in one look."""

import importlib.metadata
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from qdqbench.quantize.engine.backend import INSTALL, preferred_backend
from qdqbench.quantize.engine.hazards import RTX_WITHOUT_GPU, find_hazards, is_older
from qdqbench.quantize.utils.limits import CPU_BACKENDS, BackendName
from qdqbench.quantize.utils.schema import Strict
from qdqbench.quantize.utils.system.cpu import cpu_hazards, find_cpu
from qdqbench.quantize.utils.system.environment import describe_environment
from qdqbench.quantize.utils.system.gpu import Gpu, find_gpu

TIMEOUT_S = 90.0  # for all; torch takes seconds, on a busy machine many
MAX_SAID = 300
_ASK = """
import json, sys
name = sys.argv[1]
module = __import__(name)
found = {"version": str(getattr(module, "__version__", "unknown"))}
if name == "torch":
    found["cuda"] = module.version.cuda
    found["devices"] = module.cuda.device_count() if module.cuda.is_available() else 0
print("\\n" + json.dumps(found))
"""


@dataclass(frozen=True)
class Probed:
    """What importing a library came to; `error` is None where it worked, or where it is not there."""

    version: str | None
    error: str | None = None
    cuda: str | None = None  # that torch was built for
    devices: int = 0  # that torch sees

    @property
    def there(self) -> bool:
        """Whether it can be used."""
        return self.version is not None


def probe(names: Iterable[str], timeout_s: float = TIMEOUT_S) -> dict[str, Probed]:
    """Import each of some libraries; all at once, and no longer than `timeout_s` together."""
    with tempfile.TemporaryDirectory(prefix="qdqbench-doctor-") as folder:  # nothing here can be imported
        running = {
            name: subprocess.Popen(  # noqa: S603
                [sys.executable, "-c", _ASK, name],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=folder,
            )
            for name in names
        }
        found, deadline = {}, time.monotonic() + timeout_s
        for name, process in running.items():
            try:
                out, err = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                found[name] = Probed(None, f"did not import within {timeout_s:g} s")
                continue
            found[name] = _result(name, process.returncode, out, err.decode(errors="replace"))
    return found


def _result(name: str, code: int, out: bytes, err: str) -> Probed:
    if code == 0:
        told: dict[str, Any] = json.loads(out.decode(errors="replace").rstrip().rpartition("\n")[2])
        version = "-".join(told["version"].split("-")[:2])  # without the commit that OpenVINO adds
        return Probed(version, cuda=told.get("cuda"), devices=told.get("devices", 0))
    last = next((line.strip() for line in reversed(err.splitlines()) if line.strip()), "")
    if last == f"ModuleNotFoundError: No module named '{name}'":
        return Probed(None)
    if code < 0:
        last = f"crashed with signal {-code}" + (f" after: {last}" if last else "")
    return Probed(None, anonymous(last)[:MAX_SAID] or f"exit status {code}")


def anonymous(text: str) -> str:
    """Text without control characters, the user's name or folders: it goes into a bug report."""
    text = text.replace(sys.prefix, "PYTHON").replace(sys.base_prefix, "PYTHON")
    text = text.replace(str(Path.home()), "~").replace(str(Path.cwd()), ".")
    text = re.sub(r"(?:/home|/Users|/root|[A-Z]:\\Users)(?:[/\\][^\s/\\'\"]+)?", "~", text)
    return "".join(c if c.isprintable() else " " for c in text)


PACKAGE = "qdqbench"
LEAST_FREE = 4 << 30  # bytes of memory and of disk, under which it is told
HUB_TIMEOUT_S = 8.0


class GpuFound(Strict):
    """The first GPU that CUDA shows."""

    name: str
    compute_capability: str
    driver: str | None


class Library(Strict):
    """A library that a backend needs."""

    version: str | None  # None: not there, or not working
    error: str | None = None  # why it does not work
    detail: str | None = None  # of torch: its CUDA and GPUs


class BackendState(Strict):
    """What a backend can do here."""

    runs: bool  # builds engines and runs them
    builds: bool  # builds them at least
    why: str | None = None  # it does not run, and what to do


class Doctor(Strict):
    """What this machine can do; nothing in it names a user or a folder."""

    qdqbench: str
    git: str | None
    python: str
    platform: str
    cpu: str
    cpu_features: list[str]
    cores: int
    gpu: GpuFound | None
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


def look(*, offline: bool = False) -> Doctor:
    """Look at this machine; takes seconds, because libraries are imported, and never more than two minutes.

    Args:
        offline: do not ask whether the hub can be reached.
    """
    import psutil

    asked = _Hub(offline)
    found = probe(["torch", *INSTALL])
    gpu, cpu, memory = find_gpu(), find_cpu(), psutil.virtual_memory()
    made, packages = describe_environment(), installed()
    free = shutil.disk_usage(Path.cwd()).free
    return Doctor(
        qdqbench=made["versions"]["qdqbench"],
        git=made["git"],
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=cpu.name,
        cpu_features=[*cpu.features],
        cores=cpu.cores,
        gpu=None if gpu is None else GpuFound(**vars(gpu)),
        memory_bytes=memory.total,
        memory_free_bytes=memory.available,
        disk_free_bytes=free,
        packages=packages,
        unmet=unmet(),
        libraries={
            name: Library(version=each.version, error=each.error, detail=_detail(name, each))
            for name, each in found.items()
        },
        backends={name: state_of(name, found[name], found["torch"], gpu) for name in INSTALL},
        auto=preferred_backend("auto"),
        hub=asked.answer(),
        hazards=[*_known(found, packages, gpu), *cpu_hazards(cpu), *_scarce(memory.available, free)],
    )


def state_of(name: BackendName, own: Probed, torch: Probed, gpu: Gpu | None) -> BackendState:
    """What a backend can do, from what its library and torch said, and the GPU."""
    if not own.there:
        why = f"it does not import ({own.error}); reinstall it" if own.error else "it is not installed"
        return BackendState(runs=False, builds=False, why=f"{why}: {INSTALL[name]}")
    if name in CPU_BACKENDS:
        return BackendState(runs=True, builds=True)
    version = str(own.version)
    if gpu is None:
        ahead = name == "tensorrt_rtx" and not is_older(version, RTX_WITHOUT_GPU)
        other = f"tensorrt_rtx from {RTX_WITHOUT_GPU} on builds without one"
        builds = "it builds ahead of time only" if ahead else f"it builds no engine; {other}"
        return BackendState(runs=False, builds=ahead, why=f"CUDA shows no GPU here, and without one {builds}")
    refused = [text for text in find_hazards(name, version, gpu.compute_capability) if "refuses" in text]
    if refused:
        return BackendState(runs=False, builds=False, why=refused[0])
    if not torch.devices:
        build = (
            f"torch {torch.version} ({_detail('torch', torch)})" if torch.there else "torch does not import"
        )
        why = (
            f"engines run on torch's CUDA buffers, and there are none: {build}; install a CUDA build of torch"
        )
        return BackendState(runs=False, builds=True, why=why)
    return BackendState(runs=True, builds=True)


def installed() -> dict[str, str]:
    """Versions of the required packages that are there."""
    found = {}
    for need in _requirements():
        try:
            found[need.name] = importlib.metadata.version(need.name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def unmet() -> list[str]:
    """Requirements of the package that do not hold here, with what to install."""
    there, problems = installed(), []
    for need in _requirements():
        version = there.get(need.name)
        if version is None or not need.specifier.contains(version, prereleases=True):
            has = f"is {version}" if version else "is not installed"
            problems.append(f"{need.name} {has}: pip install '{need.name}{need.specifier}'")
    asks, here = importlib.metadata.metadata(PACKAGE)["Requires-Python"], platform.python_version()
    if asks and not SpecifierSet(asks).contains(here, prereleases=True):
        problems.append(f"Python is {here}: install one that is {asks}")
    return problems


def _requirements() -> list[Requirement]:
    """Of the package without its extras."""
    listed = [Requirement(text) for text in importlib.metadata.requires(PACKAGE) or []]
    return [need for need in listed if need.marker is None or need.marker.evaluate({"extra": ""})]


def _detail(name: str, torch: Probed) -> str | None:
    if name != "torch" or not torch.there:
        return None
    if torch.cuda is None:
        return "CPU build"
    return f"CUDA {torch.cuda}, {torch.devices or 'no'} GPU{'s' if torch.devices > 1 else ''}"


def _known(found: dict[str, Probed], packages: dict[str, str], gpu: Gpu | None) -> list[str]:
    """Known faults of the versions that are here."""
    capability = gpu.compute_capability if gpu else None
    versions = packages | {name: each.version for name, each in found.items() if each.version}
    return [text for name, version in versions.items() for text in find_hazards(name, version, capability)]


def _scarce(memory: int, disk: int) -> list[str]:
    rooms = (("memory", memory), ("disk space in this folder", disk))
    return [
        f"only {gib(room)} of {what} are free: large models may not fit"
        for what, room in rooms
        if room < LEAST_FREE
    ]


class _Hub:
    """Asks whether the hub can be reached, beside everything else."""

    def __init__(self, offline: bool) -> None:
        self._said, self._offline = "", offline
        self._thread = threading.Thread(target=self._ask, daemon=True)
        if not offline:
            self._thread.start()

    def _ask(self) -> None:
        from huggingface_hub import constants

        if constants.HF_HUB_OFFLINE:
            self._said = "not asked: HF_HUB_OFFLINE is set"
            return
        start = time.perf_counter()
        try:
            status = requests.head(constants.ENDPOINT, timeout=HUB_TIMEOUT_S).status_code
        except (requests.RequestException, OSError, ValueError) as error:
            self._said = f"not reached ({type(error).__name__}): give folders as --model and --data"
            return
        self._said = f"reached in {time.perf_counter() - start:.1f} s (status {status})"

    def answer(self) -> str:
        """One clause."""
        if self._offline:
            return "not asked"
        self._thread.join(2 * HUB_TIMEOUT_S)
        return self._said or f"no answer within {2 * HUB_TIMEOUT_S:g} s: give folders as --model and --data"


def bug_report(found: Doctor) -> str:
    """Markdown to paste into a bug report."""
    cpu = f"{found.cpu}, {found.cores} cores, {', '.join(found.cpu_features) or 'features unknown'}"
    lines = [
        f"- qdqbench {version_text(found)}, Python {found.python}, {found.platform}",
        f"- CPU: {cpu}",
        f"- GPU: {gpu_text(found.gpu)}",
        f"- memory {gib(found.memory_bytes)}, {gib(found.memory_free_bytes)} free; disk "
        f"{gib(found.disk_free_bytes)} free",
    ]
    for name, each in found.libraries.items():
        lines.append(f"- {name}: {library_text(each)}")
    lines.append("- packages: " + ", ".join(f"{name} {version}" for name, version in found.packages.items()))
    lines += [f"- unmet: {text}" for text in found.unmet]
    lines += [f"- hazard: {text}" for text in found.hazards]
    lines.append(f"- hub: {found.hub}")
    return "".join(f"{anonymous(line)}\n" for line in lines)


def version_text(found: Doctor) -> str:
    """`0.1.0 (e3307e121f9c)`."""
    return found.qdqbench + (f" ({found.git[:12]})" if found.git else "")


def gpu_text(gpu: GpuFound | None) -> str:
    """`NVIDIA L4, compute capability 8.9, driver 580.1`."""
    if gpu is None:
        return "none"
    return f"{gpu.name}, compute capability {gpu.compute_capability}, driver {gpu.driver or 'unknown'}"


def gib(size: int) -> str:
    """`23.5 GiB`."""
    return f"{size / (1 << 30):.1f} GiB"


def library_text(each: Library) -> str:
    """`2.13.0, CPU build`, or why it is not there."""
    if each.version is None:
        return each.error or "not installed"
    return ", ".join(filter(None, [each.version, each.detail]))
