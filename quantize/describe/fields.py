"""What a field of a configuration does to a model: found by changing it, on no device, so at no cost."""

import copy
from typing import TYPE_CHECKING, Any

from qdqbench.quantize.core.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def config_fields(model: "PreTrainedModel", layer: str, first: str, wide: int) -> dict[str, Any]:
    """The fields of a configuration that a `Family` names.

    Args:
        model: of any device; not changed.
        layer: one of its layers.
        first: first linear of the layer's feed-forward.
        wide: its outputs.

    Raises:
        UserError: the activation or the width of the feed-forward is no field of its own.
    """
    from transformers.activations import ACT2FN

    given = model.config.to_dict()
    before = _bare(model, layer)
    names = (n for n, value in given.items() if isinstance(value, str) and value in ACT2FN)
    others = ((n, "relu" if given[n] != "relu" else "silu") for n in names)
    changed = ((n, _bare(_rebuilt(model, n, other), layer)) for n, other in others)
    activation = next((n for n, after in changed if after and after != before), None)
    sizes = (n for n, value in given.items() if type(value) is int and value in (wide, wide // 2))
    width = next((n for n in sizes if _width(_rebuilt(model, n, 2 * given[n]), first) == 2 * wide), None)
    found = {"activation": activation, "intermediate": width}
    if lost := [what for what, name in found.items() if name is None]:
        raise UserError(
            f"the configuration of a {model.config.model_type!r} has no field for {' and '.join(lost)} of "
            "its feed-forward; its family needs a description by hand"
        )
    numbers = (n for n, value in given.items() if value is None or type(value) in (int, float))
    return {**found, "dropouts": tuple(n for n in numbers if "drop" in n)}


def _rebuilt(model: "PreTrainedModel", name: str, value: Any) -> Any:
    """The model with another value of a field; None where there is no such model."""
    import torch

    config = copy.deepcopy(model.config)
    try:
        setattr(config, name, value)
        with torch.device("meta"):
            return type(model)(config)
    except Exception:  # whatever a configuration that makes no sense raises
        return None


def _bare(model: Any, layer: str) -> list[str]:
    """Classes of the modules of a layer that have no weights, its activation among them."""
    inner = model.get_submodule(layer).modules() if model is not None else ()
    return [type(module).__name__ for module in inner if next(module.parameters(), None) is None]


def _width(model: Any, linear: str) -> int:
    return int(model.get_submodule(linear).out_features) if model is not None else 0
