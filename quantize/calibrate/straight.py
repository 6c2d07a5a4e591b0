"""k and v of an INT8 attention straight from their GEMMs: no kernel between them for scales and biases.

An engine's INT8 GEMM can scale by one scalar and round; a factor for each channel or a bias behind it is a
kernel of its own, which reads and writes the tensor once more. Where the recipe gives key and value `weights:
int8/tensor`, both go where they cost nothing:

- **The bias of k** adds the same number to all scores of a row, which the softmax takes out: it is dropped.
- **The bias of v** adds itself to every row of P v, as rows of P sum to 1: it goes, times the weight, into
  the bias of the output projection. (With an INT8 softmax the rows sum to nearly 1.)
- **The rows of their weights** get about equal ranges, so that one scale serves as well as one per channel:
  factors of the rows of k are divided out in those of q, factors of the rows of v in the columns of the
  output projection (Nagel et al. 2019, arXiv 1906.04721, section 4.1). They are powers of two.

Not where q and k are rotated, or where other terms read k before the softmax.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from qdqbench.quantize.calibrate.record import Smoothing
from qdqbench.quantize.calibrate.smoothing import apply
from qdqbench.quantize.core.arrays import Float64
from qdqbench.quantize.recipe.plan import Plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def straight(plan: Plan) -> list[str]:
    """INT8 attentions whose k and v have linears of their own with one weight scale."""
    family = plan.family
    if family.rotary or family.terms:
        return []
    found = []
    for name in plan.attention:
        made = [family.made_by(name, role) for role in ("key", "value")]
        if all(rows.parts == 1 and plan.int8.get(rows.linear) == "tensor" for rows in made):
            found.append(name)
    return found


def straight_linears(plan: Plan) -> set[str]:
    """The linears that make k and v there."""
    return {plan.family.made_by(name, role).linear for name in straight(plan) for role in ("key", "value")}


def equalize(model: "PreTrainedModel", plan: Plan, moved: Smoothing) -> Smoothing:
    """Give the weight rows of k and v about equal ranges, in place.

    Args:
        moved: factors that are in the weights already.

    Returns:
        All factors.
    """
    rows: dict[str, list[float]] = {}
    columns: dict[str, list[float]] = {}
    for name in straight(plan):
        query, key, value, output = (
            plan.family.made_by(name, role).linear for role in ("query", "key", "value", "output")
        )
        of_key, of_value = (_equal_rows(model, linear) for linear in (key, value))
        rows |= {key: of_key.tolist(), query: (1 / of_key).tolist(), value: of_value.tolist()}
        columns[output] = (1 / of_value).tolist()
    apply(model, Smoothing(rows=rows, columns=columns))
    return Smoothing(
        inputs=moved.inputs, columns=_times(moved.columns, columns), rows=_times(moved.rows, rows)
    )


def moved_biases(model: "PreTrainedModel", plan: Plan) -> dict[str, list[float]]:
    """What takes the biases out of k and v, and v's into the output projection; float32 values by linear."""
    added: dict[str, list[float]] = {}
    for name in straight(plan):
        linears = (plan.family.made_by(name, role).linear for role in ("key", "value", "output"))
        key, value, output = linears
        modules: dict[str, Any] = {linear: model.get_submodule(linear) for linear in (key, value, output)}
        if modules[key].bias is not None:
            added[key] = (-modules[key].bias.detach().float()).cpu().tolist()
        if modules[value].bias is not None and modules[output].bias is not None:
            bias = modules[value].bias.detach()
            moved = modules[output].weight.detach().double() @ bias.double()
            added |= {value: (-bias.float()).cpu().tolist(), output: moved.float().cpu().tolist()}
    return added


def _equal_rows(model: "PreTrainedModel", linear: str) -> Float64:
    """Powers of two that bring the largest magnitude of every row near their geometric mean; 1 for zeros."""
    module: Any = model.get_submodule(linear)
    ranges: Float64 = module.weight.detach().abs().amax(dim=1).double().cpu().numpy()
    alive = ranges > 0
    exponents = np.log2(np.where(alive, ranges, 1.0))
    mean = exponents[alive].mean() if alive.any() else 0.0
    factors: Float64 = np.exp2(np.where(alive, np.clip(np.rint(mean - exponents), -8, 8), 0.0))
    return factors


def _times(one: dict[str, list[float]], other: dict[str, list[float]]) -> dict[str, list[float]]:
    """Products of factors by linear; of one alone where the other has none."""
    both = {name: (np.array(one[name]) * other[name]).tolist() for name in one.keys() & other.keys()}
    return one | other | both
