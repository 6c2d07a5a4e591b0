"""Peers compute what the model computes, in their best form; capture is tried, and its failure is told."""

import pytest
import torch

from qdqbench.eval.bench import peers
from qdqbench.eval.bench.peers import TorchRun, compiled_forward, eager_forward, example, sdpa_model
from qdqbench.quantize.calibration.fakequant.quantizers import forward
from qdqbench.quantize.models.families.known import BERT
from qdqbench.quantize.models.load import load_model
from qdqbench.quantize.utils.errors import UserError

from ...support.tiny_bert import padded_batch


@pytest.fixture(scope="module")
def model(tiny_bert):
    return sdpa_model(load_model(str(tiny_bert)), "fp32", "cpu")


def test_sdpa_is_the_same_model(tiny_bert, model):
    batch = padded_batch()
    expected = forward(load_model(str(tiny_bert)), batch)
    assert model.config._attn_implementation == "sdpa"
    assert torch.allclose(forward(model, batch), expected, atol=1e-5)


def test_without_padding_the_mask_changes_nothing(model):
    ids = torch.from_numpy(padded_batch((9, 9))["input_ids"])
    run = eager_forward(model)
    with torch.inference_mode():
        assert torch.allclose(
            run(input_ids=ids), run(input_ids=ids, attention_mask=torch.ones_like(ids)), atol=1e-5
        )


def test_fp16_peers_are_half(tiny_bert):
    half = sdpa_model(load_model(str(tiny_bert)), "fp16", "cpu")
    assert {parameter.dtype for parameter in half.parameters()} == {torch.float16}


def test_a_switch_of_attention_that_does_nothing_is_an_error(tiny_bert, monkeypatch):
    model = load_model(str(tiny_bert))
    monkeypatch.setattr(model, "set_attn_implementation", lambda name: None)
    with pytest.raises(UserError, match="did not switch to SDPA"):
        sdpa_model(model, "fp32", "cpu")


def test_unknown_compile_mode(model):
    with pytest.raises(UserError, match="'fast' is unknown; use default or max-autotune-no-cudagraphs"):
        compiled_forward(model, "fast", dynamic=False)


def test_compiling_asks_for_one_graph(model, monkeypatch):
    asked = {}
    monkeypatch.setattr(torch, "compile", lambda function, **options: asked.update(options) or function)
    run = compiled_forward(model, "default", dynamic=True)
    assert asked == {"mode": "default", "dynamic": True, "fullgraph": True}
    assert run(input_ids=torch.ones(1, 4, dtype=torch.long)).shape == (1, 3)


def test_tf32_is_given_back():
    before = torch.get_float32_matmul_precision()
    with peers.tf32_allowed():
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before


class Stream:
    def synchronize(self):
        return None


class Context:
    def __init__(self, *_, **__):
        return None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


class Graph:
    """Replays what was called while it captured."""

    replays = 0

    def replay(self):
        Graph.replays += 1


@pytest.fixture
def cuda(monkeypatch):
    """torch.cuda on a CPU: streams and graphs do nothing."""
    for name in ("zeros", "ones"):
        real = getattr(torch, name)
        monkeypatch.setattr(
            torch, name, lambda *size, device, dtype, real=real: real(*size, dtype=dtype, device="cpu")
        )
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", Context)
    monkeypatch.setattr(torch.cuda, "graph", Context)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    Graph.replays = 0


def total(**inputs):
    return sum(value.sum() for value in inputs.values())


def test_a_peer_is_captured_and_replayed(cuda):
    run = TorchRun(total, example(BERT.inputs, 2, 8, "cuda"), "eager")
    assert run.detail == "eager, CUDA graph"
    assert set(run.inputs) == {"input_ids", "attention_mask", "token_type_ids"}
    assert float(run.outputs["answers"]) == 16  # the mask is all ones
    run.launch()
    run.launch()
    assert Graph.replays == 2


@pytest.mark.parametrize(
    "make", [eager_forward, lambda model: compiled_forward(model, "default", dynamic=False)]
)
@pytest.mark.parametrize("captures", [True, False])
def test_every_peer_takes_the_mask_in_warm_up_capture_and_launch(cuda, monkeypatch, make, captures):
    masks = []

    def model(*, input_ids, token_type_ids, attention_mask):
        masks.append(attention_mask)
        return {"logits": input_ids.sum(1)}

    class Refusing(Context):
        def __exit__(self, *_):
            raise RuntimeError("not permitted")

    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    if not captures:
        monkeypatch.setattr(torch.cuda, "graph", Refusing)
    run = TorchRun(make(model), example(BERT.inputs, 2, 8, "cuda"), "x")
    run.launch()
    assert len(masks) == peers.WARM_CALLS + (1 if captures else 3)
    assert all(mask.shape == (2, 8) and bool(mask.all()) for mask in masks)


def test_a_peer_without_a_graph_is_launched_each_time(cuda):
    calls = []
    run = TorchRun(
        lambda **inputs: calls.append(1) or total(**inputs),
        example(BERT.inputs, 2, 8, "cuda"),
        "eager",
        graph=False,
    )
    assert run.detail == "eager, no CUDA graph (launched one by one)"
    run.launch()
    assert (len(calls), Graph.replays) == (peers.WARM_CALLS + 1, 0)


def test_a_peer_that_does_not_capture_runs_as_it_is(cuda, monkeypatch):
    class Refusing(Context):
        def __exit__(self, *_):
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "graph", Refusing)
    stream, calls = Stream(), []
    run = TorchRun(
        lambda **inputs: calls.append(1) or total(**inputs),
        example(BERT.inputs, 1, 4, "cuda"),
        "eager",
        stream=stream,
    )
    assert run.stream is stream
    assert run.detail.startswith("eager, no CUDA graph (operation not permitted")
    before = len(calls)
    run.launch()
    assert len(calls) == before + 1
    assert Graph.replays == 0
