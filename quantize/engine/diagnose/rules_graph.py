"""Rules on the ONNX file: what `check` finds, grouped, and what the whole graph says."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from qdqbench.quantize.engine.diagnose.findings import WORST_FIRST, Finding
from qdqbench.quantize.engine.diagnose.sources import Evidence, OnnxFile
from qdqbench.quantize.engine.inspection import format_nodes
from qdqbench.quantize.graph.check.check import CheckReport, Group
from qdqbench.quantize.utils.limits import limits_of

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


def of_group(report: CheckReport, group: Group, path: Path) -> Finding:
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
    templates = advice.fixes
    if first_of_all:
        templates = tuple(f"correct {first_of_all}, then {fix}" if FIX in fix else fix for fix in templates)
    fixes = with_file(templates, path)
    return Finding(
        code=group.code,
        effect=min((row.effect or "note" for row in group.rows), key=WORST_FIRST.index),
        what=what,
        why=why,
        fixes=fixes,
        nodes=nodes,
        where=format_nodes([node.removesuffix("_quant") for node in nodes]),
        files=[path.name],
    )


def with_file(texts: Sequence[str], path: Path | None) -> list[str]:
    """Fixes with the file in them, as it was given, for a shell."""
    file = str(path or "MODEL.onnx")
    fixed = str(Path(file).with_suffix(".fixed.onnx"))
    return [
        text.replace("{file}", shlex.quote(file)).replace("{fixed}", shlex.quote(fixed)) for text in texts
    ]


def graph_rules(evidence: Evidence) -> Iterator[Finding]:
    """Findings in the graph; the layer table, where there is one, says what became of them."""
    onnx = evidence.onnx
    if onnx is None:
        return
    for group in onnx.groups:
        yield _of_check(evidence, onnx, group)
    yield from _not_quantized(evidence, onnx)
    yield from _float32(evidence, onnx)
    yield from _long_attention(evidence, onnx)


def _of_check(evidence: Evidence, onnx: OnnxFile, group: Group) -> Finding:
    found = of_group(onnx.report, group, onnx.path)
    share = evidence.share_of_nodes(group.gemms) if group.gemms else None
    if share:
        found = found.model_copy(update={"share": share[0], "basis": share[1]})
    if lost := [name for name in evidence.not_int8() if name in {*group.gemms}]:
        why = f"{found.why}; the layer table shows {len(lost)} of these GEMMs outside of INT8"
        files = [*found.files, evidence.sources.name("layers")]
        found = found.model_copy(update={"why": why, "files": files})
    return found


def _not_quantized(evidence: Evidence, onnx: OnnxFile) -> Iterator[Finding]:
    """A file without Q/DQ, or with Q/DQ on a part of its linears only."""
    weighted = [name for name, product in onnx.products.items() if product.weighted]
    if onnx.integer or not weighted:
        return
    if not onnx.qdq:
        share = evidence.share_of_nodes(weighted)
        yield Finding(
            code="no-qdq",
            effect="not INT8",
            what=f"nothing is quantized: none of {len(weighted)} linears has Q/DQ",
            why="without Q/DQ only implicit calibration made INT8, which TensorRT 10 discourages, does not "
            "do for "
            "the attention and LayerNorm of transformers, and TensorRT 11 no longer has",
            fixes=[RUN],
            nodes=weighted,
            where=format_nodes(weighted),
            share=share[0] if share else None,
            basis=share[1] if share else "",
            files=[onnx.path.name],
        )
        return
    told = {name for group in onnx.groups for name in group.gemms}
    bare = [
        name for name in weighted if name in {*onnx.report.not_quantized} - told and "classifier" not in name
    ]
    share = evidence.share_of_nodes(bare)
    if share and share[0] > 0.02:
        yield Finding(
            code="float-linears",
            effect="slow",
            what=f"{len(bare)} of {len(weighted)} linears have no Q/DQ and stay in floating point",
            why="they gain nothing from INT8",
            fixes=[RUN],
            nodes=bare,
            where=format_nodes(bare),
            share=share[0],
            basis=share[1],
            files=[onnx.path.name],
        )


def _float32(evidence: Evidence, onnx: OnnxFile) -> Iterator[Finding]:
    """Q/DQ in an FP32 graph: what is not INT8 runs in FP32 in a strongly typed engine."""
    if not onnx.qdq or not onnx.types or onnx.types["FLOAT"] < sum(onnx.types.values()):
        return
    rest = [name for name in onnx.report.not_quantized if name in onnx.products]
    share = evidence.share_of_nodes(rest)
    yield Finding(
        code="fp32-compute",
        effect="slow",
        what="all floating point is FP32: a strongly typed engine runs attention, LayerNorm, GELU and what "
        "is "
        "not INT8 in FP32",
        why="weak typing (--fp16, --int8, --best) let the builder choose FP16; TensorRT 11 has strong typing "
        "only, where the file decides",
        fixes=with_file([FIX], onnx.path),
        nodes=rest,
        where=format_nodes(rest),
        share=share[0] if share else None,
        basis=share[1] if share else "",
        files=[onnx.path.name],
    )


def _long_attention(evidence: Evidence, onnx: OnnxFile) -> Iterator[Finding]:
    """INT8 attention in an engine whose profile is longer than the fused kernel takes."""
    limit = limits_of().int8_attention_length
    profiles = evidence.log.profiles if evidence.log else []
    highest = [high for profile in profiles for _, _, high in profile.values()]
    longest = max((high[1] for high in highest if len(high) > 1), default=0)
    if onnx.report.attention_quantized and longest > limit:
        yield Finding(
            code="attention-too-long",
            effect="slow",
            what=f"{len(onnx.report.attention_quantized)} INT8 attentions in an engine for up to {longest} "
            f"tokens: the fused kernel takes {limit}",
            why="beyond that the attention falls apart into single kernels",
            fixes=[
                f"build with --maxShapes of {limit} tokens, and another engine for longer inputs",
                "attention: fp16 in the recipe",
            ],
            nodes=onnx.report.attention_quantized,
            files=[onnx.path.name, evidence.sources.name("log")],
        )
