"""The kernels of a plan, compiled by NVRTC for GPUs of some targets: ahead of time, without a GPU."""

import ctypes as c
import hashlib
import os
import re
import shutil
import site
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from qdqbench.quantize.engine.cuda.check import require_kernels
from qdqbench.quantize.engine.cuda.names import Target, is_ptx, list_instances
from qdqbench.quantize.engine.cuda.plan import Plan
from qdqbench.quantize.utils.errors import MissingDevice, QdqError, UserError
from qdqbench.quantize.utils.names import install_command

INSTALL_NVRTC = install_command("hopper")
_FOLDER = Path(__file__).parent


@cache
def get_version() -> str:
    """Return the version of the package and a hash of kernels and packer, which an engine is for."""
    digest = hashlib.sha256()
    for path in sorted([*_FOLDER.glob("*.py"), *_FOLDER.glob("kernels/*")]):
        digest.update(path.read_bytes())
    return f"{metadata.version('qdqbench')}-{digest.hexdigest()[:12]}"


def compile_kernels(plan: Plan, targets: Sequence[Target]) -> dict[str, dict[str, bytes]]:
    """Return the code of each source file that the plan needs, by target.

    Raises:
        UserError: sizes that no kernel takes, or a target that this NVRTC does not compile for.
        MissingDevice: NVRTC is not installed.
    """
    require_kernels(plan)
    _require_targets(targets)
    jobs = [(target, *each) for target in targets for each in list_lines([plan], target).items()]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = pool.map(lambda job: compile_source(job[1], job[2], job[0]), jobs)
    codes: dict[str, dict[str, bytes]] = {target.name: {} for target in targets}
    for (target, source, _), code in zip(jobs, made, strict=True):
        codes[target.name][source] = code
    return codes


def _require_targets(targets: Sequence[Target]) -> None:
    nvrtc, count, parts = load_nvrtc(), c.c_int(), (c.c_int(), c.c_int())
    _check(nvrtc.nvrtcGetNumSupportedArchs(c.byref(count)))
    known = (c.c_int * count.value)()
    _check(nvrtc.nvrtcGetSupportedArchs(known))
    if lost := [target.name for target in targets if _number(target) not in {*known}]:
        _check(nvrtc.nvrtcVersion(*map(c.byref, parts)))
        version = ".".join(str(part.value) for part in parts)
        raise UserError(
            f"NVRTC {version} does not compile for compute capability {', '.join(lost)}; {INSTALL_NVRTC}, or "
            "name other GPUs by --target"
        )


def _number(target: Target) -> int:
    return int(target.code.rpartition("_")[2].rstrip("a"))


def list_lines(plans: Iterable[Plan], target: Target) -> dict[str, list[str]]:
    """Return the lines that make the kernels of plans of the templates, by source file."""
    lines: dict[str, set[str]] = {}
    for plan in plans:
        for operation in plan.operations:
            for source, line, _ in list_instances(operation, plan, target):
                lines.setdefault(source, set()).add(line)
    return {source: sorted(made) for source, made in sorted(lines.items())}


def compile_source(name: str, instances: list[str], target: Target) -> bytes:
    """Return the cubin, or PTX, of kernels/NAME.cu with such instances of its templates."""
    source = "\n".join([read_source(f"{name}.cu"), *instances]).encode()
    shared = sorted(path.name for path in (_FOLDER / "kernels").glob("*.cuh"))
    nvrtc, program = load_nvrtc(), c.c_void_p()
    headers = (c.c_char_p * len(shared))(*[read_source(header).encode() for header in shared])
    names, place = (c.c_char_p * len(shared))(*map(str.encode, shared)), f"{name}.cu".encode()
    _check(nvrtc.nvrtcCreateProgram(c.byref(program), source, place, len(shared), headers, names))
    given = f"--gpu-architecture={target.code}", "--std=c++17"
    options = (c.c_char_p * len(given))(*map(str.encode, given))
    if nvrtc.nvrtcCompileProgram(program, len(given), options):
        raise QdqError(f"kernels/{name}.cu does not compile:\n{_read(program, 'ProgramLog').decode()}")
    code = _read(program, "PTX" if is_ptx(target) else "CUBIN")
    _check(nvrtc.nvrtcDestroyProgram(c.byref(program)))
    return code


def read_source(name: str) -> str:
    """Return a file of kernels."""
    return (_FOLDER / "kernels" / name).read_text()


def _read(program: c.c_void_p, what: str) -> bytes:
    size = c.c_size_t()
    _check(getattr(load_nvrtc(), f"nvrtcGet{what}Size")(program, c.byref(size)))
    text = c.create_string_buffer(size.value)
    _check(getattr(load_nvrtc(), f"nvrtcGet{what}")(program, text))
    return text.raw


@cache
def load_nvrtc() -> Any:
    """Load NVRTC: of the package `nvidia-cuda-nvrtc`, which CUDA builds of torch bring, or of the system."""
    found = _find_installed("lib/libnvrtc.so.1[23]")
    for path in (*found, Path("libnvrtc.so.13"), Path("libnvrtc.so.12")):
        try:
            for part in path.parent.glob("libnvrtc-builtins.so.*"):
                c.CDLL(str(part))  # NVRTC looks for it by name alone
            return c.CDLL(str(path))
        except OSError:
            continue
    raise MissingDevice(f"cuda compiles its kernels by NVRTC, which is not here; {INSTALL_NVRTC}")


def _find_installed(pattern: str) -> list[Path]:
    """Return files of NVIDIA's packages for Python."""
    folders = [*site.getsitepackages(), site.getusersitepackages(), *sys.path]
    return [path for folder in folders for path in Path(folder or ".").glob(f"nvidia/*/{pattern}")]


def find_products(cubin: bytes) -> dict[str, set[str]]:
    """Return the matrix instructions of each kernel, such as IGMMA; empty where nvdisasm is not installed."""
    tools = [*map(str, _find_installed("bin/nvdisasm")), shutil.which("nvdisasm")]
    if tools[0] is None:
        return {}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tools[0], "-c", file.name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)  # noqa: S603
    if done.returncode:
        raise QdqError(f"nvdisasm cannot read a cubin: {done.stderr.strip()[:200]}")
    kernels = re.split(r"^\.text\.(\w+):", done.stdout, flags=re.MULTILINE)[1:]
    return {
        name: set(re.findall(r"\b[A-Z]{1,2}MMA\b", code))
        for name, code in zip(kernels[::2], kernels[1::2], strict=True)
    }


def _check(status: int) -> None:
    if status:
        raise QdqError(f"NVRTC failed with status {status}")
