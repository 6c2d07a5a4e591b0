"""Answers, classes and words of a change, against what can be counted by hand."""

import csv

import datasets
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdqbench.eval.metrics.answers import (
    FILE,
    PairedAnswers,
    compare_classes,
    find_changed,
    list_changed_answers,
    predict_answers,
)
from qdqbench.quantize.tasks.kinds.tokens import Tagged
from qdqbench.quantize.tasks.task import EMBED, NAMED, get_task, with_classes

SST2 = get_task("sst2")
LOGITS = {"sure no": [3, 0], "no": [1, 0], "yes": [0, 1]}


def beside(task, before, after, gold, names):
    both = (np.array(logits, dtype=np.float32) for logits in (before, after))
    return PairedAnswers(task, "engine", "validation", *both, gold, names)


@pytest.fixture
def sentences():
    """Lost, won, same, lost and farther."""
    before = [LOGITS[each] for each in ("no", "yes", "no", "sure no")]
    after = [LOGITS[each] for each in ("yes", "no", "sure no", "yes")]
    return beside(SST2, before, after, np.array([0, 0, 1, 0]), ["negative", "positive"])


@pytest.fixture
def texts():
    words = ["a\nb", "<b>won</b>", "same", "=lost"]
    return datasets.Dataset.from_dict({"sentence": words, "label": [0, 0, 1, 0]})


def test_lost_answers_come_first_and_the_file_has_them_all(sentences, texts, tmp_path, monkeypatch):
    found = list_changed_answers(sentences, texts, tmp_path)
    assert (found.n, found.count, found.prediction_type) == (4, 3, "class")
    assert found.counts == {"regressed": 2, "fixed": 1}
    assert [row.sample for row in found.rows] == [3, 0, 1]
    first = found.rows[0]
    said = [first.text, first.label, first.fp32, first.prediction]
    assert said == ["=lost", "negative", "negative", "positive"]
    assert first.fp32_margin == pytest.approx(np.tanh(1.5))
    assert first.margin == pytest.approx(np.tanh(0.5))
    assert first.distance > found.rows[1].distance > 0
    assert found.rows[1].text == "a b"
    monkeypatch.setattr("qdqbench.eval.metrics.answers.KEPT", 1)
    found = list_changed_answers(sentences, texts, tmp_path)
    assert (found.count, len(found.rows), found.file) == (3, 1, FILE)
    with (tmp_path / FILE).open(encoding="utf-8", newline="") as stream:
        rows = [*csv.DictReader(stream)]
    assert [int(row["sample"]) for row in rows] == [3, 0, 1]
    assert rows[2]["text"] == "<b>won</b>"


def test_scores_are_sorted_by_how_far_they_moved(tmp_path):
    task = get_task("stsb")
    both = beside(task, [[1], [2], [4]], [[1], [3], [4.5]], np.array([1.0, 2.5, 4.0], dtype=np.float32), [])
    columns = {"sentence1": [*"abc"], "sentence2": [*"xyz"], "label": [0.0] * 3}
    found = list_changed_answers(both, datasets.Dataset.from_dict(columns), tmp_path)
    assert found.counts == {"moved": 2}
    assert [(row.text, row.label, row.fp32, row.prediction, row.fp32_margin) for row in found.rows] == [
        ("b | y", "2.5", "2", "3", None),
        ("c | z", "4", "4", "4.5", None),
    ]


def test_texts_without_labels_have_none(tmp_path):
    made = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
    moved = made.copy()
    moved[3] = -moved[3]
    both = beside(EMBED, made, moved, made, [])
    found = list_changed_answers(both, datasets.Dataset.from_dict({"text": [*map(str, range(12))]}), tmp_path)
    assert (found.rows[0].sample, found.rows[0].label) == (3, None)
    assert compare_classes(both) is None


def test_confusion_counts_labels_by_answers(sentences):
    found = compare_classes(sentences)
    assert (found.fp32, found.confusion) == ([[2, 1], [1, 0]], [[1, 2], [1, 0]])
    negative, positive = found.rows
    assert (negative.name, negative.n, negative.regressed, negative.fixed) == ("negative", 3, 2, 1)
    assert (negative.fp32, negative.recall, negative.delta) == pytest.approx((2 / 3, 1 / 3, -1 / 3))
    assert (positive.n, positive.delta, positive.delta_stderr) == (1, 0, 0)


@given(st.integers(0, 20), st.integers(0, 20), st.integers(1, 20))
def test_the_error_of_a_class_is_that_of_paired_samples(lost, won, same):
    before = [LOGITS["no"]] * lost + [LOGITS["yes"]] * won + [LOGITS["no"]] * same
    after = [LOGITS["yes"]] * lost + [LOGITS["no"]] * won + [LOGITS["no"]] * same
    n = lost + won + same
    row = compare_classes(beside(SST2, before, after, np.zeros(n, dtype=np.int64), ["no", "yes"])).rows[0]
    step = np.repeat([-1, 1, 0], [lost, won, same])
    assert row.delta_stderr == pytest.approx(step.std() / np.sqrt(n))


def test_a_class_without_samples_has_no_recall(sentences):
    both = beside(SST2, sentences.fp32, sentences.answers, np.zeros(4, dtype=np.int64), sentences.names)
    row = compare_classes(both).rows[1]
    assert (row.n, row.fp32, row.recall, row.delta) == (0, None, None, None)


def test_words_of_one_sentence_go_together(tmp_path):
    names = ["O", "B-PER"]
    task = with_classes(NAMED["tokens"], names)
    gold = Tagged(np.array([0, 1, 1, 0]), np.array([3, 1]), tuple(names))
    before = np.eye(2)[[0, 1, 1, 0]]
    after = np.eye(2)[[0, 0, 0, 0]]
    both = beside(task, before, after, gold, names)
    data = datasets.Dataset.from_dict({"tokens": [["a", "b", "c"], ["d"]], "ner_tags": [[0, 1, 1], [0]]})
    found = list_changed_answers(both, data, tmp_path)
    assert [(row.text, row.label, row.fp32, row.prediction) for row in found.rows] == [
        ("a b c", "O B-PER B-PER", "O B-PER B-PER", "O O O")
    ]
    classes = compare_classes(both)
    assert (classes.unit, classes.fp32, classes.confusion) == ("words", [[2, 0], [0, 2]], [[2, 0], [2, 0]])
    assert (classes.rows[1].regressed, classes.rows[1].delta_stderr) == (2, 3**0.5)  # of one sentence


@given(st.lists(st.tuples(st.floats(-30, 30), st.floats(-30, 30)), min_size=1, max_size=20))
def test_margin_is_the_distance_of_the_two_probabilities(rows):
    logits = np.array(rows, dtype=np.float32)
    found = predict_answers(get_task("sst2"), logits, np.zeros(len(rows), dtype=np.int64), ["no", "yes"])
    assert found.margin == pytest.approx(np.tanh(np.abs(np.diff(logits.astype(np.float64))[:, 0]) / 2))
    assert [found.word(n) for n in range(len(rows))] == ["yes" if b > a else "no" for a, b in logits]


def predicted(task, gold, names, *logits):
    return [predict_answers(get_task(task), np.array(x, dtype=np.float32), gold, names) for x in logits]


def test_answers_flip_and_scores_never_do():
    gold, logits = np.array([0, 1, 1]), ([[2, 1], [0, 1], [5, 1]], [[1, 2], [0, 9], [5, 1]])
    before, after = predicted("sst2", gold, ["no", "yes"], *logits)
    assert find_changed(before, after).tolist() == [0]
    assert before.right.tolist() == [True, True, False]
    gold = np.array([1.0, 2.0], dtype=np.float32)
    before, after = predicted("stsb", gold, ["LABEL_0"], [[1.25], [2]], [[3], [4]])
    assert (before.word(0), before.margin, before.right) == ("1.25", None, None)
    assert not len(find_changed(before, after))
