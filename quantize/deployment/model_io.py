"""Inputs and outputs of a deployed model: how texts become rows, and outputs answers."""

from dataclasses import dataclass
from typing import Any

from qdqbench.quantize.models.identity import model_commit
from qdqbench.quantize.models.load import load_config, read_class_names
from qdqbench.quantize.models.pooling import FIELD, choose_pooling, read_sentence_folder
from qdqbench.quantize.pipeline.session import Session
from qdqbench.quantize.tasks.rows import OVERLAP
from qdqbench.quantize.tasks.types.classification import CLASSIFICATION, REGRESSION
from qdqbench.quantize.tasks.types.embedding import PAIRS, TEXTS_ALONE
from qdqbench.quantize.tasks.types.questions import QUESTIONS
from qdqbench.quantize.tasks.types.reranking import RERANKING
from qdqbench.quantize.tasks.types.tokens import TOKENS, is_named

TEXTS = "a text", "its second text"
# by the name of a task's kind: the template of what makes an answer, and what its texts are
ANSWERS = {
    CLASSIFICATION.name: ("classes", TEXTS),
    REGRESSION.name: ("score", TEXTS),
    RERANKING.name: ("score", ("a query", "a passage")),
    TOKENS.name: ("words", ("words with spaces between them",)),
    QUESTIONS.name: ("span", ("a question", "its context")),
    PAIRS.name: ("embedding", TEXTS),
    TEXTS_ALONE.name: ("embedding", TEXTS),
}


@dataclass(frozen=True)
class ModelIO:
    """Texts and answers of one run's model."""

    answer: str  # template
    texts: tuple[str, ...]  # what each of a sample's texts is
    words: bool  # texts are words between spaces
    windows: bool  # a second text that is too long is read in windows
    truncation: str  # strategy of `tokenizers`
    labels: list[str]  # of the answers' columns; empty where they are no classes
    pooling: dict[str, Any] | None  # of an embedding model

    @property
    def example(self) -> str:
        """Arguments of a command line that asks once."""
        return " ".join(f'"{text}"' for text in self.texts)

    @property
    def sample(self) -> str:
        """What a script takes for one sample."""
        if self.words:
            return "a list of words"
        return f"({', '.join(self.texts)})" if len(self.texts) == 2 else "a text"

    def stride(self, longest: int) -> int:
        """Return the tokens that windows of so many share."""
        return longest // OVERLAP if self.windows else 0


def read_model_io(session: Session) -> ModelIO:
    """Return what a run's task and model say.

    Raises:
        UserError: as of `class_names`.
    """
    task, kind = session.config.task, session.config.task.kind
    answer, texts = ANSWERS[kind.name]
    return ModelIO(
        answer=answer,
        texts=texts[: 1 if kind.texts_apart else len(task.text_columns)],
        words=kind.split_words,
        windows=kind.windows,
        truncation="only_second" if kind.windows else "longest_first",
        labels=_labels(session),
        pooling=_pooling(session) if kind.embeds else None,
    )


def _labels(session: Session) -> list[str]:
    """Return names of the classes: the model's, or the data's where the model has none of its own."""
    config, kind = session.config, session.config.task.kind
    if kind not in (CLASSIFICATION, TOKENS):
        return []
    names = config.task.classes or tuple(read_class_names(session.model_name, config.revision, kind))
    if is_named(names):
        return list(names)
    if kind is TOKENS:  # the data's names, if it has some
        return list(next(iter(session.gold.values())).classes)
    return list(config.task.values or names)


def _pooling(session: Session) -> dict[str, Any]:
    name, revision = session.model_name, session.config.revision
    folder = read_sentence_folder(name, model_commit(name, revision))
    saved = getattr(load_config(name, revision), FIELD, None)
    return choose_pooling(name, folder, saved, session.config.pooling).model_dump(mode="json")
