"""Linears through oneDNN: the same bits as torch's own, and whose business they are not."""

import pytest
import torch
from torch.nn import functional

from qdqbench.quantize.calibration.fakequant import onednn
from qdqbench.quantize.utils.system.cpu import Cpu

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")


@pytest.fixture(autouse=True)
def quicker(monkeypatch):
    monkeypatch.setattr(onednn, "is_onednn_quicker", lambda: True)
    onednn._same.cache_clear()


@pytest.fixture
def called(monkeypatch):
    """Shapes of inputs that oneDNN was given."""
    own, shapes = onednn.multiply_blocks, []
    seen = lambda *args: shapes.append(tuple(args[0].shape)) or own(*args)  # noqa: E731
    monkeypatch.setattr(onednn, "multiply_blocks", seen)
    return shapes


@pytest.fixture
def taken(monkeypatch):
    """Every size is taken, whatever the two libraries do on this CPU."""
    monkeypatch.setattr(onednn, "_same", lambda *_: True)


def tensors(shape, dtype=torch.float32, outputs=48):
    generator = torch.Generator().manual_seed(0)
    shapes = shape, (outputs, shape[-1]), (outputs,)
    return [torch.randn(*s, generator=generator).to(dtype) for s in shapes]


def quick(*given, again=False):
    with torch.inference_mode(), onednn.use_quick_linears(again=again):
        return functional.linear(*given)


@needs_onednn
@pytest.mark.parametrize("count", [64, 192, 193, 320, 384, 400, 1600])
@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_the_bits_are_those_of_torch_on_any_cpu(count, bias, again):
    for rows in (1, 7, 16 * torch.get_num_threads(), 301):
        given = tensors((rows, count))[: 3 if bias else 2]
        assert quick(*given, again=again).equal(functional.linear(*given))


@needs_onednn
@pytest.mark.parametrize("shape", [(1, 64), (2, 7, 193), (2, 100, 384), (2, 3, 4, 500)])
@pytest.mark.parametrize("bias", [True, False])
def test_blocks_add_up_to_the_linear(shape, bias):
    inputs, weight, *rest = given = tensors(shape)[: 3 if bias else 2]
    made = onednn.multiply_blocks(inputs, onednn.split_weight(weight), *rest)
    torch.testing.assert_close(made, functional.linear(*given), rtol=1e-4, atol=1e-4)


@needs_onednn
@pytest.mark.parametrize("room", [onednn.HELD_BYTES, 64 * 48 * 4, 0])
def test_a_weight_that_is_held_is_the_one_that_is_there(taken, monkeypatch, room):
    monkeypatch.setattr(onednn, "HELD_BYTES", room)  # all, one or none of them

    def close():
        made = functional.linear(values, linear.weight)
        expected = (values.double() @ linear.weight.double().t()).float()
        torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4)

    (values, weight, _), linear = tensors((512, 64)), torch.nn.Linear(64, 48, bias=False)
    with torch.inference_mode(), onednn.use_quick_linears(again=True):
        close()
        linear.weight.data = weight.clone()  # of a tensor with another address
        close()
        for _ in range(4):  # and of one that takes the address of one that is gone
            linear.weight.data = linear.weight.detach() + 1
            close()
    linear = torch.nn.Linear(64, 48, bias=False)
    with onednn.use_quick_linears(again=True):
        for _ in range(2):
            with torch.inference_mode(), onednn.use_quick_linears():
                close()
            with torch.no_grad():
                linear.weight.mul_(2)


@needs_onednn
def test_blocks_in_blocks_hold_weights_once(taken, monkeypatch):
    given, made, own = tensors((512, 64)), [], onednn.split_weight
    monkeypatch.setattr(onednn, "split_weight", lambda weight: made.append(1) or own(weight))
    with onednn.use_quick_linears(again=True):
        for _ in range(3):
            quick(*given)
    assert len(made) == 1
    with onednn.use_quick_linears():
        for _ in range(3):
            quick(*given, again=True)
    assert len(made) == 4


@needs_onednn
def test_a_size_of_other_bits_is_left_to_torch(called, monkeypatch):
    own = onednn.multiply_blocks
    monkeypatch.setattr(onednn, "multiply_blocks", lambda *given: own(*given) + 1e-6)
    given = tensors((4096, 64))
    assert quick(*given).equal(functional.linear(*given))
    assert called == [(16 * torch.get_num_threads(), 64)]  # the probe alone


@needs_onednn
def test_few_rows_are_left_to_torch_and_many_are_not(called, taken):
    few = 16 * torch.get_num_threads()
    quick(*tensors((few - 1, 64)))
    quick(*tensors((0, 64)))
    assert called == []
    quick(*tensors((few, 64)))
    assert called == [(few, 64)]


def test_what_needs_a_gradient_or_is_laid_out_otherwise_goes_its_own_way(called, taken):
    values, weight, shift = tensors((4096, 64))
    quick(values.t().contiguous().t(), weight, shift)
    quick(values, weight.t().contiguous().t(), shift)
    assert quick(*tensors((4096, 64), torch.float64)).dtype == torch.float64
    weight.requires_grad_()
    with onednn.use_quick_linears():
        functional.linear(values, weight, shift).sum().backward()
    assert weight.grad is not None
    assert called == []


def test_a_model_elsewhere_is_left_alone(called, taken):
    with torch.inference_mode(), onednn.use_quick_linears("cuda"):
        functional.linear(*tensors((4096, 64)))
    assert called == []


def test_behind_the_block_nothing_is_changed(called, taken):
    with torch.inference_mode():
        with onednn.use_quick_linears():
            pass
        functional.linear(*tensors((4096, 64)))
    assert called == []


@pytest.mark.parametrize(
    ("name", "features", "quicker"),
    [
        ("AMD EPYC", ("avx2", "avx512f"), True),
        ("AMD EPYC", ("avx2",), False),
        ("Intel(R) Xeon(R)", ("avx2", "avx512f"), False),
    ],
)
def test_only_cpus_of_amd_with_wide_vectors_take_it(name, features, quicker, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(onednn, "find_cpu", lambda: Cpu(name, 2, features))
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    onednn.is_onednn_quicker.cache_clear()
    assert onednn.is_onednn_quicker() is quicker
    onednn.is_onednn_quicker.cache_clear()
