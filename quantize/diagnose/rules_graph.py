"""Rules on the ONNX file: what `check` finds, grouped, and what the whole graph says."""

from collections.abc import Iterator

from qdqbench.quantize.check.gemms import Group
from qdqbench.quantize.core.limits import limits_of
from qdqbench.quantize.diagnose.advice import FIX, RUN, of_group, with_file
from qdqbench.quantize.diagnose.evidence import Evidence
from qdqbench.quantize.diagnose.found import Found
from qdqbench.quantize.diagnose.onnx_file import OnnxFile
from qdqbench.quantize.engine.inspection import named


def graph_rules(evidence: Evidence) -> Iterator[Found]:
    """Findings in the graph; the layer table, where there is one, says what became of them."""
    onnx = evidence.onnx
    if onnx is None:
        return
    for group in onnx.groups:
        yield _of_check(evidence, onnx, group)
    yield from _not_quantized(evidence, onnx)
    yield from _float32(evidence, onnx)
    yield from _long_attention(evidence, onnx)


def _of_check(evidence: Evidence, onnx: OnnxFile, group: Group) -> Found:
    found = of_group(onnx.report, group, onnx.path)
    share = evidence.share_of_nodes(group.gemms) if group.gemms else None
    if share:
        found = found.model_copy(update={"share": share[0], "basis": share[1]})
    if lost := [name for name in evidence.not_int8() if name in {*group.gemms}]:
        why = f"{found.why}; the layer table shows {len(lost)} of these GEMMs outside of INT8"
        files = [*found.files, evidence.sources.name("layers")]
        found = found.model_copy(update={"why": why, "files": files})
    return found


def _not_quantized(evidence: Evidence, onnx: OnnxFile) -> Iterator[Found]:
    """A file without Q/DQ, or with Q/DQ on a part of its linears only."""
    weighted = [name for name, product in onnx.products.items() if product.weighted]
    if onnx.integer or not weighted:
        return
    if not onnx.qdq:
        share = evidence.share_of_nodes(weighted)
        yield Found(
            code="no-qdq",
            kind="not INT8",
            what=f"nothing is quantized: none of {len(weighted)} linears has Q/DQ",
            why="without Q/DQ only implicit calibration made INT8, which TensorRT 10 discourages, does not "
            "do for "
            "the attention and LayerNorm of transformers, and TensorRT 11 no longer has",
            fixes=[RUN],
            nodes=weighted,
            where=named(weighted),
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
        yield Found(
            code="float-linears",
            kind="slow",
            what=f"{len(bare)} of {len(weighted)} linears have no Q/DQ and stay in floating point",
            why="they gain nothing from INT8",
            fixes=[RUN],
            nodes=bare,
            where=named(bare),
            share=share[0],
            basis=share[1],
            files=[onnx.path.name],
        )


def _float32(evidence: Evidence, onnx: OnnxFile) -> Iterator[Found]:
    """Q/DQ in an FP32 graph: what is not INT8 runs in FP32 in a strongly typed engine."""
    if not onnx.qdq or not onnx.types or onnx.types["FLOAT"] < sum(onnx.types.values()):
        return
    rest = [name for name in onnx.report.not_quantized if name in onnx.products]
    share = evidence.share_of_nodes(rest)
    yield Found(
        code="fp32-compute",
        kind="slow",
        what="all floating point is FP32: a strongly typed engine runs attention, LayerNorm, GELU and what "
        "is "
        "not INT8 in FP32",
        why="weak typing (--fp16, --int8, --best) let the builder choose FP16; TensorRT 11 has strong typing "
        "only, where the file decides",
        fixes=with_file([FIX], onnx.path),
        nodes=rest,
        where=named(rest),
        share=share[0] if share else None,
        basis=share[1] if share else "",
        files=[onnx.path.name],
    )


def _long_attention(evidence: Evidence, onnx: OnnxFile) -> Iterator[Found]:
    """INT8 attention in an engine whose profile is longer than the fused kernel takes."""
    limit = limits_of().int8_attention_length
    profiles = evidence.log.profiles if evidence.log else []
    highest = [high for profile in profiles for _, _, high in profile.values()]
    longest = max((high[1] for high in highest if len(high) > 1), default=0)
    if onnx.report.attention_quantized and longest > limit:
        yield Found(
            code="attention-too-long",
            kind="slow",
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
