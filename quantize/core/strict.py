"""The base of every schema that is read or written."""

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """A record without unknown fields."""

    model_config = ConfigDict(extra="forbid")
