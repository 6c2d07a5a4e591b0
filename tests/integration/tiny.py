"""A tiny BERT and its data on disk, as a user would bring them, and the command line in this process."""

import io
import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

MAIN = "from qdqbench.cli.app import program; program()"  # `qdqbench` as its own process

# Every negative word against every positive one: a sentence's class is the sign of the sum of its words.
WORDS = {"awful": -1, "dull": -1, "poor": -1, "weak": -1, "bright": 1, "fine": 1, "good": 1, "sharp": 1}
FILLERS = ("a", "film", "is", "it", "of", "plot", "the", "this")
LAYERS, HIDDEN, HEAD_SIZE, POSITIONS = 2, 64, 16, 128
TRAIN_ROWS, EVAL_ROWS = 256, 96
NOISE = 0.1  # of the labels are flipped, so that accuracy is not the round number 1
COLUMNS = {
    "sst2": ("sentence",),
    "cola": ("sentence",),
    "mrpc": ("sentence1", "sentence2"),
    "stsb": ("sentence1", "sentence2"),
    "mnli": ("premise", "hypothesis"),
    "multi-label": ("text",),
}
SIDES = {"blame": -1, "praise": 1}  # classes of texts that have words of a side; some have both


@dataclass(frozen=True)
class Given:
    """What a user brings: the options that name the model, the task and the data."""

    model: Path
    task: str
    data: Path

    @property
    def options(self):
        return ["--model", str(self.model), "--task", self.task, "--data", str(self.data)]

    def config(self, recipe):
        """That of a run with a recipe, given by its name or path."""
        from qdqbench.quantize.pipeline.session import RunConfig
        from qdqbench.quantize.recipe.schema import load_recipe
        from qdqbench.quantize.tasks.task import get_task

        model, data = str(self.model), str(self.data)
        return RunConfig(recipe=load_recipe(str(recipe)), model=model, task=get_task(self.task), data=data)

    def run(self, recipe, folder):
        """A whole one, in this process."""
        from qdqbench.eval.runs.run import run_until
        from qdqbench.quantize.pipeline.pipeline import open_run

        run_until(open_run(self.config(recipe), folder), None)


@dataclass(frozen=True)
class Outcome:
    """How the command line ended."""

    code: int
    out: str
    err: str


def call(capsys, *arguments):
    """Run `qdqbench ARGUMENTS` in this process."""
    capsys.readouterr()
    code = _exit_code(arguments)
    out, err = capsys.readouterr()
    return Outcome(code, out, without_machine(err))


def call_alone(*arguments):
    """As `call`, for fixtures that are made once."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = _exit_code(arguments)
    return Outcome(code, out.getvalue(), without_machine(err.getvalue()))


def call_apart(*arguments, code=MAIN, **options):
    """Run it as a process of its own, with pipes for stdout and stderr."""
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment()} | options
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, text=True, check=False, **given)
    return Outcome(done.returncode, done.stdout, done.stderr)


def without_machine(err):
    """Leave out the line of `run` about the machine that runs the test."""
    return re.sub(r"(?m)^what INT8 can bring on .*\n", "", err)


def ended(done, code=0):
    """Of a command that ends so, whatever it says."""
    assert done.code == code, done
    return done


def fine(done):
    """Of a command that ends well and has nothing to say on stderr."""
    assert (done.code, done.err) == (0, ""), done
    return done


def refused(done, *told, code=1):
    """One sentence on stderr, which holds every text or regular expression, and nothing on stdout."""
    assert (done.code, done.out) == (code, ""), done
    assert re.fullmatch(r"qdqbench: [^\n]{20,}\n", done.err), done.err
    assert "unexpected failure" not in done.err, done.err
    for text in told:
        assert text in done.err or re.search(text, done.err), (text, done.err)


def _exit_code(arguments):
    from qdqbench.cli.app import main

    before = sys.argv
    sys.argv = ["qdqbench", *map(str, arguments)]
    try:
        main()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    finally:
        sys.argv = before
    return 0


@contextmanager
def one_profile():
    """Engines for the shape that takes everything."""
    from qdqbench.eval.stages import stages

    real = stages.engine_profiles
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "engine_profiles", lambda session: real(session)[-1:])
        yield


def results(folder):
    """`results.json` of a run."""
    return json.loads((folder / "results.json").read_text())


def listing(folder):
    """Every file below a folder, hidden ones too, but for the one that processes lock and the mark."""
    hidden = (".lock", ".qdqbench.json")
    found = (path for path in folder.rglob("*") if path.is_file() and path.name not in hidden)
    return sorted(str(path.relative_to(folder)) for path in found)


def files_of(folder):
    """The files that a second call has no reason to write, with their times."""
    written = ("results.json", "report.md", "report.html", "recipe.yaml", "run.json", "changed.csv")
    return {n: (folder / n).stat().st_mtime_ns for n in listing(folder) if n not in written}


def nothing_half_written(out):
    """A run directory holds its configuration and the outputs of finished stages, nothing else."""
    if not out.exists():
        return
    known = {"run.json", "recipe.yaml"}
    if (out / "stages.json").is_file():
        stages = json.loads((out / "stages.json").read_text())["stages"]
        known |= {"stages.json"}.union(*(stage["outputs"] for stage in stages.values()))
    assert {*listing(out)} <= known
    assert not [path for path in out.rglob("*") if path.name.endswith(".tmp")]


def sentences(rows, seed):
    """Texts of 4 to 24 words and the sums of their words' values (never 0)."""
    random = np.random.default_rng(seed)
    texts, sums = [], []
    while len(texts) < rows:
        length = random.integers(4, 25)
        words = list(random.choice(FILLERS, length))
        told = random.choice(list(WORDS), random.integers(1, 4))
        for place, word in zip(random.choice(length, len(told), replace=False), told, strict=True):
            words[place] = word
        if total := sum(WORDS[str(word)] for word in told):
            texts.append(" ".join(words))
            sums.append(total)
    return texts, sums


def rows(task, count, seed):
    """Columns of a GLUE task, learnable by a tiny model within seconds."""
    texts, sums = sentences(count, seed)
    random = np.random.default_rng(seed + 1)
    columns = COLUMNS[task]
    table = {columns[0]: texts}
    if len(columns) == 2:
        table[columns[1]] = sentences(count, seed + 2)[0]
    if task == "multi-label":
        known = [{WORDS.get(word) for word in text.split()} for text in texts]
        return table | {"labels": [[name for name, side in SIDES.items() if side in each] for each in known]}
    labels = [int(total > 0) for total in sums]
    if task == "stsb":
        table["label"] = [float(total + 3) + float(random.normal(0, 0.3)) for total in sums]
    elif task == "mnli":
        table["label"] = [
            int(random.integers(3)) if random.random() < NOISE else (total > 0) + (total > 1)
            for total in sums
        ]
    else:
        table["label"] = [1 - label if random.random() < NOISE else label for label in labels]
    table["idx"] = list(range(count))
    return table


def write_split(path, table):
    """Write columns as parquet, CSV or JSON lines, by the suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".csv":
        import csv

        with path.open("w", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(table)
            writer.writerows(zip(*table.values(), strict=True))
    elif path.suffix in (".json", ".jsonl"):
        lines = [json.dumps(dict(zip(table, row, strict=True))) for row in zip(*table.values(), strict=True)]
        path.write_text("\n".join(lines) + "\n")
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table(table), path)


def write_data(folder, task):
    """Write the splits of a task into FOLDER/TASK."""
    evaluated = ("validation_matched", "validation_mismatched") if task == "mnli" else ("validation",)
    write_split(folder / task / "train.parquet", rows(task, TRAIN_ROWS, 0))
    for number, split in enumerate(evaluated, 1):
        write_split(folder / task / f"{split}.parquet", rows(task, EVAL_ROWS, 100 * number))


def entries():
    """The vocabulary."""
    return ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *FILLERS, *WORDS]


def tokenizer():
    """WordPiece over the words above."""
    from transformers import BertTokenizer

    return BertTokenizer(
        vocab={word: index for index, word in enumerate(entries())}, model_max_length=POSITIONS
    )


def fresh(auto, model_type="bert", **fields):
    """A model of random weights, by the class that makes it of a configuration."""
    import torch
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        model_type,
        vocab_size=len(entries()),
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HIDDEN // HEAD_SIZE,
        intermediate_size=2 * HIDDEN,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.1,
        **fields,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto.from_config(config)
    # As if pretrained: a word's value has a direction of its own, so a second of training is enough.
    words, identifiers = model.base_model.embeddings.word_embeddings.weight.data, tokenizer().get_vocab()
    direction = torch.linspace(-1, 1, HIDDEN)
    for word, value in WORDS.items():
        words[identifiers[word]] += value * direction
    return model


def write_model(folder, task, steps=None):
    """Train a tiny BERT on a task for about a second and save it with its tokenizer."""
    import torch
    from transformers import AutoModelForSequenceClassification

    from qdqbench.quantize.utils.system.quiet import quiet

    num_labels, words = {"stsb": 1, "mnli": 3}.get(task, 2), tokenizer()
    fields = {"num_labels": num_labels, "max_position_embeddings": POSITIONS}
    model = fresh(AutoModelForSequenceClassification, **fields)
    table = rows(task, 4 * TRAIN_ROWS, 7)
    if task == "multi-label":
        model.config.problem_type = "multi_label_classification"
        model.config.id2label = dict(enumerate(SIDES))
        table["label"] = [[float(name in each) for name in SIDES] for each in table["labels"]]
    floats = num_labels == 1 or task == "multi-label"
    labels = torch.tensor(table["label"], dtype=torch.float32 if floats else torch.int64)
    texts = [table[column] for column in COLUMNS[task]]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    order = np.random.default_rng(0)
    if steps is None:
        steps = 30 if task == "sst2" else 60  # one sentence is easy, and its margins stay wide
    for _ in range(steps):
        chosen = order.integers(len(labels), size=32)
        batch = words(
            *[[column[row] for row in chosen] for column in texts], padding=True, return_tensors="pt"
        )
        model(**batch, labels=labels[torch.from_numpy(chosen)]).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with quiet("transformers"):
        model.eval().save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def environment():
    """Environment of a child process: no colours asked for or forced."""
    kept = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "PY_COLORS")}
    return {**kept, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}


def signs_of_life(told):
    """Whether lines on stderr are those of a busy machine: what INT8 brings here, and times with steps."""
    return all(re.match(r"\d\d:\d\d:\d\d |what INT8 can bring on ", line) for line in told.splitlines())
