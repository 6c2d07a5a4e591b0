"""Texts without labels: a file with one text a line, each text once, and the two halves of a single file."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from qdqbench.quantize.core.errors import UserError

if TYPE_CHECKING:
    import datasets


def read_lines(paths: Sequence[Path]) -> list[str]:
    """UTF-8 text files, one text a line; empty lines are texts too.

    Raises:
        UserError: one is not UTF-8.
    """
    lines = []
    for path in paths:
        try:
            with path.open(encoding="utf-8-sig") as stream:
                lines += [line.removesuffix("\n") for line in stream]
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); convert it"
            ) from error
    return lines


def distinct(texts: Sequence[str | None], source: str) -> tuple[list[str], list[str]]:
    """Each text with a word once, in the order of its first place, and notes on what was left out.

    The same text twice would be its own nearest neighbour, and could calibrate what it judges.
    """
    first: dict[str, str] = {}
    blank = 0
    for text in texts:
        if text is not None and (key := " ".join(text.split())):
            first.setdefault(key, text)
        else:
            blank += 1
    notes = []
    if blank:
        notes.append(f"{blank} of {len(texts)} texts of {source} are empty and were left out")
    if twice := len(texts) - blank - len(first):
        notes.append(f"{twice} of {len(texts)} texts of {source} are there before and were left out")
    return [*first.values()], notes


def half(texts: Sequence[str], names: tuple[str, str], asked: str, source: str) -> list[str]:
    """One of the halves of a single file: a seeded draw of its texts, in their order.

    The draw is of the file alone, so both halves are the same in every run.

    Args:
        texts: of the file.
        names: of the half to calibrate with, and of the one to judge on.
        asked: one of them.
        source: the file, for errors.

    Raises:
        UserError: it is none of them.
    """
    if asked not in names:
        raise UserError(
            f"{source} is a single file, half of which is split {names[0]!r} and half {names[1]!r}, so it "
            f"has no split {asked!r}; name one of them, or give --data a folder"
        )
    order = np.random.default_rng(0).permutation(len(texts))
    first = len(texts) // 2
    return [texts[row] for row in np.sort(order[:first] if asked == names[0] else order[first:])]


def as_dataset(texts: list[str], column: str) -> "datasets.Dataset":
    """Texts as the only column of a dataset."""
    import datasets

    return datasets.Dataset.from_dict(
        {column: texts}, features=datasets.Features({column: datasets.Value("string")})
    )
