"""What a model is made of, by class and place, and what of it becomes INT8."""

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from qdqbench.quantize.describe.flow import module_kind
from qdqbench.quantize.describe.frame import any_number
from qdqbench.quantize.describe.recognise import Recognised

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ModuleRow(NamedTuple):
    """Modules of one class in one place."""

    module: str  # * for numbers; empty: everywhere
    class_name: str
    number: int
    role: str  # empty: none that matters
    becomes: str  # INT8, FP16, or empty where nothing is computed with weights or products


def inventory(model: "PreTrainedModel", found: Recognised) -> list[ModuleRow]:
    """Every module that computes, in model order; those without weights by class alone."""
    prefix = f"{model.base_model_prefix}."
    rows: Counter[tuple[str, str, str, str]] = Counter()
    for name, module in model.named_modules():
        class_name, place, role = type(module).__name__, found.family.place(name), ""
        pattern = f"{any_number(place.layers)}.*.{place.path}" if place else name
        pattern = pattern.removeprefix(prefix)
        becomes = "FP16" if pattern in found.left else ""
        if (kind := module_kind(module)) == "linear":
            role = found.family.role(name)
            becomes = "INT8" if place and role != "other" else "FP16"
        elif kind == "norm":
            role, becomes = (found.family.norms.get(place.path, "") if place else ""), "FP16"
        elif kind or pattern in found.left:
            role, becomes = "embeddings" if kind == "embedding" else "", "FP16"
        elif place and place.path == found.attention:
            role, becomes = "attention", "FP16"
        elif [*module.children()]:
            continue
        else:
            pattern = ""
        rows[pattern, class_name, role, becomes] += 1
    return [
        ModuleRow(module, kind, count, role, becomes) for (module, kind, role, becomes), count in rows.items()
    ]
