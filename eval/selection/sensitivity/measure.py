"""Which tensor costs the accuracy: every candidate alone in INT8, and everything but it, on training data."""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from qdqbench.eval.metrics.runners import placed
from qdqbench.eval.reporting.formats import count_of
from qdqbench.eval.selection.sensitivity.candidates import (
    Candidate,
    Choices,
    attention_of,
    choices,
    choose_point,
    kept_counts,
    make_recipe,
    measure_curve,
)
from qdqbench.eval.selection.sensitivity.results import (
    CandidateRow,
    CurvePoint,
    Sensitivity,
    SensitivityChoice,
    ranking,
)
from qdqbench.eval.selection.trials.calibrations import Switches
from qdqbench.eval.selection.trials.results import DRAW, Scores, Trial
from qdqbench.eval.selection.trials.store import RECIPE_FILE, TRIALS, Trials, described, write_recipe
from qdqbench.quantize.calibration import ptq
from qdqbench.quantize.calibration.fakequant import quantizers
from qdqbench.quantize.models.families.known import family_of
from qdqbench.quantize.models.modules import module_table
from qdqbench.quantize.models.runs import record_first_inputs, resume_from
from qdqbench.quantize.pipeline.session import Session
from qdqbench.quantize.recipe.schema import Recipe
from qdqbench.quantize.recipe.sections import Calibration
from qdqbench.quantize.tasks.rows import sorted_batches
from qdqbench.quantize.tasks.task import kind_of
from qdqbench.quantize.tasks.types.encoded import Encoded, IndexedBatch
from qdqbench.quantize.utils.arrays import Batch, Float32, Int64
from qdqbench.quantize.utils.comparison import Comparison
from qdqbench.quantize.utils.progress import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Held:
    """One batch at the input of an encoder layer."""

    rows: Int64  # of the draw, [B]
    batch: Batch
    hidden: torch.Tensor  # [B, L, hidden]


class Suffixes:
    """Answers of a model to a draw, computed from the input of any encoder layer on."""

    def __init__(self, model: "PreTrainedModel", batches: list[IndexedBatch], encoded: Encoded) -> None:
        """Take the model over; `batches` are those that `sorted_batches` makes of `encoded`.

        Where the head reads the first token only, the others are not computed behind the attention of the
        last layer. What the first token gets is not changed by it.
        """
        self.model, self.batches, self.encoded = model, batches, encoded
        family = family_of(model.config)
        self.layers = family.runs(model)  # a shared one as often as it runs
        firsts = [self.layers.index(name) for name in family.layer_names(model)]
        self.starts = [*firsts, len(self.layers)]  # first run of each layer, and the head
        kind = kind_of(type(model).__name__)
        cut = kind is not None and kind.reads_first_token
        for residual in family.residuals[:1] if cut else ():  # a module with these two tensors as its inputs
            model.get_submodule(f"{self.layers[-1]}.{residual.module}").register_forward_pre_hook(
                lambda _, inputs: tuple(tensor[:, :1] for tensor in inputs)
            )

    def start(self) -> tuple[list[Held], Float32]:
        """Return states at the input of the first layer, and logits, in the model's present precision."""
        with record_first_inputs(self.model) as found:
            logits = self.full()
        states = zip(self.batches, found, strict=True)
        return [Held(rows, batch, hidden) for (rows, batch), hidden in states], logits

    def full(self) -> Float32:
        """Return answers [answers, width] of the whole model."""
        return self._gather((rows, quantizers.forward(self.model, batch)) for rows, batch in self.batches)

    def suffix(self, states: list[Held], layer: int) -> Float32:
        """Return answers [answers, width] from states at the input of `layer`, or of the head."""

        def logits() -> Iterator[tuple[Int64, torch.Tensor]]:
            for state in states:
                with resume_from(self.model, layer, state.hidden):
                    yield state.rows, quantizers.forward(self.model, state.batch)

        return self._gather(logits())

    def advance(self, states: list[Held], layer: int) -> list[Held]:
        found = []
        for state in states:
            with resume_from(self.model, layer, state.hidden, layer + 1) as made:
                quantizers.forward(self.model, state.batch)
            found.append(replace(state, hidden=made[0]))
        return found

    def _gather(self, parts: Iterator[tuple[Int64, torch.Tensor]]) -> Float32:
        found = [(rows, self.encoded.kept(rows, made).float().cpu().numpy()) for rows, made in parts]
        answers = np.empty((self.encoded.answers.sum(), found[0][1].shape[1]), dtype=np.float32)
        for rows, values in found:
            answers[self.encoded.answers_of(rows)] = values
        return answers


@contextmanager
def watch_norms(model: "PreTrainedModel", settings: Calibration) -> Iterator[Callable[[], dict[str, Any]]]:
    """Watch the input of every LayerNorm of the encoder while the model is calibrated around it.

    Yields:
        Function that gives the amax of each by the method of the calibration section, float32 scalars.
    """
    quantizers.import_modelopt()  # first, for it keeps ModelOpt's warnings from the user
    from modelopt.torch.quantization.calib import MaxCalibrator

    from qdqbench.quantize.calibration.histograms import ActivationCalibrator

    family = family_of(model.config)
    norms = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.LayerNorm) and family.layer_of(name) is not None
    }
    by_max = settings.method == "max"
    seen: dict[str, Any] = {
        name: MaxCalibrator(num_bits=8, axis=None) if by_max else ActivationCalibrator(settings.method)
        for name in norms
    }

    def hook(name: str) -> Callable[[Any, tuple[Any, ...]], None]:
        return lambda _, inputs: seen[name].collect(inputs[0].detach())

    hooks = [module.register_forward_pre_hook(hook(name)) for name, module in norms.items()]
    try:
        yield lambda: {name: calibrator.compute_amax() for name, calibrator in seen.items()}
    finally:
        for handle in hooks:
            handle.remove()


FEW = 64  # samples; below it the standard error of a metric means little
EVERYTHING = "everything"


@dataclass
class _Bench:
    """The calibrated model and the draw; made when the first candidate needs it."""

    switches: Switches
    suffixes: Suffixes
    reference: Float32
    states: list[Held]  # at the input of the first layer


@dataclass
class Measurement:
    session: Session
    samples: int
    progress: Progress = lambda done, total, text: None
    _done: int = field(default=0, init=False)  # measurements

    def run(self) -> Sensitivity:
        """Measure what the store lacks, choose a recipe and write it.

        Raises:
            UserError: bad input, too little data, or a folder that cannot be written.
            CheckFailed: weights, scales or logits that are not finite.
        """
        start = time.perf_counter()
        fp32 = self.trials.fp32_scores(DRAW)
        full = self._compare(EVERYTHING, lambda: self._whole(self.found.everything))
        self._spanning()
        self._layers()
        rows = [self._row(candidate) for candidate in self.found.candidates]
        order = [row.modules[0] for row in ranking(rows)]
        limit = self.session.recipe.gate.max_drop
        curve = measure_curve(len(order), lambda kept: self._kept(order[:kept]), limit)
        return self._report(fp32, full, rows, curve, time.perf_counter() - start)

    @functools.cached_property
    def found(self) -> Choices:
        model = self.session.fp32_model
        return choices(self.session.recipe, module_table(model), model.base_model_prefix)

    @functools.cached_property
    def trials(self) -> Trials:
        """Return the store of finished candidates, with the draw that they are measured on."""
        path = self.session.folder / f"sensitivity.{TRIALS}"
        return Trials(self.session, self.samples, path, evaluates=False, reference=self._reference)

    @functools.cached_property
    def bench(self) -> _Bench:
        """Return the model, calibrated, with everything switchable, and its FP32 logits."""
        session, recipe = self.session, self.session.recipe
        model = placed(session.new_int8_model())
        seen = 0

        def show(count: int) -> None:
            nonlocal seen
            seen += count
            self._say(f"calibration, {seen} samples")

        with watch_norms(model, recipe.calibration) as norms:
            # a correction depends on everything that is in INT8, so it cannot be switched with its linear
            settings = recipe.calibration.model_copy(update={"bias_correction": False})
            ptq.calibrate(model, self.found.plan, session.calibration_batches(), settings, show)
            switches = Switches(model, self.found.plan, norms())
        encoded = self.trials.draw
        batches = list(sorted_batches(encoded, session.config.batch_size, pad_id=session.pad_id))
        suffixes = Suffixes(model, batches, encoded)
        self._say("FP32")
        states, reference = suffixes.start()
        return _Bench(switches, suffixes, reference, states)

    def _reference(self) -> dict[str, Float32]:
        return {DRAW: self.bench.reference}

    def _spanning(self) -> None:
        for candidate in self.found.candidates:
            if candidate.start is None:
                self._both(candidate, self._whole, self._whole)

    def _layers(self) -> None:
        """Compare candidates layer by layer, from two states that advance: all FP32, and everything INT8."""
        ordered = [c for c in self.found.candidates if c.start is not None]
        ordered.sort(key=lambda c: c.start or 0)
        if all(key in self.trials.store.trials for c in ordered for key in self._keys(c)):
            return
        bench, layers = self.bench, len(self.bench.suffixes.layers)
        plain, int8, bench.states = bench.states, bench.states, []
        for layer in range(layers + 1):
            only, all_but = (functools.partial(self._suffix, states, layer) for states in (plain, int8))
            for candidate in (c for c in ordered if bench.suffixes.starts[c.start or 0] == layer):
                self._both(candidate, only, all_but)
            if layer < layers:
                bench.switches.set(())
                plain = bench.suffixes.advance(plain, layer)
                bench.switches.set(self.found.everything)
                int8 = bench.suffixes.advance(int8, layer)

    def _keys(self, candidate: Candidate) -> list[str]:
        keys = [f"only {candidate.key}"]
        return [*keys, f"all but {candidate.key}"] if candidate.units & self.found.everything else keys

    def _both(
        self,
        candidate: Candidate,
        plain: Callable[[frozenset[str]], Float32],
        int8: Callable[[frozenset[str]], Float32],
    ) -> None:
        """Compare only this in INT8, and everything but this, each from the states of its own reference."""
        keys = self._keys(candidate)
        self._compare(keys[0], lambda: plain(candidate.units))
        if len(keys) > 1:
            self._compare(keys[1], lambda: int8(self.found.everything - candidate.units))

    def _whole(self, on: frozenset[str]) -> Float32:
        self.bench.switches.set(on)
        return self.bench.suffixes.full()

    def _suffix(self, states: list[Held], layer: int, on: frozenset[str]) -> Float32:
        self.bench.switches.set(on)
        return self.bench.suffixes.suffix(states, layer)

    def _kept(self, linears: list[str]) -> CurvePoint:
        attention = attention_of(linears, self.found)
        on = self.found.everything - {*linears, *attention}
        key = f"curve {len(linears)}" if linears else EVERYTHING
        comparison = self._compare(key, lambda: self._whole(on))
        return CurvePoint(kept=len(linears), linears=linears, attention=attention, comparison=comparison)

    def _compare(self, key: str, answer: Callable[[], Float32]) -> Comparison:
        """Return a finished candidate, or else measure it now and keep it at once."""
        self._say(key)
        trials = self.trials
        if key not in trials.store.trials:
            trials.fp32, self.bench  # noqa: B018  (calibration is not the time of a candidate)
            start = time.perf_counter()
            scores, _ = trials.compare({DRAW: answer()})
            spent = time.perf_counter() - start
            trials.store.add(key, Trial(recipe=None, origin="candidate", scores=scores, seconds=spent))
        self._done += 1
        return trials.store.trials[key].scores[DRAW]

    def _say(self, text: str) -> None:
        self.progress(self._done, self._total, text)

    @functools.cached_property
    def _total(self) -> int:
        """Return the number of measurements without the bisection of the curve."""
        keys = {key for candidate in self.found.candidates for key in self._keys(candidate)}
        linears = len({*self.found.plan.int8} & self.found.everything)
        return len(keys) + 1 + len(kept_counts(linears))

    def _row(self, candidate: Candidate) -> CandidateRow:
        values = [self.trials.store.trials[key].scores[DRAW] for key in self._keys(candidate)]
        return CandidateRow(
            name=candidate.name,
            group=candidate.group,
            kind=candidate.kind,
            layer=candidate.layer,
            modules=list(candidate.modules),
            diagnostic=candidate.diagnostic,
            only=values[0],
            all_but=values[1] if len(values) > 1 else None,
        )

    def _report(
        self, fp32: Scores, full: Comparison, rows: list[CandidateRow], curve: list[CurvePoint], wall_s: float
    ) -> Sensitivity:
        session, config = self.session, self.session.config
        point, reached = choose_point(curve, config.recipe.gate.max_drop)
        model = session.fp32_model
        modules, prefix = module_table(model), model.base_model_prefix
        chosen = make_recipe(config.recipe, point, self.found, modules, prefix)
        write_recipe(chosen, session.folder)
        (split, encoded), plan = self.trials.drawn, self.found.plan
        return Sensitivity(
            **described(session, split, len(encoded.gold)),
            fp32=fp32,
            full=full,
            int8=[name for name in (*plan.int8, *plan.attention) if name in self.found.everything],
            rows=rows,
            curve=curve,
            choice=SensitivityChoice(
                kept=point.kept,
                reached=reached,
                file=RECIPE_FILE,
            ),
            warnings=session.warnings,
            notes=[*session.notes, *self.found.notes, *list_limits(config.recipe, len(encoded.gold))],
            timings={"candidates_s": self.trials.store.seconds, "this_run_s": wall_s},
        )


def list_limits(recipe: Recipe, samples: int) -> list[str]:
    """Return notes on what the figures of a recipe on so many samples cannot tell."""
    notes = []
    if samples < FEW:
        notes.append(
            f"{count_of(samples, 'sample')}: too few to judge a drop: a standard error of 0 says that no "
            f"answer changed, not that none would; take {FEW} or more"
        )
    if recipe.export.gelu == "tanh":
        notes.append(
            "FP32 is the recipe's model without quantizers; its GELU has the tanh form of the INT8 graph"
        )
    if recipe.calibration.bias_correction:
        notes.append(
            "measured without bias correction, which depends on everything that is in INT8; the written "
            "recipe has it"
        )
    smooths = {recipe.calibration.smoothing, *(rule.smoothing for rule in recipe.rules)} - {None, "none"}
    if smooths:
        notes.append(
            "the factors of smoothing are those of everything in INT8; a recipe that keeps a linear in FP16 "
            "finds its own"
        )
    return notes
