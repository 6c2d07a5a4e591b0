"""Layers that are rewritten are those of transformers: MPNet's and DeBERTa's attention, DistilBERT's sums."""

import numpy as np
import pytest
import torch

from qdqbench.eval.metrics.parity import compare_layers
from qdqbench.quantize.calibration.fakequant.quantizers import forward, quantizers_off
from qdqbench.quantize.calibration.ptq import calibrate
from qdqbench.quantize.graph.export import ExportSettings, finish_graph, trace
from qdqbench.quantize.graph.index import list_int8_norms
from qdqbench.quantize.lint.check import check_model
from qdqbench.quantize.models.attention import ATTENTION
from qdqbench.quantize.models.load import load_model, prepare_model, use_attention
from qdqbench.quantize.recipe.schema import load_recipe
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.system.quiet import quiet

from ...support import families
from ...support.tiny_bert import calibrate_model, padded_batch, plan_of, recipe_with, run_onnx

MODELS = {
    "mpnet": ("mpnet", {}),
    "deberta-v3": ("deberta-v2", {}),
    "every distance": ("deberta-v2", {"position_buckets": -1, "norm_rel_ebd": "none"}),
    "c2p": ("deberta-v2", {"pos_att_type": "c2p", "position_biased_input": True}),
    "p2c": ("deberta-v2", {"pos_att_type": "p2c", "embedding_size": 16}),
}
every_model = pytest.mark.parametrize("name", list(MODELS))


def new_model(name, **changes):
    model_type, given = MODELS[name]
    model = families.new_model(model_type, labels=3, **(given | changes))
    model.set_attn_implementation("eager")
    return model


def batch_of(model, lengths):
    batch = padded_batch(lengths)
    batch["input_ids"][batch["attention_mask"] == 0] = model.config.pad_token_id
    return batch


@every_model
@pytest.mark.parametrize("attention", [ATTENTION, "sdpa"])
def test_logits_are_those_of_eager_attention(name, attention, tmp_path):
    theirs = new_model(name)
    with quiet("transformers"):
        theirs.save_pretrained(tmp_path)
    ours = load_model(str(tmp_path))
    assert {key for key, _ in ours.named_parameters()} == {key for key, _ in theirs.named_parameters()}
    assert set(ours.state_dict()) == set(theirs.state_dict())
    use_attention(ours, attention)
    for lengths in [(9, 4, 16), (1, 128), (3,)]:
        batch = batch_of(theirs, lengths)
        found, wanted = forward(ours, batch).numpy(), forward(theirs, batch).numpy()
        assert np.abs(wanted).max() > 0.1
        np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=0)


@every_model
def test_the_graph_has_no_length_baked_in(name):
    model = prepare_model(new_model(name))
    graph = trace(model, 20)
    taken = {value.name for value in graph.graph.input}
    for lengths in [(9, 4, 16), (1, 128), (3,)]:
        batch = batch_of(model, lengths)
        found = run_onnx(graph, {key: array for key, array in batch.items() if key in taken})
        np.testing.assert_allclose(found, forward(model, batch).numpy(), atol=1e-4, rtol=0)


@every_model
def test_the_graph_projects_no_positions_and_takes_no_logarithm(name):
    graph = trace(prepare_model(new_model(name)), 20).graph
    found = [node.op_type for node in graph.node]
    assert "Log" not in found
    terms = {"mpnet": 0, "deberta-v3": 2, "every distance": 2, "c2p": 1, "p2c": 1}[name]
    per_layer = 6 + 2 + terms  # linears, the attention's own two, products with the positions
    embedded = int(name == "p2c")
    assert found.count("MatMul") == 2 * per_layer + embedded
    assert found.count("Gemm") == 2  # of the head


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("share_att_key", False),
        ("conv_kernel_size", 3),
        ("type_vocab_size", 2),
        ("relative_attention", False),
    ],
)
def test_what_no_code_is_for_is_refused(field, value, tmp_path):
    with quiet("transformers"):
        new_model("deberta-v3", **{field: value}).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=rf"has {field} {value} in config\.json; of family deberta-v2 only"):
        load_model(str(tmp_path))


INT8 = ["mpnet-int8-attention", "deberta-v2-int8-attention", "deberta-v2-int8-linears"]


@pytest.mark.parametrize("recipe", INT8)
def test_smoothing_moves_no_score_and_heads_are_joined(recipe):
    name = "mpnet" if recipe.startswith("mpnet") else "deberta-v3"
    model, notes = prepare_model(new_model(name)), list[str]()
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.weight.data[3] *= 30  # an outlier channel, so that factors differ
    batch = batch_of(model, (9, 16))
    exact = forward(model, batch).numpy()
    asked = recipe_with(recipe, calibration={"smoothing": 0.65})
    plan = plan_of(asked, model)
    record = calibrate(model, plan, [batch_of(model, (length,) * 4) for length in (5, 16)], asked.calibration)
    assert all(len({*factors}) > 1 for factors in record.smoothing.inputs.values())
    assert bool(record.smoothing.rows) == ("attention" in recipe)
    assert np.abs(forward(model, batch).numpy() - exact).max() > 1e-4
    with quantizers_off(model):
        np.testing.assert_allclose(forward(model, batch).numpy(), exact, atol=1e-5, rtol=0)
    graph = finish_graph(trace(model, 20), plan, ExportSettings(20, "fp32", "factored"), notes)
    assert notes == []
    feeds = {value.name: batch[value.name] for value in graph.graph.input}
    np.testing.assert_allclose(run_onnx(graph, feeds), forward(model, batch).numpy(), atol=0.05, rtol=0)


def test_sums_as_modules_change_no_answer_and_no_hidden_state():
    plain = families.new_model("distilbert")
    summed = prepare_model(families.new_model("distilbert"))
    plain.set_attn_implementation(ATTENTION)
    ids = torch.from_numpy(padded_batch((12, 12))["input_ids"])
    with torch.no_grad():
        expected, found = (model(ids, output_hidden_states=True) for model in (plain, summed))
    assert torch.equal(found.logits, expected.logits)
    assert len(found.hidden_states) == families.LAYERS + 1
    assert all(map(torch.equal, found.hidden_states, expected.hidden_states))
    assert list(summed.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("smoothing", ["none", 0.5])
def test_int8_residuals_round_as_the_linears_that_read_them(tmp_path, smoothing):
    recipe = load_recipe("distilbert-int8-residual-qat")
    changes = {"outlier_channel_splitting": 8, "smoothing": smoothing}
    recipe = recipe.model_copy(update={"calibration": recipe.calibration.model_copy(update=changes)})
    model = load_model(str(families.write_model(tmp_path / "model", "distilbert")))
    plan = calibrate_model(model, recipe).plan
    names = [f"{n}.{name}" for n in range(families.LAYERS) for name in ("attention_sum", "ffn_sum")]
    assert [*plan.residual] == [f"distilbert.transformer.layer.{name}" for name in names]
    graph = finish_graph(trace(model, 20), plan, ExportSettings(20, "fp16", "factored"))
    assert len(list_int8_norms(graph)) == len(plan.residual)
    expected = {*plan.int8, *plan.attention, *plan.residual}
    assert check_model(graph, expected_quantized=expected).findings == []
    parity = compare_layers(graph, model, [padded_batch()])
    assert parity.passed
    assert {f"{name}.residual" for name in plan.residual} <= {row.name for row in parity.rows}
