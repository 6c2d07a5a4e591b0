"""What QAT trains and how it is judged: the PTQ model as student, and the FP32 model as teacher."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from qdqbench.quantize.calibration.fakequant import native
from qdqbench.quantize.calibration.qkv_bias_folding import group_shared_scales
from qdqbench.quantize.calibration.record import get_state_shifts
from qdqbench.quantize.calibration.smoothing import keep_equal
from qdqbench.quantize.models.families.known import family_of
from qdqbench.quantize.models.inputs import select_inputs
from qdqbench.quantize.pipeline.session import QAT, Session
from qdqbench.quantize.recipe.plan import list_bias_free_linears
from qdqbench.quantize.recipe.training import Distill, Qat
from qdqbench.quantize.tasks import metrics
from qdqbench.quantize.tasks.rows import encode
from qdqbench.quantize.tasks.task import Task
from qdqbench.quantize.tasks.types.encoded import Encoded
from qdqbench.quantize.tasks.types.kind import TaskKind, join_outputs
from qdqbench.quantize.training.evaluate import is_collapsed, predict_rows, share_batches
from qdqbench.quantize.training.loop import HeldOut, Job, group_decayed
from qdqbench.quantize.training.record import CHECKPOINTS
from qdqbench.quantize.training.rows import TrainingData, divide
from qdqbench.quantize.utils.arrays import Float32, Int64
from qdqbench.quantize.utils.errors import CheckFailed, UserError

if TYPE_CHECKING:
    import torch


def compute_hidden_distance(
    hidden: "tuple[torch.Tensor, ...]", teacher: "tuple[torch.Tensor, ...]", mask: "torch.Tensor"
) -> "torch.Tensor":
    """Compute the squared error of every layer's output by its power in the teacher, mean over layers.

    Sample by sample, so that nothing depends on how a batch is split. As in Jiao et al. 2019, "TinyBERT",
    arXiv 1909.10351, equation 8, without a projection as the sizes agree.

    Args:
        hidden: of the student, [B, L, H] each.
        teacher: likewise.
        mask: int64 [B, L]; padding does not count.

    Returns:
        float32 scalar, the sum over B.
    """
    import torch

    weight = (mask / mask.sum(dim=1, keepdim=True))[..., None]
    total = torch.zeros((), device=mask.device)
    for mine, wanted in zip(hidden, teacher, strict=True):
        error = ((mine.float() - wanted.float()).square() * weight).sum(dim=(1, 2))
        power = (wanted.float().square() * weight).sum(dim=(1, 2))
        total = total + (error / power).sum()
    return total / len(hidden)


if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from transformers import PreTrainedModel

    States = tuple[torch.Tensor, ...]  # behind the embeddings and each layer, [B, L, hidden]

FAR_FROM_FP32 = 0.1  # of the unit of each part of the loss


def new_job(
    session: Session,
    settings: Qat,
    accelerator: "Accelerator",
    model: "PreTrainedModel",
    data: TrainingData,
) -> Job:
    """Create the training of a student, without its identity."""
    teacher = session.new_model().to(accelerator.device)
    kind = session.config.task.kind
    answers = compute_targets(accelerator, teacher, kind, data)
    if settings.distill.hidden:
        teacher.requires_grad_(False)
    model.to(accelerator.device)
    tie = keep_equal(model, session.ptq_record.splits)
    tie()
    own = _own_states(session, accelerator)

    def after_step() -> None:
        native.keep_positive(model)
        tie()

    return Job(
        model=model,
        data=data,
        settings=settings,
        loss=make_distillation(session, settings, accelerator, data.encoded, teacher, answers, own),
        judge=_judge(session, settings, accelerator, data, teacher, answers, own),
        folder=session.folder / QAT / CHECKPOINTS,
        identity={},
        groups=group_parameters(model, settings),
        after_step=after_step,
        report=session.report,
        judge_first=True,
        far=_get_worst_distance(session.config.task, settings.distill, _held_out(answers, data)),
    )


def load_training_data(session: Session, settings: Qat) -> tuple[TrainingData, str]:
    """Load the train split, tokenized and divided, and its fingerprint."""
    task = session.config.task
    split = session.split(task.train_split, limit=None)
    encoded = encode(split, task, session.tokenizer, session.recipe.export.max_length)
    return divide(encoded, session.pad_id, settings.holdout, settings.seed), split.fingerprint


def prepare_student(session: Session, settings: Qat) -> "PreTrainedModel":
    """Load the PTQ model with quantizers made for training.

    Raises:
        UserError: only some of its feed-forwards have outlier channels split.
    """
    from torch import nn

    model = session.new_ptq_model()
    splits = session.ptq_record.splits
    layers = len(family_of(model.config).layer_names(model))
    if splits and len(splits) != layers:
        raise UserError(
            f"qat with outlier_channel_splitting needs the second feed-forward linear of all {layers} layers "
            f"in INT8, and {len(splits)} are: a model whose layers differ in size cannot be saved; quantize "
            "the others, or drop outlier_channel_splitting"
        )
    for name in list_bias_free_linears(session.plan):  # a bias that comes back is a kernel again
        bias: Any = model.get_submodule(name).bias
        if bias is not None:
            bias.requires_grad_(False)
    native.use_native(model)
    if settings.amax == "learned":
        native.learn_amax(model, together=group_shared_scales(session.plan))
    if settings.dropout is not None:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = settings.dropout
    if not (settings.distill.logits or settings.distill.labels):
        # hidden states do not depend on these, and processes would wait for their gradients
        family = family_of(model.config)
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and family.role(name) in ("pooler", "classifier"):
                module.requires_grad_(False)
    return model


def _own_states(session: Session, accelerator: "Accelerator") -> "Callable[[States], States]":
    """Take what shifts add out of hidden states of the student, as the teacher has them."""
    import torch

    moved = {
        number: torch.tensor(values, device=accelerator.device)
        for number, values in get_state_shifts(session.ptq_record, session.plan).items()
    }
    return lambda hidden: tuple(
        state - moved[number] if number in moved else state for number, state in enumerate(hidden)
    )


def group_parameters(model: "PreTrainedModel", settings: Qat) -> list[dict[str, Any]]:
    """Group weights, biases and LayerNorms, and learned ratios of amax with a rate of their own."""
    ratios = native.list_learned(model)
    known = {id(ratio) for ratio in ratios}
    groups = group_decayed(model, settings.weight_decay)
    groups = [{**g, "params": [p for p in g["params"] if id(p) not in known]} for g in groups]
    if ratios := [ratio for ratio in ratios if ratio.requires_grad]:
        groups.append({"params": ratios, "weight_decay": 0.0, "lr": settings.amax_learning_rate})
    return groups


def compute_targets(
    accelerator: "Accelerator", teacher: "PreTrainedModel", kind: TaskKind, data: TrainingData
) -> Float32:
    """Compute the teacher's answers to the train split, float32 [answers, width].

    Raises:
        CheckFailed: NaN or infinite answers.
    """
    answers = predict_rows(accelerator, teacher, kind, data.encoded, data.pad_id)
    if bad := int((~np.isfinite(answers)).any(axis=1).sum()):
        raise CheckFailed(
            f"{bad} of {len(answers)} answers of the FP32 model to training rows are NaN or infinite"
        )
    return answers


def make_distillation(  # noqa: PLR0913, PLR0917
    session: Session,
    settings: Qat,
    accelerator: "Accelerator",
    encoded: Encoded,
    teacher: "PreTrainedModel",
    answers: Float32,
    own: "Callable[[States], States]",
) -> "Callable[[Any, Int64, dict[str, torch.Tensor]], torch.Tensor]":
    """Return the loss of a batch, summed over its rows."""
    import torch

    parts, kind, device = settings.distill, session.config.task.kind, accelerator.device
    wanted = torch.from_numpy(answers).to(device)
    labels = torch.from_numpy(encoded.labels).to(device)

    def loss(model: Any, rows: Int64, batch: "dict[str, torch.Tensor]") -> "torch.Tensor":
        batch = select_inputs(teacher, batch)
        output = model(**batch, output_hidden_states=parts.hidden > 0)
        places, counts = (torch.from_numpy(x).to(device) for x in encoded.places(rows))
        made = encoded.kept(rows, join_outputs(output, kind.outputs))
        total: Any = 0.0
        if parts.logits:
            total = parts.logits * kind.distance(made, wanted[places], parts.temperature, counts)
        if parts.labels and not kind.embeds:
            total = total + parts.labels * kind.loss(made, labels[places], counts)
        if parts.hidden:
            with torch.no_grad(), accelerator.autocast():
                hidden = teacher(**batch, output_hidden_states=True).hidden_states
            distance = compute_hidden_distance(own(output.hidden_states), hidden, batch["attention_mask"])
            total = total + parts.hidden * distance
        return total  # type: ignore[no-any-return]

    return loss


def _judge(  # noqa: PLR0913, PLR0917
    session: Session,
    settings: Qat,
    accelerator: "Accelerator",
    data: TrainingData,
    teacher: "PreTrainedModel",
    answers: Float32,
    own: "Callable[[States], States]",
) -> Callable[[Any], HeldOut]:
    """Compute the loss of the training, on the held-out rows."""
    task, judged = session.config.task, data.judged
    wanted, labels, counts = _held_out(answers, data), judged.labels, judged.answers

    def judge(model: Any) -> HeldOut:
        import torch

        made = predict_rows(accelerator, model, task.kind, judged, data.pad_id)
        if not np.isfinite(made).all():
            return HeldOut(float("nan"), {}, True)
        parts = settings.distill
        pair = torch.from_numpy(made), torch.from_numpy(wanted)
        distance = task.kind.distance(*pair, parts.temperature, torch.from_numpy(counts))
        scores = {"distance": float(distance) / judged.rows}
        score = parts.logits * scores["distance"]
        if not task.kind.embeds:
            scores["loss"] = task.kind.mean_loss(made, labels, counts)
            score += parts.labels * scores["loss"]
        if parts.hidden:
            scores["hidden"] = _held_out_hidden(accelerator, model, teacher, data, own)
            score += parts.hidden * scores["hidden"]
            scores = {"objective": score, **scores}
        values = {
            **scores,
            **metrics.compute(task, made, metrics.select_reference(task, judged.gold, wanted)),
        }
        constant = is_collapsed(task, made, labels) and not is_collapsed(task, wanted, labels)
        return HeldOut(-score, values, constant)

    return judge


def _held_out(answers: Float32, data: TrainingData) -> Float32:
    """Select the answers to the held-out samples from those to the train split."""
    encoded = data.encoded
    return answers[encoded.answers_of(encoded.rows_of(data.held_out))]


def _get_worst_distance(task: Task, parts: Distill, wanted: Float32) -> float:
    """Return a distance that no sound student has; ten times that of PTQ may be next to nothing.

    A tenth of 1 nat, of the power of the hidden states, and for a regression of the variance of the answers.
    """
    return FAR_FROM_FP32 * ((parts.logits + parts.labels) * task.kind.distance_unit(wanted) + parts.hidden)


def _held_out_hidden(
    accelerator: "Accelerator",
    model: Any,
    teacher: "PreTrainedModel",
    data: TrainingData,
    own: "Callable[[States], States]",
) -> float:
    """Return the mean distance of hidden states over the held-out rows, each process with its share."""
    import torch

    total = torch.zeros((), device=accelerator.device)
    for _, inputs in share_batches(accelerator, teacher, data.judged, data.pad_id):
        with torch.inference_mode(), accelerator.autocast():
            hidden = model(**inputs, output_hidden_states=True).hidden_states
            target = teacher(**inputs, output_hidden_states=True).hidden_states
        total = total + compute_hidden_distance(own(hidden), target, inputs["attention_mask"])
    return float(accelerator.reduce(total, reduction="sum")) / data.judged.rows
