"""Folders of all commands: a mistake leaves nothing, another run is refused, Ctrl-C ends everything."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from .tiny import MAIN, environment, listing, refused

QAT = "bert-int8-attention-qat"
COMMANDS = {  # with what names a recipe
    "run": ["run", "bert-int8-linears"],
    "qat": ["qat", QAT],
    "sensitivity": ["sensitivity", "bert-int8-linears", "--samples", "16"],
    "methods": ["compare-calibration", "bert-int8-linears", "--samples", "16"],
    "search": ["search", "bert-int8-linears", "--samples", "16", "--trials", "2"],
    "auto": ["auto", "bert-int8-linears", "--samples", "32"],
    "finetune": ["finetune", "--max-steps", "4000"],
    "study": ["study", QAT, "--max-steps", "4000"],
    "bench": ["bench", "--recipe", "bert-int8-linears", "--cpu", "--batch", "1", "--length", "8"],
}
MISTAKES = ("model", "data", "recipe", "task")


def words(command, model, task, data):
    """A command on a model and its data."""
    given = COMMANDS[command]
    if command == "auto":
        return ["auto", "--model", str(model), *given[1:], "--task", task, "--data", str(data)]
    if command == "bench":
        return [*given, "--model", str(model)]
    return [*given, "--model", str(model), "--task", task, "--data", str(data)]


@pytest.mark.parametrize(
    ("command", "mistake"),
    [
        (command, mistake)
        for command in COMMANDS
        for mistake in MISTAKES
        if not (command == "finetune" and mistake == "recipe")
        and not (command == "bench" and mistake in ("data", "task"))
    ],
)
def test_a_mistake_leaves_nothing_behind(  # noqa: PLR0917
    command, mistake, sst2, tmp_path, qdqbench, monkeypatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # a folder that is not there may be a hub id
    monkeypatch.chdir(tmp_path)
    given = {"model": sst2.model, "task": "sst2", "data": sst2.data}
    if mistake != "recipe":
        given[mistake] = "nowhere"
    line = words(command, **given)
    if mistake == "recipe":
        line = ["nowhere" if word.startswith("bert-") else word for word in line]
    refused(qdqbench(*line), "nowhere")
    assert os.listdir(tmp_path) == []


def test_another_recipe_is_refused_and_the_run_is_moved_aside(a_run, sst2, qdqbench):
    before = listing(a_run)
    (a_run / "notes.txt").write_text("mine")
    other = ["run", "bert-fp16", *sst2.options, "--until", "baseline"]
    refused(
        qdqbench(*other, "--out", a_run),
        f"{a_run} holds a finished run of recipe bert-int8-linears",
        "asked for is recipe bert-fp16",
    )
    assert listing(a_run) == sorted([*before, "notes.txt"])
    done = qdqbench(*other, "--out", a_run, "--overwrite")
    assert done.code == 0
    old = a_run.with_name(f"{a_run.name}.old")
    assert f"is now in {old}" in done.err
    assert listing(old) == sorted([*before, "notes.txt"])
    assert listing(a_run) == ["logits/fp32.npz", "recipe.yaml", "run.json", "stages.json"]
    done = qdqbench("compare-calibration", "bert-fp16", *sst2.options, "--out", a_run)
    assert done.code == 1


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_ends_every_command(command, sst2, tmp_path):
    """The signal to the process alone, once it holds its folder and has worked for a while."""
    out = tmp_path / "out"
    line = [*words(command, sst2.model, "sst2", sst2.data), "--out", str(out)]
    heeds = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    with subprocess.Popen(
        [sys.executable, "-c", heeds + MAIN, *line],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as process:
        until = time.monotonic() + 120
        while not (out / ".lock.json").exists() and time.monotonic() < until:
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        assert json.loads((out / ".lock.json").read_text())["process"] == process.pid
        time.sleep(1.0)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        try:
            _, told = process.communicate(timeout=60)
        finally:
            process.kill()
    ends = "starts from scratch" if command == "bench" else "resumes"
    assert process.returncode == 130
    assert told.splitlines()[-1].startswith("qdqbench: interrupted; ")
    assert told.endswith(f"the same command {ends}\n")
    assert "Traceback" not in told
    assert not [child for child in children if child.is_running()]
