"""A stage against FP32: exact figures, paired errors, SQNR."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qdqbench.eval.metrics.compare import compare, compute_decibels, measure_powers
from qdqbench.eval.metrics.gate import judge
from qdqbench.quantize.tasks import metrics
from qdqbench.quantize.tasks.kinds.classification import CLASSIFICATION, REGRESSION
from qdqbench.quantize.tasks.kinds.embedding import PAIRS, TEXTS_ALONE
from qdqbench.quantize.tasks.kinds.multilabel import MULTI_LABEL
from qdqbench.quantize.tasks.kinds.questions import QUESTIONS, Questions
from qdqbench.quantize.tasks.kinds.reranking import RERANKING
from qdqbench.quantize.tasks.kinds.tokens import TOKENS, Tagged
from qdqbench.quantize.tasks.task import get_task
from qdqbench.quantize.utils.errors import CheckFailed

SST2, MRPC, STSB = get_task("sst2"), get_task("mrpc"), get_task("stsb")


def answers(right, labels):
    """Logits that are right where `right` is."""
    return np.eye(2, dtype=np.float32)[np.where(right, labels, 1 - labels)]


def case(n, lost, won, both_wrong=0, seed=0):
    """Logits of FP32 and of a stage that loses and wins some samples, and the labels."""
    labels = np.random.default_rng(seed).integers(2, size=n)
    before, after = np.ones(n, dtype=bool), np.ones(n, dtype=bool)
    after[:lost] = False
    before[lost : lost + won] = False
    before[lost + won : lost + won + both_wrong] = after[lost + won : lost + won + both_wrong] = False
    return answers(before, labels), answers(after, labels), labels


def scored(n, noise, seed=0):
    generator = np.random.default_rng(seed)
    labels = generator.uniform(0, 5, n).astype(np.float32)
    reference = (labels + generator.normal(0, 1, n)).astype(np.float32)[:, None]
    return reference, reference + generator.normal(0, noise, (n, 1)).astype(np.float32), labels


@pytest.mark.parametrize("task", [SST2, MRPC, STSB], ids=lambda task: task.name)
def test_equal_logits(task):
    logits, _, labels = scored(50, 0) if task.kind is REGRESSION else case(50, 3, 4)
    found = compare(task, logits, logits.copy(), labels, seed=0)
    zeros = dict.fromkeys(task.metrics, 0.0)
    assert (found.delta, found.delta_stderr) == (zeros, zeros)
    assert found.within_noise
    assert (found.mean_abs_logit_diff, found.sqnr_db) == (0, None)
    assert (found.disagreements, found.mcnemar_p) == ((None, None) if task.kind is REGRESSION else (0, 1.0))


@pytest.mark.parametrize(
    ("lost", "won", "p"),
    [(1, 0, 1.0), (5, 0, 2 / 2**5), (0, 5, 2 / 2**5), (3, 1, 10 / 2**4), (4, 4, 1.0), (10, 2, 158 / 2**12)],
)
def test_mcnemar_is_exact(lost, won, p):
    found = compare(SST2, *case(100, lost, won, both_wrong=7), seed=0)
    assert found.mcnemar_p == pytest.approx(p)
    assert found.disagreements == lost + won
    assert found.delta["accuracy"] == pytest.approx((won - lost) / 100)


@settings(max_examples=25)
@given(lost=st.integers(0, 60), won=st.integers(0, 60), wrong=st.integers(0, 100))
def test_paired_error_of_accuracy(lost, won, wrong):
    """A sample adds -1, 0 or 1 to the difference, so its variance is known in closed form."""
    n = 400
    found = compare(SST2, *case(n, lost, won, wrong), seed=1)
    expected = np.sqrt((lost + won) / n - ((won - lost) / n) ** 2) / np.sqrt(n)
    assert found.delta_stderr["accuracy"] == pytest.approx(expected, rel=0.12)  # 1000 draws: 2.2 % each


@pytest.mark.parametrize(
    ("task", "data"),
    [(MRPC, case(300, 12, 6, both_wrong=40)), (STSB, scored(200, 0.3))],
    ids=["mrpc", "stsb"],
)
def test_paired_errors_are_those_of_resampled_pairs(task, data):
    reference, logits, labels = data
    found = compare(task, reference, logits, labels, seed=1)
    rows = np.random.default_rng(2).integers(len(labels), size=(250, len(labels)))
    deltas = []
    for row in rows:
        before = metrics.compute(task, reference[row], labels[row])
        after = metrics.compute(task, logits[row], labels[row])
        deltas.append([after[name] - before[name] for name in task.metrics])
    assert list(found.delta_stderr.values()) == pytest.approx(np.std(deltas, axis=0), rel=0.16)
    unpaired = metrics.stderr(task, logits, labels, seed=1)
    assert all(found.delta_stderr[name] < unpaired[name] for name in task.metrics)


@pytest.mark.parametrize(
    ("lost", "won", "within"), [(6, 4, True), (30, 2, False), (2, 30, False), (3, 0, True)]
)
def test_within_noise_is_two_paired_errors_of_the_primary_metric(lost, won, within):
    assert compare(SST2, *case(500, lost, won), seed=0).within_noise is within


def test_a_drop_at_its_limit_is_not_over_it():
    """0.9 - 0.89 is 0.010000000000000009: a gate of 0.01 asked for a billion samples to tell it."""
    found = compare(SST2, *case(100, 1, 0, both_wrong=10), seed=0)
    assert (found.drop, judge(found.drop, found.drop_stderr, 0.01)) == (0.01, None)


def test_one_seed_one_answer():
    first = compare(STSB, *scored(100, 0.3), seed=0)
    assert compare(STSB, *scored(100, 0.3), seed=0) == first
    assert compare(STSB, *scored(100, 0.3), seed=1).delta_stderr != first.delta_stderr


def test_logit_distance():
    reference = np.array([[3.0, 4.0], [0.0, 5.0]], dtype=np.float32)
    found = compare(SST2, reference, reference + np.float32(0.5), np.array([0, 1]), seed=0)
    assert found.mean_abs_logit_diff == pytest.approx(0.5)
    assert found.sqnr_db == pytest.approx(10 * np.log10(50 / 1))


def test_constant_stage_is_compared_and_not_refused():
    reference, _, labels = scored(100, 0)
    found = compare(STSB, reference, np.ones_like(reference), labels, seed=0)
    assert found.delta["pearson"] == pytest.approx(-metrics.compute(STSB, reference, labels)["pearson"])
    assert not found.within_noise


@pytest.mark.parametrize("which", [0, 1])
def test_broken_logits_of_either_stage(which):
    reference, logits, labels = case(10, 1, 1)
    (reference, logits)[which][4] = np.nan
    with pytest.raises(CheckFailed, match="1 of 10"):
        compare(SST2, reference, logits, labels, seed=0)
    with pytest.raises(CheckFailed, match="shape"):
        compare(SST2, case(10, 1, 1)[0], case(9, 1, 1)[1], labels, seed=0)


SPANS = [np.full((length, 2), -1) for length in (2, 3, 1)]  # tokens of windows
ANSWERED = [  # a kind of task, the gold of three samples, and the sample of each answer
    (CLASSIFICATION, np.array([0, 1, 1]), [0, 1, 2]),
    (REGRESSION, np.array([0.0, 1, 2]), [0, 1, 2]),
    (MULTI_LABEL, np.eye(3, dtype=np.int8), [0, 1, 2]),
    (TOKENS, Tagged(np.zeros(5, dtype=np.int64), np.array([2, 0, 3]), ("O",)), [0, 0, 2, 2, 2]),
    (RERANKING, np.array([[1, 0, np.nan], [0, 1, 1], [1, 0, np.nan]]), [0, 0, 1, 1, 1, 2, 2]),
    (PAIRS, np.array([0.0, 1, 2]), [0, 0, 1, 1, 2, 2]),
    (TEXTS_ALONE, np.zeros(3), [0, 1, 2]),
    (
        QUESTIONS,
        Questions([""] * 3, [[""]] * 3, [SPANS[:2], SPANS[2:], SPANS[1:]], False),
        [0] * 5 + [1] + [2] * 4,
    ),
]


@pytest.mark.parametrize(("kind", "gold", "samples"), ANSWERED, ids=lambda each: getattr(each, "name", ""))
@settings(max_examples=20)
@given(seed=st.integers(0, 2**16), scale=st.floats(0.01, 100))
def test_sqnr_is_that_of_the_mean_noise_of_samples(kind, gold, samples, seed, scale):
    random = np.random.default_rng(seed)
    reference, moved = (random.normal(0, scale, (len(samples), 2)) for _ in range(2))
    powers = measure_powers(kind, reference, reference + moved, gold)
    column = {"start_logits": [0], "end_logits": [1]}.get(powers.output, [0, 1])
    assert (powers.output is None) == (kind is not QUESTIONS)
    apart = np.square(moved[:, column]).sum(axis=1)
    power = np.square(reference[:, column]).sum() / len(gold)
    assert powers.noise == pytest.approx([apart[np.array(samples) == n].sum() / power for n in range(3)])
    sqnr = compute_decibels(powers.signal, powers.noise)[0]
    assert sqnr == pytest.approx(-10 * np.log10(powers.noise.mean()))
    assert 10 ** (-sqnr / 10) == pytest.approx(apart.sum() / np.square(reference[:, column]).sum())
    assert not measure_powers(kind, reference, reference, gold).noise.any()
    with pytest.raises(CheckFailed, match="answers 0 to every sample"):
        measure_powers(kind, 0 * reference, reference, gold)


def test_the_error_of_an_sqnr_is_that_of_resampled_answers():
    rng = np.random.default_rng(0)
    reference = rng.normal(size=(400, 2)).astype(np.float32)
    answers = reference + 0.1 * rng.normal(size=(400, 2)) * rng.exponential(size=(400, 1))
    found = compare(SST2, reference, answers.astype(np.float32), rng.integers(0, 2, 400), seed=0)
    drawn = []
    for rows in rng.integers(0, 400, (500, 400)):
        powers = [np.square(each[rows]).sum() for each in (reference, answers - reference)]
        drawn.append(10 * np.log10(powers[0] / powers[1]))
    assert found.sqnr_db_stderr == pytest.approx(np.std(drawn), rel=0.15)


@pytest.mark.parametrize(("n", "told"), [(1, False), (2, False), (3, False), (4, True)])
def test_few_samples_that_are_all_lost_have_an_error(n, told):
    """Their bootstrap has no spread: one flipped answer of one row was a drop of 100 % that failed a gate."""
    found = compare(SST2, *case(n, n, 0), seed=0)
    assert found.drop == 1
    assert (judge(found.drop, found.drop_stderr, 0.01) == "failed") == told
