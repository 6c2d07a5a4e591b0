"""FP32 linears through oneDNN, equal to MKL's bit for bit, on CPUs that MKL leaves half unused.

On AMD CPUs with AVX512, MKL still runs its AVX2 kernels. Both libraries sum a block of K in order, and MKL's
blocks have `BLOCK` columns: oneDNN's GEMMs of these blocks, added up, equal MKL's result. No library promises
that, so oneDNN is used for a size only if a probe gives torch's own result.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from qdqbench.quantize.utils.system.cpu import find_cpu

BLOCK = 192  # of K; two halves where K is between one and two of them
ROWS = 16  # for each thread: MKL has other kernels for a few
HELD_BYTES = 2**28  # of weights in oneDNN's layout
TYPICAL_ROWS = 256  # of a batch that the layout is chosen for
Parts = list[tuple[slice, torch.Tensor]]  # of K, and the weight there, in any layout


@contextmanager
def use_quick_linears(device: str = "cpu", *, again: bool = False) -> Iterator[None]:
    """Let linears without gradients that run in the block take the quicker library, where there is one.

    Args:
        device: type of the model's; elsewhere than on such a CPU nothing stands before torch's functions.
        again: weights are read by several batches, so that each is laid out for the library once, and held.
            Nothing in the block may write into one through `.data`, or into one that was made in inference
            mode; to make `.data` another tensor is fine.
    """
    if device != "cpu" or _QuickLinears.entered or not is_onednn_quicker():
        yield
        return
    _QuickLinears.entered = True
    try:
        with _QuickLinears(HELD_BYTES if again else 0):
            yield
    finally:
        _QuickLinears.entered = False


class _QuickLinears(TorchFunctionMode):
    entered = False  # it does not nest

    def __init__(self, room: int) -> None:
        super().__init__()
        self._held: dict[int, tuple[torch.Tensor, int | None, Parts]] = {}  # by address; holds what is there
        self._room = room  # bytes

    def __torch_function__(
        self, function: Callable[..., Any], _: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function is functional.linear and not kwargs and _dense(*args[:2]):
            inputs, weight, *bias = args
            threads = torch.get_num_threads()
            if inputs.numel() >= ROWS * threads * weight.shape[1] and _same(*weight.shape, threads):
                return multiply_blocks(inputs, self._parts(weight), *bias)
        return function(*args, **(kwargs or {}))

    def _parts(self, weight: torch.Tensor) -> Parts:
        """Call `split_weight` for a weight; once as long as there is room."""
        version = None if weight.is_inference() else weight._version
        held, known, parts = self._held.get(weight.data_ptr(), (weight, -1, []))
        if known != version or held.shape != weight.shape:
            parts = split_weight(weight)
            if weight.nbytes <= self._room:
                self._room -= weight.nbytes
                lay_out = torch.ops.mkldnn._reorder_linear_weight
                parts = [(part, lay_out(block, TYPICAL_ROWS)) for part, block in parts]
                self._held[weight.data_ptr()] = weight.detach(), version, parts
        return parts


def split_weight(weight: torch.Tensor) -> Parts:
    """Return the blocks of K of a weight [N, K] that MKL adds up, and where they are."""
    count = weight.shape[1]
    block = (count + 1) // 2 if BLOCK < count < 2 * BLOCK else BLOCK
    slices = (slice(start, start + block) for start in range(0, count, block))
    # a weight that is not contiguous would go to a kernel of no width at all
    return [(part, weight[:, part].contiguous()) for part in slices]


def multiply_blocks(inputs: torch.Tensor, parts: Parts, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute `functional.linear` of contiguous inputs [..., K] and a split weight, added up as MKL does."""
    rows = inputs.view(-1, inputs.shape[-1])
    total: torch.Tensor | None = None
    for part, weight in parts:
        arguments = rows[:, part], weight, bias if total is None else None
        found = torch.ops.mkldnn._linear_pointwise(*arguments, "none", [], "")
        total = found if total is None else total.add_(found)
    assert total is not None, "a linear has inputs"
    return total.view(*inputs.shape[:-1], total.shape[-1])


@cache
def is_onednn_quicker() -> bool:
    """Return whether MKL has no kernels of full width for this CPU, and torch has both libraries."""
    cpu = find_cpu()
    backends: Any = torch.backends
    both = backends.mkl.is_available() and backends.mkldnn.is_available()
    return bool(both) and "AMD" in cpu.name and "avx512f" in cpu.features


@cache
def _same(outputs: int, inputs: int, threads: int) -> bool:
    """Return whether both libraries give the same bits for a weight [outputs, inputs], on random values."""
    random = torch.Generator().manual_seed(0)
    shapes = (ROWS * threads, inputs), (outputs, inputs), (outputs,)
    given = [torch.randn(*shape, generator=random) for shape in shapes]
    expected = functional.linear(*given)
    layouts = (_QuickLinears(room)._parts(given[1]) for room in (0, HELD_BYTES))
    return all(multiply_blocks(given[0], parts, given[2]).equal(expected) for parts in layouts)


def _dense(inputs: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether both are as oneDNN takes them, and no gradient is asked for."""
    return torch.is_inference_mode_enabled() and all(
        value.device.type == "cpu" and value.dtype == torch.float32 and value.is_contiguous()
        for value in (inputs, weight)
    )
