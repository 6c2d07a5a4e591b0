"""A schema whose fields say what they mean in each of the ways."""

from pydantic import BaseModel, Field


class Base(BaseModel):
    """Its fields are inherited."""

    inherited: int
    """In the base."""


class Documented(Base):
    """One field for each way."""

    below: int
    """In two lines
    below it."""
    described: int = Field(default=3, description="in its description")
    silent: int = 4  # no meaning
