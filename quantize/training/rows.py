"""Training rows: the part held out to judge a run, and batches that any number of processes agree on."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from qdqbench.quantize.recipe.training import Training
from qdqbench.quantize.tasks.types.encoded import Encoded, IndexedBatch
from qdqbench.quantize.utils.arrays import Int64
from qdqbench.quantize.utils.errors import UserError

MOST_HELD_OUT = 1000
POOL = 32  # batches whose samples are sorted by length together


@dataclass(frozen=True)
class TrainingData:
    """A tokenized train split, and which of its rows teach and which judge."""

    encoded: Encoded
    pad_id: int
    rows: Int64  # to learn from
    held_out: Int64  # samples to judge on; never learned from

    @cached_property
    def judged(self) -> Encoded:
        """The held-out samples."""
        return self.encoded.part(self.held_out)

    def batch(self, rows: Int64) -> IndexedBatch:
        """Return the rows and their padded tokens, int64 [B] and [B, L]."""
        return self.encoded.batch(rows.tolist(), self.pad_id)


def divide(encoded: Encoded, pad_id: int, share: float, seed: int) -> TrainingData:
    """Hold out a seeded draw of a share of the samples, at most `MOST_HELD_OUT`.

    Raises:
        UserError: too few rows.
    """
    count = len(encoded.gold)
    held = min(round(count * share), MOST_HELD_OUT)
    if held < 2 or count - held < 2:
        raise UserError(
            f"the train split has {count} samples, of which {held} would be held out to judge the training; "
            "give a larger split or a larger holdout"
        )
    order = np.random.default_rng([seed, 0]).permutation(count)
    return TrainingData(encoded, pad_id, encoded.rows_of(np.sort(order[held:])), np.sort(order[:held]))


def epoch_batches(data: TrainingData, batch_size: int, seed: int, epoch: int) -> list[Int64]:
    """Return the rows of every global batch of an epoch, int64 [batch_size]; the last may be shorter.

    A function of the seed and the epoch alone, so that a resumed run, and one on more GPUs, sees the same
    batches. Samples of like length share a batch, which keeps padding small; the order of batches is random.
    """
    generator = np.random.default_rng([seed, 1, epoch])
    order = generator.permutation(data.rows)
    lengths = data.encoded.lengths
    pools = [order[start : start + POOL * batch_size] for start in range(0, len(order), POOL * batch_size)]
    ranked = np.concatenate([pool[np.argsort(-lengths[pool], kind="stable")] for pool in pools])
    batches = [ranked[start : start + batch_size] for start in range(0, len(ranked), batch_size)]
    return [batches[index] for index in generator.permutation(len(batches))]


def split_batch(rows: Int64, rank: int, world: int, accumulate: int) -> list[Int64]:
    """Split a global batch into parts for one process before it steps; none of them is empty.

    Every process has at least one row: where the batch is too short for all, the others get its first row,
    which then must not count.
    """
    mine = rows[rank::world] if rank < len(rows) else rows[:1]
    return [part for part in np.array_split(mine, accumulate) if len(part)]


def steps_per_epoch(data: TrainingData, batch_size: int) -> int:
    """Return the optimizer steps of a whole epoch."""
    return -(-len(data.rows) // batch_size)


def total_steps(data: TrainingData, settings: Training) -> int:
    """Return the optimizer steps of a run."""
    steps = max(1, round(settings.epochs * -(-len(data.rows) // settings.batch_size)))
    return min(steps, settings.max_steps or steps)


def evaluation_steps(steps: int, evaluations: int) -> set[int]:
    """Steps after which the model is judged: evenly spread, the last one included."""
    count = min(evaluations, steps)
    return {round(steps * (number + 1) / count) for number in range(count)}
