"""Serve a run until a signal: uvicorn's supervised worker processes on one socket."""

import contextlib
import io
import ipaddress
import logging
import logging.handlers
import math
import multiprocessing
import os
import pickle
import queue
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import h11
import uvicorn
from prometheus_client import multiprocess
from starlette.exceptions import HTTPException
from uvicorn.config import STARTUP_FAILURE
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.supervisors.multiprocess import Multiprocess

from qdqbench.quantize.deployment.server.app import CLOSE, LOG, Service, refuse
from qdqbench.quantize.deployment.server.batches import SHARED, Metrics, warm_up
from qdqbench.quantize.deployment.server.served import Served
from qdqbench.quantize.deployment.server.settings import Settings
from qdqbench.quantize.utils.errors import MissingDevice, QdqError, UserError
from qdqbench.quantize.utils.system.cpu import usable_cores
from qdqbench.quantize.utils.system.process import end_with_parent

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
PERIOD_S = 10.0  # after one, but at most two of these a connection without progress is closed
LEAST_BYTES = 16 << 10  # that a client must read in this time
MOST_CONNECTIONS, BACKLOG = 1000, 1000  # of a worker; of the socket
MOST_HEAD_BYTES, MOST_PARTS = 16 << 10, 10_000  # of a head; of a body, each of which takes 20 us
GRACE_S = 2  # beyond a request's own time, until what is still open is dropped at the end
PING_S = 20  # that a worker may hold Python's lock, as some imports do


@dataclass(frozen=True)
class WorkerApp:
    """Makes the ASGI application of a worker process; pickled, with imports that take little time.

    It has to fit into a pipe (64 KB): whoever starts a worker writes it there, holds the other end too, and
    would wait forever for a worker that a signal ended.
    """

    served: Path  # pickled: its tokenizer imports transformers
    settings: Settings
    hosts: tuple[str, ...]
    failures: Connection  # takes (exit code, sentence) of a worker that cannot start
    is_replacement: bool = False

    def __call__(self) -> Any:
        """Open the models; ends the process where that fails."""
        settings = self.settings
        _start_log()
        end_with_parent()
        handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ends it at once until it serves
        if getattr(getattr(handler, "__self__", None), "should_exit", False):
            sys.exit()  # a signal came before: uvicorn's server noted it, and would load all the same
        try:
            served: Served = pickle.loads(self.served.read_bytes())  # noqa: S301  (of the parent process)
            models = {
                name: warm_up(
                    served.open_model(name), served.sizes(name, settings.max_batch), settings.timeout
                )
                for name in settings.models
            }
        except Exception as error:
            sentence = " ".join(str(error).split())[:400]
            if not isinstance(error, QdqError):
                sentence = f"a worker cannot start, {type(error).__name__}: {sentence}"
            self.failures.send((getattr(error, "exit_code", 1), sentence))
            sys.exit(STARTUP_FAILURE)
        signal.signal(signal.SIGTERM, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        metrics = Metrics()
        metrics.replaced.inc(self.is_replacement)
        return Service(served, settings, models, metrics, hosts=self.hosts)


def serve(served: Served, settings: Settings, announce: Callable[[str, bool], None]) -> None:
    """Serve until SIGTERM or Ctrl-C; what was begun is answered first.

    `announce` gets the URL, and whether only this machine reaches it, when all workers answer. A `QdqError`
    where the address or a model cannot be used, or a file of the run changed before a worker was replaced.
    """
    _start_log()
    failures, send = multiprocessing.Pipe(duplex=False)
    with _listen(settings.host, settings.port) as listener, tempfile.TemporaryDirectory() as folder:
        address, port = listener.getsockname()[:2]
        loopback = ipaddress.ip_address(address).is_loopback
        name = f"[{settings.host}]" if ":" in settings.host else settings.host
        hosts = tuple({*LOOPBACK, name.lower(), address}) if loopback else ()
        pickled = Path(folder) / "served"  # prometheus_client reads *.db there
        pickled.write_bytes(pickle.dumps(served))
        config = uvicorn.Config(
            WorkerApp(pickled, settings, hosts, send),
            factory=True,
            workers=settings.workers,
            http=_Protocol,
            loop="asyncio",
            ws="none",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=math.ceil(2 * PERIOD_S),
            h11_max_incomplete_event_size=MOST_HEAD_BYTES,
            timeout_graceful_shutdown=math.ceil(settings.timeout) + GRACE_S,
            timeout_worker_healthcheck=PING_S,
        )
        os.environ[SHARED] = folder
        Supervisor(config, listener, folder, lambda: announce(f"http://{name}:{port}", loopback)).run()
    if failures.poll():
        code, sentence = failures.recv()
        raise (MissingDevice if code == MissingDevice.exit_code else UserError)(sentence)


class Supervisor(Multiprocess):
    """uvicorn's supervisor, with cores for each worker, metrics of dead ones and an end in bounded time."""

    def __init__(
        self, config: uvicorn.Config, listener: socket.socket, folder: str, announce: Callable[[], None]
    ) -> None:
        super().__init__(config, [listener])
        self._folder, self._announce = folder, [announce]

    def init_processes(self) -> None:
        with _blocked_interrupt():
            super().init_processes()
        self._settle()
        self.config.app = replace(self.config.app, is_replacement=True)  # type: ignore[type-var]

    def keep_subprocess_alive(self) -> None:
        before = {process.pid for process in self.processes}
        with _blocked_interrupt():
            super().keep_subprocess_alive()
        for pid in before - {process.pid for process in self.processes}:
            LOG.error("worker process %s ended and is replaced", pid)
            multiprocess.mark_process_dead(pid, self._folder)  # type: ignore[no-untyped-call]
            self._settle()
        if self._announce and all(process.is_ready(timeout=0.1) for process in self.processes):
            self._announce.pop()()

    def terminate_all(self) -> None:
        for listener in self.sockets:
            listener.close()
        super().terminate_all()

    def join_all(self) -> None:
        end = time.monotonic() + (self.config.timeout_graceful_shutdown or 0) + GRACE_S
        for process in self.processes:
            process.process.join(max(0.0, end - time.monotonic()))
            process.process.kill()
            process.process.join()

    def _settle(self) -> None:
        """Give each worker a part of the cores, which its later threads inherit."""
        cores, count = usable_cores(), len(self.processes)
        for place, process in enumerate(self.processes):
            process.child_conn.close()  # the end of the worker then ends a ping that waits for it
            with contextlib.suppress(OSError, AttributeError):  # it has just ended; no such call
                os.sched_setaffinity(process.pid or 0, cores[place::count] or cores)


@contextlib.contextmanager
def _blocked_interrupt() -> Iterator[None]:
    """Block Ctrl-C; a process that starts in the block takes it when it serves, and not within imports."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _start_log() -> None:
    """Log to stderr from a thread: a full disk, a full pipe or one without a reader stops nothing."""
    lines: queue.Queue[Any] = queue.Queue(1000)
    logging.raiseExceptions = False
    handler = logging.handlers.QueueHandler(lines)
    logging.basicConfig(format="qdqbench: %(message)s", handlers=[handler], level="WARNING", force=True)
    # Not sys.stderr: it keeps what it cannot write, and a process that cannot flush it starts no other one.
    raw = io.FileIO(2 if sys.stderr else os.open(os.devnull, os.O_WRONLY), "w", closefd=False)
    stream = io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True)
    logging.handlers.QueueListener(lines, logging.StreamHandler(stream)).start()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)  # asyncio disables Nagle's delay where it says TCP
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(BACKLOG)  # now: a second server on this port must fail before it loads its model
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise UserError(
            f"cannot listen on {host} port {port} ({error.strerror}); give another --host or --port"
        ) from error
    return listener


class _Protocol(H11Protocol):
    """Closes connections whose client neither sends nor reads, and those beyond a limit."""

    _seen: tuple[Any, bool, int] = (None, False, 0)  # request, whether one is awaited, and unsent bytes
    _timer: Any = None

    _parts = 0  # of the body of a request: chunks, or what came at once

    def connection_made(self, transport: Any) -> None:
        receive = self.conn.next_event
        self.conn.next_event = lambda: self._count(receive())  # type: ignore[method-assign]
        super().connection_made(transport)
        self._watch()
        if len(self.connections) > MOST_CONNECTIONS:
            others = (each for each in self.connections if each is not self and isinstance(each, _Protocol))
            idle = next((each for each in others if each.is_idle() or each.flow.write_paused), self)
            idle.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._timer.cancel()

    def _count(self, event: Any) -> Any:
        """Return an event of h11; a body of more than `MOST_PARTS` would keep all other clients waiting."""
        self._parts = 0 if isinstance(event, h11.Request) else self._parts + isinstance(event, h11.Data)
        if self._parts > MOST_PARTS:
            raise h11.RemoteProtocolError("too many chunks")
        return event

    def is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _watch(self) -> None:
        """Abort the connection where nothing moved since the last call, unless a request is computed."""
        idle, unsent = self.is_idle(), self.transport.get_write_buffer_size()
        request, was_idle, left = self._seen
        stuck = left - unsent < LEAST_BYTES if unsent else idle
        if self._timer and request is self.cycle and was_idle == idle and stuck:
            self.transport.abort()
            return
        self._seen = self.cycle, idle, unsent
        self._timer = self.loop.call_later(PERIOD_S, self._watch)

    def on_response_complete(self) -> None:
        """Close where requests were sent without waiting: a thousand of them would keep others waiting."""
        if self.conn.trailing_data[0]:
            self.server_state.total_requests += 1
            self.transport.close()
        else:
            super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer as every refusal, where uvicorn's is plain text."""
        answer = refuse(
            HTTPException(
                400, f"this is no HTTP request that can be read, or has over {MOST_PARTS} chunks", CLOSE
            )
        )
        head = h11.Response(status_code=400, headers=answer.raw_headers)
        with contextlib.suppress(h11.LocalProtocolError):  # an answer was begun before
            for event in (head, h11.Data(bytes(answer.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
