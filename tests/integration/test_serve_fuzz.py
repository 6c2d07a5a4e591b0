"""Whatever is sent to a server is answered with a 2xx or 4xx and JSON, in bounded memory.

In this process, with the tokenizer of the tiny model and answers that are made up.
"""

import asyncio
import json
import random

import psutil
import pytest

from qdqbench.quantize.standalone.server.settings import Settings
from qdqbench.quantize.standalone.texts import Encoder

from ..support import fake_served
from ..support.http_client import finished
from ..support.site import call, opened
from .heads import TAGS
from .tiny import FILLERS, WORDS

SETTINGS = Settings(max_texts=8, max_characters=2000, body_bytes=20 << 10, timeout=0.5, queue=64)
GROWTH = 100 << 20  # bytes of the process over all cases
PAIR = {"texts": ["a text", "its second text"]}
TASKS = {  # by endpoint: what model.json tells, and the width of an answer; negative: of each token
    "predict": ({"kind": "classification", "labels": ["bad", "good"]}, 2),
    "predict pairs": ({"kind": "regression", **PAIR}, 1),
    "embed": ({"kind": "embedding of texts"}, 16),
    "rank": ({"kind": "re-ranking", **PAIR}, 1),
    "tokens": ({"kind": "token classification", "labels": [*TAGS], "words": True, "over_tokens": True}, -5),
    "qa": (
        {
            "kind": "question answering",
            "over_tokens": True,
            "stride": 21,
            "truncation": "only_second",
            **PAIR,
        },
        -2,
    ),
}
GOOD = {
    "predict": {"texts": ["a good film"]},
    "predict pairs": {"pairs": [["a good film", "it is"]]},
    "embed": {"texts": ["a good film"]},
    "rank": {"query": "good", "passages": ["a film", "awful"]},
    "tokens": {"sentences": [["a", "good", "film"]]},
    "qa": {"questions": [{"question": "what", "context": "a good film"}], "may_be_unanswerable": True},
}
TEI = {"embed": {"inputs": ["a good film"]}, "rank": {"query": "good", "texts": ["a film"]}}
OTHERS = {("/v1/embeddings", "embed"): {"input": ["a good film"], "encoding_format": "base64"}}
OTHERS |= {(path, "embed"): TEI["embed"] for path in ("/", "/embed")}
OTHERS |= {(path, "rank"): TEI["rank"] for path in ("/", "/rerank")}
OTHERS |= {(path, "predict"): {"inputs": "a good film"} for path in ("/", "/predict")}
OTHERS |= {(path, "predict pairs"): {"inputs": [["a", "b"]]} for path in ("/", "/predict")}
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
    """Statuses that were seen, of so many cases: at the run's endpoint, and at those of other servers."""
    draw, seen = random.Random(seed), {}
    with opened(fake_served.tiny_served(name), SETTINGS, ("localhost",)) as made:
        made.front.start(asyncio.get_running_loop())
        made.look()
        paths = [*made.front.interfaces.forms]
        for number in range(cases):
            path = paths[number % len(paths)] if number % 3 == 0 else paths[0]
            good = GOOD[name] if path == paths[0] else OTHERS[path, name]
            method, asked, body, headers, chunks = case(good, path, draw)
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
