"""Bias correction: the mean that FP32 had, never a layer that is worse, and nothing else touched."""

import copy
from collections import Counter
from contextlib import nullcontext, suppress

import pytest
import torch

from qdqbench.quantize.calibration.fakequant import native
from qdqbench.quantize.calibration.fakequant import quantizers as quantizers_module
from qdqbench.quantize.calibration.fakequant.quantizers import quantizers_off
from qdqbench.quantize.calibration.techniques import bias_correction
from qdqbench.quantize.calibration.techniques.bias_correction import apply_biases, correct_biases
from qdqbench.quantize.models.load import load_model

from ...support import tiny_bert as bert

CORRECTED = {"bias_correction": True, "softmax_scale": "fixed"}
LAYERS = [f"bert.encoder.layer.{layer}" for layer in range(2)]


def biases_of(model):
    return {n.removesuffix(".bias"): p.detach().clone() for n, p in model.named_parameters() if "bias" in n}


def means(model, names):
    found = bert.values_in(model, names)
    return {n: torch.cat([v.flatten(0, 1) for v in vs]).double().mean(dim=0) for n, vs in found.items()}


def correct(model, plan):
    return correct_biases(model, plan.int8, bert.calibration_batches())


def errors(model, exact, batches):
    """Squared error of each encoder layer's output."""
    ours, theirs = (bert.values_in(each, LAYERS, batches) for each in (model, exact))
    return [
        sum(float((a - b).double().square().sum()) for a, b in zip(ours[name], theirs[name], strict=True))
        for name in LAYERS
    ]


def coarse(folder, *rules, **changes):
    """A calibrated model and its plan; clipping at the 90th percentile moves means far."""
    every = bert.EVERY | {"method": "percentile/90"}
    return bert.calibrate(folder, bert.recipe_with(rules=[every, *rules], **changes))[:2]


@pytest.mark.parametrize("name", ["bert-int8-linears", "bert-int8-linears-per-tensor", "bert-int8-attention"])
def test_the_mean_is_that_of_fp32(tiny_bert, name):
    plain = bert.calibrate(tiny_bert, bert.recipe_with(name)).model
    model, _, record = bert.calibrate(tiny_bert, bert.recipe_with(name, calibration=CORRECTED))
    assert len(record.biases) >= 6
    accepted = list(record.biases)
    exact = means(load_model(str(tiny_bert)), accepted)
    before, after = means(plain, accepted), means(model, accepted)
    for linear in accepted:
        torch.testing.assert_close(after[linear], exact[linear], rtol=0, atol=2e-6)
    assert any((before[linear] - exact[linear]).abs().max() > 1e-3 for linear in accepted)


def test_it_helps_where_clipping_moved_the_means(tiny_bert):
    (model, plan), exact = coarse(tiny_bert), load_model(str(tiny_bert))
    batches = [*bert.calibration_batches(), bert.padded_batch((11, 11), seed=5)]
    before = errors(model, exact, batches)
    assert len(correct(model, plan)) >= 8
    after = errors(model, exact, batches)
    assert all(now < 0.9 * was for now, was in zip(after, before, strict=True))


def test_torch_s_kernels_correct_the_same(tiny_bert):
    """On a GPU they stand in for ModelOpt's arithmetic."""
    model, plan = coarse(tiny_bert, **bert.INT8_ATTENTION)
    expected = correct(copy.deepcopy(model), plan)
    native.use_native(model)
    ours = correct(model, plan)
    native.use_modelopt(model)
    assert list(ours) == list(expected)
    assert len(ours) >= 8
    for name, values in ours.items():
        # a value on a tie rounds the other way on some CPUs, and its step moves all that follows a little
        first, second = torch.tensor(values), torch.tensor(expected[name])
        assert (first - second).norm() <= 0.01 * second.norm(), name


def test_of_each_layer_the_error_never_grows(tiny_bert):
    """Layer by layer with the same inputs, in every state from first to last."""
    model, plan = coarse(tiny_bert)
    exact = load_model(str(tiny_bert))
    previous = errors(model, exact, bert.calibration_batches())
    for layer in LAYERS:
        inside = [name for name in plan.int8 if name.startswith(f"{layer}.")]
        correct_biases(model, inside, bert.calibration_batches())
        now = errors(model, exact, bert.calibration_batches())
        assert now[LAYERS.index(layer)] <= previous[LAYERS.index(layer)]
        previous = now


def test_what_was_made_before_is_not_computed_again(tiny_bert, monkeypatch):
    """To the bit what running them again gives, in a third fewer linears."""
    model, plan = coarse(tiny_bert)
    models = {"replayed": model, "again": copy.deepcopy(model)}
    runs, found = Counter[str](), {}
    for way, each in models.items():
        for name in plan.int8:
            linear = each.get_submodule(name)
            linear.input_quantizer.register_forward_pre_hook(lambda *_, way=way: runs.update([way]))
        if way == "again":
            monkeypatch.setattr(bias_correction, "replay_outputs", lambda *_: nullcontext())
        found[way] = correct(each, plan)
    assert found["replayed"] == found["again"]
    assert len(found["again"]) >= 8
    # a layer runs six times, six linears in four groups: the last three runs leave out 3, 4 and 5 of them
    assert 36 * runs["replayed"] == (36 - 12) * runs["again"]


OUTLIER = 5  # a token that stands once in 32


def with_outlier_tokens(folder):
    """One token excites a feed-forward unit a hundredfold: clipped there, it rules the mean of all."""
    model = load_model(str(folder))
    embeddings = model.bert.embeddings.word_embeddings.weight.data
    embeddings[:, 3] = 0.0
    embeddings[OUTLIER] = 0.0
    embeddings[OUTLIER, 3] = 50.0
    unit = model.get_submodule(bert.LINEARS[4])
    unit.weight.data[0] = 0.0
    unit.weight.data[0, 3] = 200.0
    unit.bias.data[0] = -400.0
    batches = [bert.padded_batch((16,) * 8, seed=seed) for seed in range(3)]
    for batch in batches:
        batch["input_ids"][batch["input_ids"] == OUTLIER] = OUTLIER + 1
        batch["input_ids"][::2, 7] = OUTLIER
    return model, batches


def test_a_mean_that_outliers_rule_is_taken_back(tiny_bert):
    model, batches = with_outlier_tokens(tiny_bert)
    exact, name = with_outlier_tokens(tiny_bert)[0], bert.LINEARS[5]
    recipe = bert.recipe_with(rules=[{"match": name, "method": "percentile/90"} | bert.INT8])
    plan = bert.calibrate_model(model, recipe, batches).plan
    before, kept = errors(model, exact, batches)[0], biases_of(model)
    target, clipped = (
        torch.cat(bert.values_in(each, [name], batches)[name]).flatten(0, 1) for each in (exact, model)
    )
    plainly = {name: (target - clipped).double().mean(dim=0).float().tolist()}
    apply_biases(model, plainly)
    assert errors(model, exact, batches)[0] > 2 * before
    model.get_submodule(name).bias.data.copy_(kept[name])
    assert correct_biases(model, plan.int8, batches) == {}
    assert all(torch.equal(bias, kept[name]) for name, bias in biases_of(model).items())
    assert errors(model, exact, batches)[0] == before


def test_only_int8_linears_of_the_encoder_change(tiny_bert):
    fp16 = [name for name in bert.LINEARS if name.startswith(f"{LAYERS[1]}.attention")]
    model, plan = coarse(
        tiny_bert,
        {"match": "*", "type": "Linear"} | bert.INT8,
        {"match": "encoder.layer.1.attention.*", "type": "Linear", "precision": "fp16"},
    )
    weights = {n: p.detach().clone() for n, p in model.named_parameters() if not n.endswith("bias")}
    before, added = biases_of(model), correct(model, plan)
    assert added
    assert set(added) <= set(bert.LINEARS) - set(fp16)
    after = biases_of(model)
    assert {n for n in before if not torch.equal(before[n], after[n])} == set(added)
    assert all(torch.equal(value, model.get_parameter(name)) for name, value in weights.items())
    assert {"classifier", "bert.pooler.dense"} <= set(plan.int8)


def test_quantizers_are_left_as_they_were(tiny_bert):
    model, plan = coarse(tiny_bert, **bert.INT8_ATTENTION)
    off = [
        f"{bert.LINEARS[1]}.input_quantizer",
        f"{bert.LINEARS[4]}.weight_quantizer",
        f"{bert.ATTENTIONS[1]}.q_bmm_quantizer",
    ]
    for name in off:
        model.get_submodule(name).disable()
    before = {name: q.amax.clone() for name, q in quantizers_module.list_quantizers(model).items()}
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    correct(model, plan)
    with suppress(ZeroDivisionError), quantizers_off(model):
        assert quantizers_module.list_quantizers(model) == {}
        raise ZeroDivisionError
    after = quantizers_module.list_quantizers(model)
    assert list(after) == list(before)
    assert all(torch.equal(after[name].amax, amax) for name, amax in before.items())
    assert hooks == sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_what_was_added_is_all_that_changed_and_nothing_without_quantizers(tiny_bert):
    model, plan = coarse(tiny_bert)
    before, query = biases_of(model), bert.LINEARS[0]
    with quantizers_off(model):
        assert correct(model, plan) == {}
    assert all(torch.equal(bias, before[name]) for name, bias in biases_of(model).items())
    lacking = copy.deepcopy(model)
    lacking.get_submodule(query).bias = None
    added = correct(model, plan)
    twin = load_model(str(tiny_bert))
    apply_biases(twin, added)
    after = biases_of(model)
    assert all(torch.equal(bias, after[name]) for name, bias in biases_of(twin).items())
    assert any(not torch.equal(before[name], after[name]) for name in added)
    assert query in added
    assert bert.LINEARS[1] in (others := correct(lacking, plan))
    assert query not in others


def test_no_more_batches_than_needed_are_taken(tiny_bert, monkeypatch):
    model, plan = coarse(tiny_bert)
    monkeypatch.setattr(bias_correction, "TOKENS", 100)
    taken = []

    def batches():
        for seed in range(100):
            taken.append(seed)
            yield bert.padded_batch((8,) * 4, seed)

    correct_biases(model, plan.int8, batches())
    assert len(taken) == 4  # 32 tokens each
