"""Figures of the load test in the documents are those of its file, and the file says that all of it held."""

import asyncio
import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from scipy.stats import linregress
from tools import load_serve
from tools.load_serve import (
    SAMPLE_S,
    SOAKED,
    Load,
    Seen,
    mixed,
    remember,
    soak_table,
    soak_verdict,
    table,
    verdict,
)

ROOT = Path(__file__).parents[3]


def test_the_document_has_the_figures_of_the_file():
    found = json.loads((ROOT / "docs" / "measured-serve" / "fake.json").read_text())
    text = (ROOT / "docs" / "how-to" / "serve.md").read_text()
    assert found["does_not_hold"] == verdict(found) == []
    assert table(found) in text
    assert f"{found['capacity']['answered_per_s']} answers a second" in text
    assert f"{len(found['killed']['replaced_after_s'])} workers were killed" in text
    assert found["machine"]["cpu"] in text


def test_what_does_not_hold_is_found():
    found = json.loads((ROOT / "docs" / "measured-serve" / "fake.json").read_text())
    found["overload_300"] |= {"lost": 2, "without": 0}
    found["killed"]["statuses"] |= {"500": 1}
    found["even_70"]["p99_ms"] = 2 * found["even_70"]["p50_ms"]
    found["stopped"]["status"] = 1
    assert len(verdict(found)) == 4


def test_the_document_has_the_figures_of_the_soak():
    found = json.loads((ROOT / "docs" / "measured-serve" / "soak.json").read_text())
    text = (ROOT / "docs" / "how-to" / "serve.md").read_text()
    assert found["does_not_hold"] == soak_verdict(found) == []
    assert soak_table(found) in text
    assert found["soak_70"]["tasks"]["all"]["seconds"] >= 3600
    assert found["overload_300"]["tasks"]["all"]["seconds"] >= 600
    kept = found["memory"]["kept"]
    low, high = kept["ci95"]
    assert f"{kept['slope_mb_per_h']} MB an hour (95% interval {low} to {high})" in " ".join(text.split())
    late = kept["means_mb"][1:]
    slope = linregress([5 * n / 60 for n in range(len(late))], late).slope
    assert f"slope is {slope:.1f} MB an hour" in " ".join(text.split())
    full = found["capacity"]["tasks"]["all"]
    assert f"{full['answered_per_s']} answers a second" in text
    assert f"{full['statuses']['503']:,} of the {full['requests']:,} requests got 503" in " ".join(
        text.split()
    )
    killed = found["soak_70"]["killed"] + found["overload_300"]["killed"]
    assert f"{killed} workers were killed" in text
    assert f"seed {found['machine']['seed']}" in text
    assert f"was at most {found['memory']['most_mb'][1]} MB" in text


def test_what_does_not_hold_in_a_soak_is_found():
    found = json.loads((ROOT / "docs" / "measured-serve" / "soak.json").read_text())
    found["soak_70"]["tasks"]["all"] |= {"lost": 1, "wrong": 1}
    found["overload_300"]["tasks"]["all"]["statuses"]["500"] = 1
    found["memory"]["kept"]["ci95"] = [20.0, 30.0]
    assert len(soak_verdict(found)) == 4


@pytest.mark.parametrize("leak", [0.0, 40.0])  # MB an hour
def test_a_leak_is_told_from_noise(leak):
    draw = random.Random(0)
    times = [SAMPLE_S * n for n in range(720)]
    start = [
        300 * 2.0 ** -(at / 60) for at in times
    ]  # what is loaded at first use, until the warm-up is over
    rows = [
        (at, 500 - more + leak * at / 3600 + draw.gauss(0, 1), 900.0)
        for at, more in zip(times, start, strict=True)
    ]
    low, high = remember(rows, 3600)["kept"]["ci95"]
    assert low < leak < high
    assert high - low < 2


def test_the_peak_of_the_overload_is_of_the_overload_alone(monkeypatch):
    taken = []

    async def watch(spared, memory):
        taken.append(memory)
        await asyncio.sleep(3600)

    class Quiet(Load):
        async def learn(self):
            pass

        async def closed(self, seconds, clients):
            return Seen(), 1.0

        async def at_rate(self, seconds, rate, **_):
            await asyncio.sleep(0)
            taken[0].append((0.0, 600.0, 900.0) if seconds > 30 else (0.0, 500.0, 1000.0))
            return Seen(), 1.0

    for name, value in {
        "Load": Quiet,
        "watch": watch,
        "workers_of": lambda pid: [pid],
        "remember": lambda memory, seconds: {},
    }.items():
        monkeypatch.setattr(load_serve, name, value)
    servers = {name: (SimpleNamespace(pid=place), 0) for place, name in enumerate(SOAKED)}
    with ThreadPoolExecutor(1) as apart:  # a browser of other tests may keep a loop in this thread
        found = apart.submit(asyncio.run, load_serve.soak(servers, 1, 0)).result()
    assert found["memory"] == {"most_mb": [600.0, 1000.0], "overload_300_most_mb": [500.0, 1000.0]}


@pytest.mark.parametrize("task", SOAKED)
def test_requests_of_a_soak_are_mixed_and_their_answers_compared(task):
    requests = mixed(task, 50)
    assert {request["model"] for request in requests} == {"engine", "fp32"}
    (name,) = {key for request in requests for key in request if key != "model"}
    assert {len(request[name]) for request in requests} == {1, 2, 3, 4}
    load = Load(0, requests)
    load.expected = [[{"score": place}] for place in range(50)]
    assert load.right(3, [{"score": 3}])
    assert not load.right(3, [{"score": 4}])
    assert not load.right(3, [{"score": 3}, {"score": 3}])
