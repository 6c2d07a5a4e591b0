"""What the layer tables of engines say, and why an INT8 engine can be slower than its FP16 twin."""

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from qdqbench.quantize.engine.layers import parse_inspector_json
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
from qdqbench.quantize.lint.reports import inspect_report
from qdqbench.quantize.recipe.schema import dump_recipe
from qdqbench.quantize.report.render import render_markdown
from qdqbench.quantize.utils.errors import UserError

from ...support.findings import dated
from ...support.graphs import model_of
from ...support.layer_tables import bert, inspector_json
from ...support.tiny_bert import INT8, recipe_with, twin
from ...support.tiny_bert import LINEARS as ENCODER

GOLDEN = Path(__file__).parents[2] / "golden" / "layers"
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


# One engine.

FP16 = bert(int8=False)
FORMS = {
    "int8": {},
    "fp16": {"int8": False},
    "int8-attention": {"attention": "int8"},
    "apart": {"attention": "apart"},
    "qkv": {"merged": False},
    "raw": {"raw": True},
    "fp32-outputs": {"output": "Float", "raw": True},
    "fp16-norm": {"norm": "MeanSubMulMeanAddSqrtDivMulMulAdd"},
    "dequantized": {"dequantized": ["layer.0/output/dense"]},
}


@pytest.mark.parametrize("form", FORMS)
def test_what_is_said_of_an_engine_and_why_it_is_slower_than_fp16(form):
    """Held to `tests/golden/layers`; RECORD_GOLDEN=1 writes the files anew, to be read as a diff."""
    rows, path = bert(**FORMS[form]), GOLDEN / f"{form}.md"
    found = inspect_layers(rows)
    report = render_markdown(dated(lambda: inspect_report(found, None, False, "")))
    reasons = "\n".join(f"- {text}" for text in explain_slowdown(rows, FP16))
    said = f"{report}\n# Slower than FP16\n\n{reasons}\n"
    if os.environ.get("RECORD_GOLDEN"):
        path.write_text(said, encoding="utf-8")
    assert said == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("form", [{}, {"merged": False}])
def test_tables_of_tensorrt_10_and_11_say_the_same(form):
    found, old = (
        inspect_layers(parse_inspector_json(inspector_json(bert(**form), schema))) for schema in (11, 10)
    )
    names = {"kernels", "attention_kernels"}  # 10 has no constants of its own
    assert found.model_dump(exclude=names) == old.model_dump(exclude=names)
    assert (found.gemms, set(found.proven), found.not_int8) == (14, LINEARS, HEAD)
    assert found.failures == []  # no recipe, nothing to fail


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
