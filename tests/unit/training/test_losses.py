"""The losses of fine-tuning and QAT: sums over samples, zero where there is nothing to learn."""

import pytest
import torch

from qdqbench.quantize.tasks.task import get_task
from qdqbench.quantize.training.qat import compute_hidden_distance

CLASSES, SCORES = get_task("mnli"), get_task("stsb")


def each(rows):
    """One answer a row."""
    return torch.ones(len(rows), dtype=torch.long)


def logits(seed, rows, labels):
    return torch.randn(rows, labels, generator=torch.Generator().manual_seed(seed)) * 3


def test_plain_losses():
    student = torch.tensor([[1.0], [2.0]])
    assert SCORES.kind.loss(student, torch.tensor([0.0, 2.0]), each(student)).item() == 1.0
    found = logits(0, 5, 3)
    labels = torch.tensor([0, 1, 2, 1, 0])
    expected = -torch.log_softmax(found, dim=1)[torch.arange(5), labels].sum()
    assert CLASSES.kind.loss(found, labels, each(labels)).item() == pytest.approx(expected.item(), rel=1e-5)


def hidden(seed, rows, length):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, length, 4, generator=generator) for _ in range(3))


def test_padding_does_not_count_in_hidden_states():
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    mine, wanted = hidden(0, 2, 3), hidden(1, 2, 3)
    before = compute_hidden_distance(mine, wanted, mask).item()
    for layer in mine:
        layer[1, 1:] = 99.0
    assert compute_hidden_distance(mine, wanted, mask).item() == pytest.approx(before)
    mine[0][1, 0] = 99.0
    assert compute_hidden_distance(mine, wanted, mask).item() > before


def test_hidden_distances_add_up_over_samples_and_are_relative():
    mask = torch.ones(4, 3, dtype=torch.long)
    mine, wanted = hidden(0, 4, 3), hidden(1, 4, 3)
    whole = compute_hidden_distance(mine, wanted, mask).item()
    parts = [
        compute_hidden_distance(
            tuple(layer[i : i + 1] for layer in mine), tuple(w[i : i + 1] for w in wanted), mask[i : i + 1]
        ).item()
        for i in range(4)
    ]
    assert whole == pytest.approx(sum(parts), rel=1e-5)
    zero = tuple(torch.zeros_like(layer) for layer in mine)
    # all of the power
    assert compute_hidden_distance(zero, wanted, mask).item() == pytest.approx(4, rel=1e-5)
    scaled = compute_hidden_distance(tuple(5 * m for m in mine), tuple(5 * w for w in wanted), mask).item()
    assert scaled == pytest.approx(whole, rel=1e-5)
