"""Re-ranking: passages of a query stand together, and what a query scores is what others say it does."""

import datasets
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdqbench.quantize.tasks import metrics
from qdqbench.quantize.tasks.data.encode import encode
from qdqbench.quantize.tasks.data.load import complete_samples, load_split
from qdqbench.quantize.tasks.kinds.reranking import RERANKING
from qdqbench.quantize.tasks.task import RERANK, check_model_fits, get_task
from qdqbench.quantize.utils.errors import UserError

from ....support.families import new_tokenizer

ROWS = [  # of one query not together
    ("a cat", "c", 0.0), ("the dog", "d e", 1.0), ("a cat", "c a t", 1.0), ("the dog", "x", 0.0),
    ("a cat", "t", 0.5), ("one owl", "o", 0.0), ("one owl", "w l", 0.0),
]  # fmt: skip


def rows(table=ROWS):
    columns = zip(*table, strict=True)
    return datasets.Dataset.from_dict(dict(zip(("query", "passage", "label"), columns, strict=True)))


@pytest.fixture
def folder(tmp_path):
    rows().to_parquet(tmp_path / "train.parquet")
    return tmp_path


def test_known_values():
    gold = np.array([[0, 1, 0.5], [1, 0, np.nan]])
    found = metrics.compute(RERANK, np.array([[3], [2], [1], [5], [6]], dtype=np.float32), gold)
    ideal = 1 + 0.5 / np.log2(3)
    gain = 1 / np.log2(3) + 0.5 / 2
    assert list(found) == ["mrr@10", "ndcg@10", "average_precision"]
    assert found["mrr@10"] == pytest.approx((1 / 2 + 1 / 2) / 2)
    assert found["ndcg@10"] == pytest.approx((gain / ideal + 1 / np.log2(3)) / 2)
    assert found["average_precision"] == pytest.approx(((1 / 2 + 2 / 3) / 2 + 1 / 2) / 2)
    same = metrics.compute(RERANK, np.ones((5, 1), dtype=np.float32), np.array([[1, 0, 0], [0, 0, np.nan]]))
    assert same["mrr@10"] == pytest.approx((1 / 3 + 0) / 2)


@given(seed=st.integers(0, 2**16), passages=st.integers(2, 15))
def test_values_are_those_of_scikit_learn(seed, passages):
    from sklearn.metrics import average_precision_score, ndcg_score

    random = np.random.default_rng(seed)
    scores, gold = random.normal(size=(1, passages)), random.integers(0, 2, (1, passages)).astype(float)
    gold[0, 0] = 1
    found = metrics.compute(RERANK, scores.reshape(-1, 1).astype(np.float32), gold)
    assert found["ndcg@10"] == pytest.approx(ndcg_score(gold, scores, k=10))
    assert found["average_precision"] == pytest.approx(average_precision_score(gold[0], scores[0]))
    rank = 1 + min(np.flatnonzero(gold[0][np.argsort(-scores[0])]))
    assert found["mrr@10"] == pytest.approx(1 / rank if rank <= 10 else 0)


def test_passages_of_a_query_stand_together_and_are_not_cut(folder):
    split = load_split(RERANK, str(folder), "train")
    assert split.dataset["query"][:] == ["a cat"] * 3 + ["the dog"] * 2 + ["one owl"] * 2
    assert split.dataset["passage"][:3] == ["c", "c a t", "t"]
    cut = load_split(RERANK, str(folder), "train", limit=4)
    assert len(cut.dataset) == 5
    assert "the first 5 of 7 rows" in " ".join(cut.notes)
    drawn = load_split(RERANK, str(folder), "train", seed=1)
    smaller = load_split(RERANK, str(folder), "train", seed=1, limit=1)
    assert drawn.dataset[: len(smaller.dataset)] == smaller.dataset[:]
    assert complete_samples(drawn.dataset, RERANK, 1) == len(smaller.dataset) > 1


def test_rows_of_a_split_are_samples_of_queries(folder):
    encoded = encode(load_split(RERANK, str(folder), "train"), RERANK, new_tokenizer(0), 16)
    assert encoded.samples is not None
    assert encoded.samples.tolist() == [0, 0, 0, 1, 1, 2, 2]
    np.testing.assert_array_equal(encoded.gold, [[0, 1, 0.5], [1, 0, np.nan], [0, 0, np.nan]])
    assert encoded.labels.tolist() == [0, 1, 0.5, 1, 0, 0, 0]
    assert encoded.warnings == ("1 of 3 queries have no relevant passage and count as 0 in every metric",)
    part = encoded.part(np.array([2, 0]))
    assert part.labels.tolist() == [0, 0, 0, 1, 0.5]
    assert RERANKING.answer_samples(part.gold).tolist() == [0, 0, 1, 1, 1]


def test_the_task_takes_a_pair_and_one_score():
    own = get_task("rerank", text_columns=["question", "text"], label_column="grade", num_labels=1)
    assert (own.kind, own.text_columns, own.metrics) == (
        RERANKING, ("question", "text"), RERANKING.default_metrics,
    )  # fmt: skip
    with pytest.raises(UserError, match="has 2 labels, but re-ranking takes one score"):
        get_task("rerank", num_labels=2)
    with pytest.raises(UserError, match=r"text columns text and .*give 2 text columns, all different"):
        get_task("rerank", text_columns=["text"])
    check_model_fits(RERANK, model_labels=1, problem_type=None)
    with pytest.raises(UserError, match=r"classification with 2 outputs, but task 'rerank' needs one score"):
        check_model_fits(RERANK, model_labels=2, problem_type=None)
