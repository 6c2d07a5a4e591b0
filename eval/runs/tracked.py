"""A run in an experiment tracker: its training as it goes, its results at the end."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from qdqbench.eval.runs.run import StageProgress
from qdqbench.quantize.pipeline.session import Session
from qdqbench.quantize.utils.results import LogRow, Results
from qdqbench.quantize.utils.system.process import is_main_process
from qdqbench.quantize.utils.trackers import Log, TrackerName, open_tracker, result_values, row_values


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
