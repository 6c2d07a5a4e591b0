"""What findings of `check` mean for an engine, in plain words: data, one entry a code."""

from dataclasses import dataclass

from qdqbench.quantize.diagnose.found import Kind

FIX = "qdqbench fix {file} -o {stem}.fixed.onnx"
RUN = "qdqbench run int8-linears --model MODEL --task TASK --data DATA"


@dataclass(frozen=True)
class Advice:
    """Of one code. `{n}` is the number of places, `{gemms}` of GEMMs that they touch, `{all}` of all."""

    kind: Kind
    what: str
    fixes: tuple[str, ...]


ADVICE: dict[str, Advice] = {
    "invalid-onnx": Advice("refused", "the file is not valid ONNX", ("export the model again",)),
    "opset-too-low": Advice(
        "refused", "its opset does not have what the file uses", ("export with opset 19 or newer",)
    ),
    "unsupported-op": Advice(
        "refused",
        "{n} operators compute on INT8 codes themselves (QOperator or dynamic quantization), which TensorRT "
        "does not parse: it takes INT8 from Q/DQ only",
        (FIX, f"{FIX} --inputs samples.npz", "quantize again with QuantFormat.QDQ and static scales"),
    ),
    "non-zero-zero-point": Advice(
        "refused",
        "{n} Q/DQ have a zero point, and TensorRT takes 0 only",
        (FIX, "quantize again symmetrically (ActivationSymmetric and WeightSymmetric in ONNX Runtime)"),
    ),
    "zero-point-shape": Advice("refused", "{n} zero points have another shape than their scale", (FIX,)),
    "bad-scale": Advice(
        "refused", "{n} scales are zero, negative or not finite", ("calibrate again with real data", RUN)
    ),
    "mixed-types": Advice(
        "refused",
        "{n} nodes mix datatypes, which a strongly typed parser refuses",
        ("export the model again in one datatype, and let `qdqbench fix` write the others",),
    ),
    "q-without-dq": Advice("refused", "{n} QuantizeLinear without a DequantizeLinear", (FIX,)),
    "dq-without-q": Advice(
        "refused", "{n} DequantizeLinear without a QuantizeLinear", ("export the quantized model again",)
    ),
    "not-int8": Advice("refused", "{n} Q/DQ are of another type than INT8", (FIX,)),
    "scale-mismatch": Advice("wrong", "Q and DQ of {n} pairs have other scales", ("calibrate again", RUN)),
    "nan-constant": Advice(
        "wrong", "constants hold NaN ({n} in the file)", ("export from a checkpoint without NaN",)
    ),
    "fp16-overflow": Advice(
        "wrong",
        "{gemms} of {all} GEMMs have FP16 scales and one scale per channel: their INT32 sums overflow in "
        "FP16",
        (FIX,),
    ),
    "constant-overflows-fp16": Advice(
        "wrong",
        "constants do not fit FP16 and become infinite, such as the fill of a mask ({n} in the file)",
        (FIX,),
    ),
    "quantized-layernorm": Advice("wrong", "{n} LayerNorms read INT8, which costs accuracy", (FIX,)),
    "quantized-softmax": Advice("wrong", "{n} softmaxes read or write INT8 outside of attention", (FIX,)),
    "no-qdq": Advice("not INT8", "nothing is quantized", (RUN,)),
    "half-quantized": Advice(
        "not INT8",
        "{gemms} of {all} GEMMs have Q/DQ on one input only, and run in floating point without a word",
        (FIX, f"{FIX} --inputs samples.npz"),
    ),
    "uint8": Advice("not INT8", "{n} Q/DQ are UINT8, and TensorRT multiplies in symmetric INT8 only", (FIX,)),
    "per-channel-activation": Advice(
        "not INT8", "{n} activations have a scale per channel, and no GEMM takes that", (FIX,)
    ),
    "wrong-weight-axis": Advice(
        "not INT8", "{n} weights have their scales along the wrong axis, and no GEMM takes that", (FIX,)
    ),
    "blocked-scale": Advice("not INT8", "{n} scales are by block, which INT8 does not have", (FIX,)),
    "partial-attention": Advice(
        "slow",
        "{n} attentions are partly quantized: their fused kernel is lost, which is slower than FP16, and can "
        "be "
        "wrong",
        (FIX,),
    ),
    "attention-head-size": Advice(
        "slow", "{n} attentions in INT8 have a head size without a fused kernel", (FIX,)
    ),
    "slow-weight-order": Advice(
        "slow", "{gemms} INT8 weights are stored [K, N]: their kernels can be slower than FP16", (FIX,)
    ),
    "split-residual": Advice(
        "slow", "{n} residuals and the linears behind them round one tensor with two scales", (FIX,)
    ),
    "quantized-residual": Advice("note", "{n} residuals are in INT8, which costs accuracy", (FIX,)),
    "dynamic-scale": Advice("note", "{n} scales are computed at run time", ("store scales as constants",)),
    "float-weight": Advice(
        "note", "{n} weights are stored in floating point with Q/DQ: the file is 2 to 4 times larger", (FIX,)
    ),
    "not-checked": Advice(
        "note", "{n} nodes were not looked into", ("inline the subgraph, function or custom operator",)
    ),
}
