"""The programs behind the rows of real size: a port that copies, batches that fit, jobs that resume."""

import argparse
import sys
import time

import numpy as np
import pytest
import torch
import typer
from safetensors.torch import load_file, save_file
from transformers import MPNetConfig, MPNetModel

from qdqbench.cli.app import app

from ...tools.real_size import heal, measure


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


def test_commands_and_options_exist(tmp_path):
    given = argparse.Namespace(models=tmp_path, data="glue", work=tmp_path, out=tmp_path, heal="--seed 0")
    for task in ("sst2", "mrpc"):
        (tmp_path / measure.TUNED / f"bert-base-{task}-seed-1").mkdir(parents=True)
    trained, ran = [*measure.finetunings(given)], [*measure.runs(given)]
    assert [job.after for job in trained].count("heal") == len(measure.TRAINED)
    assert len(ran) == len(measure.RECIPES) * 2
    assert {len(job.commands) for job in ran} == {2}  # both backends
    commands = typer.main.get_command(app).commands
    for job in (*trained[1:], *ran):
        for command, _ in job.commands:
            name, *rest = command[len(measure.PROGRAM) :]
            known = {option for parameter in commands[name].params for option in parameter.opts}
            assert {each for each in rest if each.startswith("--")} <= known


def test_runs_read_rounded_weights(tmp_path):
    for seed, name in enumerate(("bert-base-rte", "bert-base-rte-seed-1")):
        model = tmp_path / "bert-base-rte" / f"seed-{seed}" / "model"
        model.mkdir(parents=True)
        (model / "config.json").write_text(name)
        save_file({"weight": torch.tensor([1 + 2**-20]), "count": torch.tensor([7])}, model / "m.safetensors")
    measure.round_weights(tmp_path / "bert-base-rte", tmp_path / measure.TUNED)
    assert len([*(tmp_path / measure.TUNED).iterdir()]) == 2
    weights = load_file(tmp_path / measure.TUNED / name / "m.safetensors")
    assert (weights["weight"].dtype, weights["weight"].item(), weights["count"].item()) == (torch.half, 1, 7)
    assert (tmp_path / measure.TUNED / name / "config.json").read_text() == name


def test_a_job_is_done_once_and_its_folder_goes(tmp_path):
    def printing(text, status):
        return [sys.executable, "-Sc", f"import sys; print({text!r}); sys.exit({status})"]

    heavy, files = tmp_path / "heavy", [tmp_path / name / "results.json" for name in "abc"]
    heavy.mkdir()
    commands = [*zip((printing("a", 0), printing("b", 2), printing("c", 1)), files, strict=True)]
    job = measure.Job("job", commands, printed=True, heavy=heavy)
    later = time.monotonic() + 60
    assert "status 1" in measure.do(job, tmp_path, later, None)
    assert [file.is_file() for file in files] == [True, True, False]  # 2 is a result, 1 is none
    assert not heavy.exists()
    assert measure.do(job, tmp_path, later, None).count("is there") == 2
    assert "no time is left" in measure.do(job, tmp_path, time.monotonic(), None)
