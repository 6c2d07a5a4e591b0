"""The report of a search: a page, Markdown and a screen."""

import statistics
from functools import partial

from qdqbench.eval.metrics import figures
from qdqbench.eval.metrics.results import Comparison
from qdqbench.eval.runs.gate import issue_sentence
from qdqbench.eval.selection.search.results import (
    SEARCH_FILE,
    ConfirmedRecipe,
    PlacedTrial,
    Search,
    SearchTrial,
)
from qdqbench.eval.selection.trials.results import DRAW, Origin
from qdqbench.quantize.recipe.schema import dump_short_recipe
from qdqbench.quantize.recipe.sections import GateSettings
from qdqbench.quantize.report import document as doc
from qdqbench.quantize.report import svg
from qdqbench.quantize.report.formats import cleaned, delta_points, flat, label, model_label, points
from qdqbench.quantize.utils.names import count_of

MARKS = (  # what a point of the plot is; shape and color differ
    ("tried", svg.SKY, "o"),
    ("Pareto front", svg.BLUE, "o"),
    ("shipped recipe", svg.ORANGE, "s"),
    ("given recipe", svg.GREEN, "^"),
    ("chosen", svg.VERMILLION, "*"),
)
ORIGINS: dict[Origin, str] = {
    "given": "given recipe",
    "unquantized": "nothing in INT8",
    "ranking": "ranking",
    "tpe": "TPE",
}
SETTINGS = {"method": "activations", "smoothing": "smoothing", "weights_method": "weights"}


def search_report(found: Search) -> doc.Report:
    found = cleaned(found)
    source, outcome = found.source, found.outcome
    speed = f"over {source.baseline_precision}" if source.mode == "latency" else "INT8 share of multiply-adds"
    tried = [trial for trial in found.trials if trial.is_scored]
    failed = sum(trial.failure is not None for trial in found.trials)
    repeated = sum(trial.duplicate_of is not None for trial in found.trials)
    counts = f"{len(tried)} recipes tried, {repeated} repeated, {failed} failed"
    shape = f"batch {source.batch}, {source.length} tokens"
    about = [label(found.task), str(found.recipe["name"])]
    facts = {"Settings": flat(found.settings), "Latency": flat(source.model_dump())}
    chart = doc.Chart(partial(draw_front, found), broad=True)
    sections = [doc.Section("front", "Accuracy against latency", [chart], on=doc.PAGE)]
    if found.confirmed:
        sections.append(_confirmation(found, speed))
    if found.chosen and found.chosen.recipe:
        recipe = doc.Code(dump_short_recipe(found.chosen.recipe), "yaml", on=doc.PAGES)
        sections.append(doc.Section("recipe", "The recipe", [recipe]))
    tiles, best = [], next(iter(found.confirmed), None)
    if best is not None and best.score is not None:
        title = "speed of the chosen" if best.speedup else "INT8 share of the chosen"
        tiles.append(doc.Tile(title, _speed(best), speed if best.speedup else "of multiply-adds"))
        remark = f"on validation, {figures.noise(best.score)}"
        tiles.append(doc.Tile("against FP32, points", _change(best.score).text, remark))
        tiles.append(doc.Tile("SQNR of the chosen", figures.sqnr(best.score).text, "on validation"))
    front = sum(trial.on_front for trial in tried)
    return doc.Report(
        doc.page_of(found, "search", model_label(found.model), about, SEARCH_FILE, facts=facts),
        [*sections, _trials(found, speed)],
        doc.Verdict(
            "good" if outcome.passed else "bad",
            describe_gate(found),
            headline(found),
            notes=[f"Asked: {describe_rule(found)}. {counts}. Latency {source.label}; {shape}."],
        ),
        tiles=[*tiles, doc.Tile("recipes tried", str(len(tried)), f"{front} on the front")],
        warnings=found.warnings,
        notes=found.notes,
    )


def describe_gate(found: Search) -> str:
    return "The gate holds" if found.outcome.passed else "The gate does not hold"


def headline(found: Search) -> str:
    chosen, outcome = found.chosen, found.outcome
    if chosen is None:
        return f"No recipe holds the gate: {describe_choice(found)}."
    if not outcome.passed:
        problems = "; ".join(issue_sentence(issue) for issue in outcome.issues if issue.state == "failed")
        return f"Trial {chosen.number} was chosen, and validation does not confirm it: {problems}."
    measured = found.source.mode == "latency"
    how = "confirmed on validation" if measured else "accuracy confirmed on validation, latency not measured"
    return f"Trial {chosen.number}: {describe_choice(found)}; {how}."


def describe_rule(found: Search) -> str:
    gate = GateSettings.model_validate(found.recipe["gate"])
    if gate.min_speedup is not None:
        baseline = found.source.baseline_precision
        return f"at least {gate.min_speedup:g}x as fast as the {baseline} engine{_sqnr(gate)}, most accurate"
    first = "fastest" if found.source.mode == "latency" else "largest INT8 share of multiply-adds"
    return f"at most {points(gate.max_drop)} lost{_sqnr(gate)}, {first}"


def _sqnr(gate: GateSettings) -> str:
    return "" if gate.min_sqnr_db is None else f" with an SQNR of {gate.min_sqnr_db:g} dB or more"


def describe_choice(found: Search) -> str:
    gate, outcome = GateSettings.model_validate(found.recipe["gate"]), found.outcome
    asked = f"{gate.min_speedup:g}x as fast" if gate.min_speedup is not None else ""
    lost = f"at most {points(gate.max_drop)}"
    chosen = found.chosen
    if chosen is None:
        engine = f"{asked} as the {found.source.baseline_precision} engine"
        text = (f"none is {engine}" if asked else f"none loses {lost}") + _sqnr(gate)
        best = next((trial for trial in found.trials if trial.number == outcome.best), None)
        if best is None:
            return f"{text}: no trial came to an end"
        speed = _speed(best) if best.speedup else f"{_speed(best)} of the multiply-adds in INT8"
        score = best.scores[DRAW]
        drop = f"a drop of {100 * score.drop:.2f} points, an SQNR of {figures.sqnr(score).text}"
        return f"{text}; the best was trial {best.number} with {drop} and {speed}"
    if asked:
        return f"the most accurate of {outcome.holding} recipes that are at least {asked}{_sqnr(gate)}"
    first = "fastest" if chosen.speedup else "one with the largest INT8 share"
    text = f"the {first} of {outcome.holding} recipes that lose {lost}{_sqnr(gate)}"
    searched = chosen.scores[DRAW].drop
    if searched > gate.max_drop:
        text += f" (it lost {100 * searched:.2f}, which is within noise of that)"
    if outcome.equal > 1:
        text += f", and the most accurate of the {outcome.equal} within 1% of that"
    return text


def _confirmation(found: Search, speed: str) -> doc.Section:
    fp32 = next(iter(found.fp32.values())).metrics[found.metric]

    table = doc.table_of(
        found.confirmed,
        ("recipe", lambda each: each.name),
        (label(found.metric), lambda each: f"{fp32 - each.score.drop:.4f}" if each.score else ""),
        ("against FP32, points", lambda each: _change(each.score)),
        ("SQNR", lambda each: figures.sqnr(each.score) if each.score else ""),
        ("engine", lambda each: _change(next(iter(each.engine.values()), None))),
        ("ms", lambda each: figures.latency(each.speedup)),
        (speed, lambda each: _speed(each) if each.score else ""),
        (
            "remark",
            lambda each: doc.Cell(_remark(each), doc.bad_unless(not (each.dominates or each.failure))),
        ),
        chosen=lambda each: each is found.confirmed[0],
        texts=(0, -1),
        look="full cards sortable",
        screen=(0, 1, 2, 3, 5, 6),
        on=doc.EVERYWHERE,
    )
    remarks = [f"{each.name}: {text}" for each in found.confirmed if (text := _remark(each))]
    agreement = doc.Prose(_describe_agreement(found), on=doc.EVERYWHERE)
    quiet = (doc.Prose(text, "quiet", on=doc.SCREEN) for text in remarks)
    return doc.Section("confirmed", "On validation, which no trial has seen", [agreement, table, *quiet])


def _remark(each: ConfirmedRecipe) -> str:
    if each.failure is not None:
        return each.failure.text
    texts = []
    for split, score in list(each.scores.items())[1:]:
        engine = f", of the engine {_change(each.engine[split]).text}" if split in each.engine else ""
        texts.append(f"{split.removeprefix('validation_')}: {_change(score).text} points{engine}")
    return "; ".join(texts + ["dominates the chosen recipe"] * each.dominates)


def _trials(found: Search, speed: str) -> doc.Section:
    order = sorted(
        found.trials, key=lambda each: (not each.on_front, -each.gain if each.is_scored else 0, each.number)
    )
    units = ", ".join(f"{kind} of layer {layer}" for layer, kind in found.ranking.units)
    ranking = found.ranking
    source = f"file {ranking.file}" if ranking.file else f"sensitivity on {ranking.samples} train rows"

    def int8(each: SearchTrial) -> doc.Cell:
        return doc.Cell(f"{each.int8_linears} linears, {each.int8_attention} attentions", look="nowrap")

    table = doc.table_of(
        order,
        ("trial", lambda each: each.number),
        (speed, lambda each: _speed(each) if each.scores else ""),
        ("against FP32, points", lambda each: _change(each.scores.get(DRAW))),
        ("front", lambda each: "yes" if each.on_front else ""),
        ("holds", lambda each: "yes" if each.holds else ""),
        ("ms", lambda each: figures.latency(each.speedup)),
        ("SQNR", lambda each: figures.sqnr(each.scores[DRAW]) if each.scores else ""),
        ("from", lambda each: doc.Cell(ORIGINS.get(each.origin, f"shipped {each.shipped}"), look="nowrap")),
        ("INT8", int8),
        ("calibration", lambda each: doc.Cell(_calibration_text(each), look="text")),
        ("remark", _trial_remark),
        chosen=lambda each: each.number == found.outcome.chosen,
        texts=(7, 8, 9, 10),
        look="full sortable",
        filter="trials",
    )
    blocks: list[doc.Block] = [
        doc.Prose(
            f"Scored on {found.settings['samples']} train rows at most, none of which calibrates. ± is one "
            "paired standard error.",
            "quiet",
        ),
        table,
        doc.Prose(f"Units in order of the ranking ({source}), the worst in INT8 first: {units}.", "quiet"),
    ]
    return doc.Section("trials", f"All {count_of(len(order), 'trial')}, the Pareto front first", blocks)


def _calibration_text(trial: SearchTrial) -> str:
    if not trial.int8_linears:
        return "nothing to calibrate"
    return ", ".join(f"{name} {trial.params[key]}" for key, name in SETTINGS.items() if key in trial.params)


def _trial_remark(trial: SearchTrial) -> str:
    if trial.failure:
        return trial.failure.text
    return f"same recipe as {trial.duplicate_of}" if trial.duplicate_of is not None else ""


def _change(score: Comparison | None) -> doc.Cell:
    return figures.change(score, in_percent=True) if score else doc.Cell()


def _speed(each: PlacedTrial) -> str:
    return figures.speed_text(each.speedup) or f"{each.int8_share:.0%}"


def _describe_agreement(found: Search) -> str:
    pair = found.agreement
    if pair is None:
        return "Whether the search and its confirmation agree is not known."
    return (
        "Calibrated in full, its drop where it was searched is "
        f"{delta_points(pair.searched, pair.searched_stderr)} points, and on validation "
        f"{delta_points(pair.confirmed, pair.confirmed_stderr)}: they "
        + ("agree within noise." if pair.within_noise else "differ by more than noise.")
    )


def draw_front(found: Search) -> str:
    drop = found.objective == "drop"
    done = [each for each in found.trials if each.is_scored and (drop or each.noise_power)]  # has dB
    if not done:
        return ""
    measure = "drop, points" if drop else "SQNR of the logits, dB"
    times = [trial.speedup.baseline_ms for trial in done if trial.speedup]
    baseline_ms = statistics.median(times) if times else None  # one scale for all hours

    def point(trial: SearchTrial) -> tuple[float, float]:
        across = baseline_ms / trial.gain if baseline_ms else 100 * (1 - trial.gain)
        score = trial.scores[DRAW]
        return across, 100 * score.drop if drop else score.sqnr_db or 0.0

    shipped = {trial.duplicate_of for trial in found.trials if trial.origin == "shipped"}

    def marks(trial: SearchTrial) -> set[str]:
        if trial.number == found.outcome.chosen:
            return {"chosen"}
        own = "Pareto front" if trial.on_front else "tried"
        own = f"{trial.origin} recipe" if trial.origin in ("shipped", "given") else own
        return {own, "shipped recipe"} if trial.number in shipped else {own}

    figure, axes = svg.axes_of(3.6)
    if front := sorted(point(trial) for trial in done if trial.on_front):
        axes.step(*zip(*front, strict=True), where="post", color=svg.BLUE, linewidth=1, alpha=0.6)
    for name, color, marker in MARKS:
        if points := [point(trial) for trial in done if name in marks(trial)]:
            look = {"s": {"tried": 14, "chosen": 130}.get(name, 34), "color": color, "marker": marker}
            axes.scatter(*zip(*points, strict=True), **look, label=name, zorder=3)
    title = f"latency, ms, batch {found.source.batch}, {found.source.length} tokens"
    axes.set_xlabel(title if times else "share of multiply-adds that is not in INT8, %")
    svg.dress(axes, measure, grid="both")
    svg.legend(figure, 3, 2)
    against = "latency" if times else "INT8 share"
    return svg.svg_of(figure, "search-front", f"{measure} against {against} of {len(done)} recipes")
