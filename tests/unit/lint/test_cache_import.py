"""Recipes from calibration caches: what a cache gives, what it cannot, and that a run takes it."""

import struct

import onnx
import pytest

from qdqbench.quantize.calibration import ptq
from qdqbench.quantize.graph.export import trace
from qdqbench.quantize.lint.cache_import import input_tensors, is_cache, read_cache_file, recipe_from_cache
from qdqbench.quantize.models.load import load_model
from qdqbench.quantize.recipe.schema import parse_recipe
from qdqbench.quantize.utils.errors import UserError

from ...support import tiny_bert as tiny
from ...support.families import write_model

QUERY = "encoder.layer.0.attention.self.query"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write_tiny_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def graph(folder):
    """As TensorRT 8 got it: FP32 and opset 13."""
    return trace(load_model(str(folder)), 13)


@pytest.fixture(scope="module")
def file(graph, tmp_path_factory):
    path = tmp_path_factory.mktemp("graph") / "model.onnx"
    onnx.save(graph, path)
    return path


@pytest.fixture(scope="module")
def found(folder):
    """Amax that calibration finds for each input."""
    states = tiny.quantized(folder).record.quantizers
    return {name: states[f"{name}.input_quantizer"].amax for name in tiny.LINEARS}


def line(name, scale):
    return f"{name}: {struct.pack('>f', scale).hex()}"


def written(path, *lines, head="TRT-8601-EntropyCalibration2"):
    path.write_text("\n".join([head, *lines, ""]))
    return path


def write_cache(path, graph, amax, *, without=()):
    """What TensorRT's calibrator writes: scales by tensor, of more tensors than linears read."""
    lines = [line("input_ids", 1 / 127), line("logits", 0.02)]
    for linear, names in input_tensors(graph, tiny.LINEARS, "bert").items():
        lines += [] if linear in without else [line(names[0][0], amax[linear] / 127)]
    return written(path, *lines)


def test_amax_of_a_cache_become_those_of_the_run(folder, graph, file, found, tmp_path):
    amax = {name: value * (0.4 if "layer.1.output" in name else 0.9) for name, value in found.items()}
    made = recipe_from_cache(write_cache(tmp_path / "c", graph, amax), str(folder), file)
    assert len(made.given) == len(tiny.LINEARS)
    assert made.calibrated == {}
    assert made.unused == 2
    recipe = parse_recipe(made.text, made.recipe)
    section = recipe.calibration.model_copy(update={"bias_correction": False})
    recipe = recipe.model_copy(update={"calibration": section})
    record = tiny.calibrate(folder, recipe).record
    for name in tiny.LINEARS:
        quantizer = f"{name}.input_quantizer"
        assert record.quantizers[quantizer].amax == pytest.approx(amax[name], rel=1e-6)
        assert record.replaced[quantizer] == pytest.approx(found[name], rel=1e-6)
    rows = {row.name: row for row in record.rows()}
    first = tiny.LINEARS[0]
    assert rows[f"{first}.input_quantizer"].calibrated_amax == pytest.approx(found[first], rel=1e-6)
    assert rows[f"{first}.weight_quantizer"].calibrated_amax is None
    note = next(text for text in record.notes if "given by the recipe" in text)
    assert "0.40 to 0.90 times" in note
    (warning,) = record.warnings
    assert "are off by more than a factor 2: bert.encoder.layer.1.output.dense" in warning
    model = load_model(str(folder))
    ptq.restore(model, tiny.plan_of(recipe, model), record)  # as later stages do
    quantizer = model.get_submodule(f"{tiny.LINEARS[-1]}.input_quantizer")
    assert float(quantizer.amax) == pytest.approx(amax[tiny.LINEARS[-1]], rel=1e-6)


def renamed(graph):
    """As exporters before modules were written into names: numbers, but for weights and biases."""
    twin, names = tiny.copied(graph), {}
    stored = {each.name for each in twin.graph.initializer}
    kept = stored | {each.name for each in (*twin.graph.input, *twin.graph.output)}
    for number, node in enumerate(twin.graph.node):
        node.name = f"{node.op_type}_{number}"
        for place, name in enumerate(node.output):
            if name not in kept:
                node.output[place] = names[name] = str(1000 + len(names))
        for place, name in enumerate(node.input):
            node.input[place] = names.get(name, name)
    del twin.graph.value_info[:]
    return twin


def test_a_graph_with_numbers_for_names_is_matched_by_its_biases(folder, graph, file, found, tmp_path):
    old = renamed(graph)
    onnx.save(old, tmp_path / "old.onnx")
    cache = write_cache(tmp_path / "c", old, found)
    with pytest.raises(UserError, match=r"none of its 10 tensors .* give the file that was calibrated"):
        recipe_from_cache(cache, str(folder), file)
    made = recipe_from_cache(cache, str(folder), tmp_path / "old.onnx")
    assert {*made.given} == {f"{name}.input_quantizer" for name in tiny.LINEARS}
    assert all(tensor.isdecimal() for tensor in made.tensors.values())


def test_what_a_cache_lacks_is_calibrated_and_named(folder, graph, file, found, tmp_path):
    lost, zero = tiny.LINEARS[3], tiny.LINEARS[5]
    cache = write_cache(tmp_path / "c", graph, found | {zero: 0.0}, without=(lost,))
    made = recipe_from_cache(cache, str(folder), file)
    assert made.calibrated == {lost: "the cache does not name its input", zero: "its amax in the cache is 0"}
    assert f"# calibrated: {lost}: the cache" in made.text
    assert parse_recipe(made.text, "it").calibration.amax == made.given


def test_a_cache_of_another_network_is_refused(folder, file, tmp_path):
    written(tmp_path / "c", "conv1: 3c010a14", "conv2: 3c010a14")
    with pytest.raises(UserError, match=r"cannot be matched .* \(conv1, conv2, ...\)"):
        recipe_from_cache(tmp_path / "c", str(folder), file)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("bert.encoder.layer.0.output.dense.input_quantiser", {}, "near: .*output.dense.input_quantizer"),
        ("encoder.layer.0.output.dense.weight_quantizer", {}, "no quantizer of an INT8 activation"),
        (f"{QUERY}.input_quantizer", {"match": QUERY, "smoothing": 0.5}, "is smoothed"),
    ],
)
def test_given_amax_that_cannot_be_used_are_refused(folder, name, changes, said):
    rules = tiny.recipe_with().model_dump(mode="json")["rules"] + ([changes] if changes else [])
    recipe = tiny.recipe_with(calibration={"amax": {name: 1.0}}, rules=rules)
    model = load_model(str(folder))
    with pytest.raises(UserError, match=said):
        ptq.calibrate(model, tiny.plan_of(recipe, model), tiny.calibration_batches(), recipe.calibration)


@pytest.mark.parametrize(
    "changes", [{"smoothing": 0.5}, {"outlier_channel_splitting": 32}, {"centering": True}]
)
def test_a_recipe_that_changes_the_tensors_cannot_give_their_amax(changes):
    with pytest.raises(
        ValueError, match="smoothing to none, outlier_channel_splitting to 0 and centering to false"
    ):
        tiny.recipe_with(calibration={"amax": {"x.input_quantizer": 1.0}, **changes})


# the reader


def test_scales_are_those_that_were_written(tmp_path):
    path = written(
        tmp_path / "calibration.cache", "input: 3c010a14", line("/a/MatMul:0", 0.25), "zeros: 00000000"
    )
    cache = read_cache_file(path)
    assert is_cache(path.read_bytes())
    assert (cache.version, cache.calibrator) == ("8.6.1", "EntropyCalibration2")
    assert cache.scales["input"] == pytest.approx(1 / 127, rel=1e-3)
    assert (cache.scales["/a/MatMul:0"], cache.scales["zeros"]) == (0.25, 0.0)


@pytest.mark.parametrize(
    ("head", "version"),
    [("TRT-7103-MinMaxCalibration", "7.1.3"), ("TRT-100600-EntropyCalibration2", "10.6.0"),
     ("TRT-8531-EntropyCalibration2\r", "8.5.31")],
)  # fmt: skip
def test_the_version_is_that_of_the_first_line(tmp_path, head, version):
    assert read_cache_file(written(tmp_path / "c", line("x", 1.0), head=head)).version == version


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (["x: 3c010a1"], "line 2"),
        (["x: 3c010a14", "3c010a14"], "line 3"),
        ([line("x", float("nan"))], "line 2"),
        ([line("x", -1.0)], "line 2"),
        (["x\x1b[2J: 3c010a14"], "line 2"),
        (["n" * 5000 + ": 3c010a14"], "line 2"),
        ([], "without tensors"),
    ],
)
def test_what_is_no_scale_is_named(tmp_path, lines, told):
    with pytest.raises(UserError, match=told):
        read_cache_file(written(tmp_path / "c", *lines))


def test_another_file_is_refused(tmp_path):
    for data in (b"", b"PK\x03\x04", b"\x80\x04\x95", b"{}", b"TRT-"):
        (tmp_path / "c").write_bytes(data)
        assert not is_cache(data)
        with pytest.raises(UserError, match="no calibration cache"):
            read_cache_file(tmp_path / "c")
    with pytest.raises(UserError, match="cannot read"):
        read_cache_file(tmp_path / "missing")


def test_a_shared_layer_gets_the_largest_amax_of_its_runs(tmp_path):
    """A TensorRT cache has the input of each run; from the first alone later ones would be clipped."""
    folder = write_model(tmp_path / "model", "albert")
    graph = trace(load_model(str(folder)), 13)
    onnx.save(graph, tmp_path / "model.onnx")
    linear = "albert.encoder.albert_layer_groups.0.albert_layers.0.ffn"
    first, second = input_tensors(graph, [linear], "albert")[linear]
    written(tmp_path / "c", line(first[0], 1 / 127), line(second[0], 2 / 127))
    made = recipe_from_cache(tmp_path / "c", str(folder), tmp_path / "model.onnx")
    assert made.given == {f"{linear}.input_quantizer": pytest.approx(2.0)}
