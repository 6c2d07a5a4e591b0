"""A bounded load test of `qdqbench serve` over loopback: what it holds, and figures as JSON.

    python tools/load_serve.py RUN [--seconds 20] [--workers 1] [--texts FILE] [--out load.json]
    python tools/load_serve.py --fake

With `--fake` the engine is one whose times are known: 40 ms a batch and 4 ms a row. Ends by itself after some
six times `--seconds`; exit status 1 where something does not hold.

Latency at 70% load is of requests that come at even times, as load generators with a constant rate send them,
and also of a Poisson process, whose bursts queue before any server. 100% is the rate at which the server
answers as many clients as its largest batch has rows, each of which asks again as soon as it is answered.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from qdqbench.quantize.utils.system.cpu import find_cpu

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.http_client import Client

PER_BATCH, PER_ROW = 0.040, 0.004  # s, of the fake engine
KILLS = 4
IDLE_S = 5.0  # that a connection is kept for the next request
CLOSE = 0.1  # probabilities of the same text in batches of other shapes; those of the fake engine are exact
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
    again: int = 0  # asked again, as the connection was closed: that of a killed worker, or an idle one
    lost: int = 0  # without any answer, also when asked again
    wrong: int = 0  # an answer of another text
    without_retry: int = 0  # 503 without Retry-After

    def quantile(self, share):
        ordered = sorted(self.seconds)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else float("nan")

    def told(self, duration):
        return {
            "seconds": round(duration, 2),
            "requests": sum(self.statuses.values()) + self.lost,
            "answered_per_s": round(self.statuses[200] / duration, 1),
            "statuses": {str(status): count for status, count in sorted(self.statuses.items())},
            "asked_again": self.again,
            "lost": self.lost,
            "wrong": self.wrong,
            "503_without_retry_after": self.without_retry,
            "p50_ms": round(1e3 * self.quantile(0.5), 2),
            "p99_ms": round(1e3 * self.quantile(0.99), 2),
        }


class Load:
    """Clients of one server; `expected` has the right answers to each request, by its place."""

    def __init__(self, port, texts, path="/v1/predict"):
        self.port, self.path, self.expected = port, path, None
        self.texts = texts
        self._free = []

    async def one(self, seen, place):
        start = time.perf_counter()
        client, since = self._free.pop() if self._free else (Client(self.port), start)
        if start - since > IDLE_S:
            await client.close()  # it opens another: the server closes what is idle, too
        try:
            status, headers, body = await self._ask(seen, client, self.request(place))
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

    async def _ask(self, seen, client, request):
        """Ask, and once more where the connection is closed, as proxies do."""
        try:
            return await client.post(self.path, request)
        except (OSError, EOFError):
            seen.again += 1
            return await client.post(self.path, request)

    def request(self, place):
        return {"texts": [self.texts[place]]}

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
        for place in range(len(self.texts)):
            status, _, body = await client.post(self.path, self.request(place))
            assert status == 200, (status, body)
            self.expected.append(body["answers"])
        await client.close()

    async def closed(self, seconds, clients):
        """So many clients, each of which asks again as soon as it is answered."""
        seen, end = Seen(), time.perf_counter() + seconds

        async def ask(number):
            place = number
            while time.perf_counter() < end:
                await self.one(seen, place % len(self.texts))
                place += clients

        start = time.perf_counter()
        await asyncio.gather(*(ask(number) for number in range(clients)))
        return seen, time.perf_counter() - start

    async def at_rate(self, seconds, rate, *, poisson=False, seed=0):
        """Requests that come at their times, whether earlier ones are answered or not."""
        seen, draw, asked = Seen(), random.Random(seed), []
        start = at = time.perf_counter()
        while at < start + seconds:
            if (wait := at - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            asked.append(asyncio.create_task(self.one(seen, draw.randrange(len(self.texts)))))
            at += draw.expovariate(rate) if poisson else 1 / rate
        await asyncio.gather(*asked)
        return seen, time.perf_counter() - start

    async def close(self):
        for client, _ in self._free:
            await client.close()
        self._free.clear()


def workers_of(pid):
    """Worker processes of a server."""
    found = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.Error):  # it has just ended
            if "spawn_main" in " ".join(child.cmdline()):
                found.append(child.pid)
    return found


async def get(port, path):
    """An answer over a connection of its own, which any worker takes."""
    client = Client(port)
    try:
        return await client.get(path)
    except (OSError, EOFError):  # its worker ended
        return 503, {}, ""
    finally:
        await client.close()


async def measure(load, pid, seconds, batch):
    """All phases but the end."""
    await load.learn()
    found = {}
    seen, duration = await load.closed(seconds, batch)
    found["capacity"] = seen.told(duration)
    rate = seen.statuses[200] / duration
    for name, poisson in (("even_70", False), ("poisson_70", True)):
        seen, duration = await load.at_rate(seconds, 0.7 * rate, poisson=poisson)
        found[name] = seen.told(duration) | {"rate": round(0.7 * rate, 1)}
    seen, duration = await load.at_rate(seconds / 2, 3 * rate)
    found["overload_300"] = seen.told(duration)
    asked, client = asyncio.create_task(load.at_rate(2 * seconds, 0.5 * rate)), Client(load.port)
    replaced = []
    while not asked.done() and len(replaced) < KILLS:
        await asyncio.sleep(seconds / 4)
        killed = workers_of(pid)[0]
        os.kill(killed, signal.SIGKILL)
        start = time.perf_counter()
        while (
            not (alive := workers_of(pid))
            or killed in alive
            or (await get(load.port, "/health/ready"))[0] != 200
        ):
            await asyncio.sleep(0.05)
        replaced.append(round(time.perf_counter() - start, 2))
    seen, duration = await asked
    found["killed"] = seen.told(duration) | {"replaced_after_s": replaced}
    statuses = [(await client.post("/v1/predict", body))[0] for body, _ in BAD]
    found["bad_input"] = {"asked": [status for _, status in BAD], "got": statuses}
    await client.close()
    return found


async def stopped(load, process, rate):
    """SIGTERM under load: what was begun is answered, the rest refused, and the status is 0."""
    asked = asyncio.create_task(load.at_rate(1.0, rate))
    await asyncio.sleep(0.5)
    begun = time.perf_counter()
    process.send_signal(signal.SIGTERM)
    seen, _ = await asked
    loop = asyncio.get_running_loop()
    status = await loop.run_in_executor(None, process.wait, 60)
    took = round(time.perf_counter() - begun, 2)
    return {"status": status, "seconds": took, "answered": seen.statuses[200], "wrong": seen.wrong}


def part_faults(name, part, *more):
    """What does not hold of one load, in words; `more` are further counts that must be 0."""
    counts = ("lost", "wrong", "503_without_retry_after", *more)
    wrong = [f"{name}: {part[what]} {what}" for what in counts if part[what]]
    strange = sorted({*part["statuses"]} - {"200", "503"})
    return [*wrong, f"{name}: statuses {strange}"] if strange else wrong


def verdict(found):
    """What does not hold, in words."""
    wrong = part_faults("killed", found["killed"])
    for name in ("capacity", "even_70", "poisson_70", "overload_300"):
        wrong += part_faults(name, found[name], "asked_again")
    even = found["even_70"]
    if even["p99_ms"] >= 2 * even["p50_ms"]:
        wrong.append(f"p99 is {even['p99_ms'] / even['p50_ms']:.2f} times p50 at 70% load")
    if found["bad_input"]["asked"] != found["bad_input"]["got"]:
        wrong.append("bad input")
    if not found["overload_300"]["statuses"].get("503"):
        wrong.append("the queue was never full under overload")
    if found["stopped"]["status"] or found["stopped"]["wrong"]:
        wrong.append(f"stopped: {found['stopped']}")
    return wrong


def start(arguments):
    """The server's process and its port."""
    root = Path(__file__).resolve().parents[1]
    if arguments.fake:
        order = {"per_batch": PER_BATCH, "per_row": PER_ROW}
        settings = {"port": 0, "no_fp32": True, "queue": 64, "workers": arguments.workers, "order": order}
        command = [sys.executable, "-m", "tests.support.fake_served", json.dumps(settings)]
    else:
        command = [sys.executable, "-m", "qdqbench", "serve", arguments.run, "--port", "0", "--no-fp32"]
        command += ["--queue", "64", "--workers", str(arguments.workers)]
        command += ["--max-wait-ms", str(arguments.max_wait_ms)]
    where = {"cwd": root} if "tests.support.fake_served" in command else {}
    process = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, text=True, **where)
    while line := process.stdout.readline():
        if "http://127.0.0.1:" in line:
            return process, int(line.partition("http://127.0.0.1:")[2].split()[0].split("/")[0])
    raise SystemExit("the server did not start")


def numbers(count, seed=0):
    """Texts of 1 to 7 digits, for the fake engine."""
    draw = random.Random(seed)
    return [str(draw.randrange(10 ** draw.randint(1, 7))) for _ in range(count)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "run", nargs="?", help="run directory of a classification or regression of single texts"
    )
    parser.add_argument("--fake", action="store_true")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--texts", type=Path, help="one a line; at most 200 are used")
    parser.add_argument("--batch", type=int, default=32, help="clients that make 100%% load")
    parser.add_argument("--max-wait-ms", type=float, default=2.0, help="of the server of a run")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    texts = numbers(200)
    if arguments.texts:
        texts = [line for line in arguments.texts.read_text(encoding="utf-8").splitlines() if line][:200]
    process, port = start(arguments)
    try:
        load = Load(port, texts)
        found = asyncio.run(_all(load, process, arguments))
    finally:
        process.kill()
    run = "fake" if arguments.fake else Path(arguments.run).name
    about = {"workers": arguments.workers, "max_wait_ms": arguments.max_wait_ms, "run": run}
    return tell(found, about, verdict(found), arguments.out)


def tell(found, about, wrong, out):
    """Print and write what was found; the exit status."""
    machine = {"cpu": str(find_cpu()), "load_average": os.getloadavg(), "python": platform.python_version()}
    found |= {"machine": machine | about, "does_not_hold": wrong}
    text = json.dumps(found, indent=2)
    print(text)
    if out:
        out.write_text(text + "\n")
    return bool(wrong)


async def _all(load, process, arguments):
    found = await measure(load, process.pid, arguments.seconds, arguments.batch)
    found["stopped"] = await stopped(load, process, found["even_70"]["rate"])
    await load.close()
    return found


if __name__ == "__main__":
    sys.exit(main())
