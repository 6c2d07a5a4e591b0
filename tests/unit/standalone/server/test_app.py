"""What the endpoints answer, good and bad, without a process or a socket."""

import asyncio
import re
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from qdqbench.quantize.deployment.opened import _read_pages
from qdqbench.quantize.engine.cuda.runtime import choose_bucket
from qdqbench.quantize.standalone.fast import FastTokenizer, open_fast
from qdqbench.quantize.standalone.server import engine, front, http
from qdqbench.quantize.standalone.server.http import Site
from qdqbench.quantize.standalone.server.interfaces import Samples
from qdqbench.quantize.standalone.server.server import Failed, require_short_words
from qdqbench.quantize.standalone.server.settings import Settings
from qdqbench.quantize.standalone.server.slots import ENGINE_GONE, RECORD, send
from qdqbench.quantize.standalone.texts import Encoder

from ....support.fake_served import Engine, Idle, digits, fake_served, tiny_served
from ....support.site import call, called, on_site, opened, within

LIMITS = Settings(max_texts=4, max_characters=100, body_bytes=2048, timeout=0.5, queue=16)
HOSTS = ("localhost", "127.0.0.1")


def ask(*arguments, headers=None, chunks=None, served=None, settings=LIMITS, **engine):
    async def main(site):
        return await called(site, *arguments, headers=headers, chunks=chunks)

    return within(main, served or fake_served(**engine), settings=settings, hosts=HOSTS)


def refused(status, sentence, *arguments, **more):
    return check_refusal(ask(*arguments, **more), status, sentence)


def check_refusal(made, status, sentence):
    assert (made[0], [*made[2]]) == (status, ["error"]), made
    assert re.search(sentence, made[2]["error"]), made[2]["error"]
    assert "\n" not in made[2]["error"]
    assert len(made[2]["error"]) < 300
    return made[1]


def post(site, texts):
    return called(site, "POST", "/v1/predict", {"texts": [*texts]})


async def posts(site, *each):
    return await asyncio.gather(*(post(site, texts) for texts in each))


def scores(made):
    return [answer["score"] for answer in made[2]["answers"]]


def statuses(made):
    return [status for status, *_ in made]


def test_an_answer_for_each_text():
    status, headers, made = ask("POST", "/v1/predict", {"texts": ["12", "", "9" * 80]})
    assert status == 200
    assert made["model"] == "engine"
    assert [answer["score"] for answer in made["answers"][:2]] == [12, 0]
    read = [(answer["tokens"], answer["truncated"]) for answer in made["answers"]]
    assert read == [(4, False), (2, False), (64, True)]
    assert headers["content-security-policy"].startswith("default-src 'none'")
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-qdqbench"] == "fake; fake 1"


@pytest.mark.parametrize("kind", ["Engine", "Packing", "in_streams"])
def test_answers_are_those_of_their_requests(kind):
    """Many at once, of one and of several texts, with and without padding."""

    async def main(site):
        texts = [[str(number), str(7 * number)][: 1 + number % 2] for number in range(200)]
        made = await posts(site, *texts)
        assert {*statuses(made)} == {200}
        assert [*map(scores, made)] == [[*map(float, each)] for each in texts]
        assert site.front.queued == 0
        return site.metrics.text(site.front.board.metrics)

    text = within(main, fake_served(kind=kind), settings=Settings(queue=512, batch_tokens=64))
    padding = float(re.search(r'padding_tokens_total{model="engine"} (\S+)', text)[1])
    assert (padding == 0) == (kind == "Packing")


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        (b"", 400, "not JSON"),
        (b'{"texts": ["a"', 400, "not JSON"),
        (b'{"texts": ["\xff"]}', 400, "not JSON"),
        (b'{"texts": ["\\ud800"]}', 400, "not JSON"),
        (b"[" * 1900, 422, "Expected `object`"),
        (b"9" * 1900, 422, "Number out of range"),
        (b'["a"]', 422, "Expected `object`"),
        ({"text": ["a"]}, 422, "unknown field `text`"),
        ({"te\nxt<b>": 1}, 422, r"unknown field `te.*xt<b>`"),
        ({}, 422, "missing required field `texts`"),
        ({"texts": []}, 422, "at least 1"),
        ({"texts": ["a", 1]}, 422, r"Expected `str`, got `int` - at `\$\.texts\[1\]"),
        ({"texts": "a"}, 422, "Expected `array`"),
        ({"texts": ["a"], "model": "int8"}, 422, r"Invalid enum value 'int8' - at `\$.model`"),
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
    assert (
        refused(400, "not both|no HTTP", "POST", "/v1/predict", good, headers=both)["connection"] == "close"
    )
    refused(408, "did not come within 0.5 s", "POST", "/v1/predict", chunks=[b"{", 1.0, b"}"])


@on_site(fake_served(per_batch=0.2), settings=Settings(queue=6, max_texts=4))
async def test_a_full_queue_is_503_at_once_and_not_ready(site):
    slow = asyncio.create_task(post(site, ["1"] * 4))
    await asyncio.sleep(0.05)
    assert (await called(site, "GET", "/health/ready"))[2] == {"ready": True, "full": False}
    start = time.monotonic()
    made = await post(site, ["1"] * 3)  # of six rows four are taken
    assert int(check_refusal(made, 503, "the queue is full")["retry-after"]) >= 1
    more = asyncio.create_task(post(site, ["1"] * 2))
    await asyncio.sleep(0.01)
    status, _, ready = await called(site, "GET", "/health/ready")
    assert (status, ready) == (503, {"ready": False, "full": True})
    assert time.monotonic() - start < 0.15
    assert (await called(site, "GET", "/health/live"))[2] == {"live": True}
    assert [(await each)[0] for each in (slow, more)] == [200, 200]
    assert site.front.queued == 0


@on_site(fake_served(), settings=Settings(queue=8))
async def test_rows_count_from_arrival_so_that_nobody_waits_for_the_tokenizer_in_vain(site, monkeypatch):
    encode = type(site.front).encode
    monkeypatch.setattr(http.Front, "encode", lambda *given: time.sleep(0.2) or encode(*given))
    start = time.monotonic()
    made = await posts(site, *[["1" * 3000] * 4] * 8)
    assert sorted(statuses(made)) == [200, 200, *[503] * 6]
    assert time.monotonic() - start < 1.2  # 1.6 s, were all of them tokenized


@on_site(fake_served(per_batch=0.6), settings=LIMITS)
async def test_an_answer_that_takes_too_long_is_503_and_frees_its_rows(site):
    check_refusal(await post(site, ["1"] * 4), 503, "no answer within 0.5 s")
    assert site.front.queued == 0
    # its late answer is none of the next request
    for (status, _, told), score in zip(await posts(site, *"234"), (2, 3, 4), strict=True):
        assert status == 503 or (status, told["answers"][0]["score"]) == (200, score)


@on_site(fake_served())
async def test_too_many_requests_at_once_are_503_but_health_is_answered(site, monkeypatch):
    monkeypatch.setattr(http, "MOST_POSTS", 1)
    stuck = asyncio.create_task(call(site, "POST", "/v1/predict", chunks=[b"{", 0.2, b"}"]))
    await asyncio.sleep(0.01)
    made = await post(site, ["1"])
    assert check_refusal(made, 503, "too many requests")["retry-after"] == "1"
    assert (await called(site, "GET", "/health"))[0] == 503  # as POST
    assert (await called(site, "GET", "/health/live"))[0] == 200
    await stuck
    assert (await called(site, "GET", "/health/ready"))[0] == 200


def test_what_fails_inside_is_a_500_without_its_insides(capfd, monkeypatch):
    refused(500, "NaN or infinite", "POST", "/v1/predict", {"texts": ["nan"]})
    monkeypatch.setattr(http.Front, "encode", lambda *_: 1 / 0)
    sentence = "^the server failed at this request; its log says why$"
    refused(500, sentence, "POST", "/v1/predict", {"texts": ["1"]})
    assert "ZeroDivisionError: division by zero" in capfd.readouterr().err


@on_site(fake_served(per_batch=0.02))
async def test_one_bad_answer_or_text_is_no_fault_of_the_others(site, monkeypatch):
    encode = type(site.front).encode

    def fail(front, samples, *more):
        return 1 / 0 if "77" in samples else encode(front, samples, *more)

    monkeypatch.setattr(http.Front, "encode", fail)
    assert statuses(await posts(site, ["1"], ["nan"], ["77"], ["2"])) == [200, 500, 500, 200]


@on_site(fake_served(per_batch=0.2))
async def test_requests_of_an_engine_that_ended_are_503_and_no_answer_comes_late(site):
    asked, answers = asyncio.create_task(post(site, ["1", "2"])), site.setup.fronts[0][1]
    await asyncio.sleep(0.05)
    slots = [slot for slot, owner in enumerate(site.front.owners) if owner]
    late = np.array([(slot, site.front.slots.epochs[slot]) for slot in slots], RECORD)
    send(answers, np.array([(ENGINE_GONE, 0)], RECORD).tobytes())
    check_refusal(await asked, 503, "the engine failed")
    assert site.front.queued == 0
    again = asyncio.create_task(post(site, ["5", "6"]))  # in the slots of those
    await asyncio.sleep(0.01)
    send(answers, late.tobytes())
    assert scores(await again) == [5, 6]
    site.front.board.alive[0] = 0.0
    check_refusal(await post(site, ["1"]), 503, "no engine is ready")
    assert (await called(site, "GET", "/health/ready"))[0] == 503


class Doubled(FastTokenizer):
    """One that is fast in name, and marks what it encodes: a 1 becomes a 2."""

    def __init__(self):
        self.tokenizer = Tokenizer.from_str(digits())

    def code(self, texts):
        coded = Encoder(self.tokenizer, 512).code(texts)
        return coded._replace(ids=np.where(coded.ids == 1, 2, coded.ids))


@on_site(fake_served(), fast=Doubled())
async def test_a_faster_tokenizer_gets_printable_ascii_alone(site):
    made = await posts(site, ["1", "1\u00e9", "31"], ["1\n5", "\u00e91"], ["14"])
    assert [*map(scores, made)] == [[2, 1, 32], [15, 1], [24]]


@pytest.mark.parametrize("fast", [None, Doubled()])
def test_long_requests_are_tokenized_beside_others_by_what_takes_them(fast):
    given = (["1" * 10_000], ["1" * 10_001], ["1" * 20_000] * 6, ["1" * 10_000, "\u00e9" * 10_000])
    samples = [Samples(texts, None, characters=sum(map(len, texts))) for texts in given]
    with opened(fake_served(), fast=fast) as site:
        assert [*map(site.front._takes_long, samples)] == [False, not fast, True, True]


@pytest.mark.parametrize(
    ("rows", "turns"), [((9, 1, 1), [1, 2]), ((1, 1, 1), [1, 1, 1]), ((9, 8, 1), [1, 1, 1])]
)
@on_site(fake_served(per_batch=0.1))
async def test_a_few_rows_wait_for_each_other_where_many_are_under_way(site, rows, turns):
    made, asked, submit = [], [], site.front._submit
    site.front._submit = lambda batch, coded: (made.append(len(batch)), submit(batch, coded))
    for place, count in enumerate(rows):
        asked.append(asyncio.create_task(post(site, [str(place)] * count)))
        for _ in range(3):  # turns of the loop, in much less than requests wait
            await asyncio.sleep(0)
    assert [scores(await each)[-1] for each in asked] == [0, 1, 2]
    assert made == turns


@on_site(fake_served(), awake_s=0.1)
async def test_a_front_with_a_core_of_its_own_stays_awake_for_a_while(site):
    assert not site.front.waking
    assert (await post(site, ["1"]))[0] == 200
    assert site.front.waking
    await asyncio.sleep(0.3)
    assert not site.front.waking


def test_tokie_gives_the_tokens_of_tokenizers():
    pytest.importorskip("tokie", reason="needs tokie: pip install 'qdqbench[fast]'")
    served = tiny_served("predict")
    texts = ["a good film", "it is awful " * 40, "[SEP] a", ""]
    fast = open_fast(served.told, served.tokenizer, texts)
    assert fast is not None
    texts += ["1\u00e9", "good " * 80]  # between those of the faster one
    made = Encoder(Tokenizer.from_str(served.tokenizer), 64, fast=fast).code(texts)
    known = Tokenizer.from_str(served.tokenizer)
    known.no_padding()
    known.enable_truncation(64)
    rows = known.encode_batch(texts)
    assert made.ids.tolist() == [token for row in rows for token in row.ids]
    assert made.types.tolist() == [kind for row in rows for kind in row.type_ids]
    assert made.lengths.tolist() == [*map(len, rows)]
    assert [*made.cut] == [bool(row.overflowing) for row in rows]
    pairs = served.told | {"texts": ["a text", "its second text"]}
    assert open_fast(pairs, served.tokenizer, texts) is None


@on_site(fake_served(per_batch=0.3), settings=Settings(queue=2))
async def test_a_front_drops_what_was_asked_by_one_before_it(site):
    """One dies with slots in flight; its place is taken by another, which uses the same slots."""
    lost = asyncio.create_task(post(site, ["11", "12"]))
    await asyncio.sleep(0.1)
    site.front.loop.remove_reader(site.front.pipe.fileno())
    second = Site(site.setup.front(), site.metrics)
    second.front.start(site.front.loop)
    assert scores(await post(second, ["21", "22"])) == [21, 22]
    lost.cancel()


@pytest.mark.parametrize("hangs", [True, False])
def test_a_front_whose_tokenizer_hangs_leaves(hangs, capfd, monkeypatch):
    """One that other requests keep does not hang."""
    left, release = [], threading.Event()

    async def main(site):
        encode, wait = type(site.front).encode, release.wait if hangs else time.sleep
        monkeypatch.setattr(
            http.Front, "encode", lambda *given: (wait(20 if hangs else 0.2), encode(*given))[1]
        )
        made = statuses(await posts(site, *[["1" * 9000] * 2] * (3 if hangs else 6)))
        assert {*made} == {503} if hangs else 200 in made
        await asyncio.sleep(0.2)
        assert not hangs or (await called(site, "GET", "/health/ready"))[0] == 503
        await asyncio.sleep(0.8)
        release.set()

    within(main, fake_served(), settings=Settings(timeout=0.5), leave=lambda: left.append(1))
    assert left == [1] * hangs
    assert ("the tokenizer takes more than 0.5 s" in capfd.readouterr().err) == hangs


def test_a_tokenizer_that_looks_up_long_words_is_refused():
    from tokenizers import Tokenizer, models

    for longest in (100, 1000, 1 << 30):
        model = models.WordPiece({"[UNK]": 0}, unk_token="[UNK]", max_input_chars_per_word=longest)
        served = replace(fake_served(), tokenizer=Tokenizer(model).to_str())
        with nullcontext() if longest <= 1000 else pytest.raises(Failed, match="words of 10737"):
            require_short_words(served)


def test_the_largest_batch_is_one_that_fits_into_the_time_of_a_request():
    told = fake_served(batch=32).told
    rows, slowest, width = engine.warm_up(Engine(per_row=0.02), told, 0.3, 0)
    assert (rows, width) == (4, 1)  # 0.08 s of 0.15 s; 8 would take 0.16 s
    assert 0.08 <= slowest <= 0.15
    with pytest.raises(SystemExit, match=r"row of 64 tokens takes 0\.\d s, more than --timeout 0\.3"):
        engine.warm_up(Engine(per_batch=0.4), told, 0.3, 0)


@given(st.integers(16, 512), st.sampled_from([512, 4096, 16_384]))
def test_an_engine_without_padding_is_prepared_for_every_bucket(longest, tokens):
    sizes = [*engine.list_packed(longest, tokens)]
    assert sizes[0] == (tokens // longest, longest)
    assert all(rows * length <= tokens and length <= longest for rows, length in sizes)
    wanted = {choose_bucket(count, 8) for count in range(1, tokens // longest * longest + 1)}
    assert wanted <= {choose_bucket(rows * length, 8) for rows, length in sizes}


def test_an_idle_engine_prepares_itself_and_answers_meanwhile():
    ran = []

    class Noting(Idle):
        def launch(self, ids, types, lengths):
            time.sleep(0.01)
            ran.append((len(lengths), int(lengths[0])))
            return super().launch(ids, types, lengths)

    async def main(site):
        while len(ran) < 6:
            await asyncio.sleep(0.01)
        assert (await post(site, ["12"]))[0] == 200
        while len(ran) < 20:
            await asyncio.sleep(0.01)

    within(main, replace(fake_served(), models={"engine": Noting}))
    sizes = [*engine.list_packed(64, Settings().batch_tokens)]
    assert ran[:2] == [sizes[0], (1, 64)]  # before it is ready
    assert (1, 4) in ran  # that of the request
    assert [size for size in ran[2:20] if size != (1, 4)] == sizes[:17]


@given(st.lists(st.integers(1, 128), max_size=200), st.integers(1, 40))
@example([100] * 8 + [60] * 8, 40)
def test_batches_hold_all_rows_and_little_padding(lengths, most):
    lengths = sorted(lengths, reverse=True)
    bounds = engine.split_lengths(lengths, most)
    parts = [lengths[start:end] for start, end in pairwise(bounds)]
    assert [length for part in parts for length in part] == lengths
    for part, after in pairwise([*parts, []]):
        assert 0 < len(part) <= most
        assert len(part) <= 8 or len(part) in {most, len(part) // 8 * 8}  # of few shapes
        assert all(length >= 0.75 * part[0] for length in part[8:])
        room = min(most, len(part) + 8) - len(part)
        assert not room or len(after) < room or after[room - 1] < 0.75 * part[0]


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
    async def main(site):
        start = time.thread_time()  # of the event loop alone: others use this machine, too
        status = (await called(site, "POST", "/v1/predict", body))[0]
        return status, time.thread_time() - start

    made = [within(main, fake_served()) for _ in range(3)]
    assert {status for status, _ in made} <= {400, 413, 422}
    assert min(seconds for _, seconds in made) < 0.1


@on_site(fake_served())
async def test_metrics_name_endpoints_and_never_what_a_client_sent(site):
    await post(site, ["1"])
    await called(site, "GET", "/x%22%7d")
    await asyncio.sleep(2 * front.SWEEP_S)  # which tells the rows that wait
    text = (await called(site, "GET", "/metrics"))[2]
    assert 'qdqbench_requests_total{endpoint="/v1/predict",status="200"} 1.0' in text
    assert 'qdqbench_requests_total{endpoint="other",status="404"} 1.0' in text
    assert "/x" not in text
    assert 'qdqbench_batch_rows_bucket{model="engine",le="1.0"} 1.0' in text
    assert "qdqbench_queue_rows 0.0" in text


@on_site(fake_served(classes=["a", "b"], fp32=True), settings=Settings(watch=1.0))
async def test_fp32_watches_a_share_of_the_answers(site):
    for text in ("1", "2", "3 0"):
        await post(site, [text, text])
    await asyncio.sleep(0.2)
    assert 'qdqbench_watched_total{verdict="same"} 6.0' in (await called(site, "GET", "/metrics"))[2]


def test_the_description_is_of_this_run():
    told = ask("GET", "/v1/model")[2]
    assert told["limits"]["texts"] == 4
    assert told["fields"]["/v1/predict"] == ["texts", "model"]
    assert ask("GET", "/info")[2]["max_input_length"] == 64


def test_pages_are_whole_and_load_nothing_from_elsewhere():
    served = replace(fake_served(), pages=dict(_read_pages()))
    assert {*served.pages} == {"/", "/app.js", "/look.css", "/style.css", "/icon.svg"}
    for page in served.pages:
        status, headers, text = ask("GET", page, served=served)
        assert status == 200
        assert headers["content-type"].endswith("; charset=utf-8")
        elsewhere = re.findall(r"https?://[^\"]+|//[a-z]+\.", text)
        assert {*elsewhere} <= {"http://www.w3.org/2000/svg"}  # the name of a format, which nobody asks for
        assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
        assert not re.findall(r"<script>|<style>|\son\w+=|\sstyle=", text)  # nothing that the policy refuses
        for named in re.findall(r'(?:src|href)="(/[^"]*)"', text):
            assert ask("GET", named, served=served)[0] == 200
        assert ask("HEAD", page, served=served)[0] == 200
