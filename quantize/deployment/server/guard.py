"""Checks before every endpoint: hosts, sizes and times of requests; headers of answers; counting."""

import asyncio
import functools
import logging
import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, multiprocess
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qdqbench.quantize.deployment.server.settings import Settings

LOG = logging.getLogger("qdqbench.serve")
SHARED = "PROMETHEUS_MULTIPROC_DIR"  # folder of values; read when prometheus_client is imported
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
MOST_POSTS = 256  # at once in a worker; with the largest body this bounds memory
WITH_BODY = ("POST", "PUT", "PATCH")
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
CLOSE = {"connection": "close"}
FAILED = HTTPException(500, "the server failed at this request; its log says why")  # without internals


class Metrics:
    """The metrics of one process; label values are our own names, never what a client sent."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        histogram = functools.partial(Histogram, registry=registry)
        gauge = functools.partial(Gauge, registry=registry, multiprocess_mode="livesum")
        counter = functools.partial(Counter, registry=registry)
        self.requests = counter("qdqbench_requests", "Answered requests.", ["endpoint", "status"])
        self.seconds = histogram(
            "qdqbench_request_seconds", "Seconds to an answer.", ["endpoint"], buckets=SECONDS
        )
        self.waited = histogram(
            "qdqbench_queue_seconds", "Seconds that a row waits.", ["model"], buckets=SECONDS
        )
        self.ran = histogram("qdqbench_engine_seconds", "Seconds of a batch.", ["model"], buckets=SECONDS)
        self.rows = histogram("qdqbench_batch_rows", "Rows of a batch.", ["model"], buckets=ROWS)
        self.tokens = counter("qdqbench_tokens", "Tokens of batches.", ["model", "kind"])
        self.replaced = counter("qdqbench_workers_lost", "Worker processes that ended or hung.")
        self.queued = gauge("qdqbench_queue_rows", "Rows from arrival to answer.")
        self.workers = gauge("qdqbench_workers", "Worker processes that answer.")

    def text(self) -> bytes:
        """Return the values of all worker processes in Prometheus' text format."""
        if SHARED not in os.environ:
            return generate_latest(self._registry)
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)


@dataclass
class Guard:
    """ASGI middleware: the application gets requests whose body is complete, and refuses by HTTPException.

    `hosts` are names that clients may call the server by, empty: any. A page elsewhere whose name its owner
    points at this machine then cannot read answers.
    """

    app: ASGIApp
    settings: Settings
    metrics: Metrics
    hosts: Collection[str]
    paths: Collection[str]  # that metrics name; the others are "other"
    refuse_if_full: Callable[[], None]  # raises where a request cannot be taken now
    posts: int = 0  # requests with a body that are being answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status = time.perf_counter(), 0

        async def send_counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                extra = [(key.encode(), value.encode()) for key, value in HEADERS.items()]
                message["headers"] = [*message.get("headers", ()), *extra]
            await send(message)

        counted = scope["method"] in WITH_BODY  # health and metrics are answered under any load
        self.posts += counted
        try:
            self._check_head(scope["method"], Headers(scope=scope))
            if not counted:
                await self.app(scope, receive, send_counted)
            elif (body := await self._read_body(receive)) is not None:
                self.refuse_if_full()  # before it is parsed: under overload a refusal must cost little
                await self.app(scope, _replay(body, receive), send_counted)
        except HTTPException as error:
            await refuse(error)(scope, receive, send_counted)
        except Exception as error:
            LOG.error("unexpected failure of a request, %s: %.300s", type(error).__name__, error)
            if not status:
                await refuse(FAILED)(scope, receive, send_counted)
        finally:
            self.posts -= counted
            name = scope["path"] if scope["path"] in self.paths else "other"
            self.metrics.requests.labels(name, str(status)).inc()
            self.metrics.seconds.labels(name).observe(time.perf_counter() - start)

    def full(self) -> bool:
        """Return whether the next request with a body is refused."""
        return self.posts >= MOST_POSTS

    def _check_head(self, method: str, headers: Headers) -> None:
        if self.hosts and _host_name(headers.get("host", "")) not in self.hosts:
            raise HTTPException(
                421, f"this server answers to {', '.join(sorted(self.hosts))} only; see --host"
            )
        if "content-length" in headers and "transfer-encoding" in headers:  # RFC 9112, 6.1: smuggling
            raise HTTPException(400, "give content-length or transfer-encoding, not both", CLOSE)
        if method not in WITH_BODY:
            return
        if self.posts > MOST_POSTS:
            raise HTTPException(
                503, "too many requests at once; try again later", CLOSE | {"retry-after": "1"}
            )
        size = headers.get("content-length", "")
        if size.isdecimal():
            self._check_size(int(size[:20]))
        if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise HTTPException(
                415, "the body must be JSON; send it with content-type: application/json", CLOSE
            )

    def _check_size(self, size: int) -> None:
        if size > (most := self.settings.body_bytes):
            raise HTTPException(
                413, f"the body has more than {most} bytes; send fewer or shorter texts", CLOSE
            )

    async def _read_body(self, receive: Receive) -> bytes | None:
        """Return the whole body; None where the client has gone."""
        body, end = bytearray(), time.monotonic() + self.settings.timeout
        while True:
            try:
                message = await asyncio.wait_for(receive(), max(0.0, end - time.monotonic()))
            except asyncio.TimeoutError:
                late = f"the body did not come within {self.settings.timeout:g} s"
                raise HTTPException(408, late, CLOSE) from None
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            self._check_size(len(body))
            if not message.get("more_body", False):
                return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives a body that was read before."""
    left = [body]

    async def replay() -> Message:
        return {"type": "http.request", "body": left.pop(), "more_body": False} if left else await receive()

    return replay


def refuse(error: HTTPException) -> JSONResponse:
    """Return the answer to a refused request."""
    return JSONResponse({"error": str(error.detail)}, error.status_code, error.headers)


def _host_name(host: str) -> str:
    """Return a Host header without its port."""
    name, colon, port = host.rpartition(":")
    return (name if colon and (port.isdecimal() or not port) else host).lower()
