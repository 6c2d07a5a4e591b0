"""torch.cuda on a CPU: buffers are the host's, streams and graphs only write down what was asked."""

from contextlib import contextmanager

import torch


class Stream:
    log: list

    def synchronize(self):
        self.log.append("synchronize")


class Graph:
    log: list

    def replay(self):
        self.log.append("replay")


class Event:
    """Time is the number of things that were done before it."""

    log: list

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, stream):
        self.time = len(self.log)
        self.log.append("event")

    def elapsed_time(self, other):
        return float(other.time - self.time)


@contextmanager
def refuse(*_, **__):
    """Capture nothing."""
    yield
    raise RuntimeError("operation not permitted when stream is capturing")


def install(monkeypatch):
    """Put it into torch; return what is asked of it."""
    log = []
    Stream.log = Graph.log = Event.log = log

    @contextmanager
    def in_stream(stream):
        assert isinstance(stream, Stream)
        log.append("in stream")
        yield
        log.append("out of stream")

    @contextmanager
    def capture(graph, *, stream):
        log.append("capture")
        yield

    fakes = {"Stream": Stream, "Event": Event, "CUDAGraph": Graph, "stream": in_stream, "graph": capture}
    for name, fake in (fakes | {"synchronize": lambda: log.append("device synchronize")}).items():
        monkeypatch.setattr(torch.cuda, name, fake)
    for name in ("cuda", "pin_memory"):
        monkeypatch.setattr(torch.Tensor, name, lambda self: self)
    for name in ("zeros", "ones"):
        real = getattr(torch, name)
        host = lambda *size, real=real, **more: real(*size, **more | {"device": "cpu"})  # noqa: E731
        monkeypatch.setattr(torch, name, host)
    return log
