"""Rules on an engine: its layer table, its profile, its times, its version."""

from collections.abc import Iterable, Iterator
from statistics import median

from qdqbench.quantize.engine.diagnose.findings import Finding
from qdqbench.quantize.engine.diagnose.rules_graph import FIX, RUN, with_file
from qdqbench.quantize.engine.diagnose.sources import Evidence, Share
from qdqbench.quantize.engine.facts import EngineFacts
from qdqbench.quantize.engine.hazards import find_hazards
from qdqbench.quantize.engine.inspection import format_nodes
from qdqbench.quantize.engine.kernels import block_of_node, kernel_kind, kernel_label
from qdqbench.quantize.engine.layers import NotInt8, base_name, is_attention
from qdqbench.quantize.engine.trtexec.read import Times
from qdqbench.quantize.utils.limits import limits_of
from qdqbench.quantize.utils.results import Effect, LayerRow

_LARGE = 0.2  # a share of a query's time that is no small thing
_SMALL = 0.01  # a share of the time below which copies are not worth a finding
DEQUANTIZED = ("dequantizes both", "dequantizes weights")  # Q/DQ in the file, and no INT8 kernel


def engine_rules(evidence: Evidence, explained: set[str]) -> Iterator[Finding]:
    """Findings in the layer table, the profile and the times.

    Args:
        explained: GEMMs that a finding in the graph already says to be outside of INT8.
    """
    facts = evidence.facts
    if facts is not None:
        yield from _gemms(evidence, facts, explained)
        yield from _attention(evidence, facts)
        yield from _copies(evidence, facts)
        yield from _norms(evidence, facts)
    elif evidence.sources.profile:
        yield from _copies_by_name(evidence)
    yield from _version(evidence)
    yield from _times(evidence)


def _found(  # noqa: PLR0913, PLR0917
    evidence: Evidence, code: str, effect: Effect, what: str, why: str, fixes: list[str],
    nodes: list[str] | None = None, share: Share | None = None,
) -> Finding:  # fmt: skip
    return Finding(
        code=code,
        effect=effect,
        what=what,
        why=why,
        fixes=with_file(fixes, evidence.sources.paths.get("onnx")),
        nodes=nodes or [],
        where=format_nodes(nodes) if nodes else "",
        share=share[0] if share else None,
        basis=share[1] if share else "",
        files=[name for name in (evidence.sources.name("layers"), _timed(evidence)) if name],
    )


def _timed(evidence: Evidence) -> str:
    return evidence.sources.name("profile") if evidence.joined_time else ""


def _gemms(evidence: Evidence, facts: EngineFacts, explained: set[str]) -> Iterator[Finding]:
    inspection = evidence.inspection
    assert inspection is not None
    total = len(facts.linears)
    if rest := [node for node in inspection.proof.not_int8 if node not in explained]:
        reasons: dict[NotInt8, list[str]] = {}
        for node in rest:
            reasons.setdefault(inspection.reasons[node], []).append(node)
        for why, nodes in reasons.items():
            inside = any(block_of_node(node).startswith("layer.") for node in nodes)
            effect: Effect = "not INT8" if why.cause in DEQUANTIZED else "slow" if inside else "note"
            yield _found(
                evidence, "engine-not-int8", effect,
                f"{len(nodes)} of {total or inspection.gemms} linears of the engine do not multiply in INT8",
                f"each {why}", ["qdqbench check {file}"], nodes, evidence.share_of_nodes(nodes),
            )  # fmt: skip
    if facts.raw_outputs:
        yield _found(
            evidence, "raw-int32-as-fp16", "wrong",
            f"{len(facts.raw_outputs)} of {total} INT8 GEMMs store their INT32 sums as FP16 before they are "
            "scaled",
            "sums over 65504 become infinite, and the answers NaN",
            [FIX, "export.weight_scales: factored in the recipe"],
            facts.raw_outputs, evidence.share_of_nodes(facts.raw_outputs),
        )  # fmt: skip
    if facts.fp32_outputs:
        yield _found(
            evidence, "gemm-writes-fp32", "slow",
            f"{len(facts.fp32_outputs)} of {len(facts.int8)} INT8 GEMMs write FP32",
            "that is twice the bytes of FP16, in the kernels that move the most",
            [f"{FIX} --weights factored",
             "export.weight_scales: factored in the recipe"],
            facts.fp32_outputs, evidence.share_of_nodes(facts.fp32_outputs),
        )  # fmt: skip


def _attention(evidence: Evidence, facts: EngineFacts) -> Iterator[Finding]:
    apart = facts.attentions - len(facts.fused)
    if apart > 0:
        rows = [row for row in facts.rows if kernel_kind(row) == "softmax"]
        onnx = evidence.onnx
        partial = [group for group in (onnx.groups if onnx else []) if group.code == "partial-attention"]
        limits = limits_of()
        if partial:
            why = f"the graph says why: {partial[0].rows[0].why}"
        elif onnx and onnx.types["FLOAT"] == sum(onnx.types.values()) > 0:
            why = "the graph is FP32, and the fused kernels are for FP16, BF16 and INT8"
        else:
            why = (
                "it takes Q/DQ on all of q, k, v, the softmax output and the output, or on none; in INT8 "
                "head "
                f"size {limits.head_sizes_text} and at most {limits.int8_attention_length} tokens; in FP16 "
                "a mask that is added once and no other operator in between"
            )
        yield _found(
            evidence, "attention-apart", "slow",
            f"{apart} of {facts.attentions} attentions fall apart into single kernels", why,
            [FIX],
            share=evidence.share_of_kernels([*rows, *_products(evidence)]),
        )  # fmt: skip
    if facts.qkv_apart:
        yield _found(
            evidence, "qkv-apart", "note",
            f"q, k and v are three GEMMs in {facts.qkv_apart} of {facts.qkv} attentions",
            "one GEMM is faster for small batches, three for large ones",
            ["export.qkv_scales: shared in the recipe, with factored weights"],
        )  # fmt: skip


def _products(evidence: Evidence) -> Iterable[LayerRow]:
    inspection, facts = evidence.inspection, evidence.facts
    assert inspection is not None
    assert facts is not None
    wanted = {*inspection.graph.products}
    return [row for row in facts.rows if wanted.intersection(facts.computed.get(row.name, ()))]


def _copies(evidence: Evidence, facts: EngineFacts) -> Iterator[Finding]:
    """Kernels that only move, cast, quantize or dequantize."""
    clean = evidence.onnx is not None and not evidence.onnx.groups  # then `fix` changes nothing
    way = RUN if clean else FIX
    for kind, code, what in (
        ("layout", "copies", "kernels only move, cast or transpose (Reformat, Cast, Transpose)"),
        ("quantize", "quantize-alone", "kernels only quantize or dequantize"),
    ):
        rows = [row for row in facts.rows if kernel_kind(row) == kind]
        share = evidence.share_of_kernels(rows)
        if not rows or share is None or share[0] < _SMALL:
            continue
        codes = sum("Int8" in (*row.inputs, *row.outputs) for row in rows)
        labels = list(dict.fromkeys(kernel_label(row) for row in rows))
        yield _found(
            evidence, code, "slow", f"{len(rows)} of {len(facts.rows)} {what}, {codes} of them INT8 codes",
            "between a Q and its GEMM each costs a pass over memory: the kernel ahead can quantize where "
            "the Q stands next to the GEMM and types do not change in between",
            [way, f"qdqbench inspect {evidence.sources.name('layers')}"],
            labels, share,
        )  # fmt: skip


def _copies_by_name(evidence: Evidence) -> Iterator[Finding]:
    """The same of a profile without its layer table: names tell some of it."""
    profile = evidence.sources.profile
    rows = [LayerRow(name=name, kind="", onnx=[], inputs=[], constants=[], outputs=[]) for name in profile]
    moved = [row for row in rows if "eformat" in row.name or kernel_kind(row) == "layout"]
    total = sum(profile.values())
    share = sum(profile[row.name] for row in moved) / total if total else 0.0
    if share >= _SMALL:
        yield Finding(
            code="copies",
            effect="slow",
            what=f"{len(moved)} of {len(rows)} kernels only move, cast or transpose",
            why=f"for example {base_name(moved[0])[:200]}",
            fixes=["give the layer table too (trtexec --exportLayerInfo --profilingVerbosity=detailed)"],
            nodes=[row.name for row in moved],
            share=share,
            basis="profiled time",
            files=[evidence.sources.name("profile")],
        )


def _norms(evidence: Evidence, facts: EngineFacts) -> Iterator[Finding]:
    low = facts.norms.get("FP16", [])
    if low:
        yield _found(
            evidence, "layernorm-fp16", "note",
            f"{len(low)} of {sum(map(len, facts.norms.values()))} LayerNorms sum their squares in FP16",
            "sums over 65504 overflow; models with large activations then answer NaN",
            [FIX,
             'the rule {match: "*", type: LayerNorm, precision: fp32} in the recipe'],
            low,
        )  # fmt: skip


def _version(evidence: Evidence) -> Iterator[Finding]:
    """Known faults of the version; those of `_gemm_mha_v2` where a kernel is called so."""
    engine, log = evidence.sources.engine, evidence.log
    version = (engine.version if engine else None) or (log.version if log else None)
    names = [row.name for row in evidence.layers] or list(evidence.sources.profile)
    fused = any("_gemm_mha" in name for name in names) or any(map(is_attention, evidence.layers))
    backend = engine.backend if engine else "tensorrt"
    files = [
        evidence.sources.name(kind) for kind in ("engine", "log", "layers") if evidence.sources.name(kind)
    ]
    for text in find_hazards(backend, version, None) if version else []:
        if "_gemm_mha" not in text or fused or not names:
            yield Finding(
                code="known-fault", effect="wrong",
                what=text, why="it is a fault of this version, not of the file",
                fixes=["build with the version that has the fix"], files=files,
            )  # fmt: skip
    if engine and not evidence.layers and not evidence.sources.profile:
        yield Finding(
            code="engine-not-read", effect="note",
            what="an engine's header has its version and nothing of its layers",
            why="only TensorRT itself reads them, on the GPU that the engine is for",
            fixes=["give what trtexec --exportLayerInfo --profilingVerbosity=detailed writes",
                   f"qdqbench diagnose {evidence.sources.name('engine')} --load-engine"], files=files,
        )  # fmt: skip
    if fused and not version:
        yield Finding(
            code="version-unknown", effect="note",
            what="attention runs as _gemm_mha, and no file says in which version of TensorRT",
            why="10.0.0 has a fault there in FP16 that 10.0.1.6 fixes",
            fixes=["give the build log or the engine too"], files=files,
        )  # fmt: skip


def _times(evidence: Evidence) -> Iterator[Finding]:
    """Where the time of a query goes besides its kernels."""
    times, log = evidence.sources.times, evidence.log
    medians = dict(log.medians) if log else {}
    if times is not None:
        columns = {"GPU Compute Time": times.compute, "H2D Latency": times.h2d, "D2H Latency": times.d2h}
        medians |= {name: float(median(values)) for name, values in columns.items()}
    compute = medians.get("GPU Compute Time", 0.0)
    if not compute:
        return
    files = [evidence.sources.name(kind) for kind in ("times", "log") if evidence.sources.name(kind)]
    if (enqueue := medians.get("Enqueue Time", 0.0)) >= compute:
        told = (
            f"launching takes {enqueue:.3f} ms and computing {compute:.3f} ms: the host is what is measured"
        )
        why = "INT8 cannot be faster while the GPU waits for its next kernel"
        yield _of_query(
            "launch-bound", told, why, ["trtexec --useCudaGraph", "use larger batches"], 1.0, files
        )
    copies = medians.get("H2D Latency", 0.0) + medians.get("D2H Latency", 0.0)
    if (share := copies / (compute + copies)) > _LARGE:
        told = f"copies to and from the GPU take {copies:.3f} ms beside {compute:.3f} ms of kernels"
        why = "the comparison of INT8 with FP16 should leave them out"
        yield _of_query("transfer-bound", told, why, ["trtexec --noDataTransfers"], share, files)
    if times is not None and (idle := _idle(times)) > _LARGE:
        told = f"the GPU computes in {1 - idle:.0%} of the time from the first query to the last"
        why = "in between it waits for the host or for copies, which INT8 does not make shorter"
        fixes = ["trtexec --useCudaGraph --noDataTransfers", "use larger batches"]
        yield _of_query("gpu-waits", told, why, fixes, idle, files)


def _idle(times: Times) -> float:
    """Part of the time in which no query computes; queries of one stream follow each other."""
    span = float(times.start[-1] + times.compute[-1] - times.start[0])
    return max(0.0, 1 - float(times.compute.sum()) / span) if span > 0 and len(times.start) > 1 else 0.0


def _of_query(  # noqa: PLR0913, PLR0917
    code: str, what: str, why: str, fixes: list[str], share: float, files: list[str]
) -> Finding:
    return Finding(
        code=code,
        effect="slow",
        what=what,
        why=why,
        fixes=fixes,
        share=share,
        basis="time of a query",
        files=files,
    )
