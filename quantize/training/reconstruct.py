"""Reconstruction: after PTQ each encoder layer is trained to give what its FP32 original gives.

From the embeddings to the head, as in BRECQ (Li et al. 2021, arXiv 2102.05426): a layer reads what the
quantized layers before it make of calibration rows. Its target is what FP32 makes of them, so it makes up for
their errors too. A layer that runs several times has a target for each run. Weights, biases, LayerNorms and
scales are trained together, by Adam through straight-through rounding, which moves codes of weights further
than learned rounding alone may (AdaRound: Nagel et al. 2020, arXiv 2004.10568). Scales are LSQ (Esser et al.
2020, arXiv 1902.08153).

Rows that are held out decide: a layer that is not nearer to FP32 on them is as before, and so is the whole
model if its answers are not. The result is Q/DQ as before, with other numbers.
"""

import copy
import hashlib
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from transformers import PreTrainedModel

from qdqbench.quantize.calibration.fakequant import native
from qdqbench.quantize.calibration.fakequant.quantizers import forward, name_outputs
from qdqbench.quantize.calibration.record import CalibrationRecord
from qdqbench.quantize.calibration.techniques import channel_splitting
from qdqbench.quantize.calibration.techniques.bias_correction import apply_biases, record_calls
from qdqbench.quantize.calibration.techniques.channel_splitting import ChannelSplit
from qdqbench.quantize.models.families.known import family_of
from qdqbench.quantize.models.inputs import select_inputs, to_device
from qdqbench.quantize.models.modules import get_hidden, resume_from
from qdqbench.quantize.pipeline.session import CHECKPOINTS, LEAST_TEXTS, RECONSTRUCTION, RECORD, Session
from qdqbench.quantize.recipe.plan import Plan
from qdqbench.quantize.recipe.sections import Reconstruction
from qdqbench.quantize.tasks.data.encode import iter_encoded
from qdqbench.quantize.tasks.kinds.encoded import pad
from qdqbench.quantize.tasks.kinds.kind import join_outputs
from qdqbench.quantize.training import loop
from qdqbench.quantize.training.results import LayerRow, ReconstructionRun
from qdqbench.quantize.training.student import list_written, prepare, to_db, write_trained
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.arrays import Batch
from qdqbench.quantize.utils.errors import CheckFailed, UserError
from qdqbench.quantize.utils.progress import report_phase
from qdqbench.quantize.utils.system.environment import get_code_identity

WARMUP = 0.1  # share of the steps in which rates rise; then they fall as a cosine
BETAS = (0.9, 0.99)
MEANS = 8  # batches, at most, that means of inputs are taken of
Tensors = dict[str, torch.Tensor]  # parameters of a layer, by their names in it
LEAST_SIZE = 1e-3  # root mean square that a rate is relative to, at least: a bias may be all zero
States = list[torch.Tensor]  # [B, L, hidden] of each batch


@dataclass
class Rows:
    """Batches of similar length, int64 [B, L]: those to learn from first, then those held out."""

    batches: list[Batch]
    learned: int  # batches


def draw_rows(samples: Iterable[Any], settings: Reconstruction, pad_id: int) -> Rows:
    """Divide encoded samples into rows to learn from and held-out rows, and both into batches.

    UserError: fewer than `LEAST_TEXTS` samples.
    """
    drawn = [each[:3] for each in samples]
    held = max(1, round(settings.holdout * len(drawn)))
    if len(drawn) < LEAST_TEXTS:
        raise UserError(
            f"reconstruction has {len(drawn)} calibration rows, and some are held out; give {LEAST_TEXTS} or "
            "more"
        )
    order = np.random.default_rng([settings.seed, 0]).permutation(len(drawn))
    parts: list[list[Batch]] = []
    for part in (order[held:], order[:held]):
        ranked = sorted((drawn[place] for place in part), key=lambda each: len(each[1]))
        starts = range(0, len(ranked), settings.batch_size)
        parts.append([pad(ranked[at : at + settings.batch_size], pad_id)[1] for at in starts])
    return Rows([*parts[0], *parts[1]], len(parts[0]))


class Chain:
    """A model whose layers run one after the other over all batches."""

    def __init__(self, model: PreTrainedModel, runs: Counter[str], batches: list[Batch]) -> None:
        self.model = model
        # states that the next layer reads, and what each layer gets of each batch besides;
        # those of inference mode are not for gradients
        self.states, self.calls = copy.deepcopy(record_calls(model, runs, batches))

    def run(self, name: str, number: int, state: torch.Tensor) -> torch.Tensor:
        args, kwargs = self.calls[name][number]
        return get_hidden(self.model.get_submodule(name)(state, *args, **kwargs))

    @torch.no_grad()
    def advance(self, name: str) -> None:
        for number, state in enumerate(self.states):
            self.states[number] = self.run(name, number, state)


class Reconstructor:
    """A quantized model and its original, side by side on the same rows, up to the layer that is next."""

    def __init__(
        self, model: PreTrainedModel, teacher: PreTrainedModel, rows: Rows, settings: Reconstruction
    ) -> None:
        self.settings, self.rows, device = settings, rows, next(model.parameters()).device
        self.runs = Counter(family_of(model.config).runs(model))  # of each layer, one after the other
        self.names = [*self.runs]
        self.student, self.teacher = (Chain(each, self.runs, rows.batches) for each in (model, teacher))
        masks = (torch.from_numpy(batch["attention_mask"]).to(device) for batch in rows.batches)
        self.masks = [mask[..., None].float() for mask in masks]

    def _answer(self, chain: Chain, number: int, state: torch.Tensor) -> torch.Tensor:
        """Return what the head makes of the last state of a batch, without what it makes of padding."""
        inputs = select_inputs(chain.model, self.rows.batches[number])
        with resume_from(chain.model, self.runs.total(), state):
            output = chain.model(**to_device(inputs, state.device))
        answers: torch.Tensor = join_outputs(output, name_outputs(chain.model)).float()
        return answers * self.masks[number] if answers.ndim > 2 else answers

    def _find_read(self, number: int, state: torch.Tensor) -> torch.Tensor:
        """Return which tokens of a last state the answers depend on, [B, L, 1]."""
        with torch.enable_grad():
            state = state.detach().requires_grad_()
            total = self._answer(self.teacher, number, state).sum()
            (slope,) = torch.autograd.grad(total, state)
        return (slope.abs().sum(dim=-1, keepdim=True) > 0).float() * self.masks[number]

    def parameters(self, layer: int) -> Tensors:
        found = self.student.model.get_submodule(self.names[layer]).named_parameters()
        return {name: value for name, value in found if value.requires_grad}

    def aim(self, layer: int) -> list[States]:
        """Let the teacher run a layer; return its states behind each run."""
        behind = []
        for _ in range(self.runs[self.names[layer]]):
            self.teacher.advance(self.names[layer])
            behind.append([*self.teacher.states])
        return behind

    def settle(self, layer: int, weights: Tensors) -> None:
        """Give a layer these weights, and go on to the next."""
        parameters = self.parameters(layer)
        with torch.no_grad():
            for name, value in weights.items():
                parameters[name].copy_(value)
        for _ in range(self.runs[self.names[layer]]):
            self.student.advance(self.names[layer])

    def train(
        self, layer: int, targets: list[States], splits: dict[str, ChannelSplit]
    ) -> tuple[Tensors, LayerRow]:
        """Train a layer to give the teacher's states, those behind each of its runs.

        Returns its best weights on the held-out rows, which may be those before.
        """
        start, name, settings = time.perf_counter(), self.names[layer], self.settings
        own = {linear: split for linear, split in splits.items() if linear.startswith(f"{name}.")}
        tie = channel_splitting.keep_equal(self.student.model, own)
        masks, wanted = [self.masks] * len(targets), States()
        if layer == len(self.names) - 1:
            masks[-1] = [self._find_read(*each) for each in enumerate(targets[-1])]
            with torch.no_grad():
                wanted = [self._answer(self.teacher, *each) for each in enumerate(targets[-1])]

        def compare(number: int) -> torch.Tensor:
            """Return squared errors and powers, [parts, 2]: of the states, and of the answers to the last."""
            state, parts = self.student.states[number], list[torch.Tensor]()
            for target, mask in zip(targets, masks, strict=True):
                state = self.student.run(name, number, state)
                parts.append(_measure(state, target[number], mask[number]))
            if wanted:
                parts.append(_measure(self._answer(self.student, number, state), wanted[number], 1.0))
            return torch.stack(parts)

        def judge() -> float:
            with torch.no_grad():
                held = range(self.rows.learned, len(self.masks))
                noise, power = torch.stack([compare(number) for number in held]).sum(dim=0).unbind(1)
            return to_db(float((noise / power).mean()))

        parameters, before = self.parameters(layer), judge()
        best = {key: value.detach().clone() for key, value in parameters.items()}
        optimizer = torch.optim.Adam([*_group(parameters, settings)], betas=BETAS, fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(_schedule, settings.steps))
        generator, order = np.random.default_rng([settings.seed, 1, layer]), list[int]()
        for step in range(settings.steps):
            report_phase(f"layer {layer + 1} of {len(self.names)}", step, settings.steps)
            order = order or generator.permutation(self.rows.learned).tolist()
            noise, power = compare(order.pop()).unbind(1)
            optimizer.zero_grad()
            (noise / power).mean().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            native.keep_positive(self.student.model)
            tie()
        after = judge()
        if after > before:  # never NaN
            best = {key: value.detach().clone() for key, value in parameters.items()}
        return best, LayerRow(
            layer=name,
            before_db=before,
            after_db=after if math.isfinite(after) else None,
            kept=after > before,
            seconds=time.perf_counter() - start,
        )


def _measure(made: torch.Tensor, target: torch.Tensor, weight: Any) -> torch.Tensor:
    return torch.stack([((made - target).square() * weight).sum(), (target.square() * weight).sum()])


def _group(parameters: Tensors, settings: Reconstruction) -> Iterator[dict[str, Any]]:
    """Yield the parameters by rate, which follows their size by powers of two: few groups are fast."""
    groups: dict[float, list[torch.Tensor]] = {}
    for name, value in parameters.items():
        if name.endswith(native.PARAMETER):
            rate = settings.amax_learning_rate
        else:
            size = max(float(value.detach().square().mean().sqrt()), LEAST_SIZE)
            rate = settings.learning_rate * 2.0 ** round(math.log2(size))
        groups.setdefault(rate, []).append(value)
    for rate, values in groups.items():
        yield {"params": values, "lr": rate}


def _schedule(steps: int, step: int) -> float:
    rising = min(1.0, (step + 1) / (WARMUP * steps))
    return rising * (1 + math.cos(math.pi * step / steps)) / 2


def reconstruct(  # noqa: PLR0913, PLR0917
    model: Any,
    teacher: Any,
    plan: Plan,
    record: CalibrationRecord,
    rows: Rows,
    settings: Reconstruction,
    store: "LayerStore | None" = None,
) -> ReconstructionRun:
    """Train the layers of a calibrated fake-quant model in place, from the embeddings to the head.

    Args:
        model: calibrated with `record`; stays on its device, where all of `rows` has to fit in two forms.
        teacher: its FP32 original, which gets the shifts of calibration.
        store: layers that an earlier call finished, and place for those of this one; None: none.

    Raises:
        UserError: as of `prepare`.
        CheckFailed: answers of the original are NaN or infinite.
    """
    for shift in record.shifts.values():  # which hidden states of the model have
        apply_biases(teacher, shift.added)
    for each in (model, teacher):
        each.eval()
    teacher.requires_grad_(False)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    learns, some = settings.amax_learning_rate > 0, rows.batches[: rows.learned]
    prepare(model, plan, record, some[:: 1 + len(some) // MEANS], learns_amax=learns)
    channel_splitting.keep_equal(model, record.splits)()
    start, trained, device = time.perf_counter(), list[LayerRow](), next(model.parameters()).device
    with loop.use_matmul_precision(settings.precision):
        held = rows.batches[rows.learned :]
        wanted = _answer(teacher, held)
        if not torch.isfinite(wanted).all():
            raise CheckFailed("answers of the FP32 model to calibration rows are NaN or infinite")

        def compare() -> float:
            noise = (_answer(model, held) - wanted).square().sum()
            return to_db(float(noise) / (float(wanted.square().sum()) or 1.0))

        sqnr, resumed = compare(), 0
        work = Reconstructor(model, teacher, rows, settings)
        for number in range(len(work.names)):
            targets = work.aim(number)
            found = store.read(number) if store else None
            resumed += found is not None
            weights, row = found or work.train(number, targets, record.splits)
            if store and not found:
                store.write(number, weights, row)
            work.settle(number, weights)
            trained.append(row)
        after = compare()
    notes = [f"reconstruction resumed after {resumed} of {len(trained)} layers"] * bool(resumed)
    notes += [
        f"training of {row.layer} gave NaN, so it is as PTQ left it; lower reconstruction.learning_rate"
        for row in trained
        if row.after_db is None
    ]
    if not after > sqnr:
        notes += ["reconstruction brought answers to held-out rows no nearer to FP32, so PTQ is kept"]
        for ratio in native.list_learned(model):
            ratio.data.fill_(1)
    native.settle_learned(model)
    channel_splitting.keep_equal(model, record.splits)()  # biases got the means back, to the last bit
    if not after > sqnr:
        model.load_state_dict(before, strict=False)
    return ReconstructionRun(
        settings=settings.model_dump(mode="json"),
        precision=loop.resolve_precision(settings.precision),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        rows=sum(len(batch["input_ids"]) for batch in rows.batches[: rows.learned]),
        held_out=sum(len(batch["input_ids"]) for batch in held),
        layers=trained,
        before_db=sqnr,
        after_db=after if math.isfinite(after) else sqnr,
        seconds=time.perf_counter() - start,
        notes=notes,
    )


def _answer(model: PreTrainedModel, batches: list[Batch]) -> torch.Tensor:
    """Return the answers to all rows that are no padding, [answers, width]."""
    parts = []
    for batch in batches:
        answers = forward(model, batch).float()
        valid = torch.from_numpy(batch["attention_mask"] != 0).to(answers.device)
        parts.append(answers[valid] if answers.ndim > 2 else answers)
    return torch.cat(parts)


@dataclass(frozen=True)
class LayerStore:
    """Trained layers as files, so that a killed run resumes with the next."""

    folder: Path
    identity: str  # of what determines the weights

    def _path(self, layer: int) -> Path:
        return self.folder / f"layer-{layer:03d}.safetensors"

    def read(self, layer: int) -> tuple[Tensors, LayerRow] | None:
        try:
            with safe_open(self._path(layer), framework="pt") as stored:
                about = stored.metadata() or {}
                if about.get("identity") != self.identity:
                    return None
                weights = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118  (no mapping)
                return weights, LayerRow.model_validate_json(about["row"])
        except (OSError, SafetensorError):  # none, or not whole
            return None

    def write(self, layer: int, weights: Tensors, row: LayerRow) -> None:
        about = {"identity": self.identity, "row": row.model_dump_json()}
        data = save({name: value.contiguous().cpu() for name, value in weights.items()}, about)
        files.write_bytes(self._path(layer), data)


def read_rows(session: Session, settings: Reconstruction, judged: int = 0) -> tuple[Rows, str]:
    """Read what the section names, and the fingerprint of the data.

    `judged` rows after those that calibrate, in the order of calibration, are left out: others judge on them.
    """
    if settings.texts is not None:
        split = session.own_texts(settings.texts, settings.seed, settings.samples)
    elif judged:
        own = session.recipe.calibration
        split = session.calibration_split(settings.samples + judged, own.seed)
        free = [row for row in range(len(split.dataset)) if not 0 <= row - own.samples < judged]
        split = replace(split, dataset=split.dataset.select(free))
    else:
        split = session.calibration_split(settings.samples, settings.seed)
    longest = session.recipe.export.max_length
    encoded = iter_encoded(split, session.config.task, session.tokenizer, longest)
    return draw_rows(encoded, settings, session.pad_id), split.fingerprint


def run_reconstruction(session: Session) -> list[Path]:
    """Reconstruct the PTQ model of a run; its folder has model, record, and what each layer gained."""
    settings, record = session.recipe.reconstruction, session.ptq_record
    assert settings is not None
    folder, longest = session.folder / RECONSTRUCTION, session.recipe.export.max_length
    rows, fingerprint = read_rows(session, settings)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    models: list[Any] = [session.new_ptq_model(), session.new_model()]
    model, teacher = (each.to(device) for each in models)
    about = [get_code_identity(), session.model_identity, fingerprint, longest, device, settings]
    identity = hashlib.sha256(f"{about} {record.model_dump_json()}".encode()).hexdigest()
    store = LayerStore(folder / CHECKPOINTS, identity)
    run = reconstruct(model, teacher, session.plan, record, rows, settings, store)
    write_trained(session, RECONSTRUCTION, model.cpu(), record)
    files.write_text(folder / RECORD, run.model_dump_json(indent=2) + "\n")
    session.notes += run.notes
    return list_written(folder)
