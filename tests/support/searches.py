"""A search without a model: points are numbers, and a fake measurement tells what comes of each."""

from collections.abc import Callable

from qdqbench.eval.selection.search.options import SearchOptions
from qdqbench.eval.selection.search.results import Ranking, SearchTrial
from qdqbench.eval.selection.search.worker import SearchStudy
from qdqbench.eval.selection.search.workspace import PLAIN
from qdqbench.quantize.recipe.plan import resolve
from qdqbench.quantize.recipe.sections import GateSettings

from . import records

SETTINGS = {"model": "a", "batch and length": [32, 128]}
GIVEN = 3  # the point that every search starts with
LARGEST = 50
Outcome = Callable[[SearchTrial], SearchTrial | None]


def placed(space, units, attention=(), **how):
    """A recipe with these in INT8, max and no smoothing unless said otherwise, and its plan."""
    recipe = space.assemble(set(units), set(attention), PLAIN | how)
    return recipe, resolve(recipe, space.whole.modules, space.whole.prefix)


def suggest(point):
    return {"keep": point.suggest_int("keep", 0, LARGEST)}


def rank():
    first = [({"keep": GIVEN}, {"origin": "given"}), ({"keep": GIVEN}, {"origin": "ranking"})]
    return Ranking(units=[(0, "qkv")], attention=[], samples=8), first


def open_search(folder, *, settings=SETTINGS, name="x", seed=0, **options):
    path, chosen = folder / "trials.jsonl", SearchOptions(**{"trials": 4} | options)
    return SearchStudy(
        chosen, name, path, settings, gate=GateSettings(), suggest=suggest, rank=rank, seed=seed
    )


class Measurement:
    """Noise power and speed of a point by its number; where an outcome is planned, that comes of it."""

    def __init__(self, plan=None):
        self.plan = plan or {}
        self.tried = list[int]()

    def __call__(self, trial, finished):
        self.tried.append(trial.number)
        keep = trial.params["keep"]
        about = {"origin": trial.origin, "shipped": trial.shipped, "params": trial.params}
        measured = records.search_trial(trial.number, keep / LARGEST, 1 + keep / LARGEST, **about)
        outcome = self.plan.get(trial.number) if isinstance(self.plan, dict) else self.plan
        return (outcome(measured) if outcome else None) or measured


def raising(error):
    def outcome(_):
        raise error

    return outcome
