"""The base of all kinds of tasks: rows, labels, predictions, scores, losses and the head of the model."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from qdqbench.quantize.tasks.kinds.encoded import Targets, Units
from qdqbench.quantize.utils.arrays import Array, Floats, Int64
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.schema import Frozen

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor


@dataclass(frozen=True)
class Metric:
    """One metric; a table is [samples, columns]."""

    # of tables whose rows count as often as weights say, float64 [resamples, rows]: one a resample
    weighted: Callable[[Floats, Array], Floats]
    alone: Callable[[Array], float] | None = None  # of a table; None: each row counts once
    stderr: Callable[[Array], float] | None = None  # of a table; None: bootstrap

    def value(self, table: Array) -> float:
        if self.alone is not None:
            return self.alone(table)
        return float(self.weighted(np.ones((1, len(table))), table)[0])


def share_of_rows(hits: Callable[[Array], Array]) -> Metric:
    """Make a metric of the share of rows that hit, bool [rows]; its error is the binomial one."""

    def stderr(table: Array) -> float:
        share = float(hits(table).mean())
        return float(np.sqrt(share * (1 - share) / len(table)))

    return Metric(
        lambda weights, table: np.asarray(weights @ hits(table) / weights.sum(axis=1)), stderr=stderr
    )


def of_sums(value: Callable[[Floats], Floats]) -> Metric:
    """Make a metric of the sums of a table's columns: [resamples, columns] to [resamples]."""
    return Metric(
        weighted=lambda weights, table: value(weights @ table),
        alone=lambda table: float(value(table.sum(axis=0, dtype=np.float64)[None])[0]),
    )


def mean_of_column(column: int) -> Metric:
    return Metric(
        weighted=lambda weights, table: np.asarray(weights @ table[:, column] / weights.sum(axis=1)),
        alone=lambda table: float(table[:, column].mean()),
    )


def ratio(numerator: Floats, denominator: Floats) -> Floats:
    """Return the quotient, 0 where the denominator is 0."""
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator > 0)


# The tables of these have two columns: label and prediction.


def _weighted_f1(weights: Floats, table: Array) -> Floats:
    labels, predicted = table.T
    true_positive = weights @ ((labels == 1) & (predicted == 1))
    return ratio(2 * true_positive, weights @ (labels == 1) + weights @ (predicted == 1))


def _matthews(table: Array) -> float:
    if np.ptp(table[:, 0]) == 0:
        raise UserError(
            f"all {len(table)} labels are of one class, so Matthews is undefined; use more samples"
        )
    return float(_weighted_matthews(np.ones((1, len(table))), table)[0])


def _weighted_matthews(weights: Floats, table: Array) -> Floats:
    """Compute the correlation of Gorodkin 2004, "Comparing two K-category assignments"."""
    labels, predicted = table.T
    classes = np.unique(table)
    total = weights.sum(axis=1)
    true = weights @ (labels[:, None] == classes)
    made = weights @ (predicted[:, None] == classes)
    covariance = total * (weights @ (labels == predicted)) - (true * made).sum(axis=1)
    spread = (total**2 - (true**2).sum(axis=1)) * (total**2 - (made**2).sum(axis=1))
    return ratio(covariance, np.sqrt(np.maximum(spread, 0)))


def _correlation(table: Array, *, ranks: bool) -> float:
    from scipy import stats

    if np.ptp(table[:, 0]) == 0:
        raise UserError(f"all {len(table)} labels are equal, so correlation is undefined; use more samples")
    if np.ptp(table[:, 1]) == 0:
        return 0.0
    correlate = stats.spearmanr if ranks else stats.pearsonr
    return float(correlate(table[:, 0], table[:, 1]).statistic)


def _weighted_correlation(weights: Floats, table: Array, *, ranks: bool) -> Floats:
    x, y = (_weighted_ranks(weights, column) if ranks else column for column in table.T)
    total = weights.sum(axis=1, keepdims=True)
    floor_x, floor_y = (total.max() * (1e-12 * np.abs(values).max()) ** 2 for values in (x, y))
    x = x - (weights * x).sum(axis=1, keepdims=True) / total
    y = y - (weights * y).sum(axis=1, keepdims=True) / total
    spread_x, spread_y = (weights * x * x).sum(axis=1), (weights * y * y).sum(axis=1)
    # Rounding leaves about 1e-16 of a constant; float32 values that differ do so by at least 6e-8.
    varies = (spread_x > floor_x) & (spread_y > floor_y)
    return ratio((weights * x * y).sum(axis=1), np.where(varies, np.sqrt(spread_x * spread_y), 0))


def _weighted_ranks(weights: Floats, values: Array) -> Floats:
    """Return the mid-ranks of values that occur `weights` times, [resamples, cells]."""
    distinct, inverse = np.unique(values, return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    starts = np.searchsorted(inverse[order], np.arange(len(distinct)))
    counts = np.add.reduceat(weights[:, order], starts, axis=1)
    return (np.cumsum(counts, axis=1) - (counts - 1) / 2)[:, inverse]


# The standard error of accuracy is sqrt(p (1 - p) / n), the binomial. F1 is that of class 1, and 0 when it is
# neither predicted nor there. Matthews is 0 for constant predictions. So are Pearson and Spearman, which are
# undefined there: a stage that answers the same to everything has no association with the labels, and its
# report and gate must say so rather than stop. Constant labels are another matter: nothing can be scored.
CLASSES = {
    "accuracy": share_of_rows(lambda table: table[:, 0] == table[:, 1]),
    "f1": Metric(_weighted_f1),
    "matthews": Metric(_weighted_matthews, _matthews),
}
CORRELATIONS = {
    name: Metric(partial(_weighted_correlation, ranks=ranks), partial(_correlation, ranks=ranks))
    for name, ranks in (("pearson", False), ("spearman", True))
}
LOGITS = {"logits": ("batch", "label")}
NUMBERS = r"bool|u?int\d+|halffloat|float|double"
SAME = 1e-3  # spread of the answers, relative to that of the labels or in nat, up to which they are the same


class TaskFields(Frozen):
    """Data layout and metrics of a kind of tasks; `Task` knows its kind."""

    name: str
    text_columns: tuple[str, ...]  # one sentence or a pair
    label_column: str = "label"
    num_labels: int  # 1: regression
    metrics: tuple[str, ...]  # the first is the primary one
    train_split: str = "train"
    eval_splits: tuple[str, ...] = ("validation",)  # MNLI has two, scored apart
    trained: bool = False  # its train split is trained on, so that a single file keeps most rows for it
    type: str | None = None  # name of its kind; None: classification or regression, by the number of labels
    classes: tuple[str, ...] = ()  # names of the model's classes, by their number, where the kind needs them
    values: tuple[str, ...] = ()  # labels of the data by class number; empty where they are the numbers
    prompts: tuple[str, ...] = ()  # put before the texts of each column; empty: none


class TaskKind(ABC):
    """A kind of task, with the defaults of one number a row as label.

    A sample is what is scored and resampled. It is fed to a model as one row or several, and each row gets
    one answer or, with `over_tokens`, one for each of some of its tokens. Answers of a split are one array
    [answers, width], row after row. Gold is what they are scored against: of a type of the kind's own, with a
    length in samples, from which samples are taken as from an array; the labels [n] where nothing more is
    needed. Predictions are what is scored, one a sample; a table has the numbers of each sample that metrics
    are made of.
    """

    name: str
    answer: str = "answer"  # what one is, for people
    # The model
    architecture: str = "ForSequenceClassification"  # what the names of such model classes end with
    embeds: bool = False  # an encoder with pooling and no head, and no loss on labels
    problem_type: str | None = None  # `config.problem_type`
    outputs: Mapping[str, tuple[str, ...]] = LOGITS  # of model and graph: names, and those of their axes
    head: str  # what a model needs, in errors: takes `count`
    count: int | None = None  # of labels, where there is no choice
    width: int | None = None  # of answers; None: the task's number of labels
    reads_first_token: bool = False  # and no other of the last hidden state
    names_classes: bool = False  # classes are matched by their names
    # Rows
    text_columns: tuple[int, int] = (1, 2)  # fewest and most
    text_type: str = "(large_)?string"  # pattern of the text columns' Arrow type
    text_values: str = "texts"  # in errors
    split_words: bool = False  # texts are lists of words
    texts_apart: bool = False  # each text of a sample is a row of its own
    windows: bool = False  # a second text that is too long is read in windows that overlap
    over_tokens: bool = False  # tokens have answers

    @property
    def truncation(self) -> str:
        """The text of a pair that is cut, as `tokenizers` names it."""
        return "only_second" if self.windows else "longest_first"

    # Labels
    label_type: str = NUMBERS  # pattern of the label column's Arrow type
    label_values: str = "numbers"  # in errors: takes `last`, the largest class
    label_dtype: type = np.float32
    labelled: bool = True  # False: there are no labels, and FP32's answers are gold
    gold_is_labels: bool = True  # False: gold is made of the rows of a split
    calibrates_unlabelled: bool = False  # calibration takes rows without labels
    # Scores
    metrics: Mapping[str, Metric]  # that can score it
    default_metrics: tuple[str, ...]

    @property
    def model_class(self) -> str:
        return "AutoModel" if self.embeds else f"AutoModel{self.architecture}"

    @staticmethod
    def column(dataset: "Dataset", name: str) -> list[Any]:
        values: list[Any] = dataset.select_columns([name])[:][name]
        return values

    def groups(self, dataset: "Dataset", task: TaskFields) -> Int64:
        """Return the sample of each row of a data set, by its first row."""
        return np.arange(len(dataset))

    def units(self, encoding: Any) -> Units:
        """Return the tokens with answers in a row as tokenizers encodes it, with `over_tokens`."""
        raise NotImplementedError

    def label_problem(self, dataset: "Dataset", task: TaskFields) -> str:
        """Return what is wrong with the labels; empty: nothing."""
        labels = dataset.data.column(task.label_column).to_numpy()
        bad = int((~np.isfinite(labels)).sum())
        return f"are not finite in {bad} of {len(labels)} rows; drop or correct them" if bad else ""

    def targets(self, dataset: "Dataset", task: TaskFields, samples: Int64, units: list[Units]) -> Targets:
        """Read labels; of each encoded row there are its sample, ascending, and units with `over_tokens`."""
        return Targets(np.array(self.column(dataset, task.label_column), dtype=self.label_dtype))

    def answer_samples(self, gold: Any) -> Int64:
        """Return the sample of each answer, [answers]."""
        return np.arange(len(gold))

    @abstractmethod
    def predict(self, answers: Floats, gold: Any) -> Array:
        """Return predictions, [samples]."""

    def table(self, predicted: Array, gold: Any) -> Array:
        """Return what metrics are made of, [samples, columns]: label and prediction."""
        return np.stack([gold, predicted], axis=1)

    def right(self, table: Array) -> Array | None:
        """Return which samples are right, bool [samples]; None: none is right or wrong."""
        return None

    def by_class(self, predicted: Array, gold: Any) -> tuple[Int64, Int64, Int64] | None:
        """Return class of label and of prediction, and sample, of each unit; None: answers are no classes."""
        return None

    def label_texts(self, gold: Any, names: Sequence[str]) -> Sequence[str | None]:
        """Return gold in words, sample by sample, with the names of the classes; None: nothing is right."""
        return [f"{label:.4g}" for label in gold]

    def constant(self, answers: Floats, labels: Array) -> bool:
        """Return whether answers do not depend on the input though labels do."""
        return bool(np.ptp(answers, axis=0).max() <= SAME)

    # Training: float32 scalars, summed over rows, of answers of any floating type [answers, width] and their
    # labels. `counts` is the number of answers of each row.

    def loss(self, answers: "Tensor", labels: "Tensor", counts: "Tensor") -> "Tensor":
        raise NotImplementedError

    def mean_loss(self, answers: Floats, labels: Array, counts: Array) -> float:
        """Return `loss` on arrays, mean over rows."""
        import torch

        given = (torch.from_numpy(np.asarray(each)) for each in (answers, labels, counts))
        return float(self.loss(*given)) / len(counts)


def join_outputs(outputs: Any, names: Iterable[str]) -> Any:
    """Return the answers [batch, ...] in a model's outputs by name; stack several along a new last axis."""
    answers = [outputs[name] for name in names]
    if len(answers) == 1:
        return answers[0]
    if hasattr(answers[0], "detach"):
        import torch

        return torch.stack(answers, dim=-1)
    return np.stack(answers, axis=-1)
