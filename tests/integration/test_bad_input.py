"""Whatever a user gets wrong: one sentence, the exit status of its kind, and nothing left half-written."""

import json
import re
import shutil
import sys
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
import yaml

from qdqbench import _models as models

from ..support.foreign_layer import float_layer
from ..support.layer_tables import bert, inspector_json
from .cases import edited
from .tiny import EVAL_ROWS, call_apart, ended, listing, refused, rows, write_split

TO_FOLDERS = ("run", "qat", "finetune", "sensitivity", "compare-calibration", "search", "auto")
FILES = {"recipe": "recipe.yaml", "bad": "bad.json", "table": "table.json", "graph": "graph.onnx"}
LATEST = ("results.json", "report.md", "report.html")


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
def test_options(case, sst2, tmp_path, qdqbench, monkeypatch, request):  # noqa: PLR0917
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # a missing folder may be a hub id
    asked, out = OPTIONS[case], tmp_path / "run"
    if "change" in asked:
        edited(tmp_path / "recipe.yaml", asked["change"])
    else:
        (tmp_path / "recipe.yaml").write_text(asked.get("recipe", ""))
    (tmp_path / "blank").mkdir()
    write_split(tmp_path / "blank" / "train.parquet", {"sentence": [" "] * 9})
    files = {name: tmp_path / file for name, file in FILES.items()}
    files["bad"].write_text('[{"name": "x"}]')
    files["table"].write_text(inspector_json(bert(), 11))
    onnx.save(float_layer(), files["graph"])
    given = {"model": f"--model {sst2.model}", "data": f"--data {sst2.data}", "sst2": " ".join(sst2.options)}
    given |= files | {"dir": tmp_path, "folder": sst2.model}
    if "{run}" in asked["command"]:
        given["run"] = request.getfixturevalue("finished_run")
    line = asked["command"].format(**given).split()
    given_out = ["--out", out] if line[0] in TO_FOLDERS else []
    refused(qdqbench(*line, *given_out), *asked["told"], code=asked.get("code", 1))
    assert not [*tmp_path.glob("out*")]
    assert not [*out.glob("*.json")] if asked.get("begun") else not out.exists()


# The run directory.


@pytest.mark.slow
def test_disk_is_full(sst2, tmp_path, qdqbench, monkeypatch):
    """The disk fills up while the logits of the baseline are written."""

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


def test_a_mistake_leaves_a_finished_run_as_it_is(a_run, sst2, qdqbench):
    """Seen: `--max-length` beyond the model's positions took the report of the run in that folder with it."""
    before = {name: (a_run / name).read_bytes() for name in ("run.json", "results.json", "report.html")}
    done = qdqbench("run", "bert-int8-linears", *sst2.options, "--out", a_run, "--max-length", 4096)
    refused(done, "export.max_length is 4096")
    assert {name: (a_run / name).read_bytes() for name in before} == before


def test_timings_of_no_results(tmp_path, qdqbench):
    (tmp_path / "results.json").write_text("{}")
    refused(qdqbench("timings", tmp_path), r"results\.json")


# Interrupted runs: each name is called in the middle of a stage.

INTERRUPTED = {
    "baseline": "qdqbench.quantize.tasks.kinds.encoded.pad",
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


# The traceback is there for who asks.


def test_debug_shows_the_traceback(tmp_path):
    loud = ended(call_apart("check", tmp_path / "nowhere.onnx", "--debug"), 1)
    for told in ("Traceback (most recent call last)", "UserError", "nowhere.onnx"):
        assert told in loud.err


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
    def fail(*_, **__):
        raise RuntimeError(said)

    monkeypatch.setattr(models, "check_file", fail)
    done = qdqbench("check", finished_run / "model.int8.onnx")
    assert (done.code, done.err.count("\n")) == (3, 1)
    assert done.err.startswith(f"qdqbench: the GPU {told}")
    assert "nvidia-smi" in done.err


def test_unexpected_failure_is_one_sentence_too(finished_run, qdqbench, monkeypatch):
    def fail(*_, **__):
        raise ZeroDivisionError("several\nlines")

    monkeypatch.setattr(models, "check_file", fail)
    done = ended(qdqbench("check", finished_run / "model.int8.onnx"), 1)
    assert re.fullmatch(
        r"qdqbench: unexpected failure, ZeroDivisionError: several lines; .*--debug.*\n", done.err
    )
    with pytest.raises(ZeroDivisionError):
        qdqbench("check", finished_run / "model.int8.onnx", "--debug")
