#!/usr/bin/env python3
"""Set up `.venv` beside this file and run the workbench or its checks in it; needs only Python 3.10 to 3.13.

python3 dev.py run [ARGUMENTS of `qdqbench run`]
python3 dev.py test [--all] [ARGUMENTS of pytest]

`run` without arguments makes a small BERT, takes it down the whole path, and times its engine.

`test` leaves out what goes a second way through what shorter tests go through once; `--all` runs it too,
and draws the examples of property tests at random.
"""

import hashlib
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
MEASURE = ["bench", "runs/bert-int8-linears-embedded", "--batch", "32", "--length", "32", "--no-baselines"]
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")


def install(extra: str, *options: str) -> bool:
    """Install the project with one extra, unless this pyproject and these constraints already are.

    Returns:
        Whether anything was installed.
    """
    marker = VENV / f"installed-{extra}"
    inputs = [(ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
    wanted = hashlib.sha256(b"".join(inputs)).hexdigest()
    if marker.is_file() and marker.read_text() == wanted:
        return False
    if not BIN.is_dir():
        print("creating .venv", flush=True)
        venv.create(VENV, with_pip=True)
    print(f"installing qdqbench[{extra}] into .venv (a few minutes the first time)", flush=True)
    pip = [BIN / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *options]
    pip.append("--use-pep517")  # the pip of Python 3.10 builds seqeval in a way that its setup.py has left
    constraints = ["--constraint", ROOT / "constraints.txt"]
    # torch first: with the pinned version in place nothing else pulls in another build of it
    call(*pip, *constraints, "torch")
    call(*pip, *constraints, "--editable", f"{ROOT}[{extra}]")
    marker.write_text(wanted)
    return True


def call(*command: object, **variables: str) -> None:
    """Run a command in the project's folder; its failure is ours."""
    environment = (
        os.environ | variables | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "VIRTUAL_ENV": str(VENV)}
    )
    done = subprocess.run([str(part) for part in command], cwd=ROOT, env=environment, check=False)
    if done.returncode:
        sys.exit(done.returncode)


def main() -> None:
    """Entry point."""
    if sys.argv[1:2] == ["run"]:
        install("rtx,openvino")
        # not in ROOT: the paths among the arguments are the caller's
        environment = os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
        commands = [sys.argv[1:]] if sys.argv[2:] else [["run"], MEASURE]
        for words in commands:
            done = subprocess.run([str(BIN / "qdqbench"), *words], env=environment, check=False)
            if done.returncode:
                sys.exit(done.returncode)
        return
    if sys.argv[1:2] == ["test"]:
        # compiling modules is half of an installation, on one core: it goes beside the checks of the code
        compiled = not install("dev", "--no-compile")
        compiling = None if compiled else subprocess.Popen([BIN / "python", "-m", "compileall", "-qq", VENV])
        call("sh", ROOT / "tests" / "fetch_bindings.sh", BIN / "python")
        call(BIN / "ruff", "check", ".")
        call(BIN / "ruff", "format", "--check", ".")
        call(BIN / "python", "tests/types.py")
        call(BIN / "lint-imports", PYTHONPATH="build/types")  # the links that types.py made
        if compiling:
            compiling.wait()
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # each worker is one core
        given = [word for word in sys.argv[2:] if word != "--all"]
        chosen = [] if "--all" in sys.argv else ["-m", "not long"]
        profile = "fixed" if chosen else "random"
        pytest = (BIN / "python", "-m", "pytest", "-n", "auto", "--dist", "worksteal", *chosen, *given)
        call(*pytest, HYPOTHESIS_PROFILE=profile)
        return
    sys.exit(__doc__)


if __name__ == "__main__":
    main()
