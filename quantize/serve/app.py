"""The endpoints and pages of a server, as an ASGI application."""

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError
from pydantic_core import from_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.core.files import LOOK
from qdqbench.quantize.serve.endpoints import Columns, Request
from qdqbench.quantize.serve.guard import Guard, Refused, failure, json_bytes, refusal
from qdqbench.quantize.serve.metrics import Metrics
from qdqbench.quantize.serve.openapi import description
from qdqbench.quantize.serve.pool import Pool, Unavailable
from qdqbench.quantize.serve.served import Limits, Served

PAGES = {  # by path: file, type
    "/": ("index.html", "text/html"),
    "/docs": ("docs.html", "text/html"),
    "/app.js": ("app.js", "text/javascript"),
    "/docs.js": ("docs.js", "text/javascript"),
    "/look.css": (str(LOOK), "text/css"),
    "/style.css": ("style.css", "text/css"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_FOLDER = Path(__file__).parent / "pages"
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Service:
    """One run behind HTTP; `app` is the ASGI application.

    Args:
        pools: workers by the name of the model that they run: `engine`, and `fp32` where it is compared.
        hosts: as of `guard.Guard`.
    """

    def __init__(
        self,
        served: Served,
        pools: Mapping[str, Pool],
        metrics: Metrics,
        *,
        limits: Limits,
        hosts: Iterable[str] = (),
    ) -> None:
        self.served, self.pools, self.limits, self._metrics = served, pools, limits, metrics
        self.draining = False
        # one thread: a tokenizer that truncates is not for several
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        path = f"/v1/{served.endpoint.name}"
        fixed: dict[str, Callable[[], Response]] = {
            "/v1/model": lambda: _json(self.about()),
            "/openapi.json": lambda: _json(description(served, limits)),
            "/health": self._ready,
            "/health/ready": self._ready,
            "/health/live": lambda: _json({"live": True}),
            "/metrics": lambda: Response(metrics.text(), media_type=_METRICS_TYPE),
            **{page: _page(*file) for page, file in PAGES.items()},
        }
        routes = [Route(path, self._answer, methods=["POST"])]
        routes += [Route(each, _fixed(made)) for each, made in fixed.items()]
        known = {path, *fixed}
        inner = Starlette(
            routes=routes,
            exception_handlers={HTTPException: self._not_found, Refused: refusal, Exception: failure},
        )
        inner.router.redirect_slashes = False
        self.app = Guard(
            inner,
            limits=limits,
            metrics=metrics,
            hosts=hosts,
            label=lambda asked: asked if asked in known else "other",
        )

    def about(self) -> dict[str, Any]:
        """What is served, as `/v1/model` tells it."""
        served = self.served
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
            "models": [*self.pools],
            "max_length": served.max_length,
            "limits": asdict(self.limits),
        }

    def _ready(self) -> Response:
        workers = {name: pool.alive for name, pool in self.pools.items()}
        ready = not self.draining and workers["engine"] > 0
        return _json({"ready": ready, "draining": self.draining, "workers": workers}, 200 if ready else 503)

    async def _not_found(self, request: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        serves = f"this server has POST /v1/{self.served.endpoint.name} and the pages of /docs"
        why = {404: f"there is nothing here; {serves}", 405: f"this method is not for this path; {serves}"}
        return _json(
            {"error": why.get(error.status_code, str(error.detail))}, error.status_code, error.headers
        )

    async def _answer(self, request: HttpRequest) -> Response:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Refused(415, "the body must be JSON; send it with content-type: application/json")
        body = await request.body()
        try:
            if b"fp32" not in body:  # under overload most are refused: that must cost little
                self._require_room("engine")
            asked = self._parsed(body)
            pool = self._require_room(asked.model)
            columns = self.served.endpoint.columns(asked, self.served.task.text_columns)
            self._check(columns)
            # the pool's own limit begins behind the tokenizer, for which others may wait, too
            found = await asyncio.wait_for(self._answers(asked, columns, pool), self.limits.timeout_s)
            return _json({"model": asked.model, "answers": found})
        except asyncio.TimeoutError as error:
            late = pool.unavailable(f"there was no answer within {self.limits.timeout_s:g} s")
            raise Refused(503, str(late), {"retry-after": str(late.retry_after)}) from error
        except Unavailable as error:
            raise Refused(503, str(error), {"retry-after": str(error.retry_after)}) from error

    async def _answers(self, asked: Request, columns: Columns, pool: Pool) -> list[dict[str, Any]]:
        loop, served = asyncio.get_running_loop(), self.served
        try:
            rows = await loop.run_in_executor(self._tokenizing, served.encoded, columns)
        except UserError as error:
            raise Refused(422, str(error)) from error
        if len(rows) > pool.capacity:
            why = f"the texts make {len(rows)} rows, more than the {pool.capacity} that may wait; send fewer"
            raise Refused(413, why)
        made = await pool.answers([(row.input_ids, row.token_type_ids) for row in rows])
        if not all(np.isfinite(each).all() for each in made):
            raise Refused(500, "the engine gives NaN or infinite answers; see its run's verification")
        found = served.endpoint.answers(asked, [*zip(rows, made, strict=True)], served.classes)
        return [each.model_dump() for each in found]

    def _require_room(self, model: str) -> Pool:
        if model not in self.pools:
            raise Refused(422, "this server was started without the FP32 twin; leave model out")
        pool = self.pools[model]
        if self.draining:
            raise pool.unavailable("the server stops")
        pool.require_room()
        return pool

    def _parsed(self, body: bytes) -> Request:
        """The request in a body, with time and memory in proportion to its size however wrong it is."""
        schema = self.served.endpoint.request
        try:
            value = from_json(body)
        except ValueError as error:
            raise Refused(400, f"the body is not JSON: {_flat(str(error))}") from error
        known = [*schema.model_fields]
        if not isinstance(value, dict):
            raise Refused(422, f"the body must be an object with {' and '.join(known)}")
        if unknown := next((key for key in value if key not in known), None):
            raise Refused(422, f"the field {_flat(unknown)!r} is not known; there are {', '.join(known)}")
        try:
            return schema.model_validate(value)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise Refused(422, f"{_flat(where)}: {_flat(first['msg'])}; see /docs") from error

    def _check(self, columns: Columns) -> None:
        count = len(next(iter(columns.values())))
        if count > self.limits.texts:
            raise Refused(413, f"{count} texts are more than the {self.limits.texts} of one request")
        for values in columns.values():
            for text in values:
                long = len(text) if isinstance(text, str) else sum(map(len, text)) + len(text)
                if long > self.limits.characters:
                    most = self.limits.characters
                    raise Refused(413, f"a text has {long} characters, more than the {most} of one text")

    def close(self) -> None:
        """Let the tokenizer's thread end."""
        self._tokenizing.shutdown(wait=False, cancel_futures=True)


def _fixed(made: Callable[[], Response]) -> Callable[[HttpRequest], Any]:
    async def answer(request: HttpRequest) -> Response:
        return made()

    return answer


def _page(file: str, kind: str) -> Callable[[], Response]:
    data = (_FOLDER / file).read_bytes()
    return lambda: Response(data, media_type=f"{kind}; charset=utf-8")


def _json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(json_bytes(value), status, headers, "application/json")


def _flat(text: str) -> str:
    """What came from a client, short and on one line."""
    return re.sub(r"\s+", " ", "".join(c if c.isprintable() else " " for c in text[:200]))[:120]
