"""The losses of fine-tuning and QAT: sums over samples, zero where there is nothing to learn."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qdqbench.quantize.tasks.task import get_task
from qdqbench.quantize.training.qat import compute_hidden_distance

CLASSES, SCORES = get_task("mnli"), get_task("stsb")


def each(rows):
    """One answer a row."""
    return torch.ones(len(rows), dtype=torch.long)


def logits(seed, rows, labels):
    return torch.randn(rows, labels, generator=torch.Generator().manual_seed(seed)) * 3


@given(seed=st.integers(0, 1000), rows=st.integers(2, 9), temperature=st.floats(0.5, 8))
def test_a_distance_adds_up_over_samples(seed, rows, temperature):
    student, teacher = logits(seed, rows, 3), logits(seed + 1, rows, 3)
    whole = CLASSES.kind.distance(student, teacher, temperature, each(student))
    parts = [
        CLASSES.kind.distance(student[i : i + 1], teacher[i : i + 1], temperature, each([i]))
        for i in range(rows)
    ]
    assert whole.item() == pytest.approx(sum(part.item() for part in parts), rel=1e-4, abs=1e-5)
    assert whole.item() >= -1e-5


@given(seed=st.integers(0, 1000), shift=st.floats(-5, 5))
def test_equal_answers_have_no_distance(seed, shift):
    found = logits(seed, 4, 3)
    assert CLASSES.kind.distance(found + shift, found, 2.0, each(found)).item() == pytest.approx(0, abs=1e-4)


def test_the_distance_is_kl_times_the_square_of_the_temperature():
    student, teacher = torch.tensor([[1.0, 0.0, -1.0]]), torch.tensor([[0.5, 0.25, 2.0]])
    p, q = (torch.softmax(x / 2, dim=1) for x in (teacher, student))
    made = CLASSES.kind.distance(student, teacher, 2.0, each(student))
    assert made.item() == pytest.approx(4 * (p * (p / q).log()).sum().item(), rel=1e-5)


def test_plain_losses():
    student, teacher = torch.tensor([[1.0], [2.0]]), torch.tensor([[1.5], [0.0]])
    assert SCORES.kind.distance(student, teacher, 3.0, each(student)).item() == 4.25
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
