"""The steps of `auto`, from the cheapest to the dearest: what recipe each proposes.

A proposal is chosen on train rows that do not calibrate, as in `methods`, `sensitivity` and `search`, and
never on evaluation data; these only say whether to take the next step.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qdqbench.eval.selection.auto.results import AutoStep, Proposal
from qdqbench.eval.selection.auto.run import AutoRun, Proposer
from qdqbench.eval.selection.methods.measure import MethodComparison
from qdqbench.eval.selection.methods.report import write_methods
from qdqbench.eval.selection.search.study import list_trials, open_worker, run_trials
from qdqbench.eval.selection.sensitivity.candidates import make_recipe
from qdqbench.eval.selection.sensitivity.measure import Measurement
from qdqbench.eval.selection.sensitivity.report import write_sensitivity
from qdqbench.eval.selection.sensitivity.results import SENSITIVITY_FILE, CurvePoint
from qdqbench.eval.selection.trials.store import RECIPE_FILE, hash_of
from qdqbench.quantize.models.families.known import family_named
from qdqbench.quantize.models.modules import module_table
from qdqbench.quantize.recipe.schema import Recipe, load_recipe, shipped_recipes
from qdqbench.quantize.recipe.training import Distill, Qat
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import CheckFailed, MissingDevice, UserError

if TYPE_CHECKING:
    from qdqbench.eval.selection.search.results import SearchTrial

# of the divergence of the recipe before: half and a quarter of the distance
ISLANDS, SEARCHED = 1 / 4, 1 / 16
WORK = "work"
DEFAULT_QAT = Qat(epochs=3, max_steps=1000, learning_rate=1e-5, distill=Distill(logits=1.0, hidden=1.0))


@dataclass(frozen=True)
class Steps:
    auto: AutoRun
    recipes: Sequence[Recipe]  # to start with, with the gate of the criteria

    def proposers(self) -> list[Proposer]:
        return [
            *(self._propose_shipped(recipe) for recipe in self.recipes),
            Proposer("methods", "methods", self._propose_methods),
            Proposer("islands", "islands", self._propose_islands),
            Proposer("search", "search", self._propose_search),
            Proposer("qat", "qat", self._propose_qat),
        ]

    def _propose_shipped(self, recipe: Recipe) -> Proposer:
        folder = self.auto.folder / recipe.name
        return Proposer(
            recipe.name,
            "shipped",
            lambda before, left: (recipe, Proposal(base=recipe.name)),
            lambda: self.auto.open_session(recipe, folder).plan,
        )

    def _base(self, before: Sequence[AutoStep], *, moved: bool = False) -> Recipe:
        """Return the recipe to start from: the nearest calibration, else the most careful shipped recipe.

        Args:
            before: steps, of which one was measured.
            moved: single linears leave INT8, which recipes with INT8 residuals do not allow.
        """
        done = [step for step in before if step.run and step.kind in {"shipped", "methods"}]
        known = [(not step.lacks("min_speedup"), step.recipe) for step in done if step.recipe]
        known = [each for each in known if not (moved and each[1].int8_residual)] or known
        return ([recipe for fast, recipe in known if fast] or [recipe for _, recipe in known])[-1]

    def _propose_methods(self, before: Sequence[AutoStep], left: float) -> tuple[Recipe, Proposal]:
        auto, folder, base = self.auto, self.auto.folder / "methods", self._base(before)
        methods = MethodComparison(
            auto.open_session(base, folder),
            auto.options.samples,
            evaluates=False,
            progress=lambda done, total, text: auto.say(f"methods: {text}, {done / total:.0%}"),
        ).run()
        write_methods(methods, folder)
        best, given = methods.best, methods.given
        if best is given:
            raise CheckFailed(f"no other calibration is nearer to FP32 than that of {base.name}")
        known = not given.trial.failure and given.trial.divergence
        share = best.trial.divergence / given.trial.divergence if known else None
        proposal = Proposal(base=base.name, samples=methods.data["samples"], share=share, method=best.name)
        return load_recipe(str(folder / RECIPE_FILE)), proposal

    def _propose_islands(self, before: Sequence[AutoStep], left: float) -> tuple[Recipe, Proposal]:
        auto = self.auto
        session = auto.open_session(self._base(before, moved=True), auto.folder / "islands")
        measurement = Measurement(
            session,
            auto.options.samples,
            lambda done, total, text: auto.say(f"islands: {text}, {done / total:.0%}"),
        )
        sensitivity = measurement.run()
        write_sensitivity(sensitivity, session.folder)
        point = find_islands(sensitivity.curve)
        model = session.fp32_model
        modules, prefix = module_table(model), model.base_model_prefix
        recipe = make_recipe(session.recipe, point, measurement.found, modules, prefix)
        return recipe, Proposal(
            base=session.recipe.name,
            samples=sensitivity.data["samples"],
            share=point.comparison.distance / sensitivity.full.distance,
            linears=point.linears,
        )

    def _propose_search(self, before: Sequence[AutoStep], left: float) -> tuple[Recipe, Proposal]:
        """Propose the fastest recipe that is a good deal nearer to FP32, else the nearest."""
        auto, base = self.auto, self._base(before, moved=True)
        ranking = auto.folder / "islands" / SENSITIVITY_FILE
        known = files.sha256(ranking) if ranking.is_file() else None
        run_s = before[-1].seconds if before else 0.0
        options = auto.options.model_copy(
            update={
                "budget": max(left - run_s, 1.0),  # the recipe that it finds is run too
                "sensitivity": ranking if known else None,
                "study_name": hash_of([auto.session.model_sha256, base.model_dump(mode="json"), known])[:16],
            }
        )
        with ExitStack() as stack:
            session = auto.open_session(base, auto.folder / "search" / WORK)
            try:
                worker = open_worker(session, options, stack, lambda text: auto.say(f"search: {text}"))
            except MissingDevice as error:  # a speed-up is asked for, and no engine runs here
                raise UserError(str(error)) from error
            run_trials(
                worker, lambda done, total, best: auto.say(f"search: {done} of {total} trials; {best}")
            )
            trials = list_trials(worker)
        trial = choose_trial(trials, auto.criteria.min_speedup)
        assert trial.recipe is not None
        given = next(each.divergence for each in trials if each.is_scored and each.origin == "given")
        return trial.recipe, Proposal(
            base=base.name,
            samples=worker.work.trials.draw.rows,
            share=trial.divergence / given if given else None,
            trial=trial.number,
            trials=len(trials),
            speedup=trial.speedup.value if trial.speedup else None,
        )

    def _propose_qat(self, before: Sequence[AutoStep], left: float) -> tuple[Recipe, Proposal]:
        """Propose to train the nearest calibration with everything in INT8, FP32 as its teacher."""
        base = self._base(before)
        recipe = base.model_copy(update={"name": f"{base.name}-qat", "qat": find_qat_settings(base)})
        return recipe, Proposal(base=base.name)


def find_islands(curve: Sequence[CurvePoint]) -> CurvePoint:
    """Return the fewest linears out of INT8 that leave at most `ISLANDS` of the divergence."""
    full = next(point.comparison.distance for point in curve if not point.kept)
    for point in sorted(curve, key=lambda point: point.kept):
        if point.kept and point.comparison.distance <= ISLANDS * full:
            return point
    most = max(point.kept for point in curve)
    raise CheckFailed(
        f"no {most} linears out of INT8 leave at most {ISLANDS:.0%} of the divergence: it is spread over all"
    )


def choose_trial(trials: "Sequence[SearchTrial]", min_speedup: float | None) -> "SearchTrial":
    """Return the fastest trial with at most `SEARCHED` of the given recipe's divergence; else the nearest.

    Train rows say too little of a drop, since the model has learned them, and the given recipe has failed on
    others: so what is asked for is a distance.

    Args:
        trials: of the search.
        min_speedup: where it is asked for, the nearest to FP32 of those that are so fast.

    Raises:
        CheckFailed: none with INT8 finished, or none is so fast.
    """
    done = [trial for trial in trials if trial.is_scored and trial.int8_linears]
    new = [trial for trial in done if trial.origin != "given"]
    fast = [trial for trial in new if trial.speedup is None or trial.speedup.value >= (min_speedup or 1.0)]
    if min_speedup is None:  # where INT8 is slower anyway, accuracy is all that can be won
        fast = fast or new
    if not new:
        raise CheckFailed("no other recipe with INT8 finished")
    if not fast:
        raise CheckFailed(
            f"none of the {len(new)} recipes that were tried is {min_speedup:g}x as fast as its baseline"
        )
    given = next((trial.divergence for trial in done if trial.origin == "given"), None)
    near = [trial for trial in fast if given and trial.divergence <= SEARCHED * given]
    if near and min_speedup is None:
        return max(near, key=lambda trial: trial.gain)
    return min(fast, key=lambda trial: trial.divergence)


def find_qat_settings(base: Recipe) -> Qat:
    """Return the training of a shipped recipe of the family, else the default."""
    name = f"{family_named(base.model.family).name}-int8-attention-qat"
    return (load_recipe(name).qat if name in shipped_recipes() else None) or DEFAULT_QAT
