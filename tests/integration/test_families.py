"""The whole path of every family on a tiny random model: what the recipe asks for is proven and reported."""

import json

import onnx
import pytest
from transformers import AutoConfig

from qdqbench.eval.verification.blocks import stitch
from qdqbench.quantize.graph.read import read_model
from qdqbench.quantize.models.families.known import FAMILIES
from qdqbench.quantize.recipe.schema import load_recipe, shipped_recipes

from ..support.families import LAYERS, write_model
from .test_run import edited, needs_rtx
from .tiny import EVAL_ROWS, entries, fine, results, write_data

pytestmark = pytest.mark.slow


def of_families():
    """A recipe has in INT8 what those listed behind it have, so these are a second way where it is there.

    So are families whose attention is BERT's or MPNet's: unit tests hold what is in their files.
    """
    own = ("deberta-v2", "modernbert")
    for family in FAMILIES[1:]:
        kinds = ("residual-fused", "residual", "attention", "linears")
        names = [f"{family.name}-int8-{kind}" for kind in kinds]
        for number, name in enumerate(name for name in names if name in shipped_recipes()):
            long = number or family.name not in own
            yield pytest.param(family, name, id=name, marks=pytest.mark.long if long else ())


@pytest.fixture(scope="session")
def sentences(tmp_path_factory):
    """A folder with labelled sentences."""
    write_data(folder := tmp_path_factory.mktemp("sentences"), "sst2")
    return folder


@needs_rtx
@pytest.mark.parametrize(("family", "name"), [*of_families()])
def test_the_path_of_a_family(family, name, sentences, tmp_path, qdqbench):
    vocabulary = entries()
    model = write_model(tmp_path / "model", family.model_types[0], vocabulary)
    recipe, out = edited(tmp_path / f"{name}.yaml", short, name), tmp_path / "run"
    fine(qdqbench("run", recipe, "--model", model, "--task", "sst2", "--data", sentences, "--out", out))
    found, asked = results(out), load_recipe(name)
    linears = LAYERS * len(family.linears)
    assert len(found["quantized_layers"]) == linears
    assert {family.layer_of(linear) for linear in found["quantized_layers"]} == set(range(LAYERS))
    config = AutoConfig.from_pretrained(model)
    runs = config.num_hidden_layers if family.shared_layers else LAYERS  # each has products of its own
    attentions = runs * (asked.attention == "int8")
    engine = found["engine"]
    products = runs * len(family.linears) + 2 * attentions
    assert engine["int8_gemms"] == engine["expected_int8_gemms"] == products
    assert engine["not_int8"] == []
    assert engine["attention_int8"] == engine["expected_attention_int8"] == attentions
    assert engine["int8_residuals"] == engine["expected_int8_residuals"] == 2 * LAYERS * asked.int8_residual
    assert found["parity"]["passed"]
    assert found["parity"]["padded"]
    assert found["findings"] == []
    cut = stitch(read_model(out / "model.int8.onnx"), family)  # what a GPU verifies
    onnx.checker.check_model(cut.model)
    assert len(cut.blocks) == runs + 2
    for stage in ("fp32", "fake_quant", "onnxruntime"):
        assert found["stages"][stage]["n"] == EVAL_ROWS
    assert name in (out / "report.md").read_text()


def short(recipe):
    """Few samples and steps, and a gate that random weights hold, whose answers lie on the edge."""
    recipe["gate"].update(max_drop=1.0)
    recipe["calibration"].update(samples=64)
    if recipe.get("qat"):
        recipe["qat"].update(max_steps=4)


@needs_rtx
@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES[1:], ids=lambda family: family.name)
def test_a_family_is_trained(family, sentences, tmp_path, qdqbench):
    name = f"{family.name}-int8-attention-qat"
    recipe = edited(tmp_path / "short.yaml", short, name)
    model = write_model(tmp_path / "model", family.model_types[0], entries())
    out = tmp_path / "run"
    given = ["--model", model, "--task", "sst2", "--data", sentences, "--out", out]
    fine(qdqbench("qat", recipe, *given))
    found = results(out)
    assert found["training"]["steps"] == 4
    assert all(found["stages"][name]["status"] == "done" for name in ("ptq", "fake_quant", "onnxruntime"))
    assert found["engine"]["int8_gemms"] == found["engine"]["expected_int8_gemms"] > 0
    assert found["parity"]["passed"]


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES[1:], ids=lambda family: family.name)
def test_the_layers_of_a_family_are_ranked(family, sentences, tmp_path, qdqbench):
    recipe = edited(tmp_path / "short.yaml", short, f"{family.name}-int8-linears")
    model = write_model(tmp_path / "model", family.model_types[0], entries())
    out = tmp_path / "sensitivity"
    given = ["--model", model, "--task", "sst2", "--data", sentences, "--samples", "16", "--out", out]
    fine(qdqbench("sensitivity", recipe, *given))
    rows = json.loads((out / "sensitivity.json").read_text())["rows"]
    linears = {name for row in rows if row["group"] == "linear" for name in row["modules"] or [row["name"]]}
    assert LAYERS * len(family.linears) <= len(linears)
    assert load_recipe(str(out / "recipe.yaml")).model.family == family.name
