"""An embedder's engine, or its FP32 graph, as an encoder of the MTEB benchmark."""

from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer

from qdqbench.quantize.deployment.opened import Answering
from qdqbench.quantize.standalone.model import Model
from qdqbench.quantize.utils.arrays import Float32
from qdqbench.quantize.utils.errors import MissingDevice, UserError
from qdqbench.quantize.utils.names import install_command

ROWS = 32  # of a batch, at most


def mteb_encoder(run: str | Path, model: Literal["engine", "fp32"] = "engine") -> Any:
    """Return an encoder that `mteb.evaluate` takes: texts are cut as in the run, and no prompt is added.

    Args:
        run: finished run of an embedding model.
        model: "engine" (INT8) or "fp32".

    Raises:
        MissingDevice: mteb is not installed, or the run has no engine.
        UserError: the run is of another kind of model.
    """
    try:
        from mteb.models import ModelMeta
        from mteb.models.abs_encoder import AbsEncoder
    except ModuleNotFoundError as error:
        raise MissingDevice(f"this needs {error.name}; `{install_command('mteb')}`") from error
    answering = Answering.of(Path(run), fp32=model == "fp32")
    if not answering.told["kind"].startswith("embedding"):
        raise UserError(f"{run} is of {answering.told['kind']}; MTEB takes embedding models")
    infer = answering.open_fp32() if model == "fp32" else answering.open_engine()
    embedder = Model(answering.told, Tokenizer.from_str(answering.tokenizer), infer, ROWS)

    class RunEncoder(AbsEncoder):  # type: ignore[misc]  # without types
        mteb_model_meta = ModelMeta.create_empty({"name": f"qdqbench/{Path(run).resolve().name}-{model}"})

        def encode(self, inputs: Any, **_: Any) -> Float32:
            texts = [text for batch in inputs for text in batch["text"]]
            return np.array([each["embedding"] for each in embedder.predict(texts, prompt="")])

    return RunEncoder()
