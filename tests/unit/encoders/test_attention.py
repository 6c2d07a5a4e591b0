"""The attention that can be quantized is transformers' own eager attention, in every family."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qdqbench.quantize.encoders.inputs import inputs_of
from qdqbench.quantize.encoders.load import load_model
from qdqbench.quantize.families.known import FAMILIES

from ...support.families import SIZES, VOCABULARY, write_model

MODEL_TYPES = [name for family in FAMILIES for name in family.model_types]
LENGTHS = (9, 1, 16)


def batch(pad_id: int, *, left: bool) -> dict[str, Any]:
    """Random tokens [3, 16], padded behind or before."""
    import torch

    rng = np.random.default_rng(0)
    mask = np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]
    ids = np.where(mask, rng.integers(6, len(VOCABULARY), mask.shape), pad_id)
    types = (np.arange(max(LENGTHS)) >= 3) & mask
    made = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
    step = -1 if left else 1
    return {name: torch.from_numpy(array[:, ::step].astype(np.int64)) for name, array in made.items()}


def test_every_model_type_has_a_tiny_model() -> None:
    missing = set(MODEL_TYPES) - set(SIZES)
    assert not missing, f"add {missing} to SIZES of tests/support/families.py"


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_logits_are_those_of_eager_attention(model_type: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification

    write_model(tmp_path, model_type)
    own = load_model(str(tmp_path))
    eager = AutoModelForSequenceClassification.from_pretrained(tmp_path, attn_implementation="eager").eval()
    pad_id = own.config.pad_token_id
    for left in (False, True):
        inputs = inputs_of(own, batch(pad_id, left=left))
        with torch.no_grad():
            found, wanted = own(**inputs).logits, eager(**inputs).logits
        assert wanted.std(dim=0).max() > 0.1  # random weights answer each sample otherwise
        assert (found - wanted).abs().max() < 1e-4
