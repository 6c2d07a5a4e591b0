"""The loss of QAT on hidden states; those on answers and labels are of the kind of task."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


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
