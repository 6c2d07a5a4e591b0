"""A tiny random BERT classifier with its tokenizer on disk, and batches for it."""

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper
from pathlib import Path
from typing import Any

from qdqbench.quantize import export, ptq
from qdqbench.quantize.matching import Plan, resolve
from qdqbench.quantize.models import load_model, module_table
from qdqbench.quantize.recipe import Calibration, Recipe, load_recipe

LAYERS, HIDDEN, HEADS, INTERMEDIATE = 2, 32, 2, 64
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCABULARY = [*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS), ".", ",", "!"]
LINEARS = [
    f"bert.encoder.layer.{layer}.{name}"
    for layer in range(LAYERS)
    for name in (
        "attention.self.query",
        "attention.self.key",
        "attention.self.value",
        "attention.output.dense",
        "intermediate.dense",
        "output.dense",
    )
]
ATTENTIONS = [f"bert.encoder.layer.{layer}.attention.self" for layer in range(LAYERS)]
Batch = dict[str, npt.NDArray[np.int64]]


def write_tiny_bert(folder: Path, *, heads: int = HEADS, labels: int = 3) -> Path:
    """Random weights wide enough that every layer matters to the logits, biases included."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

    config = BertConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        intermediate_size=INTERMEDIATE,
        max_position_embeddings=128,
        num_labels=labels,
    )
    generator = torch.Generator().manual_seed(0)
    model = BertForSequenceClassification(config)
    with torch.no_grad():
        for name, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            value.copy_(1 + 0.1 * noise if name.endswith("LayerNorm.weight") else 0.2 * noise)
    model.save_pretrained(folder)
    BertTokenizer(vocab={p: i for i, p in enumerate(VOCABULARY)}, model_max_length=128).save_pretrained(folder)
    return folder


def padded_batch(lengths: tuple[int, ...] = (9, 4, 16), seed: int = 0) -> Batch:
    """Random tokens [B, longest]; padding is at the end and of id 0."""
    rng = np.random.default_rng(seed)
    mask = (np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(np.int64)
    ids = rng.integers(len(SPECIAL), len(VOCABULARY), mask.shape) * mask
    types = (np.arange(max(lengths)) >= 3) * mask
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}


def calibration_batches() -> list[Batch]:
    """Batches of equal length, as calibration gets them."""
    return [padded_batch((length,) * 8, seed=length) for length in (5, 12, 16)]


def recipe_with(name: str = "bert-int8-linears", **changes: Any) -> Recipe:
    """A shipped recipe with some top-level keys replaced."""
    return Recipe.model_validate(load_recipe(name).model_dump(mode="json") | changes)


def plan_of(recipe: Recipe, model: Any) -> Plan:
    return resolve(recipe, module_table(model), model.base_model_prefix)


def calibrated(folder: Path, recipe: Recipe) -> tuple[Any, Plan, ptq.CalibrationRecord]:
    """The fake-quant model of a recipe, its plan and its record."""
    model = load_model(str(folder))
    plan = plan_of(recipe, model)
    record = ptq.calibrate(model, plan, iter(calibration_batches()), Calibration())
    return model, plan, record


def exported(
    model: Any, plan: Plan, compute: str = "fp16", weights: str = "channel"
) -> onnx.ModelProto:
    return export.finish(
        export.trace(model, 20), plan, export.ExportSettings(20, compute, weights)  # type: ignore[arg-type]
    )


def initializer(model: onnx.ModelProto, name: str) -> npt.NDArray[Any]:
    return numpy_helper.to_array(next(t for t in model.graph.initializer if t.name == name))


def run_onnx(model: onnx.ModelProto, feeds: dict[str, Any]) -> npt.NDArray[np.float32]:
    """First output on ONNX Runtime without optimizations, as the product runs it."""
    from qdqbench.eval.runners import session_of

    return np.asarray(session_of(model.SerializeToString(), "the test's graph").run(None, feeds)[0])
