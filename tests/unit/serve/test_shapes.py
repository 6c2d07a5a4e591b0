import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from qdqbench.quantize.serve.buckets import shape_of, shaped, shapes_of

SIZES = [(16, 32), (64, 12), (128, 1)]


def test_the_shapes_are_powers_of_two_and_the_whole_of_each_bucket():
    assert [rows for rows, length in shapes_of(SIZES) if length == 16] == [1, 2, 4, 8, 16, 32]
    assert [rows for rows, length in shapes_of(SIZES) if length == 64] == [1, 2, 4, 8, 12]
    assert [rows for rows, length in shapes_of(SIZES) if length == 128] == [1]


@given(st.sampled_from(SIZES), st.data())
def test_every_batch_gets_the_least_shape_that_a_worker_has_met(size, data):
    length = data.draw(st.integers(1, size[0]))
    most = next(rows for longest, rows in SIZES if length <= longest)
    rows = data.draw(st.integers(1, most))
    shape = shape_of(SIZES, rows, length)
    assert shape in shapes_of(SIZES)
    assert shape[0] < 2 * rows or shape[0] == most
    ids = np.arange(1, 1 + rows * length).reshape(rows, length)
    made = shaped({"input_ids": ids, "attention_mask": np.ones_like(ids)}, shape, pad_id=0)
    assert made["input_ids"].shape == shape
    assert (made["input_ids"][:rows, :length] == ids).all()
    assert (made["attention_mask"][:rows, length:] == 0).all()
    assert (made["attention_mask"].sum(1) == length).all()  # copies of rows are whole, none is empty
