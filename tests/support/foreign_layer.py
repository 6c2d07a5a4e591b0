"""The tiny layer in FP32 without Q/DQ, and what ONNX Runtime's quantizers make of it."""

import numpy as np
import onnx

from qdqbench.quantize.lint.rebuild import remove_qdq

from .tiny_layer import HIDDEN, LENGTH, healthy


def float_layer(form="fp32"):
    """As an exporter writes it; samples are [1, LENGTH, HIDDEN] with a mask that is 0 or 1."""
    model = healthy(form, int8_attention=False)
    remove_qdq(model)
    return model


def samples(count=4):
    rng = np.random.default_rng(1)
    mask = np.zeros((1, 1, 1, LENGTH), np.float32)
    shape = (1, LENGTH, HIDDEN)
    return [{"x": rng.standard_normal(shape).astype(np.float32), "mask": mask} for _ in range(count)]


class Reader:
    """A CalibrationDataReader of onnxruntime."""

    def __init__(self):
        self.left = samples()

    def get_next(self):
        return self.left.pop() if self.left else None


def write_static(folder, name, **options):
    """`quantize_static` on the layer."""
    from onnxruntime.quantization import quantize_static

    onnx.save(float_layer(), folder / "float.onnx")
    quantize_static(str(folder / "float.onnx"), str(folder / name), Reader(), **options)
    return folder / name


def write_dynamic(folder, name, form="fp32"):
    """`quantize_dynamic` on the layer."""
    from onnxruntime.quantization import quantize_dynamic

    onnx.save(float_layer(form), folder / "float.onnx")
    quantize_dynamic(str(folder / "float.onnx"), str(folder / name))
    return folder / name
