"""Fine-tuning: the FP32 baseline of a task from a base encoder, over several seeds."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from qdqbench.quantize.models.families.known import family_of
from qdqbench.quantize.models.identity import model_commit, model_fingerprint
from qdqbench.quantize.models.inputs import select_inputs
from qdqbench.quantize.models.load import load_config, load_encoder, load_matching_tokenizer, read_class_names
from qdqbench.quantize.pipeline.session import CHECKPOINTS, RECORD
from qdqbench.quantize.recipe.sections import Training
from qdqbench.quantize.tasks import metrics
from qdqbench.quantize.tasks.data.encode import encode
from qdqbench.quantize.tasks.data.load import add_data_classes, add_label_values, load_split
from qdqbench.quantize.tasks.data.splits import is_hub_source, read_split
from qdqbench.quantize.tasks.kinds.kind import join_outputs
from qdqbench.quantize.tasks.task import Task, merge_splits, with_classes
from qdqbench.quantize.training import loop
from qdqbench.quantize.training.results import RESULT, Finetuning, Spread, TrainingRun
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.arrays import Int64
from qdqbench.quantize.utils.errors import CheckFailed, UserError
from qdqbench.quantize.utils.progress import reporter
from qdqbench.quantize.utils.schema import Strict, read
from qdqbench.quantize.utils.system.environment import describe_environment, get_code_identity, now
from qdqbench.quantize.utils.system.quiet import quiet


@dataclass
class FinetuneRequest:
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
    revision: str | None = None  # of a base on the hub


class _Finished(Strict):
    """The record of a finished training, kept next to its model."""

    identity: dict[str, Any]
    run: TrainingRun


def finetune(request: FinetuneRequest, accelerator: Accelerator) -> Finetuning:
    """Fine-tune for every seed; a seed that fails is recorded, and only where all do `CheckFailed` is raised.

    Seeds that an earlier call with the same settings finished are kept; an unfinished one is resumed from its
    last checkpoint.
    """
    if request.task.kind.embeds:
        raise UserError(f"task {request.task.name!r} has no labels to learn from; give one that has")
    work, first, runs = _Seeds(request, accelerator), request.settings.seed, list[TrainingRun]()
    for number in range(request.seeds):
        settings = request.settings.model_copy(update={"seed": first + number})
        reporter().begin(f"seed {settings.seed}", number, request.seeds)
        runs.append(work.train(settings))
    result = work.summarize(runs)
    if accelerator.is_main_process:
        files.write_text(request.folder / RESULT, result.model_dump_json(indent=2) + "\n")
    if not result.spread:
        raise CheckFailed(f"no seed was trained to its end: {runs[0].reason}")
    return result


class _Seeds:
    """Task with its labels, data and processes, which all seeds share."""

    def __init__(self, request: FinetuneRequest, accelerator: Accelerator) -> None:
        self.request, self.accelerator = request, accelerator
        task, base, revision = request.task, request.base, request.revision
        if task.kind.names_classes and request.keep_head:
            task = with_classes(task, read_class_names(base, revision, task.kind))
        elif task.kind.names_classes:
            task = add_data_classes(task, request.data)
        task = add_label_values(task, request.data)
        request.task = self.task = task = with_classes(task, task.values) if task.values else task
        self.tokenizer = load_matching_tokenizer(base, revision, task.kind)
        self.pad_id = int(self.tokenizer.pad_token_id)
        seed = 0 if request.limit else None
        split = load_split(task, request.data, task.train_split, limit=request.limit, seed=seed)
        judging = {name: load_split(task, request.data, name) for name in task.eval_splits}
        length, splits = request.max_length, [split, *judging.values()]
        self.train_rows = encode(split, task, self.tokenizer, length)
        self.fingerprint = f"{split.fingerprint}/{request.limit or 'all'}"  # of the rows to learn from
        self.judged = [each.fingerprint for each in judging.values()]
        self.evaluation = {n: encode(each, task, self.tokenizer, length) for n, each in judging.items()}
        self.notes = [note for each in splits for note in each.notes]
        self.warnings = [line for each in splits for line in each.warnings]

    def train(self, settings: Training) -> TrainingRun:
        request, accelerator = self.request, self.accelerator
        folder, identity = request.folder / f"seed-{settings.seed}", self.identify(settings)
        finished = identity | {"evaluation": self.judged}
        if stored := _read_finished(folder / RECORD, finished):
            if accelerator.is_main_process:  # a signal may have come while they were removed
                shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
            return stored
        job = self.new_job(settings, identity)
        model: Any = job.model
        base: Any = load_config(request.base, request.revision)
        named = any(str(name).endswith(self.task.kind.architecture) for name in base.architectures or ())
        if named and base.num_labels == self.task.num_labels:  # it may have learned the task
            job.notes.append(
                "the base has such a head already: rows that it was trained on are not new to it, held-out "
                "ones among them"
            )
        try:
            run = loop.train(job, accelerator)
        except CheckFailed as error:
            return job.run.model_copy(update={"status": "failed", "reason": str(error)})
        scores, doubts = self.validate(model)
        changes = {"folder": f"{folder.name}/model", "notes": [*run.notes, *doubts], **scores}
        run = run.model_copy(update=changes)
        if accelerator.is_main_process:
            with files.atomic_folder(folder / "model") as temporary, quiet("transformers"):
                model.save_pretrained(temporary)
                self.tokenizer.save_pretrained(temporary)
            files.write_json(folder / RECORD, _Finished(identity=finished, run=run).model_dump(mode="json"))
            shutil.rmtree(folder / CHECKPOINTS)
        accelerator.wait_for_everyone()
        return run

    def identify(self, settings: Training) -> dict[str, Any]:
        request = self.request
        return {
            "job": "finetune",
            **get_code_identity(),
            "model": model_fingerprint(request.base, request.revision),
            "task": self.task.model_dump(mode="json"),
            "data": self.fingerprint,
            "max_length": request.max_length,
            "keep_head": request.keep_head,
            **settings.model_dump(mode="json"),
        }

    def load_base(self, settings: Training) -> PreTrainedModel:
        """Load an encoder with a classifier for the task; the classifier is new unless `keep_head`."""
        task, request = self.task, self.request
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            model = load_encoder(
                request.base,
                task.kind,
                num_labels=task.num_labels,
                classes=task.classes,
                dropout=settings.dropout,
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

    def new_job(self, settings: Training, identity: dict[str, Any]) -> loop.Job:
        accelerator, encoded, task, kind = self.accelerator, self.train_rows, self.task, self.task.kind
        data = loop.divide(encoded, self.pad_id, settings.holdout, settings.seed)
        model, judged = self.load_base(settings), data.judged
        if kind.problem_type == "regression" and not self.request.keep_head:
            center_head(model, float(np.mean(encoded.labels)))
        labels = torch.from_numpy(encoded.labels).to(accelerator.device)

        def loss(wrapped: Any, rows: Int64, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            answers = encoded.kept(rows, join_outputs(wrapped(**select_inputs(wrapped, batch)), kind.outputs))
            places, counts = (torch.from_numpy(x).to(labels.device) for x in encoded.places(rows))
            return kind.loss(answers, labels[places], counts)

        def judge(plain: Any) -> loop.HeldOut:
            answers = loop.predict_rows(accelerator, plain, kind, judged, self.pad_id)
            if not np.isfinite(answers).all():
                return loop.HeldOut(float("nan"), {}, True)
            values = metrics.compute(task, answers, judged.gold)
            score, mean = next(iter(values.values())), kind.mean_loss(answers, judged.labels, judged.answers)
            return loop.HeldOut(score, {"loss": mean, **values}, kind.constant(answers, judged.labels))

        return loop.Job(
            model=model,
            data=data,
            settings=settings,
            loss=loss,
            judge=judge,
            folder=self.request.folder / f"seed-{settings.seed}" / CHECKPOINTS,
            identity=identity,
            groups=loop.group_decayed(model, settings.weight_decay),
        )

    def validate(self, model: PreTrainedModel) -> tuple[dict[str, Any], list[str]]:
        """Compute metrics of the validation split in FP32; of MNLI's second one under a suffix.

        Returns them, with a sentence where the model does not beat a constant answer.
        """
        task, metric = self.task, self.task.metrics[0]
        scored = [
            (loop.predict_rows(self.accelerator, model, task.kind, each, self.pad_id), each.gold)
            for each in self.evaluation.values()
        ]
        answers, gold = scored[0]
        found: dict[str, Any] = {
            "metrics": merge_splits(metrics.compute(task, answers, gold) for answers, gold in scored),
            "stderr": merge_splits(metrics.stderr(task, answers, gold, seed=0) for answers, gold in scored),
            "n": len(gold),  # of the first split, whose metric stands next to it
        }
        baseline = metrics.find_baseline(task, answers, gold)
        value, stderr = found["metrics"][metric], found["stderr"].get(metric, 0.0)
        if baseline is None or metrics.reads_its_input(value, stderr, baseline):
            return found, []
        advice = "take another seed, a lower learning rate, more epochs or more evaluation rows"
        constant = f"the {baseline.value:.4f} of a constant answer"
        return found, [f"{metric} {value:.4f} ± {stderr:.4f} does not beat {constant}; {advice}"]

    def summarize(self, runs: list[TrainingRun]) -> Finetuning:
        request = self.request
        done = [run for run in runs if run.status == "done"]
        scores = {run.seed: [row.score for row in run.log if row.score is not None] for run in done}
        best = max(scores, key=lambda seed: max(scores[seed], default=float("-inf")), default=None)
        return Finetuning(
            created=now(),
            command=request.command,
            base={
                "name": Path(request.base).name,
                "sha256": model_fingerprint(request.base, request.revision),
                "revision": model_commit(request.base, request.revision),
            },
            task=self.task.model_dump(mode="json"),
            data=request.data if is_hub_source(request.data) else Path(request.data).name,
            runs=runs,
            spread=spread([run.metrics for run in done]),
            best_seed=best,
            warnings=[
                *self.warnings,
                *([f"--limit {request.limit}: a part of the train split only"] if request.limit else []),
                *dict.fromkeys(
                    note if all(note in other.notes for other in runs) else f"seed {run.seed}: {note}"
                    for run in runs
                    for note in run.notes
                ),
                *(f"seed {run.seed} failed: {run.reason}" for run in runs if run.status == "failed"),
            ],
            notes=list(dict.fromkeys(self.notes)),
            environment=describe_environment(),
        )


def center_head(model: PreTrainedModel, mean: float) -> None:
    """Start a new head of regression at the mean label.

    From 0 the first gradients are those of a wrong mean, and can keep a model from learning the task.
    """
    (output,) = (
        each for each in model.modules() if isinstance(each, torch.nn.Linear) and each.out_features == 1
    )
    torch.nn.init.constant_(output.bias, mean)


def _read_finished(path: Path, identity: dict[str, Any]) -> TrainingRun | None:
    if not path.is_file():
        return None
    stored = read(path, _Finished, "finished training", "give another --out folder")
    there = stored.identity
    if differing := sorted(key for key in {**there, **identity} if there.get(key) != identity.get(key)):
        raise UserError(
            f"{path.parent} holds a finished training of another {', '.join(differing)}; give another --out, "
            "or --overwrite to begin again"
        )
    return stored.run


def spread(runs: list[dict[str, float]]) -> dict[str, Spread]:
    result = {}
    for name in runs[0] if runs else ():
        values = np.array([scores[name] for scores in runs])
        sd = float(np.std(values, ddof=1)) if len(values) > 1 else None
        result[name] = Spread(mean=float(values.mean()), sd=sd, n=len(values))
    return result


def require_base(base: str, revision: str | None, task: Task, data: str) -> None:
    family_of(load_config(base, revision))
    load_matching_tokenizer(base, revision, task.kind)
    for split in (task.train_split, *task.eval_splits):
        read_split(task, data, split)
