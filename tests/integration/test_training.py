"""`finetune`, `qat` and `study` as a user runs them, on a tiny model."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import yaml
from pydantic import create_model

import qdqbench
from qdqbench.eval.runs import study
from qdqbench.eval.runs.results import Results
from qdqbench.eval.runs.run import run_until
from qdqbench.eval.runs.study import Study
from qdqbench.quantize.pipeline import pipeline
from qdqbench.quantize.pipeline.session import Session, read_config
from qdqbench.quantize.recipe.sections import Distill
from qdqbench.quantize.training import loop, qat
from qdqbench.quantize.training.results import Finetuning
from qdqbench.quantize.utils.errors import CheckFailed, UserError

from ..support.modelopt_folder import load_modelopt
from .cases import edited
from .tiny import MAIN, call_alone, ended, environment, refused, write_data, write_model

QUICK = ("--epochs", "2", "--num-evals", "2", "--batch-size", "16")


def recipe(tmp_path, changes=None, **qat):
    """An INT8 attention recipe with a short training, in a file."""
    calibration = {"samples": 32, "bias_correction": False, "outlier_channel_splitting": 32}
    short = {"epochs": 2, "batch_size": 16, "num_evals": 2, "distill": {"hidden": 1.0}}
    change = {
        "name": "trained",
        "reconstruction": None,
        "gate": {"max_drop": 1.0},
        "calibration": calibration,
    }
    change |= {"qat": short | qat} | (changes or {})
    return edited(tmp_path / "recipe.yaml", change, "bert-int8-attention-qat")


@pytest.fixture(scope="module")
def tuned(given, made_once, tmp_path_factory):
    """A finished fine-tuning of two seeds, to be told again to train."""

    def train(out):
        done = call_alone(
            "finetune", *given("sst2").options, *QUICK, "--keep-head", "--seeds", "2", "--out", out
        )
        assert done.code == 0, done.err

    return shutil.copytree(made_once("tuned", train), tmp_path_factory.mktemp("tuned") / "f")


def test_finetune_leaves_models_and_a_report(tuned, qdqbench, given):
    found = Finetuning.model_validate_json((tuned / "finetune.json").read_text())
    assert [run.status for run in found.runs] == ["done", "done"]
    assert found.spread["accuracy"].n == 2
    assert found.runs[0].planned_steps == found.runs[0].steps == 30
    assert (tuned / "finetune.html").read_text().count("<svg") >= 1
    assert not [*tuned.rglob("checkpoints")]
    weights = [(tuned / f"seed-{seed}" / "model" / "model.safetensors").read_bytes() for seed in (0, 1)]
    assert weights[0] != weights[1]
    assert found.runs[0].metrics["accuracy"] > 0.6  # the words decide, and a tenth of the labels is wrong
    assert any("has such a head already" in note for note in found.runs[0].notes)


def test_a_base_with_other_labels_may_not_have_learned_the_task(qdqbench, given, tmp_path):
    asked = replace(given("sst2"), model=write_model(tmp_path / "model", "stsb", steps=0)).options
    done = qdqbench("finetune", *asked, *QUICK, "--max-steps", "2", "--out", tmp_path / "f", "--json")
    (run,) = json.loads(done.out)["runs"]
    assert not any("such a head" in note for note in run["notes"])


def test_finished_seeds_are_kept_and_other_settings_refused(tuned, given):
    before = (tuned / "seed-0" / "training.json").stat().st_mtime_ns
    told = vars(given("sst2")) | {"seeds": 2, "out": tuned, "epochs": 2, "num_evals": 2, "batch_size": 16}
    told["keep_head"] = True
    assert qdqbench.finetune(**told).spread["accuracy"].n == 2
    assert (tuned / "seed-0" / "training.json").stat().st_mtime_ns == before
    with pytest.raises(qdqbench.UserError, match="finished training of another learning_rate"):
        qdqbench.finetune(**told, learning_rate=0.001)


def test_a_seed_that_fails_is_said_at_the_end(tuned, qdqbench, given, tmp_path, monkeypatch):
    def diverges(job, accelerator):
        raise CheckFailed("it diverged")

    out = shutil.copytree(tuned, tmp_path / "f")
    shutil.rmtree(out / "seed-1")
    monkeypatch.setattr(loop, "_train", diverges)
    done = qdqbench(
        "finetune", *given("sst2").options, *QUICK, "--keep-head", "--seeds", "2", "--out", out, "--json"
    )
    assert done.code == 2
    assert "not trained to the end: seed 1; " in done.err
    assert [run["status"] for run in json.loads(done.out)["runs"]] == ["done", "failed"]
    assert "it diverged" in (out / "finetune.json").read_text()


def test_a_study_names_the_seeds_that_failed(qdqbench, given, tmp_path, monkeypatch):
    rows = [("done", "failed")[seed % 2] for seed in range(4)]
    made = [
        create_model("Row", seed=(int, seed), recipe=(str, "r"), status=(str, status))()
        for seed, status in enumerate(rows)
    ]
    found, asked = create_model("Found", rows=(list, made))(), []
    monkeypatch.setattr(study, "study", lambda _, recipes, *__: asked.extend(recipes) or found)
    monkeypatch.setattr(study, "study_report", lambda _: None)
    options = [*given("sst2").options, "--out", tmp_path / "s", "--json", "--set", "qat.epochs=2"]
    done = qdqbench("study", "bert-int8-attention-qat", *options)
    assert (done.code, done.out) == (2, found.model_dump_json(indent=2) + "\n")
    assert [recipe.qat.epochs for recipe in asked] == [2]
    assert "not trained to the end: seed 1 with r, seed 3 with r; " in done.err


@pytest.mark.long
def test_a_killed_fine_tuning_goes_on_bit_for_bit(tuned, given, tmp_path, qdqbench):
    options = [*given("sst2").options, *QUICK, "--keep-head", "--out", tmp_path / "f"]
    command = [sys.executable, "-c", MAIN, "finetune", *options]
    threads = str(torch.get_num_threads())  # sums of another number are in another order
    alike = environment() | {"OMP_NUM_THREADS": threads}
    process = subprocess.Popen(command, env=alike, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not [*(tmp_path / "f").glob("seed-0/checkpoints/step-*")]:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    done = ended(qdqbench("finetune", *options, "--json"))
    run = json.loads(done.out)["runs"][0]
    assert any("resumed after step" in note for note in run["notes"])
    model = "seed-0/model/model.safetensors"
    assert (tmp_path / "f" / model).read_bytes() == (tuned / model).read_bytes()


def test_labels_out_of_range(given, qdqbench, tmp_path):
    write_data(tmp_path, "sst2")
    for split in ("train", "validation"):
        path = tmp_path / "sst2" / f"{split}.parquet"
        rows = datasets.Dataset.from_parquet(str(path)).to_dict()
        rows["label"][3] = 7
        datasets.Dataset.from_dict(rows).to_parquet(path)
    options = replace(given("sst2"), data=tmp_path).options
    refused(qdqbench("finetune", *options, "--out", tmp_path / "f"), "go from 0 to 7")


@pytest.fixture(scope="module")
def trained(whole_run):
    """A finished QAT run, never to be written to."""
    return whole_run("trained")


def test_a_run_says_how_it_was_trained(trained):
    results = Results.model_validate_json((trained / "results.json").read_text())
    assert results.training.steps == 30
    assert results.qat_vs_ptq is not None
    assert not (trained / "qat" / "checkpoints").exists()
    assert "QAT" in (trained / "report.md").read_text()


def test_what_qat_saved_gives_the_same_answers_everywhere(trained, given):
    """Our files, ModelOpt's own form, and the logits that were evaluated."""
    session = Session(read_config(trained), trained)
    ours, theirs = session.new_trained_model("qat"), load_modelopt(trained / "qat" / "modelopt")
    batch = {
        "input_ids": torch.tensor([[2, 5, 6, 7, 3]]),
        "attention_mask": torch.ones(1, 5, dtype=torch.long),
        "token_type_ids": torch.zeros(1, 5, dtype=torch.long),
    }
    with torch.inference_mode():
        plain = session.new_model()(**batch).logits
        assert torch.equal(ours(**batch).logits, theirs.eval()(**batch).logits)
        assert not torch.equal(ours(**batch).logits, plain)
    changed = np.load(trained / "logits" / "fake_quant.npz"), np.load(trained / "logits" / "ptq.npz")
    name = next(name for name in changed[0].files if name.endswith("logits"))
    assert not np.array_equal(changed[0][name], changed[1][name])


class Killed(BaseException):
    """Stands for a signal."""


def killed(*arguments, **options):
    raise Killed


def again(trained, tmp_path):
    """The finished run as it was before its training."""
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    shutil.rmtree(folder / "qat")
    return Session(read_config(folder), folder)


def test_a_killed_training_ends_with_the_same_weights_and_scales(trained, tmp_path, monkeypatch):
    save, calls = loop.save_checkpoint, []

    def killed_at_the_second(*arguments, **options):
        save(*arguments, **options)
        calls.append(None)
        if len(calls) == 2:
            raise Killed

    session = again(trained, tmp_path)
    monkeypatch.setattr(loop, "save_checkpoint", killed_at_the_second)
    with pytest.raises(Killed):
        run_until(session, "qat")
    session = again(trained, tmp_path / "2")  # another process knows nothing of the first
    shutil.rmtree(session.folder)
    shutil.move(tmp_path / "run", session.folder)
    run_until(session, "qat")
    assert any("resumed after step 15" in note for note in session.notes)
    for name in ("model/model.safetensors", "calibration.json", "modelopt/model.safetensors"):
        assert (session.folder / "qat" / name).read_bytes() == (trained / "qat" / name).read_bytes(), name


def test_a_training_killed_before_it_is_recorded_trains_no_step_again(trained, tmp_path, monkeypatch):
    session = again(trained, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "_remove_stale", killed)
        with pytest.raises(Killed):
            run_until(session, "qat")
    assert (session.folder / "qat" / "training.json").exists()
    monkeypatch.setattr(loop, "_gradient", killed)
    run_until(session, "qat")
    assert any("resumed after step 30" in note for note in session.notes)
    assert not (session.folder / "qat" / "checkpoints").exists()
    for name in ("model/model.safetensors", "calibration.json"):
        assert (session.folder / "qat" / name).read_bytes() == (trained / "qat" / name).read_bytes(), name


@pytest.mark.parametrize("logits", [0.0, 1.0])
def test_what_is_trained_has_a_gradient(trained, tmp_path, logits):
    """Processes would wait for one that never comes."""
    session = again(trained, tmp_path)
    parts = Distill(logits=logits, hidden=1.0)
    settings = session.recipe.qat.model_copy(update={"amax": "learned", "distill": parts})
    job = qat.new_job(session, settings, loop.new_accelerator("fp32"))
    model: Any = job.model
    rows, batch = job.data.batch(job.data.rows[:4])
    job.loss(model, rows, {name: torch.from_numpy(array) for name, array in batch.items()}).backward()
    assert not [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    stepped = {id(p) for group in job.groups for p in group["params"]}
    assert stepped == {id(p) for p in model.parameters() if p.requires_grad}
    assert model.classifier.weight.requires_grad == (logits > 0)


def test_a_checkpoint_of_another_recipe_is_refused(trained, tmp_path, monkeypatch):
    session = again(trained, tmp_path)
    monkeypatch.setattr(loop, "load_weights", killed)
    with pytest.raises(Killed):  # at its end
        run_until(session, "qat")
    monkeypatch.undo()
    config, placed = session.config, session.config.recipe.model_dump(mode="json")
    placed["rules"] += [{"match": "encoder.layer.0.intermediate.dense", "precision": "fp16"}]
    recipe = type(config.recipe).model_validate(placed)
    other = Session(config.model_copy(update={"recipe": recipe}), session.folder)
    with pytest.raises(UserError, match="checkpoint of another run: it differs in recipe"):
        run_until(other, "qat")


def test_layers_of_different_size_are_refused(given, qdqbench, tmp_path):
    """Only some feed-forwards would be split: no configuration of a model says that."""
    path = recipe(tmp_path)
    placed = yaml.safe_load(path.read_text())
    placed["rules"].append({"match": "encoder.layer.0.output.dense", "precision": "fp16"})
    path.write_text(yaml.safe_dump(placed))
    done = qdqbench("qat", path, *given("sst2").options, "--out", tmp_path / "run")
    refused(done, "all 2 layers in INT8, and 1 are")
    assert not (tmp_path / "run" / "qat").exists()


def test_processes_that_would_all_write_one_run_or_study_are_refused(trained, tmp_path, monkeypatch):
    session = again(trained, tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"2 processes would .*-m qdqbench qat"):
        run_until(session, "qat")
    assert not (session.folder / "qat").exists()
    with pytest.raises(UserError, match="in one process, not in 2"):
        study.study(None, [], SimpleNamespace(num_processes=2))


def test_a_training_that_diverges_says_so(sst2, qdqbench, tmp_path):
    wild = recipe(tmp_path, learning_rate=0.9, warmup_ratio=0.0, epochs=4, num_evals=8, max_grad_norm=1e9)
    done = ended(qdqbench("qat", wild, *sst2.options, "--out", tmp_path / "run"), 2)
    assert "lower learning_rate" in done.err


def test_own_texts_teach_and_have_no_metric(sst2, qdqbench, tmp_path):
    words = ["good", "bad", "fine", "poor", "great", "dull"]
    texts = [f"{one} {other} {third}" for one in words for other in words for third in words]
    own = tmp_path / "own"
    own.mkdir()
    (own / "train.csv").write_text("\n".join(["sentence", *texts, ""]))
    asked = recipe(tmp_path, epochs=0.5, texts=str(own), learning_rate=1e-5)
    centered = ["--set", "calibration.centering=true", "--until", "qat", "--out", tmp_path / "run"]
    done = ended(qdqbench("run", asked, *sst2.options, *centered))
    said = " ".join(done.out.split())  # lines break where the path of the run lets them
    assert "modelopt is left out: ModelOpt has no place for the constants of centering" in said
    assert not (tmp_path / "run" / "qat" / "modelopt").exists()
    training = json.loads((tmp_path / "run" / "qat" / "training.json").read_text())
    assert training["rows"] + training["held_out"] == len(texts)
    log = training["log"]
    judged = [row["values"] for row in log if row["values"]]
    assert all({*values} == {"score_db", "sqnr_db", "hidden_db"} for values in judged)
    assert len(judged) == 3


@pytest.mark.long
def test_two_processes_train_one_run(given, tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    # engines are built in other tests; with copies and all of the range PTQ is so near that no step is better
    unbuilt = {"engine": {"backend": "tensorrt"}, "gate": {"max_drop": 1.0, "require_int8": False}}
    unbuilt |= {"calibration": {"samples": 32, "bias_correction": False, "method": "percentile/98"}}
    unbuilt["calibration"] |= {"outlier_channel_splitting": 0}
    path = recipe(tmp_path, unbuilt, amax="learned")
    command += ["-m", "qdqbench", "qat", path, *given("sst2").options]
    command += ["--out", out]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stderr.count("no engine can be built here") == 1
    results = Results.model_validate_json((out / "results.json").read_text())
    assert results.training is not None
    assert (results.training.processes, results.training.steps) == (2, 30)
    amax = [
        {name: state["amax"] for name, state in json.loads(path.read_text())["quantizers"].items()}
        for path in (out / "calibration.json", out / "qat" / "calibration.json")
    ]
    moved = [name for name in amax[0] if amax[0][name] != amax[1][name]]
    assert moved
    assert not [name for name in moved if name.endswith("p_bmm_quantizer")]  # softmax is 1/127


@pytest.mark.long
def test_a_study_over_seeds(given, tmp_path, qdqbench):
    out = tmp_path / "study"
    options = [*given("stsb").options, "--epochs", "1", "--seeds", "2", "--out", out]
    ended(qdqbench("study", recipe(tmp_path, epochs=1), *options))
    found = Study.model_validate_json((out / "study.json").read_text())
    summary = found.summary["trained"]
    assert summary.qat.n == 2
    rows = [row.qat["pearson"] - row.fp32["pearson"] for row in found.rows]
    assert summary.qat_minus_fp32.mean == pytest.approx(np.mean(rows))
