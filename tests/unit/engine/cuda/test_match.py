"""Graphs that were changed: refused by the names of nodes, or computed as they are now."""

from collections.abc import Iterator

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from qdqbench.quantize.engine.cuda.match import match_graph
from qdqbench.quantize.engine.cuda.pack import pack
from qdqbench.quantize.models.load import prepare_model
from qdqbench.quantize.utils.errors import UserError

from ....support.cuda_boundaries import require_boundaries
from ....support.cuda_graphs import batch_for, export, load_variant
from ....support.long import mark_long
from ....support.tiny_bert import copied
from ....support.tiny_modernbert import new_modernbert

pytestmark = pytest.mark.usefixtures("in_fp32")
GRAPHS = [
    ("bert", "bert-int8-residual-fused"),
    ("modernbert", "modernbert-int8-attention"),
    ("mpnet", "mpnet-int8-attention"),
    ("mean",),
    ("last",),
]


# layers of MPNet are as those of BERT but for its bias, which a test below changes
@pytest.fixture(scope="module", params=mark_long(GRAPHS, GRAPHS[1:3]), ids="-".join)
def graph(request, graph_of):
    return graph_of(*request.param)


def places(graph: onnx.ModelProto) -> Iterator[int]:
    """Places of nodes to change: without the second layer, which is as the first, or those of the pooling."""
    pools = any("/pooling/" in node.name for node in graph.graph.node)
    for place, node in enumerate(graph.graph.node):
        if node.op_type != "Identity" and ("/pooling/" in node.name if pools else "layer.1" not in node.name):
            yield place


def numbers(graph: onnx.ModelProto) -> Iterator[int]:
    """Places of the constants that these nodes read, one for each kind of node and input."""
    seen = set()
    names = [tensor.name for tensor in graph.graph.initializer]
    for place in places(graph):
        node = graph.graph.node[place]
        for position, name in enumerate(node.input):
            kind = (node.op_type, position, node.name.rpartition("/")[0], node.name.rpartition("_")[0])
            if name in names and kind not in seen:
                seen.add(kind)
                yield names.index(name)


def with_node_behind(graph: onnx.ModelProto, place: int, kind: str) -> onnx.ModelProto:
    """A copy with a node behind the first output of another; a Sub subtracts a number."""
    changed = copied(graph)
    node = changed.graph.node[place]
    output = node.output[0]
    node.output[0] = f"{output}_before"
    inputs = [node.output[0], *["number"] * (kind == "Sub")]
    changed.graph.node.insert(place + 1, helper.make_node(kind, inputs, [output], name="added"))
    changed.graph.initializer.append(numpy_helper.from_array(np.array(0.2, np.float32), "number"))
    return changed


def without(graph: onnx.ModelProto, place: int) -> onnx.ModelProto:
    """A copy whose nodes read the first input of a node instead of its output."""
    changed = copied(graph)
    node = changed.graph.node[place]
    before, output = node.input[0], node.output[0]
    del changed.graph.node[place]
    for other in changed.graph.node:
        for position, name in enumerate(other.input):
            if name == output:
                other.input[position] = before
    return changed


def is_refused_or_right(graph: onnx.ModelProto) -> bool:
    """Whether a graph is refused; else each kernel makes what ONNX Runtime makes of the same tensors."""
    try:
        plan, arrays = pack(match_graph(graph))
    except UserError:
        return True
    require_boundaries(graph, plan, arrays, batch_for(graph), 0.005)
    return False


@pytest.mark.parametrize("kind", ["Identity", "Softmax", "Sub"])
def test_an_added_node_is_refused_by_its_name_or_that_of_a_neighbor(graph, kind):
    for place in places(graph):
        node = graph.graph.node[place]
        gated = node.op_type == "Mul" and node.name.endswith("mlp/Mul_2")
        if (node.op_type, kind) == ("Gelu", "Sub") or (gated and kind == "Sub"):
            continue
        readers = (other for other in graph.graph.node if node.output[0] in other.input)
        named = {
            "added",
            node.name,
            *node.output,
            *(n for other in readers for n in (other.name, *other.output)),
        }
        with pytest.raises(UserError) as told:
            match_graph(with_node_behind(graph, place, kind))
        assert any(name in str(told.value) for name in named), (node.name, str(told.value))


def test_a_number_is_subtracted_from_a_gelu_alone(graph):
    """And for its codes alone."""
    made_by = {node.output[0]: node.op_type for node in graph.graph.node}
    nodes = enumerate(graph.graph.node)
    centered = [
        place for place, node in nodes if node.op_type == "Sub" and made_by.get(node.input[0]) == "Gelu"
    ]
    for place in reversed(centered):
        graph = without(graph, place)
    (first, *_) = (place for place, node in enumerate(graph.graph.node) if node.op_type == "Gelu")
    changed = with_node_behind(graph, first, "Sub")
    if any(node.name.endswith("mlp/Slice") for node in graph.graph.node):
        with pytest.raises(UserError, match=r"no kernel for added \(Sub\)"):
            match_graph(changed)  # its gate reads it
        return
    assert not is_refused_or_right(changed)
    plan = match_graph(changed).plan
    assert sorted(each.center for each in plan.operations if each.op == "linear")[-2:] == [0, np.float32(0.2)]
    gelu, sub = changed.graph.node[first : first + 2]
    sub.input[:] = [*reversed(sub.input)]
    with pytest.raises(UserError, match=r"no kernel for added \(Sub\)"):
        match_graph(changed)
    sub.input[:] = [*reversed(sub.input)]
    quantizers = (each for each in changed.graph.node if each.op_type == "QuantizeLinear")
    other = next(each for each in quantizers if "layer.1" in each.name)
    other.input[0] = gelu.output[0]
    with pytest.raises(UserError, match=rf"{gelu.name} \(Gelu\): it has another reader than its Sub"):
        match_graph(changed)


def test_a_node_that_nothing_reads_is_refused_by_its_name(graph):
    changed = copied(graph)
    changed.graph.node.append(helper.make_node("Neg", [graph.graph.node[-2].output[0]], ["x"], name="extra"))
    with pytest.raises(UserError, match=r"no kernel for extra \(Neg\)"):
        match_graph(changed)


def test_a_graph_without_one_of_its_nodes_is_refused_or_computed_as_it_is(graph):
    assert np.mean([is_refused_or_right(without(graph, place)) for place in places(graph)]) > 0.8


def test_a_foreign_operator_is_refused(graph):
    for place in places(graph):
        changed = copied(graph)
        changed.graph.node[place].domain = "com.microsoft"
        with pytest.raises(UserError, match="backend cuda"):
            match_graph(changed)


def test_other_attributes_are_refused_or_computed_as_they_are(graph):
    refused = []
    for place in places(graph):
        for number, item in enumerate(graph.graph.node[place].attribute):
            changed = copied(graph)
            found = changed.graph.node[place].attribute[number]
            if item.type == onnx.AttributeProto.INT:
                found.i += 1
            elif item.type == onnx.AttributeProto.FLOAT:
                found.f += 0.01
            else:
                found.ints[:] = [*reversed(item.ints)]
            refused.append(is_refused_or_right(changed))
    assert 0.3 < np.mean(refused) < 1 or len(refused) < 20


def test_other_constants_are_refused_or_computed_as_they_are(graph):
    refused = []
    for number in numbers(graph):
        stored = graph.graph.initializer[number]
        array = numpy_helper.to_array(stored)
        other = array * 1.5 + 0.01 if array.dtype == np.float32 else array + (array < 127)
        changed = copied(graph)
        changed.graph.initializer[number].CopyFrom(
            numpy_helper.from_array(other.astype(array.dtype), stored.name)
        )
        refused.append(is_refused_or_right(changed))
    assert any(refused)


def test_constants_of_another_type_are_refused_by_the_node_that_reads_them(graph):
    for number in numbers(graph):
        stored = graph.graph.initializer[number]
        if stored.data_type == TensorProto.FLOAT:
            changed = copied(graph)
            half = numpy_helper.to_array(stored).astype(np.float16)
            changed.graph.initializer[number].CopyFrom(numpy_helper.from_array(half, stored.name))
            with pytest.raises(UserError, match=r"no kernel for .* \(\w+\)"):
                match_graph(changed)


@pytest.mark.parametrize("kind", [TensorProto.FLOAT8E4M3FN, TensorProto.INT4, TensorProto.UINT8])
def test_codes_of_another_type_are_refused_by_the_node_that_reads_them(graph, kind):
    for op_type, position in (("DequantizeLinear", 0), ("DequantizeLinear", 2), ("QuantizeLinear", 2)):
        changed = copied(graph)
        constants = {each.name: each for each in changed.graph.initializer}
        nodes = (each for each in changed.graph.node if each.op_type == op_type)
        node = next(each for each in nodes if each.input[position] in constants)
        stored = constants[node.input[position]]
        count = int(np.prod(stored.dims))
        size = -(-count // 2) if kind == TensorProto.INT4 else count
        stored.CopyFrom(TensorProto(name=stored.name, data_type=kind, dims=stored.dims, raw_data=bytes(size)))
        with pytest.raises(UserError, match=r"no kernel for .*[Qq]uantizeLinear \(\w+\)"):
            match_graph(changed)


@pytest.mark.parametrize("fill", [-5000.0, 0.0])
def test_a_mask_that_leaves_weight_is_refused(graph, fill):
    masks = [each.name for each in graph.graph.node if each.op_type == "Where" and "embed" not in each.name]
    for name in masks:  # of windows too
        changed = copied(graph)
        where = next(each for each in changed.graph.node if each.name == name)
        changed.graph.initializer.append(numpy_helper.from_array(np.array(fill, np.float32), "fill"))
        where.input[2] = "fill"
        with pytest.raises(UserError, match=rf"{name} \(Where\): a mask of 0 and {fill:g}"):
            match_graph(changed)


@pytest.mark.parametrize("change", ["a bucket", "no bucket", "a head", "places"])
def test_a_bias_that_does_not_follow_from_distances_is_refused(change, graph_of):
    graph = graph_of("mpnet", "mpnet-int8-attention")
    constants = {each.name: each for each in graph.graph.initializer}
    (gather,) = (each for each in graph.graph.node if "relative_attention_bias" in each.name)
    slices = [each for each in graph.graph.node if each.op_type == "Slice"]
    of = {"a head": gather.input[0], "places": slices[1].input[1]}.get(change, slices[0].input[0])
    array = numpy_helper.to_array(constants[of]).copy()
    if change == "a head":
        array = array[:, :1]
    elif change == "places":
        array += 1
    else:
        array[3:, :4] = 31 if change == "a bucket" else 32
    constants[of].CopyFrom(numpy_helper.from_array(array, of))
    with pytest.raises(UserError, match=r"places of a row|distance from query to key|it is of 1 and 130"):
        match_graph(graph)


@pytest.fixture
def rotated(graph_of):
    """A graph that rotates q and k."""
    return graph_of("modernbert", "modernbert-int8-attention")


def test_angles_are_products_of_matrices_in_graphs_of_older_transformers(rotated):
    old = copied(rotated)
    nodes = {node.output[0]: node for node in old.graph.node}
    constants = {each.name: numpy_helper.to_array(each) for each in old.graph.initializer}
    for angles in [node for node in old.graph.node if "rotary_emb" in node.name and node.op_type == "Mul"]:
        frequencies = constants.get(angles.input[1], np.zeros(()))
        if not frequencies.ndim:
            continue
        name, place = angles.name, [*old.graph.node].index(angles)
        positions = nodes[nodes[angles.input[0]].input[0]].input[0]
        for key, array in {
            "column": frequencies.reshape(1, -1, 1),
            "shape": np.ones(3, np.int64),
            "axis": np.ones(1, np.int64),
        }.items():
            old.graph.initializer.append(numpy_helper.from_array(array, f"{name}.{key}"))
        made = [
            helper.make_node("Expand", [f"{name}.column", f"{name}.shape"], [f"{name}.spread"]),
            helper.make_node("Unsqueeze", [positions, f"{name}.axis"], [f"{name}.row"]),
            helper.make_node("Cast", [f"{name}.row"], [f"{name}.single"], to=TensorProto.FLOAT),
            helper.make_node("MatMul", [f"{name}.spread", f"{name}.single"], [f"{name}.product"]),
            helper.make_node("Transpose", [f"{name}.product"], [angles.output[0]], perm=[0, 2, 1]),
        ]
        del old.graph.node[place]
        for node in reversed(made):
            node.name = node.output[0]
            old.graph.node.insert(place, node)
    used = {name for node in old.graph.node for name in node.input}
    unused = [node for node in old.graph.node if "rotary_emb" in node.name and node.output[0] not in used]
    for node in unused:  # the places in another shape
        old.graph.node.remove(node)
    for node in [node for node in old.graph.node if node.output[0] in {n.input[0] for n in unused}]:
        old.graph.node.remove(node)
    (_, arrays), (plan, found) = pack(match_graph(rotated)), pack(match_graph(old))
    assert all((found[name] == array).all() for name, array in arrays.items())
    assert not is_refused_or_right(old)
    assert [each.rotary for each in plan.operations if each.op == "linear"].count(32) == 2


def test_a_model_that_rotates_has_biases_or_none():
    model = new_modernbert(biases=True, pooling="cls")
    graph = export(prepare_model(model), load_variant("modernbert-int8-attention"))
    assert not is_refused_or_right(graph)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("factor", "the cosine and sine of angles alone"),
        ("window", "a window over 0"),
        ("swapped", "rotated by the places of their tokens"),
    ],
)
def test_other_rotations_and_windows_are_refused(rotated, change, why):
    nodes = [*rotated.graph.node]
    if change == "swapped":  # cosine and sine
        first, second = [node for node in nodes if node.op_type in ("Cos", "Sin")][:2]
        first.op_type, second.op_type = second.op_type, first.op_type
    else:
        kinds = {"factor": ("Cos", np.array(1.5, np.float32)), "window": ("Abs", np.array(0, np.int64))}
        kind, number = kinds[change]
        made = next(node.output[0] for node in nodes if node.op_type == kind)
        reader = next(node for node in nodes if made in node.input)
        rotated.graph.initializer.append(numpy_helper.from_array(number, "number"))
        reader.input[1] = "number"
    with pytest.raises(UserError, match=why):
        match_graph(rotated)


def test_other_types_versions_and_inputs_are_refused(graph):
    for values in ("input", "output"):
        changed = copied(graph)
        value = getattr(changed.graph, values)[0]
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
        with pytest.raises(UserError, match=f"int64 inputs and float32 outputs, unlike {value.name}"):
            match_graph(changed)
    changed = copied(graph)
    changed.opset_import[0].version = 19
    with pytest.raises(UserError, match="opset 20 or newer, not 19"):
        match_graph(changed)
    changed = copied(graph)
    changed.graph.input.append(helper.make_tensor_value_info("pixels", TensorProto.INT64, ["batch"]))
    with pytest.raises(UserError, match="takes no input pixels"):
        match_graph(changed)


def test_shapes_that_are_computed_without_end_are_refused(graph):
    """Each step doubles the list, or nests one deeper."""
    for inputs, steps in ((2, 100), (1, 5000)):
        changed = copied(graph)
        (reshape, *_) = (
            each for each in changed.graph.node if each.op_type == "Reshape" and "/att" in each.name
        )
        name = reshape.input[1]
        for step in range(steps):
            node = helper.make_node("Concat", [name] * inputs, [f"{step}"], name=f"{step}", axis=0)
            changed.graph.node.insert(0, node)
            name = node.output[0]
        reshape.input[1] = name
        with pytest.raises(UserError, match="backend cuda"):
            match_graph(changed)
