"""A run that is opened to answer: its engine and graph by their hashes, and what answers are made with."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer

from qdqbench.quantize.deployment.options import ServeOptions
from qdqbench.quantize.deployment.write import describe_task
from qdqbench.quantize.engine.cpu_runtimes import MOST_ROWS
from qdqbench.quantize.engine.runtime.runners import (
    CompiledEngine,
    EngineRunner,
    open_fp32_graph,
    open_runner,
)
from qdqbench.quantize.engine.sidecar import Sidecar, check_sidecar
from qdqbench.quantize.pipeline.graphs import FP32, graph_path
from qdqbench.quantize.pipeline.outcomes import Skipped, engine_file, read_built
from qdqbench.quantize.pipeline.pipeline import read_finished, require_recorded
from qdqbench.quantize.pipeline.session import Session, read_config
from qdqbench.quantize.standalone.fast import open_fast
from qdqbench.quantize.standalone.model import Model
from qdqbench.quantize.standalone.runtimes import Streams
from qdqbench.quantize.standalone.server.settings import Served
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import MissingDevice, UserError
from qdqbench.quantize.utils.limits import CPU_BACKENDS, BackendName
from qdqbench.quantize.utils.system.cpu import find_cpu
from qdqbench.quantize.utils.system.gpu import count_gpus

TEXTS = 1000  # of each split, on which a faster tokenizer must agree
INPUTS = ["input_ids", "attention_mask", "token_type_ids"]  # of which an engine takes its own
TEXTS_FILE = "texts.json"  # next to an engine
PAGES = Path(__file__).parent / "pages"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


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

    def read_texts(self) -> Any:
        """Return what the build wrote of texts, which spares loading transformers; None: of another build."""
        path = self.engine.path.with_name(TEXTS_FILE)
        name = str(path.relative_to(self.session.folder))
        recorded = any(name in stage.outputs for stage in read_finished(self.session.folder).values())
        found = files.read_json(path) if recorded and path.is_file() else None
        return found if found and found["task"]["max_length"] == self.max_length else None


def describe_texts(session: Session, max_length: int) -> dict[str, Any]:
    """Return the task and the tokenizer of a run, as JSON values."""
    backend: Any = session.tokenizer
    tokenizer = Tokenizer.from_str(backend.backend_tokenizer.to_str())
    tokenizer.no_truncation()  # which the last call of transformers has set
    tokenizer.no_padding()
    return {"task": describe_task(session, max_length), "tokenizer": tokenizer.to_str()}


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
    made_with: str  # backend and its version
    recipe: str
    int8: bool  # the recipe quantizes
    max_drop: float  # of its gate
    task: str
    columns: tuple[str, ...]  # of texts, in the run's own data
    told: Mapping[str, Any]  # as model.json has it
    outputs: tuple[str, ...]
    tokenizer: str  # JSON
    engine: ModelFile
    graph: ModelFile
    fp32: ModelFile | None = None
    fp32_backend: BackendName = "onnxruntime"
    texts: tuple[str, ...] = ()  # of the run
    streams: int = 1  # of an engine on a CPU that answers files

    @classmethod
    def of(cls, folder: Path, *, fp32: bool = False, texts: bool = True) -> "Answering":
        """Read it from a run, with its FP32 model or texts if they are asked for; raises as `open_run`."""
        opened = open_run(folder)
        session, profiles, task = opened.session, opened.sidecar.profiles, opened.session.config.task
        unquantized, backend = folder / FP32, cast("BackendName", opened.sidecar.backend)
        if fp32 and not unquantized.is_file():
            raise UserError(
                f"{unquantized}, the FP32 model to compare with, does not exist; run "
                "`qdqbench export` on the run again, or serve it with --no-fp32"
            )
        most = max(each.max[0] for each in profiles if each.max[1] >= opened.max_length)
        batch = min(MOST_ROWS, most) if backend in CPU_BACKENDS else most
        about = opened.read_texts() or describe_texts(session, opened.max_length)
        told = about["task"] | {"batch": batch, "inputs": INPUTS}
        return cls(
            backend=opened.sidecar.backend,
            made_with=f"{opened.sidecar.backend} {opened.sidecar.version}",
            recipe=session.recipe.name,
            int8=session.recipe.quantizes,
            max_drop=session.recipe.gate.max_drop,
            task=task.name,
            columns=task.text_columns,
            told=told,
            outputs=tuple(task.kind.outputs),
            tokenizer=about["tokenizer"],
            texts=read_texts(folder) if texts else (),
            streams=opened.sidecar.streams,
            engine=opened.engine,
            graph=opened.graph,
            fp32=ModelFile(unquantized, files.sha256(unquantized)) if fp32 else None,
            fp32_backend=backend if backend in CPU_BACKENDS else "onnxruntime",
        )

    def open_model(self, threads: int | None = None, batch: int | None = None) -> Model:
        """Load the engine with a tokenizer, and a faster one where that gives the same tokens."""
        fast, tokenizer = open_fast(self.told, self.tokenizer, self.texts), Tokenizer.from_str(self.tokenizer)
        infer = self.open_infer(threads)
        if isinstance(infer, Streams):
            infer.open(infer.streams)  # what it lacks here shows now
        return Model(self.told, tokenizer, infer, batch, fast)

    def open_infer(self, threads: int | None = None) -> EngineRunner | Streams:
        """Load the engine; on a CPU, without `threads`, in as many streams as the build found the fastest."""
        streams = 1 if threads else min(self.streams, find_cpu().cores)
        if streams == 1:
            return self.open_engine(threads)
        return Streams(partial(self.open_engine, None), streams)

    def open_fp32(self) -> Callable[..., Any]:
        """Load the FP32 model on this CPU."""
        assert self.fp32 is not None
        self.fp32.check()
        return open_fp32_graph(self.fp32.path, self.fp32_backend, self.outputs)

    def open_engine(self, threads: int | None = None, streams: int = 1) -> EngineRunner:
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
            streams=streams,
        )
        run.pads = not isinstance(run.engine, CompiledEngine)  # many texts are shorter than any profile
        for part in parts:
            part.check()  # again: it may have changed while it was read
        return run


def read_texts(folder: Path) -> tuple[str, ...]:
    """Return texts that a run was evaluated on, for a faster tokenizer; none where there is no such."""
    session = Session(read_config(folder), folder)
    task, found = session.config.task, list[Any]()
    if not find_spec("tokie") or len(task.text_columns) > 1:
        return ()
    for name in task.eval_splits:
        split = session.split(name, limit=session.config.limit)
        found += split.dataset[:TEXTS][task.text_columns[0]]
    return tuple(text for text in found if isinstance(text, str))


def open_served(folder: Path, options: ServeOptions) -> Served:
    """Open a run for serving; MissingDevice without an engine, `UserError` where it cannot be served here."""
    answering = Answering.of(folder, fp32=not options.no_fp32, texts=False)
    told, on_cpu = answering.told, answering.backend in CPU_BACKENDS
    if options.watch and (options.no_fp32 or told["kind"] != "classification"):
        raise UserError("--watch compares classes with those of the FP32 model; leave it or --no-fp32 out")
    fp32 = {} if options.no_fp32 else {"fp32": answering.open_fp32}
    return Served(
        name=folder.resolve().name,
        recipe=answering.recipe,
        made_with=answering.made_with,
        told=told,
        tokenizer=answering.tokenizer,
        models={"engine": answering.open_infer, **fp32},
        max_drop=answering.max_drop,
        gpus=0 if on_cpu else max(1, count_gpus()),
        texts=partial(read_texts, folder),
        about={"task": answering.task, "columns": [*answering.columns], "int8": answering.int8},
        pages=dict(_read_pages()),
    )


def _read_pages() -> Iterator[tuple[str, tuple[bytes, str]]]:
    for path in (*sorted(PAGES.iterdir()), files.LOOK):
        name = "" if path.stem == "index" else path.name
        yield f"/{name}", (path.read_bytes(), f"{TYPES[path.suffix]}; charset=utf-8")
