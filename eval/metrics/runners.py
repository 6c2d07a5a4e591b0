"""The same predict function over every stage: batches in, float32 answers [answers, width] out."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from qdqbench.quantize.calibration.fakequant.quantizers import forward
from qdqbench.quantize.tasks.data.encode import sorted_batches
from qdqbench.quantize.tasks.kinds.encoded import Encoded
from qdqbench.quantize.tasks.kinds.kind import join_outputs
from qdqbench.quantize.utils.arrays import Batch, Float32, Int64
from qdqbench.quantize.utils.errors import CheckFailed, UserError
from qdqbench.quantize.utils.progress import report_phase
from qdqbench.quantize.utils.system.cpu import quota

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

Predict = Callable[[dict[str, Int64]], Float32]


def predict(  # noqa: PLR0913
    run: Predict,
    encoded: Encoded,
    *,
    pad_id: int,
    batch_size: int,
    stage: str,
    edges: Sequence[int] | None = None,
) -> Float32:
    """Return answers to a whole split [answers, width], row after row.

    Args:
        run: one batch (int64 [B, L] arrays) to float32 answers [B, width] or [B, L or more, width].
        edges: of length buckets that the runner pads to; no batch has rows of two.

    Raises:
        CheckFailed: NaN or infinite logits.
    """
    parts: list[tuple[Int64, Float32]] = []
    report_phase("answering", 0, encoded.rows)
    done = 0
    for rows, batch in sorted_batches(encoded, batch_size, pad_id=pad_id, edges=edges):
        parts.append((rows, encoded.kept(rows, run(batch)[: len(rows)])))
        done += len(rows)
        report_phase("answering", done, encoded.rows)
    answers = np.empty((encoded.answers.sum(), parts[0][1].shape[1]), dtype=np.float32)
    for rows, values in parts:
        answers[encoded.answers_of(rows)] = values
    bad = int((~np.isfinite(answers)).any(axis=1).sum())
    if bad:
        what = "samples" if encoded.positions is None else "tokens"
        raise CheckFailed(
            f"stage {stage} gives NaN or infinite logits for {bad} of {len(answers)} {what}; run "
            f"`qdqbench check` on the ONNX file (overflow in FP16 is the usual cause)"
        )
    return answers


def torch_runner(model: "PreTrainedModel") -> Predict:
    return lambda batch: forward(model, batch).float().cpu().numpy()


@contextmanager
def evaluating(model: "PreTrainedModel") -> Iterator["PreTrainedModel"]:
    """Move the model to torch's GPU for the block, where there is one; weights are rounded once."""
    placed(model)
    try:
        if any(name.endswith("weight_quantizer") for name, _ in model.named_modules()):
            from qdqbench.quantize.calibration.fakequant.native import use_frozen_weights

            with use_frozen_weights(model):
                yield model
        else:
            yield model
    finally:
        cast("Any", model).to("cpu")


def placed(model: "PreTrainedModel") -> "PreTrainedModel":
    return model if (device := gpu()) is None else cast("Any", model).to(device)


def gpu() -> "torch.device | None":
    import torch

    return torch.device("cuda") if torch.cuda.is_available() else None


def onnxruntime_runner(path: Path) -> Predict:
    """Run an ONNX file on ONNX Runtime's CPU provider as exported.

    Graph optimizations would replace Q/DQ by integer kernels with other roundings.
    """
    session = session_of(path.read_bytes(), str(path))
    taken, names = (
        [each.name for each in values] for values in (session.get_inputs(), session.get_outputs())
    )

    def run(batch: Batch) -> Float32:
        made = dict(zip(names, session.run(names, {name: batch[name] for name in taken}), strict=True))
        return np.asarray(join_outputs(made, names), dtype=np.float32)

    return run


def session_of(model: bytes, name: str) -> Any:
    """Return the ONNX Runtime CPU session of a serialized model, without graph optimizations.

    Raises:
        UserError: ONNX Runtime refuses the model.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # as machine/process.py
    options.intra_op_num_threads = quota() or 0  # 0: as many as it chooses
    try:
        return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise UserError(f"ONNX Runtime refuses {name}: {' '.join(str(error).split())[:300]}") from error
