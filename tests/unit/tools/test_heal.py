"""A BERT-base out of an MPNet: a port that copies, batches that fit."""

import argparse

import numpy as np
import pytest
import torch
from tools import heal
from transformers import MPNetConfig, MPNetModel


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
