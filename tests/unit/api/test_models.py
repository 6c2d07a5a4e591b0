"""Models in memory: samples in any form, the model unharmed, the same scales as a run's."""

import copy
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import onnxruntime
import pandas
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments

import qdqbench
from qdqbench.eval.bench.results import read_bench
from qdqbench.eval.runs.results import read_results
from qdqbench.quantize.calibration.fakequant.quantizers import forward
from qdqbench.quantize.models.load import load_model

from ...integration.tiny import write_data, write_model
from ...support.tiny_bert import assert_same_state, calibrate, calibration_batches, padded_batch, recipe_with
from ...support.tiny_embedder import write_sentence_folder

MEASURED = Path(__file__).parents[3] / "docs" / "measured"


def recipe():
    """With the model's own GELU, as the other side of the comparison has it, and what no backend decides."""
    return recipe_with("bert-int8-linears", export={"gelu": "exact"}, calibration={"centering": False})


@pytest.fixture(scope="module")
def model(tiny_bert):
    return load_model(str(tiny_bert))


@pytest.fixture(scope="module")
def made(model):
    return qdqbench.quantize(model, calibration_batches(), recipe())


def amax(found):
    return {name: state.amax for name, state in found.record.quantizers.items()}


def test_scales_are_those_of_a_run_and_in_the_table(made, tiny_bert):
    assert amax(made) == amax(calibrate(tiny_bert, recipe()))
    table = made.to_frame()
    assert [*table.name] == [*made.record.quantizers]
    assert {"module", "kind", "amax", "amax_over_rms"} <= {*table.columns}


def test_the_model_that_was_given_is_not_changed(model):
    before = copy.deepcopy(model)
    qdqbench.quantize(model, calibration_batches()[:1], recipe_with(calibration={"smoothing": 0.5}))
    assert_same_state(before, model)
    assert not any("quantizer" in name for name, _ in model.named_modules())


def test_samples_in_every_form_give_the_same_scales(made, model):
    """One sample an item, tensors, and padded batches: no quantizer sees the padding."""
    batches = calibration_batches()
    single = [{key: [*map(int, batch[key][row])] for key in batch} for batch in batches for row in range(8)]
    assert amax(qdqbench.quantize(model, single, recipe())) == amax(made)
    padded = []
    for batch in batches:
        wide = {key: np.pad(values, ((0, 0), (0, 4))) for key, values in batch.items()}
        padded.append({key: torch.from_numpy(values) for key, values in wide.items()})
    assert amax(qdqbench.quantize(model, padded, recipe())) == amax(made)


def test_texts_a_path_a_batch_and_a_frame_are_taken(model, tmp_path):
    folder = write_model(tmp_path / "sst2", "sst2")
    texts = ["good and bad", "the best of all"]
    found = qdqbench.quantize(folder, texts)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [{"input_ids": tokenizer(text)["input_ids"]} for text in texts]
    assert amax(found) == amax(qdqbench.quantize(str(folder), rows))
    assert amax(found) == amax(qdqbench.quantize(load_model(str(folder)), texts, tokenizer=tokenizer))
    assert amax(found) == amax(qdqbench.quantize(folder, pandas.DataFrame(rows)))
    assert amax(found) == amax(qdqbench.quantize(folder, tokenizer(texts)))  # of two lengths
    batch, one = calibration_batches()[0], calibration_batches()[:1]
    assert amax(qdqbench.quantize(model, batch, recipe())) == amax(qdqbench.quantize(model, one, recipe()))
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)})
    with pytest.raises(qdqbench.UserError, match="train holds no input_ids"):
        qdqbench.quantize(model, splits)


def test_a_notebook_shows_one_line_and_a_small_table(made, tmp_path):
    exported = made.export(tmp_path / "model.onnx")
    report = qdqbench.check(exported.path)
    linears = len(made.plan.int8)
    assert f"recipe: bert-int8-linears, INT8 linears: {linears} of " in repr(made)
    assert re.search(r"amax spread: median \d+\.\d%, largest \d+\.\d%", repr(made))
    assert str(exported.path) in repr(exported)
    assert f"INT8 linears: {linears} of {linears + len(made.plan.high)}" in repr(report)
    results = read_results(MEASURED / "report")
    bench = read_bench(MEASURED / "benches" / "minilm-l6-sst2-openvino.json")
    assert "fp32: accuracy 0.8968, " in repr(results)
    assert "gate: passed" in repr(results)
    best = next(each.headline for each in bench.configs if (each.batch, each.length) == (8, 128))
    assert f"8 x 128: {best.leading.value:.2f}x over {best.baseline}" in repr(bench)
    for shown in (made, exported, report, results, bench, made.record):
        assert "\n" not in repr(shown)[:400] == repr(shown)
        assert "<tr>" in shown._repr_html_()
    assert qdqbench.__version__


def test_what_is_saved_loads_again_here_and_in_transformers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = write_model(tmp_path / "sst2", "sst2")
    made = qdqbench.quantize(folder, ["good and bad", "the best of all"], "int8-attention")
    found = qdqbench.load(made.save_pretrained("saved"))
    assert found.record == made.record
    assert found.recipe == made.recipe
    assert_same_state(made.model, found.model)
    assert_same_state(made.original, AutoModelForSequenceClassification.from_pretrained("saved"))
    assert found.tokenizer("good").input_ids == made.tokenizer("good").input_ids
    assert found.save_pretrained("saved").is_dir()  # again
    shutil.copytree("saved", "broken")
    damaged = json.loads(Path("saved/calibration.json").read_text())
    two = {name: [1.0, 2.0] for name in damaged["smoothing"]["columns"]}
    for broken in ({"smoothing": {"columns": two}}, {"quantizers": {}}):
        Path("broken/calibration.json").write_text(json.dumps(damaged | broken))
        with pytest.raises(qdqbench.UserError, match=r"broken is damaged|of another recipe"):
            qdqbench.load("broken")
    with pytest.raises(qdqbench.UserError, match="sst2 holds no quantized model"):
        qdqbench.load(folder)
    with pytest.raises(qdqbench.UserError, match="sst2 holds something else"):
        made.save_pretrained(folder)
    made.model.classifier = torch.nn.Identity()
    with pytest.raises(qdqbench.CheckFailed, match="layers of the model were changed"):
        made.save_pretrained("saved")
    write_data(tmp_path / "data", "sst2")
    rows = pandas.read_parquet(tmp_path / "data" / "sst2" / "validation.parquet")
    told = {"data": {"train": rows[:8], "validation": rows}, "limit": 48}
    results = found.evaluate("sst2", **told)
    assert {name: stage.n for name, stage in results.stages.items()} == {"fp32": 48, "fake_quant": 48}
    assert results.stages["fake_quant"].vs_fp32.n == 48
    assert results.data["calibration"]["samples"] == 2
    with pytest.raises(qdqbench.UserError, match="give tokenizer="):
        qdqbench.quantize(found.original, {"input_ids": [[2, 5, 3]]}).evaluate("sst2", **told)


SECTION = {"steps": 60, "batch_size": 8, "holdout": 0.25}
BATCHES = [padded_batch((6 + seed % 8,) * 8, seed=seed) for seed in range(20)]


def test_a_recipe_with_reconstruction_trains_before_it_is_saved(model, tmp_path):
    recipes = [recipe_with("bert-int8-attention", **each) for each in ({}, {"reconstruction": SECTION})]
    plain, made = (qdqbench.quantize(model, BATCHES, each) for each in recipes)
    weights = [each.model.bert.encoder.layer[0].output.dense.weight for each in (plain, made)]
    assert not torch.equal(*weights)
    assert_same_state(made.model, qdqbench.load(made.save_pretrained(tmp_path / "saved")).model)


def test_what_was_trained_with_centering_answers_the_same_once_it_is_loaded(model, tmp_path):
    changes = {"calibration": {"centering": True}, "reconstruction": SECTION | {"learning_rate": 3e-3}}
    made = qdqbench.quantize(model, BATCHES, recipe_with("bert-int8-linears-per-tensor", **changes))
    assert made.record.centering.inputs
    loaded = qdqbench.load(made.save_pretrained(tmp_path / "saved")).model
    trained = forward(made.model, BATCHES[0])
    torch.testing.assert_close(forward(loaded, BATCHES[0]), trained, rtol=1e-4, atol=1e-4)


@pytest.mark.long
def test_a_model_in_memory_is_deployed_with_its_scales(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("qdqbench.eval.runs.run.bench_quickly", lambda session: "")
    folder = write_model(tmp_path / "sst2", "sst2")
    made = qdqbench.quantize(folder, ["good and bad", "the best of all"])
    write_data(tmp_path / "data", "sst2")
    made.deploy("run", "sst2", tmp_path / "data", limit=32, backend="onnxruntime")
    assert json.loads(Path("run/calibration.json").read_text()) == made.record.model_dump(mode="json")
    assert Path("run/deploy/run_onnxruntime.py").is_file()
    assert all(stage.reused for stage in qdqbench.resume("run").timings.values())


def test_a_trainer_trains_what_is_quantized(model, tmp_path):
    split = {"outlier_channel_splitting": 32}
    in_fp32 = recipe_with("bert-int8-linears", engine={"backend": "onnxruntime"}, calibration=split)
    made = qdqbench.quantize(model, calibration_batches(), in_fp32)
    batch = calibration_batches()[0]
    rows = [{"labels": row % 2} | {name: each[row] for name, each in batch.items()} for row in range(8)]
    weights = made.model.base_model.encoder.layer[0].output.dense.weight
    before = weights.detach().clone()
    told = {"max_steps": 2, "learning_rate": 1e-3, "report_to": "none", "save_strategy": "no"}
    Trainer(made.model, TrainingArguments(str(tmp_path), use_cpu=True, **told), train_dataset=rows).train()
    assert not torch.equal(weights, before)
    exact = onnxruntime.SessionOptions()  # on a CPU that saturates, too
    exact.add_session_config_entry("session.x64quantprecision", "1")
    session = onnxruntime.InferenceSession(made.export(tmp_path / "trained.onnx").path, exact)
    [logits] = session.run(None, {each.name: batch[each.name] for each in session.get_inputs()})
    np.testing.assert_allclose(logits, forward(made.model.eval(), batch), atol=0.05)
    assert_same_state(qdqbench.load(made.save_pretrained(tmp_path / "saved")).model, made.model)


def test_an_export_holds_to_the_recipe(made, tmp_path):
    exported = qdqbench.export(made, tmp_path / "deep" / "model.onnx")
    report = qdqbench.check(exported.path, "bert-int8-linears")
    assert report.errors == []
    assert len(report.quantized) == len(made.plan.int8)
    strict = qdqbench.check(exported.path, "bert-int8-ffn")
    assert strict.errors
    assert [*strict.to_frame().code] == [row.code for row in strict.findings]


def as_type(model, name):
    other = copy.deepcopy(model)
    other.config.model_type = name
    return other


IDS = [{"input_ids": [2, 7, 3]}]
WRONG = [  # what a user may try: of the API, a model and a quantized one
    (lambda q, model, made: q.quantize(model, [{"tokens": [1, 2]}]), "has tokens, but no input_ids"),
    (lambda q, model, made: q.quantize(model, [IDS[0] | {"attention_mask": [1]}]), "have shapes"),
    (lambda q, model, made: q.quantize(model, iter(IDS)), "more than once; give a list"),
    (lambda q, model, made: q.quantize(model, []), "no samples"),
    (lambda q, model, made: q.quantize(model, [{"input_ids": [7, 70]}]), "from 7 to 70, .* 0 to 59; use the"),
    (lambda q, model, made: q.quantize(model, [{"input_ids": [7] * 129}]), "129 tokens, .* 128 positions"),
    (lambda q, model, made: q.quantize(model, ["a text"]), "tokenizer"),
    (lambda q, model, made: q.quantize(model, 7), "a int is no"),
    (lambda q, model, made: q.quantize(model, IDS, "bert-fp16"), "bert-fp16 quantizes nothing"),
    (lambda q, model, made: q.quantize(as_type(model, "bart"), IDS), "'bart', an encoder with a decoder"),
    (lambda q, model, made: q.quantize({}, IDS), "a dict is no transformers model"),
    (lambda q, model, made: q.quantize(None, IDS), "a NoneType is no transformers model"),
    (lambda q, model, made: q.quantize(model.base_model, IDS), "a BertModel has no head"),
    (lambda q, model, made: q.quantize(made.model, IDS), "has quantizers already; give the original"),
    (lambda q, model, made: q.quantize(made, IDS), "a Quantized is no transformers model"),
    (lambda q, model, made: q.quantize(model, None), "a NoneType is no calibration data"),
    (lambda q, model, made: q.quantize(model, "a text"), "a str is no calibration data"),
    (lambda q, model, made: q.quantize(model, [[7, 8]]), "a calibration sample is a list"),
    (lambda q, model, made: q.quantize(model, np.array([[7]])), "a calibration sample is a ndarray"),
    (lambda q, model, made: q.quantize(model, [{"input_ids": None}]), "but no input_ids"),
    (lambda q, model, made: q.quantize(model, [{"input_ids": "abc"}]), "no whole numbers"),
    (lambda q, model, made: q.quantize(model, [{"input_ids": [1.5]}]), "no whole numbers"),
    (lambda q, model, made: q.quantize(model, [{"input_ids": [[7], [7, 8]]}]), "pad them"),
    (lambda q, model, made: q.quantize(model, [IDS[0] | {"token_type_ids": [0, 5, 0]}]), "from 0 to 5"),
    (lambda q, model, made: q.quantize(model, [{"input_ids": []}]), "no samples of split 'memory'"),
    (lambda q, model, made: q.quantize(model, ["a", None], tokenizer=made), "None among the calibration"),
    (lambda q, model, made: q.quantize(model, ["a"], tokenizer=7), "a int is no tokenizer"),
    (
        lambda q, model, made: q.quantize(model, pandas.DataFrame({"text": ["a"]})),
        "has text, but no input_ids",
    ),
    (lambda q, model, made: q.quantize(model, IDS, 3), "no recipe or file is called '3'"),
    (lambda q, model, made: q.quantize(model, IDS, "roberta-int8-ffn"), "is for model family 'roberta'"),
    (lambda q, model, made: q.quantize(model, IDS, progress="x"), "progress='x' is no function"),
    (lambda q, model, made: q.export(model, "x.onnx"), "a BertForSequenceClassification is not quantized"),
    (lambda q, model, made: q.export(made, "."), ". is a folder; give the file to write"),
    (lambda q, model, made: made.export(None), "path='None' of type NoneType is no path"),
    (lambda q, model, made: made.save_pretrained(None), "is no path"),
    (lambda q, model, made: made.evaluate("sst2", limt=3, tokenizer=FAKE), "limt=3: no such argument"),
    (lambda q, model, made: made.evaluate(None, tokenizer=FAKE), "give a task"),
    (lambda q, model, made: made.evaluate("sst2", model="x", tokenizer=FAKE), "no model, revision"),
    (lambda q, model, made: made.deploy(None, "sst2"), "is no path"),
    (lambda q, model, made: q.check(None), "is no path"),
    (lambda q, model, made: q.load(3), "folder='3' of type int is no path"),
    (lambda q, model, made: q.load_recipe(None), "no recipe or file is called 'None'"),
    (lambda q, model, made: q.resume(made), "of type Quantized is no path"),
    (lambda q, model, made: q.evaluate(None), "is no path"),
    (lambda q, model, made: q.build(""), "is no path"),
    (lambda q, model, made: q.bench(3), "is no path"),
    (lambda q, model, made: q.bench(model=model), "should be a valid string"),
    (lambda q, model, made: q.run("int8-linears", model, "sst2"), "is in memory; save it"),
    (lambda q, model, made: q.run(data={"train": "a.csv"}), "holds rows, no paths"),
    (lambda q, model, made: q.run(text_column="a", limit="all"), "^limit=all: should be a valid integer"),
    (lambda q, model, made: q.run(set="calibration.samples"), "^set=calibration.samples: should be"),
    (lambda q, model, made: q.qat("int8-linears", seed=-1), "seed=-1: should be"),
    (lambda q, model, made: q.finetune(learning_rate="fast"), "learning_rate=fast: should be"),
    (lambda q, model, made: q.auto(budget=[]), r"budget=\[\]: no duration"),
    (lambda q, model, made: q.auto(recipe="int8-nothing"), "no recipe or file is called 'int8-nothing'"),
]
FAKE = SimpleNamespace(save_pretrained=lambda folder: None)


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_a_wrong_call_is_one_sentence(number, model, made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, message = WRONG[number]
    with pytest.raises(qdqbench.UserError, match=message):
        call(qdqbench, model, made)


@pytest.mark.parametrize("inside", ["", "0_Transformer"])
def test_a_folder_of_an_embedder_brings_its_tokenizer(tmp_path, inside):
    folder = write_sentence_folder(tmp_path / "model", inside=inside)
    of_texts = qdqbench.quantize(folder, ["a good film", "dull"])
    ids = of_texts.tokenizer(["a good film", "dull"])["input_ids"]
    of_tokens = qdqbench.quantize(folder, [{"input_ids": each} for each in ids])
    assert of_tokens.tokenizer is not None
    assert of_tokens.tokenizer.get_vocab() == of_texts.tokenizer.get_vocab()
