"""What of a run is served: its engine and FP32 twin, its tokenizer, and how requests become rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from qdqbench.quantize.core.errors import MissingDevice, UserError
from qdqbench.quantize.core.limits import CPU_BACKENDS
from qdqbench.quantize.encoders.load import class_names
from qdqbench.quantize.engine.profiles import LENGTH_STEP, Profile
from qdqbench.quantize.engine.sidecar import check_sidecar
from qdqbench.quantize.kinds.tokens import TOKENS
from qdqbench.quantize.rundir.artifacts import FP32, Skipped, engine_file, graph_path, read_built
from qdqbench.quantize.rundir.session import Session, read_config
from qdqbench.quantize.serve.endpoints import ENDPOINTS, Columns, Endpoint
from qdqbench.quantize.serve.frames import Head
from qdqbench.quantize.tasks.rows import Sample, iter_encoded
from qdqbench.quantize.tasks.sources import Split
from qdqbench.quantize.tasks.task import EMBED, Task

if TYPE_CHECKING:
    import datasets


@dataclass(frozen=True)
class Limits:
    """What one request may ask for, and how long it may take."""

    texts: int = 64
    characters: int = 20_000  # of one text
    body_bytes: int = 1 << 20
    timeout_s: float = 10.0


class _Rows:
    """Columns of a request as `iter_encoded` reads a data set: by slices."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, part: slice) -> Columns:
        return {name: values[part] for name, values in self.columns.items()}


@dataclass(frozen=True)
class Served:
    """A run as it is served."""

    name: str
    task: Task
    endpoint: Endpoint
    classes: tuple[str, ...]
    tokenizer: Any
    max_length: int  # tokens of a row
    engine: Head  # order for a worker, and for one of the FP32 twin
    twin: Head
    profiles: tuple[Profile, ...]
    made_with: str  # backend and its version
    recipe: str
    int8: bool = True  # the recipe quantizes

    @property
    def pad_id(self) -> int:
        """Token id of padding."""
        return int(self.tokenizer.pad_token_id)

    def sizes(self, max_batch: int) -> list[tuple[int, int]]:
        """Longest length of each bucket, doubling, and the most rows that the engine takes of it at once."""
        lengths = [LENGTH_STEP]
        while lengths[-1] < self.max_length:
            lengths.append(min(2 * lengths[-1], self.max_length))
        most = [max(p.max[0] for p in self.profiles if p.max[1] >= length) for length in lengths]
        return [(length, min(rows, max_batch)) for length, rows in zip(lengths, most, strict=True)]

    def encoded(self, columns: Columns) -> list[Sample]:
        """Rows of a request.

        Raises:
            UserError: a question that leaves no room for its context.
        """
        dataset = cast("datasets.Dataset", _Rows(columns))
        split = Split(dataset, "the request", "", 0, ())
        return [*iter_encoded(split, self.task, self.tokenizer, self.max_length)]


def open_served(folder: Path) -> Served:
    """Find what a run directory has to serve.

    Raises:
        UserError: no run directory, no engine in it, or one that is not for this machine.
        MissingDevice: its engine was not built.
    """
    session = Session(read_config(folder), folder)
    built = read_built(folder)
    if isinstance(built, Skipped):
        raise MissingDevice(
            f"{folder} has no engine to serve: {built.skipped}; build one for this CPU with "
            "`qdqbench run ... --backend openvino`"
        )
    engine, graph = engine_file(folder, built), graph_path(session)
    sidecar = check_sidecar(engine, graph)
    task = session.config.task
    endpoint = ENDPOINTS[task.kind.name, len(task.text_columns)]
    if task.kind is TOKENS:  # whose entities need it: loaded now, it holds up no request
        import seqeval.metrics.sequence_labeling  # noqa: F401
    if task.kind.embeds:
        task = EMBED  # each text alone, however the run judged them
    order: Head = {"engine": str(engine), "pad_id": session.pad_id, "outputs": [*task.kind.outputs]}
    on_cpu = sidecar.backend in CPU_BACKENDS
    twin_backend = sidecar.backend if on_cpu else "onnxruntime"
    longest = max(profile.max[1] for profile in sidecar.profiles)
    return Served(
        name=folder.resolve().name,
        task=task,
        endpoint=endpoint,
        classes=tuple(_classes(session)),
        tokenizer=session.tokenizer,
        max_length=min(session.recipe.export.max_length, longest),
        engine=order | {"onnx": str(graph), "fp32": None},
        twin=order | {"onnx": str(folder / FP32), "fp32": twin_backend},
        profiles=tuple(sidecar.profiles),
        made_with=f"{sidecar.backend} {sidecar.version}",
        recipe=session.recipe.name,
        int8=session.recipe.quantizes,
    )


def _classes(session: Session) -> Sequence[str]:
    config = session.config
    if config.task.classes or config.task.kind.embeds:
        return config.task.classes
    return class_names(session.model_name, config.revision, config.task.kind)


def require_twin(served: Served) -> None:
    """Refuse a run without an FP32 twin.

    Raises:
        UserError: the file is not there.
    """
    if not Path(served.twin["onnx"]).is_file():
        raise UserError(
            f"{served.twin['onnx']}, the FP32 model to compare with, is not there; run "
            "`qdqbench export` on the run again, or serve it with --no-fp32"
        )
