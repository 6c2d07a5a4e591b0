"""Export of every shipped recipe: checked, named, typed, and equal to the fake-quant model."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from qdqbench.eval.stages import stages
from qdqbench.quantize.calibration import ptq
from qdqbench.quantize.calibration.fakequant.quantizers import forward
from qdqbench.quantize.graph import export
from qdqbench.quantize.graph.export import ExportSettings, finish_graph, save, trace
from qdqbench.quantize.graph.index import module_of
from qdqbench.quantize.lint.check import check_model
from qdqbench.quantize.models.attention import MASK_FILL
from qdqbench.quantize.models.load import load_model, use_tanh_gelu
from qdqbench.quantize.recipe.schema import load_recipe
from qdqbench.quantize.recipe.sections import Calibration
from qdqbench.quantize.tasks.task import GLUE
from qdqbench.quantize.utils.errors import CheckFailed, UserError

from ...support import tiny_bert as tiny
from ...support.tiny_layer import store

INT8_RECIPES = ["bert-int8-linears", "bert-int8-linears-per-tensor", "bert-int8-ffn", "bert-int8-attention"]
BATCHES = [tiny.padded_batch(), tiny.padded_batch((1,)), tiny.padded_batch((128, 5), seed=3)]


@pytest.mark.parametrize("weights", ["channel", "factored"])
@pytest.mark.parametrize("name", INT8_RECIPES)
def test_the_check_is_clean_and_the_quantized_set_is_the_recipes(tiny_bert, name, weights):
    plan, notes = tiny.quantized(tiny_bert, name).plan, []
    graph = finish_graph(tiny.traced(tiny_bert, name), plan, ExportSettings(20, "fp16", weights), notes)
    assert notes == []
    report = check_model(graph, expected_quantized={*plan.int8, *plan.attention})
    assert report.findings == []
    assert {module_of(node) for node in report.quantized} == {*plan.int8, *plan.attention}
    assert len(report.attention_quantized) == len(plan.attention)
    onnx.checker.check_model(graph, full_check=True)


@pytest.mark.parametrize("name", INT8_RECIPES)
@pytest.mark.parametrize(
    ("compute", "weights"), [("fp32", "channel"), ("fp16", "channel"), ("fp16", "factored")]
)
def test_logits_follow_the_fake_quant_model(tiny_bert, name, compute, weights):
    model, graph = tiny.quantized(tiny_bert, name).model, tiny.exported(tiny_bert, name, compute, weights)
    exact = load_model(str(tiny_bert))
    for batch in BATCHES:
        wanted = forward(model, batch).numpy()
        found = tiny.run_onnx(graph, batch)
        assert found.dtype == np.float32
        # a code on a rounding border may flip in FP16; in FP32 none does here
        np.testing.assert_allclose(found, wanted, atol=1e-5 if compute == "fp32" else 0.15, rtol=0)
        assert np.abs(forward(exact, batch).numpy() - wanted).max() > 1e-3  # so it is the quantized one


@pytest.mark.parametrize("compute", ["fp32", "fp16"])
def test_twins_follow_the_fp32_model_and_keep_the_nodes_of_the_trace(tiny_bert, compute):
    """INT8 is measured against them: none of the rewrites touches them."""
    model, twin = load_model(str(tiny_bert)), tiny.twin(tiny_bert, compute)
    names, found = (
        [node.name for node in each.graph.node if node.op_type != "Cast"] for each in (trace(model, 20), twin)
    )
    assert found == names
    assert sum(node.op_type == "Gelu" for node in twin.graph.node) == tiny.LAYERS
    assert check_model(twin, expected_quantized=()).findings == []
    for batch in BATCHES:
        tolerance = 1e-5 if compute == "fp32" else 0.01
        wanted = forward(model, batch).numpy()
        np.testing.assert_allclose(tiny.run_onnx(twin, batch), wanted, atol=tolerance, rtol=0)


@pytest.mark.parametrize(("compute", "weights"), [("fp32", "channel"), ("fp16", "factored")])
def test_the_tanh_gelu_of_a_recipe(tiny_bert, compute, weights):
    model, settings = load_model(str(tiny_bert)), ExportSettings(20, compute, weights)
    use_tanh_gelu(model, "tiny")
    plan = tiny.plan_of(tiny.recipe_with(), model)
    ptq.calibrate(model, plan, iter(tiny.calibration_batches()), Calibration())
    graph = finish_graph(trace(model, 20), plan, settings)
    assert check_model(graph, expected_quantized={*plan.int8}).findings == []
    assert not any(node.op_type in ("Gelu", "Erf") for node in graph.graph.node)
    exact = tiny.quantized(tiny_bert).model
    for batch in BATCHES:
        wanted = forward(model, batch).numpy()
        tolerance = 1e-5 if compute == "fp32" else 0.15
        np.testing.assert_allclose(tiny.run_onnx(graph, batch), wanted, atol=tolerance, rtol=0)
        assert np.abs(forward(exact, batch).numpy() - wanted).max() > 2e-5  # so the form shows


@pytest.mark.parametrize("opset", [20, 21])
def test_the_interface_and_versions(tiny_bert, opset):
    model = trace(load_model(str(tiny_bert)), opset)

    def described(values):
        typed = [(value.name, value.type.tensor_type) for value in values]
        sizes = {name: [d.dim_param or d.dim_value for d in kind.shape.dim] for name, kind in typed}
        return [(name, kind.elem_type, sizes[name]) for name, kind in typed]

    names = ("input_ids", "attention_mask", "token_type_ids")
    assert described(model.graph.input) == [(name, TensorProto.INT64, ["batch", "length"]) for name in names]
    assert described(model.graph.output) == [("logits", TensorProto.FLOAT, ["batch", 3])]
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", opset)]
    assert model.ir_version == export.IR_VERSION


def test_every_constant_is_finite_and_the_mask_hides(tiny_bert):
    graph = tiny.exported(tiny_bert)
    values = {t.name: numpy_helper.to_array(t) for t in graph.graph.initializer}
    assert all(np.isfinite(value).all() for value in values.values() if value.dtype.kind == "f")
    assert min(float(value.min()) for value in values.values() if value.dtype == np.float16) == MASK_FILL
    batch = tiny.padded_batch((20, 3))
    noisy = batch | {"input_ids": np.where(batch["attention_mask"] == 1, batch["input_ids"], 7)}
    np.testing.assert_array_equal(tiny.run_onnx(graph, batch)[1], tiny.run_onnx(graph, noisy)[1])


@pytest.mark.parametrize("name", ["bert-int8-linears", "bert-int8-attention"])
def test_a_fully_masked_row_is_finite(tiny_bert, name):
    batch = tiny.padded_batch((8, 8))
    batch["attention_mask"][1] = 0
    assert np.isfinite(tiny.run_onnx(tiny.exported(tiny_bert, name), batch)).all()


def test_linears_of_one_input_read_one_tensor(tiny_bert):
    """An engine merges q, k and v only when it sees that their input is the same."""
    graph = tiny.exported(tiny_bert).graph
    sources = {
        module_of(node.name).removesuffix(".input_quantizer"): node.input[0]
        for node in graph.node
        if node.op_type == "QuantizeLinear"
    }
    assert set(sources) == set(tiny.LINEARS)
    for first in (0, 6):
        assert len({sources[name] for name in tiny.LINEARS[first : first + 3]}) == 1


def test_export_leaves_the_model_as_it_was(tiny_bert):
    model = load_model(str(tiny_bert))
    before = forward(model, BATCHES[0])
    trace(model, 20)
    assert model.config.return_dict
    np.testing.assert_array_equal(forward(model, BATCHES[0]), before)


def test_finish_leaves_the_trace_as_it_was(tiny_bert):
    graph = tiny.traced(tiny_bert)
    before = graph.SerializeToString(deterministic=True)
    plan = tiny.quantized(tiny_bert).plan
    settings = ExportSettings(20, "fp16", "factored")
    done = finish_graph(graph, plan, settings)
    assert graph.SerializeToString(deterministic=True) == before
    again = finish_graph(graph, plan, settings)
    assert again.SerializeToString(deterministic=True) == done.SerializeToString(deterministic=True)


def test_a_planned_linear_that_the_graph_lacks(tiny_bert):
    plan = tiny.quantized(tiny_bert).plan
    more = dataclasses.replace(plan, int8=plan.int8 | {"bert.pooler.dense": "channel"})
    with pytest.raises(CheckFailed, match=r"no quantized weight for bert\.pooler\.dense"):
        finish_graph(tiny.traced(tiny_bert), more, ExportSettings(20, "fp16", "channel"))


def test_a_failing_exporter_is_a_user_error(tiny_bert, monkeypatch):
    model = load_model(str(tiny_bert))

    def fail(*_, **__):
        raise RuntimeError("no such operator")

    monkeypatch.setattr(model, "forward", fail)
    with pytest.raises(UserError, match="ONNX export failed in torch: RuntimeError: no such operator"):
        trace(model, 20)


def test_control_flow_is_refused(tiny_bert, monkeypatch):
    """The exporter writes an If where a squeezed axis is of any size, as in the head of Splinter."""
    model = load_model(str(tiny_bert))
    classify = model.classifier.forward
    monkeypatch.setattr(model.classifier, "forward", lambda pooled: classify(pooled).squeeze(0))
    with pytest.raises(
        UserError, match=r"a 'bert' exports with control flow \(/classifier/If\), which no engine"
    ):
        trace(model, 20)
    assert model.config.return_dict


@pytest.mark.parametrize(("backend", "form"), [("tensorrt_rtx", "factored"), ("tensorrt", "channel")])
def test_the_default_form_of_a_backend(backend, form):
    assert ExportSettings.of(tiny.recipe_with(), backend).weights == form


class TestUnjoined:
    """What the export says where q, k and v could not be joined."""

    @staticmethod
    def with_other_scale(graph, *layers):
        for layer in layers:
            path = f"/bert/encoder/layer.{layer}/attention/self/key/input_quantizer/QuantizeLinear"
            scale = next(node for node in graph.graph.node if node.name == path).input[1]
            store(graph, scale, tiny.tensor(graph, scale) * np.float32(1.01))
        return graph

    @pytest.mark.parametrize("layers", [(0,), (0, 1)])
    def test_attentions_are_counted(self, tiny_bert, layers):
        notes = ["before"]
        graph = self.with_other_scale(tiny.traced(tiny_bert), *layers)
        settings = ExportSettings(20, "fp16", "factored")
        finish_graph(graph, tiny.quantized(tiny_bert).plan, settings, notes)
        assert len(notes) == 2
        assert f"q, k and v of {len(layers)} of {tiny.LAYERS} attentions were not joined" in notes[1]
        finish_graph(
            graph, tiny.quantized(tiny_bert).plan, settings
        )  # who asks for no notes gets the same graph

    def test_the_stage_warns_once(self, tiny_bert, tmp_path, monkeypatch):
        monkeypatch.setattr(export.rewrites, "join_heads", lambda model: 0)
        model, plan, _ = tiny.quantized(tiny_bert)
        session = SimpleNamespace(
            recipe=load_recipe("bert-int8-linears"),
            target=SimpleNamespace(backend="tensorrt_rtx", proves_for_gpu=False),
            config=SimpleNamespace(task=GLUE["mnli"]),
            plan=plan,
            fp32_model=load_model(str(tiny_bert)),
            fake_quant_model=model,
            folder=tmp_path,
            warnings=[],
        )
        stages.export_stage(session)
        (warning,) = session.warnings
        assert f"{tiny.LAYERS} of {tiny.LAYERS} attentions" in warning


class TestSave:
    def test_the_file(self, tiny_bert, tmp_path):
        path = tmp_path / "new" / "model.int8.onnx"
        graph = tiny.exported(tiny_bert)
        save(tiny.copied(graph), path, "bert-int8-linears")
        assert [p.name for p in path.parent.iterdir()] == [path.name]
        loaded = onnx.load(path)
        assert {p.key: p.value for p in loaded.metadata_props} == {"qdqbench.recipe": "bert-int8-linears"}
        assert loaded.graph == graph.graph
        first = path.read_bytes()
        save(tiny.copied(graph), path, "bert-int8-linears")
        assert path.read_bytes() == first

    def test_an_invalid_graph_is_not_written(self, tiny_bert, tmp_path):
        path = tmp_path / "model.onnx"
        path.write_bytes(b"old")
        graph = tiny.exported(tiny_bert)
        graph.graph.node.append(helper.make_node("Nonesuch", ["logits"], ["out"], name="/x/Nonesuch"))
        with pytest.raises(CheckFailed, match=r"the exported graph for model\.onnx is not valid ONNX"):
            save(graph, path, "a")
        assert path.read_bytes() == b"old"
        assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]
