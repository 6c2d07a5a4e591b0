"""A task's evaluation split as the batches that every system of a bench runs.

On a GPU kernels are made for shapes, so each batch is padded to one of a few lengths, and the rows of a
bucket are shared out evenly. Some batches hold a copy of a row, so that a bucket is one shape: a profile, a
CUDA graph and a compilation each. On a CPU, whose kernels take every shape, a batch is as long as its longest
row, rounded up so that shapes repeat.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qdqbench.eval.bench.target import Target
from qdqbench.quantize.engine.profiles import choose_edges
from qdqbench.quantize.models.inputs import pad_columns
from qdqbench.quantize.models.load import load_tokenizer
from qdqbench.quantize.pipeline.artifacts import length_edges
from qdqbench.quantize.tasks.rows import encode, load_split, sorted_batches, sorted_rows
from qdqbench.quantize.tasks.task import get_task
from qdqbench.quantize.tasks.types.encoded import Encoded
from qdqbench.quantize.utils.arrays import Batch, Int64
from qdqbench.quantize.utils.errors import UserError

PADDING_STEP = 8  # without buckets lengths are padded up to it: few shapes, and what tensor cores want


@dataclass(frozen=True)
class BatchedSplit:
    """A task's evaluation split as batches of at most so many rows."""

    task: str
    batch: int
    batches: list[Batch]  # padded
    rows: list[int]  # of each batch; what it holds beyond them are copies of its last one
    sequences: int  # of the split
    real_tokens: int
    bucketed: bool = False  # few shapes, worth kernels of their own

    @property
    def shapes(self) -> list[tuple[int, int]]:
        return list(dict.fromkeys(tuple(batch["input_ids"].shape) for batch in self.batches))

    @property
    def padded_tokens(self) -> int:
        """Return the tokens with padding and copies."""
        return sum(batch["input_ids"].size for batch in self.batches)


def batched_splits(  # noqa: PLR0913
    target: Target,
    task: str,
    *,
    batches: Sequence[int],
    data: str | None,
    tokenizer: str | None,
    buckets: bool,
) -> tuple[BatchedSplit, ...]:
    """Return the first evaluation split of a task, for each batch size.

    Args:
        target: what is measured; its own task's data and tokenizer are the default in a run directory.
        batches: most rows of a batch.
        data: source of the task, as in `qdqbench run`; needed where the target has no such task.
        tokenizer: folder or hub id; needed for a built-in shape.
        buckets: pad to a few lengths: those of the run with `shapes: auto`, else those that pad least.

    Raises:
        UserError: the data or the tokenizer is not known, or the ids do not fit the model.
    """
    session, about = target.session, target.about
    own = about.kind == "run" and session.config.task.name == task
    if data is None and not own:
        raise UserError(
            f"--dataset {task} needs --data (hub or a folder): {about.name} does not have that task"
        )
    if tokenizer is None and about.kind == "shape":
        raise UserError(f"--dataset needs --tokenizer: the shape {about.name} has none")
    chosen = session.config.task if own else get_task(task)
    loaded = load_tokenizer(tokenizer) if tokenizer else session.tokenizer
    limit = session.config.limit if own else None
    split = load_split(chosen, data or session.data_source, chosen.eval_splits[0], limit=limit)
    longest = session.recipe.export.max_length
    encoded = encode(split, chosen, loaded, longest)
    largest = max(int(ids.max()) for ids in encoded.input_ids)
    if largest >= (count := about.shape["vocabulary"]):
        raise UserError(f"the tokenizer gives id {largest}, but {about.name} has {count} ids; give its own")
    edges = _edges(target, encoded.lengths, longest) if buckets else None
    splits, tokens = [], int(encoded.lengths.sum())
    for size in batches:
        rows, padded = _batches(encoded, size, edges, longest, int(loaded.pad_token_id))
        inputs = [{name: batch[name] for name in target.family.inputs} for batch in padded]
        splits.append(BatchedSplit(chosen.name, size, inputs, rows, encoded.rows, tokens, bucketed=buckets))
    return tuple(splits)


def _edges(target: Target, lengths: Int64, longest: int) -> list[int]:
    if target.about.kind == "run" and (known := length_edges(target.session)):
        return known if known[-1] == longest else [*known, longest]  # what is longer has a profile, too
    shortest = min((each.length[0] for each in target.session.recipe.engine.profiles), default=1)
    return choose_edges(np.maximum(lengths, shortest), longest)


def _batches(
    encoded: Encoded, size: int, edges: Sequence[int] | None, longest: int, pad_id: int
) -> tuple[list[int], list[Batch]]:
    """Return how many rows each batch has, and batches padded to their length, the longest first.

    Batches of a bucket have one shape.
    """
    indexed = list(sorted_batches(encoded, size, pad_id=pad_id, edges=edges))
    rows, batches = [len(index) for index, _ in indexed], [batch for _, batch in indexed]
    if edges is None:
        own = (batch["input_ids"].shape[1] for batch in batches)
        lengths = [min(-(-length // PADDING_STEP) * PADDING_STEP, longest) for length in own]
    else:
        lengths = [length for length, _ in sorted_rows(encoded.lengths, size, edges)]
    return rows, [
        pad_columns(batch, length - batch["input_ids"].shape[1], pad_id)
        for length, batch in zip(lengths, batches, strict=True)
    ]
