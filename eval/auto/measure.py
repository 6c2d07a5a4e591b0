"""A recipe through a whole run, with the latency of its engine: what every step ends with."""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

from qdqbench.eval.accuracy.logits import Logits, read_logits
from qdqbench.eval.auto.judge import Answers, Judge, drop_lacks, lacks_of
from qdqbench.eval.auto.results import Measured, Step, Wanted
from qdqbench.eval.bench.engines import EngineTimer, Latency, ReadyGraph, alone_on_cpu, alone_on_gpu
from qdqbench.eval.runreport.verdict import last_measured
from qdqbench.eval.runs.pace import Pace, of_run, probed
from qdqbench.eval.runs.run import StageProgress, follow, run_until
from qdqbench.eval.search.latency import measured_source, modelled, runs_here
from qdqbench.eval.search.results import Source
from qdqbench.eval.search.worker import SearchOptions
from qdqbench.quantize.core import files
from qdqbench.quantize.core.errors import CheckFailed, MissingDevice, UserError
from qdqbench.quantize.core.limits import CPU_BACKENDS
from qdqbench.quantize.core.progress import report_phase
from qdqbench.quantize.core.results import RESULTS_FILE, Results, read_results
from qdqbench.quantize.engine.build import attention_count
from qdqbench.quantize.recipe.schema import Recipe, dump_recipe
from qdqbench.quantize.rundir.artifacts import FP16, FP32, backend_of, expected_gemms, graph_path
from qdqbench.quantize.rundir.pipeline import STAGES_FILE, finished, open_run
from qdqbench.quantize.rundir.session import RunConfig, Session

RUN, RECIPE = "run", "run.yaml"  # in the folder of a step
WAITS, WAIT_S = 12, 5.0
Say = Callable[[str], None]


@dataclass
class Ladder:
    """What all steps share: model, data, gate, and the folder with one of its own for each step."""

    config: RunConfig  # with the first recipe
    folder: Path
    wanted: Wanted
    samples: int  # of the train split that proposals are chosen on, at most
    trials: int  # of the search, at most
    options: SearchOptions  # shape and source of latencies
    say: Say = lambda text: None
    identity: str = ""  # of all that steps depend on
    source: Source | None = None
    latency_s: float = 0.0  # that the last one took
    _pace: Pace | None = field(default=None, init=False)

    @cached_property
    def session(self) -> Session:
        """Model and data; nothing is written through it."""
        return Session(self.config, self.folder)

    def session_of(self, recipe: Recipe, folder: Path) -> Session:
        """A session of another recipe in a folder of its own."""
        folder.mkdir(parents=True, exist_ok=True)
        return Session(self.config.model_copy(update={"recipe": recipe}), folder)

    @property
    def rows(self) -> int:
        """Of all evaluation splits."""
        return sum(encoded.rows for _, encoded in self.session.eval_splits.values())

    @property
    def pace(self) -> Pace:
        """What things take here: of the last run, else of a few batches."""
        if self._pace is None:
            self.say("timing a few batches")
            self._pace = probed(self.session)
        return self._pace

    def told(self, name: str) -> Callable[[StageProgress], None]:
        """What the run of a step is at."""

        def progress(now: StageProgress) -> None:
            if now.alarm:
                raise CheckFailed(now.alarm)
            if now.said:
                self.say(now.said)
            elif now.total:
                report_phase("", now.done, now.total)
            else:
                self.say(f"{name}: stage {now.number} of {now.of}, {now.stage}")

        return progress

    def run(self, name: str, recipe: Recipe, before: Sequence[Step]) -> Measured:
        """Take a recipe through a whole run, and time its engine.

        Raises:
            UserError, CheckFailed: the run cannot be done.
        """
        folder = self.folder / name / RUN
        files.write_text(self.folder / name / RECIPE, dump_recipe(recipe))
        session = open_run(self.config.model_copy(update={"recipe": recipe}), folder)
        self._share_baseline(folder, before)
        results = run_until(session, None, follow(session, self.told(name)))
        assert results is not None
        self.say(f"{name}: latency")
        start = time.perf_counter()
        latency, note = self._latency(session)
        self.latency_s = time.perf_counter() - start
        self._learn(results)
        return self._measured(name, session, results, before, latency, note)

    def _measured(  # noqa: PLR0913, PLR0917
        self,
        name: str,
        session: Session,
        results: Results,
        before: Sequence[Step],
        latency: Latency | None,
        note: str,
    ) -> Measured:
        last = last_measured(results)
        if last is None or last[1].vs_fp32 is None:
            raise CheckFailed(f"no stage of {session.folder} was compared with FP32")
        stage, row = last
        fp32, answers = (read_logits(session.folder / "logits" / f"{each}.npz") for each in ("fp32", stage))
        versus = self.judge.versus(fp32, answers)
        tried = [self.judged(step) for step in before if step.measured]
        earlier = next((step for step in reversed(before) if step.measured), None)
        lacks = lacks_of(results, versus, latency, self.wanted)
        return Measured(
            recipe=session.recipe.name,
            recipe_file=f"{name}/{RECIPE}",
            run=f"{name}/{RUN}",
            engine=f"{name}/{RUN}/engine/{results.engine.file}" if results.engine else None,
            int8_linears=len(session.plan.int8),
            int8_attention=len(session.plan.attention),
            stage=stage,
            metrics=row.metrics,
            vs_fp32=versus,
            before=earlier.name if earlier else None,
            vs_before=self.judge.versus(tried[-1].logits, answers) if tried else {},
            latency=latency,
            latency_note=note,
            lacks=lacks,
            final=self.judge.final(fp32, [*tried, Answers(answers, False)], len(tried))
            if tried and not lacks.all
            else None,
        )

    @property
    def judge(self) -> Judge:
        """Of the evaluation data."""
        encoded = {split: each for split, (_, each) in self.session.eval_splits.items()}
        return Judge(self.config.task, encoded, self.wanted.max_drop, self.config.seed)

    def _answers(self, step: Step) -> Logits:
        """What a step that was measured answered in its last stage."""
        assert step.measured is not None
        return read_logits(self.folder / step.measured.run / "logits" / f"{step.measured.stage}.npz")

    def going_on(self, steps: Sequence[Step]) -> None:
        """Learn what things take here from the steps of an interrupted call."""
        for step in steps:
            run = self.folder / step.measured.run if step.measured else None
            if run is not None and (run / RESULTS_FILE).is_file():
                self._learn(read_results(run))

    def judged(self, step: Step) -> Answers:
        """The same, with whether other samples could change that it does not hold."""
        found = step.measured
        assert found is not None
        by_drop = drop_lacks(found.vs_fp32, self.config.task.metrics[0], self.wanted.max_drop)
        return Answers(self._answers(step), bool(found.lacks.all) and not by_drop)

    def _share_baseline(self, folder: Path, before: Sequence[Step]) -> None:
        """FP32 was evaluated by an earlier run: the pipeline sees whether that is what it would do itself."""
        runs = (self.folder / step.name / RUN for step in before)  # one that failed behind it has it too
        source = next((run for run in runs if "baseline" in finished(run)), None)
        if source is None or (folder / STAGES_FILE).exists():
            return
        manifest = files.read_json(source / STAGES_FILE)
        baseline = manifest["stages"]["baseline"]
        for name in baseline["outputs"]:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, folder / name)
        files.write_json(folder / STAGES_FILE, manifest | {"stages": {"baseline": baseline}})

    def _learn(self, results: Results) -> None:
        """What things take here, as this run measured it."""
        count = int(results.data["calibration"]["samples"])
        self._pace = of_run(results, self.rows, count, self.latency_s) or self._pace

    def _latency(self, session: Session) -> tuple[Latency | None, str]:
        """Of the run's engine beside its twin without INT8, or of the cost model; and where it comes from."""
        shape = self.options.batch, self.options.length
        try:
            if not runs_here(session.recipe):
                self.source, estimate = modelled(session, self.options)
                return estimate(session.recipe, session.plan), self.source.label
            self.source = measured_source(session, self.options)
            on_cpu = backend_of(session.recipe) in CPU_BACKENDS
            gemms = expected_gemms(session)
            graph = ReadyGraph(graph_path(session), gemms, attention_count(gemms, session.plan.attention))
            half = session.recipe.precision.compute == "fp16" and not on_cpu
            twin = session.folder / (FP16 if half else FP32)
            with (
                TemporaryDirectory(dir=self.folder, prefix="timing-") as work,
                self._alone(on_cpu),
                EngineTimer(session, twin, Path(work), [shape]) as timer,
            ):
                return timer.measure(graph)[shape], self.source.label
        except (MissingDevice, UserError, CheckFailed) as error:
            return None, str(error)

    @contextmanager
    def _alone(self, on_cpu: bool) -> Iterator[None]:
        """Nobody else times engines here meanwhile; others that do are waited for a while."""
        with ExitStack() as stack:
            for waited in range(WAITS + 1):
                try:
                    stack.enter_context(alone_on_cpu() if on_cpu else alone_on_gpu())
                    break
                except UserError:
                    if waited == WAITS:
                        raise
                    self.say("waiting for another process that times engines")
                    time.sleep(WAIT_S)
            yield
