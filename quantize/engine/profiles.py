"""Optimization profiles: which one takes a shape, and whether they fit the data.

An engine's dynamic axes are batch (axis 0) and length (every other dynamic axis). This
holds for token inputs [B, L], inner tensors [B, L, H] and masks [B, 1, L, L].
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qdqbench.quantize.standalone.texts import fit_profile
from qdqbench.quantize.utils.arrays import Int64
from qdqbench.quantize.utils.errors import CheckFailed, UserError
from qdqbench.quantize.utils.schema import Strict, field

FAR_FROM_OPT = 2.0  # factor from the opt shape at which kernels are tuned for something else
LENGTH_STEP = 16  # INT8 tensor cores take 16 values at a time


@dataclass(frozen=True)
class Profile:
    """Input shapes that an engine accepts, each (batch in sequences, length in tokens)."""

    min: tuple[int, int]
    opt: tuple[int, int]
    max: tuple[int, int]

    def __post_init__(self) -> None:
        axes = zip(("batch", "length"), self.min, self.opt, self.max, strict=True)
        if wrong := [f"{name} {a}, {b}, {c}" for name, a, b, c in axes if not 1 <= a <= b <= c]:
            raise UserError(f"engine shapes must hold 1 <= min <= opt <= max, not {' and '.join(wrong)}")

    def __str__(self) -> str:
        rows = zip(("batch", "length"), self.min, self.opt, self.max, strict=True)
        return "{" + ", ".join(f"{name}: [{a}, {b}, {c}]" for name, a, b, c in rows) + "}"


def span_profiles(profiles: Sequence[Profile]) -> Profile:
    low, high = (
        [each(getattr(shapes, end)[axis] for shapes in profiles) for axis in (0, 1)]
        for end, each in (("min", min), ("max", max))
    )
    return Profile((low[0], low[1]), profiles[-1].opt, (high[0], high[1]))


def fill_shape(shape: Sequence[int], size: tuple[int, int]) -> tuple[int, ...]:
    return tuple(known if known != -1 else size[min(axis, 1)] for axis, known in enumerate(shape))


def add_profiles(builder: Any, network: Any, config: Any, profiles: Sequence[Profile]) -> None:
    tensors = [network.get_input(index) for index in range(network.num_inputs)]
    inputs = {tensor.name: tuple(tensor.shape) for tensor in tensors}
    wrong = [f"{name} {list(shape)}" for name, shape in inputs.items() if len(shape) < 2]
    if profiles and wrong:
        raise UserError(f"inputs must be [batch, length, ...], not {', '.join(wrong)}; export token inputs")
    if not profiles and any(-1 in shape for shape in inputs.values()):
        raise UserError("the model has dynamic inputs and no engine shapes; set engine.shapes in the recipe")
    for shapes in profiles:
        profile = builder.create_optimization_profile()
        for name, shape in inputs.items():
            asked = zip(shape[:2], shapes.min, shapes.max, strict=True)
            if len(shape) == 2 and any(size != -1 and not a == b == size for size, a, b in asked):
                raise UserError(
                    f"input {name} is fixed at {list(shape)} and cannot take {shapes.min} to {shapes.max}; "
                    "export with dynamic axes or ask for that shape"
                )
            low, opt, high = (fill_shape(shape, size) for size in (shapes.min, shapes.opt, shapes.max))
            profile.set_shape(name, low, opt, high)
        if config.add_optimization_profile(profile) < 0:
            raise UserError(f"the builder refuses the shapes {shapes}; change engine.shapes")


def choose_profile(profiles: Sequence[Profile], batch: int, length: int) -> int:
    size = (batch, length)
    if not profiles:
        return 0  # fixed shapes
    holding = [
        index
        for index, shapes in enumerate(profiles)
        if all(low <= n <= high for low, n, high in zip(shapes.min, size, shapes.max, strict=True))
    ]
    if not holding:
        raise CheckFailed(_refused(profiles, size))
    return min(holding, key=lambda index: measure_distance(profiles[index].opt, size))


def fit_batch(profiles: Sequence[Profile], batch: int, length: int, step: int = 1) -> tuple[int, int, int]:
    """Return the profile, batch and length to pad a batch of sequences to, the longest of `length` tokens.

    Lengths are rounded up to multiples of `step` where the profile allows, so that they repeat.
    """
    found = fit_profile([(each.min, each.opt, each.max) for each in profiles], batch, length, step)
    if found is None:
        raise CheckFailed(_refused(profiles, (batch, length)))
    return found


def measure_distance(one: Sequence[int], other: Sequence[int]) -> float:
    return sum(abs(math.log(a / b)) for a, b in zip(one, other, strict=True))


def require_room(profiles: Sequence[Profile], lengths: Int64, batch_size: int) -> None:
    """Require that the data fits the engine that will be built; batches are drawn in order of length."""
    limit = max(shapes.max[1] for shapes in profiles)
    if (longest := int(lengths.max(initial=0))) > limit:
        raise UserError(
            f"{(lengths > limit).sum()} of {len(lengths)} evaluation samples have more than {limit} "
            f"tokens (engine.shapes), the longest {longest}; raise its length to {longest}, or lower "
            f"export.max_length to {limit}"
        )
    size, falling = min(batch_size, max(shapes.max[0] for shapes in profiles)), np.sort(lengths)[::-1]
    for start in range(0, len(falling), size):
        rows, length = len(falling[start : start + size]), int(falling[start])
        if not any(rows <= shapes.max[0] and length <= shapes.max[1] for shapes in profiles):
            most = max(shapes.max[0] for shapes in profiles if length <= shapes.max[1])
            raise UserError(
                f"the evaluation data has batches of {rows} samples with {length} tokens, where "
                f"engine.shapes takes at most {most}; give --batch-size {most}, or raise that batch"
            )


def note_distant_data(profiles: Sequence[Profile], lengths: Int64, batch_size: int) -> list[str]:
    """Warn where data is over FAR_FROM_OPT times off the opt shape, with the shapes to ask for instead."""
    if not len(lengths):
        return []
    # percentile over batches, each as long as its longest sample
    padded = np.sort(lengths)[::-1][::batch_size]
    typical, longest = int(np.percentile(padded, 90, method="higher")), int(padded[0])
    batch = min(batch_size, max(shapes.max[0] for shapes in profiles), len(lengths))
    try:
        index, batch, length = fit_batch(profiles, batch, typical, LENGTH_STEP)
    except CheckFailed:
        return []  # running it says so
    used = profiles[index]
    far = [
        f"{name} {here} where it is tuned for {opt}"
        for name, here, opt in (("batch", batch, used.opt[0]), ("length", length, used.opt[1]))
        if max(here / opt, opt / here) > FAR_FROM_OPT
    ]
    if not far:
        return []
    better = Profile(used.min, (batch, length), used.max)
    several = " in place of that profile" if len(profiles) > 1 else ""
    return [
        f"the engine runs far from its opt shape, {' and '.join(far)} (90th percentile of the padded batches "
        f"of the evaluation data, the longest has {longest} tokens): if this is the load that counts, let "
        f"the profiles follow it with --shapes auto (shapes: auto in the recipe), or set engine.shapes "
        f"{better}{several}"
    ]


def _refused(profiles: Sequence[Profile], size: tuple[int, int]) -> str:
    listed = " or ".join(map(str, profiles))
    return (
        f"no profile of the engine takes batch {size[0]}, length {size[1]}; it takes {listed}: "
        "change engine.shapes in the recipe and build again"
    )


STEP = 8  # lengths are multiples of it, as tensor cores want
MOST = 6  # buckets; each is a profile with kernels of its own
LEAST_SAVING = 0.02  # of the tokens, that one more bucket must save
LARGEST_BATCH = 128  # that profiles take, as those of the shipped recipes


def choose_edges(lengths: Int64, longest: int, most: int = MOST) -> list[int]:
    """Choose rising lengths to pad to that make the fewest tokens: dynamic programming over the histogram.

    A few fixed lengths run faster than any length, and cost padding. Fewer than `most` where one more would
    save less than LEAST_SAVING. No edge is larger than `longest`, multiple of STEP or not.
    """
    edges, counts = np.unique(np.minimum(-(-lengths // STEP) * STEP, longest), return_counts=True)
    before = np.concatenate([[0], np.cumsum(counts)])  # rows up to each edge
    # cost[i, j]: tokens of the rows between the edges i and j where they are padded to the latter
    cost = (before[None, 1:] - before[:-1, None]) * edges[None, :]
    best, cuts = cost[0].astype(np.int64), [np.zeros(len(edges), dtype=np.int64)]
    totals = [best[-1]]
    possible, never = np.tri(len(edges), dtype=bool).T, np.iinfo(np.int64).max
    for _ in range(1, min(most, len(edges))):
        # the last bucket starts at edge i; up to edge i - 1 go the others, which are one fewer
        tried = np.where(possible, np.roll(best, 1)[:, None] + cost, never)
        tried[0] = cost[0]
        cuts.append(tried.argmin(axis=0))
        best = tried.min(axis=0)
        totals.append(best[-1])
    savings = 1 - np.array(totals[1:]) / np.array(totals[:-1])
    count = 1 + int(np.argmin(np.append(savings >= LEAST_SAVING, False)))
    chosen, last = [], len(edges) - 1
    for cut in reversed(cuts[:count]):
        chosen.append(int(edges[last]))
        if cut[last] == 0:
            break
        last = int(cut[last]) - 1
    return chosen[::-1]


def bucket_profiles(edges: Sequence[int], longest: int, batch: int) -> list[Profile]:
    most = max(batch, LARGEST_BATCH)
    fixed = [Profile((1, edge), (batch, edge), (most, edge)) for edge in edges]
    if edges[-1] < longest:
        fixed.append(Profile((1, edges[-1] + 1), (batch, longest), (most, longest)))
    return fixed


class LengthBucket(Strict):
    """Rows that are padded to the same length."""

    length: int = field("Length in tokens that its rows are padded to.")
    rows: int = field("Number of rows.")
    tokens: int = field("Tokens of its rows without padding.")


class Lengths(Strict):
    """Lengths of the evaluation data, and what an engine with `shapes: auto` makes of them."""

    splits: list[str] = field("Evaluation splits whose rows were counted.")
    rows: int = field("Rows of all splits; of questions the windows.")
    tokens: int = field("Tokens of all rows, without padding.")
    shortest: int = field("Tokens of the shortest row.")
    longest: int = field("Tokens of the longest row.")
    median: float = field("Median tokens of a row.")
    p90: int = field("90th percentile of the tokens of a row.")
    histogram: list[tuple[int, int]] = field("Pairs of tokens and the number of rows that have so many.")
    buckets: list[LengthBucket] = field(
        "Lengths that rows are padded to; empty for a CPU, whose kernels take every length."
    )
    padding: float = field("Share of the tokens of the engine's batches that is padding.")
    longest_padding: float = field("Share of padding if all rows were padded to the longest.")
    profiles: list[str] = field("Optimization profiles of the engine, each [min, opt, max].")
