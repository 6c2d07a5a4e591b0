"""What `check` says of operators and types is what engines of TensorRT-RTX made of them."""

import itertools

import onnx
import pytest
from tools import measure_operators as measured

from qdqbench.quantize.lint.check import check_model
from qdqbench.quantize.lint.operators import newest, read_measured

from ...support import broken_layers as broken
from ...support import tiny_layer as tiny

FORMS = [*itertools.product(measured.TYPES, measured.HEADS, (3, 4), (True, False))]
# The builder reads other codes as INT8 ones, and scales by block as if they were by column, which makes other
# numbers of them.
READ_AS_INT8 = {"UINT8 x INT8", "INT32 x INT8", "INT8 x INT8 by block"}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: measured.attention_label(*form))
def test_attention_is_refused_where_engines_were(form):
    refused = bool(check_model(measured.attention(*form)).refusals)
    assert refused == (newest("attention", measured.attention_label(*form)) == "refused")


@pytest.mark.parametrize("codes", [*measured.list_codes()], ids=lambda codes: measured.codes_label(*codes))
def test_a_linear_is_in_int8_where_engines_had_it(codes):
    label = measured.codes_label(*codes)
    report, told = check_model(measured.linear(*codes)), newest("codes", label)
    (row,) = report.gemms
    if label in READ_AS_INT8:
        assert row.state in {"not INT8", "refused"}
    else:
        assert bool(report.refusals) == (told == "refused")
        assert (row.state == "INT8") == (told == "Int8")


def test_each_operator_was_taken_refused_or_is_not_told():
    tables = read_measured()
    assert {told for row in tables["operators"].values() for told in row} <= {"taken", "refused", "not told"}
    assert {"MatMul", "LayerNormalization", "RotaryEmbedding", "RMSNormalization"} <= {*tables["operators"]}


def test_products_inside_of_attention_count():
    model = tiny.healthy("fp16")
    before = check_model(model).counts["gemms"]
    broken.own_attention(tiny.HIDDEN // 2)(model)
    report = check_model(model)
    assert report.counts["gemms"] == before + 2
    assert [row.state for row in report.gemms if row.node == "/own"] == ["floating point"] * 2


def test_a_product_that_einsum_writes_counts():
    """As the engine has it: a GEMM in INT8."""
    model = measured.linear("INT8", "INT8")
    node = model.graph.node[-1]
    node.op_type = "Einsum"
    node.attribute.append(onnx.helper.make_attribute("equation", "mk,kn->mn"))
    assert [(row.operator, row.state) for row in check_model(model).gemms] == [("Einsum", "INT8")]
    model.graph.node[-1].input[0] = "x"
    assert [row.state for row in check_model(model).gemms] == ["not INT8"]


def test_the_engine_agrees_with_the_tables():
    trt = pytest.importorskip("tensorrt_rtx")
    tables = read_measured()
    if trt.__version__ not in tables["versions"]:
        pytest.skip(f"{trt.__version__} was not measured")
    forms = [("FLOAT16", 64, 4, True), ("FLOAT", 64, 4, True), ("FLOAT16", 20, 4, True)]
    models = {("attention", measured.attention_label(*form)): measured.attention(*form) for form in forms}
    codes = [("INT8", "INT8", 0), ("INT8", "UINT8", 0), ("FLOAT8E4M3FN", "FLOAT8E4M3FN", 0)]
    models |= {("codes", measured.codes_label(*each)): measured.linear(*each) for each in codes}
    for (table, label), model in models.items():
        told, _ = measured.build([model])
        those = tables[table][label].get(told, ())
        assert those == "all" or trt.__version__ in those, label
