"""An embedder's engine, or its FP32 graph, as an encoder of the MTEB benchmark."""

from pathlib import Path
from typing import Any

import numpy as np

from qdqbench.quantize.deployment.server.served import open_served
from qdqbench.quantize.deployment.server.settings import ModelName
from qdqbench.quantize.tasks.types.encoded import pad
from qdqbench.quantize.utils.arrays import Float32
from qdqbench.quantize.utils.errors import MissingDevice, UserError
from qdqbench.quantize.utils.names import install_command

ROWS = 32  # of a batch, at most


def mteb_encoder(run: str | Path, model: ModelName = "engine") -> Any:
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
    served = open_served(Path(run), fp32=model == "fp32")
    if not served.task.kind.embeds:
        raise UserError(f"{run} is of {served.task.kind.name}; MTEB takes embedding models")
    infer, sizes = served.open_model(model), served.sizes(model, ROWS)

    class RunEncoder(AbsEncoder):  # type: ignore[misc]  # without types
        mteb_model_meta = ModelMeta.create_empty({"name": f"qdqbench/{served.name}-{model}"})

        def encode(self, inputs: Any, **_: Any) -> Float32:
            texts = [text for batch in inputs for text in batch["text"]]
            samples = served.encode({served.task.text_columns[0]: texts}, prompt="")
            samples.sort(key=lambda sample: -len(sample.input_ids))
            parts, rows = [], list[int]()
            while len(rows) < len(samples):
                longest = len(samples[len(rows)].input_ids)
                most = next(most for length, most in sizes if length >= longest)
                part = samples[len(rows) : len(rows) + most]
                numbers, batch = pad([sample[:3] for sample in part], served.pad_id)
                parts.append(infer(batch))
                rows += numbers.tolist()
            return np.concatenate(parts)[np.argsort(rows)]

    return RunEncoder()
