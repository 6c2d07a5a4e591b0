"""Quantization-aware training: the PTQ model, with Q/DQ in place, learns from its FP32 original.

Placement and first scales are those of PTQ (`calibration.json`). The teacher is the FP32 model (Hinton et al.
2015, arXiv 1503.02531). The result is an ordinary Hugging Face folder and a calibration record: together they
rebuild the trained fake-quant model bit for bit.
"""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import nn
from transformers import PreTrainedModel

from qdqbench.quantize.calibration import record as records
from qdqbench.quantize.calibration.fakequant import native
from qdqbench.quantize.calibration.techniques import channel_splitting
from qdqbench.quantize.models.families.known import family_of
from qdqbench.quantize.models.inputs import select_inputs
from qdqbench.quantize.pipeline.session import CHECKPOINTS, QAT, RECORD, Session
from qdqbench.quantize.recipe.schema import require_qat
from qdqbench.quantize.recipe.sections import Qat
from qdqbench.quantize.tasks import metrics
from qdqbench.quantize.tasks.data.encode import encode
from qdqbench.quantize.tasks.data.splits import Split
from qdqbench.quantize.tasks.kinds.classification import CLASSIFICATION, REGRESSION
from qdqbench.quantize.tasks.kinds.kind import join_outputs
from qdqbench.quantize.training import loop
from qdqbench.quantize.training.student import list_written, prepare, to_db, write_trained
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.arrays import Batch, Int64
from qdqbench.quantize.utils.errors import CheckFailed, UserError
from qdqbench.quantize.utils.system.environment import get_code_identity
from qdqbench.quantize.utils.system.process import is_main_process

States = tuple[torch.Tensor, ...]  # behind the embeddings and each layer, [B, L, hidden]

MEANS = 4  # batches that means of inputs are taken of
FAR_DB = 10.0  # an SQNR that no sound student has


def compute_hidden_distance(hidden: States, teacher: States, mask: torch.Tensor) -> torch.Tensor:
    """Compute the squared error of every layer's output by its power in the teacher, mean over layers.

    Sample by sample, so that nothing depends on how a batch is split: a float32 scalar, the sum over B.
    `mask` is int64 [B, L], 0 for padding. As in Jiao et al. 2019, "TinyBERT", arXiv 1909.10351, equation
    8, without a projection as the sizes agree.
    """
    weight = (mask / mask.sum(dim=1, keepdim=True))[..., None]
    total = torch.zeros((), device=mask.device)
    for mine, wanted in zip(hidden, teacher, strict=True):
        error = ((mine.float() - wanted.float()).square() * weight).sum(dim=(1, 2))
        power = (wanted.float().square() * weight).sum(dim=(1, 2))
        total = total + (error / power).sum()
    return total / len(hidden)


def unshift_states(session: Session, accelerator: Accelerator) -> Callable[[States], States]:
    """Return what takes the shifts of calibration out of hidden states, which the teacher has not."""
    shifts = records.get_state_shifts(session.ptq_record)
    moved = {number: torch.tensor(values, device=accelerator.device) for number, values in shifts.items()}
    return lambda hidden: tuple(s - moved[n] if n in moved else s for n, s in enumerate(hidden))


class Distillation:
    """The FP32 model as teacher, which runs alongside.

    The score that chooses weights and learning rate is the SQNR on the held-out rows, mean over the parts of
    the loss in dB: answers may be far nearer to FP32 than hidden states are.
    """

    def __init__(
        self, session: Session, settings: Qat, accelerator: Accelerator, data: loop.TrainingData
    ) -> None:
        self.task, self.parts = session.config.task, settings.distill
        self.labelled = not settings.texts
        self.accelerator, self.data = accelerator, data
        self.teacher = session.new_model().to(accelerator.device)
        self.teacher.requires_grad_(False)
        self.unshift = unshift_states(session, accelerator)
        self.labels = torch.from_numpy(data.encoded.labels).to(accelerator.device)
        held_out = loop.predict_rows(accelerator, self.teacher, self.task.kind, data.judged, data.pad_id)
        if bad := int((~np.isfinite(held_out)).any(axis=1).sum()):
            raise CheckFailed(
                f"{bad} of {len(held_out)} answers of the FP32 model to training rows are NaN or infinite"
            )
        self.held_out = held_out  # [answers, width]
        self.power = float(np.square(held_out, dtype=np.float64).sum()) or 1.0

    def loss(self, model: Any, rows: Int64, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        parts, kind, encoded = self.parts, self.task.kind, self.data.encoded
        batch = select_inputs(self.teacher, batch)
        states = parts.hidden > 0
        output = model(**batch, output_hidden_states=states)
        with torch.no_grad(), self.accelerator.autocast():
            target = self.teacher(**batch, output_hidden_states=states)
        answers, wanted = (encoded.kept(rows, join_outputs(x, kind.outputs)) for x in (output, target))
        total: Any = 0.0
        if parts.logits:
            error = (answers.float() - wanted.float()).square().sum()
            total = parts.logits * error * self.data.judged.rows / self.power
        if parts.labels and not kind.embeds:
            places, counts = (torch.from_numpy(x).to(self.labels.device) for x in encoded.places(rows))
            total = total + parts.labels * kind.loss(answers, self.labels[places], counts)
        if states:
            total = total + parts.hidden * self._compare_states(output, target, batch)
        return total  # type: ignore[no-any-return]

    def _compare_states(self, output: Any, target: Any, batch: loop.Tensors) -> torch.Tensor:
        mine = self.unshift(output.hidden_states)
        return compute_hidden_distance(mine, target.hidden_states, batch["attention_mask"])

    def judge(self, model: Any) -> loop.HeldOut:
        task, parts, judged, wanted = self.task, self.parts, self.data.judged, self.held_out
        hidden = torch.zeros((), device=self.accelerator.device)

        def compare(output: Any, inputs: loop.Tensors) -> None:
            with self.accelerator.autocast():
                target = self.teacher(**inputs, output_hidden_states=True)
            hidden.add_(self._compare_states(output, target, inputs))

        look, pad_id = compare if parts.hidden else None, self.data.pad_id
        answers = loop.predict_rows(self.accelerator, model, task.kind, judged, pad_id, look=look)
        if not np.isfinite(answers).all():
            return loop.HeldOut(float("nan"), {}, True)
        noise = float(np.square(answers - wanted, dtype=np.float64).sum())
        values = {"sqnr_db": to_db(noise / self.power)}
        weighed = [(parts.logits, values["sqnr_db"])]
        if parts.hidden:
            shared = float(self.accelerator.reduce(hidden, reduction="sum"))
            values["hidden_db"] = to_db(shared / judged.rows)
            weighed.append((parts.hidden, values["hidden_db"]))
        if self.labelled and not task.kind.embeds:
            values["loss"] = task.kind.mean_loss(answers, judged.labels, judged.answers)
            weighed.append((parts.labels, to_db(values["loss"])))
        score = sum(weight * value for weight, value in weighed) / sum(weight for weight, _ in weighed)
        reference = metrics.select_reference(task, judged.gold, wanted)
        collapsed, constant = (task.kind.constant(each, judged.labels) for each in (answers, wanted))
        found = metrics.compute(task, answers, reference) if self.labelled else {}
        return loop.HeldOut(score, {"score_db": score, **values, **found}, collapsed and not constant)


def prepare_student(session: Session, settings: Qat, batches: list[Batch]) -> PreTrainedModel:
    model, learns = session.new_start_model(), settings.amax == "learned"
    prepare(model, session.plan, session.start_record, batches, learns_amax=learns)
    with torch.no_grad():  # reconstructed weights are often where rounding turns, and any step flips them
        for name in session.plan.int8:
            linear: Any = model.get_submodule(name)
            linear.weight.copy_(linear.weight_quantizer(linear.weight))
    family = family_of(model.config)
    only_hidden = not (settings.distill.logits or settings.distill.labels)
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and settings.dropout is not None:
            module.p = settings.dropout
        if only_hidden and isinstance(module, nn.Linear) and family.role(name) in ("pooler", "classifier"):
            # hidden states do not depend on these, and processes would wait for their gradients
            module.requires_grad_(False)
    return model


def _read_split(session: Session, settings: Qat) -> Split:
    """Return the rows to learn from and to hold out; labels of own texts are zeros, which nothing reads."""
    task = session.config.task
    if settings.texts is None:
        return session.split(task.train_split, limit=None)
    if not (task.kind.embeds or task.kind in (CLASSIFICATION, REGRESSION)):
        raise UserError(f"qat.texts is for one answer a text, and task {task.name} has others; drop it")
    split = session.own_texts(settings.texts, settings.seed)
    kept = split.dataset.select_columns([*task.text_columns])
    zeros = np.zeros(len(kept), dtype=np.int64)
    return replace(split, dataset=kept.add_column(task.label_column or "label", zeros))


def new_job(session: Session, settings: Qat, accelerator: Accelerator) -> loop.Job:
    task, split = session.config.task, _read_split(session, settings)
    encoded = encode(split, task, session.tokenizer, session.recipe.export.max_length)
    data = loop.divide(encoded, session.pad_id, settings.holdout, settings.seed)
    some = loop.epoch_batches(data, loop.BATCH, settings.seed, 0)[:MEANS]
    model = prepare_student(session, settings, [data.batch(rows)[1] for rows in some])
    distillation = Distillation(session, settings, accelerator, data)
    model.to(accelerator.device)
    tie = channel_splitting.keep_equal(model, session.start_record.splits)
    tie()

    def after_step() -> None:
        native.keep_positive(model)
        tie()

    ratios = native.list_learned(model)  # of amax, with a rate of their own
    learned = {id(ratio) for ratio in ratios}
    groups = loop.group_decayed(model, settings.weight_decay)
    groups = [{**g, "params": [p for p in g["params"] if id(p) not in learned]} for g in groups]
    if ratios := [ratio for ratio in ratios if ratio.requires_grad]:
        groups.append({"params": ratios, "weight_decay": 0.0, "lr": settings.amax_learning_rate})
    return loop.Job(
        model=model,
        data=data,
        settings=settings,
        loss=distillation.loss,
        judge=distillation.judge,
        folder=session.folder / QAT / CHECKPOINTS,
        identity=_identity(session, settings, session.start_record, split.fingerprint),
        groups=groups,
        after_step=after_step,
        judge_first=True,
        far=FAR_DB,
    )


def _identity(
    session: Session, settings: Qat, record: records.CalibrationRecord, fingerprint: str
) -> dict[str, Any]:
    recipe = session.recipe
    placed = [rule.model_dump(mode="json") for rule in recipe.rules], recipe.attention, session.computes_tanh
    return {
        "job": "qat",
        **get_code_identity(),
        "model": session.model_identity,
        "task": session.config.task.model_dump(mode="json"),
        "data": fingerprint,
        "max_length": recipe.export.max_length,
        "recipe": hashlib.sha256(str(placed).encode()).hexdigest(),
        "calibration": hashlib.sha256(record.model_dump_json().encode()).hexdigest(),
        **settings.model_dump(mode="json"),
    }


def train_on_all(session: Session, lead: Callable[[str], object]) -> None:
    """Take a run up to its training, and train on all processes that a launcher started.

    The main process does PTQ alone, before the processes meet: ModelOpt's calibration would wait for the
    others. They wait where the process group is made, and end when there is nothing to train. `lead` runs the
    stages up to the named one, in the main process.
    """
    if is_main_process():
        lead("reconstructed" if session.recipe.reconstruction else "ptq")
    with loop.join_group():
        accelerator = loop.new_accelerator(require_qat(session.recipe).precision)
        if not is_main_process():
            if broadcast_object_list([None])[0]:
                _train_quantized(session, accelerator)
            return
        begun = False

        def begin() -> None:
            nonlocal begun
            begun = True
            broadcast_object_list([True])

        session.accelerator, session.before_training = accelerator, begin
        try:
            lead("qat")
        finally:
            session.accelerator, session.before_training = None, lambda: None
            if not begun:
                broadcast_object_list([False])


def train_qat(session: Session) -> list[Path]:
    if session.accelerator is None and loop.count_processes() > 1:
        raise UserError(
            f"{loop.count_processes()} processes would each go through this run; under a launcher use "
            "`-m qdqbench qat`"
        )
    session.before_training()
    return _train_quantized(
        session, session.accelerator or loop.new_accelerator(require_qat(session.recipe).precision)
    )


def _train_quantized(session: Session, accelerator: Accelerator) -> list[Path]:
    job = new_job(session, require_qat(session.recipe), accelerator)
    run = loop.train(job, accelerator)
    loop.leave_group()  # what follows is done by the main process alone
    model: Any = job.model
    native.settle_learned(model)
    channel_splitting.keep_equal(model, session.start_record.splits)()
    session.notes += run.notes
    if not accelerator.is_main_process:
        return []
    if not run.gained:  # to the bit
        model = session.new_start_model()
    run.folder = "model"
    write_trained(session, QAT, model.cpu(), session.start_record)
    files.write_text(session.folder / QAT / RECORD, run.model_dump_json(indent=2) + "\n")
    return list_written(session.folder / QAT)
