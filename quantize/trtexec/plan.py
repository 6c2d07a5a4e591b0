"""The folder that goes to a machine with trtexec and comes back: what to run there, with which inputs.

`plan.json` says what each file is; `run.sh` makes the engine (NAME.engine, its layer table and log), the
answers (`output/`) and the times (`times/`, `profile/`). Inputs are raw binary files, C order, little-endian
int64.
"""

import hashlib
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from qdqbench.quantize.core import files
from qdqbench.quantize.core.arrays import Array
from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.core.names import name_list
from qdqbench.quantize.core.strict import Strict, read
from qdqbench.quantize.engine.profiles import Profile
from qdqbench.quantize.trtexec.command import (
    answer_options,
    build_options,
    inputs_text,
    quoted,
    shapes_text,
    time_options,
)

FOLDER, PLAN, SCRIPT = "trtexec", "plan.json", "run.sh"
MAX_CASES = 10_000
Feeds = Mapping[str, Array]
Inputs = dict[str, list[int]]  # shape of each input of a graph; -1: a dynamic axis
Graph = Literal["int8", "fp16", "fp32"]
# what becomes part of a path or of the script: a plan may come back from anywhere
FileName = Annotated[str, Field(pattern=r"^\w[\w.-]{0,99}$")]
CaseName = Annotated[str, Field(pattern=r"^\w{1,40}$")]


class Case(Strict):
    """One inference: the shape of its inputs, and the profile that takes it."""

    profile: int
    batch: int
    length: int
    sha256: str  # of the inputs


class Plan(Strict):
    """What trtexec is to do for a run."""

    schema_version: Literal[1] = 1
    graph: Graph  # the engine that is proven and verified: a key of `onnx`
    onnx: dict[Graph, FileName]  # in the folder above
    sha256: dict[Graph, str]  # of these files
    inputs: Inputs  # of the graph
    profiles: list[Profile]
    answers: dict[CaseName, Case]  # inferences of `graph`, by name
    timed: dict[CaseName, Case]  # shapes that every engine is timed at, by name


def digest(feeds: Feeds) -> str:
    """Of an inference's inputs: names, shapes and values."""
    found = hashlib.sha256()
    for name, values in sorted(feeds.items()):
        found.update(f"{name} {values.shape} ".encode())
        found.update(np.ascontiguousarray(values, "<i8").tobytes())
    return found.hexdigest()


def write_plan(folder: Path, plan: Plan, feeds: Mapping[str, Feeds]) -> bool:
    """Write a plan with its script and inputs; one that is there already stays, with what trtexec made.

    Args:
        folder: `FOLDER` of a run directory.
        feeds: inputs of each answer and each timed shape, int64.

    Returns:
        Whether it was written.

    Raises:
        UserError: the folder cannot be written, or names that trtexec cannot be told.
    """
    script = script_of(plan)
    if (folder / PLAN).is_file() and read_plan(folder) == plan and (folder / SCRIPT).is_file():
        return False
    with files.atomic_folder(folder) as made:
        (made / "inputs").mkdir()
        for name, each in feeds.items():
            for title, values in each.items():
                (made / _input(name, title)).write_bytes(np.ascontiguousarray(values, "<i8").tobytes())
        lines = [_line(plan, name, case) for name, case in plan.answers.items()]
        files.write_text(made / "answers.txt", "".join(lines))
        files.write_text(made / SCRIPT, script)
        files.write_json(made / PLAN, plan.model_dump(mode="json"))
    return True


def read_plan(folder: Path) -> Plan:
    """The plan of a folder.

    Raises:
        UserError: missing, damaged or of another version.
    """
    return read(folder / PLAN, Plan, "plan for trtexec", _again(folder))


def require_current(folder: Path, plan: Plan) -> None:
    """Hold a plan to the ONNX files of its run.

    Raises:
        UserError: they are others now.
    """
    run = folder.parent
    changed = [
        name
        for key, name in plan.onnx.items()
        if not (run / name).is_file() or files.sha256(run / name) != plan.sha256.get(key)
    ]
    if changed:
        raise UserError(
            f"what trtexec made in {folder} is of another {name_list(changed)} than the one at hand; "
            f"{_again(folder)}"
        )


def state(folder: Path) -> list[tuple[str, int, int]]:
    """What stages depend on: size and time of the plan, and of each engine, layer table, log and answer."""
    if not (folder / PLAN).is_file():
        return []
    return sorted(
        (str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns)
        for path in (*folder.glob("*.*"), *folder.glob("output/*.json"))
        if path.is_file()
    )


def has_engine(folder: Path) -> bool:
    """Whether trtexec built the engine of a folder's plan."""
    if not (folder / PLAN).is_file():
        return False
    graph = read_plan(folder).graph
    return (folder / f"{graph}.engine").is_file() and (folder / f"{graph}.layers.json").is_file()


def script_of(plan: Plan) -> str:
    """The script that runs trtexec, for any POSIX shell."""
    builds = "\n".join(_build(plan, name) for name in plan.onnx)
    answered = " ".join(
        f'"{option}"'
        for option in answer_options(plan.graph, "$profile", "$shapes", "$inputs", "output/$name.json")
    )
    timed = "\n".join(
        _command(
            f"times/{graph}.{name}.log",
            time_options(
                graph, str(case.profile), _shapes(plan, case), _inputs(plan, name), f"{graph}.{name}"
            ),
        )
        for name, case in plan.timed.items()
        for graph in plan.onnx
    )
    return f"""#!/bin/sh
# Written by qdqbench for the run in the folder above, whose ONNX files it reads. Run it on the GPU that the
# engine is for, where trtexec of TensorRT 10.14 to 11 is: NVIDIA's TensorRT container has it.
set -eu
cd "$(dirname "$0")"
mkdir -p output times profile
run() {{ # a log, then options of trtexec
  log=$1
  shift
  "${{TRTEXEC:-trtexec}}" "$@" > "$log" 2>&1 < /dev/null || {{ tail -n 20 "$log" >&2; exit 1; }}
}}

# Engines: strongly typed, with all profiles; their layer tables have datatypes
{builds}

# Answers of the {plan.graph} engine to inputs that qdqbench wrote
while read -r name profile shapes inputs; do
  [ -s "output/$name.json" ] || run last.log {answered}
done < answers.txt

# Latency: a CUDA graph without copies, and each kernel in a run of its own
{timed}
echo done
"""


def _build(plan: Plan, name: Graph) -> str:
    options = build_options(f"../{plan.onnx[name]}", name, plan.inputs, plan.profiles)
    forget = "  rm -f output/*.json\n" if name == plan.graph else ""
    command = _command(f"{name}.log", options).replace("\n", "\n  ")
    return f"if [ ! -s {name}.engine ] || [ ! -s {name}.layers.json ]; then\n{forget}  {command}\nfi"


def _timed(plan: Plan, graph: str, name: str) -> str:
    case, stem = plan.timed[name], f"{graph}.{name}"
    shapes, inputs = _shapes(plan, case), _inputs(plan, name)
    return _command(f"times/{stem}.log", time_options(graph, str(case.profile), shapes, inputs, stem))


def _command(log: str, options: list[str]) -> str:
    return " \\\n  ".join([f"run {log}", *map(shlex.quote, options)])


def _line(plan: Plan, name: str, case: Case) -> str:
    return f"{name} {case.profile} {_shapes(plan, case)} {_inputs(plan, name)}\n"


def _shapes(plan: Plan, case: Case) -> str:
    return shapes_text(plan.inputs, (case.batch, case.length))


def _inputs(plan: Plan, name: str) -> str:
    return inputs_text({title: _input(name, title) for title in plan.inputs})


def _input(name: str, title: str) -> str:
    quoted(title)  # a name that it refuses could be a path, too
    return f"inputs/{name}.{title.replace('/', '_').replace(':', '_')}.bin"


def _again(folder: Path) -> str:
    return f"run `qdqbench build {folder.parent} --print-trtexec` again"
