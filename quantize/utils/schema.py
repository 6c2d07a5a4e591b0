"""The base class of all schemas, the function that reads a file of one, and results in notebooks."""

from collections.abc import Iterable, Iterator, Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, dataclass_transform

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import UserError

if TYPE_CHECKING:
    import pandas

Schema = TypeVar("Schema", bound=BaseModel)
Positive = Annotated[int, Field(gt=0)]


def field(text: str, *, default: Any = ..., **constraints: Any) -> Any:
    """Describe a field of a record; without a default it is required."""
    return Field(default, description=text, **constraints)


@dataclass_transform(kw_only_default=True, field_specifiers=(Field, field))
class Strict(BaseModel):
    """A record without unknown fields."""

    model_config = ConfigDict(extra="forbid")


class Frozen(Strict):
    """One whose values do not change."""

    model_config = ConfigDict(frozen=True)


def read(path: Path, schema: type[Schema], what: str, again: str) -> Schema:
    """Read a JSON file; a `UserError` says `what` it should be, its first fault, how to get it `again`."""
    try:
        return schema.model_validate(files.read_json(path, again))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        told = "".join(c if c.isprintable() else "?" for c in f"{where[:100]}: {first['msg'][:200]}")
        raise UserError(f"{path} is no {what} of this version of qdqbench ({told}); {again}") from error


class Shown:
    """A result that shows a few facts in place of all that it holds."""

    def facts(self) -> dict[str, Any]:
        raise NotImplementedError

    def __repr__(self) -> str:
        """Return one line."""
        facts = (f"{name}: {value}" for name, value in self.facts().items())
        return f"{type(self).__name__}({', '.join(facts)})"

    def __str__(self) -> str:
        """Return one line too."""
        return repr(self)

    def _repr_html_(self) -> str:
        rows = (
            f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>"
            for name, value in self.facts().items()
        )
        return f"<table><caption>{type(self).__name__}</caption>{''.join(rows)}</table>"


class Tabular(Shown, Strict):
    """A result that is a table too."""

    def rows(self) -> Iterable[Any]:
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """Return what a notebook shows of it."""
        return {"rows": sum(1 for _ in self.rows())}

    def to_frame(self) -> "pandas.DataFrame":
        import pandas

        rows = (row.model_dump() if isinstance(row, Strict) else row for row in self.rows())
        return pandas.DataFrame([*rows])


def stage_rows(stages: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row per stage and metric of `StageResult`s; `delta` is the paired difference from FP32."""
    for name, stage in stages.items():
        pair = stage.vs_fp32.model_dump(include={"delta", "delta_stderr"}) if stage.vs_fp32 else {}
        for metric, value in stage.metrics.items():
            row = {"stage": name, "metric": metric, "value": value, "stderr": stage.stderr.get(metric)}
            yield row | {"n": stage.n} | {key: found.get(metric) for key, found in pair.items()}
