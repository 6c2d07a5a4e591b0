"""Whatever a user gets wrong: one sentence, the exit status of its kind, and nothing left half-written."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest
import yaml

from .tiny import EVAL_ROWS, MAIN, environment, listing, refused, rows, signs_of_life, write_split

LATEST = ("results.json", "report.md", "report.html")


def nothing_half_written(out):
    """A run directory holds its configuration and the outputs of finished stages, nothing else."""
    if not out.exists():
        return
    known = {"run.json", "recipe.yaml"}
    if (out / "stages.json").is_file():
        stages = json.loads((out / "stages.json").read_text())["stages"]
        known |= {"stages.json"}.union(*(stage["outputs"] for stage in stages.values()))
    assert {*listing(out)} <= known
    assert not [path for path in out.rglob("*") if path.name.endswith(".tmp")]


@pytest.fixture
def copied(sst2, tmp_path):
    """A model and data to damage."""
    model = Path(shutil.copytree(sst2.model, tmp_path / "model"))
    data = Path(shutil.copytree(sst2.data, tmp_path / "data"))
    return model, data


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def cut(path, share):
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


def keep_only(folder, *names):
    for path in folder.iterdir():
        if path.name not in names:
            path.unlink()


def add_label(path):
    table = rows("sst2", EVAL_ROWS, 100)
    table["label"][5] = 2
    path.unlink()
    write_split(path, table)


CONFIG, WEIGHTS = "model/config.json", "model/model.safetensors"
TRAIN, VALIDATION = "data/sst2/train.parquet", "data/sst2/validation.parquet"
# What is done to a file or folder, and what the sentence must tell.
DAMAGED = {
    "config-missing": (CONFIG, Path.unlink, [r"model", r"config\.json|model_type"]),
    "config-not-json": (CONFIG, partial(cut, share=0.5), [r"load model", r"config\.json.* not a valid JSON"]),
    "other-architecture": (
        CONFIG,
        partial(edit, model_type="mobilebert"),
        [r"'mobilebert'", r"supported here: bert"],
    ),
    "no-weights": (WEIGHTS, Path.unlink, [r"cannot load model", r"safetensors"]),
    "truncated-weights": (WEIGHTS, partial(cut, share=0.6), [r"cannot load model"]),
    "no-tokenizer": (
        "model",
        lambda path: keep_only(path, "config.json", "model.safetensors"),
        [r"tokenizer"],
    ),
    "shapes-differ": (
        CONFIG,
        partial(edit, intermediate_size=96),
        [r"of another shape than config\.json says"],
    ),
    "truncated-data": (VALIDATION, partial(cut, share=0.6), [r"validation\.parquet", r"damaged"]),
    "no-train-split": (TRAIN, Path.unlink, [r"'train'", r"looked for"]),
    "a-label-too-many": (VALIDATION, add_label, [r"0 to 2", r"classes 0 to 1"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_model_or_data(case, copied, tmp_path, qdqbench):
    name, damage, told = DAMAGED[case]
    model, data = copied
    damage(tmp_path / name)
    out = tmp_path / "run"
    done = qdqbench("run", "--model", model, "--task", "sst2", "--data", data, "--out", out)
    refused(done, *told)
    assert not out.exists()


def test_damage_in_the_middle_of_a_run(a_run, sst2, copied, qdqbench):
    """The data goes bad after the run was made: nothing of the old report is taken for the new one's."""
    model, data = copied
    assert (
        qdqbench(
            "run", "int8-linears", "--model", model, "--task", "sst2", "--data", data, "--out", a_run
        ).code
        == 0
    )
    cut(model / "model.safetensors", 0.5)
    done = qdqbench("report", a_run)
    refused(done, "cannot load model")
    for name in LATEST:
        assert not (a_run / name).exists()


OPTIONS = yaml.safe_load(Path(__file__).with_name("options.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", OPTIONS)
def test_options(case, sst2, tmp_path, qdqbench, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # a missing folder may be a hub id
    asked = OPTIONS[case]
    (tmp_path / "recipe.yaml").write_text(asked.get("recipe", ""))
    (tmp_path / "blank").mkdir()
    write_split(tmp_path / "blank" / "train.parquet", {"sentence": [" "] * 9})
    given = {"model": f"--model {sst2.model}", "data": f"--data {sst2.data}", "sst2": " ".join(sst2.options)}
    line = asked["command"].format(dir=tmp_path, folder=sst2.model, recipe=tmp_path / "recipe.yaml", **given)
    out = tmp_path / "run"
    given_out = ["--out", out] if line.startswith(("run", "qat")) else []
    refused(qdqbench(*line.split(), *given_out), *asked["told"])
    assert not out.exists()


# The run directory.


def test_out_is_a_file_or_holds_others(sst2, tmp_path, qdqbench):
    out = tmp_path / "file"
    out.write_text("mine")
    refused(qdqbench("run", "int8-linears", *sst2.options, "--out", out), "is a file", "--out")
    refused(
        qdqbench("run", "int8-linears", *sst2.options, "--out", out / "run"),
        "cannot write|is a file",
        "--out",
    )
    assert out.read_text() == "mine"
    out = tmp_path / "folder"
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    refused(qdqbench("run", "int8-linears", *sst2.options, "--out", out), "holds other files", "--out")
    assert listing(out) == ["thesis.txt"]


def test_out_cannot_be_written(sst2, tmp_path, qdqbench, monkeypatch):
    """A read-only folder; tests may run as root, for whom there is none."""

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "mkdtemp", refuse)
        done = qdqbench("run", "int8-linears", *sst2.options, "--out", tmp_path / "run")
    refused(done, "cannot write .*run", "Permission denied", "--out")
    nothing_half_written(tmp_path / "run")


@pytest.mark.slow
def test_disk_is_full(sst2, tmp_path, qdqbench, monkeypatch):
    """The disk fills up while the logits of the baseline are written."""
    import numpy as np

    def full(stream, **_):
        stream.write(b"half")
        raise OSError(28, "No space left on device")

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", full)
        done = qdqbench("run", "int8-linears", *sst2.options, "--out", out)
    refused(done, r"cannot write \S*logits/fp32\.npz: no space left on device", r"MB is free on /")
    # a stage that ran beside the baseline may have ended, and is kept
    assert not [*out.glob("logits/*"), *out.glob("results.json")]


@pytest.mark.parametrize("command", ["quantize", "export", "build", "evaluate", "report"])
def test_stage_command_on_something_else(command, tmp_path, qdqbench):
    (tmp_path / "thesis.txt").write_text("mine")
    refused(qdqbench(command, tmp_path), "no run directory", "qdqbench run")
    refused(qdqbench(command, tmp_path / "nowhere"), "no run directory", "qdqbench run")
    refused(qdqbench(command, tmp_path / "thesis.txt"), "no run directory")
    assert listing(tmp_path) == ["thesis.txt"]


def test_quantize_of_a_recipe_that_quantizes_nothing(sst2, tmp_path, qdqbench):
    out = tmp_path / "run"
    assert qdqbench("run", "bert-fp16", *sst2.options, "--out", out, "--until", "baseline").code == 0
    refused(qdqbench("quantize", out), "no stage 'quantize'")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema_version": 99}', "\xff"])
def test_run_of_another_version(text, a_run, qdqbench):
    (a_run / "run.json").write_text(text, encoding="latin-1")
    refused(qdqbench("report", a_run), r"run\.json")


def test_a_mistake_leaves_a_finished_run_as_it_is(a_run, sst2, qdqbench):
    """Seen: `--max-length` beyond the model's positions took the report of the run in that folder with it."""
    before = {name: (a_run / name).read_bytes() for name in ("run.json", "results.json", "report.html")}
    done = qdqbench("run", "bert-int8-linears", *sst2.options, "--out", a_run, "--max-length", 4096)
    refused(done, "export.max_length is 4096")
    assert {name: (a_run / name).read_bytes() for name in before} == before


@pytest.mark.long
@pytest.mark.parametrize("text", ["{", '{"schema_version": 99}'])
def test_unreadable_manifest_means_that_nothing_is_reused(text, a_run, qdqbench):
    (a_run / "stages.json").write_text(text, encoding="latin-1")
    assert qdqbench("report", a_run).code == 0
    timings = json.loads((a_run / "results.json").read_text())["timings"]
    assert not any(row["reused"] for row in timings.values())


def test_profile_before_the_report(sst2, tmp_path, qdqbench):
    refused(qdqbench("timings", tmp_path), r"results\.json", "run")
    (tmp_path / "results.json").write_text("{}")
    refused(qdqbench("timings", tmp_path), r"results\.json")


# ONNX files that are none.

ONNX = {
    "a-folder": lambda path: (path.unlink(), path.mkdir()),
    "truncated": partial(cut, share=0.5),
    "text": lambda path: path.write_text("hello"),
}


@pytest.mark.parametrize("case", ONNX)
def test_check_of_a_file_that_is_no_graph(case, finished_run, tmp_path, qdqbench):
    path = Path(shutil.copy(finished_run / "model.int8.onnx", tmp_path / "model.onnx"))
    ONNX[case](path)
    told = [r"model\.onnx", *([r"truncated|corrupted|not"] if case == "truncated" else [])]
    refused(qdqbench("check", path), *told)


# Interrupted runs: each name is called in the middle of a stage.

INTERRUPTED = {
    "baseline": "qdqbench.quantize.tasks.types.encoded.pad",
    "quantize": "qdqbench.quantize.calibration.fakequant.quantizers.forward",
    "export": "qdqbench.quantize.graph.export.save",
    "check": "qdqbench.eval.stages.stages.to_json",
    "parity": "qdqbench.eval.metrics.parity.session_of",
    "onnxruntime": "qdqbench.eval.metrics.runners.session_of",
    "build": "qdqbench.quantize.engine.layers.measure_coverage",
    "report": "qdqbench.eval.runs.run.write_reports",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "raised"),
    [
        *(pytest.param(stage, KeyboardInterrupt, marks=pytest.mark.long) for stage in [*INTERRUPTED][1:]),
        (next(iter(INTERRUPTED)), KeyboardInterrupt),
        pytest.param("export", MemoryError, marks=pytest.mark.long),
    ],
)
def test_interrupted_run_goes_on_where_it_stopped(  # noqa: PLR0917
    stage, raised, finished_run, sst2, tmp_path, qdqbench, monkeypatch
):
    """Stopped at the second call where there is one, after something was made."""
    out, kept = tmp_path / "run", tmp_path / "kept"
    shutil.copytree(finished_run, out)
    manifest = json.loads((out / "stages.json").read_text())
    done_before = [*manifest["stages"]]
    start = done_before.index(stage) if stage != "report" else len(done_before)
    for name in done_before[start:]:
        for file in manifest["stages"].pop(name)["outputs"]:
            (out / file).unlink()
    (out / "stages.json").write_text(json.dumps(manifest))
    for name in LATEST:
        (out / name).unlink()
    shutil.copytree(out, kept)
    module, _, name = INTERRUPTED[stage].rpartition(".")
    __import__(module)
    real, calls = getattr(sys.modules[module], name), []

    def stop(*arguments, **options):
        calls.append(1)
        if len(calls) == (2 if stage in ("baseline", "quantize", "export") else 1):
            raise raised("stopped")
        return real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[module], name, stop)
        done = qdqbench("run", "int8-linears", *sst2.options, "--out", out)
    assert calls
    assert done.code == (130 if raised is KeyboardInterrupt else 1)
    assert re.fullmatch(r"qdqbench: [^\n]{20,}\n", done.err)
    if raised is KeyboardInterrupt:
        assert "interrupted" in done.err
    assert not [path for path in out.rglob("*") if path.name.endswith(".tmp")]
    for name in ("results.json", "report.md", "report.html"):
        assert stage == "report" or not (out / name).exists()
    again = json.loads((out / "stages.json").read_text())["stages"]
    assert {**again} == manifest["stages"]
    assert qdqbench("run", "int8-linears", *sst2.options, "--out", out).code in (0, 2)
    timings = json.loads((out / "results.json").read_text())["timings"]
    assert {name for name, row in timings.items() if row["reused"]} == {*done_before[:start]}
    nothing_lost = {*listing(kept)} - {*listing(out)}
    assert not nothing_lost


@pytest.mark.slow
def test_ctrl_c_at_the_keyboard(sst2, tmp_path):
    """The signal itself, sent to the process while it works."""
    out = tmp_path / "run"
    # background jobs of a shell ignore Ctrl-C, and what they start inherits that
    heeds = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    command = [sys.executable, "-c", heeds + MAIN, "run", "int8-linears", *sst2.options, "--out", str(out)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment(), **pipes) as process:
        until = time.monotonic() + 400
        while not (out / "stages.json").exists() and time.monotonic() < until:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        try:
            shown, told = process.communicate(timeout=200)
        finally:
            process.kill()  # if it hangs, fail and do not wait
    assert (process.returncode, shown) == (130, "")
    signs, _, last = told.rstrip().rpartition("\n")
    assert last == "qdqbench: interrupted; what is finished is kept, and the same command resumes"
    assert signs_of_life(signs), signs
    nothing_half_written(out)
    assert "baseline" in json.loads((out / "stages.json").read_text())["stages"]


# The traceback is there for who asks.


def test_debug_shows_the_traceback(tmp_path):
    arguments = [sys.executable, "-c", MAIN, "check", str(tmp_path / "nowhere.onnx"), "--debug"]
    loud = subprocess.run(arguments, capture_output=True, text=True, check=False, env=environment())
    assert loud.returncode == 1
    assert "Traceback (most recent call last)" in loud.stderr
    assert "UserError" in loud.stderr
    assert "nowhere.onnx" in loud.stderr


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "CUDA error: CUDA-capable device(s) is/are busy or unavailable\nSearch",
            "takes no further process: ",
        ),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", "has too little free memory; "),
    ],
)
def test_a_gpu_that_refuses_is_explained(said, told, finished_run, qdqbench, monkeypatch):
    from qdqbench import _models as models

    def fail(*_, **__):
        raise RuntimeError(said)

    monkeypatch.setattr(models, "check_file", fail)
    done = qdqbench("check", finished_run / "model.int8.onnx")
    assert (done.code, done.err.count("\n")) == (3, 1)
    assert done.err.startswith(f"qdqbench: the GPU {told}")
    assert "nvidia-smi" in done.err


def test_unexpected_failure_is_one_sentence_too(finished_run, qdqbench, monkeypatch):
    from qdqbench import _models as models

    def fail(*_, **__):
        raise ZeroDivisionError("several\nlines")

    monkeypatch.setattr(models, "check_file", fail)
    done = qdqbench("check", finished_run / "model.int8.onnx")
    assert done.code == 1
    assert re.fullmatch(
        r"qdqbench: unexpected failure, ZeroDivisionError: several lines; .*--debug.*\n", done.err
    )
    with pytest.raises(ZeroDivisionError):
        qdqbench("check", finished_run / "model.int8.onnx", "--debug")


def test_no_stray_files_outside_the_run_directory(sst2, tmp_path, qdqbench, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(qdqbench("run", "nonesuch", *sst2.options), "nonesuch")
    refused(qdqbench("run", "--task", "sst2"), "belong together")
    assert os.listdir(tmp_path) == []
