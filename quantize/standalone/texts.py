"""Texts as tokens: truncation, pairs, words, windows and padding, with `tokenizers` and NumPy alone."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
TOKENS = ("lengths", "ids", "types")
MOST_WINDOWS = 256  # of a context, and of a tokenizer call: each takes memory


class Refused(ValueError):
    """Input that cannot be answered; its text is one sentence."""


class Coded(NamedTuple):
    """Rows of samples, whose tokens stand in a line."""

    numbers: Ints  # of the sample that each row is of, ascending
    rows: Sequence[Any]  # as `tokenizers` gives them; None from a faster one
    lengths: npt.NDArray[np.int32]
    cut: Sequence[bool]
    ids: npt.NDArray[np.int32]
    types: npt.NDArray[np.int8]

    def pick(self, order: Ints) -> "Coded":
        """Return some rows, in this order."""
        lengths, places = self.lengths[order], order.tolist()
        starts = np.repeat((self.lengths.cumsum() - self.lengths)[order], lengths)
        at = starts + np.arange(len(starts)) - np.repeat(lengths.cumsum() - lengths, lengths)
        rows, cut = ([part[place] for place in places] for part in (self.rows, self.cut))
        return Coded(self.numbers[order], rows, lengths, cut, self.ids[at], self.types[at])


class Encoder:
    """Encodes samples: texts, pairs of texts, or lists of words. Not for several threads.

    Args:
        tokenizer: of `tokenizers`; its truncation is changed.
        max_length: tokens of a row, special ones included.
        words: samples are lists of words.
        stride: tokens that windows share, in which a second text that is too long is read; 0: it is cut.
        truncation: which text of a pair is cut, `longest_first` or `only_second`.
        side: where a text is cut off.
        fast: for texts of printable ASCII, of which `rows` of `code` then has nothing.
    """

    def __init__(  # noqa: PLR0913
        self,
        tokenizer: Any,
        max_length: int,
        *,
        words: bool = False,
        stride: int = 0,
        truncation: str = "longest_first",
        side: str = "right",
        fast: Any = None,
    ) -> None:
        self.fast = fast
        self.tokenizer, self.max_length, self.words, self.stride = tokenizer, max_length, words, stride
        self._options = {"stride": stride, "strategy": truncation, "direction": side}
        # without offsets where nothing asks for them
        exact = words or truncation == "only_second"
        self._encode = tokenizer.encode_batch if exact else tokenizer.encode_batch_fast

    def encode(self, samples: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """Yield the rows of samples: the number of its sample, and each as `tokenizers` encodes it."""
        parts: Sequence[slice] = [slice(0, len(samples))]
        if self.stride:
            parts = split_windows(self.count_windows(samples))
        elif samples and isinstance(samples[0], tuple):
            samples = self.shorten(samples)
        for part in parts:
            # again: another encoder may have this tokenizer too
            self.tokenizer.no_padding()
            self.tokenizer.enable_truncation(self.max_length, **self._options)
            coded = self._encode([*samples[part]], is_pretokenized=self.words)
            for number, first in enumerate(coded, part.start):
                for row in (first, *(first.overflowing if self.stride else ())):
                    yield number, row

    def code(self, samples: Sequence[Any]) -> Coded:
        """Return the rows of samples, of which there is at least one."""
        if self.fast and (plain := self.fast.find(samples)).any():
            return self._code_fast(samples, plain)
        return self._code(samples)

    def _code(self, samples: Sequence[Any]) -> Coded:
        numbers, rows = zip(*self.encode(samples), strict=True)
        ids, types = [row.ids for row in rows], [row.type_ids for row in rows]
        lengths, flat = np.fromiter(map(len, ids), np.int32, len(ids)), itertools.chain.from_iterable
        total, cut = int(lengths.sum()), [bool(row.overflowing) for row in rows]
        tokens = np.fromiter(flat(ids), np.int32, total), np.fromiter(flat(types), np.int8, total)
        return Coded(np.array(numbers), rows, lengths, cut, *tokens)

    def _code_fast(self, texts: Sequence[str], plain: npt.NDArray[np.bool_]) -> Coded:
        if plain.all():
            return self.fast.code(texts)  # type: ignore[no-any-return]
        order = np.argsort(~plain, kind="stable")
        ordered, count = [texts[place] for place in order.tolist()], int(plain.sum())
        quick, slow = self.fast.code(ordered[:count]), self._code(ordered[count:])
        joined = {name: np.concatenate([getattr(quick, name), getattr(slow, name)]) for name in TOKENS}
        whole = Coded(order, [*quick.rows, *slow.rows], cut=[*quick.cut, *slow.cut], **joined)
        return whole.pick(np.argsort(order))

    def count_windows(self, pairs: Sequence[tuple[str, str]]) -> list[int]:
        """Return in how many windows each second text is read, without making them; 0: no room for any."""
        counts, special = [], self.tokenizer.num_special_tokens_to_add(True)
        firsts, seconds = (self._whole([pair[place] for pair in pairs]) for place in (0, 1))
        for first, second in zip(firsts, seconds, strict=True):
            room = self.max_length - special - len(first.ids)
            step = room - self.stride
            counts.append(1 + max(0, math.ceil((len(second.ids) - room) / step)) if step > 0 else 0)
        return counts

    def require_few_windows(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Raise Refused where a context would be read in more than `MOST_WINDOWS`, or in none."""
        for (first, _), count in zip(pairs, self.count_windows(pairs), strict=True):
            if not 0 < count <= MOST_WINDOWS:
                why = f"would be read in more than {MOST_WINDOWS} windows; give a shorter context or question"
                raise Refused(f"the context of {first[:60]!r} {why}")

    def shorten(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """Cut the texts of long pairs behind what truncation can keep.

        `tokenizers` combines all parts that truncation cuts off one text with all of the other: two texts of
        16 kB take seconds and gigabytes. The longer text keeps a token more, since it gets an odd one.
        """
        shortened = [*pairs]
        if self._options["direction"] != "right":
            return shortened
        for place, pair in enumerate(pairs):
            if max(map(len, pair)) <= 8 * self.max_length:
                continue
            coded = self._whole(pair)
            longest, cut = max(len(each.ids) for each in coded), []
            for text, each in zip(pair, coded, strict=True):
                keep = 2 * self.max_length + (len(each.ids) == longest)
                cut.append(text[: each.offsets[keep - 1][1]] if len(each.ids) > keep else text)
            shortened[place] = (cut[0], cut[1])
        return shortened

    def _whole(self, texts: Sequence[str]) -> Any:
        """Return texts as they are encoded without truncation and special tokens."""
        self.tokenizer.no_truncation()
        return self.tokenizer.encode_batch([*texts], add_special_tokens=False)


def make_encoder(told: Mapping[str, Any], tokenizer: Any, fast: Any = None) -> Encoder:
    """Return the encoder of a model, as model.json describes it."""
    options = {name: told[name] for name in ("words", "stride", "truncation", "side")}
    return Encoder(tokenizer, told["max_length"], **options, fast=fast)


def split_windows(counts: Sequence[int]) -> list[slice]:
    """Return runs of samples of at most `MOST_WINDOWS` windows together."""
    ends, total = list[int](), 0
    for row, count in enumerate(counts):
        if total + count > MOST_WINDOWS:
            ends, total = [*ends, row], 0
        total += count
    return [slice(*each) for each in itertools.pairwise([0, *ends, len(counts)])]


def pad_rows(ids: Sequence[Any], types: Sequence[Any], pad_id: int) -> dict[str, Ints]:
    """Return the inputs of a model by name, int64 [rows, length], padded to the longest row."""
    shape = len(ids), max(map(len, ids))
    tokens, mask, kinds = (np.full(shape, fill, np.int64) for fill in (pad_id, 0, 0))
    for row, (own, own_types) in enumerate(zip(ids, types, strict=True)):
        tokens[row, : len(own)], mask[row, : len(own)], kinds[row, : len(own)] = own, 1, own_types
    return {"input_ids": tokens, "attention_mask": mask, "token_type_ids": kinds}


def pad_batch(
    batch: Mapping[str, npt.NDArray[Any]], length: int, pad_id: int, rows: int | None = None
) -> dict[str, npt.NDArray[Any]]:
    """Pad inputs [B, L] to a length with masked positions, and to `rows` with copies of the last row."""
    padded = {}
    for name, array in batch.items():
        places, fill = ((0, 0), (0, length - array.shape[1])), pad_id if name == "input_ids" else 0
        wide = np.pad(array, places, constant_values=fill)  # the mask above all is 0 there
        padded[name] = np.pad(wide, ((0, (rows or len(array)) - len(array)), (0, 0)), mode="edge")
    return padded


def fit_profile(
    profiles: Sequence[Sequence[Sequence[int]]], rows: int, length: int, step: int = 1
) -> tuple[int, int, int] | None:
    """Return which profile (min, opt, max) to use, and the rows and length to pad to; None: none holds them.

    The least padding comes first, then the nearest opt. Lengths are rounded up to multiples of `step`.
    """
    sizes = []
    for number, (low, best, high) in enumerate(profiles):
        if rows <= high[0] and length <= high[1]:
            size = max(rows, low[0]), max(min(-(-length // step) * step, high[1]), low[1])
            away = sum(abs(math.log(a / b)) for a, b in zip(best, size, strict=True))
            sizes.append((size[0] * size[1], away, number, *size))
    return min(sizes)[2:] if sizes else None
