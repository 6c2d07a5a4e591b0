"""Inputs, lanes and timers of devices; CUDA is a fake that writes down what is asked of it."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qdqbench.eval.bench import measure
from qdqbench.quantize.models.families.known import BERT

from ...support import fake_cuda


@given(st.integers(1, 6), st.integers(1, 12), st.integers(2, 500), st.integers(1, 5), st.integers(0, 3))
def test_random_inputs_are_seeded_distinct_and_in_the_vocabulary(batch, length, vocabulary, sets, seed):
    shape = (batch, length)
    drawn, again = (measure.random_sets(BERT.inputs, shape, vocabulary, sets, seed) for _ in range(2))
    assert len(drawn) == sets
    for one, same in zip(drawn, again, strict=True):
        assert {name: array.dtype for name, array in one.items()} == dict.fromkeys(one, np.int64)
        assert all(array.shape == (batch, length) for array in one.values())
        assert one["attention_mask"].all()
        assert 0 <= one["input_ids"].min() <= one["input_ids"].max() < vocabulary
        assert np.array_equal(one["input_ids"], same["input_ids"])


def test_sets_differ_from_each_other_and_between_seeds():
    ids = [
        values["input_ids"].tobytes()
        for seed in (0, 1)
        for values in measure.random_sets(BERT.inputs, (4, 16), 1000, 8, seed)
    ]
    assert len(set(ids)) == 16


@given(st.lists(st.integers(1, 7), min_size=2, max_size=5), st.integers(1, 40), st.integers(0, 3))
def test_inputs_of_texts_hold_whole_texts_in_their_order(lengths, length, seed):
    ends = np.cumsum(lengths)
    texts = np.split(np.arange(ends[-1]), ends[:-1])
    drawn, again = (measure.text_sets(BERT.inputs, (4, length), texts, 2, seed) for _ in range(2))
    starts = {int(text[0]) for text in texts}
    for one, same in zip(drawn, again, strict=True):
        rows = one["input_ids"]
        assert (rows.dtype, rows.shape) == (np.int64, (4, length))
        assert np.array_equal(rows, same["input_ids"])
        assert set(rows[:, 0].tolist()) <= starts
        assert ((np.diff(rows, axis=1) - 1) % ends[-1] == 0).all()  # the first text follows the last one
        assert one["attention_mask"].all()
        assert not one["token_type_ids"].any()


@given(st.integers(0, 50), st.integers(1, 3))
def test_two_sets_of_texts_differ_even_where_all_texts_begin_alike(seed, length):
    texts = [np.array([1, 2, 3, 4]), np.array([1, 2, 3, 5])]
    one, other = measure.text_sets(BERT.inputs, (1, length), texts, 2, seed)
    assert not np.array_equal(one["input_ids"], other["input_ids"])


class FakeBound:
    """Logits are the first token of each sequence."""

    def __init__(self, log, shape):
        self.log, self.stream = log, fake_cuda.Stream()
        self.inputs = {name: torch.zeros(shape, dtype=torch.long) for name in ("input_ids", "attention_mask")}
        self.outputs = {"logits": torch.zeros(shape[0], 1)}

    def launch(self):
        self.log.append("launch")
        self.outputs["logits"].copy_(self.inputs["input_ids"][:, :1])


@pytest.fixture
def cuda(monkeypatch):
    return fake_cuda.install(monkeypatch)


def tensors(first, shape=(2, 4)):
    return {"input_ids": torch.full(shape, first), "attention_mask": torch.ones(shape, dtype=torch.long)}


def test_a_lane_rotates_what_differs_and_copies_on_its_own_stream(cuda):
    lane = measure.DeviceLane(FakeBound(cuda, (2, 4)), [tensors(5), tensors(6), tensors(7)])
    assert lane.varying == ["input_ids"]  # the mask is the same in all sets
    assert lane.bound.inputs["attention_mask"].all()
    made = []
    for number in range(4):
        cuda.clear()
        lane.feed(number)
        lane.launch()
        assert cuda == ["in stream", "out of stream", "launch"]
        made.append(float(lane.fetch()[0, 0]))
    assert made == [5, 6, 7, 5]


def test_events_enclose_the_launch_and_not_the_copy(cuda):
    lane = measure.DeviceLane(FakeBound(cuda, (2, 4)), [tensors(5), tensors(6)])
    cuda.clear()
    assert measure.CudaTimer().latencies(lane, 2) == [2.0, 2.0]  # an event and a launch
    one = ["in stream", "out of stream", "event", "launch", "event"]
    assert cuda == [*one, *one, "synchronize"]


def test_throughput_launches_all_lanes_between_two_synchronizations(cuda):
    lanes = [SimpleNamespace(launch=lambda n=n: cuda.append(n)) for n in (1, 2)]
    assert measure.CudaTimer().wall(lanes, 2) >= 0
    assert cuda == ["device synchronize", 1, 2, 1, 2, "device synchronize"]


def test_a_split_runs_every_batch_in_the_buffers_of_its_shape(cuda):
    large, small = FakeBound(cuda, (2, 4)), FakeBound(cuda, (1, 2))
    rows = np.arange(2)
    steps = [(large, tensors(5), rows), (large, tensors(6), rows[:1]), (small, tensors(7, (1, 2)), rows[:1])]
    lane = measure.SplitLane([measure.Step(*step) for step in steps])
    cuda.clear()
    lane.feed(0)
    lane.launch()
    assert cuda.count("launch") == 3
    assert cuda.count("in stream") == 2 * 3  # copies to the GPU, and back
    assert lane.fetch()[:, 0].tolist() == [5, 5, 6, 7]  # without the copy of a row


def test_a_host_lane_runs_whole_sets():
    sets = [[{"x": np.full((2, 1), 1.0)}], [{"x": np.full((2, 1), 2.0)}, {"x": np.full((1, 1), 3.0)}]]
    lane = measure.HostLane(lambda batch: batch["x"], sets)
    made = []
    for number in range(3):
        lane.feed(number)
        lane.launch()
        made.append(lane.fetch()[:, 0].tolist())
    assert made == [[1, 1], [2, 2, 3], [1, 1]]


def test_several_lanes_run_at_once_each_in_a_thread_of_its_own():
    both = threading.Barrier(2, timeout=10)  # breaks unless two are inside
    lanes = [SimpleNamespace(launch=both.wait) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        assert measure.WallTimer(pool=pool).wall(lanes, 3) > 0
    where = []
    alone = SimpleNamespace(launch=lambda: where.append(threading.current_thread()))
    measure.WallTimer().wall([alone], 2)
    assert where == [threading.main_thread()] * 2


def test_answers_of_tokens_are_told_by_the_first_whatever_the_length():
    short, long = (np.arange(2 * length * 2, dtype=np.float32).reshape(2, length, 2) for length in (3, 5))
    lane = measure.HostLane(lambda batch: batch["x"], [[{"x": short}, {"x": long}]])
    lane.feed(0)
    lane.launch()
    assert lane.fetch().tolist() == [[0, 1], [6, 7], [0, 1], [10, 11]]
    assert measure.by_row(short[:, 0]).tolist() == [[0, 1], [6, 7]]


def test_several_answers_keep_the_order_of_the_graph():
    """As those of PyTorch, which are joined by the names of the task."""
    outputs = {"start_logits": torch.zeros(2, 5), "end_logits": torch.ones(2, 5)}
    assert measure._host_logits(outputs).tolist() == [[0, 1], [0, 1]]
