"""`check` on files that may be anything: a report or one sentence, in little memory."""

import json
import tracemalloc
from contextlib import nullcontext

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper

from qdqbench.quantize.graph import read
from qdqbench.quantize.lint.check import CheckReport, check_file, to_json
from qdqbench.quantize.utils.errors import UserError

from ...support.tiny_layer import healthy

HEALTHY = healthy().SerializeToString()
MAX_FILE = 1 << 20
PLACE = st.integers(0, len(HEALTHY) - 1)
ORDER = ["slow-weight-order"]  # the tiny layer stores its weights [K, N]
FUZZ = settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])


def written(folder, data):
    path = folder / "model.onnx"
    path.write_bytes(data)
    return path


def refusal(path):
    """The one sentence that says what is wrong."""
    with pytest.raises(UserError) as caught:
        check_file(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    assert not message.endswith(".")
    return message


def test_a_file_is_checked_like_its_model(tmp_path):
    report = check_file(written(tmp_path, HEALTHY), allow=ORDER)
    assert report.findings == []
    assert len(report.quantized) == 6


def test_a_file_that_is_missing(tmp_path):
    assert "is not a file" in refusal(tmp_path / "nothing.onnx")
    assert "is not a file" in refusal(tmp_path)


def nested(*fields, inside):
    """A protobuf message that holds `inside` in the fields on the way."""
    for number in reversed(fields):
        length = len(inside)
        size = b""
        while length > 127:
            size, length = size + bytes([length & 127 | 128]), length >> 7
        inside = bytes([number << 3 | 2]) + size + bytes([length]) + inside
    return inside


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is empty"),
        (b"not an ONNX file, but a sentence\n", "truncated, corrupted or not an ONNX file"),
        (b"PK\x03\x04" + bytes(100), "truncated, corrupted or not an ONNX file"),
        (bytes(range(256)) * 8, "truncated, corrupted or not an ONNX file"),
        (onnx.ModelProto(ir_version=10).SerializeToString(), "holds no graph"),
        (HEALTHY.replace(b"\x42\x04\x0a\x00\x10\x14", b""), "holds no opset"),
        *((HEALTHY[: int(share * len(HEALTHY))], "truncated") for share in (0.01, 0.3, 0.6, 0.99, 0.9999)),
        (HEALTHY.replace(b"/layer/query/Add", b"/layer/query/A\xff\xfe"), "corrupted"),
        (bytes(MAX_FILE + 1), "limit"),
        # parsing empty messages takes 30 to 100 times their size
        (nested(7, inside=b"\x0a\x00" * (1 << 18)), "besides its weights"),  # nodes
        (nested(7, inside=b"\x2a\x00" * (1 << 18)), "besides its weights"),  # initializers
        (nested(7, 1, inside=b"\x2a\x00" * (1 << 18)), "besides its weights"),  # attributes of a node
        (nested(7, 5, inside=b"\x6a\x00" * (1 << 18)), "besides its weights"),  # references of a tensor
    ],
    ids=range(17),
)
def test_a_file_that_is_not_a_model(tmp_path, monkeypatch, data, says):
    monkeypatch.setattr(read, "MAX_FILE", MAX_FILE)
    monkeypatch.setattr(read, "MAX_STRUCTURE", 1 << 18)
    assert says in refusal(written(tmp_path, data))


def test_weights_do_not_count_as_structure(tmp_path, monkeypatch):
    model = healthy()
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(1 << 18, np.float32), "large"))
    monkeypatch.setattr(read, "MAX_STRUCTURE", 1 << 17)
    assert check_file(written(tmp_path, model.SerializeToString()), allow=ORDER).findings == []


def test_a_tensor_that_announces_more_than_it_holds(tmp_path):
    model = healthy()
    model.graph.initializer[0].dims[:] = [1 << 30, 1 << 30]
    path = written(tmp_path, model.SerializeToString())
    tracemalloc.start()
    assert "does not hold the data it announces" in refusal(path)
    assert tracemalloc.get_traced_memory()[1] < 10 << 20
    tracemalloc.stop()


def test_weights_in_another_file(tmp_path):
    path, weights = tmp_path / "model.onnx", tmp_path / "weights.bin"
    onnx.save_model(healthy(), path, save_as_external_data=True, location=weights.name, size_threshold=0)
    assert check_file(path, allow=ORDER).findings == []
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "cannot read the external data of tensor" in refusal(path)
    weights.unlink()
    assert "weights.bin, which is missing; copy that file" in refusal(path)


def test_weights_outside_of_the_folder(tmp_path):
    (tmp_path / "secret").write_bytes(bytes(100))
    (tmp_path / "model").mkdir()
    model = healthy()
    onnx.external_data_helper.set_external_data(model.graph.initializer[0], "../secret")
    assert "cannot read the external data" in refusal(written(tmp_path / "model", model.SerializeToString()))


def test_many_tensors_that_share_the_same_bytes(tmp_path):
    """A small file could ask for any amount of memory this way."""
    (tmp_path / "weights.bin").write_bytes(bytes(1000))
    model = healthy()
    for number in range(10):
        tensor = onnx.numpy_helper.from_array(np.zeros(1000, np.int8), f"copy{number}")
        onnx.external_data_helper.set_external_data(tensor, "weights.bin")
        model.graph.initializer.append(tensor)
    assert "announces 10000 bytes" in refusal(written(tmp_path, model.SerializeToString()))


def survives(folder, data):
    try:
        report = check_file(written(folder, data))
    except UserError:
        return
    assert isinstance(report, CheckReport)
    assert json.dumps(to_json(report), allow_nan=False).encode()


@FUZZ
@given(
    edits=st.lists(st.tuples(PLACE, st.binary(min_size=1, max_size=3)), min_size=1, max_size=4),
    other=st.binary(max_size=400),
)
def test_random_bytes_in_a_file_or_alone(tmp_path, edits, other):
    data = bytearray(HEALTHY)
    for position, value in edits:
        data[position : position + len(value)] = value
    survives(tmp_path, bytes(data))
    survives(tmp_path, other)


@FUZZ
@given(start=st.integers(0, len(HEALTHY)), length=st.integers(1, 64), repeat=st.integers(0, 3))
def test_a_file_with_a_piece_cut_out_or_repeated(tmp_path, start, length, repeat):
    survives(tmp_path, HEALTHY[:start] + HEALTHY[start : start + length] * repeat + HEALTHY[start + length :])


@FUZZ
@given(data=st.data())
def test_a_graph_that_is_well_formed_but_odd(tmp_path, data):
    """Operators, inputs, types and attributes exchanged at random: valid protobuf, rarely a valid model."""
    model = healthy(data.draw(st.sampled_from(["fp32", "fp16", "factored"])))
    nodes = model.graph.node
    names = ["", *(name for node in nodes for name in node.output)]
    names += [tensor.name for tensor in model.graph.initializer]
    operators = sorted({node.op_type for node in nodes} | {"Where", "Concat", "Split", "ReduceMean", "If"})
    for _ in range(data.draw(st.integers(1, 4))):
        node = nodes[data.draw(st.integers(0, len(nodes) - 1))]
        kind = data.draw(st.sampled_from(["operator", "input", "domain", "attribute", "type", "drop"]))
        if kind == "operator":
            node.op_type = data.draw(st.sampled_from(operators))
        elif kind == "input" and node.input:
            node.input[data.draw(st.integers(0, len(node.input) - 1))] = data.draw(st.sampled_from(names))
        elif kind == "domain":
            node.domain = data.draw(st.sampled_from(["com.microsoft", "ai.onnx", "other"]))
            model.opset_import.append(onnx.helper.make_opsetid(node.domain, 1))
        elif kind == "attribute":
            name = data.draw(st.sampled_from(["axis", "to", "perm", "block_size", "output_dtype", "transB"]))
            value = data.draw(st.integers(-3, 40))
            node.attribute.append(onnx.helper.make_attribute(name, [value] if name == "perm" else value))
        elif kind == "type":
            tensors = model.graph.initializer
            tensor = tensors[data.draw(st.integers(0, len(tensors) - 1))]
            tensor.data_type = data.draw(st.integers(0, 30))
        elif node.input:
            node.input.pop()
    survives(tmp_path, model.SerializeToString())


@pytest.mark.parametrize(("count", "refused"), [(10, False), (40, True)])
def test_functions_that_multiply_each_other_are_refused(count, refused, tmp_path):
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]

    def call(number, source, target):
        name, domain = (f"f{number}", "own") if number >= 0 else ("Identity", "")
        return helper.make_node(name, [source], [target], domain=domain)

    functions = [
        helper.make_function(
            "own", f"f{n}", ["x"], ["y"], [call(n - 1, "x", "m"), call(n - 1, "m", "y")], opsets
        )
        for n in reversed(range(count))
    ]
    ends = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in "xy")
    graph = helper.make_graph([call(count - 1, "x", "y")], "g", *([each] for each in ends))
    onnx.save(helper.make_model(graph, functions=functions, opset_imports=opsets), tmp_path / "m.onnx")
    with pytest.raises(UserError, match="over 1,000,000 nodes") if refused else nullcontext():
        read.read_model(tmp_path / "m.onnx")
