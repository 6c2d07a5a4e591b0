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
from pathlib import Path

import pytest

from .tiny import EVAL_ROWS, MAIN, environment, listing, rows, write_split

LATEST = ("results.json", "report.md", "report.html")


def one_sentence(done, code, *told):
    """Exit status, and one line on stderr that tells everything asked for."""
    assert done.code == code, done
    assert done.out == ""
    assert re.fullmatch(r"qdqbench: [^\n]{20,}\n", done.err), done.err
    assert "Traceback" not in done.err
    assert "unexpected failure" not in done.err, done.err
    for text in told:
        assert re.search(text, done.err), (text, done.err)


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


def config_edited(model, file="config.json", **changes):
    path = model / file
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def cut(path, share):
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


def overwrite(path, start, count):
    data = bytearray(path.read_bytes())
    data[start : start + count] = b"\xff" * count
    path.write_bytes(data)


def relabelled(data, split, change):
    table = rows("sst2", EVAL_ROWS, 100)
    change(table)
    (data / "sst2" / f"{split}.parquet").unlink()
    write_split(data / "sst2" / f"{split}.parquet", table)


def set_label(value):
    return lambda table: table.update(label=[value] * EVAL_ROWS)


def some_labels(value):
    return lambda table: table["label"].__setitem__(3, value)


def no_rows(data, split):
    import pyarrow
    import pyarrow.parquet

    path = data / "sst2" / f"{split}.parquet"
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(path).slice(0, 0), path)


# What is done to the model or the data, and what the sentence must tell.
DAMAGED = {
    "config-missing": (lambda m, d: (m / "config.json").unlink(), [r"model", r"config\.json|model_type"]),
    "config-not-json": (
        lambda m, d: cut(m / "config.json", 0.5),
        [r"cannot load model", r"config\.json.* is not a valid JSON"],
    ),
    "other-architecture": (
        lambda m, d: config_edited(m, model_type="mobilebert"),
        [r"'mobilebert'", r"supported here: bert"],
    ),
    "unknown-architecture": (
        lambda m, d: config_edited(m, model_type="nonesuch"),
        [r"does not know", r"nonesuch"],
    ),
    "no-weights": (lambda m, d: (m / "model.safetensors").unlink(), [r"cannot load model", r"safetensors"]),
    "empty-weights": (lambda m, d: cut(m / "model.safetensors", 0), [r"cannot load model"]),
    "truncated-weights": (lambda m, d: cut(m / "model.safetensors", 0.6), [r"cannot load model"]),
    "corrupted-header": (lambda m, d: overwrite(m / "model.safetensors", 0, 64), [r"cannot load model"]),
    "not-a-number-weights": (
        lambda m, d: overwrite(m / "model.safetensors", -40000, 30000),
        [r"NaN|not finite|infinite"],
    ),
    "no-tokenizer": (
        lambda m, d: [
            path.unlink() for path in m.iterdir() if path.name not in ("config.json", "model.safetensors")
        ],
        [r"tokenizer"],
    ),
    "no-pad-token": (
        lambda m, d: config_edited(m, "tokenizer_config.json", pad_token=None),
        [r"tokenizer of model .* has no pad token", r"key pad_token"],
    ),
    "shapes-differ": (
        lambda m, d: config_edited(m, intermediate_size=96),
        [r"cannot load model|lacks weights"],
    ),
    "too-few-positions": (
        lambda m, d: config_edited(m, max_position_embeddings=64),
        [r"cannot load|positions"],
    ),
    "truncated-data": (
        lambda m, d: cut(d / "sst2" / "validation.parquet", 0.6),
        [r"validation\.parquet", r"damaged"],
    ),
    "no-such-split": (
        lambda m, d: (d / "sst2" / "validation.parquet").unlink(),
        [r"'validation'", r"looked for"],
    ),
    "no-rows-to-evaluate": (lambda m, d: no_rows(d, "validation"), [r"validation\.parquet", r"no rows"]),
    "no-rows-to-calibrate": (lambda m, d: no_rows(d, "train"), [r"train\.parquet", r"no rows"]),
    "no-train-split": (lambda m, d: (d / "sst2" / "train.parquet").unlink(), [r"'train'", r"looked for"]),
    "no-labels": (
        lambda m, d: relabelled(d, "validation", set_label(-1)),
        [r"labels", r"all -1", r"validation"],
    ),
    "some-labels-missing": (
        lambda m, d: relabelled(d, "validation", some_labels(None)),
        [r"missing in 1 of 96", r"labelled split"],
    ),
    "a-label-too-many": (
        lambda m, d: relabelled(d, "validation", some_labels(2)),
        [r"0 to 2", r"classes 0 to 1"],
    ),
    "labels-are-texts": (
        lambda m, d: relabelled(d, "validation", set_label("yes")),
        [r"string", r"integers from 0 to 1"],
    ),
    "texts-are-numbers": (
        lambda m, d: relabelled(d, "validation", lambda t: t.update(sentence=[1] * EVAL_ROWS)),
        [r"'sentence'", r"not texts"],
    ),
    "a-text-is-missing": (
        lambda m, d: relabelled(d, "validation", lambda t: t["sentence"].__setitem__(5, None)),
        [r"'sentence'", r"row 5"],
    ),
    "a-column-is-missing": (
        lambda m, d: relabelled(d, "validation", lambda t: t.update(text=t.pop("sentence"))),
        [r"no column sentence", r"its columns are label, idx, text"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_model_or_data(case, copied, tmp_path, qdqbench):
    damage, told = DAMAGED[case]
    model, data = copied
    damage(model, data)
    out = tmp_path / "run"
    done = qdqbench("run", "--model", model, "--task", "sst2", "--data", data, "--out", out)
    # a NaN is found by a check of the logits, after the stage ran
    one_sentence(done, 2 if case == "not-a-number-weights" else 1, *told)
    assert not out.exists()


def test_damage_in_the_middle_of_a_run(a_run, sst2, copied, qdqbench):
    """The data goes bad after the run was made: nothing of the old report is taken for the new one's."""
    model, data = copied
    assert qdqbench("run", "--model", model, "--task", "sst2", "--data", data, "--out", a_run).code == 0
    cut(model / "model.safetensors", 0.5)
    done = qdqbench("report", a_run)
    one_sentence(done, 1, "cannot load model")
    for name in LATEST:
        assert not (a_run / name).exists()


# What is asked for does not exist or does not fit.

OPTIONS = {
    "model-missing": (lambda g, t: ["run", "--model", t / "nowhere", *g.options[2:]], 1, [r"nowhere"]),
    "model-is-a-file": (
        lambda g, t: ["run", "--model", g.model / "config.json", *g.options[2:]],
        1,
        [r"config\.json"],
    ),
    "model-without-task": (
        lambda g, t: ["run", "--model", g.model],
        1,
        [r"--model and --task belong together"],
    ),
    "task-without-model": (
        lambda g, t: ["run", "--task", "sst2"],
        1,
        [r"--model and --task belong together"],
    ),
    "data-missing": (
        lambda g, t: ["run", *g.options[:4], "--data", t / "nowhere"],
        1,
        [r"data folder .*nowhere does not exist"],
    ),
    "data-is-a-file": (
        lambda g, t: ["run", *g.options[:4], "--data", g.model / "config.json"],
        1,
        [r"has no column sentence"],
    ),
    "unknown-task": (
        lambda g, t: ["run", *g.options[:2], "--task", "sst", *g.options[4:]],
        1,
        [r"unknown task 'sst'", r"'sst2'", r"--text-column\b(?!s)"],
    ),
    "task-for-other-labels": (
        lambda g, t: ["run", *g.options[:2], "--task", "mnli", *g.options[4:]],
        1,
        [r"mnli"],
    ),
    "task-for-regression": (
        lambda g, t: ["run", *g.options[:2], "--task", "stsb", *g.options[4:]],
        1,
        [r"stsb"],
    ),
    "unknown-text-column": (
        lambda g, t: ["run", *g.options, "--text-column", "sentense"],
        1,
        [r"sentense \(nearest: sentence\)", r"--text-column\b(?!s)"],
    ),
    "unknown-label-column": (
        lambda g, t: ["run", *g.options, "--label-column", "lable"],
        1,
        [r"lable \(nearest: label\)", r"--label-column"],
    ),
    "text-column-twice": (
        lambda g, t: ["run", *g.options, "--text-column", "sentence", "--text-column", "sentence"],
        1,
        [r"all different"],
    ),
    "number-of-labels-missing": (
        lambda g, t: ["run", *g.options[:2], "--task", "mine", *g.options[4:], "--text-column", "sentence"],
        1,
        [r"--num-labels"],
    ),
    "number-of-labels-wrong": (lambda g, t: ["run", *g.options, "--num-labels", "5"], 1, [r"5 classes"]),
    "unknown-metric": (
        lambda g, t: ["run", *g.options, "--metric", "bleu"],
        1,
        [r"bleu", r"accuracy, f1, matthews"],
    ),
    "unknown-recipe": (
        lambda g, t: ["run", "bert-int8-linear", *g.options],
        1,
        [r"'bert-int8-linear'", r"nearest is 'bert-int8-linears'"],
    ),
    "broken-recipe": (
        lambda g, t: ["run", broken(t, "rules: [{match: x"), *g.options],
        1,
        [r"not valid recipe YAML"],
    ),
    "recipe-is-a-list": (lambda g, t: ["run", broken(t, "- 1"), *g.options], 1, [r"holds no recipe"]),
    "recipe-matches-nothing": (
        lambda g, t: [
            "run",
            broken(
                t,
                VALID
                + "rules: [{match: 'encoder.leyer.*', weights: int8/per-channel, input: int8/per-tensor}]",
            ),
            *g.options,
        ],
        1,
        [r"encoder\.leyer", r"encoder\.layer"],
    ),
    "recipe-of-no-samples": (
        lambda g, t: ["run", broken(t, VALID + "calibration: {samples: 0}"), *g.options],
        1,
        [r"calibration\.samples", r"greater than 0"],
    ),
    "recipe-longer-than-the-model": (
        lambda g, t: ["run", broken(t, VALID + "export: {max_length: 256}"), *g.options],
        1,
        [r"export\.max_length is 256", r"128 positions"],
    ),
    "recipe-shorter-than-the-data": (
        lambda g, t: ["run", broken(t, VALID + "engine: {shapes: {length: [4, 4, 4]}}"), *g.options],
        1,
        [r"evaluation samples have more than the 4 tokens that engine\.shapes takes", r"export\.max_length"],
    ),
    "revision-of-a-folder": (lambda g, t: ["run", *g.options, "--revision", "v1"], 1, [r"drop --revision"]),
    "revision-of-nothing": (lambda g, t: ["run", "--revision", "v1"], 1, [r"belongs to --model"]),
    "until-unknown": (
        lambda g, t: ["run", *g.options, "--until", "nonesuch"],
        1,
        [r"'nonesuch'", r"baseline"],
    ),
    "no-such-command": (lambda g, t: ["rum"], 1, [r"rum"]),
    "no-such-option": (lambda g, t: ["run", *g.options, "--tusk", "sst2"], 1, [r"--tusk"]),
    "limit-of-nothing": (lambda g, t: ["run", *g.options, "--limit", "0"], 1, [r"--limit"]),
    "limit-is-no-number": (lambda g, t: ["run", *g.options, "--limit", "many"], 1, [r"--limit"]),
    "argument-missing": (lambda g, t: ["check"], 1, [r"(?i)target"]),
    "hub-set-of-no-name": (lambda g, t: ["run", *g.options[:4], "--data", "hub:"], 1, [r"hub:OWNER/NAME"]),
}
VALID = "version: 1\nname: mine\n"


def broken(folder, text):
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("case", OPTIONS)
def test_options(case, sst2, tmp_path, qdqbench, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # a missing folder may be a hub id
    build, code, told = OPTIONS[case]
    arguments, out = build(sst2, tmp_path), tmp_path / "run"
    if arguments[0] == "run":
        arguments += ["--out", out]
    one_sentence(qdqbench(*arguments), code, *told)
    assert not out.exists()


# The run directory.


def test_out_is_a_file(sst2, tmp_path, qdqbench):
    out = tmp_path / "file"
    out.write_text("mine")
    one_sentence(qdqbench("run", *sst2.options, "--out", out), 1, "is a file", "--out")
    one_sentence(qdqbench("run", *sst2.options, "--out", out / "run"), 1, "cannot write|is a file", "--out")
    assert out.read_text() == "mine"


def test_out_holds_other_files(sst2, tmp_path, qdqbench):
    out = tmp_path / "folder"
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    one_sentence(qdqbench("run", *sst2.options, "--out", out), 1, "holds other files", "--out")
    assert listing(out) == ["thesis.txt"]


def test_out_cannot_be_written(sst2, tmp_path, qdqbench, monkeypatch):
    """A read-only folder; tests may run as root, for whom there is none."""

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "mkdtemp", refuse)
        done = qdqbench("run", *sst2.options, "--out", tmp_path / "run")
    one_sentence(done, 1, "cannot write .*run", "Permission denied", "--out")
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
        done = qdqbench("run", *sst2.options, "--out", out)
    one_sentence(done, 1, r"cannot write \S*logits/fp32\.npz: no space left on device", r"MB is free on /")
    # a stage that ran beside the baseline may have ended, and is kept
    assert not [*out.glob("logits/*"), *out.glob("results.json")]


@pytest.mark.parametrize("command", ["quantize", "export", "build", "evaluate", "report"])
def test_stage_command_on_something_else(command, tmp_path, qdqbench):
    (tmp_path / "thesis.txt").write_text("mine")
    one_sentence(qdqbench(command, tmp_path), 1, "no run directory", "qdqbench run")
    one_sentence(qdqbench(command, tmp_path / "nowhere"), 1, "no run directory", "qdqbench run")
    one_sentence(qdqbench(command, tmp_path / "thesis.txt"), 1, "no run directory")
    assert listing(tmp_path) == ["thesis.txt"]


def test_quantize_of_a_recipe_that_quantizes_nothing(sst2, tmp_path, qdqbench):
    out = tmp_path / "run"
    assert qdqbench("run", "bert-fp16", *sst2.options, "--out", out, "--until", "baseline").code == 0
    one_sentence(qdqbench("quantize", out), 1, "no stage 'quantize'")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema_version": 99}', "\xff"])
def test_run_of_another_version(text, a_run, qdqbench):
    (a_run / "run.json").write_text(text, encoding="latin-1")
    one_sentence(qdqbench("report", a_run), 1, r"run\.json")


def test_a_mistake_leaves_a_finished_run_as_it_is(a_run, sst2, qdqbench):
    """Seen: `--max-length` beyond the model's positions took the report of the run in that folder with it."""
    before = {name: (a_run / name).read_bytes() for name in ("run.json", "results.json", "report.html")}
    done = qdqbench("run", "bert-int8-linears", *sst2.options, "--out", a_run, "--max-length", 4096)
    one_sentence(done, 1, "export.max_length is 4096")
    assert {name: (a_run / name).read_bytes() for name in before} == before


@pytest.mark.slow
@pytest.mark.parametrize("text", [pytest.param("{", marks=pytest.mark.long), '{"schema_version": 99}'])
def test_unreadable_manifest_means_that_nothing_is_reused(text, a_run, qdqbench):
    (a_run / "stages.json").write_text(text, encoding="latin-1")
    assert qdqbench("report", a_run).code == 0
    timings = json.loads((a_run / "results.json").read_text())["timings"]
    assert not any(row["reused"] for row in timings.values())


def test_profile_before_the_report(sst2, tmp_path, qdqbench):
    one_sentence(qdqbench("timings", tmp_path), 1, r"results\.json", "run")
    (tmp_path / "results.json").write_text("{}")
    one_sentence(qdqbench("timings", tmp_path), 1, r"results\.json")


# ONNX files that are none.

ONNX = {
    "missing": (lambda path: path.unlink(), [r"model\.onnx"]),
    "a-folder": (lambda path: (path.unlink(), path.mkdir()), [r"model\.onnx"]),
    "empty": (lambda path: cut(path, 0), [r"model\.onnx"]),
    "truncated-early": (lambda path: cut(path, 0.01), [r"model\.onnx"]),
    "truncated": (lambda path: cut(path, 0.5), [r"model\.onnx", r"truncated|corrupted|not"]),
    "truncated-late": (lambda path: cut(path, 0.999), [r"model\.onnx"]),
    "corrupted": (lambda path: overwrite(path, 100, 400), [r"model\.onnx"]),
    "text": (lambda path: path.write_text("hello"), [r"model\.onnx"]),
    "random": (lambda path: path.write_bytes(bytes(range(256)) * 64), [r"model\.onnx"]),
}


@pytest.mark.parametrize("case", ONNX)
@pytest.mark.parametrize("options", [[], ["--recipe", "bert-int8-linears"]], ids=["alone", "recipe"])
def test_check_of_a_file_that_is_no_graph(case, options, finished_run, tmp_path, qdqbench):
    damage, told = ONNX[case]
    path = Path(shutil.copy(finished_run / "model.int8.onnx", tmp_path / "model.onnx"))
    damage(path)
    one_sentence(qdqbench("check", path, *options), 1, *told)


def test_check_against_an_unknown_recipe(finished_run, qdqbench):
    done = qdqbench("check", finished_run / "model.int8.onnx", "--recipe", "nonesuch")
    one_sentence(done, 1, "nonesuch", "bert-int8-linears")


# Interrupted runs: each name is called in the middle of a stage.

INTERRUPTED = {
    "baseline": "qdqbench.quantize.tasks.types.encoded.pad",
    "quantize": "qdqbench.quantize.calibration.ptq.forward",
    "export": "qdqbench.quantize.graph.export.save",
    "check": "qdqbench.eval.stages.stages.to_json",
    "parity": "qdqbench.eval.metrics.parity.session_of",
    "onnxruntime": "qdqbench.eval.metrics.runners.session_of",
    "build": "qdqbench.quantize.engine.build.measure_coverage",
    "report": "qdqbench.eval.runs.run.write_reports",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "raised"),
    [
        *(pytest.param(stage, KeyboardInterrupt, marks=pytest.mark.long) for stage in [*INTERRUPTED][1:]),
        (next(iter(INTERRUPTED)), KeyboardInterrupt),
        ("export", MemoryError),
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
        done = qdqbench("run", *sst2.options, "--out", out)
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
    assert qdqbench("run", *sst2.options, "--out", out).code in (0, 2)
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
    command = [sys.executable, "-c", heeds + MAIN, "run", *sst2.options, "--out", str(out)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        until = time.monotonic() + 120
        while not (out / "stages.json").exists() and time.monotonic() < until:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        try:
            shown, told = process.communicate(timeout=60)
        finally:
            process.kill()  # if it hangs, fail and do not wait
    assert (process.returncode, shown) == (130, "")
    *signs, last = told.splitlines()
    assert last == "qdqbench: interrupted; what is finished is kept, and the same command goes on"
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in signs)  # of life, on a busy machine
    nothing_half_written(out)
    assert "baseline" in json.loads((out / "stages.json").read_text())["stages"]


# The traceback is there for who asks.


def test_debug_shows_the_traceback(tmp_path):
    arguments = [sys.executable, "-c", MAIN, "check", str(tmp_path / "nowhere.onnx")]
    quiet = subprocess.run(arguments, capture_output=True, text=True, check=False, env=environment())
    assert quiet.returncode == 1
    assert re.fullmatch(r"qdqbench: .*nowhere\.onnx.*\n", quiet.stderr)
    loud = subprocess.run(
        [*arguments, "--debug"], capture_output=True, text=True, check=False, env=environment()
    )
    assert loud.returncode == 1
    assert "Traceback (most recent call last)" in loud.stderr
    assert "UserError" in loud.stderr
    assert "nowhere.onnx" in loud.stderr


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
    one_sentence(qdqbench("run", "nonesuch", *sst2.options), 1, "nonesuch")
    one_sentence(qdqbench("run", "--task", "sst2"), 1, "belong together")
    assert os.listdir(tmp_path) == []
