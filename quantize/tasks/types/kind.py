"""What a kind of task is, as data: nothing else asks of which kind a task is."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from qdqbench.quantize.tasks.types.encoded import RowLayout, Targets, Units
from qdqbench.quantize.tasks.types.scores import Metric
from qdqbench.quantize.utils.arrays import Array, Float64, Floats, Int64

if TYPE_CHECKING:
    import datasets
    import torch


Divergence = Literal["kl", "squared", "cosine"]


class Described(Protocol):
    """What a kind must know of a task."""

    @property
    def name(self) -> str:
        """Of the task."""

    @property
    def text_columns(self) -> tuple[str, ...]:
        """Columns with texts."""

    @property
    def label_column(self) -> str:
        """Column with labels."""

    @property
    def num_labels(self) -> int:
        """Number of classes; 1 for one score."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """Return the metrics that score the task."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the model's classes, by their number; empty where nobody asks for them."""


@dataclass(frozen=True)
class TaskKind:
    """What differs between kinds of tasks. A new kind is one more of these, and a line in `task.KINDS`.

    A sample is what is scored and resampled. It is fed to a model as one row or several, and each row gets
    one answer or, where `units` says so, one for each of some of its tokens. Answers of a split are one array
    [answers, width], row after row. Gold is what they are scored against: of a type of the kind's own, with a
    length in samples, from which samples are taken as from an array; the labels [n] where nothing more is
    needed. Predictions are what is scored, one a sample; a table has the numbers of each sample that metrics
    are made of.
    """

    name: str
    # The model
    model_class: str  # of transformers
    architecture: str  # what the names of such model classes end with
    problem_type: str | None  # `config.problem_type`
    outputs: Mapping[str, tuple[str, ...]]  # of model and graph: names, and those of their axes
    head: str  # what a model needs, in errors: takes `count`
    # Rows
    text_type: str  # pattern of the text columns' Arrow type
    text_values: str  # in errors
    # Labels
    label_type: str  # pattern of the label column's Arrow type
    label_values: str  # in errors: takes `last`, the largest class
    label_problem: "Callable[[datasets.Dataset, Described], str]"  # empty: nothing is wrong
    targets: "Callable[[datasets.Dataset, Described, RowLayout], Targets]"
    # Scores
    metrics: Mapping[str, Metric]  # that can score it
    default_metrics: tuple[str, ...]
    predict: Callable[[Floats, Any], Array]  # answers and gold to predictions [samples]
    table: Callable[[Array, Any], Array]  # predictions and gold to [samples, columns]
    right: Callable[[Array], Array] | None  # of a table, bool [samples]; None: none is right or wrong
    # How far answers are from others
    divergence_name: Divergence
    divergence: Callable[[Float64, Float64, Any], Float64]  # reference's answers, others, gold; by sample
    # Training: float32 scalars, summed over rows, of answers of any floating type [answers, width] and their
    # labels, or a teacher's answers and a temperature; the last is the number of answers of each row
    loss: "Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None"  # None: no labels
    distance: "Callable[[torch.Tensor, torch.Tensor, float, torch.Tensor], torch.Tensor]"
    distance_unit: Callable[[Floats], float]  # of answers: a large distance
    mean_loss: "Callable[[Floats, Array, Array], float] | None"  # the loss on NumPy arrays, mean over rows
    constant: Callable[[Floats, Array], bool]  # answers do not depend on the input though labels do
    # What only some have
    count: int | None = None  # of labels, where there is no choice
    # the sample of each row of a data set, by its first row; None: each row is one
    groups: "Callable[[datasets.Dataset, Described], Int64] | None" = None
    width: int | None = None  # of answers; None: the task's number of labels
    expected: Callable[[Any], int] = len  # answers that gold is for
    units: Callable[[Any], Units] | None = None  # of a row as tokenizers encode it; None: one answer a row
    tokenizing: Mapping[str, Any] = field(default_factory=dict)  # options of the tokenizer
    text_columns: tuple[int, int] = (1, 2)  # fewest and most
    windows: bool = False  # a second text that is too long is read in windows that overlap
    names_classes: bool = False  # classes are matched by their names
    reads_first_token: bool = False  # and no other of the last hidden state
    calibrates_unlabelled: bool = False  # calibration takes rows without labels
    labelled: bool = True  # False: there are no labels, and FP32's answers are gold
    answer: str = "answer"  # what one is, for people
    # gold in words, sample by sample, with the names of the classes; None: nothing is right
    label_texts: Callable[[Any, Sequence[str]], list[str]] | None = None
    # of predictions and gold: class of each label and of its answer, and the sample that both are of, [units]
    # each; None: answers are no classes
    by_class: Callable[[Array, Any], tuple[Int64, Int64, Int64]] | None = None
    texts_apart: bool = False  # each text of a sample is a row of its own

    @property
    def embeds(self) -> bool:
        """Return whether models give embeddings: an encoder with pooling and no head of its own."""
        return self.model_class == "AutoModel"


LOGITS = {"logits": ("batch", "label")}
SAME = 1e-3  # spread of the answers, relative to that of the labels or in nat, up to which they are the same


def mean_over_rows(
    loss: "Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]",
) -> "Callable[[Floats, Array, Array], float]":
    """Make `TaskKind.mean_loss` of a `loss`."""

    def mean(answers: Floats, labels: Array, counts: Array) -> float:
        import numpy as np
        import torch

        given = (torch.from_numpy(np.asarray(each)) for each in (answers, labels, counts))
        return float(loss(*given)) / len(counts)

    return mean


def join_outputs(outputs: Any, names: Iterable[str]) -> Any:
    """Return the answers [batch, ...] in a model's outputs; several are stacked along a new last axis.

    Args:
        outputs: a mapping by name, of tensors or of arrays.
        names: as `TaskKind.outputs` lists them.
    """
    answers = [outputs[name] for name in names]
    if len(answers) == 1:
        return answers[0]
    if hasattr(answers[0], "detach"):
        import torch

        return torch.stack(answers, dim=-1)
    import numpy as np

    return np.stack(answers, axis=-1)
