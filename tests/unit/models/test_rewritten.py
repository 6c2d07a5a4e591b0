"""MPNet's and DeBERTa's attention with one additive tensor is that of transformers' own modelling."""

import numpy as np
import pytest

from qdqbench.quantize.calibration.fakequant.quantizers import forward, quantizers_off
from qdqbench.quantize.calibration.ptq import calibrate
from qdqbench.quantize.graph.export import ExportSettings, finish_graph, trace
from qdqbench.quantize.models.attention import ATTENTION
from qdqbench.quantize.models.load import load_model, prepare_model, use_attention
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.system.quiet import quiet

from ...support import families
from ...support.tiny_bert import padded_batch, plan_of, recipe_with, run_onnx

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
    batch = batch_of(model, (9, 16))
    exact = forward(model, batch).numpy()
    asked = recipe_with(recipe, calibration={"smoothing": 0.65})
    plan = plan_of(asked, model)
    record = calibrate(model, plan, [batch_of(model, (length,) * 4) for length in (5, 16)], asked.calibration)
    assert record.smoothing.inputs
    assert bool(record.smoothing.rows) == ("attention" in recipe)
    assert np.abs(forward(model, batch).numpy() - exact).max() > 1e-4
    with quantizers_off(model):
        np.testing.assert_allclose(forward(model, batch).numpy(), exact, atol=1e-5, rtol=0)
    graph = finish_graph(trace(model, 20), plan, ExportSettings(20, "fp32", "factored"), notes)
    assert notes == []
    feeds = {value.name: batch[value.name] for value in graph.graph.input}
    np.testing.assert_allclose(run_onnx(graph, feeds), forward(model, batch).numpy(), atol=0.05, rtol=0)
