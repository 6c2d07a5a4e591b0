"""The section of a recipe that describes a family which is not known here: where its models have what."""

from pydantic import Field

from qdqbench.quantize.core.strict import Frozen
from qdqbench.quantize.families.family import Family, Norm, Residual, Role


class Layout(Frozen):
    """Where models of a family have what; `qdqbench recipes new` writes it. Paths are inside a layer."""

    layers: str = Field(description="Path of the layers inside the base model; `*` stands for a number.")
    linears: dict[str, Role] = Field(
        description="Role of every linear of a layer; `other` is one that was not recognised."
    )
    outside: dict[str, Role] = Field(description="Roles of linears in no layer, by the ends of their names.")
    attention: str | None = Field(
        default=None,
        description="Module that calls transformers' AttentionInterface; null: none that can be in INT8.",
    )
    head_size: str = Field(default="head_dim", description="Attribute of the attention.")
    residuals: dict[str, tuple[Role, ...]] = Field(
        default={},
        description="Modules that add a residual, that of the attention first, and the linears that read "
        "the same tensor.",
    )
    norms: dict[str, Norm] = Field(description="What each LayerNorm of a layer normalises.")
    embeddings: str = Field(description="In the base model.")
    embeddings_norm: str = Field(default="", description="In the base model; empty: none.")
    embeddings_linear: str | None = Field(
        default=None, description="In the base model, where one stands before the layers."
    )
    layers_return_tuples: bool = Field(
        default=False, description="Whether a layer returns more than one tensor."
    )
    pooler: str | None = Field(default=None, description="In the base model.")
    dropouts: tuple[str, ...] = Field(default=(), description="Fields of the configuration.")
    activation: str = Field(description="Field of the configuration: that of the feed-forward.")
    intermediate: str = Field(description="Field of the configuration: width of the feed-forward.")
    inputs: tuple[str, ...] = Field(min_length=1, description="Of the model, in the order of the graph's.")
    positions_follow_padding: bool = Field(
        default=False, description="Whether the first token has position `pad_token_id` + 1."
    )

    def family(self, name: str) -> Family:
        """The family of the model type `name`."""
        added = tuple(Residual(*each) for each in self.residuals.items())
        return Family(name=name, model_types=(name,), **(dict(self) | {"residuals": added}))

    @classmethod
    def of(cls, family: Family) -> "Layout":
        """What a description says."""
        fields = {name: getattr(family, name) for name in cls.model_fields}
        return cls(**(fields | {"residuals": {each.module: each.readers for each in family.residuals}}))
