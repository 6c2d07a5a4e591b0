"""Calibration methods side by side: each on train rows that calibration did not see, then on validation."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from qdqbench.eval.accuracy.compare import compare
from qdqbench.eval.accuracy.divergence import divergence
from qdqbench.eval.accuracy.draw import described, draw_samples
from qdqbench.eval.accuracy.gate import NOISE
from qdqbench.eval.accuracy.runners import placed, predict, torch_runner
from qdqbench.eval.accuracy.switches import Switches
from qdqbench.eval.methods.cases import Case, cases_of, groups_of
from qdqbench.eval.methods.kept import keep_answers, kept_answers, open_ledger
from qdqbench.eval.methods.results import METHODS_RECIPE, MethodCost, MethodRow, Methods, Scores, SplitResult
from qdqbench.eval.methods.sections import write_up_method
from qdqbench.eval.methods.shared import SharedCalibration, calibrated, collect_ranges, widest_weight
from qdqbench.quantize.calibrate.bias import correct_biases
from qdqbench.quantize.core import files
from qdqbench.quantize.core.arrays import Float32, Float64
from qdqbench.quantize.core.errors import CheckFailed, UserError
from qdqbench.quantize.core.progress import Progress
from qdqbench.quantize.kinds.encoded import Encoded
from qdqbench.quantize.rundir.ledger import Ledger
from qdqbench.quantize.rundir.session import Session
from qdqbench.quantize.tasks import metrics
from qdqbench.quantize.tasks.sources import Split

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class Comparing:
    """One comparison in the folder of its session."""

    session: Session
    samples: int
    methods: Sequence[str] = ()
    smooths: Sequence[str] = ()
    progress: Progress = lambda done, total, text: None
    validates: bool = True  # False: evaluation data are not looked at
    _done: float = field(default=0.0, init=False)
    _total: float = field(default=1.0, init=False)
    # divergence of each sample of the draw, by row
    _each: dict[int, Float64] = field(default_factory=dict, init=False)
    _before: float = field(default=0.0, init=False)  # seconds of earlier calls

    def run(self) -> Methods:
        """Measure every row that the ledger lacks, and write the recipe of the best one.

        Raises:
            UserError: bad input, too little data, or no row that works.
        """
        start = time.perf_counter()
        cases = cases_of(self.session, self.methods, self.smooths)
        self._before = self.ledger.seconds
        self._count(cases)
        self._ask_fp32()
        found: dict[int, MethodCost | str] = {}
        for group in groups_of(cases):
            found |= self._group({at: cases[at] for at in group})
        return self._report(cases, found, self._before + time.perf_counter() - start)

    @cached_property
    def _drawn(self) -> tuple[Split, Encoded]:
        return draw_samples(self.session, self.samples)

    @property
    def draw(self) -> Encoded:
        """What is compared on."""
        return self._drawn[1]

    @cached_property
    def ledger(self) -> Ledger:
        """Finished rows."""
        judges = self.session.eval_splits.values() if self.validates else ()
        fingerprints = [self._drawn[0].fingerprint, *(split.fingerprint for split, _ in judges)]
        return open_ledger(self.session, self.samples, fingerprints)

    @cached_property
    def _evaluated(self) -> dict[str, Encoded]:
        """Evaluation splits, which judge."""
        splits = self.session.eval_splits if self.validates else {}
        return {name: encoded for name, (_, encoded) in splits.items()}

    def _ask_fp32(self) -> None:
        """Answers of FP32, kept beside the ledger."""
        asked, folder = {"": self.draw, **self._evaluated}, self.session.folder
        answers = kept_answers(folder, self.ledger)
        if answers is None:
            start = time.perf_counter()
            answers = self._answers(asked)
            keep_answers(folder, self.ledger, answers, time.perf_counter() - start)
        else:
            self._done += sum(encoded.rows for encoded in asked.values())
        self.reference = answers.pop("")
        self.reference_eval = answers

    def _answers(self, asked: dict[str, Encoded]) -> dict[str, Float32]:
        model = placed(self.session.fp32_model)
        try:
            return {name: self._logits(model, encoded, "FP32") for name, encoded in asked.items()}
        except CheckFailed as error:
            raise UserError(
                f"model {self.session.model_name} gives NaN or infinite logits in FP32, so there is nothing "
                "to compare with; train or save it again"
            ) from error

    def _count(self, cases: list[Case]) -> None:
        """Samples that will be run through a model, for the progress bar."""
        judged = self.draw.rows + sum(encoded.rows for encoded in self._evaluated.values())
        firsts = [cases[group[0]] for group in groups_of(cases)]
        passes = sum(1 + case.prepares + bool(case.plan.attention) for case in firsts)  # and of the softmax
        self._total = judged * (1 + len(cases)) + self.session.recipe.calibration.samples * passes

    def _say(self, count: int, text: str) -> None:
        self._done += count
        self.progress(self._done, self._total, text)

    def _logits(self, model: "PreTrainedModel", encoded: Encoded, text: str) -> Float32:
        session = self.session
        return predict(
            torch_runner(model),
            encoded,
            pad_id=session.pad_id,
            batch_size=session.config.batch_size,
            stage=text,
            progress=lambda count: self._say(count, text),
        )

    def _group(self, cases: dict[int, Case]) -> dict[int, MethodCost | str]:
        """Rows that share their passes over the data; what failed is a sentence.

        Passes are made again where a row is left to measure: what they leave is the model itself.
        """
        found: dict[int, MethodCost | str] = {
            at: self._known(at, case) for at, case in cases.items() if case.key in self.ledger.found
        }
        left = {at: case for at, case in cases.items() if at not in found}
        if not left:
            self._done += self.session.recipe.calibration.samples  # at least
            return found
        try:
            shared, seconds = self._pass(next(iter(left.values())))
        except (CheckFailed, UserError) as error:
            return found | dict.fromkeys(left, str(error))
        for at, case in left.items():
            start = time.perf_counter()
            try:
                cost = self._row(at, case, shared, seconds)
            except CheckFailed as error:
                found[at] = str(error)
                continue
            row = {
                "cost": cost.model_dump(mode="json"),
                "each": self._each[at].tolist(),
                "notes": shared.notes,
            }
            self.ledger.append(case.key, row, time.perf_counter() - start)
            found[at] = cost
        return found

    def _known(self, at: int, case: Case) -> MethodCost:
        """A row that an earlier call measured."""
        row = self.ledger.found[case.key]["value"]
        self._each[at] = np.array(row["each"], np.float64)
        self._note(row["notes"])
        self._say(self.draw.rows + sum(e.rows for e in self._evaluated.values()), "what is known")
        return MethodCost.model_validate(row["cost"])

    def _note(self, notes: list[str]) -> None:
        self.session.notes += [note for note in notes if note not in self.session.notes]

    def _pass(self, case: Case) -> tuple[SharedCalibration, float]:
        start = time.perf_counter()
        shared = collect_ranges(
            placed(self.session.new_int8_model()),
            case.plan,
            self.session.calibration_batches(),
            case.section,
            lambda count: self._say(count, f"calibration, smooth {case.section.smooth}"),
        )
        self._note(shared.notes)
        return shared, time.perf_counter() - start

    def _row(self, at: int, case: Case, shared: SharedCalibration, seconds: float) -> MethodCost:
        start = time.perf_counter()
        model, states = calibrated(shared, case.plan)
        if case.section.bias_correction:
            correct_biases(model, case.plan.int8, self.session.calibration_batches())
        seconds += time.perf_counter() - start
        # the same arithmetic, with weights rounded once and not in every batch
        Switches(model, case.plan, {}).set({*case.plan.int8, *case.plan.attention, *case.plan.residual})
        config, gold = self.session.config, self.draw.gold
        logits = self._logits(model, self.draw, case.section.method)
        self._each[at] = each = divergence(config.task, self.reference, logits, gold)
        wide = widest_weight(states)
        judged = {}
        for name, encoded in self._evaluated.items():
            answers = self._logits(model, encoded, case.section.method)
            fp32 = self.reference_eval[name]
            judge = metrics.against(config.task, encoded.gold, fp32)
            judged[name] = SplitResult(
                metrics=metrics.compute(config.task, answers, judge),
                vs_fp32=compare(config.task, fp32, answers, judge, seed=config.seed),
            )
        return MethodCost(
            divergence=float(each.mean()),
            divergence_stderr=_stderr(each),
            above_best=0.0,  # these three are known when all rows are there
            above_best_stderr=0.0,
            ties=True,
            sqnr_db=compare(config.task, self.reference, logits, gold, seed=config.seed).sqnr_db,
            amax_over_rms=wide[1] if wide else None,
            amax_over_rms_at=wide[0] if wide else None,
            validation=judged,
            calibration_s=seconds,
        )

    def _rows(self, cases: list[Case], found: dict[int, MethodCost | str]) -> list[MethodRow]:
        done = {at: each for at, each in found.items() if isinstance(each, MethodCost)}
        if not done:
            raise UserError(f"no combination gave a model that works; the recipe as it is: {found[0]}")
        best = min(sorted(done), key=lambda at: done[at].divergence)
        rows = []
        for at, case in enumerate(cases):
            measured, failure = done.get(at), found[at] if at not in done else None
            if measured is not None:
                more = self._each[at] - self._each[best]
                above, error = float(more.mean()), _stderr(more)
                update = {"above_best": above, "above_best_stderr": error, "ties": above <= NOISE * error}
                measured = measured.model_copy(update=update)
            rows.append(
                MethodRow(
                    **case.section.model_dump(include=set(MethodRow.model_fields)),
                    recipe=at == 0,
                    best=at == best,
                    measured=measured,
                    failure=None if failure is None else str(failure),
                )
            )
        return rows

    def _report(self, cases: list[Case], found: dict[int, MethodCost | str], wall_s: float) -> Methods:
        session, config = self.session, self.session.config
        rows = self._rows(cases, found)
        best = next(case.section for case, row in zip(cases, rows, strict=True) if row.best)
        chosen, text = write_up_method(config.recipe, best)
        files.write_text(session.folder / METHODS_RECIPE, text)
        if any(rule.refines for rule in config.recipe.rules):
            session.notes.append("what the recipe's rules say on calibration holds in every row")
        about = described(session, self._drawn[0], len(self.draw.gold))
        judges = self._evaluated.items()
        about["data"]["evaluation"] = {name: len(encoded.gold) for name, encoded in judges}
        return Methods(
            **about,
            fp32={name: self._scores(name) for name in self._evaluated},
            rows=rows,
            recipe_name=chosen.name,
            warnings=session.warnings,
            notes=session.notes,
            timings={"total_s": wall_s},
        )

    def _scores(self, name: str) -> Scores:
        task, seed = self.session.config.task, self.session.config.seed
        logits = self.reference_eval[name]
        gold = metrics.against(task, self.session.gold[name], logits)
        return Scores(
            metrics=metrics.compute(task, logits, gold),
            stderr=metrics.stderr(task, logits, gold, seed=seed),
            n=len(gold),
        )


def _stderr(each: Float64) -> float:
    return float(each.std(ddof=1) / np.sqrt(len(each)))
