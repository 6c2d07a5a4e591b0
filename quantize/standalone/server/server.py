"""Serve until a signal: a supervisor, engine processes, and front processes that share an address."""

import argparse
import asyncio
import ctypes
import gc
import ipaddress
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import chain, cycle, islice
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from ..fast import FastTokenizer, open_fast
from ..runtimes import open_runtime, read
from .engine import AWAKE_S, Worker, warm_up
from .front import Front, log
from .http import BACKLOG, Site, make_metrics
from .http import Connection as Client
from .metrics import Counts, Metrics
from .settings import ENGINE, Served, Settings
from .slots import ENGINE_GONE, RECORD, Board, Shape, Slots, make_memory, make_pipe, send

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
SIGNALS = {signal.SIGINT, signal.SIGTERM}
TICK_S, AGAIN_S = 0.05, 1.0  # between looks at processes, and starts of one that does not start
PR_SET_NAME = 15
GRACE_S = 2.0  # beyond a request's own time, until what is still open is dropped at the end
HANG = 5  # times the slowest batch of the warm-up
STILL_S = 20.0  # that a front may hold Python's lock
MOST_WORD = 1000  # characters of a word that WordPiece looks up


class Failed(Exception):
    """A server that cannot start or go on; its text is one sentence.

    Args:
        code: exit status that the error in the process has.
    """

    def __init__(self, sentence: str, code: int = 1) -> None:
        super().__init__(sentence)
        self.code = code


@dataclass(frozen=True)
class Shared:
    """Everything that processes have in common."""

    served: Served
    settings: Settings
    models: tuple[str, ...]  # of each engine process
    fronts: int
    hosts: tuple[str, ...]
    board: Connection
    slots: Connection
    engine_pipes: Sequence[tuple[Connection, Connection]]
    front_pipes: Sequence[tuple[Connection, Connection]]

    def open_board(self) -> tuple[Board, Metrics]:
        metrics = make_metrics(self.served, self.settings, self.models)
        return Board(self.board, self.fronts, len(self.models), metrics.size), metrics


def prepare(*modules: str) -> None:
    """Begin to import what processes need, in the process that they are forked from; call it early."""
    multiprocessing.set_forkserver_preload([__name__, *modules])
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # in all of them: only this one decides
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(kind: str, cores: Sequence[int]) -> None:
    """Begin a process that ends with the one that started it, and has a name of its own."""
    parent = multiprocessing.parent_process()

    def end() -> None:
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_NAME, f"qdqbench-{kind}".encode())
    with suppress(OSError, AttributeError):  # no such call
        os.sched_setaffinity(0, cores)


def run_engine(  # noqa: PLR0913, PLR0917
    shared: Shared, number: int, cores: Sequence[int], gpu: str | None, core: int | None, control: Connection
) -> None:
    """Load an engine, tell its sizes, and answer until the end of the process, on a core of its own."""
    _begin("engine", cores)
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    served, settings, model = shared.served, shared.settings, shared.models[number]
    (board, metrics), told = shared.open_board(), shared.served.told
    try:
        infer = served.models[model]()
        rows, slowest, width = warm_up(infer, told, settings.timeout, settings.batch_tokens)
        control.send(("ready", width, slowest))
        slots = Slots(shared.slots, Shape(*control.recv()))
        counts = Counts(metrics, board.metrics[shared.fronts + number])
        counts.set("qdqbench_workers", "engine", 1)
        pipes = shared.engine_pipes[number][0], [writer for _, writer in shared.front_pipes]
        if core is not None:
            os.sched_setaffinity(0, [core])
        given = infer, told, model, number, rows, settings.batch_tokens, slots, board, counts
        worker = Worker(*given, *pipes, awake_s=0.0 if core is None else AWAKE_S)
        board.alive[number] = time.monotonic()
        gc.freeze()  # collecting what stays takes tens of milliseconds
        worker.work()
    except BaseException as error:
        sentence = " ".join(str(error).split())[:400]
        code = getattr(error, "exit_code", 1 if isinstance(error, SystemExit) else 0)
        if not code:
            sentence = f"an engine cannot start, {type(error).__name__}: {sentence}"
        with suppress(OSError):
            control.send(("failed", sentence, code))
        os._exit(1)


def run_front(  # noqa: PLR0913, PLR0917
    shared: Shared,
    place: int,
    cores: Sequence[int],
    door: socket.socket,
    fast: bool,
    shape: Shape,
    awake_s: float,
    control: Connection,
) -> None:
    """Answer clients until the supervisor says that it ends."""
    _begin("front", cores)
    os.environ["TOKENIZERS_PARALLELISM"], os.environ["RAYON_NUM_THREADS"] = "false", "1"
    served, (board, metrics) = shared.served, shared.open_board()
    quick = FastTokenizer(served.tokenizer, served.told["max_length"]) if fast else None
    front = Front(
        served, shared.settings, place, shared.models, Slots(shared.slots, shape), board,
        Counts(metrics, board.metrics[place]), shared.front_pipes[place][0],
        [writer for _, writer in shared.engine_pipes], fast=quick, awake_s=awake_s,
    )  # fmt: skip
    site = Site(front, metrics, shared.hosts)
    gc.freeze()

    async def serve() -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        front.start(loop)
        entering = set[asyncio.Task[None]]()

        async def enter(client: socket.socket) -> None:
            with suppress(OSError):  # it has gone
                await loop.connect_accepted_socket(lambda: Client(site), client)

        def open_door() -> None:
            with suppress(BlockingIOError):
                for file in socket.recv_fds(door, 1, 1)[1]:
                    client = socket.socket(fileno=file)
                    client.setblocking(False)
                    entering.add(task := loop.create_task(enter(client)))
                    task.add_done_callback(entering.discard)

        loop.add_reader(door.fileno(), open_door)
        loop.add_reader(control.fileno(), ended.set)
        site.look()
        control.send(("ready",))
        await ended.wait()
        loop.remove_reader(control.fileno())
        loop.remove_reader(door.fileno())
        site.close_idle()
        while site.connections:
            await asyncio.sleep(TICK_S)

    try:
        runner: Any = import_module("uvloop").run
    except ModuleNotFoundError:
        runner = asyncio.run
    runner(serve())
    os._exit(0)


@dataclass
class Child:
    kind: str  # `front` or `engine`
    place: int
    process: Any
    control: Connection
    ready: bool = False
    width: int = 0  # of an answer
    slowest_s: float = 0.0  # of a batch


class Supervisor:
    """Starts processes, replaces those that end or hang, and ends all of them."""

    def __init__(self, shared: Shared, listener: socket.socket, announce: Callable[[], None]) -> None:
        self.shared, self.listener, self._announce = shared, listener, [announce]
        self.doors = [socket.socketpair() for _ in range(shared.fronts)]
        for door in chain.from_iterable(self.doors):
            door.setblocking(False)
        self.board, self.metrics = shared.open_board()
        Counts(self.metrics, self.board.metrics[0]).set("qdqbench_watch_limit", "", shared.served.max_drop)
        self.context = multiprocessing.get_context("forkserver")
        self.shape: Shape | None = None
        self.fast = False
        self.ending = False
        self.children: list[Child] = []

    def start(self, kind: str, place: int) -> Child:
        """Start a process."""
        ours, theirs = self.context.Pipe()
        shared, cores = self.shared, sorted(os.sched_getaffinity(0))
        own = keep_cores(cores, shared.fronts, shared.models) if shared.served.gpus else []
        target: Callable[..., None] = run_engine
        given: tuple[Any, ...]
        if kind == "front":  # which opens no model, and need not import what opens them
            target, names = run_front, shared.served.models
            awake_s = AWAKE_S if own else 0.0
            given = (cores[len(own) :], self.doors[place][1], self.fast, self.shape, awake_s)
            served = replace(shared.served, models=dict.fromkeys(names, object), texts=tuple)
            shared = replace(shared, served=served)
        else:
            count, gpu = shared.models.count(ENGINE), None
            if shared.models[place] == ENGINE:
                visible = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
                gpus = visible or [*map(str, range(shared.served.gpus))]
                gpu = gpus[place % len(gpus)] if shared.served.gpus else None
                cores = cores if gpu else cores[place::count] or cores
            given = (cores, gpu, own[place] if place < len(own) else None)
        process = self.context.Process(target=target, args=(shared, place, *given, theirs))
        process.start()
        theirs.close()
        return Child(kind, place, process, ours)

    def run(self) -> None:
        """Work until a signal; raises Failed where that cannot be."""
        served = self.shared.served
        self.children = [self.start("engine", place) for place in range(len(self.shared.models))]
        self.fast = open_fast(served.told, served.tokenizer, served.texts()) is not None  # while they load
        while not self.ending:
            for child in [*self.children]:
                self.look(child)
                if not child.process.is_alive():
                    self.replace(child)
            if all(child.ready for child in self.children):
                if self.shape is None:
                    self.open_slots()
                elif self._announce:
                    threading.Thread(target=self.deal, daemon=True).start()
                    self._announce.pop()()
            time.sleep(TICK_S)

    def deal(self) -> None:
        """Give clients to the fronts in turn: the busiest one, which has more of them, makes the tail."""
        places = cycle(range(self.shared.fronts))
        while self.listener.fileno() >= 0:
            try:
                client, _ = self.listener.accept()
            except OSError:  # the end, or too many files
                time.sleep(TICK_S)
                continue
            with client:
                while not self._give(client, islice(places, self.shared.fronts)):
                    time.sleep(TICK_S)

    def _give(self, client: socket.socket, places: Iterable[int]) -> bool:
        """Give a client to the first front that works and has room."""
        for place in places:
            with suppress(OSError):
                if self.board.beat[place]:
                    socket.send_fds(self.doors[place][0], [b"."], [client.fileno()])
                    return True
        return False

    def replace(self, child: Child) -> None:
        """Start a process again; one that does not start must not take the machine's time."""
        if not child.ready:
            time.sleep(AGAIN_S)
        try:
            self.children[self.children.index(child)] = self.start(child.kind, child.place)
        except (OSError, EOFError) as error:
            log(f"no process can be started ({error}); trying again")
            child.ready = False

    def open_slots(self) -> None:
        """Make the memory when engines told how wide answers are, and start the fronts."""
        shared, width = self.shared, max(child.width for child in self.children)
        length, queue = shared.served.told["max_length"], shared.settings.queue
        self.shape = Shape(shared.fronts, len(shared.models), queue, length, width)
        try:
            Slots(shared.slots, self.shape)
        except OSError as error:
            why = f"there is no memory for the rows of the queues ({error.strerror})"
            raise Failed(f"{why}; give a smaller --queue, or fewer --fronts") from error
        for child in self.children:
            with suppress(OSError):  # it has just ended
                child.control.send(self.shape)
        self.children += [self.start("front", place) for place in range(shared.fronts)]

    def look(self, child: Child) -> None:
        """Take what a process tells, kill it where it hangs, and tell the others where it ended."""
        now, engine = time.monotonic(), child.kind == "engine"
        with suppress(EOFError, OSError):
            while child.control.poll():
                self.hear(child, *child.control.recv())
        beat, most = self.board.beat[child.place] if not engine and child.ready else 0.0, STILL_S
        if engine:
            beat = self.board.busy[child.place]
            most = max(HANG * child.slowest_s, self.shared.settings.timeout)
        if beat and now - beat > most and child.process.is_alive():
            log(f"an {child.kind} process takes more than {most:.1f} s and is killed")
            child.process.kill()
            child.process.join()
        if child.process.is_alive():
            return
        if not self._announce or child.ready:
            if child.process.exitcode:  # 0 is the end of the server
                log(f"{child.kind} process {child.process.pid} ended with status {child.process.exitcode}")
        else:
            raise Failed(f"a process ended with status {child.process.exitcode} before it was ready")
        row = self.board.metrics[child.place + self.shared.fronts * engine]
        counts = Counts(self.metrics, row)
        counts.add("qdqbench_workers_lost_total", child.kind)
        counts.set("qdqbench_workers", child.kind, 0)
        counts.set("qdqbench_queue_rows", "", 0)
        if not engine:
            self.board.beat[child.place] = 0.0
            return
        self.board.alive[child.place] = self.board.busy[child.place] = 0.0
        gone = np.array([(ENGINE_GONE, child.place)], RECORD).tobytes()
        for _, writer in self.shared.front_pipes:
            send(writer, gone)

    def hear(self, child: Child, word: str, *told: Any) -> None:
        if word == "ready":
            child.ready = True
            if child.kind == "engine":
                child.width, child.slowest_s = told
                if self.shape is not None:
                    child.control.send(self.shape)
            return
        sentence, code = told
        if not child.ready and code:
            raise Failed(sentence, code)
        log(f"the engine failed, {sentence}")

    def end(self) -> None:
        """End all processes: fronts when what was begun is answered, within bounded time."""
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # of which a thread that waits hears
        self.listener.close()
        fronts = [child for child in self.children if child.kind == "front"]
        for child in fronts:
            with suppress(OSError):
                child.control.send("end")
        self.ending, until = False, time.monotonic() + self.shared.settings.timeout + GRACE_S
        while fronts and not self.ending and time.monotonic() < until:  # another signal ends it at once
            for child in [each for each in self.children if not each.process.is_alive()]:
                self.children.remove(child)
                with suppress(Failed):
                    self.look(child)
            fronts = [child for child in fronts if child.process.is_alive() and child.ready]
            time.sleep(TICK_S / 5)
        for child in self.children:
            child.process.kill()
            child.process.join()
        for door in chain.from_iterable(self.doors):
            door.close()


def keep_cores(cores: Sequence[int], fronts: int, models: Sequence[str]) -> Sequence[int]:
    """Return the cores that engines keep: none where a front would have to wait for one that is awake."""
    return cores[: models.count(ENGINE)] if len(cores) >= fronts + len(models) else []


def serve(served: Served, settings: Settings, announce: Callable[[str, bool], None]) -> None:
    """Serve until SIGTERM or Ctrl-C; what was begun is answered first.

    `announce` gets the URL, and whether only this machine reaches it, when all processes answer. Failed where
    the address or a model cannot be used, or a file changed before an engine was replaced.
    """
    require_short_words(served)
    prepare()
    cores = len(os.sched_getaffinity(0))
    fronts = settings.fronts or max(1, min(16, cores // 2 if served.gpus else cores // 8))
    models = [ENGINE] * (settings.engines or max(1, served.gpus))
    models += [name for name in served.models if name != ENGINE]
    listener = _listen(settings.host, settings.port)
    address, port = listener.getsockname()[:2]
    loopback = ipaddress.ip_address(address).is_loopback
    name = f"[{settings.host}]" if ":" in settings.host else settings.host
    shared = Shared(
        served=served,
        settings=settings,
        models=tuple(models),
        fronts=fronts,
        hosts=tuple({*LOOPBACK, name.lower(), address}) if loopback else (),
        board=make_memory("board"),
        slots=make_memory("slots"),
        engine_pipes=[make_pipe() for _ in models],
        front_pipes=[make_pipe() for _ in range(fronts)],
    )
    supervisor = Supervisor(shared, listener, lambda: announce(f"http://{name}:{port}", loopback))

    def stop(*_: Any) -> None:
        supervisor.ending = True

    before = {each: signal.signal(each, stop) for each in SIGNALS}
    try:
        try:
            supervisor.run()
        finally:
            supervisor.end()
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def require_short_words(served: Served) -> None:
    """Refuse a WordPiece that looks up long words: one of some thousand characters takes it minutes."""
    longest = json.loads(served.tokenizer)["model"].get("max_input_chars_per_word") or 0
    if longest > MOST_WORD:
        raise Failed(
            f"the tokenizer of {served.name} looks up words of {longest} characters, which can take it "
            f"minutes. Lower max_input_chars_per_word in tokenizer.json to {MOST_WORD} or less, and run again"
        )


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with ExitStack() as failing:
            listener = failing.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(BACKLOG)
            failing.pop_all()
    except OSError as error:
        why = f"cannot listen on {host} port {port} ({error.strerror})"
        raise Failed(f"{why}; give another --host or --port") from error
    return listener


def main(folder: Path) -> None:
    """Serve a deployed folder: `python serve.py --help`."""
    told = json.loads(read(folder, "model.json"))
    parser = argparse.ArgumentParser(description="Answer requests over HTTP with the model of this folder.")
    parser.add_argument("--host", default=Settings.host)
    parser.add_argument("--port", type=int, default=Settings.port)
    parser.add_argument("--runtime", default=told["runtimes"][0], choices=told["runtimes"])
    asked = parser.parse_args()
    served = Served(
        name=told["name"],
        recipe=told["recipe"],
        made_with=asked.runtime,
        told=told,
        tokenizer=read(folder, "tokenizer.json").decode(),
        models={ENGINE: partial(open_runtime, asked.runtime, folder, told)},
        gpus=int(asked.runtime not in ("onnxruntime", "openvino")),
    )
    try:
        line = f"serving {served.name} at"
        serve(served, Settings(asked.host, asked.port), lambda url, _: print(line, url, flush=True))
    except Failed as error:
        raise SystemExit(str(error)) from error
