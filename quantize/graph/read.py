"""Read an ONNX file that may be anything: truncated, corrupted, not ONNX, or made to exhaust memory.

Parsing a protobuf takes about 100 times its bytes where they hold nothing but empty messages: so the wire
format is walked first, and the bytes outside of weights are limited.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError
from onnx import external_data_helper, numpy_helper

from qdqbench.quantize.utils.errors import UserError

MAX_FILE = (1 << 31) - 1  # protobuf's own limit
MAX_STRUCTURE = 8 << 20  # bytes outside of weights; BERT-large needs about 1 MiB
MOST_EXPANDED = 1_000_000  # nodes of a graph with its functions in place of their calls
MAX_SHARING = 4  # how often, on average, tensors may refer to the same bytes of an external file
_WEIGHTS = {"float_data", "int32_data", "int64_data", "raw_data", "double_data", "uint64_data"}


def read_model(path: Path) -> onnx.ModelProto:
    """Read an ONNX file and the weights it keeps in other files of its folder.

    Memory is at most about 1 GiB plus a small multiple of the size of the files.
    UserError: the file or its external data is missing, empty, truncated, corrupted or not ONNX.
    """
    model = onnx.ModelProto()
    try:
        if not path.is_file():
            raise UserError(f"{path} is not a file; give the path of an ONNX file")
        size = path.stat().st_size
        if not 0 < size <= MAX_FILE:
            problem = "is empty" if size == 0 else f"is over protobuf's limit of {MAX_FILE} bytes"
            raise UserError(f"{path} {problem}; export the model again, large weights as external data")
        data = path.read_bytes()
        if _structure_bytes(data) > MAX_STRUCTURE:
            raise UserError(f"{path} has over {MAX_STRUCTURE} bytes besides its weights; split the model")
        model.ParseFromString(data)
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror}; check the path and its permissions"
        ) from error
    except (DecodeError, ValueError) as error:
        raise UserError(
            f"{path} is truncated, corrupted or not an ONNX file ({error}); export the model again"
        ) from error
    del data
    if not model.graph.node or not model.opset_import:
        part = "opset" if model.graph.node else "graph"
        raise UserError(f"{path} holds no {part}: truncated, or not an ONNX file; export the model again")
    if _count_expanded(model) > MOST_EXPANDED:
        raise UserError(
            f"the functions of {path} call each other so often that they are over {MOST_EXPANDED:,} nodes in "
            "place of their calls; export the model without functions"
        )
    _read_external(model, path)
    return model


def _count_expanded(model: onnx.ModelProto) -> int:
    """Return how many nodes a graph has with its functions in place of their calls, up to `MOST_EXPANDED`.

    A runtime puts them there: thirty functions that call the one before twice make a billion nodes.
    """
    calls = {(each.domain, each.name): [*_list_calls(each.node)] for each in model.functions}
    counts = dict.fromkeys(calls, 1)
    for _ in calls:  # as deep as calls can be; one that calls itself is refused elsewhere
        before = dict(counts)
        for name, inside in calls.items():
            counts[name] = min(sum(counts.get(call, 1) for call in inside), MOST_EXPANDED + 1)
        if counts == before:
            break
    return sum(counts.get(call, 1) for call in _list_calls(model.graph.node)) if calls else 0


def _list_calls(nodes: Iterable[onnx.NodeProto]) -> Iterator[tuple[str, str]]:
    waiting = [*nodes]
    while waiting:
        node = waiting.pop()
        yield node.domain, node.op_type
        for item in node.attribute:
            for graph in (*item.graphs, *([item.g] if item.HasField("g") else [])):
                waiting += graph.node


def validate_tensors(model: onnx.ModelProto) -> None:
    """Read every constant of the graph once, so that later readings cannot fail; UserError where one does."""
    for tensor in tensors(model):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            raise UserError(
                f"the data of tensor {tensor.name!r} are in another file that was not loaded; "
                "load the model together with its external data"
            )
        if tensor.data_type == onnx.TensorProto.STRING:
            continue
        try:
            if any(size < 0 for size in tensor.dims):
                raise ValueError("a negative size")
            numpy_helper.to_array(tensor)
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise UserError(
                f"tensor {tensor.name!r} with shape {list(tensor.dims)[:8]} does not hold the data it "
                f"announces ({error}); the file is corrupted, export the model again"
            ) from error


def validate_names(model: onnx.ModelProto) -> None:
    """Refuse names that are not text: protobuf hands them out as bytes, or raises when they are read."""
    try:
        wrong = next((text for text in _names(model) if isinstance(text, bytes)), None)
    except UnicodeDecodeError as error:
        wrong = error.object
    if wrong is not None:
        raise UserError(
            f"the name {wrong[:40]!r} is not UTF-8 text; the file is corrupted, export the model again"
        )


def _names(model: onnx.ModelProto) -> Iterator[str | bytes]:
    graph = model.graph
    yield graph.name
    yield from (entry.domain for entry in model.opset_import)
    for values in (graph.input, graph.output, graph.value_info, graph.initializer, model.functions):
        yield from (value.name for value in values)
    for node in graph.node:
        yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
        yield from (item.name for item in node.attribute)


def tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    yield from model.graph.initializer
    for node in model.graph.node:
        for item in node.attribute:
            if item.HasField("t"):
                yield item.t


def _structure_bytes(data: bytes) -> int:
    """Return the bytes of a ModelProto that are not weights, up to MAX_STRUCTURE; ValueError if none."""
    structure = 0
    todo: list[tuple[Any, int, int]] = [(onnx.ModelProto.DESCRIPTOR, 0, len(data))]
    while todo:
        message, position, end = todo.pop()
        fields = _length_delimited(message)
        while position < end:
            before = position
            number, start, position = _next_field(data, position, end)
            kind, child = fields.get(number, ("other", None))
            structure += (position if kind == "other" else start) - before
            if kind == "message":
                todo.append((child, start, position))
            if structure > MAX_STRUCTURE:
                return structure
    return structure


@cache
def _length_delimited(message: Any) -> dict[int, tuple[str, Any]]:
    """Return the fields of a message that hold a message (with its descriptor) or weights."""
    fields = message.fields_by_number.items()
    messages = {n: ("message", field.message_type) for n, field in fields if field.message_type is not None}
    weights = {n: ("weights", None) for n, field in fields if field.name in _WEIGHTS}
    return messages | (weights if message.name == "TensorProto" else {})


def _next_field(data: bytes, position: int, end: int) -> tuple[int, int, int]:
    """Return the field number, start and end of the value of the protobuf field at `position`."""
    tag, start = _varint(data, position, end)
    kind = tag & 7
    if kind == 0:
        stop = _varint(data, start, end)[1]
    elif kind == 2:
        length, start = _varint(data, start, end)
        stop = start + length
    elif kind in (1, 5):
        stop = start + (8 if kind == 1 else 4)
    else:
        raise ValueError(f"unknown wire type at byte {position}")
    if stop > end:
        raise ValueError(f"the field at byte {position} ends {stop - end} bytes past its end")
    # a number where a message belongs has no value to walk into
    return (tag >> 3 if kind == 2 else -1), start, stop


def _varint(data: bytes, position: int, end: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= end:
            raise ValueError(f"ends early at byte {position}")
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
    raise ValueError(f"bad number at byte {position}")


def _read_external(model: onnx.ModelProto, path: Path) -> None:
    outside = [t for t in tensors(model) if t.data_location == onnx.TensorProto.EXTERNAL]
    sizes: dict[str, int] = {}
    announced = 0
    for tensor in outside:
        place = {entry.key: entry.value for entry in tensor.external_data}
        location, length = place.get("location", ""), place.get("length", "")
        try:
            size = (path.parent / location).stat().st_size if location else None
        except (OSError, ValueError):  # missing, or not a possible name
            size = None
        if size is None:
            raise UserError(
                f"{path} keeps tensor {tensor.name!r} in {location or 'an unnamed file'}, which is missing; "
                f"copy that file to {path.parent}"
            )
        sizes[location] = size
        announced += int(length) if length.isdecimal() and len(length) < 20 else size
    if announced > MAX_SHARING * sum(sizes.values()):
        raise UserError(
            f"{path} announces {announced} bytes of external data, but {', '.join(sorted(sizes))} "
            f"has {sum(sizes.values())}; the file is truncated or corrupted, export the model again"
        )
    for tensor in outside:
        try:
            external_data_helper.load_external_data_for_tensor(tensor, str(path.parent))
        except (OSError, ValueError, onnx.checker.ValidationError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(
                f"cannot read the external data of tensor {tensor.name!r} in {path} ({reason}); "
                "export the model again"
            ) from error
