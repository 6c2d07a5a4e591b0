"""Merged q, k and v, rotary positions and a gated feed-forward: what is exact for BERT is exact there too."""

from dataclasses import replace

import numpy as np
import torch

from qdqbench.quantize.calibration import ptq
from qdqbench.quantize.calibration.fakequant.quantizers import forward, quantizers_off
from qdqbench.quantize.calibration.record import select_record
from qdqbench.quantize.calibration.techniques import bias_correction as bias
from qdqbench.quantize.calibration.techniques import channel_splitting
from qdqbench.quantize.models.families.known import MODERNBERT
from qdqbench.quantize.models.inputs import select_inputs
from qdqbench.quantize.models.load import prepare_model

from ...support.tiny_bert import calibrate_model, exported_of, padded_batch, recipe_with, restored, run_onnx
from ...support.tiny_modernbert import new_modernbert, quantized

FIRST, SECOND = "model.layers.1.mlp.Wi", "model.layers.1.mlp.Wo"
WQKV, WO = "model.layers.1.attn.Wqkv", "model.layers.1.attn.Wo"
CHANNEL, WIDTH, EXTRA = 7, 64, 32
BATCHES = [padded_batch((20, 9), seed=3), padded_batch((12, 5), seed=4)]


def answers(model):
    return torch.cat([forward(model, batch) for batch in BATCHES])


def outlying():
    """A channel of each feed-forward has a large gate that meets a large weight."""
    model = new_modernbert()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.Wi.weight[WIDTH + CHANNEL] *= 30
            layer.mlp.Wo.weight[:, CHANNEL] *= 10
    return model


def test_factors_change_no_answer_and_follow_the_heads():
    model = new_modernbert()
    with torch.no_grad():
        model.get_submodule(WQKV).weight[3] *= 16
    before = answers(prepare_model(model))
    model, _, record = quantized(model, attention=True, smoothing=0.5)
    with quantizers_off(model):
        torch.testing.assert_close(answers(model), before, rtol=1e-4, atol=1e-5)
    smoothing = record.smoothing
    # the first layer reads the embeddings' LayerNorm through an Identity
    assert {f"model.layers.{n}.attn.Wqkv" for n in range(4)} < {*smoothing.inputs}
    query, key, value = np.reshape(smoothing.rows[WQKV], (3, 2, 2, 8))  # part, head, half, pair
    assert np.array_equal(query * key, np.ones_like(query))
    assert np.array_equal(query[:, 0], query[:, 1])  # of a pair that is rotated together
    assert query[0, 0, 3] <= 0.5
    assert (value == 1).all()


def test_an_output_projection_is_smoothed_by_the_rows_of_v():
    before = answers(prepare_model(new_modernbert()))
    every = {"match": "layers.*", "type": "Linear", "weights": "int8/per-channel", "input": "int8/per-tensor"}
    recipe = recipe_with("modernbert-int8-linears", rules=[every, {"match": "*.attn.Wo", "smoothing": 0.5}])
    model, _, record = calibrate_model(prepare_model(new_modernbert()), recipe)
    with quantizers_off(model):
        torch.testing.assert_close(answers(model), before, rtol=1e-4, atol=1e-5)
    *others, value = np.reshape(record.smoothing.rows[WQKV], (3, 32))
    assert (np.array(others) == 1).all()
    assert np.array_equal(1 / value, record.smoothing.columns[WO])


def test_a_split_copies_a_channel_with_its_gate():
    before = answers(prepare_model(outlying()))
    model, plan, record = made = quantized(outlying(), outlier_channel_splitting=EXTRA)
    assert CHANNEL in record.splits[SECOND].outliers
    assert model.get_submodule(FIRST).out_features == 2 * (WIDTH + EXTRA)
    assert model.config.intermediate_size == model.get_submodule(SECOND).in_features == WIDTH + EXTRA
    with quantizers_off(model):
        torch.testing.assert_close(answers(model), before, rtol=1e-3, atol=1e-4)
    whole = quantized(outlying()).record.quantizers[f"{SECOND}.input_quantizer"].amax
    assert record.quantizers[f"{SECOND}.input_quantizer"].amax < 0.6 * whole
    restored(made, prepare_model(outlying()))
    graph = run_onnx(exported_of(model, plan, "factored"), select_inputs(model, BATCHES[0]))
    np.testing.assert_allclose(graph, forward(model, BATCHES[0]), atol=0.3 * float(before.abs().max()))


def test_copies_follow_their_original_in_training_and_merge_again():
    model, _, record = made = quantized(outlying(), outlier_channel_splitting=EXTRA)
    tie = channel_splitting.keep_equal(model, record.splits)
    for name in (FIRST, SECOND):
        weight = model.get_submodule(name).weight.data
        weight *= 1 + 0.01 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    tie()
    merged, plain = ptq.take_out(model, record), prepare_model(outlying())
    plain.load_state_dict({name: merged[name] for name in plain.state_dict()})
    restored(made, plain)


def test_a_record_is_narrowed_to_rows_without_copies():
    plain = quantized(outlying(), outlier_channel_splitting=EXTRA)
    fused = quantized(outlying(), attention=True, outlier_channel_splitting=EXTRA)
    int8 = {name: how for name, how in plain.plan.int8.items() if name != SECOND}
    part = replace(plain.plan, int8=int8)
    record = select_record(part, plain.record, fused.record)
    wanted = quantized(outlying()).record.quantizers[f"{FIRST}.weight_quantizer"].amax
    assert record.quantizers[f"{FIRST}.weight_quantizer"].amax == wanted


def test_bias_correction_says_what_has_no_bias():
    record = quantized(new_modernbert(), bias_correction=True).record
    assert record.biases == {}
    assert record.notes[-1].startswith("bias correction left out 16 of 16 INT8 linears, which have no bias: ")


def test_layers_run_one_by_one_with_the_mask_and_positions_of_each():
    model = prepare_model(new_modernbert(biases=True))
    layers = MODERNBERT.layer_names(model)
    with torch.inference_mode():
        states, given = bias.record_calls(model, dict.fromkeys(layers, 1), BATCHES)
        for name in layers:
            states = bias.run_layer(model, name, 1, given[name], states)
        for state, batch in zip(states, BATCHES, strict=True):
            whole = model.model(**{k: torch.from_numpy(v) for k, v in select_inputs(model, batch).items()})
            assert torch.equal(model.model.final_norm(state), whole.last_hidden_state)
    assert quantized(new_modernbert(biases=True), bias_correction=True).record.biases


def test_values_are_centred_in_their_rows_where_there_are_biases():
    before = answers(prepare_model(new_modernbert(biases=True)))
    model, _, record = quantized(new_modernbert(biases=True), attention=True, softmax_scale="min-error")
    assert WQKV in record.centers
    *others, value = np.reshape(record.centers[WQKV], (3, 32))
    assert not np.any(others)
    assert value.any()
    with quantizers_off(model):
        torch.testing.assert_close(answers(model), before, rtol=1e-4, atol=1e-4)
    left = quantized(new_modernbert(), attention=True, softmax_scale="min-error").record
    assert left.centers == {}
    assert left.notes[0].startswith("values of INT8 attentions were not centered where model.layers.0.attn")
