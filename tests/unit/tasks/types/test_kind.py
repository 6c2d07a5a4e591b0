"""Kinds of tasks: their parts fit together, and what a kind says is what is exported, loaded and scored."""

import datasets
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from qdqbench.quantize.graph.export import trace
from qdqbench.quantize.models.load import load_encoder, load_model
from qdqbench.quantize.tasks import metrics
from qdqbench.quantize.tasks.task import Task
from qdqbench.quantize.tasks.types.classification import CLASSIFICATION, REGRESSION, Classification
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


@KINDS
@given(seed=st.integers(0, 2**16))
def test_what_training_and_evaluation_measure_is_the_same(kind, count, seed):
    """Each is written twice, for tensors and for arrays."""
    found, other = answers(seed, count), answers(seed + 1, count)
    labels = labels_of(kind, other)
    each = np.ones(len(labels), dtype=np.int64)
    loss = kind.loss(torch.from_numpy(found), torch.from_numpy(labels), torch.from_numpy(each)).item()
    assert kind.mean_loss(found, labels, each) == pytest.approx(loss / len(labels), rel=1e-4)


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
