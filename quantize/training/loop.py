"""The training loop of `finetune` and `qat`, on one process or many (Hugging Face Accelerate).

A global batch is a function of seed, epoch and position (`training_data`), every process takes its rows of
it, and the gradient is that of the mean over the whole batch: so the number of processes and of accumulated
parts changes rounding only, and a resumed run goes on exactly where it was. That is why the loop is no
`Trainer`: its sampler, Accelerate's, fills the last batch of an epoch with rows of the first, and cuts
batches by the number of processes. Schedule, seeds, clipping, autocast and saved state are the libraries'.
"""

import contextlib
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qdqbench.quantize.recipe.training import Training
from qdqbench.quantize.training import checkpoints
from qdqbench.quantize.training.processes import resolve_precision, use_matmul_precision
from qdqbench.quantize.training.rows import (
    TrainingData,
    epoch_batches,
    evaluation_steps,
    split_batch,
    steps_per_epoch,
    total_steps,
)
from qdqbench.quantize.utils.arrays import Int64
from qdqbench.quantize.utils.errors import CheckFailed
from qdqbench.quantize.utils.progress import report_phase
from qdqbench.quantize.utils.results import LogRow

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from torch import nn

MOST_DIVERGED = 2  # evaluations in a row
FURTHER = 10  # times the distance before training


@dataclass(frozen=True)
class HeldOut:
    """An evaluation on the held-out rows."""

    score: float  # higher is better; chooses the weights that are kept
    values: dict[str, float]  # by name, for the log
    collapsed: bool  # the answers no longer depend on the input


@dataclass
class State:
    """What a checkpoint holds beside model, optimizer and scheduler."""

    step: int = 0
    first_score: float | None = None
    best_step: int = -1
    best_score: float = -math.inf
    last_score: float = -math.inf
    without_gain: int = 0  # evaluations
    collapsed: int = 0  # evaluations in a row
    far: int = 0  # likewise
    seconds: float = 0.0
    samples: int = 0
    log: list[dict[str, Any]] = field(default_factory=list)

    def see(self, judged: HeldOut, *, may_collapse: bool, far: float) -> None:
        """Count an evaluation.

        Args:
            judged: after the current step.
            may_collapse: whether answers that do not depend on the input count.
            far: distance (minus the score) that is no divergence yet, whatever the first one was.
        """
        if self.first_score is None:
            self.first_score = judged.score
        self.last_score = judged.score
        gained = judged.score > self.best_score
        if gained:
            self.best_step, self.best_score = self.step, judged.score
        self.without_gain = 0 if gained else self.without_gain + 1
        self.collapsed = self.collapsed + 1 if judged.collapsed and may_collapse else 0
        self.far = self.far + 1 if -judged.score > max(-FURTHER * self.first_score, far) else 0

    def ends(self, settings: Training) -> str | None:
        """Return why the run ends here, if it does.

        Raises:
            CheckFailed: it diverged.
        """
        advice = f"lower learning_rate (now {settings.learning_rate:g}) or raise warmup_ratio"
        if self.collapsed >= MOST_DIVERGED:
            raise CheckFailed(
                f"training diverged: after step {self.step} the model gives the same answer whatever the "
                f"input, for {self.collapsed} evaluations in a row; {advice}"
            )
        if self.far >= MOST_DIVERGED and self.first_score is not None:
            raise CheckFailed(
                "training diverged: the distance from the FP32 model on the held-out rows grew from "
                f"{-self.first_score:.3g} to {-self.last_score:.3g} after step {self.step}; {advice}"
            )
        if settings.patience is not None and self.without_gain >= settings.patience:
            return f"no gain in {self.without_gain} evaluations"
        return None


LOG_STEPS = 10  # between looks at the loss: each look waits for the device
Tensors = dict[str, "torch.Tensor"]


@dataclass
class Job:
    """What is trained, on what, and how it is judged."""

    model: "nn.Module"
    data: TrainingData
    settings: Training
    loss: "Callable[[nn.Module, Int64, Tensors], torch.Tensor]"  # summed over the rows
    judge: "Callable[[nn.Module], HeldOut]"  # the same on every process
    folder: Path  # of checkpoints
    identity: dict[str, Any]  # what a resumed run must share
    groups: list[dict[str, Any]]  # of parameters, as optimizers take them
    after_step: Callable[[], None] = lambda: None
    report: Callable[[LogRow, int], None] = lambda row, steps: None  # a new line of the log, and all steps
    judge_first: bool = False  # the weights before training are a candidate too
    far: float = math.inf  # minus the score: a run that gets there, and ten times its first, diverged
    notes: list[str] = field(default_factory=list)


@dataclass
class Trained:
    """A finished training; the model holds the weights of `best_step`."""

    steps: int
    best_step: int
    best_score: float
    log: list[LogRow]
    seconds: float  # in steps, without evaluations and checkpoints
    samples: int  # seen in `seconds`
    stopped: str | None  # why before the last step


def train(job: Job, accelerator: "Accelerator") -> Trained:
    """Train a model in place, or go on with a run that was killed; it ends with the best weights.

    Raises:
        UserError: a checkpoint of another run, or no room for checkpoints.
        CheckFailed: the loss is NaN or infinite, or the model diverged.
    """
    try:
        with use_matmul_precision(job.settings.precision):
            return _train(job, accelerator)
    finally:
        accelerator.free_memory()  # it would go on saving this model with the next one
        job.model.eval()


def _train(job: Job, accelerator: "Accelerator") -> Trained:
    from accelerate.utils import set_seed

    settings = job.settings
    steps = total_steps(job.data, settings)
    due = evaluation_steps(steps, settings.num_evals)
    model, optimizer, scheduler = _prepare(job, accelerator, steps)
    state = _resume(job, accelerator)
    if state is None:
        state = State()
        set_seed(settings.seed, device_specific=True)
        if job.judge_first:
            _judge(job, accelerator, state)
    stopped = state.ends(settings)
    while state.step < steps and stopped is None:
        until = min(step for step in due if step > state.step)
        _advance(job, accelerator, (model, optimizer, scheduler), state, until)
        _judge(job, accelerator, state)
        stopped = state.ends(settings)
    checkpoints.load_best(checkpoints.get_checkpoint_folder(job.folder, state.best_step), job.model)
    accelerator.unwrap_model(model, keep_fp32_wrapper=False)  # its forward is no longer under autocast
    return Trained(
        steps=state.step,
        best_step=state.best_step,
        best_score=state.best_score,
        log=[LogRow(**row) for row in state.log],
        seconds=state.seconds,
        samples=state.samples,
        stopped=stopped,
    )


def _prepare(job: Job, accelerator: "Accelerator", steps: int) -> tuple[Any, Any, Any]:
    """Wrap model, optimizer and scheduler by Accelerate."""
    import torch
    from transformers import get_scheduler

    settings = job.settings
    job.model.to(accelerator.device)
    optimizer = torch.optim.AdamW(
        job.groups, lr=settings.learning_rate, fused=accelerator.device.type in ("cuda", "cpu")
    )
    kind = "constant_with_warmup" if settings.lr_scheduler_type == "constant" else settings.lr_scheduler_type
    scheduler = get_scheduler(
        kind, optimizer, num_warmup_steps=round(settings.warmup_ratio * steps), num_training_steps=steps
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch renames an option that Accelerate passes on
        return accelerator.prepare(job.model, optimizer, scheduler)  # type: ignore[no-any-return]


def group_decayed(model: "nn.Module", weight_decay: float) -> list[dict[str, Any]]:
    """Group the parameters of a model: biases and LayerNorms are not decayed (Devlin et al. 2018)."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def _identity(job: Job, accelerator: "Accelerator") -> dict[str, Any]:
    """Return the identity that a resumed run must share: with other arithmetic it ends in other weights."""
    return {
        **job.identity,
        "processes": accelerator.num_processes,
        "device": accelerator.device.type,
        "arithmetic": resolve_precision(job.settings.precision),
    }


def _resume(job: Job, accelerator: "Accelerator") -> State | None:
    found = checkpoints.find_checkpoint(job.folder, _identity(job, accelerator), job.notes)
    if found is None:
        return None
    accelerator.load_state(str(found.folder))
    state = State(**found.state)
    job.notes.append(f"resumed after step {state.step}")
    for row in state.log:
        job.report(LogRow(**row), total_steps(job.data, job.settings))
    return state


def _advance(
    job: Job, accelerator: "Accelerator", prepared: tuple[Any, Any, Any], state: State, until: int
) -> None:
    """Step the optimizer up to the next evaluation."""
    model, optimizer, scheduler = prepared
    settings, data = job.settings, job.data
    per_epoch = steps_per_epoch(data, settings.batch_size)
    steps = total_steps(data, settings)
    model.train()
    losses: list[Any] = []
    norms: list[Any] = []
    seen, start, epoch, batches = 0, time.perf_counter(), -1, []
    while state.step < until:
        report_phase("training", state.step, steps)
        if state.step // per_epoch != epoch:
            epoch = state.step // per_epoch
            batches = epoch_batches(data, settings.batch_size, settings.seed, epoch)
        rows = batches[state.step % per_epoch]
        losses.append(_gradient(job, accelerator, model, rows))
        norms.append(accelerator.clip_grad_norm_(model.parameters(), settings.max_grad_norm))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        job.after_step()
        state.step += 1
        seen += len(rows)
        if state.step % LOG_STEPS == 0 or state.step == until:
            mean = _mean_loss(accelerator, losses, norms, state.step)
            row = LogRow(
                step=state.step,
                epoch=state.step / per_epoch,
                loss=mean,
                learning_rate=scheduler.get_last_lr()[0],
                gradient_norm=float(norms[-1]),
            )
            losses, norms = [], []
            state.log.append(row.model_dump())
            job.report(row, steps)
    state.seconds += time.perf_counter() - start
    state.samples += seen


def _gradient(job: Job, accelerator: "Accelerator", model: Any, rows: Int64) -> Any:
    """Compute the gradient of the mean loss over a global batch; return this process's part of that mean."""
    world = accelerator.num_processes
    parts = split_batch(rows, accelerator.process_index, world, job.settings.gradient_accumulation_steps)
    weight = float(accelerator.process_index < len(rows)) / len(rows)  # 0 for a row that another process has
    total: Any = 0.0
    for number, part in enumerate(parts):
        last = number + 1 == len(parts)
        with contextlib.nullcontext() if last else accelerator.no_sync(model):  # no all-reduce yet
            loss = job.loss(model, part, _tensors(job, accelerator, part)) * weight
            accelerator.backward(loss * world)  # DDP takes the mean over the processes
        total = total + loss.detach()
    return total


def _tensors(job: Job, accelerator: "Accelerator", rows: Int64) -> Tensors:
    import torch

    _, batch = job.data.batch(rows)
    return {name: torch.from_numpy(array).to(accelerator.device) for name, array in batch.items()}


def _mean_loss(accelerator: "Accelerator", losses: list[Any], norms: list[Any], step: int) -> float:
    """Return the mean over the steps since the last look, the same on every process.

    Raises:
        CheckFailed: a loss or a gradient is not a number: a quantizer makes a code of NaN.
    """
    import torch

    reduced = accelerator.reduce(torch.stack(losses).float(), reduction="sum")
    for number, (loss, norm) in enumerate(zip(reduced.tolist(), torch.stack(norms).tolist(), strict=True)):
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise CheckFailed(
                f"the {'gradient of the ' * math.isfinite(loss)}training loss became NaN or infinite at step "
                f"{step - len(losses) + number + 1}; lower learning_rate, or set precision: fp32"
            )
    return float(reduced.mean())


def _judge(job: Job, accelerator: "Accelerator", state: State) -> None:
    """Evaluate, note, and write a checkpoint."""
    job.model.eval()
    judged = job.judge(job.model)
    if not math.isfinite(judged.score):
        raise CheckFailed(
            f"the model's answers to the held-out rows are NaN or infinite after step {state.step}; lower "
            "learning_rate, or set precision: fp32"
        )
    # a new head may answer the same to everything for half of the steps, and step 0 is no training
    late = 2 * state.step > total_steps(job.data, job.settings)
    state.see(judged, may_collapse=late or (job.judge_first and state.step > 0), far=job.far)
    per_epoch = steps_per_epoch(job.data, job.settings.batch_size)
    row = LogRow(step=state.step, epoch=state.step / per_epoch, score=judged.score, values=judged.values)
    state.log.append(row.model_dump())
    job.report(row, total_steps(job.data, job.settings))
    identity = _identity(job, accelerator)
    checkpoints.save_checkpoint(job.folder, state.step, accelerator, identity=identity, state=asdict(state))
