"""Operators that multiply matrices, and those that compute on INT8 codes, which TensorRT refuses."""

import onnx

from qdqbench.quantize.graph.index import ONNX_DOMAINS, GraphIndex

QDQ_DOMAINS = (*ONNX_DOMAINS, "com.microsoft")

# Products of all ways to quantize, and the input that holds the weight.
PRODUCTS = {
    "MatMul": 1, "Gemm": 1, "MatMulInteger": 1, "MatMulIntegerToFloat": 1, "DynamicQuantizeMatMul": 1,
    "QLinearMatMul": 3, "QGemm": 3, "QAttention": 1, "MatMulNBits": 1, "FusedMatMul": 1,
}  # fmt: skip
# What `qdqbench fix` writes as Q, DQ and the plain operator, and the inputs that each needs.
PLAIN_FORMS = {
    "QLinearMatMul": 8, "QLinearAdd": 7, "QLinearMul": 7, "QLinearSigmoid": 4, "QLinearLeakyRelu": 4,
    "QLinearSoftmax": 4, "QLinearReduceMean": 4, "QGemm": 6,
}  # fmt: skip
_INTEGER = {
    "DynamicQuantizeLinear", "MatMulInteger", "MatMulIntegerToFloat", "ConvInteger", "QAttention", "QGemm",
    "DynamicQuantizeMatMul", "MatMulNBits", "DynamicQuantizeLSTM", "QEmbedLayerNormalization",
}  # fmt: skip


def is_integer(node: onnx.NodeProto) -> bool:
    """Does the node compute on INT8 codes itself? It has its own finding, as nothing around it is wrong."""
    integer = node.op_type in _INTEGER or node.op_type.startswith("QLinear")
    return integer and node.domain in QDQ_DOMAINS


def missing_arguments(node: onnx.NodeProto) -> str:
    """Return what an integer operator lacks, or ''; onnx.checker knows the operators of ONNX only."""
    least = PLAIN_FORMS.get(node.op_type, PRODUCTS.get(node.op_type, 0) + 1)
    if not is_integer(node) or (len(node.input) >= least and node.output):
        return ""
    return f"{node.op_type} has {len(node.input)} inputs of {least} and {len(node.output)} outputs"


def has_plain_form(index: GraphIndex, node: onnx.NodeProto) -> bool:
    """Whether `qdqbench fix` rewrites the node: what `quantize_static` and `quantize_dynamic` write."""
    if node.op_type == "MatMulInteger":
        source = index.producers.get(node.input[0])
        return source is not None and source.op_type == "DynamicQuantizeLinear"
    if node.op_type == "DynamicQuantizeLinear":
        readers = index.consumers.get(node.output[0], [])
        return all(reader.op_type == "MatMulInteger" for reader in readers)
    return node.op_type in PLAIN_FORMS
