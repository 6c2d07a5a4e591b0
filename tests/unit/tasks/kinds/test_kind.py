"""Kinds of tasks: their parts fit together, and what a kind says is what is exported, loaded and scored."""

import datasets
import numpy as np
import pytest
import torch
import transformers

from qdqbench.quantize.graph.export import trace
from qdqbench.quantize.models.load import load_encoder, load_model
from qdqbench.quantize.tasks import metrics
from qdqbench.quantize.tasks.kinds.classification import CLASSIFICATION, REGRESSION, Classification
from qdqbench.quantize.tasks.kinds.multilabel import MULTI_LABEL
from qdqbench.quantize.tasks.kinds.questions import QUESTIONS
from qdqbench.quantize.tasks.kinds.reranking import RERANKING
from qdqbench.quantize.tasks.kinds.tokens import TOKENS
from qdqbench.quantize.tasks.task import Task
from qdqbench.quantize.utils.errors import UserError

from ....support.tiny_bert import write_tiny_bert

KINDS = pytest.mark.parametrize(
    ("kind", "count"), [(CLASSIFICATION, 3), (REGRESSION, 1)], ids=["classification", "regression"]
)


class Tagging(Classification):
    architecture = "ForTokenClassification"
    outputs = {"tags": ("batch", "length", "label")}


def answers(seed, labels, rows=12):
    return np.random.default_rng(seed).normal(0, 2, (rows, labels)).astype(np.float32)


def labels_of(kind, found):
    """Labels by which answers are right."""
    predicted = kind.predict(found, None)
    return predicted.astype(np.float32) if predicted.dtype.kind == "f" else predicted


def log_softmax(logits, axis):
    return logits - np.log(np.exp(logits).sum(axis=axis, keepdims=True))


def losses():
    """Answers, labels, answers of each row, and the loss by its definition."""
    random = np.random.default_rng(0)
    logits, one = random.normal(size=(7, 3)), np.ones(7, dtype=np.int64)
    tags = np.array([0, 1, 2, 1, 0, 2, 2])
    entropies, shares = -log_softmax(logits, 1)[np.arange(7), tags], random.random(7)
    yield CLASSIFICATION, logits, tags, one, entropies.sum()
    # of a sentence the mean over its words
    yield TOKENS, logits, tags, np.array([2, 0, 5]), entropies[:2].mean() + entropies[2:].mean()
    yield REGRESSION, logits[:, :1], shares, one, ((logits[:, 0] - shares) ** 2).sum()
    entropies = np.logaddexp(0, logits[:, 0]) - logits[:, 0] * shares
    yield RERANKING, logits[:, :1], shares, one, entropies.sum()
    marks = logits[::-1] > 0
    yield MULTI_LABEL, logits, marks, one, (np.logaddexp(0, logits) - logits * marks).mean(axis=1).sum()
    ends = np.zeros((7, 2))  # of windows of three and four tokens
    ends[1, 0] = ends[2, 1] = ends[3] = 1
    logs = np.concatenate([log_softmax(part, 0) for part in (logits[:3, :2], logits[3:, :2])])
    yield QUESTIONS, logits[:, :2], ends, np.array([3, 4]), -(ends * logs).sum() / 2


@pytest.mark.parametrize(("kind", "logits", "labels", "counts", "expected"), [*losses()])
def test_what_training_and_evaluation_measure_is_the_same(kind, logits, labels, counts, expected):
    """Each may be written twice, for tensors and for arrays."""
    labels = labels if labels.dtype == np.int64 else labels.astype(np.float32)
    given = logits.astype(np.float32), labels, counts
    assert kind.loss(*map(torch.from_numpy, given)).item() == pytest.approx(expected, rel=1e-5)
    assert kind.mean_loss(*given) == pytest.approx(expected / len(counts), rel=1e-5)


@KINDS
def test_a_kind_s_own_metrics_score_its_predictions(kind, count):
    task = Task(name="x", text_columns=("s",), num_labels=count, metrics=kind.default_metrics)
    assert task.kind is kind
    found = answers(0, count)
    labels = labels_of(kind, found)
    rows = datasets.Dataset.from_dict({"s": ["a"] * len(labels), "label": labels})
    assert kind.label_problem(rows, task) == ""
    assert [*metrics.compute(task, found, labels).values()] == pytest.approx([1.0] * len(task.metrics))
    assert set(kind.default_metrics) <= set(kind.metrics)


def test_model_head_and_graph_are_as_the_kind_says(tmp_path):
    folder = str(write_tiny_bert(tmp_path))
    tokens = Tagging()
    model = load_encoder(folder, tokens, num_labels=5)
    assert isinstance(model, transformers.BertForTokenClassification)
    assert load_encoder(folder, REGRESSION, num_labels=1).config.problem_type == "regression"
    model.config._attn_implementation = "eager"
    model.save_pretrained(tmp_path / "tagger")
    with pytest.raises(
        UserError, match=r"is a BertForTokenClassification, but the task \(classification\) needs a model"
    ):
        load_model(str(tmp_path / "tagger"))
    loaded = load_model(str(tmp_path / "tagger"), kind=tokens)
    (output,) = trace(loaded, 20, tokens.outputs).graph.output
    shape = [axis.dim_param or axis.dim_value for axis in output.type.tensor_type.shape.dim]
    assert (output.name, shape) == ("tags", ["batch", "length", 5])
