"""The engine of backend cuda in a bench: fed with packed tokens as the unpadded encoder is."""

from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import onnx
import pytest

from qdqbench.eval.bench import gpu, measure
from qdqbench.eval.bench.gpu import PackedKernels
from qdqbench.eval.bench.systems import Config, Preparation, Work
from qdqbench.eval.bench.target import BatchedSplit
from qdqbench.quantize.engine.cuda.interpret import interpret
from qdqbench.quantize.engine.cuda.match import match_graph
from qdqbench.quantize.engine.cuda.pack import pack
from qdqbench.quantize.engine.cuda.tokens import MOST_TOKENS
from qdqbench.quantize.tasks.kinds.kind import join_outputs
from qdqbench.quantize.utils.errors import UserError

from ...support.cuda_graphs import HEADS, batch_for, write_once
from ...support.fake_bench import PLAN
from ...support.interpreted import Interpreted, use_host


@pytest.fixture(params=["bert", "roberta", "questions", "mean"])
def engine(request, made_once):
    """Answers of rows and of tokens; positions that count from padding on."""
    case = [] if request.param in HEADS else [f"{request.param}-int8-linears"]
    graph = onnx.load(write_once(made_once, request.param, *case))
    return graph, Interpreted(*pack(match_graph(graph)))


class Timer:
    """Sees launches and the size of each: two are the fastest."""

    def __init__(self):
        self.seen = []

    def latencies(self, lane, count):
        lane.launch()
        self.seen.append(len(lane.steps))
        return [float(abs(len(lane.steps) - 2))] * count


def lanes_of(engine, batches, config, monkeypatch, timer=None):
    use_host(monkeypatch)
    here = Preparation(SimpleNamespace(), PLAN, config, Work(list), ExitStack())
    here.__dict__["batches"] = batches
    return gpu._packed_lanes(here, PackedKernels(engine), timer)


def answers_of(engine, batch):
    found = interpret(engine.plan, engine.arrays, batch)
    return measure.by_row(join_outputs(found, found))


def test_each_stream_has_buffers_of_its_own_and_answers_as_padded_rows_do(engine, monkeypatch):
    graph, kernels = engine
    batches = [batch_for(graph, (11,) * 3, seed) for seed in range(2)]
    lanes, detail = lanes_of(kernels, batches, Config(3, 11, None), monkeypatch)
    assert detail == "packed tokens, 64 tokens a launch, CUDA graph"
    assert len(lanes) == len({id(lane.bound) for lane in lanes}) == 2
    for lane in lanes:
        for number, batch in enumerate(batches):
            lane.feed(number)
            lane.launch()
            np.testing.assert_allclose(lane.fetch(), answers_of(kernels, batch), atol=1e-5)


def test_a_split_is_packed_into_launches_of_the_fastest_size_and_answers_in_order(engine, monkeypatch):
    graph, kernels = engine
    monkeypatch.setattr(gpu.peers, "LAUNCH_TOKENS", (40, 64, 128))
    batches = [batch_for(graph, lengths) for lengths in ((9, 4, 16), (30, 2), (1, 7, 7, 3, 3))]
    counts = [3, 2, 4]  # the last row of the last batch is a copy
    split = BatchedSplit("sst2", 8, batches, counts, 9, 79, bucketed=True)
    timer = Timer()
    (lane,), detail = lanes_of(kernels, batches, Config(8, None, split), monkeypatch, timer)
    assert timer.seen == [2, 1]
    assert detail == "packed tokens, 2 launches of 64 tokens, CUDA graph, the fastest size"
    lane.launch()
    wanted = [answers_of(kernels, batch)[:count] for batch, count in zip(batches, counts, strict=True)]
    np.testing.assert_allclose(lane.fetch(), np.concatenate(wanted), atol=1e-5)


def test_more_tokens_than_an_engine_takes_are_refused(engine):
    with pytest.raises(UserError, match=f"takes {MOST_TOKENS} tokens at once, and a launch has 65600"):
        PackedKernels(engine[1]).bind(SimpleNamespace(tokens=65600), None)
