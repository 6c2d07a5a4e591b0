"""The trials that every search starts with."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qdqbench.eval.placement.space import PLAIN, Space, ranked_by
from qdqbench.eval.search.study import First
from qdqbench.eval.search.trial import Workspace
from qdqbench.eval.sensitivity.results import read_sensitivity
from qdqbench.quantize.calibrate.narrow import without_corrections
from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.recipe.schema import load_recipe, shipped_recipes, short_yaml
from qdqbench.quantize.rundir.session import Session

if TYPE_CHECKING:
    from qdqbench.eval.sensitivity.measure import Measurement
    from qdqbench.eval.sensitivity.results import Sensitivity
    from qdqbench.quantize.core.progress import Progress

SAMPLES = 128  # enough to tell the worst units from the others
PREFIXES = (8, 4, 2)  # of the ranking: an eighth, a quarter and half of the units out of INT8


def first_trials(work: Workspace, space: Space) -> list[First]:
    """The given recipe, the shipped ones in this space, nothing in INT8, and prefixes of the ranking."""
    base = work.session.recipe
    given = space.project(work.plan(base), base)
    found = [("given recipe", given, {"recipe": short_yaml(base)})]
    for name in shipped_recipes():
        recipe = load_recipe(name)
        if recipe.model.family != base.model.family or not recipe.quantizes or recipe.qat:
            continue
        with suppress(UserError):  # it may ask for an attention that this model cannot have
            found.append((f"shipped {name}", space.project(work.plan(recipe), recipe), {}))
    count = len(space.units)
    everything = given | {"frame": "all", "keep": 0, "flip_1": 0, "flip_2": 0}
    high = {"attention_keep": len(space.attention)} if space.attention else {}
    found.append(("nothing in INT8", everything | high | {"keep": count}, {}))
    for part in PREFIXES:
        prefix = everything | {"keep": max(1, round(count / part))}
        found.append(("ranking", prefix | high, {}))
    if space.attention:
        half = {"keep": max(1, round(count / 4)), "attention_keep": len(space.attention) // 2}
        found.append(("ranking", everything | half, {}))
    return found


def rank(work: Workspace, file: Path | None) -> tuple[Space, str]:
    """The space in order of the ranking, and where that comes from.

    Raises:
        UserError: the file is not a sensitivity of this model.
    """
    if file is not None:
        measured = read_ranking(work.session, file)
        return from_rows(work.space, measured.rows, str(file)), f"sensitivity file {file.name}"
    work.progress("measuring sensitivity")

    def told(done: float, total: float, text: str) -> None:
        work.progress(f"measuring sensitivity, {done / total:.0%}")

    measurement = own_ranking(work, told)
    found, samples = measurement.run(), measurement.samples
    return from_rows(work.space, found.rows, "the sensitivity"), f"sensitivity on {samples} train rows"


def own_ranking(work: Workspace, progress: "Progress" = lambda done, total, text: None) -> "Measurement":
    """The sensitivity that ranks a search which is given none; not measured yet."""
    from qdqbench.eval.sensitivity.measure import Measurement

    session = work.session
    whole = without_corrections(work.space.assemble(set(work.space.units), set(work.space.attention), PLAIN))
    everything = session.config.model_copy(update={"recipe": whole})
    return Measurement(Session(everything, session.folder), min(SAMPLES, work.samples), progress)


def read_ranking(session: Session, file: Path) -> "Sensitivity":
    """A sensitivity file of the session's model and task.

    Raises:
        UserError: missing, unreadable, or of another model or task.
    """
    measured = read_sensitivity(file)
    task = session.config.task.model_dump(mode="json")
    if measured.model["sha256"] != session.model_sha256 or measured.task != task:
        raise UserError(
            f"{file} is of another model or task; run `qdqbench sensitivity` on this one, or leave "
            "--sensitivity out"
        )
    return measured


def from_rows(space: Space, rows: Any, source: str) -> Space:
    """Rank units and attentions by the divergence of "only this in INT8".

    Raises:
        UserError: no row is of this model.
    """
    linears: dict[str, float] = {}
    attention: dict[int, float] = {}
    for row in rows:
        judged = row.only or row.all_but
        if judged is None or judged.divergence is None:
            continue
        if row.group == "linear":
            linears |= dict.fromkeys(row.modules or [row.name], float(judged.divergence))
        elif row.group == "attention" and row.layer is not None:
            attention[int(row.layer)] = float(judged.divergence)
    known = {name for names in space.units.values() for name in names}
    if not known & set(linears):
        raise UserError(f"{source} ranks no linear of this model; run `qdqbench sensitivity` on it first")
    return ranked_by(space, linears, attention)
