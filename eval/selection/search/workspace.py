"""What all trials of a search share: the model, its data, FP32's answers, calibrations, and the store."""

import os
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from qdqbench.eval.bench.measure import (
    OpenEngine,
    alone,
    measure_speedup,
    open_engine,
    write_engine_graph,
)
from qdqbench.eval.metrics.runners import evaluating, placed
from qdqbench.eval.selection.search.options import SearchOptions
from qdqbench.eval.selection.search.results import Source
from qdqbench.eval.selection.search.space import Space, count_multiply_adds, int8_share
from qdqbench.eval.selection.trials.calibrations import describe_cost
from qdqbench.eval.selection.trials.results import CalibrationCost, Origin, Trial, failure_of
from qdqbench.eval.selection.trials.store import TRIALS, Trials, hash_of
from qdqbench.quantize.calibration import ptq
from qdqbench.quantize.calibration.record import (
    CalibrationRecord,
    disable_bias_correction,
    read_record,
    select_record,
    write_record,
)
from qdqbench.quantize.engine.backend import choose_backend
from qdqbench.quantize.engine.build import require_int8
from qdqbench.quantize.engine.profiles import choose_profile
from qdqbench.quantize.pipeline.artifacts import backend_of, cpu_compute, engine_profiles
from qdqbench.quantize.pipeline.session import Session
from qdqbench.quantize.recipe.plan import Plan, resolve
from qdqbench.quantize.recipe.schema import Recipe
from qdqbench.quantize.utils.arrays import Float32
from qdqbench.quantize.utils.errors import CheckFailed, MissingDevice, UserError
from qdqbench.quantize.utils.limits import CPU_BACKENDS
from qdqbench.quantize.utils.speedup import Speedup
from qdqbench.quantize.utils.system.cpu import find_cpu
from qdqbench.quantize.utils.system.gpu import find_gpu

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MOST_RECORDS = 3  # calibrations in memory
LEAST_SAMPLES = 32  # below it a drop means nothing
Measure = Callable[[Recipe, Plan], Speedup | None]  # None where the INT8 share is compared


def plan_key(recipe: Recipe, plan: Plan) -> str:
    """Return the same key for recipes that make the same engine with the same scales."""
    scaling = {name: asdict(plan.scaling_of(name)) for name in (*plan.int8, *plan.attention)}
    calibration = recipe.calibration.model_dump(exclude={"method", "weights_method", "smoothing"})
    parts = [
        dict(sorted(plan.int8.items())),
        sorted(plan.attention),
        sorted(plan.fp32),
        scaling,
        calibration if scaling else None,
        recipe.export.model_dump() if scaling else recipe.export.max_length,
        recipe.precision.compute,
    ]
    return hash_of(parts)


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
    progress: Callable[[str], None] = lambda text: None
    identity: str = ""  # of model, data and code: calibrations of others are not reused
    _records: dict[str, CalibrationRecord] = field(default_factory=dict)
    _last: "tuple[tuple[str, bool], PreTrainedModel] | None" = None  # scored, then exported

    @cached_property
    def trials(self) -> Trials:
        path = self.session.folder / TRIALS
        return DeviceTrials(self.session, self.samples, path, evaluates=False, least=LEAST_SAMPLES)

    @cached_property
    def confirmations(self) -> Trials:
        return DeviceTrials(self.session, 0, self.session.folder / "confirmed.jsonl")

    def plan(self, recipe: Recipe) -> Plan:
        return resolve(recipe, self.space.modules, self.space.prefix)

    def int8_share(self, plan: Plan, length: int) -> float:
        return int8_share(plan, count_multiply_adds(self.session.fp32_model, self.space.modules, length))

    def score(self, trials: Trials, recipe: Recipe, origin: Origin, *, in_full: bool) -> Trial:
        """Return the scores of a recipe in one of the two stores; those that are known are not measured.

        Calibrated `in_full` it has its corrections of biases, as in `qdqbench run`.
        """
        plan = self.plan(recipe)
        key = (
            plan_key(recipe, plan) if in_full else f"shared {plan_key(disable_bias_correction(recipe), plan)}"
        )

        def calibrate() -> "tuple[PreTrainedModel, CalibrationCost]":
            start = time.perf_counter()
            if not plan.int8:
                return self.session.fp32_model, describe_cost(0.0, {})
            model, record = self._calibrate(recipe, plan, in_full=in_full)
            return model, describe_cost(time.perf_counter() - start, record.quantizers)

        self.progress(f"scoring {recipe.name}")
        trial = Trial(recipe=recipe, origin=origin)
        try:
            return trials.measure(key, trial, calibrate)
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
        model = self._session_of(recipe).new_int8_model()
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
        if key in self._records:
            return self._records[key]
        path = self.session.folder / "calibrations" / f"{key}.json"
        if path.is_file():
            record = read_record(path)
        else:
            self.progress("calibrating")
            session = self._session_of(recipe)
            model = placed(session.new_int8_model())
            record = ptq.calibrate(model, plan, session.calibration_batches(), recipe.calibration)
            write_record(path, record)
        while len(self._records) >= MOST_RECORDS:
            self._records.pop(next(iter(self._records)))  # they are on disk
        self._records[key] = record
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
    runs_here = bool(find_gpu()) or backend_of(session.recipe) in CPU_BACKENDS
    if options.speed == "latency" or (options.speed == "auto" and runs_here):
        return _open_timer(session, options, work, stack)
    if session.recipe.gate.min_speedup is not None:
        raise MissingDevice(
            f"gate.min_speedup of recipe {session.recipe.name} needs a measured latency; search with "
            "--speed latency where its engine runs, or with --backend openvino on this CPU"
        )
    return Source(mode="int8-share", batch=options.batch, length=options.length), lambda recipe, plan: None


def measured_source(session: Session, options: SearchOptions) -> Source:
    gpu, recipe = find_gpu(), session.recipe
    on_cpu = backend_of(recipe) in CPU_BACKENDS
    if gpu is None and not on_cpu:
        raise MissingDevice(
            f"a latency with {backend_of(recipe)} needs an NVIDIA GPU, and CUDA shows none here; "
            "--backend openvino measures on this CPU, `search --speed int8-share` needs no engine"
        )
    chosen = choose_backend(recipe.engine.backend)
    return Source(
        mode="latency",
        gpu=gpu.name if gpu and not on_cpu else None,
        cpu=str(find_cpu()) if on_cpu else None,
        baseline_precision=(cpu_compute(recipe) if on_cpu else recipe.precision.compute).upper(),
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
            high = write_engine_graph(
                session, session.fp32_model, twin, Plan(fp32=plan.fp32), folder / "twin.onnx"
            )
            baseline.append(stack.enter_context(open_engine(session, high, folder / "baseline", [shape])))
        if not plan.int8 and known:  # it is its own baseline
            own = {"system_ms": known[0].baseline_ms, "value": 1.0, "ci95_low": None, "ci95_high": None}
            return known[0].model_copy(update=own)
        work.progress("building and timing")
        graph = write_engine_graph(session, work.model(recipe, plan), recipe, plan, folder / "trial.onnx")
        with open_engine(session, graph, folder / "trial", [shape]) as engine:
            require_int8(engine.result)
            known[:] = [measure_speedup(engine, baseline[0], shape)]
        return known[0]

    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return source, measure
