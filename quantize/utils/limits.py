"""What backends and number formats can hold: the one table that recipes, checks and measurements read."""

from dataclasses import dataclass
from typing import Literal

BackendName = Literal["tensorrt", "tensorrt_rtx", "openvino", "onnxruntime"]
BackendChoice = Literal["auto", "tensorrt", "tensorrt_rtx", "openvino", "onnxruntime"]
CPU_BACKENDS: tuple[BackendName, ...] = ("openvino", "onnxruntime")  # the first that is installed is taken
INT8_RESIDUALS: tuple[BackendName, ...] = ("tensorrt", "tensorrt_rtx")  # have a LayerNorm that reads INT8
FP16_MAX = 65504.0  # largest finite number of FP16


@dataclass(frozen=True)
class Limits:
    """Of the kernels of one backend."""

    int8_head_sizes: tuple[int, ...]  # of a fused INT8 attention; with any other it falls apart
    int8_attention_length: int  # longest sequence of a fused INT8 attention, tokens

    @property
    def head_sizes_text(self) -> str:
        *first, last = map(str, self.int8_head_sizes)
        return f"{', '.join(first)} or {last}"


# NVIDIA's documentation of both, "Multi-Head Attention Fusion"; the edges were measured with TensorRT-RTX 1.4
LIMITS = {
    "tensorrt": Limits(int8_head_sizes=(16, 32, 64), int8_attention_length=512),
    "tensorrt_rtx": Limits(int8_head_sizes=(16, 32, 64), int8_attention_length=512),
}


def limits_of(backend: str = "auto") -> Limits:
    """Return limits of a backend; of "auto" and of CPU runtimes, which are for GPUs too, common ones."""
    if backend in LIMITS:
        return LIMITS[backend]
    common = set.intersection(*(set(each.int8_head_sizes) for each in LIMITS.values()))
    return Limits(tuple(sorted(common)), min(each.int8_attention_length for each in LIMITS.values()))
