"""Read the files of one build together and say what is wrong, the worst first."""

import math
import shlex
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from qdqbench.quantize.engine import layers as tables
from qdqbench.quantize.engine.backend import capture, choose_backend, inspect_engine
from qdqbench.quantize.engine.hazards import find_hazards, is_older
from qdqbench.quantize.engine.profiles import FAR_FROM_OPT
from qdqbench.quantize.engine.results import LayerRow
from qdqbench.quantize.lint.findings import WORST_FIRST, Effect, Finding, read_kinds
from qdqbench.quantize.lint.inspection import ALONE, Inspection, count_alone, find_faults
from qdqbench.quantize.lint.logs import LogFile, Shape
from qdqbench.quantize.lint.sources import OWN, READERS, TOKENS, Evidence, OnnxFile, read_sources
from qdqbench.quantize.report.coverage import coverage
from qdqbench.quantize.utils.errors import MissingDevice, UserError
from qdqbench.quantize.utils.limits import INT8_ATTENTION_LENGTH
from qdqbench.quantize.utils.names import count_of, name_list
from qdqbench.quantize.utils.schema import Strict, Tabular

MAX_FILES = 16
_OPERATORS = {"unsupported-op", "no-plain-form", "onnxruntime-operators", "operator-refused"}
_COVERED = {  # code of a finding: those of better founded ones, of which each says it already
    "no-qdq": {"implicit-calibration"},
    "log-enqueue-bound": {"launch-bound"},
    "log-transfer-bound": {"transfer-bound"},
    "log-mixed-types": {"mixed-types"},
    "log-bad-scale": {"bad-scale"},
    "log-zero-point": {"non-zero-zero-point"},
    "log-int32-bias": {"not-int8"},
    "log-uint8": {"uint8"},
    "log-scale-count": {"wrong-weight-axis", "zero-point-shape"},
    "log-attention-kernel": {"attention-operator"},
    "log-no-importer": _OPERATORS,
    "log-no-plugin": _OPERATORS,
}


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


def diagnose(paths: Sequence[Path], *, load_engine: bool = False) -> Diagnosis:
    """Return the findings in files of one build; `load_engine` raises MissingDevice without what loads it."""
    if not 0 < len(paths) <= MAX_FILES:
        raise UserError(f"give 1 to {MAX_FILES} files of one build, not {len(paths)}")
    evidence = read_sources(list(dict.fromkeys(paths)))
    if load_engine:
        evidence.layers = evidence.layers or _load_table(evidence)
    findings = list(find_all(evidence))
    codes = {finding.code for finding in findings}
    findings = [finding for finding in findings if codes.isdisjoint(_COVERED.get(finding.code, ()))]
    findings.sort(key=lambda finding: (WORST_FIRST.index(finding.effect), -(finding.share or 0.0)))
    order = "first what keeps an engine from being built, then wrong answers, no INT8, lost time"
    if bases := list(dict.fromkeys(finding.basis for finding in findings if finding.basis)):
        order += f"; within these by the share of {' or '.join(bases)} that a finding touches"
    if "GEMM FLOPs" in bases:
        order += f" (FLOPs of the graph at {TOKENS} tokens: give a profile to rank by measured time)"
    return Diagnosis(
        files=[
            SourceRow(name=path.name, kind=READERS[kind][0], what=_describe_file(evidence, kind))
            for kind, path in evidence.paths.items()
        ]
        + [SourceRow(name=path.name, kind="not read", what=why) for path, why in evidence.unread.items()],
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
        return f"{onnx.origin}; {coverage(counts['int8_linears'], counts['linears'], 'linears')} by the graph"
    if kind == "log" and (log := evidence.log):
        version = f" {log.version}" if log.version else ""
        tool = "" if log.tool == "TensorRT" else f"{log.tool}, "
        parts = [f"of {tool}TensorRT{version}", log.device, log.precision]
        return ", ".join(filter(None, parts)) + (f", {tables.format_count(log.layers)}" if log.layers else "")
    if kind == "layers" and (inspection := evidence.inspection):
        share = coverage(len(inspection.int8), len(inspection.linears), "linears")
        return f"{tables.format_count(evidence.layers)}; {share}"
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
RUN = "qdqbench run int8-linears --model MODEL --task TASK --data DATA"
# of lines that follow others, which say why
_GENERAL = ("log-unsupported-node", "log-no-outputs", "log-myelin", "log-constant")
_TOLD = ("dequantized", "float-residual")  # faults of an engine that other findings name with their cause


def find_all(evidence: Evidence) -> Iterator[Finding]:
    explained: set[str] = set()  # GEMMs that a finding in the graph already says to be outside of INT8
    if (onnx := evidence.onnx) is not None:
        outside = evidence.inspection.not_int8 if evidence.inspection else []
        for finding in onnx.report.grouped(onnx.path):
            gemms = onnx.report.gemms_of(finding.code)
            if share := evidence.share_of_nodes(gemms):
                finding.share, finding.basis = share
            if lost := [name for name in outside if name in {*gemms}]:
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
        yield from _copies(evidence, evidence.inspection)
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
        yield evidence.find("no-qdq", ["onnx"], weighted, share=evidence.share_of_nodes(weighted))
        return
    explained = {gemm.node for gemm in onnx.report.gemms if gemm.codes}
    rest = {*onnx.report.not_quantized} - explained
    bare = [name for name in weighted if name in rest and "classifier" not in name]
    share = evidence.share_of_nodes(bare)
    if share and share[0] > _FLOAT:
        yield evidence.find("float-linears", ["onnx"], bare, share=share, all=len(weighted))


def _float32(evidence: Evidence, onnx: OnnxFile) -> Iterator[Finding]:
    if not onnx.qdq or not onnx.types or onnx.types["FLOAT"] < sum(onnx.types.values()):
        return
    rest = [name for name in onnx.report.not_quantized if name in onnx.products]
    why, fixes = None, None
    if onnx.origin == OWN:
        why, fixes = "qdqbench writes this form for CPUs", ["on a GPU, use model.gpu.onnx of the run"]
    share = evidence.share_of_nodes(rest)
    yield evidence.find("fp32-compute", ["onnx"], rest, why=why, fixes=fixes, share=share)


def _long_attention(evidence: Evidence, onnx: OnnxFile) -> Iterator[Finding]:
    quantized = onnx.report.attention_quantized
    profiles = evidence.log.profiles if evidence.log else []
    highest = [high for profile in profiles for _, _, high in profile.values()]
    longest = max((high[1] for high in highest if len(high) > 1), default=0)
    if quantized and longest > INT8_ATTENTION_LENGTH:
        yield evidence.find("attention-too-long", ["onnx", "log"], quantized, where="", longest=longest)


def _gemms(evidence: Evidence, inspection: Inspection, explained: Collection[str]) -> Iterator[Finding]:
    onnx = evidence.onnx
    reasons: dict[tables.NotInt8, list[str]] = {}
    for node in inspection.not_int8:
        if node not in explained:
            reasons.setdefault(inspection.reasons[node], []).append(node)
    for reason, nodes in reasons.items():
        inside = any(tables.block_of_node(node).startswith("layer.") for node in nodes)
        effect: Effect = "not INT8" if reason.cause in _DEQUANTIZED else "slow" if inside else "note"
        total, share = len(inspection.linears) or inspection.gemms, evidence.share_of_nodes(nodes)
        yield evidence.find(
            "engine-not-int8", None, nodes, effect=effect, share=share, all=total, reason=reason
        )
    for fault in find_faults(inspection, evidence.paths.get("onnx")):
        if fault.code in _TOLD:
            continue
        fault.files = evidence.shown()
        share = evidence.share_of_nodes(fault.nodes)
        if fault.code == "attention-apart":
            products = {*inspection.graph.products}
            share = evidence.share_of_kernels(
                row
                for row in inspection.rows
                if tables.kernel_kind(row) == "softmax"
                or products.intersection(inspection.computed.get(row.name, ()))
            )
            partial = onnx.report.codes.get("partial-attention") if onnx else None
            if partial:
                fault.why = f"the graph says why: {partial[0].why}"
            elif onnx and onnx.types["FLOAT"] == sum(onnx.types.values()) > 0:
                fault.why = "the graph is FP32, and the fused kernels are for FP16, BF16 and INT8"
        if share:
            fault.share, fault.basis = share
        yield fault


def _copies(evidence: Evidence, inspection: Inspection) -> Iterator[Finding]:
    clean = evidence.onnx is not None and not evidence.onnx.report.findings  # then `fix` changes nothing
    for kind, code in ALONE.items():
        rows = [row for row in inspection.rows if tables.kernel_kind(row) == kind]
        share = evidence.share_of_kernels(rows)
        if rows and share and share[0] >= _SMALL:
            fixes = read_kinds()[code].fixes
            fixes = (RUN, *fixes[1:]) if clean else fixes
            nodes = list(dict.fromkeys(map(tables.kernel_label, rows)))
            figures = count_alone(inspection, kind)
            layers = shlex.quote(evidence.name("layers"))
            yield evidence.find(code, None, nodes, fixes=fixes, share=share, layers=layers, **figures)


def _version(evidence: Evidence) -> Iterator[Finding]:
    engine, log, profile = evidence.engine, evidence.log, evidence.profile
    version = (engine.version if engine else None) or (log.version if log else None)
    names = [row.name for row in evidence.layers] or list(profile)
    fused = any("_gemm_mha" in name for name in names) or any(map(tables.is_attention, evidence.layers))
    kinds = ["engine", "log", "layers"]
    for text in find_hazards(engine.backend if engine else "tensorrt", version, None) if version else []:
        if "_gemm_mha" not in text or fused or not names:
            yield evidence.find("known-fault", kinds, fault=text)
    if engine and not evidence.layers and not profile:
        yield evidence.find("engine-not-read", kinds, engine=shlex.quote(evidence.name("engine")))
    if fused and not version:
        yield evidence.find("version-unknown", kinds)


def _bounds(evidence: Evidence, log: LogFile) -> Iterator[Finding]:
    """Find what bounds the time of a query besides its kernels."""
    compute, basis = log.medians.get("GPU Compute Time", 0.0), "time of a query"
    if not compute:
        return
    figures = {"compute": f"{compute:.3f}"}
    if (launch := log.medians.get("Enqueue Time", 0.0)) >= compute:
        share = (1.0, basis)
        yield evidence.find("launch-bound", ["log"], share=share, launch=f"{launch:.3f}", **figures)
    copies = log.medians.get("H2D Latency", 0.0) + log.medians.get("D2H Latency", 0.0)
    if (part := copies / (compute + copies)) > _LARGE:
        share = (part, basis)
        yield evidence.find("transfer-bound", ["log"], share=share, copies=f"{copies:.3f}", **figures)


def _implicit(evidence: Evidence) -> Iterator[Finding]:
    """Find a calibrator by what the files show of it: --int8 alone also builds Q/DQ before TensorRT 11."""
    log, cache, onnx = evidence.log, evidence.cache, evidence.onnx
    missing = log.signs["missing-scale"] if log else 0
    shown = log is not None and (log.signs["calibrates"] > 0 or "calib" in log.options)
    wanted = onnx is not None and not onnx.qdq and log is not None and "int8" in log.options
    explicit = (onnx is not None and onnx.qdq) or (log is not None and log.signs["explicit"] > 0)
    if not (missing or shown or cache or wanted) or (explicit and not missing):
        return
    names = (log.names.get("missing-scale") if log else None) or []
    weighted = [name for name, product in onnx.products.items() if product.weighted] if onnx else []
    reasons, fixes, words = "", [*read_kinds()["implicit-calibration"].fixes], {}
    if missing:
        said = f'{count_of(missing, "line")} with "Missing scale and zero-point"'
        reasons += f"{said}: these tensors, and what reads them, stay in floating point; "
    if cache:
        whose = f"the cache of TensorRT {cache.version} ({cache.calibrator})"
        reasons += f"{whose} has scales of {len(cache.scales)} tensors; "
        words = {
            "cache": shlex.quote(evidence.name("cache")),
            "graph": shlex.quote(onnx.path.name if onnx else "MODEL.onnx"),
        }
        fixes.append("qdqbench recipes from-cache {cache} --model MODEL --onnx {graph}")
    yield evidence.find(
        "implicit-calibration",
        ["log", "cache", "onnx"],
        names,
        where=name_list(names),
        fixes=fixes,
        share=evidence.share_of_nodes(weighted) if missing else None,
        reasons=reasons,
        **words,
    )


def _log_lines(evidence: Evidence, log: LogFile) -> Iterator[Finding]:
    """Find what the lines of a log say; none that a build was refused where it passed in the end."""
    effects = {code: kind.effect for code, kind in read_kinds("log").items() if log.signs[code]}
    told = [code for code, effect in effects.items() if not (log.passed and effect == "refused")]
    if any(effects[code] == "refused" for code in told if code not in _GENERAL):
        told = [code for code in told if code not in _GENERAL]
    for code in told:
        nodes, count = log.names.get(code, []), log.signs[code]
        where = name_list(nodes)
        names = where or "what the log does not name"
        yield evidence.find(code, ["log"], nodes, where=where, n=count, names=names)
    known = any(effects[code] == "refused" for code in told)
    if log.errors and not known and not log.passed:
        yield evidence.find("build-failed", ["log"], errors=len(log.errors), first=log.errors[0])


def _weak_typing(evidence: Evidence, log: LogFile) -> Iterator[Finding]:
    used = [f"--{name}" for name in _WEAK if name in log.options]
    refused = [name for name in log.names.get("unknown-option", []) if name.removeprefix("--") in _WEAK]
    if (not used and not refused) or ("stronglyTyped" in log.options and not refused):
        return
    eleven = bool(refused) or (log.version is not None and not is_older(log.version, "11"))
    options = ", ".join(used or refused)
    yield evidence.find("weak-typing", ["log"], effect="refused" if eleven else "note", options=options)


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
        sizes = {"opt": _shape(opt), "load": _shape(load), "far": f"{far:.1f}"}
        yield evidence.find("far-from-opt", ["log"], input=name, **sizes)
        return
    for profile in log.profiles:
        for name, (_, opt, high) in profile.items():
            if len(opt) > 1 and min(opt) > 0 and math.prod(high[:2]) >= _WIDE * math.prod(opt[:2]):
                yield evidence.find("wide-profile", ["log"], input=name, most=_shape(high), opt=_shape(opt))
                return


def _shape(shape: Shape) -> str:
    return "x".join(map(str, shape))
