"""Which batches of real samples show what an engine computes: its shapes, padding, and blocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from qdqbench.quantize.models.inputs import pad_columns
from qdqbench.quantize.utils.arrays import Array, Floats, Int64
from qdqbench.quantize.utils.errors import UserError

if TYPE_CHECKING:
    from qdqbench.eval.metrics.runners import Predict
    from qdqbench.quantize.engine.profiles import Profile
    from qdqbench.quantize.tasks.types.encoded import Encoded

BLOCK_SAMPLES = 32


@dataclass
class InputCase:
    """One batch to run: samples, and the length that they are padded to."""

    what: str
    rows: list[int]  # samples; repeated where the data has fewer than the batch
    length: int


def widest(profiles: "Sequence[Profile]") -> "Profile":
    """The profile that takes the longest samples, and of those the largest batch."""
    return max(profiles, key=lambda profile: (profile.max[1], profile.max[0]))


def shape_cases(lengths: Int64, profiles: "Sequence[Profile]", seed: int) -> list[InputCase]:
    """Batches at each corner of the profiles, padded and of equal lengths, and the shortest and longest."""
    random = np.random.default_rng(seed)
    cases: dict[tuple[str, int, int], InputCase] = {}

    def add(what: str, rows: Array, batch: int, length: int) -> None:
        chosen = np.resize(random.permutation(rows), batch).tolist()
        cases.setdefault((what, batch, length), InputCase(what, chosen, length))

    for profile in profiles:
        low, high = profile.min[1], profile.max[1]
        fitting = np.flatnonzero(lengths <= high)
        if not len(fitting):
            continue
        batches = dict.fromkeys((profile.min[0], profile.opt[0], profile.max[0]))
        within = lengths[fitting]
        common = np.bincount(within[within >= low], minlength=1)
        for batch in batches:
            for length in dict.fromkeys((low, profile.opt[1], high)):
                if len(rows := np.flatnonzero(lengths <= length)):
                    add("padded", rows, batch, length)
            if common.any():
                length = int(common.argmax())
                add("equal lengths", np.flatnonzero(lengths == length), batch, length)
        for what, length in (("shortest", int(within.min())), ("longest", int(within.max()))):
            add(what, np.flatnonzero(lengths == length)[:1], profile.min[0], max(low, length))
    return list(cases.values())


def fitting_samples(lengths: Int64, longest: int) -> Int64:
    """Samples that an engine takes, of at least one.

    Raises:
        UserError: all are longer.
    """
    found = np.flatnonzero(lengths <= longest)
    if not len(found):
        raise UserError(
            f"the engine takes at most {longest} tokens, and the shortest of {len(lengths)} samples has "
            f"{lengths.min()}, so none can show what it computes; raise the length of engine.shapes"
        )
    return found


def block_cases(lengths: Int64, profile: "Profile", seed: int) -> list[InputCase]:
    """Batches for the blocks: mixed lengths with the extremes, equal lengths, and the shortest sample.

    Raises:
        UserError: no sample fits the profile.
    """
    random, (low, high) = np.random.default_rng(seed), (profile.min[1], profile.max[1])
    fitting = fitting_samples(lengths, high)
    order = fitting[np.argsort(lengths[fitting], kind="stable")]
    batch = int(np.clip(BLOCK_SAMPLES, profile.min[0], profile.max[0]))
    others = random.permutation(fitting)[: max(0, batch - 2)]
    mixed = np.resize(np.unique([order[0], order[-1], *others]), batch)
    again = np.resize(random.permutation(fitting), batch)
    counts = np.bincount(lengths[fitting])
    equal = np.resize(np.flatnonzero(lengths == counts.argmax()), batch)
    alone = np.resize(order[:1], profile.min[0])
    drawn = (("padded", mixed), ("padded", again), ("equal lengths", equal), ("shortest", alone))
    return [InputCase(what, rows.tolist(), max(low, int(lengths[rows].max()))) for what, rows in drawn]


def batch_of(encoded: "Encoded", case: InputCase, pad_id: int) -> dict[str, Int64]:
    """int64 [B, L] arrays of a case."""
    _, batch = encoded.batch(case.rows, pad_id)
    return pad_columns(batch, case.length - batch["input_ids"].shape[1], pad_id)


def padding_answers(
    run: "Predict", encoded: "Encoded", rows: list[int], profiles: "Sequence[Profile]", pad_id: int
) -> Floats:
    """Answers [3, answers, width] of rows alone, alone at the longest length, and in one large batch."""
    profile = widest(profiles)
    (small, low), (large, high) = profile.min, profile.max

    def alone(row: int, length: int) -> Floats:
        made = run(batch_of(encoded, InputCase("alone", [row] * small, length), pad_id))[:1]
        answers: Floats = encoded.kept(np.array([row]), made)
        return answers

    lengths = encoded.lengths
    together = np.resize(np.array(rows), max(large, len(rows))).tolist()[:large]
    batch = run(
        batch_of(encoded, InputCase("together", together, max(low, int(lengths[together].max()))), pad_id)
    )
    rows = rows[:large]
    short = [alone(row, max(low, int(lengths[row]))) for row in rows]
    long = [alone(row, high) for row in rows]
    filled = encoded.kept(np.array(rows), batch[: len(rows)])
    return np.stack([np.concatenate(short), np.concatenate(long), filled])
