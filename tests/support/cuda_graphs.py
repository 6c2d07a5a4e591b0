"""Tiny random models in the form that the CUDA backend takes: of every family, with every recipe and head."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx

from qdqbench.quantize.engine.cuda.match import FAMILIES
from qdqbench.quantize.graph.export import ExportSettings, finish_graph, save, trace
from qdqbench.quantize.models.load import load_model, prepare_model, use_tanh_gelu
from qdqbench.quantize.recipe.schema import Recipe, adapt_recipe, family_free_recipes, load_recipe
from qdqbench.quantize.tasks.kinds.embedding import PairEmbedding
from qdqbench.quantize.tasks.kinds.kind import LOGITS
from qdqbench.quantize.tasks.kinds.questions import QUESTIONS
from qdqbench.quantize.tasks.kinds.tokens import TOKENS

from . import families, tiny_embedder
from . import tiny_bert as tiny

LIKE_ROBERTA = {"xlm-roberta": "roberta", "camembert": "roberta"}  # and the family
RECIPES = {
    family: [f"{family}-{name}" for name, having in family_free_recipes().items() if family in having]
    for family in FAMILIES
} | {model_type: ["roberta-int8-residual-fused"] for model_type in LIKE_ROBERTA}
CASES = [(model_type, recipe) for model_type, recipes in RECIPES.items() for recipe in recipes]
POOLINGS = {"mean": tiny_embedder.MEAN, "cls": tiny_embedder.CLS, "last": tiny_embedder.LAST}
HEADS = ["tokens", "questions", "regression", *POOLINGS]


def write_once(made_once: Any, *case: Any) -> Path:
    """The file of a graph by model type and recipe, head of a BERT, or recipe and size of heads."""
    if isinstance(case[-1], int):
        write, name = write_wide, f"wide-{case[0]}-{case[1]}"
    else:
        write, name = (write_case if len(case) == 2 else write_head), "-".join(case)
    return made_once(f"cuda-{name}", lambda path: write(path, *case)) / "model.onnx"


def batch_for(graph: onnx.ModelProto, lengths: tuple[int, ...] = (9, 4, 16), seed: int = 0) -> tiny.Batch:
    """Random tokens for the inputs of a graph; 0 and 1 stand where padding is alone."""
    batch = tiny.padded_batch(lengths, seed)
    batch["input_ids"] = np.where(batch["attention_mask"] > 0, batch["input_ids"], 1)
    return {value.name: batch[value.name] for value in graph.graph.input}


def export(model: Any, recipe: Recipe, outputs: Any = LOGITS) -> onnx.ModelProto:
    """Quantize a model for backend cuda, and export it as the CPU runtimes get it."""
    recipe = recipe.model_copy(update={"calibration": recipe.calibration_for("cuda")})
    if recipe.computes_tanh_on("cuda"):
        use_tanh_gelu(model, "tiny")
    quantized = tiny.calibrate_model(model, recipe)
    settings = ExportSettings.of(recipe, "onnxruntime")
    return finish_graph(trace(quantized.model, 20, outputs), quantized.plan, settings)


def _new_model(model_type: str, **sizes: int) -> Any:
    """Return a random classifier; its bias by distance, if any, is as large as scores."""
    model = prepare_model(families.new_model(model_type, **sizes))
    for name, parameter in model.named_parameters():
        if "relative_attention_bias" in name:
            parameter.data *= 50
    return model


def load_variant(recipe: str) -> Recipe:
    """Load a recipe with centering; behind its name another `calibration.softmax_scale` may stand instead."""
    name, _, softmax = recipe.partition(" ")
    loaded = load_recipe(name)
    changes = {"softmax_scale": softmax} if softmax else {"centering": True}
    settings = loaded.calibration.model_copy(update=changes)
    return loaded.model_copy(update={"calibration": settings})


def write_case(folder: Path, model_type: str, recipe: str) -> None:
    """Export a classifier of a model type by a recipe or a variant of one."""
    graph = export(_new_model(model_type), load_variant(recipe))
    save(graph, folder / "model.onnx", recipe)


def write_head(folder: Path, head: str, model_type: str = "bert") -> None:
    """Export a model with another head; a BERT with the exact GELU."""
    from transformers import AutoConfig, AutoModelForQuestionAnswering, AutoModelForTokenClassification

    recipe = load_recipe(f"{LIKE_ROBERTA.get(model_type, model_type)}-int8-attention")
    if model_type == "bert":
        recipe = recipe.model_copy(update={"export": recipe.export.model_copy(update={"gelu": "exact"})})
    if head in POOLINGS:
        options: dict[str, Any] = {"normalize": head != "last"}
        if model_type == "bert":
            options["dense"] = {"width": 8, "activation": "Tanh"} if head == "cls" else None
            tiny_embedder.write_sentence_folder(folder / "model", POOLINGS[head], **options)
        else:
            families.write_model(folder / "model", model_type)
            tiny_embedder.write_modules(folder / "model", POOLINGS[head], **options)
        kind = PairEmbedding()
        graph = export(load_model(str(folder / "model"), kind=kind), recipe, kind.outputs)
    elif head == "regression":
        graph = export(prepare_model(families.new_model(model_type, labels=1)), recipe)
    else:
        made, kind = {
            "tokens": (AutoModelForTokenClassification, TOKENS),
            "questions": (AutoModelForQuestionAnswering, QUESTIONS),
        }[head]
        config = AutoConfig.for_model(
            model_type, vocab_size=60, num_labels=5 if head == "tokens" else 2, **families.SIZES[model_type]
        )
        graph = export(prepare_model(made.from_config(config).eval()), recipe, kind.outputs)
    save(graph, folder / "model.onnx", recipe.name)


def write_wide(folder: Path, recipe: str, head_size: int) -> None:
    """Export a model with heads of a size that kernels take, and 48 more channels than a tile has."""
    width = {"hidden_size": 2 * head_size, "intermediate_size": 2 * head_size + 48}
    model = _new_model(recipe.partition("-int8")[0], **width, max_position_embeddings=514)
    save(export(model, adapt_recipe(load_variant(recipe), backend="cuda")), folder / "model.onnx", recipe)
