"""Everything behind `docs/measured-real` that needs a GPU: fine-tunings, and runs of recipes, side by side.

    nvidia-cuda-mps-control -d
    python -m tools.real_size.measure all --models MODELS --data GLUE --work WORK --out OUT --gpus 2
    echo quit | nvidia-cuda-mps-control
    python tools/measure_tables.py lengths-real --models WORK --data GLUE --out OUT
    python tools/tables.py --summarize OUT

MODELS holds `mpnet` and `minilm-l6`, which are all-mpnet-base-v2 and all-MiniLM-L6-v2 with weights in FP16.
`train` heals `bert-base` from `mpnet` (heal.py), and fine-tunes all three on the tasks. `runs` takes each
model, task and recipe to engines and evaluates them, those of TensorRT-RTX last. `all` does both, each run as
soon as its model is there. A job whose result is in OUT is not done again; its log is
WORK/NAME.log. Weights stay in WORK; runs read them from WORK/tuned, rounded to FP16. Runs that `lengths-real`
times stay there too.

Without CUDA MPS, processes take turns on a GPU. Beside MPS no process may use the GPU without it, or some are
refused. To use some GPUs of a machine, give CUDA_VISIBLE_DEVICES to the daemon and to this program alike. A
worker needs a core: 33 workers on 32 CPUs took 70 to 85 s for a run of BERT-base by `cuda`, and 56 on 64 took
117 to 230 s. A run takes 6 GB of memory; one in TensorRT-RTX takes 11 GB, and 430 to 550 s. Healing waits
until a GPU is free of other jobs. Benches that --build-only has prepared take 37 to 72 s each.
"""

import argparse
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file
from tools.measure_tables import PROGRAM, REAL, TUNED, find_idle, name_run

HEAL = Path(__file__).with_name("heal.py")
SMALL = "minilm-l6"
SEEDS = {"sst2": 3, "mrpc": 3, "stsb": 3, "rte": 3}  # of bert-base; one for other tasks and models
LARGE = ["--batch-size", "128", "--learning-rate", "1e-4"]
MIDDLE = ["--batch-size", "64", "--learning-rate", "7e-5"]
LOW = ["--batch-size", "64", "--learning-rate", "3e-5"]  # at 7e-5 Pearson was 0.05, 0.24 and 0.87
TRAINED = {  # options of a task's fine-tuning: the longest first
    "sst2": ["--epochs", "2", "--batch-size", "256", "--learning-rate", "1e-4"],
    "qqp": ["--epochs", "2", *LARGE],
    "mnli": ["--epochs", "3", *LARGE],
    "stsb": ["--epochs", "6", *LOW],
    "mrpc": ["--epochs", "4", *MIDDLE],
    "rte": ["--epochs", "6", *LOW],
    "wnli": ["--epochs", "3"],
}
FOR_SMALL = {  # sst2, mrpc and stsb are measured already
    "qqp": ["--epochs", "3", *LARGE],
    "mnli": ["--epochs", "3"],
    "rte": ["--epochs", "12", "--learning-rate", "1e-4"],
    "wnli": ["--epochs", "3"],
}
MODELS = {SMALL: FOR_SMALL, "mpnet": TRAINED, "bert-base": TRAINED}
# RTE's train split is small: a healed model has 60% when it learns RTE alone (arXiv:1907.11692, section 5.1)
FIRST = {("bert-base", "rte"): "mnli"}
ALIKE = ["--num-evals", "1"]  # one checkpoint: those of a base model are large
RECIPES = (
    "int8-residual-fused", "int8-attention", "int8-linears", "int8-residual", "int8-ffn",
    "int8-linears-per-tensor",
)  # fmt: skip
CUDA, OPENVINO, RTX = BACKENDS = ("cuda", "openvino", "tensorrt_rtx")  # the quickest first
SEEDED = RECIPES[:3]  # that models of later seeds are taken through
EVERYWHERE = (*SEEDS, "mnli")  # tasks on which base models run in all backends
QAT = ("int8-residual-qat", "int8-attention-qat")  # of bert-base, on the tasks of EVERYWHERE
EMBED = "embed"  # the encoders as they are, on STS-B
EMBEDDER = ["--task", "stsb", "--pooling", "mean", "--normalize"]
ROWS = {"qqp": ["--limit", "10000"]}  # of 40,430
TIMED = {name_run(*run) for run in REAL}  # they stay in WORK
FINETUNED, RESULTS = "finetune.json", "results.json"


@dataclass(frozen=True)
class Job:
    """A command and the file that it leaves."""

    name: str
    command: list[str]
    file: Path
    printed: bool = False  # the file is what the command prints
    after: str = ""  # job that has to end before
    alone: bool = False  # on its GPU
    heavy: Path | None = None  # folder that goes at the end


def finetunings(given: argparse.Namespace) -> Iterator[Job]:
    """Heal, and fine-tune all models on all tasks."""
    models, data, work, healed = given.models, given.data, given.work, given.work / "bert-base"
    options = [str(models / "mpnet"), str(healed), "--texts", data, *given.heal.split()]
    yield Job("heal", [sys.executable, str(HEAL), *options], healed / "heal.json", alone=True)
    for model, tasks in MODELS.items():
        base = healed if model == "bert-base" else models / model
        for task, settings in tasks.items():
            name, seeds = f"{model}-{task}", str(count_seeds(model, task, given.seeds))
            after = "heal" if model == "bert-base" else ""
            source = base
            if first := FIRST.get((model, task)):
                after = f"{model}-{first}"
                source = work / TUNED / after
            shared = ["--model", str(source), "--task", task, "--data", data, "--seeds", seeds]
            command = [*PROGRAM, "finetune", *shared, *settings, *ALIKE, "--out", str(work / name)]
            yield Job(name, command, work / name / FINETUNED, after=after)


def count_seeds(model: str, task: str, most: int) -> int:
    return min(most, SEEDS.get(task, 1)) if model == "bert-base" else 1


def choose_backends(model: str, task: str, recipe: str, seed: int) -> list[str]:
    """Return the backends of a run: the model's own, and for some tasks of seed 0 all others."""
    own = RTX if model == "mpnet" else CUDA
    chosen = [own] if not seed or recipe in SEEDED else []
    if not seed and (task == EMBED or (task in EVERYWHERE and model != SMALL)):
        chosen += [each for each in (OPENVINO, RTX) if each != own]
    # no runtime for CPUs reads an INT8 residual
    return [each for each in chosen if each != OPENVINO or "residual" not in recipe]


def runs(given: argparse.Namespace) -> Iterator[Job]:
    """Take models, tasks and recipes to engines: the quick ones of the first seed first."""
    work, out, planned = given.work, given.out, []
    for (model, tasks), recipe in itertools.product(MODELS.items(), RECIPES):
        if model == "mpnet" and recipe == "int8-linears-per-tensor":
            continue
        for task in (*tasks, EMBED):
            for seed in range(count_seeds(model, task, given.seeds)):
                for backend in choose_backends(model, task, recipe, seed):
                    place = BACKENDS.index(backend), seed, RECIPES.index(recipe)
                    planned.append((place, model, task, backend, recipe))
    trained = itertools.product(QAT, EVERYWHERE)
    planned += [((0, 0, len(RECIPES)), "bert-base", task, CUDA, recipe) for recipe, task in trained]
    for (_, seed, _), model, task, backend, recipe in sorted(planned):
        if backend not in given.backends:
            continue
        later = f"-seed-{seed}" if seed else ""
        source, after, asked = work / TUNED / f"{model}-{task}{later}", f"{model}-{task}", ["--task", task]
        if task == EMBED:
            after, asked = "heal" if model == "bert-base" else "", EMBEDDER
            source = source if after else given.models / model
        if given.kind == "runs" and not source.is_dir():
            continue
        name = name_run(model, task, f"{recipe}{later}", backend)
        own = f"{'mpnet' if model == 'mpnet' else 'bert'}-{recipe}"
        command = [*PROGRAM, "run", own, "--model", str(source), *asked, "--data", given.data]
        command += ["--out", str(work / name), "--seed", str(seed), *ROWS.get(task, [])]
        command += ["--backend", backend, "--until", given.until, "--json"]
        heavy = None if name in TIMED else work / name
        yield Job(name, command, out / name / RESULTS, printed=True, after=after, heavy=heavy)


def name_models(job: str, work: Path) -> None:
    """Give the models of a training the names that results are to have, with weights in FP16."""
    if job == "heal" and (work / "bert-base" / "heal.json").is_file():
        round_weights(work / "bert-base", work / TUNED / f"bert-base-{EMBED}")
    for model in sorted((work / job).glob("seed-*/model")):
        seed = int(model.parent.name.removeprefix("seed-"))
        round_weights(model, work / TUNED / (job + (f"-seed-{seed}" if seed else "")))
        shutil.rmtree(model.parent)  # 42 models with checkpoints would fill a disk


def round_weights(model: Path, named: Path) -> None:
    """Copy a model, unless it is there, with weights in FP16."""
    part = named.with_name(f"{named.name}.part")
    if named.is_dir():
        return
    shutil.copytree(model, part, ignore=shutil.ignore_patterns("*.safetensors"))
    for file in model.glob("*.safetensors"):
        weights = {
            name: value.half() if value.is_floating_point() else value
            for name, value in load_file(file).items()
        }
        save_file(weights, part / file.name, {"format": "pt"})
    part.rename(named)


def do(job: Job, given: argparse.Namespace, until: float, gpu: str | None) -> str:
    """Run the command of a job whose file is missing; return a line about it."""
    if job.file.is_file():
        return f"{job.name}: is there"
    started = time.monotonic()
    if started >= until:
        return f"{job.name}: left out, no time is left"
    environment = dict(os.environ)
    if not job.alone:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // given.workers)))
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    log = (given.work / f"{job.name}.log").open("a")
    printed = job.file.with_suffix(".part")
    if job.printed:
        printed.parent.mkdir(parents=True, exist_ok=True)
    with log, printed.open("w") if job.printed else log as into:
        process = subprocess.Popen(job.command, stdout=into, stderr=log, env=environment)
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


def choose_gpu(job: Job, running: Collection[tuple[Job, int]], gpus: int) -> int | None:
    """Return the GPU with the fewest jobs that may take one more; None where each is taken."""
    there = [[other for other, gpu in running if gpu == number] for number in range(gpus)]
    free = [
        number
        for number, jobs in enumerate(there)
        if not any(other.alone for other in jobs) and not (job.alone and jobs)
    ]
    return min(free, key=lambda number: len(there[number]), default=None)


def do_all(asked: Sequence[Job], given: argparse.Namespace) -> None:
    """Run jobs side by side, each after the job that it needs, and tell of each as it ends."""
    begun, waiting = time.monotonic(), [*asked]
    running: dict[Future[str], tuple[Job, int]] = {}
    with ThreadPoolExecutor(given.workers) as pool:
        while waiting or running:
            unfinished = {job.name for job in waiting} | {job.name for job, _ in running.values()}
            for job in [job for job in waiting if job.after not in unfinished]:
                gpu = choose_gpu(job, running.values(), given.gpus)
                if gpu is None or len(running) >= given.workers:
                    continue
                waiting.remove(job)
                chosen = str(gpu) if given.gpus > 1 else None
                running[pool.submit(do, job, given, begun + given.seconds, chosen)] = job, gpu
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job, _ = running.pop(future)
                print(f"{time.monotonic() - begun:5.0f} s: {future.result()}", flush=True)
                keep_records(given.work, given.out)
                if not job.printed:
                    name_models(job.name, given.work)


def main(arguments: list[str] | None = None) -> int:
    """Do all jobs of a kind; returns 1 if any left no result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    kinds = {"train": (finetunings,), "runs": (runs,), "all": (finetunings, runs)}
    parser.add_argument("kind", choices=kinds)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--work", type=Path, required=True, help="models and run directories: tens of GB")
    parser.add_argument("--out", type=Path, required=True, help="results files")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument(
        "--seeds", type=int, default=max(SEEDS.values()), help="limit of fine-tunings by task"
    )
    parser.add_argument(
        "--until", default="engine", help="last stage of runs; `evaluate` has ONNX Runtime too"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="jobs at a time")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs that jobs are spread over")
    parser.add_argument("--seconds", type=float, default=86400, help="limit of all")
    parser.add_argument("--heal", default="--steps 3000 --seconds 200", help="options of heal.py")
    parser.add_argument("--only", nargs="*", default=[""], help="jobs whose name begins so")
    given = parser.parse_args(arguments)
    given.work.mkdir(parents=True, exist_ok=True)
    made = itertools.chain.from_iterable(kind(given) for kind in kinds[given.kind])
    listed = [*made]
    names = [job.name for job in listed]
    if idle := find_idle(given.only, names):
        parser.error(f"no job begins with {', '.join(idle)}; there are {', '.join(names)}")
    asked = [job for job in listed if job.name.startswith(tuple(given.only))]
    do_all(asked, given)
    return int(any(not job.file.is_file() for job in asked))


if __name__ == "__main__":
    sys.exit(main())
