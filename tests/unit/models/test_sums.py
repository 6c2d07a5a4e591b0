"""DistilBERT's residuals as modules: the same answers, and a place for the quantizers of INT8 residuals."""

import pytest
import torch

from qdqbench.eval.metrics.parity import compare_layers
from qdqbench.quantize.calibration import ptq
from qdqbench.quantize.graph import export
from qdqbench.quantize.graph.index import list_int8_norms
from qdqbench.quantize.lint.check import check_model
from qdqbench.quantize.models.load import load_model, prepare_model
from qdqbench.quantize.models.modules import module_table
from qdqbench.quantize.recipe.plan import resolve
from qdqbench.quantize.recipe.schema import load_recipe

from ...support.families import LAYERS, new_model, write_model
from ...support.tiny_bert import calibration_batches, padded_batch

NAMES = ("attention_sum", "ffn_sum")
SUMS = [f"distilbert.transformer.layer.{n}.{name}" for n in range(LAYERS) for name in NAMES]


def test_answers_and_hidden_states_are_those_of_transformers():
    plain, summed = new_model("distilbert"), prepare_model(new_model("distilbert"))
    plain.set_attn_implementation("qdq_eager")
    ids = torch.from_numpy(padded_batch((12, 12))["input_ids"])
    with torch.no_grad():
        expected, found = (model(ids, output_hidden_states=True) for model in (plain, summed))
    assert torch.equal(found.logits, expected.logits)
    assert len(found.hidden_states) == LAYERS + 1
    assert all(map(torch.equal, found.hidden_states, expected.hidden_states))
    assert list(summed.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("smoothing", ["none", 0.5])
def test_int8_residuals_round_as_the_linears_that_read_them(tmp_path, smoothing):
    model = load_model(str(write_model(tmp_path / "model", "distilbert")))
    recipe = load_recipe("distilbert-int8-residual-qat")
    settings = recipe.calibration.model_copy(update={"outlier_channel_splitting": 8, "smoothing": smoothing})
    recipe = recipe.model_copy(update={"calibration": settings})
    plan = resolve(recipe, module_table(model), "distilbert")
    assert list(plan.residual) == SUMS
    ptq.calibrate(model, plan, calibration_batches(), settings)
    graph = export.finish_graph(export.trace(model, 20), plan, export.ExportSettings(20, "fp16", "factored"))
    assert len(list_int8_norms(graph)) == 2 * LAYERS
    expected = {*plan.int8, *plan.attention, *plan.residual}
    assert check_model(graph, expected_quantized=expected).findings == []
    parity = compare_layers(graph, model, [padded_batch()])
    assert parity.passed
    assert {f"{name}.residual" for name in SUMS} <= {row.name for row in parity.rows}
