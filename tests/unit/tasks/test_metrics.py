import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from qdqbench.quantize.tasks import metrics
from qdqbench.quantize.tasks.kinds.classification import REGRESSION
from qdqbench.quantize.tasks.task import get_task
from qdqbench.quantize.utils.errors import CheckFailed, UserError

BINARY = get_task("own", text_columns=["s"], num_labels=2, metrics=["f1", "accuracy", "matthews"])
FOUR = get_task("own", text_columns=["s"], num_labels=4, metrics=["matthews", "accuracy"])
STSB = get_task("stsb")


def one_hot(classes, count=2):
    return np.eye(count, dtype=np.float32)[classes]


def scores(values):
    return np.array(values, dtype=np.float32)[:, None]


def some(task, n, seed=0):
    """Logits that are right more often than not, and labels."""
    generator = np.random.default_rng(seed)
    if task.kind is REGRESSION:
        labels = np.round(generator.uniform(0, 5, n) * 2).astype(np.float32) / 2  # ties, as in STS-B
        return scores(labels + generator.normal(0, 1.5, n)), labels
    labels = generator.integers(task.num_labels, size=n)
    noise = generator.normal(0, 0.7, (n, task.num_labels)).astype(np.float32)
    return one_hot(labels, task.num_labels) + noise, labels


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("task", [BINARY, STSB], ids=lambda task: task.metrics[0])
def test_logits_that_are_not_finite_are_counted(task, value):
    logits, labels = some(task, 20)
    logits[[3, 7], -1] = value
    for function in (metrics.compute, lambda *args: metrics.stderr(*args, seed=0)):
        with pytest.raises(CheckFailed, match="NaN or infinite for 2 of 20 samples"):
            function(task, logits, labels)


@pytest.mark.parametrize("shape", [(20, 3), (19, 2), (20, 1), (20,)])
def test_logits_of_another_shape(shape):
    with pytest.raises(CheckFailed, match=r"\[20, 2\]"):
        metrics.compute(BINARY, np.zeros(shape, dtype=np.float32), np.zeros(20, dtype=np.int64))


@pytest.mark.parametrize("value", [0.0, 0.1, 1e30, -2.5])
def test_constant_answers_score_0_with_0_error(value):
    labels = some(STSB, 50)[1]
    logits = np.full((50, 1), value, dtype=np.float32)
    assert metrics.compute(STSB, logits, labels) == {"pearson": 0, "spearman": 0}
    assert metrics.stderr(STSB, logits, labels, seed=0) == {"pearson": 0, "spearman": 0}
    answers = np.zeros(50, dtype=np.int64)
    truth = np.arange(50) % 2
    assert metrics.compute(BINARY, one_hot(answers), truth) == {"f1": 0, "accuracy": 0.5, "matthews": 0}
    with pytest.raises(UserError, match="all 10 labels are of one class, so Matthews is undefined"):
        metrics.compute(FOUR, np.eye(4, dtype=np.float32)[np.arange(10) % 4], np.ones(10, dtype=np.int64))


def test_constant_labels_of_a_regression_cannot_be_scored():
    with pytest.raises(UserError, match="all 3 labels are equal"):
        metrics.compute(STSB, scores([1, 2, 3]), np.ones(3, dtype=np.float32))


@settings(deadline=None)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(2, 40), kind=st.sampled_from([BINARY, FOUR, STSB]))
def test_weighted_metrics_equal_those_of_repeated_samples(seed, n, kind):
    """The bootstrap's own formulas, against scikit-learn and SciPy on the samples written out."""
    generator = np.random.default_rng(seed)
    logits, labels = some(kind, n, seed)
    logits = np.round(logits, 1)  # ties
    weights = generator.multinomial(n, np.full(n, 1 / n))
    drawn = np.repeat(np.arange(n), weights)
    assume(np.ptp(labels[drawn]) > 0)
    expected = metrics.compute(kind, logits[drawn], labels[drawn])
    theirs = {"f1": f1_score, "accuracy": accuracy_score, "matthews": matthews_corrcoef}
    for name in theirs.keys() & expected.keys():  # to the last digit
        assert expected[name] == theirs[name](labels[drawn], logits[drawn].argmax(1))
    table = kind.kind.table(metrics.predict(kind, logits, labels), labels)
    found = {name: kind.kind.metrics[name].weighted(weights[None] * 1.0, table)[0] for name in kind.metrics}
    assert found == pytest.approx(expected, rel=0, abs=1e-12)


@pytest.mark.parametrize("task", [BINARY, FOUR, STSB], ids=lambda task: task.metrics[0])
def test_standard_errors_are_those_of_resampled_samples(task, monkeypatch):
    monkeypatch.setattr(metrics, "RESAMPLES", 2000)
    n, draws = 150, 250
    logits, labels = some(task, n)
    found = metrics.stderr(task, logits, labels, seed=1)
    generator = np.random.default_rng(2)
    rows = generator.integers(n, size=(draws, n))
    values = [metrics.compute(task, logits[row], labels[row]) for row in rows]
    for name in task.metrics:
        # The standard deviation of 250 draws is itself known to 1 / sqrt(500) = 4.5 %.
        assert found[name] == pytest.approx(np.std([value[name] for value in values]), rel=0.16)


def test_accuracy_error_is_the_binomial_one():
    labels = np.zeros(100, dtype=np.int64)
    answers = np.r_[np.zeros(80, dtype=np.int64), np.ones(20, dtype=np.int64)]
    assert metrics.stderr(BINARY, one_hot(answers), labels, seed=0)["accuracy"] == pytest.approx(0.04)


@pytest.mark.parametrize("task", [BINARY, STSB], ids=lambda task: task.metrics[0])
def test_errors_depend_on_the_seed_and_not_on_the_block(task, monkeypatch):
    logits, labels = some(task, 60)
    first = metrics.stderr(task, logits, labels, seed=0)
    name = task.metrics[0]
    assert metrics.stderr(task, logits, labels, seed=1)[name] != first[name]
    monkeypatch.setattr(metrics, "BLOCK", 700)
    assert metrics.stderr(task, logits, labels, seed=0) == pytest.approx(first)
