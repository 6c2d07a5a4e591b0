"""Runs with an engine that this CPU runs, and their endpoints without a socket."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

from qdqbench.quantize.deployment.opened import TEXTS_FILE
from qdqbench.quantize.deployment.serve import open_served
from qdqbench.quantize.deployment.serve_options import ServeOptions
from qdqbench.quantize.engine.build import build
from qdqbench.quantize.pipeline.data_profiles import engine_profiles
from qdqbench.quantize.pipeline.graphs import graph_path
from qdqbench.quantize.pipeline.outcomes import BUILD, write_outcome
from qdqbench.quantize.pipeline.pipeline import STAGES_FILE
from qdqbench.quantize.pipeline.session import Session, read_config
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
    shutil.copy(run / "engine" / TEXTS_FILE, out / "engine")
    record(out)
    return out


def record(run: Path) -> None:
    """Take files of stages that a test made up for those that the run made."""
    stages = read_json(run / STAGES_FILE)
    for stage in stages["stages"].values():
        there = [name for name in stage["outputs"] if (run / name).is_file()]
        stage["outputs"] = {name: sha256(run / name) for name in there}
    write_json(run / STAGES_FILE, stages)


class Asked:
    """The endpoint of a run whose engine is in this process; answers have fields as attributes."""

    def __init__(self, run: Path, out: Path) -> None:
        self.run = with_cpu_engine(run, out)

    def __call__(self, **fields):
        from ..support.site import called, within

        options = ServeOptions(no_fp32=True, max_texts=1000)
        served = open_served(self.run, options)

        async def ask(site):
            path = site.front.interfaces.endpoint
            return await called(site, "POST", path, json.dumps(fields).encode())

        status, _, made = within(ask, served, settings=options.settings())
        assert status == 200, made
        return json.loads(json.dumps(made["answers"]), object_hook=lambda each: SimpleNamespace(**each))
