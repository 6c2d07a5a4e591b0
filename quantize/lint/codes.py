"""Every finding of `check`: its stable code, severity, effect and what to do about it."""

from typing import Literal

import onnx

from qdqbench.quantize.utils.limits import HEAD_SIZES_TEXT
from qdqbench.quantize.utils.schema import Strict, field

Severity = Literal["error", "warning"]
# What a finding does to an engine of TensorRT, in the order in which it matters. "not portable": ONNX Runtime
# refuses the file, TensorRT does not.
Effect = Literal["refused", "wrong", "not INT8", "not portable", "slow", "note"]


class FindingRow(Strict):
    """One finding of `check`."""

    severity: Severity = field("Severity; an `error` makes the exit status 2.")
    effect: Effect = field(
        "Effect on a TensorRT engine: it is not built, predictions can be wrong, INT8 does not happen, ONNX "
        "Runtime alone refuses the file, time, a note."
    )
    code: str = field("Stable short name of the rule.")
    node: str = field("ONNX node or tensor.")
    why: str = field("Cause.")
    fix: str = field("Advice.")


# "Measured" in the modules of `check` means: parsed and built with TensorRT-RTX 1.7, strongly typed.
_FIXES: dict[tuple[Severity, Effect], dict[str, str]] = {
    ("error", "refused"): {
        "invalid-onnx": "correct the node, or export the model again; no other rule was applied",
        "opset-too-low": "export with opset 19 or newer (20 is what qdqbench writes)",
        "unsupported-op": "use QuantizeLinear and DequantizeLinear with constant scales instead, as "
        "`qdqbench fix` does",
        "no-plain-form": "quantize with QuantFormat.QDQ and static scales a file that was not optimized for "
        "ONNX Runtime",
        "onnxruntime-operators": "export again without optimizing for ONNX Runtime, and quantize that file",
        "bad-scale": "calibrate this quantizer again; every scale must be finite and above 0",
        "non-zero-zero-point": "quantize symmetrically, with zero point 0",
        "zero-point-shape": "give the zero point the shape of the scale, all zeros",
        "not-int8": "use INT8 for Q/DQ, and leave biases in floating point",
        "blocked-scale": "use one scale per tensor, or per output channel of a weight",
        "mixed-types": "insert a Cast, or store the constant in the type of the other input",
    },
    ("error", "wrong"): {
        "scale-mismatch": "give the Q and the DQ of a pair the same scale, zero point and axis",
        "fp16-overflow": "keep the scales in FP32, use one scale per weight, or the factored form (scalar "
        "scale, then Mul)",
        "q-without-dq": "follow QuantizeLinear by DequantizeLinear with the same scale",
        "dq-without-q": "feed DequantizeLinear from QuantizeLinear or from an INT8 constant",
        "quantized-layernorm": "take the Q/DQ off LayerNorm, or --allow quantized-layernorm",
        "quantized-softmax": "take the Q/DQ off softmax, or --allow quantized-softmax",
        "constant-overflows-fp16": "use a finite value that FP16 holds, such as -1e4 for a mask",
        "nan-constant": "export again from a checkpoint without NaN",
        "recipe-surplus": "export with this recipe again, or add a rule that quantizes the module",
    },
    ("error", "not INT8"): {
        "no-qdq": "export the quantized model, not its FP16 or FP32 twin",
        "half-quantized": "put Q/DQ on both inputs or on neither",
        "dynamic-scale": "store the scale and the zero point as constants",
        "uint8": "use an INT8 zero point of 0 (symmetric quantization)",
        "per-channel-activation": "use one scale for the whole activation",
        "wrong-weight-axis": "put the weight's scales along the output channels",
        "recipe-missing": "export with this recipe again, or take the module out of it",
    },
    ("error", "slow"): {
        "partial-attention": "put Q/DQ on all of q, k, v, the softmax output and the output, or none"
    },
    ("warning", "slow"): {
        "attention-head-size": "keep this attention in FP16; INT8 attention needs head size "
        + HEAD_SIZES_TEXT,
        "slow-weight-order": "store the codes [N, K] and put a Transpose [1, 0] after the DequantizeLinear, "
        "or export with qdqbench",
        "split-residual": "give the residual and the linears that read the same tensor one scale, or take "
        "its Q/DQ off",
    },
    ("warning", "note"): {
        "not-checked": "inline the subgraph, function or custom operator to have it checked",
        "float-weight": "store the weight as INT8 followed by DequantizeLinear alone",
        "quantized-residual": "take the Q/DQ off the residual, or --allow quantized-residual",
    },
}
CODES = {code: (*kind, fix) for kind, fixes in _FIXES.items() for code, fix in fixes.items()}


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
    """Return the name of a node, or its operator and first output."""
    return str(node.name) or f"{node.op_type} (output {next(iter(node.output), '')!r})"
