"""Candidates, the curve, the choice of a recipe and its YAML."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdqbench.eval.selection.sensitivity import measure as sensitivity
from qdqbench.eval.selection.sensitivity.measure import attention_of, choose_point, make_recipe
from qdqbench.eval.selection.sensitivity.results import CurvePoint
from qdqbench.quantize.models.families.family import LINEAR_KINDS
from qdqbench.quantize.recipe.plan import resolve

from ....support import records, tiny_bert

LAYERS = 3
OUTPUTS = [f"bert.encoder.layer.{layer}.attention.output.dense" for layer in range(LAYERS)]
FFN = [f"bert.encoder.layer.{layer}.output.dense" for layer in range(LAYERS)]


def modules(head_size=16):
    return tiny_bert.fake_modules(LAYERS, head_size)


def found_for(recipe, head_size=16):
    return sensitivity.list_candidates(recipe, modules(head_size), "bert")


def compared(amount=0.0, drop=0.0, error=0.001):
    return records.comparison({"accuracy": -drop}, error, **records.sqnr(amount))


def point(kept, amount, drop):
    linears = [f"linear {n}" for n in range(kept)]
    return CurvePoint(kept=kept, linears=linears, attention=[], comparison=compared(amount, drop))


def test_candidates_of_the_default_recipe():
    found = found_for(tiny_bert.recipe_with())
    by_group = {}
    for candidate in found.candidates:
        by_group.setdefault(candidate.group, []).append(candidate.name)
    assert len(by_group["linear"]) == 6 * LAYERS + 2
    assert by_group["attention"] == [f"encoder.layer.{n}.attention.self" for n in range(LAYERS)]
    assert by_group["block"] == [f"encoder.layer.{n}" for n in range(LAYERS)]
    assert by_group["kind"] == [*LINEAR_KINDS, "attention", "LayerNorm input", "embeddings"]
    assert found.everything == {
        name for name, about in modules().items() if about.kind == "Linear" and "encoder" in name
    }
    assert {c.name for c in found.candidates if c.diagnostic} == {"LayerNorm input", "embeddings"}
    assert any("pooler, classifier, attention" in note for note in found.notes)
    kinds = {c.name: c for c in found.candidates if c.group == "kind"}
    assert len(kinds["qkv"].modules) == 3 * LAYERS
    assert len(kinds["LayerNorm input"].modules) == 2 * LAYERS


def test_everything_follows_the_recipe():
    rules = [{"match": "*", **tiny_bert.INT8}]
    assert "classifier" in found_for(tiny_bert.recipe_with(rules=rules)).everything
    recipe = tiny_bert.recipe_with("bert-int8-attention")
    assert "bert.encoder.layer.1.attention.self" in found_for(recipe).everything
    block = next(c for c in found_for(recipe).candidates if c.name == "encoder.layer.1")
    assert len(block.units) == 7


def test_linears_without_a_rule_are_per_channel():
    recipe = tiny_bert.recipe_with("bert-int8-ffn", calibration={"smoothing": "gain", "method": "mse"},
                                   rules=[
        {"match": "*.intermediate.dense", "weights": "int8/per-tensor", "input": "int8/per-tensor"}
    ])  # fmt: skip
    found = found_for(recipe)
    assert found.plan.int8["bert.encoder.layer.0.intermediate.dense"] == "tensor"
    assert found.plan.int8[OUTPUTS[0]] == "channel"
    assert found.plan.scaling_of(OUTPUTS[0]).method == "mse"
    assert found.plan.scaling_of(OUTPUTS[0]).smoothing == "none"  # no LayerNorm before it
    assert found.plan.scaling_of("bert.encoder.layer.0.attention.self.key").smoothing == "gain"
    assert found.plan.scaling_of("classifier").smoothing == "none"
    assert any(f"{5 * LAYERS} encoder linears are not INT8" in note for note in found.notes)


def test_candidates_are_calibrated_as_the_recipe_that_has_them_would():
    rules = [{"match": "encoder.layer.0.*", "type": "Linear", **tiny_bert.INT8}]
    calibration = {"smoothing": 0.65, "outlier_channel_splitting": 32}
    part = tiny_bert.recipe_with(rules=rules, calibration=calibration)
    whole = tiny_bert.recipe_with(calibration=calibration)
    found, wanted = found_for(part), resolve(whole, modules(), "bert")
    for name in wanted.int8:
        assert found.plan.scaling_of(name) == wanted.scaling_of(name), name


def test_attention_that_cannot_be_fused_is_no_candidate():
    found = found_for(tiny_bert.recipe_with(), head_size=24)
    assert not [c for c in found.candidates if c.kind == "attention"]
    assert any("head sizes" in note for note in found.notes)


@given(linears=st.integers(1, 200), first=st.integers(0, 200))
def test_curve_finds_the_smallest_that_holds(linears, first):
    """Any number of linears, the condition true from `first` on."""
    measured = []

    def measure(kept):
        measured.append(kept)
        good = kept >= first
        return point(kept, 0.1 if good and kept else 1.0, 0.0 if good else 0.5)

    curve = sensitivity.measure_curve(linears, measure, 0.01)
    chosen, reached = choose_point(curve, 0.01)
    assert len(measured) == len(set(measured)) <= 2 * linears.bit_length() + 1
    assert [p.kept for p in curve] == sorted(measured)
    assert set(sensitivity.kept_counts(linears)) <= set(measured)
    assert max(measured) < max(linears, 1)
    assert reached == (first <= max(sensitivity.kept_counts(linears)))
    if reached:
        assert chosen.kept == first


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(1.0, 0.002), (0.6, 0.0), (0.49, 0.0)], (0, True)),  # two standard errors
        ([(1.0, -0.5), (0.6, 0.0), (0.49, 0.0)], (0, True)),  # better than FP32
        # below the gate and no noise: half of the noise power must go
        ([(1.0, 0.003), (0.6, 0.0), (0.49, 0.0)], (2, True)),
        ([(1.0, 0.1), (0.1, 0.1), (0.3, 0.1)], (1, False)),  # a drop over the gate is not accepted
    ],
)
def test_nothing_more_is_kept_than_must_be(points, expected):
    chosen, reached = choose_point([point(kept, *each) for kept, each in enumerate(points)], 0.01)
    assert (chosen.kept, reached) == expected


def kept_point(linears, found):
    attention = attention_of(linears, found)
    return CurvePoint(kept=len(linears), linears=linears, attention=attention, comparison=compared())


@pytest.mark.parametrize("name", ["bert-int8-linears", "bert-int8-attention", "bert-int8-ffn", "bert-fp16"])
@pytest.mark.parametrize("kept", [[], [OUTPUTS[1]], [FFN[0], OUTPUTS[0], OUTPUTS[2]], [*OUTPUTS, *FFN]])
def test_written_recipe_resolves_to_what_was_measured(name, kept):
    recipe = tiny_bert.recipe_with(name)
    found = found_for(recipe)
    at = kept_point(kept, found)
    written = make_recipe(at, found)
    plan = resolve(written, modules(), "bert")
    assert {*plan.int8, *plan.attention} == found.everything - {*at.linears, *at.attention}
    assert written.name == f"{name}-sensitivity"
    assert written.calibration == recipe.calibration
    assert [written.gate, written.export, written.engine] == [recipe.gate, recipe.export, recipe.engine]
    assert len(written.rules) <= 1 + len(at.linears) + len(at.attention)
    assert not [rule.match for rule in written.rules if rule.match and rule.match.startswith("bert.")]
    # again: the name does not grow
    again = make_recipe(kept_point(kept, found_for(written)), found_for(written))
    assert again.name == written.name


def test_a_recipe_without_anything_to_split_does_not_ask_for_it():
    recipe = tiny_bert.recipe_with(calibration={"outlier_channel_splitting": 32})
    found = found_for(recipe)
    for kept, splitting in ((FFN, 0), (FFN[:1], 32)):
        written = make_recipe(kept_point(kept, found), found)
        assert written.calibration.outlier_channel_splitting == splitting


def test_attention_leaves_int8_with_its_output():
    found = found_for(tiny_bert.recipe_with("bert-int8-attention"))
    assert attention_of([OUTPUTS[1], FFN[0]], found) == ["bert.encoder.layer.1.attention.self"]
    assert attention_of([OUTPUTS[1]], found_for(tiny_bert.recipe_with())) == []


def test_calibration_of_kept_linears_is_dropped():
    """A rule on how to calibrate what is no longer INT8 would be refused."""
    rules = [
        {"match": "*", "type": "Linear", **tiny_bert.INT8},
        {"match": "encoder.layer.0.output.dense", **tiny_bert.INT8, "method": "mse"},
        {"match": "encoder.layer.1.output.dense", "smoothing": 0.5},
        {"match": "encoder.layer.*.output.dense", "weights_method": "mse"},
    ]
    recipe = tiny_bert.recipe_with(rules=rules)
    found = found_for(recipe)
    written = make_recipe(kept_point(FFN[:2], found), found)
    assert [rule.method for rule in written.rules].count("mse") == 0
    assert [rule.smoothing for rule in written.rules].count(0.5) == 0
    assert [rule.weights_method for rule in written.rules].count("mse") == 1
