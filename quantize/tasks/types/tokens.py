"""Token classification: one class for each word of a sentence, told by its first token."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from qdqbench.quantize.tasks.types.classification import class_text, kl, same_for_all
from qdqbench.quantize.tasks.types.encoded import RowLayout, Targets, Units
from qdqbench.quantize.tasks.types.kind import Described, TaskKind, mean_over_rows
from qdqbench.quantize.tasks.types.scores import of_sums, ratio
from qdqbench.quantize.utils.arrays import Array, Float64, Floats, Int64
from qdqbench.quantize.utils.names import name_list

if TYPE_CHECKING:
    import datasets
    import torch

# columns of a table: numbers of a sentence
CORRECT, PREDICTED, GOLD, RIGHT, WORDS = range(5)  # entities, entities, entities, words, words


@dataclass(frozen=True)
class Tagged:
    """The tags of sentences: of those words that have a token."""

    tags: Int64  # numbers of classes, [words]
    words: Int64  # number of words of each sentence, [samples]
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, samples: Int64) -> "Tagged":
        parts = self.by_sentence(self.tags)
        tags = np.concatenate([*(parts[sample] for sample in samples), np.zeros(0, dtype=np.int64)])
        return Tagged(tags, self.words[samples], self.classes)

    def by_sentence(self, values: Array) -> list[Array]:
        """Return the values of words, [words, ...], as one array a sentence."""
        return np.split(values, np.cumsum(self.words)[:-1])

    def entities(self, tags: Array) -> set[tuple[str, int, int]]:
        """Type, first and last word of every entity of a sentence, where classes name entities."""
        from seqeval.metrics.sequence_labeling import get_entities

        return set(get_entities([self.classes[tag] for tag in tags]))

    @cached_property
    def gold_entities(self) -> list[set[tuple[str, int, int]]]:
        """Return the true entities of each sentence."""
        return [self.entities(tags) for tags in self.by_sentence(self.tags)]

    @property
    def has_entities(self) -> bool:
        """Return whether classes name entities."""
        return not _not_iob2(self.classes)


def _not_iob2(classes: tuple[str, ...]) -> list[str]:
    return [name for name in classes if name != "O" and name[:2] not in ("B-", "I-")]


def class_names(dataset: "datasets.Dataset", column: str) -> tuple[str, ...]:
    """Return the names of tags in a column of lists: of its numbers in order, or its sorted texts, O first.

    Empty where its numbers have no names.
    """
    feature = dataset.features[column].feature
    if names := getattr(feature, "names", None):
        return tuple(names)
    if "int" in str(feature.dtype):
        return ()
    import pyarrow.compute as pc

    found = pc.unique(pc.drop_null(pc.list_flatten(dataset.data.column(column)))).to_pylist()
    return tuple(sorted(map(str, found), key=lambda name: (name != "O", name)))


def is_named(classes: tuple[str, ...]) -> bool:
    """Return whether classes have names of their own, not those that transformers gives."""
    return not all(name == f"LABEL_{number}" for number, name in enumerate(classes))


def _label_problem(dataset: "datasets.Dataset", task: Described) -> str:
    import pyarrow.compute as pc

    words, tags = (dataset.data.column(name) for name in (task.text_columns[0], task.label_column))
    uneven = pc.sum(pc.not_equal(pc.list_value_length(words), pc.list_value_length(tags))).as_py()
    if uneven:
        return f"are not as many as the words in {uneven} of {len(dataset)} rows; correct or drop them"
    flat = pc.list_flatten(tags)
    if flat.null_count:
        return f"are missing for {flat.null_count} words; correct or drop their rows"
    names = class_names(dataset, task.label_column)
    if "int" in str(flat.type):
        count = len(names) or task.num_labels
        low, high = pc.min(flat).as_py() or 0, pc.max(flat).as_py() or 0
        if low < 0 or high >= count:
            return f"go from {low} to {high}, but there are tags 0 to {count - 1}; correct them"
    strange = _not_iob2(task.classes if is_named(task.classes) else names or task.classes)
    if strange and {*task.metrics} - {"accuracy"}:
        return (
            f"are no IOB2 tags (B-, I- and O) but {name_list(strange)}, so there are no entities to score; "
            "take --metric accuracy"
        )
    return _names_problem(names, task, texts="int" not in str(flat.type))


def _names_problem(names: tuple[str, ...], task: Described, *, texts: bool) -> str:
    """Return the fault of the names of tags against those of the model's classes."""
    if not is_named(task.classes):
        if texts:
            return (
                "are texts, but the model does not name its classes; give one whose config.json has "
                "id2label, or a label column of numbers"
            )
        if names and len(names) != task.num_labels:
            return f"have {len(names)} tags, but the model has {task.num_labels} classes without names"
        return ""
    if lost := sorted({*names} - {*task.classes}):
        return (
            f"are not those of the model: it does not know {name_list(lost)}, only "
            f"{', '.join(task.classes)}; give a model that was fine-tuned on these tags"
        )
    return ""


def _targets(dataset: "datasets.Dataset", task: Described, layout: RowLayout) -> Targets:
    names, classes, warnings = class_names(dataset, task.label_column), task.classes, []
    if not is_named(classes) and names:
        classes = names
        warnings.append("the model does not name its classes: they are taken to be in the data's order")
    if not names:
        warnings.append("the tags are numbers without names: they are taken to be in the model's order")
    number = {name: place for place, name in enumerate(classes)}
    rows = dataset.select_columns([task.label_column])[:][task.label_column]
    tags, words, lost = [], [], 0
    for row, (positions, about) in zip(rows, layout.units, strict=True):
        read = [number[tag if isinstance(tag, str) else names[tag]] if names else tag for tag in row]
        tags.append(np.array(read, dtype=np.int64)[about])
        words.append(len(positions))
        lost += len(row) - len(positions)
    if lost:
        warnings.append(
            f"{lost} of {lost + sum(words)} words are not scored: they were cut off at export.max_length, or "
            "the tokenizer makes nothing of them"
        )
    labels = np.concatenate([*tags, np.zeros(0, dtype=np.int64)])
    return Targets(labels, Tagged(labels, np.array(words, dtype=np.int64), classes), tuple(warnings))


def _units(encoding: Any) -> Units:
    """Return the first token of each word."""
    found: dict[int, int] = {}
    for position, word in enumerate(encoding.word_ids):
        if word is not None:
            found.setdefault(word, position)
    return Units(np.array([*found.values()], dtype=np.int64), np.array([*found], dtype=np.int64))


def _predict(logits: Floats, gold: Tagged) -> Array:
    """Return the numbers of the classes of a sentence as one text."""
    return np.array([" ".join(map(str, tags)) for tags in gold.by_sentence(np.argmax(logits, axis=1))])


def _table(predicted: Array, gold: Tagged) -> Array:
    return np.array([*_rows(predicted, gold)], dtype=np.int64)


def _rows(predicted: Array, gold: Tagged) -> Iterator[tuple[int, ...]]:
    known = gold.gold_entities if gold.has_entities else [set[tuple[str, int, int]]()] * len(gold)
    for text, tags, truth in zip(predicted, gold.by_sentence(gold.tags), known, strict=True):
        made = np.array(text.split(), dtype=np.int64)
        found = gold.entities(made) if gold.has_entities else set()
        yield len(found & truth), len(found), len(truth), int((made == tags).sum()), len(tags)


def _f1(sums: Floats) -> Floats:
    return ratio(2 * sums[:, CORRECT], sums[:, PREDICTED] + sums[:, GOLD])


def _divergence(reference: Float64, logits: Float64, gold: Tagged) -> Float64:
    each = gold.by_sentence(kl(reference, logits))
    return np.array([part.mean() if len(part) else 0.0 for part in each])


def share_of_row(answers: "torch.Tensor") -> "torch.Tensor":
    """Return the weight of each answer [answers], by row numbers; those of a row sum to 1."""
    import torch

    return torch.repeat_interleave(1 / answers.clamp(min=1), answers)


def _loss(logits: "torch.Tensor", labels: "torch.Tensor", answers: "torch.Tensor") -> "torch.Tensor":
    """Compute cross entropy, of a sentence the mean over its words."""
    from torch.nn import functional

    each = functional.cross_entropy(logits.float(), labels, reduction="none")
    return (each * share_of_row(answers)).sum()


def _distance(
    logits: "torch.Tensor", teacher: "torch.Tensor", temperature: float, answers: "torch.Tensor"
) -> "torch.Tensor":
    """Compute KL(teacher || student) T^2 as of classes, of a sentence the mean over its words."""
    from torch.nn import functional

    student = functional.log_softmax(logits.float() / temperature, dim=-1)
    target = functional.log_softmax(teacher.float() / temperature, dim=-1)
    each = functional.kl_div(student, target, reduction="none", log_target=True).sum(dim=-1)
    return (each * share_of_row(answers)).sum() * temperature**2


def _tag_texts(gold: Tagged, names: Sequence[str]) -> list[str]:
    sentences = gold.by_sentence(gold.tags) if len(gold) else []
    return [" ".join(class_text(int(tag), names) for tag in tags) for tags in sentences]


def _by_class(predicted: Array, gold: Tagged) -> tuple[Int64, Int64, Int64]:
    made = np.array(" ".join(predicted).split(), dtype=np.int64)
    return gold.tags, made, np.repeat(np.arange(len(gold)), gold.words)


TOKENS = TaskKind(
    name="token classification",
    model_class="AutoModelForTokenClassification",
    architecture="ForTokenClassification",
    problem_type=None,
    outputs={"logits": ("batch", "length", "label")},
    head="{count} classes for each token",
    text_type=r"(large_)?list<\w+: (large_)?string( not null)?>",
    text_values="lists of words",
    label_type=r"(large_)?list<\w+: (u?int\d+|(large_)?string)( not null)?>",
    label_values="lists with a tag for each word",
    label_problem=_label_problem,
    targets=_targets,
    metrics={
        "f1": of_sums(_f1),
        "precision": of_sums(lambda sums: ratio(sums[:, CORRECT], sums[:, PREDICTED])),
        "recall": of_sums(lambda sums: ratio(sums[:, CORRECT], sums[:, GOLD])),
        "accuracy": of_sums(lambda sums: ratio(sums[:, RIGHT], sums[:, WORDS])),
    },
    default_metrics=("f1", "precision", "recall", "accuracy"),
    predict=_predict,
    table=_table,
    right=lambda table: np.asarray(table[:, RIGHT] == table[:, WORDS]),
    divergence_name="kl",
    divergence=_divergence,
    loss=_loss,
    distance=_distance,
    distance_unit=lambda answers: 1.0,  # nat
    mean_loss=mean_over_rows(_loss),
    constant=same_for_all,
    expected=lambda gold: len(gold.tags),
    units=_units,
    tokenizing={"is_split_into_words": True},
    text_columns=(1, 1),
    answer="tags",
    label_texts=_tag_texts,
    by_class=_by_class,
    names_classes=True,
    calibrates_unlabelled=True,
)
