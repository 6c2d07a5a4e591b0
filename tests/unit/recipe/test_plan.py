"""Rules against modules: which linear becomes what, and the sentences when a rule makes no sense."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qdqbench.quantize.models.families.known import BERT
from qdqbench.quantize.models.modules import ModuleInfo
from qdqbench.quantize.recipe.plan import Scaling, match_modules, resolve
from qdqbench.quantize.recipe.schema import Recipe, adapt_recipe, load_recipe
from qdqbench.quantize.recipe.sections import Rule
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.names import MAX_NAMED, name_list

from ...support.tiny_bert import EVERY, INT8, OF_A_LAYER, fake_modules, recipe_with

LAYER = "bert.encoder.layer."
ONE_SCALE = INT8 | {"weights": "int8/per-tensor"}

ATTENTION = {"match": "*", "type": "Attention"}


def modules(layers=2, head_size=16):
    """The table of a BERT classifier, without residuals."""
    table = fake_modules(layers, head_size) | {"bert.embeddings.LayerNorm": ModuleInfo("LayerNorm")}
    table |= {name: ModuleInfo("other") for name in ("bert", *(f"{LAYER}{n}" for n in range(layers)))}
    return {name: info for name, info in table.items() if info.kind != "Residual"}


def plan_for(*rules, table=None, **changes):
    return resolve(recipe_with(rules=list(rules), **changes), table or modules(), "bert")


def in_encoder(layers=2):
    return [f"bert.encoder.layer.{layer}.{name}" for layer in range(layers) for name in OF_A_LAYER]


def test_the_later_rule_wins():
    plan = plan_for(
        EVERY,
        {"match": "*.query"} | ONE_SCALE,
        {"match": "encoder.layer.1.*", "type": "Linear", "precision": "fp16"},
        {"match": "encoder.layer.1.output.dense"} | INT8,
    )
    first = [name for name in in_encoder() if "layer.0" in name]
    assert plan.int8 == dict.fromkeys(first, "channel") | {
        "bert.encoder.layer.0.attention.self.query": "tensor",
        "bert.encoder.layer.1.output.dense": "channel",
    }
    every = (*in_encoder(), "bert.pooler.dense", "classifier")
    assert list(plan.high) == [name for name in every if name not in plan.int8]
    assert plan.fp32 == ()


@pytest.mark.parametrize("pattern", ["encoder.layer.0.*", "bert.encoder.layer.0.*", "*.layer.0.*"])
def test_patterns_with_and_without_the_prefix(pattern):
    assert list(plan_for({"match": pattern} | INT8).int8) == [n for n in in_encoder() if ".0." in n]


def test_the_prefix_is_cut_at_a_border_and_case_counts():
    table = {"bertram.dense": ModuleInfo("Linear")}
    rule = Rule.model_validate({"match": "ram.dense"} | INT8)
    assert match_modules(rule, table, BERT, "bert") == []
    whole = rule.model_copy(update={"match": "bertram.dense"})
    assert match_modules(whole, table, BERT) == ["bertram.dense"]
    with pytest.raises(UserError, match=r"'\*layernorm' matches no LayerNorm .*output\.LayerNorm"):
        plan_for({"match": "*layernorm", "type": "LayerNorm", "precision": "fp32"})


def test_rules_that_match_nothing_are_all_named_with_near_names():
    with pytest.raises(UserError) as error:
        plan_for(
            {"match": "encoder.layers.*"} | INT8,
            EVERY,
            {"match": "*.intermediate.dens"} | INT8,
            {"match": "*", "type": "Embedding", "precision": "fp32"},
        )
    message = str(error.value)
    assert "rule 'encoder.layers.*' matches no Linear of this model; near names: encoder.layer.*." in message
    assert "rule '*.intermediate.dens' matches no Linear" in message
    assert "encoder.layer.*.intermediate.dense" in message.partition("'*.intermediate.dens'")[2]
    assert "'encoder.layer.*'" not in message
    assert "\n" not in message


def test_classes_that_the_model_lacks_and_near_names():
    rule = {"match": "*", "type": "Embedding", "precision": "fp32"}
    with pytest.raises(UserError, match=r"matches no Embedding: it has none"):
        resolve(recipe_with(rules=[rule]), {"a": ModuleInfo("Linear")}, "")
    with pytest.raises(UserError) as error:
        resolve(recipe_with(rules=[{"match": "encoder.layer.*.querry"} | INT8]), modules(12), "bert")
    assert str(error.value).count("attention.self.query") == 1


@settings(deadline=None)
@given(pattern=st.text(alphabet="*?[]!abdeklnorty.012", min_size=1, max_size=12) | st.just("*"))
def test_only_linears_become_int8_whatever_the_pattern(pattern):
    table = modules()
    recipe = recipe_with(rules=[{"match": pattern} | INT8])
    if not match_modules(recipe.rules[0], table, BERT, "bert"):
        with pytest.raises(UserError, match="matches no Linear"):
            resolve(recipe, table, "bert")
        return
    plan = resolve(recipe, table, "bert")
    assert plan.int8
    assert {table[name].kind for name in plan.int8} == {"Linear"}
    assert sorted([*plan.int8, *plan.high]) == sorted(n for n, info in table.items() if info.kind == "Linear")


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({"match": "*", "type": "LayerNorm"}, lambda name: name.endswith("LayerNorm")),
        ({"match": "*", "type": "Softmax"}, lambda name: name.endswith("softmax")),
        ({"match": "*.softmax"}, lambda name: name.endswith("softmax")),
        ({"match": "encoder.layer.1.output.*"}, lambda name: name.startswith("bert.encoder.layer.1.output.")),
        ({"match": "encoder.layer.1"}, lambda name: name.startswith("bert.encoder.layer.1")),
        ({"match": "classifier"}, lambda name: name == "classifier"),
    ],
    ids=lambda value: value["match"] + value.get("type", "") if isinstance(value, dict) else "",
)
def test_fp32_islands(rule, expected):
    plan = plan_for(rule | {"precision": "fp32"})
    assert list(plan.fp32) == [name for name in modules() if expected(name)]


def test_a_later_fp16_rule_opens_an_island_again():
    plan = plan_for(
        {"match": "encoder.layer.0", "precision": "fp32"},
        {"match": "encoder.layer.0.output.dense", "precision": "fp16"},
        {"match": "encoder.layer.0.*.query"} | INT8,
    )
    inside = [name for name in modules() if name.startswith("bert.encoder.layer.0")]
    opened = ("bert.encoder.layer.0.output.dense", "bert.encoder.layer.0.attention.self.query")
    assert list(plan.fp32) == [name for name in inside if name not in opened]


@pytest.mark.parametrize(
    ("rule", "parts"),
    [
        ({"role": "encoder"}, OF_A_LAYER),
        ({"role": "qkv"}, OF_A_LAYER[:3]),
        ({"role": "key"}, OF_A_LAYER[1:2]),
        ({"role": "ffn-in", "match": "*.1.*"}, OF_A_LAYER[4:5]),
    ],
)
def test_roles_are_what_a_family_calls_its_linears(rule, parts):
    plan = plan_for(rule | INT8)
    layers = [1] if "match" in rule else [0, 1]
    assert [*plan.int8] == [f"bert.encoder.layer.{layer}.{part}" for layer in layers for part in parts]


def test_roles_outside_of_layers_and_of_modules_that_are_no_linears():
    assert [*plan_for({"role": "pooler"} | INT8).int8] == ["bert.pooler.dense"]
    plan = plan_for({"role": "encoder", "type": "LayerNorm", "precision": "fp32"})
    assert [*plan.fp32] == [name for name in modules() if name.endswith("LayerNorm") and ".layer." in name]


def test_a_role_that_no_linear_has_names_those_that_there_are():
    with pytest.raises(
        UserError, match=r"rule role embeddings matches no Linear .*output\.dense \(ffn-out\)"
    ):
        plan_for({"role": "embeddings"} | INT8)
    with pytest.raises(UserError, match=r"rule '\*\.7\.\*' with role qkv matches no Linear .*near names"):
        plan_for({"role": "qkv", "match": "*.7.*"} | INT8)


class TestAttention:
    recipe: Recipe = load_recipe("bert-int8-attention")

    @pytest.mark.parametrize("size", [1, 8, 16, 24, 32, 64, 128, 129])
    @pytest.mark.parametrize("backend", ["tensorrt", "cuda"])
    def test_head_sizes_that_fuse(self, size, backend):
        recipe, table = adapt_recipe(self.recipe, backend=backend), modules(head_size=size)
        if size <= 128 if backend == "cuda" else size in {16, 32, 64}:
            assert len(resolve(recipe, table, "bert").attention) == 2
            return
        known = "at most 128" if backend == "cuda" else "16, 32 or 64"
        with pytest.raises(UserError, match=rf"head size of {known} .* this model has {size};"):
            resolve(recipe, table, "bert")

    def test_a_model_without_attention(self):
        table = {name: info for name, info in modules().items() if info.kind != "Attention"}
        with pytest.raises(UserError, match="no self-attention"):
            resolve(self.recipe, table, "bert")

    def by_rule(self, *rules, attention="fp16", table=None):
        """Layers whose attention is in INT8."""
        never = {"never_quantize": ["layernorm"]}
        plan = plan_for(EVERY, *rules, table=table, attention=attention, precision=never)
        return [int(name.removeprefix(LAYER).removesuffix(".attention.self")) for name in plan.attention]

    @pytest.mark.parametrize(
        ("attention", "rules", "layers"),
        [
            ("fp16", [("encoder.layer.1.*", "int8")], [1]),
            ("fp16", [("*", "int8")], [0, 1]),
            ("fp16", [("*", "int8"), ("encoder.layer.0.*", "fp16")], [1]),
            ("fp16", [("encoder.layer.0.*", "fp16"), ("*", "int8")], [0, 1]),
            ("int8", [("encoder.layer.0.attention.self", "fp16")], [1]),
            ("int8", [("encoder.layer.0.attention.self", "fp32")], [1]),
        ],
    )
    def test_in_and_out_by_rule(self, attention, rules, layers):
        rules = [ATTENTION | {"match": match, "precision": precision} for match, precision in rules]
        assert self.by_rule(*rules, attention=attention) == layers
        # the output linear of one that is out is free
        free = {"match": f"encoder.layer.{1 - layers[0]}.attention.output.dense", "precision": "fp16"}
        if len(layers) == 1:
            assert self.by_rule(*rules, free, attention=attention) == layers
        needed = rf"a rule for bert\.encoder\.layer\.{layers[0]}\.attention\.output\.dense"
        with pytest.raises(UserError, match=needed):
            self.by_rule(*rules, free | {"match": "*.attention.output.dense"}, attention=attention)

    def test_a_whole_layer_out(self):
        out = {"match": "encoder.layer.1.*", "precision": "fp16"}
        assert self.by_rule(out, attention="int8") == [0]
        assert list(plan_for(EVERY, out).int8) == in_encoder(1)

    def test_sizes_count_where_it_is_int8_only(self):
        table = modules(head_size=24)
        assert self.by_rule(ATTENTION | {"precision": "fp16"}, attention="int8", table=table) == []
        table[f"{LAYER}0.attention.self"] = ModuleInfo("Attention", 32)
        inside = ATTENTION | {"match": "encoder.layer.0.*", "precision": "int8"}
        assert self.by_rule(inside, table=table) == [0]


class TestScaling:
    def of(self, *rules, **changes):
        plan = plan_for({"match": "*"} | INT8, *rules, **changes)
        assert list(plan.int8) == [*in_encoder(), "bert.pooler.dense", "classifier"]
        assert plan.high == ()
        assert set(plan.scaling) == {*plan.int8, *plan.attention}
        return plan.scaling

    def test_the_section_is_for_all(self):
        calibration = {"method": "percentile/99.9", "weights_method": "mse"}
        found = self.of(calibration=calibration)
        assert set(found) == {*in_encoder(), "bert.pooler.dense", "classifier"}
        assert {*found.values()} == {Scaling("percentile/99.9", "mse", "none")}

    def test_the_section_smooths_what_reads_a_layernorm_and_attentions(self):
        never = {"never_quantize": ["layernorm"]}
        found = self.of(calibration={"smoothing": 0.65}, attention="int8", precision=never)
        names = ("self", "query", "key", "value", "intermediate.dense")
        smoothed = [name for name in found if name.endswith(names)]
        assert len(smoothed) == 10
        wanted = dict.fromkeys(found, "none") | dict.fromkeys(smoothed, 0.65)
        assert {name: scaling.smoothing for name, scaling in found.items()} == wanted

    def test_rules_refine_field_by_field_and_the_later_wins(self):
        found = self.of(
            {"match": "encoder.layer.0.*", "method": "mse", "smoothing": 0.3},
            {"match": "*.output.dense", "smoothing": 0.8},
            {"match": "*.0.attention.output.dense", "type": "Linear", "weights_method": "mse"},
            {"match": "encoder.layer.0.output.dense", "method": "entropy", "smoothing": "none"},
            calibration={"method": "percentile/99", "smoothing": 0.5},
        )
        assert found[f"{LAYER}0.attention.self.query"] == Scaling("mse", "max", 0.3)
        assert found[f"{LAYER}0.attention.output.dense"] == Scaling("mse", "mse", 0.8)
        assert found[f"{LAYER}0.output.dense"] == Scaling("entropy", "max", "none")
        assert found[f"{LAYER}1.output.dense"] == Scaling("percentile/99", "max", 0.8)
        assert found[f"{LAYER}1.intermediate.dense"] == Scaling("percentile/99", "max", 0.5)
        assert found["classifier"] == Scaling("percentile/99", "max", "none")

    def test_a_rule_can_quantize_and_refine_at_once(self):
        plan = plan_for({"match": "*.query", "method": "mse"} | ONE_SCALE)
        assert set(plan.int8.values()) == {"tensor"}
        assert plan.scaling == dict.fromkeys(plan.int8, Scaling("mse"))

    def test_refining_changes_no_placement(self):
        rules = (
            {"match": "encoder.layer.0.*"} | INT8,
            {"match": "*", "type": "LayerNorm", "precision": "fp32"},
        )
        plain, refined = plan_for(*rules), plan_for(*rules, {"match": "*", "smoothing": 0.5})
        assert plain != refined
        assert replace(refined, scaling=plain.scaling) == plain

    def test_rules_that_refine_nothing_in_int8_are_all_named(self):
        with pytest.raises(UserError) as error:
            plan_for(
                {"match": "encoder.layer.0.*"} | INT8,
                {"match": "classifier", "method": "mse"},
                {"match": "encoder.layer.1.*", "smoothing": 0.5},
                {"match": "encoder.layer.0.*", "smoothing": 0.5},
                {"match": "*", "type": "Attention", "method": "mse"},
            )
        message = str(error.value)
        assert message.startswith("rules 'classifier', 'encoder.layer.1.*', '*' say how to calibrate, but")
        assert "encoder.layer.0" not in message
        assert "\n" not in message

    def test_what_a_later_rule_keeps_in_fp16_cannot_be_refined(self):
        with pytest.raises(UserError, match=r"rules '\*\.query' say how to calibrate"):
            plan_for(
                {"match": "*"} | INT8,
                {"match": "*.query", "method": "mse"},
                {"match": "*.query", "precision": "fp16"},
            )


def test_long_lists_are_cut():
    names = [str(i) for i in range(MAX_NAMED + 3)]
    assert name_list(names) == f"{', '.join(names[:MAX_NAMED])} and 3 more"
    assert name_list(iter(names[:MAX_NAMED])) == ", ".join(names[:MAX_NAMED])
    assert name_list([]) == ""


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_a_layer_that_stays_out_of_int8_takes_what_is_inside_along(precision):
    plan = plan_for(EVERY, {"match": "encoder.layer.0", "precision": precision})
    assert [*plan.int8] == [name for name in in_encoder() if "layer.1." in name]
    inside = f"bert.encoder.layer.0.{OF_A_LAYER[0]}"
    assert (inside in plan.fp32) == (precision == "fp32")
    # an attention is its products: their linears have rules of their own
    self = {"match": "encoder.layer.0.attention.self", "precision": precision}
    assert [*plan_for(EVERY, self).int8] == in_encoder()
