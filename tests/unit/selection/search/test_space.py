"""The space of a search: every point is a valid recipe that means what the parameters say."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.trial import FixedTrial

from qdqbench.eval.selection.search import worker
from qdqbench.eval.selection.search.results import Ranking
from qdqbench.eval.selection.search.workspace import FLIPS, FRAMES, SECTION, make_space, rank_by_rows
from qdqbench.quantize.models.families.known import BERT
from qdqbench.quantize.recipe.plan import resolve
from qdqbench.quantize.recipe.schema import (
    Recipe,
    adapt_recipe,
    dump_short_recipe,
    load_recipe,
    parse_recipe,
    shipped_recipes,
)
from qdqbench.quantize.tasks.task import Task
from qdqbench.quantize.utils.errors import UserError

from ....support.tiny_bert import INT8, fake_modules

TASK = Task(name="x", text_columns=("sentence",), num_labels=2, metrics=("accuracy",))
LAYERS = 12  # numbers of two digits are where patterns go wrong


def modules(head_size=32):
    return fake_modules(LAYERS, head_size)


def space_of(recipe="bert-int8-linears", **changes):
    base = load_recipe(recipe) if isinstance(recipe, str) else recipe
    if changes:
        base = Recipe.model_validate(base.model_dump(mode="json") | changes)
    return make_space(base, modules(), "bert")


SPACE = space_of()
PARAMS = st.fixed_dictionaries(
    {
        "frame": st.sampled_from(FRAMES),
        "keep": st.integers(0, len(SPACE.units)),
        **{name: st.integers(0, len(SPACE.units)) for name in FLIPS},
        "attention_keep": st.integers(0, LAYERS),
        **{name: st.sampled_from(values) for name, values in SECTION.items()},
    }
)
PLAIN = {"method": "max", "smoothing": "none", "weights_method": "max"} | dict.fromkeys(FLIPS, 0)


@settings(max_examples=40)
@given(PARAMS, st.randoms(use_true_random=False))
def test_every_point_is_a_recipe_with_exactly_its_units(params, random):
    order = list(SPACE.units)
    random.shuffle(order)
    space = SPACE.ranked(Ranking(units=order, attention=random.sample(range(LAYERS), LAYERS)))
    assert space.suggest(FixedTrial(params)) == params
    recipe = space.recipe(params)
    assert parse_recipe(dump_short_recipe(recipe), "again") == recipe
    plan = resolve(recipe, modules(), "bert")
    units = space.int8_units(params)
    assert set(plan.int8) == {name for unit in units for name in space.units[unit]}
    inside = {BERT.layer_of(name) for name in plan.attention}
    assert inside == space.int8_attention(params, units)
    assert all((layer, "output") in units for layer in inside)
    for name in plan.int8:
        scaling = plan.scaling_of(name)
        assert (scaling.method, scaling.weights) == (params["method"], params["weights_method"])
        of_norm = BERT.kind(name) in ("qkv", "ffn-in")
        assert str(scaling.smoothing) == (params["smoothing"] if of_norm else "none")
    assert recipe.gate == space.whole.recipe.gate
    assert recipe.engine == space.whole.recipe.engine


@pytest.mark.parametrize(
    ("params", "rules"),
    [
        ({"frame": "all", "keep": 0, "attention_keep": 0}, 1),
        ({"frame": "all", "keep": 3, "attention_keep": LAYERS}, 4),  # one FP16 rule for each kept unit
        ({"frame": "ffn", "keep": 0, "attention_keep": LAYERS}, 2),  # patterns over all layers
        ({"frame": "all", "keep": 4 * LAYERS, "attention_keep": 0}, 0),
        ({"frame": "all", "keep": 4 * LAYERS - 1, "attention_keep": LAYERS}, 1),  # one INT8 rule is shorter
    ],
)
def test_rules_are_short(params, rules):
    assert len(SPACE.recipe(PLAIN | params).rules) <= rules


@pytest.mark.parametrize(
    "name", [n for n in shipped_recipes() if n.startswith("bert-int8") and load_recipe(n).qat is None]
)
def test_shipped_recipes_are_points_of_the_space(name):
    """With one kind of weight scales, that of the given recipe."""
    shipped = resolve(load_recipe(name), modules(), "bert")
    params = SPACE.project(shipped, load_recipe(name))
    plan = resolve(SPACE.recipe(params), modules(), "bert")
    assert set(plan.int8) == set(shipped.int8)
    assert plan.attention == shipped.attention


def test_a_projection_takes_up_exceptions_from_the_ranking():
    params = PLAIN | {"frame": "all", "keep": 5, "flip_1": 2, "flip_2": 40, "attention_keep": 7}
    recipe = SPACE.recipe(params)
    again = SPACE.project(resolve(recipe, modules(), "bert"), recipe)
    assert SPACE.int8_units(again) == SPACE.int8_units(params)


def test_fp32_islands_and_other_linears_stay():
    rules = [
        {"match": "encoder.layer.*", "type": "Linear", **INT8, "weights": "int8/per-tensor"},
        {"match": "pooler.dense", **INT8},
        {"match": "encoder.layer.3.output.dense", "precision": "fp32"},
        {"match": "encoder.layer.*", "type": "LayerNorm", "precision": "fp32"},
    ]
    space = space_of(rules=rules)
    assert space.scales == "tensor"
    assert (3, "ffn-out") not in space.units
    plan = resolve(space.recipe(PLAIN | {"frame": "all", "keep": 2, "attention_keep": 0}), modules(), "bert")
    assert plan.int8["bert.pooler.dense"] == "channel"
    assert "bert.encoder.layer.3.output.dense" in plan.fp32
    assert "bert.encoder.layer.0.output.LayerNorm" in plan.fp32
    assert plan.int8["bert.encoder.layer.5.output.dense"] == "tensor"


def test_attention_that_cannot_be_fused_is_not_searched():
    space = make_space(load_recipe("bert-int8-linears"), modules(head_size=80), "bert")
    assert not space.attention
    recipe = space.recipe(PLAIN | {"frame": "all", "keep": 0})
    assert not recipe.int8_attention
    kernels = adapt_recipe(load_recipe("bert-int8-linears"), backend="cuda")
    for head_size, fused in ((26, True), (80, True), (129, False)):
        assert bool(make_space(kernels, modules(head_size=head_size), "bert").attention) is fused


def test_nothing_left_to_search_is_an_error():
    rules = [
        {"match": "encoder.layer.*", "type": "Linear", **INT8},
        {"match": "encoder.layer.*", "type": "Linear", "precision": "fp32"},
    ]
    with pytest.raises(UserError, match="nothing to search"):
        space_of(rules=rules, calibration={})


def test_the_ranking_weighs_cost_by_work():
    """A costly small product is kept before a large one that costs a little more."""
    costs = {
        "bert.encoder.layer.2.attention.output.dense": 3.0,
        "bert.encoder.layer.7.intermediate.dense": 4.0,
        **{f"bert.encoder.layer.9.attention.self.{x}": 1.5 for x in ("query", "key", "value")},
    }
    rows = [candidate(cost, group="linear", modules=[name]) for name, cost in costs.items()]
    rows += [
        candidate(cost, group="attention", modules=[], layer=at) for at, cost in {4: 0.5, 6: 0.7}.items()
    ]
    units, attention = rank_by_rows(SPACE, rows, "a file")
    assert units[:3] == [(2, "output"), (9, "qkv"), (7, "ffn-in")]
    assert attention[:2] == [6, 4]
    assert set(units) == set(SPACE.units)
    again = SPACE.ranked(Ranking(units=units, attention=attention))
    assert (list(again.units), list(again.attention)) == (units, attention)
    with pytest.raises(UserError, match="a file ranks no linear of this model"):
        rank_by_rows(SPACE, rows[-2:], "a file")


def candidate(cost, **fields):
    return SimpleNamespace(only=SimpleNamespace(noise_power=cost), **fields)


@pytest.mark.parametrize("other", [{"model": {"sha256": "b"}}, {"task": {"name": "another"}}])
def test_a_sensitivity_of_another_model_or_task_is_refused(other, monkeypatch, tmp_path):
    measured = {"model": {"sha256": "a"}, "task": TASK.model_dump(mode="json"), "rows": []} | other
    monkeypatch.setattr(worker, "read_sensitivity", lambda file: SimpleNamespace(**measured))
    session = SimpleNamespace(model_sha256="a", config=SimpleNamespace(task=TASK))
    with pytest.raises(UserError, match="another model or task"):
        worker.read_ranking(session, tmp_path / "sensitivity.json")
