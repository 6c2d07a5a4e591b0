"""What the endpoints answer, good and bad, without a process or a socket."""

import asyncio
import contextlib
import json
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from qdqbench.quantize.deployment.server import app
from qdqbench.quantize.deployment.server.app import PAGES, Service
from qdqbench.quantize.deployment.server.batches import Metrics, Model, warm_up
from qdqbench.quantize.deployment.server.served import require_short_words
from qdqbench.quantize.deployment.server.settings import Settings
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.files import LOOK

from ....support.fake_served import Engine, fake_served
from ....support.http_client import call, finished

LIMITS = Settings(max_texts=4, max_characters=100, max_body_kb=2, timeout=0.5, queue=16)
HOSTS = ("localhost", "127.0.0.1")


def make_service(served=None, settings=LIMITS, slowest_s=0.0, leave=lambda: None, **engine):
    served = served or fake_served(**engine)
    models = {"engine": Model(Engine(**engine), served.sizes("engine", 8), slowest_s)}
    return Service(served, settings, models, Metrics(), hosts=HOSTS, leave=leave)


async def called(service, method, path, body=b"", headers=None, **more):
    """Status, headers and value of an answer."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, headers, made = await call(service, method, path, body, headers, **more)
    value = json.loads(made) if headers.get("content-type") == "application/json" else made.decode()
    return status, headers, value


def within(work, **options):
    """The result of a coroutine of a service that works."""

    async def main():
        service = make_service(**options)
        async with service._lifespan(None):
            return await work(service)

    return finished(main())


def ask(*arguments, headers=None, chunks=None, **options):
    return within(lambda service: called(service, *arguments, headers=headers, chunks=chunks), **options)


def refused(status, sentence, *arguments, **more):
    return check_refusal(ask(*arguments, **more), status, sentence)


def check_refusal(made, status, sentence):
    assert (made[0], [*made[2]]) == (status, ["error"]), made
    assert re.search(sentence, made[2]["error"]), made[2]["error"]
    assert "\n" not in made[2]["error"]
    assert len(made[2]["error"]) < 300
    return made[1]


def predict(body, **more):
    return ask("POST", "/v1/predict", body, **more)


def test_an_answer_for_each_text():
    status, headers, made = predict({"texts": ["12", "", "9" * 80]})
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
        (b"", 422, "Field required"),
        (b'{"texts": ["a"', 400, "not JSON"),
        (b'{"texts": ["\xff"]}', 400, "pars"),
        (b'{"texts": ["\\ud800"]}', 422, "half a surrogate pair"),
        (b"[" * 1900, 400, "pars"),
        (b"9" * 1900, 422, "valid dictionary"),
        (b'["a"]', 422, "valid dictionary"),
        ({"text": ["a"]}, 422, "the field 'text' is unknown; there are model, texts"),
        ({"te\nxt<b>": 1}, 422, r"the field 'te.*xt<b>' is unknown"),
        ({}, 422, "texts: Field required"),
        ({"texts": []}, 422, "at least 1"),
        ({"texts": ["a", 1]}, 422, r"texts\.1: Input should be a valid string"),
        ({"texts": "a"}, 422, "texts: Input should be a valid list"),
        ({"texts": ["a"], "model": "int8"}, 422, "model: Input should be 'engine' or 'fp32'"),
        ({"texts": ["a"], "model": "fp32"}, 422, "started without the FP32 model"),
        ({"texts": ["a"] * 5}, 413, "5 texts are more than the 4"),
        ({"texts": ["a" * 101]}, 413, "101 characters, more than the 100"),
        ({"texts": ["a" * 2100]}, 413, "the body has more than 2048 bytes"),
    ],
)
def test_bad_bodies_are_told_what_is_wrong(body, status, sentence):
    refused(status, sentence, "POST", "/v1/predict", body)


def test_bad_requests_are_told_what_is_wrong():
    good = b'{"texts": ["1"]}'
    refused(404, "nothing here", "POST", "/v1/embed", good)
    refused(404, "nothing here", "GET", "/../../etc/passwd")
    assert refused(405, "another method", "GET", "/v1/predict")["allow"] == "POST"
    refused(415, "must be JSON", "POST", "/v1/predict", good, headers={"content-type": "text/plain"})
    # a page elsewhere whose name is pointed at this machine
    refused(421, "answers to 127.0.0.1", "POST", "/v1/predict", good, headers={"host": "evil.example:8000"})
    # sizes that are given or not, both ways to give them, and a body that does not come
    long = refused(413, "2048 bytes", "POST", "/v1/predict", good, headers={"content-length": "9999"})
    assert long["connection"] == "close"
    refused(413, "2048 bytes", "POST", "/v1/predict", chunks=[b"x" * 500] * 5)
    both = {"content-length": "16", "transfer-encoding": "chunked"}
    assert refused(400, "not both", "POST", "/v1/predict", good, headers=both)["connection"] == "close"
    refused(408, "did not come within 0.5 s", "POST", "/v1/predict", chunks=[b"{", 5.0, b"}"])
    gone = within(lambda service: call(service, "POST", "/v1/predict", chunks=[]))
    assert gone is None  # the client has gone


def test_a_full_queue_is_503_at_once_and_not_ready():
    async def main(service):
        post = ("POST", "/v1/predict")
        slow = asyncio.create_task(called(service, *post, {"texts": ["1"] * 4}))
        await asyncio.sleep(0.05)
        assert (await called(service, "GET", "/health/ready"))[2] == {"ready": True, "full": False}
        start = time.monotonic()
        made = await called(service, *post, {"texts": ["1"] * 3})  # of six rows four are taken
        assert int(check_refusal(made, 503, "the queue is full")["retry-after"]) >= 1
        more = asyncio.create_task(called(service, *post, {"texts": ["1"] * 2}))
        await asyncio.sleep(0.01)
        status, _, ready = await called(service, "GET", "/health/ready")
        assert (status, ready) == (503, {"ready": False, "full": True})
        assert "qdqbench_queue_rows 6.0" in (await called(service, "GET", "/metrics"))[2]
        assert time.monotonic() - start < 0.1
        assert (await called(service, "GET", "/health/live"))[2] == {"live": True}
        assert [(await each)[0] for each in (slow, more)] == [200, 200]
        assert service.queued == 0
        await called(service, *post, {"texts": ["1"]})

    within(main, settings=LIMITS.model_copy(update={"queue": 6}), per_batch=0.15)


def test_rows_count_from_arrival_so_that_nobody_waits_for_the_tokenizer_in_vain():
    served, texts = fake_served(), ["1"] * 4

    def tokenize_slowly(columns, prompt):
        time.sleep(0.2)
        return type(served).encode(served, columns)

    object.__setattr__(served, "encode", tokenize_slowly)

    async def main(service):
        start = time.monotonic()
        posts = (called(service, "POST", "/v1/predict", {"texts": texts}) for _ in range(8))
        made = await asyncio.gather(*posts)
        assert sorted(each[0] for each in made) == [200, 200, *[503] * 6]
        assert time.monotonic() - start < 0.6  # 1.6 s, were all of them tokenized

    within(main, served=served, settings=LIMITS.model_copy(update={"queue": 8}))


def test_an_answer_that_takes_too_long_is_503_and_frees_its_rows(caplog):
    async def main(service):
        made = await called(service, "POST", "/v1/predict", {"texts": ["1"] * 4})
        check_refusal(made, 503, "no answer within 0.5 s")
        assert service.queued == 0

    within(main, per_batch=0.6, slowest_s=0.6)
    assert not caplog.records  # as of futures that nobody awaits


def test_too_many_requests_at_once_are_503_but_health_is_answered(monkeypatch):
    monkeypatch.setattr(app, "MOST_POSTS", 1)

    async def main(service):
        stuck = asyncio.create_task(called(service, "POST", "/v1/predict", chunks=[b"{", 0.2, b"}"]))
        await asyncio.sleep(0.01)
        made = await called(service, "POST", "/v1/predict", {"texts": ["1"]})
        assert check_refusal(made, 503, "too many requests")["retry-after"] == "1"
        assert (await called(service, "GET", "/health"))[0] == 503  # as POST
        assert (await called(service, "GET", "/health/live"))[0] == 200
        await stuck
        assert (await called(service, "GET", "/health/ready"))[0] == 200

    within(main)


def test_what_fails_inside_is_a_500_without_its_insides(caplog):
    refused(500, "NaN or infinite", "POST", "/v1/predict", {"texts": ["nan"]})
    served = fake_served()
    object.__setattr__(served, "encode", lambda columns, prompt: 1 / 0)
    sentence = "^the server failed at this request; its log says why$"
    refused(500, sentence, "POST", "/v1/predict", {"texts": ["1"]}, served=served)
    assert "ZeroDivisionError: division by zero" in caplog.text


@pytest.mark.parametrize(("text", "why"), [("fail", "the device is lost"), ("hang", "takes more than 0.5 s")])
def test_a_worker_whose_engine_fails_or_hangs_answers_all_and_leaves(text, why, caplog, monkeypatch):
    monkeypatch.setattr("tests.support.fake_served.time.sleep", lambda seconds: real_sleep(min(seconds, 0.8)))
    left = []

    async def main(service):
        posts = [called(service, "POST", "/v1/predict", {"texts": [word]}) for word in (text, *"1" * 9)]
        made = await asyncio.gather(*posts)
        assert {each[0] for each in made} == {503}
        await asyncio.sleep(0.1)
        assert (await called(service, "GET", "/health/ready"))[0] == 503
        check_refusal(await called(service, "POST", "/v1/predict", {"texts": ["1"]}), 503, "")
        await asyncio.sleep(0.6)

    within(main, leave=lambda: left.append(1))
    assert left == [1]
    assert why in caplog.text


def test_a_worker_whose_tokenizer_hangs_leaves(caplog):
    served, left, release = fake_served(), [], threading.Event()
    encode = served.encode
    object.__setattr__(served, "encode", lambda *given: release.wait(20) and encode(*given))

    async def main(service):
        posts = [called(service, "POST", "/v1/predict", {"texts": ["1"]}) for _ in range(3)]
        assert {each[0] for each in await asyncio.gather(*posts)} == {503}
        await asyncio.sleep(0.2)
        assert (await called(service, "GET", "/health/ready"))[0] == 503
        await asyncio.sleep(0.6)
        release.set()

    within(main, served=served, leave=lambda: left.append(1))
    assert left == [1]
    assert "the tokenizer takes more than 0.5 s" in caplog.text


def test_a_tokenizer_that_looks_up_long_words_is_refused():
    from tokenizers import models

    for longest in (100, 1000, 1 << 30):
        model = models.WordPiece({"[UNK]": 0}, unk_token="[UNK]", max_input_chars_per_word=longest)
        tokenizer = SimpleNamespace(backend_tokenizer=SimpleNamespace(model=model))
        with (
            contextlib.nullcontext() if longest <= 1000 else pytest.raises(UserError, match="words of 10737")
        ):
            require_short_words(tokenizer, "m")


def test_a_tokenizer_that_others_keep_does_not_hang():
    served, left = fake_served(), []
    encode = served.encode
    object.__setattr__(served, "encode", lambda *given: real_sleep(0.2) or encode(*given))

    async def main(service):
        posts = [called(service, "POST", "/v1/predict", {"texts": ["1"]}) for _ in range(8)]
        assert 200 in {each[0] for each in await asyncio.gather(*posts)}
        await asyncio.sleep(1.5)

    within(main, served=served, leave=lambda: left.append(1))
    assert left == []


real_sleep = time.sleep


def test_the_largest_batch_is_one_that_fits_into_the_time_of_a_request():
    sizes = fake_served().sizes("engine", 32)
    model = warm_up(Engine(per_row=0.02), sizes, 0.3)
    assert {rows for _, rows in model.sizes} == {4}  # 0.08 s of 0.15 s; 8 would take 0.16 s
    assert 0.08 <= model.slowest_s <= 0.15
    with pytest.raises(UserError, match=r"row of 16 tokens takes 0\.\d s, more than --timeout 0\.3"):
        warm_up(Engine(per_batch=0.4), sizes, 0.3)


BODY = 1 << 20


@pytest.mark.parametrize(
    "body",
    [
        b'{"texts":[' + b"1," * (BODY // 2 - 10) + b"1]}",
        b'{"texts":[' + b'"",' * (BODY // 3 - 10) + b'""]}',
        b"{" + b",".join(b'"%d":1' % n for n in range(80_000)) + b"}",
        b'{"texts":' + b"[" * 100_000,
        b'{"texts":["' + b"1" * (BODY - 50) + b'"]}',
    ],
    ids=["numbers", "empty", "keys", "nested", "long"],
)
def test_a_wrong_body_takes_no_time_from_others(body):
    async def main(service):
        start = time.thread_time()  # of the event loop alone: others use this machine, too
        status = (await called(service, "POST", "/v1/predict", body))[0]
        return status, time.thread_time() - start

    made = [within(main, settings=Settings()) for _ in range(3)]
    assert {status for status, _ in made} <= {400, 413, 422}
    assert min(seconds for _, seconds in made) < 0.1


def test_metrics_name_endpoints_and_never_what_a_client_sent():
    async def main(service):
        await called(service, "POST", "/v1/predict", {"texts": ["1"]})
        await called(service, "GET", '/x"}\n')
        return (await called(service, "GET", "/metrics"))[2]

    text = within(main)
    assert 'qdqbench_requests_total{endpoint="/v1/predict",status="200"} 1.0' in text
    assert 'qdqbench_requests_total{endpoint="other",status="404"} 1.0' in text
    assert "/x" not in text


def test_the_description_is_of_this_run():
    told = ask("GET", "/openapi.json")[2]
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
    assert ask("GET", "/v1/model")[2]["limits"]["texts"] == 4


@pytest.mark.parametrize("page", [*PAGES])
def test_pages_are_whole_and_load_nothing_from_elsewhere(page):
    status, headers, text = ask("GET", page)
    assert status == 200
    assert headers["content-type"].endswith("; charset=utf-8")
    elsewhere = re.findall(r"https?://[^\"]+|//[a-z]+\.", text)
    assert {*elsewhere} <= {"http://www.w3.org/2000/svg"}  # the name of a format, which nobody asks for
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    assert not re.findall(r"<script>|<style>|\son\w+=|\sstyle=", text)  # nothing that the policy refuses
    for named in re.findall(r'(?:src|href)="(/[^"]*)"', text):
        assert ask("GET", named)[0] == 200
    assert ask("HEAD", page)[0] == 200
    files = {path.name for path in (Path(app.__file__).parent / "pages").iterdir()}
    assert files == {file for file, _ in PAGES.values() if file != str(LOOK)}
