"""Requests to every endpoint: good ones, and what may come in their place."""

import json
from pathlib import Path

import yaml

from qdqbench.quantize.standalone.server.settings import Settings

from ..integration.heads import TAGS
from ..integration.tiny import FILLERS, WORDS

SETTINGS = Settings(max_texts=8, max_characters=2000, body_bytes=20 << 10, timeout=0.5, queue=64)
ODD = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
GOOD, OTHERS, VALUES = ODD["good"], ODD["others"], ODD["values"]
TASKS = {  # by endpoint: what model.json tells, and the width of an answer; negative: of each token
    name: (each["told"], each["width"]) for name, each in ODD["tasks"].items()
}
TASKS["tokens"][0]["labels"] = [*TAGS]
TEXTS = [*ODD["texts"], "漢字" * 300, "a" * 2001, "a\u0301" * 500, *FILLERS, *WORDS]
RAW = [text.encode("latin-1") for text in ODD["raw"]]
RAW += [b"1" * 5000, b"[" * 5000, b'{"a":' * 3000, b'{"texts":[' + b'"",' * 4000 + b'""]}']
METHODS = ["GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "X" * 50]


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


def draw_request(good, path, draw):
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
        method = draw.choice(METHODS)
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
