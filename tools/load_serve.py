"""Load on `qdqbench serve` over loopback: rates, latencies and CPU time as JSON; nothing may be lost.

    python -m tools.load_serve RUN [--texts FILE] [--seconds 3] [--clients 1] [--out load.json]
    python -m tools.load_serve --noop TOKENIZER_JSON     an engine that computes nothing: the server's cost

The engine's own rate is measured in the same call, in this process, on the same texts. Clients are processes
of their own, each pinned to a core where there are several. Exit status 1 where an answer is lost or wrong.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import os
import platform
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import numpy as np
import psutil

from qdqbench.quantize.utils.system.cpu import find_cpu, usable_cores
from qdqbench.quantize.utils.system.gpu import find_gpu

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from support.http_client import Client, request_of  # noqa: E402

KILLS = 6
LAST_S = 20.0  # that clients wait for their last answers
START_S = 60.0  # that client processes wait for each other
IDLE_S = 5.0  # that a connection is kept for the next request
CLOSE = 0.1  # probabilities of the same text in batches of other shapes; those of the fake engine are exact
LOADS = "1x1,64x1,200x1,8x32,16x32"  # connections, and texts of a request
HELD = [  # texts of a request, share of the full rate, and connections
    ("poisson_70", 1, 0.7, 400),
    ("poisson_70_of_32", 32, 0.7, 400),
    ("overload_300", 32, 3.0, 900),
]
MOST_RATE = 1000.0  # of the clients that check each answer
QUANTILES = {"p50_ms": 0.5, "p99_ms": 0.99, "p999_ms": 0.999}
BAD = [
    (b"{", 400),
    (b'{"texts": []}', 422),
    (b'{"texts": [1]}', 422),
    (b"[1]", 422),
    (b'{"text": ["a"]}', 422),
    (b'{"texts": ["' + b"a" * 30_000 + b'"]}', 413),
    (b'{"texts": ["' + b"a" * (1 << 20) + b'"]}', 413),
]


@dataclass
class Seen:
    """What clients saw."""

    seconds: list = field(default_factory=list)  # of requests that were answered 200
    statuses: Counter = field(default_factory=Counter)
    again: int = 0  # asked again, as the connection was closed: that of a killed front, or an idle one
    lost: int = 0  # without any answer, also when asked again
    wrong: int = 0  # an answer of another text
    without_retry: int = 0  # 503 without Retry-After

    def told(self, duration):
        ordered = sorted(self.seconds) or [float("nan")]
        return {
            "answered_per_s": round(self.statuses[200] / duration, 1),
            "statuses": {str(status): count for status, count in sorted(self.statuses.items())},
            "asked_again": self.again,
            "lost": self.lost,
            "wrong": self.wrong,
            "503_without_retry_after": self.without_retry,
            **{
                name: round(1e3 * ordered[min(int(share * len(ordered)), len(ordered) - 1)], 2)
                for name, share in QUANTILES.items()
            },
        }


class Load:
    """Clients of one server; `expected` has the right answers to each request, by its place."""

    def __init__(self, port, texts, path="/v1/predict"):
        self.port, self.path, self.expected, self.texts = port, path, None, texts
        self._free = []

    async def one(self, seen, place):
        start = time.perf_counter()
        client, since = self._free.pop() if self._free else (Client(self.port), start)
        if start - since > IDLE_S:
            await client.close()  # it opens another: the server closes what is idle, too
        request = {"texts": [self.texts[place]]}
        try:
            try:
                status, headers, body = await client.post(self.path, request)
            except (OSError, EOFError):  # once more, as proxies do
                seen.again += 1
                status, headers, body = await client.post(self.path, request)
        except (OSError, EOFError):
            seen.lost += 1
            return
        seen.statuses[status] += 1
        if status == 200:
            seen.seconds.append(time.perf_counter() - start)
            seen.wrong += not self.right(place, body["answers"])
        elif status == 503:
            seen.without_retry += not headers.get("retry-after", "").isdecimal()
        self._free.append((client, time.perf_counter()))

    def right(self, place, answers):
        if self.expected is None:
            return True
        known = self.expected[place]
        if len(answers) != len(known):
            return False
        (known,), (answer,) = known, answers
        if "scores" in known:
            return all(abs(known["scores"][name] - share) < CLOSE for name, share in answer["scores"].items())
        return known["score"] == answer["score"]

    async def learn(self):
        """The right answers, asked one by one."""
        client, self.expected = Client(self.port), []
        for text in self.texts:
            status, _, body = await client.post(self.path, {"texts": [text]})
            assert status == 200, (status, body)
            self.expected.append(body["answers"])
        await client.close()

    async def at_rate(self, seconds, rate, *, seed=0):
        """Requests that come at their times, whether earlier ones are answered or not."""
        seen, draw, asked = Seen(), random.Random(seed), []
        start = at = time.perf_counter()
        while at < start + seconds:
            if (wait := at - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            asked.append(asyncio.create_task(self.one(seen, draw.randrange(len(self.texts)))))
            at += 1 / rate
        await asyncio.gather(*asked)
        return seen, time.perf_counter() - start

    async def close(self):
        for client, _ in self._free:
            await client.close()
        self._free.clear()


class Driver(asyncio.Protocol):
    """A connection that asks again as soon as it is answered, or when its turn comes."""

    def __init__(self, shared):
        self.shared, self.buffer, self.number = shared, b"", random.randrange(len(shared.requests))

    def connection_made(self, transport):
        self.transport = transport
        self.shared.open.add(self)
        self.free()

    def connection_lost(self, exc):
        self.shared.open.discard(self)

    def free(self):
        if self.shared.rate:
            self.shared.idle.append(self)
        elif time.perf_counter() < self.shared.end:
            self.ask(time.perf_counter())
        else:
            self.transport.close()

    def ask(self, begun):
        self.number, self.begun = (self.number + 1) % len(self.shared.requests), begun
        self.transport.write(self.shared.requests[self.number])

    def data_received(self, data):
        self.buffer += data
        head = self.buffer.find(b"\r\n\r\n")
        if head < 0:
            return
        at = self.buffer[:head].lower().find(b"content-length: ") + 16
        if len(self.buffer) < head + 4 + int(self.buffer[at : self.buffer.find(b"\r", at)]):
            return
        status = int(self.buffer[9:12])
        self.shared.statuses[status] += 1
        self.buffer = b""
        if status == 200:
            self.shared.seconds.append(time.perf_counter() - self.begun)
        self.free()


async def ask_at_rate(shared, pinned):
    """Ask over idle connections, in a Poisson process; what is asked late counts from its time."""
    draw, due = random.Random(os.getpid()), time.perf_counter()
    while (now := time.perf_counter()) < shared.end:
        while due < now:
            if not shared.idle:
                break
            shared.idle.popleft().ask(due)  # that which waits longest: all connections take part
            due += draw.expovariate(shared.rate)
        await asyncio.sleep(0 if pinned else 0.001)
    while len(shared.idle) < len(shared.open) and time.perf_counter() < shared.end + LAST_S:
        await asyncio.sleep(0.01)
    for each in shared.open:
        each.transport.close()


def drive(port, connections, requests, seconds, rate, core, together, out):  # noqa: PLR0917
    """So many connections for so long, in a process of its own; all begin together."""
    if core is not None:
        os.sched_setaffinity(0, [core])
    random.seed()
    shared = Seen()
    together.wait(START_S)  # a process takes its time to start, and the first must not have the server alone
    begun, spent = time.perf_counter(), time.process_time()
    shared.requests, shared.end, shared.open = requests, begun + seconds, set()
    shared.rate, shared.idle = rate, deque()

    async def main():
        loop = asyncio.get_running_loop()
        for _ in range(connections):
            await loop.create_connection(lambda: Driver(shared), "127.0.0.1", port)
        await (ask_at_rate(shared, core is not None) if rate else asyncio.sleep(seconds))
        while shared.open and time.perf_counter() < shared.end + LAST_S:
            await asyncio.sleep(0.01)

    with contextlib.suppress(ModuleNotFoundError):
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    try:
        asyncio.run(main())
    finally:
        out.put((shared.seconds, shared.statuses, time.perf_counter() - begun, time.process_time() - spent))


def order_cores():
    """Usable cores, hyperthreads of one next to each other: the last ones share none with the first."""

    def first(core):
        path = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        return int(re.split("[,-]", path.read_text())[0]) if path.is_file() else core

    return sorted(usable_cores(), key=lambda core: (first(core), core))


@dataclass(frozen=True)
class Asking:
    """A server under load, and how it is asked."""

    pid: int
    port: int
    path: str
    texts: list
    seconds: float
    clients: int  # processes

    def requests(self, count):
        draw = random.Random(count)
        drawn = (draw.choices(self.texts, k=count) for _ in range(200))
        if self.path == "/v1/embeddings":
            return [request_of(self.path, {"input": each, "encoding_format": "base64"}) for each in drawn]
        return [request_of(self.path, {"texts": each}) for each in drawn]

    def load(self, connections, count, rate=0.0):
        """Rates, latencies, and CPU microseconds and memory of the server by kind of process.

        Args:
            rate: requests a second, in a Poisson process; 0: each connection asks again once it is answered.
        """
        context = multiprocessing.get_context("fork")  # at once: importing takes longer than a load
        requests, cores, clients = self.requests(count), order_cores(), min(self.clients, connections)
        shares = [connections // clients + (n < connections % clients) for n in range(clients)]
        (before, _), seconds, asking = usage(self.pid), self.seconds, 0.0
        together, queue, children = context.Barrier(clients), context.SimpleQueue(), []
        for n, share in enumerate(shares):
            core = cores[-1 - n % len(cores)] if clients > 1 or len(cores) > 2 else None
            given = (self.port, share, requests, seconds, rate / clients, core, together, queue)
            children.append(context.Process(target=drive, args=given))
            children[-1].start()
        seen = Seen()
        for _ in children:
            times, statuses, taken, spent = queue.get()
            seconds, asking = max(seconds, taken), max(asking, spent / taken)
            seen.seconds += times
            seen.statuses += statuses
        for child in children:
            child.join()
        (after, memory), total = usage(self.pid), max(sum(seen.statuses.values()), 1)
        spent = {name: 1e6 * (after[name] - before.get(name, 0.0)) / total for name in after}
        return {"connections": connections, "texts_per_request": count, "rate": round(rate, 1)} | {
            **seen.told(seconds),
            "texts_per_s": round(seen.statuses[200] * count / seconds, 1),
            "cpu_us_per_request": {name: round(each, 1) for name, each in spent.items()},
            "cpu_us_per_text": round(sum(spent.values()) / count, 2),
            "memory_mb": {name: round(each, 1) for name, each in memory.items()},  # a leak grows it
            "busiest_client": round(asking, 2),  # share of a core; near 1 the clients are the limit
        }


def processes_of(pid, kind=""):
    """Processes of a server, all or those of a kind."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            if child.name().startswith(f"qdqbench-{kind}"):
                found.append(child)
    return found


def usage(pid):
    """CPU seconds and MB of own memory by kind of process."""
    seconds, memory = Counter(), Counter()
    for child in processes_of(pid):
        with contextlib.suppress(psutil.Error):
            kind, own = child.name().removeprefix("qdqbench-"), child.memory_full_info().uss
            seconds[kind] += sum(child.cpu_times()[:2])
            memory[kind] += own / 1e6
    return seconds, memory


async def get(port, path):
    """An answer over a connection of its own, which any front takes."""
    client = Client(port)
    try:
        return await client.get(path)
    except (OSError, EOFError):  # its front ended
        return 503, {}, ""
    finally:
        await client.close()


async def kill(load, pid, seconds, rate, kills=KILLS):
    """Kill fronts and engines in turn at random moments under load."""
    asked, draw = asyncio.create_task(load.at_rate(seconds, rate)), random.Random(0)
    replaced = []
    while not asked.done() and len(replaced) < kills:
        await asyncio.sleep(draw.uniform(0, seconds / kills))
        kind = ("front", "engine")[len(replaced) % 2]
        killed = draw.choice(processes_of(pid, kind))
        count = len(processes_of(pid, kind))
        os.kill(killed.pid, signal.SIGKILL)
        start = time.perf_counter()
        while time.perf_counter() < start + 60:
            alive = {each.pid for each in processes_of(pid, kind)} - {killed.pid}
            if len(alive) == count and (await get(load.port, "/health/ready"))[0] == 200:
                break
            await asyncio.sleep(0.05)
        replaced.append(round(time.perf_counter() - start, 2))
    seen, duration = await asked
    return seen.told(duration) | {"replaced_after_s": replaced}


async def stopped(load, process, rate):
    """SIGTERM under load: what was begun is answered, the rest refused, and the status is 0."""
    asked = asyncio.create_task(load.at_rate(1.0, rate))
    await asyncio.sleep(0.5)
    begun = time.perf_counter()
    process.send_signal(signal.SIGTERM)
    seen, _ = await asked
    status = await asyncio.get_running_loop().run_in_executor(None, process.wait, 60)
    took = round(time.perf_counter() - begun, 2)
    return {"status": status, "seconds": took, "answered": seen.statuses[200], "wrong": seen.wrong}


async def hold(load, process, seconds, rate):
    """Kills, bad input and the end."""
    await load.learn()
    found = {"killed": await kill(load, process.pid, 3 * seconds, 0.5 * rate)}
    client = Client(load.port)
    statuses = [(await client.post("/v1/predict", body))[0] for body, _ in BAD]
    found["bad_input"] = {"asked": [status for _, status in BAD], "got": statuses}
    await client.close()
    found["stopped"] = await stopped(load, process, 0.7 * rate)
    await load.close()
    return found


def verdict(found):
    """What does not hold, in words."""
    wrong = []
    part = found["killed"]
    counts = ("lost", "wrong", "503_without_retry_after")
    wrong += [f"killed: {part[what]} {what}" for what in counts if part[what]]
    for name in {*found} & {"poisson_70", "poisson_70_of_32", "overload_300", "killed"}:
        if strange := sorted({*found[name]["statuses"]} - {"200", "503"}):
            wrong.append(f"{name}: statuses {strange}")
    if found["bad_input"]["asked"] != found["bad_input"]["got"]:
        wrong.append("bad input")
    if "overload_300" in found and not found["overload_300"]["statuses"].get("503"):
        wrong.append("the queue was never full under overload")
    if found["stopped"]["status"] or found["stopped"]["wrong"]:
        wrong.append(f"stopped: {found['stopped']}")
    return wrong


def command_of(arguments):
    """The server's command."""
    if arguments.noop:
        order = {"tokenizer": str(arguments.noop), "texts": str(arguments.texts or "")}
        settings = {"port": 0, "queue": 4096, "order": order}
        return [sys.executable, "-m", "tests.support.fake_served", json.dumps(settings)]
    command = [sys.executable, "-m", "qdqbench", "serve", arguments.run, "--port", "0", "--no-fp32"]
    command += ["--queue", arguments.queue, *(["--fronts", arguments.fronts] if arguments.fronts else [])]
    return command


def start(command):
    """A server's process, its port, and the seconds until it answers."""
    begun = time.perf_counter()
    process = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    while line := process.stdout.readline():
        if "http://127.0.0.1:" in line:
            port = int(line.partition("http://127.0.0.1:")[2].split()[0].split("/")[0])
            return process, port, round(time.perf_counter() - begun, 2)
    raise SystemExit("the server did not start")


def engine_rate(run, texts, seconds):
    """Texts a second and CPU us a text of the engine alone.

    Rows are tokens. Those of backend cuda stand in batches as a server makes them, two under way; others are
    sorted by length and padded.
    """
    from qdqbench.quantize.deployment.opened import Answering

    model = Answering.of(Path(run)).open_model()
    coded = model.encoder.code(texts * max(1, 8192 // len(texts)))
    if not model.packs:
        coded = coded.pick(np.arange(min(len(coded.lengths), 512)))
    batches = [coded]
    if model.packs:
        parts = [coded.pick(np.arange(*part)) for part in itertools.pairwise(model.split(coded.lengths))]
        batches = [(part.ids, part.types.astype(np.int32), part.lengths) for part in parts]
    for _ in range(2):  # the first time prepares
        count, begun, before, under_way = 0, time.perf_counter(), time.process_time(), deque()
        for batch in itertools.cycle(batches):
            if model.packs:
                under_way.append(model.infer.launch(*batch))
                if len(under_way) > 1:
                    under_way.popleft().read()
            else:
                model.run(batch)
            count += len(batch[-1] if model.packs else batch.lengths)
            if time.perf_counter() > begun + seconds:
                break
        spent, duration = time.process_time() - before, time.perf_counter() - begun
    return count / duration, 1e6 * spent / count


async def endpoint(port):
    """The path that is asked."""
    paths = (await get(port, "/v1/model"))[2]["endpoints"]
    return "/v1/embeddings" if "/v1/embeddings" in paths else paths[0]


def numbers(count, seed=0):
    """Texts of 1 to 7 digits, for the fake engine."""
    draw = random.Random(seed)
    return [str(draw.randrange(10 ** draw.randint(1, 7))) for _ in range(count)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", nargs="?", help="run of a classification or regression of single texts")
    parser.add_argument("--noop", type=Path, help="tokenizer.json of a server whose engine computes nothing")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--texts", type=Path, help="one a line")
    parser.add_argument("--clients", type=int, default=1, help="client processes")
    parser.add_argument("--queue", type=int, default=1024, help="of the server of a run")
    parser.add_argument("--fronts", type=int, help="of the server of a run")
    parser.add_argument("--loads", default=LOADS, help="connections x texts of a request, as in 64x1,16x32")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    texts = numbers(200)
    if arguments.texts:
        texts = [line for line in arguments.texts.read_text(encoding="utf-8").splitlines() if line]
    alone, cost = 0.0, 0.0
    if arguments.run:
        alone, cost = engine_rate(arguments.run, texts[:2000], arguments.seconds)
    found = {"engine_alone": {"texts_per_s": round(alone, 1), "cpu_us_per_text": round(cost, 2)}}
    process, port, ready = start(command_of(arguments))
    found |= {"ready_s": ready, "loads": []}
    rates, wrong = {1: 0.0, 32: 0.0}, []
    try:
        path = asyncio.run(endpoint(port))
        asking = Asking(process.pid, port, path, texts, arguments.seconds, arguments.clients)
        for load in arguments.loads.split(","):
            connections, count = map(int, load.split("x"))
            made = asking.load(connections, count)
            if alone:  # the second share says, also on cores that others use, what the server takes
                made["share_of_engine"] = round(made["texts_per_s"] / alone, 3)
                made["share_by_cpu"] = round(cost / (made["cpu_us_per_text"] or 1.0), 3)
            found["loads"].append(made)
            rates[count] = max(rates.get(count, 0.0), made["answered_per_s"])
        for name, count, share, connections in HELD:
            if rates[count] and not arguments.noop:
                made = asking.load(connections, count, share * rates[count])
                found[name] = made | {"share_of_full_rate": round(made["answered_per_s"] / rates[count], 3)}
        if not arguments.noop:
            rate = min(rates[1] or asking.load(64, 1)["answered_per_s"], MOST_RATE)
            found |= asyncio.run(hold(Load(port, texts[:200]), process, arguments.seconds, rate))
            wrong = verdict(found)
    finally:
        process.kill()
    tell(found | {"does_not_hold": wrong}, arguments)
    return bool(wrong)


def describe_machine():
    versions = {name: metadata.version(name) for name in ("qdqbench", "tokenizers", "httptools", "msgspec")}
    with contextlib.suppress(metadata.PackageNotFoundError):
        versions["tokie"] = metadata.version("tokie")
    told = {"cpu": str(find_cpu()), "gpu": gpu.name if (gpu := find_gpu()) else None}
    return told | {"load_average": os.getloadavg(), "python": platform.python_version()} | versions


def tell(found, arguments):
    """Print and write what was found, and on which machine."""
    text = json.dumps(found | {"machine": describe_machine()}, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
