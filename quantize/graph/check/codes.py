"""Every finding of `check`: its stable code, severity, effect and what to do about it."""

import onnx

from qdqbench.quantize.utils.limits import limits_of
from qdqbench.quantize.utils.results import Effect, FindingRow, Severity

# "Measured" in the modules of `check` means: parsed and built with TensorRT-RTX 1.7, strongly typed.
CODES: dict[str, tuple[Severity, Effect, str]] = {
    "invalid-onnx": (
        "error",
        "refused",
        "correct the node, or export the model again; no other rule was applied",
    ),
    "opset-too-low": ("error", "refused", "export with opset 19 or newer (20 is what qdqbench writes)"),
    "not-checked": ("warning", "note", "inline the subgraph, function or custom operator to have it checked"),
    "unsupported-op": (
        "error",
        "refused",
        "use QuantizeLinear and DequantizeLinear with constant scales instead, as `qdqbench fix` does",
    ),
    "no-plain-form": (
        "error",
        "refused",
        "quantize with QuantFormat.QDQ and static scales a file that was not optimized for ONNX Runtime",
    ),
    "onnxruntime-operators": (
        "error",
        "refused",
        "export again without optimizing for ONNX Runtime, and quantize that file",
    ),
    "no-qdq": ("error", "not INT8", "export the quantized model, not its FP16 or FP32 twin"),
    "half-quantized": ("error", "not INT8", "put Q/DQ on both inputs or on neither"),
    "partial-attention": (
        "error",
        "slow",
        "put Q/DQ on all of q, k, v, the softmax output and the output, or none",
    ),
    "attention-head-size": (
        "warning",
        "slow",
        f"keep this attention in FP16; INT8 attention needs head size {limits_of().head_sizes_text}",
    ),
    "bad-scale": (
        "error",
        "refused",
        "calibrate this quantizer again; every scale must be finite and above 0",
    ),
    "dynamic-scale": ("error", "not INT8", "store the scale and the zero point as constants"),
    "scale-mismatch": (
        "error",
        "wrong",
        "give the Q and the DQ of a pair the same scale, zero point and axis",
    ),
    "non-zero-zero-point": ("error", "refused", "quantize symmetrically, with zero point 0"),
    "zero-point-shape": ("error", "refused", "give the zero point the shape of the scale, all zeros"),
    "uint8": ("error", "not INT8", "use an INT8 zero point of 0 (symmetric quantization)"),
    "not-int8": ("error", "refused", "use INT8 for Q/DQ, and leave biases in floating point"),
    "blocked-scale": ("error", "refused", "use one scale per tensor, or per output channel of a weight"),
    "per-channel-activation": ("error", "not INT8", "use one scale for the whole activation"),
    "wrong-weight-axis": ("error", "not INT8", "put the weight's scales along the output channels"),
    "fp16-overflow": (
        "error",
        "wrong",
        "keep the scales in FP32, use one scale per weight, or the factored form (scalar scale, then Mul)",
    ),
    "float-weight": ("warning", "note", "store the weight as INT8 followed by DequantizeLinear alone"),
    "slow-weight-order": (
        "warning",
        "slow",
        "store the codes [N, K] and put a Transpose [1, 0] behind the DequantizeLinear, or export with "
        "qdqbench",
    ),
    "q-without-dq": ("error", "wrong", "follow QuantizeLinear by DequantizeLinear with the same scale"),
    "dq-without-q": ("error", "wrong", "feed DequantizeLinear from QuantizeLinear or from an INT8 constant"),
    "quantized-layernorm": ("error", "wrong", "take the Q/DQ off LayerNorm, or --allow quantized-layernorm"),
    "quantized-softmax": ("error", "wrong", "take the Q/DQ off softmax, or --allow quantized-softmax"),
    "quantized-residual": (
        "warning",
        "note",
        "take the Q/DQ off the residual, or --allow quantized-residual",
    ),
    "split-residual": (
        "warning",
        "slow",
        "give the residual and the linears that read the same tensor one scale, or take its Q/DQ off",
    ),
    "mixed-types": (
        "error",
        "refused",
        "insert a Cast, or store the constant in the type of the other input",
    ),
    "constant-overflows-fp16": (
        "error",
        "wrong",
        "use a finite value that FP16 holds, such as -1e4 for a mask",
    ),
    "nan-constant": ("error", "wrong", "export again from a checkpoint without NaN"),
    "recipe-missing": ("error", "not INT8", "export with this recipe again, or take the module out of it"),
    "recipe-surplus": (
        "error",
        "wrong",
        "export with this recipe again, or add a rule that quantizes the module",
    ),
}


def finding(
    code: str,
    place: onnx.NodeProto | str,
    why: str,
    severity: Severity | None = None,
    effect: Effect | None = None,
) -> FindingRow:
    """Create a finding at a node or a name; `severity` and `effect` override those of its code."""
    default, usual, fix = CODES[code]
    name = place if isinstance(place, str) else finding_label(place)
    return FindingRow(
        severity=severity or default, effect=effect or usual, code=code, node=name, why=why, fix=fix
    )


def finding_label(node: onnx.NodeProto) -> str:
    """Name of a node; one without a name is called by its operator and first output."""
    return str(node.name) or f"{node.op_type} (output {next(iter(node.output), '')!r})"


def type_name(elem_type: int) -> str:
    """Return `FLOAT16` for 10, and so on; the number itself for one that ONNX does not know."""
    try:
        return str(onnx.TensorProto.DataType.Name(elem_type))
    except ValueError:
        return f"type {elem_type}"
