"""An ONNX file of any origin: who quantized it, its GEMMs with their FLOPs, what `check` finds at them."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import onnx

from qdqbench.quantize.check.check import CheckReport, check_model
from qdqbench.quantize.check.codes import finding_label
from qdqbench.quantize.check.gemms import Group
from qdqbench.quantize.check.operators import PRODUCTS
from qdqbench.quantize.check.types import walk_types
from qdqbench.quantize.check.view import MOVES, CheckGraph, is_dequantize, is_quantize, operator
from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.graph.read import read_model

TOKENS = 128  # length that the FLOPs of attention are counted at


@dataclass(frozen=True)
class Product:
    """One node that multiplies matrices."""

    name: str
    weighted: bool  # by weights; else both operands are activations
    flops: float  # for one token of a sequence of TOKENS


@dataclass(frozen=True)
class OnnxFile:
    """What the rules read of a graph."""

    path: Path
    origin: str  # who quantized it and how, in a few words
    report: CheckReport
    products: dict[str, Product]
    groups: list[Group]  # one a code, in the order of `check`
    operators: Counter[str]
    types: Counter[str] = field(default_factory=Counter)  # what the floating-point GEMMs compute in

    @property
    def qdq(self) -> bool:
        """Whether anything is quantized explicitly."""
        return self.operators["QuantizeLinear"] + self.operators["DequantizeLinear"] > 0

    @property
    def integer(self) -> bool:
        """Whether operators compute on codes themselves: ONNX Runtime's own formats."""
        return any(row.code in ("unsupported-op", "no-plain-form") for row in self.report.findings)


def read_onnx(path: Path) -> OnnxFile:
    """Read and check a file.

    Raises:
        UserError: as `read_model` and `check_model` raise it.
    """
    model = read_model(path)
    try:
        report = check_model(model)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    operators = Counter(node.op_type for node in model.graph.node)
    stopped = any(row.code in ("invalid-onnx", "opset-too-low") for row in report.findings)
    graph = None if stopped else CheckGraph(model, walk_types(model, report.opset)[0])
    products = {} if graph is None else _products(graph)
    types: Counter[str] = Counter()
    if graph is not None:
        names = onnx.TensorProto.DataType.Name
        found = (graph.types.get(node.output[0], 0) for node in graph.matmuls)
        types.update(names(kind) for kind in found if kind in (1, 10, 16))
    return OnnxFile(
        path=path,
        origin=_origin(model, operators),
        report=report,
        products=products,
        groups=report.groups,
        operators=operators,
        types=types,
    )


def _products(graph: CheckGraph) -> dict[str, Product]:
    sizes: dict[str, tuple[int, int] | None] = {}
    nodes = [node for node in graph.nodes if node.op_type in PRODUCTS and node.output]
    for node in nodes:
        sizes[node.output[0]] = _weight_size(graph, node)
    widths = Counter(size[0] for size in sizes.values() if size)
    hidden = widths.most_common(1)[0][0] if widths else 1
    found: dict[str, Product] = {}
    for node in nodes:
        size = sizes[node.output[0]]
        name = finding_label(node)
        if size is None:
            found[name] = Product(name, False, 2.0 * TOKENS * hidden)
        else:
            # an exporter writes Gemm for what has no length any more: it runs once a sequence
            share = 1 / TOKENS if node.op_type in ("Gemm", "QGemm") else 1.0
            found[name] = Product(name, True, 2.0 * size[0] * size[1] * share)
    return found


def _weight_size(graph: CheckGraph, node: onnx.NodeProto) -> tuple[int, int] | None:
    """K and N of a weight; None where both operands are activations."""
    position = PRODUCTS[node.op_type]
    if len(node.input) <= position:
        return None
    name = node.input[position]
    for _ in range(8):
        tensor, maker = graph.index.stored(name), graph.index.producers.get(name)
        if tensor is not None:
            sizes = sorted(tensor.dims)
            return (tensor.dims[-2], tensor.dims[-1]) if len(sizes) > 1 else None
        moved = maker is not None and (operator(maker) in MOVES or is_quantize(maker) or is_dequantize(maker))
        if maker is None or not moved or not maker.input:
            return None
        name = maker.input[0]
    return None


def _origin(model: onnx.ModelProto, operators: Counter[str]) -> str:  # noqa: PLR0911  one line a tool
    """A guess from what each tool leaves in its files."""
    keys = {entry.key.lower() for entry in model.metadata_props[:100]}
    producer = f"{model.producer_name} {model.producer_version}".strip()[:80]
    names = " ".join(node.name for node in model.graph.node[:20_000])
    if "qdqbench.fix" in keys:
        return "written by qdqbench fix"
    if any("qdqbench" in key for key in keys):
        return "written by qdqbench"
    if operators["DynamicQuantizeLinear"] or operators["MatMulInteger"]:
        return "dynamically quantized, as ONNX Runtime's quantize_dynamic does"
    if any(name.startswith("QLinear") or name == "QGemm" for name in operators):
        return "quantized in ONNX Runtime's QOperator format"
    if not operators["QuantizeLinear"] and not operators["DequantizeLinear"]:
        return f"not quantized ({producer or 'unknown producer'})"
    if (
        any("nncf" in key for key in keys)
        or "nncf" in names.lower()
        or "QuantizeLinear_ActivationIn" in names
    ):
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
