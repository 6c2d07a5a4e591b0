"""Rules on the ONNX file: what `check` finds, grouped, and what the whole graph says."""

from collections.abc import Iterator

from qdqbench.quantize.core.limits import limits_of
from qdqbench.quantize.diagnose.advice import ADVICE, FIX, RUN
from qdqbench.quantize.diagnose.evidence import Evidence
from qdqbench.quantize.diagnose.found import Found
from qdqbench.quantize.diagnose.onnx_file import Group, OnnxFile
from qdqbench.quantize.engine.inspection import named


def graph_rules(evidence: Evidence) -> Iterator[Found]:
    """Findings in the graph; the layer table, where there is one, says what became of them."""
    onnx = evidence.onnx
    if onnx is None:
        return
    for group in onnx.groups:
        yield _of_check(evidence, onnx, group)
    yield from _runtimes_own(onnx)
    yield from _not_quantized(evidence, onnx)
    yield from _float32(evidence, onnx)
    yield from _long_attention(evidence, onnx)


def with_file(texts: tuple[str, ...] | list[str], onnx: OnnxFile | None) -> list[str]:
    """Fixes with the names of the file in them."""
    file = onnx.path.name if onnx else "MODEL.onnx"
    stem = onnx.path.stem if onnx else "MODEL"
    return [text.replace("{file}", file).replace("{stem}", stem) for text in texts]


def _of_check(evidence: Evidence, onnx: OnnxFile, group: Group) -> Found:
    advice = ADVICE[group.code]
    nodes = group.products or [row.node for row in group.rows]
    counts = {"n": len(group.rows), "gemms": len(group.products), "all": len(onnx.products)}
    what = advice.what
    for key, number in counts.items():
        what = what.replace(f"{{{key}}}", str(number))
    first = group.rows[0]
    why = first.why if len(group.rows) == 1 else f"for example {first.node}: {first.why}"
    why = "tensor cores read both operands along K" if group.code == "slow-weight-order" else why
    certain = any(row.severity == "error" for row in group.rows) or advice.kind == "slow"
    lost = [name for name in evidence.not_int8() if name in {*group.products}]
    if lost:
        why += f"; the layer table shows {len(lost)} of these GEMMs outside of INT8"
    share = evidence.share_of_nodes(group.products) if group.products else None
    return Found(
        code=group.code,
        kind=advice.kind if certain else "note",
        what=what,
        why=why,
        fixes=with_file(advice.fixes, onnx),
        nodes=nodes,
        where=named([node.removesuffix("_quant") for node in nodes]),
        share=share[0] if share else None,
        basis=share[1] if share else "",
        files=[onnx.path.name, *([evidence.sources.name("layers")] if lost else [])],
    )


def _runtimes_own(onnx: OnnxFile) -> Iterator[Found]:
    """Fused operators of a graph that ONNX Runtime or Optimum has optimized."""
    if onnx.runtimes_own:
        yield Found(
            code="onnxruntime-operators",
            kind="refused",
            what=f"{len(onnx.runtimes_own)} operators are ONNX Runtime's own (com.microsoft), such as fused "
            "attention or LayerNorm",
            why="ONNX Runtime's or Optimum's optimizer wrote them, and TensorRT has no plugin for them",
            fixes=["export again without optimizing for ONNX Runtime, and quantize that file"],
            nodes=onnx.runtimes_own,
            where=named(onnx.runtimes_own),
            files=[onnx.path.name],
        )


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
    told = {name for group in onnx.groups for name in group.products}
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
        fixes=with_file([FIX], onnx),
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
