"""Token-packed inputs: the tokens of all rows in a line, without padding, and answers back in their rows."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from qdqbench.quantize.engine.cuda.plan import Plan
from qdqbench.quantize.utils.arrays import Array, Int32
from qdqbench.quantize.utils.errors import UserError

TOKENS, MASK, TYPES = "input_ids", "attention_mask", "token_type_ids"  # names of inputs
_TABLES = {"token": "word"}
MOST_TOKENS = 1 << 16  # of a batch: the largest bucket
MOST_POSITIONS = 8192  # of a row whose queries and keys are rotated


@dataclass(frozen=True)
class Tokens:
    ids: Int32  # [T]
    positions: Int32  # [T]
    types: Int32  # [T]
    starts: Int32  # [B + 1]: row b has the tokens from starts[b] to starts[b + 1]
    kept: Array  # bool [B, L]: tokens that are there
    given: dict[str, Array]  # [T, H] each: states of a cut graph


def pack_tokens(plan: Plan, arrays: Mapping[str, Array], batch: Mapping[str, Array]) -> Tokens:
    """Return the attended tokens of inputs int [B, L]; UserError names the row that no kernel can run."""
    shapes = {name: batch[name].shape[:2] for name in plan.inputs}
    if len({*shapes.values()}) > 1 or batch[TOKENS].ndim != 2 or not batch[TOKENS].size:
        raise UserError(f"inputs are {shapes}; give arrays [batch, length] of one shape, none of them empty")
    kinds = {name: str(batch[name].dtype) for name in plan.inputs if name not in plan.given}
    if any(np.dtype(kind).kind not in "iub" for kind in kinds.values()):
        raise UserError(f"inputs are {kinds}; give integers")
    ids, kept = batch[TOKENS], batch[MASK].astype(bool)
    if kept.sum() > MOST_TOKENS:
        raise UserError(
            f"the batch has {kept.sum()} tokens, and an engine takes {MOST_TOKENS} at once; give fewer rows"
        )
    first = plan.head.pooling == "first"
    empty = ~(kept[:, 0] if first else kept.any(axis=1))
    if empty.any():
        missing = f"no attended {'first ' if first else ''}token"
        raise UserError(f"row {empty.argmax()} of the batch has {missing}; give every row one")
    positions = count_positions(ids, plan.embed.padding)
    types = batch[TYPES] if plan.embed.typed else np.zeros_like(ids)
    begun = (np.diff(kept.astype(np.int8), axis=1, prepend=0) > 0).sum(axis=1)  # runs of tokens
    if plan.measures_distances and begun.max() > 1:
        raise UserError(
            f"row {begun.argmax()} has masked tokens between others, whose distances the model counts"
        )
    given = {name: batch[name][kept] for name in plan.given}
    line = {"token": ids[kept], "position": positions[kept], "type": types[kept]}
    return _check(plan, arrays, line, kept.sum(axis=1), kept, given)


def pack_rows(plan: Plan, arrays: Mapping[str, Array], ids: Array, types: Array, lengths: Array) -> Tokens:
    """Return rows whose tokens already stand in a line; UserError names the row that no kernel can run."""
    before = np.repeat(lengths.cumsum() - lengths, lengths)
    positions = np.arange(len(ids)) - before
    if (padding := plan.embed.padding) is not None:
        there = ids != padding
        counted = there.cumsum()
        positions = (counted - (counted - there)[before]) * there + padding
    line = {"token": ids, "position": positions, "type": types if plan.embed.typed else np.zeros_like(ids)}
    return _check(plan, arrays, line, lengths, np.empty((0, 0), bool), {})


def _check(  # noqa: PLR0913, PLR0917
    plan: Plan,
    arrays: Mapping[str, Array],
    line: Mapping[str, Array],
    lengths: Array,
    kept: Array,
    given: dict[str, Array],
) -> Tokens:
    """Return the tokens of `line` if the tables of the model have them."""
    for part, values in line.items():
        entries = len(arrays.get(f"embed.{_TABLES.get(part, part)}", range(MOST_POSITIONS)))
        wrong = (values < 0) | (values >= entries)
        if wrong.any():
            row = int(np.searchsorted(lengths.cumsum(), wrong.argmax(), "right"))
            raise UserError(
                f"row {row} has the {part} {values[wrong.argmax()]}; the model has {entries} of them"
            )
    if plan.embed.span and lengths.max() > plan.embed.span:
        raise UserError(
            f"row {lengths.argmax()} has {lengths.max()} tokens; the model has distances of {plan.embed.span}"
        )
    parts = (*line.values(), np.concatenate([[0], lengths.cumsum()]))
    ids, positions, types, starts = (each.astype(np.int32) for each in parts)
    return Tokens(ids, positions, types, starts, kept, given)


def count_positions(ids: Array, padding: int | None) -> Array:
    """Return the positions of token ids int [..., L], counted past those of padding if the model does."""
    if padding is None:
        return np.broadcast_to(np.arange(ids.shape[-1]), ids.shape)
    there = ids != padding
    return np.asarray(there.cumsum(axis=-1) * there + padding)


def spread(answers: Array, tokens: Tokens) -> Array:
    """Return answers of tokens [T, ...] in their rows [B, L, ...], 0 where there is none."""
    spread_out = np.zeros((*tokens.kept.shape, *answers.shape[1:]), answers.dtype)
    spread_out[tokens.kept] = answers
    return spread_out
