"""The report of `auto`: a page, Markdown and a screen."""

from collections.abc import Sequence
from functools import partial

from qdqbench.eval.metrics import figures
from qdqbench.eval.metrics.results import Comparison, GateIssue
from qdqbench.eval.runs.gate import issue_sentence
from qdqbench.eval.selection.auto.results import AUTO_FILE, Auto, AutoStep, SkipReason, StepKind
from qdqbench.quantize.deployment.write import DEPLOY
from qdqbench.quantize.report import document as doc
from qdqbench.quantize.report import svg
from qdqbench.quantize.report.formats import cleaned, flat, label, points, seconds, sentence
from qdqbench.quantize.utils.names import count_of

TITLES: dict[StepKind, str] = {
    "shipped": "shipped recipe",
    "methods": "calibration methods",
    "islands": "islands by sensitivity",
    "search": "search",
    "qat": "training (QAT)",
    "unquantized": "without INT8",
}
REMEDIES: dict[StepKind, str] = {"methods": "scales", "islands": "less INT8", "qat": "weights"}


def auto_report(auto: Auto) -> doc.Report:
    auto = cleaned(auto)
    choice, passed, criteria = auto.choice, auto.choice.passed, _criteria_text(auto)
    deploy = choice.model_dump(include={"recipe", "engine", "run"})
    deploy |= {"deploy": choice.run and f"{choice.run}/{DEPLOY}", "repeats it": choice.command}
    known = [(name, value) for name, value in deploy.items() if value]
    title = "What to deploy" if passed else "The best that was found"
    story = [(_title(step), " ".join(map(sentence, _describe_step(auto, step)))) for step in auto.steps]
    blocks: list[doc.Block] = [
        doc.Prose(criteria, on=doc.SCREEN),
        _table(auto),
        doc.Bullets(_group_remarks(auto), "quiet", doc.SCREEN),
        doc.Pairs(known, on=doc.SCREEN),
        doc.Chart(partial(steps_svg, auto), broad=True),
        *(doc.Prose(text, "quiet") for text in _explanation(auto)),
    ]
    tiles, step = list[doc.Tile](), auto.chosen
    open_issues = step.run.open if step and step.run else []
    if step is not None:
        versus = next(iter(step.scores.values()))
        holds = versus.within_noise or versus.drop <= auto.gate.max_drop
        change, against = figures.change(versus, in_percent=True), f"{label(auto.metric)} against FP32"
        remark = f"points, {figures.noise(versus)}"
        tiles.append(doc.Tile(against, change.text, remark, doc.bad_unless(holds)))
        if (speed := step.speedup) is not None:
            over = f"over {auto.source.baseline_precision}" if auto.source else ""
            tiles.append(doc.Tile("speed", figures.speed_text(speed), over, figures.speed(speed).state))
    done = sum(each.status == "done" for each in auto.steps)
    tiles.append(doc.Tile("steps taken", f"{done} of {len(auto.steps)}", seconds(auto.elapsed_s)))
    return doc.Report(
        doc.page_of_choice(auto, "recipe that holds", AUTO_FILE, *flat(auto.gate.model_dump(), "gate")),
        [
            *([doc.Section("deploy", title, [doc.Pairs(known)])] if known else []),
            doc.Section("steps", "What each step bought", blocks),
            doc.Section("story", "The story", [doc.Pairs(story, definitions=True)]),
        ],
        doc.Verdict(
            ("unclear" if open_issues else "good") if passed else "bad",
            _verdict_title(auto, open_issues),
            " ".join([headline(auto), *map(sentence, reason_lines(auto))]),
            unmet_lines(auto),
            [*map(issue_sentence, open_issues)] if passed else [],
        ),
        lead=[criteria],
        tiles=tiles,
        warnings=auto.warnings,
        notes=[sentence(note) for note in auto.notes],
    )


def _verdict_title(auto: Auto, open_issues: Sequence[GateIssue]) -> str:
    if not auto.choice.passed:
        return "No recipe holds"
    if few := next((issue for issue in open_issues if issue.state == "inconclusive"), None):
        return f"A recipe holds as far as {few.n:,} samples can tell"
    return "A recipe holds, but not all was judged" if open_issues else "A recipe holds"


def headline(auto: Auto) -> str:
    step = auto.chosen
    if step is None or step.recipe is None:
        return "No recipe."
    speed = f", {figures.speed_text(step.speedup)}" if step.speedup else ""
    result = f"{label(auto.metric)} {_difference(step.scores)} against FP32{speed}"
    if auto.choice.passed:
        if step.undecided:
            return f"{step.recipe.name} holds as far as these samples can tell: {result}."
        return f"Deploy {step.recipe.name}: {result}."
    return f"No recipe holds. The best that was found is {step.recipe.name}: {result}."


def unmet_lines(auto: Auto) -> list[str]:
    if auto.chosen is not None:
        return [issue_sentence(issue) for issue in auto.chosen.unmet]
    reasons = _group_names({step.name: explain_step(auto, step) for step in auto.steps})
    return [f"no step finished: {'; '.join(reasons)}"]


def reason_lines(auto: Auto) -> list[str]:
    step, done = auto.chosen, [each for each in auto.steps if each.run]
    if step is None or step.run is None:
        return []
    if step.kind == "unquantized":
        return [f"In INT8 ({step.proposal.base if step.proposal else ''}) it is no faster on this CPU"]
    holding = [each for each in done if each.holds]
    if step.undecided and len(holding) > 1:
        return [
            f"{len(holding)} hold within noise; {step.name} has the smallest upper bound of its loss, "
            f"{100 * step.most_drop:.2f} points. Evaluation data chose it, so its figure is a little too good"
        ]
    if step.holds:
        first = f"{step.name} is the first that holds, of {len(done)} that were tried"
        alone = [] if step.undecided else [f"{step.name} holds"]
        lines = [first] if len(done) > 1 else alone
    else:
        lines = [f"None of the {len(done)} that were tried holds; {step.name} is the nearest to FP32"]
    if (nested := step.run.nested) is not None:
        lines.append(
            "Evaluation data decided how many steps were taken, so its figure on them is a little too good. "
            f"With each sample judged by the choice of the others ({nested.folds} folds) the result is "
            f"{_difference(nested.scores)}; {nested.others:.0%} of the samples got another step's "
            "answers there"
        )
    elif step.holds:
        lines.append("It was the first to be tried, so no evaluation data chose it")
    return lines


def explain_step(auto: Auto, step: AutoStep) -> str:
    if step.failure is not None:
        return step.failure.text
    if step.skipped is None:
        return ""
    before = auto.steps[: auto.steps.index(step)]
    left = max(auto.budget_s - sum(each.seconds for each in before), 0)
    holding = next((each.name for each in before if each.holds), "")
    unmet = next((issue_sentence(each.unmet[0]) for each in reversed(before) if each.unmet), "")
    texts: dict[SkipReason, str] = {
        "holds": f"{holding} holds the gate",
        "no_base": "no shipped recipe finished that it could start from",
        "no_remedy": f"it changes nothing about what is unmet: {unmet}",
        "only_speed": f"only speed is lacking, and {REMEDIES.get(step.kind, '')} cannot give it",
        "faster": "it was not found to be as fast as INT8",
        "budget": (
            f"it needs about {seconds(step.estimate_s or 0)}, as the last step did, and {seconds(left)} of "
            f"{seconds(auto.budget_s)} are left; give a larger --budget, and the same command resumes"
        ),
        "misfit": "its recipe does not fit",
    }
    return texts[step.skipped]


def _proposal_text(step: AutoStep) -> str:
    proposal = step.proposal
    if proposal is None or step.recipe is None:
        return ""
    share = "" if proposal.share is None else f"{proposal.share:.0%} of the noise power of {proposal.base}"
    on = f" on {proposal.samples} train rows"
    if step.kind == "methods":
        return f"Calibration: {proposal.method}, {share or 'the highest SQNR'}{on}"
    if step.kind == "islands":
        count = count_of(len(proposal.linears), "linear")
        return f"{count} out of INT8 leave {share}{on}: {', '.join(proposal.linears)}"
    if step.kind == "search":
        counts = ""
        if step.run:
            linears = count_of(step.run.int8_linears, "linear")
            counts = f"{linears} and {count_of(step.run.int8_attention, 'attention')} in INT8, "
        speed = "" if proposal.speedup is None else f", {proposal.speedup:.2f}x"
        return f"Trial {proposal.trial} of {proposal.trials}: {counts}{share}{on}{speed}"
    if step.kind == "qat":
        return f"{proposal.base}, trained on its train split with FP32 as teacher"
    return step.recipe.description


def _describe_step(auto: Auto, step: AutoStep) -> list[str]:
    lines = [_proposal_text(step), _reason(auto, step)]
    lines += [f"Unmet: {issue_sentence(issue)}" for issue in step.unmet]
    if step.run is not None:
        if step.run.not_timed:
            lines.append(f"No speed-up: {step.run.not_timed.text}")
        lines.append(f"Run: `{step.run.folder}`")
    return [line for line in lines if line]


def _group_remarks(auto: Auto) -> list[str]:
    """Return what is unmet or why a step was skipped, once for all steps that it is true of."""
    texts = {}
    for step in auto.steps:
        if step is not auto.chosen:
            texts[step.name] = _reason(auto, step)
            if step.run:
                texts[step.name] = f"Unmet: {issue_sentence(step.unmet[-1])}" if step.unmet else ""
    return _group_names(texts)


def _group_names(texts: dict[str, str]) -> list[str]:
    names: dict[str, list[str]] = {}
    for name, text in texts.items():
        names.setdefault(text, []).append(name)
    return [f"{', '.join(of)}: {text}" for text, of in names.items() if text]


def _reason(auto: Auto, step: AutoStep) -> str:
    reason = explain_step(auto, step)
    return reason and f"{'Skipped' if step.status == 'skipped' else 'Failed'}: {reason}"


def _criteria_text(auto: Auto) -> str:
    gate = auto.gate
    speed = (
        f", a speed-up of at least {gate.min_speedup:g}x over the same backend" if gate.min_speedup else ""
    )
    return (
        f"Asked: at most {points(gate.max_drop)} of {label(auto.metric)} lost, or no more than noise"
        f"{speed}, within {seconds(auto.budget_s)}; {seconds(auto.elapsed_s)} were spent."
    )


def _table(auto: Auto) -> doc.Table:
    def not_run(step: AutoStep) -> doc.Row | None:
        if step.run is not None:
            return None
        status = doc.Cell(step.status, "quiet" if step.status == "skipped" else "bad")
        return doc.row(doc.Cell(_title(step), short=step.name), status, "", "", "", "", _time_cell(step))

    return doc.table_of(
        auto.steps,
        ("step", lambda step: doc.Cell(_title(step), "good" if step.holds else "bad", short=step.name)),
        (label(auto.metric), lambda step: f"{100 * auto.value(step):.2f}"),
        ("against FP32", lambda step: _change_cell(step.scores)),
        ("against the step before", lambda step: _change_cell(step.run.vs_previous if step.run else {})),
        ("ms", lambda step: figures.latency(step.speedup)),
        (
            f"over {auto.source.baseline_precision}" if auto.source else "speed-up",
            lambda step: figures.speed_text(step.speedup),
        ),
        ("time", _time_cell),
        chosen=lambda step: auto.choice.passed and step is auto.chosen,
        instead=not_run,
        look="full cards",
        screen=(0, 1, 2, 5, 6),
        on=doc.EVERYWHERE,
    )


def _time_cell(step: AutoStep) -> doc.Cell:
    texts = [] if step.estimate_s is None else [f"{seconds(step.estimate_s)} estimated"]
    if step.status == "skipped":
        return doc.Cell(", ".join(texts), short="")
    return doc.Cell(", ".join([*texts, f"{seconds(step.seconds)} taken"]), short=seconds(step.seconds))


def _title(step: AutoStep) -> str:
    return step.name if step.kind == "shipped" else TITLES[step.kind]


def _change_cell(scores: dict[str, Comparison]) -> doc.Cell:
    cells = [figures.change(each, in_percent=True) for each in scores.values()]
    marked = [cell.text if cell.short is None else cell.short for cell in cells]
    return doc.Cell(" / ".join(marked), short=marked[0] if marked else "")


def _difference(scores: dict[str, Comparison]) -> str:
    cells = [figures.change(each, in_percent=True) for each in scores.values()]
    return " and ".join(f"{cell.text} points{f' ({cell.note})' if cell.note else ''}" for cell in cells)


def _explanation(auto: Auto) -> list[str]:
    stages = ", ".join(dict.fromkeys(label(step.run.stage) for step in auto.steps if step.run)) or "none"
    lines = [
        "Differences are in points with one paired standard error; ~ marks those of at most two. They are of "
        f"the last stage that ran: {stages}. In the chart bars are two standard errors, and the dashed line "
        "is what was allowed. An estimate is what the last step took.",
        f"What a step proposes is chosen on at most {auto.data['proposals']} rows of the train split that do "
        "not calibrate. Evaluation data only say whether to take the next step.",
    ]
    if (source := auto.source) is not None:
        shape = f"batch {source.batch}, {source.length} tokens"
        lines.append(
            f"Speed: {source.label}; {shape}, over the {source.baseline_precision} engine of that backend."
        )
    return lines


def steps_svg(auto: Auto) -> str:
    done = [step for step in auto.steps if step.run]
    if not done:
        return ""
    figure, axes = svg.axes_of(0.9 + 0.3 * len(done))
    axes.axvline(0.0, color=svg.MUTED, linewidth=0.8)
    axes.axvline(-100 * auto.gate.max_drop, **svg.LIMIT_LINE)
    for place, step in enumerate(done):
        versus = next(iter(step.scores.values()))
        color, marker = (svg.GREEN, "o") if step.holds else (svg.VERMILLION, "X")
        value, error = -100 * versus.drop, 200 * versus.drop_stderr
        axes.errorbar(value, place, xerr=error, color=color, marker=marker, markersize=6, capsize=3)
    axes.set_yticks(range(len(done)), [f"{'✓' if step.holds else '✗'} {_title(step)}" for step in done])
    axes.set_ylim(len(done) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    title = f"{label(auto.metric)} against FP32, points"
    svg.dress(axes, title, grid="x")
    return svg.svg_of(figure, "auto-steps", f"{title}, of every step that was measured")
