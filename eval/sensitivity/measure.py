"""Which tensor costs the accuracy: every candidate alone in INT8, and everything but it, on training data."""

import functools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from qdqbench.eval.accuracy.draw import described, draw_samples
from qdqbench.eval.accuracy.runners import placed
from qdqbench.eval.accuracy.switches import Switches
from qdqbench.eval.sensitivity import choice as sensitivity_choice
from qdqbench.eval.sensitivity.candidates import Candidate, Choices, choices
from qdqbench.eval.sensitivity.judge import effect_of, limits_noted
from qdqbench.eval.sensitivity.results import (
    CandidateRow,
    Choice,
    CurvePoint,
    Effect,
    Reference,
    Sensitivity,
    ranking,
)
from qdqbench.eval.sensitivity.suffixes import Held, Suffixes, watch_norms
from qdqbench.quantize.calibrate import ptq
from qdqbench.quantize.core import files
from qdqbench.quantize.core.arrays import Float32
from qdqbench.quantize.core.progress import Progress
from qdqbench.quantize.encoders.modules import module_table
from qdqbench.quantize.kinds.encoded import Encoded
from qdqbench.quantize.machine.environment import made_with
from qdqbench.quantize.rundir.ledger import Ledger
from qdqbench.quantize.rundir.session import Session
from qdqbench.quantize.tasks import metrics
from qdqbench.quantize.tasks.batches import sorted_batches
from qdqbench.quantize.tasks.sources import Split

INT8_COST = 1.5  # of an evaluation against one in FP32, for the estimate of the time left
EVERYTHING = "everything"
PARTIAL = "sensitivity.partial.jsonl"


@dataclass
class _Bench:
    """The calibrated model and the draw; made when the first candidate needs it."""

    switches: Switches
    suffixes: Suffixes
    reference: Float32
    states: list[Held]  # at the input of the first layer


@dataclass
class Measurement:
    """One sensitivity run in the folder of its session."""

    session: Session
    samples: int
    progress: Progress = lambda done, total, text: None
    _done: float = field(default=0.0, init=False)

    def run(self) -> Sensitivity:
        """Measure what the ledger lacks, choose a recipe and write it.

        Raises:
            UserError: bad input, too little data, or a folder that cannot be written.
            CheckFailed: weights, scales or logits that are not finite.
        """
        start = time.perf_counter()
        self.ledger  # noqa: B018  (says early whether this goes on)
        fp32 = Reference.model_validate(self._known("fp32", self._reference))
        full = self._judged(EVERYTHING, lambda: self._whole(self.found.everything), INT8_COST)
        self._spanning()
        self._layers()
        rows = [self._row(candidate) for candidate in self.found.candidates]
        order = [row.modules[0] for row in ranking(rows)]
        limit = self.session.recipe.gate.max_drop
        curve = sensitivity_choice.measure_curve(len(order), lambda kept: self._kept(order[:kept]), limit)
        return self._report(fp32, full, rows, curve, time.perf_counter() - start)

    @functools.cached_property
    def found(self) -> Choices:
        """Candidates."""
        model = self.session.fp32_model
        return choices(self.session.recipe, module_table(model), model.base_model_prefix)

    @functools.cached_property
    def draw(self) -> tuple[Split, Encoded]:
        """What is measured on."""
        return draw_samples(self.session, self.samples)

    @functools.cached_property
    def ledger(self) -> Ledger:
        """Finished candidates."""
        config = self.session.config
        settings = {
            "model": self.session.model_sha256,
            "recipe": config.recipe.model_dump(mode="json"),
            "task": config.task.model_dump(mode="json"),
            "data": self.draw[0].fingerprint,
            "samples": self.samples,
            "batch_size": config.batch_size,
            "seed": config.seed,
            **made_with(),
        }
        return Ledger(self.session.folder / PARTIAL, json.loads(json.dumps(settings)))

    @functools.cached_property
    def bench(self) -> _Bench:
        """The model, calibrated, with everything switchable, and its FP32 logits."""
        session, recipe = self.session, self.session.recipe
        model = placed(session.new_int8_model())
        seen = 0

        def show(count: int) -> None:
            nonlocal seen
            seen += count
            self._say(f"calibration, {seen} samples")

        with watch_norms(model, recipe.calibration) as norms:
            # a correction depends on everything that is in INT8, so it cannot be switched with its linear
            settings = recipe.calibration.model_copy(update={"bias_correction": False})
            ptq.calibrate(model, self.found.plan, session.calibration_batches(), settings, show)
            switches = Switches(model, self.found.plan, norms())
        encoded = self.draw[1]
        batches = list(sorted_batches(encoded, session.config.batch_size, pad_id=session.pad_id))
        suffixes = Suffixes(model, batches, encoded)
        self._say("FP32")
        states, reference = suffixes.start()
        return _Bench(switches, suffixes, reference, states)

    def _reference(self) -> dict[str, Any]:
        task, logits = self.session.config.task, self.bench.reference
        gold = metrics.against(task, self.draw[1].gold, logits)
        primary = task.metrics[0]
        return {
            "metric": metrics.compute(task, logits, gold)[primary],
            "stderr": metrics.stderr(task, logits, gold, seed=self.session.config.seed)[primary],
        }

    def _spanning(self) -> None:
        """Candidates of the whole depth."""
        for candidate in self.found.candidates:
            if candidate.start is None:
                self._both(candidate, self._whole, self._whole)

    def _layers(self) -> None:
        """Candidates layer by layer, from two states that advance: all in FP32, and everything in INT8."""
        ordered = [c for c in self.found.candidates if c.start is not None]
        ordered.sort(key=lambda c: c.start or 0)
        if all(key in self.ledger.found for c in ordered for key in self._keys(c)):
            return
        bench, layers = self.bench, len(self.bench.suffixes.layers)
        plain, int8, bench.states = bench.states, bench.states, []
        for layer in range(layers + 1):
            only, all_but = (functools.partial(self._suffix, states, layer) for states in (plain, int8))
            for candidate in (c for c in ordered if bench.suffixes.starts[c.start or 0] == layer):
                self._both(candidate, only, all_but)
            if layer < layers:
                bench.switches.set(())
                plain = bench.suffixes.advance(plain, layer)
                bench.switches.set(self.found.everything)
                int8 = bench.suffixes.advance(int8, layer)

    def _keys(self, candidate: Candidate) -> list[str]:
        keys = [f"only {candidate.key}"]
        return [*keys, f"all but {candidate.key}"] if candidate.units & self.found.everything else keys

    def _both(
        self,
        candidate: Candidate,
        plain: Callable[[frozenset[str]], Float32],
        int8: Callable[[frozenset[str]], Float32],
    ) -> None:
        """Only this in INT8, and everything but this; each from its own reference's states."""
        cost = _cost(candidate, len(self._layer_numbers))
        keys = self._keys(candidate)
        self._judged(keys[0], lambda: plain(candidate.units), cost)
        if len(keys) > 1:
            self._judged(keys[1], lambda: int8(self.found.everything - candidate.units), INT8_COST * cost)

    def _whole(self, on: frozenset[str]) -> Float32:
        self.bench.switches.set(on)
        return self.bench.suffixes.full()

    def _suffix(self, states: list[Held], layer: int, on: frozenset[str]) -> Float32:
        self.bench.switches.set(on)
        return self.bench.suffixes.suffix(states, layer)

    def _kept(self, linears: list[str]) -> CurvePoint:
        attention = sensitivity_choice.attention_of(linears, self.found)
        on = self.found.everything - {*linears, *attention}
        key = f"curve {len(linears)}" if linears else EVERYTHING
        judged = self._judged(key, lambda: self._whole(on), INT8_COST)
        return CurvePoint(kept=len(linears), linears=linears, attention=attention, judged=judged)

    def _judged(self, key: str, logits: Callable[[], Float32], cost: float) -> Effect:
        def value() -> dict[str, Any]:
            config, reference = self.session.config, self.bench.reference
            found = effect_of(config.task, reference, logits(), self.draw[1].gold, config.seed)
            return found.model_dump(mode="json")

        self._say(key)
        found = Effect.model_validate(self._known(key, value))
        self._done += cost
        return found

    def _known(self, key: str, value: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """A finished candidate, or else measured now and added at once."""
        if key not in self.ledger.found:
            self.bench  # noqa: B018  (calibration is not the time of a candidate)
            start = time.perf_counter()
            self.ledger.append(key, value(), time.perf_counter() - start)
        return dict(self.ledger.found[key]["value"])

    def _say(self, text: str) -> None:
        self.progress(self._done, self.evaluations, text)

    @functools.cached_property
    def evaluations(self) -> float:
        """Evaluations in FP32 that take as long as all candidates and the curve without its bisection."""
        depth = len(self._layer_numbers)
        both = {
            key: _cost(c, depth) * (INT8_COST if key.startswith("all") else 1)
            for c in self.found.candidates
            for key in self._keys(c)
        }
        linears = sum(
            c.group == "linear" and bool(c.units & self.found.everything) for c in self.found.candidates
        )
        return sum(both.values()) + INT8_COST * (1 + len(sensitivity_choice.kept_counts(linears)))

    @functools.cached_property
    def _layer_numbers(self) -> set[int]:
        return {c.layer for c in self.found.candidates if c.layer is not None}

    def _row(self, candidate: Candidate) -> CandidateRow:
        values = [Effect.model_validate(self.ledger.found[key]["value"]) for key in self._keys(candidate)]
        return CandidateRow(
            name=candidate.name,
            group=candidate.group,
            kind=candidate.kind,
            layer=candidate.layer,
            modules=list(candidate.modules),
            diagnostic=candidate.diagnostic,
            only=values[0],
            all_but=values[1] if len(values) > 1 else None,
        )

    def _report(
        self, fp32: Reference, full: Effect, rows: list[CandidateRow], curve: list[CurvePoint], wall_s: float
    ) -> Sensitivity:
        session, config = self.session, self.session.config
        point, reached, reason = sensitivity_choice.choose_point(curve, config.recipe.gate.max_drop)
        model = session.fp32_model
        chosen, text = sensitivity_choice.write_up(
            config.recipe, point, self.found, module_table(model), model.base_model_prefix
        )
        files.write_text(session.folder / sensitivity_choice.CHOICE_FILE, text)
        (split, encoded), plan = self.draw, self.found.plan
        return Sensitivity(
            **described(session, split, len(encoded.gold)),
            fp32=fp32,
            full=full,
            int8=[name for name in (*plan.int8, *plan.attention) if name in self.found.everything],
            rows=rows,
            curve=curve,
            choice=Choice(
                kept=point.kept,
                reached=reached,
                reason=reason,
                file=sensitivity_choice.CHOICE_FILE,
                recipe_name=chosen.name,
            ),
            warnings=session.warnings,
            notes=[*session.notes, *self.found.notes, *limits_noted(config.recipe, len(encoded.gold))],
            timings={"candidates_s": self.ledger.seconds, "this_run_s": wall_s},
        )


def _cost(candidate: Candidate, layers: int) -> float:
    """Part of a whole evaluation that a candidate needs."""
    return 1.0 if candidate.start is None else (layers - candidate.start) / max(layers, 1)
