"""The attention that can be quantized is transformers' own eager attention, in every family."""

import copy

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from qdqbench.quantize.calibration.fakequant.quantizers import forward
from qdqbench.quantize.graph.export import trace
from qdqbench.quantize.graph.index import GraphIndex
from qdqbench.quantize.graph.precision import to_fp16
from qdqbench.quantize.models.attention import MASK_FILL, make_additive_mask
from qdqbench.quantize.models.families.known import FAMILIES
from qdqbench.quantize.models.inputs import select_inputs
from qdqbench.quantize.models.load import load_model, prepare_model

from ...support.families import SIZES, write_model
from ...support.tiny_bert import padded_batch, run_onnx
from ...support.tiny_modernbert import WINDOW, new_modernbert

MODEL_TYPES = [name for family in FAMILIES for name in family.model_types]
WINDOW_LENGTHS = (1, 3, 2 * WINDOW, 40, 128)


def batch(pad_id, *, left):
    """Random tokens [3, 16], padded behind or before."""
    made = padded_batch((9, 1, 16))
    made["input_ids"][made["attention_mask"] == 0] = pad_id
    return {name: torch.from_numpy(array[:, ::-1].copy() if left else array) for name, array in made.items()}


def test_every_model_type_has_a_tiny_model():
    missing = set(MODEL_TYPES) - set(SIZES)
    assert not missing, f"add {missing} to tests/support/sizes.yaml"


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_logits_are_those_of_eager_attention(model_type, tmp_path):
    write_model(tmp_path, model_type)
    own = load_model(str(tmp_path))
    eager = AutoModelForSequenceClassification.from_pretrained(tmp_path, attn_implementation="eager").eval()
    pad_id = own.config.pad_token_id
    # padding before: the first token is what the head reads, and there DeBERTa attends to nothing
    for left in (False,) if model_type == "deberta-v2" else (False, True):
        inputs = select_inputs(own, batch(pad_id, left=left))
        with torch.no_grad():
            found, wanted = own(**inputs).logits, eager(**inputs).logits
        assert wanted.std(dim=0).max() > 0.1  # random weights answer each sample otherwise
        assert (found - wanted).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("seen", [[1, 1, 0], [True, True, False]])
def test_what_is_not_seen_is_filled_and_the_rest_is_not_moved(seen, dtype):
    added = make_additive_mask(torch.tensor(seen), dtype)
    assert torch.equal(added, torch.tensor([0.0, 0.0, MASK_FILL], dtype=dtype))
    assert (added + torch.tensor(0.1875, dtype=dtype))[0] == 0.1875


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_graph_chooses_its_mask_and_never_multiplies_by_it(model_type, tmp_path):
    """OpenVINO takes (1 - mask) * c for a dequantization."""
    graph = trace(load_model(str(write_model(tmp_path, model_type))), 20)
    index = GraphIndex(graph)
    filled = set()
    for node in graph.graph.node:
        constants = [index.constant(name) for name in node.input]
        if any(each is not None and each.size == 1 and each == MASK_FILL for each in constants):
            filled.add(node.op_type)
    assert filled == {"Where"}


def batch_of(length):
    """Padded to less and to more than the window."""
    return padded_batch((length, max(1, length // 2), max(1, length - 2)), seed=length)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_a_window_is_that_of_transformers(pooling):
    model = new_modernbert(pooling=pooling)
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    ours = prepare_model(model)
    for length in WINDOW_LENGTHS:
        batch = select_inputs(ours, batch_of(length))
        np.testing.assert_allclose(forward(ours, batch), forward(eager, batch), atol=1e-4)
        batch.pop("attention_mask")
        np.testing.assert_allclose(forward(ours, batch), forward(eager, batch), atol=1e-4)


@pytest.mark.parametrize(("compute", "limit"), [("fp32", 1e-4), ("fp16", 0.02)])
def test_a_graph_has_the_window_and_the_angles_at_every_length(compute, limit):
    model = prepare_model(new_modernbert())
    graph = trace(model, 20)
    if compute == "fp16":
        to_fp16(graph)  # angles that were FP16 would be off by 0.06 at position 127
    for length in WINDOW_LENGTHS:
        batch = select_inputs(model, batch_of(length))
        np.testing.assert_allclose(run_onnx(graph, batch), forward(model, batch), atol=limit)
