"""Marks for tests of OpenVINO's INT8 kernels, whose sums saturate on CPUs without VNNI."""

import pytest

from qdqbench.quantize.utils.system.cpu import find_cpu

needs_int8_dot = pytest.mark.skipif(
    not find_cpu().int8_dot, reason="needs a CPU with INT8 dot products (VNNI): OpenVINO saturates here"
)
BACKENDS = [pytest.param("openvino", marks=needs_int8_dot), "onnxruntime"]
