"""What the layer tables of engines say, and why an INT8 engine can be slower than its FP16 twin."""

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from qdqbench.quantize.engine.layers import kernel_label, parse_inspector_json, types_text
from qdqbench.quantize.engine.results import LayerRow
from qdqbench.quantize.lint.inspect_target import recipe_modules
from qdqbench.quantize.lint.inspection import (
    explain_slowdown,
    find_faults,
    inspect_layers,
    read_graph,
    rebuild_graph,
    split_time,
)
from qdqbench.quantize.recipe.schema import dump_recipe
from qdqbench.quantize.utils.errors import UserError

from ...support.graphs import model_of
from ...support.layer_tables import bert, inspector_json
from ...support.tiny_bert import INT8, recipe_with, twin
from ...support.tiny_bert import LINEARS as ENCODER

LAYER = "/bert/encoder/layer.0"
LINEARS = {
    f"/bert/encoder/layer.{n}/{name}/MatMul"
    for n in range(2)
    for name in (
        *(f"attention/self/{leaf}" for leaf in ("query", "key", "value")),
        *(f"{leaf}/dense" for leaf in ("attention/output", "intermediate", "output")),
    )
}
HEAD = ["/bert/pooler/dense/Gemm", "/classifier/Gemm"]


def kernel(name, kind="kgen", onnx=(), inputs=("Half",), outputs=("Half",)):
    return LayerRow(
        name=name, kind=kind, onnx=list(onnx), inputs=list(inputs), constants=[], outputs=list(outputs)
    )


# Names.


def test_labels_and_datatypes():
    rows = bert(1)
    facts = inspect_layers(rows)
    texts = [(kernel_label(row, facts.computed.get(row.name, ())), types_text(row)) for row in facts.rows]
    assert texts[:4] == [
        ("embeddings", "INT64 -> FP16/INT8"),
        ("attention mask", "INT64 -> FP16"),
        ("layer.0 attention key+query+value", "INT8*INT8 -> FP16"),
        ("layer.0 attention value", "FP16 -> FP16"),
    ]
    assert ("layer.0 attention", "FP16 -> INT8") in texts
    assert ("layer.0 attention output LayerNorm", "FP16 -> FP16/INT8") in texts
    assert ("layer.0 intermediate GELU", "FP16 -> INT8") in texts
    assert texts[-1] == ("classifier", "FP16 -> FP32")


# One engine.


@pytest.mark.parametrize("schema", [10, 11])
@pytest.mark.parametrize("merged", [True, False])
def test_an_int8_engine(merged, schema):
    found = inspect_layers(parse_inspector_json(inspector_json(bert(merged=merged), schema)))
    assert (found.gemms, set(found.proven)) == (14, LINEARS)
    assert found.not_int8 == HEAD
    assert set(found.reasons) == {*HEAD}
    assert found.failures == []  # no recipe, nothing to fail
    facts = found
    assert (facts.attentions, found.attention_fused, found.attention_int8) == (2, 2, 0)
    assert facts.qkv == {"attentions": 2, "merged": 2 if merged else 0}
    assert facts.gelu == {"fused": 0, "separate": 2}
    assert facts.layernorm == {"FP32": 5}
    assert (facts.layout_kernels, facts.layout_kernels_int8) == (8, 2)
    assert len(facts.separate_epilogues) == 12
    assert facts.int8_writers == {"LayerNorm": 4, "attention": 2, "layout": 2, "GELU": 2, "embeddings": 1}
    assert "none" not in facts.kernel_counts
    assert len([*find_faults(facts)]) == (0 if merged else 1)


def test_an_fp16_engine():
    found = inspect_layers(bert(int8=False))
    assert (found.proven, set(found.not_int8)) == ([], {*LINEARS, *HEAD})
    assert found.gelu == {"fused": 2, "separate": 0}
    assert len(found.separate_epilogues) == 10  # the feed-forward GEMM has its bias and GELU inside
    assert [*find_faults(found)] == []


def test_int8_attention_and_the_recipe():
    attentions = [f"/bert/encoder/layer.{n}/attention/self" for n in (0, 1)]
    products = {f"{path}/{name}" for path in attentions for name in ("MatMul", "MatMul_1")}
    held = inspect_layers(bert(attention="int8"), expected=LINEARS | products, expected_attention=2)
    assert (len(held.proven), held.gemms, held.failures) == (16, 18, [])
    broken = inspect_layers(bert(), expected=LINEARS | products, expected_attention=2)
    assert set(broken.not_int8) == products
    assert broken.failures == [
        "4 GEMMs that should be in INT8 are not",
        "0 of 2 attentions run as one INT8 kernel",
    ]


def test_unfused_attention():
    found = inspect_layers(bert(attention="apart"))
    assert (found.attentions, found.attention_fused) == (2, 0)
    assert found.softmax_kernels == {"FP32": 2}
    assert not any("self/MatMul" in name for name in [*found.not_int8, *found.graph.linears])
    assert any("2 of 2 attentions fall apart" in problem.what for problem in find_faults(found))


@pytest.mark.parametrize(
    ("form", "part"),
    [
        ({"raw": True}, "12 INT8 GEMMs store raw INT32 sums as FP16"),
        ({"output": "Float", "raw": True}, "12 of 12 INT8 GEMMs write FP32"),
        ({"merged": False}, "three GEMMs in 2 of 2 attentions"),
        ({"norm": "MeanSubMulMeanAddSqrtDivMulMulAdd"}, "5 of 5 LayerNorms sum their squares in FP16"),
        ({"dequantized": ["layer.0/output/dense"]}, "1 linears dequantize INT8 codes"),
    ],
)
def test_findings(form, part):
    (problem,) = find_faults(inspect_layers(bert(**form)))
    found = problem.sentence
    assert part in found
    assert "set " in found or "give " in found or "add " in found


def test_three_gemms_are_no_finding_in_a_runtime_for_cpus():
    rows = [row.model_copy(update={"kernel": "brgemm_avx512_i8"}) for row in bert(merged=False)]
    assert [*find_faults(inspect_layers(rows))] == []


def test_several_profiles_are_counted_once_and_proven_in_each():
    both = [*bert(), *bert(copy=1)]
    found = inspect_layers(both)
    assert len(found.proven) == 12
    assert found.kernel_counts == inspect_layers(bert()).kernel_counts
    broken = inspect_layers([*bert(), *bert(copy=1, dequantized=["layer.1/output/dense"])])
    assert broken.not_int8 == ["/bert/encoder/layer.1/output/dense/MatMul", *HEAD]


# The graph.


def small_graph(tmp_path, kind=TensorProto.FLOAT16):
    """softmax(x W0' x^T) with a quantized weight, and names that say nothing."""
    constants = {"w": np.ones((4, 4), np.int8), "s": helper.tensor_dtype_to_np_dtype(kind).type(1)}
    node = helper.make_node
    nodes = [
        node("DequantizeLinear", ["w", "s"], ["d"], name="d"),
        node("Transpose", ["d"], ["t"], name="t"),
        node("MatMul", ["x", "t"], ["y"], name="linear"),
        node("MatMul", ["y", "x"], ["z"], name="product"),
        node("Softmax", ["z"], ["p"], name="softmax"),
        node("Gemm", ["p", "t"], ["out"], name="gemm"),
    ]
    path = tmp_path / "small.onnx"
    onnx.save(model_of(nodes, {"x": [4, 4]}, {"out": [4, 4]}, constants, x=kind, out=kind), path)
    return path


@pytest.mark.parametrize(("kind", "text"), [(TensorProto.FLOAT16, "FP16"), (TensorProto.FLOAT, "FP32")])
def test_linears_and_products_of_an_onnx_file(tmp_path, kind, text):
    graph = read_graph(small_graph(tmp_path, kind))
    assert (graph.linears, graph.products, graph.softmaxes) == (["linear", "gemm"], ["product"], ["softmax"])
    assert graph.softmax_types == {"softmax": text}


def test_another_graph_is_refused(tmp_path):
    with pytest.raises(UserError, match="give the file that the engine was built from"):
        inspect_layers(bert(), read_graph(small_graph(tmp_path)))


def test_what_autocast_leaves_behind_an_fp32_softmax():
    softmax = f"{LAYER}/attention/self/Softmax"
    rows = [kernel("_gemm_mha_v2_myl0_1", onnx=[softmax, f"{softmax}_output_0_cast_to_fp16"])]
    assert rebuild_graph(rows).softmax_types == {softmax: "FP32"}


# Time.


def test_time_by_kernel_block_and_kind():
    rows = bert(1)
    facts = inspect_layers(rows)
    times = {row.name: float(number + 1) for number, row in enumerate(facts.rows)}
    time = split_time(rows, times | {"unheard of": 0.5})
    assert time.total == sum(times.values()) + 0.5
    for parts in (time.by_kernel, time.by_block, time.by_kind):
        assert sum(parts.values()) == pytest.approx(sum(times.values()))
    assert list(time.by_block) == ["embeddings", "layer.0", "head", "other"]
    assert list(time.by_kernel.values()) == sorted(times.values(), reverse=True)
    assert list(time.by_kind.values()) == sorted(time.by_kind.values(), reverse=True)
    assert time.by_kind["attention"] == next(times[row.name] for row in facts.fused)
    assert (time.unmatched, time.missing) == ({"unheard of": 0.5}, 0)
    assert split_time(rows, {"x": 0.0}).missing == len(facts.rows)


def test_blocks_are_in_the_order_of_the_network():
    rows = bert(12)
    time = split_time(rows, {row.name: 1.0 for row in rows})
    assert list(time.by_block)[1:13] == [f"layer.{n}" for n in range(12)]


# Why slower.


FP16 = bert(int8=False)


def test_no_reason_where_nothing_differs():
    assert explain_slowdown(FP16, FP16)[1:] == []  # all that is left is that nothing is in INT8
    assert "12 of 12 encoder linears are not in INT8" in explain_slowdown(FP16, FP16)[0]


@pytest.mark.parametrize(
    ("form", "parts"),
    [
        ({}, ["2 GELU run in a kernel of their own (FP16: 0", "8 kernels only move, cast", "run where FP16"]),
        (
            {"merged": False},
            ["q, k and v are three GEMMs in 2 of 2 attentions", "(FP16 merges 2)", "gemm 14 against 10"],
        ),
        ({"output": "Float", "raw": True}, ["12 of 12 INT8 GEMMs write FP32"]),
        ({"attention": "apart"}, ["2 of 2 attentions fall apart", "(FP16 fuses 2)"]),
        ({"dequantized": ["layer.0/output/dense"]}, ["1 linears dequantize", "(layer.0: output)"]),
    ],
)
def test_reasons_have_figures_and_name_what_to_change(form, parts):
    reasons = explain_slowdown(bert(**form), FP16)
    for part in parts:
        assert [text for text in reasons if part in text], part
    for text in reasons:
        assert "\n" not in text
        assert any(character.isdigit() for character in text)
        assert ": " in text


def test_an_int8_engine_has_no_reason_that_is_not_its_own():
    text = " ".join(explain_slowdown(bert(attention="int8"), FP16))
    for absent in ("three GEMMs", "write FP32", "dequantize INT8", "fall apart", "not in INT8"):
        assert absent not in text


def test_linears_that_stay_in_fp16_are_named():
    mixed = [row for row in bert() if "output/dense" not in row.name]
    mixed += [row for row in FP16 if "output/dense" in row.name]
    first = "4 of 12 encoder linears are not in INT8 and gain nothing (layer.0-1: attention output, output)"
    assert explain_slowdown(mixed, FP16)[0].startswith(first)


# Anything.

_MARKED = ["/a/MatMul_myl0_1", "__myl_CastMeanSub_myl0_2", "__myl_FcAdd_myl1_3", "_gemm_mha_v2_myl0_1"]
_names = st.sampled_from([*_MARKED, "x", "+/a+", ""]) | st.text(max_size=6)
_types = st.lists(st.sampled_from(["Int8", "Half", "Float", "Int64", ""]), max_size=3)
_rows = st.lists(
    st.builds(
        LayerRow,
        name=_names,
        kind=st.sampled_from(["gemm", "kgen", "runtime_fusion", "signal", "Normalization", ""]),
        onnx=st.lists(
            st.sampled_from(["/a/MatMul", "/a/b/Gemm", "/s/Softmax", "/layer.1/q/MatMul", ""]), max_size=3
        ),
        inputs=_types,
        constants=_types,
        outputs=_types,
    ),
    max_size=6,
)


@given(_rows, _rows)
def test_any_table_is_judged(rows, others):
    found = inspect_layers(rows, times={row.name: 1.0 for row in rows})
    assert {*found.proven, *found.not_int8} <= {*found.graph.linears}
    assert len(found.proven) + len(found.not_int8) == found.gemms
    texts = [each.sentence for each in find_faults(found)] + explain_slowdown(rows, others)
    assert all(isinstance(text, str) for text in texts)


def test_rules_for_what_a_graph_does_not_show_are_no_error(tiny_bert, tmp_path):
    """Embeddings in FP32, and a layer that is named as a whole."""
    rules = [{"role": "encoder"} | INT8, {"match": "*", "type": "Embedding", "precision": "fp32"}]
    recipe = recipe_with(rules=[*rules, {"match": "encoder.layer.0", "precision": "fp16"}])
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
    onnx.save(twin(tiny_bert), tmp_path / "model.onnx")
    wanted = {name for name in ENCODER if "layer.1." in name}
    assert recipe_modules(tmp_path / "model.onnx", str(tmp_path / "recipe.yaml")) == wanted
    recipe = recipe_with(rules=[*rules, {"match": "no.such.*"} | INT8])
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
    with pytest.raises(UserError, match="matches no Linear"):
        recipe_modules(tmp_path / "model.onnx", str(tmp_path / "recipe.yaml"))
