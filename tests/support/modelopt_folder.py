"""A fake-quant model read from ModelOpt's own files, with the quantizers that ModelOpt does not know."""

import contextlib
import io

from qdqbench.quantize.calibration.fakequant import quantizers
from qdqbench.quantize.models.load import prepare_model
from qdqbench.quantize.training.loop import WEIGHTS
from qdqbench.quantize.training.student import STATE


def load_modelopt(folder):
    """The model of `save_modelopt`, in FP32 and eval mode."""
    from modelopt.torch.opt.conversion import (
        ModeloptStateManager,
        load_modelopt_state,
        restore_from_modelopt_state,
    )
    from safetensors.torch import load_file
    from transformers import AutoModelForSequenceClassification

    quantizers.import_modelopt()  # its modes
    state = load_modelopt_state(folder / STATE)
    # `load_model` refuses its quantizers' tensors, which transformers leaves unread
    model = prepare_model(AutoModelForSequenceClassification.from_pretrained(folder))
    modes = [mode for _, mode in state["modelopt_state_dict"]]
    names = [name for mode in modes for name in mode.get("metadata", {}).get("quantizer_state", {})]
    residuals = [name for name in names if name.endswith(quantizers.RESIDUAL_QUANTIZER)]
    if not ModeloptStateManager.is_converted(model):  # it is where transformers was patched
        with contextlib.redirect_stdout(io.StringIO()), quantizers.register_residuals(model, residuals):
            restore_from_modelopt_state(model, state)
    model.load_state_dict(load_file(folder / WEIGHTS))
    return model
