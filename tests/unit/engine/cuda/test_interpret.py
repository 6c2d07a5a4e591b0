"""The arithmetic of the interpreter, and token-packed rows."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qdqbench.quantize.engine.cuda.interpret import dot, interpret, round_codes
from qdqbench.quantize.engine.cuda.match import match_graph
from qdqbench.quantize.engine.cuda.pack import pack
from qdqbench.quantize.engine.cuda.tokens import pack_rows, pack_tokens, spread
from qdqbench.quantize.utils.errors import UserError

from ....support.cuda_graphs import batch_for

GRAPHS = [("bert", "bert-int8-attention"), ("roberta", "roberta-int8-residual-fused"), ("tokens",), ("mean",)]


@pytest.fixture(scope="module", params=GRAPHS, ids="-".join)
def case(request, graph_of):
    """A graph, its plan and its arrays."""
    graph = graph_of(*request.param)
    return graph, *pack(match_graph(graph))


def row_of(batch, row, padding=0):
    """One row alone, with other padding."""
    length = int(batch["attention_mask"][row].sum())
    return {
        name: np.pad(
            array[row : row + 1, :length], ((0, 0), (0, padding)), constant_values=name == "input_ids"
        )
        for name, array in batch.items()
    }


def test_sums_of_codes_are_exact():
    random = np.random.default_rng(0)
    codes, weight = (random.integers(-128, 128, (shape, 3072)).astype(np.int8) for shape in (5, 7))
    codes[0], weight[0] = -128, -128
    assert (dot(codes, weight) == codes.astype(np.int64) @ weight.astype(np.int64).T).all()


def test_codes_are_rounded_half_to_even_and_saturate():
    x = np.array([0.5, 1.5, -0.5, -2.5, 127.4, 127.5, 1e9, -128.5, -128.6, -1e9], np.float32)
    assert round_codes(x).tolist() == [0, 2, 0, -2, 127, 127, 127, -128, -128, -128]


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    seed=st.integers(0, 9),
    padding=st.integers(0, 9),
    data=st.data(),
)
def test_answers_of_a_row_do_not_depend_on_the_rows_beside_it(case, lengths, seed, padding, data):
    graph, plan, arrays = case
    batch = batch_for(graph, tuple(lengths), seed)
    order = data.draw(st.permutations(range(len(lengths))))
    found = interpret(plan, arrays, batch)
    shuffled = interpret(plan, arrays, {name: array[order] for name, array in batch.items()})
    for name, answers in found.items():
        np.testing.assert_allclose(shuffled[name], answers[order], rtol=1e-5, atol=1e-6)
        for row, length in enumerate(lengths):
            alone = interpret(plan, arrays, row_of(batch, row, padding))[name]
            if plan.head.pooling == "tokens":
                assert not alone[:, length:].any()
                assert not answers[row, length:].any()
                alone, wanted = alone[:, :length], answers[row : row + 1, :length]
            else:
                wanted = answers[row : row + 1]
            np.testing.assert_allclose(alone, wanted, rtol=1e-5, atol=1e-6)


def test_rows_are_packed_in_order_and_come_back(case):
    graph, plan, arrays = case
    batch = batch_for(graph, (3, 1, 5))
    tokens = pack_tokens(plan, arrays, batch)
    assert tokens.starts.tolist() == [0, 3, 4, 9]
    assert {array.dtype for array in (tokens.ids, tokens.positions, tokens.types, tokens.starts)} == {
        np.dtype(np.int32)
    }
    first = 0 if plan.embed.padding is None else plan.embed.padding + 1
    assert (tokens.positions - first).tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 4]
    assert (spread(tokens.ids, tokens) == batch["input_ids"] * batch["attention_mask"]).all()
    batch["attention_mask"][2, 2] = 0  # inside of a row: the others keep their places
    assert (pack_tokens(plan, arrays, batch).positions - first).tolist() == [0, 1, 2, 0, 0, 1, 3, 4]


def test_rows_have_the_distances_that_a_bias_is_for(graph_of):
    """Padding before the tokens changes none of them."""
    graph = graph_of("mpnet", "mpnet-int8-attention")
    plan, arrays = pack(match_graph(graph))
    batch = batch_for(graph, (9, 4, 16))
    plan = replace(plan, operations=(*plan.operations[:-1], replace(plan.head, pooling="mean")))
    later = {key: np.roll(array[:2], 3, axis=1) for key, array in batch.items()}
    for row, answers in enumerate(interpret(plan, arrays, later)["logits"]):
        alone = interpret(plan, arrays, row_of(batch, row))["logits"][0]
        np.testing.assert_allclose(alone, answers, rtol=1e-5, atol=1e-6)
    batch["attention_mask"][1, 2] = 0
    with pytest.raises(UserError, match="row 1 has masked tokens between others"):
        pack_tokens(plan, arrays, batch)
    long = {key: np.ones((2, 131), np.int64) for key in batch}  # all at the place of padding
    with pytest.raises(UserError, match="row 0 has 131 tokens; the model has distances of 130"):
        pack_tokens(plan, arrays, long)
    with pytest.raises(UserError, match="row 1 has 131 tokens"):
        pack_rows(plan, arrays, *np.ones((2, 132), np.int64), np.array([1, 131]))


def test_rows_of_a_model_with_windows_have_no_holes_and_a_length(graph_of):
    graph = graph_of("modernbert", "modernbert-int8-attention")
    plan, arrays = pack(match_graph(graph))
    batch = batch_for(graph, (9, 4))
    batch["attention_mask"][0, 2] = 0
    with pytest.raises(UserError, match="row 0 has masked tokens between others"):
        pack_tokens(plan, arrays, batch)
    with pytest.raises(UserError, match="row 1 has the position 8192; the model has 8192 of them"):
        pack_rows(plan, arrays, *np.ones((2, 8194), np.int64), np.array([1, 8193]))


def test_rows_that_cannot_be_run_are_refused_by_their_number(case):
    """Where the answer is that of the first token, so is a row without it."""
    graph, plan, arrays = case
    batch = batch_for(graph, (3, 2))
    batch["attention_mask"][1, 0] = 0
    first = plan.head.pooling == "first"
    told = "row 1 of the batch has no attended first token"
    with pytest.raises(UserError, match=told) if first else nullcontext():
        assert interpret(plan, arrays, batch)
    for name, value, told in (
        ("attention_mask", 0, "row 1 of the batch has no attended"),
        ("input_ids", 60, "row 1 has the token 60; the model has 60"),
        ("input_ids", -1, "row 1 has the token -1"),
        ("token_type_ids", 2, "row 1 has the type 2; the model has 2"),
    ):
        batch = batch_for(graph, (3, 2))
        if name in batch:
            batch[name][1] = value
            with pytest.raises(UserError, match=told):
                pack_tokens(plan, arrays, batch)
    with pytest.raises(UserError, match="row 1 has the position 1"):
        pack_tokens(plan, arrays, batch_for(graph, (3, 131)))
