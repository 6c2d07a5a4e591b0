"""Extractive question answering: the first and the last token of the answer in a context."""

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from qdqbench.quantize.standalone.answers import NO_ANSWER, find_best_span, find_spans
from qdqbench.quantize.tasks.kinds.encoded import Targets, Units
from qdqbench.quantize.tasks.kinds.kind import TaskFields, TaskKind, of_sums, ratio
from qdqbench.quantize.utils.arrays import Array, Floats, Int64

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(text: str) -> str:
    """Return lower case, without punctuation, the articles a, an and the, and doubled spaces."""
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, right: Sequence[str]) -> float:
    """Return 1 where an answer is one of the right ones, or none where there is none, else 0."""
    return float(normalized(answer) in _known(right))


def f1(answer: str, right: Sequence[str]) -> float:
    """Return the largest F1 of an answer's words with a right one's; `exact_match` if either has none."""
    words, scores = normalized(answer).split(), []
    for known in (text.split() for text in _known(right)):
        same = sum((Counter(words) & Counter(known)).values())
        scores.append(2 * same / (len(words) + len(known)) if words and known else float(words == known))
    return max(scores)


def _known(right: Sequence[str]) -> list[str]:
    return [text for text in map(normalized, right) if text] or [""]


PADDING = -1e9  # a logit that no probability is left of
EXACT, F1, COUNT = range(3)  # columns of a table


@dataclass(frozen=True)
class Questions:
    """Questions with their contexts and answers, and the windows that a context is read in."""

    contexts: list[str]  # of each sample
    answers: list[list[str]]  # of each sample, all that are right; none where the context has no answer
    windows: list[list[Int64]]  # of each sample: where in the context each token is [tokens, 2], or -1
    unanswerable: bool  # some questions of the split have no answer, so that none is an answer

    def __len__(self) -> int:
        return len(self.contexts)

    def __getitem__(self, samples: Int64) -> "Questions":
        contexts, answers = [self.contexts[i] for i in samples], [self.answers[i] for i in samples]
        return Questions(contexts, answers, [self.windows[i] for i in samples], self.unanswerable)

    @property
    def tokens(self) -> Int64:
        """The number of tokens of each window, [windows]."""
        return np.array([len(spans) for windows in self.windows for spans in windows], dtype=np.int64)

    def by_window(self, values: Array) -> list[Array]:
        """Return the values of tokens, [answers, ...], as one array a window."""
        return np.split(values, np.cumsum(self.tokens)[:-1])


def _mark(spans: Int64, answers: Any) -> Floats:
    """Mark first and last token of the first answer, [tokens, 2]; `NO_ANSWER` where it is not whole."""
    marks = np.zeros((len(spans), 2), dtype=np.float32)
    first = last = NO_ANSWER
    if answers["text"]:
        start = answers["answer_start"][0]
        end = start + len(answers["text"][0])
        inside = np.flatnonzero(spans[:, 0] >= 0)
        if len(inside) and spans[inside[0], 0] <= start and end <= spans[inside[-1], 1]:
            first = inside[np.flatnonzero(spans[inside, 0] <= start)[-1]]
            last = inside[np.flatnonzero(spans[inside, 1] >= end)[0]]
    marks[first, 0] = marks[last, 1] = 1
    return marks


class QuestionAnswering(TaskKind):
    name = "question answering"
    architecture = "ForQuestionAnswering"
    outputs = {"start_logits": ("batch", "length"), "end_logits": ("batch", "length")}
    head = "a start and an end for each token"
    width = 2
    text_columns = (2, 2)
    windows = True
    over_tokens = True
    label_type = r"struct<(?=.*\btext: (large_)?list<)(?=.*\banswer_start: (large_)?list<\w+: u?int).*>"
    label_values = "objects with the lists text and answer_start"
    gold_is_labels = False
    calibrates_unlabelled = True
    metrics = {
        "f1": of_sums(lambda sums: ratio(sums[:, F1], sums[:, COUNT])),
        "exact_match": of_sums(lambda sums: ratio(sums[:, EXACT], sums[:, COUNT])),
    }
    default_metrics = tuple(metrics)

    def units(self, encoding: Any) -> Units:
        """Return every token, and where in the context it stands."""
        spans = find_spans(encoding)
        return Units(np.arange(len(spans)), spans)

    def label_problem(self, dataset: "Dataset", task: TaskFields) -> str:
        context, uneven, lost = task.text_columns[1], 0, 0
        for row in dataset.select_columns([context, task.label_column]):
            texts, starts = (row[task.label_column][name] for name in ("text", "answer_start"))
            if texts is None or starts is None or len(texts) != len(starts):
                uneven += 1
            else:
                pairs = zip(texts, starts, strict=True)
                lost += any(
                    None in (text, at) or row[context][at : at + len(text)] != text for text, at in pairs
                )
        count = len(dataset)
        if uneven:
            return f"have as many answer_start as text in all but {uneven} of {count} rows; correct them"
        if lost:
            return (
                f"are not at their answer_start in column {context!r} in {lost} of {count} rows; count "
                "characters from 0, and give the text as in the context"
            )
        return ""

    def targets(self, dataset: "Dataset", task: TaskFields, samples: Int64, units: list[Units]) -> Targets:
        rows = dataset.select_columns([*task.text_columns, task.label_column])[:]
        answers = rows[task.label_column]
        windows: list[list[Int64]] = [[] for _ in answers]
        labels = []
        for sample, (_, spans) in zip(samples, units, strict=True):
            windows[sample].append(spans)
            labels.append(_mark(spans, answers[sample]))
        texts = [list(each["text"]) for each in answers]
        gold = Questions(list(rows[task.text_columns[1]]), texts, windows, not all(texts))
        return Targets(np.concatenate(labels), gold)

    def answer_samples(self, gold: Questions) -> Int64:
        return np.repeat(np.arange(len(gold)), [sum(map(len, windows)) for windows in gold.windows])

    def predict(self, answers: Floats, gold: Questions) -> Array:
        """Return the text of the best span of each question, as in transformers' examples; or no answer."""
        scores, texts = iter(gold.by_window(answers)), []
        for context, windows in zip(gold.contexts, gold.windows, strict=True):
            best, text, none = -np.inf, "", np.inf
            for spans in windows:
                window = next(scores)
                none = min(none, float(window[NO_ANSWER].sum()))
                score, first, last = find_best_span(window, spans)
                if score > best:
                    best, text = score, context[spans[first, 0] : spans[last, 1]]
            texts.append("" if gold.unanswerable and none > best else text)
        return np.array(texts, dtype=str)

    def table(self, predicted: Array, gold: Questions) -> Array:
        pairs = zip(predicted.tolist(), gold.answers, strict=True)
        rows = [(exact_match(text, right), f1(text, right), 1) for text, right in pairs]
        return np.array(rows, dtype=np.float64)

    def right(self, table: Array) -> Array:
        return np.asarray(table[:, EXACT] == 1)

    def label_texts(self, gold: Questions, names: Sequence[str]) -> list[str]:
        return [" / ".join(dict.fromkeys(each)) or "no answer" for each in gold.answers]

    def loss(self, answers: "Tensor", labels: "Tensor", counts: "Tensor") -> "Tensor":
        """Compute cross entropy over a window's tokens, mean of both ends (Devlin et al. 2018, 4.2)."""
        import torch
        from torch.nn import functional
        from torch.nn.utils.rnn import pad_sequence

        rows, marks = ([*torch.split(each, counts.tolist())] for each in (answers.float(), labels))
        windows = pad_sequence(rows, batch_first=True, padding_value=PADDING)  # [windows, tokens, 2]
        right = pad_sequence(marks, batch_first=True) * functional.log_softmax(windows, dim=1)
        return -right.sum() / 2


QUESTIONS = QuestionAnswering()
