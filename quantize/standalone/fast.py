"""A faster tokenizer for plain texts, where it is installed and gives the same ids."""

from collections.abc import Sequence
from importlib import import_module
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from .texts import Encoder


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

    def find(self, samples: Sequence[Any]) -> npt.NDArray[np.bool_]:
        """Return which samples are texts of printable ASCII."""
        if type(samples[0]) is not str:
            return np.zeros(len(samples), bool)
        whole = "".join(samples)
        if whole.isascii() and whole.isprintable():
            return np.ones(len(samples), bool)
        return np.array([text.isascii() and text.isprintable() for text in samples])

    def encode(self, text: str) -> tuple[npt.NDArray[Any], bool]:
        """Return the tokens of a text of printable ASCII, and whether it was cut.

        One by one: batches take the threads of `tokie`, which take longer to wake than such a text does.
        """
        ids, _ = self._tokenizer.encode_batch_flat([text])
        cut = len(ids) > self.max_length  # the last but one goes, the special token behind it stays
        return (np.delete(ids, -2), True) if cut else (ids, False)


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
    texts = [*texts, " ".join(texts)[:20_000]]
    asked = [text for text, plain in zip(texts, fast.find(texts), strict=True) if plain]
    if not asked:
        return None
    known, ours = (
        Encoder(Tokenizer.from_str(tokenizer), told["max_length"], fast=each).code(asked)
        for each in (None, fast)
    )
    fields = ("lengths", "cut", "ids", "types")
    return fast if all(np.array_equal(getattr(known, f), getattr(ours, f)) for f in fields) else None
