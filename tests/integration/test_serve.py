"""`serve` on a run and as processes: answers, load, workers that are killed, and the end."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("httptools", reason="needs httptools: pip install 'qdqbench[serve]'")

from tools import load_serve

from qdqbench.quantize.deployment.opened import TEXTS_FILE, Answering
from qdqbench.quantize.pipeline.session import read_config
from qdqbench.quantize.utils.errors import UserError

from ..support.http_client import Client, finished
from .served import started, with_cpu_engine
from .tiny import MAIN, ended, refused

ROOT = Path(__file__).parents[2]
FAKE = (sys.executable, "-m", "tests.support.fake_served")
WAIT_S = 60  # for a worker to be replaced, beside other programs
EVIL = "<img src=x onerror=alert()><b>bad</b>"


def fake_server(word="http://127.0.0.1:", stderr=None, **settings):
    return started(*FAKE, json.dumps({"port": 0, **settings}), word=word, stderr=stderr, cwd=ROOT)


def test_a_run_that_cannot_be_served_is_told_why(finished_run, tmp_path, qdqbench):
    run = with_cpu_engine(finished_run, tmp_path / "run")
    (run / "model.fp32.onnx").unlink()
    refused(qdqbench("serve", run), "the FP32 model to compare with, does not exist")
    built = json.loads((run / "build.json").read_text())
    (run / "build.json").write_text(json.dumps(built | {"file": "../../evil.engine"}))
    refused(qdqbench("serve", run), "names an engine outside of the run, '../../evil.engine'")
    (run / "build.json").write_text(json.dumps({"skipped": "no GPU here"}))
    done = ended(qdqbench("serve", run), 3)
    assert "no engine that answers: no GPU here" in done.err


def test_a_worker_refuses_a_model_that_changed_since_the_start(finished_run, tmp_path):
    served = Answering.of(with_cpu_engine(finished_run, tmp_path / "run"), fp32=True)
    batch = {name: np.ones((1, 4), np.int64) for name in ("input_ids", "attention_mask", "token_type_ids")}
    for load in (served.open_engine, served.open_fp32):
        assert np.isfinite(load()(batch)).all()
    for part in (served.fp32, served.graph, served.engine):
        kept = part.path.read_bytes()
        part.path.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
        with pytest.raises(UserError, match="changed since it was opened; start the same command again"):
            (served.open_fp32 if part is served.fp32 else served.open_engine)()
        part.path.unlink()
        with pytest.raises(UserError, match="changed since it was opened"):
            (served.open_fp32 if part is served.fp32 else served.open_engine)()
        part.path.write_bytes(kept)


def test_a_server_opens_a_run_without_loading_transformers(finished_run, tmp_path):
    run = with_cpu_engine(finished_run, tmp_path / "run")
    code = "import sys, pathlib; from qdqbench.quantize.deployment.opened import Answering; "
    code += "Answering.of(pathlib.Path(sys.argv[1])); print({'torch', 'transformers'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code, run], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
    made, path = Answering.of(run), run / "engine" / TEXTS_FILE
    path.rename(tmp_path / TEXTS_FILE)  # as in a run of an older version
    known = Answering.of(run)
    assert (made.told, made.tokenizer) == (json.loads(json.dumps(known.told)), known.tokenizer)
    path.write_text("{}")
    with pytest.raises(UserError, match="changed since the run made it"):
        Answering.of(run)


def test_under_load_no_answer_is_lost_or_of_another_text(monkeypatch):
    """Overload, a killed front and a killed engine, one that hangs, bad input, SIGTERM under load."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # stderr keeps in a buffer what nobody takes
    order, unread = {"per_batch": 0.02, "per_row": 0.002}, os.pipe()  # nobody reads it, and below nobody can

    async def main(process, port):
        load = load_serve.Load(port, load_serve.numbers(200))
        load.expected = [[{"score": float(text)}] for text in load.texts]
        seen, _ = await load.at_rate(0.8, 2000)  # fewer than the connections that two fronts take
        assert (seen.lost, seen.wrong, seen.without_retry, seen.again) == (0, 0, 0, 0)
        assert {*seen.statuses} == {200, 503}
        os.close(unread[0])
        for lost, kind in enumerate(("front", "engine"), 1):
            before = load_serve.processes_of(process.pid, kind)
            asked = asyncio.create_task(load.at_rate(0.8, 60))
            await asyncio.sleep(0.2)
            before[0].kill()
            seen, _ = await asked
            assert (seen.lost, seen.wrong) == (0, 0)
            assert {*seen.statuses} <= {200, 503}
            await replaced(port, lost)
        client = Client(port)
        assert (await client.post("/v1/predict", {"texts": ["hang"]}))[0] == 503
        await client.close()
        await replaced(port, 3)
        client = Client(port)
        for body, status in load_serve.BAD:
            assert (await client.post("/v1/predict", body))[0] == status
        assert (await client.send(b"no http\r\n\r\n"))[0] == 400
        await client.close()
        ended = await load_serve.stopped(load, process, 60)
        assert (ended["status"], ended["wrong"]) == (0, 0)
        assert ended["answered"] > 0
        await load.close()

    async def replaced(port, lost):
        """Wait until so many were lost, and all are there."""
        end, text = time.monotonic() + WAIT_S, ""
        told = 'qdqbench_workers{process="front"} 2.0', 'qdqbench_workers{process="engine"} 2.0'
        while not all(each in text for each in told) or lost > sum(
            float(count) for count in re.findall(r"workers_lost_total\S+ (\S+)", text)
        ):
            assert time.monotonic() < end, text
            await asyncio.sleep(0.05)
            text = (await load_serve.get(port, "/metrics"))[2]

    given = {"queue": 32, "fronts": 2, "engines": 2, "timeout": 1.0, "order": order, "stderr": unread[1]}
    with fake_server(**given) as (process, port):
        os.close(unread[1])
        finished(main(process, port))
        assert process.wait() == 0


@pytest.mark.long
def test_processes_killed_at_random_moments_mix_up_no_answer():
    """Each text is marked by its number; fronts and engines die in turn, with rows under way."""
    order = {"per_batch": 0.01, "per_row": 0.001, "kind": "Packing"}

    async def main(process, port):
        load = load_serve.Load(port, load_serve.numbers(500))
        load.expected = [[{"score": float(text)}] for text in load.texts]
        told = await load_serve.kill(load, process.pid, 20.0, 150, kills=20)
        await load.close()
        return told

    with fake_server(queue=64, fronts=2, engines=2, order=order, stderr=subprocess.DEVNULL) as given:
        told = finished(main(*given))
    assert (told["lost"], told["wrong"]) == (0, 0)
    assert {*told["statuses"]} <= {"200", "503"}
    assert told["statuses"]["200"] > 500
    assert len(told["replaced_after_s"]) >= 4


def test_a_killed_server_leaves_no_worker_not_even_one_that_hangs():

    async def main(port):
        client = Client(port)
        asked = asyncio.create_task(client.post("/v1/predict", {"texts": ["hang"]}))
        await asyncio.sleep(0.3)
        asked.cancel()
        await asyncio.wait({asked})
        await client.close()

    with fake_server(timeout=60.0) as (process, port):
        finished(main(port))
        workers = load_serve.processes_of(process.pid)
        assert len(workers) == 2
    end = time.monotonic() + 10
    while any(worker.is_running() for worker in workers):
        assert time.monotonic() < end
        time.sleep(0.02)


def failed(**settings):
    """What a server that does not start writes to stderr."""
    command = [*FAKE, json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout) == (1, "")
    return done.stderr


def test_a_server_that_cannot_start_says_why():
    slow = {"timeout": 0.1, "order": {"per_batch": 0.2}}
    assert "there is no such device" in failed(port=0, order={"refuses": True})
    assert "one row of 64 tokens takes" in failed(port=0, **slow)


def test_a_server_answers_to_the_address_that_it_prints():
    with fake_server(host="127.0.0.2", word="http://127.0.0.2:") as (process, port):
        for host, status in (("127.0.0.2", 200), ("localhost", 200), ("evil.example", 421)):
            with socket.create_connection(("127.0.0.2", port), 10) as asked:
                asked.sendall(f"GET /health HTTP/1.1\r\nhost: {host}:{port}\r\n\r\n".encode())
                assert int(asked.recv(1000).split()[1]) == status
        second = failed(host="127.0.0.2", port=port)
        assert f"cannot listen on 127.0.0.2 port {port} (Address already in use)" in second
        process.terminate()
        assert process.wait(20) == 0


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_a_run_until_a_signal(finished_run, tmp_path, number):
    run = with_cpu_engine(finished_run, tmp_path / "run")
    command = [sys.executable, "-c", MAIN, "serve", run, "--port", 0, "--fronts", 2]

    async def main(port):
        client = Client(port)
        for model in ("engine", "fp32"):
            status, _, made = await client.post("/v1/predict", {"texts": ["a good film"], "model": model})
            assert (status, made["model"], made["answers"][0]["label"]) == (200, model, "LABEL_1")
        assert (await client.get("/health"))[2] == {"ready": True, "full": False}
        metrics = (await client.get("/metrics"))[2]
        assert 'qdqbench_workers{process="front"} 2.0' in metrics
        assert f"qdqbench_watch_limit {read_config(run).recipe.gate.max_drop}" in metrics
        assert "<html" in (await client.get("/"))[2]
        await client.close()

    with started(*command, start_new_session=True) as (process, port):
        finished(main(port))
        os.killpg(process.pid, number)  # as a terminal does
        assert process.wait(20) == 0
    assert load_serve.psutil.pid_exists(process.pid) is False


def test_a_signal_ends_a_server_whose_workers_load():
    settings = json.dumps({"port": 0, "order": {"loads": 60.0}})
    with subprocess.Popen([*FAKE, settings], stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            end = time.monotonic() + WAIT_S
            while not load_serve.processes_of(process.pid):
                assert time.monotonic() < end
                time.sleep(0.02)
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
            assert process.stdout.read() == ""
        finally:
            process.kill()


@pytest.fixture(scope="module")
def with_classes():
    """The port of a server with FP32 beside the engine, and class names that somebody means badly."""
    with fake_server(order={"classes": [EVIL, "good"], "fp32": True, "pages": True}) as (_, port):
        yield port


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
    assert all(url.startswith(root) for url in asked)
    assert not wrong
    page.close()
