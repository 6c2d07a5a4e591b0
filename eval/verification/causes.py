"""The likely cause of a wrong tensor, by rule: the faults that engines of INT8 encoders are known to have."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto

from qdqbench.eval.verification.checks import kept_positions
from qdqbench.quantize.graph.index import MATMULS, GraphIndex, module_of
from qdqbench.quantize.models.families.family import Family
from qdqbench.quantize.utils.arrays import Array
from qdqbench.quantize.utils.limits import FP16_MAX

EXPLAINED = 0.3  # of the error may stay behind when a factor or an offset explains it
_MOVES = ("Cast", "Reshape", "Transpose", "Unsqueeze", "Squeeze")
_LINEAR_TAIL = (*_MOVES, "Mul", "Add", "Div", "Sub")
_NORM_PARTS = ("LayerNormalization", "ReduceMean", "Pow", "Sqrt", "Reciprocal")


@dataclass
class Deviation:
    """What is known about the first wrong tensor."""

    index: GraphIndex
    node: onnx.NodeProto  # that makes it
    family: Family
    got: Array | None  # None: the fault vanished when the tensor was marked
    expected: Array | None
    mask: Array  # [batch, length]
    nonfinite: bool


def likely_cause(evidence: Deviation) -> tuple[str, str]:
    """Cause and advice; ("unknown", ...) where no rule fits."""
    rules: tuple[Callable[[Deviation], tuple[str, str] | None], ...] = (
        _norm_in_half,
        _accumulator,
        _overflow,
        _mask,
        _partial_attention,
        _scale,
        _offset,
    )
    for rule in rules:
        if (found := rule(evidence)) is not None:
            return found
    return "unknown", "compare the kernels named above with those of another backend version, and report it"


def _norm_in_half(evidence: Deviation) -> tuple[str, str] | None:
    node = evidence.node
    norm = node.op_type in _NORM_PARTS or module_of(node.name).lower().endswith("norm")
    if not evidence.nonfinite or not norm or _behind_int8(evidence) is not None:
        return None
    return (
        "LayerNorm in FP16: its variance leaves the range of FP16",
        "give the LayerNorm `precision: fp32` in the recipe's rules",
    )


def _accumulator(evidence: Deviation) -> tuple[str, str] | None:
    if not evidence.nonfinite or (gemm := _behind_int8(evidence)) is None:
        return None
    dequantizers = [dq for name in gemm.input[:2] if (dq := _dequantizer(evidence.index, name)) is not None]
    scales = [dq.input[1] for dq in dequantizers]
    kinds = {evidence.index.initializers[s].data_type for s in scales if s in evidence.index.initializers}
    channels = any((value := evidence.index.constant(s)) is not None and value.size > 1 for s in scales)
    if channels and TensorProto.FLOAT16 in kinds:
        return (
            f"FP16 overflow of the raw INT32 accumulator of {gemm.name}: "
            "per-channel weights with FP16 scales",
            "export with FP32 scales or `export: {weight_scales: factored}`",
        )
    return (
        f"FP16 overflow behind the INT8 GEMM {gemm.name}",
        "export with `weight_scales: factored`, or keep the layer in FP32",
    )


def _overflow(evidence: Deviation) -> tuple[str, str] | None:
    if not evidence.nonfinite or evidence.expected is None:
        return None
    largest = float(np.abs(np.nan_to_num(evidence.expected.astype(np.float64), posinf=np.inf)).max())
    if largest < FP16_MAX / 4:
        return None
    return (
        f"FP16 overflow: the reference reaches {largest:.3g} here, FP16 ends at {FP16_MAX:.0f}",
        "keep the layer in FP32 with a rule `precision: fp32`",
    )


def _mask(evidence: Deviation) -> tuple[str, str] | None:
    """Samples with padding are wrong and the others are not."""
    padded = ~evidence.mask.all(axis=1)
    errors = _sample_errors(evidence)
    if errors is None or padded.all() or not padded.any():
        return None
    if np.min(errors[padded]) <= 10 * np.max(errors[~padded]) or np.min(errors[padded]) < 0.01:
        return None
    return (
        "only samples with padding are wrong: the constant or the type of the attention mask",
        "the mask must be a finite FP16 number far below every score, such as -1e4",
    )


def _sample_errors(evidence: Deviation) -> Array | None:
    """Relative error of each sample over its unpadded positions."""
    got, expected, mask = evidence.got, evidence.expected, evidence.mask
    if got is None or expected is None or got.shape[:1] != mask.shape[:1] or got.shape != expected.shape:
        return None
    rows = []
    for row in range(len(mask)):
        one = slice(row, row + 1)
        made, truth = (kept_positions(a[one], mask[one]) for a in (got, expected))
        rows.append(np.linalg.norm(made - truth) / max(float(np.linalg.norm(truth)), 1e-30))
    return np.array(rows) if np.isfinite(rows).all() else None


def _partial_attention(evidence: Deviation) -> tuple[str, str] | None:
    """q, k and v are quantized and the softmax is not, and the tensor is not ahead of the scores."""
    index, module = evidence.index, module_of(evidence.node.name)
    for softmax in (node for node in index.graph.node if node.op_type == "Softmax"):
        attention = module_of(softmax.name)
        if evidence.family.layer_of(module) != evidence.family.layer_of(attention):
            continue
        sides = [
            [_dequantizer(index, name) is not None for name in node.input]
            for node in index.graph.node
            if node.op_type == "MatMul" and module_of(node.name) == attention
        ]
        whole = any(all(side) for side in sides)
        half = any(any(side) and not all(side) for side in sides)
        after = module == attention or evidence.family.behind_attention(module)
        if whole and half and after:
            return (
                "attention is quantized in part: Q/DQ on q, k and v without Q/DQ on the softmax output",
                "quantize all of it with `attention: int8`, or nothing with `attention: fp16`",
            )
    return None


def _scale(evidence: Deviation) -> tuple[str, str] | None:
    """One factor explains the error."""
    flat = _flat(evidence)
    if flat is None:
        return None
    got, expected = flat
    factor = float((got * expected).sum() / max(float((expected**2).sum()), 1e-30))
    left = np.linalg.norm(got - factor * expected)
    if abs(factor - 1) < 0.01 or left > EXPLAINED * np.linalg.norm(got - expected):
        return None
    return (
        f"off by the constant factor {factor:.4g}: a wrong scale",
        "compare the scales of the node's Q/DQ with calibration.json",
    )


def _offset(evidence: Deviation) -> tuple[str, str] | None:
    """One number per channel explains the error."""
    flat = _flat(evidence)
    if flat is None or len(flat[0]) < 8:
        return None
    error = flat[0] - flat[1]
    if np.linalg.norm(error - error.mean(axis=0)) > EXPLAINED * np.linalg.norm(error):
        return None
    return (
        "off by one constant per channel: a lost or wrong bias",
        "check the Add behind the MatMul in the ONNX file",
    )


def _flat(evidence: Deviation) -> tuple[Array, Array] | None:
    """Finite values as [positions, channels]."""
    if evidence.got is None or evidence.expected is None or evidence.nonfinite:
        return None
    got, expected = (kept_positions(a, evidence.mask) for a in (evidence.got, evidence.expected))
    return (got.reshape(len(got), -1), expected.reshape(len(expected), -1)) if got.size else None


def _behind_int8(evidence: Deviation) -> onnx.NodeProto | None:
    """The INT8 GEMM whose result reaches the node through factors, biases, residuals and moves only."""
    waiting, seen = [evidence.node], set()
    while waiting:
        node = waiting.pop()
        if node.name in seen:
            continue
        seen.add(node.name)
        if node.op_type in MATMULS:
            if all(_dequantizer(evidence.index, name) is not None for name in node.input[:2]):
                return node
        elif node.op_type in _LINEAR_TAIL or node is evidence.node:
            producers = (evidence.index.producers.get(name) for name in node.input)
            waiting += [producer for producer in producers if producer is not None]
    return None


def _dequantizer(index: GraphIndex, name: str) -> onnx.NodeProto | None:
    """The DequantizeLinear that made a tensor before it was moved."""
    node, _ = index.origin(name, _MOVES)
    return node if node is not None and node.op_type == "DequantizeLinear" else None
