"""Which recipe to start with follows from figures by the written rule; the documents say what follows."""

import re
from pathlib import Path

import pytest

from qdqbench.quantize.models.families.known import FAMILIES, family_of
from qdqbench.quantize.recipe import shipped
from qdqbench.quantize.recipe.schema import shipped_recipes

ROOT = Path(__file__).parents[3]


def accuracy(task, points, stderr=0.1, stage="engine"):
    about = {"model": "m", "metric": "f1", "n": 9, "where": "one GPU"}
    return shipped.Accuracy(task=task, points=points, stderr=stderr, stage=stage, **about)


def figure(name, speed, losses=(0.0, 0.0, 0.0), backends="tensorrt", padded=False, **more):
    model, batch, length = shipped.SHOWN[backends]
    about = {"length": length, "low": None, "high": None, "over": "FP16", "where": "one GPU"}
    timed = ((model, 1, 9), ("another", batch, 9), (model, batch, speed))
    return shipped.Figure(
        recipe=name,
        backends=backends,
        accuracy=[accuracy(task, lost, **more) for task, lost in zip(shipped.TASKS, losses, strict=False)],
        speed=[
            shipped.Speed(model=m, batch=size, value=value, padded=padded, **about)
            for m, size, value in timed
        ],
    )


def with_sqnr(made, db):
    judged = [{"model": f"{shipped.JUDGED}-{row.task}", "sqnr_db": db} for row in made.accuracy]
    rows = [row.model_copy(update=more) for row, more in zip(made.accuracy, judged, strict=True)]
    return made.model_copy(update={"accuracy": rows})


SLOW, FAST = figure("slow", 1.2), figure("fast", 1.5)
NEAR, FASTEST = with_sqnr(figure("near", 1.81), 32.0), with_sqnr(figure("fastest", 2.0), 30.0)
LOST = FAST.model_copy(update={"accuracy": (*FAST.accuracy, accuracy("another", -3.0))})


@pytest.mark.parametrize(
    ("one", "other", "best"),
    [
        (SLOW, FAST, "fast"),
        (SLOW, figure("fast", 1.5, (0.0, -0.8, 0.0)), "slow"),
        (SLOW, figure("fast", 1.5, (0.0, -0.8, 0.0), stderr=0.2), "fast"),  # within noise
        (SLOW, figure("fast", 1.5, (-0.6, -0.6, -0.6), stderr=0.9), "slow"),  # no excuse on average
        (SLOW, figure("fast", 1.5, (0.0, 0.0)), "slow"),  # a task is missing
        (SLOW, figure("fast", 1.5, stage="fake_quant"), "slow"),  # no engine ran
        (SLOW, LOST, "slow"),
        (figure("slower", 0.9), figure("cpu", 1.5, backends="cpu"), None),
        # SQNR chooses among those about as fast as the fastest
        (NEAR, FASTEST, "near"),
        (NEAR, figure("fastest", 2.0), "near"),  # not judged
        (figure("near", 1.81), FASTEST, "fastest"),
        (with_sqnr(figure("slower", 1.79), 40.0), FASTEST, "fastest"),
        (with_sqnr(figure("lost", 2.0, (-5.0, 0.0, 0.0)), 40.0), NEAR, "near"),
    ],
)
def test_the_one_to_start_with(one, other, best):
    assert shipped.find_best("tensorrt", (one, other)) == best


def test_the_worst_task_is_shown_and_what_no_engine_ran_is_called_so():
    drawn = figure("x", 1.0, (-0.3,), stage="onnxruntime")
    padded = figure("x", 1.234, padded=True)
    empty = shipped.Figure(recipe="x", backends="tensorrt", accuracy=(), speed=())
    first, second, _ = shipped.TASKS
    for shown, worst, speed in (
        (figure("x", 1.234, (0.2, -0.3, 0.1)), f"-0.30 ± 0.10 {second}", "1.23x"),
        (figure("x", 1.0, (-0.001,), stderr=None), f"+0.00 {first}", "1.00x"),
        (drawn, f"-0.30 ± 0.10 {first} (graph)", "1.00x"),
        (padded, f"+0.00 ± 0.10 {first}", "1.23x †"),
        (empty, "not measured", "not measured"),
    ):
        cells = dict(zip(shipped.TITLES, shipped.format_figure(shown), strict=True))
        assert (cells["worst task"], cells["speed-up"]) == (worst, speed)
    assert any("no engine of it ran" in line for line in shipped.describe_conditions([drawn]))
    *_, speeds, told = shipped.describe_conditions([padded])
    assert speeds.endswith("over the fastest FP16.")
    assert told == "† The unpadded encoder, which may be faster, was not timed."
    assert shipped.describe_conditions([empty]) == []
    assert "Not timed so: x." in shipped.describe_conditions([padded, empty])[-2]


def test_a_task_counts_once_in_the_mean_and_held_out_ones_are_told_apart():
    rows = [accuracy("sst2", -0.4, 0.1), accuracy("sst2", 0.2, 0.3), accuracy("rte", -1.3, 0.6)]
    found = shipped.Figure(
        recipe="x", backends="tensorrt", accuracy=(*rows, accuracy("mnli", -9, stage="fake_quant")), speed=()
    )
    assert found.mean == shipped.Mean(
        tasks=2, points=-0.7, stderr=0.3162, measurements=3, beyond=2, by_chance=0.07
    )
    assert (found.held_out.tasks, found.held_out.points, found.held_out.stderr) == (1, -1.3, 0.6)
    cells = ("-0.70 ± 0.32", "-1.30 ± 0.60", "-1.30 ± 0.60 rte", "2/3", "not measured", "not measured")
    assert shipped.format_figure(found) == cells
    compared = [
        accuracy(task, 0.0).model_copy(update={"model": f"{shipped.JUDGED}-{task}", "sqnr_db": db})
        for task, db in zip(("sst2", "sst2", "mrpc", "stsb"), (30.0, 34.0, 22.0, 30.0), strict=True)
    ]
    more = (*found.accuracy, *compared)
    assert shipped.format_figure(found.model_copy(update={"accuracy": more}))[-2] == "28.0"
    assert found.model_copy(update={"accuracy": more[:-1]}).sqnr_db is None  # of a task there is none
    same = shipped.average([accuracy("sst2", 0.0, None)])  # no answer differs
    assert (same.beyond, same.stderr) == (0, 0.0)


def test_a_family_whose_own_engine_lost_more_is_not_sent_there(monkeypatch):
    def starts(recipe):
        (shown,) = (row for row in shipped.list_shipped() if row.recipe == recipe)
        return shown.start_in

    before, recipe = shipped.read_figures(), "mpnet-int8-residual-fused"
    assert "tensorrt" in starts(recipe)
    (own,) = (each for each in before if (each.recipe, each.backends) == (recipe, "tensorrt"))
    worse = tuple(row.model_copy(update={"points": -5.0}) for row in own.accuracy)
    changed = own.model_copy(update={"accuracy": worse})
    monkeypatch.setattr(
        shipped, "read_figures", lambda: tuple(changed if each is own else each for each in before)
    )
    assert "tensorrt" not in starts(recipe)
    assert "tensorrt" in starts("bert-int8-residual-fused")


def test_a_family_without_the_fastest_recipe_starts_with_the_next():
    best = shipped.choose_start()["tensorrt"]
    for family in FAMILIES:
        (start,) = (row for row in shipped.list_shipped(family) if "tensorrt" in row.start_in)
        held = f"{family.name}-{best}" in shipped_recipes()
        assert (start.name == best) == held


def test_figures_and_recipes_of_one_family():
    figures = shipped.read_figures()
    assert {each.recipe for each in figures} <= {*shipped_recipes()}
    assert len({(each.recipe, each.backends) for each in figures}) == len(figures)
    rows = shipped.list_shipped(family_of("xlm-roberta"))
    assert {row.recipe for row in rows} == {name for name in shipped_recipes() if name.startswith("roberta-")}
    assert all("xlm-roberta" in row.model_types and row.description for row in rows)
    for shown in (each for row in shipped.list_shipped() for each in row.figures):
        assert set(shipped.format_figure(shown)) > {shipped.NOT_MEASURED} or shown.accuracy


def test_the_documents_recommend_what_the_figures_do():
    chosen = shipped.choose_start()
    assert {*chosen} == {*shipped.BACKENDS}
    said = ", ".join(f"`{name}` {shipped.PLACES[backends]}" for backends, name in chosen.items())
    assert said in " ".join((ROOT / "recipes" / "README.md").read_text().split())
    assert shipped.describe_choice(chosen).startswith(f"Start with {said.replace('`', '')}. ")
    for file in (ROOT / "recipes").glob("*.yaml"):  # which would have to be changed by hand
        assert not re.search("start here|fastest", file.read_text(), re.IGNORECASE)
