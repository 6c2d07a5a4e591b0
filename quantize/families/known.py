"""The families that are supported, and which of them a model is of."""

from typing import Any

from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.families.albert import ALBERT
from qdqbench.quantize.families.bert import BERT, ELECTRA, ROBERTA
from qdqbench.quantize.families.distilbert import DISTILBERT
from qdqbench.quantize.families.family import Family
from qdqbench.quantize.families.modernbert import MODERNBERT
from qdqbench.quantize.families.relative import DEBERTA_V2, MPNET

FAMILIES = (  # whose whole path is tested
    BERT,
    ROBERTA,
    ELECTRA,
    DISTILBERT,
    MPNET,
    ALBERT,
    DEBERTA_V2,
    MODERNBERT,
)
# Families that recipes with a layout describe, by model type. A recipe enters its own when it is read, and
# again when it is held to a model: the whole program asks for the family of a model by its type alone.
_DESCRIBED: dict[str, Family] = {}


def family_of(of: Any, model: str = "") -> Family:
    """The family of a model type such as "bert", or of a transformers configuration; `model` is for messages.

    Raises:
        UserError: it is not supported.
    """
    model_type = of if isinstance(of, str) else of.model_type
    if found := known_family(model_type) or _DESCRIBED.get(model_type):
        return found
    known = ", ".join(name for family in FAMILIES for name in family.model_types)
    raise UserError(
        f"{f'model {model}' if model else 'the model'} is a {model_type!r}; supported here: {known} "
        f"(config.json, key model_type); for others `qdqbench recipes new --model {model or 'DIR'}` writes a "
        "recipe"
    )


def known_family(model_type: str) -> Family | None:
    """The family of a model type that needs no description by a recipe."""
    return next((family for family in FAMILIES if model_type in family.model_types), None)


def describe(family: Family) -> None:
    """Let models of this process be of a family that a recipe describes; of two the last counts."""
    _DESCRIBED.update(dict.fromkeys(family.model_types, family))


def family_named(name: str) -> Family:
    """The family that a recipe names; the schema has refused all other names."""
    return next(family for family in (*FAMILIES, *_DESCRIBED.values()) if family.name == name)


def require_family(recipe: str, family: str, model: str, config: Any) -> Family:
    """The family of a model, which must be the one that a recipe is for: `family` is its `model.family`.

    Raises:
        UserError: they differ.
    """
    found = family_of(config, model)
    if found.name != family:
        raise UserError(
            f"recipe {recipe} is for model family {family!r}, but model {model} is a {config.model_type!r}; "
            f"take a recipe of family {found.name}"
        )
    return found
