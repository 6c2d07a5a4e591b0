"""The gate of a run: what fails, what was not judged, and what so few samples cannot tell."""

from collections.abc import Iterator

from qdqbench.eval.accuracy.gate import judge, samples_to_tell
from qdqbench.eval.gate.baseline import standing_of
from qdqbench.quantize.core.comparison import Comparison, Gate, OpenQuestion, Speed
from qdqbench.quantize.core.errors import CheckFailed
from qdqbench.quantize.core.limits import INT8_RESIDUALS
from qdqbench.quantize.core.results import Results
from qdqbench.quantize.engine.build import require_int8
from qdqbench.quantize.recipe.schema import Recipe
from qdqbench.quantize.rundir.artifacts import Skipped, backend_of, read_built
from qdqbench.quantize.rundir.session import Session
from qdqbench.quantize.tasks.task import SECOND

SPEED = "min_speedup"  # how what is said of it begins


def gate_of(session: Session, results: Results) -> Gate:
    """Hold the numbers of a run to the gate of its recipe; drops as `gate.judge` does it."""
    asked, found, notes = session.recipe.gate, [], []
    found += [
        f"check: {row.code} at {row.node}: {row.why}" for row in results.findings if row.severity == "error"
    ]
    if results.parity is not None and not results.parity.passed:
        bad = [row.name for row in results.parity.rows if not row.holds]
        found.append(f"ONNX Runtime does not follow the fake-quant model in {', '.join(bad)}")
    if results.verification is not None:
        found += results.verification.failures
    unclear = [*_baseline(session, results, found)]
    last = next((name for name in reversed(results.stages) if results.stages[name].vs_fp32), None)
    for name, said, versus, metric in _drops(session, results):
        drop, error = -versus.delta[metric], versus.delta_stderr[metric]
        judged = judge(drop, error, asked.max_drop)
        needed = samples_to_tell(
            drop, error, asked.max_drop, versus.n, counted=versus.disagreements is not None
        )
        if judged == "fails":
            found.append(said)
            continue
        if judged == "holds within noise":
            notes.append(f"{said}; it holds within noise (two standard errors)")
        if needed is not None and name == last:  # what is deployed; the others answered the same samples
            what = f"whether {name} loses more than {asked.max_drop:g} of {metric}"
            needs = f"about {needed:,} samples, there are {versus.n:,}"
            unclear.append(OpenQuestion(state="cannot tell", what=what, needs=needs))
    found += _not_in_int8(session, results)
    unclear += _engine_not_run(session, results)
    gate = Gate(
        passed=not found,
        max_drop=asked.max_drop,
        min_speedup=asked.min_speedup,
        failures=found,
        notes=notes,
        open=unclear,
    )
    return with_speed(gate, results.speed)


def with_speed(gate: Gate, speed: list[Speed]) -> Gate:
    """The gate with its `min_speedup` judged by the run's bench: each cell must hold."""
    if gate.min_speedup is None:
        return gate
    asked = f"{SPEED} {gate.min_speedup:g}"
    kept = [question for question in gate.open if not question.what.startswith(SPEED)]
    failures = [line for line in gate.failures if not line.startswith(SPEED)]
    if not speed:
        needs = "`qdqbench bench RUN` where the engine will run"
        kept.append(OpenQuestion(state="not judged", what=asked, needs=needs))
    failures += [
        f"{asked} is asked, INT8 is {row.value:.2f}x as fast as {row.over} at {row.cell}"
        for row in speed
        if row.value < gate.min_speedup
    ]
    return gate.model_copy(update={"passed": not failures, "failures": failures, "open": kept})


def cannot_hold(recipe: Recipe) -> str:
    """Why the gate of a run fails here whatever is found; empty where it may hold."""
    backend = backend_of(recipe)
    if recipe.gate.int8_layers != "all" or not recipe.int8_residual or backend in INT8_RESIDUALS:
        return ""
    return (
        f"the gate cannot hold here: {recipe.name} wants INT8 residuals, which no kernel of {backend} reads; "
        f"give --backend {INT8_RESIDUALS[-1]} for an engine for GPUs, take a recipe without residual: int8, "
        "or set gate.int8_layers: null to judge accuracy alone"
    )


def _baseline(session: Session, results: Results, found: list[str]) -> Iterator[OpenQuestion]:
    """Hold FP32 to one answer for everything."""
    row = results.stages.get("fp32")
    found_out = standing_of(session, row) if row else None
    if found_out is not None and found_out.above is False:
        found.append(f"{found_out.said}: {found_out.mend}")
    elif found_out is not None and found_out.above is None:
        needs = "more samples, or a model that was trained on this task"
        what = f"{found_out.said}, whether the model reads its input"
        yield OpenQuestion(state="cannot tell", what=what, needs=needs)


def _drops(session: Session, results: Results) -> Iterator[tuple[str, str, Comparison, str]]:
    """The stage, what is said of the primary metric on each split, the pair, and the metric."""
    primary, most = session.config.task.metrics[0], session.recipe.gate.max_drop
    for name, stage in results.stages.items():
        if name == "ptq" or stage.vs_fp32 is None:  # QAT comes after PTQ
            continue
        for metric, delta in stage.vs_fp32.delta.items():
            if metric.removesuffix(SECOND) == primary:
                error = stage.vs_fp32.delta_stderr[metric]
                said = f"{name}: {metric} is {-delta:.4f} below FP32 (paired standard error {error:.4f})"
                yield name, f"{said}, the gate allows {most}", stage.vs_fp32, metric


def _not_in_int8(session: Session, results: Results) -> Iterator[str]:
    recipe = session.recipe
    if not recipe.quantizes or recipe.gate.int8_layers != "all":
        return
    for built in (results.engine or read_built(session.folder), results.gpu_engine):
        try:
            if isinstance(built, Skipped):
                raise CheckFailed(f"INT8 is not proven, no engine was built: {built.skipped}")
            if built is not None:
                require_int8(built)
        except CheckFailed as error:
            yield str(error)


def _engine_not_run(session: Session, results: Results) -> Iterator[OpenQuestion]:
    """An engine that was built and never gave an answer."""
    row = results.stages.get("engine")
    if results.engine is None or row is None or row.status == "done":
        return
    needs = "copy the run to where its engine can run, and `qdqbench report RUN` there"
    yield OpenQuestion(state="not judged", what=f"the engine did not run ({row.reason})", needs=needs)
