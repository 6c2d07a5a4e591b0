"""A bounded load test of `qdqbench serve` over loopback: what it holds, and figures as JSON.

    python tools/load_serve.py RUN [--seconds 20] [--workers 1] [--texts FILE] [--out load.json]
    python tools/load_serve.py --fake
    python tools/load_serve.py --soak 60

With `--fake` the engine is one whose times are known: 40 ms a batch and 4 ms a row. Ends by itself after some
six times `--seconds`; exit status 1 where something does not hold.

With `--soak` three servers of two workers each (single texts, pairs, question answering; requests of one to
four of them, short and long, to both models) hold so many minutes at 70% of their capacity, and a sixth of
that at 300%, while workers are killed at random. Their engine takes 200 ms a batch and 20 ms a row.

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
from importlib import metadata
from pathlib import Path

import psutil

from qdqbench.quantize.utils.system.cpu import find_cpu

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from integration.tiny import FILLERS, WORDS
from support.http_client import Client

PER_BATCH, PER_ROW = 0.040, 0.004  # s, of the fake engine
SOAKED = {"predict": 24, "predict pairs": 24, "qa": 10}  # tasks, and the clients that make 100% load
SOAK_ENGINE = {"per_batch": 0.2, "per_row": 0.02}
SAMPLE_S, BLOCK_S, WARM_UP_S = 5, 300, 600  # between looks at the memory; of their means; before the first
MOST_GROWTH = 5.0  # MB an hour, beyond which memory is not flat
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

    def add(self, other):
        self.seconds += other.seconds
        self.statuses += other.statuses
        for name in ("again", "lost", "wrong", "without_retry"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

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
        self.texts = texts  # or requests
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
        text = self.texts[place]
        return {"texts": [text]} if isinstance(text, str) else text

    def right(self, place, answers):
        if self.expected is None:
            return True
        known = self.expected[place]
        if isinstance(self.texts[place], dict) or len(answers) != len(known):
            return answers == known
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


def table(found):
    """The figures as docs/how-to/serve.md has them."""
    lines = ["| load | p50 ms | p99 ms | p99 / p50 | answered | 503 | lost, twice or mixed up |"]
    lines.append("|---|---|---|---|---|---|---|")
    names = {
        "capacity": "100%",
        "even_70": "70%, even times",
        "poisson_70": "70%, Poisson",
        "overload_300": "300%",
        "killed": "50%, workers killed",
    }
    for name, told in names.items():
        part = found[name]
        statuses = (part["statuses"].get(status, 0) for status in ("200", "503"))
        cells = [told, part["p50_ms"], part["p99_ms"], f"{part['p99_ms'] / part['p50_ms']:.2f}"]
        lines.append("| " + " | ".join(map(str, [*cells, *statuses, part["lost"] + part["wrong"]])) + " |")
    return "\n".join(lines)


def start(arguments, order=None):
    """The server's process and its port."""
    root = Path(__file__).resolve().parents[1]
    if arguments.fake or order:
        settings = {
            "port": 0,
            "no_fp32": not order,
            "queue": 64,
            "workers": 2 if order else arguments.workers,
        }
        settings["order"] = order or {"per_batch": PER_BATCH, "per_row": PER_ROW}
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


def mixed(endpoint, count, seed=0):
    """Requests of one to four texts, pairs or questions of 3 to 60 words, one of five to the FP32 model."""
    draw = random.Random(f"{endpoint} {seed}")
    words = (*WORDS, *FILLERS)

    def text(most=60):
        return " ".join(draw.choice(words) for _ in range(draw.randint(3, most)))

    kinds = {
        "predict": ("texts", text),
        "predict pairs": ("pairs", lambda: [text(30), text(30)]),
        "qa": ("questions", lambda: {"question": text(8), "context": text(150)}),
    }
    name, one = kinds[endpoint]
    return [
        {name: [one() for _ in range(draw.randint(1, 4))], "model": draw.choice(["engine"] * 4 + ["fp32"])}
        for _ in range(count)
    ]


async def soak(servers, minutes, seed):
    """All phases of a soak; `servers` has the process and port of each task."""
    loads = {
        name: Load(port, mixed(name, 200, seed), "/v1/" + name.split()[0])
        for name, (_, port) in servers.items()
    }
    spared = {process.pid: workers_of(process.pid)[0] for process, _ in servers.values()}

    async def phase(name, run):
        began, before = time.perf_counter(), len(kills)
        seen = dict(zip(loads, await asyncio.gather(*map(run, loads)), strict=True))
        rows = {task: part.told(duration) for task, (part, duration) in seen.items()}
        total = Seen()
        for part, _ in seen.values():
            total.add(part)
        rows["all"] = total.told(max(duration for _, duration in seen.values()))
        about = {"killed": len(kills) - before, "from_s": round(began - start, 1), "tasks": rows}
        found[name] = about
        return {task: part.statuses[200] / duration for task, (part, duration) in seen.items()}

    found, kills, memory, start = {}, [], [], time.perf_counter()
    await asyncio.gather(*(load.learn() for load in loads.values()))
    rates = await phase("capacity", lambda task: loads[task].closed(min(60, 6 * minutes), SOAKED[task]))
    begun = asyncio.create_task(watch(spared, memory)), asyncio.create_task(kill(spared, kills, seed))

    def at(share, seconds):
        return lambda task: loads[task].at_rate(seconds, share * rates[task], poisson=True, seed=seed)

    await phase("soak_70", at(0.7, 60 * minutes))
    found["memory"] = remember(memory, 60 * minutes)
    overload = len(memory)
    await phase("overload_300", at(3.0, 10 * minutes))
    found["memory"] |= {"most_mb": most(memory), "overload_300_most_mb": most(memory[overload:])}
    for task in begun:
        assert not task.done(), task.exception()
        task.cancel()
    return found


async def watch(spared, memory):
    """Append MB of the processes that live throughout, and of all."""
    while True:
        kept = sum(psutil.Process(pid).memory_info().rss for pair in spared.items() for pid in pair)
        total = kept
        for server, worker in spared.items():
            for other in psutil.Process(server).children(recursive=True):
                with contextlib.suppress(psutil.Error):  # it has just ended
                    total += other.memory_info().rss if other.pid != worker else 0
        memory.append((time.perf_counter(), kept / 1e6, total / 1e6))
        await asyncio.sleep(SAMPLE_S)


async def kill(spared, kills, seed):
    """Kill a worker of a random server at random times, but never the first."""
    draw = random.Random(seed)
    while True:
        await asyncio.sleep(draw.uniform(20, 100))
        server, first = draw.choice([*spared.items()])
        if others := [pid for pid in workers_of(server) if pid != first]:
            os.kill(draw.choice(others), signal.SIGKILL)
            kills.append(time.perf_counter())


def most(memory):
    """The most MB of the processes that live throughout, and of all."""
    return [round(max(row[place] for row in memory), 1) for place in (1, 2)]


def remember(memory, seconds):
    """What memory did after the warm-up: the slope of means of five minutes, with its 95% interval."""
    import numpy as np
    from scipy import stats

    rows = np.array(memory)
    rows = rows[rows[:, 0] - rows[0, 0] >= min(WARM_UP_S, seconds / 6)]
    block = min(BLOCK_S, seconds / 12)
    blocks = ((rows[:, 0] - rows[0, 0]) // block).astype(int)
    # the last is not whole
    means = np.array([rows[blocks == each].mean(0) for each in np.unique(blocks)[:-1]])
    told = {"samples": len(rows), "blocks": len(means), "block_s": block}
    for place, name in ((1, "kept"), (2, "all")):
        fit = stats.linregress(means[:, 0] / 3600, means[:, place])
        half = stats.t.ppf(0.975, len(means) - 2) * fit.stderr
        told[name] = {
            "means_mb": means[:, place].round(2).tolist(),
            "most_mb": float(rows[:, place].max().round(1)),
            "slope_mb_per_h": round(float(fit.slope), 3),
            "ci95": [round(float(fit.slope + side * half), 3) for side in (-1, 1)],
        }
    return told


def soak_verdict(found):
    """What does not hold, in words."""
    wrong = []
    for name in ("capacity", "soak_70", "overload_300"):
        wrong += part_faults(name, found[name]["tasks"]["all"])
    if not found["memory"]["kept"]["ci95"][1] <= MOST_GROWTH:  # a NaN fails too
        wrong.append(f"memory may grow: {found['memory']['kept']}")
    if not found["soak_70"]["killed"]:
        wrong.append("no worker was killed")
    if not found["overload_300"]["tasks"]["all"]["statuses"].get("503"):
        wrong.append("the queue was never full under overload")
    if any(found["ended"]):
        wrong.append(f"ended with {found['ended']}")
    return wrong


def soak_table(found):
    """The figures of a soak as docs/how-to/serve.md has them."""
    lines = ["| load | task | requests | answered | 503 | p50 ms | p99 ms | asked again | lost or wrong |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for name, told in {"soak_70": "70%", "overload_300": "300%"}.items():
        for task, part in found[name]["tasks"].items():
            statuses = (part["statuses"].get(status, 0) for status in ("200", "503"))
            cells = [told, task, part["requests"], *statuses, part["p50_ms"], part["p99_ms"]]
            cells += [part["asked_again"], part["lost"] + part["wrong"]]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


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
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="minutes at 70%%")
    parser.add_argument("--seed", type=int, default=0, help="of a soak")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.soak:
        return soaked(arguments)
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


def soaked(arguments):
    """Start the servers of a soak, and tell what it found."""
    servers = {}
    try:
        for name in SOAKED:
            servers[name] = start(arguments, SOAK_ENGINE | {"endpoint": name})
        found = asyncio.run(soak(servers, arguments.soak, arguments.seed))
    finally:
        for process, _ in servers.values():
            process.terminate()
    found["ended"] = [process.wait(60) for process, _ in servers.values()]
    versions = {name: metadata.version(name) for name in ("uvicorn", "starlette", "fastapi", "transformers")}
    about = {"workers": 2, "engine": SOAK_ENGINE, "seed": arguments.seed, "versions": versions}
    return tell(found, about, soak_verdict(found), arguments.out)


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
