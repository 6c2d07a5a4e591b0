"""Amax that a recipe gives: they stand instead of what calibration finds, which is kept beside them."""

import difflib
import math
from collections.abc import Collection, Mapping
from typing import Any

from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.core.names import name_list
from qdqbench.quantize.fakequant.quantizers import quantizer_kind
from qdqbench.quantize.recipe.plan import Plan
from qdqbench.quantize.recipe.straight import linears_of, shifted, straight

FAR = 2.0  # times what calibration found, or a part of it, from which on an amax is named


def named(given: Mapping[str, float], names: Collection[str], plan: Plan, prefix: str) -> dict[str, float]:
    """Given amax by the full names of quantizers.

    Args:
        given: by quantizer, with or without the prefix of the base model.
        names: of all quantizers.
        prefix: `bert` in `bert.encoder.layer.0`.

    Raises:
        UserError: names that no quantizer has, or whose tensor is changed before; lists all of them.
    """
    straightened = _straightened(plan)
    known = {name for name in names if quantizer_kind(name) not in ("weight", "softmax")}
    found: dict[str, float] = {}
    wrong = []
    for name, amax in given.items():
        full = name if name in known else f"{prefix}.{name}"
        module = full.rpartition(".")[0]
        if full not in known:
            near = difflib.get_close_matches(full, known, 1)
            wrong.append(
                f"{name} is no quantizer of an INT8 activation" + (f" (near: {near[0]})" if near else "")
            )
        elif plan.scaling_of(module).smooth != "none":
            wrong.append(f"{name} is smoothed, which changes its range")
        elif full in straightened:
            wrong.append(
                f"{name} is given another range, so that k, v and q come straight from their GEMMs (weights: "
                "int8/tensor in an INT8 attention)"
            )
        else:
            found[full] = amax
    if wrong:
        raise UserError(f"calibration.amax cannot be used: {name_list(wrong)}; change the recipe")
    return found


def _straightened(plan: Plan) -> set[str]:
    """Quantizers of tensors that `straight.py` changes."""
    attentions, linears = straight(plan), list[str]()
    for name in shifted(plan):
        linears += linears_of(plan, name, "query", "key", "value")
    for name in attentions:
        linears += linears_of(plan, name, "output")
    return {f"{linear}.input_quantizer" for linear in linears} | {
        f"{name}.{x}_bmm_quantizer" for name in attentions for x in "qkv"
    }


def impose(quantizers: Mapping[str, Any], given: Mapping[str, float]) -> dict[str, float]:
    """Set the given amax; what calibration found for them, by quantizer."""
    import torch

    found = {}
    for name, amax in given.items():
        quantizer = quantizers[name]
        found[name] = float(quantizer.amax)
        quantizer.amax = torch.tensor(amax, dtype=torch.float32, device=quantizer.amax.device)
    return found


def compared(given: Mapping[str, float], found: Mapping[str, float]) -> tuple[list[str], list[str]]:
    """How given amax compare with what calibration found: a note, and a warning of those that are far off."""
    ratios = {name: given[name] / amax for name, amax in found.items() if amax > 0 and math.isfinite(amax)}
    if not ratios:
        return [], []
    ordered = sorted(ratios.values())
    far = [name for name, ratio in ratios.items() if not 1 / FAR < ratio < FAR]
    told = (
        f"{len(given)} amax are given by the recipe: {ordered[0]:.2f} to {ordered[-1]:.2f} times what "
        f"calibration found (median {ordered[len(ordered) // 2]:.2f})"
    )
    if not far:
        return [told], []
    far.sort(key=lambda name: -abs(math.log(ratios[name])))
    listed = [f"{name} ({given[name]:.3g} for {found[name]:.3g})" for name in far]
    return [told], [
        f"{len(far)} of {len(given)} amax that the recipe gives are off by more than a factor {FAR:g}: "
        f"{name_list(listed)}"
    ]
