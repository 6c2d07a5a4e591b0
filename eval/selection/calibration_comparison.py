"""Calibration methods side by side: `qdqbench compare-calibration` (docs/how-to/compare-calibration.md)."""

import dataclasses
import time
from collections.abc import Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import ValidationError

from qdqbench.eval.metrics import figures
from qdqbench.eval.metrics.compare import compute_decibels
from qdqbench.eval.metrics.runners import placed
from qdqbench.eval.selection.trials.calibrations import (
    QuantizerToggles,
    SharedCalibration,
    apply_methods,
    collect_ranges,
    describe_cost,
    reconstruct_calibrated,
)
from qdqbench.eval.selection.trials.results import DRAW, CalibrationCost, DrawRecord, Origin, Scores, Trial
from qdqbench.eval.selection.trials.store import TRIALS, Trials, named_by, write_recipe
from qdqbench.quantize.calibration import ptq
from qdqbench.quantize.calibration.techniques.channel_splitting import EXTRA
from qdqbench.quantize.calibration.techniques.smoothing import ALPHA
from qdqbench.quantize.models.modules import module_table
from qdqbench.quantize.pipeline.session import Session
from qdqbench.quantize.recipe.plan import Plan, resolve
from qdqbench.quantize.recipe.schema import Recipe
from qdqbench.quantize.recipe.sections import Calibration, Reconstruction
from qdqbench.quantize.report import document as doc
from qdqbench.quantize.report import svg
from qdqbench.quantize.report.formats import cleaned, label, seconds, sentence
from qdqbench.quantize.tasks.metrics import NOISE
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.progress import reporter
from qdqbench.quantize.utils.schema import Strict, field

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RECONSTRUCTION = "reconstruction"  # a method that trains, so it takes minutes: only where it is named
METHODS = ("max", "percentile/99.9", "percentile/99.99", "percentile/99.999", "mse", "entropy")


class CalibrationRow(Strict):
    """One calibration section."""

    trial: Trial = field("Recipe with another calibration section.")
    best: bool = field("True for the highest SQNR on the draw.", default=False)
    below_best_db: float | None = field("SQNR of the best row minus this one's; or null.", default=None)
    below_best_db_stderr: float | None = field("Paired standard error of `below_best_db`.", default=None)
    ties: bool = field("True if `below_best_db` is at most two standard errors.", default=False)

    @property
    def section(self) -> Calibration:
        assert self.trial.recipe is not None
        return self.trial.recipe.calibration

    @property
    def is_given(self) -> bool:
        return self.trial.origin == "given"

    @property
    def name(self) -> str:
        section = self.section
        parts = [section.method]
        parts += [f"smooth {section.smoothing}"] if section.smoothing != "none" else []
        parts += [f"weights {section.weights_method}"] if section.weights_method != "max" else []
        parts += ["bias correction"] if section.bias_correction else []
        parts += [f"split {section.outlier_channel_splitting}"] if section.outlier_channel_splitting else []
        parts += ["centering"] if section.centering is True else []
        parts += ["row-max"] if section.softmax_scale == "row-max" else []
        parts += [RECONSTRUCTION] if self.trial.recipe and self.trial.recipe.reconstruction else []
        return ", ".join(parts)


class CalibrationComparison(DrawRecord):
    """Everything that `qdqbench compare-calibration` measured."""

    fp32: dict[str, Scores] = field("Metrics of FP32 by evaluation split.")
    rows: list[CalibrationRow] = field("Calibration sections, the recipe's own first.")
    timings: dict[str, float] = field("`total_s`: time of the whole comparison in seconds.")

    @property
    def best(self) -> CalibrationRow:
        return next(row for row in self.rows if row.best)

    @property
    def given(self) -> CalibrationRow:
        return self.rows[0]


def list_sections(own: Calibration, methods: Sequence[str], smooths: Sequence[str]) -> list[Calibration]:
    """Return the calibration sections to compare, the recipe's own first, none twice.

    Without names they are all `METHODS`, smoothed and not, and the recipe's own with one thing changed.
    `RECONSTRUCTION` has the recipe's own section, so that it adds none.

    Raises:
        UserError: not a method, or not a way to smooth.
    """
    named = [name for name in methods if name != RECONSTRUCTION]
    if methods and not (named or smooths):
        return [own]
    smoothings = [_parse_smooth(text) for text in smooths] or [
        "none",
        ALPHA if own.smoothing == "none" else own.smoothing,
    ]
    changes: list[dict[str, Any]] = [
        {"method": method, "smoothing": smoothing}
        for smoothing in smoothings
        for method in named or dict.fromkeys((*METHODS, own.method))
    ]
    if not methods and not smooths:
        changes += [
            {"weights_method": "max" if own.weights_method == "mse" else "mse"},
            {"bias_correction": not own.bias_correction},
            {"outlier_channel_splitting": 0 if own.outlier_channel_splitting else EXTRA},
            {"smoothing": ALPHA if own.smoothing == "gain" else "gain"},
            {"centering": not own.centering},
        ]
        if own.softmax_scale == "row-max":
            changes.append({"softmax_scale": "min-error"})
    sections = [own, *(_change(own, each) for each in changes)]
    return [section for at, section in enumerate(sections) if section not in sections[:at]]


def _parse_smooth(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text  # a word; refused with every other that does not fit


def _change(own: Calibration, changes: dict[str, Any]) -> Calibration:
    try:
        return Calibration.model_validate(own.model_dump() | changes)
    except ValidationError as error:
        first = error.errors()[0]
        if first["loc"][0] == "smoothing":
            raise UserError(
                f"--smoothing {changes['smoothing']} must be none, gain or an alpha from 0 to 1, such as 0.65"
            ) from error
        raise UserError(f"--method: {first['msg'].removeprefix('Value error, ')}") from error


def require_quantized(recipe: Recipe) -> None:
    if not recipe.quantizes:
        raise UserError(
            f"recipe {recipe.name} puts nothing into INT8, so there is nothing to calibrate; take another"
        )


@dataclasses.dataclass(frozen=True)
class CalibrationCase:
    recipe: Recipe
    plan: Plan

    @property
    def section(self) -> Calibration:
        return self.recipe.calibration

    @property
    def key(self) -> str:
        return self.section.model_dump_json() + RECONSTRUCTION * (self.recipe.reconstruction is not None)

    @property
    def passes(self) -> str:
        """Return what is equal for cases that share their passes over the calibration data."""
        scaling = [(name, each.weights, each.smoothing) for name, each in self.plan.scaling.items()]
        section = self.section
        return repr((section.outlier_channel_splitting, section.centering, section.softmax_scale, scaling))


def list_cases(session: Session, methods: Sequence[str], smooths: Sequence[str]) -> list[CalibrationCase]:
    recipe, sections = session.recipe, list_sections(session.calibration, methods, smooths)
    require_quantized(recipe)
    model = session.fp32_model
    modules, prefix = module_table(model), model.base_model_prefix
    plan = resolve(recipe, modules, prefix)
    if not plan.family.splittable(plan.int8):
        sections = [section for section in sections if not section.outlier_channel_splitting]
    cases: dict[Any, CalibrationCase] = {}
    for section in sections:
        variant = recipe.model_copy(update={"calibration": section})
        plan = resolve(variant, modules, prefix)
        others = section.bias_correction, section.outlier_channel_splitting, section.centering
        key = tuple(plan.scaling.items()), section.softmax_scale, *others
        cases.setdefault(key, CalibrationCase(variant, plan))
    if same := len(sections) - len(cases):
        session.notes.append(
            f"{same} combinations come to the same as another under the rules of recipe "
            f"{recipe.name} and are left out"
        )
    found = list(cases.values())
    if RECONSTRUCTION in methods:
        trained = found[0].recipe.model_copy(update={"reconstruction": Reconstruction()})
        found.append(CalibrationCase(trained, found[0].plan))
    return found


@dataclasses.dataclass
class CalibrationMeasurement:
    session: Session
    samples: int
    methods: Sequence[str] = ()
    smooths: Sequence[str] = ()
    evaluates: bool = True  # False: evaluation data are not read
    _shared: tuple[str, SharedCalibration] | None = None  # of the last passes

    @cached_property
    def trials(self) -> Trials:
        path = self.session.folder / f"methods.{TRIALS}"
        return Trials(self.session, self.samples, path, evaluates=self.evaluates)

    def run(self) -> CalibrationComparison:
        start, session, trials = time.perf_counter(), self.session, self.trials
        cases, earlier = list_cases(session, self.methods, self.smooths), trials.store.seconds
        reporter().begin("FP32", 0, 1 + len(cases))
        trials.fp32  # noqa: B018  (before anything is calibrated)
        tried: dict[str, Trial] = {}
        passes = [case.passes for case in cases]
        for done, case in enumerate(sorted(cases, key=lambda case: passes.index(case.passes)), 1):
            reporter().begin(f"calibration, smooth {case.section.smoothing}", done, 1 + len(cases))
            origin: Origin = "given" if case is cases[0] else "calibration"
            draft = Trial(recipe=case.recipe, origin=origin)
            trial = tried[case.key] = trials.measure(case.key, draft, partial(self._calibrate, case))
            notes = trial.calibration.notes if trial.calibration else []
            session.notes += [note for note in notes if note not in session.notes]
        return self._summarize([tried[case.key] for case in cases], earlier + time.perf_counter() - start)

    def _reconstruct(self, case: CalibrationCase) -> tuple["PreTrainedModel", CalibrationCost]:
        start, session, settings = time.perf_counter(), self.session, case.recipe.reconstruction
        assert settings is not None
        twin, batches = placed(session.new_int8_model()), session.calibration_batches()
        record = ptq.calibrate(twin, case.plan, batches, case.section)
        model, notes = reconstruct_calibrated(session, settings, case.plan, record, self.samples)
        return model, describe_cost(time.perf_counter() - start, record.quantizers, notes)

    def _calibrate(self, case: CalibrationCase) -> tuple["PreTrainedModel", CalibrationCost]:
        if case.recipe.reconstruction:
            return self._reconstruct(case)
        session = self.session
        if self._shared is None or self._shared[0] != case.passes:
            self._shared = None  # never two at a time
            model, batches = placed(session.new_int8_model()), session.calibration_batches()
            self._shared = case.passes, collect_ranges(model, case.plan, batches, case.section)
        start, shared = time.perf_counter(), self._shared[1]
        model, states = apply_methods(shared, case.plan)
        if case.section.bias_correction:
            ptq.correct(model, case.plan, session.calibration_batches())
        spent = shared.seconds + time.perf_counter() - start
        # the same arithmetic, with weights rounded once and not in every batch
        QuantizerToggles(model, case.plan, {}).set(
            {*case.plan.int8, *case.plan.attention, *case.plan.residual}
        )
        return model, describe_cost(spent, states, shared.notes)

    def _summarize(self, tried: list[Trial], wall_s: float) -> CalibrationComparison:
        session, trials, recipe = self.session, self.trials, self.session.recipe
        rows = compare_trials(tried)
        best = next(row.trial.recipe for row in rows if row.best)
        assert best is not None
        changed = {"calibration": best.calibration, RECONSTRUCTION: best.reconstruction}
        name = named_by(recipe.name, "calibrated")
        write_recipe(recipe.model_copy(update={"name": name, **changed}), session.folder)
        if any(rule.refines for rule in recipe.rules):
            session.notes.append("what the recipe's rules say on calibration holds in every row")
        about = trials.describe()
        splits = [split for split in trials.encoded if split != DRAW]
        about["data"]["evaluation"] = {split: len(trials.encoded[split].gold) for split in splits}
        fp32 = {split: trials.fp32_scores(split) for split in splits}
        return CalibrationComparison(**about, fp32=fp32, rows=rows, timings={"total_s": wall_s})


def compare_trials(tried: list[Trial]) -> list[CalibrationRow]:
    done = [trial for trial in tried if not trial.failure]
    if not done:
        failure = tried[0].failure
        assert failure is not None
        raise UserError(f"no combination gave a model that works; the recipe as it is: {failure.text}")
    best = min(done, key=lambda trial: trial.noise_power)
    rows = []
    for trial in tried:
        row = CalibrationRow(trial=trial.model_copy(update={"noise_powers": []}), best=trial is best)
        if not trial.failure:
            pair = np.array(trial.noise_powers), np.array(best.noise_powers)
            below, error = row.below_best_db, row.below_best_db_stderr = compute_decibels(*pair)
            equal = trial.noise_power == best.noise_power
            row.ties = equal if below is None or error is None else below <= NOISE * error
        rows.append(row)
    return rows


def calibration_report(methods: CalibrationComparison) -> doc.Report:
    methods = cleaned(methods)
    wall = seconds(methods.timings["total_s"])
    settings = [("batch size", str(methods.batch_size)), ("time of all rows", wall)]
    failures = [
        f"failed: {each.name}: {each.trial.failure.text}" for each in methods.rows if each.trial.failure
    ]
    charts = [doc.Chart(partial(_draw_split, methods, split)) for split in (DRAW, *list(methods.fp32)[:1])]
    data, best = methods.data, methods.best.trial
    caption = (
        f"The best row is chosen on {data['split']} data only: by the SQNR of the logits on "
        f"{data['samples']} rows that calibration ({data['calibration']} rows) did not see. Validation "
        + ("is the judge and chose nothing." if methods.fp32 else "was not looked at.")
    )
    explanation = (
        "SQNR is the power of FP32's logits over that of the difference, the noise power; ± is one standard "
        "error over the samples. = marks rows that are not worse than the best one by more than two standard "
        "errors, paired by sample.",
        "Against FP32 is INT8 minus FP32 in fake-quant with the paired standard error; within noise (~) are "
        "differences of at most two of them. amax / rms is the largest of an activation. Time is that of the "
        "passes over the calibration data, also where rows share them, and of what the row adds.",
    )
    blocks: list[doc.Block] = [
        _table(methods),
        doc.Prose(f"{caption} ~ marks differences within noise.", on=doc.SCREEN),
        doc.Bullets(failures, "bad", doc.SCREEN),
        *(doc.Prose(text, "quiet") for text in (caption, *explanation)),
    ]
    share = _share(methods, best)
    of = f"{share} of the recipe's noise power" * bool(share)
    tiles = [doc.Tile("SQNR of the best", figures.sqnr(best.scores[DRAW]).text, of)]
    for split in methods.fp32:
        versus, title = best.scores[split], f"{_metric(methods, split)} against FP32"
        tiles.append(doc.Tile(title, figures.change(versus).text, figures.noise(versus)))
    return doc.Report(
        doc.page_of_choice(methods, "calibration methods", "methods.json", *settings),
        [
            doc.Section("methods", "Methods", blocks),
            doc.Section("charts", "Charts", [doc.Columns([[chart] for chart in charts])], on=doc.PAGE),
        ],
        doc.Verdict("", "The best method", calibration_headline(methods)),
        tiles=[*tiles, doc.Tile("methods", str(len(methods.rows)), wall)],
        warnings=methods.warnings,
        notes=[sentence(note) for note in methods.notes],
    )


def calibration_headline(methods: CalibrationComparison) -> str:
    best, given = methods.best, methods.given
    text = f"Best: {best.name}, with an SQNR of {figures.sqnr(best.trial.scores[DRAW]).text}"
    if best is given:
        text += "; that is the recipe as it is."
    elif given.trial.failure:
        text += "; the recipe as it is failed."
    else:
        noise = ", which is within noise" if given.ties else ""
        text += f" against {figures.sqnr(given.trial.scores[DRAW]).text} of the recipe as it is{noise}."
    scores = [
        f"{_metric(methods, split)} {figures.change(versus).text}"
        for split in methods.fp32
        for versus in [best.trial.scores[split]]
    ]
    return f"{text} Against FP32 on validation: {', '.join(scores)}." if scores else text


def _metric(methods: CalibrationComparison, split: str) -> str:
    of = f" ({split.removeprefix('validation_')})" if len(methods.fp32) > 1 else ""
    return f"{label(methods.metric)}{of}"


def _share(methods: CalibrationComparison, trial: Trial) -> str:
    given = methods.given.trial
    return "" if given.failure else figures.noise_share(trial.scores[DRAW], given.scores[DRAW])


def _table(methods: CalibrationComparison) -> doc.Table:
    metrics = [_metric(methods, split) for split in methods.fp32]
    pairs = [name for metric in metrics for name in (metric, f"{metric} against FP32")]
    return doc.Table(
        ["method", "SQNR", "of the recipe's noise power", *pairs, "time", "amax / rms"],
        [_row(methods, each) for each in methods.rows],
        look="full sortable",
        screen=(0, 1, *range(4, 3 + len(pairs), 2)),
        on=doc.EVERYWHERE,
    )


def _row(methods: CalibrationComparison, method: CalibrationRow) -> doc.Row:
    states = [("best", method.best), ("=", method.ties and not method.best), ("the recipe", method.is_given)]
    marks = ", ".join(mark for mark, holds in states if holds)
    name = doc.Cell(method.name, note=marks, short=f"{method.name} ({marks})" if marks else None)
    trial = method.trial
    if trial.failure:
        return doc.row(name, doc.Cell(f"failed: {trial.failure.text}", "bad", short="failed"))
    assert trial.calibration is not None
    widest = trial.calibration.amax_over_rms
    scores = []
    for split, fp32 in methods.fp32.items():
        versus = trial.scores[split]
        value = fp32.metrics[methods.metric] + versus.delta[methods.metric]
        scores += [doc.Cell(f"{value:.4f}"), figures.change(versus)]
    return doc.row(
        name,
        figures.sqnr(trial.scores[DRAW]),
        _share(methods, trial),
        *scores,
        f"{trial.calibration.seconds:.0f} s",
        None if widest is None else f"{widest:.0f}",
        chosen=method.best,
    )


def _shorten(name: str) -> str:
    for word, short in (("percentile/", "p"), ("weights mse", "w. mse"), ("bias correction", "bias")):
        name = name.replace(word, short)
    return name


def _draw_split(methods: CalibrationComparison, split: str) -> str:
    rows = [(each, each.trial.scores[split]) for each in methods.rows if not each.trial.failure]
    is_draw = split == DRAW
    title = f"{label(methods.metric)} against FP32, {split}"
    figure, axes = svg.axes_of(0.7 + 0.24 * len(rows))
    if is_draw:
        title = "SQNR of the logits, dB, train rows"
        rows = [each for each in rows if each[1].sqnr_db is not None]
        points = [(versus.sqnr_db, versus.sqnr_db_stderr or 0.0) for _, versus in rows]
    else:
        points = [(-versus.drop, versus.drop_stderr) for _, versus in rows]
        axes.axvline(0.0, color=svg.MUTED, linewidth=0.8)
    for place, ((method, _), (value, error)) in enumerate(zip(rows, points, strict=True)):
        color, marker = (svg.GREEN, "*") if method.best else (svg.BLUE, "o")
        axes.errorbar(value, place, xerr=error, color=color, marker=marker, markersize=5, capsize=3)
    labels = [f"{_shorten(method.name)}{' (recipe)' if method.is_given else ''}" for method, _ in rows]
    axes.set_yticks(range(len(rows)), labels)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.ticklabel_format(axis="x", style="sci", scilimits=(-2, 3))
    axes.locator_params(axis="x", nbins=5)
    axes.tick_params(axis="y", length=0)
    svg.dress(axes, f"{title}; star: best", grid="x")
    return svg.svg_of(figure, "methods-sqnr" if is_draw else "methods-delta", title)
