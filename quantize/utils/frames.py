"""Typed results as tables of pandas."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from qdqbench.quantize.utils.schema import Strict

if TYPE_CHECKING:
    import pandas


class Tabular(Strict):
    """A result that is a table too."""

    def rows(self) -> Iterable[Any]:
        raise NotImplementedError

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
