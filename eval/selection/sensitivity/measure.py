"""Which tensor costs the accuracy: every candidate alone in INT8, and everything but it, on training data."""

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from qdqbench.eval.metrics import gate
from qdqbench.eval.metrics.results import Comparison
from qdqbench.eval.metrics.runners import placed
from qdqbench.eval.selection.sensitivity.results import (
    DIAGNOSTIC,
    Candidate,
    CandidateRow,
    CurvePoint,
    Group,
    Sensitivity,
    SensitivityChoice,
    ranking,
)
from qdqbench.eval.selection.trials.calibrations import QuantizerToggles
from qdqbench.eval.selection.trials.results import DRAW, EMBEDDINGS, LAYERNORMS, Trial
from qdqbench.eval.selection.trials.store import RECIPE_FILE, TRIALS, Trials, named_by, write_recipe
from qdqbench.eval.selection.units import Units
from qdqbench.quantize.calibration import ptq
from qdqbench.quantize.calibration.fakequant import quantizers
from qdqbench.quantize.engine.target import choose_target
from qdqbench.quantize.models.families.family import LINEAR_KINDS, SMOOTHED
from qdqbench.quantize.models.families.known import family_of
from qdqbench.quantize.models.modules import ModuleInfo, module_table, record_first_inputs, resume_from
from qdqbench.quantize.pipeline.session import Session
from qdqbench.quantize.recipe.plan import Plan, Scaling, short_name
from qdqbench.quantize.recipe.schema import Recipe
from qdqbench.quantize.recipe.sections import Calibration
from qdqbench.quantize.tasks.data.encode import sorted_batches
from qdqbench.quantize.tasks.kinds.encoded import Encoded, IndexedBatch
from qdqbench.quantize.tasks.task import kind_of
from qdqbench.quantize.utils.arrays import Batch, Float32, Int64
from qdqbench.quantize.utils.limits import HEAD_SIZES_TEXT, INT8_HEAD_SIZES
from qdqbench.quantize.utils.names import count_of
from qdqbench.quantize.utils.progress import reporter

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class CandidateSet:
    units: Units
    plan: Plan  # every linear and every attention that can be fused
    everything: frozenset[str]  # linears and attention modules of "everything in INT8"
    candidates: list[Candidate]
    notes: list[str]


def list_candidates(recipe: Recipe, modules: Mapping[str, ModuleInfo], prefix: str) -> CandidateSet:
    """Return the candidates of a model, and the plan that calibrates all of them.

    Everything in INT8 is every linear of the encoder, per channel where the recipe has no INT8 rule for it,
    and the recipe's INT8 attention and other INT8 linears.
    """
    units = Units(recipe, modules, prefix)
    units.require_no_residual("sensitivity", "measure")
    base = units.plan
    section, family = recipe.calibration, base.family
    linears = [name for name, info in modules.items() if info.kind == "Linear"]
    attention = [
        name
        for name, info in modules.items()
        if info.kind == "Attention" and info.head_size in INT8_HEAD_SIZES
    ]
    added = Scaling(section.method, section.weights_method)  # of what the recipe has not in INT8
    smoothed = replace(added, smoothing=section.smoothing)
    kinds = {name: family.kind(name) for name in linears}
    scaling = {name: smoothed if kinds[name] in SMOOTHED else added for name in linears}
    plan = Plan(
        int8={name: base.int8.get(name, "channel") for name in linears},
        attention=tuple(attention),
        scaling={n: base.scaling.get(n) or scaling.get(n, added) for n in (*linears, *attention)},
        family=family,
    )
    encoder = [name for name in linears if family.layer_of(name) is not None]
    everything = frozenset([*encoder, *base.int8, *base.attention])
    candidates = _candidates(plan, everything, modules, prefix)
    notes = [*_notes(plan, base, modules)]
    return CandidateSet(units, plan, everything, candidates, notes)


def _candidates(
    plan: Plan, everything: frozenset[str], modules: Mapping[str, ModuleInfo], prefix: str
) -> list[Candidate]:
    family, found = plan.family, list[Candidate]()

    def add(group: Group, kind: str, layer: int | None, names: Iterable[str], name: str = "") -> None:
        known: dict[str, Any] = {"name": name or kind, "group": group, "kind": kind, "layer": layer}
        diagnostic = group == "kind" and kind in DIAGNOSTIC
        found.append(Candidate(**known, modules=[*names], diagnostic=diagnostic))

    layers = sorted({layer for name in plan.int8 if (layer := family.layer_of(name)) is not None})
    for name in plan.int8:
        add("linear", family.kind(name), family.layer_of(name), [name], short_name(name, prefix))
    for name in plan.attention:
        add("attention", "attention", family.layer_of(name), [name], short_name(name, prefix))
    for layer in layers:
        inside = [name for name in modules if name in everything and family.layer_of(name) == layer]
        place = family.place(short_name(inside[0], prefix))
        assert place is not None, inside
        add("block", "block", layer, inside, f"{place.layers}.{layer}")
    kinds = {kind: [name for name in plan.int8 if family.kind(name) == kind] for kind in LINEAR_KINDS}
    for kind, names in (kinds | {"attention": [*plan.attention]}).items():
        if names:
            add("kind", kind, None, names)
    of = {kind: [name for name, info in modules.items() if info.kind == kind] for kind in DIAGNOSTIC.values()}
    add("kind", LAYERNORMS, None, (name for name in of["LayerNorm"] if family.layer_of(name) is not None))
    add("kind", EMBEDDINGS, None, of["Embedding"])
    return found


def _notes(plan: Plan, base: Plan, modules: Mapping[str, ModuleInfo]) -> Iterator[str]:
    yield (
        "LayerNorm input and embeddings are diagnostic: no recipe can put them into INT8 today (LayerNorm "
        "paths are protected, embeddings are looked up and not multiplied)"
    )
    layer_of = plan.family.layer_of
    added = [name for name in plan.int8 if layer_of(name) is not None and name not in base.int8]
    if added:
        yield (
            f"{len(added)} encoder linears are not INT8 in the recipe; here they are, per channel, "
            "and so in the written recipe unless it keeps them out"
        )
    if any(i.kind == "Attention" and name not in plan.attention for name, i in modules.items()):
        yield f"attention is not measured: INT8 attention is fused for head sizes {HEAD_SIZES_TEXT} only"
    outside = [name for name in plan.int8 if layer_of(name) is None and name not in base.int8]
    if outside or not base.attention:
        names = [plan.family.kind(name) for name in outside]
        names += [] if base.attention else ["attention"]
        yield (
            f"{', '.join(dict.fromkeys(names))}: not INT8 in the recipe, so not part of everything, and "
            "measured alone only"
        )


SHARE = 0.5  # of the noise power of everything in INT8 that may be left: 3 dB


def kept_counts(linears: int) -> list[int]:
    """Return 0, 1, 2, 4, 8, ... linears, one at least left in INT8."""
    return [0, *(1 << power for power in range(linears.bit_length()) if 1 << power < linears)]


def measure_curve(linears: int, measure: Callable[[int], CurvePoint], max_drop: float) -> list[CurvePoint]:
    """Return points of the curve: powers of two, then a bisection to the first one that holds."""
    points = {kept: measure(kept) for kept in kept_counts(linears)}
    while True:
        full = points[0].comparison
        good = min((k for k, point in points.items() if point_holds(point, full, max_drop)), default=0)
        below = max((k for k in points if k < good), default=good)
        if good - below < 2:
            return [points[kept] for kept in sorted(points)]
        middle = (good + below) // 2
        points[middle] = measure(middle)


def point_holds(point: CurvePoint, full: Comparison, max_drop: float) -> bool:
    """Return whether a point is good enough; without a kept linear, a drop that may be noise is."""
    own = point.comparison
    if point.kept == 0:
        return gate.judge(own.drop, own.drop_stderr, 0.0) != "failed"
    holds = gate.judge(own.drop, own.drop_stderr, max_drop) != "failed"
    return holds and own.noise_power <= SHARE * full.noise_power


def choose_point(curve: list[CurvePoint], max_drop: float) -> tuple[CurvePoint, bool]:
    """Return the first point that holds, else the one with the highest SQNR; and whether it holds."""
    good = next((point for point in curve if point_holds(point, curve[0].comparison, max_drop)), None)
    return good or min(curve, key=lambda point: point.comparison.noise_power), good is not None


def attention_of(linears: list[str], found: CandidateSet) -> list[str]:
    """Return attention modules that leave INT8 with these linears: they would lose their fusion."""
    base = found.units.plan
    return [name for name in base.attention if base.family.require_beside(name, "output") in linears]


def make_recipe(point: CurvePoint, found: CandidateSet) -> Recipe:
    """Return the recipe of a point of the curve, which was resolved against the model."""
    recipe, int8 = found.units.recipe, found.everything - {*point.linears, *point.attention}
    count = count_of(len(point.linears), "linear")
    return found.units.write(
        {name: scales for name, scales in found.plan.int8.items() if name in int8},
        [name for name in found.plan.attention if name in int8],
        name=named_by(recipe.name, "sensitivity"),
        description=f"{recipe.name}, {count} kept out of INT8 by sensitivity.",
    )


@dataclass(frozen=True)
class LayerState:
    rows: Int64  # of the draw, [B]
    batch: Batch
    hidden: "torch.Tensor"  # [B, L, hidden]


class PartialForward:
    """Answers of a model to a draw, computed from the input of any encoder layer on."""

    def __init__(self, model: "PreTrainedModel", batches: list[IndexedBatch], encoded: Encoded) -> None:
        """Take the model over; `batches` are those that `sorted_batches` makes of `encoded`.

        Where the head reads the first token only, the others are not computed after the attention of the
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

    def start(self) -> tuple[list[LayerState], Float32]:
        """Return states at the input of the first layer, and logits, in the model's present precision."""
        with record_first_inputs(self.model) as found:
            logits = self.full()
        states = zip(self.batches, found, strict=True)
        return [LayerState(rows, batch, hidden) for (rows, batch), hidden in states], logits

    def full(self) -> Float32:
        """Return answers [answers, width] of the whole model."""
        return self._gather((rows, quantizers.forward(self.model, batch)) for rows, batch in self.batches)

    def suffix(self, states: list[LayerState], layer: int) -> Float32:
        """Return answers [answers, width] from states at the input of `layer`, or of the head."""

        def logits() -> Iterator[tuple[Int64, "torch.Tensor"]]:
            for state in states:
                with resume_from(self.model, layer, state.hidden):
                    yield state.rows, quantizers.forward(self.model, state.batch)

        return self._gather(logits())

    def advance(self, states: list[LayerState], layer: int) -> list[LayerState]:
        found = []
        for state in states:
            with resume_from(self.model, layer, state.hidden, layer + 1) as made:
                quantizers.forward(self.model, state.batch)
            found.append(replace(state, hidden=made[0]))
        return found

    def _gather(self, parts: Iterator[tuple[Int64, "torch.Tensor"]]) -> Float32:
        found = [(rows, self.encoded.kept(rows, made).float().cpu().numpy()) for rows, made in parts]
        answers = np.empty((self.encoded.answers.sum(), found[0][1].shape[1]), dtype=np.float32)
        for rows, values in found:
            answers[self.encoded.answers_of(rows)] = values
        return answers


@contextmanager
def watch_norms(model: "PreTrainedModel", settings: Calibration) -> Iterator[Callable[[], dict[str, Any]]]:
    """Watch the input of every LayerNorm of the encoder; yield a function that gives the amax of each."""
    quantizers.import_modelopt()  # first, for it keeps ModelOpt's warnings from the user
    import torch
    from modelopt.torch.quantization.calib import MaxCalibrator

    from qdqbench.quantize.calibration.histograms import ActivationCalibrator

    family = family_of(model.config)
    seen: dict[str, Any] = {
        name: MaxCalibrator(8, axis=None)
        if settings.method == "max"
        else ActivationCalibrator(settings.method)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.LayerNorm) and family.layer_of(name) is not None
    }

    def collect(calibrator: Any, module: Any, inputs: tuple[Any, ...]) -> None:
        calibrator.collect(inputs[0].detach())

    with ExitStack() as stack:
        for name, calibrator in seen.items():
            module = model.get_submodule(name)
            stack.callback(module.register_forward_pre_hook(functools.partial(collect, calibrator)).remove)
        yield lambda: {name: calibrator.compute_amax() for name, calibrator in seen.items()}


FEW = 64  # samples; below it the standard error of a metric means little
EVERYTHING = "everything"


@dataclass
class CalibratedModel:
    """The calibrated model and the draw; made when the first candidate needs it."""

    switches: QuantizerToggles
    suffixes: PartialForward
    reference: Float32
    states: list[LayerState]  # at the input of the first layer


@dataclass
class Measurement:
    session: Session
    samples: int
    _done: int = field(default=0, init=False)  # measurements

    def run(self) -> Sensitivity:
        start = time.perf_counter()
        fp32 = self.trials.fp32_scores(DRAW)
        full = self._compare(EVERYTHING, self.found.everything)
        for candidate in self.found.candidates:
            for key, on in self._units(candidate).items() if candidate.start is None else ():
                self._compare(key, on)
        self._layers()
        rows = [self._row(candidate) for candidate in self.found.candidates]
        order = [row.modules[0] for row in ranking(rows)]
        limit = self.session.recipe.gate.max_drop
        curve = measure_curve(len(order), lambda kept: self._keep_out(order[:kept]), limit)
        point, reached = choose_point(curve, limit)
        write_recipe(make_recipe(point, self.found), self.session.folder)
        about, plan = self.trials.describe(), self.found.plan
        limits = list_limits(self.session.recipe, about["data"]["samples"])
        about["notes"] = [*about["notes"], *self.found.notes, *limits]
        return Sensitivity(
            **about,
            fp32=fp32,
            full=full,
            int8=[name for name in (*plan.int8, *plan.attention) if name in self.found.everything],
            rows=rows,
            curve=curve,
            choice=SensitivityChoice(kept=point.kept, reached=reached, file=RECIPE_FILE),
            timings={"candidates_s": self.trials.store.seconds, "this_run_s": time.perf_counter() - start},
        )

    @functools.cached_property
    def found(self) -> CandidateSet:
        model = self.session.fp32_model
        return list_candidates(self.session.recipe, module_table(model), model.base_model_prefix)

    @functools.cached_property
    def trials(self) -> Trials:
        path = self.session.folder / f"sensitivity.{TRIALS}"
        answer = lambda: {DRAW: self.bench.reference}  # noqa: E731  (not before it is needed)
        return Trials(self.session, self.samples, path, evaluates=False, reference=answer)

    @functools.cached_property
    def bench(self) -> CalibratedModel:
        """Return the model, calibrated, with everything switchable, and its FP32 logits."""
        session, recipe = self.session, self.session.recipe
        model = placed(session.new_int8_model())
        with watch_norms(model, recipe.calibration) as norms:
            # a correction depends on everything that is in INT8, so it cannot be switched with its linear
            attended = recipe.model_copy(update={"attention": "int8"})  # a candidate, whatever the recipe has
            settings = attended.calibration_for(session.target.backend)
            settings = settings.model_copy(update={"bias_correction": False})
            ptq.calibrate(model, self.found.plan, session.calibration_batches(), settings)
            switches = QuantizerToggles(model, self.found.plan, norms())
        encoded = self.trials.draw
        batches = list(sorted_batches(encoded, session.config.batch_size, pad_id=session.pad_id))
        suffixes = PartialForward(model, batches, encoded)
        self._say("FP32")
        states, reference = suffixes.start()
        return CalibratedModel(switches, suffixes, reference, states)

    def _layers(self) -> None:
        """Compare candidates layer by layer, from two states that advance: all FP32, and everything INT8."""
        ordered = [c for c in self.found.candidates if c.start is not None]
        if all(key in self.trials.store.trials for c in ordered for key in self._units(c)):
            return
        bench, layers = self.bench, len(self.bench.suffixes.layers)
        plain, int8, bench.states = bench.states, bench.states, []
        for layer in range(layers + 1):
            for candidate in (c for c in ordered if bench.suffixes.starts[c.start or 0] == layer):
                for (key, on), states in zip(self._units(candidate).items(), (plain, int8), strict=False):
                    self._compare(key, on, states, layer)
            if layer < layers:
                bench.switches.set(())
                plain = bench.suffixes.advance(plain, layer)
                bench.switches.set(self.found.everything)
                int8 = bench.suffixes.advance(int8, layer)

    def _units(self, candidate: Candidate) -> dict[str, frozenset[str]]:
        """Return what is in INT8, by key: only the candidate, and everything but it if it is part of that."""
        units, everything = candidate.units, self.found.everything
        all_but = {f"all but {candidate.key}": everything - units} if units & everything else {}
        return {f"only {candidate.key}": units} | all_but

    def _keep_out(self, linears: list[str]) -> CurvePoint:
        attention = attention_of(linears, self.found)
        key = f"curve {len(linears)}" if linears else EVERYTHING
        comparison = self._compare(key, self.found.everything - {*linears, *attention})
        return CurvePoint(kept=len(linears), linears=linears, attention=attention, comparison=comparison)

    def _compare(
        self, key: str, on: frozenset[str], states: list[LayerState] | None = None, layer: int = 0
    ) -> Comparison:
        """Return a comparison with these units in INT8; one that lacks is measured from states at a layer."""
        self._say(key)
        trials = self.trials
        if key not in trials.store.trials:
            trials.fp32, self.bench  # noqa: B018  (calibration is not the time of a candidate)
            start, suffixes = time.perf_counter(), self.bench.suffixes
            self.bench.switches.set(on)
            answers = suffixes.full() if states is None else suffixes.suffix(states, layer)
            scores = trials.compare({DRAW: answers})
            spent = time.perf_counter() - start
            trials.store.add(key, Trial(recipe=None, origin="candidate", scores=scores, seconds=spent))
        self._done += 1
        return trials.store.trials[key].scores[DRAW]

    def _say(self, text: str) -> None:
        reporter().begin(text, self._done, self._total)

    @functools.cached_property
    def _total(self) -> int:
        """Return the number of measurements without the bisection of the curve."""
        keys = {key for candidate in self.found.candidates for key in self._units(candidate)}
        return len(keys) + 1 + len(kept_counts(len({*self.found.plan.int8} & self.found.everything)))

    def _row(self, candidate: Candidate) -> CandidateRow:
        values = [self.trials.store.trials[key].scores[DRAW] for key in self._units(candidate)]
        all_but = values[1] if len(values) > 1 else None
        return CandidateRow(**candidate.model_dump(), only=values[0], all_but=all_but)


def list_limits(recipe: Recipe, samples: int) -> Iterator[str]:
    if samples < FEW:
        yield (
            f"{count_of(samples, 'sample')}: too few to judge a drop: a standard error of 0 says that no "
            f"answer changed, not that none would; take {FEW} or more"
        )
    if recipe.computes_tanh_on(choose_target(recipe).backend):
        yield "FP32 is the recipe's model without quantizers; its GELU has the tanh form of the INT8 graph"
    if recipe.calibration.bias_correction:
        yield (
            "measured without bias correction, which depends on everything that is in INT8; the written "
            "recipe has it"
        )
    smooths = {recipe.calibration.smoothing, *(rule.smoothing for rule in recipe.rules)} - {None, "none"}
    if smooths:
        yield (
            "the factors of smoothing are those of everything in INT8; a recipe that keeps a linear in FP16 "
            "finds its own"
        )
