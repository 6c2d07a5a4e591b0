"""What findings of `check` mean for an engine, in plain words: one entry a code."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qdqbench.quantize.check.check import CheckReport
from qdqbench.quantize.check.gemms import Group
from qdqbench.quantize.diagnose.found import KINDS, Found
from qdqbench.quantize.engine.inspection import named

FIX = "qdqbench fix {file} -o {fixed}"
RUN = "qdqbench run int8-linears --model MODEL --task TASK --data DATA"


@dataclass(frozen=True)
class Advice:
    """Of one code. `{n}` is the number of places, `{gemms}` of GEMMs that they touch, `{all}` of all."""

    what: str
    fixes: tuple[str, ...]


ADVICE: dict[str, Advice] = {
    "invalid-onnx": Advice("the file is not valid ONNX", ("export the model again",)),
    "opset-too-low": Advice("its opset does not have what the file uses", ("export with opset 19 or newer",)),
    "unsupported-op": Advice(
        "{n} operators compute on INT8 codes themselves (QOperator or dynamic quantization), which TensorRT "
        "does not parse: it takes INT8 from Q/DQ only",
        (FIX, f"{FIX} --inputs samples.npz", "quantize again with QuantFormat.QDQ and static scales"),
    ),
    "no-plain-form": Advice(
        "{n} operators compute on INT8 codes themselves, which TensorRT does not parse and `fix` cannot "
        "rewrite",
        (
            "quantize a file that was not optimized for ONNX Runtime, with QuantFormat.QDQ and static scales",
            RUN,
        ),
    ),
    "onnxruntime-operators": Advice(
        "{n} operators are ONNX Runtime's own (com.microsoft), such as fused attention or LayerNorm, and "
        "TensorRT has no plugin for them",
        ("export again without optimizing for ONNX Runtime, and quantize that file",),
    ),
    "non-zero-zero-point": Advice(
        "{n} Q/DQ have a zero point, and TensorRT takes 0 only",
        (FIX, "quantize again symmetrically (ActivationSymmetric and WeightSymmetric in ONNX Runtime)"),
    ),
    "zero-point-shape": Advice("{n} zero points have another shape than their scale", (FIX,)),
    "bad-scale": Advice(
        "{n} scales are zero, negative or not finite", ("calibrate again with real data", RUN)
    ),
    "mixed-types": Advice(
        "{n} nodes mix datatypes, which a strongly typed parser refuses",
        ("export the model again in one datatype, and let `qdqbench fix` write the others",),
    ),
    "q-without-dq": Advice("{n} QuantizeLinear without a DequantizeLinear", (FIX,)),
    "dq-without-q": Advice(
        "{n} DequantizeLinear without a QuantizeLinear", ("export the quantized model again",)
    ),
    "not-int8": Advice("{n} Q/DQ are of another type than INT8", (FIX,)),
    "scale-mismatch": Advice("Q and DQ of {n} pairs have other scales", ("calibrate again", RUN)),
    "nan-constant": Advice("constants hold NaN ({n} in the file)", ("export from a checkpoint without NaN",)),
    "fp16-overflow": Advice(
        "{gemms} of {all} GEMMs have FP16 scales and one scale per channel: their INT32 sums overflow in "
        "FP16",
        (FIX,),
    ),
    "constant-overflows-fp16": Advice(
        "constants do not fit FP16 and become infinite, such as the fill of a mask ({n} in the file)",
        (FIX,),
    ),
    "quantized-layernorm": Advice("{n} LayerNorms read INT8, which costs accuracy", (FIX,)),
    "quantized-softmax": Advice("{n} softmaxes read or write INT8 outside of attention", (FIX,)),
    "no-qdq": Advice("nothing is quantized", (RUN,)),
    "half-quantized": Advice(
        "{gemms} of {all} GEMMs have Q/DQ on one input only, and run in floating point without a word",
        (FIX, f"{FIX} --inputs samples.npz"),
    ),
    "uint8": Advice("{n} Q/DQ are UINT8, and TensorRT multiplies in symmetric INT8 only", (FIX,)),
    "per-channel-activation": Advice(
        "{n} activations have a scale per channel, and no GEMM takes that", (FIX,)
    ),
    "wrong-weight-axis": Advice(
        "{n} weights have their scales along the wrong axis, and no GEMM takes that", (FIX,)
    ),
    "blocked-scale": Advice("{n} scales are by block, which INT8 does not have", (FIX,)),
    "partial-attention": Advice(
        "{n} attentions are partly quantized: their fused kernel is lost, which is slower than FP16, and can "
        "be "
        "wrong",
        (FIX,),
    ),
    "attention-head-size": Advice("{n} attentions in INT8 have a head size without a fused kernel", (FIX,)),
    "slow-weight-order": Advice(
        "{gemms} INT8 weights are stored [K, N]: their kernels can be slower than FP16", (FIX,)
    ),
    "split-residual": Advice(
        "{n} residuals and the linears behind them round one tensor with two scales", (FIX,)
    ),
    "quantized-residual": Advice("{n} residuals are in INT8, which costs accuracy", (FIX,)),
    "dynamic-scale": Advice(
        "{n} scales are computed at run time, and no GEMM takes that", ("store scales as constants",)
    ),
    "float-weight": Advice(
        "{n} weights are stored in floating point with Q/DQ: the file is 2 to 4 times larger", (FIX,)
    ),
    "not-checked": Advice(
        "{n} nodes were not looked into", ("inline the subgraph, function or custom operator",)
    ),
    "recipe-missing": Advice(
        "{n} places that the recipe wants in INT8 are not", ("export with this recipe again",)
    ),
    "recipe-surplus": Advice(
        "{n} places are in INT8 that the recipe keeps in floating point", ("export with this recipe again",)
    ),
}


# What `qdqbench fix` stops at: a type or a value that it would have to guess.
BLOCKERS = ("mixed-types", "bad-scale")


def of_group(report: CheckReport, group: Group, path: Path) -> Found:
    """One finding for all places of a code.

    Args:
        report: of the whole file.
        group: one of the report's.
        path: of the file, for commands.
    """
    advice = ADVICE[group.code]
    nodes = group.gemms or [row.node for row in group.rows]
    counts = {"n": len(group.rows), "gemms": len(group.gemms), "all": len(report.gemms)}
    what = advice.what
    for key, number in counts.items():
        what = what.replace(f"{{{key}}}", str(number))
    first = group.rows[0]
    why = f"{'for example ' * (len(group.rows) > 1)}{first.node}: {first.why}"
    why = "tensor cores read both operands along K" if group.code == "slow-weight-order" else why
    first_of_all = " and ".join(code for code in BLOCKERS if any(row.code == code for row in report.findings))
    fixes = with_file(advice.fixes, path)
    if first_of_all:
        fixes = [
            f"mend {first_of_all}, then {fix}" if fix.startswith("qdqbench fix") else fix for fix in fixes
        ]
    return Found(
        code=group.code,
        kind=min((row.effect or "note" for row in group.rows), key=KINDS.index),
        what=what,
        why=why,
        fixes=fixes,
        nodes=nodes,
        where=named([node.removesuffix("_quant") for node in nodes]),
        files=[path.name],
    )


def with_file(texts: Sequence[str], path: Path | None) -> list[str]:
    """Fixes with the file in them, as it was given, for a shell."""
    file = str(path or "MODEL.onnx")
    fixed = str(Path(file).with_suffix(".fixed.onnx"))
    return [
        text.replace("{file}", shlex.quote(file)).replace("{fixed}", shlex.quote(fixed)) for text in texts
    ]
