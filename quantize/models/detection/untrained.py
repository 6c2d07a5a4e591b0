"""A model of any type from its configuration alone: its own modules with random weights, on the CPU."""

import inspect
from typing import TYPE_CHECKING, Any

from qdqbench.quantize.models.families.known import BERT
from qdqbench.quantize.models.identity import explain_load_errors, model_commit, read_config
from qdqbench.quantize.tasks.types.classification import CLASSIFICATION
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.system.quiet import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS = BERT.inputs[0]


def read_model_config(name: str, revision: str | None = None) -> Any:
    """Read the configuration of a model, from a folder or a hub id.

    Raises:
        UserError: there is none, or transformers does not know its type.
    """
    with quiet("transformers"), explain_load_errors(name):
        return read_config(name, model_commit(name, revision))


def create_untrained(name: str, config: Any) -> "PreTrainedModel":
    """Create an encoder of the configuration's own class, with a classifier where that has no head.

    No file is read, and no code but that of transformers is run.

    Raises:
        UserError: quantized weights, an encoder with a decoder, or a model that does not read tokens.
    """
    what = f"model {name} is a {config.model_type!r}"
    if quantized := getattr(config, "quantization_config", None):
        method = dict(quantized).get("quant_method", "an unknown method")
        raise UserError(
            f"{what} whose weights are quantized already ({method}); give the model it was made of"
        )
    if config.is_encoder_decoder:
        raise UserError(f"{what}, an encoder with a decoder; only encoders are supported")
    with quiet("transformers"), explain_load_errors(name):
        model = _find_class(config)._from_config(config, attn_implementation="eager").eval()
    if TOKENS not in inspect.signature(model.forward).parameters:
        raise UserError(f"{what}, which does not read {TOKENS}; only encoders of text are supported")
    if model.config.pad_token_id is None:
        model.config.pad_token_id = 0  # some classifiers look for the last token that is none
    return model  # type: ignore[no-any-return]


def _find_class(config: Any) -> Any:
    """Return the class that config.json names, with a head; else the type's classifier or encoder."""
    import transformers

    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if "For" in name and found is not None and issubclass(found, transformers.PreTrainedModel):
            return found
    heads = getattr(transformers, CLASSIFICATION.model_class)._model_mapping
    mapping = heads if type(config) in heads else transformers.AutoModel._model_mapping
    if type(config) not in mapping:
        raise UserError(f"transformers has no model for the type {config.model_type!r}")
    return mapping[type(config)]
