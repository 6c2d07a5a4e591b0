"""Linears through oneDNN: what they compute, and whose business they are not."""

import pytest
import torch
from torch.nn import functional

from qdqbench.eval.accuracy import onednn
from qdqbench.quantize.machine.cpu import Cpu

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")


@pytest.fixture(autouse=True)
def quicker(monkeypatch):
    monkeypatch.setattr(onednn, "onednn_is_quicker", lambda: True)


@pytest.fixture
def called(monkeypatch):
    """Shapes of inputs that oneDNN was given."""
    own, shapes = torch.ops.mkldnn._linear_pointwise, []
    seen = lambda *args: shapes.append(tuple(args[0].shape)) or own(*args)  # noqa: E731
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", seen)
    return shapes


def tensors(shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*s, generator=generator).to(dtype) for s in (shape, (5, shape[-1]), (5,))]


@needs_onednn
@pytest.mark.parametrize("shape", [(3, 64), (2, 7, 64), (2, 0, 64)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_computes_the_same_but_for_rounding(shape, bias, called):
    values, weight, shift = tensors(shape)
    given = (values, weight, shift) if bias else (values, weight)
    expected = functional.linear(*given)
    with torch.inference_mode(), onednn.quick_linears():
        made = functional.linear(*given)
    assert called == [shape]
    torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-5)


@needs_onednn
def test_strides_do_not_matter():
    values, weight, shift = tensors((7, 64))
    expected = functional.linear(values, weight, shift)
    with torch.inference_mode(), onednn.quick_linears():
        turned = functional.linear(values.t().contiguous().t(), weight.t().contiguous().t(), shift)
    torch.testing.assert_close(turned, expected, rtol=1e-5, atol=1e-5)


def test_what_needs_a_gradient_or_has_another_type_goes_its_own_way(called):
    values, weight, shift = tensors((3, 64))
    weight.requires_grad_()
    with onednn.quick_linears():
        functional.linear(values, weight, shift).sum().backward()
    assert weight.grad is not None
    with torch.inference_mode(), onednn.quick_linears():
        doubles = functional.linear(*tensors((3, 64), torch.float64))
    assert (doubles.dtype, called) == (torch.float64, [])


def test_behind_the_block_nothing_is_changed(called):
    with torch.inference_mode():
        with onednn.quick_linears():
            pass
        functional.linear(*tensors((3, 64)))
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
    onednn.onednn_is_quicker.cache_clear()
    assert onednn.onednn_is_quicker() is quicker
    onednn.onednn_is_quicker.cache_clear()
