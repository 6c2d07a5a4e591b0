"""One calibration pass that serves every method."""

import numpy as np
import pytest

from qdqbench.eval.selection.calibration_comparison import METHODS
from qdqbench.eval.selection.trials.calibrations import apply_methods, collect_ranges, describe_cost
from qdqbench.quantize.calibration import ptq
from qdqbench.quantize.calibration.fakequant import quantizers
from qdqbench.quantize.calibration.fakequant.quantizers import get_quantizer_kind
from qdqbench.quantize.models.load import load_model
from qdqbench.quantize.recipe.schema import load_recipe
from qdqbench.quantize.recipe.sections import Calibration
from qdqbench.quantize.utils.errors import CheckFailed

from ....support.tiny_bert import calibration_batches, plan_of, recipe_with


@pytest.mark.parametrize(
    ("changes", "methods", "name"),
    [
        pytest.param({}, ("max", "percentile/99.9", "mse"), "bert-int8-attention", marks=pytest.mark.long),
        ({}, METHODS, "bert-int8-ffn"),
        pytest.param({"smoothing": 0.5}, ("max", "mse"), "bert-int8-attention", marks=pytest.mark.long),
        ({"weights_method": "mse"}, ("percentile/99.9",), "bert-int8-attention"),
        ({}, ("max", "mse"), "bert-int8-residual-fused"),
    ],
    ids=str,
)
def test_one_pass_answers_every_method_as_its_own_calibration(tiny_bert, changes, methods, name):
    rules = [
        *load_recipe(name).model_dump(mode="json")["rules"],
        {"match": "encoder.layer.1.output.dense", "method": "percentile/99.95"},
    ]
    recipe = recipe_with(name, rules=rules, calibration=changes)
    model, settings = load_model(str(tiny_bert)), recipe.calibration
    shared = collect_ranges(model, plan_of(recipe, model), calibration_batches(), settings)
    answers = set()
    for method in methods:
        section = Calibration.model_validate(settings.model_dump() | {"method": method})
        model = load_model(str(tiny_bert))
        plan = plan_of(recipe.model_copy(update={"calibration": section}), model)
        record = ptq.calibrate(model, plan, calibration_batches(), section)
        copied, states = apply_methods(shared, plan)
        assert states == record.quantizers
        for batch in calibration_batches():
            assert np.array_equal(quantizers.forward(copied, batch), quantizers.forward(model, batch))
        answers.add(tuple(float(np.max(state.amax)) for state in states.values()))
    assert len(answers) == len(methods)


def test_a_copy_leaves_the_shared_model_alone(tiny_bert):
    recipe = recipe_with(calibration={"method": "entropy"})
    model = load_model(str(tiny_bert))
    plan = plan_of(recipe, model)
    shared = collect_ranges(model, plan, calibration_batches(), recipe.calibration)
    before = {name: float(q.amax.max()) for name, q in quantizers.list_quantizers(shared.model).items()}
    copied, _ = apply_methods(shared, plan)
    for quantizer in quantizers.list_quantizers(copied).values():
        quantizer.amax = quantizer.amax * 2
    assert before == {n: float(q.amax.max()) for n, q in quantizers.list_quantizers(shared.model).items()}


def test_widest_activation(tiny_bert):
    recipe = recipe_with()
    model = load_model(str(tiny_bert))
    shared = collect_ranges(model, plan_of(recipe, model), calibration_batches(), recipe.calibration)
    cost = describe_cost(1.0, shared.states)
    ratios = [s.amax / s.rms for n, s in shared.states.items() if get_quantizer_kind(n) != "weight" and s.rms]
    assert (get_quantizer_kind(str(cost.amax_over_rms_at)), cost.amax_over_rms) == ("input", max(ratios))
    assert describe_cost(1.0, {}).amax_over_rms is None


def test_one_pass_refuses_what_is_not_finite(tiny_bert):
    model = load_model(str(tiny_bert))
    model.bert.embeddings.word_embeddings.weight.data[7] = float("inf")
    recipe = recipe_with()
    with pytest.raises(CheckFailed):
        collect_ranges(model, plan_of(recipe, model), calibration_batches(), recipe.calibration)
