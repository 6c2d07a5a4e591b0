"""Run graphs in ONNX Runtime, before and after a repair: inputs, outputs, the range of a tensor."""

import math
import re
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from qdqbench.quantize.graph.index import GraphIndex
from qdqbench.quantize.models.load import load_tokenizer
from qdqbench.quantize.tasks.data.encode import iter_encoded
from qdqbench.quantize.tasks.data.load import load_split
from qdqbench.quantize.tasks.kinds.encoded import pad
from qdqbench.quantize.tasks.task import Task
from qdqbench.quantize.utils.arrays import Array, read_arrays
from qdqbench.quantize.utils.errors import UserError

BATCH, LENGTH, ROWS = 4, 32, 16  # of random inputs
BATCH_SECONDS = 120  # of one batch; BERT-large on one core takes 10
MAX_VALUES = 1 << 27  # of a random input
Feeds = Mapping[str, Array]


class CannotLoad(UserError):
    """ONNX Runtime has no kernels for a graph, or finds it invalid; other inputs would not help."""


def graph_inputs(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    constants = {tensor.name for tensor in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in constants]


def random_feeds(model: onnx.ModelProto, seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    index = GraphIndex(model)
    lengths = rng.integers(LENGTH // 2, LENGTH + 1, ROWS)
    found: dict[str, Array] = {}
    for value in graph_inputs(model):
        tensor = value.type.tensor_type
        if not tensor.HasField("shape") or not tensor.elem_type:
            raise UserError(f"input {value.name!r} has no shape or type; give --inputs FILE.npz")
        known = [entry.dim_value if entry.HasField("dim_value") else -1 for entry in tensor.shape.dim]
        shape = [size if size > 0 else (ROWS, LENGTH)[min(axis, 1)] for axis, size in enumerate(known)]
        kind = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        if math.prod(shape) > MAX_VALUES:
            raise UserError(
                f"input {value.name!r} has shape {shape}, too large to be random; give --inputs FILE.npz"
            )
        if "mask" in value.name.lower() and len(shape) == 2:
            filled = np.arange(shape[1]) < np.resize(lengths, shape[0])[:, None]
            found[value.name] = filled.astype(kind)
        elif np.issubdtype(kind, np.integer):
            # tokens of the tables that it looks up; 2 where it looks up none
            readers = [node for node in index.consumers.get(value.name, []) if node.op_type == "Gather"]
            tables = [index.stored(node.input[0]) for node in readers]
            rows = min((int(t.dims[0]) for t in tables if t is not None and t.dims), default=2)
            found[value.name] = rng.integers(0, max(1, rows), shape).astype(kind)
        elif kind == np.bool_:
            found[value.name] = np.ones(shape, np.bool_)
        else:
            found[value.name] = rng.standard_normal(shape).astype(kind)
    return found


def read_feeds(path: Path, model: onnx.ModelProto) -> dict[str, Array]:
    arrays = read_arrays(path, "give arrays that numpy.savez wrote, fewer samples where they are too many")
    return select_feeds(arrays, model, str(path))


def select_feeds(found: Feeds, model: onnx.ModelProto, source: str) -> dict[str, Array]:
    wanted = [value.name for value in graph_inputs(model)]
    if missing := [name for name in wanted if name not in found or not found[name].ndim]:
        raise UserError(
            f"{source} has no array for {', '.join(missing)}; it has {', '.join(found) or 'none'}"
        )
    if len({len(found[name]) for name in wanted}) > 1:
        raise UserError(f"{source} has arrays with different numbers of samples; give as many of each")
    return {name: found[name] for name in wanted}


def run_batches(model: onnx.ModelProto | Path, feeds: Feeds, size: int = BATCH) -> list[dict[str, Array]]:
    """Return outputs of ONNX Runtime on the CPU without rewrites of its own, by batches of `size` samples."""
    batches = _run(model, feeds, None, size=size)
    return [{name: np.asarray(value) for name, value in batch.items()} for batch in batches]


def run_fitting(model: onnx.ModelProto, feeds: Feeds) -> tuple[int, list[dict[str, Array]]]:
    """Return how many samples a graph takes at once, and its outputs by such batches.

    BATCH, else all as they were given, else one: a graph may compute a size from all texts of a batch.
    Raises the first refusal where none runs.
    """
    total = max((len(value) for value in feeds.values()), default=1)
    refusals = []
    for size in dict.fromkeys((min(BATCH, total), total, 1)):
        try:
            return size, run_batches(model, feeds, size)
        except UserError as error:
            if took_too_long(error):
                raise
            refusals.append(error)
    raise refusals[0]


def measure_ranges(model: onnx.ModelProto, tensors: Collection[str], feeds: Feeds) -> dict[str, float]:
    """Return the largest absolute value of each tensor over all samples.

    Each sample is alone and without padding, or all are as they were given where the graph takes only that.
    """
    tapped = deepcopy(model)
    names, total = [*dict.fromkeys(tensors)], max(map(len, feeds.values()), default=1)
    known = {value.name for value in tapped.graph.output}
    tapped.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in known)
    try:
        return _largest(_run(tapped, feeds, names, alone=True), names)
    except UserError as error:
        if total < 2 or took_too_long(error):
            raise
        return _largest(_run(tapped, feeds, names, size=total), names)


def took_too_long(error: UserError) -> bool:
    """Return whether a graph was stopped, which another batch size would not help."""
    return isinstance(error.__cause__, FutureTimeout)


def _largest(batches: Iterable[Feeds], tensors: Collection[str]) -> dict[str, float]:
    found = dict.fromkeys(tensors, 0.0)
    for batch in batches:
        for name, value in batch.items():
            found[name] = max(found[name], float(np.abs(value).max(initial=0.0)))
    return found


def _run(
    model: onnx.ModelProto | Path,
    feeds: Feeds,
    wanted: Sequence[str] | None,
    *,
    alone: bool = False,
    size: int = BATCH,
) -> Iterator[dict[str, Array]]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    try:
        session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its errors are of classes of its own, which it does not export
        raise CannotLoad(f"ONNX Runtime cannot load the graph: {_shorten(str(error))}") from error
    try:
        names = list(wanted) if wanted is not None else [output.name for output in session.get_outputs()]
        shapes = [each.shape for each in session.get_inputs()]
        fixed = [shape[0] for shape in shapes if shape and isinstance(shape[0], int)]
        free = not any(isinstance(size, int) for shape in shapes for size in shape[1:2])
        total = max((len(value) for value in feeds.values()), default=1)
        for start in range(0, max(total, 1), step := max(1, fixed[0] if fixed else 1 if alone else size)):
            batch = {name: value[start : start + step] for name, value in feeds.items()}
            batch = _without_padding(batch) if alone and free else batch
            yield dict(zip(names, _run_in_time(session, names, batch), strict=True))
    except FutureTimeout as error:
        raise UserError(
            f"the graph took over {BATCH_SECONDS} s for one batch and was stopped; take an endless "
            "Loop out of it, or give shorter samples"
        ) from error
    except Exception as error:  # its errors are of classes of its own, which it does not export
        raise UserError(f"ONNX Runtime refuses {_read_refusal(str(error))}") from error


_AT_NODE = re.compile(r"running (\w+) node\. Name:'([^']{0,200})' Status Message: (.*)")
_SOURCE = re.compile(
    r"^\S+\.(?:cc|cpp|h):\d+ (?:.{0,300}?\w\([^()]*(?:\([^()]*\)[^()]*)*\)(?: const)? )?(?:\[with [^\]]*\] )?"
)


def _shorten(text: str) -> str:
    text = " ".join(text.split()).rpartition(" : ")[2]
    return re.sub(r"^Load model from .{1,300}? failed:", "", text)[:300]


def _read_refusal(text: str) -> str:
    """Return what ONNX Runtime refuses, and why, without places in its own source."""
    text = " ".join(text.split())
    if found := _AT_NODE.search(text):
        return f"{found[1]} {found[2]!r}: {_SOURCE.sub('', found[3])[:300]}"
    return f"the inputs: {_shorten(text)}"


def _run_in_time(session: Any, names: list[str], batch: Feeds) -> list[Array]:
    """Run a session in a thread: Ctrl-C and BATCH_SECONDS end it at its next node, in a Loop too."""
    import onnxruntime

    options, result = onnxruntime.RunOptions(), Future[list[Array]]()
    options.log_severity_level = 4

    def work() -> None:
        try:
            result.set_result(session.run(names, batch, options))
        except Exception as error:
            result.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        return result.result(BATCH_SECONDS)
    finally:
        options.terminate = True


def _without_padding(batch: dict[str, Array]) -> dict[str, Array]:
    """Return token inputs [B, L] cut after the last position that a mask keeps."""
    masks = [value for name, value in batch.items() if "mask" in name.lower() and value.ndim == 2]
    if len(masks) != 1 or not masks[0].any():
        return batch
    length = int(np.flatnonzero(masks[0].any(0))[-1]) + 1
    same = masks[0].shape
    return {name: value[:, :length] if value.shape == same else value for name, value in batch.items()}


TOKENS = 128  # of a sample at most


def sample_feeds(  # noqa: PLR0913, PLR0917
    model: str, revision: str | None, task: Task, source: str, count: int, seed: int
) -> dict[str, Array]:
    """Return token inputs int64 [count, L], padded to the longest, of a draw of the train split."""
    if task.kind.texts_apart or task.kind.windows:
        raise UserError(f"samples of task {task.name} have several rows; give --inputs FILE.npz")
    tokenizer = load_tokenizer(model, revision, task.kind)
    split = load_split(task, source, "train", limit=count, seed=seed, labelled=False)
    rows = [sample[:3] for sample in iter_encoded(split, task, tokenizer, TOKENS)]
    _, batch = pad(rows, int(tokenizer.pad_token_id or 0))
    return {name: np.asarray(value) for name, value in batch.items()}
