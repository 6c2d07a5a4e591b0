"""Runs with an engine that this CPU runs, and their endpoints without a server."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from qdqbench.quantize.deployment.server.served import Served, open_served
from qdqbench.quantize.engine.build import build
from qdqbench.quantize.pipeline.data_profiles import engine_profiles
from qdqbench.quantize.pipeline.graphs import graph_path
from qdqbench.quantize.pipeline.outcomes import BUILD, write_outcome
from qdqbench.quantize.pipeline.pipeline import STAGES_FILE
from qdqbench.quantize.pipeline.session import Session, read_config
from qdqbench.quantize.tasks.types.encoded import pad
from qdqbench.quantize.utils.files import read_json, sha256, write_json


def with_cpu_engine(run: Path, out: Path) -> Path:
    """A copy of a run whose engine is ONNX Runtime's, of the same graph."""
    shutil.copytree(run, out, ignore=shutil.ignore_patterns("engine", "report*", ".lock"))
    session = Session(read_config(out), out)
    graph = graph_path(session)
    built = build(
        graph,
        out / "engine" / "model.engine",
        backend="onnxruntime",
        profiles=engine_profiles(session)[-1:],
        expected_gemms=[],
        expected_attention=0,
    )
    write_outcome(out / BUILD, built)
    record(out)
    return out


def record(run: Path) -> None:
    """Take files of stages that a test made up for those that the run made."""
    stages = read_json(run / STAGES_FILE)
    for stage in stages["stages"].values():
        there = [name for name in stage["outputs"] if (run / name).is_file()]
        stage["outputs"] = {name: sha256(run / name) for name in there}
    write_json(run / STAGES_FILE, stages)


@dataclass
class Asked:
    """An endpoint whose engine is called in this process."""

    served: Served

    @classmethod
    def of(cls, run: Path, out: Path) -> "Asked":
        return cls(open_served(with_cpu_engine(run, out), fp32=False))

    def __call__(self, **fields):
        served, endpoint = self.served, self.served.endpoint
        request = endpoint.request(**fields)
        columns = request.columns(served.task.text_columns)
        rows = served.encode(columns, getattr(request, "prompt", None))
        assert served.count_rows(columns) == len(rows)
        batch = pad([(n, row.input_ids, row.token_type_ids) for n, row in enumerate(rows)], served.pad_id)[1]
        made = [*served.open_model("engine")(batch)]
        return endpoint.answer.read(request, [*zip(rows, made, strict=True)], served.classes)
