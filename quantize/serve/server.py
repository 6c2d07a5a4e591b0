"""Serve a run until a signal: its workers, a socket, and an end that answers what was begun."""

import asyncio
import contextlib
import ipaddress
import math
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.machine.cpu import usable_cores
from qdqbench.quantize.serve.app import Service
from qdqbench.quantize.serve.buckets import Buckets, shapes_of
from qdqbench.quantize.serve.guard import LOOPBACK, json_bytes
from qdqbench.quantize.serve.metrics import Metrics
from qdqbench.quantize.serve.pool import COMMAND, Pool, order_of, shared_cores
from qdqbench.quantize.serve.served import Limits, Served

HEAD_S = 10.0  # that the head of a request may take
IDLE_S = 20  # that a connection is kept without a request
MOST_CONNECTIONS, BACKLOG = 1000, 1000
MOST_HEAD_BYTES = 16 << 10
MORE_S = 2  # beyond a request's own time, until what is still open is dropped at the end


@dataclass(frozen=True)
class Settings:
    """How a run is served."""

    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    max_batch: int = 32
    max_wait_s: float = 0.002
    queue: int = 256  # rows
    fp32: bool = True
    limits: Limits = field(default_factory=Limits)

    @property
    def loopback(self) -> bool:
        """Whether only this machine can ask."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def make_service(served: Served, settings: Settings, command: Sequence[str] = COMMAND) -> Service:
    """A service whose workers are not started yet."""
    limits, metrics, cores = settings.limits, Metrics(), usable_cores()
    sizes = served.sizes(settings.max_batch)
    single = [(length, 1) for length, _ in sizes]

    def pool(name: str, base: dict[str, Any], workers: int, met: list[tuple[int, int]]) -> Pool:
        # every worker meets these shapes before the first request does
        orders = [order_of(base | {"warm": shapes_of(met)}, part) for part in shared_cores(workers, cores)]
        buckets = Buckets(sizes, settings.queue, settings.max_wait_s)
        return Pool(
            name,
            orders,
            buckets,
            pad_id=served.pad_id,
            timeout=limits.timeout_s,
            metrics=metrics,
            command=command,
        )

    pools = {"engine": pool("engine", served.engine, settings.workers, sizes)}
    if settings.fp32:
        pools["fp32"] = pool("fp32", served.twin, 1, single)
    hosts = LOOPBACK if settings.loopback else ()
    return Service(served, pools, metrics, limits=limits, hosts=hosts)


def serve(
    served: Served, settings: Settings, listening: Callable[[str], None], command: Sequence[str] = COMMAND
) -> None:
    """Serve until SIGTERM or Ctrl-C; what was begun is answered first, the second signal ends at once.

    Args:
        listening: called with the URL when requests are answered.
        command: that starts a worker.

    Raises:
        UserError: the address cannot be had.
        QdqError: a worker cannot open its model.
    """
    with _bound(settings.host, settings.port) as bound:
        asyncio.run(_serve(served, settings, bound, listening, command))


async def _serve(
    served: Served,
    settings: Settings,
    bound: socket.socket,
    listening: Callable[[str], None],
    command: Sequence[str],
) -> None:
    service = make_service(served, settings, command)
    config = uvicorn.Config(
        service.app,
        http=_Protocol,
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=IDLE_S,
        h11_max_incomplete_event_size=MOST_HEAD_BYTES,
        timeout_graceful_shutdown=math.ceil(settings.limits.timeout_s) + MORE_S,
    )
    server = _Server(config, service)
    try:
        with server.stopped_by_signals():
            if await server.begun(asyncio.gather(*(pool.start() for pool in service.pools.values()))):
                name = f"[{settings.host}]" if ":" in settings.host else settings.host
                bound.listen(BACKLOG)  # who comes before uvicorn takes it waits
                listening(f"http://{name}:{bound.getsockname()[1]}")
                await server.serve(sockets=[bound])
    finally:
        await asyncio.gather(*(pool.close() for pool in service.pools.values()))
        service.close()


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)  # asyncio turns Nagle's delay off where it says TCP
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind((host, port))
            bound.setblocking(False)
        except BaseException:
            bound.close()
            raise
    except OSError as error:
        raise UserError(
            f"cannot listen on {host} port {port} ({error.strerror}); give another --host or --port"
        ) from error
    return bound


class _Server(uvicorn.Server):
    """One that ends with success after a signal, where uvicorn's raises the signal again."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._begins: asyncio.Future[Any] | None = None

    async def begun(self, workers: "asyncio.Future[Any]") -> bool:
        """Wait for the workers' start, which a signal ends; whether they started."""
        self._begins = workers
        try:
            await workers
        except asyncio.CancelledError:
            if not self.should_exit:
                raise
        return not self.should_exit

    @contextlib.contextmanager
    def stopped_by_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            loop.add_signal_handler(number, self._asked)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def _asked(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = self._service.draining = True
        if self._begins is not None:
            self._begins.cancel()  # once they have started nothing follows


class _Protocol(H11Protocol):
    """One that closes connections whose request does not come, and those beyond what can be served."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
        else:
            self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """As every refusal, where uvicorn's is plain text."""
        body = json_bytes({"error": "this is no HTTP request that can be read"})
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
        }
        events = h11.Response(status_code=400, headers=[*headers.items()]), h11.Data(body), h11.EndOfMessage()
        with contextlib.suppress(h11.LocalProtocolError):  # an answer was begun before
            for event in events:
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._late is not None:
            self._late.cancel()

    def _waits(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _watch(self) -> None:
        if self._late is not None and not self._waits():
            self._late.cancel()
            self._late = None
        elif self._late is None and self._waits():
            self._late = self.loop.call_later(HEAD_S, self._close_late)

    def _close_late(self) -> None:
        self._late = None
        if self._waits() and not self.transport.is_closing():
            self.transport.close()
