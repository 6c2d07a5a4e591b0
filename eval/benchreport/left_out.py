"""What a report or a table leaves out of a bench that was measured before, and says so."""

from collections.abc import Sequence

from qdqbench.eval.bench.results import PEERS, Bench, BenchCell, BenchContestant, headline_of


def without_unmasked(bench: Bench) -> Bench:
    """A bench without the figures of PyTorch peers that had no attention mask, and a warning in their place.

    They were slower than they need to be (`peers`), so that what INT8 gains over them is too good.
    """
    peers = {about.name for about in bench.contestants if about.name.startswith(PEERS)}
    if not peers or bench.settings.peers_masked or bench.device == "cpu":
        return bench
    warning = (
        "PyTorch and torch.compile at fixed shapes are left out: they were measured without an attention "
        "mask, which made them slower than they are; measure again"
    )
    return without(bench, peers, warning, real=False)


def without(bench: Bench, names: set[str], warning: str, *, real: bool = True) -> Bench:
    """A bench without the figures of some contestants, and a warning in their place.

    Args:
        real: in its cells of real lengths too.
    """
    rest = [about for about in bench.contestants if about.name not in names]
    cells = [_without(cell, names, rest) if real or cell.kind != "real" else cell for cell in bench.cells]
    left = {row.contestant for cell in cells for row in cell.rows}
    changes = {
        "cells": cells,
        "contestants": [about for about in bench.contestants if about.name not in names - left],
        "warnings": [*bench.warnings, warning],
    }
    return bench.model_copy(update=changes)


def _without(cell: BenchCell, names: set[str], rest: Sequence[BenchContestant]) -> BenchCell:
    rows = [row for row in cell.rows if row.contestant not in names]
    speedups = [found for found in cell.speedups if not {found.system, found.baseline} & names]
    left = cell.model_copy(update={"rows": rows, "speedups": speedups})
    return left.model_copy(update={"headline": headline_of(rest, left)})
