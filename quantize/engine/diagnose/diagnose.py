"""Read the files of one build together and say what is wrong, the worst first."""

from collections.abc import Sequence
from pathlib import Path

from qdqbench.quantize.engine.backend import capture, choose_backend, inspect_engine
from qdqbench.quantize.engine.diagnose.findings import WORST_FIRST, Diagnosis, Finding, SourceRow
from qdqbench.quantize.engine.diagnose.rules import find_all
from qdqbench.quantize.engine.diagnose.sources import TOKENS, Evidence, Sources, kind_text, read_sources
from qdqbench.quantize.engine.kernels import format_count
from qdqbench.quantize.engine.layers import parse_inspector_json
from qdqbench.quantize.utils.errors import MissingDevice, UserError
from qdqbench.quantize.utils.results import LayerRow

MAX_FILES = 16


def diagnose(paths: Sequence[Path], *, load_engine: bool = False) -> Diagnosis:
    """Return the findings in files of one build.

    With `load_engine` TensorRT loads an engine for its layer table. An engine is a program: your own only.

    Raises:
        UserError: no file, too many, or one that cannot be read; names it.
        MissingDevice: with `load_engine`, what loads the engine is not here.
    """
    if not 0 < len(paths) <= MAX_FILES:
        raise UserError(f"give 1 to {MAX_FILES} files of one build, not {len(paths)}")
    sources = read_sources(list(dict.fromkeys(paths)))
    if load_engine:
        sources.layers = sources.layers or _load_table(sources)
    evidence = Evidence(sources)
    findings = _drop_covered(list(find_all(evidence)))
    findings.sort(key=lambda finding: (WORST_FIRST.index(finding.effect), -(finding.share or 0.0)))
    return Diagnosis(
        files=[SourceRow(name=path.name, kind=kind_text(kind), what=_describe_file(evidence, kind))
               for kind, path in sources.paths.items()],
        findings=findings,
        ranked_by=_ranked_by(evidence, findings),
        joined=_describe_joins(evidence, sources),
    )  # fmt: skip


def _load_table(sources: Sources) -> list[LayerRow]:
    if sources.engine is None:
        raise UserError("--load-engine needs an engine among the files")
    backend = choose_backend(sources.engine.backend)
    if backend.gpu is None:
        raise MissingDevice("--load-engine takes the GPU that the engine is for, and CUDA shows none here")
    with capture(backend.module) as (logger, log):
        text = inspect_engine(backend.module, logger, sources.paths["engine"].read_bytes())
    if text is None:
        raise UserError(
            f"{backend.name} {backend.version} cannot load {sources.paths['engine']} here ({log.errors()}); "
            "build it on this machine with this version"
        )
    sources.paths["layers"] = sources.paths["engine"]
    return parse_inspector_json(text)


def _drop_covered(findings: list[Finding]) -> list[Finding]:
    """Return findings without what a better founded one says already."""
    codes = {finding.code for finding in findings}
    covered = {
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
    return [finding for finding in findings if covered.get(finding.code) not in codes]


def _ranked_by(evidence: Evidence, findings: Sequence[Finding]) -> str:
    bases = list(dict.fromkeys(found.basis for found in findings if found.basis))
    order = "first what keeps an engine from being built, then wrong answers, no INT8, lost time"
    if not bases:
        return order
    text = f"{order}; within these by the share of {' or '.join(bases)} that a finding touches"
    if "GEMM FLOPs" in bases:
        text += f" (FLOPs of the graph at {TOKENS} tokens: give a profile to rank by measured time)"
    return text


def _describe_joins(evidence: Evidence, sources: Sources) -> list[str]:
    found = []
    layers, onnx = sources.name("layers"), sources.name("onnx")
    if evidence.layers and evidence.graph is not None:
        if evidence.other_build:
            found.append(f"{onnx} and {layers} were not joined: {evidence.other_build}")
        else:
            found.append(f"{onnx} and {layers} by the names of ONNX nodes")
    if sources.profile and evidence.inspection and evidence.inspection.time:
        time = evidence.inspection.time
        known = len(time.by_kernel)
        of = f"{known} of {len(sources.profile)}"
        text = f"{layers} and {sources.name('profile')} by the names of kernels ({of})"
        found.append(text if known else text.replace(" by ", " share no name: not joined by "))
    return found


def _describe_file(evidence: Evidence, kind: str) -> str:  # noqa: PLR0911  one line a kind
    sources = evidence.sources
    onnx, log, times = sources.onnx, sources.log, sources.times
    if kind == "onnx" and onnx:
        counts = onnx.report.counts
        return f"{onnx.origin}; {counts['int8']} of {counts['gemms']} GEMMs run in INT8 by the graph"
    if kind == "log" and log:
        version = f" {log.version}" if log.version else ""
        parts = [f"of {log.tool}, TensorRT{version}", log.device, log.precision]
        return ", ".join(filter(None, parts)) + (f", {format_count(log.layers)}" if log.layers else "")
    if kind == "layers" and evidence.inspection:
        done, gemms = len(evidence.inspection.proof.int8_gemms), evidence.inspection.gemms
        return f"{format_count(evidence.layers)}; {done} of {gemms} GEMMs in INT8"
    if kind == "profile":
        return f"{len(sources.profile)} kernels, {sum(sources.profile.values()):.3f} ms"
    if kind == "times" and times is not None:
        return f"{len(times.compute)} queries"
    if kind == "engine" and sources.engine:
        version = sources.engine.version or "of an unknown version"
        return f"{sources.engine.backend} {version}, {sources.engine.bytes} bytes"
    if kind == "cache" and sources.cache:
        return f"{len(sources.cache.scales)} tensors, TensorRT {sources.cache.version}"
    return ""
