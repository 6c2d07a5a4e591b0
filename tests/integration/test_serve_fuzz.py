"""Whatever is sent to a server is answered with a 2xx or 4xx and JSON, in bounded memory.

In this process, with the tokenizer of the tiny model and answers that are made up.
"""

import json
import random
from pathlib import Path

import numpy as np
import psutil
import pytest

pytest.importorskip("fastapi", reason="needs fastapi: pip install 'qdqbench[serve]'")

from qdqbench.quantize.deployment.server.app import Service
from qdqbench.quantize.deployment.server.batches import Metrics, Model
from qdqbench.quantize.deployment.server.served import ModelFile, Served
from qdqbench.quantize.deployment.server.settings import Settings
from qdqbench.quantize.engine.profiles import Profile
from qdqbench.quantize.tasks.task import EMBED, NAMED, RERANK, get_task, with_classes
from qdqbench.quantize.utils.errors import UserError

from ..support.http_client import call, finished
from .heads import TAGS
from .tiny import FILLERS, WORDS, tokenizer

SETTINGS = Settings(max_texts=8, max_characters=2000, max_body_kb=20, timeout=0.5, queue=64)
GROWTH = 100 << 20  # bytes of the process over all cases
TASKS = {  # by endpoint: the task, and the width of an answer, of each token where it is negative
    "predict": (get_task("sst2"), 2),
    "predict pairs": (get_task("stsb"), 1),
    "embed": (EMBED, 16),
    "rank": (RERANK, 1),
    "tokens": (with_classes(NAMED["tokens"], TAGS), -5),
    "qa": (NAMED["qa"], -2),
}
GOOD = {
    "predict": {"texts": ["a good film"]},
    "predict pairs": {"pairs": [["a good film", "it is"]]},
    "embed": {"texts": ["a good film"]},
    "rank": {"query": "good", "passages": ["a film", "awful"]},
    "tokens": {"sentences": [["a", "good", "film"]]},
    "qa": {"questions": [{"question": "what", "context": "a good film"}], "may_be_unanswerable": True},
}
TEXTS = [
    "",
    " ",
    "\0",
    "\n\r\t",
    "\u202e",
    "é",
    "漢字" * 300,
    "😀",
    "\ufeff",
    "\ud7ff\ue000",
    "a" * 2001,
    "<script>",
    "{{7*7}}",
]
TEXTS += [
    "\U0010ffff",
    "a\u0301" * 500,
    "[CLS] [SEP] [PAD] [UNK]",
    "../../etc/passwd",
    "' OR 1=1 --",
    "%00%0a",
    *FILLERS,
    *WORDS,
]
VALUES = [
    None,
    True,
    False,
    0,
    -1,
    1.5,
    1e308,
    10**30,
    [],
    {},
    [[]],
    [[[]]],
    [None],
    {"": {}},
    "text",
    ["a", 1],
    [["a"]],
    [["a", "b", "c"]],
]
RAW = [
    b"",
    b"{",
    b"nul",
    b"NaN",
    b"Infinity",
    b"-",
    b"1" * 5000,
    b"[" * 5000,
    b'{"a":' * 3000,
    b"\xff\xfe{",
    b"\0",
    b'"\\ud800"',
]
RAW += [
    b'{"texts":["\\udfff"]}',
    b'{"texts":["a"],"texts":[1]}',
    b"{}" * 2,
    b"\xef\xbb\xbf{}",
    b"/**/{}",
    b'{"texts":[' + b'"",' * 4000 + b'""]}',
]


def service(name):
    task, width = TASKS[name]
    nothing = ModelFile(Path(), "")
    served = Served(
        name="fuzz",
        task=task,
        classes=task.classes or ("bad", "good"),
        tokenizer=tokenizer(),
        max_length=64,
        profiles=(Profile((1, 16), (8, 32), (32, 64)),),
        made_with="none",
        recipe="none",
        engine=nothing,
        graph=nothing,
        fp32=nothing,
    )

    def run(batch):
        rows, length = batch["input_ids"].shape
        assert length <= 64
        return np.ones((rows, length, -width) if width < 0 else (rows, width), np.float32)

    models = {"engine": Model(run, served.sizes("engine", 32), 0.0)}
    return Service(served, SETTINGS, models, Metrics(), hosts=("localhost",))


def mutated(value, draw):
    """A JSON value with one part replaced, added, repeated or removed."""
    if isinstance(value, dict) and value and draw.random() < 0.8:
        made, key = dict(value), draw.choice([*value])
        action = draw.randrange(4)
        if action == 0:
            made[key] = draw.choice([*VALUES, *TEXTS])
        elif action == 1:
            made[draw.choice([*TEXTS, "model"])] = draw.choice([*VALUES, "engine", "fp32"])
        elif action == 2:
            del made[key]
        else:
            made[key] = mutated(made[key], draw)
        return made
    if isinstance(value, list) and value and draw.random() < 0.8:
        made = list(value)
        action, place = draw.randrange(4), draw.randrange(len(value))
        if action == 0:
            made[place] = draw.choice([*VALUES, *TEXTS])
        elif action == 1:
            made = made * draw.choice([2, 7, 9, 40])
        elif action == 2:
            made[place] = mutated(made[place], draw)
        else:
            made = [*made, draw.choice([*VALUES, *TEXTS])]
        return made
    return draw.choice([*VALUES, *TEXTS])


def case(good, path, draw):
    """Method, path, body, headers and chunks of a request."""
    method, headers, kind = "POST", {}, draw.random()
    if kind < 0.55:
        value = good
        for _ in range(draw.randint(1, 4)):
            value = mutated(value, draw)
        body = json.dumps(value, ensure_ascii=draw.random() < 0.5).encode("utf-8", "surrogatepass")
    elif kind < 0.7:
        body = draw.choice(RAW)
    elif kind < 0.8:
        body = draw.randbytes(draw.choice([1, 10, 1000, 19_000, 21_000]))
    else:
        body = bytearray(json.dumps(good).encode())
        for _ in range(draw.randint(1, 5)):
            body[draw.randrange(len(body))] = draw.randrange(256)
        body = bytes(body)
    if draw.random() < 0.1:
        method = draw.choice(["GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "X" * 50])
    if draw.random() < 0.1:
        odd = ["/v1/", "/v1", "//", "/" + "a" * 5000, "/v1/model", "/é\0", "/../x", "", path + "/", "/docs"]
        path = draw.choice(odd)
    if draw.random() < 0.15:
        name = draw.choice(["content-type", "content-length", "host", "accept", "transfer-encoding"])
        headers[name] = draw.choice(
            ["", "x", "-1", "1e9", "9" * 50, "text/html", "evil:1", "application/json; x=\xff", "a" * 3000]
        )
    chunks = None
    if draw.random() < 0.1:
        at = draw.randrange(len(body) + 1)
        chunks = [body[:at], body[at:]]
    return method, path, body, headers, chunks


async def fuzz(name, cases, seed):
    """Statuses that were seen, of so many cases."""
    made, draw, seen = service(name), random.Random(seed), {}
    path = made.describe()["endpoint"]
    async with made._lifespan(None):
        for _ in range(cases):
            method, asked, body, headers, chunks = case(GOOD[name], path, draw)
            told = (method, asked[:60], body[:300], headers)
            answer = await call(made, method, asked, body, headers, chunks=chunks)
            assert answer is not None, told
            status, answered, text = answer
            assert 200 <= status < 500, (told, text)
            if method == "HEAD":
                assert answered["content-type"], told
            elif answered["content-type"] == "application/json":
                value = json.loads(text)
                if status >= 400:
                    assert [*value] == ["error"], told
                    assert len(value["error"]) < 400, told
                    assert value["error"].isprintable(), told
            else:
                assert status < 300, told  # a page
            seen[status] = seen.get(status, 0) + 1
    return seen


def test_windows_of_a_long_context_are_bounded_before_they_are_made():
    context, made = "a " * 990, service("qa")
    long = {"question": [" ".join(["what"] * 39)], "context": [context]}
    assert made.served.count_rows(long) > 900  # windows a token apart
    with pytest.raises(UserError, match="in 969 windows, and 256 are the most"):
        made.served.encode(long)
    short = {"question": ["what"] * 2, "context": [context, "a"]}
    assert made.served.count_rows(short) == len(made.served.encode(short)) < 40
    object.__setattr__(made.served, "encode", None)  # nobody calls it
    body = {"questions": [{"question": long["question"][0], "context": context}]}

    async def ask():
        async with made._lifespan(None):
            return await call(made, "POST", "/v1/qa", json.dumps(body).encode())

    status, _, answer = finished(ask())
    assert status == 413
    assert "rows, more than the 64 of the queue; send fewer" in answer.decode()
    assert made.queued == 0


@pytest.mark.parametrize(
    "cases", [50, pytest.param(2000, marks=pytest.mark.long)], ids=["few", "many"]
)  # of each of six endpoints
def test_whatever_is_sent_is_answered(cases):
    import seqeval.metrics.sequence_labeling  # noqa: F401  (which a server of tokens loads at its start)

    process, seen = psutil.Process(), {}
    for name in TASKS:
        finished(fuzz(name, 20, 99))  # loads what is loaded at first use
    before = process.memory_info().rss
    for seed, name in enumerate(TASKS):
        for status, count in finished(fuzz(name, cases, seed + cases)).items():
            seen[status] = seen.get(status, 0) + count
    assert process.memory_info().rss - before < GROWTH
    assert sum(seen.values()) == cases * len(TASKS)
    assert {*seen} >= {200, 400, 404, 405, 413, 415, 422}
