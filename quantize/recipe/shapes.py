"""Shapes that an engine is built for, as a recipe says them: one profile, several, or those of the data."""

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from qdqbench.quantize.core.strict import Frozen, Positive

Range = tuple[Positive, Positive, Positive]
AUTO = "auto"
# tags keep pydantic from reporting a wrong key once for each form
FORMS = ("mapping", "list", "word")


class Shapes(Frozen):
    """Minimum, optimum and maximum of the optimization profile."""

    batch: Range = Field(default=(1, 32, 128), description="Samples: [min, opt, max] in rising order.")
    length: Range = Field(
        default=(16, 128, 128), description="Tokens of a sample: [min, opt, max] in rising order."
    )

    @model_validator(mode="after")
    def _ordered(self) -> "Shapes":
        for name, values in (("batch", self.batch), ("length", self.length)):
            if list(values) != sorted(values):
                raise ValueError(f"{name} must be [min, opt, max] in rising order, not {list(values)}")
        return self


def _form(value: object) -> str:
    return "list" if isinstance(value, (list, tuple)) else "word" if isinstance(value, str) else "mapping"


ShapesForm = Annotated[
    Annotated[Shapes, Tag("mapping")]
    | Annotated[tuple[Shapes, ...], Tag("list")]
    | Annotated[Literal["auto"], Tag("word")],
    Discriminator(_form),
]
