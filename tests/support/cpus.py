"""CPUs whose INT8 kernels OpenVINO makes exact; on others sums of UINT8 x INT8 saturate."""

import pytest

from qdqbench.quantize.utils.system.cpu import find_cpu

needs_int8_dot = pytest.mark.skipif(
    not find_cpu().int8_dot, reason="needs a CPU with INT8 dot products (VNNI): OpenVINO saturates here"
)
BACKENDS = [pytest.param("openvino", marks=needs_int8_dot), "onnxruntime"]
