"""Layer-local parity: it passes for the right graph, and any fault in one layer fails and is named."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from qdqbench.eval.parity import LIMIT_FRACTION, compare_layers, force
from qdqbench.eval.results import MAX_OUTPUT_ERROR, Parity, ParityRow
from qdqbench.quantize.graph import module_of
from qdqbench.quantize.models import MASK_FILL

from .tiny_bert import ATTENTIONS, LINEARS, exported, padded_batch, quantized, tensor
from .tiny_layer import store

BATCHES = [padded_batch((9, 4, 16)), padded_batch((12, 12, 3, 7), seed=1)]
QUERY, OUTPUT, FFN1, FFN2 = LINEARS[0], LINEARS[3], LINEARS[4], LINEARS[5]


def compared(folder: Path, graph: onnx.ModelProto, name: str = "bert-int8-linears") -> Parity:
    return compare_layers(graph, quantized(folder, name).model, BATCHES)


def failing(parity: Parity) -> list[str]:
    return [row.name for row in parity.rows if not row.holds]


@pytest.mark.parametrize("compute", ["fp32", "fp16"])
@pytest.mark.parametrize("weights", ["channel", "factored"])
@pytest.mark.parametrize("name", ["bert-int8-linears", "bert-int8-linears-per-tensor", "bert-int8-attention"])
def test_the_right_graph_passes(tiny_bert: Path, name: str, weights: str, compute: str) -> None:
    graph = exported(tiny_bert, name, compute, weights)
    before = graph.SerializeToString(deterministic=True)
    parity = compared(tiny_bert, graph, name)
    assert failing(parity) == []
    assert parity.passed
    assert (parity.n, parity.padded) == (7, True)
    assert parity.logits_max_abs_diff < 0.01
    names = {*LINEARS}
    if name == "bert-int8-attention":
        names |= {f"{a}.{part}" for a in ATTENTIONS for part in ("query", "key", "value", "softmax")}
    assert {row.name for row in parity.rows} == names
    tokens = sum(batch["input_ids"].size for batch in BATCHES)
    assert {row.name: row.codes for row in parity.rows}[FFN2] == 64 * tokens
    if compute == "fp32":
        assert {row.limit for row in parity.rows} == {LIMIT_FRACTION}
        assert all(row.differing <= 1 for row in parity.rows)
    assert graph.SerializeToString(deterministic=True) == before


@pytest.mark.parametrize("lengths", [(8, 8), (9, 4, 16), (16,) * 16])
def test_the_right_graph_passes_whatever_the_batch(tiny_bert: Path, lengths: tuple[int, ...]) -> None:
    """FP16 moves a few codes over a border, and few codes are compared here."""
    graph, model = exported(tiny_bert), quantized(tiny_bert).model
    for seed in range(4):
        parity = compare_layers(graph, model, [padded_batch(lengths, seed)])
        assert failing(parity) == []
        assert parity.padded == (lengths == (9, 4, 16))


def code_block(graph: onnx.ModelProto, name: str) -> None:
    codes = tensor(graph, f"{name}.weight_int8")
    codes[:8, :8] = -codes[:8, :8]
    store(graph, f"{name}.weight_int8", codes)


def weight_scale(graph: onnx.ModelProto, name: str) -> None:
    scale = tensor(graph, f"{name}.weight_scale")
    scale[:4] *= 1.5
    store(graph, f"{name}.weight_scale", scale)


def bias(graph: onnx.ModelProto, name: str) -> None:
    value = tensor(graph, f"{name}.bias_fp16").astype(np.float32)
    value[:4] += 0.5
    store(graph, f"{name}.bias_fp16", value)


def input_scale(graph: onnx.ModelProto, name: str) -> None:
    scale = next(
        node.input[1]
        for node in graph.graph.node
        if node.op_type == "QuantizeLinear" and module_of(node.name) == f"{name}.input_quantizer"
    )
    store(graph, scale, tensor(graph, scale) * 0.5)


@pytest.mark.parametrize("fault", [code_block, weight_scale, bias, input_scale])
@pytest.mark.parametrize("name", LINEARS)
def test_a_fault_in_one_layer_is_named(
    tiny_bert: Path, name: str, fault: Callable[[onnx.ModelProto, str], None]
) -> None:
    graph = exported(tiny_bert)
    fault(graph, name)
    parity = compared(tiny_bert, graph)
    assert not parity.passed
    failed = failing(parity)
    assert name in failed
    # teacher forcing: besides it only the readers of what it makes
    assert len(failed) <= 4
    assert {f.split(".")[3] for f in failed} <= {name.split(".")[3], "1"}


def test_a_wrong_scale_of_the_softmax_is_named(tiny_bert: Path) -> None:
    graph = exported(tiny_bert, "bert-int8-attention")
    node = next(n for n in graph.graph.node if "p_bmm_quantizer" in n.name and n.op_type == "QuantizeLinear")
    assert float(tensor(graph, node.input[1])) == pytest.approx(1 / 127)
    store(graph, node.input[1], np.float32(1 / 64))
    failed = failing(compared(tiny_bert, graph, "bert-int8-attention"))
    assert OUTPUT in failed


def test_a_dropped_mask_is_seen_in_every_attention(tiny_bert: Path) -> None:
    graph = exported(tiny_bert)
    (fill,) = (
        t.name
        for t in graph.graph.initializer
        if t.data_type == 10 and (tensor(graph, t.name) == MASK_FILL).any()
    )
    store(graph, fill, 0)
    parity = compared(tiny_bert, graph)
    assert not parity.passed
    assert failing(parity) == [LINEARS[3], LINEARS[9]]
    unpadded = compare_layers(graph, quantized(tiny_bert).model, [padded_batch((8, 8))])
    assert failing(unpadded) == []  # which is why the batches have to be padded


def test_swapped_layers_are_seen(tiny_bert: Path) -> None:
    graph = exported(tiny_bert)
    first, second = (tensor(graph, f"{name}.weight_int8") for name in (QUERY, LINEARS[1]))
    store(graph, f"{QUERY}.weight_int8", second)
    store(graph, f"{LINEARS[1]}.weight_int8", first)
    assert {QUERY, LINEARS[1]} <= set(failing(compared(tiny_bert, graph)))


def test_a_norm_between_two_quantizers_is_seen(tiny_bert: Path) -> None:
    graph = exported(tiny_bert)
    norm = "bert.encoder.layer.0.output.LayerNorm.weight_fp16"
    store(graph, norm, tensor(graph, norm) * 1.1)
    assert failing(compared(tiny_bert, graph)) == LINEARS[6:9]


def test_nan_fails_and_stays_out_of_the_numbers(tiny_bert: Path) -> None:
    graph = exported(tiny_bert)
    name = f"{FFN1}.bias_fp16"
    store(graph, name, np.full(tensor(graph, name).shape, np.nan))
    parity = compared(tiny_bert, graph)
    assert {FFN1, FFN2} <= set(failing(parity))
    assert all(np.isfinite(row.output_rel_error or 0.0) for row in parity.rows)
    assert np.isfinite(parity.logits_max_abs_diff)


def test_each_quantizer_is_cut(tiny_bert: Path) -> None:
    name = "bert-int8-attention"
    forced, boundaries, outputs = force(exported(tiny_bert, name))
    readers = [reader for boundary in boundaries for reader in boundary.quantizers]
    record = quantized(tiny_bert, name).record.quantizers
    assert sorted(readers) == sorted(n for n, state in record.items() if state.kind != "weight")
    for boundary in boundaries:
        for reader, scale in boundary.quantizers.items():
            assert scale == pytest.approx(record[reader].amax / 127, rel=1e-6)  # type: ignore[operator]
    assert list(outputs) == LINEARS
    onnx.shape_inference.infer_shapes(forced, strict_mode=True)


@pytest.mark.parametrize(
    ("change", "passes"),
    [
        ({}, True),
        ({"max_step": 2}, False),
        ({"differing": 5}, True),
        ({"differing": 6}, False),
        ({"differing": 6, "limit": 0.01}, True),
        ({"output_rel_error": MAX_OUTPUT_ERROR}, True),
        ({"output_rel_error": 2 * MAX_OUTPUT_ERROR}, False),
        ({"output_rel_error": float("nan")}, False),
    ],
)
def test_limits(change: dict[str, float], passes: bool) -> None:
    row = ParityRow(name="a", codes=1000, differing=1, max_step=1, output_rel_error=None)
    assert row.model_copy(update=change).holds == passes
