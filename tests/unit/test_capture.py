"""A capture of a CUDA graph, without a GPU: garbage that cannot go while it runs."""

import gc
from contextlib import contextmanager

import pytest
import torch

from qdqbench.quantize.utils.capture import capture_graph


@pytest.fixture
def capturing(monkeypatch):
    """Options of the captures that run."""
    running = []

    @contextmanager
    def capture(graph, **options):
        running.append(options)
        yield
        running.pop()

    monkeypatch.setattr(torch.cuda, "graph", capture)
    return running


class Engine:
    """An engine with a method of its own in a list, as ours are: only a collection frees it."""

    def __init__(self, ends, capturing):
        self.lanes, self.ends, self.capturing = [self.run], ends, capturing

    def run(self): ...

    def __del__(self):
        self.ends.append(bool(self.capturing))


def test_no_engine_is_freed_while_another_is_captured(capturing):
    threshold, ends = gc.get_threshold(), []
    gc.set_threshold(1, 1, 1)
    try:
        with capture_graph(object(), pool=1):
            Engine(ends, capturing)
            assert capturing == [{"pool": 1}]
            kept = [[] for _ in range(1000)]
        assert not any(ends)
        del kept
        gc.collect()
    finally:
        gc.set_threshold(*threshold)
    assert ends == [False]


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collection_of_garbage_is_as_before_also_after_an_error(capturing, enabled):
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(RuntimeError, match="memory"), capture_graph(object()):
            raise RuntimeError("memory")
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()
