"""What the runtime decides on the host: buckets, graphs, tiles, buffers, and the order of weights."""

import weakref
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qdqbench.quantize.engine.cuda.interpret import compute
from qdqbench.quantize.engine.cuda.names import BROAD, NARROW, SLIM, STATIONARY, TILES, find_target
from qdqbench.quantize.engine.cuda.plan import Answer, Embed, Head, Plan, Tensor
from qdqbench.quantize.engine.cuda.runtime import (
    PACKED,
    CudaEngine,
    bound_reach,
    choose_bucket,
    choose_graph,
    choose_heads,
    choose_tile,
    fill,
    permute_rows,
)
from qdqbench.quantize.engine.cuda.tokens import MOST_TOKENS, pack_tokens
from qdqbench.quantize.utils.errors import UserError

from ....support.cuda_kernels import Dense
from ....support.interpreted import use_host

PLAN = Plan(
    inputs=("input_ids", "attention_mask"),
    tensors={"x": Tensor(kind="fp16", width=8)},
    operations=(
        Embed(name="embed", epsilon=1e-12, typed=False, half="x"),
        Head(name="head", input="x", pooling="tokens", steps=(), answers=(Answer(name="y"),)),
    ),
)
ENTRIES = {"word": 9, "position": 600, "type": 1}
TABLES = {f"embed.{part}": np.zeros((entries, 8)) for part, entries in ENTRIES.items()}
LENGTHS = st.lists(st.integers(1, 512), min_size=1, max_size=60)


def packed(lengths):
    """Tokens of rows, whose ids count from 1 on in each."""
    mask = np.arange(max(lengths)) < np.array(lengths)[:, None]
    ids = np.where(mask, np.arange(max(lengths)) % 8 + 1, 0)
    return pack_tokens(PLAN, TABLES, {"input_ids": ids, "attention_mask": mask.astype(np.int64)})


@given(st.integers(1, MOST_TOKENS))
def test_a_bucket_holds_its_tokens_and_wastes_few(tokens):
    bucket = choose_bucket(tokens)
    assert tokens <= bucket <= MOST_TOKENS
    assert bucket % 64 == 0
    assert bucket - tokens < max(64, tokens / 16 + 1)
    assert choose_bucket(bucket) == bucket


@given(LENGTHS)
def test_a_graph_is_for_all_that_its_tokens_need(lengths):
    tokens = packed(lengths)
    bucket, rows, longest, reach = choose_graph(tokens)
    assert bucket >= sum(lengths)
    assert len(lengths) <= rows < 2 * len(lengths)
    assert max(lengths) <= longest < 2 * max(lengths)
    row = np.repeat(np.arange(len(lengths)), lengths)
    reached = max(
        tokens.starts[row[min(first + 64, len(row)) - 1] + 1] - tokens.starts[row[first]]
        for first in range(0, len(row), 64)
    )
    assert reach in (128, 256, 384, 512)
    assert reach - 128 < min(reached, 512) <= reach <= bound_reach(longest)


@given(LENGTHS, st.integers(-9, 9))
def test_a_filled_buffer_holds_the_rows_and_spare_ones(lengths, old):
    tokens = packed(lengths)
    bucket, rows, *_ = choose_graph(tokens)
    staging = np.full(5 * bucket + rows + 1, old, np.int32)  # of the batch before
    fill(staging, tokens, bucket, rows)
    ids, positions, types, start, end = staging[: 5 * bucket].reshape(5, bucket)
    bounds, count = staging[5 * bucket :], sum(lengths)
    for row, length in enumerate(lengths):
        place = slice(bounds[row], bounds[row + 1])
        assert (ids[place] == np.arange(length) % 8 + 1).all()
        assert (positions[place] == np.arange(length)).all()
        assert {*start[place]} == {bounds[row]}
        assert {*end[place]} == {bounds[row + 1]}
    assert {*bounds[len(lengths) :]} == {count}
    spare = np.arange(count, bucket)
    assert (start[count:] == spare).all()
    assert (end[count:] == spare + 1).all()
    assert not ids[count:].any()
    assert not positions[count:].any()
    assert not types.any()


@given(st.integers(1, 40).map(lambda n: 16 * n), st.sampled_from([8, 16]))
def test_a_thread_owns_consecutive_columns(n, run):
    """Lane t of four gets columns 2 t and 2 t + 1 of each 8 in a group: they are `run` in a line."""
    rows = permute_rows(n, run)
    group = 4 * run
    assert len(rows) % group == 0 <= len(rows) - n < group
    assert (np.sort(rows) == np.arange(len(rows))).all()
    for first in range(0, len(rows), group):
        lanes = rows[first : first + group].reshape(run // 2, 4, 2).transpose(1, 0, 2).reshape(4, run)
        assert (lanes == first + np.arange(group).reshape(4, run)).all()


@given(st.integers(1, MOST_TOKENS), st.integers(1, 4096), st.integers(1, 4096), st.integers(1, 200))
def test_choices_are_kernels_that_there_are(m, n, k, multiprocessors):
    for tiles in (TILES, (*TILES, STATIONARY), (*TILES, BROAD, NARROW, SLIM)):
        assert choose_tile(m, n, k, multiprocessors, tiles) in tiles
    for reach, longest in ((128, 64), (128, 128), (256, 64), (384, 512)):
        assert 1 <= choose_heads(m, 12, reach, longest, multiprocessors) <= (4 if reach == 128 else 2)


@pytest.mark.parametrize(
    ("m", "k", "stays"),
    [(16384, 1024, True), (16384, 768, True), (16384, 512, False), (16384, 1040, False), (1024, 1024, False)],
)
def test_weights_stay_in_large_launches_where_they_fit(m, k, stays):
    assert (choose_tile(m, 3072, k, 132, (*TILES, STATIONARY)) == STATIONARY) is stays


@pytest.mark.parametrize(
    ("m", "tile"), [(128, SLIM), (256, TILES[2]), (1024, NARROW), (4096, BROAD), (16384, TILES[0])]
)
def test_few_tokens_are_shared_by_more_multiprocessors(m, tile):
    for k in (768, 3072):
        assert choose_tile(m, 768, k, 132, (*TILES, BROAD, NARROW, SLIM)) == tile


class Device:
    """A stream, an event or a CUDA graph that only counts."""

    replayed = 0

    def replay(self):
        self.replayed += 1

    def wait_stream(self, _):
        return None

    record = wait_stream


def test_bound_launches_share_no_buffer_stream_or_pool(monkeypatch):
    use_host(monkeypatch)
    pools, fed = [], []

    def capture(graph, pool):
        pools.append(pool)
        return nullcontext()

    for name in ("Stream", "CUDAGraph", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, Device)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None))
    monkeypatch.setattr(torch.cuda, "current_stream", Device)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    engine = CudaEngine.__new__(CudaEngine)
    engine.target, engine.device = find_target("9.0"), "cpu"
    engine.forward = lambda rows: fed.append(rows) or {"y": rows.ids * 2}
    one, other = (engine.bind(128, 5, 30, 256) for _ in range(2))
    assert len(fed) == 4  # warm, then captured
    assert len({id(pool) for pool in pools}) == len({id(each.stream) for each in (one, other)}) == 2
    one.inputs[PACKED][:] = torch.arange(5 * 128 + 6)
    assert fed[1].positions.tolist() == [*range(128, 256)]
    assert (fed[1].bounds.tolist(), fed[1].longest, fed[1].reach) == ([*range(640, 646)], 30, 256)
    assert not fed[3].ids.any()  # the other's
    one.launch()
    assert (one._graph.replayed, other._graph.replayed) == (1, 0)


def test_batches_that_no_bucket_holds_or_of_other_shapes_are_refused():
    ones = np.ones((129, 512), np.int64)
    for ids, mask, message in (
        (ones, ones, "has 66048 tokens, and an engine takes 65536 at once; give fewer rows"),
        *((ones, other, "of one shape") for other in (ones[:1], ones[:, :1], ones[0])),
        (ones * 1.5, ones, "'input_ids': 'float64'.*; give integers"),
        (ones, ones * 1.5, "'attention_mask': 'float64'.*; give integers"),
        *((empty, empty, "none of them empty") for empty in (ones[:0], ones[:, :0], ones[0])),
    ):
        with pytest.raises(UserError, match=message):
            pack_tokens(PLAN, TABLES, {"input_ids": ids, "attention_mask": mask})


@pytest.mark.parametrize(
    ("pooling", "steps", "widths", "launches"),
    [
        ("first", "dense tanh dense", (16, 24, 2), ["tanh", "none"]),
        ("last", "dense gelu normalize", (16, 24), ["gelu"]),
        ("first", "dense dense relu sigmoid", (16, 20, 3), ["none"]),  # PyTorch takes 20 channels
        ("last", "tanh dense", (16, 3), ["none"]),
        ("first", "dense relu", (12, 3), []),
        ("last", "normalize", (16,), []),
        ("mean", "dense sigmoid", (16, 4), ["sigmoid"]),
        ("tokens", "dense", (16, 4), []),
    ],
)
@pytest.mark.parametrize("spare", [0, 8])  # channels behind the model's own
def test_a_head_folds_activations_into_its_dense_steps(
    pooling, steps, widths, launches, *, spare, monkeypatch
):
    head = Dense((5, 2, 7), pooling, steps, widths)
    tensor = Tensor(kind="fp16", width=widths[0] + spare, channels=widths[0])
    plan, arrays, tokens = replace(head.plan(), tensors={"x": tensor}), head.arrays(), head.tokens()
    states = np.pad(tokens.given["x"], ((0, 0), (0, spare)), constant_values=9)
    engine, ran = CudaEngine.__new__(CudaEngine), []
    engine.plan, engine.arrays = plan, arrays
    engine._arrays = {name: torch.from_numpy(array).half() for name, array in engine._prepared()}

    def dense(name, x, rows, places, *last):
        """Compute what head.cu does."""
        activation, half = last
        ran.append(activation)
        at = torch.arange(rows) if places is None else (places[0].long() + places[1]).clamp(0, len(x) - 1)
        weight, bias = (engine._arrays[f"{name}.{part}"].float() for part in ("weight", "bias"))
        made = x[at].float() @ weight.T + bias
        made = made if activation == "none" else engine._step(name, activation, made)
        return made.half() if half else made

    monkeypatch.setattr(engine, "_dense", dense)
    bounds = torch.from_numpy(np.append(tokens.starts, [14] * 2).astype(np.int32))  # two spare rows
    made = engine._head(plan.head, {"x": torch.from_numpy(states)}, SimpleNamespace(bounds=bounds))
    assert ran == launches
    for name, wanted in compute(plan.head, plan, arrays, {"x": states}, tokens).items():
        assert made[name].dtype == torch.float32
        np.testing.assert_allclose(made[name][: len(wanted)].numpy(), wanted, rtol=0.01, atol=0.02)


def test_what_a_bound_graph_writes_to_lives_as_long(monkeypatch):
    """Sums of split GEMMs went into memory that was freed, and that another model had by then."""
    engine, kept = object.__new__(CudaEngine), []
    engine.device, engine.target, engine._multiprocessors = "cpu", find_target("8.0"), 2

    def capture(*given):
        kept.append(weakref.ref(given[-1]))
        return None, (None, None, None), {}

    monkeypatch.setattr(engine, "_capture", capture)
    for name in ("graph_pool_handle", "synchronize", "Stream"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    bound = engine.bind(64, 1, 64, 128)
    assert kept[0]() is not None
    del bound
    assert kept[0]() is None
