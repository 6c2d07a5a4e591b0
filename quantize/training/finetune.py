"""Fine-tuning: the FP32 baseline of a task from a base encoder, over several seeds."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qdqbench.quantize.models.families.known import family_of
from qdqbench.quantize.models.identity import model_commit, model_fingerprint
from qdqbench.quantize.models.inputs import select_inputs
from qdqbench.quantize.models.load import load_config, load_encoder, load_matching_tokenizer, read_class_names
from qdqbench.quantize.recipe.training import Training
from qdqbench.quantize.tasks import metrics
from qdqbench.quantize.tasks.rows import add_label_values, add_tag_classes, encode, load_split
from qdqbench.quantize.tasks.sources import is_hub_source, read_split
from qdqbench.quantize.tasks.task import Task, merge_splits, with_classes
from qdqbench.quantize.tasks.types.encoded import Encoded
from qdqbench.quantize.tasks.types.kind import join_outputs
from qdqbench.quantize.training.evaluate import is_collapsed, predict_rows
from qdqbench.quantize.training.loop import HeldOut, Job, group_decayed, train
from qdqbench.quantize.training.record import (
    CHECKPOINTS,
    RECORD,
    complete_record,
    held_out_score,
    read_finished,
    spread,
    start_record,
    write_finished,
)
from qdqbench.quantize.training.rows import TrainingData, divide
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.arrays import Int64
from qdqbench.quantize.utils.errors import CheckFailed, UserError
from qdqbench.quantize.utils.results import Finetuning, LogRow, TrainingRun
from qdqbench.quantize.utils.system.environment import describe_environment, get_code_identity, now
from qdqbench.quantize.utils.system.quiet import quiet

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

RESULT = "finetune.json"


@dataclass
class FinetuneRequest:
    """What `finetune` was asked for."""

    base: str  # folder or hub id of an encoder
    task: Task
    data: str
    folder: Path
    settings: Training  # of the first seed
    seeds: int
    max_length: int
    keep_head: bool
    limit: int | None  # training rows
    command: str
    report: Callable[[int, LogRow, int], None] = lambda seed, row, steps: None
    revision: str | None = None  # of a base on the hub


@dataclass
class _FinetuneData:
    """Tokenized splits, shared by all seeds."""

    tokenizer: "PreTrainedTokenizerBase"
    train: Encoded
    fingerprint: str
    evaluation: dict[str, Encoded]
    notes: list[str]
    warnings: list[str]

    @property
    def pad_id(self) -> int:
        return int(self.tokenizer.pad_token_id)


def finetune(request: FinetuneRequest, accelerator: "Accelerator") -> Finetuning:
    """Fine-tune for every seed; a seed that fails is recorded, and the others go on.

    Seeds that an earlier call with the same settings finished are kept, an unfinished one goes on from its
    last checkpoint.

    Raises:
        UserError: model, data or folder cannot be used.
        CheckFailed: every seed failed.
    """
    if request.task.kind.embeds:
        raise UserError(f"task {request.task.name!r} has no labels to learn from; give one that has")
    data = _load(request)
    first = request.settings.seed
    runs = [
        _train_seed(request, data, request.settings.model_copy(update={"seed": seed}), accelerator)
        for seed in range(first, first + request.seeds)
    ]
    result = _result(request, data, runs)
    if accelerator.is_main_process:
        files.write_text(request.folder / RESULT, result.model_dump_json(indent=2) + "\n")
    if not result.spread:
        raise CheckFailed(f"no seed was trained to its end: {runs[0].reason}")
    return result


def load_base(request: FinetuneRequest, seed: int) -> "PreTrainedModel":
    """Load an encoder with a classifier for the task; the classifier is new unless `keep_head`.

    Raises:
        UserError: not found, unsupported, without encoder weights, or too short for the samples.
    """
    import torch

    task = request.task
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = load_encoder(
            request.base,
            task.kind,
            num_labels=task.num_labels,
            classes=task.classes,
            dropout=request.settings.dropout,
            keep_head=request.keep_head,
            revision=request.revision,
        )
    longest = family_of(model.config).positions(model.config)
    if request.max_length > longest:
        raise UserError(
            f"samples may have {request.max_length} tokens, but model {request.base} has {longest} "
            "positions; lower --max-length, or in a study export.max_length of the recipes"
        )
    return model


def _load(request: FinetuneRequest) -> _FinetuneData:
    if request.task.kind.names_classes:
        kept = request.keep_head
        request.task = (
            with_classes(request.task, read_class_names(request.base, request.revision, request.task.kind))
            if kept
            else add_tag_classes(request.task, request.data)
        )
    request.task = add_label_values(request.task, request.data)
    if request.task.values:
        request.task = with_classes(request.task, request.task.values)
    task, length = request.task, request.max_length
    tokenizer = load_matching_tokenizer(request.base, request.revision, task.kind)
    seed = 0 if request.limit else None
    split = load_split(task, request.data, task.train_split, limit=request.limit, seed=seed)
    judging = {name: load_split(task, request.data, name) for name in task.eval_splits}
    return _FinetuneData(
        tokenizer=tokenizer,
        train=encode(split, task, tokenizer, length),
        fingerprint=f"{split.fingerprint}/{request.limit or 'all'}",
        evaluation={name: encode(found, task, tokenizer, length) for name, found in judging.items()},
        notes=[note for found in (split, *judging.values()) for note in found.notes],
        warnings=[line for found in (split, *judging.values()) for line in found.warnings],
    )


def _train_seed(
    request: FinetuneRequest, data: _FinetuneData, settings: Training, accelerator: "Accelerator"
) -> TrainingRun:
    """Train one seed, or read what an earlier call made of it."""
    folder = request.folder / f"seed-{settings.seed}"
    identity = _identity(request, data, settings)
    if stored := read_finished(folder / RECORD, identity):
        return stored
    divided = divide(data.train, data.pad_id, settings.holdout, settings.seed)
    run = start_record(settings, divided, accelerator)
    try:
        model = load_base(request, settings.seed)
        run.parameters = sum(p.numel() for p in model.parameters())
        job = _job(request, settings, model, divided, identity, accelerator)
        run.notes = job.notes
        if any(
            str(name).endswith(request.task.kind.architecture) for name in model.config.architectures or ()
        ):
            run.notes.append(
                "the base has such a head already: rows that it was trained on are not new to it, held-out "
                "ones among them"
            )
        outcome = train(job, accelerator)
    except CheckFailed as error:
        return run.model_copy(update={"status": "failed", "reason": str(error)})
    run = complete_record(run, outcome).model_copy(
        update={"folder": f"{folder.name}/model", **_validate(request, data, model, accelerator)}
    )
    if accelerator.is_main_process:
        with files.atomic_folder(folder / "model") as temporary, quiet("transformers"):
            model.save_pretrained(temporary)
            data.tokenizer.save_pretrained(temporary)
        write_finished(folder / RECORD, identity, run)
        shutil.rmtree(folder / CHECKPOINTS)
    accelerator.wait_for_everyone()
    return run


def _identity(request: FinetuneRequest, data: _FinetuneData, settings: Training) -> dict[str, Any]:
    """Return the identity of a run: equal for the same run; JSON values."""
    return {
        "job": "finetune",
        **get_code_identity(),
        "model": model_fingerprint(request.base, request.revision),
        "task": request.task.model_dump(mode="json"),
        "data": data.fingerprint,
        "max_length": request.max_length,
        "keep_head": request.keep_head,
        **settings.model_dump(mode="json"),
    }


def _job(  # noqa: PLR0913, PLR0917
    request: FinetuneRequest,
    settings: Training,
    model: "PreTrainedModel",
    data: TrainingData,
    identity: dict[str, Any],
    accelerator: "Accelerator",
) -> Job:
    import torch

    task, kind, encoded, judged = request.task, request.task.kind, data.encoded, data.judged
    labels = torch.from_numpy(encoded.labels).to(accelerator.device)

    def loss(wrapped: Any, rows: Int64, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        answers = encoded.kept(rows, join_outputs(wrapped(**select_inputs(wrapped, batch)), kind.outputs))
        places, counts = (torch.from_numpy(x).to(labels.device) for x in encoded.places(rows))
        return kind.loss(answers, labels[places], counts)

    def judge(plain: Any) -> HeldOut:
        answers = predict_rows(accelerator, plain, kind, judged, data.pad_id)
        if not np.isfinite(answers).all():
            return HeldOut(float("nan"), {}, True)
        values = metrics.compute(task, answers, judged.gold)
        score = next(iter(values.values()))
        mean = kind.mean_loss(answers, judged.labels, judged.answers)
        return HeldOut(score, {"loss": mean, **values}, is_collapsed(task, answers, judged.labels))

    return Job(
        model=model,
        data=data,
        settings=settings,
        loss=loss,
        judge=judge,
        folder=request.folder / f"seed-{settings.seed}" / CHECKPOINTS,
        identity=identity,
        groups=group_decayed(model, settings.weight_decay),
        report=lambda row, steps: request.report(settings.seed, row, steps),
    )


def _validate(
    request: FinetuneRequest, data: _FinetuneData, model: "PreTrainedModel", accelerator: "Accelerator"
) -> dict[str, Any]:
    """Compute metrics of the validation split in FP32; of MNLI's second one under a suffix."""
    task = request.task
    scored = [
        (predict_rows(accelerator, model, task.kind, each, data.pad_id), each.gold)
        for each in data.evaluation.values()
    ]
    return {
        "metrics": merge_splits(metrics.compute(task, answers, gold) for answers, gold in scored),
        "stderr": merge_splits(metrics.stderr(task, answers, gold, seed=0) for answers, gold in scored),
        "n": len(scored[0][1]),  # of the first split, whose metric stands beside it
    }


def _result(request: FinetuneRequest, data: _FinetuneData, runs: list[TrainingRun]) -> Finetuning:
    done = [run for run in runs if run.status == "done"]
    best = max(done, key=held_out_score, default=None)
    return Finetuning(
        created=now(),
        command=request.command,
        base={
            "name": Path(request.base).name,
            "sha256": model_fingerprint(request.base, request.revision),
            "revision": model_commit(request.base, request.revision),
        },
        task=request.task.model_dump(mode="json"),
        data=request.data if is_hub_source(request.data) else Path(request.data).name,
        runs=runs,
        spread=spread([run.metrics for run in done]),
        best_seed=best.seed if best else None,
        warnings=[
            *data.warnings,
            *([f"--limit {request.limit}: a part of the train split only"] if request.limit else []),
            *dict.fromkeys(note for run in runs for note in run.notes),
            *(f"seed {run.seed} failed: {run.reason}" for run in runs if run.status == "failed"),
        ],
        notes=list(dict.fromkeys(data.notes)),
        environment=describe_environment(),
    )


def require_base(base: str, revision: str | None, task: Task, data: str) -> None:
    """Find out what is wrong with a base or its data before anything is written.

    Raises:
        UserError: they cannot be read.
    """
    family_of(load_config(base, revision))
    load_matching_tokenizer(base, revision, task.kind)
    for split in (task.train_split, *task.eval_splits):
        read_split(task, data, split)
