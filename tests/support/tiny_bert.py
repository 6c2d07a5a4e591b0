"""A tiny random BERT classifier with its tokenizer on disk, batches for it, and its path to ONNX."""

import functools
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper

from qdqbench.eval.metrics.runners import session_of
from qdqbench.quantize.calibration import ptq
from qdqbench.quantize.calibration import record as calibration
from qdqbench.quantize.calibration.fakequant.quantizers import forward
from qdqbench.quantize.graph import export
from qdqbench.quantize.models.load import load_model
from qdqbench.quantize.models.modules import ModuleInfo, module_table
from qdqbench.quantize.recipe.plan import Plan, resolve
from qdqbench.quantize.recipe.schema import Recipe, load_recipe
from qdqbench.quantize.utils.system.quiet import quiet

LAYERS, HIDDEN, HEADS, INTERMEDIATE = 2, 32, 2, 64
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCABULARY = [*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS), ".", ",", "!"]
OF_A_LAYER = (
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "attention.output.dense",
    "intermediate.dense",
    "output.dense",
)
LINEARS = [f"bert.encoder.layer.{layer}.{name}" for layer in range(LAYERS) for name in OF_A_LAYER]
ATTENTIONS = [f"bert.encoder.layer.{layer}.attention.self" for layer in range(LAYERS)]
INT8 = {"weights": "int8/per-channel", "input": "int8/per-tensor"}
EVERY = {"match": "encoder.layer.*", "type": "Linear"} | INT8  # a rule
INT8_ATTENTION = {"attention": "int8", "precision": {"never_quantize": ["layernorm"]}}
Batch = dict[str, npt.NDArray[np.int64]]


def fake_modules(layers, head_size):
    """What `module_table` gives for a BERT classifier."""
    found = {"": ModuleInfo("other"), "bert.embeddings.word_embeddings": ModuleInfo("Embedding")}
    for layer in range(layers):
        here = f"bert.encoder.layer.{layer}"
        found[f"{here}.attention.self"] = ModuleInfo("Attention", head_size)
        found[f"{here}.attention.self.softmax"] = ModuleInfo("Softmax")
        found |= {f"{here}.{name}": ModuleInfo("Linear") for name in OF_A_LAYER}
        for name in ("attention.output", "output"):
            found[f"{here}.{name}"] = ModuleInfo("Residual")
            found[f"{here}.{name}.LayerNorm"] = ModuleInfo("LayerNorm")
    return found | {"bert.pooler.dense": ModuleInfo("Linear"), "classifier": ModuleInfo("Linear")}


class Quantized(NamedTuple):
    """A calibrated fake-quant model; shared by tests, so never changed."""

    model: Any
    plan: Plan
    record: calibration.CalibrationRecord


def new_bert(*, heads=HEADS, labels=3):
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        intermediate_size=INTERMEDIATE,
        max_position_embeddings=128,
        num_labels=labels,
    )
    return widen(BertForSequenceClassification(config))


def widen(model, seed=0):
    """The model with random weights wide enough that every layer matters to the logits, biases included."""
    import torch

    norms = {id(each.weight) for each in model.modules() if isinstance(each, torch.nn.LayerNorm)}
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in model.parameters():
            noise = torch.randn(value.shape, generator=generator)
            value.copy_(1 + 0.1 * noise if id(value) in norms else 0.2 * noise)
    return model


def write_tiny_bert(folder, model=None):
    """Save a model (by default a new one) and the tokenizer."""
    from transformers import BertTokenizer

    with quiet("transformers"):
        (model or new_bert()).save_pretrained(folder)
    vocabulary = {piece: index for index, piece in enumerate(VOCABULARY)}
    BertTokenizer(vocab=vocabulary, model_max_length=128).save_pretrained(folder)
    return folder


def padded_batch(lengths=(9, 4, 16), seed=0):
    """Random tokens [B, longest]; padding is at the end and of id 0."""
    rng = np.random.default_rng(seed)
    mask = (np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(np.int64)
    ids = rng.integers(len(SPECIAL), len(VOCABULARY), mask.shape) * mask
    types = (np.arange(max(lengths)) >= 3) * mask
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}


def calibration_batches():
    """Batches of equal length, as calibration gets them."""
    return [padded_batch((length,) * 8, seed=length) for length in (5, 12, 16)]


def recipe_with(name="bert-int8-linears", **changes):
    """A shipped recipe with max calibration and nothing more, and with some top-level keys replaced."""
    plain = {"calibration": {"softmax_scale": "fixed"}}
    return Recipe.model_validate(load_recipe(name).model_dump(mode="json") | plain | changes)


def one_scale(*parts):
    """Rules that give linears of the attention, such as "query", one weight scale."""
    one = {"type": "Linear", "weights": "int8/per-tensor", "input": "int8/per-tensor"}
    return [{"match": f"*.self.{part}"} | one for part in parts]


def plan_of(recipe, model):
    return resolve(recipe, module_table(model), model.base_model_prefix)


def calibrate_model(model, recipe, batches=None):
    """A model that becomes a fake-quant one, in place."""
    plan = plan_of(recipe, model)
    record = ptq.calibrate(model, plan, batches or calibration_batches(), recipe.calibration)
    return Quantized(model, plan, record)


def calibrate(folder, recipe):
    """A fresh fake-quant model."""
    return calibrate_model(load_model(str(folder)), recipe)


@contextmanager
def watched(model, names, *, inputs=False):
    """Outputs, or first inputs, of modules for each of their calls in the block, by name."""
    found = {name: [] for name in names}

    def keep(name, _, given, made=None):
        value = given if inputs else made
        found[name].append(value[0] if isinstance(value, tuple) else value)

    with ExitStack() as hooks:
        for name in found:
            module = model.get_submodule(name)
            register = module.register_forward_pre_hook if inputs else module.register_forward_hook
            hooks.enter_context(register(functools.partial(keep, name)))
        yield found


def values_in(model, names, batches=None, **how):
    """What is `watched` while batches, by default those of calibration, go through a model."""
    with watched(model, names, **how) as found:
        for batch in batches or calibration_batches():
            forward(model, batch)
    return found


def restored(made, model):
    """A model that becomes the fake-quant one by its record, as JSON; held to have its every bit."""
    ptq.restore(model, made.plan, type(made.record).model_validate_json(made.record.model_dump_json()))
    assert_same_state(made.model, model)
    for batch in (padded_batch(), padded_batch((12, 5), seed=4)):
        assert forward(made.model, batch).equal(forward(model, batch))
    return model


def assert_same_state(one, other):
    ours, theirs = one.state_dict(), other.state_dict()
    assert list(ours) == list(theirs)
    assert [name for name in ours if not ours[name].equal(theirs[name])] == []


@functools.cache
def quantized(folder, name="bert-int8-linears"):
    """The fake-quant model of `recipe_with(name)`, made once."""
    return calibrate(folder, recipe_with(name))


@functools.cache
def _traced(folder, name):
    return export.trace(quantized(folder, name).model, 20)


def traced(folder, name="bert-int8-linears"):
    """FP32 graph with Q/DQ as the exporter gives it; a copy, to be changed at will."""
    return copied(_traced(folder, name))


@functools.cache
def _exported(folder, name, compute, weights):
    settings = export.ExportSettings(20, compute, weights)
    return export.finish_graph(_traced(folder, name), quantized(folder, name).plan, settings)


def exported(folder, name="bert-int8-linears", compute="fp16", weights="channel"):
    """The finished graph of a shipped recipe; a copy, to be changed at will."""
    return copied(_exported(folder, name, compute, weights))


def exported_of(model, plan, weights, compute="fp32"):
    """The finished graph of a fake-quant model."""
    settings = export.ExportSettings(20, compute, weights)
    return export.finish_graph(export.trace(model, 20), plan, settings)


def twin(folder, compute="fp16", weights="factored"):
    """The finished graph of the model without quantizers."""
    model = load_model(str(folder))
    return exported_of(model, plan_of(recipe_with(), model), weights, compute)


def copied(model):
    twin = onnx.ModelProto()
    twin.CopyFrom(model)
    return twin


def tensor(model, name):
    """An initializer as a writable array."""
    stored = next(t for t in model.graph.initializer if t.name == name)
    found = numpy_helper.to_array(stored)
    return found.copy()


def run_onnx(model, feeds):
    """First output on ONNX Runtime without optimizations, as the product runs it."""
    return np.asarray(session_of(model.SerializeToString(), "the test's graph").run(None, feeds)[0])
