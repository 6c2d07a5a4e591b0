"""An engine that trtexec built and ran elsewhere: kept, verified and evaluated from its files."""

from pathlib import Path

from qdqbench.eval.accuracy.logits import evaluate_stage
from qdqbench.eval.verify.cases import widest
from qdqbench.eval.verify.engine import ask, judged
from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.core.names import name_list
from qdqbench.quantize.core.results import EngineResult, Verification
from qdqbench.quantize.engine.backend import BuiltEngine
from qdqbench.quantize.engine.build import attention_count, keep
from qdqbench.quantize.engine.layers import read_table
from qdqbench.quantize.engine.sidecar import sidecar_path
from qdqbench.quantize.graph.read import read_model
from qdqbench.quantize.machine.gpu import Gpu
from qdqbench.quantize.rundir.artifacts import expected_gemms, graph_path
from qdqbench.quantize.rundir.outcomes import BUILD, ENGINE, Ran, Skipped, read_built, record
from qdqbench.quantize.rundir.session import Session
from qdqbench.quantize.trtexec.log import read_builder
from qdqbench.quantize.trtexec.plan import FOLDER, SCRIPT, Plan, has_engine, read_plan, require_current
from qdqbench.quantize.trtexec.replay import Replay, missing

NOT_BLOCKS = "trtexec ran the whole network only, and its blocks were not cut out"


def brought(session: Session) -> Path | None:
    """The folder of what trtexec made for this run; None where it made no engine."""
    folder = session.folder / FOLDER
    return folder if has_engine(folder) else None


def build_brought(session: Session, folder: Path) -> list[Path]:
    """Keep the engine that trtexec built as that of the run, and prove its INT8 layers; its files."""
    plan, graph = _plan(folder), graph_path(session)
    if plan.onnx[plan.graph] != graph.name:
        raise UserError(f"{folder} is about {plan.onnx[plan.graph]}, and this run about {graph.name}")
    builder, gemms = read_builder(folder / f"{plan.graph}.log"), expected_gemms(session)
    built = BuiltEngine(
        data=(folder / f"{plan.graph}.engine").read_bytes(),
        layer_lines=[],
        inspector_json=None,
        messages=[],
        backend="tensorrt",
        version=builder.version,
        compute_capability=[builder.compute_capability],
        ahead_of_time=False,
        seconds=builder.seconds,
        notes=[f"the engine was built and run by trtexec on {builder.gpu}: its files are in {folder.name}/"],
        kernels=read_table(folder / f"{plan.graph}.layers.json"),
    )
    path, layers = (
        session.folder / "engine" / graph.with_suffix(".engine").name,
        session.folder / "layers.json",
    )
    result = keep(
        built,
        read_model(graph),
        graph,
        path,
        gpu=Gpu(builder.gpu, builder.compute_capability, None),
        profiles=plan.profiles,
        expected_gemms=gemms,
        expected_attention=attention_count(gemms, session.plan.attention),
        layers_path=layers,
        note=session.warnings.append,
    )
    return [record(session.folder / BUILD, result), path, sidecar_path(path), layers]


def verify_brought(session: Session, folder: Path) -> Verification:
    """Judge the answers that trtexec wrote."""
    plan, built = _plan(folder), read_built(session.folder)
    assert isinstance(built, EngineResult)  # `build_brought` made it
    asked = ask(session, _replay(session, folder, plan), plan.profiles)
    return judged(session, asked, built, [], NOT_BLOCKS)


def evaluate_brought(session: Session, folder: Path) -> list[Path]:
    """Logits of every evaluation sample from the answers that trtexec wrote."""
    plan, built = _plan(folder), read_built(session.folder)
    if isinstance(built, Skipped):
        return [record(session.folder / ENGINE, built)]
    run, gpu = _replay(session, folder, plan), read_builder(folder / f"{plan.graph}.log").gpu
    logits = evaluate_stage(session, "engine", run, batch_size=widest(plan.profiles).max[0])
    done = Ran(detail=f"{built.backend} {built.version} on {gpu}, run by trtexec", memory={})
    return [record(session.folder / ENGINE, done), logits]


def _plan(folder: Path) -> Plan:
    plan = read_plan(folder)
    require_current(folder, plan)
    return plan


def _replay(session: Session, folder: Path, plan: Plan) -> Replay:
    """What answers for the engine.

    Raises:
        UserError: trtexec did not answer all yet.
    """
    if lost := missing(folder, plan):
        raise UserError(
            f"{folder / 'output'} lacks {len(lost)} of {len(plan.answers)} answers ({name_list(lost)}); "
            f"go on with {folder / SCRIPT}"
        )
    return Replay(folder, plan, session.pad_id, list(session.config.task.kind.outputs))
