"""Every shipped recipe, its plan and its graph on a tiny model, held to `tests/golden/shipped_recipes.json`.

Weights are dyadic, so that the INT8 codes and the structure of a graph are the same on every machine; of
other constants only the sum is held, with a tolerance. After a wanted change:

RECORD_GOLDEN=1 .venv/bin/python -m pytest tests/unit/recipe/test_golden.py
"""

import functools
import hashlib
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from onnx import numpy_helper

from qdqbench.quantize.graph import export
from qdqbench.quantize.models.families.known import FAMILIES
from qdqbench.quantize.models.load import load_model
from qdqbench.quantize.recipe.schema import load_recipe, shipped_recipes

from ...support.families import write_model
from ...support.long import mark_long
from ...support.tiny_bert import calibrate_model, calibration_batches, plan_of

RECORDED = Path(__file__).parents[2] / "golden" / "shipped_recipes.json"
RECORDING = bool(os.environ.get("RECORD_GOLDEN"))
GRAPHS = ("tensorrt_rtx", "onnxruntime")  # a backend that takes FP16 and factored weights, and one of neither
SHORT = ("bert-int8-residual-fused", "albert-int8-ffn", "modernbert-int8-attention")
NAMES = shipped_recipes()


@functools.cache
def recorded():
    return json.loads(RECORDED.read_text()) if RECORDED.is_file() else {"plans": {}, "graphs": {}}


def hold(part, name, found):
    if not RECORDING:
        assert found == recorded()[part][name]
        return
    recorded()[part][name] = found
    lines = [
        f'"{part}": {{\n'
        + ",\n".join(f"{json.dumps(key)}: {json.dumps(rows[key])}" for key in sorted(rows))
        + "\n}"
        for part, rows in recorded().items()
    ]
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


@pytest.fixture(scope="module")
def folders(made_once):
    """The folder of a tiny model by the name of its family."""

    def make(family, folder):
        import torch
        from safetensors.torch import load_file, save_file

        write_model(folder, family.model_types[0])
        weights, rng = load_file(folder / "model.safetensors"), np.random.default_rng(0)
        for name, value in sorted(weights.items()):
            drawn = torch.from_numpy(rng.integers(-32, 33, value.shape) / 128)
            weights[name] = (drawn + (1 if "norm" in name.lower() and "weight" in name else 0)).float()
        save_file(weights, folder / "model.safetensors", {"format": "pt"})

    return {
        each.name: lambda each=each: made_once(f"dyadic-{each.name}", lambda path: make(each, path))
        for each in FAMILIES
    }


def fold(rows):
    """Rows by module, equal ones of several layers in one: those of `layer.0` and `layer.1` as `layer.01`."""
    layers = {}
    for name, value in rows.items():
        before, number, after = re.fullmatch(r"(.*?\.)(\d+)(\..*|)|.*", name).groups(default="")
        layers.setdefault((before, after, value) if number else (name, "", value), []).append(number)
    return {f"{before}{''.join(numbers)}{after}": value for (before, after, value), numbers in layers.items()}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_what_recipes_say_and_their_plans(family, folders):
    model = load_model(str(folders[family.name]()))
    for recipe in (load_recipe(name) for name in NAMES if name.startswith(f"{family.name}-")):
        plan = plan_of(recipe, model)
        scaling = {
            key: f"{each.method} {each.weights} {each.smoothing}" for key, each in plan.scaling.items()
        }
        parts = ("high", "attention", "residual", "fp32")
        hold(
            "plans",
            recipe.name,
            {
                "recipe": recipe.model_dump(mode="json", exclude={"rules"}, exclude_defaults=True),
                "int8": fold(plan.int8),
                "scaling": fold(scaling),
                "merge_qkv": plan.merge_qkv,
                **{part: [*fold(dict.fromkeys(getattr(plan, part)))] for part in parts},
            },
        )


@pytest.mark.parametrize("name", mark_long(NAMES, {*NAMES} - {*SHORT}))
def test_the_graph_of_a_recipe(name, folders):
    recipe = load_recipe(name)
    model = load_model(str(folders[recipe.model.family]()))
    plan = plan_of(recipe, model)
    if recipe.quantizes:
        inputs = plan.family.inputs
        batches = [{key: batch[key] for key in inputs} for batch in calibration_batches()]
        plan = calibrate_model(model, recipe, batches).plan
    traced = export.trace(model, recipe.export.opset)
    found, sums = {}, {}
    for backend in GRAPHS:
        graph = export.finish_graph(traced, plan, export.ExportSettings.of(recipe, backend)).graph
        sums[backend] = 0.0
        for tensor in graph.initializer:
            values = numpy_helper.to_array(tensor)
            if values.dtype.kind == "f":
                sums[backend] += float(np.abs(values.astype(np.float64)).sum())
                tensor.CopyFrom(numpy_helper.from_array(np.zeros_like(values), tensor.name))
        # transformers goes through a set of ModernBERT's two kinds of layers, in the order of this process
        text = str(graph).replace("/rotary_emb_1/", "/rotary_emb/")
        found[backend] = hashlib.sha256(text.encode()).hexdigest()
    if RECORDING:
        hold("graphs", name, found | {"sums": {key: round(value, 2) for key, value in sums.items()}})
    else:
        kept = recorded()["graphs"][name]
        assert found == {backend: kept[backend] for backend in GRAPHS}
        assert sums == pytest.approx(kept["sums"], rel=1e-3)
