"""The kinds of embedding models: scores of pairs, agreement with FP32, and what QAT comes near to."""

import numpy as np
import pytest

from qdqbench.eval.metrics.compare import agreement_of, compare
from qdqbench.quantize.tasks import metrics
from qdqbench.quantize.tasks.task import EMBED, GLUE, get_task, score_embeddings
from qdqbench.quantize.tasks.types.embedding import PAIRS, TEXTS_ALONE
from qdqbench.quantize.tasks.types.encoded import RowLayout
from qdqbench.quantize.utils.comparison import COSINE_EDGES
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


def test_divergence_is_the_distance_from_fp32_by_sample():
    reference, answers = vectors(8).astype(float), vectors(8, noise=0.3).astype(float)
    texts = TEXTS_ALONE.divergence(reference, answers, reference)
    assert texts.shape == (8,)
    assert (texts > 0).all()
    np.testing.assert_allclose(PAIRS.divergence(reference, answers, None), texts.reshape(4, 2).mean(axis=1))
    np.testing.assert_allclose(TEXTS_ALONE.divergence(reference, 3 * reference, None), 0, atol=1e-12)


def test_distance_of_qat_is_twice_the_divergence_of_normalized_embeddings():
    import torch

    reference, answers = vectors(8).astype(float), vectors(8, noise=0.3).astype(float)
    reference, answers = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (reference, answers))
    made, teacher = torch.from_numpy(answers).requires_grad_(), torch.from_numpy(reference)
    distance = PAIRS.distance(made, teacher, 1.0, torch.ones(8))
    assert float(distance.detach()) == pytest.approx(
        2 * TEXTS_ALONE.divergence(reference, answers, None).sum()
    )
    distance.backward()
    assert made.grad is not None
    assert made.grad.abs().sum() > 0


def test_one_embedding_for_all_is_seen():
    assert TEXTS_ALONE.constant(np.ones((5, 4)), np.zeros(5))
    assert not TEXTS_ALONE.constant(vectors(5), np.zeros(5))


def test_too_few_texts():
    with pytest.raises(UserError, match="10 texts are too few to compare their 10 nearest neighbours"):
        TEXTS_ALONE.targets(None, EMBED, RowLayout(np.arange(10), []))


class TestTasks:
    def test_a_task_for_embeddings(self):
        assert STSB.kind is PAIRS
        assert score_embeddings(GLUE["stsb"], ("pearson",)).metrics == ("pearson",)
        assert score_embeddings(EMBED, ()) is EMBED
        own = get_task("mine", text_columns=("a", "b"), num_labels=1)
        assert score_embeddings(own, ()).kind is PAIRS

    @pytest.mark.parametrize("name", ["sst2", "mrpc"])
    def test_a_task_about_something_else(self, name):
        with pytest.raises(
            UserError, match=r"cannot judge an embedding model; give pairs .*--data lines\.txt"
        ):
            score_embeddings(GLUE[name], ())

    def test_texts_are_no_pairs(self):
        with pytest.raises(UserError, match=r"has text columns a, b and .*give 1 text column, all"):
            get_task("embed", text_columns=("a", "b"))

    def test_the_metric_that_decides_can_be_chosen(self):
        assert get_task("embed", metrics=("neighbors",)).metrics == ("neighbors",)
