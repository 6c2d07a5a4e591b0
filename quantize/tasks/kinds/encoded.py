"""A split as tokens: its rows, the tokens that give predictions, and the sample of each row."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from qdqbench.quantize.standalone.texts import pad_rows
from qdqbench.quantize.utils.arrays import Array, Batch, Int64

IndexedBatch = tuple[Int64, Batch]


class Units(NamedTuple):
    """The tokens of one row that give answers, and what each of them is about, as its kind says."""

    positions: Int64  # [answers]
    about: Int64  # [answers] or [answers, 2]


class Targets(NamedTuple):
    labels: Array  # to learn from, of each answer
    gold: Any = None  # what samples are scored against; None: the labels
    warnings: tuple[str, ...] = ()  # what a reader of the report must know


@dataclass(frozen=True)
class Encoded:
    """A whole split as tokens, without padding."""

    input_ids: list[Int64]  # of each row
    token_type_ids: list[Int64]
    labels: Array  # to learn from, [answers] or [answers, ...]
    truncated: int  # rows that lost tokens
    positions: list[Int64] | None = None  # of each row: its tokens that give answers; None: one answer a row
    samples: Int64 | None = None  # of each row, each first seen in ascending order; None: each row is one
    scored: Any = None  # what samples are scored against; None: the labels
    warnings: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        return len(self.input_ids)

    @property
    def gold(self) -> Any:
        """Return the reference of the samples' scores; its length is the number of samples."""
        return self.labels if self.scored is None else self.scored

    @property
    def lengths(self) -> Int64:
        return np.array([len(ids) for ids in self.input_ids], dtype=np.int64)

    @property
    def longest(self) -> Int64:
        """The number of tokens of the longest row of each sample, [samples]."""
        longest = np.zeros(len(self.gold), dtype=np.int64)
        np.maximum.at(longest, self._sample_of_rows, self.lengths)
        return longest

    @property
    def distinct(self) -> Int64:
        """The first of the samples that have the same tokens, ascending."""
        texts: dict[int, bytes] = {}
        for row, sample in enumerate(self._sample_of_rows.tolist()):
            parts = self.input_ids[row], self.token_type_ids[row]
            texts[sample] = texts.get(sample, b"") + b"".join(part.tobytes() + b"|" for part in parts)
        first: dict[bytes, int] = {}
        for sample, text in texts.items():
            first.setdefault(text, sample)
        return np.array([*first.values()], dtype=np.int64)

    @cached_property
    def answers(self) -> Int64:
        if self.positions is None:
            return np.ones(self.rows, dtype=np.int64)
        return np.array([len(kept) for kept in self.positions], dtype=np.int64)

    @property
    def sample_of_answers(self) -> Int64:
        return np.repeat(self._sample_of_rows, self.answers)

    @property
    def _sample_of_rows(self) -> Int64:
        return np.arange(self.rows) if self.samples is None else self.samples

    @cached_property
    def _ends(self) -> Int64:
        return np.cumsum(self.answers)

    def batch(self, rows: Iterable[int], pad_id: int) -> IndexedBatch:
        """Return the rows, int64 [B], and their tokens, padded to the longest of them, int64 [B, L]."""
        return pad([(row, self.input_ids[row], self.token_type_ids[row]) for row in rows], pad_id)

    def kept(self, rows: Int64, outputs: Any) -> Any:
        """Select the answers [answers, width] from an array or tensor [B, width] or [B, L, width]."""
        if self.positions is None:
            return outputs
        places = np.repeat(np.arange(len(rows)), self.answers[rows])
        return outputs[places, np.concatenate([self.positions[row] for row in rows])]

    def answers_of(self, rows: Int64) -> Int64:
        """Return the places of the answers of some rows among those of all, row after row."""
        if self.positions is None:
            return np.asarray(rows)
        ends, counts = self._ends[rows], self.answers[rows]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.asarray(np.repeat(ends - counts, counts) + within)

    def places(self, rows: Int64) -> tuple[Int64, Int64]:
        return self.answers_of(rows), self.answers[rows]

    def rows_of(self, samples: Int64) -> Int64:
        """Return the rows of some samples, sample after sample."""
        if self.samples is None:
            return samples
        first, last = (np.searchsorted(self.samples, samples, side) for side in ("left", "right"))
        return np.concatenate([np.arange(a, b) for a, b in zip(first, last, strict=True)]).astype(np.int64)

    def part(self, samples: Int64) -> "Encoded":
        """Return some samples as a split of their own, in their order."""
        rows, renumbered = self.rows_of(samples), None
        if self.samples is not None:
            renumbered = np.repeat(np.arange(len(samples)), np.bincount(self.samples)[samples])
        return Encoded(
            [self.input_ids[row] for row in rows],
            [self.token_type_ids[row] for row in rows],
            self.labels[self.answers_of(rows)],
            truncated=0,
            positions=None if self.positions is None else [self.positions[row] for row in rows],
            samples=renumbered,
            scored=None if self.scored is None else self.scored[samples],
        )


def pad(samples: list[tuple[int, Int64, Int64]], pad_id: int) -> IndexedBatch:
    """Return one batch of (row, input_ids, token_type_ids), padded to the longest row."""
    rows, ids, types = zip(*samples, strict=True)
    return np.array(rows, dtype=np.int64), pad_rows(ids, types, pad_id)
