"""ModernBERT with and without biases, deeper than that of `families`, and in INT8."""

from qdqbench.quantize.models.load import prepare_model

from .families import SIZES, new_model
from .tiny_bert import calibrate_model, recipe_with

WINDOW = SIZES["modernbert"]["local_attention"] // 2  # tokens to each side, of layers 1 and 2 of 4


def new_modernbert(*, biases=False, pooling="mean"):
    """Random weights; layers 0 and 3 attend to every token."""
    fields = {"norm_bias": biases, "attention_bias": biases, "mlp_bias": biases}
    return new_model("modernbert", labels=3, num_hidden_layers=4, classifier_pooling=pooling, **fields)


def quantized(model, *, attention=False, **calibration):
    """A model in INT8, changed in place, with max calibration and what is given."""
    name = f"modernbert-int8-{'attention' if attention else 'linears'}"
    return calibrate_model(prepare_model(model), recipe_with(name, calibration=calibration))
