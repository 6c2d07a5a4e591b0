"""Calibration methods side by side: each on train rows that calibration did not see, then on validation."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import ValidationError

from qdqbench.eval.metrics.gate import NOISE
from qdqbench.eval.metrics.runners import placed
from qdqbench.eval.selection.methods.results import MethodRow, Methods
from qdqbench.eval.selection.trials.calibrations import (
    SharedCalibration,
    Switches,
    apply_methods,
    collect_ranges,
    widest_activation,
)
from qdqbench.eval.selection.trials.results import DRAW, CalibrationCost, Trial, failure_of
from qdqbench.eval.selection.trials.store import TRIALS, Trials, described, named_by, write_recipe
from qdqbench.quantize.calibration.bias import correct_biases
from qdqbench.quantize.models.modules import module_table
from qdqbench.quantize.pipeline.session import Session
from qdqbench.quantize.recipe.plan import Plan, resolve
from qdqbench.quantize.recipe.schema import Recipe
from qdqbench.quantize.recipe.sections import Calibration
from qdqbench.quantize.utils.errors import CheckFailed, UserError
from qdqbench.quantize.utils.progress import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel

METHODS = ("max", "percentile/99.9", "percentile/99.99", "percentile/99.999", "mse", "entropy")
ALPHA = 0.65  # of SmoothQuant where the recipe does not smooth
EXTRA = 64  # channels for copies where the recipe does not split


def list_sections(own: Calibration, methods: Sequence[str], smooths: Sequence[str]) -> list[Calibration]:
    """Return the calibration sections to compare, the recipe's own first, none twice.

    Args:
        methods: of activations; none: `METHODS` and the recipe's own.
        smooths: "none", "gain" or an alpha; none: "none" and the recipe's own, or else 0.65.

    Returns:
        The recipe's own, every method with every smoothing, and, where nothing was named, the recipe's own
        with one thing changed: weights_method, bias_correction, outlier_channel_splitting, smooth (gain).

    Raises:
        UserError: not a method, or not a way to smooth.
    """
    chosen = [_parse_smooth(text) for text in smooths]
    chosen = chosen or ["none", ALPHA if own.smoothing == "none" else own.smoothing]
    changes: list[dict[str, Any]] = [
        {"method": method, "smoothing": smoothing}
        for smoothing in chosen
        for method in methods or dict.fromkeys((*METHODS, own.method))
    ]
    if not methods and not smooths:
        changes += [
            {"weights_method": "max" if own.weights_method == "mse" else "mse"},
            {"bias_correction": not own.bias_correction},
            {"outlier_channel_splitting": 0 if own.outlier_channel_splitting else EXTRA},
            {"smoothing": ALPHA if own.smoothing == "gain" else "gain"},
        ]
    sections = [own, *(_change(own, each) for each in changes)]
    return [section for at, section in enumerate(sections) if section not in sections[:at]]


def _parse_smooth(text: str) -> float | str:
    try:
        return text if text in {"none", "gain"} else float(text)
    except ValueError:
        return text  # is refused with every other that does not fit


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


@dataclass(frozen=True)
class MethodCase:
    recipe: Recipe
    plan: Plan

    @property
    def section(self) -> Calibration:
        return self.recipe.calibration

    @property
    def key(self) -> str:
        return self.section.model_dump_json()

    @property
    def passes(self) -> str:
        """Return what cases that share their passes over the data have in common."""
        each = [(name, scaling.weights, scaling.smoothing) for name, scaling in self.plan.scaling.items()]
        return repr((self.section.outlier_channel_splitting, each))

    @property
    def prepares(self) -> bool:
        """Return whether calibration goes through the data once before."""
        smooths = any(each.smoothing != "none" for each in self.plan.scaling.values())
        return smooths or self.section.outlier_channel_splitting > 0


def list_cases(session: Session, methods: Sequence[str], smooths: Sequence[str]) -> list[MethodCase]:
    """Return sections with their plans; of those that resolve to the same for this recipe, the first.

    Raises:
        UserError: a wrong name, or a recipe that puts nothing into INT8.
    """
    recipe = session.recipe
    sections = list_sections(recipe.calibration, methods, smooths)
    require_quantized(recipe)
    model = session.fp32_model
    modules, prefix = module_table(model), model.base_model_prefix
    plan = resolve(recipe, modules, prefix)
    if not plan.family.splittable(plan.int8):
        sections = [
            section for section in sections if not section.outlier_channel_splitting
        ]  # nothing to split
    cases: dict[Any, MethodCase] = {}
    for section in sections:
        variant = recipe.model_copy(update={"calibration": section})
        plan = resolve(variant, modules, prefix)
        key = tuple(plan.scaling.items()), section.bias_correction, section.outlier_channel_splitting
        cases.setdefault(key, MethodCase(variant, plan))
    if same := len(sections) - len(cases):
        session.notes.append(
            f"{same} combinations come to the same as another under the rules of recipe "
            f"{recipe.name} and are left out"
        )
    return list(cases.values())


def group_cases(cases: Iterable[MethodCase]) -> list[list[MethodCase]]:
    """Return the cases in groups that share their passes over the calibration data."""
    groups: dict[str, list[MethodCase]] = {}
    for case in cases:
        groups.setdefault(case.passes, []).append(case)
    return list(groups.values())


@dataclass
class MethodComparison:
    session: Session
    samples: int
    methods: Sequence[str] = ()
    smooths: Sequence[str] = ()
    progress: Progress = lambda done, total, text: None
    evaluates: bool = True  # False: evaluation data are not read
    _done: float = field(default=0.0, init=False)  # samples that went through a model
    _total: float = field(default=1.0, init=False)

    @cached_property
    def trials(self) -> Trials:
        path = self.session.folder / f"methods.{TRIALS}"
        return Trials(self.session, self.samples, path, evaluates=self.evaluates, advance=self._advance)

    def run(self) -> Methods:
        """Measure every case that the store lacks, and write the recipe of the best one.

        Raises:
            UserError: bad input, too little data, or no case that works.
        """
        start, trials = time.perf_counter(), self.trials
        cases = list_cases(self.session, self.methods, self.smooths)
        groups, earlier = group_cases(cases), trials.store.seconds
        firsts = [group[0] for group in groups]
        passes = sum(1 + case.prepares + bool(case.plan.attention) for case in firsts)  # and of the softmax
        drawn = self.session.recipe.calibration.samples
        self._total = trials.rows * (1 + len(cases)) + drawn * passes
        trials.fp32  # noqa: B018  (before anything is calibrated)
        self._done = trials.rows
        tried: dict[str, Trial] = {}
        for group in groups:
            tried |= self._try_group(group)
        return self._report([tried[case.key] for case in cases], earlier + time.perf_counter() - start)

    def _advance(self, rows: int, text: str) -> None:
        self._done += rows
        self.progress(self._done, self._total, text)

    def _try_group(self, group: list[MethodCase]) -> dict[str, Trial]:
        """Try cases that share their passes; those are made where a case is left to measure."""
        session, known = self.session, self.trials.store.trials
        pending = [case for case in group if case.key not in known]
        tried = {case.key: known[case.key] for case in group if case.key in known}
        if tried:
            self._advance(len(tried) * self.trials.rows, "resuming")
        if not pending:
            self._advance(session.recipe.calibration.samples, "resuming")  # at least
        else:
            start, first = time.perf_counter(), pending[0]
            try:
                shared = collect_ranges(
                    placed(session.new_int8_model()),
                    first.plan,
                    session.calibration_batches(),
                    first.section,
                    lambda rows: self._advance(rows, f"calibration, smooth {first.section.smoothing}"),
                )
            except (CheckFailed, UserError) as error:
                failed = {case.key: self._draft(case, failure=failure_of(error)) for case in pending}
                return tried | failed
            seconds = time.perf_counter() - start
            for case in pending:
                tried[case.key] = self._try_case(case, shared, seconds)
        for trial in tried.values():
            notes = trial.calibration.notes if trial.calibration else []
            session.notes += [note for note in notes if note not in session.notes]
        return tried

    def _draft(self, case: MethodCase, **fields: Any) -> Trial:
        given = case.section == self.session.recipe.calibration
        return Trial(recipe=case.recipe, origin="given" if given else "calibration", **fields)

    def _try_case(self, case: MethodCase, shared: SharedCalibration, seconds: float) -> Trial:
        def calibrate() -> tuple["PreTrainedModel", CalibrationCost]:
            start = time.perf_counter()
            model, states = apply_methods(shared, case.plan)
            if case.section.bias_correction:
                correct_biases(model, case.plan.int8, self.session.calibration_batches())
            spent = seconds + time.perf_counter() - start
            # the same arithmetic, with weights rounded once and not in every batch
            Switches(model, case.plan, {}).set({*case.plan.int8, *case.plan.attention, *case.plan.residual})
            name, ratio = widest_activation(states) or (None, None)
            cost = CalibrationCost(
                seconds=spent, amax_over_rms=ratio, amax_over_rms_at=name, notes=shared.notes
            )
            return model, cost

        return self.trials.measure(case.key, self._draft(case), calibrate)

    def _rows(self, tried: list[Trial]) -> list[MethodRow]:
        done = [trial for trial in tried if not trial.failure]
        if not done:
            failure = tried[0].failure
            assert failure is not None
            raise UserError(f"no combination gave a model that works; the recipe as it is: {failure.text}")
        best = min(done, key=lambda trial: trial.divergence)
        rows = []
        for trial in tried:
            row = MethodRow(trial=trial.model_copy(update={"divergences": []}))
            if not trial.failure:
                more = np.array(trial.divergences) - np.array(best.divergences)
                row.best, row.above_best = trial is best, float(more.mean())
                row.above_best_stderr = float(more.std(ddof=1) / np.sqrt(len(more)))
                row.ties = row.above_best <= NOISE * row.above_best_stderr
            rows.append(row)
        return rows

    def _report(self, tried: list[Trial], wall_s: float) -> Methods:
        session, trials, recipe = self.session, self.trials, self.session.recipe
        rows = self._rows(tried)
        best = next(row.section for row in rows if row.best)
        name = named_by(recipe.name, "calibrated")
        write_recipe(recipe.model_copy(update={"name": name, "calibration": best}), session.folder)
        if any(rule.refines for rule in recipe.rules):
            session.notes.append("what the recipe's rules say on calibration holds in every row")
        about = described(session, trials.drawn[0], len(trials.draw.gold))
        splits = [split for split in trials.encoded if split != DRAW]
        about["data"]["evaluation"] = {split: len(trials.encoded[split].gold) for split in splits}
        return Methods(
            **about,
            fp32={split: trials.fp32_scores(split) for split in splits},
            rows=rows,
            warnings=session.warnings,
            notes=session.notes,
            timings={"total_s": wall_s},
        )
