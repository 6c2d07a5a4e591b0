"""Folders of all commands: a mistake leaves nothing, another run is refused, Ctrl-C ends everything."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from ..support.long import mark_long
from .tiny import MAIN, ended, environment, listing, nothing_half_written, refused, signs_of_life

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


def test_a_run_is_moved_aside(a_run, sst2, qdqbench):
    before = listing(a_run)
    other = ["run", "bert-fp16", *sst2.options, "--until", "baseline", "--out", a_run]
    refused(qdqbench(*other), f"{a_run} holds a finished run of recipe bert-int8-linears")
    done, old = ended(qdqbench(*other, "--overwrite")), a_run.with_name(f"{a_run.name}.old")
    assert f"is now in {old}" in done.err
    assert listing(old) == before
    assert listing(a_run) == ["logits/fp32.npz", "recipe.yaml", "run.json", "stages.json"]


@pytest.mark.parametrize("command", COMMANDS)
def test_folders_of_others_are_left_alone(command, sst2, qdqbench, tmp_path):
    notes = tmp_path / "mine" / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("mine")
    line = words(command, sst2.model, "sst2", sst2.data)
    for out, told in {
        notes.parent: "other files",
        notes: "is a file",
        notes / "run": "write|is a file",
    }.items():
        refused(qdqbench(*line, "--out", out), told, "--out")
    assert (listing(tmp_path), notes.read_text()) == (["mine/notes.txt"], "mine")


@pytest.mark.slow
@pytest.mark.parametrize("command", mark_long(COMMANDS, [*COMMANDS][1:]))
def test_ctrl_c_ends_every_command(command, sst2, tmp_path):
    """The signal to the process alone, once it holds its folder and has worked for a while."""
    out = tmp_path / "out"
    line = [*words(command, sst2.model, "sst2", sst2.data), "--out", str(out)]
    begun = out / ("stages.json" if command == "run" else ".lock.json")
    # background jobs of a shell ignore Ctrl-C, and what they start inherits that
    heeds = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", heeds + MAIN, *line], env=environment(), **pipes) as process:
        until = time.monotonic() + 400
        while not begun.exists() and time.monotonic() < until:
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        assert json.loads((out / ".lock.json").read_text())["process"] == process.pid
        time.sleep(0.0 if command == "run" else 1.0)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        try:
            shown, told = process.communicate(timeout=200)
        finally:
            process.kill()  # if it hangs, fail and do not wait
    signs, _, last = told.rstrip().rpartition("\n")
    assert (process.returncode, shown, signs_of_life(signs)) == (130, "", True), told
    assert last.startswith("qdqbench: interrupted; ")
    assert last.endswith(f"the same command {'starts from scratch' if command == 'bench' else 'resumes'}")
    assert not [child for child in children if child.is_running()]
    if command == "run":
        assert last == "qdqbench: interrupted; what is finished is kept, and the same command resumes"
        nothing_half_written(out)
        assert "baseline" in json.loads((out / "stages.json").read_text())["stages"]
