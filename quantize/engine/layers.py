"""The INT8 layers of an engine, read from the layer table of a build log or of the engine inspector.

Counts are ONNX MatMul/Gemm nodes, not kernels: one kernel may run q, k and v, and one node may show up in
several kernels (its dequantization is often fused into the next one).
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from qdqbench.quantize.engine.results import LayerRow
from qdqbench.quantize.models.families.known import (
    ACTIVATION,
    ANY_EMBEDDINGS,
    ANY_HEAD,
    ANY_LAYER,
    RUN,
    SILENT,
    layer_of_node,
)
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.files import read_bounded
from qdqbench.quantize.utils.names import count_of, name_list

ATTENTION = "attention"  # kind of a row that is a whole one, of a CPU runtime or of backend cuda
OWN_NORM = "norm"  # kind of a LayerNorm of backend cuda
MAX_TABLE_BYTES = 16 << 20  # of a saved table; BERT-large with four profiles has 2 MiB
MAX_TABLE_LAYERS = 20_000  # BERT-large with four profiles has 1,400 kernels
MAX_MERGED = 64  # GEMMs in one kernel
_NAME = re.compile(r"(?:^|\s)Name: ")
_KIND = re.compile(r", LayerType: (\w+), Inputs: \[")
_CONSTANTS, _OUTPUTS = "], Constants: [", "], Outputs: ["
_AFTER_OUTPUTS = re.compile(r"\], (?:Tactic|Parameter|Stream|Event|shapeValues|Metadata)\w*: ")
_DATATYPE = re.compile(r"(?:Format/)?Datatype: ([^,}\]]*)")
_GRAPH = re.compile(r"_myl(\d+)_\d+$")  # the copy of the network (one a profile) and the kernel's place in it
_PROFILE = re.compile(r" \[profile \d+\]$")
_NAMED = ("Int8", "UInt8", "Int4", "Int32", "Int64", "Half", "Float", "Bool", "BFloat16")
_TYPES = {name.lower(): name for name in _NAMED}
_TYPES |= {"fp8": "FP8", "fp4": "FP4", "fp16": "Half", "fp32": "Float", "bf16": "BFloat16"}


@dataclass
class Coverage:
    int8_gemms: list[str]  # proven, sorted; products of two activations only where they are expected
    not_int8: list[str]  # expected and not proven, sorted
    attention_fused: int  # attentions that run as one kernel
    attention_int8: int  # of these, with INT8 q, k and v
    int8_products: int  # proven products of two activations, outside of fused attentions
    unknown: list[str]  # nodes that no row names, sorted


def parse_log(lines: Iterable[str]) -> list[LayerRow]:
    rows = []
    for line in (part for message in lines for part in message.split("\n")):
        if (parts := _parts(line)) is None:
            continue
        name, kind, *tensors, rest = parts
        tensors.append(_AFTER_OUTPUTS.split(rest, maxsplit=1)[0])
        inputs, constants, outs = ([_datatype(text) for text in _DATATYPE.findall(part)] for part in tensors)
        onnx = _onnx_names(rest.partition(", Metadata: ")[2])
        row = LayerRow(name=name, kind=kind, onnx=onnx, inputs=inputs, constants=constants, outputs=outs)
        rows.append(row)
    return rows


def _parts(line: str) -> tuple[str, str, str, str, str] | None:
    """Split a line into name, kind, inputs, constants and the rest, at the first of each mark."""
    name = _NAME.search(line)
    kind = _KIND.search(line, name.end()) if name else None
    if name is None or kind is None:
        return None
    head, found, rest = line[kind.end() :].partition(_OUTPUTS)
    if not found:
        return None
    inputs, _, constants = head.partition(_CONSTANTS)
    return line[name.end() : kind.start()], kind[1], inputs, constants, rest


def read_table(path: Path) -> list[LayerRow]:
    text = read_bounded(path, MAX_TABLE_BYTES, "a layer table", "the engine inspector's JSON")
    try:
        rows = _own_rows(text) or parse_inspector_json(text)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    if not rows:
        raise UserError(f"{path} lists no layers; save the inspector's JSON of a whole engine")
    return rows


def _own_rows(text: str) -> list[LayerRow]:
    try:
        layers = json.loads(text, strict=False)["layers"]
        _check_count(layers)
        return [LayerRow.model_validate(layer) for layer in layers]
    except (ValueError, KeyError, TypeError, RecursionError, ValidationError):
        return []


def _check_count(layers: Any) -> None:
    if isinstance(layers, list) and len(layers) > MAX_TABLE_LAYERS:
        raise UserError(f"the table has {len(layers)} layers, and an engine at most {MAX_TABLE_LAYERS}")


def parse_inspector_json(text: str) -> list[LayerRow]:
    """Parse `EngineInspector.get_engine_information(JSON)` of TensorRT 10 (no constants) or 11."""
    try:
        layers = json.loads(text, strict=False)["Layers"]  # metadata may hold a bare 0x1f
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"not engine inspector JSON ({error!r}); write it with get_engine_information(JSON)"
        ) from error
    _check_count(layers)
    if not isinstance(layers, list) or not all(isinstance(layer, dict) for layer in layers):
        raise UserError(
            "the inspector JSON lists layers without datatypes; build with ProfilingVerbosity.DETAILED"
        )
    return [
        LayerRow(
            name=str(layer.get("Name", "")),
            kind=str(layer.get("LayerType", "")),
            onnx=_onnx_names(str(layer.get("Metadata") or "")),
            inputs=_datatypes(layer.get("Inputs")),
            constants=_datatypes(layer.get("Constants")),
            outputs=_datatypes(layer.get("Outputs")),
        )
        for layer in layers
    ]


def measure_coverage(
    layers: Sequence[LayerRow], expected_gemms: Collection[str], all_gemms: Collection[str]
) -> Coverage:
    """Hold the table against the ONNX nodes that must run in INT8, in each copy of the network in it."""
    expected, known = set(expected_gemms), set(expected_gemms) | set(all_gemms)
    copies = find_computing_rows(layers, known)
    proven = {node for node, parts in copies.items() if all(is_int8(row) for rows in parts for row in rows)}
    linear = {
        node
        for node, parts in copies.items()
        if not any(len(row.inputs) != 1 or is_attention(row) for rows in parts for row in rows)
    }
    fused = {node for node, parts in copies.items() if all(any(map(is_attention, rows)) for rows in parts)}
    attentions = [(known.intersection(row.onnx), row) for row in layers if is_attention(row)]
    whole = {tuple(sorted(nodes)) or row.name: row for nodes, row in attentions if nodes <= fused}
    return Coverage(
        int8_gemms=sorted(proven & (linear | expected)),
        not_int8=sorted(expected - proven),
        attention_fused=len(whole),
        attention_int8=sum(is_int8(row) and proven >= known.intersection(row.onnx) for row in whole.values()),
        int8_products=len((proven & expected) - linear - fused),
        unknown=sorted(known - set(copies)),
    )


def find_computing_rows(
    layers: Sequence[LayerRow], known: Collection[str]
) -> dict[str, list[list[LayerRow]]]:
    names = frozenset(known)
    found: dict[str, dict[str, list[LayerRow]]] = defaultdict(lambda: defaultdict(list))
    for row in layers:
        for node in _nodes(row, names):
            found[node][copy_of(row)].append(row)
    return {node: [_deciding(rows, node) for rows in graphs.values()] for node, graphs in found.items()}


def copy_of(row: LayerRow) -> str:
    graph = _GRAPH.search(row.name)
    return graph[1] if graph else ""


def base_name(row: LayerRow) -> str:
    """Name of a kernel without its place in the engine: the same for the same kernel of another layer."""
    return _GRAPH.sub("", row.name).removeprefix("__myl_")


def is_attention(row: LayerRow) -> bool:
    return "_gemm_mha" in row.name or row.kind == ATTENTION


# ONNX Runtime's kernels for integers. Their weights are UINT8 on CPUs that would saturate with INT8.
INTEGER_KERNELS = ("MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "QLinearMatMul", "QGemm")


def is_int8(row: LayerRow) -> bool:
    """Return whether the kernel multiplies in INT8.

    A `gemm` whose inputs, and weights where the table shows them, are all INT8; or a fused attention with
    INT8 q, k and v (the mask is not). INT8 inputs alone prove nothing: `runtime_fusion` kernels named
    CastMul...Fc take INT8 codes, dequantize them and multiply in FP16.
    """
    if is_attention(row):
        return row.inputs.count("Int8") >= 3
    weights = {"Int8", "UInt8"} if row.kernel in INTEGER_KERNELS else {"Int8"}
    weights_int8 = len(row.inputs) > 1 or not row.constants or not weights.isdisjoint(row.constants)
    taken = {"Int8"} if row.kernel is None else {"Int8", "UInt8"}  # CPU runtimes may add 128 to codes
    codes = bool(row.inputs) and {*row.inputs} <= taken
    return row.kind == "gemm" and codes and weights_int8


@dataclass(frozen=True)
class NotInt8:
    cause: Literal["no kernel", "no Q/DQ", "dequantizes both", "dequantizes weights"]
    kernel: str = ""  # what runs it, on which datatypes

    def __str__(self) -> str:
        return _CLAUSES[self.cause].format(kernel=self.kernel)


_CLAUSES = {
    "no kernel": "no kernel names it",
    "no Q/DQ": "runs as {kernel}, because no Q/DQ pair reaches both of its inputs",
    "dequantizes both": "runs as {kernel} after dequantizing both, because of its weight axis or a "
    "per-channel activation scale",
    "dequantizes weights": "runs as {kernel} after dequantizing its weights, because its input has no Q/DQ "
    "or a scale no GEMM takes",
}


def why_not(layers: Sequence[LayerRow], node: str) -> NotInt8:
    rows = [row for row in layers if node in _nodes(row, {node})]
    if not rows:
        return NotInt8("no kernel")
    row = next((row for row in _deciding(rows, node) if not is_int8(row)), rows[0])
    kernel = f"{row.kind} on {'/'.join(row.inputs) or 'nothing'}"
    if "Int8" not in row.constants:
        return NotInt8("no Q/DQ", kernel)
    return NotInt8("dequantizes both" if "Int8" in row.inputs else "dequantizes weights", kernel)


def _deciding(rows: list[LayerRow], node: str) -> list[LayerRow]:
    """Return the rows of one copy of the network that compute `node`; others may only dequantize it."""
    named = [row for row in rows if row.kind == "gemm" and node in name_parts(row)]
    computing = [row for row in rows if row.kind in ("gemm", "runtime_fusion") or is_attention(row)]
    return named or computing or rows


def _nodes(row: LayerRow, known: Collection[str]) -> list[str]:
    """Return the known ONNX nodes that a kernel names, sorted: a GEMM by its name, else by its metadata."""
    named = [part for part in name_parts(row) if part in known] if row.kind == "gemm" else []
    return sorted(set(named or (name for name in row.onnx if name in known)))


def name_parts(row: LayerRow) -> list[str]:
    """Split a GEMM's name into possible ONNX names: `/a/MatMul [profile 1]+/b/MatMul [profile 1]_myl1_22`."""
    name = _GRAPH.sub("", row.name)
    split = name.split("+") if name.count("+") <= MAX_MERGED else []
    parts = [_PROFILE.sub("", part) for part in (name, *split)]
    return parts + [re.sub(r"^__mye\d+", "", part) for part in parts]


def _onnx_names(metadata: str) -> list[str]:
    """Return the names in `[ONNX Layer: a]\\x1f[ONNX Layer: b]`; copied logs may lack the separator."""
    pieces = (piece for part in re.split("[\x1e\x1f]", metadata) for piece in part.split("[ONNX Layer: ")[1:])
    return list(dict.fromkeys(piece.strip().removesuffix("]") for piece in pieces))


def _datatypes(tensors: Any) -> list[str]:
    entries = [tensor for tensor in tensors if isinstance(tensor, dict)] if isinstance(tensors, list) else []
    return [_datatype(str(tensor.get("Datatype", tensor.get("Format/Datatype", "")))) for tensor in entries]


def _datatype(text: str) -> str:
    """Return `Half` from `Half`, `FP16` or `Row major linear FP16 format`; else the text itself."""
    words = (_TYPES.get(word.lower()) for word in re.findall(r"[A-Za-z]+\d*", text))
    return next((word for word in words if word), text.strip())


KernelKind = Literal[
    "gemm", "attention", "softmax", "LayerNorm", "GELU", "embeddings", "mask", "layout", "quantize",
    "elementwise", "none",
]  # fmt: skip
EMBEDDINGS, HEAD, OTHER = "embeddings", "head", "other"
_QUANTIZER = re.compile(r"(?:Quantize|Dequantize)Linear(?:_\d+)?(?:@\d+)?$|_quantizer(?:/|$)")
_NO_KERNEL = {"signal", "wait", "shape_call", "shapehosttodevice", "constant", "noop", "shape"}
_KINDS: dict[str, KernelKind] = {  # LayerType of engines that are not made by Myelin
    **dict.fromkeys(("matrixmultiply", "fullyconnected", "convolution"), "gemm"),
    **dict.fromkeys(("reformat", "shuffle", "cast", "slice", "concatenation", "gather"), "layout"),
    **dict.fromkeys(("quantize", "dequantize", "scale"), "quantize"),
    "softmax": "softmax",
    "embed": "embeddings",
    **dict.fromkeys(
        (OWN_NORM, "normalization", "layernormalization", "mvn"), "LayerNorm"
    ),  # those of CPU runtimes too
}
_MOVES = {"Tran", "Move", "Conc", "Repl", "Slic", "Gath"}
_ALIASES = {"Half": "FP16", "Float": "FP32", "BFloat16": "BF16"}


def kernel_operator(node: str) -> str:
    """Return the operator that an exporter wrote into a name: `MatMul` of `/a/MatMul_1` and `/a/MatMul@3`."""
    return re.sub(r"(?:_\d+)?(?:@\d+)?$", "", node.rpartition("/")[2])


def is_product(node: str) -> bool:
    return node.rpartition("/")[2].startswith(("MatMul", "Gemm"))


def operations(row: LayerRow) -> list[str]:
    # a generated kernel is named after its operations, four letters each: CastMeanSubMulMean is a LayerNorm
    # that goes to FP32 first; long names end in Etc, and then the ONNX nodes that the kernel lists decide
    return re.findall(r"[A-Z][a-z]*", base_name(row)) if row.name.startswith("__myl_") else []


def kernel_kind(row: LayerRow) -> KernelKind:
    words, lower = operations(row), row.kind.lower()
    if lower in _NO_KERNEL or is_attention(row):
        return "none" if lower in _NO_KERNEL else "attention"
    known: KernelKind | None = "gemm" if lower == "gemm" or "Fc" in words else _KINDS.get(lower)
    if known:
        return known
    operators = {kernel_operator(node) for node in row.onnx}
    rules: tuple[tuple[object, KernelKind], ...] = (
        ("Gath" in words and kernel_block(row) == EMBEDDINGS, "embeddings"),
        ("Mean" in words or "LayerNormalization" in operators, "LayerNorm"),
        (is_gelu(row), "GELU"),
        ({"Maxr", "Exp"} <= {*words} or "Softmax" in operators, "softmax"),
        (row.inputs and {*row.inputs} <= {"Int64", "Int32", "Bool"}, "mask"),
        (_MOVES & {*words}, "layout"),
        ("Roun" in words or ("Int8" in row.inputs and "Cast" in words), "quantize"),
        (words and {*words} <= {"Resh", "Cast"}, "layout"),
    )
    return next((kind for holds, kind in rules if holds), "elementwise")


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
    return "Mean" in operations(row) or _KINDS.get(row.kind.lower()) == "LayerNorm"


def is_gelu(row: LayerRow) -> bool:
    return "Erf" in operations(row) or any(map(_of_gelu, row.onnx))


def _of_gelu(node: str) -> bool:
    inside = ACTIVATION.fullmatch(node.rpartition("/")[0].rpartition("/")[2]) and not ANY_HEAD.search(node)
    return kernel_operator(node) in ("Gelu", "Erf") or bool(inside)


def kernel_block(row: LayerRow) -> str:
    """Return where most nodes of a kernel are; one that ends a layer often quantizes for the next."""
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
    if found := list(linears):
        return _together([shorten_node(node) for node in found])
    kind = kernel_kind(row)
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
    operators, order = list(map(kernel_operator, own)), (telling, "MatMul", "Gemm", "Add", "Transpose")
    return shorten_node(next((own[operators.index(name)] for name in order if name in operators), own[0]))


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
    kinds = [name for name in ("Int8", "UInt8", "Half", "Float", "BFloat16") if name in weights]
    if kinds and len(row.inputs) == 1:
        sides[0] += f"*{_ALIASES.get(kinds[0], kinds[0].upper())}"
    return " -> ".join(side for side in sides if side)


def norm_precision(row: LayerRow) -> str:
    """Return the datatype of the statistics of LayerNorm or the sum of softmax; FP32 behind a Cast."""
    words = operations(row)
    start = next((i for i, word in enumerate(words) if word in ("Mean", "Maxr")), None)
    # kernels of backend cuda keep the type of their weights, whatever they read
    read = row.constants if row.kind == OWN_NORM else row.inputs
    floats = [name for name in read if name in ("Half", "Float", "BFloat16")]
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

    A row says what its residual is, or the residual is an input next to the result of the linear. So one INT8
    input is enough; a GEMM that normalizes what it makes has INT8 operands too, and needs another.
    """
    proven: dict[str, dict[str, bool]] = {name: {} for name in norms}
    for row in layers:
        int8 = row.residual == "Int8" or row.inputs.count("Int8") > (row.kind == "gemm")
        for name in proven.keys() & set(row.onnx):
            copies = proven[name]
            copies[copy_of(row)] = copies.get(copy_of(row), False) or int8
    return sorted(name for name, copies in proven.items() if not copies or not all(copies.values()))


MAX_LAYERS_NAMED = 6


def format_nodes(nodes: Sequence[str]) -> str:
    """Format ONNX nodes in few words, several layers together: `layer.0-11: attention key, output`."""
    layers: dict[str, list[int]] = defaultdict(list)
    for node in nodes:
        block, _, name = shorten_node(node).partition(" ")
        number = block.removeprefix("layer.")
        if block.startswith("layer.") and number.isdecimal() and name:
            layers[name].append(int(number[:9]))
        else:
            layers[shorten_node(node)] = []
    groups: dict[str, list[str]] = defaultdict(list)
    for name, numbers in layers.items():
        groups[format_ranges(numbers)].append(name)
    texts = [f"layer.{key}: {name_list(names)}" if key else name_list(names) for key, names in groups.items()]
    more = f"; and {len(texts) - MAX_LAYERS_NAMED} more" if len(texts) > MAX_LAYERS_NAMED else ""
    return "; ".join(texts[:MAX_LAYERS_NAMED]) + more


def format_ranges(numbers: Sequence[int]) -> str:
    """Format 0, 1, 2, 5 as `0-2,5`."""
    runs = groupby(enumerate(sorted({*numbers})), lambda pair: pair[1] - pair[0])
    spans = ([number for _, number in run] for _, run in runs)
    return ",".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)
