"""Answers from the outputs of a model, for each kind of task, with NumPy alone.

The answers of a row are an array [width], or [length, width] where tokens have answers.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.floating[Any]]
# as transformers' examples/pytorch/question-answering/utils_qa.py has them
BEST = 20  # starts, and ends, of a window that are combined
LONGEST = 30  # tokens of an answer
NO_ANSWER = 0  # position of the token that stands for none: the first


class Rows(NamedTuple):
    """Rows of samples, and the model's answers to them."""

    numbers: Any  # of the sample that each row is of, ascending
    coded: Sequence[Any]  # as `tokenizers` encoded them
    answers: Sequence[Floats] | Floats


Answer = dict[str, Any]
Samples = Sequence[Any]
Answers = Callable[[Samples, Rows, Sequence[str]], list[Answer]]


def classify(samples: Samples, rows: Rows, labels: Sequence[str]) -> list[Answer]:
    """Return the most probable class of each sample, and the probability of each class."""
    logits = np.array(rows.answers, dtype=np.float64)
    shares = np.exp(logits - np.logaddexp.reduce(logits, axis=1, keepdims=True))
    best = shares.argmax(axis=1).tolist()
    return [
        {"label": labels[place], "scores": dict(zip(labels, row, strict=True))}
        for place, row in zip(best, shares.tolist(), strict=True)
    ]


def list_classes(samples: Samples, rows: Rows, labels: Sequence[str]) -> list[Answer]:
    """Return the classes of each sample whose probability is above 0.5, and the probability of each class."""
    made = []
    for shares in (1 / (1 + np.exp(-np.array(rows.answers, dtype=np.float64)))).tolist():
        scores = dict(zip(labels, shares, strict=True))
        made.append({"labels": [label for label, share in scores.items() if share > 0.5], "scores": scores})
    return made


def score(samples: Samples, rows: Rows, labels: Sequence[str]) -> list[Answer]:
    """Return the score of each sample."""
    return [{"score": float(answers[0])} for answers in rows.answers]


def embed(samples: Samples, rows: Rows, labels: Sequence[str]) -> list[Answer]:
    """Return the embedding of each text; pooling and normalization are in the graph."""
    return [{"embedding": answers} for answers in rows.answers]


def tag(samples: Samples, rows: Rows, labels: Sequence[str]) -> list[Answer]:
    """Return each word of a sample with its class, which its first token tells; None where it was cut off."""
    made = []
    for words, coded, answers in zip(samples, rows.coded, rows.answers, strict=True):
        positions, about = find_first_tokens(coded)
        best = answers[positions].argmax(axis=1).tolist()
        found = dict(zip(about.tolist(), best, strict=True))
        told = [labels[found[place]] if place in found else None for place in range(len(words))]
        made.append({"words": [[*each] for each in zip(words, told, strict=True)]})
    return made


def extract(samples: Samples, rows: Rows, labels: Sequence[str]) -> list[Answer]:
    """Return the best span of each context and its score; without a span it is that of no answer."""
    made: list[Answer] = [{"answer": "", "score": -np.inf, "score_without_answer": np.inf} for _ in samples]
    for number, coded, logits in zip(rows.numbers.tolist(), rows.coded, rows.answers, strict=True):
        answer, spans = made[number], find_spans(coded)
        none = min(answer["score_without_answer"], float(logits[NO_ANSWER].sum()))
        answer["score_without_answer"] = none
        found, first, last = find_best_span(logits, spans)
        if found > answer["score"]:
            answer["answer"] = samples[number][1][spans[first, 0] : spans[last, 1]]
            answer["score"] = found
    for answer in made:  # JSON has no infinity
        answer["score"] = answer["score"] if np.isfinite(answer["score"]) else answer["score_without_answer"]
    return made


def find_first_tokens(coded: Any) -> tuple[Ints, Ints]:
    """Return the first token of each word that has one, and the number of the word: [words] each."""
    first: dict[int, int] = {}
    for position, word in enumerate(coded.word_ids):
        if word is not None:
            first.setdefault(word, position)
    return np.array([*first.values()], dtype=np.int64), np.array([*first], dtype=np.int64)


def find_spans(coded: Any) -> Ints:
    """Return where in the second text each token stands, [tokens, 2]; -1 for the other tokens."""
    spans = np.array(coded.offsets, dtype=np.int64).reshape(-1, 2)
    spans[[sequence != 1 for sequence in coded.sequence_ids]] = -1
    return spans


def find_best_span(logits: Floats, spans: Ints) -> tuple[float, int, int]:
    """Return score, first and last token of a window's best answer; -inf where it has no context."""
    inside = np.flatnonzero(spans[:, 0] >= 0)
    starts, ends = (inside[np.argsort(-logits[inside, side], kind="stable")[:BEST]] for side in (0, 1))
    long = ends[None] - starts[:, None] + 1
    sums = logits[starts, 0][:, None] + logits[ends, 1][None]
    scores = np.where((long >= 1) & (long <= LONGEST), sums, -np.inf)
    if not scores.size:
        return -np.inf, NO_ANSWER, NO_ANSWER
    row, column = np.unravel_index(int(scores.argmax()), scores.shape)
    return float(scores[row, column]), int(starts[row]), int(ends[column])


ANSWERS: dict[str, Answers] = {  # by the name of the kind of task
    "classification": classify,
    "multi-label classification": list_classes,
    "regression": score,
    "re-ranking": score,
    "token classification": tag,
    "question answering": extract,
    "embedding": embed,
    "embedding of texts": embed,
}
