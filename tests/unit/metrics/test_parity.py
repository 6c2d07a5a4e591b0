"""Layer-local parity: it passes for the right graph, and any fault in one layer fails and is named."""

import functools

import numpy as np
import onnx
import pytest
import torch

from qdqbench.eval.metrics.parity import BORDER, LIMIT_FRACTION, Boundary, Norm, _fed, compare_layers, force
from qdqbench.eval.metrics.results import MAX_OUTPUT_ERROR, ParityRow
from qdqbench.quantize.graph import export
from qdqbench.quantize.graph.index import GraphIndex, module_of
from qdqbench.quantize.lint.check import check_model
from qdqbench.quantize.models.attention import MASK_FILL

from ...support.families import write_model
from ...support.tiny_bert import (
    ATTENTIONS,
    INT8,
    LINEARS,
    calibrate,
    copied,
    exported,
    exported_of,
    new_bert,
    padded_batch,
    quantized,
    recipe_with,
    tensor,
    write_tiny_bert,
)
from ...support.tiny_layer import store

BATCHES = [padded_batch((9, 4, 16)), padded_batch((12, 12, 3, 7), seed=1)]
QUERY, OUTPUT, FFN1, FFN2 = LINEARS[0], LINEARS[3], LINEARS[4], LINEARS[5]


@pytest.fixture(scope="module")
def roberta(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("roberta") / "model", "roberta")


def compared(folder, graph, name="bert-int8-linears"):
    return compare_layers(graph, quantized(folder, name).model, BATCHES)


def failing(parity):
    return [row.name for row in parity.rows if not row.holds]


@pytest.mark.parametrize("compute", ["fp32", "fp16"])
@pytest.mark.parametrize("weights", ["channel", "factored"])
@pytest.mark.parametrize("name", ["bert-int8-linears", "bert-int8-linears-per-tensor", "bert-int8-attention"])
def test_the_right_graph_passes(tiny_bert, name, weights, compute):
    graph = exported(tiny_bert, name, compute, weights)
    before = graph.SerializeToString(deterministic=True)
    parity = compared(tiny_bert, graph, name)
    assert failing(parity) == []
    assert parity.passed
    assert (parity.n, parity.padded) == (7, True)
    assert [row.name for row in parity.outputs] == ["logits"]
    assert parity.logits_max_abs_diff < 0.01
    names = {*LINEARS}
    if name == "bert-int8-attention":
        names |= {f"{a}.{part}" for a in ATTENTIONS for part in ("query", "key", "value", "softmax")}
    assert {row.name for row in parity.rows} == names
    tokens = sum(batch["attention_mask"].sum() for batch in BATCHES)
    assert {row.name: row.int8_values for row in parity.rows}[FFN2] == 64 * tokens
    assert {row.limit for row in parity.rows} == {LIMIT_FRACTION}
    assert all(row.differing == row.at_border for row in parity.rows)
    if compute == "fp32":
        assert all(row.differing <= 1 for row in parity.rows)
    assert graph.SerializeToString(deterministic=True) == before


@pytest.mark.parametrize("lengths", [(8, 8), (9, 4, 16), (16,) * 16])
def test_the_right_graph_passes_whatever_the_batch(tiny_bert, lengths):
    """FP16 moves a few codes over a border, and few codes are compared here."""
    graph, model = exported(tiny_bert), quantized(tiny_bert).model
    for seed in range(4):
        parity = compare_layers(graph, model, [padded_batch(lengths, seed)])
        assert failing(parity) == []
        assert parity.padded == (lengths == (9, 4, 16))


@pytest.mark.parametrize("lengths", [(3, 4, 40), (40, 3, 5, 4, 6, 3)])
def test_padding_of_one_position_counts_not_at_all(roberta, lengths):
    """RoBERTa's padding is one vector over and over: a value at a border of it would decide."""
    name = "roberta-int8-residual"
    graph, model = exported(roberta, name), quantized(roberta, name).model
    batches = [padded_batch(lengths, seed) for seed in range(12)]
    for batch in batches:
        batch["input_ids"][batch["attention_mask"] == 0] = model.config.pad_token_id
        assert failing(compare_layers(graph, model, [batch])) == []
    linear = "roberta.encoder.layer.1.intermediate.dense"
    spoil(graph, linear, "bias_fp16")
    assert all(linear in failing(compare_layers(graph, model, [batch])) for batch in batches[:3])


FAULTS = {  # of the first four channels; of codes only in half of their rows
    "weight_int8": lambda value: value * np.where(np.arange(value.shape[0])[:, None] < 8, -1, 1),
    "weight_scale": lambda value: value * 1.5,
    "bias_fp16": lambda value: value + 0.5,
}


def spoil(graph, name, what):
    value, first = tensor(graph, f"{name}.{what}"), (Ellipsis, slice(4))
    value[first] = FAULTS[what](value[first])
    store(graph, f"{name}.{what}", value)


def input_scale(graph, name):
    scale = next(
        node.input[1]
        for node in graph.graph.node
        if node.op_type == "QuantizeLinear" and module_of(node.name) == f"{name}.input_quantizer"
    )
    store(graph, scale, tensor(graph, scale) * 0.5)


@pytest.mark.parametrize("fault", [*FAULTS, "input_scale"])
@pytest.mark.parametrize("name", LINEARS)
def test_a_fault_in_one_layer_is_named(tiny_bert, name, fault):
    graph = exported(tiny_bert)
    if fault in FAULTS:
        spoil(graph, name, fault)
    else:
        input_scale(graph, name)
    parity = compared(tiny_bert, graph)
    assert not parity.passed
    failed = failing(parity)
    assert name in failed
    # teacher forcing: besides it only the readers of what it makes
    assert len(failed) <= 4
    assert {f.split(".")[3] for f in failed} <= {name.split(".")[3], "1"}


def test_a_wrong_scale_of_the_softmax_is_named(tiny_bert):
    graph = exported(tiny_bert, "bert-int8-attention")
    node = next(n for n in graph.graph.node if "p_bmm_quantizer" in n.name and n.op_type == "QuantizeLinear")
    assert float(tensor(graph, node.input[1])) == pytest.approx(1 / 127)
    store(graph, node.input[1], np.float32(1 / 64))
    failed = failing(compared(tiny_bert, graph, "bert-int8-attention"))
    assert OUTPUT in failed


def test_a_dropped_mask_is_seen_in_every_attention(tiny_bert):
    graph = exported(tiny_bert)
    halves = (t.name for t in graph.graph.initializer if t.data_type == onnx.TensorProto.FLOAT16)
    (fill,) = (name for name in halves if (tensor(graph, name) == MASK_FILL).any())
    store(graph, fill, 0)
    parity = compared(tiny_bert, graph)
    assert not parity.passed
    assert failing(parity) == [LINEARS[3], LINEARS[9]]
    unpadded = compare_layers(graph, quantized(tiny_bert).model, [padded_batch((8, 8))])
    assert failing(unpadded) == []  # which is why the batches have to be padded


def test_swapped_layers_and_a_norm_between_two_quantizers_are_seen(tiny_bert):
    graph = exported(tiny_bert)
    first, second = (tensor(graph, f"{name}.weight_int8") for name in (QUERY, LINEARS[1]))
    store(graph, f"{QUERY}.weight_int8", second)
    store(graph, f"{LINEARS[1]}.weight_int8", first)
    assert {QUERY, LINEARS[1]} <= set(failing(compared(tiny_bert, graph)))
    graph = exported(tiny_bert)
    norm = "bert.encoder.layer.0.output.LayerNorm.weight_fp16"
    store(graph, norm, tensor(graph, norm) * 1.1)
    assert failing(compared(tiny_bert, graph)) == LINEARS[6:9]


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(("module", "names"), [(FFN1, {FFN1, FFN2}), ("classifier", {"logits"})])
def test_what_is_not_finite_fails_and_stays_out_of_the_numbers(tiny_bert, module, names, value):
    graph = exported(tiny_bert)
    name = f"{module}.bias_fp16"
    store(graph, name, np.full(tensor(graph, name).shape, value))
    parity = compared(tiny_bert, graph)
    assert names <= {row.name for row in parity.compared if not row.holds}
    assert all(np.isfinite(row.output_rel_error or 0.0) for row in parity.compared)
    assert np.isfinite(parity.logits_max_abs_diff)


def test_each_quantizer_is_cut(tiny_bert):
    name = "bert-int8-attention"
    forced, boundaries, outputs = force(exported(tiny_bert, name))
    readers = [reader for boundary in boundaries for reader in boundary.quantizers]
    record = quantized(tiny_bert, name).record.quantizers
    assert sorted(readers) == sorted(n for n, state in record.items() if state.kind != "weight")
    for boundary in boundaries:
        for reader, scale in boundary.quantizers.items():
            assert scale == pytest.approx(record[reader].amax / 127, rel=1e-6)
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
def test_limits(change, passes):
    row = ParityRow(name="a", int8_values=1000, differing=1, max_step=1, output_rel_error=None)
    assert row.model_copy(update=change).holds == passes


@pytest.fixture(scope="module")
def uneven_bert(tmp_path_factory):
    """A tiny BERT whose channels differ by orders, so that smoothing has something to do."""
    model = new_bert()
    for name, value in model.named_parameters():
        if "LayerNorm" in name:
            value.data *= 2.0 ** (torch.arange(len(value)) % 5 - 2)
    return write_tiny_bert(tmp_path_factory.mktemp("uneven-bert"), model)


@functools.cache
def smoothed(folder):
    """Everything at once: smoothing of every kind, an INT8 attention, and corrected biases."""
    rules = [{"match": "encoder.layer.*"} | INT8, {"match": "*.attention.output.dense", "smoothing": 0.5}]
    changes = {"smoothing": 0.65, "bias_correction": True}
    return calibrate(folder, recipe_with("bert-int8-attention", rules=rules, calibration=changes))


@functools.cache
def _smoothed_graph(folder, compute, weights):
    model, plan, _ = smoothed(folder)
    settings = export.ExportSettings(20, compute, weights)
    return export.finish_graph(export.trace(model, 20), plan, settings)


def multipliers(graph):
    """Factors in front of the Q of each linear's input: module to initializer."""
    index, found = GraphIndex(graph), {}
    for node in graph.graph.node:
        if node.op_type != "QuantizeLinear" or not module_of(node.name).endswith(".input_quantizer"):
            continue
        made = index.producers[node.input[0]]
        if made.op_type == "Cast":
            made = index.producers[made.input[0]]
        if made.op_type == "Mul":
            found[module_of(node.name).removesuffix(".input_quantizer")] = made.input[1]
    return found


@pytest.mark.parametrize("compute", ["fp32", "fp16"])
@pytest.mark.parametrize("weights", ["channel", "factored"])
def test_the_whole_path_with_smoothing_and_correction(uneven_bert, weights, compute):
    model, plan, record = smoothed(uneven_bert)
    assert len(record.biases) > 3
    graph = copied(_smoothed_graph(uneven_bert, compute, weights))
    assert check_model(graph, expected_quantized={*plan.int8, *plan.attention}).findings == []
    found = multipliers(graph)
    assert set(found) == set(record.smoothing.inputs) == {*LINEARS[:3], FFN1, *LINEARS[6:9], LINEARS[10]}
    for name, factors in found.items():
        assert np.array_equal(tensor(graph, factors).astype(float), record.smoothing.inputs[name])
        assert len(set(record.smoothing.inputs[name])) > 2
    parity = compare_layers(graph, model, BATCHES)
    assert failing(parity) == []
    assert {row.name for row in parity.rows} >= {*LINEARS}
    assert max(row.max_step for row in parity.rows if not row.name.endswith("softmax")) <= 1


def test_another_factor_is_seen(uneven_bert):
    graph = copied(_smoothed_graph(uneven_bert, "fp16", "channel"))
    factors = multipliers(graph)[FFN1]
    store(graph, factors, np.ones_like(tensor(graph, factors)))
    assert failing(compare_layers(graph, smoothed(uneven_bert).model, BATCHES)) == [FFN1]


def test_a_dropped_correction_is_seen(uneven_bert):
    graph = copied(_smoothed_graph(uneven_bert, "fp32", "channel"))
    model, _, record = smoothed(uneven_bert)
    name = max(record.biases, key=lambda n: np.abs(record.biases[n]).max())
    before = compare_layers(graph, model, BATCHES)
    bias = f"{name}.bias"
    store(graph, bias, tensor(graph, bias) - np.array(record.biases[name], np.float32))
    errors = [
        next(row.output_rel_error for row in parity.rows if row.name == name)
        for parity in (before, compare_layers(graph, model, BATCHES))
    ]
    assert errors[0] is not None
    assert errors[1] is not None
    assert errors[1] > 10 * errors[0]


@pytest.mark.parametrize("kind", ["v_bmm", "p_bmm", "residual"])
def test_what_goes_on_as_it_is_is_rounded_once(kind):
    """A border value that two roundings tell apart would be a whole step, and more behind an attention."""
    made = f"layer.0.attention.{kind}_quantizer"
    boundary = Boundary("tensor", {"layer.0.query.input_quantizer": 0.1, made: 0.1})
    assert boundary.fed == made
    assert Boundary("tensor", {"layer.0.query.input_quantizer": 0.1}).fed.endswith("input_quantizer")


@pytest.fixture(scope="module")
def bordered(tmp_path_factory):
    """Channels of a LayerNorm that are the same in every token, each on a border of rounding."""
    model, channels = new_bert(), slice(0, 4)
    norm = model.bert.encoder.layer[0].attention.output.LayerNorm
    norm.weight.data[channels] = 0.0
    folder = write_tiny_bert(tmp_path_factory.mktemp("bordered-bert"), model)
    made = calibrate(folder, recipe_with("bert-int8-residual"))
    layer = made.model.bert.encoder.layer[0]
    scale = layer.intermediate.dense.input_quantizer.amax / 127
    bias = layer.attention.output.LayerNorm.bias
    border = (torch.floor(bias[channels] / scale) + 0.5) * scale
    away = torch.sign(border - border.half().float())  # from the side that FP16 rounds to
    bias.data[channels] = border + 1e-4 * away * scale
    return made


@pytest.mark.parametrize("compute", ["fp32", "fp16"])
def test_a_value_that_is_at_a_border_in_every_token_is_no_fault(bordered, compute):
    graph = exported_of(bordered.model, bordered.plan, "channel", compute)
    parity = compare_layers(graph, bordered.model, BATCHES)
    assert failing(parity) == []
    if compute == "fp16":  # or the test would not reproduce what it is for
        row = next(row for row in parity.rows if row.name == FFN1)
        assert row.differing == row.at_border > 2 * LIMIT_FRACTION * row.int8_values
    names = (t.name for t in graph.graph.initializer)
    norm = next(name for name in names if "layer.0.attention.output.LayerNorm.bias" in name)
    value = tensor(graph, norm).astype(np.float32)
    amax = bordered.record.quantizers[f"{FFN1}.input_quantizer"].amax
    assert amax is not None
    value[:2] -= 0.9 * amax / 127
    store(graph, norm, value)
    assert FFN1 in failing(compare_layers(graph, bordered.model, BATCHES))


def test_terms_that_nearly_cancel_are_rounded_as_large_as_they_are(tmp_path, monkeypatch):
    """The bias of a centered linear undoes what its products have of the constant."""
    model = new_bert()
    layer = model.bert.encoder.layer[0]
    layer.intermediate.dense.bias.data += 12.0
    layer.output.dense.bias.data -= 12.0 * layer.output.dense.weight.data.sum(dim=1)
    made = calibrate(write_tiny_bert(tmp_path / "model", model), recipe_with())
    graph = exported_of(made.model, made.plan, "channel", "fp16")
    assert failing(compare_layers(graph, made.model, BATCHES)) == []
    norm = tensor(graph, "bert.encoder.layer.0.output.LayerNorm.bias_fp16")
    amax = made.record.quantizers[f"{LINEARS[6]}.input_quantizer"].amax
    store(graph, "bert.encoder.layer.0.output.LayerNorm.bias_fp16", norm + np.float16(2 * amax / 127))
    assert {*LINEARS[6:9]} <= {*failing(compare_layers(graph, made.model, BATCHES))}
    store(graph, "bert.encoder.layer.0.output.LayerNorm.bias_fp16", norm)
    monkeypatch.setattr(Norm, "terms", lambda _, value: np.zeros_like(value))
    assert {*LINEARS[6:9]} <= {*failing(compare_layers(graph, made.model, BATCHES))}  # or it shows nothing


def test_a_value_that_both_round_to_a_code_of_their_own_is_moved_off_the_border():
    """ModelOpt multiplies by 1 / scale and ONNX divides: a value in between has two codes."""
    scale = float(np.float32(0.1))
    value = np.float32([10.5 * scale, -3.5 * scale, 7.2 * scale])
    boundary = Boundary("tensor", {"layer.0.query.input_quantizer": scale})
    for codes in ([10, -4, 7], [11, -3, 7]):
        made = (np.float32(codes) * np.float32(scale)).astype(np.float32)
        fed = _fed(boundary, {boundary.fed: value}, {boundary.fed: made})
        assert np.rint(fed / np.float32(scale)).tolist() == codes
        assert np.abs(fed - value).max() < 2 * BORDER * scale
        assert fed[2] == value[2]
    stale = _fed(boundary, {boundary.fed: value}, {boundary.fed: np.float32([5, 5, 5])})
    assert np.array_equal(stale, value)  # of another scale: nothing is hidden
