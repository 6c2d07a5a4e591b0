"""A client over one kept connection, and a call of an ASGI application without any."""

import asyncio
import contextlib
import json
from concurrent.futures import ThreadPoolExecutor


def finished(coroutine):
    """What a coroutine returns; in a thread, as a browser's driver may have a loop running in this one."""
    with ThreadPoolExecutor(1) as other:
        return other.submit(asyncio.run, coroutine).result()


class Client:
    """One connection to a loopback server."""

    def __init__(self, port):
        self.port, self._streams = port, None

    async def post(self, path, value):
        """Status, headers and JSON of an answer; raises OSError or EOFError where there is none."""
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        return await self.send(
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n".encode()
            + body
        )

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


async def call(app, method, path, body=b"", headers=None, *, chunks=None):
    """Status, headers and body of an ASGI application's answer, or None where it gave none."""
    given = {"host": "localhost", "content-type": "application/json", **(headers or {})}
    parts = [body] if chunks is None else list(chunks)
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode("utf-8", "replace"),
        "root_path": "",
        "query_string": b"",
        "headers": [(k.lower().encode("latin-1"), v.encode("latin-1")) for k, v in given.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "state": {},
    }
    sent = []

    async def receive():
        if not parts:
            return {"type": "http.disconnect"}
        part = parts.pop(0)
        if isinstance(part, float):
            await asyncio.sleep(part)
            part = b""
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    async def send(message):
        sent.append(message)

    await app(scope, receive, send)
    if not sent:
        return None
    answered = {k.decode(): v.decode() for k, v in sent[0]["headers"]}
    return sent[0]["status"], answered, b"".join(each.get("body", b"") for each in sent[1:])
