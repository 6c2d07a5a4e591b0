"""Scripts of a run's folder `deploy`, as they are, in a fresh Python without what they must not need."""

import json
import os
import subprocess
import sys

FORBIDDEN = ("qdqbench", "torch", "transformers", "onnx", "datasets")


def fresh(blocked, forbidden=FORBIDDEN):
    """Environment variables of a Python in which modules of the folder `blocked` refuse to be imported."""
    blocked.mkdir(exist_ok=True)
    for name in forbidden:
        (blocked / f"{name}.py").write_text(f"raise ImportError('{name} is not to be needed')\n")
    return {"PATH": os.environ["PATH"], "PYTHONPATH": str(blocked), "OMP_NUM_THREADS": "1"}


def run_script(script, blocked, *texts, lines=None, forbidden=FORBIDDEN):
    """The finished process; texts on its command line, or lines of its standard input."""
    return subprocess.run(
        [sys.executable, str(script), *texts],
        input="".join(f"{line}\n" for line in lines or []),
        cwd="/",
        env=fresh(blocked, forbidden),
        capture_output=True,
        text=True,
        check=False,
    )


def answers(script, blocked, *texts, lines=None):
    """What a script says; it must end well and say nothing else."""
    done = run_script(script, blocked, *texts, lines=lines)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
