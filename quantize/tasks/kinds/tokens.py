"""Token classification: one class for each word of a sentence, predicted at its first token."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from qdqbench.quantize.standalone.answers import find_first_tokens
from qdqbench.quantize.tasks.kinds.classification import class_text, same_for_all
from qdqbench.quantize.tasks.kinds.encoded import Targets, Units
from qdqbench.quantize.tasks.kinds.kind import TaskFields, TaskKind, of_sums, ratio
from qdqbench.quantize.utils.arrays import Array, Floats, Int64
from qdqbench.quantize.utils.names import name_list

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor

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
        """Return type, first and last word of every entity of a sentence, where classes name entities."""
        from seqeval.metrics.sequence_labeling import get_entities

        return set(get_entities([self.classes[tag] for tag in tags]))

    @cached_property
    def gold_entities(self) -> list[set[tuple[str, int, int]]]:
        return [self.entities(tags) for tags in self.by_sentence(self.tags)]

    @property
    def has_entities(self) -> bool:
        return not _not_iob2(self.classes)


def _not_iob2(classes: tuple[str, ...]) -> list[str]:
    return [name for name in classes if name != "O" and name[:2] not in ("B-", "I-")]


def class_names(dataset: "Dataset", column: str) -> tuple[str, ...]:
    """Return the names of tags: of numbers in order, empty without names; of texts sorted, O first."""
    feature = dataset.features[column].feature
    if names := getattr(feature, "names", None):
        return tuple(names)
    if "string" not in str(feature.dtype):
        return ()
    import pyarrow.compute as pc

    found = pc.unique(pc.drop_null(pc.list_flatten(dataset.data.column(column)))).to_pylist()
    return tuple(sorted(map(str, found), key=lambda name: (name != "O", name)))


def read_label_names(dataset: "Dataset", column: str) -> tuple[str, ...]:
    """Return the names of the labels of texts or words; empty where these are numbers without names."""
    feature = dataset.features.get(column)
    if hasattr(feature, "feature"):
        return class_names(dataset, column)
    return tuple(getattr(feature, "names", None) or ())


@dataclass(frozen=True)
class Classes:
    """Classes of a model, as the labels of a data set mean them."""

    names: tuple[str, ...]  # in the data, empty where labels are numbers without names
    classes: tuple[str, ...]
    warnings: tuple[str, ...]

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.classes)}

    def number(self, label: Any) -> int:
        """Return the model's number of a label, a name or a number of the data."""
        if not self.names:
            return int(label)
        return self._places[label if isinstance(label, str) else self.names[label]]


def read_classes(dataset: "Dataset", task: TaskFields, what: str) -> Classes:
    """Read how the labels of a data set name a model's classes; `what` they are called in a warning."""
    names, classes, warnings = class_names(dataset, task.label_column), task.classes, []
    if not is_named(classes) and names:
        classes = names
        warnings.append("the model does not name its classes: they are taken to be in the data's order")
    if not names:
        warnings.append(f"the {what} are numbers without names: they are taken to be in the model's order")
    return Classes(names, classes, tuple(warnings))


def is_named(classes: tuple[str, ...]) -> bool:
    """Return whether classes have names of their own, not those that transformers gives."""
    return not all(name == f"LABEL_{number}" for number, name in enumerate(classes))


def explain_names(names: tuple[str, ...], task: TaskFields, *, texts: bool) -> str:
    """Return why names of the data's classes do not fit those of the model; empty: they do."""
    if not is_named(task.classes):
        if texts:
            return (
                "are texts, but the model does not name its classes; give one whose config.json has "
                "id2label, or a label column of numbers"
            )
        if names and len(names) != task.num_labels:
            return f"have {len(names)} names, but the model has {task.num_labels} classes without names"
        return ""
    if lost := sorted({*names} - {*task.classes}):
        return (
            f"are not those of the model: it does not know {name_list(lost)}, only "
            f"{', '.join(task.classes)}; give a model that was fine-tuned on these labels"
        )
    return ""


class TokenClassification(TaskKind):
    name = "token classification"
    answer = "tags"
    architecture = "ForTokenClassification"
    outputs = {"logits": ("batch", "length", "label")}
    head = "{count} classes for each token"
    names_classes = True
    text_columns = (1, 1)
    text_type = r"(large_)?list<\w+: (large_)?string( not null)?>"
    text_values = "lists of words"
    split_words = True
    over_tokens = True
    label_type = r"(large_)?list<\w+: (u?int\d+|(large_)?string)( not null)?>"
    label_values = "lists with a tag for each word"
    gold_is_labels = False
    calibrates_unlabelled = True
    metrics = {
        "f1": of_sums(lambda sums: ratio(2 * sums[:, CORRECT], sums[:, PREDICTED] + sums[:, GOLD])),
        "precision": of_sums(lambda sums: ratio(sums[:, CORRECT], sums[:, PREDICTED])),
        "recall": of_sums(lambda sums: ratio(sums[:, CORRECT], sums[:, GOLD])),
        "accuracy": of_sums(lambda sums: ratio(sums[:, RIGHT], sums[:, WORDS])),
    }
    default_metrics = tuple(metrics)

    def units(self, encoding: Any) -> Units:
        return Units(*find_first_tokens(encoding))

    def label_problem(self, dataset: "Dataset", task: TaskFields) -> str:
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
                f"are no IOB2 tags (B-, I- and O) but {name_list(strange)}, so there are no entities to "
                "score; take --metric accuracy"
            )
        return explain_names(names, task, texts="int" not in str(flat.type))

    def targets(self, dataset: "Dataset", task: TaskFields, samples: Int64, units: list[Units]) -> Targets:
        known = read_classes(dataset, task, "tags")
        warnings = [*known.warnings]
        rows, tags, words, lost = self.column(dataset, task.label_column), [], [], 0
        for row, (positions, about) in zip(rows, units, strict=True):
            tags.append(np.array([*map(known.number, row)], dtype=np.int64)[about])
            words.append(len(positions))
            lost += len(row) - len(positions)
        if lost:
            warnings.append(
                f"{lost} of {lost + sum(words)} words are not scored: they were cut off at "
                "export.max_length, or the tokenizer makes nothing of them"
            )
        labels = np.concatenate([*tags, np.zeros(0, dtype=np.int64)])
        return Targets(
            labels, Tagged(labels, np.array(words, dtype=np.int64), known.classes), tuple(warnings)
        )

    def answer_samples(self, gold: Tagged) -> Int64:
        return np.repeat(np.arange(len(gold)), gold.words)

    def predict(self, answers: Floats, gold: Tagged) -> Array:
        """Return the numbers of the classes of a sentence as one text."""
        return np.array([" ".join(map(str, tags)) for tags in gold.by_sentence(np.argmax(answers, axis=1))])

    def table(self, predicted: Array, gold: Tagged) -> Array:
        known = gold.gold_entities if gold.has_entities else [set[tuple[str, int, int]]()] * len(gold)
        rows = []
        for text, tags, truth in zip(predicted, gold.by_sentence(gold.tags), known, strict=True):
            classes = np.array(text.split(), dtype=np.int64)
            found = gold.entities(classes) if gold.has_entities else set()
            rows.append((len(found & truth), len(found), len(truth), int((classes == tags).sum()), len(tags)))
        return np.array(rows, dtype=np.int64)

    def right(self, table: Array) -> Array:
        return np.asarray(table[:, RIGHT] == table[:, WORDS])

    def by_class(self, predicted: Array, gold: Tagged) -> tuple[Int64, Int64, Int64]:
        classes = np.array(" ".join(predicted).split(), dtype=np.int64)
        return gold.tags, classes, self.answer_samples(gold)

    def label_texts(self, gold: Tagged, names: Sequence[str]) -> list[str]:
        sentences = gold.by_sentence(gold.tags) if len(gold) else []
        return [" ".join(class_text(int(tag), names) for tag in tags) for tags in sentences]

    def constant(self, answers: Floats, labels: Array) -> bool:
        return same_for_all(answers, labels)

    def loss(self, answers: "Tensor", labels: "Tensor", counts: "Tensor") -> "Tensor":
        """Compute cross entropy, of a sentence the mean over its words."""
        import torch
        from torch.nn import functional

        each = functional.cross_entropy(answers.float(), labels, reduction="none")
        shares = torch.repeat_interleave(1 / counts.clamp(min=1), counts)  # those of a row sum to 1
        return (each * shares).sum()


TOKENS = TokenClassification()
