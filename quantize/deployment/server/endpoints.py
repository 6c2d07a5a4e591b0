"""Endpoints by kind of task: schemas, rows of a request, answers from the model's."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import FailFast, Field, field_validator, model_validator

from qdqbench.quantize.tasks.rows import Sample
from qdqbench.quantize.tasks.types.classification import CLASSIFICATION, REGRESSION
from qdqbench.quantize.tasks.types.embedding import PAIRS, TEXTS_ALONE
from qdqbench.quantize.tasks.types.questions import QUESTIONS, Questions
from qdqbench.quantize.tasks.types.reranking import RERANKING
from qdqbench.quantize.tasks.types.tokens import TOKENS, Tagged
from qdqbench.quantize.utils.arrays import Float32
from qdqbench.quantize.utils.schema import Strict

Columns = dict[str, list[Any]]  # as a data set has them: values of each sample, by column


class _Input(Strict):
    """Input of a client: the first unknown field ends its validation, which so stays cheap."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, value: Any) -> Any:
        known = cls.model_fields
        if (
            isinstance(value, dict)
            and (unknown := next((key for key in value if key not in known), None)) is not None
        ):
            raise ValueError(f"the field {unknown[:100]!r} is unknown; there are {', '.join(known)}")
        return value


class Request(_Input):
    """Fields of all requests."""

    model: Literal["engine", "fp32"] = Field("engine", description="The run's engine, or its FP32 model.")


class Texts(Request):
    """Single texts."""

    texts: Annotated[list[str], FailFast()] = Field(description="One answer each.", min_length=1)


class Pairs(Request):
    """Pairs of texts."""

    pairs: Annotated[list[tuple[str, str]], FailFast()] = Field(description="One answer each.", min_length=1)


class Ranking(Request):
    """A query, and passages to put in order."""

    query: str
    passages: Annotated[list[str], FailFast()] = Field(min_length=1)


class Sentences(Request):
    """Sentences, word by word."""

    sentences: Annotated[list[Annotated[list[str], FailFast()]], FailFast()] = Field(
        description="Words of each sentence.", min_length=1
    )

    @field_validator("sentences")
    @classmethod
    def _with_words(cls, sentences: list[list[str]]) -> list[list[str]]:
        if not all(sentences):
            raise ValueError("a sentence without words has no answer")
        return sentences


class Question(_Input):
    """A question, and the text that contains the answer."""

    question: str
    context: str


class QuestionRequest(Request):
    """Questions."""

    questions: Annotated[list[Question], FailFast()] = Field(min_length=1)
    may_be_unanswerable: bool = Field(False, description="Whether no answer (an empty one) is an answer.")


class Answer(Strict):
    """What all answers say."""

    tokens: int = Field(description="That the model read.")
    truncated: bool = Field(description="Whether text was cut off at the longest length of the engine.")


class Class(Answer):
    """A class."""

    label: str
    scores: dict[str, float] = Field(description="Probability of each class.")


class Score(Answer):
    """A score."""

    score: float


class Ranked(Score):
    """A passage in its place."""

    index: int = Field(description="Of the passage in the request.")


class Embedding(Answer):
    """An embedding."""

    embedding: list[float]


class Entity(Strict):
    """A run of words."""

    type: str
    first: int
    last: int
    text: str


class Tags(Answer):
    """A class for each word."""

    labels: list[str | None] = Field(description="Of each word; null where it was cut off.")
    entities: list[Entity]


class Span(Answer):
    """An answer as it stands in the context."""

    answer: str


Rows = Sequence[tuple[Sample, Float32]]  # rows of a request, with the model's answer to each


@dataclass(frozen=True)
class Endpoint:
    """How one kind of task is served."""

    name: str  # under /v1/
    request: type[Request]
    answer: type[Answer]
    columns: Callable[[Any, Sequence[str]], Columns]  # of a request, by the task's text columns
    answers: Callable[[Any, Rows, Sequence[str]], list[Any]]  # of a request, with the names of the classes


def _about(*samples: Sample) -> dict[str, Any]:
    return {
        "tokens": sum(len(sample.input_ids) for sample in samples),
        "truncated": any(sample.truncated for sample in samples),
    }


def _texts(request: Texts, names: Sequence[str]) -> Columns:
    return {names[0]: request.texts}


def _pairs(request: Pairs, names: Sequence[str]) -> Columns:
    return {name: [pair[place] for pair in request.pairs] for place, name in enumerate(names)}


def _classes(request: Request, rows: Rows, classes: Sequence[str]) -> list[Class]:
    answers = []
    for sample, logits in rows:
        wide = logits.astype(np.float64)
        shares = np.exp(wide - np.logaddexp.reduce(wide))
        scores = {name: float(share) for name, share in zip(classes, shares, strict=True)}
        answers.append(Class(label=classes[int(shares.argmax())], scores=scores, **_about(sample)))
    return answers


def _scores(request: Request, rows: Rows, classes: Sequence[str]) -> list[Score]:
    return [Score(score=float(answer[0]), **_about(sample)) for sample, answer in rows]


def _ranked(request: Ranking, rows: Rows, classes: Sequence[str]) -> list[Ranked]:
    scores = enumerate(_scores(request, rows, classes))
    ranked = [Ranked(index=index, **score.model_dump()) for index, score in scores]
    return sorted(ranked, key=lambda each: -each.score)


def _embeddings(request: Request, rows: Rows, classes: Sequence[str]) -> list[Embedding]:
    return [Embedding(embedding=answer.tolist(), **_about(sample)) for sample, answer in rows]


def _tags(request: Sentences, rows: Rows, classes: Sequence[str]) -> list[Tags]:
    answers = []
    for words, (sample, logits) in zip(request.sentences, rows, strict=True):
        assert TOKENS.units is not None
        positions, about = TOKENS.units(sample.coded)
        tags = np.argmax(logits[positions], axis=1).astype(np.int64)
        labels: list[str | None] = [None] * len(words)
        for word, tag in zip(about, tags, strict=True):
            labels[word] = classes[tag]
        tagged, entities = Tagged(tags, np.array([len(tags)]), tuple(classes)), []
        for kind, *ends in sorted(tagged.entities(tags), key=lambda e: e[1]) if tagged.has_entities else ():
            first, last = (int(about[end]) for end in ends)
            entities.append(Entity(type=kind, first=first, last=last, text=" ".join(words[first : last + 1])))
        cut = {"truncated": len(about) < len(words)}
        answers.append(Tags(labels=labels, entities=entities, **(_about(sample) | cut)))
    return answers


def _question_columns(request: QuestionRequest, names: Sequence[str]) -> Columns:
    both = [(each.question, each.context) for each in request.questions]
    return {name: [pair[place] for pair in both] for place, name in enumerate(names)}


def _spans(request: QuestionRequest, rows: Rows, classes: Sequence[str]) -> list[Span]:
    assert QUESTIONS.units is not None
    contexts = [each.context for each in request.questions]
    windows: list[list[Any]] = [[] for _ in contexts]
    for sample, _ in rows:
        windows[sample.sample].append(QUESTIONS.units(sample.coded).about)
    gold = Questions(contexts, [[] for _ in contexts], windows, request.may_be_unanswerable)
    logits = np.concatenate([answer[: len(sample.input_ids)] for sample, answer in rows])
    texts = QUESTIONS.predict(logits, gold)
    read = [[sample for sample, _ in rows if sample.sample == place] for place in range(len(contexts))]
    return [Span(answer=str(text), **_about(*samples)) for text, samples in zip(texts, read, strict=True)]


_SINGLE = Endpoint("predict", Texts, Class, _texts, _classes)
_EMBED = Endpoint("embed", Texts, Embedding, _texts, _embeddings)
# by the name of the kind, and the number of its text columns
ENDPOINTS: Mapping[tuple[str, int], Endpoint] = {
    (CLASSIFICATION.name, 1): _SINGLE,
    (CLASSIFICATION.name, 2): Endpoint("predict", Pairs, Class, _pairs, _classes),
    (REGRESSION.name, 1): Endpoint("predict", Texts, Score, _texts, _scores),
    (REGRESSION.name, 2): Endpoint("predict", Pairs, Score, _pairs, _scores),
    (RERANKING.name, 2): Endpoint(
        "rank",
        Ranking,
        Ranked,
        lambda request, names: {
            names[0]: [request.query] * len(request.passages),
            names[1]: request.passages,
        },
        _ranked,
    ),
    (TOKENS.name, 1): Endpoint(
        "tokens", Sentences, Tags, lambda request, names: {names[0]: request.sentences}, _tags
    ),
    (QUESTIONS.name, 2): Endpoint("qa", QuestionRequest, Span, _question_columns, _spans),
    (TEXTS_ALONE.name, 1): _EMBED,
    (PAIRS.name, 2): _EMBED,
}
