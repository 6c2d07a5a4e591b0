"""Which kernels a peer ran, by torch.profiler: whether attention was fused, and what was left in FP32.

PyTorch chooses the kernel of an attention by mask, shape and datatype, without a word. Its math path
multiplies in FP32 and is 2 to 2.5 times slower, so that a peer which took it is no measure of anything.
"""

import re
from collections import Counter
from typing import Any

from qdqbench.eval.bench.results import BenchKernels
from qdqbench.eval.bench.rounds import Lane
from qdqbench.quantize.core.errors import CheckFailed

LONGEST_NAME = 160  # templates of CUTLASS are named at length
# flash-attention, CUTLASS's memory-efficient one (fmha_cutlassF), cuDNN's (...sdpa_sm90_flash_fprop...), and
# Inductor's template of flex attention
ATTENTION = re.compile(r"flash_fwd|flash_fprop|fmha|sdpa|triton_tem\w*attention", re.I)
# Inductor names pointwise kernels after the operators beside them, attention too
POINTWISE = re.compile(r"^triton_(poi|per|red|for)_")
GEMM = re.compile(r"gemm|nvjet|gemv", re.I)
HALF = re.compile(r"f16|h16|fp16|half|hgemm|hsh|hhh|tst|s16816|s161616|e4m3", re.I)


def is_fused_attention(name: str) -> bool:
    """Whether a kernel computes a whole attention."""
    return bool(ATTENTION.search(name)) and not POINTWISE.match(name)


def is_fp32_gemm(name: str) -> bool:
    """Whether a kernel multiplies matrices in FP32 or TF32: cuBLAS and CUTLASS name their types."""
    return bool(GEMM.search(name)) and not HALF.search(name) and not is_fused_attention(name)


def kernels_in(names: "Counter[str]") -> BenchKernels:
    """What the kernels of one inference, by name, say."""
    return BenchKernels(
        names={name[:LONGEST_NAME]: count for name, count in names.most_common()},
        fused_attention=sum(count for name, count in names.items() if is_fused_attention(name)),
        fp32_gemms=sum(count for name, count in names.items() if is_fp32_gemm(name)),
    )


def kernels_of(lane: Lane) -> BenchKernels:
    """Kernels of one inference, a replayed CUDA graph's too.

    Raises:
        CheckFailed: the profiler saw none.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        lane.launch()
        torch.cuda.synchronize()
    names = Counter(event.name for event in found.events() if _is_kernel(event))
    if not names:
        raise CheckFailed("torch.profiler saw no kernel of it")
    return kernels_in(names)


def _is_kernel(event: Any) -> bool:
    """Not a copy, not a range that an annotation names."""
    on_gpu = str(event.device_type).endswith("CUDA")
    marked = getattr(event, "is_user_annotation", False)
    return on_gpu and not marked and not event.name.startswith(("Memcpy", "Memset"))
