"""What all trials of a search share: the model, its data, FP32's answers, calibrations, and the store."""

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from qdqbench.eval.bench.measure import OpenEngine, alone, measure_speedup, open_engine, write_engine_graph
from qdqbench.eval.metrics.results import Speedup
from qdqbench.eval.metrics.runners import evaluating, placed
from qdqbench.eval.selection.search.options import SearchOptions
from qdqbench.eval.selection.search.results import Ranking, Source
from qdqbench.eval.selection.sensitivity.results import CandidateRow
from qdqbench.eval.selection.trials.calibrations import describe_cost, reconstruct_calibrated
from qdqbench.eval.selection.trials.results import CalibrationCost, Origin, Trial, failure_of
from qdqbench.eval.selection.trials.store import TRIALS, Trials, hash_of, named_by
from qdqbench.eval.selection.units import Unit, Units
from qdqbench.quantize.calibration import ptq
from qdqbench.quantize.calibration.record import (
    CalibrationRecord,
    disable_bias_correction,
    read_record,
    select_record,
    write_record,
)
from qdqbench.quantize.calibration.techniques.smoothing import SEARCHED as SMOOTHINGS
from qdqbench.quantize.engine.backend import choose_backend
from qdqbench.quantize.engine.build import require_int8
from qdqbench.quantize.engine.cuda.names import ATTENTION_SIZES, NAMES, find_target
from qdqbench.quantize.engine.profiles import choose_profile
from qdqbench.quantize.engine.target import choose_target
from qdqbench.quantize.models.families.known import family_of
from qdqbench.quantize.models.modules import ModuleInfo
from qdqbench.quantize.pipeline.data_profiles import engine_profiles
from qdqbench.quantize.pipeline.session import Session
from qdqbench.quantize.recipe.plan import Plan, resolve
from qdqbench.quantize.recipe.schema import Recipe
from qdqbench.quantize.recipe.sections import Calibration
from qdqbench.quantize.utils.arrays import Float32
from qdqbench.quantize.utils.errors import CheckFailed, MissingDevice, UserError
from qdqbench.quantize.utils.limits import INT8_ATTENTION_LENGTH, INT8_HEAD_SIZES
from qdqbench.quantize.utils.progress import report_phase
from qdqbench.quantize.utils.system.cpu import find_cpu
from qdqbench.quantize.utils.system.gpu import Gpu, find_gpu

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Params = dict[str, Any]
FRAMES = ("all", "ffn")  # kinds that may be INT8; ffn: the feed-forward alone
SECTION = {  # of the calibration; the first is taken where a recipe has none of them
    "method": ("max", "percentile/99.99", "percentile/99.999", "mse", "entropy"),
    "smoothing": SMOOTHINGS,
    "weights_method": ("max", "mse"),
}
PLAIN = {"method": "max", "smoothing": "none", "weights_method": "max"}
FLIPS = ("flip_1", "flip_2")


@dataclass(frozen=True)
class Space:
    """Changes that a search may make in a recipe, and the way from a trial's parameters to a recipe and back.

    A BERT has dozens of linears and a search only dozens of trials. So the space follows a ranking of the
    units (a layer's q, k and v, its attention output, its two feed-forward linears) by what INT8 costs in
    each: how many of the worst stay out of INT8, and one or two exceptions.
    """

    whole: Units
    units: dict[Unit, tuple[str, ...]]  # linears of each unit; in order of the ranking, worst first
    attention: dict[int, str]  # layers whose attention may be INT8; in order of the ranking, worst first

    def ranked(self, ranking: Ranking) -> "Space":
        units = {unit: self.units[unit] for unit in ranking.units}
        attention = {layer: self.attention[layer] for layer in ranking.attention}
        return replace(self, units=units, attention=attention)

    @cached_property
    def outside(self) -> dict[str, str]:
        """Return the scales of INT8 linears that no trial moves."""
        searched = {name for names in self.whole.linears.values() for name in names}
        return {name: each for name, each in self.whole.plan.int8.items() if name not in searched}

    @cached_property
    def scales(self) -> str:
        """Return the weight scales of the searched linears: what most of them have in the recipe."""
        formats = Counter(each for name, each in self.whole.plan.int8.items() if name not in self.outside)
        return formats.most_common(1)[0][0] if formats else "channel"

    def suggest(self, trial: Any) -> Params:
        count = len(self.units)
        params: Params = {"frame": trial.suggest_categorical("frame", FRAMES)}
        params |= {name: trial.suggest_int(name, 0, count) for name in ("keep", *FLIPS)}
        if self.attention:
            params["attention_keep"] = trial.suggest_int("attention_keep", 0, len(self.attention))
        return params | {name: trial.suggest_categorical(name, values) for name, values in SECTION.items()}

    def int8_units(self, params: Params) -> set[Unit]:
        """Return units in INT8: all after the first `keep` of the ranking, then flips (1: worst, 0: none)."""
        units = list(self.units)
        chosen = {u for u in units[params["keep"] :] if params["frame"] == "all" or u[1].startswith("ffn")}
        for name in FLIPS:
            if params[name]:
                chosen ^= {units[params[name] - 1]}
        return chosen

    def int8_attention(self, params: Params, units: set[Unit]) -> set[int]:
        """Return layers with INT8 attention; it is fused only where the output linear is INT8 too."""
        keep = params.get("attention_keep", len(self.attention))
        return {layer for layer in list(self.attention)[keep:] if (layer, "output") in units}

    def recipe(self, params: Params, description: str = "") -> Recipe:
        units = self.int8_units(params)
        return self.assemble(units, self.int8_attention(params, units), params, description)

    def assemble(
        self, units: set[Unit], attention: set[int], how: Mapping[str, Any], description: str = ""
    ) -> Recipe:
        smoothing = how["smoothing"] if how["smoothing"] in ("none", "gain") else float(how["smoothing"])
        section = self.whole.recipe.calibration.model_dump() | {name: how[name] for name in SECTION}
        return self.whole.write(
            {name: self.scales for unit in units for name in self.units[unit]} | self.outside,
            {self.attention[layer] for layer in attention},
            Calibration.model_validate(section | {"smoothing": smoothing}),
            name=named_by(self.whole.recipe.name, "searched"),
            description=description,
            qat=None,
        )

    def project(self, plan: Plan, recipe: Recipe) -> Params:
        """Return the parameters whose recipe is nearest to a plan."""
        target = {unit for unit, names in self.units.items() if all(name in plan.int8 for name in names)}
        inside = {plan.family.layer_of(name) for name in plan.attention}
        order = list(self.units)

        def list_wrong(params: Params) -> list[int]:
            return sorted(order.index(unit) + 1 for unit in self.int8_units(params) ^ target)

        unflipped = dict.fromkeys(FLIPS, 0)
        counts, layers = range(len(order) + 1), list(self.attention)
        points = [{"frame": frame, "keep": keep} | unflipped for frame in FRAMES for keep in counts]
        params: Params = min(points, key=lambda params: len(list_wrong(params)))
        params |= dict(zip(FLIPS, list_wrong(params), strict=False))
        if layers:
            left = [len(set(layers[keep:]) ^ (inside & set(layers))) for keep in range(len(layers) + 1)]
            params["attention_keep"] = left.index(min(left))
        for name, values in SECTION.items():
            own = str(getattr(recipe.calibration, name))
            params[name] = own if own in values else values[0]
        return params


def make_space(base: Recipe, modules: Mapping[str, ModuleInfo], prefix: str) -> Space:
    """Return the space around a recipe, in model order.

    What the recipe computes in FP32 stays there, and linears outside of the encoder stay as they are.
    """
    whole = Units(base, modules, prefix)
    whole.require_no_residual("search", "search")
    fp32 = {*whole.plan.fp32}
    free = {unit: names for unit, names in whole.linears.items() if not fp32 & {*names}}
    if not free:
        raise UserError(f"recipe {base.name} leaves nothing to search: every encoder linear is in FP32")
    any_size = range(1, ATTENTION_SIZES[-1] + 1)
    fused = any_size if choose_target(base).backend == "cuda" else INT8_HEAD_SIZES
    sizes = fused if base.export.max_length <= INT8_ATTENTION_LENGTH else ()
    attention = {
        layer: name
        for layer, name in whole.attention.items()
        if modules[name].head_size in sizes and name not in fp32
    }
    return Space(whole, free, attention)


def rank_by_rows(space: Space, rows: list[CandidateRow], source: str) -> tuple[list[Unit], list[int]]:
    """Return units and attentions by what INT8 costs for each multiply-add that it saves, worst first.

    The cost is the noise power of "only this in INT8"; `source` names the rows in a message.
    """
    costs = {name: row.only.noise_power for row in rows if row.group == "linear" for name in row.modules}
    heads = {row.layer: row.only.noise_power for row in rows if row.group == "attention"}
    if not any(name in costs for names in space.units.values() for name in names):
        raise UserError(f"{source} ranks no linear of this model; run `qdqbench sensitivity` on it first")
    # a feed-forward linear has four times the work of an attention output, q, k and v together three times
    work = {"qkv": 3.0, "output": 1.0, "ffn-in": 4.0, "ffn-out": 4.0}

    def cost(unit: Unit) -> float:
        return sum(costs.get(name, 0.0) for name in space.units[unit]) / work[unit[1]]

    units = sorted(space.units, key=lambda unit: -cost(unit))
    return units, sorted(space.attention, key=lambda layer: -heads.get(layer, 0.0))


def count_multiply_adds(model: Any, modules: Mapping[str, ModuleInfo], length: int) -> dict[str, int]:
    """Return the multiply-adds of a sequence of so many tokens in each linear and attention of the encoder.

    Layers that share weights count once for every run. An attention has two products, q k and the
    probabilities with v.
    """
    family, config = family_of(model.config), model.config
    layer_of = {name: family.layer_of(name) for name in modules}
    layers = {layer for layer in layer_of.values() if layer is not None}
    runs = Counter(family.run_order(len(layers), config.num_hidden_layers))
    counts = {}
    for name, layer in layer_of.items():
        if layer is None:
            continue
        if modules[name].kind == "Linear":
            rows, columns = model.get_submodule(name).weight.shape
            counts[name] = runs[layer] * length * rows * columns
        elif modules[name].kind == "Attention":
            counts[name] = runs[layer] * 2 * length**2 * config.hidden_size
    return counts


def int8_share(plan: Plan, counts: Mapping[str, int]) -> float:
    return sum(counts.get(name, 0) for name in (*plan.int8, *plan.attention)) / sum(counts.values())


LEAST_SAMPLES = 32  # below it a drop means nothing
Measure = Callable[[Recipe, Plan], Speedup | None]  # None where the INT8 share is compared


def plan_key(recipe: Recipe, plan: Plan) -> str:
    """Return the same key for recipes that make the same engine with the same scales."""
    scaling = {name: asdict(plan.scaling_of(name)) for name in (*plan.int8, *plan.attention)}
    calibration = recipe.calibration.model_dump(exclude={"method", "weights_method", "smoothing"})
    parts = [
        engine_key(recipe, plan),
        scaling,
        calibration if scaling else None,
        recipe.export.max_length,
        *([recipe.reconstruction.model_dump()] if recipe.reconstruction else []),
    ]
    return hash_of(parts)


def engine_key(recipe: Recipe, plan: Plan) -> str:
    """Return the same key for recipes whose engines differ in their scales alone, and so not in speed."""
    smoothed = sorted(name for name in plan.int8 if plan.scaling_of(name).smoothing != "none")
    changes = {"outlier_channel_splitting", "centering", "softmax_scale"}  # of the graph
    calibrated = [recipe.export.model_dump(), recipe.calibration.model_dump(include=changes)]
    parts = sorted(plan.int8.items()), sorted(plan.attention), sorted(plan.residual), sorted(plan.fp32)
    return hash_of(
        [parts, plan.merge_qkv, smoothed, calibrated if plan.int8 else None, recipe.precision.compute]
    )


class DeviceTrials(Trials):
    """Trials whose models are on the GPU while they are scored, as they are exported on the CPU."""

    def answer(self, model: "PreTrainedModel", text: str) -> dict[str, Float32]:
        with evaluating(model):
            return super().answer(model, text)


@dataclass
class Workspace:
    session: Session
    space: Space
    samples: int
    identity: str = ""  # of model, data and code: calibrations of others are not reused
    _last: "tuple[tuple[str, bool], PreTrainedModel] | None" = None  # scored, then exported

    @cached_property
    def trials(self) -> Trials:
        path = self.session.folder / TRIALS
        return DeviceTrials(self.session, self.samples, path, evaluates=False, least=LEAST_SAMPLES)

    @cached_property
    def confirmations(self) -> Trials:
        return DeviceTrials(self.session, 0, self.session.folder / "confirmed.jsonl")

    def plan(self, recipe: Recipe) -> Plan:
        return resolve(recipe, self.space.whole.modules, self.space.whole.prefix)

    def int8_share(self, plan: Plan, length: int) -> float:
        modules = self.space.whole.modules
        return int8_share(plan, count_multiply_adds(self.session.fp32_model, modules, length))

    def score(self, recipe: Recipe, origin: Origin, kept: Trials | None = None) -> Trial:
        """Return the scores of a recipe on the draw; those that are `kept` in a store are not measured again.

        What is kept is calibrated in full, as in `qdqbench run`: with corrections of biases, reconstructed.
        """
        plan, trial = self.plan(recipe), Trial(recipe=recipe, origin=origin)

        def calibrate() -> "tuple[PreTrainedModel, CalibrationCost]":
            start = time.perf_counter()
            if not plan.int8:
                return self.session.fp32_model, describe_cost(0.0, {})
            model, record = self._calibrate(recipe, plan, in_full=kept is not None)
            return model, describe_cost(time.perf_counter() - start, record.quantizers)

        report_phase(f"scoring {recipe.name}")
        try:
            if kept is None:
                return self.trials.attempt(trial, calibrate)
            return kept.measure(plan_key(recipe, plan), trial, calibrate)
        except MissingDevice:
            raise
        except Exception as error:  # out of memory: hours of trials must not end without their report
            trial.failure = failure_of(error)
            return trial

    def model(self, recipe: Recipe, plan: Plan, *, in_full: bool = False) -> "PreTrainedModel":
        if not plan.int8:
            return self.session.fp32_model
        if self._last is not None and self._last[0] == (plan_key(recipe, plan), in_full):
            return self._last[1]
        return self._calibrate(recipe, plan, in_full=in_full)[0]

    def _calibrate(
        self, recipe: Recipe, plan: Plan, *, in_full: bool
    ) -> "tuple[PreTrainedModel, CalibrationRecord]":
        self._last = None  # never two at a time
        record = self._record(recipe, plan) if in_full else self._shared_record(recipe, plan)
        session, trains = self._session_of(recipe), recipe.reconstruction
        if in_full and trains:
            model, notes = reconstruct_calibrated(session, trains, plan, record, self.samples)
            session.notes += [note for note in notes if note not in session.notes]
            cast("Any", model).cpu()
        else:
            model = session.new_int8_model()
            ptq.restore(model, plan, record)
        self._last = (plan_key(recipe, plan), in_full), model
        return model, record

    def _shared_record(self, recipe: Recipe, plan: Plan) -> CalibrationRecord:
        """Return the recipe's part of a calibration that holds all candidates, or else its own.

        Biases are not corrected: that depends on all that is INT8, and takes far longer than a trial.
        """
        recipe = disable_bias_correction(recipe)
        fused = self._everything(recipe, set(self.space.attention))
        whole = self.plan(fused)
        names = (*plan.int8, *plan.attention)
        shared = (
            fused.export == recipe.export
            and all(whole.int8.get(name) == scales for name, scales in plan.int8.items())
            and set(plan.attention) <= set(whole.attention)
            and all(whole.scaling_of(name) == plan.scaling_of(name) for name in names)
        )
        if not shared:
            return self._record(recipe, plan)
        record = self._record(fused, whole)
        layer_of = plan.family.layer_of
        layers = {layer_of(name) for name in plan.int8} & set(self.space.attention)
        if not record.smoothing.rows or {layer_of(name) for name in plan.attention} >= layers:
            return select_record(plan, record, record)
        plain = self._everything(recipe, set())
        return select_record(plan, self._record(plain, self.plan(plain)), record)

    def _everything(self, recipe: Recipe, attention: set[int]) -> Recipe:
        """Return every linear in INT8, and these attentions, calibrated by the section of this recipe."""
        how = recipe.calibration.model_dump(include={"method", "smoothing", "weights_method"})
        return disable_bias_correction(self.space.assemble(set(self.space.units), attention, how))

    def _record(self, recipe: Recipe, plan: Plan) -> CalibrationRecord:
        key = hash_of([plan_key(recipe, plan), self.identity])[:24]
        path = self.session.folder / "calibrations" / f"{key}.json"
        if path.is_file():
            return read_record(path)
        report_phase("calibrating")
        session = self._session_of(recipe)
        model = placed(session.new_int8_model())
        record = ptq.calibrate(model, plan, session.calibration_batches(), session.calibration)
        write_record(path, record)
        return record

    def _session_of(self, recipe: Recipe) -> Session:
        config = self.session.config.model_copy(update={"recipe": recipe})
        return Session(config, self.session.folder, notes=self.session.notes, warnings=self.session.warnings)


def open_source(
    session: Session, options: SearchOptions, work: Workspace, stack: ExitStack
) -> tuple[Source, Measure]:
    """Return the second objective of a search, and the function that times the engine of a recipe.

    Raises:
        MissingDevice: latency is asked for, by an option or by the gate, and the engine does not run here.
        UserError: the recipe's engine does not take the shape, or another process times engines.
    """
    try:
        choose_profile(engine_profiles(session), options.batch, options.length)
    except CheckFailed as error:
        raise UserError(
            f"--batch {options.batch} --length {options.length}: {error}; the recipe's engine is timed"
        ) from error
    here = _find_gpu(session.recipe) or session.target.on_cpu
    if options.speed == "latency" or (options.speed == "auto" and here):
        return _open_timer(session, options, work, stack)
    if session.recipe.gate.min_speedup is not None:
        raise MissingDevice(
            f"gate.min_speedup of recipe {session.recipe.name} needs a measured latency; search with "
            "--speed latency where its engine runs, or with --backend openvino on this CPU"
        )
    return Source(mode="int8-share", batch=options.batch, length=options.length), lambda recipe, plan: None


def _find_gpu(recipe: Recipe) -> Gpu | None:
    """Return the GPU that runs the engines of a recipe."""
    gpu = find_gpu()
    old = gpu and choose_target(recipe).backend == "cuda" and not find_target(gpu.compute_capability)
    return None if old else gpu


def measured_source(session: Session, options: SearchOptions) -> Source:
    recipe = session.recipe
    target = session.target
    gpu, on_cpu = _find_gpu(recipe), target.on_cpu
    if gpu is None and not on_cpu:
        kind = f" of compute capability {NAMES[0]} or newer" if target.backend == "cuda" else ""
        raise MissingDevice(
            f"a latency with {target.backend} needs an NVIDIA GPU{kind}, and CUDA shows none here; "
            "--backend openvino measures on this CPU, `search --speed int8-share` needs no engine"
        )
    chosen = choose_backend(recipe.engine.backend)
    return Source(
        mode="latency",
        gpu=gpu.name if gpu and not on_cpu else None,
        cpu=str(find_cpu()) if on_cpu else None,
        baseline_precision=target.baseline.upper(),
        backend=chosen.name,
        version=chosen.version,
        batch=options.batch,
        length=options.length,
    )


def _open_timer(
    session: Session, options: SearchOptions, work: Workspace, stack: ExitStack
) -> tuple[Source, Measure]:
    source = measured_source(session, options)
    stack.enter_context(alone(on_cpu=source.cpu is not None))
    folder = session.folder / f".engines.{os.getpid():08}.tmp"
    shape = options.batch, options.length
    baseline: list[OpenEngine] = []
    known: list[Speedup] = []

    def measure(recipe: Recipe, plan: Plan) -> Speedup:
        if not baseline:  # minutes after the command started: a study of other settings is refused before
            twin = session.recipe.model_copy(update={"name": f"{session.recipe.name}-twin"})
            none, path = Plan(fp32=plan.fp32), folder / "twin.onnx"
            high = write_engine_graph(session, session.fp32_model, twin, none, path)
            opened = open_engine(session, high, none, folder / "baseline", shape)
            baseline.append(stack.enter_context(opened))
        if not plan.int8 and known:  # it is its own baseline
            own = {"system_ms": known[0].baseline_ms, "value": 1.0, "ci95_low": 1.0, "ci95_high": 1.0}
            return known[0].model_copy(update=own)
        report_phase("building and timing")
        graph = write_engine_graph(session, work.model(recipe, plan), recipe, plan, folder / "trial.onnx")
        with open_engine(session, graph, plan, folder / "trial", shape) as engine:
            require_int8(engine.result)
            known[:] = [measure_speedup(engine, baseline[0], shape)]
        return known[0]

    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return source, measure
