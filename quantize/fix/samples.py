"""Samples of a task as inputs of an ONNX file."""

import numpy as np

from qdqbench.quantize.core.arrays import Array
from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.encoders.load import load_tokenizer
from qdqbench.quantize.kinds.encoded import pad
from qdqbench.quantize.tasks.rows import iter_encoded, load_split
from qdqbench.quantize.tasks.task import Task

TOKENS = 128  # of a sample at most


def sample_feeds(  # noqa: PLR0913, PLR0917
    model: str, revision: str | None, task: Task, source: str, count: int, seed: int
) -> dict[str, Array]:
    """Token inputs int64 [count, L], padded to the longest, of a draw of the train split.

    Args:
        model: folder or hub id with a tokenizer.
        source: as `load_split` takes it.

    Raises:
        UserError: no tokenizer or data, or a task whose samples have several rows.
    """
    if task.kind.texts_apart or task.kind.windows:
        raise UserError(f"samples of task {task.name} have several rows; give --inputs FILE.npz")
    tokenizer = load_tokenizer(model, revision, task.kind)
    split = load_split(task, source, "train", limit=count, seed=seed, labelled=False)
    rows = [sample[:3] for sample in iter_encoded(split, task, tokenizer, TOKENS)]
    _, batch = pad(rows, int(tokenizer.pad_token_id or 0))
    return {name: np.asarray(value) for name, value in batch.items()}
