"""Connections that send nothing, too little or too many, at a socket."""

import asyncio
import socket
from contextlib import asynccontextmanager

import pytest
import uvicorn

from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.serve import server
from qdqbench.quantize.serve.server import Settings

from ...support.http_client import Client, finished


async def answer(scope, receive, send):
    body = b'{"live":true}'
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def listening():
    with socket.create_server(("127.0.0.1", 0)) as bound:
        config = uvicorn.Config(
            answer, http=server._Protocol, lifespan="off", log_level="critical", timeout_keep_alive=1
        )
        running = uvicorn.Server(config)
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
    monkeypatch.setattr(server, "HEAD_S", 0.2)

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


def test_there_are_no_more_connections_than_can_be_served(monkeypatch):
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 2)

    async def main():
        async with listening() as port:
            clients = [Client(port) for _ in range(3)]
            seen = []
            for client in clients:
                try:
                    seen.append((await client.get("/"))[0])
                except (OSError, EOFError):
                    seen.append(None)
            assert seen == [200, 200, None]
            for client in clients:
                await client.close()

    finished(main())


def test_what_is_no_http_is_told_in_json():
    async def main():
        async with listening() as port:
            for data in (b"\0\1\2\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01\x02\0\1\0\1\xfc\r\n\r\n"):
                told = await told_until_closed(port, data)
                assert told.startswith(b"HTTP/1.1 400")
                assert told.endswith(b'{"error":"this is no HTTP request that can be read"}')

    finished(main())


def test_loopback_is_told_from_other_addresses():
    there = {"127.0.0.1": True, "localhost": True, "::1": True, "127.9.9.9": True}
    there |= {"0.0.0.0": False, "::": False, "10.0.0.1": False, "example.org": False}
    assert {host: Settings(host=host).loopback for host in there} == there


def test_an_address_that_cannot_be_had_is_told():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            UserError, match=rf"cannot listen on 127\.0\.0\.1 port {port} \(Address already in use\)"
        ):
            server._bound("127.0.0.1", port)
    with pytest.raises(UserError, match="give another --host or --port"):
        server._bound("no-such-host.invalid", 80)
    with server._bound("127.0.0.1", 0) as bound:
        assert bound.proto == socket.IPPROTO_TCP  # else asyncio leaves Nagle's delay on
