"""Runs with an engine that this CPU runs, their endpoints without a socket, and what answers say."""

import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from qdqbench.quantize.deployment.opened import TEXTS_FILE, open_served
from qdqbench.quantize.deployment.options import ServeOptions
from qdqbench.quantize.engine.build import build
from qdqbench.quantize.pipeline.data_profiles import engine_profiles
from qdqbench.quantize.pipeline.graphs import graph_path
from qdqbench.quantize.pipeline.outcomes import BUILD, write_outcome
from qdqbench.quantize.pipeline.pipeline import STAGES_FILE
from qdqbench.quantize.pipeline.session import Session, read_config
from qdqbench.quantize.utils.files import read_json, sha256, write_json

from .heads import TAGS
from .tiny import environment


def with_cpu_engine(run: Path, out: Path) -> Path:
    """A copy of a run whose engine is ONNX Runtime's, of the same graph."""
    shutil.copytree(run, out, ignore=shutil.ignore_patterns("engine", "report*", ".lock"))
    session = Session(read_config(out), out)
    graph = graph_path(session)
    built = build(
        graph,
        out / "engine" / "model.engine",
        backend="onnxruntime",
        profiles=engine_profiles(session)[-1:],
        expected_gemms=[],
        expected_attention=0,
    )
    write_outcome(out / BUILD, built)
    shutil.copy(run / "engine" / TEXTS_FILE, out / "engine")
    record(out)
    return out


def record(run: Path) -> None:
    """Take files of stages that a test made up for those that the run made."""
    stages = read_json(run / STAGES_FILE)
    for stage in stages["stages"].values():
        there = [name for name in stage["outputs"] if (run / name).is_file()]
        stage["outputs"] = {name: sha256(run / name) for name in there}
    write_json(run / STAGES_FILE, stages)


def ask(run, **fields):
    """The answers of the endpoint of a run whose engine is in this process."""
    from ..support.site import called, within

    options = ServeOptions(no_fp32=True, max_texts=1000)
    served = open_served(run, options)

    async def post(site):
        return await called(site, "POST", site.front.interfaces.endpoint, fields)

    status, _, made = within(post, served, settings=options.settings())
    assert status == 200, made
    return made["answers"]


@contextmanager
def started(*command, word="http://127.0.0.1:", **options):
    """A server's process and its port; at the end it is killed if it lives."""
    given = {"stdout": subprocess.PIPE, "text": True, "env": environment()} | options
    with subprocess.Popen([*map(str, command)], **given) as process:
        try:
            line = next((line for line in process.stdout if word in line), "")
            assert line, f"it did not start: {process.wait()}"
            yield process, int(line.partition(word)[2].split()[0].split("/")[0])
        finally:
            process.kill()


def rows_of(run, count):
    """The texts of the first rows that a run was evaluated with."""
    session = Session(read_config(run), run)
    split, _ = next(iter(session.eval_splits.values()))
    return [[split.dataset[row][name] for name in session.config.task.text_columns] for row in range(count)]


def line_of(row):
    """A row as a line of a script's standard input."""
    return "\t".join(text if isinstance(text, str) else " ".join(text) for text in row)


def evaluated(run, count, stage="onnxruntime"):
    """What a stage answered to them: shares of classes, a score, an embedding; or tags, or a text."""
    session = Session(read_config(run), run)
    kind, (split, (_, encoded)) = session.config.task.kind, next(iter(session.eval_splits.items()))
    with np.load(run / "logits" / f"{stage}.npz") as saved:
        logits = saved[f"{split}.logits"]
    if kind.over_tokens:
        return kind.predict(logits, encoded.gold)[:count].tolist()
    logits = logits[:count].astype(np.float64)
    if kind.name == "multi-label classification":
        return 1 / (1 + np.exp(-logits))
    one = kind.name != "classification"
    return logits if one else np.exp(logits - np.logaddexp.reduce(logits, axis=1, keepdims=True))


def value_of(answer):
    """What an answer says, in the form of `evaluated`."""
    if isinstance(answer, np.ndarray):  # Triton has no JSON for an embedding
        return answer
    if scores := answer.get("scores"):
        assert answer.get("label", max(scores, key=scores.get)) == max(scores, key=scores.get)
        return [*scores.values()]
    if "answer" in answer:
        return answer["answer"]
    if tags := answer.get("labels") or [tag for _, tag in answer.get("words", ())]:
        return " ".join(str(TAGS.index(tag)) for tag in tags)
    return answer.get("embedding") or [answer["score"]]
