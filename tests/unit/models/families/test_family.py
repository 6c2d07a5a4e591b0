"""A description of a family says everything that differs; and no other file says any of it."""

import ast
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoConfig
from transformers import AutoModelForSequenceClassification as Classifier

from qdqbench.eval.metrics.parity import compare_layers
from qdqbench.eval.selection.trials import calibrations
from qdqbench.quantize.calibration.ptq import calibrate
from qdqbench.quantize.graph.export import ExportSettings, finish_graph, trace
from qdqbench.quantize.lint.check import check_model
from qdqbench.quantize.models.attention import MASK_FILL
from qdqbench.quantize.models.families import known as families
from qdqbench.quantize.models.families.family import ENCODER_KINDS
from qdqbench.quantize.models.inputs import select_inputs
from qdqbench.quantize.models.load import load_encoder, load_model, prepare_model
from qdqbench.quantize.models.modules import module_table
from qdqbench.quantize.recipe.plan import resolve
from qdqbench.quantize.recipe.schema import load_recipe
from qdqbench.quantize.recipe.sections import ModelSection
from qdqbench.quantize.standalone.texts import pad_batch
from qdqbench.quantize.tasks.kinds.classification import CLASSIFICATION
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.system.quiet import quiet

from ....support.families import new_model, write_model
from ....support.tiny_bert import INT8, new_bert, padded_batch, recipe_with

every_model = pytest.mark.parametrize(
    ("family", "model_type"),
    [pytest.param(f, name, id=name) for f in families.FAMILIES for name in f.model_types],
)


@pytest.mark.parametrize(
    ("model_type", "makers"),
    [
        ("bert", ["bert.embeddings.LayerNorm", "bert.encoder.layer.0.output.LayerNorm"]),
        ("electra", ["electra.embeddings_project", "electra.encoder.layer.0.output.LayerNorm"]),
        ("albert", [None, None]),  # one LayerNorm for every run of the layer
        ("modernbert", [None, None]),  # it reads less than the residual
    ],
)
def test_what_makes_the_input_of_an_attention_is_known(model_type, makers):
    model = new_model(model_type)
    table, family = module_table(model), families.family_of(model.config)
    attentions = [name for name, info in table.items() if info.kind == "Attention"]
    assert [family.read_by(name, table) for name in attentions] == makers


def test_a_model_may_have_no_linear_or_no_layernorm_behind_its_embeddings():
    first = "electra.encoder.layer.0.attention.self"
    assert families.ELECTRA.read_by(first, {}) == "electra.embeddings.LayerNorm"
    assert replace(families.ELECTRA, embeddings_norm="").read_by(first, {}) is None
    assert replace(families.ELECTRA, norms={}).read_by(first, {}) is None


@every_model
def test_a_description_finds_its_parts_in_a_model(family, model_type):
    model = new_model(model_type)
    assert families.family_of(model.config) is family
    table, names = module_table(model), {name for name, _ in model.named_modules()}

    def of(kind):
        return [name for name, info in table.items() if info.kind == kind]

    inside = [name for name in of("Linear") if family.place(name)]
    assert len(inside) == len(family.layer_names(model)) * len(family.linears)
    assert {family.kind(name) for name in inside} == set(ENCODER_KINDS)
    outside = [family.kind(name) for name in of("Linear") if name not in inside]
    assert [kind for kind in outside if kind != "embeddings"] == ["pooler", "classifier"]
    layers = family.layer_names(model)
    assert of("Attention") == [f"{layer}.{family.attention}" for layer in layers]
    assert [table[name].head_size for name in of("Attention")] == [16, 16]
    assert of("Softmax") == [f"{name}.softmax" for name in of("Attention")]
    assert model.get_input_embeddings() in [model.get_submodule(name) for name in of("Embedding")]
    makers = [family.read_by(name, table) for name in of("Attention")]
    assert {maker for maker in makers if maker} <= names
    assert family.splittable(of("Linear")) == [family.beside(layer, "ffn-out") for layer in layers]
    for layer in layers:
        roles = {role: family.beside(layer, role) for role in family.linears.values()}
        assert names.issuperset(roles.values())
        assert family.behind_attention(str(roles["output"]))
        assert not family.behind_attention(str(roles["ffn-in"]))
    places = [place.path for name in of("LayerNorm") if (place := family.place(name))]
    assert set(places) == {*family.norms}
    missing = family.name == "modernbert"  # its first has one less
    assert len(places) == len(layers) * len(family.norms) - missing
    base = model.base_model_prefix
    assert {f"{base}.{family.embeddings}", f"{base}.{family.embeddings_norm}"} <= names
    assert hasattr(model.config, family.activation)
    assert getattr(model.config, family.intermediate) == 64


@every_model
def test_residuals_and_the_linears_that_read_them(family, model_type):
    model = prepare_model(new_model(model_type))
    table = module_table(model)
    found = [name for name, info in table.items() if info.kind == "Residual"]
    classes = family.residual_classes(model)
    assert found == [name for name, module in model.named_modules() if type(module) in classes]
    if not family.residuals:  # inside of modules that do more, or read by no linear
        assert found == []
        return
    readers = {reader for name in found for reader in family.residual_readers(name)}
    linears = [name for name in table if table[name].kind == "Linear"]
    assert readers == {name for name in linears if family.kind(name) in ("qkv", "ffn-in")}
    for name in found:
        assert name in {family.residual_read_by(reader) for reader in family.residual_readers(name)}
    assert family.residual_read_by(str(family.beside(found[0], "ffn-out"))) is None


@every_model
def test_every_dropout_is_turned_off(family, model_type, tmp_path):
    model = new_model(model_type)
    for field in family.dropouts:
        setattr(model.config, field, 0.3)
    model.save_pretrained(tmp_path)

    def probabilities(dropout):
        loaded = load_encoder(str(tmp_path), CLASSIFICATION, num_labels=2, dropout=dropout)
        return {module.p for module in loaded.modules() if isinstance(module, nn.Dropout)}

    assert probabilities(None) == {0.3}
    assert probabilities(0.0) == {0.0}


@pytest.mark.parametrize("model_type", ["bert", "roberta"])  # a linear; a module of several
def test_a_new_head_is_not_that_of_the_base(model_type, tmp_path):
    folder = str(write_model(tmp_path, model_type))

    def weights(seed, **options):
        torch.manual_seed(seed)
        model = load_encoder(folder, CLASSIFICATION, num_labels=2, **options)
        head = (module for name, module in model.named_children() if name != model.base_model_prefix)
        return [value for module in head for value in module.parameters() if value.ndim > 1]

    stored = weights(0, keep_head=True)
    for one, two in ((stored, weights(0)), (weights(0), weights(1))):
        assert not any(torch.equal(*pair) for pair in zip(one, two, strict=True))
    for one, two in ((stored, weights(1, keep_head=True)), (weights(1), weights(1))):
        assert all(torch.equal(*pair) for pair in zip(one, two, strict=True))


def test_a_dropout_that_follows_another_field_still_does(tmp_path):
    new_bert().save_pretrained(tmp_path)
    config = load_encoder(str(tmp_path), CLASSIFICATION, num_labels=2, dropout=0.2).config
    assert (config.hidden_dropout_prob, config.classifier_dropout) == (0.2, None)


@every_model
def test_training_attends_to_something_wherever_padding_is(family, model_type, tmp_path, monkeypatch):
    folder = str(write_model(tmp_path, model_type))
    model = load_encoder(folder, CLASSIFICATION, num_labels=2, keep_head=True)
    batch = padded_batch((3, 40))  # more padding than a window holds
    batch["input_ids"][batch["attention_mask"] == 0] = model.config.pad_token_id
    inputs = {name: torch.from_numpy(array) for name, array in select_inputs(model, batch).items()}
    fused, masks = functional.scaled_dot_product_attention, []

    def looks(*given, attn_mask=None, **others):
        masks.append(attn_mask)
        return fused(*given, attn_mask=attn_mask, **others)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", looks)
    with torch.no_grad(), quiet("transformers"):
        wanted = Classifier.from_pretrained(folder, attn_implementation="eager").eval()(**inputs).logits
        torch.testing.assert_close(model.eval()(**inputs).logits, wanted, atol=1e-4, rtol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        loss = functional.cross_entropy(model.train()(**inputs).logits, torch.tensor([0, 1]))
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert all((m if m.dtype == torch.bool else m > MASK_FILL).any(-1).all() for m in masks)
    assert family.windows == any("sliding" in kind for kind in getattr(model.config, "layer_types", ()))


@every_model
def test_a_sample_as_long_as_the_positions_runs_and_no_longer_one(family, model_type):
    model = prepare_model(new_model(model_type))
    assert family.positions(model.config) == 128
    for length in (128, 129):
        batch = {name: torch.ones(1, length, dtype=torch.long) * 7 for name in families.BERT.inputs}
        batch["attention_mask"] = torch.ones(1, length, dtype=torch.long)
        batch["token_type_ids"] = torch.zeros(1, length, dtype=torch.long)
        if length == 128 or family.rotary:  # which has no table of positions
            assert model(**select_inputs(model, batch)).logits.isfinite().all()
        else:
            with pytest.raises((IndexError, RuntimeError)):
                model(**select_inputs(model, batch))


@every_model
def test_the_graph_has_the_inputs_of_the_family(family, model_type, tmp_path):
    new_model(model_type).save_pretrained(tmp_path)
    graph = trace(load_model(str(tmp_path)), 20, CLASSIFICATION.outputs).graph
    assert [value.name for value in graph.input] == list(family.inputs)


@pytest.mark.parametrize(
    "family", [families.DISTILBERT, families.ELECTRA, families.MPNET], ids=lambda family: family.name
)
def test_what_a_recipe_asks_for_stands_in_the_file(family, tmp_path):
    """The other families go the whole path, to an engine, in a test that is not long."""
    model = load_model(str(write_model(tmp_path, family.model_types[0])))
    recipe = load_recipe(f"{family.name}-int8-attention")
    plan = resolve(recipe, module_table(model), model.base_model_prefix)
    assert len(plan.int8) == len(family.layer_names(model)) * len(family.linears)
    batches = [padded_batch((length,) * 4, seed=length) for length in (5, 12)]
    calibrate(model, plan, [select_inputs(model, batch) for batch in batches], recipe.calibration)
    graph = finish_graph(trace(model, 20), plan, ExportSettings(20, "fp16", "factored"))
    report = check_model(graph, expected_quantized={*plan.int8, *plan.attention})
    assert report.findings == []
    runs = len(family.runs(model))
    assert len(report.quantized) == runs * (len(family.linears) + 2)
    assert len(report.attention_quantized) == runs
    batch = padded_batch((9, 4, 16))
    batch["input_ids"][batch["attention_mask"] == 0] = model.config.pad_token_id
    parity = compare_layers(graph, model, [select_inputs(model, batch)])
    assert parity.passed
    assert parity.padded
    assert len(parity.rows) == runs * (len(family.linears) + 4)


def test_a_shared_layer_runs_several_times_wherever_numbers_stand():
    groups = [f"albert.encoder.albert_layer_groups.{number}" for number in (0, 1)]
    assert families.ALBERT.runs(new_model("albert")) == [groups[0], groups[0], groups[1], groups[1]]
    assert families.BERT.runs(new_model("bert")) == families.BERT.layer_names(new_model("bert"))
    shared = replace(families.BERT, layers="encoder.albert_layer_groups.*.albert_layers")
    place = shared.place("albert.encoder.albert_layer_groups.0.albert_layers.3.attention.query")
    assert place == ("albert.encoder.albert_layer_groups.0.albert_layers", 3, "attention.query")


class TestOtherNamesAreLoud:
    def test_a_linear_that_the_family_does_not_have(self):
        with pytest.raises(UserError, match=r"family bert has no linears such as .*attention\.q_lin"):
            families.BERT.kind("distilbert.transformer.layer.0.attention.q_lin")

    def test_a_recipe_or_model_of_another_family(self):
        table = module_table(new_model("distilbert"))
        recipe = recipe_with(rules=[{"match": "transformer.layer.*", "type": "Linear", **INT8}])
        with pytest.raises(UserError, match=r"family bert has no linears such as distilbert\.transformer"):
            resolve(recipe, table, "distilbert")
        config = new_model("roberta").config
        with pytest.raises(UserError, match=r"recipe mine is for model family 'bert', but .* is a 'roberta'"):
            families.require_family("mine", "bert", "folder", config)
        assert families.require_family("mine", "roberta", "folder", config) is families.ROBERTA

    def test_an_unknown_model_type(self):
        with pytest.raises(UserError, match=r"is a 'gpt2'; supported here: bert, .*albert"):
            families.family_of("gpt2")


def test_a_plan_of_another_family():
    def planned(*rules):
        free = {"never_quantize": ["layernorm"]}
        made = recipe_with(rules=rules, attention="int8", precision=free, calibration={"smoothing": 0.5})
        recipe = made.model_copy(update={"model": ModelSection.model_construct(family="distilbert")})
        return resolve(recipe, module_table(new_model("distilbert")), "distilbert")

    every = {"match": "transformer.layer.*", "type": "Linear", **INT8}
    plan = planned(every)
    second = {name.rpartition("layer.1.")[2] for name in plan.int8 if ".layer.1." in name}
    assert second == {*families.DISTILBERT.linears}
    smoothed = {name.rpartition(".")[2] for name in plan.int8 if plan.scaling_of(name).smoothing == 0.5}
    assert smoothed == {"q_lin", "k_lin", "v_lin", "lin1"}
    with pytest.raises(UserError, match=r"the output linear too .*layer\.1\.attention\.out_lin or set"):
        planned(every, {"match": "*.1.attention.out_lin", "precision": "fp16"})


def test_padding_is_of_the_pad_token_and_masked():
    batch = {name: np.ones((1, 2), np.int64) for name in families.BERT.inputs}
    made = {name: array.tolist() for name, array in pad_batch(batch, 4, pad_id=7).items()}
    masked = [[1, 1, 0, 0]]
    assert made == {"input_ids": [[1, 1, 7, 7]], "attention_mask": masked, "token_type_ids": masked}


# millions of parameters, with a classifier of two labels, as their authors and transformers' documents say
PARAMETERS = {
    "bert-base": 109.5, "bert-large": 335.1, "minilm": 22.7, "roberta-base": 124.6, "xlm-roberta-base": 278.0,
    "camembert-base": 110.6, "distilbert-base": 67.0, "electra-base": 109.5, "mpnet-base": 109.5,
    "albert-base": 11.7, "deberta-v3-base": 184.4, "modernbert-base": 149.6,
}  # fmt: skip


@pytest.mark.parametrize("name", families.MODEL_SHAPES)
def test_a_size_has_the_published_number_of_parameters(name):
    with torch.device("meta"):
        config = AutoConfig.for_model(**families.MODEL_SHAPES[name], num_labels=2)
        model = Classifier.from_config(config)
    counted = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    assert counted == pytest.approx(PARAMETERS[name], rel=0.01)


# names of BERT that no other file may know; `tasks` has the tokens of a sample and makes the default's model,
# the Python API says what samples may hold, and servers carry tokens from the tokenizer to an engine
NAMES = re.compile(
    r"attention\.(self|output)\b|intermediate\.dense|output\.dense|encoder\.layer|\.layer\\\.|Bert(Self)?Output"
    r"|BertSelfAttention|SelfAttention|(?<!nn)\.LayerNorm|hidden_dropout_prob|attention_probs_dropout_prob"
    r"|\bhidden_act\b|max_position_embeddings|\bintermediate_size\b|pooler\.|base\.pooler"
    r"|(query|key|value)_proj|\b[qkv]_lin|^\.(query|key|value)$"
)
INPUT = re.compile(r"token_type_ids")


def source_names(path):
    """Strings and attributes of a file, less its documentation."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            found.append(node.value)
        elif isinstance(node, ast.Attribute):
            found.append(ast.unparse(node))
        elif isinstance(node, ast.keyword) and node.arg:
            found.append(node.arg)
        elif isinstance(node, ast.ImportFrom):
            found += [alias.name for alias in node.names]
    return found


def test_no_other_file_knows_the_names_of_bert():
    home = Path(families.__file__).parent
    packages = [home.parents[1], Path(calibrations.__file__).parents[2]]
    files = [path for root in packages for path in root.rglob("*.py") if path.parent != home]
    assert len(files) > 150
    known = {
        f"{path.parent.name}/{path.name}: {name}"
        for path in files
        if path.parent.name not in ("tasks", "data", "kinds", "cuda") and path.name != "rewritten.py"
        for name in source_names(path)
        if NAMES.search(name)
        or (INPUT.search(name) and path.parent.name not in ("server", "standalone", "triton", "deployment"))
    }
    assert known == set()
    assert any(NAMES.search(name) for name in source_names(home / "known.py"))
