#!/usr/bin/env python3
"""Set up `.venv` beside this file and run the workbench or its checks in it; needs only Python 3.11 to 3.13.

python3 dev.py run [ARGUMENTS of `qdqbench run`]
python3 dev.py test [--all] [ARGUMENTS of pytest]
python3 dev.py lint

`run` without arguments makes a small BERT, takes it down the whole path, and times its engine.

`test` leaves out what goes a second way through what shorter tests go through once; `--all` runs it too,
and draws the examples of property tests at random. The linters of `lint` run next to the tests at a lower
priority, and their output comes after that of the tests.
"""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
LOCK = ROOT / "constraints.lock"
BUILD = ("setuptools", "wheel", "setuptools-scm")  # what this project and seqeval are built with
LOCAL_TORCH = re.compile(r"torch-[^-]*\+")  # a build for one device: not of PyPI, so you pointed pip at it
NOT_COMPILED = r"[/\\](tests|transformers[/\\]models)[/\\]"  # a third of the time; few are imported
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")


def install(extra: str, *options: str) -> bool:
    """Install the project with one extra, unless this pyproject and this lock already are.

    Every file is downloaded, held to the hashes of the lock, and installed without the network.

    Returns:
        Whether anything was installed.
    """
    marker = VENV / f"installed-{extra}"
    inputs = [(ROOT / "pyproject.toml").read_bytes(), LOCK.read_bytes()]
    wanted = hashlib.sha256(b"".join(inputs)).hexdigest()
    if marker.is_file() and marker.read_text() == wanted:
        return False
    if not BIN.is_dir():
        print("creating .venv", flush=True)
        venv.create(VENV, with_pip=True)
    print(f"installing qdqbench[{extra}] into .venv (a few minutes the first time)", flush=True)
    pip = [BIN / "python", "-m", "pip", "--disable-pip-version-check"]
    # seqeval has a setup.py only; an environment for each build takes a quarter of the time
    quiet = ["--quiet", "--use-pep517", "--no-build-isolation"]
    with tempfile.TemporaryDirectory(dir=VENV) as folder:
        # with hashes pip would refuse this folder, which has none
        constraints, files = Path(folder) / "constraints.txt", Path(folder) / "files"
        constraints.write_text(re.sub(r" *\\\n +--hash=\S+", "", LOCK.read_text()))
        offline = ["--isolated", "--no-index", "--find-links", files]
        for how, asked in (([], BUILD), (["--editable"], [f"{ROOT}[{extra}]"])):
            call(*pip, "download", *quiet, "-c", constraints, "-d", files, *asked)
            verify(files)
            call(*pip, "install", *quiet, "--upgrade", *options, *offline, *how, *asked)
    marker.write_text(wanted)
    return True


def verify(folder: Path) -> None:
    """End where a file is none that the lock lists."""
    known = {*re.findall(r"sha256:([0-9a-f]{64})", LOCK.read_text())}
    for file in sorted(folder.iterdir()):
        digest = hashlib.sha256()
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
        if digest.hexdigest() not in known and not LOCAL_TORCH.match(file.name):
            sys.exit(f"{file.name} is not the file that {LOCK.name} lists by its hash; nothing was installed")


def run(*command: object, **variables: str) -> int:
    """Run a command in the project's folder; its exit status."""
    environment = (
        os.environ | variables | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "VIRTUAL_ENV": str(VENV)}
    )
    return subprocess.run([str(part) for part in command], cwd=ROOT, env=environment, check=False).returncode


def call(*command: object, **variables: str) -> None:
    """Run a command in the project's folder; its failure is ours."""
    if status := run(*command, **variables):
        sys.exit(status)


def lint() -> None:
    """Run every linter, at a lower priority; fail if one does."""
    if hasattr(os, "nice"):
        os.nice(10)
    failed = []
    linked = {"PYTHONPATH": "build/types"}  # check_types.py makes it
    for command, variables in (
        (("ruff", "check", "."), {}),
        (("ruff", "format", "--check", "."), {}),
        (("python", "tools/check_types.py"), {}),
        (("lint-imports",), linked),
    ):
        name = " ".join(command)
        print(f"--- {name}", flush=True)
        if run(BIN / command[0], *command[1:], **variables):
            failed.append(name)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def test(words: list[str]) -> None:
    """Run the tests, and the linters next to them; the failure of either is ours."""
    # compiling modules is half of an installation: it takes all cores, beside the download of bindings; ours
    # are for the processes that tests start, where PYTHONDONTWRITEBYTECODE is set
    compiled = not install("dev", "--no-compile")
    folders = [VENV, *(ROOT / name for name in ("api", "eval", "quantize"))]
    compile_all = [BIN / "python", "-m", "compileall", "-qq", "-j0", "-x", NOT_COMPILED, *folders]
    compiling = None if compiled else subprocess.Popen(compile_all)
    call("sh", ROOT / "tools" / "fetch_bindings.sh", BIN / "python")
    given = [word for word in words if word != "--all"]
    chosen = [] if "--all" in words else ["-m", "not long"]
    profile = "fixed" if chosen else "random"
    pytest = (BIN / "python", "-m", "pytest", "-n", "auto", "--dist", "worksteal", "--durations=25")
    with tempfile.TemporaryFile("w+") as told:
        linting = subprocess.Popen([BIN / "python", __file__, "lint"], stdout=told, stderr=subprocess.STDOUT)
        if compiling:
            compiling.wait()
        status = run(*pytest, *chosen, *given, HYPOTHESIS_PROFILE=profile)
        failed = linting.wait()
        told.seek(0)
        print(f"=== linters: {'FAILED' if failed else 'passed'}\n{told.read()}", flush=True)
    sys.exit(status or failed)


def main() -> None:
    """Entry point."""
    if sys.argv[1:2] == ["run"]:
        install("quantize,rtx,openvino")
        # not in ROOT, whose paths the arguments do not mean; nor is .venv activated in the caller's shell
        done = subprocess.run([str(BIN / "qdqbench"), *sys.argv[1:]], check=False)
        sys.exit(done.returncode)
    if sys.argv[1:2] == ["test"]:
        test(sys.argv[2:])
    if sys.argv[1:] == ["lint"]:
        install("dev")
        lint()
    sys.exit(__doc__)


if __name__ == "__main__":
    main()
