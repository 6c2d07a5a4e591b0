"""All that the figures of the pages need from a GPU, again, in chunks of some minutes each.

    python tools/measure_tables.py --list
    python tools/measure_tables.py bench --out runs/measured
    python tools/measure_tables.py runs:minilm-l6:sst2:cuda --models MODELS --data GLUE --out runs/measured
    python tools/tables.py --add runs/measured

A chunk needs no other one. Its results go to OUT/NAME, as the files of `docs/measured` are called. The exit
status is 1 where a command failed.
`runs:MODEL:TASK:BACKEND` runs each recipe on the checkpoint MODELS/MODEL-TASK, `qat:MODEL:TASK:BACKEND` each
recipe that trains. For `lengths-real` MODELS holds runs, called MODEL-TASK-RECIPE-BACKEND.
"""

import argparse
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from datasets import Dataset

from qdqbench.quantize.models.load import load_tokenizer

PROGRAM = (sys.executable, "-c", "from qdqbench.cli.app import program; program()")
TASKS = ("sst2", "mrpc", "stsb")
RECIPES = (
    "int8-residual-fused", "int8-residual", "int8-attention", "int8-linears", "int8-linears-per-tensor",
    "int8-ffn",
)  # fmt: skip
TRAINED = ("int8-attention-qat", "int8-linears-per-tensor-qat", "int8-residual-qat")
BENCH = [
    *("--streams", "1", "--duration", "0.4", "--compile-seconds", "100", "--no-fp32"),
    *("--exclude", "autotune-fp16"),  # never the fastest, and compiles longest
]
# baselines that the unpadded encoder beats everywhere, at these sizes and lengths
PADDED = ("--exclude", "torch-fp16-eager", "--exclude", "compile-fp16-eager")
FUSED = "int8-residual-fused"
WITHOUT_TENSORRT = ("--exclude", "int8-tensorrt_rtx", "--exclude", "fp16")  # slow, and built longest
REAL = [  # model, task, recipe and backend: the recommended one on all tasks, the others on one
    *(("bert-base", task, FUSED, "cuda") for task in TASKS),
    *(("bert-base", "sst2", each, "cuda") for each in RECIPES if each != FUSED),
    *(("minilm-l6", task, FUSED, "cuda") for task in ("sst2", "stsb")),
    *(("mpnet", "sst2", FUSED, backend) for backend in ("cuda", "tensorrt_rtx")),
]
SQUAD = "squad-lengths"
SQUAD_ROWS, SQUAD_TOKENS = 1024, (30, 384)  # of a row, least and most
SQUAD_MEDIAN, SQUAD_SPREAD = 167.4, 0.42  # tokens of a row; of their logarithm


@dataclass(frozen=True)
class Step:
    """One command, whose result goes into a folder of its own."""

    name: str  # of the folder
    file: str  # that is kept
    command: list[str]


def grid(*batches: int, length: int = 128) -> list[str]:
    """Options of a bench's shapes."""
    return [part for batch in batches for part in ("--batch", str(batch))] + ["--length", str(length)]


def bench(name: str, model: str, recipe: str, *options: str) -> Step:
    """A bench of a size with random weights."""
    return Step(name, "bench.json", ["bench", "--model", model, "--recipe", recipe, *BENCH, *options])


def also(*recipes: str) -> list[str]:
    """Options of a bench's other recipes."""
    return [part for recipe in recipes for part in ("--extra-recipe", recipe)]


def lengths(name: str, task: str, model: str, data: str, *options: str) -> Step:
    """A bench of a task's validation split with its real lengths."""
    split = ["--dataset", task, "--data", data, "--engine-shapes", "exact", "--exclude", "compile-fp16"]
    given = ["bench", "--model", model, "--recipe", "bert-int8-residual-fused", *split, *options]
    return Step(name, "bench.json", [*given, *BENCH, *PADDED])


def name_run(model: str, task: str, recipe: str, backend: str) -> str:
    """Return the folder of a run."""
    return f"{model}-{task}-{recipe}-{backend}"


def choose_contestants(model: str, recipe: str) -> list[str]:
    """Return options of a bench of REAL: which baselines it leaves out, or time to compile them."""
    if model == "mpnet":  # torch.compile can be the fastest
        return ["--compile-seconds", "300"]
    return [*PADDED, "--exclude", "compile-fp16", *([] if recipe == FUSED else WITHOUT_TENSORRT)]


def write_squad_lengths(folder: Path, tokenizer: Path) -> Path:
    """Write made-up rows, as long in tokens as questions of SQuAD cut at 384: log-normal, mean 177.

    The mean is MLPerf's (54% of padding at 384, https://openreview.net/forum?id=3nzKUh9a4M). They have the
    layout of SST-2; their words are one token each.
    """
    known = load_tokenizer(str(tokenizer)).get_vocab()
    words = sorted(word for word in known if word.isascii() and word.isalnum())
    random = np.random.default_rng(0)
    counts = np.clip(np.rint(random.lognormal(np.log(SQUAD_MEDIAN), SQUAD_SPREAD, SQUAD_ROWS)), *SQUAD_TOKENS)
    texts = [" ".join(random.choice(words, int(count) - 2)) for count in counts]
    rows = {"sentence": texts, "label": [0, 1] * (SQUAD_ROWS // 2), "idx": list(range(SQUAD_ROWS))}
    for split in ("train", "validation"):
        path = folder / "sst2" / f"{split}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        Dataset.from_dict(rows).to_parquet(path)
    return folder


def chunks(models: Path, data: str, work: Path) -> dict[str, list[Step]]:
    """Return the chunks of benches by name, the most wanted first."""
    fused, exact = f"bert-{FUSED}", ["--engine-shapes", "exact"]
    both = ["--dataset-batch", "128", "--dataset-batch", "256"]
    tokenizer = ["--tokenizer", str(models / "minilm-l6-sst2")]
    others = [f"bert-{name}" for name in RECIPES if name != FUSED]
    squad = "--dataset-batch", "128", "--set", "export.max_length=384", *tokenizer
    return {
        "bench": [
            bench("bert-base", "bert-base", fused, *grid(1, 8, 32, 128), *exact, *PADDED),
            bench("bert-base-384", "bert-base", fused, *grid(32, length=384), *exact, *PADDED),
        ],
        "bench-recipes": [
            bench(f"bert-base-recipes-{backend}", "bert-base", fused, *grid(1, 8, 32, 128), *given)
            for backend in ("cuda", "tensorrt_rtx")
            for given in [("--set", f"engine.backend={backend}", *also(*others), *PADDED)]
        ],
        "bench-small": [bench("minilm", "minilm", fused, *grid(1, 8, 32), "--length", "32", *exact, *PADDED)],
        "bench-large": [bench("bert-large", "bert-large", fused, *grid(128), *exact, *PADDED)],
        "families": [
            bench(size, size, f"{size.split('-')[0]}-{FUSED}", *grid(32, 128), *exact, *PADDED)
            for size in ("roberta-base", "electra-base", "distilbert-base")
        ]
        + [bench("mpnet-base", "mpnet-base", f"mpnet-{FUSED}", *grid(1, 8, 32, 128), *exact)],
        "lengths": [
            lengths(f"minilm-l6-{task}", task, str(models / "minilm-l6-sst2"), data, *both) for task in TASKS
        ],
        "lengths-base": [
            lengths(f"bert-base-{task}", task, "bert-base", data, "--dataset-batch", "256", *tokenizer)
            for task in TASKS
        ],
        "lengths-real": [
            Step(
                name_run(*run),
                "bench.json",
                [
                    *("bench", str(models / name_run(*run)), *grid(128), *exact),
                    *("--dataset", run[1], "--dataset-batch", "256"),
                    *(*BENCH, *choose_contestants(run[0], run[2])),
                ],
            )
            for run in REAL
        ],
        "lengths-squad": [lengths("bert-large-squad", "sst2", "bert-large", str(work / SQUAD), *squad)],
    }


def runs(chunk: str, models: Path, data: str) -> list[Step]:
    """Return the runs of a chunk called `runs:MODEL:TASK:BACKEND`, or `qat:...`; none of another name."""
    kind, *named = chunk.split(":")
    recipes = {"runs": RECIPES, "qat": TRAINED}.get(kind, ())
    if len(named) != 3:
        return []
    model, task, backend = named
    shared = ["--model", str(models / f"{model}-{task}"), "--task", task, "--data", data]
    return [
        Step(
            name_run(model, task, recipe, backend),
            "results.json",
            ["run", recipe, *shared, "--backend", backend],
        )
        for recipe in recipes
    ]


def measure(step: Step, work: Path, out: Path) -> bool:
    """Run a step and keep its result; whether there is one."""
    made, kept = work / step.name, out / step.name
    status = subprocess.run([*PROGRAM, *step.command, "--out", str(made)], check=False).returncode
    if status not in (0, 2):  # 2: finished, and something does not hold, which is a result too
        return False
    kept.mkdir(parents=True, exist_ok=True)
    shutil.copy(made / step.file, kept / step.file)
    return True


def main(arguments: list[str] | None = None) -> int:
    """Measure the chunks that are named; returns 1 if a command failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("chunks", nargs="*")
    parser.add_argument("--list", action="store_true", help="what the chunks measure")
    parser.add_argument("--models", type=Path, default=Path("models"))
    parser.add_argument("--data", default="hub")
    parser.add_argument("--work", type=Path, default=Path("runs/tables"), help="run directories")
    parser.add_argument("--out", type=Path, default=Path("runs/measured"), help="results files")
    given = parser.parse_args(arguments)
    known = chunks(given.models, given.data, given.work)
    known |= {name: steps for name in given.chunks if (steps := runs(name, given.models, given.data))}
    if given.list:
        for name, steps in known.items():
            print(f"{name}: {', '.join(step.name for step in steps)}")
        return 0
    if wrong := [name for name in given.chunks if name not in known]:
        parser.error(f"no chunk is called {', '.join(wrong)}; there are {', '.join(known)}")
    if "lengths-squad" in given.chunks:
        write_squad_lengths(given.work / SQUAD, given.models / "minilm-l6-sst2")
    failed = 0
    for step in (step for name in given.chunks for step in known[name]):
        done = measure(step, given.work, given.out)
        print(f"{step.name}: {'measured' if done else 'left out'}", flush=True)
        failed |= not done
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
