"""The training loop of `finetune` and `qat`, on one process or many (Hugging Face Accelerate).

A global batch is a function of seed, epoch and position, every process takes its rows of it, and the gradient
is that of the mean over the whole batch. So the number of processes and of accumulated parts changes rounding
only, and a resumed run with as many threads continues bit for bit. `Trainer` cannot do that: Accelerate's
sampler fills the last batch of an epoch with rows of the first, and cuts batches by the number of processes.
"""

import contextlib
import math
import os
import shutil
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from itertools import chain, count, cycle, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.state import AcceleratorState
from accelerate.utils import gather_object, set_seed
from safetensors.torch import load_model
from torch import nn
from transformers import get_scheduler

from qdqbench.quantize.models.inputs import select_inputs, to_device
from qdqbench.quantize.recipe.sections import Training
from qdqbench.quantize.tasks.kinds.encoded import Encoded, IndexedBatch
from qdqbench.quantize.tasks.kinds.kind import TaskKind, join_outputs
from qdqbench.quantize.training.results import TrainingRun, Tried, describe_tries
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.arrays import Float32, Int64
from qdqbench.quantize.utils.errors import CheckFailed, QdqError, Unwritable, UserError
from qdqbench.quantize.utils.progress import report_phase, reporter, track
from qdqbench.quantize.utils.schema import Strict, read
from qdqbench.quantize.utils.trackers import LogRow

CHECKPOINT_FILE = "checkpoint.json"
WEIGHTS = "model.safetensors"
KEPT = 2  # the last, and the one before it in case the last is damaged; their best are kept as well
MOST_HELD_OUT = 1000
POOL = 32  # batches whose samples are sorted by length together
BATCH = 64  # rows, where no gradient is taken
MOST_DIVERGED = 2  # evaluations in a row
FURTHER_DB = 10.0  # from FP32 than before training
RATES = (3e-7, 1e-6, 3e-6, 1e-5, 3e-5, 1e-4)  # that `auto` tries, in this order
TRIED_STEPS = 30  # of each
MOST_WORSE = 2  # rates in a row that win less than the best
LEAST_GAIN = 0.1  # dB of a short training, for which a whole one is worth its time
LOG_STEPS = 10  # between looks at the loss: each look waits for the device
AMPERE = (8, 0)  # the first with TF32
Tensors = dict[str, torch.Tensor]


def resolve_precision(precision: str) -> str:
    """Return the precision of a setting on this machine: `bf16`, `tf32` or `fp32`.

    `auto` is bf16, and `tf32` is TF32, where the GPU has it; else both are FP32. TF32 products have the
    10 bits of mantissa that FP16 has, bf16 has 7: about those of INT8, whose steps QAT is to learn.
    """
    cuda = torch.cuda.is_available()
    if precision == "auto":
        return "bf16" if cuda and torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    if precision == "tf32":
        return "tf32" if cuda and torch.cuda.get_device_capability() >= AMPERE else "fp32"
    return precision


@contextlib.contextmanager
def use_matmul_precision(precision: str) -> Iterator[None]:
    """Compute FP32 matrix products in TF32, if the setting means that here; as before, afterwards.

    Fused attention is not cuDNN's: at lengths of 64 modulo 128 its gradient is NaN where a mask leaves a row
    nothing (github.com/pytorch/pytorch/issues/196678).
    """
    attention: Any = torch.backends.cuda  # whose functions have no types
    before, cudnn = torch.get_float32_matmul_precision(), attention.cudnn_sdp_enabled()
    attention.enable_cudnn_sdp(False)
    torch.set_float32_matmul_precision("high" if resolve_precision(precision) == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        attention.enable_cudnn_sdp(cudnn)


def new_accelerator(precision: str) -> Accelerator:
    mixed = "bf16" if resolve_precision(precision) == "bf16" else "no"
    if AcceleratorState._shared_state and AcceleratorState().mixed_precision != mixed:
        AcceleratorState._reset_state()  # one process may train twice
    return Accelerator(
        mixed_precision=mixed,
        cpu=not torch.cuda.is_available(),  # else several processes without a GPU would not find each other
        step_scheduler_with_optimizer=False,
        kwargs_handlers=[
            # calibration runs in the main process while the others wait
            InitProcessGroupKwargs(timeout=timedelta(hours=6)),
            # buffers are amax and positions, which are the same everywhere
            DistributedDataParallelKwargs(broadcast_buffers=False),
        ],
    )


def count_processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def leave_group() -> None:
    """End the group of processes, if there is one; each continues alone."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@contextlib.contextmanager
def join_group() -> Iterator[None]:
    """End the group of processes with the block.

    Every process raises the same `QdqError`. Any other exception may be one process's alone, for which the
    others would wait in a collective, as ending the group would for them: it ends this process at once, and
    the launcher then stops the others.
    """
    try:
        yield
    except BaseException as error:
        if count_processes() > 1 and not isinstance(error, QdqError):
            traceback.print_exc()
            rank, what = os.environ.get("RANK", "0"), " ".join(f"{type(error).__name__}: {error}".split())
            sys.stderr.write(f"qdqbench: process {rank} failed and stops the training, {what[:400]}\n")
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        raise
    finally:
        leave_group()


@dataclass(frozen=True)
class TrainingData:
    """A tokenized train split, and which of its rows teach and which judge."""

    encoded: Encoded
    pad_id: int
    rows: Int64  # to learn from
    held_out: Int64  # samples to judge on; never learned from

    @cached_property
    def judged(self) -> Encoded:
        return self.encoded.part(self.held_out)

    def batch(self, rows: Int64) -> IndexedBatch:
        """Return the rows and their padded tokens, int64 [B] and [B, L]."""
        return self.encoded.batch(rows.tolist(), self.pad_id)


def divide(encoded: Encoded, pad_id: int, share: float, seed: int) -> TrainingData:
    count = len(encoded.gold)
    held = min(round(count * share), MOST_HELD_OUT)
    if held < 2 or count - held < 2:
        raise UserError(
            f"the train split has {count} samples, of which {held} would be held out to judge the training; "
            "give a larger split or a larger holdout"
        )
    order = np.random.default_rng([seed, 0]).permutation(count)
    return TrainingData(encoded, pad_id, encoded.rows_of(np.sort(order[held:])), np.sort(order[:held]))


def epoch_batches(data: TrainingData, batch_size: int, seed: int, epoch: int) -> list[Int64]:
    """Return the rows of every global batch of an epoch, int64 [batch_size]; the last may be shorter."""
    generator = np.random.default_rng([seed, 1, epoch])
    order = generator.permutation(data.rows)
    lengths = data.encoded.lengths
    pools = [order[start : start + POOL * batch_size] for start in range(0, len(order), POOL * batch_size)]
    ranked = np.concatenate([pool[np.argsort(-lengths[pool], kind="stable")] for pool in pools])
    batches = [ranked[start : start + batch_size] for start in range(0, len(ranked), batch_size)]
    return [batches[index] for index in generator.permutation(len(batches))]


def split_batch(rows: Int64, rank: int, world: int, accumulate: int) -> list[Int64]:
    """Split a global batch into parts for one process before it steps; none of them is empty.

    Where the batch is too short for all processes, the others get its first row, which must not count.
    """
    mine = rows[rank::world] if rank < len(rows) else rows[:1]
    return [part for part in np.array_split(mine, accumulate) if len(part)]


def total_steps(data: TrainingData, settings: Training) -> int:
    steps = max(1, round(settings.epochs * math.ceil(len(data.rows) / settings.batch_size)))
    return min(steps, settings.max_steps or steps)


def evaluation_steps(steps: int, evaluations: int) -> set[int]:
    count = min(evaluations, steps)
    return {round(steps * (number + 1) / count) for number in range(count)}


def predict_rows(  # noqa: PLR0913
    accelerator: Accelerator,
    model: nn.Module,
    kind: TaskKind,
    encoded: Encoded,
    pad_id: int,
    *,
    look: Callable[[Any, Tensors], None] | None = None,
) -> Float32:
    """Compute the answers float32 [answers, width] to a split; each process a share, the result on all.

    `look` is shown the outputs to each batch, with hidden states, and the inputs.
    """
    states = {"output_hidden_states": True} if look else {}
    mine: list[tuple[Int64, Float32]] = []
    order = np.argsort(-encoded.lengths, kind="stable")  # the longest first
    share = order[accelerator.process_index :: accelerator.num_processes]
    for start in track("answering", range(0, len(share), BATCH)):
        rows = share[start : start + BATCH]
        inputs = to_device(select_inputs(model, encoded.batch(rows.tolist(), pad_id)[1]), accelerator.device)
        with torch.inference_mode():
            output = model(**inputs, **states)
            answers: Any = encoded.kept(rows, join_outputs(output, kind.outputs))
            if look:
                look(output, inputs)
        mine.append((rows, answers.float().cpu().numpy()))
    parts: list[tuple[Int64, Float32]] = gather_object(mine)
    result = np.empty((encoded.answers.sum(), parts[0][1].shape[1]), dtype=np.float32)
    for rows, values in parts:
        result[encoded.answers_of(rows)] = values
    return result


@dataclass(frozen=True)
class HeldOut:
    score: float  # higher is better; chooses the weights that are kept
    values: dict[str, float]  # by name, for the log
    collapsed: bool  # the answers no longer depend on the input


class State(Strict):
    """State of a checkpoint besides model, optimizer and scheduler."""

    step: int = 0
    collapsed: int = 0  # evaluations in a row
    seconds: float = 0.0
    samples: int = 0
    threads: int = 0  # of a CPU, that compute
    learning_rate: float = 0.0  # 0: none won anything
    tried: list[Tried] = []
    log: list[LogRow] = []

    @property
    def scores(self) -> dict[int, float]:
        return {row.step: row.score for row in self.log if row.score is not None}

    @property
    def best_step(self) -> int:
        return max(self.scores, key=self.scores.__getitem__)

    def ends(self, settings: Training, far: float) -> str | None:
        if not self.learning_rate:
            return "nothing to win"
        advice = f"lower learning_rate (now {self.learning_rate:g}) or raise warmup_ratio"
        if self.collapsed >= MOST_DIVERGED:
            raise CheckFailed(
                f"training diverged: after step {self.step} the model gives the same answer whatever the "
                f"input, for {self.collapsed} evaluations in a row; {advice}"
            )
        scores = [*self.scores.values()]
        least = min(scores[0] - FURTHER_DB, far)
        if len(scores) >= MOST_DIVERGED and max(scores[-MOST_DIVERGED:]) < least:
            raise CheckFailed(
                f"training diverged: the SQNR on the held-out rows fell from {scores[0]:.1f} to "
                f"{scores[-1]:.1f} dB after step {self.step}; {advice}"
            )
        without_gain = len(scores) - 1 - scores.index(max(scores))
        if settings.patience is not None and without_gain >= settings.patience:
            return f"no gain in {without_gain} evaluations"
        return None


@dataclass
class Job:
    model: nn.Module
    data: TrainingData
    settings: Training
    loss: Callable[[nn.Module, Int64, Tensors], torch.Tensor]  # summed over the rows
    judge: Callable[[nn.Module], HeldOut]  # the same on every process
    folder: Path  # of checkpoints
    identity: dict[str, Any]  # what a resumed run must share
    groups: list[dict[str, Any]]  # of parameters, as optimizers take them
    after_step: Callable[[], None] = lambda: None
    judge_first: bool = False  # the weights before training are a candidate too
    far: float = -math.inf  # a score: a run that falls below it, and 10 dB below its first, diverged
    notes: list[str] = field(default_factory=list)
    run: TrainingRun = field(init=False)  # record of the training

    def log(self, state: State, row: LogRow) -> None:
        state.log.append(row)
        reporter().advance(row.step, self.run.planned_steps, row=row)


class _CheckpointManifest(Strict):
    schema_version: Literal[1] = 1
    identity: dict[str, Any]  # what the run is of, as JSON values
    best_step: int  # whose checkpoint is kept as well
    state: State
    files: dict[str, str]  # name -> sha256


def save_checkpoint(job: Job, accelerator: Accelerator, state: State) -> None:
    """Write a checkpoint from all processes; the others go, but for the one before and the best of both.

    What cannot be written is a `UserError`.
    """
    folder, final = job.folder, get_checkpoint_folder(job.folder, state.step)
    temporary = folder / f".{final.name}.training.tmp"  # the same in all processes

    def prepare() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)

    def finish() -> None:
        hashes = {path.name: files.sha256(path) for path in sorted(temporary.iterdir())}
        written = _CheckpointManifest(
            identity=job.identity, best_step=state.best_step, state=state, files=hashes
        )
        files.write_json(temporary / CHECKPOINT_FILE, written.model_dump(mode="json"))
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        last = [path for path in _list(folder) if path.name <= final.name][:KEPT]  # later ones are damaged
        manifests = filter(None, map(_read_manifest, last))
        best = {get_checkpoint_folder(folder, manifest.best_step) for manifest in manifests}
        for other in {*_list(folder)} - {*last} - best:
            shutil.rmtree(other)

    main = accelerator.is_main_process
    try:
        _run_together(accelerator, folder, prepare if main else None)
        _run_together(accelerator, folder, lambda: accelerator.save_state(str(temporary)))
        _run_together(accelerator, folder, finish if main else None)
    finally:
        if main:
            shutil.rmtree(temporary, ignore_errors=True)


def _run_together(accelerator: Accelerator, folder: Path, work: Callable[[], Any] | None) -> None:
    """Do the work of this process and wait for the others; all stop when one cannot write."""
    problem = ""
    try:
        if work is not None:
            work()
    except Exception as error:  # OSError, and what torch and safetensors make of it
        problem = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    for text in filter(None, gather_object([problem])):
        raise Unwritable(
            f"checkpoints cannot be written into {folder} ({text}); make room or choose another --out"
        )


def get_checkpoint_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def find_checkpoint(job: Job) -> tuple[Path, State] | None:
    """Find the last whole checkpoint of a run, if any: its folder, and the state of the training.

    One of another `identity` is a `UserError`; each damaged one that is passed over is a line of `notes`.
    """
    for path in _list(job.folder):
        damaged = _list_damaged(path)
        if manifest := _read_manifest(path):
            _require_same(path, manifest.identity, job.identity)
            best = get_checkpoint_folder(job.folder, manifest.best_step)  # whose weights the run returns
            damaged = damaged or [f"{best.name}/{name}" for name in _list_damaged(best)]
            if not damaged:
                return path, manifest.state
        job.notes.append(f"checkpoint {path.name} is damaged ({', '.join(damaged)}); it is passed over")
    if _list(job.folder):
        job.notes.append("no whole checkpoint was left; the training began again")
    return None


def load_weights(checkpoint: Path, model: Any) -> None:
    if damaged := _list_damaged(checkpoint):
        raise UserError(
            f"{checkpoint} is damaged ({', '.join(damaged)}); run the same command again, which resumes from "
            "an older checkpoint"
        )
    load_model(model, checkpoint / WEIGHTS)


def _require_same(folder: Path, there: dict[str, Any], here: dict[str, Any]) -> None:
    def short(value: Any) -> str:
        text = str(value)
        return text if len(text) <= 24 else f"{text[:12]}..."

    differing = [
        f"{key} (there {short(there.get(key))}, here {short(here.get(key))})"
        for key in {**there, **here}
        if there.get(key) != here.get(key)
    ]
    if differing:
        raise UserError(
            f"{folder} is a checkpoint of another run: it differs in {', '.join(differing)}; resume with "
            "what it was started with, or give another --out, or remove it to begin again"
        )


def _list(folder: Path) -> list[Path]:
    """Return the checkpoints, the last first."""
    return sorted(folder.glob("step-*"), reverse=True) if folder.is_dir() else []


def _read_manifest(folder: Path) -> _CheckpointManifest | None:
    try:
        return read(folder / CHECKPOINT_FILE, _CheckpointManifest, "checkpoint", "go on from another")
    except UserError:
        return None


def _list_damaged(folder: Path) -> list[str]:
    manifest = _read_manifest(folder)
    if manifest is None:
        return [CHECKPOINT_FILE]
    return [
        name
        for name, digest in manifest.files.items()
        if Path(name).name != name or not (folder / name).is_file() or files.sha256(folder / name) != digest
    ]


def group_decayed(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Group the parameters of a model: biases and LayerNorms are not decayed (Devlin et al. 2018)."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def train(job: Job, accelerator: Accelerator) -> TrainingRun:
    """Train a model in place, or resume a run that was killed; it ends with the best weights.

    The record is in `job.run` as well when it fails: UserError for a checkpoint of another run or no room for
    checkpoints, CheckFailed where the loss is NaN or infinite, or the model diverged.
    """
    settings = job.settings
    precision = resolve_precision(settings.precision)
    cuda = accelerator.device.type == "cuda"
    job.identity = {  # with other arithmetic a resumed run would end in other weights
        **job.identity,
        "processes": accelerator.num_processes,
        "device": accelerator.device.type,
        "arithmetic": precision,
    }
    job.run = TrainingRun(
        seed=settings.seed,
        status="done",
        settings=settings.model_dump(mode="json"),
        precision=precision,
        device=torch.cuda.get_device_name(accelerator.device) if cuda else "CPU",
        processes=accelerator.num_processes,
        rows=len(job.data.rows),
        held_out=len(job.data.held_out),
        planned_steps=total_steps(job.data, settings),
        parameters=sum(p.numel() for p in job.model.parameters()),
    )
    try:
        with use_matmul_precision(settings.precision):
            _train(job, accelerator)
    finally:
        job.run.notes = job.notes
        accelerator.free_memory()  # it would go on saving this model with the next one
        job.model.eval()
    return job.run


def _train(job: Job, accelerator: Accelerator) -> None:
    settings, run = job.settings, job.run
    due = evaluation_steps(run.planned_steps, settings.num_evals)
    model: Any = accelerator.prepare(job.model.to(accelerator.device))
    found = find_checkpoint(job)
    state = found[1] if found else _begin(job, accelerator, model)
    run.tried, run.learning_rate = state.tried, state.learning_rate
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch renames an option that Accelerate passes on
        optimizing = accelerator.prepare(*_new_optimizer(job, state.learning_rate, run.planned_steps))
    prepared = model, *optimizing
    if found:
        accelerator.load_state(str(found[0]))
        job.notes.append(f"resumed after step {state.step}")
        threads = torch.get_num_threads()
        if accelerator.device.type == "cpu" and state.threads != threads:
            job.notes.append(f"{state.threads} threads before, {threads} now: sums are rounded differently")
        state.threads = threads
        for row in state.log:
            reporter().advance(row.step, run.planned_steps, row=row)
    elif job.judge_first:
        save_checkpoint(job, accelerator, state)
    run.stopped = state.ends(settings, job.far) if state.log else None
    while state.step < run.planned_steps and run.stopped is None:
        _advance(job, accelerator, prepared, state, until=min(step for step in due if step > state.step))
        _judge(job, state)
        save_checkpoint(job, accelerator, state)
        run.stopped = state.ends(settings, job.far)
    load_weights(get_checkpoint_folder(job.folder, state.best_step), job.model)
    accelerator.unwrap_model(prepared[0], keep_fp32_wrapper=False)  # its forward is no longer under autocast
    run.steps, run.best_step, run.seconds = state.step, state.best_step, state.seconds
    run.samples_per_s = state.samples / state.seconds if state.seconds else None
    run.log = state.log


def _begin(job: Job, accelerator: Accelerator, model: Any) -> State:
    """Judge the weights before training where they are a candidate, and find the learning rate."""
    settings, state = job.settings, State(threads=torch.get_num_threads())
    set_seed(settings.seed, device_specific=True)
    if job.judge_first:
        _judge(job, state)
    if isinstance(settings.learning_rate, float):
        state.learning_rate = settings.learning_rate
        return state
    _try_rates(job, accelerator, model, state)
    set_seed(settings.seed, device_specific=True)  # the same training as with this rate given
    return state


def _try_rates(job: Job, accelerator: Accelerator, model: Any, state: State) -> None:
    """Train for a few steps at each rate, from the same weights, until two in a row win less than the best.

    The schedule is that of a whole training, so that the weights come to rest.
    """
    parameters: list[torch.Tensor] = [*job.model.parameters()]
    before, best, worse = [each.detach().clone() for each in parameters], 0.0, 0
    steps = min(TRIED_STEPS, job.run.planned_steps)
    batches = epoch_batches(job.data, job.settings.batch_size, job.settings.seed, 0)
    for number, rate in enumerate(RATES):
        optimizer, scheduler = _new_optimizer(job, rate, steps)
        job.model.train()
        for step, rows in zip(range(steps), cycle(batches), strict=False):
            report_phase("trying learning rates", number * steps + step, len(RATES) * steps)
            _gradient(job, accelerator, model, rows)
            _step(job, accelerator, (model, optimizer, scheduler))
        job.model.eval()
        judged = job.judge(job.model)
        with torch.no_grad():
            torch._foreach_copy_(parameters, before)
        if not math.isfinite(judged.score):
            job.notes.append(f"at learning rate {rate:g} answers became NaN, so no higher rate was tried")
            break
        gain, sqnr = judged.score - state.scores[0], judged.values["sqnr_db"]
        state.tried.append(Tried(learning_rate=rate, gain_db=gain, sqnr_db=sqnr))
        worse = 0 if gain > best else worse + 1
        if gain > best:
            best, state.learning_rate = gain, rate
        elif worse == MOST_WORSE:
            break
    if best < LEAST_GAIN:
        state.learning_rate = 0.0
    reporter().log(describe_tries(state.tried, state.learning_rate))


def _new_optimizer(job: Job, rate: float, steps: int) -> tuple[Any, Any]:
    settings = job.settings
    fused = next(job.model.parameters()).device.type in ("cuda", "cpu")
    optimizer = torch.optim.AdamW([{**group} for group in job.groups], lr=rate, fused=fused)
    kind = "constant_with_warmup" if settings.lr_scheduler_type == "constant" else settings.lr_scheduler_type
    scheduler = get_scheduler(
        kind, optimizer, num_warmup_steps=round(settings.warmup_ratio * steps), num_training_steps=steps
    )
    return optimizer, scheduler


def _advance(
    job: Job, accelerator: Accelerator, prepared: tuple[Any, Any, Any], state: State, until: int
) -> None:
    model, _, scheduler = prepared
    settings, data = job.settings, job.data
    per_epoch = math.ceil(len(data.rows) / settings.batch_size)
    model.train()
    losses: list[Any] = []
    norms: list[Any] = []
    start, (epoch, first) = time.perf_counter(), divmod(state.step, per_epoch)
    ahead = (epoch_batches(data, settings.batch_size, settings.seed, number) for number in count(epoch))
    for rows in islice(chain.from_iterable(ahead), first, first + until - state.step):
        report_phase("training", state.step, job.run.planned_steps)
        losses.append(_gradient(job, accelerator, model, rows))
        norms.append(_step(job, accelerator, prepared))
        state.step += 1
        state.samples += len(rows)
        if state.step % LOG_STEPS == 0 or state.step == until:
            row = LogRow(
                step=state.step,
                epoch=state.step / per_epoch,
                loss=_mean_loss(accelerator, losses, norms, state.step),
                learning_rate=scheduler.get_last_lr()[0],
                gradient_norm=float(norms[-1]),
            )
            losses, norms = [], []
            job.log(state, row)
    state.seconds += time.perf_counter() - start


def _step(job: Job, accelerator: Accelerator, prepared: tuple[Any, Any, Any]) -> Any:
    """Take a step of the optimizer; return the norm of the gradient before it was clipped."""
    model, optimizer, scheduler = prepared
    norm = accelerator.clip_grad_norm_(model.parameters(), job.settings.max_grad_norm)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    job.after_step()
    return norm


def _gradient(job: Job, accelerator: Accelerator, model: Any, rows: Int64) -> Any:
    """Compute the gradient of the mean loss over a global batch; return this process's part of that mean."""
    world = accelerator.num_processes
    parts = split_batch(rows, accelerator.process_index, world, job.settings.gradient_accumulation_steps)
    weight = float(accelerator.process_index < len(rows)) / len(rows)  # 0 for a row that another process has
    total: Any = 0.0
    for number, part in enumerate(parts):
        last = number + 1 == len(parts)
        tensors = to_device(job.data.batch(part)[1], accelerator.device)
        with contextlib.nullcontext() if last else accelerator.no_sync(model):  # no all-reduce yet
            loss = job.loss(model, part, tensors) * weight
            accelerator.backward(loss * world)  # DDP takes the mean over the processes
        total = total + loss.detach()
    return total


def _mean_loss(accelerator: Accelerator, losses: list[Any], norms: list[Any], step: int) -> float:
    """Return the mean over the steps since the last look, the same on every process."""
    reduced = accelerator.reduce(torch.stack(losses).float(), reduction="sum")
    for number, (loss, norm) in enumerate(zip(reduced.tolist(), torch.stack(norms).tolist(), strict=True)):
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise CheckFailed(
                f"the {'gradient of the ' * math.isfinite(loss)}training loss became NaN or infinite at step "
                f"{step - len(losses) + number + 1}; lower learning_rate, or set precision: fp32"
            )
    return float(reduced.mean())


def _judge(job: Job, state: State) -> None:
    job.model.eval()
    judged = job.judge(job.model)
    if not math.isfinite(judged.score):
        raise CheckFailed(
            f"the model's answers to the held-out rows are NaN or infinite after step {state.step}; lower "
            "learning_rate, or set precision: fp32"
        )
    # a new head may answer the same to everything for half of the steps, and step 0 is no training
    late = 2 * state.step > job.run.planned_steps
    may_collapse = late or (job.judge_first and state.step > 0)
    state.collapsed = state.collapsed + 1 if judged.collapsed and may_collapse else 0
    epoch = state.step / math.ceil(len(job.data.rows) / job.settings.batch_size)
    job.log(state, LogRow(step=state.step, epoch=epoch, score=judged.score, values=judged.values))
