"""A client over one kept connection."""

import asyncio
import contextlib
import json
from concurrent.futures import ThreadPoolExecutor


def finished(coroutine):
    """What a coroutine returns; in a thread, as a browser's driver may have a loop running in this one."""
    with ThreadPoolExecutor(1) as other:
        return other.submit(asyncio.run, coroutine).result()


def request_of(path, value):
    """The bytes of a POST of JSON."""
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


class Client:
    """One connection to a loopback server."""

    def __init__(self, port):
        self.port, self._streams = port, None

    async def post(self, path, value):
        """Status, headers and JSON of an answer; raises OSError or EOFError where there is none."""
        return await self.send(request_of(path, value))

    async def get(self, path):
        return await self.send(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())

    async def send(self, data):
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self._streams
        try:
            writer.write(data)
            await writer.drain()
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in head[1:] if line)}
            body = await reader.readexactly(int(headers["content-length"]))
        except (OSError, EOFError):
            await self.close()
            raise
        if headers.get("connection") == "close":
            await self.close()
        kind = headers.get("content-type", "")
        return int(head[0].split()[1]), headers, json.loads(body) if "json" in kind else body.decode()

    async def close(self):
        if self._streams is not None:
            writer, self._streams = self._streams[1], None
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
