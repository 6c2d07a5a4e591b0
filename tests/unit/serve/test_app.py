"""What the endpoints answer, good and bad, without a process or a socket."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from qdqbench.quantize.core.files import LOOK
from qdqbench.quantize.serve import guard
from qdqbench.quantize.serve.app import PAGES, Service
from qdqbench.quantize.serve.metrics import Metrics
from qdqbench.quantize.serve.pool import Unavailable
from qdqbench.quantize.serve.served import Limits

from ...support.fake_served import fake_served
from ...support.fake_worker import value
from ...support.http_client import call, finished

LIMITS = Limits(texts=4, characters=100, body_bytes=2000, timeout_s=0.2)


class Pool:
    """Answers at once."""

    capacity, alive, full = 16, 1, False

    def require_room(self):
        if self.full:
            raise self.unavailable("the queue is full")

    def unavailable(self, why):
        return Unavailable(why, 7)

    async def answers(self, rows):
        return [np.array([value(ids)], dtype=np.float32) for ids, _ in rows]


@pytest.fixture
def service():
    pools = {"engine": Pool()}
    return Service(fake_served(), pools, Metrics(), limits=LIMITS, hosts=guard.LOOPBACK)


def ask(service, method, path, body=b"", headers=None, **more):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, headers, made = finished(call(service.app, method, path, body, headers, **more))
    return (
        status,
        headers,
        json.loads(made) if headers["content-type"] == "application/json" else made.decode(),
    )


def refused(service, status, sentence, *arguments, **more):
    made = ask(service, *arguments, **more)
    assert (made[0], [*made[2]]) == (status, ["error"]), made
    assert re.search(sentence, made[2]["error"]), made[2]["error"]
    assert "\n" not in made[2]["error"]
    assert len(made[2]["error"]) < 300
    return made[1]


def predict(service, body, **more):
    return ask(service, "POST", "/v1/predict", body, **more)


def test_an_answer_for_each_text(service):
    status, headers, made = predict(service, {"texts": ["12", "", "9" * 80]})
    assert status == 200
    assert made["model"] == "engine"
    assert [answer["score"] for answer in made["answers"][:2]] == [12, 0]
    assert [(answer["tokens"], answer["truncated"]) for answer in made["answers"]] == [
        (4, False),
        (2, False),
        (64, True),
    ]
    assert headers["content-security-policy"].startswith("default-src 'none'")
    assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        (b"", 400, "not JSON"),
        (b'{"texts": ["a"', 400, "not JSON"),
        (b'{"texts": ["\xff"]}', 400, "not JSON"),
        (b'{"texts": ["\\ud800"]}', 400, "not JSON"),
        (b"[" * 1900, 400, "not JSON"),
        (b"9" * 1900, 422, "must be an object"),
        (b'["a"]', 422, "must be an object with model and texts"),
        ({"text": ["a"]}, 422, "the field 'text' is not known; there are model, texts"),
        ({"te\nxt<b>": 1}, 422, "field 'te xt<b>' is not known"),
        ({}, 422, "texts: Field required"),
        ({"texts": []}, 422, "at least 1"),
        ({"texts": ["a", 1]}, 422, r"texts\.1: Input should be a valid string"),
        ({"texts": "a"}, 422, "texts: Input should be a valid list"),
        ({"texts": ["a"], "model": "int8"}, 422, "model: Input should be 'engine' or 'fp32'"),
        ({"texts": ["a"], "model": "fp32"}, 422, "started without the FP32 twin"),
        ({"texts": ["a"] * 5}, 413, "5 texts are more than the 4"),
        ({"texts": ["a" * 101]}, 413, "101 characters, more than the 100"),
        ({"texts": ["a" * 2000]}, 413, "the body has more than 2000 bytes"),
    ],
)
def test_bad_bodies_are_told_what_is_wrong(service, body, status, sentence):
    refused(service, status, sentence, "POST", "/v1/predict", body)


def test_bad_requests_are_told_what_is_wrong(service):
    good = b'{"texts": ["1"]}'
    refused(service, 404, "nothing here", "POST", "/v1/embed", good)
    refused(service, 404, "nothing here", "GET", "/../../etc/passwd")
    assert refused(service, 405, "this method", "GET", "/v1/predict")["allow"] == "POST"
    refused(service, 415, "must be JSON", "POST", "/v1/predict", good, {"content-type": "text/plain"})
    # a page elsewhere whose name is pointed at this machine
    refused(service, 421, "answers to 127.0.0.1", "POST", "/v1/predict", good, {"host": "evil.example:8000"})
    # sizes that are told or not, and a body that does not come
    told = {"content-length": "9999"}
    assert refused(service, 413, "2000 bytes", "POST", "/v1/predict", good, told)["connection"] == "close"
    refused(service, 413, "2000 bytes", "POST", "/v1/predict", chunks=[b"x" * 500] * 5)
    refused(service, 408, "did not come within 0.2 s", "POST", "/v1/predict", chunks=[b"{", 5.0, b"}"])
    assert finished(call(service.app, "POST", "/v1/predict", chunks=[])) is None  # the client has gone


def test_no_room_no_worker_and_the_end_are_503_with_a_time(service, monkeypatch):
    assert ask(service, "GET", "/health/ready")[0] == 200
    service.pools["engine"].full = True
    assert (
        refused(service, 503, "the queue is full", "POST", "/v1/predict", {"texts": ["1"]})["retry-after"]
        == "7"
    )
    service.pools["engine"].full, service.draining = False, True
    assert (
        refused(service, 503, "the server stops", "POST", "/v1/predict", {"texts": ["1"]})["retry-after"]
        == "7"
    )
    assert ask(service, "GET", "/health")[0] == 503
    service.draining, service.pools["engine"].alive = False, 0
    assert ask(service, "GET", "/health/ready")[0] == 503
    assert ask(service, "GET", "/health/live")[2] == {"live": True}
    monkeypatch.setattr(guard, "MOST_REQUESTS", 0)
    assert refused(service, 503, "too many", "POST", "/v1/predict", {"texts": ["1"]})["retry-after"] == "1"


def test_what_fails_inside_is_a_500_without_its_insides(service, capsys):
    refused(service, 500, "NaN or infinite", "POST", "/v1/predict", {"texts": ["nan"]})

    async def broken(rows):
        raise ZeroDivisionError("secret")

    service.pools["engine"].answers = broken
    refused(
        service,
        500,
        "^the server failed at this request; its log says why$",
        "POST",
        "/v1/predict",
        {"texts": ["1"]},
    )
    assert "ZeroDivisionError: secret" in capsys.readouterr().err


def test_metrics_name_endpoints_and_never_what_a_client_sent(service):
    predict(service, {"texts": ["1"]})
    ask(service, "GET", '/x"}\n')
    text = ask(service, "GET", "/metrics")[2]
    assert 'qdqbench_requests_total{endpoint="/v1/predict",status="200"} 1.0' in text
    assert 'qdqbench_requests_total{endpoint="other",status="404"} 1.0' in text
    assert "/x" not in text


def test_the_description_is_of_this_run(service):
    told = ask(service, "GET", "/openapi.json")[2]
    assert told["openapi"].startswith("3.1")
    operation = told["paths"]["/v1/predict"]["post"]
    schemas, found = told["components"]["schemas"], []

    def follow(value):
        if isinstance(value, dict):
            if "$ref" in value:
                name = value["$ref"].removeprefix("#/components/schemas/")
                found.append(name)
                assert name in schemas
            for each in value.values():
                follow(each)
        elif isinstance(value, list):
            for each in value:
                follow(each)

    follow(told)
    assert {*found} >= {"Texts", "Score", "Answers", "Error"}
    assert {*operation["responses"]} >= {"200", "400", "413", "422", "503"}
    assert ask(service, "GET", "/v1/model")[2]["limits"]["texts"] == 4


@pytest.mark.parametrize("page", [*PAGES])
def test_pages_are_whole_and_load_nothing_from_elsewhere(service, page):
    status, headers, text = ask(service, "GET", page)
    assert status == 200
    assert headers["content-type"].endswith("; charset=utf-8")
    elsewhere = re.findall(r"https?://[^\"]+|//[a-z]+\.", text)
    assert {*elsewhere} <= {"http://www.w3.org/2000/svg"}  # the name of a format, which nobody asks for
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    assert not re.findall(r"<script>|<style>|\son\w+=|\sstyle=", text)  # nothing that the policy refuses
    for named in re.findall(r'(?:src|href)="(/[^"]*)"', text):
        assert ask(service, "GET", named)[0] == 200
    assert {path.name for path in (Path(guard.__file__).parent / "pages").iterdir()} == {
        file for file, _ in PAGES.values() if file != str(LOOK)
    }
