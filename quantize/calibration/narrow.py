"""One calibration for many placements: the part of its record that a plan needs."""

from qdqbench.quantize.calibration.record import CalibrationRecord, QuantizerState, Smoothing
from qdqbench.quantize.recipe.plan import Plan
from qdqbench.quantize.recipe.schema import Recipe


def narrowed(plan: Plan, plain: CalibrationRecord, fused: CalibrationRecord) -> CalibrationRecord:
    """The record of a plan, from records with every candidate in INT8.

    An amax is measured in full precision, so it does not depend on what else is INT8, and smoothing looks at
    one layer alone. Only what a layer's attention is has a say there: an INT8 one is smoothed too.

    Args:
        plan: a part of both.
        plain: all linears in INT8, no attention.
        fused: all linears and attentions in INT8.
    """
    family = plan.family
    inside = {family.layer_of(name) for name in plan.attention}
    wanted = [f"{name}.{kind}_quantizer" for name in plan.int8 for kind in ("weight", "input")]
    wanted += [f"{name}.{x}_bmm_quantizer" for name in plan.attention for x in "qkvp"]

    def of(name: str) -> CalibrationRecord:
        return fused if family.layer_of(name) in inside else plain

    smoothing = Smoothing()
    for record in (plain, fused):
        given = record.smoothing
        for name, values in given.columns.items():
            if of(name) is record and (name in plan.int8 or name not in given.inputs):
                smoothing.columns[name] = values
        smoothing.inputs |= {n: v for n, v in given.inputs.items() if of(n) is record and n in plan.int8}
        smoothing.rows |= {n: v for n, v in given.rows.items() if of(n) is record}
    centers = {n: v for record in (plain, fused) for n, v in record.centers.items() if of(n) is record}
    shifts = {name: each for name, each in fused.shifts.items() if name in plan.attention}
    softmax = [row for row in fused.softmax if row.module in plan.attention]
    quantizers = {name: of(name).quantizers[name] for name in wanted}
    splits = {name: of(name).splits[name] for name in fused.splits if name in plan.int8}
    for name, each in fused.splits.items():
        rows = f"{family.beside(name, 'ffn-in')}.weight_quantizer"
        if name not in splits and rows in quantizers:
            quantizers[rows] = _without_copies(quantizers[rows], each.extra, 1 + family.gated)
    parts = {"shifts": shifts, "smoothing": smoothing, "splits": splits, "centers": centers}
    return fused.model_copy(update={"quantizers": quantizers, "softmax": softmax, **parts})


def _without_copies(state: QuantizerState, extra: int, parts: int) -> QuantizerState:
    """Amax of the rows that the model has, which come first: of the channels, and of their gates."""
    if not isinstance(state.amax, list):
        return state
    width = len(state.amax) // parts
    kept = [value for n, value in enumerate(state.amax) if n % width < width - extra]
    return state.model_copy(update={"amax": kept})


def without_corrections(recipe: Recipe) -> Recipe:
    """The recipe as trials judge it."""
    section = recipe.calibration.model_copy(update={"bias_correction": False})
    return recipe.model_copy(update={"calibration": section})
