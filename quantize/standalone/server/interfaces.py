"""The forms of requests and answers: our own, those of OpenAI, and those of Text Embeddings Inference."""

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import msgspec
import numpy as np

from .settings import ENGINE, Served, Settings


class Refusal(Exception):
    """An answer that is none: status and one sentence."""

    def __init__(self, status: int, sentence: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(sentence)
        self.status, self.sentence, self.headers = status, sentence, headers or {}


@dataclass(slots=True)
class Samples:
    """Samples of a request, and how their answers are told."""

    samples: Sequence[Any]
    respond: Callable[[list[Any], Any], bytes]  # of answers and rows
    model: str = ENGINE
    characters: int = 0


def _struct(name: str, **fields: Any) -> Any:
    """Return a decoder of a JSON object of these fields; a type with a default is (type, default)."""
    listed = [(key, *each) if isinstance(each, tuple) else (key, each) for key, each in fields.items()]
    return msgspec.defstruct(name, listed, forbid_unknown_fields=True)


MODEL = (Literal["engine", "fp32"], ENGINE)
TEXTS = _struct("Texts", texts=list[str], model=MODEL)
PROMPTED = _struct("PromptedTexts", texts=list[str], prompt=(str | None, None), model=MODEL)
PAIRS = _struct("Pairs", pairs=list[tuple[str, str]], model=MODEL)
RANKING = _struct("Ranking", query=str, passages=list[str], model=MODEL)
SENTENCES = _struct("Sentences", sentences=list[list[str]], model=MODEL)
QUESTION: Any = _struct("Question", question=str, context=str)
QUESTIONS = _struct("Questions", questions=list[QUESTION], may_be_unanswerable=(bool, False), model=MODEL)
OPENAI = _struct(
    "EmbeddingRequest",
    input=str | list[str],
    model=(str, ""),
    encoding_format=(Literal["float", "base64"], "float"),
    dimensions=(int | None, None),
    user=(str | None, None),
)
TEI = {"truncate": (bool | None, None), "truncation_direction": (str | None, None), "parameters": (Any, None)}
TEI_EMBED = _struct(
    "Embed",
    inputs=str | list[str],
    normalize=(bool | None, True),
    prompt_name=(str | None, None),
    dimensions=(int | None, None),
    **TEI,
)
TEI_PREDICT = _struct("Predict", inputs=str | list[str | list[str]], raw_scores=(bool, False), **TEI)
TEI_RERANK = _struct(
    "Rerank", query=str, texts=list[str], raw_scores=(bool, False), return_text=(bool, False), **TEI
)


def _sentences(asked: Any) -> Sequence[Any]:
    if not all(asked.sentences):
        raise Refusal(422, "a sentence without words has no answer")
    return asked.sentences  # type: ignore[no-any-return]


# By the kind of task: the path, how its body is decoded, and the samples in it.
OWN_FORMS: dict[str, tuple[str, Any, Callable[[Any], Sequence[Any]]]] = {
    "token classification": ("tokens", SENTENCES, _sentences),
    "question answering": (
        "qa",
        QUESTIONS,
        lambda asked: [(each.question, each.context) for each in asked.questions],
    ),
    "re-ranking": ("rank", RANKING, lambda asked: [(asked.query, each) for each in asked.passages]),
}


def encode(value: Any) -> bytes:
    return msgspec.json.encode(value, enc_hook=lambda array: array.tolist())


def flat(text: str) -> str:
    return re.sub(r"\s+", " ", "".join(c if c.isprintable() else " " for c in text[:300]))[:200]


class Interfaces:
    def __init__(self, served: Served, settings: Settings) -> None:
        self.served, self.settings, told = served, settings, served.told
        kind, pair = told["kind"], len(told["texts"]) == 2
        embeds = kind.startswith("embedding")
        name, struct, listed = OWN_FORMS.get(
            kind, ("predict", PAIRS, lambda asked: asked.pairs) if pair else ("predict", TEXTS, self._texts)
        )
        if embeds:
            name, struct, listed = "embed", PROMPTED, self._texts
        self.endpoint = f"/v1/{name}"
        forms: dict[str, tuple[Any, Any]] = {self.endpoint: (struct, partial(self._read_own, listed))}
        if embeds:
            forms["/v1/embeddings"] = OPENAI, self._openai
            forms["/embed"] = forms["/"] = TEI_EMBED, self._tei_embed
        elif name == "rank":
            forms["/rerank"] = forms["/"] = TEI_RERANK, self._tei_rerank
        elif name == "predict":
            forms["/predict"] = TEI_PREDICT, self._tei_predict
            forms["/"] = TEI_PREDICT, partial(self._tei_predict, nested=True)  # as clients of the hub expect
        self.readers = {path: read for path, (_, read) in forms.items()}
        self.forms = {path: msgspec.json.Decoder(struct) for path, (struct, _) in forms.items()}
        self.kind = name

    # Requests

    def read(self, path: str, body: bytes) -> Samples:
        """Return what a body asks; raises a Refusal."""
        try:
            asked = self.forms[path].decode(body)
        except msgspec.ValidationError as error:
            raise Refusal(422, f"the body has another form: {flat(str(error))}; see GET /v1/model") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Refusal(400, f"the body is not JSON: {flat(str(error))}") from None
        about: Samples = self.readers[path](asked)
        self._check(about)
        return about

    def _check(self, about: Samples) -> None:
        settings, count = self.settings, len(about.samples)
        if not count:
            raise Refusal(422, "the body has no texts; give at least 1")
        if count > settings.max_texts:
            raise Refusal(413, f"{count} texts are more than the {settings.max_texts} of one request")
        words, pair, texts = self.served.told["words"], len(self.served.told["texts"]) == 2, about.samples
        if pair or words:
            texts = [text for sample in about.samples for text in (sample if pair else [" ".join(sample)])]
        lengths = [*map(len, texts)]
        about.characters = sum(lengths)
        if (longest := max(lengths)) > (most := settings.max_characters):
            raise Refusal(413, f"a text has {longest} characters, more than the {most} of one text")

    def _prompted(self, texts: Sequence[str], prompt: str | None = None) -> Sequence[str]:
        if prompt := self.served.told["prompt"] if prompt is None else prompt:
            return [f"{prompt}{text}" for text in texts]
        return texts

    def _texts(self, asked: Any) -> Sequence[str]:
        return self._prompted(asked.texts, getattr(asked, "prompt", None))

    def _read_own(self, listed: Callable[[Any], Sequence[Any]], asked: Any) -> Samples:
        return Samples(listed(asked), partial(self._own, asked), asked.model)

    def _openai(self, asked: Any) -> Samples:
        texts = [asked.input] if isinstance(asked.input, str) else asked.input
        cut = self._require_dimensions(asked.dimensions)
        return Samples(self._prompted(texts), partial(self._as_openai, asked, cut))

    def _tei_embed(self, asked: Any) -> Samples:
        texts = [asked.inputs] if isinstance(asked.inputs, str) else asked.inputs
        if asked.prompt_name is not None:
            raise Refusal(422, "this run has one prompt, which is before each text; leave prompt_name out")
        cut = self._require_dimensions(asked.dimensions)
        respond = partial(self._as_vectors, cut)
        return Samples(self._prompted(texts), lambda answers, _: encode(respond(answers)))

    def _tei_predict(self, asked: Any, *, nested: bool = False) -> Samples:
        pair, inputs = len(self.served.told["texts"]) == 2, asked.inputs
        if asked.raw_scores and self.served.told["labels"]:
            raise Refusal(422, "raw_scores: this server gives probabilities; leave it out")
        single = isinstance(inputs, str) or (pair and [*map(type, inputs)] == [str, str])
        given = [inputs] if single else inputs
        samples = [[each] if isinstance(each, str) else each for each in given]
        if any(len(each) != 1 + pair for each in samples):
            raise Refusal(422, f"inputs: each one needs {1 + pair} text{'s' * pair}")
        texts = [tuple(each) for each in samples] if pair else [text for (text,) in samples]
        return Samples(texts, partial(self._as_classes, single and not nested))

    def _tei_rerank(self, asked: Any) -> Samples:
        return Samples([(asked.query, text) for text in asked.texts], partial(self._as_ranks, asked))

    def _require_dimensions(self, wanted: int | None) -> int | None:
        if wanted is None or wanted in self.settings.dimensions:
            return wanted
        known = ", ".join(map(str, self.settings.dimensions)) or "none"
        why = f"this model cannot be cut to {wanted} dimensions"
        raise Refusal(422, f"{why}; the server was started with {known} (--dimensions)")

    # Answers

    def _own(self, asked: Any, answers: list[Any], coded: Any) -> bytes:
        """Return our own form: each answer with the tokens that were read, and whether text was cut."""
        lengths, cut = coded.lengths.tolist(), coded.cut
        if self.kind == "qa":  # several rows a sample
            numbers = coded.numbers
            lengths = np.bincount(numbers, coded.lengths).astype(int).tolist()
            cut = [False] * len(lengths)
        answers = [
            {"tokens": length, "truncated": each, **answer}
            for answer, length, each in zip(answers, lengths, cut, strict=True)
        ]
        if self.kind == "rank":
            ranked = [{"index": place, **answer} for place, answer in enumerate(answers)]
            answers = sorted(ranked, key=lambda each: -each["score"])
        elif self.kind == "tokens":
            answers = [_with_entities(answer, self.served.told["labels"]) for answer in answers]
        elif self.kind == "qa":
            for answer in answers:
                none = answer.pop("score_without_answer") > answer.pop("score")
                answer["answer"] = "" if none and asked.may_be_unanswerable else answer["answer"]
        return encode({"model": asked.model, "answers": answers})

    def _as_vectors(self, cut: int | None, answers: list[Any]) -> list[Any]:
        vectors = [answer["embedding"] for answer in answers]
        if cut is not None:  # of a model that was trained for it
            vectors = [each[:cut] / max(float(np.linalg.norm(each[:cut])), 1e-12) for each in vectors]
        return vectors

    def _as_openai(self, asked: Any, cut: int | None, answers: list[Any], coded: Any) -> bytes:
        vectors, total = self._as_vectors(cut, answers), int(coded.lengths.sum())
        if asked.encoding_format == "base64":
            vectors = [base64.b64encode(np.asarray(each, "<f4").tobytes()).decode() for each in vectors]
        data = [
            {"object": "embedding", "index": place, "embedding": each} for place, each in enumerate(vectors)
        ]
        usage = {"prompt_tokens": total, "total_tokens": total}
        return encode({"object": "list", "data": data, "model": self.served.name, "usage": usage})

    def _as_classes(self, single: bool, answers: list[Any], _: Any) -> bytes:
        made = []
        for answer in answers:
            scores = answer.get("scores") or {"LABEL_0": answer["score"]}
            ordered = sorted(scores.items(), key=lambda each: -each[1])
            made.append([{"label": label, "score": score} for label, score in ordered])
        return encode(made[0] if single else made)

    def _as_ranks(self, asked: Any, answers: list[Any], _: Any) -> bytes:
        scores = [answer["score"] for answer in answers]
        if not asked.raw_scores:
            scores = (1 / (1 + np.exp(-np.array(scores)))).tolist()
        text = {place: {"text": each} if asked.return_text else {} for place, each in enumerate(asked.texts)}
        ranks = [{"index": place, "score": score, **text[place]} for place, score in enumerate(scores)]
        return encode(sorted(ranks, key=lambda each: -each["score"]))

    def tell(self, error: Refusal, path: str) -> bytes:
        """Return a refusal as JSON, in OpenAI's form on its path."""
        if path != "/v1/embeddings":
            return encode({"error": error.sentence})
        kind = "server_error" if error.status >= 500 else "invalid_request_error"
        return encode({"error": {"message": error.sentence, "type": kind, "param": None, "code": None}})

    # What is told without a question

    def describe(self) -> dict[str, Any]:
        served, settings, told = self.served, self.settings, self.served.told
        return {
            "name": served.name,
            "kind": told["kind"],
            "endpoint": self.endpoint,
            "endpoints": [*self.forms],
            "fields": {path: [*decoder.type.__struct_fields__] for path, decoder in self.forms.items()},
            "columns": told["texts"],
            "classes": told["labels"],
            "recipe": served.recipe,
            "engine": served.made_with,
            "models": [*served.models],
            "max_length": told["max_length"],
            "limits": {
                "texts": settings.max_texts,
                "characters": settings.max_characters,
                "body_bytes": settings.body_bytes,
                "timeout_s": settings.timeout,
            },
            **served.about,
        }

    def describe_tei(self) -> dict[str, Any]:
        """Return what Text Embeddings Inference tells of a model."""
        told, settings = self.served.told, self.settings
        labels = {str(place): label for place, label in enumerate(told["labels"])}
        classes = {"id2label": labels, "label2id": {label: int(place) for place, label in labels.items()}}
        kind = {"embed": {"embedding": {"pooling": "of the graph"}}, "rank": {"reranker": classes}}
        return {
            "model_id": self.served.name,
            "model_sha": None,
            "model_dtype": self.served.recipe,
            "model_type": kind.get(self.kind, {"classifier": classes}),
            "max_concurrent_requests": settings.queue,
            "max_input_length": told["max_length"],
            "max_batch_tokens": settings.batch_tokens,
            "max_client_batch_size": settings.max_texts,
            "auto_truncate": True,
            "version": self.served.made_with,
        }


def _with_entities(answer: dict[str, Any], classes: Sequence[str]) -> dict[str, Any]:
    """Return the classes of words, and the entities that they name where the classes are IOB2's."""
    words, labels = [word for word, _ in answer["words"]], [label for _, label in answer.pop("words")]
    told = {"labels": labels, "entities": [], **answer}
    told["truncated"] = None in labels
    if not all(label == "O" or label[:2] in ("B-", "I-") for label in classes):
        return told
    begun: list[Any] = []  # kind, first and last word
    for place, label in (*((place, label) for place, label in enumerate(labels) if label), (0, "O")):
        mark, _, kind = label.partition("-")
        if begun and (mark != "I" or kind != begun[0]):
            kind_before, first, last = begun
            text = " ".join(words[first : last + 1])
            told["entities"].append({"type": kind_before, "first": first, "last": last, "text": text})
            begun = []
        if kind:
            begun = [kind, begun[1] if begun else place, place]
    return told
