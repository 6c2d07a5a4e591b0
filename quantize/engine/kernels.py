"""What one kernel of an engine does, read from its name, its ONNX nodes and its datatypes.

TensorRT names a generated kernel after its operations, four letters each: CastMeanSubMulMean is a LayerNorm
that goes to FP32 first. Long names end in Etc, and then the ONNX nodes that the kernel lists decide.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Literal

from qdqbench.quantize.engine.layers import base_name, copy_of, is_attention, name_parts
from qdqbench.quantize.models.families.known import (
    ACTIVATION,
    ANY_EMBEDDINGS,
    ANY_HEAD,
    ANY_LAYER,
    RUN,
    SILENT,
    layer_of_node,
)
from qdqbench.quantize.utils.names import count_of
from qdqbench.quantize.utils.results import LayerRow

KernelKind = Literal[
    "gemm", "attention", "softmax", "LayerNorm", "GELU", "embeddings", "mask", "layout", "quantize",
    "elementwise", "none",
]  # fmt: skip
EMBEDDINGS, HEAD, OTHER = "embeddings", "head", "other"
_QUANTIZER = re.compile(r"(?:Quantize|Dequantize)Linear(?:_\d+)?(?:@\d+)?$|_quantizer(?:/|$)")
_NO_KERNEL = {"signal", "wait", "shape_call", "shapehosttodevice", "constant", "noop", "shape"}
_TYPES: dict[str, KernelKind] = {  # LayerType of engines that are not made by Myelin
    **dict.fromkeys(("matrixmultiply", "fullyconnected", "convolution"), "gemm"),
    **dict.fromkeys(("reformat", "shuffle", "cast", "slice", "concatenation", "gather"), "layout"),
    **dict.fromkeys(("quantize", "dequantize", "scale"), "quantize"),
    "softmax": "softmax",
    **dict.fromkeys(("normalization", "layernormalization", "mvn"), "LayerNorm"),  # those of CPU runtimes too
}
_MOVES = {"Tran", "Move", "Conc", "Repl", "Slic", "Gath"}
_ALIASES = {"Half": "FP16", "Float": "FP32", "BFloat16": "BF16"}


def kernel_operator(node: str) -> str:
    """Return the operator that an exporter wrote into a name: `MatMul` of `/a/MatMul_1` and `/a/MatMul@3`."""
    return re.sub(r"(?:_\d+)?(?:@\d+)?$", "", node.rpartition("/")[2])


def operations(row: LayerRow) -> list[str]:
    return re.findall(r"[A-Z][a-z]*", base_name(row)) if row.name.startswith("__myl_") else []


def kernel_kind(row: LayerRow) -> KernelKind:
    words, lower = operations(row), row.kind.lower()
    operators = {kernel_operator(node) for node in row.onnx}
    kind: KernelKind = "elementwise"
    if lower in _NO_KERNEL:
        kind = "none"
    elif is_attention(row):
        kind = "attention"
    elif lower == "gemm" or "Fc" in words:
        kind = "gemm"
    elif lower in _TYPES:
        kind = _TYPES[lower]
    elif "Gath" in words and kernel_block(row) == EMBEDDINGS:
        kind = "embeddings"
    elif "Mean" in words or "LayerNormalization" in operators:
        kind = "LayerNorm"
    elif is_gelu(row):
        kind = "GELU"
    elif {"Maxr", "Exp"} <= {*words} or "Softmax" in operators:
        kind = "softmax"
    elif row.inputs and {*row.inputs} <= {"Int64", "Int32", "Bool"}:
        kind = "mask"
    elif _MOVES & {*words}:
        kind = "layout"
    elif "Roun" in words or ("Int8" in row.inputs and "Cast" in words):
        kind = "quantize"
    elif words and {*words} <= {"Resh", "Cast"}:
        kind = "layout"
    return kind


def select_profile(layers: Sequence[LayerRow]) -> tuple[list[LayerRow], int]:
    """Return the kernels of the largest profile, without signals and waits, and the number of profiles."""
    copies = Counter(copy_of(row) for row in layers if copy_of(row))
    main = copies.most_common(1)[0][0] if copies else ""
    rows = [row for row in layers if copy_of(row) in (main, "") and kernel_kind(row) != "none"]
    return rows, max(len(copies), 1)


def format_count(layers: Sequence[LayerRow]) -> str:
    """Format a count: `120 kernels`, or `480 kernels, 120 for each of 4 profiles`."""
    rows, profiles = select_profile(layers)
    total = sum(kernel_kind(row) != "none" for row in layers)
    if profiles == 1:
        return count_of(total, "kernel")
    each = f"{len(rows)} for each" if total == profiles * len(rows) else f"at most {len(rows)} for each"
    return f"{count_of(total, 'kernel')}, {each} of {profiles} profiles"


def is_norm(row: LayerRow) -> bool:
    return "Mean" in operations(row) or _TYPES.get(row.kind.lower()) == "LayerNorm"


def is_gelu(row: LayerRow) -> bool:
    return "Erf" in operations(row) or any(map(_of_gelu, row.onnx))


def _of_gelu(node: str) -> bool:
    inside = ACTIVATION.fullmatch(node.rpartition("/")[0].rpartition("/")[2]) and not ANY_HEAD.search(node)
    return kernel_operator(node) in ("Gelu", "Erf") or bool(inside)


def kernel_block(row: LayerRow) -> str:
    """Return the block of the network that a kernel belongs to: "embeddings", "layer.N", "head" or "other".

    A kernel that ends one layer often quantizes for the next; the block is where most of its nodes are.
    """
    nodes = row.onnx or name_parts(row)
    votes = Counter(map(block_of_node, (node for node in nodes if not _QUANTIZER.search(node))))
    votes = votes or Counter(map(block_of_node, nodes))
    del votes[OTHER]
    return votes.most_common(1)[0][0] if votes else OTHER


def block_of_node(node: str) -> str:
    if (layer := layer_of_node(node)) is not None:
        return f"layer.{layer}"
    if ANY_EMBEDDINGS.search(node):
        return EMBEDDINGS
    return HEAD if ANY_HEAD.search(node) else OTHER


def block_order(block: str) -> tuple[int, int]:
    name, _, number = block.partition(".")
    places = {EMBEDDINGS: 0, "layer": 1, HEAD: 2}
    return places.get(name, 3), int(number[:9]) if number.isdecimal() else 0


def shorten_node(node: str) -> str:
    layer, number = ANY_LAYER.search(node), layer_of_node(node)
    parts = RUN.sub("", node[layer.end() if layer else 0 :]).strip("/").split("/")
    if not layer and len(parts) > 2:
        parts = parts[1:]  # the model's prefix
    if len(parts) > 1 and re.fullmatch(r"MatMul|Gemm", parts[-1]) and parts[-2] != SILENT[0]:
        parts = parts[:-1]
    names = [part for part in parts if part not in SILENT and not (layer and ACTIVATION.fullmatch(part))]
    names = [re.sub("^LayerNormalization$", "", part) for part in names]
    return " ".join([*([f"layer.{number}"] if layer else []), *filter(None, names)]) or node


def kernel_label(row: LayerRow, linears: Iterable[str] = ()) -> str:
    """Label a kernel, a GEMM by its linears, in few words: `layer.0 attention value+key+query`."""
    kind = kernel_kind(row)
    if found := list(linears):
        return _together([shorten_node(node) for node in found])
    fixed = {
        "attention": f"{kernel_block(row)} attention",
        "embeddings": EMBEDDINGS,
        "mask": "attention mask",
    }
    own = [node for node in row.onnx if not _QUANTIZER.search(node)] or row.onnx
    if kind in fixed or not own:
        return fixed.get(kind, base_name(row))
    if kind == "GELU":
        place = next(filter(_of_gelu, own), own[0])
        return f"{shorten_node(place.rpartition('/')[0])} GELU"
    biased = [node.rpartition("/")[0] for node in own if kernel_operator(node) == "Add"]
    if kind == "layout" and biased:  # the linears whose bias and result it moves
        return _together([shorten_node(node) for node in dict.fromkeys(biased)])
    telling = {"LayerNorm": "LayerNormalization", "softmax": "Softmax"}.get(kind, "")
    order = (telling, "MatMul", "Gemm", "Add", "Transpose")
    return shorten_node(
        min(
            own, key=lambda node: order.index(kernel_operator(node)) if kernel_operator(node) in order else 99
        )
    )


def _together(names: list[str]) -> str:
    heads = {name.rpartition(" ")[0] for name in names}
    if len(names) == 1 or len(heads) > 1:
        return " + ".join(names)
    return " ".join(filter(None, [heads.pop(), "+".join(name.rpartition(" ")[2] for name in names)]))


def types_text(row: LayerRow) -> str:
    """Format datatypes of inputs, times that of weights where the table has them: `INT8*INT8 -> FP16`."""
    sides = [
        "/".join(dict.fromkeys(_ALIASES.get(name, name.upper()) for name in side))
        for side in (row.inputs, row.outputs)
    ]
    weights = row.constants if kernel_kind(row) == "gemm" else []
    kinds = [name for name in ("Int8", "Half", "Float", "BFloat16") if name in weights]
    if kinds and len(row.inputs) == 1:
        sides[0] += f"*{_ALIASES.get(kinds[0], kinds[0].upper())}"
    return " -> ".join(side for side in sides if side)


def norm_precision(row: LayerRow) -> str:
    """Return the datatype in which a kernel does the statistics of LayerNorm, or the sum of softmax.

    A Cast ahead of the first of them is the FP32 island; without one it is that of the inputs. "unknown"
    where the name ends before.
    """
    words = operations(row)
    start = next((i for i, word in enumerate(words) if word in ("Mean", "Maxr")), None)
    floats = [name for name in row.inputs if name in ("Half", "Float", "BFloat16")]
    if start is None:
        return "unknown" if not floats or "Etc" in words else _ALIASES[floats[0]]
    before = [word for word in words[:start] if word not in ("Resh", "Tran", "Move", "Slic")]
    # with INT8 residuals a LayerNorm may write INT8 alone: then its weights say what it computes in
    if "Half" in (*row.inputs, *row.outputs, *row.constants) or "BFloat16" in row.inputs:
        own = "BF16" if "BFloat16" in row.inputs else "FP16"
        return "FP32" if before[-1:] == ["Cast"] else own
    return "FP32"


def float_residuals(layers: Sequence[LayerRow], norms: Collection[str]) -> list[str]:
    """Return the normalizations, by ONNX name and sorted, whose kernels do not read the residual as INT8.

    In a fused kernel the residual stands beside the result of the linear, so one INT8 input is enough; a GEMM
    that normalizes what it makes has INT8 operands too, and needs another. One that no row names is not
    proven.
    """
    proven: dict[str, dict[str, bool]] = {name: {} for name in norms}
    for row in layers:
        int8 = row.inputs.count("Int8") > (row.kind == "gemm")
        for name in proven.keys() & set(row.onnx):
            copies = proven[name]
            copies[copy_of(row)] = copies.get(copy_of(row), False) or int8
    return sorted(name for name, copies in proven.items() if not copies or not all(copies.values()))
