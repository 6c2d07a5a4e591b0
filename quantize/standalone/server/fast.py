"""A faster tokenizer for plain texts, where it is installed and gives the same ids."""

from collections.abc import Sequence
from importlib import import_module
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from .slots import Array


class FastTokenizer:
    """`tokie` for printable ASCII: other texts it does not always split as `tokenizers` does."""

    def __init__(self, tokenizer: str, max_length: int) -> None:
        self.max_length = max_length
        with NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:  # it takes no text
            file.write(tokenizer)
            file.flush()
            self._tokenizer: Any = import_module("tokie").Tokenizer.from_json(file.name)
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(max_length=max_length + 1)  # one more tells that text was cut

    def find(self, samples: Sequence[Any]) -> Array:
        """Return which samples are texts of printable ASCII."""
        if type(samples[0]) is not str:
            return np.zeros(len(samples), bool)
        whole = "".join(samples)
        if whole.isascii() and whole.isprintable():
            return np.ones(len(samples), bool)
        return np.array([text.isascii() and text.isprintable() for text in samples])

    def encode(self, texts: Sequence[str]) -> tuple[Array, Array, Sequence[bool]]:
        """Return the ids of all texts in a line, their lengths, and whether each was cut."""
        ids, lengths = self._tokenizer.encode_batch_flat(texts)
        cut = lengths > self.max_length
        if cut.any():  # the last but one goes, the special token behind it stays
            ids, lengths = np.delete(ids, lengths.cumsum()[cut] - 2), lengths - cut
        return ids, lengths.astype(np.int32), cut.tolist()


def open_fast(told: Any, tokenizer: str, texts: Sequence[str]) -> FastTokenizer | None:
    """Return the faster tokenizer where it is installed and gives the same ids for these texts."""
    plain = (
        len(told["texts"]) == 1 and not told["words"] and not told["over_tokens"] and told["side"] == "right"
    )
    if not plain or not texts:
        return None
    try:
        fast = FastTokenizer(tokenizer, told["max_length"])
    except Exception:  # not installed, or of a kind that it does not know
        return None
    known = Tokenizer.from_str(tokenizer)
    known.no_padding()
    known.enable_truncation(told["max_length"])
    texts = [*texts, " ".join(texts)[:20_000]]
    asked = [text for text, plain in zip(texts, fast.find(texts), strict=True) if plain]
    rows = known.encode_batch(asked)
    ids, lengths, cut = fast.encode(asked)
    if ids.tolist() != [token for row in rows for token in row.ids] or lengths.tolist() != [*map(len, rows)]:
        return None
    same_cut = cut == [bool(row.overflowing) for row in rows]
    return fast if asked and same_cut and not any(sum(row.type_ids) for row in rows) else None
