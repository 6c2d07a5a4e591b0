"""Fake quantization for training: the same codes as ModelOpt, a clipped gradient, and scales that learn."""

import copy
import functools
import itertools

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch.profiler import ProfilerActivity, profile

from qdqbench.eval.metrics import runners
from qdqbench.quantize.calibration import ptq
from qdqbench.quantize.calibration.fakequant import modelopt as private
from qdqbench.quantize.calibration.fakequant import native, quantizers
from qdqbench.quantize.calibration.record import trained_record
from qdqbench.quantize.graph.weights import quantize_weights
from qdqbench.quantize.models.load import load_model

from ....support import tiny_bert as bert

RECIPES = {
    "linears": {},
    "per-tensor": {"name": "bert-int8-linears-per-tensor"},
    "smoothing": {"calibration": {"smoothing": 0.5}},
    "attention": {"name": "bert-int8-attention"},
    "residual": {"name": "bert-int8-attention", "residual": "int8", "calibration": {"smoothing": 0.5}},
}
TIE = 2.0**-15  # of a quotient from a tie, where codes may differ by one
ROUNDING = 2.0**-22
axes = pytest.mark.parametrize("axis", [None, 0], ids=["tensor", "channel"])
values = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 4), st.integers(1, 16)),
    elements=st.floats(-3, 3, width=32, allow_subnormal=False),
)
# one value that is FP32's smallest normal number: the gradient of its scale is smaller than FP32 holds
SMALLEST = np.zeros((4, 13), np.float32)
SMALLEST[1, 11] = np.finfo(np.float32).tiny
ranges = st.floats(-20, 16).map(lambda exponent: float(np.float32(2**exponent)))


@pytest.fixture(params=RECIPES)
def fake_quant(tiny_bert, request):
    return fresh(tiny_bert, request.param)


def fresh(folder, name):
    return copy.deepcopy(calibrated(folder, name))


@functools.cache
def calibrated(folder, name):
    """Of all tests, which get copies."""
    return bert.calibrate(folder, bert.recipe_with(**{"name": "bert-int8-linears", **RECIPES[name]}))


def inputs():
    return {name: torch.from_numpy(array) for name, array in bert.padded_batch().items()}


def logits(model):
    with torch.no_grad():
        return model(**inputs()).logits


def train(model, steps=2, rate=1e-2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)
    for _ in range(steps):
        optimizer.zero_grad()
        model(**inputs()).logits.square().sum().backward()
        optimizer.step()
        native.keep_positive(model)


def quantizer_of(amax, axis, **attributes):
    """A ModelOpt quantizer."""
    from modelopt.torch.quantization.config import QuantizerAttributeConfig
    from modelopt.torch.quantization.nn import TensorQuantizer

    quantizer = TensorQuantizer(QuantizerAttributeConfig(num_bits=8, axis=axis, **attributes))
    quantizer.amax = torch.as_tensor(amax, dtype=torch.float32)
    return quantizer


def case(x, amax, axis):
    """Values of up to three times the range, and an amax for each row or for all."""
    rows = amax * np.linspace(1, 2, len(x), dtype=np.float32)[:, None]
    chosen = rows.astype(np.float32) if axis == 0 else np.float32(amax)
    return torch.from_numpy(x * np.float32(amax)), torch.from_numpy(np.asarray(chosen))


@axes
@pytest.mark.parametrize("narrow", [False, True])
@settings(deadline=None)
@given(x=values, amax=ranges)
def test_codes_are_those_of_modelopt(x, amax, axis, narrow):
    x, bound = case(x, amax, axis)
    quantizer = quantizer_of(bound, axis, narrow_range=narrow)
    theirs, ours = quantizer(x).double(), private.fake_quantize(x, quantizer).double()
    step = bound.double() / 127
    quotient = (x.double() / step).clamp(-127 if narrow else -128, 127)
    near_tie = (quotient - quotient.floor() - 0.5).abs() <= TIE
    different = (ours - theirs).abs()
    assert (different <= torch.where(near_tie, 1.001 * step, ROUNDING * theirs.abs())).all()
    assert ((ours - quotient * step).abs() <= (0.5 + TIE) * step * (1 + 2.0**-20)).all()


@axes
@settings(deadline=None)
@given(x=values, amax=ranges)
def test_gradient_is_straight_through_inside_and_zero_outside(x, amax, axis):
    x, bound = case(x, amax, axis)
    incoming = torch.linspace(-2, 2, x.numel()).reshape(x.shape) + 0.1
    found = []
    for run in (quantizer_of(bound, axis, pass_through_bwd=False), None):
        leaf = x.clone().requires_grad_()
        quantizer = quantizer_of(bound, axis)
        (private.fake_quantize(leaf, quantizer) if run is None else run(leaf)).backward(incoming)
        found.append(leaf.grad)
    theirs, ours = found
    inside, step = x.abs() <= bound, bound / 127
    assert torch.equal(ours[inside], theirs[inside])
    assert torch.equal(ours[inside], incoming[inside])
    assert (ours[(x > 127.6 * step) | (x < -128.6 * step)] == 0).all()


@axes
@settings(deadline=None)
@given(x=values, amax=ranges)
def test_bf16_is_rounded_once_from_fp32(x, amax, axis):
    x, bound = case(x, amax, axis)
    quantizer, half = quantizer_of(bound, axis), x.bfloat16()
    ours = private.fake_quantize(half, quantizer)
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, private.fake_quantize(half.float(), quantizer).bfloat16())


@settings(deadline=None)
@given(st.lists(st.floats(2.0**-30, 2.0**17, width=32), min_size=1, max_size=20))
def test_weight_scales_are_rounded_as_calibration_does(scales):
    quantizer = quantizer_of(torch.tensor(scales)[:, None] * 127, 0)
    ours = native.round_up((quantizer.amax / 127).flatten())
    quantizers.round_weight_scales({"x.weight_quantizer": quantizer})
    assert torch.equal(ours * 127, quantizer.amax.flatten())
    assert torch.equal(quantizer.amax.flatten() / 127, ours)


@axes
@pytest.mark.parametrize("rounded", [False, True])
@settings(deadline=None)
@given(x=values, amax=st.floats(2.0**-7, 2.0**7, width=32), ratio=st.floats(0.25, 1.5, width=32))
@example(x=SMALLEST, amax=0.125, ratio=1.0)
def test_gradient_of_lsq(x, amax, ratio, axis, rounded):
    x, bound = case(x, amax, axis)
    quantizer = quantizer_of(bound, axis)
    parameter = torch.nn.Parameter(torch.full((len(x),) if axis == 0 else (), ratio))
    item = native.Learned(parameter, quantizer, rounded, -128, axis, x.shape[1])
    scale = item.scale
    incoming = torch.linspace(-2, 2, x.numel()).reshape(x.shape) + 0.1
    leaf = x.clone().requires_grad_()
    item.quantized(leaf).backward(incoming)
    # equation 3 of the paper, in FP64, and the chain rule to the ratio
    wide = (scale if axis is None else scale[:, None]).double()
    quotient = x.double() * (1 / wide.float()).double()
    code = quotient.round()
    inside = (code >= -128) & (code <= 127)
    slope = torch.where(inside, code - x.double() / wide, code.clamp(-128, 127))
    terms = incoming.double() * slope * wide
    wanted = (terms.sum() if axis is None else terms.sum(1)) / ratio / (x.shape[1] * 127) ** 0.5
    error = (parameter.grad.double() - wanted).abs()
    unsure = ((quotient - quotient.floor() - 0.5).abs() < TIE).any()  # a tie: another code, another slope
    limit = 1e-5 * terms.abs().sum() / ratio + 1e-6 * (incoming.double() * x).abs().sum() / ratio
    limit += torch.finfo(torch.float32).tiny  # the gradient is FP32
    assert unsure or (error <= limit).all()
    assert unsure or torch.equal(leaf.grad, incoming * inside)


def test_same_model_and_undone(fake_quant):
    model, expected = fake_quant.model, logits(fake_quant.model)
    before = {name: (type(m), {**m.__dict__}) for name, m in model.named_modules()}
    native.use_native(model)
    ours = logits(model)
    assert (ours - expected).abs().max() < 1e-5 * expected.abs().max()
    with torch.inference_mode():
        assert torch.equal(model(**inputs()).logits, ours)
    with ptq.smoothing.quantizers_off(model):
        off = logits(model)
    native.use_native(model)  # twice is once
    assert torch.equal(logits(model), ours)
    native.use_modelopt(model)
    assert torch.equal(logits(model), expected)
    with ptq.smoothing.quantizers_off(model):
        torch.testing.assert_close(logits(model), off)
    for name, module in model.named_modules():
        kind, values = before[name]
        assert type(module) is kind
        assert module.__dict__.keys() == values.keys()
        assert getattr(module, "backend", None) is None


def test_evaluated_on_a_gpu_by_torch_s_kernels_and_put_back(fake_quant, monkeypatch):
    model, expected = fake_quant.model, logits(fake_quant.model)
    kinds = {name: type(module) for name, module in model.named_modules()}
    monkeypatch.setattr(runners, "gpu", lambda: torch.device("cpu"))  # stands for one
    with runners.evaluating(model) as placed:
        ours = torch.from_numpy(runners.torch_runner(placed)(bert.padded_batch()))
        assert {q.backend for q in quantizers.list_quantizers(placed).values()} == {native.BACKEND}
    assert (ours - expected).abs().max() < 1e-5 * expected.abs().max()
    assert torch.equal(logits(model), expected)
    assert {name: type(module) for name, module in model.named_modules()} == kinds


def test_evaluated_on_a_cpu_as_modelopt_does_to_the_bit(fake_quant):
    model = fake_quant.model
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    batches = [*bert.calibration_batches(), bert.padded_batch()]
    run = runners.torch_runner(model)
    expected = [run(batch) for batch in batches]
    with runners.evaluating(model):
        for batch, wanted in zip(batches, expected, strict=True):
            np.testing.assert_array_equal(run(batch), wanted)
    np.testing.assert_array_equal(run(batches[0]), expected[0])
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


@axes
def test_frozen_weights_have_the_codes_of_the_graph(tiny_bert, axis):
    # 119 / 8192 is such a scale: its odd multiples of a half are FP16 values, and 1 / scale is rounded up
    model = fresh(tiny_bert, "linears" if axis == 0 else "per-tensor").model
    linear = model.get_submodule("bert.encoder.layer.0.attention.self.query")
    scale, shape = 119 / 8192, linear.weight.shape
    codes = torch.arange(linear.weight.numel()).reshape(shape) % 16 - 8
    linear.weight.data = ((codes + 0.5) * scale).float()
    linear.weight_quantizer.amax = torch.full_like(linear.weight_quantizer.amax, 127 * scale)
    assert torch.equal(linear.weight.half().float(), linear.weight)
    stored = quantize_weights(linear.weight.detach().numpy(), np.float32([scale] * len(codes)), 0)
    with torch.inference_mode():
        theirs = (linear.weight_quantizer(linear.weight) / scale).round()
    assert not np.array_equal(theirs, stored)
    with native.use_frozen_weights(model):
        np.testing.assert_array_equal((linear.weight / scale).round().detach(), stored)


@given(
    seed=st.integers(0, 2**32 - 1),
    amax=st.floats(2**-10, 128, width=32),
    spread=st.floats(0.01, 100),
    form=st.sampled_from(["narrow", "wide", "unsigned"]),
)
def test_exact_rounding_is_that_of_modelopt(seed, amax, spread, form):
    values = spread * torch.randn((2, 5, 11), generator=torch.Generator().manual_seed(seed))
    values = values.abs() if form == "unsigned" else values
    quantizer = quantizer_of(amax, None, unsigned=form == "unsigned", narrow_range=form == "narrow")
    with torch.inference_mode():
        expected = quantizer(values)
        private.use_backend("exact", private.quantize_exactly, [quantizer])
        assert torch.equal(quantizer(values), expected)


def test_a_scale_that_is_zero_to_fp16_gives_zeros_as_modelopt_has_it():
    quantizer = quantizer_of([[2e-8], [1.0]], axis=0)
    values = torch.tensor([[1e-8, 2e-8], [0.3, -2.0]])
    with torch.inference_mode():
        expected = quantizer(values)
        assert torch.equal(private.quantize_exactly(values, quantizer), expected)
        assert torch.equal(quantizers.round_weight(values, quantizer), expected)
    assert not expected[0].any()


def test_every_weight_gets_a_gradient(fake_quant):
    model = fake_quant.model
    native.use_native(model)
    with torch.inference_mode():
        model(**inputs())  # scales made here serve for training too
    ratios = native.learn_amax(model)
    with torch.inference_mode():
        model(**inputs())
    with torch.autocast("cpu", torch.bfloat16):
        model(**inputs()).logits.float().square().sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []
    assert all((ratio.grad != 0).any() for ratio in ratios)


def test_quantizers_of_one_tensor_quantize_it_once(fake_quant):
    model = fake_quant.model
    native.use_native(model)
    layer = bert.ATTENTIONS[0].removesuffix(".attention.self")
    names = [f"{linear}.input_quantizer" for linear in bert.LINEARS[:3]]
    groups = [names + [f"{layer}.attention.output.residual_quantizer"] * bool(fake_quant.plan.residual)]
    if fake_quant.plan.residual:
        groups.append([f"{layer}.intermediate.dense.input_quantizer", f"{layer}.output.residual_quantizer"])
    with bert.watched(model, itertools.chain(*groups)) as seen:
        model(**inputs())
        model(**inputs())
    for group in groups:
        for first, second in zip(seen[group[0]], seen[group[-1]], strict=True):
            assert first is second
    assert seen[names[0]][0] is not seen[names[0]][1]
    shared = model.get_submodule(names[0]).shared
    assert shared.inputs is shared.output is None  # nothing is held


def test_a_shared_tensor_is_quantized_again_when_anything_changed(tiny_bert):
    model = fresh(tiny_bert, "linears").model
    native.learn_amax(model)
    query, key = (model.get_submodule(name).input_quantizer for name in bert.LINEARS[:2])
    x = torch.linspace(-5, 5, 320).reshape(1, 10, 32)
    first = query(x)
    assert key(x) is first
    assert query(x) is not first
    with torch.no_grad():
        assert key(x).requires_grad is False
        native.list_learned(model)[0].mul_(0.5)
    narrower = key(x)
    assert narrower.abs().max() < 0.6 * first.abs().max()
    x.mul_(0.01)
    assert query(x).abs().max() < 0.1


def test_new_scales_are_noticed(tiny_bert):
    model = fresh(tiny_bert, "linears").model
    expected = logits(model)
    native.use_native(model)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    for quantizer in quantizers.list_quantizers(model).values():
        quantizer.amax = quantizer.amax * 0.5
    halved = logits(model)
    assert not torch.allclose(halved, expected, rtol=1e-3)
    model.load_state_dict(start)
    assert torch.allclose(logits(model), expected, rtol=1e-4, atol=1e-5)


def test_scales_are_made_once_and_without_a_host_sync(tiny_bert):
    model = fresh(tiny_bert, "attention").model
    native.use_native(model)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        model(**inputs()).logits.sum().backward()
    counts = {event.key: event.count for event in profiler.key_averages()}
    assert not {"aten::item", "aten::_local_scalar_dense"} & counts.keys()
    assert counts["aten::fake_quantize_per_channel_affine"] == len(bert.LINEARS)
    # query, key and value share one of the three
    assert counts["aten::fake_quantize_per_tensor_affine"] == len(bert.LINEARS) - 4 + 4 * len(bert.ATTENTIONS)


def test_learning_starts_where_calibration_ended(fake_quant):
    model = fake_quant.model
    native.use_native(model)
    expected = logits(model)
    ratios = native.learn_amax(model)
    assert torch.equal(logits(model), expected)
    assert [id(p) for p in native.list_learned(model)] == [id(p) for p in ratios]
    assert {id(p) for p in ratios} <= {id(p) for p in model.parameters()}
    softmax = sum("p_bmm" in name for name in fake_quant.record.quantizers)
    saved = (2 + bool(fake_quant.plan.residual)) * 2 + 2 * bool(fake_quant.plan.residual)
    assert len(ratios) == len(fake_quant.record.quantizers) - softmax - saved
    assert sum(name.endswith(native.PARAMETER) for name in model.state_dict()) == len(ratios)


def test_settled_scales_are_those_of_training(tiny_bert, fake_quant):
    model, plan, record = fake_quant
    keys = model.state_dict().keys()
    native.learn_amax(model)
    train(model)
    trained = logits(model)
    native.settle_learned(model)
    native.use_native(model)
    assert torch.equal(logits(model), trained)
    native.use_modelopt(model)
    assert model.state_dict().keys() == keys
    assert not model._forward_pre_hooks
    told, twin = trained_record(model, record), load_model(str(tiny_bert))
    ptq.restore(twin, plan, type(record).model_validate_json(told.model_dump_json()))
    restored = quantizers.list_quantizers(twin)
    for name, quantizer in quantizers.list_quantizers(model).items():
        assert torch.equal(restored[name].amax, quantizer.amax)
        assert quantizer.amax.dtype == torch.float32
        if name.endswith("weight_quantizer"):
            mantissa, _ = torch.frexp(quantizer.amax / 127)
            assert torch.equal(mantissa * 2**11, (mantissa * 2**11).round())
        if name.endswith("p_bmm_quantizer"):
            assert quantizer.amax == 1
    for linears in (bert.LINEARS[:3], bert.LINEARS[6:9]):
        scales = {float(restored[f"{name}.input_quantizer"].amax) for name in linears}
        assert len(scales) == 1
        assert scales != {record.quantizers[f"{linears[0]}.input_quantizer"].amax}


def test_means_go_into_biases_and_come_back(fake_quant):
    model = fake_quant.model
    native.use_native(model)
    before, plain = logits(model), {name: value.clone() for name, value in model.named_parameters()}
    native.take_means(model, lambda: logits(model))
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-4)
    linear = model.get_submodule(bert.LINEARS[-1])
    mean = linear.get_buffer(native.MEAN)
    assert mean.shape == (linear.in_features,)
    assert not torch.equal(linear.bias, plain[f"{bert.LINEARS[-1]}.bias"])
    with bert.watched(model, bert.LINEARS[-1:]) as seen:
        logits(model)
        linear.weight.data += 0.5 * linear.weight.abs().max()  # of each row in the same direction
        logits(model)
    one, other = (rows.flatten(0, -2).mean(dim=0) for rows in seen[bert.LINEARS[-1]])
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    linear.weight.data.copy_(plain[f"{bert.LINEARS[-1]}.weight"])
    with pytest.raises(RuntimeError, match="no means"):
        native.use_modelopt(model)
    native.settle_learned(model)
    for name, value in model.named_parameters():
        torch.testing.assert_close(value, plain[name], rtol=1e-4, atol=1e-4)
    assert not any(native.MEAN in module._buffers for module in model.modules())


def test_a_copy_learns_alone(tiny_bert):
    model = fresh(tiny_bert, "linears").model
    native.learn_amax(model)
    expected = logits(model)
    twin = copy.deepcopy(model)
    train(twin)
    assert torch.equal(logits(model), expected)
    assert not torch.equal(logits(twin), expected)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(logits(twin), expected)


@pytest.mark.parametrize("kind", [{"fused": True}, {"foreach": True}], ids=str)
def test_a_step_of_the_optimizer_is_noticed(tiny_bert, kind):
    """A fused one leaves no trace on the parameters."""
    model = fresh(tiny_bert, "linears").model
    ratios = native.learn_amax(model)
    model(**inputs()).logits.square().sum().backward()
    torch.optim.AdamW(ratios, lr=0.1, **kind).step()
    ours = logits(model)
    native.settle_learned(model)
    torch.testing.assert_close(ours, logits(model), rtol=1e-4, atol=1e-5)


def test_ratios_stay_positive_and_are_not_lost(tiny_bert):
    model = fresh(tiny_bert, "linears").model
    native.keep_positive(model)  # nothing to do
    ratios = native.learn_amax(model)
    with torch.no_grad():
        ratios[0].fill_(-3.0)
        ratios[1][0] = 0.0
    native.keep_positive(model)
    assert ratios[0] == ratios[1][0] == native.LOWEST_RATIO
    assert (ratios[1][1:] == 1).all()
    with pytest.raises(RuntimeError, match="settle"):
        native.use_modelopt(model)
    native.settle_learned(model)
    assert (logits(model).isfinite()).all()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by Dynamo itself
@pytest.mark.parametrize("learn", [pytest.param(False, marks=pytest.mark.long), True])
def test_compiled_layers_compute_the_same(tiny_bert, learn):
    """In one graph: nothing in it needs Python."""
    model = fresh(tiny_bert, "linears").model
    native.use_native(model)
    if learn:
        native.learn_amax(model)
    layer = model.bert.encoder.layer[0].attention
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    run = torch.compile(layer, backend="aot_eager", fullgraph=True)
    results = []
    for compute in (layer, run):
        layer.zero_grad()
        output = compute(x)[0]
        output.square().sum().backward()
        results.append([output.detach(), *(p.grad.clone() for p in layer.parameters())])
    torch._dynamo.reset()
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-4)
