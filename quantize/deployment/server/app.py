"""The endpoints and pages of one worker process, as an ASGI application."""

import asyncio
import contextlib
import functools
import logging
import math
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import Field, create_model
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from qdqbench.quantize.deployment.server.batches import Batcher, Metrics, Model
from qdqbench.quantize.deployment.server.served import Columns, Request, Served
from qdqbench.quantize.deployment.server.settings import ModelName, Settings
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.files import LOOK
from qdqbench.quantize.utils.schema import Strict

Result = TypeVar("Result")
LOG = logging.getLogger("qdqbench.serve")
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
PAGES = {  # by path: file, type
    "/": ("index.html", "text/html"),
    "/docs": ("docs.html", "text/html"),
    "/app.js": ("app.js", "text/javascript"),
    "/docs.js": ("docs.js", "text/javascript"),
    "/look.css": (str(LOOK), "text/css"),
    "/style.css": ("style.css", "text/css"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
REFUSALS = {
    400: "The body is not JSON.",
    408: "The body did not come in time.",
    413: "Too many or too long texts, or too large a body.",
    415: "The body has another type than JSON.",
    422: "JSON of another form.",
    503: "The queue is full, or there is no answer in time; Retry-After says when to come again.",
}
MOST_RETRY_S = 60
SURROGATE = re.compile("[\ud800-\udfff]")
LONG = 10_000  # numbers of an answer, whose JSON would hold up other requests
FAREWELL_S = 0.5  # from the last answers of a worker that gives up to its end


class Error(Strict):
    """A refusal."""

    error: str = Field(description="One sentence.")


class Service:
    """One run behind HTTP: an ASGI application, which refuses requests by HTTPException.

    Args:
        hosts: names that clients may call the server by; empty: any. A page elsewhere whose name its owner
            points at this machine then cannot read answers.
        leave: ends the process.
    """

    def __init__(  # noqa: PLR0913
        self,
        served: Served,
        settings: Settings,
        models: Mapping[ModelName, Model],
        metrics: Metrics,
        *,
        hosts: Collection[str] = (),
        leave: Callable[[], None] = lambda: os._exit(1),
    ) -> None:
        self.served, self.settings, self.metrics, self._leave = served, settings, metrics, leave
        self.queued, self.given_up = 0, False  # rows, from arrival to answer
        self.batchers = {
            name: Batcher(
                name,
                model,
                pad_id=served.pad_id,
                max_wait_s=settings.max_wait_ms / 1000,
                timeout_s=settings.timeout,
                metrics=metrics,
                give_up=self._give_up,
            )
            for name, model in models.items()
        }
        # one thread: a tokenizer that truncates is not for several
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self.hosts, self.posts = hosts, 0  # requests with a body that are being answered
        self.routes = self._make_routes()
        self._paths = {route.path for route in self.routes.routes}  # type: ignore[attr-defined]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check and count a request; the routes get one whose body is complete."""
        if scope["type"] != "http":
            await self.routes(scope, receive, send)
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
                await self.routes(scope, receive, send_counted)
            elif (body := await self._read_body(receive)) is not None:
                self._check_room()  # before it is parsed: under overload a refusal must cost little
                await self.routes(scope, _replay(body, receive), send_counted)
        except HTTPException as error:
            await refuse(error)(scope, receive, send_counted)
        except Exception as error:
            LOG.error("unexpected failure of a request, %s: %.300s", type(error).__name__, error)
            if not status:
                await refuse(FAILED)(scope, receive, send_counted)
        finally:
            self.posts -= counted
            name = scope["path"] if scope["path"] in self._paths else "other"
            self.metrics.requests.labels(name, str(status)).inc()
            self.metrics.seconds.labels(name).observe(time.perf_counter() - start)

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
        body, end = bytearray(), time.monotonic() + self.settings.timeout
        while True:
            try:
                message = await asyncio.wait_for(receive(), max(0.0, end - time.monotonic()))
            except TimeoutError:
                late = f"the body did not come within {self.settings.timeout:g} s"
                raise HTTPException(408, late, CLOSE) from None
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            self._check_size(len(body))
            if not message.get("more_body", False):
                return bytes(body)

    def _make_routes(self) -> FastAPI:
        served, settings = self.served, self.settings
        app = FastAPI(
            title=f"qdqbench serve {served.name}",
            version=metadata.version("qdqbench"),
            docs_url=None,  # those of FastAPI load from elsewhere
            redoc_url=None,
            lifespan=self._lifespan,
            redirect_slashes=False,
            exception_handlers=dict.fromkeys(
                (HTTPException, RequestValidationError, Exception), self._refuse
            ),
        )

        async def answer(request: Request) -> Response:
            return await self._answer(request)

        answer.__annotations__["request"] = served.endpoint.request
        answers = list[served.endpoint.answer]  # type: ignore[name-defined]
        app.post(
            f"/v1/{served.endpoint.name}",
            response_model=create_model(
                "Answers", __base__=Strict, model=(ModelName, ...), answers=(answers, ...)
            ),
            responses={status: {"description": why, "model": Error} for status, why in REFUSALS.items()},
            summary=f"{served.task.kind.name}: {(served.endpoint.request.__doc__ or '').rstrip('.').lower()}",
            description=f"At most {settings.max_texts} texts of {settings.max_characters} characters and "
            f"{settings.body_bytes} bytes, {settings.timeout:g} s; a row has {served.max_length} tokens.",
        )(answer)

        def add(path: str, respond: Callable[[], Response], summary: str = "") -> None:
            async def handle(request: HttpRequest) -> Response:
                return respond()

            if summary:
                app.get(path, summary=summary, response_class=Response)(handle)
            app.add_route(path, handle, ["HEAD"] if summary else ["GET"], include_in_schema=False)

        add("/v1/model", lambda: JSONResponse(self.describe()), "The served run and its limits.")
        add("/health/live", lambda: JSONResponse({"live": True}), "Answered while the process works.")
        add("/health/ready", self._ready, "503 while requests are refused.")
        add("/health", self._ready, "The same.")
        add(
            "/metrics",
            lambda: Response(self.metrics.text(), media_type=METRICS_TYPE),
            "Metrics for Prometheus.",
        )
        for path, (file, kind) in PAGES.items():
            data = (Path(__file__).parent / "pages" / file).read_bytes()
            add(path, functools.partial(Response, data, media_type=f"{kind}; charset=utf-8"))
        app.openapi()  # kept, so that no request waits for it
        return app

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(batcher.work()) for batcher in self.batchers.values()]
        self.metrics.workers.set(1)
        yield
        for task in tasks:
            task.cancel()

    def describe(self) -> dict[str, Any]:
        served, settings = self.served, self.settings
        return {
            "name": served.name,
            "task": served.task.name,
            "kind": served.task.kind.name,
            "endpoint": f"/v1/{served.endpoint.name}",
            "columns": [*served.task.text_columns],
            "classes": [*served.classes],
            "recipe": served.recipe,
            "engine": served.made_with,
            "int8": served.int8,
            "models": [*self.batchers],
            "max_length": served.max_length,
            "limits": {
                "texts": settings.max_texts,
                "characters": settings.max_characters,
                "body_bytes": settings.body_bytes,
                "timeout_s": settings.timeout,
            },
        }

    def _ready(self) -> Response:
        full = self.queued >= self.settings.queue or self.posts >= MOST_POSTS
        ready = not full and not self.given_up
        return JSONResponse({"ready": ready, "full": full}, 200 if ready else 503)

    def _check_room(self, rows: int = 1) -> None:
        if self.given_up or self.queued + rows > self.settings.queue:
            raise self._unavailable("the queue is full")

    def _unavailable(self, why: str) -> HTTPException:
        rate = sum(batcher.rate for batcher in self.batchers.values())
        seconds = math.ceil(self.queued / rate) if rate else 1
        retry = {"retry-after": str(min(max(seconds, 1), MOST_RETRY_S))}
        return HTTPException(503, f"{why}; try again later", retry)

    @contextlib.contextmanager
    def _admit(self, rows: int) -> Iterator[None]:
        self._check_room(rows)
        self.queued += rows
        self.metrics.queued.set(self.queued)
        try:
            yield
        finally:
            self.queued -= rows
            self.metrics.queued.set(self.queued)

    async def _answer(self, request: Request) -> Response:
        if request.model not in self.batchers:
            raise HTTPException(422, "this server was started without the FP32 model; leave model out")
        columns = request.columns(self.served.task.text_columns)
        texts = self._check_texts(columns)
        timeout_s = self.settings.timeout
        with contextlib.ExitStack() as admitted:
            admitted.enter_context(self._admit(texts))
            try:
                return await asyncio.wait_for(self._run(request, columns, texts, admitted), timeout_s)
            except TimeoutError as error:
                raise self._unavailable(f"there was no answer within {timeout_s:g} s") from error

    async def _run(
        self, request: Request, columns: Columns, texts: int, admitted: contextlib.ExitStack
    ) -> Response:
        served = self.served
        if served.task.kind.windows:  # they are many for a long context: admitted before they are made
            count = await self._tokenize(served.count_rows, columns)
            self._check_rows(count)
            admitted.enter_context(self._admit(count - texts))
        try:
            prompt = getattr(request, "prompt", None)
            rows = await self._tokenize(served.encode, columns, prompt)
        except UserError as error:
            raise HTTPException(422, str(error)) from error
        batcher = self.batchers[request.model]
        answered = await batcher.answer([(row.input_ids, row.token_type_ids) for row in rows])
        answers = [answer for answer in answered if answer is not None]
        if len(answers) < len(rows):
            raise self._unavailable("the engine failed")
        if not all(np.isfinite(answer).all() for answer in answers):
            raise HTTPException(500, "the engine gives NaN or infinite answers; see its run's verification")

        def respond() -> Response:
            read = served.endpoint.answer.read(request, [*zip(rows, answers, strict=True)], served.classes)
            return JSONResponse({"model": request.model, "answers": [each.model_dump() for each in read]})

        long = len(rows) > 1 or answers[0].size > LONG
        return await asyncio.to_thread(respond) if long else respond()

    async def _tokenize(self, call: Callable[..., Result], *given: Any) -> Result:
        """Call the tokenizer in its thread; where it hangs, no request after this one could be answered."""
        loop, hang_s, alarms = asyncio.get_running_loop(), self.settings.timeout, list[asyncio.TimerHandle]()

        def watch() -> None:  # from when the thread begins: requests before this one may have kept it
            why = f"the tokenizer takes more than {hang_s:g} s"
            alarms.append(loop.call_later(hang_s, self._give_up, why))

        def work() -> Result:
            loop.call_soon_threadsafe(watch)
            try:
                return call(*given)
            finally:
                loop.call_soon_threadsafe(lambda: alarms.pop().cancel())

        return await loop.run_in_executor(self._tokenizing, work)

    def _check_texts(self, columns: Columns) -> int:
        settings, count = self.settings, len(next(iter(columns.values())))
        if count > settings.max_texts:
            raise HTTPException(413, f"{count} texts are more than the {settings.max_texts} of one request")
        most = settings.max_characters
        for value in (value for values in columns.values() for value in values):
            text = value if isinstance(value, str) else " ".join(value)
            if len(text) > most:
                raise HTTPException(
                    413, f"a text has {len(text)} characters, more than the {most} of one text"
                )
            if SURROGATE.search(text):  # JSON allows it, UTF-8 and tokenizers do not
                raise HTTPException(422, "a text has half a surrogate pair (\\ud800 to \\udfff)")
        self._check_rows(count)
        return count

    def _check_rows(self, count: int) -> None:
        if count > (most := self.settings.queue):
            raise HTTPException(
                413, f"the texts make {count} rows, more than the {most} of the queue; send fewer or shorter"
            )

    def _give_up(self, reason: str) -> None:
        if not self.given_up:
            self.given_up = True
            LOG.error("a worker gives up: %s", reason)
            asyncio.get_running_loop().call_later(FAREWELL_S, self._leave)
        for batcher in self.batchers.values():
            batcher.fail()

    async def _refuse(self, request: Any, error: Exception) -> Response:
        if isinstance(error, RequestValidationError):
            first = error.errors()[0]
            if first["type"] == "json_invalid":
                return refuse(
                    HTTPException(400, f"the body is not JSON: {_flat(str(first['ctx']['error']))}")
                )
            where = ".".join(map(str, first["loc"][1:])) or "the body"
            return refuse(HTTPException(422, f"{_flat(where)}: {_flat(first['msg'])}; see /docs"))
        if not isinstance(error, HTTPException):
            return refuse(FAILED)
        if why := {404: "there is nothing here", 405: "this path has another method"}.get(error.status_code):
            serves = f"this server has POST /v1/{self.served.endpoint.name} and the pages of /docs"
            return refuse(HTTPException(error.status_code, f"{why}; {serves}", error.headers))
        return refuse(error)


def _flat(text: str) -> str:
    return re.sub(r"\s+", " ", "".join(c if c.isprintable() else " " for c in text[:200]))[:120]


def _replay(body: bytes, receive: Receive) -> Receive:
    left = [body]

    async def replay() -> Message:
        return {"type": "http.request", "body": left.pop(), "more_body": False} if left else await receive()

    return replay


def refuse(error: HTTPException) -> JSONResponse:
    return JSONResponse({"error": str(error.detail)}, error.status_code, error.headers)


def _host_name(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return (name if colon and (port.isdecimal() or not port) else host).lower()
