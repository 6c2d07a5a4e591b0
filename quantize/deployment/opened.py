"""A run that is opened to answer: its engine and graph by their hashes, and what answers are made with."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from qdqbench.quantize.deployment.write import describe_task
from qdqbench.quantize.engine.runtime.runners import CompiledEngine, open_runner
from qdqbench.quantize.engine.sidecar import Sidecar, check_sidecar
from qdqbench.quantize.pipeline.graphs import graph_path
from qdqbench.quantize.pipeline.outcomes import Skipped, engine_file, read_built
from qdqbench.quantize.pipeline.pipeline import require_recorded
from qdqbench.quantize.pipeline.session import Session, read_config
from qdqbench.quantize.standalone.model import Model
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import MissingDevice, UserError

# of a batch, by backend: those that need no padding are filled by more, and a CPU by a few rows
MOST_ROWS = {"cuda": 1024, "openvino": 32, "onnxruntime": 32}
INPUTS = ["input_ids", "attention_mask", "token_type_ids"]  # of which an engine takes its own


@dataclass(frozen=True)
class ModelFile:
    """A file of the run with its hash, so that no other model ever answers."""

    path: Path
    sha256: str

    def check(self) -> None:
        if not self.path.is_file() or files.sha256(self.path) != self.sha256:
            raise UserError(f"{self.path} changed since it was opened; start the same command again")


@dataclass(frozen=True)
class OpenedRun:
    """A run whose files are those that it recorded."""

    session: Session
    engine: ModelFile
    graph: ModelFile
    sidecar: Sidecar

    @property
    def max_length(self) -> int:
        """Tokens of a row."""
        longest = max(profile.max[1] for profile in self.sidecar.profiles)
        return min(self.session.recipe.export.max_length, longest)


def open_run(folder: Path) -> OpenedRun:
    """Open a run; MissingDevice without an engine, `UserError` where a file changed since the run made it."""
    session = Session(read_config(folder), folder)
    built = read_built(folder)
    if isinstance(built, Skipped):
        raise MissingDevice(
            f"{folder} has no engine that answers: {built.skipped}; build one for this CPU with "
            "`qdqbench run ... --backend openvino`"
        )
    engine, graph = engine_file(folder, built), graph_path(session)
    require_recorded(session, graph)
    sidecar = check_sidecar(engine, graph)
    parts = ModelFile(engine, sidecar.engine_sha256), ModelFile(graph, sidecar.onnx_sha256)
    return OpenedRun(session, *parts, sidecar)


@dataclass(frozen=True)
class Answering:
    """Everything that a process needs to answer with a run."""

    backend: str
    recipe: str
    columns: tuple[str, ...]  # of texts, in the run's own data
    told: Mapping[str, Any]  # as model.json has it
    outputs: tuple[str, ...]
    tokenizer: str  # JSON
    engine: ModelFile
    graph: ModelFile

    @classmethod
    def of(cls, folder: Path) -> "Answering":
        """Read it from a run; raises as `open_run`."""
        opened = open_run(folder)
        session, profiles, task = opened.session, opened.sidecar.profiles, opened.session.config.task
        tokenizer: Any = session.tokenizer
        most = max(each.max[0] for each in profiles if each.max[1] >= opened.max_length)
        batch = min(MOST_ROWS.get(opened.sidecar.backend, most), most)
        return cls(
            backend=opened.sidecar.backend,
            recipe=session.recipe.name,
            columns=task.text_columns,
            told=describe_task(session, opened.max_length) | {"batch": batch, "inputs": INPUTS},
            outputs=tuple(task.kind.outputs),
            tokenizer=tokenizer.backend_tokenizer.to_str(),
            engine=opened.engine,
            graph=opened.graph,
        )

    def open_model(self, threads: int | None = None, batch: int | None = None) -> Model:
        """Load the engine, on a CPU with so many threads."""
        parts = (self.engine, self.graph)
        for part in parts:
            part.check()
        run = open_runner(
            self.engine.path,
            self.graph.path,
            pad_id=self.told["pad_id"],
            runtime_cache=self.engine.path.with_name("runtime.cache"),
            outputs=self.outputs,
            threads=threads,
        )
        run.pads = not isinstance(run.engine, CompiledEngine)  # many texts are shorter than any profile
        for part in parts:
            part.check()  # again: it may have changed while it was read
        return Model(self.told, Tokenizer.from_str(self.tokenizer), run, batch)
