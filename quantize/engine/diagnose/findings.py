"""Findings of `check` and `diagnose`: their effect, their words, and the files that they come from."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from qdqbench.quantize.engine.inspection import format_nodes
from qdqbench.quantize.graph.check.check import CheckReport, Group
from qdqbench.quantize.utils.results import Effect
from qdqbench.quantize.utils.schema import Strict, Tabular

WORST_FIRST: tuple[Effect, ...] = get_args(Effect)
EFFECTS: dict[Effect, str] = {
    "refused": "no engine is built",
    "wrong": "answers can be wrong",
    "not INT8": "no gain from INT8",
    "not portable": "ONNX Runtime refuses the file",
    "slow": "time",
    "note": "worth knowing",
}
FIX = "qdqbench fix {file} -o {fixed}"
RUN = "qdqbench run int8-linears --model MODEL --task TASK --data DATA"
BLOCKERS = ("mixed-types", "bad-scale")  # that stop `fix`: a type or a value that it would have to guess
# Words of each code of `check`: {n} places, which touch {gemms} of {all} GEMMs.
WORDS = {
    "invalid-onnx": "the file is not valid ONNX",
    "opset-too-low": "its opset does not have what the file uses",
    "unsupported-op": "{n} operators compute on INT8 codes themselves (QOperator or dynamic quantization), "
    "which TensorRT does not parse: it takes INT8 from Q/DQ only",
    "no-plain-form": "{n} operators compute on INT8 codes themselves, which TensorRT does not parse and "
    "`fix` cannot rewrite",
    "onnxruntime-operators": "{n} operators are ONNX Runtime's own (com.microsoft), such as fused attention "
    "or LayerNorm, and TensorRT has no plugin for them",
    "non-zero-zero-point": "{n} Q/DQ have a zero point, and TensorRT takes 0 only",
    "zero-point-shape": "{n} zero points have another shape than their scale",
    "bad-scale": "{n} scales are zero, negative or not finite",
    "mixed-types": "{n} nodes mix datatypes, which a strongly typed parser refuses",
    "q-without-dq": "{n} QuantizeLinear without a DequantizeLinear",
    "dq-without-q": "{n} DequantizeLinear without a QuantizeLinear",
    "not-int8": "{n} Q/DQ are of another type than INT8",
    "scale-mismatch": "Q and DQ of {n} pairs have other scales",
    "nan-constant": "constants hold NaN ({n} in the file)",
    "fp16-overflow": "{gemms} of {all} GEMMs have FP16 scales and one scale per channel: their INT32 sums "
    "overflow in FP16",
    "constant-overflows-fp16": "constants do not fit FP16 and become infinite, such as the fill of a mask "
    "({n} in the file)",
    "quantized-layernorm": "{n} LayerNorms read INT8, which costs accuracy",
    "quantized-softmax": "{n} softmaxes read or write INT8 outside of attention",
    "no-qdq": "nothing is quantized",
    "half-quantized": "{gemms} of {all} GEMMs have Q/DQ on one input only, and run in floating point "
    "without a word",
    "uint8": "{n} Q/DQ are UINT8, and TensorRT multiplies in symmetric INT8 only",
    "per-channel-activation": "{n} activations have a scale per channel, and no GEMM takes that",
    "wrong-weight-axis": "{n} weights have their scales along the wrong axis, and no GEMM takes that",
    "blocked-scale": "{n} scales are by block, which INT8 does not have",
    "partial-attention": "{n} attentions are partly quantized: their fused kernel is lost, which is slower "
    "than FP16, and can be wrong",
    "attention-head-size": "{n} attentions in INT8 have a head size without a fused kernel",
    "slow-weight-order": "{gemms} INT8 weights are stored [K, N]: their kernels can be slower than FP16",
    "split-residual": "{n} residuals and the linears behind them round one tensor with two scales",
    "quantized-residual": "{n} residuals are in INT8, which costs accuracy",
    "dynamic-scale": "{n} scales are computed at run time, and no GEMM takes that",
    "float-weight": "{n} weights are stored in floating point with Q/DQ: the file is 2 to 4 times larger",
    "not-checked": "{n} nodes were not looked into",
    "recipe-missing": "{n} places that the recipe wants in INT8 are not",
    "recipe-surplus": "{n} places are in INT8 that the recipe keeps in floating point",
}
FIXES: dict[str, tuple[str, ...]] = {  # by code; else FIX alone
    "invalid-onnx": ("export the model again",),
    "opset-too-low": ("export with opset 19 or newer",),
    "unsupported-op": (
        FIX,
        f"{FIX} --inputs samples.npz",
        "quantize again with QuantFormat.QDQ and static scales",
    ),
    "no-plain-form": (
        "quantize a file that was not optimized for ONNX Runtime, with QuantFormat.QDQ and static scales",
        RUN,
    ),
    "onnxruntime-operators": ("export again without optimizing for ONNX Runtime, and quantize that file",),
    "non-zero-zero-point": (
        FIX,
        "quantize again symmetrically (ActivationSymmetric and WeightSymmetric in ONNX Runtime)",
    ),
    "bad-scale": ("calibrate again with real data", RUN),
    "mixed-types": ("export the model again in one datatype, and let `qdqbench fix` write the others",),
    "dq-without-q": ("export the quantized model again",),
    "scale-mismatch": ("calibrate again", RUN),
    "nan-constant": ("export from a checkpoint without NaN",),
    "no-qdq": (RUN,),
    "half-quantized": (FIX, f"{FIX} --inputs samples.npz"),
    "dynamic-scale": ("store scales as constants",),
    "not-checked": ("inline the subgraph, function or custom operator",),
    "recipe-missing": ("export with this recipe again",),
    "recipe-surplus": ("export with this recipe again",),
}


class Finding(Strict):
    """One thing that is wrong, for all the nodes that have it."""

    code: str
    effect: Effect
    what: str  # one sentence in plain words
    why: str  # what it does, with an example where the file has one
    fixes: list[str]  # commands, or edits; the first is the shortest way
    nodes: list[str] = []  # all of them, by the names of the file
    where: str = ""  # the same in few words
    share: float | None = None  # of what `basis` says, touched by this
    basis: str = ""
    files: list[str] = []  # names of the files that show it

    @property
    def severity(self) -> str:
        """As in `check`: an error breaks or silently changes the engine."""
        return "warning" if self.effect in ("slow", "note") else "error"


class SourceRow(Strict):
    name: str
    kind: str
    what: str  # in a few words


class Diagnosis(Tabular):
    files: list[SourceRow]
    findings: list[Finding]
    ranked_by: str  # how the order came about
    joined: list[str] = []  # which files were read together, and by what

    def rows(self) -> list[Finding]:
        return self.findings

    @property
    def errors(self) -> list[Finding]:
        return [row for row in self.findings if row.severity == "error"]


def group_finding(report: CheckReport, group: Group, path: Path) -> Finding:
    """Return one finding for all places of a code; `path` goes into commands."""
    nodes = group.gemms or [row.node for row in group.rows]
    what, templates = WORDS[group.code], FIXES.get(group.code, (FIX,))
    for key, number in (("n", group.rows), ("gemms", group.gemms), ("all", report.gemms)):
        what = what.replace(f"{{{key}}}", str(len(number)))
    first = group.rows[0]
    why = f"{'for example ' * (len(group.rows) > 1)}{first.node}: {first.why}"
    why = "tensor cores read both operands along K" if group.code == "slow-weight-order" else why
    first_of_all = " and ".join(code for code in BLOCKERS if any(row.code == code for row in report.findings))
    if first_of_all:
        templates = tuple(f"correct {first_of_all}, then {fix}" if FIX in fix else fix for fix in templates)
    return Finding(
        code=group.code,
        effect=min((row.effect or "note" for row in group.rows), key=WORST_FIRST.index),
        what=what,
        why=why,
        fixes=with_file(templates, path),
        nodes=nodes,
        where=format_nodes([node.removesuffix("_quant") for node in nodes]),
        files=[path.name],
    )


def with_file(texts: Sequence[str], path: Path | None) -> list[str]:
    file = str(path or "MODEL.onnx")
    fixed = str(Path(file).with_suffix(".fixed.onnx"))
    return [
        text.replace("{file}", shlex.quote(file)).replace("{fixed}", shlex.quote(fixed)) for text in texts
    ]
