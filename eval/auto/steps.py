"""The rungs, from the cheapest to the dearest: what each tries, and what that will take.

What a rung proposes is chosen on train rows that do not calibrate, as in `methods`, `sensitivity` and
`search`, and never on evaluation data; these only say whether to climb on.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from qdqbench.eval.auto.climb import Rung
from qdqbench.eval.auto.measure import RECIPE, Ladder
from qdqbench.eval.auto.results import Measured, Step
from qdqbench.eval.methods.measure import Comparing
from qdqbench.eval.methods.report import methods_headline, write_methods
from qdqbench.eval.methods.results import METHODS_RECIPE
from qdqbench.eval.methods.sections import sections
from qdqbench.eval.report.formats import count_of
from qdqbench.eval.search.results import Trial
from qdqbench.eval.search.trial import hash_of
from qdqbench.eval.search.trials import open_worker, run_trials, trials_of
from qdqbench.eval.sensitivity.choice import write_up
from qdqbench.eval.sensitivity.measure import Measurement
from qdqbench.eval.sensitivity.report import write_sensitivity
from qdqbench.eval.sensitivity.results import SENSITIVITY_FILE, CurvePoint
from qdqbench.quantize.core import files
from qdqbench.quantize.core.errors import CheckFailed
from qdqbench.quantize.encoders.modules import module_table
from qdqbench.quantize.families.known import family_named
from qdqbench.quantize.recipe.schema import Recipe, load_recipe, parse_recipe, shipped_recipes
from qdqbench.quantize.recipe.training import Distill, Qat

ISLANDS, SEARCHED = (
    1 / 4,
    1 / 16,
)  # of the divergence of the recipe before: half and a quarter of the distance
LEAST_TRIALS = 8
LEAST_STEPS = 100  # of a training
PASSES = 5  # of the data by `methods`: rows share them
WORK = "work"
DEFAULT_QAT = Qat(epochs=3, max_steps=1000, learning_rate=1e-5, distill=Distill(logits=1.0, hidden=1.0))
Taken = tuple[list[str], Measured]


@dataclass(frozen=True)
class Steps:
    """Rungs of a ladder."""

    ladder: Ladder
    recipes: Sequence[Recipe]  # to begin with, with the ladder's gate

    def rungs(self) -> list[Rung]:
        """In their order."""
        return [
            *(self._shipped(recipe) for recipe in self.recipes),
            Rung("methods", "methods", self._methods, self._methods_s),
            Rung("islands", "islands", self._islands, self._islands_s),
            Rung("search", "search", self._search, self._search_s),
            Rung("qat", "qat", self._qat, self._qat_s),
        ]

    def _shipped(self, recipe: Recipe) -> Rung:
        def estimate(before: Sequence[Step], left: float) -> float:
            self.ladder.session_of(recipe, self.ladder.folder / recipe.name).plan  # noqa: B018  (does it fit?)
            return self.ladder.pace.run_s

        def take(before: Sequence[Step], left: float) -> Taken:
            return [recipe.description], self.ladder.run(recipe.name, recipe, before)

        return Rung(recipe.name, "shipped", take, estimate)

    def _base(self, before: Sequence[Step], *, moved: bool = False) -> Recipe:
        """What to go on from: the nearest calibration, else the most careful of the shipped recipes.

        Args:
            moved: single linears leave INT8, which recipes with INT8 residuals do not allow.
        """
        found = [
            (not step.measured.lacks.speed, load_recipe(str(self.ladder.folder / step.measured.recipe_file)))
            for step in before
            if step.measured and step.kind in ("shipped", "methods")
        ]
        found = [each for each in found if not (moved and each[1].int8_residual)] or found
        return ([recipe for fast, recipe in found if fast] or [recipe for _, recipe in found])[-1]

    def _methods_s(self, before: Sequence[Step], left: float) -> float:
        pace, section = self.ladder.pace, self._base(before).calibration
        judged = len(sections(section, (), ())) * self.ladder.samples * pace.fake_s
        return judged + pace.calibrated(PASSES, section.samples) + pace.run_s

    def _methods(self, before: Sequence[Step], left: float) -> Taken:
        """The calibration section that is nearest to FP32."""
        ladder, folder = self.ladder, self.ladder.folder / "methods"
        session = ladder.session_of(self._base(before), folder)
        found = Comparing(
            session,
            ladder.samples,
            validates=False,
            progress=lambda done, total, text: ladder.say(f"methods: {text}, {done / total:.0%}"),
        ).run()
        write_methods(found, folder)
        if found.best is found.own:
            raise CheckFailed(f"no other calibration is nearer to FP32 than that of {found.recipe['name']}")
        recipe = load_recipe(str(folder / METHODS_RECIPE))
        return [methods_headline(found)], ladder.run("methods", recipe, before)

    def _measurement(self, before: Sequence[Step]) -> Measurement:
        ladder = self.ladder
        session = ladder.session_of(self._base(before, moved=True), ladder.folder / "islands")
        return Measurement(
            session,
            ladder.samples,
            lambda done, total, text: ladder.say(f"islands: {text}, {done / total:.0%}"),
        )

    def _islands_s(self, before: Sequence[Step], left: float) -> float:
        pace, measurement = self.ladder.pace, self._measurement(before)
        judged = measurement.evaluations * self.ladder.samples * pace.fp32_s
        return judged + pace.calibrated(1, measurement.session.recipe.calibration.samples) + pace.run_s

    def _islands(self, before: Sequence[Step], left: float) -> Taken:
        """The linears that cost the most stay out of INT8."""
        measurement = self._measurement(before)
        found = measurement.run()
        session = measurement.session
        write_sensitivity(found, session.folder)
        point = islands_of(found.curve)
        model = session.fp32_model
        modules, prefix = module_table(model), model.base_model_prefix
        recipe, _ = write_up(session.recipe, point, measurement.found, modules, prefix)
        share = point.judged.divergence / found.full.divergence
        said = (
            f"{count_of(point.kept, 'linear')} stay out of INT8: the fewest measured that leave at most "
            f"{ISLANDS:.0%} of the divergence of {found.recipe['name']} ({share:.0%} on "
            f"{found.data['samples']} train rows): {', '.join(point.linears)}."
        )
        return [said], self.ladder.run("islands", recipe, before)

    def _trials(self, before: Sequence[Step], left: float) -> tuple[int, float]:
        """How many trials fit, and what they take."""
        ladder, pace = self.ladder, self.ladder.pace
        drawn = self._base(before, moved=True).calibration.samples
        around = pace.calibrated(2, drawn) + pace.run_s
        each = ladder.samples * pace.fake_s + ladder.latency_s
        each += pace.calibrated(0.5, drawn)  # some share one
        count = min(ladder.trials, max(LEAST_TRIALS, int((left - around) / each)))
        return count, around + count * each

    def _search_s(self, before: Sequence[Step], left: float) -> float:
        return self._trials(before, left)[1]

    def _search(self, before: Sequence[Step], left: float) -> Taken:
        """The fastest recipe that is a good deal nearer to FP32, or the nearest that is as fast as asked."""
        ladder, base = self.ladder, self._base(before, moved=True)
        folder = ladder.folder / "search"
        count, _ = self._trials(before, left)
        ranking = ladder.folder / "islands" / SENSITIVITY_FILE
        known = files.sha256(ranking) if ranking.is_file() else None
        options = replace(
            ladder.options,
            trials=count,
            samples=ladder.samples,
            budget_s=max(left - ladder.pace.run_s, 1.0),
            sensitivity=ranking if known else None,
            study=hash_of([ladder.identity, base.model_dump(mode="json"), known])[:16],
        )
        with ExitStack() as stack:
            worker = open_worker(
                ladder.session_of(base, folder / WORK), options, stack, lambda t: ladder.say(f"search: {t}")
            )
            run_trials(
                worker, lambda done, total, best: ladder.say(f"search: {done} of {total} trials; {best}")
            )
            trials, how = trials_of(worker), worker.source.label
        found = further(trials, ladder.wanted.min_speedup)
        recipe = parse_recipe(found.recipe or "", "the chosen trial")
        assert found.accuracy is not None
        assert found.latency is not None
        given = next(t.accuracy.divergence for t in trials if t.accuracy and t.origin == "given recipe")
        said = (
            f"Trial {found.number} of {len(trials)}: {count_of(found.int8_linears, 'linear')} and "
            f"{count_of(found.int8_attention, 'attention')} in INT8, "
            f"{found.accuracy.divergence / given:.0%} of the divergence of {base.name} on "
            f"{found.accuracy.n} train rows, {found.latency.value:.2f}x ({how})."
        )
        return [said], ladder.run("search", recipe, before)

    def _trained(self, before: Sequence[Step], left: float) -> tuple[Recipe, float, str]:
        """The recipe to train, what that takes, and what was cut."""
        ladder, base = self.ladder, self._base(before)
        settings = qat_settings(base)
        recipe = base.model_copy(update={"name": f"{base.name}-qat", "qat": settings})
        rows = ladder.session.split(ladder.config.task.train_split, limit=None).rows
        around, each, steps = ladder.pace.training(settings, rows)
        around += ladder.pace.run_s
        kept = ladder.folder / "qat" / RECIPE
        if kept.is_file() and same_but_steps(begun := load_recipe(str(kept)), recipe):
            # an interrupted call began with it, and its checkpoints are gone on from
            fitting = min((begun.qat and begun.qat.max_steps) or steps, steps)
            return recipe.model_copy(update={"qat": begun.qat}), around + fitting * each, ""
        if around + steps * each > left:
            fitting = max(int((left - around) / each), min(LEAST_STEPS, steps))
            cut = recipe.model_copy(update={"qat": settings.model_copy(update={"max_steps": fitting})})
            return cut, around + fitting * each, f"Of {steps} steps {fitting} fit into the budget."
        return recipe, around + steps * each, ""

    def _qat_s(self, before: Sequence[Step], left: float) -> float:
        return self._trained(before, left)[1]

    def _qat(self, before: Sequence[Step], left: float) -> Taken:
        """The nearest calibration with everything in INT8, trained with FP32 as its teacher."""
        recipe, _, cut = self._trained(before, left)
        said = f"{recipe.name.removesuffix('-qat')}, trained on its train split with FP32 as teacher."
        return [said, *([cut] if cut else [])], self.ladder.run("qat", recipe, before)


def islands_of(curve: Sequence[CurvePoint]) -> CurvePoint:
    """The fewest linears out of INT8 that leave at most `ISLANDS` of the divergence.

    Raises:
        CheckFailed: no number of them does.
    """
    full = next(point.judged.divergence for point in curve if not point.kept)
    for point in sorted(curve, key=lambda point: point.kept):
        if point.kept and point.judged.divergence <= ISLANDS * full:
            return point
    most = max(point.kept for point in curve)
    raise CheckFailed(
        f"no {most} linears out of INT8 leave at most {ISLANDS:.0%} of the divergence: it is spread over all"
    )


def further(trials: Sequence[Trial], min_speedup: float | None) -> Trial:
    """The fastest trial with at most `SEARCHED` of the given recipe's divergence; else the nearest to FP32.

    Train rows say too little of a drop, since the model has learnt them, and the given recipe has failed on
    others: so what is asked for is a distance.

    Args:
        min_speedup: where it is asked for, the nearest to FP32 of those that are so fast.

    Raises:
        CheckFailed: none with INT8 came to an end, or none is so fast.
    """
    done = [t for t in trials if t.accuracy and t.latency and t.int8_linears and t.duplicate_of is None]
    new = [t for t in done if t.origin != "given recipe"]
    fast = [t for t in new if t.latency and t.latency.value >= (min_speedup or 1.0)]
    if min_speedup is None:  # where INT8 is slower anyway, accuracy is all that can be won
        fast = fast or new
    if not new:
        raise CheckFailed("no other recipe with INT8 came to an end")
    if not fast:
        raise CheckFailed(
            f"none of the {len(new)} recipes that were tried is {min_speedup:g}x as fast as its twin"
        )
    given = next((t.accuracy.divergence for t in done if t.accuracy and t.origin == "given recipe"), None)
    near = [t for t in fast if given and t.accuracy and t.accuracy.divergence <= SEARCHED * given]
    if near and min_speedup is None:
        return max(near, key=lambda t: t.latency.value if t.latency else 0.0)
    return min(fast, key=lambda t: t.accuracy.divergence if t.accuracy else 0.0)


def same_but_steps(one: Recipe, other: Recipe) -> bool:
    """Whether two recipes train the same for a different number of steps."""
    plain = [each.model_dump(mode="json") for each in (one, other)]
    for each in plain:
        (each["qat"] or {}).pop("max_steps", None)
    return plain[0] == plain[1]


def qat_settings(base: Recipe) -> Qat:
    """Those of a shipped recipe of the family, else of all."""
    family = family_named(base.model.family).name
    name = f"{family}-int8-attention-qat"
    found = load_recipe(name).qat if name in shipped_recipes() else None
    return found or DEFAULT_QAT
