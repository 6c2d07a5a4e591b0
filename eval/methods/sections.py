"""Which calibration sections are compared, and the recipe that comes of the best one."""

from collections.abc import Sequence
from typing import Any

import yaml
from pydantic import ValidationError

from qdqbench.eval.methods.results import METHODS_RECIPE
from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.recipe.schema import Recipe, parse_recipe
from qdqbench.quantize.recipe.sections import Calibration

METHODS = ("max", "percentile/99.9", "percentile/99.99", "percentile/99.999", "mse", "entropy")
ALPHA = 0.65  # of SmoothQuant where the recipe does not smooth
EXTRA = 64  # channels for copies where the recipe does not split


def sections(own: Calibration, methods: Sequence[str], smooths: Sequence[str]) -> list[Calibration]:
    """Calibration sections to compare, the recipe's own first, none twice.

    Args:
        methods: of activations; none: `METHODS` and the recipe's own.
        smooths: "none", "gain" or an alpha; none: "none" and the recipe's own, or else 0.65.

    Returns:
        The recipe's own, every method with every smoothing, and, where nothing was named, the recipe's own
        with one thing changed: weights_method, bias_correction, split_outliers, smooth (gain).

    Raises:
        UserError: not a method, or not a way to smooth.
    """
    chosen = [_smooth(text) for text in smooths]
    chosen = chosen or ["none", ALPHA if own.smooth == "none" else own.smooth]
    found = [own]
    for smooth in chosen:
        for method in methods or dict.fromkeys((*METHODS, own.method)):
            found.append(_changed(own, {"method": method, "smooth": smooth}))
    if not methods and not smooths:
        weights = "max" if own.weights_method == "mse" else "mse"
        found.append(_changed(own, {"weights_method": weights}))
        found.append(_changed(own, {"bias_correction": not own.bias_correction}))
        found.append(_changed(own, {"split_outliers": 0 if own.split_outliers else EXTRA}))
        found.append(_changed(own, {"smooth": ALPHA if own.smooth == "gain" else "gain"}))
    return [section for at, section in enumerate(found) if section not in found[:at]]


def _smooth(text: str) -> float | str:
    try:
        return text if text in ("none", "gain") else float(text)
    except ValueError:
        return text  # is refused with every other that does not fit


def _changed(own: Calibration, changes: dict[str, Any]) -> Calibration:
    try:
        return Calibration.model_validate(own.model_dump() | changes)
    except ValidationError as error:
        found = error.errors()[0]
        if found["loc"][0] == "smooth":
            raise UserError(
                f"--smooth {changes['smooth']} is none of none, gain and an alpha from 0 to 1, such as 0.65"
            ) from error
        raise UserError(f"--method: {found['msg'].removeprefix('Value error, ')}") from error


def write_up_method(recipe: Recipe, section: Calibration) -> tuple[Recipe, str]:
    """The recipe with another calibration section, and its YAML, which parses back to it."""
    chosen = recipe.model_copy(
        update={"name": f"{recipe.name.removesuffix('-calibrated')}-calibrated", "calibration": section}
    )
    short = chosen.model_dump(mode="json", exclude_defaults=True)
    text = yaml.safe_dump(short, sort_keys=False, allow_unicode=True, default_flow_style=None, width=100)
    if parse_recipe(text, METHODS_RECIPE) != chosen:
        raise AssertionError(f"{METHODS_RECIPE} does not hold the recipe that was chosen")
    return chosen, text
