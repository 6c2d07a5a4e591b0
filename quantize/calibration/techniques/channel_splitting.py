"""Outlier channel splitting: copies of a channel share its range (`calibration.outlier_channel_splitting`).

One or two channels of a feed-forward carry a massive activation (Sun et al. 2024, arXiv 2402.17762) and
meet a weight of like size (Yu et al. 2024, arXiv 2411.07191), so that no factor helps. Zhao et al. 2019
(arXiv 1901.09504) split such a channel: n copies of it, each with 1/n of the product, n a power of two. The
copies are rows of the first linear (and of its gate) and columns of the second. Each divides its activation
a little more than the one before, and its weight less (`SPREAD`), or all would be rounded in the same
direction. Weights are divided only where they have one scale for all rows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from qdqbench.quantize.calibration.techniques import Change
from qdqbench.quantize.models.families.family import Family
from qdqbench.quantize.models.families.known import family_of
from qdqbench.quantize.utils.arrays import Float64, Int64
from qdqbench.quantize.utils.names import count_of
from qdqbench.quantize.utils.schema import Strict

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

EXTRA = 64  # channels for copies, that comparisons try where the recipe does not split
LIKE = 8  # a channel is an outlier against the range that this many others reach
SPREAD = 1 / 16  # of the copies of a channel: the last divides its activation by so much more than the first
FP16_STEPS = 1024


class ChannelSplit(Strict):
    """Copies of outlier channels in one feed-forward; the columns that they leave are filled with zeros."""

    extra: int  # channels more than the model has
    # channel -> what divides its activation and its weight, powers of two; the product is its copies
    outliers: dict[int, tuple[int, int]]


def list_changes(splits: Mapping[str, ChannelSplit]) -> list[Change]:
    extra = max((split.extra for split in splits.values()), default=0)
    copies = (
        f"{{}} of {count_of(len(splits), 'feed-forward')} are split into copies, for which each feed-forward "
        f"is {extra} channels wider."
    )
    return [
        ("split channels", sum(len(split.outliers) for split in splits.values()), "outlier channel", copies)
    ]


def choose_channels(activations: Float64, weights: Float64, extra: int) -> ChannelSplit:
    """Halve what stands out most, again and again, while its copies fit into `extra` channels.

    Both ranges are the largest magnitudes of the K channels: in the activation, and in the weight's columns,
    or all equal where columns are not to be divided.
    Extra channels that no outlier needs are filled with zero columns.
    """
    by_input, by_weight = np.ones(len(activations), dtype=np.int64), np.ones(len(weights), dtype=np.int64)
    room = extra
    while True:
        tops = [(_outlier(activations / by_input), by_input), (_outlier(weights / by_weight), by_weight)]
        fitting = [
            (ratio, channel, parts)
            for (ratio, channel), parts in tops
            if ratio > 1 and by_input[channel] * by_weight[channel] <= room
        ]
        if not fitting:
            break
        _, channel, parts = max(fitting, key=lambda top: top[0])
        room -= int(by_input[channel] * by_weight[channel])
        parts[channel] *= 2
    outliers = np.flatnonzero(by_input * by_weight > 1).tolist()
    return ChannelSplit(extra=extra, outliers={n: (int(by_input[n]), int(by_weight[n])) for n in outliers})


def _outlier(ranges: Float64) -> tuple[float, int]:
    order = np.argsort(-ranges, kind="stable")
    largest, like = float(ranges[order[0]]), float(ranges[order[min(LIKE, len(order) - 1)]])
    return (largest / like if like > 0 else 1.0), int(order[0])


def apply_copies(model: "PreTrainedModel", splits: dict[str, ChannelSplit]) -> None:
    from torch import nn

    family = family_of(model.config)
    for name, split in splits.items():
        first, second = _linears(model, name)
        layout = make_split_layout(split, second.in_features)
        rows = _list_rows(layout.channels, second.in_features, family)
        first.weight = nn.Parameter(first.weight.data[rows])
        if first.bias is not None:
            first.bias = nn.Parameter(first.bias.data[rows])
        columns = second.weight.new_tensor(layout.columns)
        second.weight = nn.Parameter(second.weight.data[:, layout.channels] * columns)
        first.out_features, second.in_features = len(rows), len(columns)
        second.input_quantizer.pre_quant_scale = second.weight.new_tensor(layout.inputs)
    if len(splits) == len(family.layer_names(model)):
        setattr(model.config, family.intermediate, len(columns))  # so that it can be saved, and loaded again


def keep_equal(model: "PreTrainedModel", splits: dict[str, ChannelSplit]) -> Callable[[], None]:
    """Let copies follow their original bit for bit; call it after each step of a training."""
    ties, family = [], family_of(model.config)
    for name, split in splits.items():
        first, second = _linears(model, name)
        wide = second.in_features
        width = wide - split.extra
        layout = make_split_layout(split, width)
        originals, as_index = layout.channels[width:], partial(first.weight.new_tensor, dtype=int)
        each = (np.arange(width, wide), originals)
        rows = tuple(as_index(_list_rows(channels, wide, family)) for channels in each)
        # a power of two lies between the two, so this product has the bits of that in `apply_copies`
        columns = layout.columns[width:] / layout.columns[originals]
        ties.append((first, second, rows, (width, as_index(originals)), second.weight.new_tensor(columns)))

    def tie() -> None:
        for first, second, (copies, own), (width, index), columns in ties:
            for value in first.parameters(recurse=False):
                value.data[copies] = value.data[own]
            second.weight.data[:, width:] = second.weight.data[:, index] * columns

    return tie


def remove_copies(
    weights: "dict[str, torch.Tensor]", splits: dict[str, ChannelSplit], family: Family
) -> "dict[str, torch.Tensor]":
    """Return a state dict without copies; `apply_copies` makes them again bit for bit if kept equal."""
    merged = dict(weights)
    for name, split in splits.items():
        key = f"{name}.weight"
        wide = weights[key].shape[1]
        width = wide - split.extra
        rows = _list_rows(np.arange(width), wide, family)
        columns = make_split_layout(split, width).columns[:width]
        merged[key] = weights[key][:, :width] / weights[key].new_tensor(columns)  # powers of two
        for part in ("weight", "bias"):
            if (key := f"{family.require_beside(name, 'ffn-in')}.{part}") in weights:
                merged[key] = weights[key][rows]
    return merged


def _list_rows(channels: Int64, width: int, family: Family) -> Int64:
    """Return the rows of the first linear, gates included, that make these of `width` channels."""
    return np.concatenate([channels + half * width for half in range(1 + family.gated)])


@dataclass(frozen=True)
class SplitLayout:
    """The channels of a feed-forward with copies: its own, then copies, then filling. All [K + extra]."""

    channels: Int64  # which one each is; filling is the first one, with a column of zeros
    inputs: Float64  # what multiplies the activation before its Q; fits FP16
    columns: Float64  # what multiplies the column of the weight; powers of two for the first K


def make_split_layout(split: ChannelSplit, width: int) -> SplitLayout:
    channels, spread = list(range(width)), [0.0] * width
    inputs, columns = np.ones(width), np.ones(width)
    for channel, (by_input, by_weight) in split.outliers.items():
        copies = by_input * by_weight
        channels += [channel] * (copies - 1)
        spread += [np.rint(SPREAD * n / copies * FP16_STEPS) / FP16_STEPS for n in range(1, copies)]
        inputs[channel], columns[channel] = 1 / by_input, 1 / by_weight
    filling = width + split.extra - len(channels)
    kept = np.array([1.0] * len(channels) + [0.0] * filling)
    less = 1 - np.array([*spread, *[0.0] * filling])
    index = np.array([*channels, *[0] * filling], dtype=np.int64)
    return SplitLayout(index, inputs[index] * less, columns[index] * kept / less)


def _linears(model: "PreTrainedModel", name: str) -> tuple[Any, Any]:
    first = family_of(model.config).require_beside(name, "ffn-in")
    return model.get_submodule(first), model.get_submodule(name)
