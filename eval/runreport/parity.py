"""Layer parity as figures: each tensor against its own limits, the one nearest to them first."""

from collections import defaultdict

from qdqbench.eval.runreport.charts import layer_chart, place
from qdqbench.quantize.core.comparison import MAX_OUTPUT_ERROR, Parity, ParityRow
from qdqbench.quantize.core.results import Results

MEASURES = {"codes": "codes that differ", "step": "largest step", "output": "error of the output"}


def share(row: ParityRow) -> float:
    """Return the fraction of codes that differ without lying at a border."""
    return (row.differing - row.at_border) / max(row.codes, 1)


def worst_first(parity: Parity | None) -> list[ParityRow]:
    """Tensors by how much of their nearest limit they use."""
    rows = parity.rows if parity else []
    return sorted(rows, key=lambda row: -row.nearest[0])


def part_text(row: ParityRow) -> str:
    """Part of its nearest limit that a tensor uses."""
    return f"{row.nearest[0]:.0%}"


def nearest_text(row: ParityRow) -> str:
    """What a tensor is nearest to, its figure and its limit: `codes that differ: 0.229% of 0.500%`."""
    measure = row.nearest[1]
    values = {
        "codes": f"{share(row):.3%} of {row.limit:.3%}",
        "step": f"{row.max_step} of {row.step_limit}",
        "output": f"{row.output_rel_error or 0.0:.2g} of {MAX_OUTPUT_ERROR:g}",
    }
    return f"{MEASURES[measure]}: {values[measure]}"


def remark_of(row: ParityRow) -> str:
    """The same with where it is: `layer 3 output, codes that differ: 0.229% of 0.500%`."""
    layer, kind = place(row.name)
    return f"{kind if layer is None else f'layer {layer} {kind}'}, {nearest_text(row)}"


def limits_text(parity: Parity) -> str:
    """The limits of differing codes and steps of all tensors."""
    steps = sorted({row.step_limit for row in parity.rows} or {parity.limit_step})
    limits = f"{100 * parity.limit_fraction:.3g}%", " or ".join(map(str, steps))
    return f"At most {limits[0]} of the INT8 codes may differ beyond rounding, by at most {limits[1]}"


def parity_svg(results: Results) -> str:
    """By encoder layer, the part of its own limit that each tensor uses, in percent; may be empty."""
    if results.parity is None:
        return ""
    points: dict[str, dict[int, float]] = defaultdict(dict)
    for row in results.parity.rows:
        layer, kind = place(row.name)
        if layer is not None:
            points[kind][layer] = 100 * min(row.nearest[0], 100.0)
    return layer_chart(points, "part of its own limit that each tensor uses, %", "parity", 100, "own limit")
