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


class Row(NamedTuple):
    """A row of a sample, as `tokenizers` encoded it, and the model's answers to it."""

    coded: Any
    answers: Floats


Answer = dict[str, Any]
Samples = Sequence[Any]
Rows = Sequence[Sequence[Row]]  # of each sample
Answers = Callable[[Samples, Rows, Sequence[str]], list[Answer]]


def classify(samples: Samples, rows: Rows, labels: Sequence[str]) -> list[Answer]:
    """Return the most probable class of each sample, and the probability of each class."""
    logits = np.array([row.answers for (row,) in rows], dtype=np.float64)
    shares = np.exp(logits - np.logaddexp.reduce(logits, axis=1, keepdims=True))
    best = shares.argmax(axis=1).tolist()
    return [
        {"label": labels[place], "scores": dict(zip(labels, row, strict=True))}
        for place, row in zip(best, shares.tolist(), strict=True)
    ]


def list_classes(
    samples: Sequence[Any], rows: Sequence[Sequence[Row]], labels: Sequence[str]
) -> list[Answer]:
    """Return the classes of each sample whose probability is above 0.5, and the probability of each class."""
    made = []
    for (row,) in rows:
        shares = 1 / (1 + np.exp(-row.answers.astype(np.float64)))
        scores = dict(zip(labels, shares.tolist(), strict=True))
        made.append({"labels": [label for label, share in scores.items() if share > 0.5], "scores": scores})
    return made


def score(samples: Samples, rows: Rows, labels: Sequence[str]) -> list[Answer]:
    """Return the score of each sample."""
    return [{"score": float(row.answers[0])} for (row,) in rows]


def embed(samples: Samples, rows: Rows, labels: Sequence[str]) -> list[Answer]:
    """Return the embedding of each text; pooling and normalization are in the graph."""
    return [{"embedding": row.answers} for (row,) in rows]


def tag(samples: Samples, rows: Rows, labels: Sequence[str]) -> list[Answer]:
    """Return each word of a sample with its class, which its first token tells; None where it was cut off."""
    made = []
    for words, (row,) in zip(samples, rows, strict=True):
        positions, about = find_first_tokens(row.coded)
        best = row.answers[positions].argmax(axis=1).tolist()
        found = dict(zip(about.tolist(), best, strict=True))
        told = [labels[found[place]] if place in found else None for place in range(len(words))]
        made.append({"words": [[*each] for each in zip(words, told, strict=True)]})
    return made


def extract(samples: Samples, rows: Rows, labels: Sequence[str]) -> list[Answer]:
    """Return the best span of each context, its score, and the score of there being no answer."""
    made = []
    for (_, context), windows in zip(samples, rows, strict=True):
        best, text, none = -np.inf, "", np.inf
        for row in windows:
            spans = find_spans(row.coded)
            logits = row.answers
            none = min(none, float(logits[NO_ANSWER].sum()))
            found, first, last = find_best_span(logits, spans)
            if found > best:
                best, text = found, context[spans[first, 0] : spans[last, 1]]
        made.append({"answer": text, "score": best, "score_without_answer": none})
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
