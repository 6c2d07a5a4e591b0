"""The table of searches: the chosen recipe beside the shipped ones on validation, in Markdown."""

from collections.abc import Sequence

from qdqbench.eval.report.formats import code, delta_points, label, text, versions_text
from qdqbench.eval.search.results import Confirmed, Search
from qdqbench.eval.tables.accuracy import table
from qdqbench.eval.tables.changed import Changed, differences
from qdqbench.quantize.core.comparison import Comparison
from qdqbench.quantize.recipe.schema import shipped_recipes


def search_tables(searches: Sequence[Search], changed: Changed) -> list[str]:
    """One table: for each search the chosen recipe, then the shipped ones; drops in points."""
    if not searches:
        return []
    places = list(dict.fromkeys(_where(found) for found in searches))
    done = [(found, row) for found in searches for row in found.confirmed if row.status == "done"]
    kept = [(found, row) for found, row in done if not (row.recipe and differences(row.recipe))]
    rows = [_row(found, row, changed, places.index(_where(found)) + 1) for found, row in kept]
    title = (
        "### Search\n\nThe recipe that `qdqbench search` chose, in bold, and the shipped ones on validation, "
        "which no trial has seen. Drops are FP32 minus the recipe in points, ± one paired standard error. "
        "Speed-ups are over the engine without INT8, not the fastest there is (`qdqbench bench`)."
    )
    over = " or ".join(dict.fromkeys(found.source.twin for found in searches))
    header = ["task", "metric", "recipe", "fake-quant", "drop", "engine drop", "ms", f"over {over}", "trials"]
    notes = [f"- {number}: {text(line)}" for number, line in enumerate(places, 1)]
    notes += [f"- {text(label(found.task))}: {text(line)}" for found in searches for line in _said(found)]
    if gone := len(done) - len(kept):
        notes.append(f"- left out: {gone} rows of shipped recipes that have changed since")
    return [title, table([*header, "where"], rows), "\n".join(notes)]


def _row(found: Search, confirmed: Confirmed, changed: Changed, place: int) -> list[str]:
    name = changed.label(confirmed.recipe) if confirmed.recipe else code(confirmed.name)
    if confirmed is found.confirmed[0]:
        name = f"**{name if confirmed.name in shipped_recipes() else 'found by the search'}**"
    elif confirmed.dominates:
        name += " ✗ dominates the chosen one"
    value, latency = confirmed.metrics.get(found.metric), confirmed.latency
    return [
        text(label(found.task)),
        text(label(found.metric)),
        name,
        "" if value is None else f"{100 * value:.2f}",
        _drop(confirmed.fake_quant, found.metric),
        _drop(confirmed.engine, found.metric),
        "" if latency is None else f"{latency.system_ms:.3f}",
        "" if latency is None else f"{latency.value:.2f}x",
        str(len(found.trials)),
        str(place),
    ]


def _drop(splits: dict[str, Comparison], metric: str) -> str:
    """Of the first split; empty where it was not measured."""
    for comparison in splits.values():
        return delta_points(-comparison.delta[metric], comparison.delta_stderr[metric])
    return ""


def _said(found: Search) -> list[str]:
    """Whether it holds, what could not be judged, and whether search and confirmation agree."""
    lines = list(found.outcome.failures)
    lines += [f"✗ {row.name} failed: {row.reason}" for row in found.confirmed if row.status == "failed"]
    if (drops := found.agreement) is not None:
        said = "they agree within noise" if drops.within_noise else "✗ they do not agree"
        lines.append(
            f"drop {delta_points(drops.searched, drops.searched_stderr)} where it was searched, "
            f"{delta_points(drops.confirmed, drops.confirmed_stderr)} confirmed: {said}"
        )
    return lines


def _where(found: Search) -> str:
    source, versions = found.source, versions_text(found.environment)
    return f"latency {source.label}, batch {source.batch} x {source.length} tokens; {versions}"
