"""The base of every schema that is read or written, and the way to read a file of one."""

from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import UserError

Schema = TypeVar("Schema", bound=BaseModel)
Positive = Annotated[int, Field(gt=0)]


def field(text: str, default: Any = None, **constraints: Any) -> Any:
    """Return a field with its help and default (`...`: required), and constraints of `pydantic.Field`."""
    return Field(default, description=text, **constraints)


class Strict(BaseModel):
    """A record without unknown fields."""

    model_config = ConfigDict(extra="forbid")


class Frozen(Strict):
    """One whose values do not change."""

    model_config = ConfigDict(frozen=True)


def read(path: Path, schema: type[Schema], what: str, again: str) -> Schema:
    """Read and check a JSON file; errors say `what` it should be, and how to get it `again`.

    Raises:
        UserError: missing, not JSON, or not of this schema; names the first field that is wrong.
    """
    try:
        return schema.model_validate(files.read_json(path, again))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        told = "".join(c if c.isprintable() else "?" for c in f"{where[:100]}: {first['msg'][:200]}")
        raise UserError(f"{path} is no {what} of this version of qdqbench ({told}); {again}") from error
