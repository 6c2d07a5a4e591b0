"""Rules of `check` on residuals: Q/DQ on what a LayerNorm adds, against the recipe where there is one."""

from collections.abc import Collection, Iterator

from qdqbench.quantize.check.codes import finding, finding_label
from qdqbench.quantize.check.view import CheckGraph
from qdqbench.quantize.core.results import FindingRow
from qdqbench.quantize.graph.residuals import ResidualAdd, other_rounding


def check_residuals(
    graph: CheckGraph, found: Collection[ResidualAdd], expected: Collection[str] | None
) -> Iterator[FindingRow]:
    """INT8 residuals that no recipe asks for, or that round a tensor in another way than its other readers.

    The latter is slow and not wrong: a warning, and an error in a file that is held to a recipe.

    Args:
        expected: modules that the recipe wants in INT8; None: no recipe.
    """
    for residual in found:
        if residual.dq is None:
            continue
        if expected is not None and residual.module not in expected:
            why = f"its residual is in INT8, but the recipe keeps that of {residual.module} in floating point"
            yield finding("recipe-surplus", residual.add, why)
        elif other := other_rounding(graph.index, residual):
            why = (
                f"its residual and {finding_label(other)!r} round one tensor with scales of two values or "
                "types, so the engine keeps it in floating point and in INT8"
            )
            yield finding("split-residual", residual.add, why, None if expected is None else "error")
        elif expected is None:
            norm, dq = finding_label(residual.norm), finding_label(residual.dq)
            why = f"what {norm!r} adds comes from {dq!r}; that costs accuracy"
            yield finding("quantized-residual", residual.add, why)


def missing_residuals(found: Collection[ResidualAdd], expected: Collection[str]) -> Iterator[FindingRow]:
    """Residuals that the recipe wants in INT8 and that have no Q/DQ."""
    for residual in found:
        if residual.module in expected and residual.dq is None:
            why = f"the recipe asks for the residual of {residual.module} in INT8, and neither input has Q/DQ"
            yield finding("recipe-missing", residual.add, why)
