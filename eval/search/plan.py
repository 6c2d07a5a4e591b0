"""What a search will take, before it is begun: `search --plan`."""

import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from qdqbench.eval.placement.space import make_space
from qdqbench.eval.report.formats import count_of, size
from qdqbench.eval.runs.pace import LATENCY_S, probed, unchecked
from qdqbench.eval.search.confirm import rivals_of
from qdqbench.eval.search.latency import measured_source, modelled, runs_here
from qdqbench.eval.search.results import Source
from qdqbench.eval.search.start import SAMPLES, own_ranking
from qdqbench.eval.search.study import counted, decided, default_storage
from qdqbench.eval.search.trial import Workspace
from qdqbench.quantize.core.progress import duration
from qdqbench.quantize.core.strict import Strict
from qdqbench.quantize.encoders.modules import module_table
from qdqbench.quantize.machine.quiet import quiet
from qdqbench.quantize.rundir.session import Session

if TYPE_CHECKING:
    from rich.console import Group

    from qdqbench.eval.search.worker import SearchOptions

MEASURED_WITH = 23e6  # parameters of the model whose engines took `LATENCY_S` to export, build and time
AROUND_S = 1.5  # of a trial: a model is loaded, and gets its quantizers
SHARED = 0.5  # of the trials need a calibration that no earlier one has made
GRAPHS = 4  # twin, trial and the confirmed graph and its engine lie there at once, at most as large as FP32
BYTES_PER_SCALE, STUDY_BYTES = 25, 1_000_000  # of a calibration file; of the database


class SearchPlan(Strict):
    """Everything that `search --plan` says."""

    schema_version: Literal[1] = 1
    study: str
    recipe: str
    task: str
    units: int  # groups of linears that go into INT8 or stay out together
    attentions: int  # that may be in INT8
    trials: int  # asked for
    done: int  # of them, by earlier calls
    budget_s: float | None
    samples: int  # train rows that judge a trial
    source: Source  # of latencies
    basis: str  # what the estimate comes from
    unchecked: str = ""  # what of that was never checked on such a device or backend
    ranking_s: float  # 0: it is given, or was made
    trial_s: float  # each
    trials_s: float  # those that are left, within the budget
    confirmed: int  # recipes on the evaluation data
    rows: int  # of the evaluation data
    confirm_s: float
    total_s: float
    disk_bytes: int
    disk_free_bytes: int


def plan_search(session: Session, options: "SearchOptions", folder: Path) -> SearchPlan:
    """Estimate a search from a few rows in FP32, or from the trials that an earlier call has done.

    Args:
        folder: of the search; nothing is written.

    Raises:
        MissingDevice: latency can neither be measured nor modelled here.
        UserError: the recipe does not fit, or calibration leaves too few train rows.
    """
    model, recipe = session.fp32_model, session.recipe
    space = make_space(recipe, module_table(model), model.base_model_prefix)
    work = Workspace(session, space, options.samples)
    engine = runs_here(recipe) if options.latency == "auto" else options.latency == "engine"
    source = measured_source(session, options) if engine else modelled(session, options)[0]
    parameters = sum(p.numel() for p in model.parameters())
    pace, rows = probed(session), sum(each.rows for _, each in session.eval_splits.values())
    name = options.study or f"{recipe.name}-{session.config.task.name}"
    done, seconds = _before(name, folder)
    judged = len(work.draw.gold)  # of a small train split fewer than were asked for, or too few
    samples, latency_s = recipe.calibration.samples, 0.0
    if engine:
        latency_s = LATENCY_S * max(1.0, parameters / MEASURED_WITH)
    if seconds:
        trial_s, basis = (
            float(np.mean(seconds)),
            f"{count_of(len(seconds), 'trial')} of this study",
        )
    else:
        basis = "a few rows in FP32, timed now, and what calibrations, fake-quant and engines took elsewhere"
        trial_s = AROUND_S + judged * pace.fake_s + pace.calibrated(SHARED, samples) + latency_s
    ranking_s = 0.0
    if options.sensitivity is None and not done:
        ranking_s = own_ranking(work).evaluations * min(SAMPLES, judged) * pace.fp32_s
        ranking_s += pace.calibrated(1, samples)
    trials_s = max(options.trials - done, 0) * trial_s
    trials_s = trials_s if options.budget_s is None else min(trials_s, options.budget_s)
    rivals = rivals_of(recipe)
    confirmed = 1 + (recipe not in rivals) + len(rivals)  # the chosen one, the given one, the shipped ones
    each_s = AROUND_S + pace.calibrated(1, samples) + rows * pace.fake_s + latency_s
    confirm_s = rows * pace.fp32_s + confirmed * each_s
    scales = sum(module.weight.shape[0] for module in _linears(session))
    return SearchPlan(
        study=name,
        recipe=recipe.name,
        task=session.config.task.name,
        units=len(space.units),
        attentions=len(space.attention),
        trials=options.trials,
        done=done,
        budget_s=options.budget_s,
        samples=judged,
        source=source,
        basis=basis,
        unchecked=unchecked(source.backend if engine else None),
        ranking_s=ranking_s,
        trial_s=trial_s,
        trials_s=trials_s,
        confirmed=confirmed,
        rows=rows,
        confirm_s=confirm_s,
        total_s=ranking_s + trials_s + confirm_s,
        disk_bytes=GRAPHS * 4 * parameters
        + STUDY_BYTES
        + int(SHARED * options.trials + confirmed) * BYTES_PER_SCALE * scales,
        disk_free_bytes=shutil.disk_usage(_there(folder)).free,
    )


def _linears(session: Session) -> list[Any]:
    return [session.fp32_model.get_submodule(name) for name in session.plan.int8]


def _there(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(path for path in (folder.resolve(), *folder.resolve().parents) if path.is_dir())


def _before(name: str, folder: Path) -> tuple[int, list[float]]:
    """How many trials a study in this folder has done, and what each took; a database is not made."""
    import optuna

    if not (folder / "study.db").is_file():
        return 0, []
    with quiet("optuna"), ExitStack() as stack:
        try:
            study = optuna.load_study(study_name=name, storage=default_storage(folder))
        except KeyError:  # of another name
            return 0, []
        stack.callback(study._storage.remove_session)
        found = [trial.user_attrs.get("seconds") for trial in decided(study)]
        return counted(study), [each for each in found if each is not None]


def plan_lines(plan: SearchPlan) -> "Group":
    """For the terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    left = max(plan.trials - plan.done, 0)
    trials = f"{count_of(left, 'trial')} of about {duration(plan.trial_s)}: {duration(plan.trials_s)}"
    trials += f", within --budget {duration(plan.budget_s)}" if plan.budget_s is not None else ""
    trials += f"; {plan.done} of {plan.trials} are done" if plan.done else ""
    space = f"{count_of(plan.units, 'group')} of linears"
    space += f", {count_of(plan.attentions, 'attention')}" if plan.attentions else ""
    ranking = f"about {duration(plan.ranking_s)}" if plan.ranking_s else "is there"
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, text in (
        ("to place", f"{space} in INT8 or not, and calibration"),
        ("latency", plan.source.label),
        ("ranking", ranking),
        ("trials", f"{trials}; each judged on {plan.samples:,} train rows"),
        (
            "confirmation",
            f"{count_of(plan.confirmed, 'recipe')} on {plan.rows:,} rows: about {duration(plan.confirm_s)}",
        ),
        ("in all", f"about {duration(plan.total_s)}, by {plan.basis}"),
        ("disk", f"up to {size(plan.disk_bytes)}, {size(plan.disk_free_bytes)} are free"),
    ):
        table.add_row(Text(name, style="bold"), Text(text))
    title = f"plan of search {plan.study}; nothing was tried"
    doubt = [Text(plan.unchecked, style="yellow")] if plan.unchecked else []
    return Group(Text(title, style="bold"), table, *doubt)
