"""A schema whose fields say what they mean in each of the ways."""

from pydantic import BaseModel, Field


class Base(BaseModel):
    """Its fields are inherited."""

    inherited: int
    """In the base."""


class Documented(Base):
    """One field for each way."""

    below: int  # not this
    """In two lines
    below it."""
    trailing: int = 1  # at its end
    # above it
    above: int = 2
    described: int = Field(default=3, description="in its description")
    silent: int = 4
