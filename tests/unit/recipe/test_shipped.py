"""Which recipe to start with follows from figures by the written rule; the documents say what follows."""

import re
from pathlib import Path

from qdqbench.quantize.models.families.known import FAMILIES, family_of
from qdqbench.quantize.recipe import shipped
from qdqbench.quantize.recipe.schema import shipped_recipes

ROOT = Path(__file__).parents[3]


def accuracy(task, points, stderr=0.1, stage="engine"):
    about = {"model": "m", "metric": "f1", "n": 9, "where": "one GPU"}
    return shipped.Accuracy(task=task, points=points, stderr=stderr, stage=stage, **about)


def figure(name, speed, losses=(0.0, 0.0, 0.0), backends="tensorrt", padded=False, **more):
    model, batch, length = shipped.SHOWN[backends]
    about = {
        "length": length,
        "low": None,
        "high": None,
        "over": "FP16",
        "where": "one GPU",
        "padded": padded,
    }
    return shipped.Figure(
        recipe=name,
        backends=backends,
        accuracy=tuple(
            accuracy(task, points, **more) for task, points in zip(shipped.TASKS, losses, strict=False)
        ),
        speed=(
            shipped.Speed(model=model, batch=1, value=9, **about),
            shipped.Speed(model="another", batch=batch, value=9, **about),
            shipped.Speed(model=model, batch=batch, value=speed, **about),
        ),
    )


def test_the_fastest_that_holds_is_the_one_to_start_with():
    slow, fast = figure("slow", 1.2), figure("fast", 1.5)
    assert shipped.find_best("tensorrt", (slow, fast)) == "fast"
    assert shipped.find_best("cpu", (slow, fast)) is None
    assert shipped.find_best("tensorrt", (slow, figure("fast", 1.5, (0.0, -0.8, 0.0)))) == "slow"
    within_noise = figure("fast", 1.5, (0.0, -0.8, 0.0), stderr=0.2)
    assert shipped.find_best("tensorrt", (slow, within_noise)) == "fast"
    on_average = figure("fast", 1.5, (-0.6, -0.6, -0.6), stderr=0.9)  # for which noise is no excuse
    assert shipped.find_best("tensorrt", (slow, on_average)) == "slow"
    assert (
        shipped.find_best("tensorrt", (slow, figure("fast", 1.5, (0.0, 0.0)))) == "slow"
    )  # a task is missing
    # no engine ran
    assert shipped.find_best("tensorrt", (slow, figure("fast", 1.5, stage="fake_quant"))) == "slow"
    assert shipped.find_best("tensorrt", (figure("slower", 0.9),)) is None
    lost = fast.model_copy(update={"accuracy": (*fast.accuracy, accuracy("another", -3.0))})
    assert shipped.find_best("tensorrt", (slow, lost)) == "slow"


def test_sqnr_chooses_among_those_about_as_fast_as_the_fastest():
    def with_sqnr(made, db):
        rows = (
            row.model_copy(update={"model": f"{shipped.JUDGED}-{row.task}", "sqnr_db": db})
            for row in made.accuracy
        )
        return made.model_copy(update={"accuracy": tuple(rows)})

    near, fastest = with_sqnr(figure("near", 1.81), 32.0), with_sqnr(figure("fastest", 2.0), 30.0)
    assert shipped.find_best("tensorrt", (near, fastest)) == "near"
    assert shipped.find_best("tensorrt", (near, figure("fastest", 2.0))) == "near"  # not judged
    assert shipped.find_best("tensorrt", (figure("near", 1.81), fastest)) == "fastest"
    slower = with_sqnr(figure("slower", 1.79), 40.0)
    assert shipped.find_best("tensorrt", (slower, fastest)) == "fastest"
    lost = with_sqnr(figure("lost", 2.0, (-5.0, 0.0, 0.0)), 40.0)
    assert shipped.find_best("tensorrt", (lost, near)) == "near"


def test_the_worst_task_is_shown_and_what_no_engine_ran_is_called_so():
    assert shipped.format_worst(figure("x", 1.0, (0.2, -0.3, 0.1))) == f"-0.30 ± 0.10 {shipped.TASKS[1]}"
    assert shipped.format_worst(figure("x", 1.0, (-0.001,), stderr=None)) == f"+0.00 {shipped.TASKS[0]}"
    drawn = figure("x", 1.0, (-0.3,), stage="onnxruntime")
    assert shipped.format_worst(drawn) == f"-0.30 ± 0.10 {shipped.TASKS[0]} (graph)"
    assert any("no engine of it ran" in line for line in shipped.describe_conditions([drawn]))
    assert shipped.format_speed(figure("x", 1.234)) == "1.23x"
    padded = figure("x", 1.234, padded=True)
    assert shipped.format_speed(padded) == "1.23x †"
    *_, speeds, told = shipped.describe_conditions([padded])
    assert speeds.endswith("over the fastest FP16.")
    assert told == "† The unpadded encoder, which may be faster, was not timed."
    empty = shipped.Figure(recipe="x", backends="tensorrt", accuracy=(), speed=())
    assert (shipped.format_worst(empty), shipped.format_speed(empty)) == ("not measured", "not measured")
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
    same = accuracy("sst2", 0.0, None)  # no answer differs
    assert (
        shipped.average([same]).model_dump() | {"beyond": 0, "stderr": 0.0}
        == shipped.average([same]).model_dump()
    )


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
    assert {each.recipe for each in shipped.read_figures()} <= {*shipped_recipes()}
    assert len({(each.recipe, each.backends) for each in shipped.read_figures()}) == len(
        shipped.read_figures()
    )
    rows = shipped.list_shipped(family_of("xlm-roberta"))
    assert {row.recipe for row in rows} == {name for name in shipped_recipes() if name.startswith("roberta-")}
    assert all("xlm-roberta" in row.model_types and row.description for row in rows)
    shown = [figure for row in shipped.list_shipped() for figure in row.figures]
    assert all(
        set(shipped.format_figure(figure)) > {shipped.NOT_MEASURED} or figure.accuracy for figure in shown
    )


def test_the_documents_recommend_what_the_figures_do():
    chosen = shipped.choose_start()
    assert {*chosen} == {*shipped.BACKENDS}
    said = ", ".join(f"`{name}` {shipped.PLACES[backends]}" for backends, name in chosen.items())
    assert said in " ".join((ROOT / "recipes" / "README.md").read_text().split())
    assert shipped.describe_choice(chosen).startswith(f"Start with {said.replace('`', '')}. ")
    for file in (ROOT / "recipes").glob("*.yaml"):  # which would have to be changed by hand
        assert not re.search("start here|fastest", file.read_text(), re.IGNORECASE)
