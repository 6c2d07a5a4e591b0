"""Several inferences at once share the threads and answer as one does; the build finds how many pay."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from qdqbench.quantize.engine import cpu_runtimes
from qdqbench.quantize.engine.cpu_runtimes import choose_streams, compile_model

from ....support.tiny_bert import exported, padded_batch


@pytest.mark.parametrize("threads", [2, 4])
@pytest.mark.parametrize("backend", ["openvino", "onnxruntime"])
def test_streams_answer_at_once_as_one_does(backend, threads, tiny_bert):
    pytest.importorskip(backend)
    data = exported(tiny_bert, compute="fp32").SerializeToString()
    batches = [padded_batch(seed=seed) for seed in range(2)]
    single = compile_model(backend, data, blob=False, compute="fp32", threads=1)
    expected = [single.run(batch)["logits"] for batch in batches]
    model = compile_model(backend, data, blob=False, compute="fp32", threads=threads, streams=2)
    assert len(model.lanes) == 2
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda run, batch: run(batch)["logits"], model.lanes, batches))
    for answer, wanted in zip(made, expected, strict=True):
        assert np.allclose(answer, wanted, atol=1e-4)


@pytest.mark.parametrize(("seconds", "best"), [({1: 4, 2: 4, 4: 9}, 2), ({1: 4, 2: 7.9, 4: 16}, 1)])
def test_streams_are_as_many_as_answer_most_and_one_where_more_win_little(seconds, best, monkeypatch):
    """A batch takes so many seconds, of a clock of the test's own, in so many streams."""
    clock, turns = [0.0], threading.Lock()
    monkeypatch.setattr(cpu_runtimes, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    class Lane:
        """Refuses to run twice at once, as OpenVINO's requests do."""

        def __init__(self, count):
            self.count, self.lock = count, threading.Lock()

        def __call__(self, feeds):
            assert self.lock.acquire(blocking=False)
            time.sleep(0.001)
            with turns:
                clock[0] += seconds[self.count] / self.count
            self.lock.release()

    def opened(count):
        lanes = [Lane(count) for _ in range(count)]
        return SimpleNamespace(inputs={}, run=lanes[0], lanes=lanes)

    assert choose_streams(opened, (32, 16), 4) == best
