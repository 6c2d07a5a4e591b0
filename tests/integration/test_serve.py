"""`serve` on a run and as processes: answers, load, workers that are killed, and the end."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

pytest.importorskip("starlette", reason="needs starlette: pip install 'qdqbench[serve]'")

from ..support import fake_served
from ..support.http_client import Client, finished
from ..tools import load_serve
from .served import Asked, with_cpu_engine
from .tiny import MAIN, environment

EVIL = "<img src=x onerror=alert()><b>bad</b>"


def started(*command, **options):
    """A server's process and its port."""
    process = subprocess.Popen(
        [*map(str, command)], stdout=subprocess.PIPE, text=True, env=environment(), **options
    )
    while line := process.stdout.readline():
        if "http://127.0.0.1:" in line:
            return process, int(line.partition("http://127.0.0.1:")[2].split()[0].split("/")[0])
    raise AssertionError(f"it did not start: {process.wait()}")


def fake_server(**settings):
    return started(sys.executable, fake_served.__file__, json.dumps({"port": 0, "fp32": False, **settings}))


def test_an_endpoint_answers_as_the_run_was_evaluated(finished_run, tmp_path):
    from qdqbench.quantize.rundir.session import Session, read_config

    ask = Asked.of(finished_run, tmp_path / "run")
    split, _ = Session(read_config(finished_run), finished_run).eval_splits["validation"]
    with np.load(finished_run / "logits" / "onnxruntime.npz") as saved:
        known = saved["validation.logits"][:16].astype(np.float64)
    made = ask(texts=split.dataset["sentence"][:16])
    shares = np.exp(known - np.logaddexp.reduce(known, axis=1, keepdims=True))
    for each, share in zip(made, shares, strict=True):
        assert [*each.scores.values()] == pytest.approx(share.tolist(), abs=0.02)
        assert each.label == f"LABEL_{share.argmax()}"
    assert ask.served.sizes(32)[0] == (16, 32)
    assert ask.served.sizes(1000)[-1] == (128, 128)


def test_a_run_that_cannot_be_served_is_told_why(finished_run, tmp_path, qdqbench):
    done = qdqbench("serve", tmp_path)
    assert (done.code, done.out) == (1, "")
    assert "is no run directory" in done.err
    run = with_cpu_engine(finished_run, tmp_path / "run")
    (run / "model.fp32.onnx").unlink()
    done = qdqbench("serve", run)
    assert done.code == 1
    assert "the FP32 model to compare with, is not there" in done.err
    built = json.loads((run / "build.json").read_text())
    (run / "build.json").write_text(json.dumps(built | {"file": "../../evil.engine"}))
    done = qdqbench("serve", run)
    assert done.code == 1
    assert "names an engine outside of the run, '../../evil.engine'" in done.err
    (run / "build.json").write_text(json.dumps({"skipped": "no GPU here"}))
    done = qdqbench("serve", run)
    assert done.code == 3
    assert "no engine to serve: no GPU here" in done.err


def test_under_load_no_answer_is_lost_or_of_another_text():
    """Overload, a worker that is killed, bad input, and SIGTERM under load, each for a second or less."""
    process, port = fake_server(queue=32, max_batch=8, order={"per_batch": 0.02, "per_row": 0.002})

    async def main():
        load = load_serve.Load(port, load_serve.numbers(200))
        load.expected = [{"score": float(text)} for text in load.texts]
        seen, _ = await load.at_rate(0.8, 600)
        assert (seen.lost, seen.wrong, seen.without_retry) == (0, 0, 0)
        assert {*seen.statuses} == {200, 503}
        asked = asyncio.create_task(load.at_rate(0.8, 40))
        await asyncio.sleep(0.2)
        (killed,) = load_serve.workers_of(process.pid)
        os.kill(killed, signal.SIGKILL)
        seen, _ = await asked
        assert (seen.lost, seen.wrong) == (0, 0)
        assert {*seen.statuses} <= {200, 503}
        client = Client(port)
        end = time.monotonic() + 30
        while (await client.get("/health/ready"))[0] != 200:
            assert time.monotonic() < end
            await asyncio.sleep(0.02)
        assert load_serve.workers_of(process.pid) != [killed]
        metrics = (await client.get("/metrics"))[2]
        assert 'qdqbench_workers_lost_total{model="engine"} 1.0' in metrics
        for body, status in load_serve.BAD:
            assert (await client.post("/v1/predict", body))[0] == status
        assert (await client.send(b"no http\r\n\r\n"))[0] == 400
        await client.close()
        ended = await load_serve.stopped(load, process, 60)
        assert (ended["status"], ended["wrong"]) == (0, 0)
        assert ended["answered"] > 0
        await load.close()

    try:
        finished(main())
    finally:
        process.kill()
        process.stdout.close()
    assert process.wait() == 0


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_a_run_until_a_signal(finished_run, tmp_path, number):
    run = with_cpu_engine(finished_run, tmp_path / "run")
    process, port = started(
        sys.executable, "-c", MAIN, "serve", run, "--port", 0, "--workers", 2, start_new_session=True
    )

    async def main():
        client = Client(port)
        for model in ("engine", "fp32"):
            status, _, made = await client.post("/v1/predict", {"texts": ["a good film"], "model": model})
            assert (status, made["model"], made["answers"][0]["label"]) == (200, model, "LABEL_1")
        assert (await client.get("/health"))[2]["workers"] == {"engine": 2, "fp32": 1}
        assert "<html" in (await client.get("/"))[2]
        await client.close()

    try:
        finished(main())
        os.killpg(process.pid, number)  # as a terminal does
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.stdout.close()
    assert load_serve.psutil.pid_exists(process.pid) is False


def test_a_signal_ends_a_server_whose_workers_load():
    settings = json.dumps({"port": 0, "fp32": False, "order": {"loads": 60.0}})
    process = subprocess.Popen(
        [sys.executable, fake_served.__file__, settings], stdout=subprocess.PIPE, text=True
    )
    try:
        end = time.monotonic() + 30
        while not load_serve.workers_of(process.pid):
            assert time.monotonic() < end
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert process.stdout.read() == ""
    finally:
        process.kill()
        process.stdout.close()


@pytest.fixture(scope="module")
def with_classes():
    """The port of a server with FP32 beside the engine, and class names that somebody means badly."""
    process, port = fake_server(fp32=True, order={"classes": [EVIL, "good"]})
    yield port
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_the_page_in_a_browser(with_classes, browser, width, scheme, tmp_path):
    asked, wrong, root = [], [], f"http://127.0.0.1:{with_classes}"
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda told: wrong.append(told.text) if "Policy" in told.text else None)
    page.goto(root)
    page.locator("textarea").fill(f"3 {EVIL}")
    page.get_by_role("button", name="Compare").click()
    page.get_by_text("Same class").wait_for()
    for side, name in zip(page.locator("article").all(), ("engine", "FP32"), strict=True):
        assert name in side.locator("h2").inner_text()
        assert side.locator(".big").inner_text() == EVIL
        assert "95.26 %" in side.inner_text()  # of logits 3 and 0
        assert side.locator("meter").count() == 2
    assert page.locator("main :is(img, b)").count() == 0  # it is text
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(18, 22, 26)") == (scheme == "dark")
    assert len(page.screenshot(path=tmp_path / "page.png")) > 10_000
    page.locator("textarea").fill("x" * 20_001)
    page.get_by_role("button", name="Compare").click()
    page.get_by_text("a text has 20001 characters").wait_for()
    page.goto(f"{root}/docs")
    page.get_by_text("POST /v1/predict").wait_for()
    assert page.get_by_text("Retry-After").first.is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert all(url.startswith(root) for url in asked)
    assert not wrong
    page.close()
