"""One worker of a search: it opens the study, and turns what is proposed into trials."""

import gc
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from qdqbench.eval.selection.search import workspace
from qdqbench.eval.selection.search.options import SearchOptions
from qdqbench.eval.selection.search.results import Ranking, SearchTrial, Source, choose_trial, mark_trials
from qdqbench.eval.selection.search.study import SearchStudy, Start
from qdqbench.eval.selection.sensitivity.measure import Measurement
from qdqbench.eval.selection.sensitivity.results import Sensitivity, read_sensitivity, sensitivity_file
from qdqbench.eval.selection.trials.results import DRAW, failure_of
from qdqbench.eval.selection.trials.store import TRIALS, hash_of
from qdqbench.quantize.calibration.record import disable_bias_correction
from qdqbench.quantize.models.modules import module_table
from qdqbench.quantize.pipeline.session import Session
from qdqbench.quantize.recipe.schema import load_recipe, shipped_recipes
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import CheckFailed, MissingDevice, UserError
from qdqbench.quantize.utils.progress import Within, reporter, reporting_to

RANKED_SAMPLES = 128  # enough to tell the worst units from the others
PREFIXES = (8, 4, 2)  # of the ranking: an eighth, a quarter and half of the units out of INT8


@dataclass
class Worker:
    work: workspace.Workspace
    source: Source
    measure: workspace.Measure
    search: SearchStudy

    def run(self) -> None:
        """Run trials until the study has as many as asked for, or the budget of time is spent.

        Raises:
            CheckFailed, MissingDevice: the device cannot be used any more; finished trials are kept.
        """
        wanted = self.search.options.trials

        def report(done: int, trials: list[SearchTrial]) -> None:
            text = f"{done} of {wanted} trials; {self._describe_best(trials)}"
            reporter().begin(text, done, wanted)

        self.search.run(self._try, report)

    def list_trials(self) -> list[SearchTrial]:
        return self._mark(self.search.list_finished())

    def _mark(self, trials: list[SearchTrial]) -> list[SearchTrial]:
        mark_trials(trials, self.search.gate, self.search.options.objective)
        return trials

    def _try(self, trial: SearchTrial, finished: Sequence[SearchTrial]) -> SearchTrial:
        start = time.monotonic()
        try:
            self._measure(trial, finished)
        except MissingDevice:
            raise
        except Exception as error:
            trial.failure = failure_of(error)
        trial.seconds = time.monotonic() - start
        if trial.failure is not None:
            import torch

            gc.collect()
            torch.cuda.empty_cache()
            if "CUDA error" in trial.failure.text and "out of memory" not in trial.failure.text:
                raise CheckFailed(
                    "the GPU failed and this process cannot use it any more "
                    f"({trial.failure.text}); run the same command again to resume"
                )
        return trial

    def _measure(self, trial: SearchTrial, finished: Sequence[SearchTrial]) -> None:
        """Give a trial its scores and its speed, those of an earlier one with the same recipe."""
        work, text = self.work, f"Found by `qdqbench search`, trial {trial.number}."
        recipe = work.session.recipe if trial.origin == "given" else work.space.recipe(trial.params, text)
        plan = work.plan(recipe)
        trial.recipe = recipe
        trial.int8_linears, trial.int8_attention = len(plan.int8), len(plan.attention)
        trial.int8_share = work.int8_share(plan, self.search.options.length)
        trial.key = workspace.plan_key(disable_bias_correction(recipe), plan)
        known = next((each for each in finished if each.key == trial.key), None)
        if known is not None:
            trial.duplicate_of = known.number if known.duplicate_of is None else known.duplicate_of
            trial.scores, trial.calibration = known.scores, known.calibration
            trial.speedup, trial.failure = known.speedup, known.failure
            return
        scored = work.score(recipe, trial.origin)
        trial.scores, trial.calibration, trial.failure = scored.scores, scored.calibration, scored.failure
        if trial.failure is None:
            trial.speedup = self.measure(recipe, plan)

    def _describe_best(self, trials: list[SearchTrial]) -> str:
        number = choose_trial(self._mark(trials), self.search.gate).chosen
        chosen = next((trial for trial in trials if trial.number == number), None)
        if chosen is None:
            return "none holds the gate yet"
        speed = f"{chosen.gain:.2f}x" if chosen.speedup else f"{chosen.gain:.0%} in INT8"
        return (
            f"best so far: trial {chosen.number}, drop {100 * chosen.scores[DRAW].drop:.2f} points, {speed}"
        )


def open_worker(session: Session, options: SearchOptions, stack: ExitStack) -> Worker:
    """Join or start a search; its trials are kept next to the folder of the session.

    Raises:
        MissingDevice: latency is asked for, and the engine does not run here.
        UserError: the recipe does not fit, too few train rows are left, or the study is of other settings.
    """
    file = options.sensitivity
    if file is not None:  # before a study is made for it
        read_ranking(session, file)
    model = session.fp32_model
    space = workspace.make_space(session.recipe, module_table(model), model.base_model_prefix)
    work = workspace.Workspace(session, space, options.samples)
    work.identity = hash_of(work.trials.settings)  # too few rows fail, too
    source, measure = workspace.open_source(session, options, work, stack)
    settings = work.trials.settings | {  # the gate may change, it only chooses
        "objective": options.objective,
        "speed": source.mode,
        "device": [source.gpu or source.cpu, source.backend, source.version, source.baseline_precision],
        "batch and length": [options.batch, options.length],
        "sensitivity file": files.sha256(sensitivity_file(file)) if file else None,
    }

    def rank() -> tuple[Ranking, list[Start]]:
        ranking = rank_units(work, file)
        return ranking, first_trials(work, ranking)

    name = options.study_name or f"{session.recipe.name}-{session.config.task.name}"
    path, gate, seed = session.folder.parent / TRIALS, session.recipe.gate, session.config.seed
    search = SearchStudy(
        options, name, path, settings, gate=gate, suggest=space.suggest, rank=rank, seed=seed
    )
    work.space = space.ranked(search.ranking)
    return Worker(work, source, measure, search)


def first_trials(work: workspace.Workspace, ranking: Ranking) -> list[Start]:
    """Return parameters and origins of the trials that every search starts with.

    These are the given recipe, the shipped ones in this space, nothing in INT8, and prefixes of the ranking.
    """
    base, space = work.session.recipe, work.space.ranked(ranking)
    given = space.project(work.plan(base), base)
    trials = [(given, {"origin": "given"})]
    for name in shipped_recipes():
        recipe = load_recipe(name)
        if recipe.model.family != base.model.family or not recipe.quantizes or recipe.trainings:
            continue
        with suppress(UserError):  # it may ask for an attention that this model cannot have
            shipped = {"origin": "shipped", "shipped": name}
            trials.append((space.project(work.plan(recipe), recipe), shipped))
    units = len(space.units)
    everything = given | {"frame": "all", "keep": 0, "flip_1": 0, "flip_2": 0}
    high = {"attention_keep": len(space.attention)} if space.attention else {}
    trials.append((everything | high | {"keep": units}, {"origin": "unquantized"}))
    for part in PREFIXES:
        trials.append((everything | {"keep": max(1, round(units / part))} | high, {"origin": "ranking"}))
    if space.attention:
        half = {"keep": max(1, round(units / 4)), "attention_keep": len(space.attention) // 2}
        trials.append((everything | half, {"origin": "ranking"}))
    return trials


def rank_units(work: workspace.Workspace, file: Path | None) -> Ranking:
    session = work.session
    if file is not None:
        units, attention = workspace.rank_by_rows(work.space, read_ranking(session, file).rows, str(file))
        return Ranking(units=units, attention=attention, file=file.name)
    whole = work.space.assemble(set(work.space.units), set(work.space.attention), workspace.PLAIN)
    config = session.config.model_copy(update={"recipe": disable_bias_correction(whole)})
    measured = Measurement(Session(config, session.folder), min(RANKED_SAMPLES, work.samples))
    with reporting_to(Within()):
        rows = measured.run().rows
    units, attention = workspace.rank_by_rows(work.space, rows, "the sensitivity")
    return Ranking(units=units, attention=attention, samples=measured.samples)


def read_ranking(session: Session, file: Path) -> Sensitivity:
    measured = read_sensitivity(file)
    task = session.config.task.model_dump(mode="json")
    if measured.model["sha256"] != session.model_sha256 or measured.task != task:
        raise UserError(
            f"{file} is of another model or task; run `qdqbench sensitivity` on this one, or leave "
            "--sensitivity out"
        )
    return measured
