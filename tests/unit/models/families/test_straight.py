"""q, k and v straight from their GEMMs in every family that ships it: the same answers, the same kernels."""

from dataclasses import replace

import onnx
import pytest
import torch

from qdqbench.eval.metrics.parity import compare_layers
from qdqbench.quantize.calibration.fakequant.quantizers import forward
from qdqbench.quantize.calibration.ptq import calibrate
from qdqbench.quantize.calibration.techniques import qkv_bias_folding as folding
from qdqbench.quantize.calibration.techniques.bias_correction import apply_biases
from qdqbench.quantize.calibration.techniques.smoothing import Ranges
from qdqbench.quantize.engine import backend as trt
from qdqbench.quantize.engine.build import TOGETHER, merge_qkv_gemms
from qdqbench.quantize.engine.layers import kernel_kind
from qdqbench.quantize.engine.profiles import Profile
from qdqbench.quantize.graph.export import ExportSettings, finish_graph, trace
from qdqbench.quantize.graph.index import list_int8_norms
from qdqbench.quantize.lint.check import check_model
from qdqbench.quantize.models.families.known import family_of
from qdqbench.quantize.models.inputs import select_inputs
from qdqbench.quantize.models.load import load_model
from qdqbench.quantize.models.modules import module_table
from qdqbench.quantize.recipe import plan as plans
from qdqbench.quantize.recipe.schema import load_recipe
from qdqbench.quantize.recipe.sections import Rule
from qdqbench.quantize.utils.errors import UserError

from ....support.families import LAYERS, write_model
from ....support.long import mark_long
from ....support.tiny_bert import calibration_batches, padded_batch

ONE = {"weights": "int8/per-tensor", "input": "int8/per-tensor"}
FAMILIES = ("roberta", "electra", "distilbert", "mpnet")


def planned(model, what="int8-residual-fused"):
    family = family_of(model.config)
    return plans.resolve(load_recipe(f"{family.name}-{what}"), module_table(model), model.base_model_prefix)


def batch_of(model):
    batch = padded_batch((9, 14, 16, 16))  # some padding alone, as RoBERTa and MPNet compute it all alike
    batch["input_ids"][batch["attention_mask"] == 0] = model.config.pad_token_id
    return select_inputs(model, batch)


@pytest.mark.parametrize("model_type", [*FAMILIES, "xlm-roberta", "camembert"])
def test_no_answer_changes_with_all_biases_moved(model_type, tmp_path):
    """MPNet's bias of positions is added to the scores, and k's to all scores of a row."""
    model = load_model(str(write_model(tmp_path, model_type)))
    plan, batch = planned(model), batch_of(model)
    assert (
        len(plans.folds_kv_bias(plan))
        == len(plans.folds_q_bias(plan))
        == len(plans.shares_qkv_scales(plan))
        == LAYERS
    )
    assert plans.note_kept_biases(plan) == []
    before = forward(model, batch)
    with folding.record_inputs(model, plan) as seen:
        for each in calibration_batches():
            forward(model, select_inputs(model, each))
    shifts, warnings = folding.choose_shifts(model, plan, seen, Ranges({}, {}))
    assert (len(shifts), warnings) == (LAYERS, [])
    for made in shifts.values():
        apply_biases(model, made.added)
    torch.testing.assert_close(forward(model, batch), before, rtol=1e-4, atol=1e-5)
    query = [linear for name in plan.attention for linear in plans.get_linears(plan, name, "query")]
    moved = folding.compute_moved_biases(model, plan)
    apply_biases(model, {name: each for name, each in moved.items() if name not in query})
    torch.testing.assert_close(forward(model, batch), before, rtol=1e-4, atol=1e-5)


# RoBERTa goes the whole path in a test that is not long; ELECTRA's layers are BERT's
@pytest.mark.parametrize("family", mark_long(FAMILIES[1:], ["electra"]))
def test_an_engine_has_one_gemm_and_one_copy_of_q_k_and_v(family, tmp_path):
    pytest.importorskip("tensorrt_rtx")
    model = load_model(str(write_model(tmp_path, family)))
    plan, recipe = planned(model), load_recipe(f"{family}-int8-residual-fused")
    batches = [select_inputs(model, batch) for batch in calibration_batches()]
    record = calibrate(model, plan, batches, recipe.calibration)
    assert [*record.shifts] == [*plan.attention]
    graph = finish_graph(trace(model, 20), plan, ExportSettings(20, "fp16", "factored", True))
    asked = {*plan.int8, *plan.attention, *plan.residual}
    assert check_model(graph, expected_quantized=asked).findings == []
    assert len(list_int8_norms(graph)) == len(plan.residual) == 2 * LAYERS
    assert compare_layers(graph, model, [batch_of(model)]).passed
    joined = merge_qkv_gemms(graph)
    assert joined is not None
    onnx.save(joined, tmp_path / "model.onnx")
    backend, profile = trt.choose_backend("tensorrt_rtx"), Profile((1, 64), (8, 64), (8, 64))
    built = trt.build_engine(tmp_path / "model.onnx", backend, [profile], compute_capability="8.9")
    rows = [row for row in built.layers if any("layer.0/" in name for name in row.onnx)]
    kinds = [kernel_kind(row) for row in rows]
    assert [sum(TOGETHER in name for name in row.onnx) for row in rows].count(1) == 1
    counts = [kinds.count(kind) for kind in ("gemm", "layout", "attention", "GELU", "LayerNorm")]
    assert counts == [4, 1, 1, 1, 2]
    # what a linear behind the embeddings made is rounded by a kernel of its own
    assert kinds.count("quantize") == (family == "electra")


def bent(family, *parts, attention, folder):
    """A model with one weight scale for these linears and INT8 attention."""
    model = load_model(str(write_model(folder, family)))
    recipe = load_recipe(f"{family}-int8-attention")
    rules = [Rule.model_validate({"match": f"*{attention}.{part}", "type": "Linear"} | ONE) for part in parts]
    recipe = recipe.model_copy(update={"rules": (*recipe.rules, *rules)})
    return model, plans.resolve(recipe, module_table(model), model.base_model_prefix)


def test_a_family_that_cannot_have_it_says_so(tmp_path):
    parts = ("query_proj", "key_proj", "value_proj")
    _, plan = bent("deberta-v2", *parts, attention="self", folder=tmp_path / "deberta")
    (note,) = plans.note_kept_biases(plan)
    assert note.startswith("q, k and v of 2 INT8 attentions with weights: int8/per-tensor")
    assert note.endswith("family deberta-v2 has other terms of scores that read k")
    assert plans.folds_kv_bias(plan) == []
    _, plan = bent("albert", "query", "key", "value", attention="attention", folder=tmp_path / "albert")
    (note,) = plans.note_kept_biases(plan)
    assert note.startswith("q of 2 INT8 attentions with")
    assert note.endswith("what makes its input serves several runs of a layer")
    assert len(plans.folds_kv_bias(plan)) == LAYERS
    assert plans.folds_q_bias(plan) == {}


@pytest.mark.parametrize("family", ["albert", "modernbert"])
def test_int8_residuals_that_cannot_be_are_refused(family, tmp_path):
    model = load_model(str(write_model(tmp_path, family)))
    recipe = load_recipe(f"{family}-int8-attention").model_copy(update={"residual": "int8"})
    why = {"albert": "has no place for a quantizer where it adds", "modernbert": "normalizes first"}[family]
    with pytest.raises(UserError, match=f"family {family} {why}.*; set residual: fp16"):
        plans.resolve(recipe, module_table(model), model.base_model_prefix)


def test_what_is_not_read_is_refused_before_it_is_shifted(tmp_path):
    """A family that a recipe describes may name another LayerNorm."""
    model = load_model(str(write_model(tmp_path, "roberta")))
    plan = planned(model)
    wrong = replace(plan, family=replace(plan.family, embeddings_norm="encoder.layer.0.output.LayerNorm"))
    said = r"do not read what roberta\.encoder\.layer\.0\.output\.LayerNorm makes.*weights: int8/per-channel"
    with pytest.raises(UserError, match=said), folding.record_inputs(model, wrong):
        forward(model, select_inputs(model, calibration_batches()[0]))


def test_biases_that_are_not_there(tmp_path):
    """Nothing is shifted for a query without one; of what has to take its part no bias may lack."""
    model = load_model(str(write_model(tmp_path, "roberta")))
    plan = planned(model)
    first, second = (layer.attention.self for layer in model.roberta.encoder.layer)
    first.query.bias = None
    with folding.record_inputs(model, plan) as seen:
        forward(model, select_inputs(model, calibration_batches()[0]))
    assert [*folding.choose_shifts(model, plan, seen, Ranges({}, {}))[0]] == [plan.attention[1]]
    second.key.bias = None
    said = r"layer\.1\.attention\.self\.query cannot go elsewhere, as .*self\.key have"
    with pytest.raises(UserError, match=said):
        folding.choose_shifts(model, plan, seen, Ranges({}, {}))
