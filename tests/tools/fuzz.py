"""Random search for inputs that break a reader: damaged bytes and disfigured graphs, for a limited time.

    python -m tests.tools.fuzz [--minutes 5] [--seed N] [TARGET ...]

A target is a reader of foreign files, or `hypothesis`: the property tests with random draws. What breaks a
reader is shortened and printed with its seed, and the exit status is 1. Add it to the explicit examples of
that reader's test.
"""

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from tests.support.disfigured import disfigure
from tests.support.foreign_layer import float_layer
from tests.support.fuzz import broken
from tests.support.records import engine_result
from tests.support.tiny_layer import FORMS, healthy
from tests.unit.engine.diagnose.test_hostile import BASES

from qdqbench.eval.metrics.logits import read_answers
from qdqbench.quantize.engine.cache_import.cache_file import read_cache_file
from qdqbench.quantize.engine.diagnose.diagnose import diagnose
from qdqbench.quantize.engine.repair.fix import FixOptions, rewrite
from qdqbench.quantize.engine.trtexec.read import read_outputs, read_profile, read_times
from qdqbench.quantize.graph.check.check import check_file, check_model, to_json
from qdqbench.quantize.graph.read import read_model
from qdqbench.quantize.recipe.schema import load_recipe
from qdqbench.quantize.utils.arrays import read_arrays
from qdqbench.quantize.utils.errors import QdqError
from qdqbench.quantize.utils.results import EngineResult
from qdqbench.quantize.utils.schema import read

ROOT = Path(__file__).parents[2]
SECONDS = 20.0  # of CPU for one case
PROPERTIES = [
    f"tests/unit/{name}" for name in ("graph", "gate", "recipe", "engine", "core", "machine", "tasks")
]
Reader = Callable[[Path], object]


def rewritten(path: Path) -> object:
    """Do what `fix` does to a graph before it runs it."""
    model = read_model(path)
    if {row.code for row in check_model(model).findings} & {"invalid-onnx", "opset-too-low"}:
        return None
    return rewrite(model, FixOptions(), {}, [], [])


def archives() -> list[bytes]:
    """Return archives of logits, as a stage writes them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.npz"
        np.savez(
            path,
            **{"validation.logits": np.zeros((9, 2), np.float32), "validation.labels": np.zeros(9, np.int64)},
        )
        return [path.read_bytes()]


def graphs() -> list[bytes]:
    """Return good ONNX files of several forms."""
    return [*(healthy(form).SerializeToString() for form in FORMS), float_layer().SerializeToString()]


def engines() -> list[bytes]:
    """Return what a run records of an engine."""
    return [engine_result(12).model_dump_json().encode()]


def recipes() -> list[bytes]:
    """Return every shipped recipe."""
    return [path.read_bytes() for path in sorted((ROOT / "recipes").glob("*/*.yaml"))]


TARGETS: dict[str, tuple[Reader, Callable[[], list[bytes]]]] = {
    "check": (lambda path: json.dumps(to_json(check_file(path)), allow_nan=False), graphs),
    "fix": (rewritten, graphs),
    "recipe": (lambda path: load_recipe(str(path)), recipes),
    "engine record": (lambda path: read(path, EngineResult, "engine record", "build it again"), engines),
    "arrays": (lambda path: read_arrays(path, "write it again"), archives),
    "answers": (read_answers, archives),
    "cache": (read_cache_file, BASES["cache"]),
    "times": (read_times, BASES["times"]),
    "profile": (read_profile, BASES["profile"]),
    "outputs": (read_outputs, lambda: [b'[{"name": "a", "dimensions": "1x2", "values": [nan, -inf(0x8)]}]']),
    **{f"diagnose {kind}": (lambda path: diagnose([path]), base) for kind, base in BASES.items()},
}  # fmt: skip


def cases(samples: list[bytes], seed: int) -> Iterator[bytes]:
    """Yield damaged files; of graphs, half are well-formed ones with odd parts."""
    import onnx

    chance, damaged = random.Random(seed), broken(samples, 1 << 40, seed)
    for data in damaged:
        if chance.random() < 0.5 and samples[0][:1] == b"\x08":
            model = onnx.load_from_string(chance.choice(samples))
            with contextlib.suppress(Exception):  # it was disfigured beyond what onnx lets one write
                disfigure(model, chance)
            for node in model.graph.node:
                if chance.random() < 0.03:
                    node.domain = chance.choice(["com.microsoft", "ai.onnx", "other"])
                if chance.random() < 0.03:
                    del node.output[chance.randrange(len(node.output) + 1) :]
            model.opset_import.extend(
                [onnx.helper.make_opsetid("com.microsoft", 1), onnx.helper.make_opsetid("other", 1)]
            )
            yield model.SerializeToString()
        else:
            yield data


def fault_of(reader: Reader, path: Path, data: bytes) -> str:
    """Return how a reader breaks on these bytes: an exception that is not ours, a long sentence, or time."""
    path.write_bytes(data)
    start = time.process_time()
    try:
        reader(path)
    except QdqError as error:
        if "\n" in str(error) or len(str(error)) > 5_000:
            return f"no sentence: {str(error)[:200]!r}"
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}: {str(error)[:200]}"
    return f"over {SECONDS} s" if time.process_time() - start > SECONDS else ""


def shortened(reader: Reader, path: Path, data: bytes, fault: str, until: float) -> bytes:
    """Remove parts of a case while it breaks in the same way."""
    size = len(data) // 2
    while size and time.monotonic() < until:
        place = 0
        while place < len(data) and time.monotonic() < until:
            shorter = data[:place] + data[place + size :]
            if fault_of(reader, path, shorter).partition(": ")[0] == fault.partition(": ")[0]:
                data = shorter
            else:
                place += size
        size //= 2
    return data


def search(name: str, seed: int, seconds: float) -> list[str]:
    """Look for faults of one reader; every kind of fault once."""
    reader, make = TARGETS[name]
    until, count, faults = time.monotonic() + seconds, 0, dict[str, str]()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ("file.yaml" if name == "recipe" else "file")
        for data in cases(make(), seed):
            if time.monotonic() > until:
                break
            count += 1
            fault = fault_of(reader, path, data)
            if fault and fault.partition(": ")[0] not in faults:
                shortest = shortened(reader, path, data, fault, time.monotonic() + 30)
                faults[fault.partition(": ")[0]] = f"{name}, seed {seed}: {fault}\n  {shortest[:2000]!r}"
                print(faults[fault.partition(": ")[0]], flush=True)
    print(f"{name}: {count} cases, {len(faults)} faults", flush=True)
    return [*faults.values()]


def properties(seed: int, seconds: float) -> list[str]:
    """Run the property tests with random draws, again and again."""
    until, faults = time.monotonic() + seconds, []
    while time.monotonic() < until:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-m", "hypothesis and not long"]
        done = subprocess.run(
            [*command, f"--hypothesis-seed={seed}", *PROPERTIES],
            cwd=ROOT, env=os.environ | {"HYPOTHESIS_PROFILE": "random"}, stdout=subprocess.PIPE, text=True,
            check=False,
        )  # fmt: skip
        print(f"hypothesis, seed {seed}: {done.stdout.strip().splitlines()[-1:]}", flush=True)
        if done.returncode:
            print(done.stdout[-4000:], flush=True)
            faults.append(f"hypothesis, seed {seed}")
        seed += 1
    return faults


def main() -> None:
    """Share the time among the targets."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("targets", nargs="*", choices=[*TARGETS, "hypothesis", []], default=[])
    options.add_argument("--minutes", type=float, default=5.0)
    options.add_argument("--seed", type=int, default=int(time.time()))
    given = options.parse_args()
    names = given.targets or [*TARGETS, "hypothesis"]
    seconds, faults = 60 * given.minutes / len(names), []
    print(f"seed {given.seed}", flush=True)
    for name in names:
        faults += (
            properties(given.seed, seconds) if name == "hypothesis" else search(name, given.seed, seconds)
        )
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
