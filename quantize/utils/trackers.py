"""Experiment trackers: a training's log and a run's results in TensorBoard, Weights & Biases or MLflow."""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from qdqbench.quantize.utils.errors import MissingDevice, UserError
from qdqbench.quantize.utils.names import install_command

if TYPE_CHECKING:
    from qdqbench.quantize.utils.results import LogRow, Results

TrackerName = Literal["tensorboard", "wandb", "mlflow"]
Log = Callable[[Mapping[str, float], int], None]  # of values by name, at a step
PROJECT = "qdqbench"


def require_tracker(name: TrackerName | None) -> None:
    if name is not None and find_spec(name) is None:
        raise MissingDevice(
            f"--report-to {name} needs its library, which is not installed; `{install_command(name)}`"
        )


@contextmanager
def open_tracker(name: TrackerName | None, folder: Path, config: Mapping[str, Any]) -> Iterator[Log]:
    """Open a run of the folder's name in a tracker, and give the function that logs to it.

    TensorBoard writes to a subfolder; the others where their own settings say.
    """
    with ExitStack() as stack:
        try:
            with redirect_stdout(sys.stderr):  # which is of the command's JSON
                log = _OPEN[name](folder, config, stack)
        except Exception as error:  # no login, no server, a damaged store: each library has its own
            why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise UserError(f"cannot report to {name} ({why}); correct its settings") from error
        yield log
        with redirect_stdout(sys.stderr):
            stack.close()


def _open_none(folder: Path, config: Mapping[str, Any], stack: ExitStack) -> Log:
    return lambda values, step: None


def _open_tensorboard(folder: Path, config: Mapping[str, Any], stack: ExitStack) -> Log:
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = stack.enter_context(SummaryWriter(folder / "tensorboard"))
    for name, value in config.items():
        writer.add_text(name, str(value))

    def log(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return log


def _open_wandb(folder: Path, config: Mapping[str, Any], stack: ExitStack) -> Log:
    import wandb

    run = stack.enter_context(wandb.init(project=PROJECT, name=folder.name, config=dict(config)))
    run.define_metric("*", step_metric="step")  # its own may only rise, and each seed starts at 0
    return lambda values, step: run.log({"step": step, **values})


def _open_mlflow(folder: Path, config: Mapping[str, Any], stack: ExitStack) -> Log:
    import mlflow

    mlflow.set_experiment(PROJECT)
    stack.enter_context(mlflow.start_run(run_name=folder.name))
    mlflow.log_params(dict(config))
    return lambda values, step: mlflow.log_metrics(dict(values), step=step)


_OPEN: dict[TrackerName | None, Callable[[Path, Mapping[str, Any], ExitStack], Log]] = {
    None: _open_none,
    "tensorboard": _open_tensorboard,
    "wandb": _open_wandb,
    "mlflow": _open_mlflow,
}


def row_values(row: "LogRow", prefix: str = "") -> dict[str, float]:
    """Return the values of one line of a training's log."""
    shown = {f"train/{name}": getattr(row, name) for name in ("loss", "learning_rate", "gradient_norm")}
    shown |= {"held_out/score": row.score} | {f"held_out/{name}": value for name, value in row.values.items()}
    return {f"{prefix}{name}": value for name, value in shown.items() if value is not None}


def result_values(results: "Results") -> dict[str, float]:
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
