"""Endpoints by kind of task: schemas, rows of a request, answers from the model's."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import FailFast, Field, field_validator, model_validator

from qdqbench.quantize.tasks.rows import Sample
from qdqbench.quantize.tasks.types.classification import CLASSIFICATION
from qdqbench.quantize.tasks.types.embedding import PAIRS, TEXTS_ALONE
from qdqbench.quantize.tasks.types.questions import QUESTIONS, Questions
from qdqbench.quantize.tasks.types.regression import REGRESSION
from qdqbench.quantize.tasks.types.reranking import RERANKING
from qdqbench.quantize.tasks.types.tokens import TOKENS, Tagged
from qdqbench.quantize.utils.arrays import Float32
from qdqbench.quantize.utils.schema import Strict

Columns = dict[str, list[Any]]  # as a data set has them: values of each sample, by column
Rows = Sequence[tuple[Sample, Float32]]  # rows of a request, with the model's answer to each


class _Input(Strict):
    """Input of a client: the first unknown field ends its validation, which so stays cheap."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, value: Any) -> Any:
        known = cls.model_fields
        unknown = next((key for key in value if key not in known), None) if isinstance(value, dict) else None
        if unknown is not None:
            raise ValueError(f"the field {unknown[:100]!r} is unknown; there are {', '.join(known)}")
        return value


class Request(_Input):
    """Fields of all requests."""

    model: Literal["engine", "fp32"] = Field("engine", description="The run's engine, or its FP32 model.")

    def columns(self, names: Sequence[str]) -> Columns:
        """Return the samples by the task's text columns."""
        raise NotImplementedError


class Texts(Request):
    """Single texts."""

    texts: Annotated[list[str], FailFast()] = Field(description="One answer each.", min_length=1)

    def columns(self, names: Sequence[str]) -> Columns:
        return {names[0]: self.texts}


class Pairs(Request):
    """Pairs of texts."""

    pairs: Annotated[list[tuple[str, str]], FailFast()] = Field(description="One answer each.", min_length=1)

    def columns(self, names: Sequence[str]) -> Columns:
        return {name: [pair[place] for pair in self.pairs] for place, name in enumerate(names)}


class Ranking(Request):
    """A query, and passages to put in order."""

    query: str
    passages: Annotated[list[str], FailFast()] = Field(min_length=1)

    def columns(self, names: Sequence[str]) -> Columns:
        return {names[0]: [self.query] * len(self.passages), names[1]: self.passages}


class Sentences(Request):
    """Sentences, word by word."""

    sentences: Annotated[list[Annotated[list[str], FailFast()]], FailFast()] = Field(
        description="Words of each sentence.", min_length=1
    )

    @field_validator("sentences")
    @classmethod
    def _require_words(cls, sentences: list[list[str]]) -> list[list[str]]:
        if not all(sentences):
            raise ValueError("a sentence without words has no answer")
        return sentences

    def columns(self, names: Sequence[str]) -> Columns:
        return {names[0]: self.sentences}


class Question(_Input):
    """A question, and the text that contains the answer."""

    question: str
    context: str


class QuestionRequest(Request):
    """Questions."""

    questions: Annotated[list[Question], FailFast()] = Field(min_length=1)
    may_be_unanswerable: bool = Field(False, description="Whether no answer (an empty one) is an answer.")

    def columns(self, names: Sequence[str]) -> Columns:
        return {
            names[0]: [each.question for each in self.questions],
            names[1]: [each.context for each in self.questions],
        }


class Answer(Strict):
    """What all answers say."""

    tokens: int = Field(description="That the model read.")
    truncated: bool = Field(description="Whether text was cut off at the longest length of the engine.")

    @classmethod
    def read(cls, request: Any, rows: Rows, classes: Sequence[str]) -> "Sequence[Answer]":
        """Return the answers to a request, with the names of the classes."""
        raise NotImplementedError


def _about(*samples: Sample) -> dict[str, Any]:
    return {
        "tokens": sum(len(sample.input_ids) for sample in samples),
        "truncated": any(sample.truncated for sample in samples),
    }


class Class(Answer):
    """A class."""

    label: str
    scores: dict[str, float] = Field(description="Probability of each class.")

    @classmethod
    def read(cls, request: Any, rows: Rows, classes: Sequence[str]) -> "list[Class]":
        answers = []
        for sample, logits in rows:
            wide = logits.astype(np.float64)
            shares = np.exp(wide - np.logaddexp.reduce(wide))
            scores = dict(zip(classes, shares.tolist(), strict=True))
            answers.append(cls(label=classes[int(shares.argmax())], scores=scores, **_about(sample)))
        return answers


class Score(Answer):
    """A score."""

    score: float

    @classmethod
    def read(cls, request: Any, rows: Rows, classes: Sequence[str]) -> "Sequence[Score]":
        return [Score(score=float(answer[0]), **_about(sample)) for sample, answer in rows]


class Ranked(Score):
    """A passage in its place."""

    index: int = Field(description="Of the passage in the request.")

    @classmethod
    def read(cls, request: Any, rows: Rows, classes: Sequence[str]) -> "list[Ranked]":
        scores = enumerate(super().read(request, rows, classes))
        ranked = [cls(index=index, **score.model_dump()) for index, score in scores]
        return sorted(ranked, key=lambda each: -each.score)


class Embedding(Answer):
    """An embedding."""

    embedding: list[float]

    @classmethod
    def read(cls, request: Any, rows: Rows, classes: Sequence[str]) -> "list[Embedding]":
        return [cls(embedding=answer.tolist(), **_about(sample)) for sample, answer in rows]


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

    @classmethod
    def read(cls, request: Any, rows: Rows, classes: Sequence[str]) -> "list[Tags]":
        answers = []
        for words, (sample, logits) in zip(request.sentences, rows, strict=True):
            assert TOKENS.units is not None
            positions, about = TOKENS.units(sample.coded)
            tags = np.argmax(logits[positions], axis=1).astype(np.int64)
            labels: list[str | None] = [None] * len(words)
            for word, tag in zip(about, tags, strict=True):
                labels[word] = classes[tag]
            tagged, entities = Tagged(tags, np.array([len(tags)]), tuple(classes)), []
            for kind, *ends in (
                sorted(tagged.entities(tags), key=lambda e: e[1]) if tagged.has_entities else ()
            ):
                first, last = (int(about[end]) for end in ends)
                text = " ".join(words[first : last + 1])
                entities.append(Entity(type=kind, first=first, last=last, text=text))
            cut = {"truncated": len(about) < len(words)}
            answers.append(cls(labels=labels, entities=entities, **(_about(sample) | cut)))
        return answers


class Span(Answer):
    """An answer as it stands in the context."""

    answer: str

    @classmethod
    def read(cls, request: Any, rows: Rows, classes: Sequence[str]) -> "list[Span]":
        assert QUESTIONS.units is not None
        contexts = [each.context for each in request.questions]
        samples: list[list[Sample]] = [[] for _ in contexts]
        windows: list[list[Any]] = [[] for _ in contexts]
        for sample, _ in rows:
            samples[sample.sample].append(sample)
            windows[sample.sample].append(QUESTIONS.units(sample.coded).about)
        gold = Questions(contexts, [[] for _ in contexts], windows, request.may_be_unanswerable)
        logits = np.concatenate([answer[: len(sample.input_ids)] for sample, answer in rows])
        texts = QUESTIONS.predict(logits, gold)
        return [cls(answer=str(text), **_about(*each)) for text, each in zip(texts, samples, strict=True)]


class Endpoint(NamedTuple):
    """How one kind of task is served."""

    name: str  # under /v1/
    request: type[Request]
    answer: type[Answer]


# by the name of the kind, and the number of its text columns
ENDPOINTS = {
    (CLASSIFICATION.name, 1): Endpoint("predict", Texts, Class),
    (CLASSIFICATION.name, 2): Endpoint("predict", Pairs, Class),
    (REGRESSION.name, 1): Endpoint("predict", Texts, Score),
    (REGRESSION.name, 2): Endpoint("predict", Pairs, Score),
    (RERANKING.name, 2): Endpoint("rank", Ranking, Ranked),
    (TOKENS.name, 1): Endpoint("tokens", Sentences, Tags),
    (QUESTIONS.name, 2): Endpoint("qa", QuestionRequest, Span),
    (TEXTS_ALONE.name, 1): Endpoint("embed", Texts, Embedding),
    (PAIRS.name, 2): Endpoint("embed", Texts, Embedding),
}
