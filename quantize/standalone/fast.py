"""A faster tokenizer for plain texts, where it is installed and gives the same ids."""

from collections.abc import Sequence
from importlib import import_module
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from .texts import Coded, Encoder

AT_ONCE = 2  # texts: for more, `tokie` takes threads, which take longer to wake than texts do


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

    def code(self, texts: Sequence[str]) -> Coded:
        """Return the rows of texts of printable ASCII."""
        encode = self._tokenizer.encode_batch_flat
        made = [encode(texts[at : at + AT_ONCE]) for at in range(0, len(texts), AT_ONCE)]
        ids, lengths = (np.concatenate(part).astype(np.int32) for part in zip(*made, strict=True))
        cut = lengths > self.max_length
        if cut.any():  # the last but one goes, the special token behind it stays
            ids, lengths = np.delete(ids, lengths.cumsum()[cut] - 2), lengths - cut
        rows, types = [None] * len(texts), np.zeros(len(ids), np.int8)
        return Coded(np.arange(len(texts)), rows, lengths, cut.tolist(), ids, types)


def open_fast(told: Any, tokenizer: str, texts: Sequence[str]) -> FastTokenizer | None:
    """Return the faster tokenizer where it is installed and gives the same ids for these texts."""
    single = len(told["texts"]) == 1 and not told["words"] and not told["over_tokens"]
    if not single or told["side"] != "right" or not texts:
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
