"""A run as it is served: its engine and FP32 model, its tokenizer, and how requests become rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, cast

import numpy as np
from pydantic import BeforeValidator, FailFast, Field, field_validator, model_validator

from qdqbench.quantize.deployment.opened import ModelFile, open_run
from qdqbench.quantize.deployment.server.batches import Run, Sizes
from qdqbench.quantize.deployment.server.settings import ModelName
from qdqbench.quantize.engine.profiles import LENGTH_STEP, Profile
from qdqbench.quantize.pipeline.graphs import FP32
from qdqbench.quantize.standalone.answers import Row, classify, embed, extract, list_classes, score, tag
from qdqbench.quantize.standalone.texts import Encoder
from qdqbench.quantize.tasks.data.encode import Sample, encode_columns, make_encoder
from qdqbench.quantize.tasks.task import EMBED, Task
from qdqbench.quantize.tasks.types.classification import CLASSIFICATION, REGRESSION
from qdqbench.quantize.tasks.types.embedding import PAIRS, TEXTS_ALONE
from qdqbench.quantize.tasks.types.multilabel import MULTI_LABEL
from qdqbench.quantize.tasks.types.questions import QUESTIONS
from qdqbench.quantize.tasks.types.reranking import RERANKING
from qdqbench.quantize.tasks.types.tokens import TOKENS, Tagged
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.arrays import Float32
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.limits import CPU_BACKENDS, BackendName
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
        raise NotImplementedError


class Texts(Request):
    """Single texts."""

    texts: Annotated[list[str], FailFast()] = Field(description="One answer each.", min_length=1)

    def columns(self, names: Sequence[str]) -> Columns:
        return {names[0]: self.texts}


class PromptedTexts(Texts):
    """Texts of an embedding model."""

    prompt: str | None = Field(
        None, max_length=1000, description="Before each text; null: as the run was evaluated."
    )


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
    """Fields of every answer."""

    made: ClassVar[Any]  # makes answers of rows
    tokens: int = Field(description="That the model read.")
    truncated: bool = Field(description="Whether text was cut off at the longest length of the engine.")

    @classmethod
    def read(cls, request: Any, rows: Rows, classes: Sequence[str]) -> "Sequence[Answer]":
        """Return the answers to a request, with the names of the classes."""
        made = cls.made((), _alone(rows), classes)
        return [cls(**each, **_about(sample)) for each, (sample, _) in zip(made, rows, strict=True)]


def _alone(rows: Rows) -> list[list[Row]]:
    """Return the rows of samples that have one each, as answers are made of."""
    return [[Row(sample.coded, answers)] for sample, answers in rows]


def _about(*samples: Sample) -> dict[str, Any]:
    return {
        "tokens": sum(len(sample.input_ids) for sample in samples),
        "truncated": any(sample.truncated for sample in samples),
    }


class Class(Answer):
    """A class."""

    made = staticmethod(classify)
    label: str
    scores: dict[str, float] = Field(description="Probability of each class.")


class ClassList(Answer):
    """The classes that are there."""

    made = staticmethod(list_classes)
    labels: list[str] = Field(description="Whose probability is above 0.5.")
    scores: dict[str, float] = Field(description="Probability of each class.")


class Score(Answer):
    """A score."""

    made = staticmethod(score)
    score: float


class Ranked(Score):
    """A passage in its place."""

    index: int = Field(description="Of the passage in the request.")

    @classmethod
    def read(cls, request: Any, rows: Rows, classes: Sequence[str]) -> "list[Ranked]":
        made = score((), _alone(rows), classes)
        about = [_about(sample) for sample, _ in rows]
        ranked = [cls(index=place, **each, **about[place]) for place, each in enumerate(made)]
        return sorted(ranked, key=lambda each: -each.score)


class Embedding(Answer):
    """An embedding."""

    made = staticmethod(embed)
    embedding: Annotated[list[float], BeforeValidator(np.ndarray.tolist)]


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
        made = tag(request.sentences, _alone(rows), classes)
        for words, each, (sample, _) in zip(request.sentences, made, rows, strict=True):
            labels = [label for _, label in each["words"]]
            about = [word for word, label in enumerate(labels) if label is not None]
            tags = np.array([classes.index(labels[word]) for word in about], dtype=np.int64)
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
        pairs = [(each.question, each.context) for each in request.questions]
        samples: list[list[Sample]] = [[] for _ in pairs]
        windows: list[list[Row]] = [[] for _ in pairs]
        for sample, logits in rows:
            samples[sample.sample].append(sample)
            windows[sample.sample].append(Row(sample.coded, logits))
        answers = []
        for each, read in zip(extract(pairs, windows, classes), samples, strict=True):
            none = request.may_be_unanswerable and each["score_without_answer"] > each["score"]
            answers.append(cls(answer="" if none else each["answer"], **_about(*read)))
        return answers


class Endpoint(NamedTuple):
    name: str  # under /v1/
    request: type[Request]
    answer: type[Answer]


# by the name of the kind, and the number of its text columns
ENDPOINTS = {
    (CLASSIFICATION.name, 1): Endpoint("predict", Texts, Class),
    (CLASSIFICATION.name, 2): Endpoint("predict", Pairs, Class),
    (REGRESSION.name, 1): Endpoint("predict", Texts, Score),
    (REGRESSION.name, 2): Endpoint("predict", Pairs, Score),
    (MULTI_LABEL.name, 1): Endpoint("predict", Texts, ClassList),
    (MULTI_LABEL.name, 2): Endpoint("predict", Pairs, ClassList),
    (RERANKING.name, 2): Endpoint("rank", Ranking, Ranked),
    (TOKENS.name, 1): Endpoint("tokens", Sentences, Tags),
    (QUESTIONS.name, 2): Endpoint("qa", QuestionRequest, Span),
    (TEXTS_ALONE.name, 1): Endpoint("embed", PromptedTexts, Embedding),
    (PAIRS.name, 2): Endpoint("embed", PromptedTexts, Embedding),
}


MOST_WORD = 1000  # characters of a word that WordPiece looks up
FP32_ROWS = 4  # of a batch: the FP32 model is for comparing single texts


@dataclass(frozen=True)
class Served:
    """A run as it is served; each worker process gets a copy."""

    name: str
    task: Task
    classes: tuple[str, ...]
    tokenizer: Any
    max_length: int  # tokens of a row
    profiles: tuple[Profile, ...]
    made_with: str  # backend and its version
    recipe: str
    engine: ModelFile
    graph: ModelFile
    fp32: ModelFile
    fp32_backend: BackendName = "onnxruntime"
    int8: bool = True  # the recipe quantizes

    @property
    def endpoint(self) -> Endpoint:
        return ENDPOINTS[self.task.kind.name, len(self.task.text_columns)]

    @property
    def pad_id(self) -> int:
        return int(self.tokenizer.pad_token_id)

    def sizes(self, model: ModelName, max_batch: int) -> Sizes:
        """Return the longest length of each bucket, doubling, and the most rows that a batch of it has."""
        lengths = [LENGTH_STEP]
        while lengths[-1] < self.max_length:
            lengths.append(min(2 * lengths[-1], self.max_length))
        if model == "fp32":
            return [(length, min(max_batch, FP32_ROWS)) for length in lengths]
        most = [max(p.max[0] for p in self.profiles if p.max[1] >= length) for length in lengths]
        return [(length, min(rows, max_batch)) for length, rows in zip(lengths, most, strict=True)]

    def open_model(self, model: ModelName) -> Run:
        from qdqbench.quantize.engine.runtime.runners import open_fp32_graph, open_runner

        if TOKENS is self.task.kind:  # whose entities need it: loaded now, it delays no request
            import seqeval.metrics.sequence_labeling  # noqa: F401
        parts = [self.fp32] if model == "fp32" else [self.engine, self.graph]
        first, outputs = parts[0].path, [*self.task.kind.outputs]
        for part in parts:
            part.check()
        if model == "fp32":
            run: Run = open_fp32_graph(first, self.fp32_backend, outputs)
        else:
            cache = first.with_name("runtime.cache")
            run = open_runner(
                first, self.graph.path, pad_id=self.pad_id, runtime_cache=cache, outputs=outputs
            )
        for part in parts:
            part.check()  # again: it may have changed while it was read
        return run

    def encode(self, columns: Columns, prompt: str | None = None) -> list[Sample]:
        """Return the rows of a request; with `prompt` that is put before each text, not the run's."""
        task = self.task if prompt is None else self.task.model_copy(update={"prompts": (prompt,)})
        return [*encode_columns(columns, task, self._encoder(), "the request")]

    def _encoder(self) -> Encoder:
        return make_encoder(self.task, self.tokenizer, self.max_length)

    def count_rows(self, columns: Columns) -> int:
        """Return how many rows `encode` makes, without making the windows of long contexts."""
        texts = [columns[name] for name in self.task.text_columns]
        if not self.task.kind.windows:
            return len(texts[0])
        return sum(max(1, count) for count in self._encoder().count_windows([*zip(*texts, strict=True)]))


def require_short_words(tokenizer: Any, name: str) -> None:
    """Refuse a WordPiece that looks up long words: one of some thousand characters takes it minutes."""
    longest = getattr(tokenizer.backend_tokenizer.model, "max_input_chars_per_word", 0)
    if longest > MOST_WORD:
        raise UserError(
            f"the tokenizer of {name} looks up words of {longest} characters, which can take it minutes. "
            f"Lower max_input_chars_per_word in tokenizer.json to {MOST_WORD} or less, and run it again"
        )


def open_served(folder: Path, *, fp32: bool = True) -> Served:
    """Open a run for serving; MissingDevice without an engine, `UserError` where it cannot be served here."""
    opened, unquantized = open_run(folder), folder / FP32
    session, sidecar = opened.session, opened.sidecar
    if fp32 and not unquantized.is_file():
        raise UserError(
            f"{unquantized}, the FP32 model to compare with, does not exist; run "
            "`qdqbench export` on the run again, or serve it with --no-fp32"
        )
    task = session.config.task
    require_short_words(session.tokenizer, session.model_name)
    on_cpu = sidecar.backend in CPU_BACKENDS
    # each text alone, however the run was evaluated; queries come first
    alone = EMBED.model_copy(update={"prompts": task.prompts[:1]})
    return Served(
        name=folder.resolve().name,
        task=alone if task.kind.embeds else task,
        classes=() if task.kind.embeds else session.class_names,
        tokenizer=session.tokenizer,
        max_length=opened.max_length,
        profiles=tuple(sidecar.profiles),
        made_with=f"{sidecar.backend} {sidecar.version}",
        recipe=session.recipe.name,
        engine=opened.engine,
        graph=opened.graph,
        fp32=ModelFile(unquantized, files.sha256(unquantized) if fp32 else ""),
        fp32_backend=cast("BackendName", sidecar.backend) if on_cpu else "onnxruntime",
        int8=session.recipe.quantizes,
    )
