"""Fine-tunings over seeds, and a run with QAT; every number is invented."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np

from qdqbench.eval.runs.results import Results
from qdqbench.quantize.pipeline.session import RunConfig, Session
from qdqbench.quantize.tasks.task import Task
from qdqbench.quantize.training.results import Finetuning, LayerRow, ReconstructionRun, Spread, TrainingRun
from qdqbench.quantize.utils.trackers import LogRow

from .records import comparison, sample_of
from .runs import GARBLED, measured, poisoned, sample
from .tiny_bert import VOCABULARY, recipe_with


def log_of(seed: int, steps: int = 460, evaluations: int = 10, first: bool = False) -> list[LogRow]:
    """Loss every 10 steps, and evaluations with the metrics of MRPC."""
    draw = np.random.default_rng(seed)
    due = {round(steps * (number + 1) / evaluations) for number in range(evaluations)}
    rows = []
    for step in sorted({0, *range(10, steps + 1, 10), *due}):
        part = step / steps
        if step:
            loss = 0.12 + 0.55 * math.exp(-3 * part) + 0.03 * draw.standard_normal()
            rate = 5e-5 * (1 - part)
            rows.append(LogRow(step=step, epoch=4 * part, loss=loss, learning_rate=rate, gradient_norm=2.1))
        if step in due or (first and step == 0):
            f1 = 0.82 + 0.06 * (1 - math.exp(-4 * part)) + 0.008 * draw.standard_normal()
            values = {"loss": 0.35 + 0.2 * (part - 0.5) ** 2, "f1": f1, "accuracy": f1 - 0.04}
            if first:  # QAT is judged by its SQNR against FP32
                values = {"score_db": 50 * f1 - 20, "sqnr_db": 50 * f1 - 18, **values}
            score = values["score_db"] if first else f1
            rows.append(LogRow(step=step, epoch=4 * part, score=score, values=values))
    return rows


def run_of(seed: int, **changes: Any) -> TrainingRun:
    log = changes.pop("log", None) or log_of(seed)
    judged = [row for row in log if row.score is not None]
    fields = sample_of(
        "training",
        seed=seed,
        folder=f"seed-{seed}/model",
        settings={"epochs": 4, "learning_rate": 5e-5, "batch_size": 32, "patience": None, "seed": seed},
        best_step=max(judged, key=lambda row: row.score or -9).step if judged else 0,
        seconds=19.4 + seed,
        log=log,
        metrics={"f1": 0.861 + 0.004 * seed, "accuracy": 0.811 + 0.003 * seed},
    )
    return TrainingRun.model_validate(fields | changes)


def reconstruction(**changes: Any) -> ReconstructionRun:
    rows = [
        LayerRow(
            layer=f"bert.encoder.layer.{n}", before_db=27.0 - n, after_db=28.5 - n, kept=True, seconds=9.0
        )
        for n in range(6)
    ]
    return ReconstructionRun.model_validate(sample_of("reconstruction", layers=rows) | changes)


def failed_run(seed: int, **changes: Any) -> TrainingRun:
    return run_of(seed).model_copy(update=sample_of("failed training") | changes)


def finetuning(runs: list[TrainingRun], **changes: Any) -> Finetuning:
    done = [run for run in runs if run.status == "done"]
    spread = {}
    for name in done[0].metrics if done else ():
        found = [run.metrics[name] for run in done]
        sd = float(np.std(found, ddof=1)) if len(found) > 1 else None
        spread[name] = Spread(mean=float(np.mean(found)), sd=sd, n=len(found))
    best = done[-1].seed if done else None
    warnings = [f"seed {run.seed} failed: {run.reason}" for run in runs if run.status == "failed"]
    fields = sample_of("fine-tuning", runs=runs, spread=spread, best_seed=best, warnings=warnings)
    return Finetuning.model_validate(fields | changes)


def qat_run(gain: float = 0.0147, within: bool = False, ptq: float = -0.017, **changes: Any) -> Results:
    """A run of the sample recipe with QAT."""
    stages = {
        "fp32": measured({"accuracy": 0.8968}, None),
        "ptq": measured({"accuracy": 0.8968 + ptq}, ptq, abs(ptq) <= 0.0042),
        "fake_quant": measured({"accuracy": 0.8968 + ptq + gain}, ptq + gain, abs(ptq + gain) <= 0.0042),
        "onnxruntime": measured({"accuracy": 0.8956}, -0.0012),
        "engine": measured({"accuracy": 0.8945}, -0.0023),
    }
    settings = {"epochs": 3, "learning_rate": "auto", "amax": "frozen"}
    settings |= {"distill": {"logits": 1.0, "hidden": 1.0}}
    log = log_of(3, first=True)
    before = log[0].values["sqnr_db"]
    gains = {1e-6: 0.4, 3e-6: 1.2, 1e-5: 0.9}
    tried = [
        {"learning_rate": rate, "gain_db": gain, "sqnr_db": before + gain} for rate, gain in gains.items()
    ]
    changed = {"settings": settings, "learning_rate": 3e-6, "tried": tried}
    training = run_of(0, log=log, metrics={}, stderr={}, n=0, **changed)
    fields = {
        "stages": stages,
        "training": training,
        "qat_vs_ptq": comparison({"accuracy": gain}, 0.0042, within_noise=within),
    }
    return sample(**(fields | changes))


def twice_trained(**changes: Any) -> Results:
    """A run with both trainings, whose stages say what each won."""
    run = qat_run(reconstruction=reconstruction(), **changes)
    stages = {name: run.stages[name] for name in ("fp32", "ptq")}
    stages["reconstructed"] = run.stages["fake_quant"]
    return run.model_copy(update={"stages": stages | run.stages})


def hostile_finetuning() -> Finetuning:
    """Every string of the file is an attack."""
    result = finetuning([run_of(0, notes=["resumed"]), failed_run(1)])
    for run in result.runs:
        run.metrics = {GARBLED: 0.9} if run.metrics else {}
        for row in run.log:
            row.values = {GARBLED: row.score} if row.score is not None else {}
    result.spread = {GARBLED: Spread(mean=0.9, sd=None, n=1)}
    fields = poisoned(result.model_dump())
    fields["task"]["metrics"] = [GARBLED]
    return Finetuning.model_validate(fields)


def hostile_qat() -> Results:
    fields = qat_run().model_dump()
    noted = {"notes": [GARBLED], "settings": {GARBLED: GARBLED}}
    fields["training"], fields["notes"] = poisoned(fields["training"]) | noted, [GARBLED]
    for row in fields["training"]["log"]:
        row["values"] = {GARBLED: 0.5} if row["score"] is not None else {}
    return Results.model_validate(fields)


def session_of(folder: Path, model: Path, **recipe: Any) -> Session:
    """Of a task with 12 train rows and 4 that judge; texts differ."""
    words = VOCABULARY[5:]
    texts = [f"{one} {other}" for one, other in itertools.combinations(words[:7], 2)]
    for name, rows in (("train", texts[:12]), ("validation", texts[12:16])):
        lines = [f"{text},{number % 3}" for number, text in enumerate(rows)]
        (folder / f"{name}.csv").write_text("\n".join(["sentence,label", *lines, ""]))
    task = Task(name="x", text_columns=("sentence",), num_labels=3, metrics=("accuracy",))
    made = recipe_with("bert-int8-attention", **recipe)
    return Session(RunConfig(recipe=made, model=str(model), task=task, data=str(folder)), folder / "run")
