"""A front with an engine in a thread, and requests to it without a socket."""

import asyncio
import json
import threading
import time
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from inspect import Signature, signature

import pytest

pytest.importorskip("httptools", reason="needs httptools: pip install 'qdqbench[serve]'")
pytest.importorskip("msgspec", reason="needs msgspec: pip install 'qdqbench[serve]'")

from qdqbench.quantize.standalone.server import engine
from qdqbench.quantize.standalone.server.front import Front
from qdqbench.quantize.standalone.server.http import Connection, Site, make_metrics
from qdqbench.quantize.standalone.server.metrics import Counts
from qdqbench.quantize.standalone.server.settings import Settings
from qdqbench.quantize.standalone.server.slots import Board, Shape, Slots, make_memory, make_pipe

from .http_client import finished


class Setup:
    """Memory, pipes and an engine in a thread for each model: all that a front needs."""

    def __init__(self, served, settings):
        self.served, self.settings, told = served, settings, served.told
        self.models, workers = [*served.models], []
        for model in self.models:
            infer = served.models[model]()
            rows, _, width = engine.warm_up(infer, told, max(settings.timeout, 5.0), settings.batch_tokens)
            workers.append((infer, model, rows, width))
        self.metrics = make_metrics(served, settings, self.models)
        self.board = Board(make_memory("board"), 1, len(self.models), self.metrics.size)
        width = max(each[-1] for each in workers)
        shape = Shape(1, len(self.models), settings.queue, told["max_length"], width)
        self.slots = Slots(make_memory("slots"), shape)
        self.engines, self.fronts = [make_pipe() for _ in workers], [make_pipe()]
        writers = [writer for _, writer in self.fronts]
        for number, (infer, model, rows, _) in enumerate(workers):
            counts = Counts(self.metrics, self.board.metrics[1 + number])
            given = (infer, told, model, number, rows, settings.batch_tokens, self.slots, self.board, counts)
            worker = engine.Worker(*given, self.engines[number][0], writers)
            self.board.alive[number] = time.monotonic()
            threading.Thread(target=self._work, args=(worker,), daemon=True).start()

    def _work(self, worker):
        try:
            worker.work()
        except Exception:
            self.board.alive[worker.number] = 0.0

    def front(self, **options):
        """A front."""
        counts = Counts(self.metrics, self.board.metrics[0])
        pipes = self.fronts[0][0], [writer for _, writer in self.engines]
        given = (self.served, self.settings, 0, self.models, self.slots, self.board, counts)
        return Front(*given, *pipes, **options)

    def close(self):
        """End the engines."""
        for _, writer in self.engines:
            writer.close()


@contextmanager
def opened(served, settings=None, hosts=(), **options):
    """A site whose engine works."""
    setup = Setup(served, settings or Settings())
    try:
        site = Site(setup.front(**options), setup.metrics, hosts)
        site.setup = setup
        yield site
    finally:
        setup.close()


class Transport(asyncio.Transport):
    """A connection whose client reads at once."""

    def __init__(self):
        super().__init__()
        self.written, self.closing, self.unsent = bytearray(), False, 0

    def write(self, data):
        self.written += data

    def is_closing(self):
        return self.closing

    def close(self):
        self.closing = True

    abort = write_eof = close

    def get_write_buffer_size(self):
        return self.unsent


async def call(site, method, path, body=b"", headers=None, *, chunks=None):
    """Status, headers and body of an answer, or None where there was none."""
    given = {"host": "localhost", "content-type": "application/json", **(headers or {})}
    if chunks is None and body and not {"content-length", "transfer-encoding"} & {*given}:
        given["content-length"] = str(len(body))
    elif chunks is not None:
        given["transfer-encoding"] = "chunked"
    head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in given.items())
    parts = (
        [head.encode("utf-8", "surrogateescape") + b"\r\n" + body]
        if chunks is None
        else [head.encode() + b"\r\n"]
    )
    for chunk in chunks or ():
        parts.append(chunk if isinstance(chunk, float) else b"%x\r\n%b\r\n" % (len(chunk), chunk))
    parts += [b"0\r\n\r\n"] if chunks else []
    connection, transport = Connection(site), Transport()
    connection.connection_made(transport)
    for part in parts:
        if isinstance(part, float):
            await asyncio.sleep(part)
        elif not transport.closing:
            connection.data_received(part)
    end = time.monotonic() + 20
    while (connection.busy or chunks) and not transport.written and time.monotonic() < end:
        await asyncio.sleep(0.001)
    connection.connection_lost(None)
    if not transport.written:
        return None
    head, _, content = bytes(transport.written).partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    answered = dict(line.split(": ", 1) for line in lines)
    length = 0 if method == "HEAD" else int(answered["content-length"])
    assert len(content) >= length
    content = content[:length]  # what came behind it may have an answer too
    return int(first.split()[1]), answered, content


async def called(site, method, path, body=b"", headers=None, **more):
    """Status, headers and value of an answer."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, headers, made = await call(site, method, path, body, headers, **more)
    value = json.loads(made) if headers.get("content-type") == "application/json" else made.decode()
    return status, headers, value


@asynccontextmanager
async def working(served, **options):
    """A site in this loop."""
    with opened(served, **options) as site:
        site.front.start(asyncio.get_running_loop())
        site.look()
        yield site


def within(work, served, **options):
    """The result of a coroutine of a site that works."""

    async def main():
        async with working(served, **options) as site:
            return await work(site)

    return finished(main())


def as_test(context):
    """Make a test of a coroutine that gets what a context has, and fixtures."""

    def make(work):
        def test(**fixtures):
            async def main():
                async with context() as given:
                    await work(given, **fixtures)

            finished(main())

        test.__signature__ = Signature([*signature(work).parameters.values()][1:])
        return test

    return make


def on_site(served, **options):
    """Make a test of a coroutine of a site that works, and of fixtures."""
    return as_test(partial(working, served, **options))
