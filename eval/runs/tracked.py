"""A run or fine-tuning in an experiment tracker: its training as it goes, its results at the end."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qdqbench.eval.runs.results import Results
from qdqbench.quantize.utils.progress import Reporter, reporting_to
from qdqbench.quantize.utils.system.process import is_main_process
from qdqbench.quantize.utils.trackers import Log, LogRow, TrackerName, open_tracker, row_values

SEED = "seed "  # begins the steps of a fine-tuning


class Tracked(Reporter):
    """Logs each row of a training; those of seeds under a prefix."""

    prefix = ""

    def __init__(self, log: Log) -> None:
        self.log_values, self.last = log, 0  # step that was logged

    def begin(self, step: str, done: float = 0, of: float = 0, *, reused: bool = False) -> None:
        self.prefix = f"{step.replace(' ', '-')}/" if step.startswith(SEED) else ""
        super().begin(step, done, of, reused=reused)

    def advance(self, done: float = 0, total: float = 0, phase: str = "", row: LogRow | None = None) -> None:
        if row:
            self.log_row(row)
        super().advance(done, total, phase, row)

    def log_row(self, row: LogRow) -> None:
        self.last = row.step
        self.log_values(row_values(row, self.prefix), row.step)

    def finish(self, results: Results) -> None:
        for row in results.training.log if results.training and not self.last else ():  # of an earlier call
            self.log_row(row)
        self.log_values(result_values(results), self.last)


@contextmanager
def tracking(name: TrackerName | None, folder: Path, known: Mapping[str, Any]) -> Iterator[Tracked]:
    with (
        open_tracker(name if is_main_process() else None, folder, known) as log,
        reporting_to(Tracked(log)) as tracked,
    ):
        yield tracked


def result_values(results: Results) -> dict[str, float]:
    """Return the metrics of every stage, their differences from FP32, speed-ups and the gate's verdict."""
    values = {"gate/passed": float(results.gate.passed)}
    for name, stage in results.stages.items():
        values |= {f"{name}/{metric}": value for metric, value in stage.metrics.items()}
        if stage.vs_fp32:
            values |= {f"{name}/{metric}_vs_fp32": value for metric, value in stage.vs_fp32.delta.items()}
    for row in reversed(results.speed):  # the latest bench counts
        name = f"speedup/{row.system} over {row.baseline}/{row.config}"
        values[re.sub(r"[^\w./ -]", "-", name)] = row.leading.value  # MLflow takes no other characters
    return values
