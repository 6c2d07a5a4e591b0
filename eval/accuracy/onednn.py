"""FP32 linears through oneDNN where MKL, which torch takes, leaves half of the CPU unused.

MKL gives CPUs of AMD its AVX2 kernels even where they have AVX512; oneDNN's are about twice as fast there.
The sums round otherwise in the last bit. That is nothing to a model without quantizers; one that has them
rounds some values to other codes, so it keeps torch's own sums, and so does calibration (CONTRIBUTING.md).
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from qdqbench.quantize.machine.cpu import find_cpu


class quick_linears(TorchFunctionMode):
    """Linears without gradients that run in the block take the quicker library; others do not."""

    def __torch_function__(
        self, function: Callable[..., Any], _: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """What torch calls for each of its functions."""
        if function is functional.linear and not kwargs and onednn_is_quicker() and _dense(*args[:2]):
            return torch.ops.mkldnn._linear_pointwise(
                args[0], args[1], *(args[2:] or (None,)), "none", [], ""
            )
        return function(*args, **(kwargs or {}))


@cache
def onednn_is_quicker() -> bool:
    """Whether this is a CPU that MKL has no kernels of full width for, and torch has both libraries."""
    cpu = find_cpu()
    backends: Any = torch.backends
    both = backends.mkl.is_available() and backends.mkldnn.is_available()
    return bool(both) and "AMD" in cpu.name and "avx512f" in cpu.features


def _dense(inputs: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether both are what oneDNN takes as it is, and no gradient is asked for."""
    return torch.is_inference_mode_enabled() and all(
        value.device.type == "cpu" and value.dtype == torch.float32 and value.layout == torch.strided
        for value in (inputs, weight)
    )
