"""Limits of backends and number formats, for recipes, checks and measurements."""

from typing import Literal

BackendName = Literal["tensorrt", "tensorrt_rtx", "cuda", "openvino", "onnxruntime"]
BackendChoice = Literal["auto", "tensorrt", "tensorrt_rtx", "cuda", "openvino", "onnxruntime"]
CPU_BACKENDS: tuple[BackendName, ...] = ("openvino", "onnxruntime")  # `find_best` takes one
TENSORRT: tuple[BackendName, ...] = ("tensorrt", "tensorrt_rtx")
INT8_RESIDUALS: tuple[BackendName, ...] = ("cuda", *TENSORRT)  # have kernels that read them


def takes_fp32_graph(backend: str) -> bool:
    """Return whether a backend takes a graph in FP32, not rewritten, and chooses the other datatypes."""
    return backend not in TENSORRT


def has_profiles(backend: str) -> bool:
    """Return whether kernels are tuned for each profile; else one engine takes any shape as well."""
    return backend in TENSORRT


FP16_MAX = 65504.0  # largest finite number of FP16

# of a fused INT8 attention in TensorRT and TensorRT-RTX: NVIDIA, "Multi-Head Attention Fusion"; the edges
# were measured with TensorRT-RTX 1.4
INT8_HEAD_SIZES = (16, 32, 64)  # with any other it falls apart
HEAD_SIZES_TEXT = "16, 32 or 64"
MOST_KERNEL_HEAD = 128  # channels of a head in INT8 in backend cuda, which takes any number up to it
INT8_ATTENTION_LENGTH = 512  # tokens
ATTENTION_HEAD_SIZES = range(16, 257, 8)  # of ONNX's Attention in FP16 (`lint/operators.json`)
ATTENTION_HEADS_TEXT = "16 to 256 in steps of 8"
