"""A run in an experiment tracker: its training as it goes, its results at the end."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from qdqbench.eval.runs.results import Results
from qdqbench.eval.runs.run import StageProgress
from qdqbench.quantize.pipeline.session import Session
from qdqbench.quantize.utils.system.process import is_main_process
from qdqbench.quantize.utils.trackers import Log, LogRow, TrackerName, open_tracker, row_values


@dataclass
class TrackedRun:
    log: Log
    last: LogRow | None = None  # that was logged

    def follow(self, progress: Callable[[StageProgress], None]) -> Callable[[StageProgress], None]:
        def show(now: StageProgress) -> None:
            if now.row:
                self._log_row(now.row)
            progress(now)

        return show

    def finish(self, results: Results) -> None:
        for row in results.training.log if results.training and not self.last else ():  # of an earlier call
            self._log_row(row)
        self.log(result_values(results), self.last.step if self.last else 0)

    def _log_row(self, row: LogRow) -> None:
        self.last = row
        self.log(row_values(row), row.step)


@contextmanager
def track_run(name: TrackerName | None, session: Session) -> Iterator[TrackedRun]:
    config = session.config
    known = {"recipe": config.recipe.name, "model": session.model_name, "task": config.task.name}
    known |= {"data": session.data_source, "seed": str(config.seed)}
    with open_tracker(name if is_main_process() else None, session.folder, known) as log:
        yield TrackedRun(log)


def result_values(results: Results) -> dict[str, float]:
    """Return the metrics of every stage, their differences from FP32, speed-ups and the gate's verdict."""
    values = {"gate/passed": float(results.gate.passed)}
    for name, stage in results.stages.items():
        values |= {f"{name}/{metric}": value for metric, value in stage.metrics.items()}
        if stage.vs_fp32:
            values |= {f"{name}/{metric}_vs_fp32": value for metric, value in stage.vs_fp32.delta.items()}
    for row in results.speed:
        name = f"speedup/{row.system} over {row.baseline}/{row.config}"
        values[re.sub(r"[^\w./ -]", "-", name)] = row.value  # MLflow takes no other characters
    return values
