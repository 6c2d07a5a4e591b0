"""A cross-encoder that ranks passages: the whole path, and what it is refused for."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import ndcg_score
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from qdqbench.quantize.utils.system.quiet import quiet

from .brought import PASSAGES, QUERIES, passages
from .tiny import refused, results, write_split

pytestmark = pytest.mark.slow


def plain_scores(model, table):
    """Scores [queries, passages] by transformers alone."""
    with quiet("transformers"):
        made = AutoModelForSequenceClassification.from_pretrained(model, attn_implementation="eager")
        encoder = made.eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    batch = tokenizer(table["query"], table["passage"], padding=True, return_tensors="pt")
    with torch.no_grad():
        return encoder(**batch).logits.numpy().reshape(-1, PASSAGES)


@pytest.mark.long
def test_the_path_of_a_cross_encoder(whole_run, given):
    table, out = passages("validation", 1), whole_run("rerank")
    found = results(out)
    scores, gold = plain_scores(given("rerank").model, table), np.array(table["label"]).reshape(-1, PASSAGES)
    ranks = 1 + (scores > scores[:, 2:3]).sum(axis=1)
    metrics = found["stages"]["fp32"]["metrics"]
    assert [*metrics] == ["mrr@10", "ndcg@10", "average_precision"]
    assert metrics["mrr@10"] == pytest.approx(np.mean(1 / ranks), abs=1e-6)
    assert metrics["ndcg@10"] == pytest.approx(ndcg_score(gold, scores, k=10), abs=1e-6)
    for stage in ("fp32", "fake_quant", "onnxruntime"):
        assert found["stages"][stage]["n"] == QUERIES["validation"]
        assert found["stages"][stage]["stderr"]["mrr@10"] > 0
    assert {*found["stages"]["onnxruntime"]["vs_fp32"]["delta_stderr"]} == {*metrics}


def test_a_query_with_one_passage_is_refused(given, tmp_path, qdqbench):
    theirs, table = given("rerank"), passages("validation", 1)
    last = {"query": "one", "passage": "two", "label": 1.0}
    lonely = {name: [*column, last[name]] for name, column in table.items()}
    shutil.copytree(theirs.data, tmp_path / "data")
    write_split(tmp_path / "data" / "validation.parquet", lonely)
    options = replace(theirs, data=tmp_path / "data").options
    done = qdqbench("run", "int8-linears", *options, "--out", tmp_path / "run")
    refused(done, r"1 of \d+ queries, which have one passage only.*'one'")
