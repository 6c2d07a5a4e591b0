"""Read the files of one build together and say what is wrong, the worst first."""

import math
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from qdqbench.quantize.engine import layers as tables
from qdqbench.quantize.engine.backend import capture, choose_backend, inspect_engine
from qdqbench.quantize.engine.hazards import find_hazards, is_older
from qdqbench.quantize.engine.profiles import FAR_FROM_OPT
from qdqbench.quantize.engine.results import LayerRow
from qdqbench.quantize.lint.codes import Effect
from qdqbench.quantize.lint.findings import (
    FIX,
    LOG_FINDINGS,
    RUN,
    WORST_FIRST,
    Diagnosis,
    Finding,
    LogFile,
    Shape,
    SourceRow,
    group_finding,
)
from qdqbench.quantize.lint.inspection import EngineFacts, Inspection, find_problems
from qdqbench.quantize.lint.sources import KINDS, OWN, TOKENS, Evidence, OnnxFile, read_sources
from qdqbench.quantize.utils.errors import MissingDevice, UserError
from qdqbench.quantize.utils.limits import INT8_ATTENTION_LENGTH
from qdqbench.quantize.utils.names import count_of, name_list

MAX_FILES = 16
_COVERED = {  # code of a finding: that of a better founded one, which says it already
    "no-qdq": "implicit-calibration",
    "log-enqueue-bound": "launch-bound",
    "log-transfer-bound": "transfer-bound",
    "log-mixed-types": "mixed-types",
    "log-bad-scale": "bad-scale",
    "log-asymmetric": "non-zero-zero-point",
    "log-zero-point": "non-zero-zero-point",
    "log-no-importer": "unsupported-op",
    "log-no-plugin": "unsupported-op",
}


def diagnose(paths: Sequence[Path], *, load_engine: bool = False) -> Diagnosis:
    """Return the findings in files of one build; `load_engine` raises MissingDevice without what loads it."""
    if not 0 < len(paths) <= MAX_FILES:
        raise UserError(f"give 1 to {MAX_FILES} files of one build, not {len(paths)}")
    evidence = read_sources(list(dict.fromkeys(paths)))
    if load_engine:
        evidence.layers = evidence.layers or _load_table(evidence)
    findings = list(find_all(evidence))
    codes = {finding.code for finding in findings}
    findings = [finding for finding in findings if _COVERED.get(finding.code) not in codes]
    findings.sort(key=lambda finding: (WORST_FIRST.index(finding.effect), -(finding.share or 0.0)))
    order = "first what keeps an engine from being built, then wrong answers, no INT8, lost time"
    if bases := list(dict.fromkeys(finding.basis for finding in findings if finding.basis)):
        order += f"; within these by the share of {' or '.join(bases)} that a finding touches"
    if "GEMM FLOPs" in bases:
        order += f" (FLOPs of the graph at {TOKENS} tokens: give a profile to rank by measured time)"
    return Diagnosis(
        files=[
            SourceRow(name=path.name, kind=KINDS[kind][0], what=_describe_file(evidence, kind))
            for kind, path in evidence.paths.items()
        ],
        findings=findings,
        ranked_by=order,
        joined=_describe_joins(evidence),
    )


def _load_table(evidence: Evidence) -> list[LayerRow]:
    if evidence.engine is None:
        raise UserError("--load-engine needs an engine among the files")
    backend, path = choose_backend(evidence.engine.backend), evidence.paths["engine"]
    if backend.gpu is None:
        raise MissingDevice("--load-engine takes the GPU that the engine is for, and CUDA shows none here")
    with capture(backend.module) as (logger, log):
        text = inspect_engine(backend.module, logger, path.read_bytes())
    if text is None:
        raise UserError(
            f"{backend.name} {backend.version} cannot load {path} here ({log.errors()}); "
            "build it on this machine with this version"
        )
    evidence.paths["layers"] = path
    return tables.parse_inspector_json(text)


def _describe_joins(evidence: Evidence) -> list[str]:
    joins = []
    layers, onnx = evidence.name("layers"), evidence.name("onnx")
    if evidence.layers and evidence.graph is not None:
        other = evidence.other_build
        how = f"were not joined: {other}" if other else "by the names of ONNX nodes"
        joins.append(f"{onnx} and {layers} {how}")
    if evidence.profile and evidence.inspection and evidence.inspection.time:
        known = len(evidence.inspection.time.by_kernel)
        how = "by the names" if known else "share no name: not joined by the names"
        profile = evidence.name("profile")
        joins.append(f"{layers} and {profile} {how} of kernels ({known} of {len(evidence.profile)})")
    return joins


def _describe_file(evidence: Evidence, kind: str) -> str:  # noqa: PLR0911  one line a kind
    if kind == "onnx" and (onnx := evidence.onnx):
        counts = onnx.report.counts
        return f"{onnx.origin}; {counts['int8']} of {counts['gemms']} GEMMs run in INT8 by the graph"
    if kind == "log" and (log := evidence.log):
        version = f" {log.version}" if log.version else ""
        tool = "" if log.tool == "TensorRT" else f"{log.tool}, "
        parts = [f"of {tool}TensorRT{version}", log.device, log.precision]
        return ", ".join(filter(None, parts)) + (f", {tables.format_count(log.layers)}" if log.layers else "")
    if kind == "layers" and (inspection := evidence.inspection):
        done = len(inspection.proof.int8_gemms)
        return f"{tables.format_count(evidence.layers)}; {done} of {inspection.gemms} GEMMs in INT8"
    if kind == "profile":
        return f"{len(evidence.profile)} kernels, {sum(evidence.profile.values()):.3f} ms"
    if kind == "engine" and (engine := evidence.engine):
        return f"{engine.backend} {engine.version or 'of an unknown version'}, {engine.bytes} bytes"
    if kind == "cache" and (cache := evidence.cache):
        return f"{len(cache.scales)} tensors, TensorRT {cache.version}"
    return ""


_LARGE = 0.2  # a share of a query's time that is no small thing
_SMALL = 0.01  # a share of the time below which copies are not worth a finding
_FLOAT = 0.02  # a share of the FLOPs below which linears without Q/DQ are not worth a finding
_WIDE = 16.0  # tokens at the maximum over tokens at the optimum, in one profile
_DEQUANTIZED = ("dequantizes both", "dequantizes weights")  # Q/DQ in the file, and no INT8 kernel
_WEAK = ("int8", "fp16", "bf16", "best", "fp8", "calib", "precisionConstraints", "layerPrecisions")
_ENGINE_FIXES = {  # code of an engine's problem -> what to do besides its remedy in the recipe
    "raw-int32-as-fp16": [FIX],
    "gemm-writes-fp32": [f"{FIX} --weights factored"],
    "attention-apart": [FIX],
    "qkv-apart": [],
    "layernorm-fp16": [FIX],
}


def find_all(evidence: Evidence) -> Iterator[Finding]:
    explained: set[str] = set()  # GEMMs that a finding in the graph already says to be outside of INT8
    if (onnx := evidence.onnx) is not None:
        outside = evidence.inspection.proof.not_int8 if evidence.inspection else []
        for group in onnx.report.groups:
            finding = group_finding(onnx.report, group, onnx.path)
            if share := evidence.share_of_nodes(group.gemms):
                finding.share, finding.basis = share
            if lost := [name for name in outside if name in {*group.gemms}]:
                finding.why += f"; the layer table shows {len(lost)} of these GEMMs outside of INT8"
                finding.files.append(evidence.name("layers"))
            explained.update(finding.nodes)
            yield finding
        for rule in (_not_quantized, _float32, _long_attention):
            for finding in rule(evidence, onnx):
                explained.update(finding.nodes)
                yield finding
    if evidence.inspection is not None:
        yield from _gemms(evidence, evidence.inspection, explained)
        yield from _copies(evidence, evidence.inspection.facts)
    yield from _version(evidence)
    yield from _implicit(evidence)
    if (log := evidence.log) is not None:
        yield from _bounds(evidence, log)
        yield from _log_lines(evidence, log)
        yield from _weak_typing(evidence, log)
        yield from _shapes(evidence, log)


def _not_quantized(evidence: Evidence, onnx: OnnxFile) -> Iterator[Finding]:
    weighted = [name for name, product in onnx.products.items() if product.weighted]
    if onnx.integer or not weighted:
        return
    if not onnx.qdq:
        what = f"nothing is quantized: none of {len(weighted)} linears has Q/DQ"
        why = (
            "without Q/DQ only implicit calibration made INT8. TensorRT 10 discourages it, and does not do "
            "it for the attention and LayerNorm of transformers; TensorRT 11 no longer has it"
        )
        share = evidence.share_of_nodes(weighted)
        yield evidence.finding(
            "no-qdq", "not INT8", what, why, [RUN], nodes=weighted, share=share, kinds=["onnx"]
        )
        return
    explained = {name for group in onnx.report.groups for name in group.gemms}
    rest = {*onnx.report.not_quantized} - explained
    bare = [name for name in weighted if name in rest and "classifier" not in name]
    share = evidence.share_of_nodes(bare)
    if share and share[0] > _FLOAT:
        what = f"{len(bare)} of {len(weighted)} linears have no Q/DQ and stay in floating point"
        why = "they gain nothing from INT8"
        yield evidence.finding(
            "float-linears", "slow", what, why, [RUN], nodes=bare, share=share, kinds=["onnx"]
        )


def _float32(evidence: Evidence, onnx: OnnxFile) -> Iterator[Finding]:
    if not onnx.qdq or not onnx.types or onnx.types["FLOAT"] < sum(onnx.types.values()):
        return
    rest = [name for name in onnx.report.not_quantized if name in onnx.products]
    what = "all floating point is FP32: a strongly typed engine runs attention, LayerNorm, GELU and what is "
    what += "not INT8 in FP32"
    why = "weak typing (--fp16, --int8, --best) let the builder choose FP16; TensorRT 11 has strong typing "
    why += "only, where the file decides"
    share, fixes = evidence.share_of_nodes(rest), [FIX]
    if onnx.origin == OWN:
        why, fixes = (
            "qdqbench writes this form for CPUs",
            ["on a GPU, use model.gpu.onnx of the run"],
        )
    yield evidence.finding("fp32-compute", "slow", what, why, fixes, nodes=rest, share=share, kinds=["onnx"])


def _long_attention(evidence: Evidence, onnx: OnnxFile) -> Iterator[Finding]:
    limit, quantized = INT8_ATTENTION_LENGTH, onnx.report.attention_quantized
    profiles = evidence.log.profiles if evidence.log else []
    highest = [high for profile in profiles for _, _, high in profile.values()]
    longest = max((high[1] for high in highest if len(high) > 1), default=0)
    if quantized and longest > limit:
        text = f"{len(quantized)} INT8 attentions in an engine for up to {longest} tokens"
        what = f"{text}: the fused kernel takes {limit}"
        why = "beyond that the attention falls apart into single kernels"
        first = f"build with --maxShapes of {limit} tokens, and another engine for longer inputs"
        fixes, kinds = [first, "attention: fp16 in the recipe"], ["onnx", "log"]
        yield evidence.finding(
            "attention-too-long", "slow", what, why, fixes, nodes=quantized, kinds=kinds, where=""
        )


def _gemms(evidence: Evidence, inspection: Inspection, explained: Collection[str]) -> Iterator[Finding]:
    facts = inspection.facts
    total = len(facts.linears) or inspection.gemms
    reasons: dict[tables.NotInt8, list[str]] = {}
    for node in inspection.proof.not_int8:
        if node not in explained:
            reasons.setdefault(inspection.reasons[node], []).append(node)
    for reason, nodes in reasons.items():
        inside = any(tables.block_of_node(node).startswith("layer.") for node in nodes)
        effect: Effect = "not INT8" if reason.cause in _DEQUANTIZED else "slow" if inside else "note"
        what = f"{len(nodes)} of {total} linears of the engine do not multiply in INT8"
        fixes, share = ["qdqbench check {file}"], evidence.share_of_nodes(nodes)
        yield evidence.finding(
            "engine-not-int8", effect, what, f"each {reason}", fixes, nodes=nodes, share=share
        )
    onnx = evidence.onnx
    for problem in find_problems(facts):
        why = problem.why or "one GEMM is faster for small batches, three for large ones"
        nodes = problem.nodes
        share = evidence.share_of_nodes(nodes)
        if problem.code == "attention-apart":
            products = {*inspection.graph.products}
            share = evidence.share_of_kernels(
                row
                for row in facts.rows
                if tables.kernel_kind(row) == "softmax"
                or products.intersection(facts.computed.get(row.name, ()))
            )
            groups = onnx.report.groups if onnx else []
            partial = [group for group in groups if group.code == "partial-attention"]
            if partial:
                why = f"the graph says why: {partial[0].rows[0].why}"
            elif onnx and onnx.types["FLOAT"] == sum(onnx.types.values()) > 0:
                why = "the graph is FP32, and the fused kernels are for FP16, BF16 and INT8"
        if problem.code in _ENGINE_FIXES:
            fixes = [*_ENGINE_FIXES[problem.code], f"{problem.remedy} in the recipe"]
            yield evidence.finding(
                problem.code, problem.effect, problem.what, why, fixes, nodes=nodes, share=share
            )


def _copies(evidence: Evidence, facts: EngineFacts) -> Iterator[Finding]:
    clean = evidence.onnx is not None and not evidence.onnx.report.groups  # then `fix` changes nothing
    for kind, code, what in (
        ("layout", "copies", "kernels only move, cast or transpose (Reformat, Cast, Transpose)"),
        ("quantize", "quantize-alone", "kernels only quantize or dequantize"),
    ):
        rows = [row for row in facts.rows if tables.kernel_kind(row) == kind]
        share = evidence.share_of_kernels(rows)
        if not rows or share is None or share[0] < _SMALL:
            continue
        int8 = sum("Int8" in (*row.inputs, *row.outputs) for row in rows)
        text = f"{len(rows)} of {len(facts.rows)} {what}, {int8} of them INT8 codes"
        why = "between a Q and its GEMM each costs a pass over memory: the kernel ahead can quantize where "
        why += "the Q stands next to the GEMM and types do not change in between"
        fixes = [RUN if clean else FIX, f"qdqbench inspect {evidence.name('layers')}"]
        nodes = list(dict.fromkeys(map(tables.kernel_label, rows)))
        yield evidence.finding(code, "slow", text, why, fixes, nodes=nodes, share=share)


def _version(evidence: Evidence) -> Iterator[Finding]:
    engine, log, profile = evidence.engine, evidence.log, evidence.profile
    version = (engine.version if engine else None) or (log.version if log else None)
    names = [row.name for row in evidence.layers] or list(profile)
    fused = any("_gemm_mha" in name for name in names) or any(map(tables.is_attention, evidence.layers))
    kinds = ["engine", "log", "layers"]
    for text in find_hazards(engine.backend if engine else "tensorrt", version, None) if version else []:
        if "_gemm_mha" not in text or fused or not names:
            why = "it is a fault of this version, not of the file"
            fixes = ["build with the version that has the fix"]
            yield evidence.finding("known-fault", "wrong", text, why, fixes, kinds=kinds)
    if engine and not evidence.layers and not profile:
        what = "an engine's header has its version and nothing of its layers"
        why = "only TensorRT itself reads them, on the GPU that the engine is for"
        first = "give what trtexec --exportLayerInfo --profilingVerbosity=detailed writes"
        fixes = [first, f"qdqbench diagnose {evidence.name('engine')} --load-engine"]
        yield evidence.finding("engine-not-read", "note", what, why, fixes, kinds=kinds)
    if fused and not version:
        what = "attention runs as _gemm_mha, and no file says in which version of TensorRT"
        why = "10.0.0 has a fault there in FP16 that 10.0.1.6 fixes"
        fixes = ["give the build log or the engine too"]
        yield evidence.finding("version-unknown", "note", what, why, fixes, kinds=kinds)


def _bounds(evidence: Evidence, log: LogFile) -> Iterator[Finding]:
    """Find what bounds the time of a query besides its kernels."""
    compute = log.medians.get("GPU Compute Time", 0.0)
    if not compute:
        return
    if (enqueue := log.medians.get("Enqueue Time", 0.0)) >= compute:
        both = f"launching takes {enqueue:.3f} ms and computing {compute:.3f} ms"
        what = f"{both}: the host is what is measured"
        why = "INT8 cannot be faster while the GPU waits for its next kernel"
        fixes = ["trtexec --useCudaGraph", "use larger batches"]
        share = (1.0, "time of a query")
        yield evidence.finding("launch-bound", "slow", what, why, fixes, share=share, kinds=["log"])
    copies = log.medians.get("H2D Latency", 0.0) + log.medians.get("D2H Latency", 0.0)
    if (part := copies / (compute + copies)) > _LARGE:
        what = f"copies to and from the GPU take {copies:.3f} ms next to {compute:.3f} ms of kernels"
        why = "the comparison of INT8 with FP16 should leave them out"
        share, fixes = (part, "time of a query"), ["trtexec --noDataTransfers"]
        yield evidence.finding("transfer-bound", "slow", what, why, fixes, share=share, kinds=["log"])


def _implicit(evidence: Evidence) -> Iterator[Finding]:
    log, cache, onnx = evidence.log, evidence.cache, evidence.onnx
    missing = log.signs["missing-scale"] if log else 0
    signs = ("calibrates", "implicit-deprecated", "no-calibrator")
    shown = log is not None and any(log.signs[sign] for sign in signs)
    wanted = log is not None and ("calib" in log.options or "INT8" in log.precision)
    explicit = onnx is not None and onnx.qdq
    if not (missing or shown or cache or wanted) or (explicit and not missing):
        return
    names = (log.names.get("missing-scale") if log else None) or []
    weighted = [name for name, product in onnx.products.items() if product.weighted] if onnx else []
    reasons, fixes = [], [RUN]
    if missing:
        said = f'{count_of(missing, "line")} with "Missing scale and zero-point"'
        reasons.append(f"{said}: these tensors, and what reads them, stay in floating point")
    if cache:
        whose = f"the cache of TensorRT {cache.version} ({cache.calibrator})"
        reasons.append(f"{whose} has scales of {len(cache.scales)} tensors")
        graph = f" --onnx {onnx.path.name}" if onnx else ""
        fixes.append(f"qdqbench recipes from-cache {evidence.name('cache')} --model MODEL{graph}")
    reasons.append(
        "implicit calibration finds no INT8 for attention, LayerNorm and constants of transformers, and "
        "TensorRT 11 has no calibrators any more"
    )
    what = "INT8 was asked of a calibrator (implicit quantization), not of Q/DQ in the file"
    why, where, kinds = "; ".join(reasons), name_list(names), ["log", "cache", "onnx"]
    share = evidence.share_of_nodes(weighted) if missing else None
    yield evidence.finding(
        "implicit-calibration", "not INT8", what, why, fixes,
        nodes=names, share=share, kinds=kinds, where=where,
    )  # fmt: skip


def _log_lines(evidence: Evidence, log: LogFile) -> Iterator[Finding]:
    for key, (effect, what, why, fixes) in LOG_FINDINGS.items():
        if count := log.signs[key]:
            nodes = log.names.get(key, [])
            where = name_list(nodes)
            names = where or f"an operator ({count} messages)"
            text = what.replace("{n}", str(count)).replace("{names}", names)
            yield evidence.finding(
                f"log-{key}", effect, text, why, fixes, nodes=nodes, kinds=["log"], where=where
            )
    known = any(log.signs[key] for key, (effect, *_) in LOG_FINDINGS.items() if effect == "refused")
    if log.errors and not known and not log.passed:
        what, why = f"the log has {len(log.errors)} errors", f"the first: {log.errors[0]}"
        more = ["qdqbench check {file}", "give the ONNX file too"]
        yield evidence.finding("build-failed", "refused", what, why, more, kinds=["log"])


def _weak_typing(evidence: Evidence, log: LogFile) -> Iterator[Finding]:
    used = [f"--{name}" for name in _WEAK if name in log.options]
    refused = [name for name in log.names.get("unknown-option", []) if name.removeprefix("--") in _WEAK]
    if (not used and not refused) or ("stronglyTyped" in log.options and not refused):
        return
    eleven = bool(refused) or (log.version is not None and not is_older(log.version, "11"))
    effect: Effect = "refused" if eleven else "note"
    what = f"{', '.join(used or refused)} ask for weak typing, where the builder chooses datatypes"
    why = "TensorRT 11 has no such options: the datatypes are those of the file"
    fixes = [FIX, "trtexec --onnx={stem}.fixed.onnx --stronglyTyped (without the other options)"]
    yield evidence.finding("weak-typing", effect, what, why, fixes, kinds=["log"])


def _shapes(evidence: Evidence, log: LogFile) -> Iterator[Finding]:
    near: tuple[float, str, Shape, Shape] | None = None
    for profile in log.profiles:
        for name, (_, opt, _) in profile.items():
            load = log.load.get(name)
            if load and opt and len(load) == len(opt) > 1 and min(*load, *opt) > 0:
                ratios = [math.prod(load[:2]) / math.prod(opt[:2]), load[0] / opt[0], load[1] / opt[1]]
                far = max(max(ratio, 1 / ratio) for ratio in ratios)
                near = min(near or (far, name, load, opt), (far, name, load, opt))
    if near and near[0] >= FAR_FROM_OPT:
        far, name, load, opt = near
        shape = "x".join(map(str, load))
        tuned = f"kernels were tuned for {name} = {'x'.join(map(str, opt))}"
        what = f"{tuned} and run at {shape}, {far:.1f} times off"
        why = "a profile's kernels are chosen at its optimum; at other shapes they can be slower than FP16's"
        first = (
            f"build with --optShapes={name}:{shape} (and the other inputs), or with a profile for each load"
        )
        fixes = [first, "engine.shapes in the recipe, with one profile for each load"]
        yield evidence.finding("far-from-opt", "slow", what, why, fixes, kinds=["log"])
        return
    for profile in log.profiles:
        for name, (_, opt, high) in profile.items():
            if len(opt) > 1 and min(opt) > 0 and math.prod(high[:2]) >= _WIDE * math.prod(opt[:2]):
                most, best = ("x".join(map(str, shape)) for shape in (high, opt))
                what = f"one profile takes {name} up to {most} and is tuned for {best}"
                why = "far from its optimum an engine is slower than one for that shape"
                fixes = ["give each range of shapes a profile of its own", "engine.shapes in the recipe"]
                yield evidence.finding("wide-profile", "note", what, why, fixes, kinds=["log"])
                return
