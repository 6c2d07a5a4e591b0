"""Rules on how an engine was built: log, calibration cache, shapes."""

import math
from collections.abc import Iterator

from qdqbench.quantize.engine.diagnose.findings import Finding
from qdqbench.quantize.engine.diagnose.log_file import LogFile, Shape
from qdqbench.quantize.engine.diagnose.rules_graph import FIX, RUN, with_file
from qdqbench.quantize.engine.diagnose.sources import Evidence
from qdqbench.quantize.engine.hazards import is_older
from qdqbench.quantize.engine.profiles import FAR_FROM_OPT
from qdqbench.quantize.utils.names import name_list
from qdqbench.quantize.utils.results import Effect

_WEAK = ("int8", "fp16", "bf16", "best", "fp8", "calib", "precisionConstraints", "layerPrecisions")
_WIDE = 16.0  # tokens at the maximum over tokens at the optimum, in one profile

# Lines of a log that mean one thing: key of SIGNS -> effect, what, why, fixes; `{n}` lines name `{names}`.
SAID: dict[str, tuple[Effect, str, str, tuple[str, ...]]] = {
    "asymmetric": (
        "refused", "the parser refuses asymmetric quantization ({n} messages)",
        "TensorRT takes zero points of 0 only", (FIX,),
    ),
    "zero-point": (
        "refused", "the parser refuses zero points other than 0 ({n} messages)",
        "TensorRT quantizes symmetrically", (FIX,),
    ),
    "no-importer": (
        "refused", "the parser does not know {names}",
        "QOperator and dynamic quantization are ONNX Runtime's own",
        (FIX, "export with standard operators"),
    ),
    "no-plugin": (
        "refused", "the parser finds no plugin for an operator ({n} messages)",
        "operators of ONNX Runtime and old plugins are not there", (FIX, "export with standard operators"),
    ),
    "mixed-types": (
        "refused", "a strongly typed network refuses operators with mixed datatypes ({n} messages)",
        "each operator takes one floating-point type", ("qdqbench check {file}", FIX),
    ),
    "bad-scale": (
        "refused", "the parser refuses a scale ({n} messages)", "scales must be finite and positive",
        ("qdqbench check {file}", "calibrate again with real data"),
    ),
    "no-kernel": (
        "refused", "no kernel takes {names}", "the builder gave up on the whole engine",
        ("qdqbench check {file}", "keep these nodes out of INT8"),
    ),
    "other-version": (
        "refused", "the engine is of another version of TensorRT",
        "engines load only where version and GPU fit",
        ("build the engine again with this version",),
    ),
    "other-device": (
        "refused", "the engine is for another GPU", "engines load only where version and GPU fit",
        ("build the engine again on this GPU",),
    ),
    "across-devices": (
        "slow", "the engine was built on another model of GPU", "its kernels were timed there",
        ("build the engine again on this GPU",),
    ),
    "layernorm-fp16": (
        "wrong", "LayerNorm runs in FP16 and may overflow", "its squares are summed in FP16",
        (FIX, "export with opset 17 or newer, which has LayerNormalization"),
    ),
    "weights-overflow-fp16": (
        "wrong", "weights or constants do not fit FP16 and become infinite",
        "a mask of -3.4e38 does so; -inf times 0 is NaN", (FIX,),
    ),
    "enqueue-bound": (
        "slow", "trtexec says that launching bounds the throughput",
        "INT8 cannot be faster while the GPU waits for its next kernel",
        ("trtexec --useCudaGraph", "use larger batches"),
    ),
    "transfer-bound": (
        "slow", "trtexec says that copies to the GPU bound the throughput",
        "the comparison of INT8 with FP16 should leave them out", ("trtexec --noDataTransfers",),
    ),
    "unstable": (
        "note", "GPU times vary, says trtexec",
        "clocks change, or others use the GPU; `bench` interleaves its contestants",
        ("qdqbench bench RUN", "trtexec --useSpinWait, with locked clocks"),
    ),
}  # fmt: skip


def build_rules(evidence: Evidence) -> Iterator[Finding]:
    """Findings in the log and the cache."""
    yield from _implicit(evidence)
    log = evidence.log
    if log is None:
        return
    for key, (effect, what, why, fixes) in SAID.items():
        if count := log.signs[key]:
            names = name_list(log.names.get(key, [])) or f"an operator ({count} messages)"
            text = what.replace("{n}", str(count)).replace("{names}", names)
            yield _found(evidence, f"log-{key}", effect, text, why, list(fixes), log.names.get(key))
    yield from _weak_typing(evidence, log)
    yield from _shapes(evidence, log)
    yield from _failed(evidence, log)


def _found(  # noqa: PLR0913, PLR0917
    evidence: Evidence, code: str, effect: Effect, what: str, why: str, fixes: list[str],
    nodes: list[str] | None = None,
) -> Finding:  # fmt: skip
    return Finding(
        code=code, effect=effect, what=what, why=why, nodes=nodes or [],
        fixes=with_file(fixes, evidence.sources.paths.get("onnx")),
        where=name_list(nodes) if nodes else "", files=[evidence.sources.name("log")],
    )  # fmt: skip


def _implicit(evidence: Evidence) -> Iterator[Finding]:
    """INT8 from a calibrator: scales missing, deprecated, gone in TensorRT 11."""
    log, cache, onnx = evidence.log, evidence.sources.cache, evidence.onnx
    missing = log.signs["missing-scale"] if log else 0
    told = bool(
        log and (log.signs["calibrates"] or log.signs["implicit-deprecated"] or log.signs["no-calibrator"])
    )
    asked = bool(log and ("calib" in log.options or "INT8" in log.precision))
    explicit = onnx is not None and onnx.qdq
    if not (missing or told or cache or asked) or (explicit and not missing):
        return
    names = (log.names.get("missing-scale") if log else None) or []
    weighted = [name for name, each in onnx.products.items() if each.weighted] if onnx else []
    share = evidence.share_of_nodes(weighted) if weighted and missing else None
    parts = []
    if missing:
        said = '"Missing scale and zero-point"'
        parts.append(
            f"{missing} lines say {said}: these tensors, and what reads them, stay in floating point"
        )
    if cache:
        parts.append(
            f"the cache of TensorRT {cache.version} ({cache.calibrator}) has scales of {len(cache.scales)} "
            "tensors"
        )
    parts.append(
        "implicit calibration finds no INT8 for attention, LayerNorm and constants of transformers, and "
        "TensorRT "
        "11 has no calibrators any more"
    )
    fixes = [RUN]
    if cache:
        graph = f" --onnx {onnx.path.name}" if onnx else ""
        fixes.append(f"qdqbench recipes from-cache {evidence.sources.name('cache')} --model MODEL{graph}")
    yield Finding(
        code="implicit-calibration", effect="not INT8",
        what="INT8 was asked of a calibrator (implicit quantization), not of Q/DQ in the file",
        why="; ".join(parts), fixes=fixes, nodes=names, where=name_list(names),
        share=share[0] if share else None, basis=share[1] if share else "",
        files=[name for kind in ("log", "cache", "onnx") if (name := evidence.sources.name(kind))],
    )  # fmt: skip


def _weak_typing(evidence: Evidence, log: LogFile) -> Iterator[Finding]:
    used = [name for name in _WEAK if name in log.options]
    gone = log.names.get("unknown-option", [])
    refused = [name for name in gone if name.removeprefix("--") in _WEAK]
    if (not used and not refused) or ("stronglyTyped" in log.options and not refused):
        return
    flags = ", ".join(f"--{name}" for name in used) or ", ".join(refused)
    eleven = bool(refused) or (log.version is not None and not is_older(log.version, "11"))
    what = f"{flags} ask for weak typing, where the builder chooses datatypes"
    why = "TensorRT 11 has no such options: the datatypes are those of the file"
    fixes = [FIX, "trtexec --onnx={stem}.fixed.onnx --stronglyTyped (without the other options)"]
    yield _found(evidence, "weak-typing", "refused" if eleven else "note", what, why, fixes)


def _shapes(evidence: Evidence, log: LogFile) -> Iterator[Finding]:
    """Profiles that are tuned for another shape than the one that runs, or for everything at once."""
    near: tuple[float, str, Shape, Shape] | None = None
    for profile in log.profiles:
        for name, (_, opt, _) in profile.items():
            load = log.load.get(name)
            if load and opt and len(load) == len(opt) > 1 and min(*load, *opt) > 0:
                factor = math.prod(load[:2]) / math.prod(opt[:2])
                far = max(
                    factor, 1 / factor, *(max(a / b, b / a) for a, b in zip(load[:2], opt[:2], strict=True))
                )
                near = min(near or (far, name, load, opt), (far, name, load, opt))
    if near and near[0] >= FAR_FROM_OPT:
        far, name, load, opt = near
        told = "x".join(map(str, load))
        yield _found(
            evidence, "far-from-opt", "slow",
            f"kernels were tuned for {name} = {'x'.join(map(str, opt))} and run at {told}, {far:.1f} times "
            "off",
            "a profile's kernels are chosen at its optimum; at other shapes they can be slower than FP16's",
            [f"build with --optShapes={name}:{told} (and the other inputs), or with a profile for each load",
             "engine.shapes in the recipe, with one profile for each load"],
        )  # fmt: skip
        return
    for profile in log.profiles:
        for name, (_, opt, high) in profile.items():
            if len(opt) > 1 and min(opt) > 0 and math.prod(high[:2]) >= _WIDE * math.prod(opt[:2]):
                yield _found(
                    evidence, "wide-profile", "note",
                    f"one profile takes {name} up to {'x'.join(map(str, high))} and is tuned for "
                    f"{'x'.join(map(str, opt))}",
                    "far from its optimum an engine is slower than one for that shape",
                    ["give each range of shapes a profile of its own", "engine.shapes in the recipe"],
                )  # fmt: skip
                return


def _failed(evidence: Evidence, log: LogFile) -> Iterator[Finding]:
    """Errors that no other rule explains."""
    if not log.errors:
        return
    known = any(log.signs[key] for key, (effect, *_) in SAID.items() if effect == "refused")
    if not known and (log.passed is False or log.passed is None):
        yield _found(
            evidence, "build-failed", "refused", f"the log has {len(log.errors)} errors",
            f"the first: {log.errors[0]}", ["qdqbench check {file}", "give the ONNX file too"],
        )  # fmt: skip
