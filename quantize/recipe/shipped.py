"""Shipped recipes with their measured figures, from a generated file, and the ones to start with."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from statistics import fmean
from typing import Literal, NamedTuple

from pydantic import TypeAdapter

from qdqbench.quantize.models.families.family import Family
from qdqbench.quantize.models.families.known import FAMILIES
from qdqbench.quantize.recipe.schema import family_free_recipes, load_recipe
from qdqbench.quantize.utils.limits import CPU_BACKENDS, BackendName
from qdqbench.quantize.utils.schema import Frozen

FIGURES_FILE = "figures.json"
Backends = Literal["cuda", "tensorrt", "cpu"]
BACKENDS: dict[Backends, str] = {"cuda": "cuda", "tensorrt": "TensorRT", "cpu": "CPU"}
PLACES: dict[Backends, str] = {"cuda": "in backend cuda", "tensorrt": "in TensorRT", "cpu": "on a CPU"}
SHOWN: dict[Backends, tuple[str, int, int]] = {  # model, batch and tokens of the speeds that are compared
    "cuda": ("bert-base", 32, 128),
    "tensorrt": ("bert-base", 32, 128),
    "cpu": ("minilm-l6-sst2", 8, 128),
}
AS_FAST = 0.9  # of the fastest speed-up: recipes from here on are told apart by their SQNR
JUDGED = "minilm-l6"  # model of the SQNR that are compared, trained on each of `TASKS`
TASKS = ("sst2", "mrpc", "stsb")  # that settings of recipes were chosen on; all others are held out
MAX_DROP = 0.5  # points: what `auto` asks for by default
NOISE, CHANCE = 2, 0.023  # standard errors; how often a recipe without loss seems to lose more than these
NOT_MEASURED = "not measured"
MARK = "†"  # behind a speed over padded baselines only
TITLES = ("mean", "held out", "worst task", "lost", "SQNR", "speed-up")


class Accuracy(Frozen):
    """A task's primary metric against FP32, on one of its evaluation splits."""

    model: str
    task: str
    metric: str
    points: float  # the recipe minus FP32
    stderr: float | None  # paired, in points; null where no answer differs
    n: int  # samples, of the first split
    stage: Literal["engine", "onnxruntime", "fake_quant"]  # the last one that ran
    where: str  # hardware and library that ran it
    sqnr_db: float | None = None  # of the logits; null where they are equal


class Mean(Frozen):
    """Accuracy over tasks, which count alike; a task is the mean over its models, seeds and hardware."""

    tasks: int
    points: float
    stderr: float  # of one model: those of a task share its samples
    measurements: int
    beyond: int  # measurements that lost more than two standard errors
    by_chance: float  # how many of them a recipe without loss would have


class Speed(Frozen):
    """The engine for the recipe's shapes over the fastest contestant that is not INT8."""

    model: str
    batch: int
    length: int  # tokens
    value: float  # the least of several benches of that shape
    low: float | None  # 95% interval over rounds
    high: float | None
    over: str  # precision of the fastest other
    where: str
    padded: bool = False  # the unpadded encoder was not timed


class Figure(Frozen):
    """A shipped recipe, as it is shipped now, in backends of one kind."""

    recipe: str
    backends: Backends
    accuracy: tuple[Accuracy, ...]  # by task and hardware
    speed: tuple[Speed, ...]  # by shape

    @property
    def judged(self) -> list[Accuracy]:
        """Return what engines reached, or graphs where none ran."""
        return [row for row in self.accuracy if row.stage == "engine"] or [*self.accuracy]

    @property
    def worst(self) -> Accuracy | None:
        return min(self.judged, key=lambda row: row.points, default=None)

    @property
    def mean(self) -> Mean | None:
        return average(self.judged)

    @property
    def held_out(self) -> Mean | None:
        """Return the mean over tasks that no setting was chosen on."""
        return average([row for row in self.judged if row.task not in TASKS])

    @property
    def sqnr_db(self) -> float | None:
        """Return the mean SQNR of the engines of `JUDGED` over `TASKS`; None unless all ran."""
        found: dict[str, list[float]] = {}
        for row in self.judged:
            if row.stage == "engine" and row.sqnr_db is not None and row.model == f"{JUDGED}-{row.task}":
                found.setdefault(row.task, []).append(row.sqnr_db)
        return fmean(map(fmean, found.values())) if {*found} == {*TASKS} else None

    @property
    def shown_speed(self) -> Speed | None:
        shown = SHOWN[self.backends]
        return next((row for row in self.speed if (row.model, row.batch, row.length) == shown), None)

    @property
    def holds(self) -> bool:
        """Return whether engines ran on `TASKS` and did not lose too much."""
        return {row.task for row in self.judged if row.stage == "engine"} >= {*TASKS} and not self.lost

    @property
    def lost(self) -> bool:
        """Return whether engines lost more than `MAX_DROP` on average, or on a task beyond its noise."""
        ran = [row for row in self.judged if row.stage == "engine"]
        mean = average(ran)
        clearly = any(-row.points - NOISE * (row.stderr or 0) > MAX_DROP for row in ran)
        return clearly or (mean is not None and -mean.points > MAX_DROP)


def average(rows: Sequence[Accuracy]) -> Mean | None:
    """Return the mean over tasks of what was measured, if anything was."""
    if not rows:
        return None
    tasks: dict[str, list[Accuracy]] = defaultdict(list)
    for row in rows:
        tasks[row.task].append(row)
    points = [fmean(row.points for row in same) for same in tasks.values()]
    errors = [fmean(row.stderr or 0 for row in same) for same in tasks.values()]
    return Mean(
        tasks=len(tasks),
        points=round(fmean(points), 4),
        stderr=round(math.hypot(*errors) / len(tasks), 4),
        measurements=len(rows),
        beyond=sum(-row.points > NOISE * (row.stderr or 0) for row in rows),
        by_chance=round(CHANCE * len(rows), 2),
    )


class Shipped(NamedTuple):
    recipe: str
    name: str  # without the family
    family: str
    model_types: tuple[str, ...]  # of config.json
    description: str
    figures: tuple[Figure, ...]  # by backends; none where nothing was measured
    # backends in which it, or the one of its name in another family, is to start with
    start_in: tuple[Backends, ...]


@cache
def read_figures() -> tuple[Figure, ...]:
    text = resources.files("qdqbench.recipes").joinpath(FIGURES_FILE).read_text(encoding="utf-8")
    return TypeAdapter(tuple[Figure, ...]).validate_json(text)


def list_shipped(family: Family | None = None) -> list[Shipped]:
    rows = []
    for each in FAMILIES if family is None else (family,):
        first = choose_start(each)
        for name in (name for name, having in family_free_recipes().items() if each.name in having):
            recipe = f"{each.name}-{name}"
            own = [figure for figure in read_figures() if figure.recipe == recipe]
            figures = {figure.backends: figure for figure in own if figure.accuracy or figure.shown_speed}
            measured = tuple(figures[backends] for backends in BACKENDS if backends in figures)
            on = tuple(backends for backends, chosen in first.items() if chosen == name)
            about = load_recipe(recipe).description
            rows.append(Shipped(recipe, name, each.name, each.model_types, about, measured, on))
    return rows


def backends_of(backend: BackendName) -> Backends:
    """Return whose figures tell what a recipe brings in a backend."""
    return "cpu" if backend in CPU_BACKENDS else "cuda" if backend == "cuda" else "tensorrt"


def choose_start(
    family: Family | None = None, figures: Sequence[Figure] | None = None
) -> dict[Backends, str]:
    """Return the recipe to start with by backends, without its family, from the shipped figures or others."""
    figures = read_figures() if figures is None else figures
    lost = {(each.recipe, each.backends) for each in figures if each.lost}
    names = {
        f"{other}-{name}": name
        for name, having in family_free_recipes().items()
        for other in having
        if family is None or family.name in having
    }

    def able(each: Figure) -> bool:
        own = family and f"{family.name}-{names.get(each.recipe)}"
        return each.recipe in names and (own, each.backends) not in lost

    measured = tuple(filter(able, figures))
    chosen = {backends: find_best(backends, measured) for backends in BACKENDS}
    return {backends: names[recipe] for backends, recipe in chosen.items() if recipe is not None}


def find_best(backends: Backends, candidates: Iterable[Figure]) -> str | None:
    """Return the recipe with the highest SQNR of those that hold and are about as fast as the fastest.

    Those that were not timed count where none was.
    """
    able = [
        (speed.value if speed else 0.0, each)
        for each in candidates
        if each.backends == backends and each.holds and not ((speed := each.shown_speed) and speed.value <= 1)
    ]
    least = AS_FAST * max((speed for speed, _ in able), default=0)
    return max(
        ((each.sqnr_db or 0, speed, each.recipe) for speed, each in able if speed >= least), default=(None,)
    )[-1]


def _format_points(points: float, stderr: float | None) -> str:
    return f"{round(points, 2) + 0.0:+.2f}" + ("" if stderr is None else f" ± {stderr:.2f}")


def format_figure(figure: Figure, *, briefly: bool = False) -> tuple[str, ...]:
    """Return the cells under `TITLES`; briefly, the worst task is without its error."""
    means = [each and _format_points(each.points, each.stderr) for each in (figure.mean, figure.held_out)]
    mean, worst, speed = figure.mean, figure.worst, figure.shown_speed
    cells = (
        *means,
        worst
        and f"{_format_points(worst.points, None if briefly else worst.stderr)} {worst.task}"
        f"{'' if worst.stage == 'engine' else ' (graph)'}",
        mean and f"{mean.beyond}/{mean.measurements}",
        None if figure.sqnr_db is None else f"{figure.sqnr_db:.1f}",
        speed and f"{speed.value:.2f}x{f' {MARK}' if speed.padded else ''}",
    )
    return tuple(str(cell or NOT_MEASURED) for cell in cells)


def describe_conditions(shown: Iterable[Figure], *, briefly: bool = False) -> list[str]:
    """Return what the figures are of, in sentences; briefly, without tasks that are held out."""
    shown = list(shown)
    held_out = f"Held out: all tasks but {', '.join(TASKS)}, on which settings of recipes were chosen. "
    ran = dict.fromkeys(row.where for each in shown for row in each.accuracy if row.stage == "engine")
    sentences = []
    if ran:
        sentences.append(
            "Accuracy: points of the task's metric, the recipe's engine minus FP32, ± one paired standard "
            f"error; {'; '.join(sorted(ran))}. The mean is over tasks. {'' if briefly else held_out}"
            f"Lost: measurements that lost more than {NOISE} standard errors. By chance, {CHANCE:.1%} of "
            "those without a loss would. Empty: not measured."
        )
    if any(each.sqnr_db for each in shown):
        sentences.append(
            f"SQNR: in dB, the mean over {', '.join(TASKS)} of the engines of {JUDGED}. It tells "
            "recipes apart where accuracy is within noise."
        )
    if any(row.stage != "engine" for each in shown for row in each.accuracy):
        sentences.append("(graph): of the fake-quantized or exported model, no engine of it ran.")
    for backends, place in PLACES.items():
        here = [each for each in shown if each.backends == backends]
        rows = [speed for each in here if (speed := each.shown_speed)]
        untimed = [each.recipe for each in here if not each.shown_speed]
        what = sorted({f"{row.where}, over the fastest {row.over}" for row in rows})
        model, batch, length = SHOWN[backends]
        if what:
            left = f" Not timed so: {', '.join(untimed)}." if untimed else ""
            shape = f"{model}, {batch} x {length} tokens"
            sentences.append(f"Speed-up {place}: {shape}, {'; '.join(what)}.{left}")
        if any(row.padded for row in rows):
            sentences.append(f"{MARK} The unpadded encoder, which may be faster, was not timed.")
    return sentences


def describe_choice(chosen: Mapping[Backends, str]) -> str:
    start = ", ".join(f"{name} {PLACES[backends]}" for backends, name in chosen.items())
    return (
        f"Start with {start}. Without training, their engines lost at most {MAX_DROP:g} points on the mean "
        f"over tasks, and on no task more than that beyond {NOISE} standard errors. {', '.join(TASKS)} are "
        f"among the tasks. Of those with at least {AS_FAST:.0%} of the fastest speed-up, each has the "
        "highest SQNR. That was measured with BERT. Other families take the same name if they have it and "
        "it did not lose more there, else the next."
    )
