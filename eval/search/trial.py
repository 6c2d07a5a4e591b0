"""One trial: a recipe's fake-quant model on the search draw. Calibrations are shared by trials that can."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from qdqbench.eval.accuracy.compare import compare
from qdqbench.eval.accuracy.divergence import divergence
from qdqbench.eval.accuracy.draw import draw_samples
from qdqbench.eval.accuracy.runners import evaluating, placed, predict, torch_runner
from qdqbench.eval.search.results import Accuracy
from qdqbench.quantize.calibrate import ptq
from qdqbench.quantize.calibrate.narrow import narrowed, without_corrections
from qdqbench.quantize.calibrate.record import CalibrationRecord, read_record, write_record
from qdqbench.quantize.core.arrays import Floats
from qdqbench.quantize.core.errors import CheckFailed, UserError
from qdqbench.quantize.machine.environment import made_with
from qdqbench.quantize.recipe.plan import Plan, resolve
from qdqbench.quantize.recipe.schema import Recipe
from qdqbench.quantize.rundir.session import Session
from qdqbench.quantize.tasks.metrics import Gold, against, compute
from qdqbench.quantize.tasks.task import Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from qdqbench.eval.placement.space import Space
    from qdqbench.quantize.kinds.encoded import Encoded

MOST_RECORDS = 3  # calibrations in memory
LEAST_SAMPLES = 32  # below it a drop means nothing


def accuracy(task: Task, reference: Floats, logits: Floats, gold: Gold, seed: int) -> Accuracy:
    """Everything that a trial records of its accuracy."""
    found = compare(task, reference, logits, gold, seed=seed)
    metric = task.metrics[0]
    return Accuracy(
        divergence=float(divergence(task, reference, logits, gold).mean()),
        metric=metric,
        value=compute(task, logits, against(task, gold, reference))[metric],
        drop=-found.delta[metric] + 0.0,  # no negative zero
        drop_stderr=found.delta_stderr[metric],
        within_noise=found.within_noise,
        disagreements=found.disagreements,
        n=found.n,
    )


def plan_key(recipe: Recipe, plan: Plan) -> str:
    """Same key for recipes that make the same engine with the same scales."""
    scaling = {name: asdict(plan.scaling_of(name)) for name in (*plan.int8, *plan.attention)}
    calibration = recipe.calibration.model_dump(exclude={"method", "weights_method", "smooth"})
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


@dataclass
class Workspace:
    """What all trials of a search share: the model, its data, the answers of FP32, and calibrations."""

    session: Session
    space: "Space"
    samples: int
    progress: Callable[[str], None] = lambda text: None
    fatal: Exception | None = None  # after it this process can run no more trials
    identity: str = ""  # of model and data: calibrations of others are not reused
    _records: dict[str, CalibrationRecord] = field(default_factory=dict)
    _last: "tuple[str, PreTrainedModel] | None" = None  # evaluated, then exported

    def plan(self, recipe: Recipe) -> Plan:
        """A recipe resolved for this model.

        Raises:
            UserError: it does not fit.
        """
        return resolve(recipe, self.space.modules, self.space.prefix)

    @cached_property
    def draw(self) -> "Encoded":
        """What trials are judged on."""
        return draw_samples(self.session, self.samples, least=LEAST_SAMPLES)[1]

    @cached_property
    def fp32_logits(self) -> Floats:
        """FP32's answers to the draw, float32 [answers, width]."""
        return self.predict(self.session.fp32_model, self.draw)

    def predict(self, model: "PreTrainedModel", encoded: "Encoded") -> Floats:
        """Logits of a model.

        Raises:
            CheckFailed: NaN or infinity.
        """
        size = self.session.config.batch_size
        with evaluating(model):
            return predict(
                torch_runner(model), encoded, pad_id=self.session.pad_id, batch_size=size, stage="fake_quant"
            )

    def model(self, recipe: Recipe, plan: Plan) -> "PreTrainedModel":
        """A fresh fake-quant model, calibrated; FP32 where nothing is INT8.

        Raises:
            UserError, CheckFailed: calibration fails.
        """
        if not plan.int8:
            return self.session.fp32_model
        key = plan_key(recipe, plan)
        if self._last is None or self._last[0] != key:
            self._last = None  # never two at a time
            return self._restored(recipe, plan, self.record(recipe, plan))
        return self._last[1]

    def recalibrated(self, recipe: Recipe, plan: Plan) -> "PreTrainedModel":
        """The fake-quant model as `qdqbench run` makes it: calibrated with nothing else in INT8."""
        if not plan.int8:
            return self.session.fp32_model
        self._last = None
        return self._restored(recipe, plan, self._record(recipe, plan))

    def _restored(self, recipe: Recipe, plan: Plan, record: CalibrationRecord) -> "PreTrainedModel":
        model = self._of(recipe).new_int8_model()
        ptq.restore(model, plan, record)
        self._last = plan_key(recipe, plan), model
        return model

    def accuracy(self, recipe: Recipe, plan: Plan, *, whole: bool = False) -> Accuracy:
        """Of a recipe on the draw; `whole`: calibrated on its own, with what its section says of biases."""
        make = self.recalibrated if whole else self.model
        logits = self.predict(make(recipe, plan), self.draw) if plan.int8 else self.fp32_logits
        task = self.session.config.task
        return accuracy(task, self.fp32_logits, logits, self.draw.gold, self.session.config.seed)

    def record(self, recipe: Recipe, plan: Plan) -> CalibrationRecord:
        """The calibration of a recipe: its part of one that holds all candidates, or its own.

        Biases are not corrected: that depends on all that is INT8, and takes far longer than a trial.
        """
        recipe = without_corrections(recipe)
        space = self.space
        fused = self._everything(recipe, set(space.attention))
        found = self.plan(fused)
        names = (*plan.int8, *plan.attention)
        shared = all(found.int8.get(name) == scales for name, scales in plan.int8.items())
        shared = shared and set(plan.attention) <= set(found.attention)
        shared = shared and all(found.scaling_of(name) == plan.scaling_of(name) for name in names)
        if not shared or fused.export != recipe.export:
            return self._record(recipe, plan)
        record = self._record(fused, found)
        layer_of = plan.family.layer_of
        layers = {layer_of(name) for name in plan.int8} & set(space.attention)
        if not record.smoothing.rows or {layer_of(name) for name in plan.attention} >= layers:
            return narrowed(plan, record, record)
        plain = self._everything(recipe, set())
        return narrowed(plan, self._record(plain, self.plan(plain)), record)

    def _everything(self, recipe: Recipe, attention: set[int]) -> Recipe:
        """Every linear in INT8, and these attentions, calibrated by the section of this recipe."""
        section = recipe.calibration
        how = section.model_dump(include={"method", "smooth", "weights_method"})
        return without_corrections(self.space.assemble(set(self.space.units), attention, how))

    def _record(self, recipe: Recipe, plan: Plan) -> CalibrationRecord:
        key = hash_of([plan_key(recipe, plan), self.identity, made_with()])[:24]
        if key in self._records:
            return self._records[key]
        path = self.session.folder / "calibrations" / f"{key}.json"
        if path.is_file():
            found = read_record(path)
        else:
            self.progress("calibrating")
            session = self._of(recipe)
            model = placed(session.new_int8_model())
            found = ptq.calibrate(model, plan, session.calibration_batches(), recipe.calibration)
            write_record(path, found)
        while len(self._records) >= MOST_RECORDS:
            self._records.pop(next(iter(self._records)))  # they are on disk
        self._records[key] = found
        return found

    def _of(self, recipe: Recipe) -> Session:
        """The session as if it had been opened with this recipe."""
        config = self.session.config.model_copy(update={"recipe": recipe})
        known = self.session
        return Session(config, known.folder, notes=known.notes, warnings=known.warnings)


def explained(error: Exception) -> str:
    """One line on why a trial failed."""
    what = " ".join(str(error).split())[:500]
    return what if isinstance(error, (UserError, CheckFailed)) else f"{type(error).__name__}: {what}"


def hash_of(value: Any) -> str:
    """SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
