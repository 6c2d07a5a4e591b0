"""`check` on a tiny BERT layer: clean when healthy, and each broken one names its node alone."""

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from qdqbench.quantize.engine.backend import choose_backend
from qdqbench.quantize.lint.check import MENDS, CheckReport, check_model, to_json
from qdqbench.quantize.lint.findings import read_kinds
from qdqbench.quantize.lint.fix import engine_row
from qdqbench.quantize.utils.errors import UserError

from ...support import broken_layers as broken
from ...support import tiny_layer as tiny
from ...support.foreign_layer import float_layer

ORDER = "slow-weight-order"


def checked(model, allow=(), **options):
    """The report without the order of weights: the tiny layer has them [K, N], and tests of its own below."""
    return check_model(model, allow=(*allow, ORDER), **options)


def found(report):
    return [(row.code, row.node) for row in report.findings]


@pytest.mark.parametrize(("scales", "code"), [(0, "bad-scale"), (5, "wrong-weight-axis")])
def test_scales_that_are_none_or_of_another_number_are_refused(scales, code):
    """TensorRT-RTX 1.7.1 builds neither; the first had no finding, the second was called slow."""
    model = tiny.healthy("fp32")
    for name, value in {"scale": 1, "zero_point": 0}.items():
        tiny.store(model, f"/layer/query.weight_{name}", np.full(scales, value))
    assert code in [row.code for row in checked(model).refusals]


@pytest.mark.parametrize("case", broken.CASES, ids=broken.IDS)
def test_a_broken_model_names_the_node_and_nothing_else(case):
    report = checked(case.broken())
    assert found(report) == [(case.code, case.node)]
    (row,), kind = report.findings, read_kinds("graph")[case.code]
    fp32_mask = case.code == "constant-overflows-fp16" and case.form == "fp32"
    assert row.severity == ("warning" if fp32_mask else kind.severity)
    assert row.fix == kind.edit or MENDS in row.fix
    assert checked(case.broken(), allow=(case.code,)).findings == []


def test_every_code_has_a_broken_model():
    below = {"no-qdq", "recipe-missing", "recipe-surplus", "batch-dependent", ORDER}
    assert {case.code for case in broken.CASES} | below == set(read_kinds("graph"))


def test_the_parser_agrees():
    """What TensorRT refuses at once, and what it takes without a word, is as the rules say."""
    trt = pytest.importorskip("tensorrt_rtx")
    logger = trt.Logger(trt.Logger.INTERNAL_ERROR)
    builder = trt.Builder(logger)

    def refused(model):
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        return not trt.OnnxParser(network, logger).parse(model.SerializeToString())

    assert not any(refused(tiny.healthy(form)) for form in tiny.FORMS)
    assert [case.code for case in broken.CASES if refused(case.broken()) != case.is_refused] == []


# No other rule was applied after these, and UINT8 with zero point 0 is read as if it were INT8.
NOT_COUNTED = [name for name in broken.IDS if name.endswith(("opset-too-low", "invalid-onnx", "uint8"))]


def in_int8(report):
    """Linears of the layer that `check` counts as INT8; None: it says that no engine is built."""
    rows = [row for row in report.gemms if row.node in tiny.LINEARS]
    return None if report.refusals else sum(row.state == "INT8" for row in rows)


@pytest.mark.parametrize(("name", "case"), [*zip(broken.IDS, broken.CASES, strict=True)], ids=broken.IDS)
def test_what_is_counted_is_what_the_engine_ran(name, case):
    report = checked(case.broken())
    if name in NOT_COUNTED:  # less, never more
        assert (in_int8(report) or 0) <= (case.int8 or 0)
    else:
        assert in_int8(report) == case.int8
    assert report.counts["int8"] == (0 if report.refusals else sum(r.state == "INT8" for r in report.gemms))
    assert sum(report.counts[key] for key in ("refused", "not_int8", "floating_point")) == sum(
        row.state != "INT8" for row in report.gemms
    )


@pytest.mark.long
def test_the_engine_agrees(tmp_path):
    """`Case.int8` is what layer tables of TensorRT-RTX say."""
    pytest.importorskip("tensorrt_rtx")
    builder = choose_backend("tensorrt_rtx")
    path, other = tmp_path / "model.onnx", []
    for name, case in zip(broken.IDS, broken.CASES, strict=True):
        onnx.save(case.broken(), path)
        row = engine_row(path, builder)
        if (None if row.refused else row.int8_gemms) != case.int8:
            other.append((name, row))
    assert other == []


@pytest.mark.parametrize("form", tiny.FORMS)
@pytest.mark.parametrize("int8_attention", [True, False])
def test_the_healthy_model_is_clean(form, int8_attention):
    model = tiny.healthy(form, int8_attention=int8_attention)
    before = model.SerializeToString(deterministic=True)
    report = checked(model)
    attention = ["/layer/self/MatMul", tiny.CONTEXT]
    assert report.findings == []
    assert sorted(report.quantized) == sorted(tiny.LINEARS + attention * int8_attention)
    assert report.not_quantized == attention * (not int8_attention) + ["/classifier/Gemm"]
    assert report.attention_quantized == [tiny.SOFTMAX] * int8_attention
    assert report.attention_not_quantized == [tiny.SOFTMAX] * (not int8_attention)
    assert (report.opset, report.ir_version) == (20, 10)
    assert model.SerializeToString(deterministic=True) == before


def two_casts(model):
    for number, kind in enumerate((TensorProto.FLOAT, TensorProto.FLOAT16)):
        tiny.insert(model, tiny.QUERY, 0, tiny.make("Cast", f"/cast{number}", to=kind))


def scalar_factor(model):
    tiny.insert(model, tiny.QUERY, 0, tiny.make("Mul", "/mul", tiny.give(model, "factor", 0.5, np.float16)))
    divisor = tiny.give(model, "divisor", [[2]], np.float16)
    tiny.insert(model, tiny.QUERY, 0, tiny.make("Div", "/div", divisor))


def moved(model):
    shape = tiny.give(model, "flat", [tiny.LENGTH, tiny.HIDDEN], np.int64)
    tiny.insert(model, tiny.QUERY, 0, tiny.make("Reshape", "/flat", shape), tiny.make("Identity", "/same"))


def right_gemm(model):
    broken.quantized_gemm(model, axis=0)


def large_in_fp32_island(model):
    """A mask of -3.4e38 that softmax reads in FP32, in a model that is FP16 elsewhere."""
    broken.mask_in_fp32(model)
    for name in ("/mask/Cast_1", "/layer/self/p/Cast"):
        tiny.node(model, name).attribute[0].i = TensorProto.FLOAT
    tiny.insert(model, "/layer/self/Add", 0, tiny.make("Cast", "/scores", to=TensorProto.FLOAT))


@pytest.mark.parametrize(
    ("form", "edit"),
    [
        ("fp16", two_casts),
        ("fp16", scalar_factor),
        ("fp16", moved),
        ("fp16", broken.rightly_transposed_weight),
        ("fp32", right_gemm),
        ("fp32", lambda model: tiny.set_axis(model, tiny.WEIGHT, -1)),
        ("factored", large_in_fp32_island),
        ("fp16", tiny.at_opset(23)),
    ],
)
def test_what_the_engine_takes_in_int8_is_clean(form, edit):
    model = tiny.healthy(form)
    edit(model)
    report = checked(model)
    assert report.findings == []
    assert tiny.QUERY in report.quantized


def test_uint8_activations_run_in_an_engine_that_multiplies_them():
    model = tiny.healthy()
    tiny.store(model, "/layer/query/input.zero_point", 0, np.uint8)
    report = checked(model, unsigned=True)
    assert report.findings == []
    assert tiny.QUERY in report.quantized
    assert tiny.QUERY in checked(model).not_quantized
    tiny.store(model, "/layer/query/input.zero_point", 128, np.uint8)
    assert {row.code for row in checked(model, unsigned=True).findings} >= {"uint8"}


def in_nk(model, *modules):
    """Weights as `fold_weights` stores them: codes [N, K], scales along axis 0, a Transpose behind the DQ."""
    for name in modules:
        dq = tiny.node(model, f"/layer/{name}/weight/DQ")
        codes = next(t for t in model.graph.initializer if t.name == f"/layer/{name}.weight")
        tiny.store(model, codes.name, numpy_helper.to_array(codes).T)
        if dq.attribute:
            tiny.set_axis(model, dq.name, 0)
        turn = tiny.make("Transpose", f"/layer/{name}/t", perm=[1, 0])
        tiny.insert(model, f"/layer/{name}/MatMul", 1, turn)
    return model


ALL = ("query", "key", "value", "output")


def gemm_without_trans_b(model):
    """The classifier in INT8, its weight [32, 3]."""
    broken.quantized_gemm(model, axis=0)
    tiny.store(model, "classifier.weight", np.ones((tiny.HIDDEN, 3)))
    tiny.set_axis(model, "/classifier/weight/DQ", 1)
    del tiny.node(model, "/classifier/Gemm").attribute[:]


def two_transposes(model):
    first, second = tiny.make("Transpose", "/t1", perm=[1, 0]), tiny.make("Transpose", "/t2")
    tiny.insert(model, tiny.QUERY, 1, first, second)


def single_output(model):
    """One output channel: [K, 1] and [1, K] are the same bytes."""
    gemm_without_trans_b(model)
    tiny.store(model, "classifier.weight", np.ones((tiny.HIDDEN, 1)))
    for name, value in {"classifier.s": 0.01, "classifier.z": 0, "classifier.bias": 0}.items():
        tiny.store(model, name, [value])
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 1


def reshaped(model):
    shape = tiny.give(model, "square", [tiny.HIDDEN, tiny.HIDDEN], np.int64)
    tiny.insert(model, tiny.QUERY, 1, tiny.make("Reshape", "/square", shape))


def float_weight_n_k(model):
    """As ModelOpt's exporter has it: FP32 [N, K] -> Q -> DQ -> Transpose."""
    broken.float_weight(model)
    in_nk(model, "query")
    tiny.set_axis(model, "/layer/query/weight/Q", 0)


KEY, TWO = "/layer/key/MatMul", "2 of 4 INT8 weights (/layer/key/MatMul, /layer/value/MatMul) are"
ONE = "its INT8 weight is"


@pytest.mark.parametrize(
    ("form", "turned", "edit", "slow"),  # weights stored [N, K]; the one that is named, and what is said
    [
        *((form, (), None, (tiny.QUERY, "all 4 INT8 weights are")) for form in tiny.FORMS),
        *((form, ALL, None, None) for form in tiny.FORMS),
        ("factored", ("query", "output"), None, (KEY, TWO)),
        ("factored", ALL[:3], None, ("/layer/output/MatMul", ONE)),
        # a builder folds Q and DQ of FP32 into codes of the same order
        ("fp32", ALL[1:], broken.float_weight, (tiny.QUERY, ONE)),
        ("fp32", ALL, gemm_without_trans_b, ("/classifier/Gemm", ONE)),
        ("factored", ALL[1:], two_transposes, (tiny.QUERY, ONE)),
        ("fp32", ALL, right_gemm, None),  # [N, K] and transB
        ("fp32", ALL, single_output, None),
        ("fp32", ALL[1:], float_weight_n_k, None),
        ("factored", ALL[1:], reshaped, None),  # nothing is claimed where the axes cannot be followed
        ("factored", ALL[1:], tiny.unquantized("/layer/query/input"), None),  # not in INT8 at all
        ("factored", ALL[1:], tiny.stored("/layer/query/input.zero_point", 0, np.uint8), None),
    ],
)
def test_weights_stored_k_n_are_one_warning(form, turned, edit, slow):
    model = in_nk(tiny.healthy(form), *turned)
    if edit:
        edit(model)
    report = check_model(model)
    rows = report.codes.get(ORDER, [])
    assert [(row.node, row.why.partition(" stored [K, N]")[0]) for row in rows] == ([slow] if slow else [])
    assert {row.severity for row in rows} <= {"warning"}  # as they are in INT8
    if edit is None:
        assert report.findings == rows
        assert set(tiny.LINEARS) <= set(report.quantized)


@pytest.mark.parametrize("perm", [[], [0], [5, 7], [0, 0], [1, 0, 2], [-9, 3]])
@pytest.mark.parametrize("form", ["fp16", "factored"])
def test_a_transpose_that_does_not_fit_its_weight(form, perm):
    model = tiny.healthy(form)
    transpose = tiny.make("Transpose", "/t")
    transpose.attribute.append(helper.make_attribute("perm", perm, attr_type=onnx.AttributeProto.INTS))
    tiny.insert(model, tiny.QUERY, 1, transpose)
    assert found(checked(model)) == [("wrong-weight-axis", tiny.WEIGHT)] * (form == "fp16")


MODULES = {"layer.query", "layer.key", "layer.value", "layer.output", "layer.self"}
LACKING = {"/classifier/Gemm": "recipe-missing"}


@pytest.mark.parametrize(
    ("attention", "expected", "wrong"),
    [
        (True, MODULES, {}),
        (False, MODULES - {"layer.self"}, {}),
        (True, MODULES - {"layer.key"}, {"/layer/key/MatMul": "recipe-surplus"}),
        (True, MODULES | {"classifier", "layer.kee"}, LACKING | {"layer.kee": "recipe-missing"}),
        (False, MODULES, dict.fromkeys(("/layer/self/MatMul", tiny.CONTEXT), "recipe-missing")),
        (False, set(), dict.fromkeys(tiny.LINEARS, "recipe-surplus")),
    ],
)
def test_the_recipe_is_held_to(attention, expected, wrong):
    report = checked(tiny.healthy(int8_attention=attention), expected_quantized=expected)
    assert found(report) == [(code, node) for node, code in wrong.items()]
    assert "layer.kee" not in wrong or "layer.key" in report.findings[-1].why


def test_a_twin_without_qdq():
    twin = float_layer("fp16")
    assert checked(twin).findings == []
    assert checked(twin, expected_quantized=()).findings == []
    assert found(checked(twin, expected_quantized=MODULES)) == [("no-qdq", "tiny")]


@pytest.mark.parametrize(("size", "told"), [(1, False), (8, True), ("batch", True)])
def test_ranges_of_a_whole_batch_are_told(size, told):
    """Dynamic quantization of two texts at once answers otherwise than of each."""
    model = tiny.healthy("fp32")
    broken.dynamic(model)
    axis = model.graph.input[0].type.tensor_type.shape.dim[0]
    axis.CopyFrom(onnx.TensorShapeProto.Dimension(**{"dim_param" if size == "batch" else "dim_value": size}))
    model.graph.input[1].type.tensor_type.shape.dim[0].CopyFrom(axis)
    assert [row.node for row in checked(model).codes.get("batch-dependent", ())] == [tiny.INPUT] * told


def test_errors_come_before_warnings():
    model = tiny.healthy("fp32")
    tiny.store(model, "fill", -3.4e38)
    broken.float_weight(model)
    tiny.store(model, "/layer/output/input.zero_point", 1)
    report = checked(model)
    assert [row.severity for row in report.findings] == ["error", "warning", "warning"]
    assert [row.code for row in report.errors] == ["non-zero-zero-point"]


def test_a_node_without_a_name_is_called_by_its_output():
    model = tiny.healthy()
    tiny.node(model, tiny.QUERY).name = ""
    tiny.skip_qdq(model, "/layer/query/input")
    assert found(checked(model)) == [("half-quantized", f"MatMul (output '{tiny.QUERY}.out')")]


def test_the_report_is_json():
    model = tiny.healthy()
    tiny.skip_qdq(model, "/layer/query/input")
    report = checked(model)
    told = json.loads(json.dumps(to_json(report)))
    assert told.pop("counts") == report.counts
    assert CheckReport.model_validate(told) == report


def test_a_code_that_does_not_exist():
    with pytest.raises(UserError, match="half-quantised; did you mean half-quantized"):
        checked(tiny.healthy(), allow=("half-quantised",))


@pytest.mark.parametrize(
    "edit",
    [
        lambda model: model.graph.initializer[0].dims.__setitem__(0, 31),
        lambda model: model.graph.initializer[0].dims.__setitem__(0, -1),
        lambda model: model.graph.initializer[0].dims.__setitem__(0, 1 << 40),
        lambda model: setattr(model.graph.initializer[0], "data_type", 0),
        lambda model: setattr(model.graph.initializer[0], "data_location", TensorProto.EXTERNAL),
        lambda model: model.ClearField("graph"),
        lambda model: model.ClearField("opset_import"),
    ],
)
def test_a_model_that_cannot_be_read(edit):
    model = tiny.healthy()
    edit(model)
    with pytest.raises(UserError):
        checked(model)
