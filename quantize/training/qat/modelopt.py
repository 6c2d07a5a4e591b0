"""A fake-quant model in ModelOpt's own files, for users of ModelOpt.

What `mto.enable_huggingface_checkpointing()` and `save_pretrained` write: config.json, model.safetensors
with the quantizers' buffers (weights hold the factors of smoothing), and modelopt_state.pth, which says
where quantizers are. transformers is not patched for that. A script without qdqbench loads the folder with

    import modelopt.torch.opt as mto
    from transformers import AutoModelForSequenceClassification
    mto.enable_huggingface_checkpointing()
    model = AutoModelForSequenceClassification.from_pretrained(folder)

and has every scale. It computes the same up to rounding if the recipe leaves attention in FP16, with any
attention of transformers (`attn_implementation`). INT8 attention needs `load_modelopt`: ModelOpt itself
ignores an INT8 quantizer on the softmax output. So does an INT8 residual, as ModelOpt refuses a state with
quantizers in modules that it does not know.
"""

import contextlib
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qdqbench.quantize.calibration.fakequant import residual
from qdqbench.quantize.calibration.fakequant.quantizers import enabled_quantizers, import_modelopt
from qdqbench.quantize.models.load import load_model
from qdqbench.quantize.training.checkpoints import WEIGHTS
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.system.quiet import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STATE = "modelopt_state.pth"


def save_modelopt(model: "PreTrainedModel", folder: Path) -> None:
    """Write a calibrated fake-quant model as ModelOpt does; after `settle` where it was trained.

    Raises:
        RuntimeError: its quantizers are those of training.
    """
    import torch
    from modelopt.torch.opt import modelopt_state
    from modelopt.torch.utils.serialization import safe_save

    from qdqbench.quantize.calibration.fakequant.native import BACKEND

    if any(quantizer.backend == BACKEND for quantizer in enabled_quantizers(model).values()):
        raise RuntimeError("the model computes as in training; settle(model) before it is saved")
    with quiet("transformers"):
        model.save_pretrained(folder)
    with torch.no_grad():
        safe_save(modelopt_state(model), folder / STATE)


def load_modelopt(folder: Path) -> "PreTrainedModel":
    """The fake-quant model that `save_modelopt` wrote, in FP32 and eval mode: every bit as it was saved.

    Runs no code from the files: the state is read with `weights_only`.

    Raises:
        UserError: not such a folder, or damaged.
    """
    from modelopt.torch.opt.conversion import ModeloptStateManager, restore_from_modelopt_state
    from safetensors.torch import load_file

    state = _read_state(folder / STATE)
    model = load_model(str(folder))
    names = [name for name in _quantizers(state) if name.endswith(residual.QUANTIZER)]
    try:
        if not ModeloptStateManager.is_converted(model):  # it is where transformers was patched
            with (
                contextlib.redirect_stdout(io.StringIO()),
                residual.registered(model, names),
            ):
                restore_from_modelopt_state(model, state)
        model.load_state_dict(load_file(folder / WEIGHTS))
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"{folder / STATE} and {WEIGHTS} are not of one model: {type(error).__name__}: {reason}"
        ) from error
    return model


def _read_state(path: Path) -> dict[str, Any]:
    from modelopt.torch.opt.conversion import load_modelopt_state

    if not path.is_file():
        raise UserError(f"{path} does not exist; give a folder that holds a model saved by ModelOpt")
    import_modelopt()  # its modes
    try:
        state: dict[str, Any] = load_modelopt_state(path)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path} is not a ModelOpt state: {type(error).__name__}: {reason}") from error
    return state


def _quantizers(state: dict[str, Any]) -> list[str]:
    """Full names of the quantizers in a state."""
    return [
        name
        for _, mode in state["modelopt_state_dict"]
        for name in mode.get("metadata", {}).get("quantizer_state", {})
    ]
