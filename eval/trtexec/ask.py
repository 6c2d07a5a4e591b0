"""What trtexec is to do for a run: every question of verification and evaluation, and the shapes to time."""

from pathlib import Path

import onnx

from qdqbench.eval.accuracy.logits import read_logits
from qdqbench.eval.accuracy.runners import predict
from qdqbench.eval.bench.lanes import random_sets
from qdqbench.eval.verify.cases import widest
from qdqbench.eval.verify.engine import ask
from qdqbench.quantize.core import files
from qdqbench.quantize.core.errors import UserError
from qdqbench.quantize.graph.read import read_model
from qdqbench.quantize.rundir.artifacts import FP16, FP32, INT8, backend_of, engine_profiles, graph_path
from qdqbench.quantize.rundir.session import Session
from qdqbench.quantize.trtexec.plan import FOLDER, Case, Feeds, Graph, Inputs, Plan, write_plan
from qdqbench.quantize.trtexec.replay import Recorder, case_of

GRAPHS: dict[Graph, str] = {"int8": INT8, "fp16": FP16, "fp32": FP32}


def require_tensorrt(session: Session) -> None:
    """Refuse a run whose graph is for something else.

    Raises:
        UserError: its engine is of another backend.
    """
    backend = backend_of(session.recipe)
    if backend != "tensorrt":
        raise UserError(
            f"the engine of {session.folder} is one of {backend}, and trtexec builds those of TensorRT; "
            "start the run with --backend tensorrt"
        )


def plan_for(session: Session) -> tuple[Path, bool]:
    """Write the folder that goes to a machine with trtexec.

    Args:
        session: with its files up to the graph, and the answers of the models that it is held to.

    Returns:
        The folder, and whether it was written: one of the same plan stays with what trtexec made there.

    Raises:
        UserError: the run is for another backend, or samples do not fit.
    """
    require_tensorrt(session)
    graph, folder, profiles = graph_path(session), session.folder / FOLDER, engine_profiles(session)
    present = {name: path for name, path in GRAPHS.items() if (session.folder / path).is_file()}
    kind = next(name for name, path in present.items() if path == graph.name)
    inputs = input_shapes(read_model(graph))
    answers = _recorded(session, list(inputs))
    timed, feeds = _timed(session, list(inputs))
    plan = Plan(
        graph=kind,
        onnx=present,
        sha256={name: files.sha256(session.folder / path) for name, path in present.items()},
        inputs=inputs,
        profiles=profiles,
        answers=answers.cases,
        timed=timed,
    )
    return folder, write_plan(folder, plan, {**answers.feeds, **feeds})


def input_shapes(model: onnx.ModelProto) -> Inputs:
    """Shape of each graph input by name; -1 where it is dynamic."""
    weights = {each.name for each in model.graph.initializer}
    return {
        value.name: [d.dim_value if d.HasField("dim_value") else -1 for d in value.type.tensor_type.shape.dim]
        for value in model.graph.input
        if value.name not in weights
    }


def _recorded(session: Session, inputs: list[str]) -> Recorder:
    """Every batch that verification and evaluation feed to an engine."""
    profiles = engine_profiles(session)
    fp32 = read_logits(session.folder / "logits" / "fp32.npz")
    _, encoded = next(iter(session.eval_splits.values()))
    width = next(iter(fp32.values())).shape[1]
    run = Recorder(profiles, inputs, session.pad_id, width, by_token=encoded.positions is not None)
    ask(session, run, profiles)
    for _, encoded in session.eval_splits.values():
        predict(run, encoded, pad_id=session.pad_id, batch_size=widest(profiles).max[0], stage="engine")
    return run


def _timed(session: Session, inputs: list[str]) -> tuple[dict[str, Case], dict[str, Feeds]]:
    """The opt shape of each profile, with random tokens as a bench has them."""
    profiles = engine_profiles(session)
    cases: dict[str, Case] = {}
    feeds: dict[str, Feeds] = {}
    for batch, length in dict.fromkeys(profile.opt for profile in profiles):
        made = random_sets(
            inputs=inputs,
            batch=batch,
            length=length,
            vocabulary=int(session.fp32_model.config.vocab_size),
            sets=1,
            seed=session.config.seed,
        )
        name = f"b{batch}s{length}"
        cases[name], feeds[name] = case_of(made[0], profiles), made[0]
    return cases, feeds
