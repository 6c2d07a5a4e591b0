"""Connections of a front: HTTP/1.1 by httptools, one request after the other, and limits on clients."""

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import httptools

from .front import FAILED, Asked, Front, log
from .interfaces import Interfaces, Refusal, encode
from .metrics import STATUSES, Metrics
from .settings import Served, Settings

PERIOD_S = 10.0  # after one, but at most two of these a connection without progress is closed
LEAST_BYTES = 16 << 10  # that a client must read in this time
MOST_CONNECTIONS, BACKLOG = 1000, 4096  # of a front; of all
MOST_POSTS = 256  # at once in a front; with the largest body this bounds memory
MOST_HEAD_BYTES, MOST_PARTS = 16 << 10, 10_000  # of a head; of a body, each of which takes time
LINGER_S = 2.0  # from a refusal of what is still being sent to the end of the connection
WITH_BODY = ("POST", "PUT", "PATCH")
JSON = "application/json"
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
CLOSE = {"connection": "close"}
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
PATHS = ("/v1/model", "/v1/models", "/info", "/health", "/health/live", "/health/ready", "/metrics")


def make_metrics(served: Served, settings: Settings, models: Sequence[str]) -> Metrics:
    """Return where the numbers of a server stand; endpoints are the paths of the run."""
    paths = dict.fromkeys((*Interfaces(served, settings).forms, *PATHS, *served.pages))
    return Metrics([*paths], [*dict.fromkeys(models)])


class Site:
    """All connections of a front, and what is answered without an engine.

    Args:
        hosts: names that clients may call the server by; empty: any. A page elsewhere whose name its owner
            points at this machine then cannot read answers.
    """

    def __init__(self, front: Front, metrics: Metrics, hosts: Collection[str] = ()) -> None:
        self.front, self.metrics, self.hosts = front, metrics, hosts
        self.connections, self.posts = set[Connection](), 0  # requests with a body that are being answered
        served = front.served
        made = " ".join(f"{served.recipe}; {served.made_with}".encode("ascii", "replace").decode().split())
        fixed = "".join(f"{name}: {value}\r\n" for name, value in (HEADERS | {"x-qdqbench": made}).items())
        self.heads = {
            status: f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n{fixed}".encode()
            for status in map(int, STATUSES)
        }
        model = {"id": served.name, "object": "model", "owned_by": "qdqbench", "created": 0}
        self.facts = {
            "/v1/model": front.interfaces.describe(),
            "/v1/models": {"object": "list", "data": [model]},
            "/info": front.interfaces.describe_tei(),
            "/health/live": {"live": True},
        }
        self.paths = {*PATHS, *front.interfaces.forms, *served.pages}

    def look(self) -> None:
        """Close connections without progress, from now on."""
        now = time.monotonic()
        for connection in [*self.connections]:
            connection.watch(now)
        self.front.loop.call_later(min(PERIOD_S, self.front.settings.timeout) / 4, self.look)

    def get(self, path: str) -> tuple[int, Any, str] | None:
        """Return status, content and type of what is told without a question; None where there is nothing."""
        front = self.front
        if path in front.served.pages:
            return 200, *front.served.pages[path]
        if path == "/metrics":
            return 200, self.metrics.text(front.board.metrics).encode(), METRICS_TYPE
        if path in ("/health", "/health/ready"):
            status, told = front.ready()
            if self.posts >= MOST_POSTS:
                status, told = 503, {"ready": False, "full": True}
            return status, encode(told), JSON
        return (200, encode(self.facts[path]), JSON) if path in self.facts else None

    def close_idle(self) -> None:
        """Take no further request; what was begun is answered."""
        self.front.stopping = True
        for connection in [*self.connections]:
            if not connection.begun:
                connection.transport.close()


class Connection(asyncio.Protocol):
    """One client: its requests are answered one after the other."""

    transport: Any

    def __init__(self, site: Site) -> None:
        self.site, self.front = site, site.front
        self.parser: Any = httptools.HttpRequestParser(self)
        self.busy = False  # a request is complete, and not answered yet
        self.ended = False  # answered although not all was read
        self.answered = 0
        self.asked: Asked | None = None
        self.seen, self.left = (-1, True), 0  # of the last time that something moved
        self.moved = time.monotonic()
        self.reset()

    def reset(self) -> None:
        self.url, self.head_bytes, self.body, self.size, self.parts = b"", 0, list[bytes](), 0, 0
        self.length, self.kind, self.host, self.chunked = b"", b"", b"", False
        self.method, self.complete, self.eager, self.keep = "", False, False, True
        self.refusal: Refusal | None = None
        self.begun = 0.0

    # Of asyncio

    def connection_made(self, transport: Any) -> None:
        """Begin; where there are too many, an idle one goes."""
        self.transport = transport
        connections = self.site.connections
        connections.add(self)
        if len(connections) > MOST_CONNECTIONS:
            others = (each for each in connections if each is not self)
            idle = next((each for each in others if not each.busy or each.stuck()), self)
            idle.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the client and what it asked."""
        self.site.connections.discard(self)
        if self.asked is not None:
            self.front.drop(self.asked)
        self._end_post()

    def data_received(self, data: bytes) -> None:
        if self.ended:
            return
        if self.busy or self.transport.is_closing():
            self.eager = True  # it does not wait for an answer: a thousand such would keep others waiting
            return
        if not self.method:
            self.head_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:  # to another protocol, which this server need not take
            self.keep = False
        except Exception:  # of the parser, or of what is called by it
            if not self.complete:
                self.refusal = self.refusal or _unreadable()
        if not self.method and self.head_bytes > MOST_HEAD_BYTES:
            self.refusal = self.refusal or _unreadable()
        if self.refusal is not None and "connection" in self.refusal.headers:
            self.respond_refusal(self.refusal)
        elif self.complete:
            self.handle()

    # Of httptools

    def on_message_begin(self) -> None:
        """Note a second request that came with the first."""
        self.eager = self.eager or self.complete

    def on_url(self, url: bytes) -> None:
        if not self.complete:
            self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep what matters of the head."""
        if self.complete:
            return
        match name.lower():
            case b"content-length":
                self.length = value
            case b"content-type":
                self.kind = value
            case b"host":
                self.host = value
            case b"transfer-encoding":
                self.chunked = True
            case b"expect" if value.lower() == b"100-continue":
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_headers_complete(self) -> None:
        """Refuse what need not be read."""
        if self.complete:
            return
        self.method, self.begun = self.parser.get_method().decode(), time.monotonic()
        with_body = self.method in WITH_BODY
        self.site.posts += with_body
        self.refusal = self._check_head(with_body)

    def _check_head(self, with_body: bool) -> Refusal | None:
        site, most = self.site, self.front.settings.body_bytes
        if site.hosts and _host_name(self.host.decode("latin-1")) not in site.hosts:
            return Refusal(421, f"this server answers to {', '.join(sorted(site.hosts))} only; see --host")
        if self.length and self.chunked:  # RFC 9112, 6.1: smuggling
            return Refusal(400, "give content-length or transfer-encoding, not both", CLOSE)
        if self.length and (not self.length.isdigit() or int(self.length[:20]) > most):
            return _too_large(most)
        if with_body and site.posts > MOST_POSTS:
            return Refusal(503, "too many requests at once; try again later", CLOSE | {"retry-after": "1"})
        if with_body and self.kind.partition(b";")[0].strip().lower() != JSON.encode():
            return Refusal(415, "the body must be JSON; send it with content-type: application/json", CLOSE)
        return None

    def on_body(self, data: bytes) -> None:
        if self.complete:
            return
        self.size, self.parts = self.size + len(data), self.parts + 1
        if self.size > (most := self.front.settings.body_bytes):
            self.refusal = self.refusal or _too_large(most)
        elif self.parts > MOST_PARTS:
            self.refusal = self.refusal or _unreadable()
        if self.refusal is None:
            self.body.append(data)

    def on_message_complete(self) -> None:
        self.complete, self.keep = True, self.keep and self.parser.should_keep_alive()

    # Of requests

    def handle(self) -> None:
        """Answer a request, now or when an engine has."""
        self.busy = True
        path, front, site = self.path(), self.front, self.site
        try:
            if self.refusal is not None:
                raise self.refusal
            if path in front.interfaces.forms and self.method == "POST":
                if front.stopping:
                    raise Refusal(503, "the server ends; try again later", CLOSE | {"retry-after": "1"})
                asked = front.take(path, b"".join(self.body), self.respond)
                self.asked = asked if asked.open else None
                return
            told = site.get(path) if self.method in ("GET", "HEAD") else None
            if told is None:
                known = path in site.paths
                serves = f"this server has POST {', '.join(sorted(front.interfaces.forms))}"
                why = "this path has another method" if known else "there is nothing here"
                get = path not in front.interfaces.forms or path in front.served.pages
                allow = {"allow": "GET" if get else "POST"} if known else {}
                raise Refusal(405 if known else 404, f"{why}; {serves}", allow)
            status, body, kind = told
            self.respond(status, body, {"content-type": kind})
        except Refusal as error:
            self.respond_refusal(error)
        except Exception as error:
            log(f"unexpected failure of a request, {type(error).__name__}: {error}")
            self.respond_refusal(FAILED)

    def respond_refusal(self, error: Refusal) -> None:
        path = self.path()
        self.respond(error.status, self.front.interfaces.tell(error, path), error.headers)

    def respond(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        """Write an answer, and be ready for the next request or close."""
        self.asked, front, transport = None, self.front, self.transport
        if transport.is_closing() or self.ended:
            return
        keep = self.keep and not self.eager and not front.stopping and "connection" not in headers
        told = "".join(f"{name}: {value}\r\n" for name, value in headers.items()) if headers else ""
        if "content-type" not in headers:
            told += "content-type: application/json\r\n"
        if not keep and "connection" not in headers:
            told += "connection: close\r\n"
        head = b"%bcontent-length: %d\r\n%b\r\n" % (
            self.site.heads[status],
            len(body),
            told.encode("latin-1"),
        )
        transport.write(head if self.method == "HEAD" else head + body)
        path = self.path()
        name = path if path in self.site.paths else "other"
        seconds = time.monotonic() - self.begun if self.begun else 0.0
        front.counts.add("qdqbench_requests_total", f"{name}{status}")
        front.counts.observe("qdqbench_request_seconds", name, seconds)
        self.answered += 1
        self._end_post()
        read, self.busy = self.complete, False
        self.reset()
        if keep:
            return
        if read:
            transport.close()
        else:  # a client that still sends would see a reset in place of the answer
            self.ended = True
            transport.write_eof()
            front.loop.call_later(LINGER_S, transport.abort)

    def _end_post(self) -> None:
        self.site.posts -= self.method in WITH_BODY
        self.method = ""

    def path(self) -> str:
        return self.url.partition(b"?")[0].decode("latin-1")

    def stuck(self) -> bool:
        """Return whether the client does not read."""
        return bool(self.transport.get_write_buffer_size())

    def watch(self, now: float) -> None:
        """Close the connection where nothing moved for a while, unless a request is computed."""
        timeout = self.front.settings.timeout
        if self.begun and not self.busy and now - self.begun > timeout:
            self.respond_refusal(Refusal(408, f"the body did not come within {timeout:g} s", CLOSE))
            return
        unsent, waits = self.transport.get_write_buffer_size(), not self.begun
        stuck = self.left - unsent < LEAST_BYTES if unsent else waits
        if self.seen != (self.answered, waits) or not stuck:
            self.seen, self.left, self.moved = (self.answered, waits), unsent, now
        elif now - self.moved > PERIOD_S:
            self.transport.abort()


def _unreadable() -> Refusal:
    return Refusal(400, f"this is no HTTP request that can be read, or has over {MOST_PARTS} chunks", CLOSE)


def _too_large(most: int) -> Refusal:
    return Refusal(413, f"the body has more than {most} bytes; send fewer or shorter texts", CLOSE)


def _host_name(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return (name if colon and (port.isdecimal() or not port) else host).lower()
