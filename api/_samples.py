"""Calibration samples of the Python API: texts, or tokens in any form, as batches without padding."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from qdqbench.quantize.tasks.data.encode import Sample, equal_length_batches
from qdqbench.quantize.utils.errors import UserError

Samples = Iterable[Mapping[str, Any]]
INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def find_texts(samples: Any) -> list[str]:
    """Return the texts of a list, an array or a column of texts; empty for samples of another form."""
    listed = hasattr(samples, "__getitem__") and not hasattr(samples, "columns")
    if isinstance(samples, str | Mapping) or not (listed and isinstance(next(iter(samples), None), str)):
        return []
    if wrong := [text for text in samples if not isinstance(text, str)]:
        raise UserError(f"{wrong[0]!r} among the calibration samples is no text; leave it out")
    return [*map(str, samples)]


def list_samples(samples: Any) -> Samples:
    """Return samples as items: of one batch that one, of a data frame its rows."""
    if isinstance(samples, Mapping):
        if "input_ids" not in samples:
            raise UserError(
                f"a {type(samples).__name__} of {', '.join(map(str, samples)) or 'nothing'} holds no "
                "input_ids; give one of its splits, or a batch with them"
            )
        if not isinstance(next(iter(samples["input_ids"]), None), list | tuple):
            return [samples]
        given = {name: samples[name] for name in INPUTS if samples.get(name) is not None}
        return [dict(zip(given, row, strict=True)) for row in zip(*given.values(), strict=True)]  # not padded
    if hasattr(samples, "to_dict") and hasattr(samples, "columns"):
        return [*samples.to_dict("records")]
    if isinstance(samples, str) or not isinstance(samples, Iterable):
        raise UserError(f"a {type(samples).__name__} is no calibration data; give a list of samples or texts")
    return samples


@dataclass(frozen=True)
class Batches:
    """Samples as batches of equal length, made again on each pass."""

    samples: Samples
    batch_size: int
    longest: int  # tokens of a sample
    sizes: Mapping[str, int]  # of the vocabulary of each input

    def __post_init__(self) -> None:
        if iter(self.samples) is self.samples:
            raise UserError("calibration goes over its samples more than once; give a list, not an iterator")

    def rows(self) -> Iterator[Sample]:
        return (row for given in self.samples for row in _rows(given, self.longest, self.sizes))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for _, batch in equal_length_batches(self.rows(), self.batch_size, pad_id=0):  # of one length
            yield batch


def _rows(given: Mapping[str, Any], longest: int, sizes: Mapping[str, int]) -> Iterator[Sample]:
    """Yield the samples of an item without padding; `UserError` names what does not fit."""
    if not isinstance(given, Mapping):
        raise UserError(f"a calibration sample is a {type(given).__name__}; give a dict with input_ids")
    if given.get("input_ids") is None:
        listed = ", ".join(map(str, given)) or "nothing"
        raise UserError(
            f"a calibration sample has {listed}, but no input_ids; tokenize it, or give a list of texts"
        )
    ids = _array(given, "input_ids", 0)
    mask = _array(given, "attention_mask", np.ones_like(ids))
    types = _array(given, "token_type_ids", np.zeros_like(ids))
    if not ids.shape == mask.shape == types.shape:
        shapes = ", ".join(str(list(array.shape)) for array in (ids, mask, types))
        names = "input_ids, attention_mask and token_type_ids"
        raise UserError(f"{names} of a calibration sample have shapes {shapes}; give one shape")
    for name, values in (("input_ids", ids), ("token_type_ids", types)):
        seen, size = values[mask.astype(bool)], sizes.get(name, np.inf)
        if seen.size and not 0 <= seen.min() <= seen.max() < size:
            raise UserError(
                f"{name} of a calibration sample go from {seen.min()} to {seen.max()}, but the model has ids "
                f"from 0 to {size - 1}; use the tokenizer of this model"
            )
    for row, kept in enumerate(mask.astype(bool)):
        if kept.sum() > longest:
            raise UserError(
                f"a calibration sample has {kept.sum()} tokens, but the model has {longest} positions; cut it"
            )
        if kept.any():
            yield Sample(row, ids[row][kept], types[row][kept], False)


def _array(given: Mapping[str, Any], name: str, default: Any) -> Any:
    """Int64 [B, L] of lists, arrays or tensors on any device, [L] too; `default` where there are none."""
    values = given.get(name)
    values = default if values is None else values
    try:
        found = np.atleast_2d(np.asarray(values.cpu() if hasattr(values, "cpu") else values))
        whole = found.astype(np.int64)
    except (TypeError, ValueError):
        found = whole = np.empty(0, dtype=np.int64)
    if whole.ndim != 2 or (whole != found).any():
        raise UserError(
            f"{name} of a calibration sample are no whole numbers [L] or [B, L]; pad them, or give rows"
        )
    return whole
