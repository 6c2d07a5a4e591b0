"""Connections that send nothing, too little or too many, at a socket; signals while a server starts."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import uvicorn

from qdqbench.quantize.deployment.server import server
from qdqbench.quantize.utils.errors import UserError

from ....support.http_client import Client, finished

ROOT = Path(__file__).parents[4]


async def answer(scope, receive, send):
    body = b'{"live":true}'
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


running_servers = {}


def running_state(port):
    return running_servers[port].server_state


@asynccontextmanager
async def listening():
    with socket.create_server(("127.0.0.1", 0)) as bound:
        quiet = {"lifespan": "off", "log_level": "critical"}
        config = uvicorn.Config(answer, http=server._Protocol, timeout_keep_alive=9, **quiet)
        running = running_servers[bound.getsockname()[1]] = uvicorn.Server(config)
        task = asyncio.create_task(running.serve(sockets=[bound]))
        try:
            yield bound.getsockname()[1]
        finally:
            running.should_exit = True
            await task


async def told_until_closed(port, data):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    told = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    return told


def test_a_connection_whose_request_does_not_come_is_closed(monkeypatch):
    monkeypatch.setattr(server, "PERIOD_S", 0.2)

    async def main():
        async with listening() as port:
            head = b"GET / HTTP/1.1\r\nhost: x\r\n"
            slow = told_until_closed(port, b""), told_until_closed(port, head)
            assert await asyncio.gather(*slow) == [b"", b""]
            # one request, then half of another
            told = await told_until_closed(port, head + b"\r\n" + head)
            assert told.count(b"HTTP/1.1 200") == 1
            client = Client(port)  # who asks in time is kept
            for _ in range(4):
                assert (await client.get("/"))[0] == 200
                await asyncio.sleep(0.1)
            await client.close()

    finished(main())


def test_a_client_that_does_not_read_is_closed_and_one_that_reads_slowly_is_not(monkeypatch):
    monkeypatch.setattr(server, "PERIOD_S", 0.2)
    large = b"x" * (4 << 20)

    async def send_large(scope, receive, send):
        headers = [(b"content-length", b"4194304")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": large})

    monkeypatch.setattr(sys.modules[__name__], "answer", send_large)

    async def get(port, pause):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 3)  # only the first is answered
        size = 0
        try:
            while part := await reader.read(1 << 20):
                size += len(part)
                await asyncio.sleep(pause)
        except ConnectionResetError:
            pass
        writer.close()
        return size

    async def main():
        async with listening() as port:
            never = await asyncio.open_connection("127.0.0.1", port)
            never[1].write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 30)
            start = time.monotonic()
            assert len(large) < await get(port, 0.02) < 2 * len(large)
            await asyncio.sleep(max(0.0, start + 1 - time.monotonic()))
            assert not running_state(port).connections
            never[1].close()

    finished(main())


def test_above_the_most_connections_an_idle_one_goes(monkeypatch):
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 2)

    async def main():
        async with listening() as port:
            idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
            await asyncio.sleep(0.05)
            client = Client(port)
            assert (await client.get("/"))[0] == 200  # as a probe of health
            assert len(running_state(port).connections) == 2
            await client.close()
            for _, writer in idle:
                writer.close()

    finished(main())


def test_what_is_no_http_is_told_in_json():
    async def main():
        async with listening() as port:
            for data in (b"\0\1\2\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01\x02\0\1\0\1\xfc\r\n\r\n"):
                told = await told_until_closed(port, data)
                assert told.startswith(b"HTTP/1.1 400")
                assert b'{"error":"this is no HTTP request that can be read, or has over' in told

    finished(main())


@pytest.mark.parametrize(("count", "status"), [(100, b"200"), (101, b"400")])
def test_a_body_of_very_many_chunks_is_refused(count, status, monkeypatch):
    monkeypatch.setattr(server, "MOST_PARTS", 100)

    async def main():
        async with listening() as port:
            head = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
            told = await told_until_closed(port, head + b"1\r\n \r\n" * count + b"0\r\n\r\n")
            assert told.startswith(b"HTTP/1.1 " + status)

    finished(main())


def test_an_address_that_cannot_be_had_is_told():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"cannot listen on .* port {port} \(Address already in use\)"):
            server._listen("127.0.0.1", port)
    with pytest.raises(UserError, match="give another --host or --port"):
        server._listen("no-such-host.invalid", 80)
    with server._listen("127.0.0.1", 0) as bound:
        assert bound.proto == socket.IPPROTO_TCP  # else asyncio leaves Nagle's delay on


def test_a_worker_loads_nothing_after_a_signal():
    """uvicorn's server handles signals before it makes the application, and goes on to make it."""
    code = (
        "import os, signal, uvicorn\n"
        "from qdqbench.quantize.deployment.server.server import WorkerApp\n"
        "from qdqbench.quantize.deployment.server.settings import Settings\n"
        "app = WorkerApp(b'no model', Settings(), (), None)\n"
        "running = uvicorn.Server(uvicorn.Config(app, factory=True))\n"
        "with running.capture_signals():\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    assert running.should_exit\n"
        "    running.config.load()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def end_by_signal(number: int, after_s: float) -> float:
    """Start a server that loads for minutes, signal its group; return the seconds until all of it ended."""
    command = [sys.executable, "-m", "tests.support.slow_server"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    started = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **pipes)
    try:
        assert started.stdout.readline() == b"starting\n"
        time.sleep(after_s)
        os.killpg(started.pid, number)
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


@pytest.mark.parametrize(("number", "after_s"), [(signal.SIGINT, 0.1), (signal.SIGTERM, 0.5)])
def test_a_signal_to_the_group_ends_a_server_that_starts(number, after_s):
    assert end_by_signal(number, after_s) < 15


@pytest.mark.long
def test_a_signal_at_any_moment_of_the_start_ends_it():
    """At fifty moments drawn from four seconds, two at a time."""
    draws = np.random.default_rng(0).uniform(0, 4, 50)
    numbers = [signal.SIGINT, signal.SIGTERM] * 25
    with ThreadPoolExecutor(2) as pool:
        taken = list(pool.map(end_by_signal, numbers, draws))
    assert max(taken) < 15, [(*each, took) for *each, took in zip(numbers, draws, taken, strict=True)]
