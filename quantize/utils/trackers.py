"""Experiment trackers: a training's log and a run's results in TensorBoard, Weights & Biases or MLflow."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from qdqbench.quantize.utils.errors import MissingDevice, UserError
from qdqbench.quantize.utils.names import install_command
from qdqbench.quantize.utils.schema import Strict, field

TrackerName = Literal["tensorboard", "wandb", "mlflow"]
Log = Callable[[Mapping[str, float], int], None]  # of values by name, at a step
PROJECT = "qdqbench"


class LogRow(Strict):
    """One look at the loss, or one evaluation on the held-out rows."""

    step: int = field("Optimizer steps done; 0 is before training.")
    epoch: float = field("Passes over the training rows done.")
    loss: float | None = field("Training loss since the previous row; null in an evaluation.", default=None)
    learning_rate: float | None = field("Rate of the next step; null in an evaluation.", default=None)
    gradient_norm: float | None = field("Norm before clipping; null in an evaluation.", default=None)
    score: float | None = field("Held-out score, higher is better; it chooses the weights.", default=None)
    values: dict[str, float] = field(
        "Figures of an evaluation on the held-out rows: `loss` against the labels, the metrics, and for QAT "
        "the SQNR in dB of answers (`sqnr_db`), hidden states (`hidden_db`) and their mean (`score_db`).",
        default={},
    )


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
    None: lambda folder, config, stack: lambda values, step: None,
    "tensorboard": _open_tensorboard,
    "wandb": _open_wandb,
    "mlflow": _open_mlflow,
}


def row_values(row: LogRow, prefix: str = "") -> dict[str, float]:
    """Return the values of one line of a training's log."""
    shown = {f"train/{name}": getattr(row, name) for name in ("loss", "learning_rate", "gradient_norm")}
    shown |= {"held_out/score": row.score} | {f"held_out/{name}": value for name, value in row.values.items()}
    return {f"{prefix}{name}": value for name, value in shown.items() if value is not None}
