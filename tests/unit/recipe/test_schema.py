"""Recipes: what validates, what is refused, and in which words."""

import time
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qdqbench.quantize.models.families.known import FAMILIES, family_named, family_of
from qdqbench.quantize.recipe import schema
from qdqbench.quantize.utils.errors import UserError

GOLDEN = Path(__file__).parents[2] / "golden" / "recipe_bert_int8_linears.yaml"
SHIPPED = schema.shipped_recipes()
HEAD = "version: 1\nname: a\n"
INT8 = "weights: int8/per-channel, input: int8/per-tensor"


def refusal(text):
    with pytest.raises(UserError) as error:
        schema.parse_recipe(text, "my.yaml")
    message = str(error.value)
    assert message.startswith("my.yaml")
    assert "\n" not in message
    return message


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_has_recipes(family):
    own = [name for name in SHIPPED if name.startswith(f"{family.name}-")]
    assert {f"{family.name}-fp16", f"{family.name}-int8-linears"} <= {*own}
    for name in own:
        recipe = schema.load_recipe(name)
        assert (recipe.name, recipe.model.family) == (name, family.name)
        assert schema.load_recipe(name.removeprefix(f"{family.name}-"), lambda: family) == recipe


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("albert-int8-residual", "albert has no place for a quantizer where it adds its residuals"),
        ("modernbert-int8-residual-qat", "modernbert normalizes first"),
        ("deberta-v2-int8-residual-fused", "deberta-v2 has other terms of scores that read k"),
        ("electra-int8-residual-qat", "not measured there; to try it, .*show bert-int8-residual-qat` prints"),
    ],
)
def test_what_a_family_cannot_have_is_refused_by_name_with_its_own(name, why):
    family, free = name.split("-int8-")
    for asked, of in ((name, None), (f"int8-{free}", lambda: family_named(family))):
        with pytest.raises(
            UserError, match=f"family {family} has no recipe 'int8-{free}'.*{why}.*fp16, int8-"
        ):
            schema.load_recipe(asked, of)


def test_a_full_name_and_a_file_ask_for_no_family(tmp_path):
    def never():
        raise AssertionError

    assert schema.load_recipe("bert-fp16", never).name == "bert-fp16"
    (tmp_path / "mine.yaml").write_text(HEAD + "description: für alle", encoding="utf-8")
    assert schema.load_recipe(str(tmp_path / "mine.yaml"), never).description == "für alle"


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_recipes_round_trip(name):
    recipe = schema.load_recipe(name)
    assert recipe.name == name
    assert recipe.description
    assert schema.parse_recipe(schema.dump_recipe(recipe), "dump") == recipe
    assert recipe.quantizes == ("int8" in name)


def test_the_resolved_recipe_is_as_the_golden_file():
    # after a wanted change of the schema: qdqbench recipes show bert-int8-linears --resolved > the file
    assert schema.dump_recipe(schema.load_recipe("bert-int8-linears")) == GOLDEN.read_text(encoding="utf-8")


def test_a_minimal_recipe_quantizes_nothing():
    recipe = schema.parse_recipe(HEAD, "a")
    assert not recipe.quantizes
    assert recipe.rules == ()
    plain = recipe.calibration
    assert (plain.method, plain.weights_method, plain.smoothing) == ("max", "max", "none")
    assert not plain.bias_correction


@pytest.mark.parametrize(
    ("text", "key", "nearest"),
    [
        (HEAD + "atention: fp16", "atention", "attention"),
        (HEAD + "calibration: {sampels: 3}", "calibration.sampels", "samples"),
        (HEAD + "engine: {shapes: {lenght: [1, 2, 3]}}", "engine.shapes.lenght", "length"),
        (HEAD + f"rules: [{{match: a, {INT8}, wieghts: x}}]", "rules.0.wieghts", "weights"),
        (HEAD + "Gate: {}", "Gate", "gate"),
        (HEAD + "export: {max_len: 3}", "export.max_len", "max_length"),
        (HEAD + "export: {glue: tanh}", "export.glue", "gelu"),
    ],
)
def test_an_unknown_key_names_the_nearest(text, key, nearest):
    assert f"unknown key {key!r}, did you mean {nearest!r}?" in refusal(text)


def test_a_long_key_makes_no_long_sentence():
    keys = "".join(f"{number}{'A' * 9000}: 1\n" for number in range(40))
    with pytest.raises(UserError) as caught:
        schema.parse_recipe(keys, "file.yaml")
    assert len(str(caught.value)) < 10_000


def test_every_mistake_is_named_at_once():
    message = refusal(HEAD + "calibration: {samples: 0, batch_size: many}\ngate: {max_drop: 2}")
    assert all(key in message for key in ("calibration.samples", "calibration.batch_size", "gate.max_drop"))


ATTENTION_RULE = "rules: [{match: '*', type: Attention, precision: int8}]"
# what is refused, and a part of the sentence: a whole text; a text behind `HEAD`; and a rule
REFUSED = [
    ("", "holds no recipe"),
    ("- 1\n- 2", "holds no recipe"),
    ("just words", "holds no recipe"),
    ("a: [1", "not valid recipe YAML"),
    ("name: a", "version: Field required"),
    ("version: 1", "name: Field required"),
    ("version: 2\nname: a", "version: Input should be 1"),
    ("version: '1'\nname: a", "version"),
    ("version: 1\nname: A B", "name: String should match"),
    ("version: 1\nname: ../up", "name: String should match"),
    ("a: " + "[" * 20_000, "not valid recipe YAML"),
]
REFUSED_PARTS = [
    ("name: b", "key 'name' stands twice, line 1"),
    ("gate: {max_drop: 0.1, max_drop: 0.2}", "key 'max_drop' stands twice, line 3"),
    ("rules: &a []\ngate: *a", "aliases (*a) are not allowed"),
    ("<<: {attention: int8}", "not valid recipe YAML"),
    ("qat: !!python/object/apply:os.system [true]", "not valid recipe YAML"),
    ("model: {family: gpt}", "model: 'gpt' is no family that is known here"),
    ("qat: {epoch: 1}", "unknown key 'qat.epoch', did you mean 'epochs'"),
    ("qat: {epochs: 0}", "qat.epochs"),
    ("qat: {distill: {logits: 0, hidden: 0}}", "nothing to learn from"),
    ("qat: {distill: {labels: 1}, texts: mine}", "texts have no labels"),
    ("export: {opset: 19}", "export.opset"),
    ("export: {gelu: erf}", "export.gelu: Input should be 'auto', 'exact' or 'tanh'"),
    ("export: {gelu: true}", "export.gelu"),
    ("gate: {max_drop: .nan}", "gate.max_drop"),
    ("gate: {xyzzy: 1}", "unknown key 'gate.xyzzy', known keys: max_drop, min_sqnr_db"),
    ("calibration: {samples: -1}", "calibration.samples"),
    ("calibration: {seed: -1}", "calibration.seed"),
    ("calibration: {outlier_channel_splitting: 8}", "splitting: Input should be a multiple of 32"),
    ("rules: [{match: '', precision: fp16}]", "rules.0.match"),
    ("attention: int8", "precision.never_quantize protects softmax"),
    ("residual: int8", "needs INT8 linears that read the same tensors"),
    ("residual: yes", "residual: Input should be 'fp16' or 'int8'"),
    ("precision: {never_quantize: []}", "add layernorm to precision.never_quantize"),
    ("precision: {never_quantize: [softmax]}", "add layernorm to precision.never_quantize"),
    (
        "attention: int8\nprecision: {never_quantize: [layernorm]}\nexport: {max_length: 513}",
        "lengths up to 512 only, and export.max_length is 513",
    ),
    ("engine: {shapes: {batch: [4, 2, 8]}}", "batch must be [min, opt, max] in rising order, not [4"),
    ("engine: {shapes: {length: [16, 128, 64]}}", "length must be [min, opt, max]"),
    ("engine: {shapes: {length: [0, 1, 2]}}", "engine.shapes.length.0"),
    ("engine: {shapes: {length: [1, 2]}}", "engine.shapes.length"),
    ("export: {max_length: 64}", "shapes.length goes to 128, but export.max_length truncates at 64"),
    (ATTENTION_RULE, "precision.never_quantize protects softmax"),
    (
        f"{ATTENTION_RULE}\nprecision: {{never_quantize: [layernorm]}}\nexport: {{max_length: 513}}",
        "lengths up to 512 only, and export.max_length is 513",
    ),
]
REFUSED_RULES = [
    ("weights: int8/per-channel", "give both weights and input"),
    ("input: int8/per-tensor", "give both weights and input"),
    (f"{INT8}, precision: fp16", "give either weights and input (INT8) or precision"),
    ("type: Linear", "give weights and input (INT8), precision (fp16 or fp32), or how to calibrate"),
    (f"type: LayerNorm, {INT8}", "type LayerNorm is protected from Q/DQ by class"),
    (f"type: Softmax, {INT8}", "type Softmax is protected from Q/DQ by class"),
    ("weights: int8/per-channel, input: int8/per-channel", "rules.0.input"),
    ("precision: int8", "precision int8 is for type Attention"),
    ("precision: fp16, method: mse", "precision fp16 needs no calibration; drop method and smoothing"),
    ("type: LayerNorm, smoothing: 0.5", "type LayerNorm is never quantized"),
    (f"{INT8}, method: percentile/30", "none of max, mse, entropy and percentile/P"),
    (f"{INT8}, method: percentile/nan", "none of max, mse, entropy and percentile/P"),
    (f"{INT8}, method: median", "none of max, mse, entropy and percentile/P"),
    (f"{INT8}, smoothing: 1.5", "rules.0.smoothing"),
    (f"{INT8}, smoothing: -0.5", "rules.0.smoothing"),
    (f"{INT8}, smoothing: .nan", "rules.0.smoothing"),
    (f"{INT8}, smoothing: no", "rules.0.smoothing"),  # YAML reads false, which is not alpha 0
    (f"{INT8}, smoothing: some", "rules.0.smoothing"),
    (f"{INT8}, method: percentile", "none of max, mse, entropy and percentile/P"),
    (f"{INT8}, method: percentile/50", "none of max, mse, entropy and percentile/P"),
    (f"{INT8}, method: percentile/100.1", "none of max, mse, entropy and percentile/P"),
    (f"{INT8}, method: percentile/inf", "none of max, mse, entropy and percentile/P"),
    (f"{INT8}, weights_method: entropy", "rules.0.weights_method: Input should be 'max' or 'mse'"),
    ("type: Attention, precision: int8, weights: int8/per-tensor, input: int8/per-tensor", "give either"),
    ("type: Linear, precision: int8", "precision int8 is for type Attention"),
    ("precision: fp32, smoothing: 0.5", "precision fp32 needs no calibration"),
    ("type: Embedding, method: max", "type Embedding is never quantized"),
    ("type: Residual, method: mse", "calibrated as the linears that read the same"),
    (f"type: Residual, {INT8}", "only Linear"),
]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *REFUSED,
        *((HEAD + text, words) for text, words in REFUSED_PARTS),
        *((HEAD + f"rules: [{{match: '*', {rule}}}]", words) for rule, words in REFUSED_RULES),
    ],
)
def test_refused(text, words):
    assert words in refusal(text)


@pytest.mark.parametrize("method", ["max", "mse", "entropy", "percentile/99.99", "percentile/100"])
@pytest.mark.parametrize("smoothing", [0, 0.5, 1, "gain", "none"])
def test_calibration_of_a_recipe_and_of_its_rules(method, smoothing):
    how = f"method: {method}, weights_method: mse, smoothing: {smoothing}"
    text = HEAD + f"calibration: {{{how}, bias_correction: true}}\nrules: [{{match: '*', {how}}}]"
    recipe = schema.parse_recipe(text, "a")
    for section in (recipe.calibration, recipe.rules[0]):
        assert (section.method, section.weights_method, section.smoothing) == (method, "mse", smoothing)
    assert recipe.rules[0].refines
    assert recipe.calibration.bias_correction
    assert not recipe.quantizes  # a rule that only refines asks for nothing in INT8
    assert schema.parse_recipe(schema.dump_recipe(recipe), "again") == recipe


@pytest.mark.parametrize(("text", "attention"), [(ATTENTION_RULE, "fp16"), ("attention: int8", "int8")])
def test_int8_attention_up_to_512(text, attention):
    text += "\nprecision: {never_quantize: [layernorm]}\nexport: {max_length: 512}"
    allowed = schema.parse_recipe(HEAD + text, "a")
    assert (allowed.int8_attention, allowed.attention) == (True, attention)


def test_an_alias_bomb_is_refused_at_once():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    start = time.perf_counter()
    assert "aliases" in refusal("\n".join(lines))
    assert time.perf_counter() - start < 5


class TestFiles:
    @pytest.mark.parametrize(
        ("content", "told"),
        [
            (b"#" * (schema.MAX_RECIPE_BYTES + 1), r"is \d+ bytes; a recipe has at most \d+$"),
            (HEAD.encode() + "description: für alle".encode("latin-1"), "is not UTF-8 text"),
        ],
        ids=["huge", "latin"],
    )
    def test_a_file_that_is_not_read(self, tmp_path, content, told):
        (tmp_path / "mine.yaml").write_bytes(content)
        with pytest.raises(UserError, match=rf"mine\.yaml {told}"):
            schema.load_recipe(str(tmp_path / "mine.yaml"))

    @pytest.mark.parametrize(
        ("name", "family", "told"),
        [
            ("int8-linear", None, "nearest is 'bert-int8-linears'"),
            ("bert-int8-linear", None, f"'bert-int8-linears' .*{', '.join(schema.family_free_recipes())}"),
            ("nonesuch", None, r"names after a family, as in bert-int8-linears: fp16,"),
            ("int8-linear", "bert", "nearest is 'int8-linears'"),
            ("nonesuch", "bert", r"names for a model: fp16,"),
            ("int8-linears", None, r"in each family \(bert, roberta, .*such as bert-int8"),
            ("int8-residual-qat", "camembert", r"roberta has no recipe 'int8-residual-qat': .*fp16"),
        ],
    )
    def test_names_without_a_family_are_offered_only_with_a_model(self, name, family, told):
        with pytest.raises(UserError, match=told):
            schema.load_recipe(name, (lambda: family_of(family)) if family else None)

    @pytest.mark.parametrize("name", ["", ".", "/", "no\0name", "x" * 5000])
    def test_a_name_that_is_no_file(self, name):
        with pytest.raises(UserError, match="no recipe or file is called"):
            schema.load_recipe(name)


keys = st.sampled_from([*schema.Recipe.model_fields, "weights", "match", "shapes", "batch", "<<", "version:"])
yamlish = st.lists(
    keys
    | st.sampled_from([*"{}[]:,&*!|>-?#\n '\"\t%@=~", "!!int ", "!!map ", "!!timestamp ", "0x_", "1:6"])
    | st.text(max_size=4)
).map(" ".join)


@settings(max_examples=300, deadline=None)
@given(text=st.text() | yamlish)
@example(text='version: !!int ""')
@example(text='version: !!float ""')
@example(text="version: !!bool maybe")
@example(text="version: !!timestamp soon")
@example(text="!!map [a]")
@example(text="!!set [a]")
@example(text="!!omap {a: b}")
@example(text="? [a, b]\n: 1")
@example(text="? {a: b}\n: 1")
@example(text="1: 2")
@example(text=HEAD + "null: 2")
@example(text=HEAD + "rules: [{1: 2}]")
@example(text=HEAD + "rules: {a: b}")
@example(text=HEAD + "calibration: {samples: " + "9" * 5000 + "}")
@example(text=HEAD + "gate: 2001-99-99")
@example(text=HEAD + "=: 1")
def test_random_text_is_a_recipe_or_a_user_error(text):
    try:
        recipe = schema.parse_recipe(text, "random")
    except UserError:
        return
    assert recipe.version == 1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(keys | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(changes=st.dictionaries(st.sampled_from(list(schema.Recipe.model_fields)), json_values, max_size=3))
def test_random_values_are_a_recipe_or_a_user_error(changes):
    text = yaml.safe_dump({"version": 1, "name": "a"} | changes)
    try:
        recipe = schema.parse_recipe(text, "random")
    except UserError:
        return
    assert schema.parse_recipe(schema.dump_recipe(recipe), "again") == recipe


@pytest.mark.parametrize(
    ("gelu", "computes_tanh"),
    [
        ("auto", {"openvino": False, "onnxruntime": True, "cuda": True, "auto": True}),
        ("tanh", {"openvino": True, "cuda": True}),
        ("exact", {"openvino": False, "cuda": False}),
    ],
)
def test_the_gelu_of_auto_follows_the_backend(gelu, computes_tanh):
    data = schema.load_recipe("bert-int8-linears").model_dump(mode="json")
    assert data["export"]["gelu"] == "auto"
    data["export"]["gelu"] = gelu
    recipe = schema.Recipe.model_validate(data)
    assert {backend: recipe.computes_tanh_on(backend) for backend in computes_tanh} == computes_tanh


@pytest.mark.parametrize(
    ("backend", "recipe", "changes", "softmax", "centering"),
    [
        ("cuda", "bert-int8-attention", {}, "row-max", True),
        ("cuda", "bert-int8-linears", {}, "auto", True),
        ("cuda", "bert-int8-attention", {"softmax_scale": "min-error"}, "min-error", True),
        ("cuda", "bert-int8-attention", {"centering": False}, "row-max", False),
        ("tensorrt", "bert-int8-attention", {}, "auto", True),
        ("openvino", "bert-int8-linears", {}, "auto", True),
        ("openvino", "bert-int8-linears", {"centering": False}, "auto", False),
        ("onnxruntime", "bert-int8-attention", {}, "auto", False),
        ("tensorrt_rtx", "bert-int8-linears", {}, "auto", True),
        ("onnxruntime", "bert-int8-linears", {"centering": True}, "auto", True),
        (
            "cuda",
            "bert-int8-linears",
            {"smoothing": "none", "outlier_channel_splitting": 0, "amax": {"a.input_quantizer": 1.0}},
            "auto",
            False,
        ),
    ],
)
def test_what_auto_means_follows_the_backend(backend, recipe, changes, softmax, centering):
    data = schema.load_recipe(recipe).model_dump(mode="json")
    data["calibration"] |= changes
    section = schema.Recipe.model_validate(data).calibration_for(backend)
    assert (section.softmax_scale, section.centering) == (softmax, centering)


@pytest.mark.parametrize("fields", [
    {"engine.shapes": {"batch": [1, 2, 4]}}, {"engine.shapes": None}, {"engine.shapes": [3]}, {"engine": 5},
    {"engine.shapes": {"length": "a"}}, {"rules.²": 1},
], ids=str)  # fmt: skip
def test_values_that_fit_no_recipe_are_one_sentence_with_a_length_too(fields):
    with pytest.raises(UserError):
        schema.adapt_recipe(schema.load_recipe("bert-int8-linears"), fields=fields, max_length=64)
