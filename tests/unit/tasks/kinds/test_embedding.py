"""The kinds of embedding models: scores of pairs, agreement with FP32, and what QAT comes near to."""

import hypothesis.extra.numpy as arrays
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from qdqbench.eval.metrics.compare import agreement_of, compare
from qdqbench.eval.metrics.results import COSINE_EDGES
from qdqbench.quantize.tasks import metrics
from qdqbench.quantize.tasks.kinds import embedding
from qdqbench.quantize.tasks.task import EMBED, GLUE, get_task, score_embeddings
from qdqbench.quantize.utils.errors import CheckFailed, UserError

STSB = score_embeddings(GLUE["stsb"], ())


def vectors(rows, seed=0, noise=0.0):
    rng = np.random.default_rng(seed)
    made = rng.normal(size=(rows, 16))
    return (made + noise * np.random.default_rng(9).normal(size=made.shape)).astype(np.float32)


def test_pairs_are_scored_by_the_cosine_of_their_texts():
    from scipy import stats

    answers, labels = vectors(40), np.linspace(0, 5, 20).astype(np.float32)
    first, second = answers[::2].astype(float), answers[1::2].astype(float)
    cosine = (first * second).sum(axis=1) / np.linalg.norm(first, axis=1) / np.linalg.norm(second, axis=1)
    found = metrics.compute(STSB, answers, labels)
    assert list(found) == ["spearman", "pearson"]
    assert found["spearman"] == pytest.approx(stats.spearmanr(labels, cosine).statistic)
    assert found["pearson"] == pytest.approx(stats.pearsonr(labels, cosine).statistic)
    with pytest.raises(CheckFailed, match=r"needs \[40, 16\]"):
        metrics.compute(STSB, answers[:30], labels)


def test_pairs_are_compared_with_fp32_and_so_are_their_texts():
    labels = np.linspace(0, 5, 20).astype(np.float32)
    found = compare(STSB, vectors(40), vectors(40, noise=0.1), labels, seed=0)
    assert found.n == 20
    assert found.disagreements is None
    assert found.agreement is not None
    assert found.agreement.n == 40
    assert 0.97 < found.agreement.values["cosine"] < 1


def test_texts_are_scored_against_fp32_alone():
    reference, answers = vectors(60), vectors(60, noise=0.2)
    found = compare(EMBED, reference, answers, np.zeros(60), seed=0)
    assert found.delta["cosine"] < 0
    assert 0 < found.delta_stderr["cosine"] < 0.01
    same = compare(EMBED, reference, reference, np.zeros(60), seed=0)
    assert same.delta == pytest.approx(dict.fromkeys(EMBED.metrics, 0.0))
    assert same.within_noise


def test_the_bootstrap_is_that_of_drawn_texts():
    table = np.stack([np.linspace(0.8, 1, 300), np.random.default_rng(0).random(300)], axis=1)
    found = metrics.bootstrap(EMBED, table, [table], seed=0, resamples=2000)
    for name, column in (("cosine", 0), ("neighbors", 1)):
        error = table[:, column].std() / np.sqrt(300)
        assert np.std(found[name][0]) == pytest.approx(error, rel=0.1)
    assert np.quantile(found["cosine_p1"], 0.5) == pytest.approx(np.quantile(table[:, 0], 0.01), abs=2e-3)


def test_counts_of_the_chart_hold_every_text():
    reference, answers = vectors(60), vectors(60, noise=0.2)
    answers[0], answers[1] = reference[0], -reference[1]
    found = agreement_of(reference, answers, seed=0)
    assert len(found.cosine_counts) == len(COSINE_EDGES) + 1
    assert sum(found.cosine_counts) == sum(found.neighbor_counts) == found.n == 60
    assert found.cosine_counts[0] == found.cosine_counts[-1] == 1
    kept = np.dot(np.arange(11), found.neighbor_counts) / 600
    assert kept == pytest.approx(found.values["neighbors"])


def test_one_embedding_for_all_is_seen():
    assert embedding.TEXTS_ALONE.constant(np.ones((5, 4)), np.zeros(5))
    assert not embedding.TEXTS_ALONE.constant(vectors(5), np.zeros(5))


def test_too_few_texts():
    with pytest.raises(UserError, match="10 texts are too few to compare their 10 nearest neighbors"):
        embedding.TEXTS_ALONE.targets(None, EMBED, np.arange(10), [])


class TestTasks:
    def test_a_task_for_embeddings(self):
        assert STSB.kind is embedding.PAIRS
        assert score_embeddings(GLUE["stsb"], ("pearson",)).metrics == ("pearson",)
        assert score_embeddings(EMBED, ()) is EMBED
        own = get_task("mine", text_columns=("a", "b"), num_labels=1)
        assert score_embeddings(own, ()).kind is embedding.PAIRS

    @pytest.mark.parametrize("name", ["sst2", "mrpc"])
    def test_a_task_about_something_else(self, name):
        said = r"cannot judge an embedding model\. Give scored pairs .*--data lines\.txt"
        with pytest.raises(UserError, match=said):
            score_embeddings(GLUE[name], ())

    def test_texts_are_no_pairs_and_have_metrics_of_their_own(self):
        with pytest.raises(UserError, match=r"has text columns a, b and .*give 1 text column, all"):
            get_task("embed", text_columns=("a", "b"))
        assert get_task("embed", metrics=("neighbors",)).metrics == ("neighbors",)


def nearest(vectors, count):
    """By the definition, in loops: the largest cosine, of equal ones the first."""
    similar = (
        embedding.unit(vectors.astype(np.float32)) @ embedding.unit(vectors.astype(np.float32)).T
    ).round(6)
    found = []
    for row in range(len(vectors)):
        others = [other for other in range(len(vectors)) if other != row]
        found.append(set(sorted(others, key=lambda other: (-similar[row, other], other))[:count]))
    return found


small = st.integers(-2, 2).map(float)


@given(arrays.arrays(np.float32, (7, 3), elements=small), arrays.arrays(np.float32, (7, 3), elements=small))
def test_overlap_is_that_of_sorted_lists(a, b):
    wanted = [len(mine & other) / 3 for mine, other in zip(nearest(a, 3), nearest(b, 3), strict=True)]
    np.testing.assert_allclose(embedding.overlap(a, b, 3), wanted)


@pytest.mark.parametrize("block", [1, 7, 40, 1 << 20])
def test_blocks_change_nothing(monkeypatch, block):
    rng = np.random.default_rng(0)
    a = rng.normal(size=(40, 8)).astype(np.float32)
    b = a + 0.4 * rng.normal(size=a.shape).astype(np.float32)
    whole = embedding.overlap(a, b)
    assert 0.3 < whole.mean() < 0.9
    monkeypatch.setattr(embedding, "BLOCK", block)
    np.testing.assert_array_equal(embedding.overlap(a, b), whole)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_few_texts_have_fewer_neighbors(count):
    a = np.random.default_rng(0).normal(size=(count, 4)).astype(np.float32)
    np.testing.assert_array_equal(embedding.overlap(a, a), np.ones(count))


def test_cosines():
    a = np.array([[1, 0], [1, 1], [0, 0], [0, 0], [3, 4]], dtype=np.float32)
    b = np.array([[2, 0], [0, 5], [0, 0], [1, 0], [-3, -4]], dtype=np.float32)
    np.testing.assert_allclose(embedding.cosines(a, b), [1, 0.5**0.5, 1, 0, -1])


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=20), st.floats(0.01, 0.99))
def test_a_percentile_of_resamples_is_that_of_repeated_samples(values, share):
    values = np.array(values, dtype=np.float64)
    even = np.full(len(values), 1 / len(values))
    weights = np.random.default_rng(len(values)).multinomial(len(values), even, size=5)
    wanted = [np.quantile(np.repeat(values, counts), share, method="inverted_cdf") for counts in weights]
    np.testing.assert_array_equal(embedding.weighted_percentile(weights.astype(float), values, share), wanted)
