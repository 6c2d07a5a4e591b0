"""Heads over tokens go the whole path: run, report, sensitivity, training."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from seqeval.metrics import f1_score
from transformers import AutoModelForTokenClassification, AutoTokenizer

from qdqbench.eval.metrics.compare import compare
from qdqbench.eval.metrics.parity import compare_layers
from qdqbench.eval.verification.bisect import bisect, run_onnxruntime
from qdqbench.eval.verification.blocks import check_blocks, reference_blocks, stitch
from qdqbench.quantize.pipeline.session import Session, read_config

from . import heads
from .cases import edited
from .tiny import call, ended, refused, results

pytestmark = pytest.mark.slow
KINDS = "tokens", "qa"


@pytest.fixture(scope="module")
def options(given):
    """Those of a model and data of each kind."""
    return {kind: given(kind).options for kind in KINDS}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """Calibrates on few samples."""
    return edited(tmp_path_factory.mktemp("recipe") / "short.yaml", {"calibration": {"samples": 128}})


@pytest.fixture(scope="module")
def runs(whole_run):
    """Finished run directories; of questions with windows of 32 tokens."""
    return {kind: whole_run(kind) for kind in KINDS}


def test_a_run_has_the_answers_of_its_head(runs):
    for kind, shape in (("tokens", ["batch", "length", 5]), ("qa", ["batch", "length"])):
        found = results(runs[kind])
        assert not any("classifier" in name or "qa_outputs" in name for name in found["quantized_layers"])
        assert found["parity"]["logits_max_abs_diff"] < 0.1
        stages = found["stages"]
        assert stages["fp32"]["n"] == stages["onnxruntime"]["vs_fp32"]["n"] == 64
        assert stages["fp32"]["metrics"]["f1"] > 0.5
        assert stages["onnxruntime"]["vs_fp32"]["mcnemar_p"] is not None
        assert "F1" in (runs[kind] / "report.md").read_text()
        outputs = onnx.load(runs[kind] / "model.int8.onnx").graph.output
        assert {
            tuple(axis.dim_param or axis.dim_value for axis in output.type.tensor_type.shape.dim)
            for output in outputs
        } == {tuple(shape)}
    assert [output.name for output in outputs] == ["start_logits", "end_logits"]


def test_scores_are_those_of_seqeval_and_of_transformers_own_head(runs, options):
    model = AutoModelForTokenClassification.from_pretrained(options["tokens"][1]).eval()
    words = AutoTokenizer.from_pretrained(options["tokens"][1])
    lines = (Path(options["tokens"][5]) / "validation.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    said = []
    for row in rows:
        with torch.inference_mode():
            batch = words(row["tokens"], is_split_into_words=True, return_tensors="pt")
            tags = model(**batch).logits.argmax(2)
        said.append([heads.TAGS[tag] for tag in tags[0, 1:-1]])  # each word is one token
    expected = f1_score([row["ner_tags"] for row in rows], said)
    assert results(runs["tokens"])["stages"]["fp32"]["metrics"]["f1"] == pytest.approx(expected)


def test_windows_are_as_long_as_asked(runs):
    found = results(runs["qa"])
    assert found["recipe"]["export"]["max_length"] == 32
    assert [each["length"] for each in found["recipe"]["engine"]["shapes"]][-1] == [16, 32, 32]
    with np.load(runs["qa"] / "logits" / "fp32.npz") as arrays:
        answers = arrays["validation.logits"]
    assert answers.shape[1] == 2
    assert len(answers) > 64 * 20  # an answer a token


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_judged_output_by_output(runs, kind):
    session = Session(read_config(runs[kind]), runs[kind])
    cut = stitch(onnx.load(runs[kind] / "model.int8.onnx"), session.plan.family)
    _, batch = session.eval_splits["validation"][1].batch(range(32), 0)
    widths = []

    def run(feeds):
        got = run_onnxruntime(cut.model, feeds)
        widths.append(got[cut.blocks[-1].output].shape[2])
        return got

    checks = check_blocks(cut, run, session.fake_quant_model, session.fp32_model, [batch])
    assert [row.name for row in checks if not row.holds] == []
    assert widths == [{"tokens": 5, "qa": 1}[kind]]


def test_a_fault_of_one_output_is_named(runs):
    """Of two outputs: by layer parity, by the check of blocks, and by bisecting an engine."""
    folder = runs["qa"]
    session = Session(read_config(folder), folder)
    broken = onnx.load(folder / "model.int8.onnx")
    halved(broken, "end_logits")
    _, batch = session.eval_splits["validation"][1].batch(range(16), 0)
    parity = compare_layers(broken, session.fake_quant_model, [batch])
    assert [row.name for row in parity.compared if not row.holds] == ["end_logits"]

    def run_engine(model, feeds):
        if "end_logits/head" in [output.name for output in model.graph.output]:
            model = halved(onnx.ModelProto.FromString(model.SerializeToString()), "end_logits")
        return run_onnxruntime(model, feeds)

    tensors = reference_blocks(session.fake_quant_model, session.fp32_model, batch, half=True)
    found = bisect(
        folder / "model.int8.onnx",
        batch,
        run_engine,
        run_onnxruntime,
        family=session.plan.family,
        tensors=tensors,
    )
    assert (found.block, found.node) == ("head.end_logits", next(iter(makers(broken, "end_logits/whole"))))


def test_the_worst_of_two_outputs_is_told(runs):
    session = Session(read_config(runs["qa"]), runs["qa"])
    with np.load(runs["qa"] / "logits" / "fp32.npz") as arrays:
        answers = arrays["validation.logits"]
    gold = session.gold["validation"]
    far, near = answers * [1.0, 0.5], answers * [0.999, 1.0]
    for other, output, decibels in ((far, "end_logits", 6.02), (near, "start_logits", 60)):
        found = compare(session.config.task, answers, other.astype(np.float32), gold, seed=0)
        assert (found.sqnr_output, found.sqnr_db) == (output, pytest.approx(decibels, abs=0.01))
    assert results(runs["tokens"])["stages"]["onnxruntime"]["vs_fp32"]["sqnr_output"] is None


def makers(model, tensor):
    return [node.name for node in model.graph.node if tensor in node.output]


def halved(model, output):
    """Halve an output of a graph, in place."""
    for node in model.graph.node:
        node.output[:] = [f"{output}/whole" if name == output else name for name in node.output]
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(0.5), "half"))
    model.graph.node.append(onnx.helper.make_node("Mul", [f"{output}/whole", "half"], [output], name="halve"))
    return model


@pytest.mark.long
def test_sensitivity_sees_heads_over_tokens(options, recipe, tmp_path, capsys):
    done = call(capsys, "sensitivity", recipe, *options["tokens"], "--samples", 24, "--out", tmp_path / "s")
    assert done.code == 0, done.err
    found = json.loads((tmp_path / "s" / "sensitivity.json").read_text())
    assert found["data"]["samples"] == 24
    rows = [row for row in found["rows"] if row["group"] == "linear"]
    assert len(rows) == 13  # twelve and the head, without a pooler
    assert {row["kind"] for row in rows} == {"qkv", "output", "ffn-in", "ffn-out", "classifier"}
    assert all(row["only"]["sqnr_db"] > 0 for row in rows)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_finetune_learns_and_names_its_classes(options, tmp_path, capsys, kind):
    short = ["--limit", 96, "--epochs", 1, "--seeds", 1, "--batch-size", 16, "--out", tmp_path / "f"]
    ended(call(capsys, "finetune", *options[kind], *short))
    (run,) = json.loads((tmp_path / "f" / "finetune.json").read_text())["runs"]
    assert set(run["metrics"]) >= {"f1"}
    assert run["n"] == 64
    config = json.loads((tmp_path / "f" / "seed-0" / "model" / "config.json").read_text())
    if kind == "tokens":
        assert set(config["id2label"].values()) == set(heads.TAGS)


def test_a_head_of_another_kind_is_one_sentence(options, tmp_path, capsys):
    model = [*options["qa"][:2], *options["tokens"][2:]]
    done = call(capsys, "run", "int8-linears", *model, "--metric", "accuracy", "--out", tmp_path / "r")
    refused(done, "is a BertForQuestionAnswering, but the task (token classification) needs a model")
