"""Everything behind `docs/measured-real` that needs a GPU: fine-tunings, and runs of recipes, side by side.

    python -m tests.tools.real_size.measure train --models MODELS --data GLUE --work WORK --out OUT
    python -m tests.tools.real_size.measure runs --models MODELS --data GLUE --work WORK --out OUT
    python tests/tools/measure_tables.py lengths-real --models WORK --data GLUE --out OUT
    python tests/tools/tables.py --summarize OUT

MODELS holds `mpnet` and `minilm-l6`, which are all-mpnet-base-v2 and all-MiniLM-L6-v2 with weights in FP16.
`train` heals `bert-base` from `mpnet` (heal.py), and fine-tunes all three on the tasks. `runs` takes each
model, task, recipe and backend to an engine and evaluates it: first the first seed and the first backend. A
job whose result is in OUT is not done again; its log is WORK/NAME.log. Weights stay in WORK; runs read them
from WORK/tuned, rounded to FP16. Runs that `lengths-real` times stay there too. With several GPUs give each a
command of its own: CUDA_VISIBLE_DEVICES chooses the GPU, and --only the models.

Start CUDA MPS first (`nvidia-cuda-mps-control -d`), or processes take turns on the GPU. Stop it before
anything is timed. No process may use the GPU without it then, or some are refused. A worker needs a core.
"""

import argparse
import functools
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file
from tests.tools.measure_tables import PROGRAM

HEAL = Path(__file__).with_name("heal.py")
BASE, SMALL = ("bert-base", "mpnet"), "minilm-l6"
SEEDS = {"sst2": 3, "mrpc": 3, "stsb": 3}  # one for other tasks, and one of MiniLM
LARGE = ["--batch-size", "128", "--learning-rate", "1e-4"]
MIDDLE = ["--batch-size", "64", "--learning-rate", "7e-5"]
TRAINED = {  # options of a task's fine-tuning: the longest first
    "sst2": ["--epochs", "2", "--batch-size", "256", "--learning-rate", "1e-4"],
    "qqp": ["--epochs", "2", *LARGE],
    "mnli": ["--epochs", "3", *LARGE],
    "stsb": [
        "--epochs",
        "6",
        "--batch-size",
        "64",
        "--learning-rate",
        "3e-5",
    ],  # 7e-5: two seeds of three learned nothing
    "mrpc": ["--epochs", "4", *MIDDLE],
    "rte": ["--epochs", "6", *MIDDLE],
    "wnli": ["--epochs", "3"],
}
FOR_SMALL = {  # sst2, mrpc and stsb are measured already
    "qqp": ["--epochs", "3", *LARGE],
    "mnli": ["--epochs", "3"],
    "rte": ["--epochs", "12", "--learning-rate", "1e-4"],
    "wnli": ["--epochs", "3"],
}
ALIKE = ["--num-evals", "1"]  # one checkpoint: those of a base model are large
RECIPES = (
    "int8-residual-fused", "int8-attention", "int8-linears", "int8-residual", "int8-ffn",
    "int8-linears-per-tensor",
)  # fmt: skip
BACKENDS = {"bert": ("cuda", "tensorrt_rtx", "openvino"), "mpnet": ("tensorrt_rtx", "openvino")}
SEEDED = RECIPES[:3]  # that models of later seeds are taken through
ROWS = {"qqp": ["--limit", "10000"]}  # of 40,430
TIMED = RECIPES[0]  # whose runs stay in WORK
FINETUNED, RESULTS, TUNED = "finetune.json", "results.json", "tuned"


@dataclass(frozen=True)
class Job:
    """A command and the file that it leaves."""

    name: str
    command: list[str]
    file: Path
    printed: bool = False  # the file is what the command prints
    after: str = ""  # job that has to end before
    heavy: Path | None = None  # folder that goes at the end


def finetunings(given: argparse.Namespace) -> Iterator[Job]:
    """Heal, and fine-tune all models on all tasks."""
    models, data, work, healed = given.models, given.data, given.work, given.work / "bert-base"
    options = [str(models / "mpnet"), str(healed), "--texts", data, *given.heal.split()]
    yield Job("heal", [sys.executable, str(HEAL), *options], healed / "heal.json")
    for model, tasks in ((SMALL, FOR_SMALL), ("mpnet", TRAINED), ("bert-base", TRAINED)):
        base = healed if model == "bert-base" else models / model
        for task, settings in tasks.items():
            name = f"{model}-{task}"
            seeds = SEEDS.get(task, 1) if model in BASE else 1
            shared = ["--model", str(base), "--task", task, "--data", data, "--seeds", str(seeds)]
            command = [*PROGRAM, "finetune", *shared, *settings, *ALIKE, "--out", str(work / name)]
            after = "heal" if model == "bert-base" else ""
            yield Job(name, command, work / name / FINETUNED, after=after)


def runs(given: argparse.Namespace) -> Iterator[Job]:
    """Take all models, tasks and recipes to an engine, and some tasks to one of each backend."""
    work, out = given.work, given.out
    order = itertools.product(range(max(SEEDS.values())), range(3), RECIPES)
    for seed, which, recipe in sorted(order, key=lambda each: (sum(each[:2]), RECIPES.index(each[2]))):
        for task, model in itertools.product(TRAINED, (*BASE, SMALL)):
            own, later = "mpnet" if model == "mpnet" else "bert", f"-seed-{seed}" if seed else ""
            tuned = work / TUNED / f"{model}-{task}{later}"
            if not tuned.is_dir() or (own == "mpnet" and recipe == "int8-linears-per-tensor"):
                continue
            if which and (seed or task not in SEEDS or which >= len(BACKENDS[own])):
                continue
            backend = BACKENDS[own][which]
            if (seed and recipe not in SEEDED) or (backend == "openvino" and "residual" in recipe):
                continue  # no runtime for CPUs reads an INT8 residual
            name = f"{model}-{task}-{recipe}{later}-{backend}"
            command = [*PROGRAM, "run", f"{own}-{recipe}", "--model", str(tuned), "--task", task]
            command += ["--data", given.data, "--out", str(work / name), "--seed", str(seed)]
            command += [*ROWS.get(task, []), "--backend", backend, "--until", "engine", "--json"]
            timed = recipe == TIMED and task in SEEDS and not seed and not which
            heavy = None if timed else work / name
            yield Job(name, command, out / name / RESULTS, printed=True, heavy=heavy)


def round_weights(trained: Path, tuned: Path) -> None:
    """Move the models of a fine-tuning to the names that results are to have, with weights in FP16."""
    for model in sorted(trained.glob("seed-*/model")):
        seed = int(model.parent.name.removeprefix("seed-"))
        named = tuned / (trained.name + (f"-seed-{seed}" if seed else ""))
        part = tuned / f"{named.name}.part"
        if named.is_dir():
            continue
        shutil.copytree(model, part, ignore=shutil.ignore_patterns("*.safetensors"))
        for file in model.glob("*.safetensors"):
            weights = {
                name: value.half() if value.is_floating_point() else value
                for name, value in load_file(file).items()
            }
            save_file(weights, part / file.name, {"format": "pt"})
        part.rename(named)
        shutil.rmtree(model.parent)  # 42 models with checkpoints would fill a disk


def do(job: Job, work: Path, until: float, first: "Future[str] | None") -> str:
    """Run the command of a job whose file is missing; return a line about it."""
    if first is not None:
        first.result()
    if job.file.is_file():
        return f"{job.name}: is there"
    started = time.monotonic()
    if started >= until:
        return f"{job.name}: left out, no time is left"
    log = (work / f"{job.name}.log").open("a")
    printed = job.file.with_suffix(".part")
    if job.printed:
        printed.parent.mkdir(parents=True, exist_ok=True)
    with log, printed.open("w") if job.printed else log as into:
        process = subprocess.Popen(job.command, stdout=into, stderr=log)
        try:
            status = process.wait(until - started)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            status = process.wait()
    # 2: finished, and something does not hold, which is a result too
    if job.printed and status in (0, 2) and printed.stat().st_size:
        printed.rename(job.file)
    if job.heavy is not None:
        shutil.rmtree(job.heavy, ignore_errors=True)
    return f"{job.name}: {time.monotonic() - started:.0f} s, status {status}"


def keep_records(work: Path, out: Path) -> None:
    """Copy the records of trainings, which are small, next to the results."""
    for pattern in (FINETUNED, "heal.json"):
        for file in sorted(work.glob(f"*/{pattern}")):
            target = out / file.parent.name / file.name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)


def main(arguments: list[str] | None = None) -> int:
    """Do all jobs of a kind; returns 1 if any left no result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    kinds = {"train": finetunings, "runs": runs}
    parser.add_argument("kind", choices=kinds)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--work", type=Path, required=True, help="models and run directories: tens of GB")
    parser.add_argument("--out", type=Path, required=True, help="results files")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="jobs at a time")
    parser.add_argument("--seconds", type=float, default=86400, help="limit of all")
    parser.add_argument("--heal", default="--steps 3000 --seconds 200", help="options of heal.py")
    parser.add_argument("--only", nargs="*", default=[""], help="jobs whose name begins so")
    given = parser.parse_args(arguments)
    given.work.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    done: dict[str, Future[str]] = {}

    def tell(job: Job, future: "Future[str]") -> None:
        print(f"{time.monotonic() - begun:5.0f} s: {future.result()}", flush=True)
        keep_records(given.work, given.out)
        if not job.printed:
            round_weights(given.work / job.name, given.work / TUNED)

    asked = [job for job in kinds[given.kind](given) if job.name.startswith(tuple(given.only))]
    with ThreadPoolExecutor(given.workers) as pool:
        for job in asked:
            before = done.get(job.after)
            done[job.name] = pool.submit(do, job, given.work, begun + given.seconds, before)
            done[job.name].add_done_callback(functools.partial(tell, job))
    return int(any(not job.file.is_file() for job in asked))


if __name__ == "__main__":
    sys.exit(main())
