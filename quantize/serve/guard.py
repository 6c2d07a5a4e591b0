"""What stands before every endpoint: hosts, sizes and times of requests, headers of answers, counting."""

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qdqbench.quantize.serve.metrics import Metrics
from qdqbench.quantize.serve.served import Limits

MOST_REQUESTS = 256  # at once; with the largest body this bounds memory
WITH_BODY = ("POST", "PUT", "PATCH")
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
# pages load nothing from elsewhere, run no inline script, and nobody frames them
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class Refused(Exception):
    """A request that is answered with an error status and a sentence."""

    def __init__(self, status: int, why: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(why)
        self.status, self.headers = status, dict(headers or {})


class Guard:
    """ASGI middleware.

    Args:
        app: what is guarded; it sees requests whose body is whole, and raises Refused.
        hosts: names that clients may call the server by; none: any. A page elsewhere whose name its owner
            points at this machine cannot read answers then.
        label: name of an endpoint in metrics, by its path.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        limits: Limits,
        metrics: Metrics,
        hosts: Iterable[str],
        label: Callable[[str], str],
    ) -> None:
        self._app, self._limits, self._metrics = app, limits, metrics
        self._hosts, self._label, self._active = {*hosts}, label, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        start, status = time.perf_counter(), 0

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *_encoded(HEADERS)]
            await send(message)

        self._active += 1
        try:
            await self._answer(scope, receive, sent)
        except Refused as error:
            await refusal(None, error)(scope, receive, sent)
        except Exception as error:
            told = " ".join(str(error).split())[:300]
            sys.stderr.write(f"qdqbench: unexpected failure of a request, {type(error).__name__}: {told}\n")
            if not status:
                await failure(None, error)(scope, receive, sent)
        finally:
            self._active -= 1
            name = self._label(scope["path"])
            self._metrics.requests.labels(name, str(status)).inc()
            self._metrics.seconds.labels(name).observe(time.perf_counter() - start)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
        if self._hosts and _host(headers.get("host", "")) not in self._hosts:
            raise Refused(421, f"this server answers to {', '.join(sorted(self._hosts))} only; see --host")
        if scope["method"] not in WITH_BODY:  # health and metrics are told under any load
            await self._app(scope, receive, send)
            return
        if self._active > MOST_REQUESTS:
            raise Refused(503, "too many requests at once; come again later", {"retry-after": "1"})
        if (body := await self._body(headers, receive)) is None:
            return  # the client has gone
        given = False

        async def whole() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, whole, send)

    async def _body(self, headers: Mapping[str, str], receive: Receive) -> bytes | None:
        most, close = self._limits.body_bytes, {"connection": "close"}
        large = Refused(413, f"the body has more than {most} bytes; send fewer or shorter texts", close)
        said = headers.get("content-length", "")
        if said.isdecimal() and int(said[:20]) > most:
            raise large
        body, end = bytearray(), time.monotonic() + self._limits.timeout_s
        while True:
            try:
                message = await asyncio.wait_for(receive(), max(0.0, end - time.monotonic()))
            except asyncio.TimeoutError:
                raise Refused(
                    408, f"the body did not come within {self._limits.timeout_s:g} s", close
                ) from None
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > most:
                raise large
            if not message.get("more_body", False):
                return bytes(body)


def json_bytes(value: Any) -> bytes:
    """Strict JSON in UTF-8."""
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()


def refusal(request: Any, error: Exception) -> Response:
    """The answer to a refused request, as Starlette asks for it."""
    assert isinstance(error, Refused)
    body = json_bytes({"error": str(error)})
    return Response(body, error.status, error.headers, "application/json")


def failure(request: Any, error: Exception) -> Response:
    """The answer to a request that the server failed at, without what is inside."""
    return refusal(request, Refused(500, "the server failed at this request; its log says why"))


def _encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(key.encode("latin-1"), value.encode("latin-1")) for key, value in headers.items()]


def _host(header: str) -> str:
    """A Host header without its port."""
    name, colon, port = header.rpartition(":")
    return (name if colon and (port.isdecimal() or not port) else header).lower()
