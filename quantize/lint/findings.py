"""Findings of `check` and `diagnose`: their effect, wording and source files."""

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import get_args

from qdqbench.quantize.engine.hazards import version_text
from qdqbench.quantize.engine.layers import MAX_TABLE_LAYERS, parse_log
from qdqbench.quantize.engine.results import LayerRow
from qdqbench.quantize.lint.check import CheckReport, Group
from qdqbench.quantize.lint.codes import Effect
from qdqbench.quantize.lint.inspection import format_nodes
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import UserError
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
    "split-residual": "{n} residuals and the linears after them round one tensor with two scales",
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
    file = path or Path("MODEL.onnx")
    fixed = file.with_suffix(".fixed.onnx")
    if any((folder / files.SUMS).is_file() for folder in fixed.parents[:2]):
        fixed = Path(fixed.name)
    return [
        text.replace("{file}", shlex.quote(str(file))).replace("{fixed}", shlex.quote(str(fixed)))
        for text in texts
    ]


MAX_LOG_BYTES = 256 << 20  # a verbose build of BERT-large has some 100 MB
MAX_LINE = 32_768  # characters; longer ones are cut
MAX_TABLE_CHARACTERS = 16 << 20
MAX_SHAPE_LINES, MAX_SHAPE_LINE = 2_000, 8_192  # those with shapes or options, which are searched further
MAX_NAME = 200
KEPT = 200  # names and errors of each kind

# What a line says: the text that it holds, and where the name that it is about stands (None: nowhere).
SIGNS: dict[str, tuple[str, str | None]] = {
    "missing-scale": ("Missing scale and zero-point for tensor", r"for tensor (.{1,500}?), expect"),
    "no-calibrator": ("Calibrator is not being used", None),
    "implicit-deprecated": ("mplicit quantization has been deprecated", None),
    "calibrates": ("Starting Calibration", None),
    "layernorm-fp16": ("unning layernorm after self-attention", None),
    "weights-overflow-fp16": ("would overflow in FP16", None),
    "unknown-option": ("Unknown option", r"Unknown option:? ?(--\w{1,60})"),
    "asymmetric": ("only supports symmetric quantization", None),
    "zero-point": ("zero point for the QuantizeLinear/DequantizeLinear operator must be all zeros", None),
    "no-importer": ("No importer registered for op", r"for op: (\w{1,80})"),
    "no-plugin": ("Plugin not found", None),
    "mixed-types": ("same input types", None),
    "bad-scale": ("cale coefficient", None),
    "no-kernel": ("Could not find any implementation for node", r"for node (.{1,500}?)(?:\. |\.?$)"),
    "other-version": ("not compatible with this version of TensorRT", None),
    "other-device": ("generated on an incompatible device", None),
    "across-devices": ("engine plan file across different models of devices", None),
    "enqueue-bound": ("bound by Enqueue Time", None),
    "transfer-bound": ("bound by host-to-device transfers", None),
    "unstable": ("GPU compute time is unstable", None),
}
# Lines of a log that mean one thing: key of SIGNS -> effect, what, why, fixes; `{n}` lines name `{names}`.
LOG_FINDINGS: dict[str, tuple[Effect, str, str, tuple[str, ...]]] = {
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
_NAMES = {key: re.compile(pattern) for key, (_, pattern) in SIGNS.items() if pattern}
_TRTEXEC = re.compile(r"&&&& (RUNNING|PASSED|FAILED) TensorRT\.trtexec(?: \[TensorRT v(\d{4,7})\])?")
_VERSION = re.compile(r"TensorRT[- ](?:version|RTX version)?:? ?v?(\d{1,3}(?:\.\d{1,5}){1,3})\b")
_OPTION = re.compile(r"(?<!\S)--(\w{1,60})(?:[= ]([^\s-]\S{0,2000})?)?")
_SEVERITY = re.compile(r"\[(?:TRT\] \[)?([EFW])\]")
_SHAPE = re.compile(r"\d[\dx+]{0,200}")
_SIZES = r"[\[(]([\d, ]{1,80})[\])]"
_TRIPLE = re.compile(rf" \[min={_SIZES}, opt={_SIZES}, max={_SIZES}\]")
_MEDIAN = re.compile(
    r"(GPU Compute Time|Enqueue Time|H2D Latency|D2H Latency|Latency): .{0,200}?"
    r"median = (\d{1,12}(?:\.\d{1,12})?) ms"
)
_TOOLS = {"TensorRT.trtexec": "trtexec", "polygraphy": "Polygraphy"}  # else TensorRT itself
_MARKS = (*_TOOLS, "[TRT]", "LayerType: ")

Shape = tuple[int, ...]


@dataclass
class LogFile:
    tool: str  # trtexec, Polygraphy or TensorRT
    version: str | None = None  # of TensorRT
    options: dict[str, str] = field(default_factory=dict)  # of the command line, without dashes
    precision: str = ""  # FP32+INT8, or Polygraphy's flags
    device: str = ""
    passed: bool | None = None  # trtexec's own verdict; None: it gave none
    signs: Counter[str] = field(default_factory=Counter)  # lines by key of SIGNS
    names: dict[str, list[str]] = field(default_factory=dict)  # what those lines name
    errors: list[str] = field(default_factory=list)
    profiles: list[dict[str, tuple[Shape, Shape, Shape]]] = field(default_factory=list)  # min, opt, max
    load: dict[str, Shape] = field(default_factory=dict)  # shapes that were timed
    medians: dict[str, float] = field(default_factory=dict)  # milliseconds, by trtexec's names
    layers: list[LayerRow] = field(default_factory=list)  # where the log has the table of a DETAILED build


def is_log(start: bytes) -> bool:
    text = start.decode("utf-8", errors="replace")
    strange = sum(not (c.isprintable() or c.isspace() or c == "\x1f") for c in text)
    return strange <= len(text) // 50 and any(mark in text for mark in (*_MARKS, "[I] ", "[W] "))


def read_log(path: Path) -> LogFile:
    """Read a build log; memory is bounded whatever the file holds, UserError where it is none of a build."""
    found = LogFile("")
    table: list[str] = []
    room, searched = MAX_TABLE_CHARACTERS, 0
    for line in _lines(path):
        if "LayerType: " in line:
            if len(table) < MAX_TABLE_LAYERS and room > len(line) and (row := _row(line)):
                table.append(row)
                room -= len(line)
            continue
        _take(found, line)
        if searched < MAX_SHAPE_LINES and len(line) <= MAX_SHAPE_LINE:
            searched += _take_shapes(found, line)
    found.layers = parse_log(table)
    if not (found.tool or found.layers):
        raise UserError(
            f"{path} is text, and no build log of trtexec, Polygraphy or TensorRT; give the whole log, or "
            "JSON"
        )
    found.tool = found.tool or "TensorRT"
    return found


def _row(line: str) -> str:
    """Return the part of a line that `parse_log` takes at its first try, in little time; else ''."""
    start = line.find("Name: ")
    _, kind, rest = line[max(start, 0) :].partition(", LayerType: ")
    word, inputs, rest = rest.partition(", Inputs: [")
    whole = kind and inputs and word.isidentifier() and "], Outputs: [" in rest
    once = line.count("LayerType: ") == 1 and rest.count(", Constants: [") <= 1
    return line[start:] if 0 <= start < 200 and whole and once else ""


def _lines(path: Path) -> Iterator[str]:
    try:
        if path.stat().st_size > MAX_LOG_BYTES:
            raise UserError(f"{path} has over {MAX_LOG_BYTES} bytes; give the part from the build on")
        with path.open(encoding="utf-8", errors="replace", newline=None) as stream:
            while line := stream.readline(MAX_LINE):
                yield line.rstrip("\n")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check the path") from error


def _take(found: LogFile, line: str) -> None:
    for mark in _MARKS:
        if mark in line and found.tool in ("", "TensorRT"):
            found.tool = _TOOLS.get(mark, "TensorRT")
    if match := _TRTEXEC.search(line):
        found.passed = found.passed if match[1] == "RUNNING" else match[1] == "PASSED"
        found.version = version_text(int(match[2])) if match[2] else found.version
    if not found.version and (version := _VERSION.search(line)):
        found.version = version[1]
    for key, (text, _) in SIGNS.items():
        if text in line:
            found.signs[key] += 1
            if key in _NAMES and (name := _NAMES[key].search(line)):
                _keep(found.names.setdefault(key, []), name[1])
    severity = _SEVERITY.search(line[:80])
    if severity and severity[1] in "EF":
        _keep(found.errors, line[severity.end() :].strip().removeprefix("[TRT]").strip()[:400])


def _take_shapes(found: LogFile, line: str) -> bool:
    """Read options, shapes and times; return whether the line may have any."""
    _, _, told = line.partition("] ")
    if ("trtexec" in line or "polygraphy" in line) and "--" in line:
        found.options |= {name: value or "" for name, value in _OPTION.findall(line)[:KEPT]}
        return True
    if "median = " in line:
        found.medians |= {name: float(ms) for name, ms in _MEDIAN.findall(line)}
        return True
    if "Precision: " in line:
        found.precision = line.partition("Precision: ")[2][:100].strip()
    elif "Flags " in line and "|" in line:
        found.precision = line.partition("|")[2].strip()[:200]
    elif "Selected Device: " in line:
        found.device = line.partition("Selected Device: ")[2][:100].strip()
    elif "Input build shape" in line:
        for name, text in _named_shapes(told):
            sizes = [_sizes(part, "x") for part in text.split("+")]
            if len(sizes) == 3:
                _add_profile(found, name, (sizes[0], sizes[1], sizes[2]))
    elif "Input inference shape" in line:
        found.load |= {name: _sizes(text, "x") for name, text in _named_shapes(told)}
    elif "min=" in line and "opt=" in line:
        for match in islice(_TRIPLE.finditer(line), KEPT):
            low, opt, high = (_sizes(text, ",") for text in match.groups())
            before = line[max(0, match.start() - MAX_NAME) : match.start()].split()
            _add_profile(found, before[-1].lstrip("{") if before else "", (low, opt, high))
    else:
        return False
    return True


def _named_shapes(told: str) -> Iterator[tuple[str, str]]:
    for word in told.replace(",", " ").split()[:KEPT]:
        name, _, text = word.rpartition("=")
        if 0 < len(name) <= MAX_NAME and _SHAPE.fullmatch(text):
            yield name, text


def _add_profile(found: LogFile, name: str, sizes: tuple[Shape, Shape, Shape]) -> None:
    """Add to the first profile that does not have this input; a repeated line is no other profile."""
    if any(profile.get(name) == sizes for profile in found.profiles):
        return
    profile = next((each for each in found.profiles if name not in each), None)
    if profile is not None:
        profile[name] = sizes
    elif len(found.profiles) < KEPT:
        found.profiles.append({name: sizes})


def _keep(known: list[str], text: str) -> None:
    if text and len(known) < KEPT and text not in known:
        known.append(text)


def _sizes(text: str, separator: str) -> Shape:
    return tuple(int(part) for part in text.split(separator) if part.strip().isdecimal() and len(part) < 19)
