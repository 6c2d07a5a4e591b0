"""`qdqbench diagnose` and `qdqbench fix`: exit status, JSON, and what a terminal shows."""

import json
from io import TextIOWrapper

import numpy as np
import onnx
import pytest
import torch
from onnxruntime.quantization import quantize_dynamic
from transformers import AutoModelForSequenceClassification

from ..support.build_logs import missing_scale, trtexec
from ..support.foreign_layer import samples, write_dynamic, write_static
from ..support.layer_tables import bert, inspector_json
from ..support.tiny_layer import healthy
from .tiny import ended, fine, refused


@pytest.fixture
def static(tmp_path):
    return write_static(tmp_path, "static.onnx")


@pytest.fixture
def inputs(tmp_path):
    made = samples()
    joined = {name: np.concatenate([each[name] for each in made]) for name in made[0]}
    np.savez(tmp_path / "samples.npz", **joined)
    return tmp_path / "samples.npz"


def test_a_file_that_tensorrt_refuses(static, qdqbench, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    done = qdqbench("diagnose", static)
    assert (done.code, done.err) == (2, "")
    assert done.out.startswith("static.onnx ONNX file: quantized by ONNX Runtime (Q/DQ);")
    assert max(map(len, done.out.splitlines())) <= 80
    first = done.out.split("\n1. ")[1].split("\n2. ")[0]
    assert "no engine is built" in first
    command = f"fix: qdqbench fix {static} -o {static.with_suffix('.fixed.onnx')}"
    assert "".join(command.split()) in "".join(first.split())
    assert "Ranked: " in done.out


def test_json_has_every_node(static, qdqbench, monkeypatch):
    with static.open("rb") as stream:
        monkeypatch.setattr("sys.stdin", TextIOWrapper(stream))
        done = qdqbench("diagnose", "-", "--json")
    told = json.loads(done.out)
    assert done.code == 2
    wrong = [row for row in told["findings"] if row["effect"] in ("refused", "wrong", "not INT8")]
    assert told["errors"] == len(wrong)
    assert all(row["fixes"] for row in told["findings"])
    assert len(told["findings"][0]["nodes"]) > 3


def test_slow_parts_alone_are_no_failure(tmp_path, qdqbench):
    (tmp_path / "layers.json").write_text(inspector_json(bert(attention="apart")))
    done = fine(qdqbench("diagnose", tmp_path / "layers.json"))
    assert "attention-apart" in done.out


def test_names_are_shown_and_not_obeyed(tmp_path, qdqbench):
    name = "\x1b[2J[red]<b>{0}"
    log = tmp_path / "build.log"
    log.write_text(trtexec(*missing_scale(name)))
    done = ended(qdqbench("diagnose", log), 2)
    assert "\x1b" not in done.out
    assert "[2J[red]<b>{0}" in done.out


def test_what_cannot_be_read_is_one_sentence(tmp_path, qdqbench):
    (tmp_path / "model.pt").write_bytes(b"PK\x03\x04")
    refused(qdqbench("diagnose", tmp_path / "model.pt"), "zip archive")
    assert qdqbench("diagnose", tmp_path / "model.pt", "--load-engine").code == 1


def test_fix_mends_and_proves(tmp_path, static, inputs, qdqbench, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    done = fine(qdqbench("fix", static, "-o", tmp_path / "out.onnx", "--inputs", inputs))
    assert "after against before: relative difference" in done.out
    assert "n = 4" in done.out
    again = qdqbench("check", tmp_path / "out.onnx", "--json")
    assert json.loads(again.out)["findings"] == []
    assert qdqbench("diagnose", tmp_path / "out.onnx").code == 0


def test_fix_says_what_it_cannot_mend(tmp_path, inputs, qdqbench):
    path = write_dynamic(tmp_path, "dynamic.onnx")
    done = ended(qdqbench("fix", path, "-o", tmp_path / "out.onnx", "--no-engine", "--json"), 2)
    told = json.loads(done.out)
    assert (told["int8_after"], len(told["left"])) == (0, 1)
    assert "--inputs" in done.err
    given = qdqbench("fix", path, "-o", tmp_path / "out.onnx", "--no-engine", "--inputs", inputs)
    assert given.code == 0


def test_factored_weights_of_fix(tmp_path, qdqbench):
    onnx.save(healthy("fp32", int8_attention=False), tmp_path / "model.onnx")
    out = tmp_path / "out.onnx"
    options = ("--weights", "factored", "--compute", "keep", "--no-engine", "--max-error", "0.5")
    assert qdqbench("fix", tmp_path / "model.onnx", "-o", out, *options).code == 0
    scalars = [tensor for tensor in onnx.load(out).graph.initializer if "scalar" in tensor.name]
    assert scalars
    assert not any(tensor.dims for tensor in scalars)


def export_fp32(model, out):
    """As most exports are made: transformers' eager attention, mask of -3.4e38, dynamic batch and length."""
    loaded = AutoModelForSequenceClassification.from_pretrained(model, attn_implementation="eager").float()
    ids, names = torch.ones(2, 16, dtype=torch.long), ["input_ids", "attention_mask", "token_type_ids"]
    axes = {name: {0: "batch", 1: "length"} for name in names} | {"logits": {0: "batch"}}
    written = {"input_names": names, "output_names": ["logits"], "dynamic_axes": axes, "opset_version": 17}
    torch.onnx.export(loaded.eval(), (ids, ids, ids), str(out), dynamo=False, **written)


@pytest.mark.filterwarnings("ignore")
def test_samples_of_a_task_calibrate(tmp_path, sst2, qdqbench):
    """A plain export of transformers, dynamically quantized, becomes static with rows of the train split."""
    export_fp32(sst2.model, tmp_path / "fp32.onnx")
    path = tmp_path / "dynamic.onnx"
    quantize_dynamic(str(tmp_path / "fp32.onnx"), str(path))
    asked = ("fix", path, "-o", tmp_path / "out.onnx", "--samples", 16, "--no-engine")
    done = fine(qdqbench(*asked, *sst2.options))
    assert "n = 16, 16 rows of sst2 in" in " ".join(done.out.split())
    assert "activations without a scale are calibrated" in " ".join(done.out.split())
    again = qdqbench(*asked, *sst2.options, "--inputs", "samples.npz")
    assert (again.code, "give one of them" in again.err) == (1, True)
