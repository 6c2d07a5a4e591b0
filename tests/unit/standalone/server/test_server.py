"""Connections that send nothing, too little or too many, at a socket; signals while a server starts."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import numpy as np
import pytest

from qdqbench.quantize.standalone.server import engine, http, server
from qdqbench.quantize.standalone.server.engine import Worker
from qdqbench.quantize.standalone.server.server import Failed
from qdqbench.quantize.standalone.server.settings import Settings
from qdqbench.quantize.standalone.server.slots import make_memory

from ....support.fake_served import fake_served
from ....support.http_client import Client
from ....support.site import as_test, working

ROOT = Path(__file__).parents[4]
LARGE = b"x" * (8 << 20)


@asynccontextmanager
async def listening(period_s=http.PERIOD_S):
    pages = {"/": (b'{"live":true}', http.JSON), "/large": (LARGE, "text/plain")}
    with patch.object(http, "PERIOD_S", period_s), socket.create_server(("127.0.0.1", 0)) as bound:
        async with working(replace(fake_served(), pages=pages)) as site:
            site.port = bound.getsockname()[1]
            async with await site.front.loop.create_server(lambda: http.Connection(site), sock=bound):
                yield site


async def told_until_closed(port, data):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    told = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    return told


@as_test(partial(listening, 0.2))
async def test_a_connection_whose_request_does_not_come_is_closed(site):
    head = b"GET / HTTP/1.1\r\nhost: x\r\n"
    slow = told_until_closed(site.port, b""), told_until_closed(site.port, head)
    assert await asyncio.gather(*slow) == [b"", b""]
    # one request, then half of another
    told = await told_until_closed(site.port, head + b"\r\n" + head)
    assert told.count(b"HTTP/1.1 200") == 1
    client = Client(site.port)  # who asks in time is kept
    for _ in range(4):
        assert (await client.get("/"))[0] == 200
        await asyncio.sleep(0.1)
    await client.close()


@as_test(partial(listening, 0.8))
async def test_a_client_that_does_not_read_is_closed_and_one_that_reads_slowly_is_not(site):
    never = await asyncio.open_connection("127.0.0.1", site.port)
    never[1].get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    never[1].write(b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n" * 30)
    start, size = time.monotonic(), 0
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port, limit=1 << 16)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    writer.write(b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n" * 3)  # only the first is answered
    with suppress(ConnectionResetError):
        while part := await reader.read(1 << 20):
            size += len(part)
            await asyncio.sleep(0.02)
    writer.close()
    assert len(LARGE) < size < 2 * len(LARGE)
    await asyncio.sleep(max(0.0, start + 2.5 - time.monotonic()))
    assert not site.connections
    never[1].close()


@as_test(listening)
async def test_another_protocol_that_is_offered_is_not_taken(site):
    head = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n\r\n"
    assert (await told_until_closed(site.port, head)).startswith(b"HTTP/1.1 200 OK")


@as_test(listening)
async def test_above_the_most_connections_an_idle_one_goes(site, monkeypatch):
    monkeypatch.setattr(http, "MOST_CONNECTIONS", 2)
    idle = [await asyncio.open_connection("127.0.0.1", site.port) for _ in range(5)]
    await asyncio.sleep(0.05)
    client = Client(site.port)
    assert (await client.get("/"))[0] == 200  # as a probe of health
    assert len(site.connections) == 2
    await client.close()
    for _, writer in idle:
        writer.close()


@as_test(listening)
async def test_what_is_no_http_is_told_in_json(site):
    for data in (b"\0\1\2\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01\x02\0\1\0\1\xfc\r\n\r\n"):
        told = await told_until_closed(site.port, data)
        assert told.startswith(b"HTTP/1.1 400")
        assert b'{"error":"this is no HTTP request that can be read, or has over' in told


@pytest.mark.parametrize(("count", "status"), [(100, b"200"), (101, b"400")])
@as_test(listening)
async def test_a_body_of_very_many_chunks_is_refused(site, count, status, monkeypatch):
    monkeypatch.setattr(http, "MOST_PARTS", 100)
    head = b"POST /v1/predict HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    head += b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    sent = b"".join(b"1\r\n%c\r\n" % sign for sign in b'{"texts": ["1"]}'.rjust(count))
    told = await told_until_closed(site.port, head + sent + b"0\r\n\r\n")
    assert told.startswith(b"HTTP/1.1 " + status)


def test_an_address_that_cannot_be_had_is_told():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Failed, match=rf"cannot listen on .* port {port} \(Address already in use\)"):
            server._listen("127.0.0.1", port)
    with pytest.raises(Failed, match="give another --host or --port"):
        server._listen("no-such-host.invalid", 80)


def test_clients_are_dealt_in_turn_to_the_fronts_that_work():
    supervisor = object.__new__(server.Supervisor)
    supervisor.shared, supervisor.board = SimpleNamespace(fronts=3), SimpleNamespace(beat=[1.0, 0.0, 1.0])
    supervisor.listener = server._listen("127.0.0.1", 0)
    supervisor.doors, supervisor.children = [socket.socketpair() for _ in range(3)], []
    dealer = threading.Thread(target=supervisor.deal)
    dealer.start()
    clients = [socket.create_connection(supervisor.listener.getsockname()) for _ in range(6)]
    dealt = {}
    for place in (0, 2):
        supervisor.doors[place][1].settimeout(10)
        files = [socket.recv_fds(supervisor.doors[place][1], 1, 1)[1][0] for _ in range(3)]
        with ExitStack() as stack:
            dealt[place] = [stack.enter_context(socket.socket(fileno=each)).getpeername() for each in files]
    assert [dealt[place] for place in (0, 2)] == [
        [each.getsockname() for each in clients[n::2]] for n in (0, 1)
    ]
    supervisor.shared.settings = Settings()
    supervisor.end()
    dealer.join(10)
    assert not dealer.is_alive()
    for each in (*clients, *chain.from_iterable(supervisor.doors)):
        each.close()


def test_a_lack_of_memory_for_the_queues_is_told_at_the_start(monkeypatch):
    monkeypatch.setattr("os.posix_fallocate", Mock(side_effect=OSError(28, "No space left on device")))
    shared = Mock(fronts=2, models=["engine"], settings=Settings(), served=fake_served())
    shared.slots = make_memory("t")
    told = r"no memory for the rows of the queues \(No space left on device\); give a"
    with pytest.raises(Failed, match=told):
        server.Supervisor.open_slots(Mock(shared=shared, children=[Mock(width=2)]))


def end_by_signal(number: int, after_s: float) -> float:
    """Start a server that loads for minutes, signal its group; return the seconds until all of it ended.

    SIGKILL is for the supervisor alone.
    """
    command = [sys.executable, "-m", "tests.support.slow_server"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    started = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **pipes)
    try:
        assert started.stdout.readline() == b"starting\n"
        time.sleep(after_s)
        (os.kill if number == signal.SIGKILL else os.killpg)(started.pid, number)
        clock = time.monotonic()
        started.wait(20)
        while (left := time.monotonic() - clock) < 20:
            try:
                os.killpg(started.pid, 0)
            except ProcessLookupError:
                return left
            time.sleep(0.02)
        raise AssertionError("a worker is left")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.stdout.close()
        started.wait()


@pytest.mark.parametrize(
    ("number", "after_s"), [(signal.SIGINT, 0.1), (signal.SIGTERM, 0.5), (signal.SIGKILL, 4.0)]
)
def test_a_signal_ends_all_processes_of_a_server_that_starts(number, after_s):
    assert end_by_signal(number, after_s) < 15


@pytest.mark.long
def test_a_signal_at_any_moment_of_the_start_ends_it():
    """At fifty moments drawn from four seconds, two at a time."""
    draws = np.random.default_rng(0).uniform(0, 4, 50)
    numbers = [signal.SIGINT, signal.SIGTERM] * 25
    with ThreadPoolExecutor(2) as pool:
        taken = list(pool.map(end_by_signal, numbers, draws))
    assert max(taken) < 15, [(*each, took) for *each, took in zip(numbers, draws, taken, strict=True)]


def test_an_engine_keeps_a_core_only_where_each_process_has_one():
    models = ("engine", "engine", "fp32")
    assert server.keep_cores(range(16), 13, models) == range(2)
    assert list(server.keep_cores(range(16), 14, models)) == []


@pytest.mark.parametrize(("waiting", "flying", "alone"), [(0, 0, True), (1, 0, False), (0, 1, False)])
def test_a_batch_is_alone_where_none_flies_or_waits(waiting, flying, alone, monkeypatch):
    launched, tokens = [], np.zeros(3, np.int32)
    monkeypatch.setattr(engine, "launch", lambda *_, alone: launched.append(alone))
    slots = Mock(lengths=np.array([3]), flat_ids=tokens, flat_types=tokens, since=np.zeros(1))
    slots.places.return_value = slice(3)
    queued = {"waiting": [0] * waiting, "flying": [0] * flying, "sorted": []}
    worker = Mock(slots=slots, number=0, packed=False, told={"max_length": 64}, **queued)
    worker.take.return_value, worker.board.busy = np.zeros(1, engine.RECORD), [0.0]
    Worker.begin(worker)
    assert launched == [alone]


@pytest.mark.parametrize(("awake_s", "sleeps"), [(60.0, 0), (0.0, None)])
def test_an_engine_with_a_core_of_its_own_sleeps_only_after_a_while(awake_s, sleeps):
    assert Worker.patience(SimpleNamespace(ended=time.monotonic(), awake_s=awake_s)) == sleeps
