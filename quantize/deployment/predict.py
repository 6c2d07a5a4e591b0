"""Answer files of any number of texts with a run: in parts, on every device, resumed after a kill.

Each part of the rows is one file until all are there. So what a killed call finished is kept, and no row is
lost or doubled.
"""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet

from qdqbench.quantize.deployment.opened import Answering
from qdqbench.quantize.deployment.options import PredictOptions
from qdqbench.quantize.deployment.rows import ROWS, Rows, choose_columns, open_rows
from qdqbench.quantize.standalone.answers import (
    ANSWERS,
    Answer,
    Answers,
    classify,
    embed,
    extract,
    list_classes,
    score,
    tag,
)
from qdqbench.quantize.standalone.texts import MOST_WINDOWS, Refused
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import UserError
from qdqbench.quantize.utils.limits import CPU_BACKENDS
from qdqbench.quantize.utils.names import name_list
from qdqbench.quantize.utils.progress import reporter
from qdqbench.quantize.utils.schema import Strict, field, read
from qdqbench.quantize.utils.system.cpu import usable_cores
from qdqbench.quantize.utils.system.gpu import count_gpus
from qdqbench.quantize.utils.system.process import end_with_parent

JOB = "job.json"  # in the folder of parts
AHEAD = 2  # parts that wait for each process
NUMBER, TEXT, LABELS = pa.float64(), pa.string(), pa.list_(pa.string())
# Fields of an answer that are columns, by what makes it; None: a number for each label.
FIELDS: dict[Answers, dict[str, Any]] = {
    classify: {"label": TEXT, "scores": None},
    score: {"score": NUMBER},
    embed: {"embedding": pa.list_(pa.float32())},
    tag: {"words": LABELS},
    extract: {"answer": TEXT, "score": NUMBER, "score_without_answer": NUMBER},
    list_classes: {"labels": LABELS, "scores": None},
}
COLUMNS = {"embedding": "embedding", "words": "predicted_labels"}  # the others have `predicted_` before them


class Job(Strict):
    """Identity of a folder of parts: a part of another job is no part of this one."""

    schema_version: Literal[1] = 1
    engine_sha256: str
    graph_sha256: str
    files: list[tuple[str, int, int]]  # path, bytes, time of the last change in ns
    text_columns: list[str]
    keep: list[str]
    prompt: str
    limit: int | None
    rows: int  # of a part


class Predicted(Strict):
    """Output of `predict`."""

    out: str = field("Path of the written file.")
    rows: int = field("Rows in it.")
    resumed: int = field("Rows that an earlier call had answered.")
    unanswered: int = field("Rows without an answer (null): a text is null, or takes too many windows.")
    seconds: float = field("Time from the first row to the last answer, without loading the engine.")
    rows_per_second: float = field("Rows of this call in that time.")
    processes: int = field("Processes, each with an engine.")
    columns: list[str] = field("Names of the columns.")


class Predictor:
    """Callable that answers a table of texts, row by row: the function of `map_batches` in Ray Data."""

    def __init__(  # noqa: PLR0913
        self,
        run: str | Path | Answering,
        *,
        text_columns: Sequence[str] | None = None,
        keep: Sequence[str] | None = None,
        prompt: str | None = None,
        threads: int | None = None,
        batch: int | None = None,
    ) -> None:
        """Open a run.

        Args:
            run: run directory.
            text_columns: names of the columns of texts (default: those of the task).
            keep: columns to pass on (default: all).
            prompt: before each text of a model of embeddings (default: as the run was evaluated).
            threads: of the engine, on a CPU.
            batch: most rows of a batch.

        Raises:
            UserError: the run cannot be used.
            MissingDevice: no engine, or no device for it.
        """
        self._answering = run if isinstance(run, Answering) else Answering.of(Path(run))
        self._model = self._answering.open_model(threads, batch)
        self._texts, self._keep, self._prompt = text_columns, keep, prompt

    def __call__(self, table: pa.Table) -> pa.Table:
        """Return the kept columns with the answers as further ones."""
        told = self._answering.told
        texts = self._texts or choose_texts(self._answering, table.schema)
        kept = table.select(choose_kept(self._answering, table.schema, self._keep))
        rows = [*zip(*(table.column(name).to_pylist() for name in texts), strict=True)]
        made = ((place, _sample(row, told)) for place, row in enumerate(rows))
        samples = {place: sample for place, sample in made if sample is not None}
        if self._model.encoder.stride and samples:
            counts = self._model.encoder.count_windows([*samples.values()])
            fits = dict(zip(samples, counts, strict=True))
            samples = {place: each for place, each in samples.items() if 0 < fits[place] <= MOST_WINDOWS}
        try:
            answered = self._model.predict([*samples.values()], self._prompt)
        except Refused as error:
            raise UserError(str(error)) from error
        found = dict(zip(samples, answered, strict=True))
        answers = [found.get(place) for place in range(len(rows))]
        for each in answer_fields(told):
            values = [None if answer is None else _value(answer, each.name) for answer in answers]
            kept = kept.append_column(each.with_name(_column(each.name)), pa.array(values, each.type))
        return kept


def _sample(row: tuple[Any, ...], told: Mapping[str, Any]) -> Any:
    """Return a row of texts as a model takes it; None where a text is null."""
    if None in row:
        return None
    if told["words"]:
        words = row[0].split() if isinstance(row[0], str) else row[0]
        return None if None in words else words
    return row if len(row) > 1 else row[0]


def _value(answer: Answer, name: str) -> Any:
    return [label for _, label in answer["words"]] if name == "words" else answer[name]


def answer_fields(told: Mapping[str, Any]) -> list[pa.Field]:
    """Return the name in an answer and the type of each column of answers."""
    shares = pa.struct([(label, NUMBER) for label in dict.fromkeys(told["labels"])])
    return [pa.field(name, kind or shares) for name, kind in FIELDS[ANSWERS[told["kind"]]].items()]


def _column(name: str) -> str:
    return COLUMNS.get(name, f"predicted_{name}")


def choose_texts(answering: Answering, schema: pa.Schema, named: Sequence[str] | None = None) -> list[str]:
    """Return the columns of texts of a table."""
    count, words = len(answering.told["texts"]), answering.told["words"]
    return choose_columns(schema, answering.columns, count, named, words=words)


def choose_kept(answering: Answering, schema: pa.Schema, keep: Sequence[str] | None) -> list[str]:
    """Return the columns that are passed on; a `UserError` where one is missing, or has an answer's name."""
    kept = schema.names if keep is None else [*keep]
    if missing := sorted({*kept} - {*schema.names}):
        raise UserError(f"--keep names {name_list(missing)}, and the data has {name_list(schema.names)}")
    made = {_column(each.name) for each in answer_fields(answering.told)}
    if twice := sorted(made & {*kept}):
        raise UserError(
            f"the data has a column {name_list(twice)}, as the answers do; --keep only the others"
        )
    return kept


class _Parts:
    """Answers parts with an engine, which is loaded with the first."""

    def __init__(self, folder: Path, load: Callable[[], Predictor]) -> None:
        self.folder, self._load = folder, load
        self._predictor: Predictor | None = None

    def answer(self, number: int, data: bytes) -> int:
        """Answer a part, write it, and return its rows."""
        self._predictor = self._predictor or self._load()
        made = self._predictor(pa.ipc.open_stream(data).read_all())
        with files.atomic_path(_part(self.folder, number)) as temporary:
            pa.parquet.write_table(made, temporary)
        return len(made)


_parts: list[_Parts] = []  # of a process of the pool


def _answer_here(number: int, data: bytes) -> int:
    return _parts[0].answer(number, data)


def _part(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}.parquet"


def _start(slots: Any, parts: _Parts) -> None:
    """Begin a process: it takes its share of the devices, and ends with the one that started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    gpu, cores = slots.get()
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    os.environ["RAYON_NUM_THREADS"] = str(len(cores))
    with suppress(OSError, AttributeError):  # no such call
        os.sched_setaffinity(0, cores)
    _parts.append(parts)


@contextmanager
def _executor(count: int, gpus: int, parts: _Parts) -> Iterator[tuple[Executor, Callable[..., int]]]:
    """Yield processes, each with its share of the devices, and what they run; one is a thread of this one."""
    if count == 1:
        with ThreadPoolExecutor(1) as thread:
            yield thread, parts.answer
        return
    context, cores = get_context("spawn"), usable_cores()
    slots = context.SimpleQueue()
    named = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    named = named or [*map(str, range(gpus))]
    for place in range(count):
        slots.put((named[place % len(named)] if gpus else None, cores[place::count] or cores))
    with ProcessPoolExecutor(count, context, _start, (slots, parts)) as pool:
        yield pool, _answer_here


def predict_files(options: PredictOptions) -> Predicted:
    """Answer the rows of files and write them in order with their answers; resumes what was killed.

    Raises:
        UserError: input that cannot be used; parts that are finished stay.
        MissingDevice: no engine, or no device for it.
    """
    out = options.out
    if out.suffix != ".parquet":
        raise UserError(f"--out {out} is no .parquet file; answers are written as Parquet")
    if (out.exists() or out.is_symlink()) and not (options.overwrite and out.is_file()):
        raise UserError(f"{out} exists; give another --out" + ", or --overwrite" * out.is_file())
    return answer_files(Answering.of(options.run), options)


def answer_files(answering: Answering, options: PredictOptions, size: int = ROWS) -> Predicted:
    """Answer files in parts of `size` rows, as `predict_files`."""
    out, folder = options.out, options.out.with_name(f"{options.out.name}.parts")
    rows = open_rows(options.data, {*answering.columns, *(options.text_column or ())})
    schema = rows.read_schema()
    texts = choose_texts(answering, schema, options.text_column)
    kept = choose_kept(answering, schema, options.keep)
    if options.prompt is not None and ANSWERS[answering.told["kind"]] is not embed:
        raise UserError(f"--prompt is for embeddings, and the run answers {answering.told['kind']}")
    if options.overwrite and folder.is_dir():
        shutil.rmtree(folder)
    job = Job(
        engine_sha256=answering.engine.sha256,
        graph_sha256=answering.graph.sha256,
        files=[(str(path.resolve()), (at := path.stat()).st_size, at.st_mtime_ns) for path in rows.paths],
        text_columns=texts,
        keep=kept,
        prompt=answering.told["prompt"] if options.prompt is None else options.prompt,
        limit=options.limit,
        rows=size,
    )
    gpus = 0 if answering.backend in CPU_BACKENDS else max(1, count_gpus())
    count = options.processes or max(1, gpus)
    given = options.model_dump(include={"prompt", "threads", "batch"})
    parts = _Parts(folder, partial(Predictor, answering, **given, text_columns=texts, keep=kept))
    files.remove_abandoned(out)
    with _owned(folder, job):
        with _executor(count, gpus, parts) as (executor, answer):
            try:
                told = _answer_parts(partial(executor.submit, answer), folder, rows, job, ahead=AHEAD * count)
            except BrokenProcessPool as error:
                raise UserError(
                    "a process of this call was killed or could not start (in a script, call predict under "
                    'if __name__ == "__main__"); the same command resumes'
                ) from error
            finally:
                executor.shutdown(cancel_futures=True)
        columns, unanswered = _join(folder, out, told, answering)
    shutil.rmtree(folder, ignore_errors=True)
    return Predicted(
        out=str(out),
        rows=told.rows,
        resumed=told.resumed,
        unanswered=unanswered,
        seconds=told.seconds,
        rows_per_second=told.rate,
        processes=count,
        columns=columns,
    )


@dataclass
class _Told:
    """Progress of a call."""

    parts: int = 0
    rows: int = 0
    resumed: int = 0  # rows
    first: int = 0  # rows when the first answer of this call was there, which took loading the engine
    begun: float = 0.0  # s: when that was
    seconds: float = 0.0  # since then

    @property
    def rate(self) -> float:
        return (self.rows - self.first) / self.seconds if self.seconds else 0.0


def _answer_parts(
    submit: Callable[..., Future[int]], folder: Path, rows: Rows, job: Job, *, ahead: int
) -> _Told:
    """Have every part answered that is not finished, with no more than `ahead` of them in memory."""
    told, finished, waiting = _Told(), dict(_finished(folder)), dict[Future[int], float]()

    def take(most: int) -> None:
        while len(waiting) > most:
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                at, now = waiting.pop(future), time.monotonic()
                told.rows += future.result()
                if not told.begun:
                    told.begun, told.first = now, told.rows
                told.seconds = now - told.begun
                step = f"answering, {told.rate:,.0f} rows/s" if told.seconds else "answering"
                reporter().begin(step, *rows.share(at, job.limit))

    reporter().begin("loading the engine")
    for part, at in rows.parts(job.rows, job.limit):
        number, told.parts = told.parts, told.parts + 1
        if finished.get(number) == len(part):
            told.rows, told.resumed = told.rows + len(part), told.resumed + len(part)
            continue
        take(ahead - 1)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, part.schema) as stream:
            stream.write_table(part)
        waiting[submit(number, sink.getvalue().to_pybytes())] = at
    take(0)
    return told


@contextmanager
def _owned(folder: Path, job: Job) -> Iterator[None]:
    """Hold the folder of parts for this process and job."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise files.cannot_write(folder, error) from error
    try:
        with files.locked(folder):
            if (folder / JOB).is_file():
                known = read(folder / JOB, Job, "mark of a folder of parts", "give another --out")
                if other := [name for name in Job.model_fields if getattr(known, name) != getattr(job, name)]:
                    raise UserError(
                        f"{folder} holds parts of other answers ({name_list(other)} differ); give another "
                        "--out, or --overwrite to start over"
                    )
            elif any(folder.iterdir()):
                raise UserError(f"{folder} holds other files than parts of answers; give another --out")
            files.remove_abandoned_below(folder)
            files.write_json(folder / JOB, job.model_dump(mode="json"))
            try:
                yield
            finally:
                if not any(folder.glob("*.parquet")):  # refused input leaves nothing
                    shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError as error:
        raise UserError(
            f"{folder} is in use by another call; wait until it ends, or give another --out"
        ) from error


def _finished(folder: Path) -> Iterator[tuple[int, int]]:
    """Yield the number and the rows of each part that is whole."""
    for path in folder.glob("*.parquet"):
        with suppress(pa.ArrowException, OSError, ValueError):
            yield int(path.stem), pa.parquet.read_metadata(path).num_rows


def _join(folder: Path, out: Path, told: _Told, answering: Answering) -> tuple[list[str], int]:
    """Write all parts as one file; return its columns, and how many rows have no answer."""
    reporter().begin("joining parts")
    made = {"qdqbench.recipe": answering.recipe, "qdqbench.engine_sha256": answering.engine.sha256}
    schema = pa.parquet.read_schema(_part(folder, 0)).with_metadata(made)
    answer, written, unanswered = _column(answer_fields(answering.told)[0].name), 0, 0
    with files.atomic_path(out) as temporary, pa.parquet.ParquetWriter(temporary, schema) as writer:
        for number in range(told.parts):
            part = pa.parquet.read_table(_part(folder, number), partitioning=None)
            writer.write_table(part.cast(schema))
            written, unanswered = written + len(part), unanswered + part.column(answer).null_count
        assert written == told.rows, (written, told.rows)  # before the file is in place
    return schema.names, unanswered
