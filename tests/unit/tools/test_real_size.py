"""The programs behind the rows of real size: a port that copies, batches that fit, jobs that resume."""

import argparse
import os
import sys
import time
from collections import Counter

import numpy as np
import pytest
import torch
import typer
from safetensors.torch import load_file, save_file
from tools.real_size import heal, measure
from transformers import MPNetConfig, MPNetModel

from qdqbench.cli.app import app


@pytest.fixture(scope="module")
def teacher():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = MPNetConfig(vocab_size=50, max_position_embeddings=34, initializer_range=0.5, **sizes)
    return MPNetModel(config).eval().requires_grad_(False)


def draw_rows(count):
    generator = np.random.default_rng(0)
    return [generator.integers(3, 50, size).tolist() for size in generator.integers(3, 30, count)]


def test_without_a_position_bias_the_bert_computes_what_the_mpnet_does(teacher):
    bias = teacher.encoder.relative_attention_bias.weight
    kept = bias.clone()
    student = heal.port(teacher).eval()
    tokens, mask = heal.pad_rows(draw_rows(4), pad=1, device=torch.device("cpu"))
    assert mask.min() == 0
    with torch.no_grad():
        other = heal.run_states(teacher, tokens, mask)
        bias.zero_()
        same = heal.run_states(teacher, tokens, mask)
        bias.copy_(kept)
        ported = heal.run_states(student, tokens, mask)
    assert torch.allclose(ported, same, atol=1e-5)
    assert not torch.allclose(ported, other, atol=1e-2)


def test_distillation_brings_every_layer_nearer(teacher):
    student, rows = heal.port(teacher).eval(), draw_rows(100)
    given = argparse.Namespace(steps=20, seconds=None, tokens=256, learning_rate=1e-2, warmup=3, seed=0)
    with torch.no_grad():
        student.embeddings.word_embeddings.weight.mul_(0.5)
    before = heal.judge(student, teacher, rows[:32])
    heal.distill(student, teacher, rows, given)
    after = heal.judge(student, teacher, rows[:32])
    assert after["relative_error"] < 0.9 * before["relative_error"]


def test_batches_hold_every_row_once_an_epoch_and_no_more_tokens_than_asked():
    rows = draw_rows(500)
    drawn = []
    for batch in heal.draw_batches(rows, 128, seed=0):
        tokens, _ = heal.pad_rows([rows[index] for index in batch], 1, torch.device("cpu"))
        assert tokens.numel() <= 128
        drawn += batch
        if len(drawn) >= len(rows):
            break
    assert sorted(drawn) == list(range(500))


@pytest.fixture
def given(tmp_path):
    return argparse.Namespace(
        kind="runs", models=tmp_path, data="glue", work=tmp_path, out=tmp_path, heal="--seed 0", gpus=2,
        workers=3, seconds=60, seeds=3, until="engine",
        backends=measure.BACKENDS,
    )  # fmt: skip


def test_commands_and_options_exist(given):
    given.kind = "all"
    trained, ran = [*measure.finetunings(given)], [*measure.runs(given)]
    after = {job.name: job.after for job in trained}
    assert [*after.values()].count("heal") == len(measure.TRAINED) - 1
    assert after["bert-base-rte"] == "bert-base-mnli"
    assert {job.after for job in ran} == {job.name for job in trained} | {""}
    commands = typer.main.get_command(app).commands
    for job in (*trained[1:], *ran):
        name, *rest = job.command[len(measure.PROGRAM) :]
        known = {option for parameter in commands[name].params for option in parameter.opts}
        assert {each for each in rest if each.startswith("--")} <= known
    assert all(("--limit" in job.command) == ("qqp" in job.name) for job in ran)
    kept = {f"bert-base-{task}-int8-residual-fused-cuda" for task in ("mrpc", "stsb")}
    kept |= {f"bert-base-sst2-{recipe}-cuda" for recipe in measure.RECIPES}
    kept.add("mpnet-sst2-int8-residual-fused-tensorrt_rtx")
    assert {job.name for job in ran if job.heavy is None} == kept
    given.seeds = 1
    assert [job.name for job in measure.runs(given)] == [job.name for job in ran if "-seed-" not in job.name]


def test_runs_are_of_models_that_are_there_and_the_slow_ones_come_last(given):
    for name in ("bert-base-sst2", "bert-base-mrpc-seed-1", "mpnet-qqp", "mpnet-stsb"):
        (given.work / measure.TUNED / name).mkdir(parents=True)
    ran = [*measure.runs(given)]
    backends = [job.command[-4] for job in ran]
    counted = Counter(
        (job.name.partition("-int8")[0], backend) for job, backend in zip(ran, backends, strict=True)
    )
    assert counted == {
        ("bert-base-sst2", "cuda"): 8,
        ("bert-base-sst2", "openvino"): 4,
        ("bert-base-sst2", "tensorrt_rtx"): 6,
        ("bert-base-mrpc", "cuda"): 3,
        ("mpnet-qqp", "tensorrt_rtx"): 5,
        ("mpnet-stsb", "openvino"): 3,
        ("mpnet-stsb", "tensorrt_rtx"): 5,
    }
    assert backends == sorted(backends, key=measure.BACKENDS.index)
    given.backends = ["cuda"]
    assert [job.name for job in measure.runs(given)] == [job.name for job in ran if "-cuda" in job.name]


def test_a_job_runs_after_the_one_it_needs_and_alone_where_it_must_be(given, monkeypatch):
    running, seen = [], []

    def do(job, given, until, gpu):
        running.append((job.name, gpu))
        seen.append((job.name, gpu, [*running]))
        time.sleep(0.05)
        running.remove((job.name, gpu))
        job.file.write_text("")
        return f"{job.name}: done"

    monkeypatch.setattr(measure, "do", do)
    asked = [
        measure.Job("heal", [], given.work / "heal", alone=True),
        measure.Job("tuned", [], given.work / "tuned-bert", after="heal"),
        measure.Job("run", [], given.work / "run", printed=True, after="tuned"),
        *(measure.Job(f"other-{number}", [], given.work / f"other-{number}") for number in range(4)),
    ]
    measure.do_all(asked, given)
    order = [name for name, *_ in seen]
    assert sorted(order) == sorted(job.name for job in asked)
    assert order.index("heal") < order.index("tuned") < order.index("run")
    healed = next(gpu for name, gpu, _ in seen if name == "heal")
    beside = [gpu for name, gpu, at_once in seen if name != "heal" and ("heal", healed) in at_once]
    assert beside
    assert healed not in beside
    assert max(len(at_once) for *_, at_once in seen) <= given.workers


def test_runs_read_rounded_weights(tmp_path):
    for seed, name in enumerate(("bert-base-rte", "bert-base-rte-seed-1")):
        model = tmp_path / "bert-base-rte" / f"seed-{seed}" / "model"
        model.mkdir(parents=True)
        (model / "config.json").write_text(name)
        save_file({"weight": torch.tensor([1 + 2**-20]), "count": torch.tensor([7])}, model / "m.safetensors")
    measure.name_models("bert-base-rte", tmp_path)
    assert len([*(tmp_path / measure.TUNED).iterdir()]) == 2
    weights = load_file(tmp_path / measure.TUNED / name / "m.safetensors")
    assert (weights["weight"].dtype, weights["weight"].item(), weights["count"].item()) == (torch.half, 1, 7)
    assert (tmp_path / measure.TUNED / name / "config.json").read_text() == name


@pytest.mark.parametrize(("status", "kept"), [(0, True), (2, True), (1, False)])
def test_a_job_is_done_once_and_its_folder_goes(status, kept, given, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "cpu_count", lambda: 3 * given.workers + 1)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    heavy, file = tmp_path / "heavy", tmp_path / "a" / "results.json"
    heavy.mkdir()
    printing = "import os, sys; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['OMP_NUM_THREADS'])"
    command = [sys.executable, "-Sc", f"{printing}; sys.exit({status})"]
    job = measure.Job("job", command, file, printed=True, heavy=heavy)
    later = time.monotonic() + 60
    assert f"status {status}" in measure.do(job, given, later, "1")
    assert file.is_file() == kept  # 2 is a result, 1 is none
    assert not kept or file.read_text() == "1 3\n"
    assert not heavy.exists()
    assert ("is there" in measure.do(job, given, later, None)) == kept
    file.unlink(missing_ok=True)
    assert "no time is left" in measure.do(job, given, time.monotonic(), None)


def test_a_job_that_is_not_there_is_an_error(tmp_path, capsys):
    folders = [
        part for name in ("models", "data", "work", "out") for part in (f"--{name}", str(tmp_path / name))
    ]
    with pytest.raises(SystemExit):
        measure.main(["train", *folders, "--only", "heal", "no-such-job"])
    assert "no job begins with no-such-job; there are heal, " in capsys.readouterr().err
