"""Baselines of PyTorch compute what transformers computes, padded or not; in a CUDA graph if it captures."""

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoConfig,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from qdqbench.eval.bench import peers
from qdqbench.quantize.calibration.fakequant.quantizers import forward
from qdqbench.quantize.models.embedder import make_embedder_class
from qdqbench.quantize.models.families.known import BERT, family_of
from qdqbench.quantize.models.identity import FIELD
from qdqbench.quantize.models.load import load_model
from qdqbench.quantize.utils.errors import UserError

from ...support import fake_cuda
from ...support.families import SIZES, new_model
from ...support.tiny_bert import padded_batch


@pytest.fixture(scope="module")
def model(tiny_bert):
    return peers.sdpa_model(load_model(str(tiny_bert)), "fp32", "cpu")


def test_sdpa_is_the_same_model(tiny_bert, model):
    batch = padded_batch()
    expected = forward(load_model(str(tiny_bert)), batch)
    assert model.config._attn_implementation == "sdpa"
    assert torch.allclose(forward(model, batch), expected, atol=1e-5)


def test_without_padding_the_mask_changes_nothing(model):
    ids = torch.from_numpy(padded_batch((9, 9))["input_ids"])
    run = peers.eager_forward(model)
    with torch.inference_mode():
        masked = run(input_ids=ids, attention_mask=torch.ones_like(ids))
        assert torch.allclose(run(input_ids=ids), masked, atol=1e-5)


def test_fp16_peers_are_half(tiny_bert):
    half = peers.sdpa_model(load_model(str(tiny_bert)), "fp16", "cpu")
    assert {parameter.dtype for parameter in half.parameters()} == {torch.float16}


def test_a_switch_of_attention_that_does_nothing_is_an_error(tiny_bert, monkeypatch):
    model = load_model(str(tiny_bert))
    monkeypatch.setattr(model, "set_attn_implementation", lambda name: None)
    with pytest.raises(UserError, match="did not switch to SDPA"):
        peers.sdpa_model(model, "fp32", "cpu")


def test_compiling_asks_for_one_graph(model, monkeypatch):
    asked = {}
    monkeypatch.setattr(torch, "compile", lambda function, **options: asked.update(options) or function)
    run = peers.compiled_forward(model, "default", dynamic=True)
    assert asked == {"mode": "default", "dynamic": True, "fullgraph": True}
    assert run(input_ids=torch.ones(1, 4, dtype=torch.long)).shape == (1, 3)


def test_tf32_is_given_back():
    before = torch.get_float32_matmul_precision()
    with peers.tf32_allowed():
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before


@pytest.fixture
def cuda(monkeypatch):
    return fake_cuda.install(monkeypatch)


def total(**inputs):
    return sum(value.sum() for value in inputs.values())


def test_a_peer_is_captured_and_replayed(cuda):
    run = peers.TorchRun(total, peers.example(BERT.inputs, 2, 8, "cuda"), "eager")
    assert run.detail == "eager, CUDA graph"
    assert set(run.inputs) == {"input_ids", "attention_mask", "token_type_ids"}
    assert float(run.outputs["answers"]) == 16  # the mask is all ones
    run.launch()
    run.launch()
    assert cuda.count("replay") == 2


@pytest.mark.parametrize(
    "make", [peers.eager_forward, lambda model: peers.compiled_forward(model, "default", dynamic=False)]
)
@pytest.mark.parametrize("captures", [True, False])
def test_every_peer_takes_the_mask_in_warm_up_capture_and_launch(cuda, monkeypatch, make, captures):
    masks = []

    def model(*, input_ids, token_type_ids, attention_mask):
        masks.append(attention_mask)
        return {"logits": input_ids.sum(1)}

    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    if not captures:
        monkeypatch.setattr(torch.cuda, "graph", fake_cuda.refuse)
    run = peers.TorchRun(make(model), peers.example(BERT.inputs, 2, 8, "cuda"), "x")
    run.launch()
    assert len(masks) == peers.WARM_CALLS + (1 if captures else 3)
    assert all(mask.shape == (2, 8) and bool(mask.all()) for mask in masks)


@pytest.mark.parametrize(
    ("graph", "why"),
    [(False, "launched one by one"), (True, "operation not permitted when stream is capturing")],
)
def test_a_peer_without_a_graph_is_launched_each_time(cuda, monkeypatch, graph, why):
    monkeypatch.setattr(torch.cuda, "graph", fake_cuda.refuse)
    stream, calls = fake_cuda.Stream(), []
    inputs = peers.example(BERT.inputs, 2, 8, "cuda")
    run = peers.TorchRun(
        lambda **batch: calls.append(1) or total(**batch), inputs, "eager", graph=graph, stream=stream
    )
    assert run.stream is stream
    assert run.detail == f"eager, no CUDA graph ({why})"
    before = len(calls)
    assert before == peers.WARM_CALLS + 2 * graph  # tried once, and called again for its outputs
    run.launch()
    assert (len(calls), cuda.count("replay")) == (before + 1, 0)


LENGTHS = (9, 3, 17, 5, 1)


def padded(model, lengths=LENGTHS, seed=0):
    """A padded batch of random ids for a model, the padding behind each row."""
    rng = np.random.default_rng(seed)
    shape = (len(lengths), max(lengths))
    mask = (np.arange(shape[1]) < np.array(lengths)[:, None]).astype(np.int64)
    pad = int(model.config.pad_token_id or 0)
    ids = rng.integers(5, model.config.vocab_size, shape)
    batch = {"input_ids": np.where(mask, ids, pad), "attention_mask": mask}
    if "token_type_ids" in family_of(model.config).inputs:
        batch["token_type_ids"] = rng.integers(0, 2, shape) * mask
    return batch


def expected(model, batch):
    with torch.inference_mode():
        return peers.eager_forward(model)(**{name: torch.from_numpy(array) for name, array in batch.items()})


def packed(model, batch, launches=1, **options):
    """The encoder of a model, and a batch as it takes it."""
    encoder = peers.UnpaddedEncoder(model, **{"compiled": False} | options)
    return encoder, peers.pack_rows(peers.unpadded_rows(batch), launches, encoder.positions_of)


def unpadded(encoder, packing):
    """Answers of each launch."""
    run = partial(encoder.forward, tokens=packing.tokens, longest=packing.longest)
    with torch.inference_mode():
        return [run(torch.from_numpy(flat)) for flat in packing.launches]


POOLED = ("mean", "cls", "last")


def model_of(kind):
    """A classifier of a family; an embedder by how it pools; a BERT with another head."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("bert", vocab_size=99, num_labels=2, **SIZES["bert"])
    if kind in POOLED:
        setattr(config, FIELD, {"mode": kind, "normalize": True})
        return make_embedder_class(type(config))(config).eval()
    return new_model(kind) if isinstance(kind, str) else kind.from_config(config).eval()


@pytest.mark.parametrize("launches", [1, 2])
@pytest.mark.parametrize(
    "kind",
    ["bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "albert", "mpnet", "modernbert",
     *POOLED],
)  # fmt: skip
def test_rows_are_answered_as_transformers_does(kind, launches):
    model = model_of(kind)
    batch = padded(model)
    batch["input_ids"][0, 2] = model.config.pad_token_id or 0  # random ids of a fixed shape hold it
    reference, (encoder, packing) = expected(model, batch), packed(model, batch, launches)
    answers = unpadded(encoder, packing)
    found = torch.cat([rows[:count] for rows, count in zip(answers, packing.counts, strict=True)])
    assert len(packing.launches) == launches
    assert torch.allclose(found, reference, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("model_type", ["bert", "albert", "modernbert"])
def test_in_fp8_linears_round_their_inputs_and_weights(model_type, monkeypatch):
    def attend(query, key, value, starts, *sizes, attend=peers.packed_attention, **more):
        context = attend(query, key, value, starts, *sizes, **more)
        context[starts[-1] :] = torch.nan  # as on a GPU, where nothing writes there
        return context

    monkeypatch.setattr(peers, "packed_attention", attend)
    model = new_model(model_type).half()
    encoder, packing = packed(model, padded(model))
    (half,) = unpadded(encoder, packing)
    with torch.inference_mode():
        encoder.use_fp8(packing)
    error = (unpadded(encoder, packing)[0].float() - half.float()).norm() / half.float().norm()
    assert 0.005 < error < 0.4
    assert "linears in E4M3" in encoder.how
    for weights in encoder.layers:
        scaled = [each for each in weights if isinstance(each, peers.Scaled)]
        assert [each.codes.float().abs().max() for each in scaled] == [448] * 4


def test_other_attentions_are_refused_by_name():
    family = family_of(AutoConfig.for_model("deberta-v2")).name
    assert peers.refusal("deberta-v2", family).startswith("no unpadded form for deberta-v2: its")


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_adds_the_bias_of_distances_within_rows():
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 256, 2, 16)
    starts, bias = torch.tensor([0, 9, 10, 130, 130], dtype=torch.int32), torch.randn(2, 255)
    blocks = peers._find_blocks(starts, 256)
    found = peers.packed_attention(query, key, value, starts, 120, bias=bias, blocks=blocks)
    wanted = peers.packed_attention(query, key, value, starts, 120, bias=bias)
    assert torch.allclose(found[:130], wanted[:130], atol=1e-5)


@pytest.mark.parametrize("auto", [AutoModelForTokenClassification, AutoModelForQuestionAnswering])
def test_heads_over_tokens_answer_every_token(auto):
    model = model_of(auto)
    batch = padded(model)
    reference, (encoder, packing) = expected(model, batch), packed(model, batch)
    (answers,) = unpadded(encoder, packing)
    for row, (start, length) in enumerate(zip(packing.first_tokens(0), LENGTHS, strict=True)):
        assert torch.allclose(answers[start : start + length], reference[row, :length], atol=2e-5)


@pytest.mark.parametrize("auto", [AutoModelForTokenClassification, AutoModelForSequenceClassification])
def test_a_bound_encoder_answers_rows_of_one_shape(auto, cuda):
    model = model_of(auto)
    batch = padded(model, (7, 7, 7))
    reference, (encoder, packing) = expected(model, batch), packed(model, batch)
    run = encoder.bind(packing, (3, 7))
    assert (run.detail, encoder.feed(packing)) == ("CUDA graph", packing.launches)
    assert torch.allclose(run.outputs[peers.OUTPUT], reference, atol=2e-5)


def test_a_compiled_encoder_is_the_same(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "compile", lambda function, **how: asked.append(how) or function)
    model = new_model("bert")
    batch = padded(model)
    reference, (encoder, packing) = expected(model, batch), packed(model, batch, compiled=True)
    assert torch.allclose(unpadded(encoder, packing)[0], reference, atol=2e-5)
    assert [how["dynamic"] for how in asked] == [False, False]
    assert torch._dynamo.config.recompile_limit > 2 * len(peers.LAUNCH_TOKENS)  # in FP16 and FP8


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30), launches=st.integers(1, 8))
def test_every_row_is_packed_once_and_in_order(lengths, launches):
    rows = [{"input_ids": np.full(size, number + 1)} for number, size in enumerate(lengths)]
    packing = peers.pack_rows(rows, launches, lambda ids: np.arange(len(ids)))
    assert sum(packing.counts) == len(rows)
    assert len(packing.launches) <= launches
    assert packing.tokens % peers.TOKEN_STEP == 0
    assert packing.longest == max(lengths)
    seen = []
    for launch, (flat, count) in enumerate(zip(packing.launches, packing.counts, strict=True)):
        ids, positions, types, starts = np.split(flat, [packing.tokens * part for part in (1, 2, 3)])
        assert len(starts) == packing.sequences + 1
        assert packing.first_tokens(launch).tolist() == starts[:count].tolist()
        assert (starts[count:] == starts[count]).all()  # the rows that are left are empty
        for begin, end in pairwise(starts[: count + 1]):
            assert len(set(ids[begin:end])) == 1
            assert positions[begin:end].tolist() == list(range(end - begin))
            seen.append((ids[begin], end - begin))
        assert not ids[starts[-1] :].any()
        assert not types.any()
    assert seen == [(number + 1, size) for number, size in enumerate(lengths)]


def test_sizes_of_a_launch_that_are_tried():
    assert peers.launch_counts(21_900, 872) == [11, 6, 3, 2, 1]
    assert peers.launch_counts(500, 872) == [1]
    assert peers.launch_counts(10_000, 2) == [2, 1]


def test_on_a_gpu_attention_is_flash_attentions(monkeypatch):
    asked = []

    class OnGpu:
        is_cuda = True

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", lambda *given: asked.append(given))
    query, starts = OnGpu(), object()
    peers.packed_attention(query, "k", "v", starts, 7)
    assert asked == [(query, "k", "v", starts, starts, 7, 7)]
