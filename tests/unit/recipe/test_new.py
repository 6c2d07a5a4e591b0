"""A recipe for any model: with a layout for a type that is not known, else a shipped one fitted to it."""

import json
from dataclasses import fields

import pytest
import yaml

from qdqbench.cli.app import main
from qdqbench.quantize.models.detection.detect_layout import detect_layout
from qdqbench.quantize.models.families import known
from qdqbench.quantize.models.families.family import Family
from qdqbench.quantize.models.families.known import family_of
from qdqbench.quantize.models.load import create_untrained
from qdqbench.quantize.recipe.new import NewRecipe, new_recipe
from qdqbench.quantize.recipe.schema import dump_recipe, load_recipe, parse_recipe, shipped_recipes
from qdqbench.quantize.recipe.sections import FamilyLayout
from qdqbench.quantize.utils.errors import UserError

from ...support.tiny_bert import new_bert
from ...support.unknown import config_for, write_config


@pytest.fixture(autouse=True)
def _nothing_is_described(monkeypatch):
    monkeypatch.setattr(known, "_DESCRIBED", {})


def new(folder, model_type):
    return new_recipe(str(write_config(folder / model_type, model_type)))


def test_a_layout_says_what_a_family_says():
    # what only a description by hand says; a layout's family has the defaults
    by_hand = {"name", "model_types", "gated", "rotary", "given_sums", "shared_layers", "feed_forward_share"}
    by_hand |= {"windows", "terms", "rewritten", "needs"}
    assert {field.name for field in fields(Family)} - by_hand == {*FamilyLayout.model_fields}
    for model_type in ("ernie", "roformer"):
        found = detect_layout(create_untrained("tiny", config_for(model_type))).family
        assert FamilyLayout.of(found).family(model_type) == found


def test_the_recipe_of_an_unknown_type_makes_it_known(tmp_path):
    made = new(tmp_path, "ernie")
    known._DESCRIBED.clear()
    with pytest.raises(UserError, match=r"is a 'ernie'; supported here: .*`qdqbench recipes new --model"):
        family_of("ernie", "my")
    recipe = parse_recipe(made.text, "mine")
    assert family_of("ernie").linears == recipe.model.layout.linears
    assert parse_recipe(dump_recipe(recipe), "again") == recipe
    assert (recipe.name, recipe.model.family, made.shipped) == ("ernie-int8-linears", "ernie", [])
    assert new(tmp_path, "data2vec-text").recipe == "data2vec-text-int8-linears"
    assert recipe.export.gelu == "auto"
    assert recipe.calibration == load_recipe("bert-int8-linears").calibration
    tried = "attention: int8, with precision.never_quantize: [layernorm]"
    assert made.notes == [f"INT8 attention can be tried: {tried}."]
    assert f"# {made.notes[0]}" in made.text.splitlines()


def test_of_two_recipes_for_a_type_each_counts_when_it_is_used(tmp_path):
    from qdqbench.quantize.pipeline.session import require_fit

    one = parse_recipe(new(tmp_path, "ernie").text, "one")
    data = one.model_dump(mode="json")
    data["model"]["layout"]["norms"] = {}
    other = parse_recipe(yaml.safe_dump(data), "other")
    for recipe in (one, other, one):
        require_fit(recipe, "tiny", config_for("ernie"))
        assert family_of("ernie").norms == recipe.model.layout.norms


def test_what_is_not_recognized_has_a_rule_and_a_line(tmp_path):
    made = new(tmp_path, "xmod")
    recipe = parse_recipe(made.text, "mine")
    assert [rule.match for rule in recipe.rules if rule.precision == "fp16"] == [*made.left]
    assert len(made.left) == 4
    told = [line for line in made.text.splitlines() if line.startswith("# stays in FP16: ")]
    assert told == [f"# stays in FP16: {name}: {why}" for name, why in made.left.items()]


def test_an_attention_that_cannot_be_int8_and_a_gated_feed_forward(tmp_path):
    made = new(tmp_path, "nomic_bert")
    recipe = parse_recipe(made.text, "mine")
    assert (recipe.model.layout.attention, recipe.calibration.outlier_channel_splitting) == (None, 0)
    attention, splitting = made.notes
    assert attention.startswith("The attention stays in FP16:")
    assert splitting.startswith("No outlier channels are split:")


def test_a_known_type_gets_a_shipped_recipe_fitted_to_the_model(tmp_path):
    model = new_bert()
    model.config.max_position_embeddings, model.config.hidden_act = 64, "relu"
    model.config.save_pretrained(tmp_path)
    made = new_recipe(str(tmp_path))
    assert made.shipped == [name for name in shipped_recipes() if name.startswith("bert-")]
    recipe = parse_recipe(made.text, "mine")
    shipped = load_recipe("bert-int8-linears")
    assert recipe.rules == shipped.rules
    assert (recipe.export.max_length, recipe.export.gelu) == (64, "exact")
    assert [shapes.length for shapes in recipe.engine.profiles] == [(64, 64, 64)] * 3 + [(16, 64, 64)]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"layout": {"linears": {}}}, r"model\.layout\.layers: Field required"),
        ({"family": "bert"}, r"'bert' is known here; drop its layout"),
        ({"layout": None}, r"'ernie' is no family that is known here; choose from bert, .*recipes new"),
    ],
)
def test_a_layout_that_does_not_fit(tmp_path, change, why):
    data = parse_recipe(new(tmp_path, "ernie").text, "mine").model_dump(mode="json")
    data["model"] |= change
    with pytest.raises(UserError, match=why):
        parse_recipe(yaml.safe_dump(data), "mine")


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        (None, r"has no config.json, so it is no model"),
        ("unheard", r"is a 'unheard' .*, which transformers .* does not know"),
        ("vit", r"is a 'vit', a model of image; only encoders of text"),
        ("wav2vec2", r"is a 'wav2vec2', a model of audio"),
        ("clip", r"is a 'clip', a model of image and text"),
        ("perceiver", r"is a 'perceiver', a model of image"),
        ("gemma3", r"is a 'gemma3', a causal language model"),
        ("t5", r"is a 't5', an encoder with a decoder"),
        ("ernie", r"are quantized already \(gptq, by quantization_config in config\.json\)"),
    ],
)
def test_models_that_no_recipe_is_for(tmp_path, model_type, why):
    data = {"model_type": model_type}
    if model_type == "ernie":
        data["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    if model_type:
        (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(UserError, match=why) as raised:
        new_recipe(str(tmp_path))
    assert "\n" not in str(raised.value)


def test_no_count_of_positions(tmp_path, monkeypatch):
    monkeypatch.setattr(Family, "positions", lambda self, config: int(config.nowhere))
    with pytest.raises(UserError, match="does not say how many positions it has"):
        new(tmp_path, "ernie")


@pytest.fixture
def call(monkeypatch):
    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["qdqbench", "recipes", "new", *map(str, arguments)])
        try:
            main()
        except SystemExit as stop:
            return int(stop.code or 0)
        return 0

    return run


def test_the_command_writes_the_recipe_and_lists_what_was_found(tmp_path, call, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "160")
    folder, out = write_config(tmp_path / "m", "xmod"), tmp_path / "mine.yaml"
    assert call("--model", folder, "--out", out) == 0
    printed = capsys.readouterr().out
    assert "is of type xmod, which has no recipes here" in printed
    assert "not recognized, stays in FP16: encoder.layer.*.output.adapter_modules.en_XX.dense1" in printed
    rows = [line.split() for line in printed.splitlines()]
    assert ["encoder.layer.*.output.dense", "Linear", "2", "ffn-out", "INT8"] in rows
    assert load_recipe(str(out)).name == "xmod-int8-linears"
    before = out.read_bytes()
    assert call("--model", folder, "--out", out) == 1
    assert "mine.yaml is there already; give another --out" in capsys.readouterr().err
    assert out.read_bytes() == before


def test_the_command_as_json(tmp_path, call, monkeypatch, capsys):
    folder = write_config(tmp_path / "m", "ernie")
    monkeypatch.chdir(tmp_path)
    assert call("--model", folder, "--json") == 0
    found = NewRecipe.model_validate_json(capsys.readouterr().out)
    assert (tmp_path / "ernie-int8-linears.yaml").read_text() == found.text
    assert found.left == {}
