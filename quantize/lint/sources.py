"""Files of one build, each recognized by its content and read by the reader of its format."""

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx

from qdqbench.quantize.engine.layers import find_computing_rows, read_table
from qdqbench.quantize.engine.results import LayerRow
from qdqbench.quantize.engine.trtexec import read_profile
from qdqbench.quantize.graph.index import MOVES, QDQ
from qdqbench.quantize.graph.read import read_model
from qdqbench.quantize.lint.cache_import import CalibrationCache, is_cache, read_cache_file
from qdqbench.quantize.lint.check import CheckReport, check_model
from qdqbench.quantize.lint.findings import Finding, Share, find, finding_label, read_kinds
from qdqbench.quantize.lint.inspection import Graph, Inspection, Time, inspect_layers, read_graph
from qdqbench.quantize.lint.logs import LogFile, is_log, read_log
from qdqbench.quantize.lint.view import PRODUCTS, CheckGraph
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.limits import BackendName

# Fixes that want the ONNX file, which `diagnose` checks where it is given.
ONNX_WANTED = ("qdqbench check {file}", "give the ONNX file too")
TOKENS = 128  # length that the FLOPs of attention are counted at


@dataclass(frozen=True)
class MatrixProduct:
    weighted: bool  # by weights; else both operands are activations
    flops: float  # for one token of a sequence of TOKENS


@dataclass(frozen=True)
class OnnxFile:
    path: Path
    origin: str  # who quantized it and how, in a few words
    report: CheckReport
    products: dict[str, MatrixProduct]
    operators: Counter[str]
    types: Counter[str]  # what the floating-point GEMMs compute in

    @property
    def qdq(self) -> bool:
        return self.operators["QuantizeLinear"] + self.operators["DequantizeLinear"] > 0

    @property
    def integer(self) -> bool:
        """Return whether operators compute on codes themselves: ONNX Runtime's own formats."""
        return any(row.code in ("unsupported-op", "no-plain-form") for row in self.report.findings)


def read_onnx(path: Path) -> OnnxFile:
    model = read_model(path)
    try:
        report = check_model(model)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    products, types = dict[str, MatrixProduct](), Counter[str]()
    if not any(row.code in ("invalid-onnx", "opset-too-low") for row in report.findings):
        graph = CheckGraph(model)
        products = _products(graph)
        kinds = (graph.types.get(node.output[0], 0) for node in graph.matmuls)
        types.update(onnx.TensorProto.DataType.Name(kind) for kind in kinds if kind in (1, 10, 16))
    operators = Counter(node.op_type for node in model.graph.node)
    return OnnxFile(path, _origin(model, operators), report, products, operators, types)


def _products(graph: CheckGraph) -> dict[str, MatrixProduct]:
    nodes = [node for node in graph.nodes if node.op_type in PRODUCTS and node.output]
    sizes = {node.output[0]: _weight_size(graph, node) for node in nodes}
    widths = Counter(size[0] for size in sizes.values() if size)
    hidden = widths.most_common(1)[0][0] if widths else 1
    found: dict[str, MatrixProduct] = {}
    for node in nodes:
        size = sizes[node.output[0]]
        flops = 2.0 * math.prod(size or (TOKENS, hidden))
        # an exporter writes Gemm for what has no length any more: it runs once a sequence
        once = size is not None and node.op_type in ("Gemm", "QGemm")
        found[finding_label(node)] = MatrixProduct(size is not None, flops * (1 / TOKENS if once else 1.0))
    return found


def _weight_size(graph: CheckGraph, node: onnx.NodeProto) -> tuple[int, int] | None:
    position = PRODUCTS[node.op_type]
    if len(node.input) <= position:
        return None
    tensor = graph.index.stored(graph.index.origin(node.input[position], (*MOVES, *QDQ))[1])
    return (tensor.dims[-2], tensor.dims[-1]) if tensor is not None and len(tensor.dims) > 1 else None


OWN = "written by qdqbench"


def _origin(model: onnx.ModelProto, operators: Counter[str]) -> str:  # noqa: PLR0911  one line a tool
    keys = {entry.key.lower() for entry in model.metadata_props[:100]}
    producer = f"{model.producer_name} {model.producer_version}".strip()[:80]
    names = " ".join(node.name for node in model.graph.node[:20_000])
    if "qdqbench.fix" in keys:
        return "written by qdqbench fix"
    if any("qdqbench" in key for key in keys):
        return OWN
    if operators["DynamicQuantizeLinear"] or operators["MatMulInteger"]:
        return "dynamically quantized, as ONNX Runtime's quantize_dynamic does"
    if any(name.startswith("QLinear") or name == "QGemm" for name in operators):
        return "quantized in ONNX Runtime's QOperator format"
    if not operators["QuantizeLinear"] and not operators["DequantizeLinear"]:
        return f"not quantized ({producer or 'unknown producer'})"
    if "nncf" in " ".join([names.lower(), *keys]) or "QuantizeLinear_ActivationIn" in names:
        return "quantized by NNCF"
    if any("modelopt" in key for key in keys) or "modelopt" in producer.lower():
        return "quantized by ModelOpt"
    if "onnx.quantize" in producer and not any(key.startswith("onnx.infer") for key in keys):
        return "quantized by ModelOpt's ONNX quantizer"  # which builds on ONNX Runtime's
    if "onnx.quantize" in producer or "_QuantizeLinear" in names or "onnx.infer" in keys:
        return "quantized by ONNX Runtime (Q/DQ)"
    if "_quantizer" in names:
        return "fake-quantized in PyTorch (pytorch-quantization or ModelOpt)"
    return f"explicit Q/DQ ({producer or 'unknown producer'})"


_TAGS: dict[bytes, BackendName] = {b"ptrt": "tensorrt", b"ftrt": "tensorrt", b"vtrt": "tensorrt_rtx"}
_HEADER = 64


@dataclass(frozen=True)
class EngineFile:
    backend: BackendName
    version: str | None  # None: the header does not say, as those of TensorRT 8.5 and older
    bytes: int


def read_engine(path: Path) -> EngineFile:
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            header = stream.read(_HEADER)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check the path") from error
    if len(header) < _HEADER or header[:4] not in _TAGS:
        raise UserError(f"{path} is no whole engine: its header has {len(header)} bytes; build it again")
    parts = [*header[24:28]]
    known = 0 < parts[0] < 30 and any(parts)
    return EngineFile(_TAGS[header[:4]], ".".join(map(str, parts)) if known else None, size)


_START = 1 << 16  # bytes that decide what a file is
# What is never read, however it is called: to open these runs code, or unpacks what somebody else packed.
_REFUSED = {
    b"PK\x03\x04": "a zip archive (a PyTorch checkpoint or a package); export the model to ONNX",
    b"PK\x05\x06": "an empty zip archive; export the model to ONNX",
    b"\x1f\x8b": "a gzip archive; unpack it",
    b"\x80": "a pickle, which is never loaded here; export the model to ONNX",
    b"\x89HDF": "an HDF5 file; export the model to ONNX",
    b"\x7fELF": "a program or library; give files of a build",
}
_JSON_KINDS = (  # the first key that is found in the start of the file decides
    ("layers", re.compile(r'"[Ll]ayers"\s*:')),
    ("profile", re.compile(r'"(?:averageMs|medianMs|ms)"\s*:')),
    ("outputs", re.compile(r'"values"\s*:')),
)
READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "onnx": ("ONNX file", read_onnx),
    "log": ("build log", read_log),
    "layers": ("layer table", read_table),
    "profile": ("kernel profile", read_profile),
    "engine": ("engine", read_engine),
    "cache": ("calibration cache", read_cache_file),
}


def recognise(path: Path) -> str:
    try:
        if not path.is_file():
            raise UserError(f"{path} is not a file; give files of a build, such as model.onnx or build.log")
        with path.open("rb") as stream:
            start = stream.read(_START)
    except (OSError, ValueError) as error:  # ValueError: no possible path
        why = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read {path}: {why}; check the path and its permissions") from error
    if not start:
        raise UserError(f"{path} is empty; give files of a build, such as model.onnx or build.log")
    if what := next((what for magic, what in _REFUSED.items() if start.startswith(magic)), None):
        raise UserError(f"{path} is {what}")
    if start[:4] in _TAGS:
        return "engine"
    if is_cache(start):
        return "cache"
    if is_log(start):  # which may start with [date], as JSON does
        return "log"
    if start.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"["):
        return _json_kind(path, start.decode("utf-8", errors="replace"))
    if all(32 <= byte < 127 or byte in (9, 10, 13) for byte in start[:4096]):
        raise UserError(
            f"{path} is text, and neither a build log, JSON nor a calibration cache; give a file of a build"
        )
    return "onnx"


def _json_kind(path: Path, text: str) -> str:
    found = [(match.start(), kind) for kind, pattern in _JSON_KINDS if (match := pattern.search(text))]
    kind = min(found)[1] if found else ""
    if kind == "outputs":
        raise UserError(
            f"{path} holds outputs of an engine, which `qdqbench verify` compares; give its layers"
        )
    if not kind:
        raise UserError(
            f"{path} is JSON, but no layer table or kernel profile; give what trtexec wrote with "
            "--exportLayerInfo or --exportProfile, or the inspector's JSON"
        )
    return kind


@dataclass
class Evidence:
    paths: dict[str, Path] = field(default_factory=dict)  # by kind
    onnx: OnnxFile | None = None
    log: LogFile | None = None
    layers: list[LayerRow] = field(default_factory=list)  # of a table, or of the log
    profile: dict[str, float] = field(default_factory=dict)  # milliseconds by kernel
    engine: EngineFile | None = None
    cache: CalibrationCache | None = None
    other_build: str = ""  # why table and graph could not be joined
    unread: dict[Path, str] = field(default_factory=dict)  # why a file was left out

    def name(self, kind: str) -> str:
        path = self.paths.get(kind) or (self.paths.get("log") if kind == "layers" else None)
        return path.name if path else ""

    @cached_property
    def graph(self) -> Graph | None:
        return read_graph(self.onnx.path) if self.onnx is not None and self.onnx.products else None

    @cached_property
    def inspection(self) -> Inspection | None:
        """The layer table, held against the graph and the profile where they are at hand."""
        if not self.layers:
            return None
        times = self.profile or None
        try:
            joined = inspect_layers(self.layers, self.graph, times=times)
        except UserError as error:
            self.other_build = str(error)
        else:
            known = len(self.graph.linears) + len(self.graph.products) if self.graph else 0
            if 2 * len(joined.unknown) <= known:
                return joined
            found = known - len(joined.unknown)
            self.other_build = f"the table names {found} of {known} MatMul and Gemm nodes"
        return inspect_layers(self.layers, times=times)

    @property
    def time(self) -> Time | None:
        """The profile, where its kernels are those of the table."""
        time = self.inspection.time if self.inspection else None
        return time if time and time.by_kernel else None

    @cached_property
    def _kernels(self) -> dict[str, list[LayerRow]]:
        if self.inspection is None:
            return {}
        rows, graph = self.inspection.rows, self.inspection.graph
        known = [*graph.linears, *graph.products, *graph.softmaxes]
        return {name: found[0] for name, found in find_computing_rows(rows, known).items()}

    def share_of_nodes(self, nodes: Collection[str]) -> Share | None:
        """Return the share of profiled time that kernels of these GEMMs take, else of FLOPs."""
        rows = {row.name: row for node in nodes for row in self._kernels.get(node, ())}
        if self.time and rows:
            return self.share_of_kernels(rows.values())
        products = self.onnx.products if self.onnx else {}
        total = sum(product.flops for product in products.values())
        touched = [products[node].flops for node in dict.fromkeys(nodes) if node in products]
        if total and touched:
            return sum(touched) / total, "GEMM FLOPs"
        gemms = self.inspection.gemms if self.inspection else 0
        return (min(1.0, len({*nodes}) / gemms), "GEMMs") if gemms and nodes else None

    def share_of_kernels(self, rows: Iterable[LayerRow]) -> Share | None:
        names = {row.name for row in rows}
        if (time := self.time) and time.total:
            return sum(time.by_kernel.get(name, 0.0) for name in names) / time.total, "profiled time"
        kernels = len(self.inspection.rows) if self.inspection else 0
        return (len(names) / kernels, "kernels") if kernels and names else None

    def shown(self, kinds: Sequence[str] | None = None) -> list[str]:
        """Return the names of files of these kinds, else of the layer table and a joined profile."""
        kinds = kinds or (("layers", "profile") if self.time else ("layers",))
        return [name for kind in kinds if (name := self.name(kind))]

    def find(
        self, code: str, kinds: Sequence[str] | None, nodes: Sequence[str] = (), **words: Any
    ) -> Finding:
        """Return a finding that the files of these kinds show, else the layer table and a joined profile.

        Where the ONNX file is given, `check` was applied to it already and needs no command.
        """
        graph, fixes = self.paths.get("onnx"), words.pop("fixes", None) or read_kinds()[code].fixes
        if graph is not None:
            fixes = [fix for fix in fixes if fix not in ONNX_WANTED] or fixes
        elif (built := self.log.options.get("onnx", "") if self.log else "").endswith(".onnx"):
            graph = Path(built)
        return find(code, nodes=nodes, shown=self.shown(kinds), path=graph, fixes=fixes, **words)


def read_sources(paths: list[Path]) -> Evidence:
    """Read files of one build. What cannot be read is told with the others; UserError where none can."""
    evidence = Evidence()
    for path in paths:
        try:
            title, reader = READERS[kind := recognise(path)]
            if kind not in evidence.paths:
                setattr(evidence, kind, reader(path))
        except UserError as error:
            if len(paths) == 1:
                raise
            evidence.unread[path] = str(error)
            continue
        if kind in evidence.paths:
            raise UserError(
                f"{evidence.paths[kind]} and {path} are both a {title}; the files of one call are read "
                "together as one build, so diagnose these one by one"
            )
        evidence.paths[kind] = path
    if not evidence.paths:
        raise UserError("none of the files can be read: " + " | ".join(evidence.unread.values()))
    if evidence.log and not evidence.layers:
        evidence.layers = evidence.log.layers
    return evidence
