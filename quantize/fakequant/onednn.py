"""FP32 linears through oneDNN, to the bit, where MKL, which torch takes, leaves half of the CPU unused.

MKL gives CPUs of AMD its AVX2 kernels even where they have AVX512; oneDNN's are about twice as fast there.
The sums of the two differ in the last bit, which moves some values to other codes. But both add the products
of a block of K one after another, and MKL's blocks are of `BLOCK`: oneDNN's GEMMs of them, added up, are
MKL's. No library promises that, so a probe of every size is compared with torch's own before it is taken.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from qdqbench.quantize.machine.cpu import find_cpu

BLOCK = 192  # of K; two halves where K is between one and two of them
ROWS = 16  # for each thread: MKL has other kernels for a few


def quick_linears(device: str = "cpu") -> AbstractContextManager[Any]:
    """Linears without gradients that run in the block take the quicker library, where there is one.

    Args:
        device: type of the model's; elsewhere than on such a CPU nothing stands before torch's functions.
    """
    return _QuickLinears() if device == "cpu" and onednn_is_quicker() else nullcontext()


class _QuickLinears(TorchFunctionMode):
    def __torch_function__(
        self, function: Callable[..., Any], _: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """What torch calls for each of its functions."""
        if function is functional.linear and not kwargs and _dense(*args[:2]):
            inputs, weight = args[:2]
            threads = torch.get_num_threads()
            if inputs.numel() >= ROWS * threads * weight.shape[1] and _same(*weight.shape, threads):
                return by_blocks(*args)
        return function(*args, **(kwargs or {}))


def by_blocks(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`functional.linear` of inputs [..., K] and a weight [N, K], added up as MKL does; all contiguous."""
    count = weight.shape[1]
    block = (count + 1) // 2 if BLOCK < count < 2 * BLOCK else BLOCK
    rows = inputs.view(-1, count)
    made: torch.Tensor | None = None
    for start in range(0, count, block):
        part = slice(start, start + block)
        # a weight that is not contiguous would go to a kernel of no width at all
        given = rows[:, part], weight[:, part].contiguous(), bias if made is None else None
        found = torch.ops.mkldnn._linear_pointwise(*given, "none", [], "")
        made = found if made is None else made.add_(found)
    assert made is not None, "a linear has inputs"
    return made.view(*inputs.shape[:-1], len(weight))


@cache
def onednn_is_quicker() -> bool:
    """Whether this is a CPU that MKL has no kernels of full width for, and torch has both libraries."""
    cpu = find_cpu()
    backends: Any = torch.backends
    both = backends.mkl.is_available() and backends.mkldnn.is_available()
    return bool(both) and "AMD" in cpu.name and "avx512f" in cpu.features


@cache
def _same(outputs: int, inputs: int, threads: int) -> bool:
    """Whether both libraries give the same bits for a weight [outputs, inputs], on random values."""
    random = torch.Generator().manual_seed(0)
    shapes = (ROWS * threads, inputs), (outputs, inputs), (outputs,)
    given = [torch.randn(*shape, generator=random) for shape in shapes]
    return by_blocks(*given).equal(functional.linear(*given))


def _dense(inputs: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether both are what oneDNN takes as it is, and no gradient is asked for."""
    return torch.is_inference_mode_enabled() and all(
        value.device.type == "cpu" and value.dtype == torch.float32 and value.is_contiguous()
        for value in (inputs, weight)
    )
