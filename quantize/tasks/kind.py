"""What a kind of task is, as data: nothing else asks whether a task is a classification or a regression."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from qdqbench.quantize.core.arrays import Array, Float64, Floats

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TaskKind:
    """What differs between kinds of tasks. A new kind is one more of these, and a line in `task.task_kind`.

    Answers are what a model gives, [n, num_labels]; predictions are what is scored, [n].
    """

    name: str
    # The model
    model_class: str  # of transformers
    problem_type: str  # `config.problem_type`
    outputs: Mapping[str, tuple[str, ...]]  # names of the graph's outputs, and of their axes
    head: str  # what a model needs, in errors: takes `count`
    # Labels
    label_type: type  # NumPy's
    label_values: str  # in errors: takes `last`, the largest class
    label_problem: Callable[[Array, int], str]  # numeric labels [n] and their number; empty: nothing is wrong
    # Scores
    metrics: tuple[str, ...]  # that can score it
    default_metrics: tuple[str, ...]
    predict: Callable[[Floats], Array]  # answers to predictions
    right_or_wrong: bool  # a prediction is: differing ones are counted, and McNemar's test holds
    # How far answers are from others
    divergence_name: Literal["kl", "squared"]
    divergence: Callable[[Float64, Float64], Float64]  # of answers from the reference's (first), by sample
    # Training: float32 scalars, summed over samples; answers of any floating type [B, num_labels], labels [B]
    loss: "Callable[[torch.Tensor, torch.Tensor], torch.Tensor]"  # answers, labels
    distance: "Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]"  # answers, teacher's, temperature
    distance_unit: Callable[[Floats], float]  # of answers: a large distance
    mean_loss: Callable[[Floats, Array], float]  # the loss on NumPy arrays, mean
    constant: Callable[[Floats, Array], bool]  # answers do not depend on the input though labels do


LOGITS = {"logits": ("batch", "label")}
SAME = 1e-3  # spread of the answers, relative to that of the labels or in nat, up to which they are the same
