"""Rows in batches: padded or packed, each answer is that of its own text."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from qdqbench.quantize.standalone import model
from qdqbench.quantize.standalone.model import Model
from qdqbench.quantize.standalone.runtimes import Streams
from qdqbench.quantize.standalone.texts import Refused

from ...support.fake_served import Engine, Packing, digits, fake_told
from .server.test_app import Doubled


@pytest.mark.parametrize("engine", [Engine, Packing, lambda: Streams(lambda _: Engine(), 3)])
@given(texts=st.lists(st.integers(0, 10**6), min_size=1, max_size=40), tokens=st.integers(1, 40))
def test_each_text_gets_its_own_answer(engine, texts, tokens):
    opened = Model(fake_told(batch=3), Tokenizer.from_str(digits()), engine())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(model, "PACKED_TOKENS", tokens)
        assert [each["score"] for each in opened.predict([*map(str, texts)])] == texts
    assert opened.predict([]) == []
    with pytest.raises(Refused, match="NaN"):
        opened.predict(["1", "nan"])


class Tokens(Packing):
    """One that answers each token with its id and its place."""

    def launch(self, ids, types, lengths):
        class Launched:
            def read(self):
                places = np.concatenate([np.arange(length) for length in lengths])
                return np.stack([ids, places], axis=1).astype(np.float32)

        return Launched()

    def __call__(self, batch):
        ids = np.pad(batch["input_ids"], ((0, 0), (0, 3)))  # as an engine pads to a profile
        return np.stack([ids, ids * 0 + np.arange(ids.shape[1])], axis=2).astype(np.float32)


@pytest.mark.parametrize("form", ["packed", "padded", "in streams"])
def test_tokens_get_their_own_answers(form):
    told = fake_told(kind="token classification", over_tokens=True, words=True, batch=2)
    forms = {
        "packed": Tokens(),
        "padded": Tokens().__call__,
        "in streams": Streams(lambda _: Tokens().__call__, 2),
    }
    opened = Model(told, Tokenizer.from_str(digits()), forms[form])
    coded = opened.encoder.code([["12", "3"], ["4"], ["5", "6", "789"]])
    for ids, answers in zip(np.split(coded.ids, coded.lengths.cumsum()[:-1]), opened.run(coded), strict=True):
        assert answers.tolist() == [[token, place] for place, token in enumerate(ids.tolist())]


def test_a_batch_that_is_alone_takes_all_threads_and_opens_no_second_model():
    asked, opened = [], []

    def open_engine(streams):
        opened.append(streams)
        return lambda batch: asked.append(streams) or Engine()(batch)

    model = Model(fake_told(batch=2), Tokenizer.from_str(digits()), Streams(open_engine, 3))
    for texts, expected in ((["1", "2"], [1]), (["1", "2", "3"], [3, 3]), (["4"], [1])):
        asked.clear()
        assert [each["score"] for each in model.predict(texts)] == [*map(int, texts)]
        assert asked == expected
    assert opened == [1, 3]
    model = Model(fake_told(batch=2), Tokenizer.from_str(digits()), Streams(open_engine, 3))
    model.infer.open(3)
    model.predict(["1"])
    assert opened == [1, 3, 3]


def test_rows_of_both_tokenizers_keep_their_order():
    opened = Model(fake_told(), Tokenizer.from_str(digits()), Engine(), fast=Doubled())
    scores = [each["score"] for each in opened.predict(["1", "1\u00e9", "31", "\u00e914", "5"])]
    assert scores == [2, 1, 32, 14, 5]


@given(lengths=st.lists(st.integers(1, 50), max_size=40))
def test_batches_without_padding_hold_no_more_than_their_budget(lengths):
    opened, budget = Model(fake_told(), Tokenizer.from_str(digits()), Packing()), 60
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(model, "PACKED_TOKENS", budget)
        bounds = opened.split(np.array(lengths, np.int32))
    sizes = [sum(lengths[first:last]) for first, last in pairwise(bounds)]
    assert (bounds[0], bounds[-1]) == (0, len(lengths))
    assert all(0 < size <= budget for size in sizes)
    assert all(size + lengths[last] > budget for size, last in zip(sizes, bounds[1:-1], strict=False))
