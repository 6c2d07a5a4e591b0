"""A run as it is served: its engine and FP32 model, its tokenizer, and how requests become rows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from qdqbench.quantize.deployment.server.batches import Run, Sizes
from qdqbench.quantize.deployment.server.endpoints import ENDPOINTS, Columns, Endpoint
from qdqbench.quantize.deployment.server.settings import ModelName
from qdqbench.quantize.engine.profiles import LENGTH_STEP, Profile
from qdqbench.quantize.engine.sidecar import check_sidecar
from qdqbench.quantize.models.load import read_class_names
from qdqbench.quantize.pipeline.artifacts import FP32, Skipped, engine_file, graph_path, read_built
from qdqbench.quantize.pipeline.session import Session, read_config
from qdqbench.quantize.tasks.rows import OVERLAP, Sample, iter_encoded
from qdqbench.quantize.tasks.sources import Split
from qdqbench.quantize.tasks.task import EMBED, Task
from qdqbench.quantize.tasks.types.tokens import TOKENS
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import MissingDevice, UserError
from qdqbench.quantize.utils.limits import CPU_BACKENDS, BackendName

if TYPE_CHECKING:
    import datasets

FP32_ROWS = 4  # of a batch: the FP32 model is for comparing single texts


@dataclass
class _Rows:
    """Columns of a request as `iter_encoded` reads a data set: by slices."""

    columns: Columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, part: slice) -> Columns:
        return {name: values[part] for name, values in self.columns.items()}


@dataclass(frozen=True)
class ModelFile:
    """A file of the run with its hash, so that no other model ever answers."""

    path: Path
    sha256: str

    def check(self) -> None:
        if not self.path.is_file() or files.sha256(self.path) != self.sha256:
            raise UserError(f"{self.path} changed since the server started; start the server again")


@dataclass(frozen=True)
class Served:
    """A run as it is served; each worker process gets a copy."""

    name: str
    task: Task
    classes: tuple[str, ...]
    tokenizer: Any
    max_length: int  # tokens of a row
    profiles: tuple[Profile, ...]
    made_with: str  # backend and its version
    recipe: str
    engine: ModelFile
    graph: ModelFile
    fp32: ModelFile
    fp32_backend: BackendName = "onnxruntime"
    int8: bool = True  # the recipe quantizes

    @property
    def endpoint(self) -> Endpoint:
        return ENDPOINTS[self.task.kind.name, len(self.task.text_columns)]

    @property
    def pad_id(self) -> int:
        return int(self.tokenizer.pad_token_id)

    def sizes(self, model: ModelName, max_batch: int) -> Sizes:
        """Return the longest length of each bucket, doubling, and the most rows that a batch of it has."""
        lengths = [LENGTH_STEP]
        while lengths[-1] < self.max_length:
            lengths.append(min(2 * lengths[-1], self.max_length))
        if model == "fp32":
            return [(length, min(max_batch, FP32_ROWS)) for length in lengths]
        most = [max(p.max[0] for p in self.profiles if p.max[1] >= length) for length in lengths]
        return [(length, min(rows, max_batch)) for length, rows in zip(lengths, most, strict=True)]

    def open_model(self, model: ModelName) -> Run:
        """Open the engine or the FP32 model.

        Raises:
            UserError, MissingDevice: as of `runtime.opened`, or a file changed since the server started.
        """
        from qdqbench.quantize.engine.runtime.runners import open_fp32_graph, open_runner

        if TOKENS is self.task.kind:  # whose entities need it: loaded now, it delays no request
            import seqeval.metrics.sequence_labeling  # noqa: F401
        parts = [self.fp32] if model == "fp32" else [self.engine, self.graph]
        first, outputs = parts[0].path, [*self.task.kind.outputs]
        for part in parts:
            part.check()
        if model == "fp32":
            run: Run = open_fp32_graph(first, self.fp32_backend, outputs)
        else:
            cache = first.with_name("runtime.cache")
            run = open_runner(
                first, self.graph.path, pad_id=self.pad_id, runtime_cache=cache, outputs=outputs
            )
        for part in parts:
            part.check()  # again: it may have changed while it was read
        return run

    def encode(self, columns: Columns) -> list[Sample]:
        """Return the rows of a request.

        Raises:
            UserError: a question leaves no room for its context.
        """
        split = Split(cast("datasets.Dataset", _Rows(columns)), "the request", "", 0, ())
        return [*iter_encoded(split, self.task, self.tokenizer, self.max_length)]

    def count_rows(self, columns: Columns) -> int:
        """Return how many rows `encode` makes, without making the windows of long contexts."""
        texts = [columns[name] for name in self.task.text_columns]
        if not self.task.kind.windows:
            return len(texts[0])
        rows, special = 0, self.tokenizer.num_special_tokens_to_add(pair=True)
        options = {"add_special_tokens": False, "verbose": False}
        both = (self.tokenizer(column, **options)["input_ids"] for column in texts)
        for question, context in zip(*both, strict=True):
            room = self.max_length - special - len(question)
            step = room - self.max_length // OVERLAP
            rows += 1 + (max(0, math.ceil((len(context) - room) / step)) if step > 0 else 0)  # encode refuses
        return rows


def open_served(folder: Path, *, fp32: bool = True) -> Served:
    """Open a run directory for serving.

    Raises:
        UserError: no run directory, no engine in it, one that is not for this machine, or no FP32 model.
        MissingDevice: its engine was not built.
    """
    session = Session(read_config(folder), folder)
    built = read_built(folder)
    if isinstance(built, Skipped):
        raise MissingDevice(
            f"{folder} has no engine to serve: {built.skipped}; build one for this CPU with "
            "`qdqbench run ... --backend openvino`"
        )
    engine, graph, unquantized = engine_file(folder, built), graph_path(session), folder / FP32
    sidecar = check_sidecar(engine, graph)
    if fp32 and not unquantized.is_file():
        raise UserError(
            f"{unquantized}, the FP32 model to compare with, does not exist; run "
            "`qdqbench export` on the run again, or serve it with --no-fp32"
        )
    config, task = session.config, session.config.task
    classes: Sequence[str] = task.classes
    if not classes and not task.kind.embeds:
        classes = read_class_names(session.model_name, config.revision, task.kind)
    on_cpu = sidecar.backend in CPU_BACKENDS
    longest = max(profile.max[1] for profile in sidecar.profiles)
    return Served(
        name=folder.resolve().name,
        task=EMBED if task.kind.embeds else task,  # each text alone, however the run was evaluated
        classes=tuple(classes),
        tokenizer=session.tokenizer,
        max_length=min(session.recipe.export.max_length, longest),
        profiles=tuple(sidecar.profiles),
        made_with=f"{sidecar.backend} {sidecar.version}",
        recipe=session.recipe.name,
        engine=ModelFile(engine, sidecar.engine_sha256),
        graph=ModelFile(graph, sidecar.onnx_sha256),
        fp32=ModelFile(unquantized, files.sha256(unquantized) if fp32 else ""),
        fp32_backend=cast("BackendName", sidecar.backend) if on_cpu else "onnxruntime",
        int8=session.recipe.quantizes,
    )
