"""Rows, the answers of their tokens, and the samples that they belong to."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from qdqbench.quantize.tasks.kinds.encoded import Encoded
from qdqbench.quantize.tasks.kinds.kind import join_outputs

INT = np.int64


def split(counts, samples, seed=0):
    """Rows with so many answers each at random positions; what is answered is the position and the row."""
    random = np.random.default_rng(seed)
    lengths = [int(random.integers(count + 1, count + 6)) for count in counts]
    positions = [
        np.sort(random.choice(length, count, replace=False)).astype(INT)
        for length, count in zip(lengths, counts, strict=True)
    ]
    ids = [np.full(length, row, dtype=INT) for row, length in enumerate(lengths)]
    labels = np.concatenate([100 * row + kept for row, kept in enumerate(positions)] or [[]]).astype(INT)
    return Encoded(ids, ids, labels, 0, positions, np.array(samples, dtype=INT), np.arange(max(samples) + 1))


def made(encoded, rows, like=np.asarray):
    """What a model answers [B, L, 1]: 100 times the row, and the position."""
    longest = int(encoded.lengths[rows].max()) + 3  # an engine pads further
    answers = 100 * np.asarray(rows)[:, None] + np.arange(longest)
    return like(answers[..., None].astype(np.float32))


@given(st.data())
def test_answers_find_their_place_in_any_order_of_rows(data):
    counts = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=8))
    starts = data.draw(st.lists(st.booleans(), min_size=len(counts), max_size=len(counts)))
    encoded = split(counts, np.cumsum([0, *starts[1:]]), seed=data.draw(st.integers(0, 99)))
    order = np.array(data.draw(st.permutations(range(len(counts)))))
    answers = np.full((len(encoded.labels), 1), np.nan, dtype=np.float32)
    for rows in np.array_split(order, 2):
        if len(rows):
            answers[encoded.answers_of(rows)] = encoded.kept(rows, made(encoded, rows))
    assert answers[:, 0].tolist() == encoded.labels.tolist()
    assert torch.equal(
        encoded.kept(order, made(encoded, order, torch.from_numpy)),
        torch.from_numpy(answers[encoded.answers_of(order)]),
    )


def test_a_part_has_whole_samples_and_their_answers():
    encoded = split([2, 1, 0, 3, 1], [0, 0, 1, 2, 2])
    part = encoded.part(np.array([2, 0]))
    assert [int(ids[0]) for ids in part.input_ids] == [3, 4, 0, 1]
    assert part.samples.tolist() == [0, 0, 1, 1]
    assert part.gold.tolist() == [2, 0]
    assert part.answers.tolist() == [3, 1, 2, 1]
    assert part.sample_of_answers.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert part.labels.tolist() == encoded.labels[encoded.answers_of(np.array([3, 4, 0, 1]))].tolist()
    assert encoded.longest.tolist() == [
        max(encoded.lengths[:2]), encoded.lengths[2], max(encoded.lengths[3:])
    ]  # fmt: skip


def test_with_one_answer_a_row_rows_answers_and_samples_are_the_same():
    ids = [np.arange(n, dtype=INT) for n in (3, 5, 2)]
    encoded = Encoded(ids, ids, np.array([7, 8, 9]), 0)
    rows = np.array([2, 0])
    logits = np.eye(3, dtype=np.float32)[:2]
    assert encoded.kept(rows, logits) is logits
    assert (encoded.answers_of(rows) == rows).all()
    assert (encoded.rows_of(rows) == rows).all()
    assert encoded.gold is encoded.labels
    assert encoded.part(rows).labels.tolist() == [9, 7]
    assert encoded.sample_of_answers.tolist() == [0, 1, 2]
    assert encoded.longest.tolist() == encoded.lengths.tolist() == [3, 5, 2]


def test_several_outputs_become_one():
    start, end = np.arange(6.0).reshape(2, 3), np.arange(6.0, 12).reshape(2, 3)
    outputs = {"start": start, "end": end}
    assert join_outputs(outputs, ["end"]) is end
    assert join_outputs(outputs, ["start", "end"])[1, 2].tolist() == [5, 11]
    tensors = {name: torch.from_numpy(value) for name, value in outputs.items()}
    assert join_outputs(tensors, outputs).tolist() == join_outputs(outputs, outputs).tolist()


def test_samples_of_the_same_tokens_are_one():
    """In ids and types, row for row; a sample of two rows is not the sample of both as one."""
    ids = [np.array(each, dtype=INT) for each in ([1, 2], [3], [1, 2], [1, 2], [3], [1, 2, 3])]
    types = [np.zeros_like(row) for row in ids]
    assert Encoded(ids, types, np.zeros(6), 0).distinct.tolist() == [0, 1, 5]
    types[2] = np.ones_like(types[2])
    assert Encoded(ids, types, np.zeros(6), 0).distinct.tolist() == [0, 1, 2, 5]
    types[2] = np.zeros_like(types[2])
    samples = np.array([0, 0, 1, 2, 2, 3], dtype=INT)
    assert Encoded(ids, types, np.zeros(6), 0, None, samples, np.zeros(4)).distinct.tolist() == [0, 1, 3]
