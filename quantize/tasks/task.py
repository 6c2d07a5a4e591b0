"""The nine GLUE tasks, tasks over tokens, and any other text-classification task by naming its columns."""

import difflib
from collections.abc import Iterable, Mapping, Sequence

from qdqbench.quantize.tasks.types.classification import CLASSIFICATION
from qdqbench.quantize.tasks.types.embedding import PAIRS, TEXTS_ALONE
from qdqbench.quantize.tasks.types.kind import TaskFields, TaskKind
from qdqbench.quantize.tasks.types.questions import QUESTIONS
from qdqbench.quantize.tasks.types.regression import REGRESSION
from qdqbench.quantize.tasks.types.reranking import RERANKING
from qdqbench.quantize.tasks.types.tokens import TOKENS
from qdqbench.quantize.utils.errors import UserError

SECOND = "_mm"  # ends the name of a metric on the second evaluation split: MNLI's mismatched one


class Task(TaskFields):
    @property
    def kind(self) -> TaskKind:
        """Return the meaning of labels and answers."""
        return KINDS[self.type] if self.type else task_kind(self.num_labels)


KINDS = {
    kind.name: kind for kind in (CLASSIFICATION, REGRESSION, TOKENS, QUESTIONS, RERANKING, PAIRS, TEXTS_ALONE)
}


def kind_of(architecture: str) -> TaskKind | None:
    """Return the kind of task that a class of transformers is for; None where its head is not known.

    Classifiers and regressors share a class: classification is found. Libraries put names before it.
    """
    return next((kind for kind in KINDS.values() if architecture.endswith(kind.architecture)), None)


def task_kind(num_labels: int, problem_type: str | None = None) -> TaskKind:
    """Return the kind of a task with so many labels, or of a model's head (`config.problem_type`)."""
    return REGRESSION if num_labels == 1 or problem_type == REGRESSION.problem_type else CLASSIFICATION


def _glue(name: str, columns: str, metrics: str, num_labels: int = 2) -> Task:
    return Task(
        name=name,
        text_columns=tuple(columns.split()),
        num_labels=num_labels,
        metrics=tuple(metrics.split()),
        eval_splits=("validation_matched", "validation_mismatched") if name == "mnli" else ("validation",),
    )


# Columns as in nyu-mll/glue, metrics as in Wang et al. 2019, "GLUE", table 1.
GLUE: dict[str, Task] = {
    task.name: task
    for task in (
        _glue("cola", "sentence", "matthews"),
        _glue("sst2", "sentence", "accuracy"),
        _glue("mrpc", "sentence1 sentence2", "f1 accuracy"),
        _glue("stsb", "sentence1 sentence2", "pearson spearman", num_labels=1),
        _glue("qqp", "question1 question2", "f1 accuracy"),
        _glue("mnli", "premise hypothesis", "accuracy", num_labels=3),
        _glue("qnli", "question sentence", "accuracy"),
        _glue("rte", "sentence1 sentence2", "accuracy"),
        _glue("wnli", "sentence1 sentence2", "accuracy"),
    )
}
# The generated task of qdqbench.eval.embedded.
EMBEDDED = Task(name="embedded", text_columns=("sentence",), num_labels=2, metrics=("accuracy", "f1"))
# Texts without labels, for embedding models: the judge is FP32.
EMBED = Task(
    name="embed",
    text_columns=("text",),
    label_column="",
    num_labels=1,
    metrics=TEXTS_ALONE.default_metrics,
    type=TEXTS_ALONE.name,
)


# Columns as in the sets of the hub. Classes of tokens are the model's, or in fine-tuning those of the data.
TOKEN_TASK = Task(
    name="tokens",
    text_columns=("tokens",),
    label_column="ner_tags",
    num_labels=1,
    metrics=TOKENS.default_metrics,
    type=TOKENS.name,
)
QUESTION_TASK = Task(
    name="qa",
    text_columns=("question", "context"),
    label_column="answers",
    num_labels=2,
    metrics=QUESTIONS.default_metrics,
    type=QUESTIONS.name,
)
OVER_TOKENS: dict[str, Task] = {
    TOKEN_TASK.name: TOKEN_TASK,
    **{name: QUESTION_TASK.model_copy(update={"name": name}) for name in ("qa", "squad", "squad_v2")},
}
# A query and a passage with its relevance in each row; a query has several.
RERANK = Task(
    name="rerank",
    text_columns=("query", "passage"),
    num_labels=1,
    metrics=RERANKING.default_metrics,
    type=RERANKING.name,
)
KNOWN = {**GLUE, EMBEDDED.name: EMBEDDED, RERANK.name: RERANK, EMBED.name: EMBED, **OVER_TOKENS}


def with_classes(task: Task, names: Sequence[str]) -> Task:
    """Return a task whose classes are known by their names."""
    return task.model_copy(update={"classes": tuple(names), "num_labels": len(names)})


def merge_splits(splits: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Merge numbers by metric of all evaluation splits; names of the second end with `SECOND`."""
    return {
        f"{name}{SECOND if position else ''}": value
        for position, values in enumerate(splits)
        for name, value in values.items()
    }


def find_nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that looks most like `name`."""
    return difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.0)[0]


def get_task(
    name: str,
    *,
    text_columns: Sequence[str] = (),
    label_column: str | None = None,
    num_labels: int | None = None,
    metrics: Sequence[str] = (),
) -> Task:
    """Return a known task (with the given fields changed), or a new one from its columns.

    Args:
        name: A GLUE task, `tokens`, `qa`, `squad`, `squad_v2`, `rerank`, `embedded`, or any name when
            `text_columns` is given.
        text_columns: Column of the sentence, or the two columns of a pair.
        label_column: Default `label`.
        num_labels: Number of classes; 1 means regression.
        metrics: Primary first; default accuracy, or Pearson and Spearman for regression.

    Raises:
        UserError: unknown name without columns, or fields that do not fit together.
    """
    changes = {
        "text_columns": tuple(text_columns),
        "label_column": label_column,
        "num_labels": num_labels,
        "metrics": tuple(metrics),
    }
    changes = {key: value for key, value in changes.items() if value not in (None, ())}
    if name in OVER_TOKENS and num_labels is not None:
        raise UserError(f"task {name!r} takes its classes from the model; drop --num-labels")
    if name in KNOWN:
        fields = KNOWN[name].model_dump() | changes
        if num_labels is not None and not metrics and KNOWN[name].type is None:
            kind = task_kind(num_labels)
            fields["metrics"] = KNOWN[name].metrics if kind is KNOWN[name].kind else kind.default_metrics
    elif not text_columns:
        raise UserError(
            f"unknown task {name!r}, nearest is {find_nearest(name, KNOWN)!r}; choose one of "
            f"{', '.join(KNOWN)}, or name the columns of your own set with --text-column (twice for pairs), "
            "--label-column and --num-labels"
        )
    elif num_labels is None:
        raise UserError(
            f"task {name!r} is not built in and its number of classes is not known; give --num-labels "
            "(1 for regression)"
        )
    else:
        fields = {"name": name, "metrics": task_kind(num_labels).default_metrics} | changes
    task = Task.model_validate(fields)
    _check_fields(task)
    return task


def _check_fields(task: Task) -> None:
    least, most = task.kind.text_columns
    count = len(task.text_columns)
    if not least <= count <= most or len({*task.text_columns, task.label_column}) <= count:
        wanted = "one or two text columns" if least < most else f"{least} text column{'s' * (least > 1)}"
        raise UserError(
            f"task {task.name!r} has text columns {', '.join(task.text_columns)} and label column "
            f"{task.label_column}; give {wanted}, all different from each other and the label"
        )
    if task.num_labels < 1:
        raise UserError(
            f"task {task.name!r} has {task.num_labels} labels; give --num-labels 1 (regression) or more"
        )
    kind = task.kind
    if task.num_labels != (kind.count or task.num_labels):
        raise UserError(
            f"task {task.name!r} has {task.num_labels} labels, but {kind.name} takes "
            f"{kind.head.format(count=kind.count)}"
        )
    if bad := [metric for metric in task.metrics if metric not in task.kind.metrics]:
        raise UserError(
            f"task {task.name!r} ({task.kind.name}) cannot be scored by {', '.join(bad)}; "
            f"choose from {', '.join(task.kind.metrics)}"
        )
    if task.kind is CLASSIFICATION and "f1" in task.metrics and task.num_labels != 2:
        raise UserError(
            f"f1 is the F1 of class 1 and needs 2 classes, task {task.name!r} has {task.num_labels}; "
            "use accuracy or matthews"
        )


def score_embeddings(task: Task, metrics: Sequence[str]) -> Task:
    """Return a task for embeddings: a score of pairs by the cosine of their texts.

    Args:
        metrics: that were asked for, if any.

    Raises:
        UserError: the task is about something else.
    """
    if task.kind.embeds:
        return task
    if task.kind is not REGRESSION or len(task.text_columns) != 2:
        raise UserError(
            f"task {task.name!r} ({task.kind.head.format(count=task.num_labels)}) cannot judge an embedding "
            "model; give pairs of texts with a score (--task stsb, or two --text-column and --num-labels 1), "
            f"or texts alone (--task {EMBED.name} --data lines.txt)"
        )
    fields = {"type": PAIRS.name, "metrics": tuple(metrics) or PAIRS.default_metrics}
    return task.model_copy(update=fields)


def check_model_fits(task: Task, *, model_labels: int, problem_type: str | None) -> None:
    """Check that a model's head makes what the task scores.

    Args:
        model_labels: `config.num_labels` of the model.
        problem_type: `config.problem_type`: None, `regression`, `single_label_classification` or
            `multi_label_classification`.

    Raises:
        UserError: the head is for another kind of task or another number of classes.
    """
    if task.kind.over_tokens or task.kind.embeds:  # held to the kind when it was loaded
        return
    head = task_kind(model_labels, problem_type)
    outputs = f"{problem_type or head.name} with {model_labels} output{'s' * (model_labels != 1)}"
    needs = task.kind.head.format(count=task.num_labels)
    if (
        model_labels != task.num_labels
        or head.problem_type != task.kind.problem_type
        or problem_type == "multi_label_classification"
    ):
        fitting = [
            name for name, other in GLUE.items() if other.kind is head and other.num_labels == model_labels
        ]
        others = f" (GLUE tasks with such a head: {', '.join(fitting)})" if fitting else ""
        raise UserError(
            f"the model's head is {outputs}, but task {task.name!r} needs {needs}; give a model that was "
            f"fine-tuned on this task, or the --task that it was fine-tuned on{others}"
        )
