"""Whatever is sent to a server is answered with a 2xx or 4xx and JSON, in bounded memory.

In this process, with the tokenizer of the tiny model and answers that are made up.
"""

import asyncio
import json
import random

import psutil
import pytest

from qdqbench.quantize.standalone.texts import Encoder

from ..support import fake_served
from ..support.http_client import finished
from ..support.requests import GOOD, OTHERS, SETTINGS, TASKS, draw_request
from ..support.site import call, opened

GROWTH = 100 << 20  # bytes of the process over all cases


async def fuzz(name, cases, seed):
    """Statuses that were seen, of so many cases: at the run's endpoint, and at those of other servers."""
    draw, seen = random.Random(seed), {}
    with opened(fake_served.tiny_served(name), SETTINGS, ("localhost",)) as made:
        made.front.start(asyncio.get_running_loop())
        made.look()
        paths = [*made.front.interfaces.forms]
        for number in range(cases):
            path = paths[number % len(paths)] if number % 3 == 0 else paths[0]
            good = GOOD[name] if path == paths[0] else OTHERS[name][path]
            method, asked, body, headers, chunks = draw_request(good, path, draw)
            told = (method, asked[:60], body[:300], headers)
            answer = await call(made, method, asked, body, headers, chunks=chunks)
            if answer is None:  # a head that announces more than comes
                assert {"content-length", "transfer-encoding"} & {*headers} or not body, told
                continue
            status, answered, text = answer
            assert 200 <= status < 500, (told, text)
            if method == "HEAD":
                assert answered["content-type"], told
            elif answered["content-type"] == "application/json":
                value = json.loads(text)
                if status >= 400:
                    assert [*value] == ["error"], told
                    sentence = value["error"]
                    sentence = sentence["message"] if isinstance(sentence, dict) else sentence
                    assert len(sentence) < 400, told
                    assert sentence.isprintable(), told
            else:
                assert status < 300, told  # a page
            seen[status] = seen.get(status, 0) + 1
        assert made.front.queued == 0
    return seen


def test_windows_of_a_long_context_are_bounded_before_they_are_made(monkeypatch):
    question, context = " ".join(["what"] * 39), "a " * 990
    asked = {"questions": [{"question": question, "context": context}]}
    many = {"questions": [{"question": "what", "context": context}] * 4}
    monkeypatch.setattr(Encoder, "encode", None)  # nobody calls it

    async def ask(body):
        with opened(fake_served.tiny_served("qa"), SETTINGS) as made:
            made.front.start(asyncio.get_running_loop())
            status, _, answer = await call(made, "POST", "/v1/qa", json.dumps(body).encode())
            assert made.front.queued == 0
            return status, answer.decode()

    status, answer = finished(ask(asked))
    assert (status, "more than 256 windows" in answer) == (422, True), answer
    status, answer = finished(ask(many))
    assert status == 413
    assert "rows, more than the 64 of the queue; send fewer" in answer


@pytest.mark.parametrize(
    "cases", [50, pytest.param(2000, marks=pytest.mark.long)], ids=["few", "many"]
)  # of each of six endpoints
def test_whatever_is_sent_is_answered(cases):
    process, seen = psutil.Process(), {}
    for name in TASKS:
        finished(fuzz(name, 20, 99))  # loads what is loaded at first use
    before = process.memory_info().rss
    for seed, name in enumerate(TASKS):
        for status, count in finished(fuzz(name, cases, seed + cases)).items():
            seen[status] = seen.get(status, 0) + count
    assert process.memory_info().rss - before < GROWTH
    assert sum(seen.values()) > 0.8 * cases * len(TASKS)
    assert {*seen} >= {200, 400, 404, 405, 413, 415, 422}
