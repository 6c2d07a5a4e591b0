"""Losses of fine-tuning and QAT, summed over the samples of a batch."""

from typing import TYPE_CHECKING

from qdqbench.quantize.tasks.task import Task

if TYPE_CHECKING:
    import torch


def label_loss(task: Task, logits: "torch.Tensor", labels: "torch.Tensor") -> "torch.Tensor":
    """Distance of answers from labels: cross entropy, or squared error of a regression.

    Args:
        task: says which.
        logits: [B, num_labels].
        labels: int64 classes or float32 scores, [B].

    Returns:
        float32 scalar, the sum over B.
    """
    return task.kind.loss(logits.float(), labels)


def answer_distance(
    task: Task, logits: "torch.Tensor", teacher: "torch.Tensor", temperature: float
) -> "torch.Tensor":
    """Distillation from answers: KL(teacher || student) T^2, or squared error of a regression.

    Args:
        task: says which.
        logits: of the student, [B, num_labels].
        teacher: its answers, [B, num_labels].
        temperature: T.

    Returns:
        float32 scalar, the sum over B.
    """
    return task.kind.distance(logits.float(), teacher.float(), temperature)


def hidden_distance(
    hidden: "tuple[torch.Tensor, ...]", teacher: "tuple[torch.Tensor, ...]", mask: "torch.Tensor"
) -> "torch.Tensor":
    """Squared error of every layer's output relative to its power in the teacher, mean over layers.

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
