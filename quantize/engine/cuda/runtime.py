"""Run a plan on a GPU: token-packed buffers, and a CUDA graph for each bucket of tokens and rows."""

import ctypes as c
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from qdqbench.quantize.engine.cuda.check import list_arrays
from qdqbench.quantize.engine.cuda.driver import (
    AttentionArguments,
    DenseArguments,
    GemmArguments,
    Kernels,
    NormArguments,
    RotaryArguments,
    SplitArguments,
    TableArguments,
    map_tiles,
)
from qdqbench.quantize.engine.cuda.names import (
    NORM_PARTS,
    Target,
    Tile,
    attention_name,
    count_columns,
    count_parts,
    explain_misfit,
    find_target,
    gemm_name,
    list_tiles,
    norm_name,
)
from qdqbench.quantize.engine.cuda.plan import (
    Attention,
    Embed,
    Head,
    Linear,
    Norm,
    Operation,
    Plan,
    Quantize,
)
from qdqbench.quantize.engine.cuda.reader import EngineFile
from qdqbench.quantize.engine.cuda.tiles import (
    MOST_ITEMS,
    TileFile,
    choose_tile,
    guess_form,
    list_forms,
    round_size,
    time_launches,
)
from qdqbench.quantize.engine.cuda.tokens import MOST_POSITIONS, Tokens, pack_rows, pack_tokens, spread
from qdqbench.quantize.utils.arrays import Array
from qdqbench.quantize.utils.capture import capture_graph
from qdqbench.quantize.utils.errors import MissingDevice, QdqError

_DENSE_ROWS, _DENSE_CHANNELS = 256, 1024  # at most, of a dense step in head.cu; PyTorch takes all others
_ACTIVATIONS = ["none", "tanh", "relu", "sigmoid", "gelu", "gelu_tanh"]  # as head.cu numbers them
_ALIGN = 64  # tokens: an attention block's
# Of a multiprocessor, as LEAST_BLOCKS in norm.cu. A block takes four tokens at a time.
NORM_BLOCKS = dict(zip(NORM_PARTS, (7, 4, 8, 4, 2), strict=True))
_KEYS = 128  # of a step of an attention block
_MOST_KEYS = 4 * _KEYS  # that it holds in shared memory
_WINDOW = 64  # tokens of an attention block
_TIMED = 8  # launches of a GEMM, each with other weights, and three times
_SERVED = 8  # buckets for each power of two of a server's batches
_MOST_GRAPHS = 1024  # more than a server prepares for batches of 128 rows of up to 512 tokens
PACKED = "packed"  # the one input of what is bound
_MARK = "plan: "  # before the name of an operation in a profile
_Around = Callable[[Operation], AbstractContextManager[None]]


def choose_bucket(tokens: int, count: int = 16) -> int:
    """Return the least bucket for so many tokens: `count` for each power of two, all multiples of 64."""
    step = max(_ALIGN, (1 << (tokens - 1).bit_length()) // (2 * count))
    return -(-tokens // step) * step


def choose_graph(tokens: Tokens) -> tuple[int, int, int, int]:
    """Return what a graph is captured for: tokens, rows, the longest row, and keys of an attention block."""
    lengths, count = np.diff(tokens.starts), len(tokens.ids)
    rows, longest = (1 << int(each - 1).bit_length() for each in (len(lengths), lengths.max()))
    return choose_bucket(count), rows, longest, _find_reach(tokens.starts)


def _find_reach(starts: Array) -> int:
    """Return how many keys an attention block holds: those of all rows that it touches, if they fit."""
    lengths, count = np.diff(starts), int(starts[-1])
    if count <= _KEYS:
        return _KEYS
    first = np.arange(0, count, _WINDOW)
    last = np.minimum(first + _WINDOW, count) - 1
    row = np.repeat(np.arange(len(lengths)), lengths)
    reach = (starts[row[last] + 1] - starts[row[first]]).max()
    return min(-(-int(reach) // _KEYS) * _KEYS, _MOST_KEYS)


def bound_reach(longest: int) -> int:
    """Return the most keys that an attention block can need if no row is longer than `longest` tokens."""
    return min(-(-(_WINDOW + 2 * (longest - 1)) // _KEYS) * _KEYS, _MOST_KEYS)


def fit_attention(heads: int, reach: int, size: int) -> int:
    """Return the bytes of shared memory that an attention block takes for its heads and keys."""
    return (_WINDOW + 2 * reach + 4) * size * (2 if heads > 1 else 1)


def choose_heads(tokens: int, heads: int, reach: int, longest: int, multiprocessors: int) -> int:
    """Return how many heads an attention block takes: several where loads, not sums, bound it."""
    most = 4 if reach == _KEYS else 2 if longest <= _WINDOW else 1
    blocks = -(-tokens // _WINDOW) * heads
    return max(1, min(most, blocks // (6 * multiprocessors)))


def launch_gemm(  # noqa: PLR0913, PLR0917
    kernels: Kernels,
    instance: str,
    tile: Tile,
    multiprocessors: int,
    source: Any,
    weight: Any,
    call: GemmArguments,
    scratch: Any = None,
) -> None:
    """Launch a GEMM of INT8 [M, K] and [N, K]: of gemm.cu, or with `scratch` of gemm_mma.cu.

    In gemm.cu a multiprocessor has one block at most. `scratch` has room for sums of parts of K.
    """
    count = -(-call.m // tile.m) * -(-call.n // tile.n)
    if scratch is None:
        grid, block = min(multiprocessors, count), 384
        columns = 2 * 2 * 3 * 4 * tile.n  # bytes: scale, bias and factor, for two tiles of two groups at most
        weights = -(-call.k // 128) if tile.stationary else tile.stages  # [tile.n, 128] each
        shared = 128 * (tile.stages * tile.m + weights * tile.n) + 16 * tile.stages + columns + 1024
        arguments: list[Any] = [map_tiles(source, tile.m), map_tiles(weight, tile.n), call]
    else:
        if tile.parts > 1 and count * tile.parts > MOST_ITEMS * multiprocessors:
            sizes = f"{call.m} x {call.n}"
            raise QdqError(f"gemm_{tile} of {sizes} has no room for the sums of {tile.parts} parts")
        grid, block = min(tile.blocks * multiprocessors, count * tile.parts), 32 * math.prod(tile.warps)
        shared, done = tile.shared, scratch.data_ptr()
        split = SplitArguments(done, done + 4 * MOST_ITEMS * multiprocessors, tile.parts)
        arguments = [c.c_void_p(source.data_ptr()), c.c_void_p(weight.data_ptr()), split, call]
    kernels.launch(f"gemm_{tile}_{instance}", (grid, 1), block, arguments, shared)


def permute_rows(n: int, run: int) -> Array:
    """Return the row of B that each row in memory holds, so that a thread owns `run` consecutive columns.

    Rows come in groups of `4 * run`; those from `n` on are beyond B.
    """
    row = np.arange(-(-n // (4 * run)) * 4 * run)
    group, at = row // (4 * run), row % (4 * run)
    return group * 4 * run + run * (at % 8 // 2) + 2 * (at // 8) + at % 2


def order_turns(frequencies: Array, run: int) -> Array:
    """Return cosines and sines FP32 [positions, pitch, 4] of two pairs of channels each, for a GEMM.

    Threads of a row own `run` columns one after the other; what they read at once lies together.
    """
    angles = np.arange(MOST_POSITIONS, dtype=np.float32)[:, None] * frequencies
    channels = 2 * len(frequencies)
    first = np.arange(0, channels, 4)
    made = np.zeros((MOST_POSITIONS, -(-channels // (4 * run)) * run, 4), np.float32)
    turns = np.stack([np.cos(angles), np.sin(angles)], axis=2).reshape(MOST_POSITIONS, -1, 4)
    made[:, first // (4 * run) * run + first % run // 4 * 4 + first // run % 4] = turns
    return made


@dataclass
class _Rows:
    """Inputs of a bucket on the GPU, int32: [T] each, but bounds [B + 1] of the rows."""

    ids: Any
    positions: Any
    types: Any
    start: Any
    end: Any
    bounds: Any
    longest: int
    reach: int
    scratch: Any  # int32, 0: of GEMMs of few tiles
    given: dict[str, Any] = field(default_factory=dict)  # FP16 [T, H] each


Loaded = TypeVar("Loaded", bound="CudaEngine")


def load_engine(file: EngineFile, kind: type[Loaded], tiles: Path | None = None) -> Loaded:
    """Return an engine on the current GPU; MissingDevice without one that it is for, or an old driver.

    Args:
        tiles: a file that keeps the tiles that were fastest; it only saves time.
    """
    import torch

    if not torch.cuda.is_available():
        raise MissingDevice(
            f"backend cuda runs on a GPU of compute capability {', '.join(file.codes)}, and torch shows no "
            "GPU; install torch for CUDA where there is one"
        )
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    target = find_target(capability, file.codes)
    if target is None:
        raise MissingDevice(explain_misfit(capability, file.codes))
    try:
        return kind(file.plan, file.arrays, file.codes[target.name], target, tiles)
    except QdqError as error:
        raise MissingDevice(f"the kernels cannot be loaded here ({error}); update the driver") from error


@dataclass
class BoundTokens:
    """Launches of one size with buffers, a stream and a CUDA graph of their own; several run at once."""

    inputs: dict[str, Any]  # PACKED: as `fill` fills it
    outputs: dict[str, Any]
    stream: Any
    _graph: Any
    _scratch: Any  # which the graph writes to, so it lives as long
    detail = "CUDA graph"

    def launch(self) -> None:
        import torch

        with torch.cuda.stream(self.stream):
            self._graph.replay()


@dataclass
class Flight:
    """A batch under way: its answers, which the device still copies into memory of the host."""

    answers: dict[str, Any]
    done: Any  # event

    def query(self) -> bool:
        return bool(self.done.query())

    def read(self) -> dict[str, Array]:
        self.done.synchronize()
        return {name: answer.numpy() for name, answer in self.answers.items()}


class CudaEngine:
    """A plan with its arrays on the current GPU. Not safe for threads: buffers are shared."""

    device = "cuda"

    def __init__(
        self,
        plan: Plan,
        arrays: Mapping[str, Array],
        codes: Mapping[str, bytes],
        target: Target,
        tiles: Path | None = None,
    ) -> None:
        import torch

        self.plan, self.arrays, self.target = plan, arrays, target
        self._load(codes)
        self._tiles = TileFile(tiles, codes, target)
        self._arrays = {name: torch.from_numpy(array).to(self.device) for name, array in self._prepared()}
        self._turns = self._make_turns()
        self._scratch = self._make_scratch()
        self._last = {name: number for number, each in enumerate(plan.operations) for name in each.reads}
        self._graphs: OrderedDict[tuple[int, int, int, int], tuple[Any, Any, dict[str, Any]]] = OrderedDict()
        self.ran: Tokens | None = None

    def _load(self, codes: Mapping[str, bytes]) -> None:
        import torch

        self._kernels = Kernels([*codes.values()], self.target.early)
        self._multiprocessors = torch.cuda.get_device_properties().multi_processor_count
        self._pool = torch.cuda.graph_pool_handle()

    def _make_turns(self) -> dict[str, Any]:
        """Return the table of each linear that rotates; those of the same frequencies share one."""
        import torch

        tables: dict[tuple[bytes, int], Any] = {}
        found = {}
        for each in self.plan.linears:
            if each.rotary:
                frequencies = self.arrays[f"{each.name}.frequencies"]
                run = self._run_of(each) if each.weight == "int8" else 4
                key = frequencies.tobytes(), run
                if key not in tables:
                    tables[key] = torch.from_numpy(order_turns(frequencies, run)).to(self.device)
                found[each.name] = tables[key]
        return found

    def _run_of(self, operation: Linear) -> int:
        """Return the consecutive columns of an INT8 linear's product that a thread owns."""
        return 16 if self.plan.tensors[operation.output].kind == "int8" else 8

    def _make_scratch(self) -> Any:
        """Return room for the sums of parts of GEMMs that run one after the other, and their counts."""
        import torch

        items = 0 if self.target.wgmma else MOST_ITEMS * self._multiprocessors
        most = max((each.m * each.n for each in self.target.tiles if each.splits), default=0)
        return torch.zeros(items * (1 + most), dtype=torch.int32, device=self.device)

    def _prepared(self) -> Iterator[tuple[str, Array]]:
        """Yield arrays as the kernels read them: rows of INT8 weights permuted, channels in groups of 64.

        Weights of a head have columns of zeros where the states that it reads are wider than the model's.
        """
        int8 = (each for each in self.plan.linears if each.weight == "int8")
        permuted = {f"{each.name}.weight": self._run_of(each) for each in int8}
        of_head = {name for name, *_ in list_arrays(self.plan.head, self.plan, self.arrays)}
        for name, host in self.arrays.items():
            array = host
            if name in permuted:
                rows = permute_rows(len(array), permuted[name])
                beyond = np.zeros((len(rows) - len(array), array.shape[1]), array.dtype)
                array = np.concatenate([array, beyond])[rows]
            if name in of_head:
                array = array.astype(np.float16)
            if name == f"{self.plan.head.name}.0.weight":
                state = self.plan.tensors[self.plan.head.input]
                array = np.pad(array, ((0, 0), (0, state.width - state.own)))
            yield name, np.require(array, requirements=["C", "A", "W"])  # a file's are read-only

    def run(self, batch: Mapping[str, Array]) -> dict[str, Array]:
        """Return the answers of int [B, L] inputs by name, FP32; those of masked tokens are 0."""
        self.ran = tokens = pack_tokens(self.plan, self.arrays, batch)
        return self._run_cut(tokens) if self.plan.given else self.unpack(tokens, self.answer(tokens))

    def _run_cut(self, tokens: Tokens) -> dict[str, Array]:
        """Return the answers and states of a cut graph, without a CUDA graph: it runs a few times only."""
        kept: dict[str, Any] = {}
        answers = self.unpack(tokens, self.forward(self.load(tokens), kept))
        count, tensors = len(tokens.ids), self.plan.tensors
        states = {
            name: kept[name][:count, : tensors[name].own].float().cpu().numpy() for name in self.plan.states
        }
        return answers | {name: spread(state, tokens) for name, state in states.items()}

    def profile(self, tokens: Tokens) -> list[dict[str, float]]:
        """Return the kernels of each operation and their milliseconds, by torch.profiler."""
        import torch
        from torch.profiler import ProfilerActivity, profile, record_function

        @contextmanager
        def mark(operation: Operation) -> Iterator[None]:
            with record_function(_MARK + operation.name):
                yield
                torch.cuda.synchronize()

        rows = self.load(tokens)
        self.forward(rows)  # loads kernels
        torch.cuda.synchronize()
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        with profile(activities=activities, acc_events=True) as profiler:  # or torch warns of further cycles
            self.forward(rows, around=mark)
        spans: dict[str, Any] = {}
        ran: list[Any] = []
        for event in profiler.events():
            marked = event.name.startswith(_MARK)
            if event.device_type.name == "CUDA" and not marked:
                ran.append(event)
            elif marked and event.device_type.name == "CPU":
                spans[event.name.removeprefix(_MARK)] = event.time_range
        found: list[dict[str, float]] = []
        for span in (spans[operation.name] for operation in self.plan.operations):
            found.append({})
            for event in (each for each in ran if span.start <= each.time_range.start <= span.end):
                found[-1][event.name] = found[-1].get(event.name, 0.0) + event.time_range.elapsed_us() / 1000
        return found

    def answer(self, tokens: Tokens, key: tuple[int, int, int, int] | None = None) -> dict[str, Any]:
        """Return the answers of packed tokens on the GPU; the next call overwrites them."""
        key = key or choose_graph(tokens)
        captured = (each for each in (key, (*key[:3], bound_reach(key[2]))) if each in self._graphs)
        graph, staging, answers = self._take_graph(next(captured, key))
        staging[1].synchronize()  # the last copy out of the host's buffer is over
        fill(staging[0].numpy(), tokens, *key[:2])
        staging[2].copy_(staging[0], non_blocking=True)
        staging[1].record()
        graph.replay()
        return answers

    def launch(self, ids: Array, types: Array, lengths: Array) -> Flight:
        """Start rows whose tokens stand in a line, int [T]; the next ones may start before they are done."""
        import torch

        tokens = pack_rows(self.plan, self.arrays, ids, types, lengths)
        count = len(ids) if self.plan.head.pooling == "tokens" else len(lengths)
        _, rows, longest, reach = choose_graph(tokens)
        # batches of a server differ: what is spare costs less than a graph for each number of it
        bucket = choose_bucket(len(ids), _SERVED)
        key = bucket, max(rows, 1 << (bucket // 16 - 1).bit_length()), max(longest, _WINDOW), reach
        host = {}
        for name, answer in self.answer(tokens, key).items():
            host[name] = torch.empty((count, *answer.shape[1:]), dtype=answer.dtype, pin_memory=True)
            host[name].copy_(answer[:count], non_blocking=True)
        done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return Flight(host, done)

    def prepare(self, tokens: int, rows: int, longest: int) -> None:
        """Capture the graph that serves all batches of these sizes, wherever their rows start."""
        powers = [1 << (each - 1).bit_length() for each in (rows, longest)]
        self._take_graph((choose_bucket(tokens), powers[0], powers[1], bound_reach(powers[1])))

    def _take_graph(self, key: tuple[int, int, int, int]) -> tuple[Any, Any, dict[str, Any]]:
        if key in self._graphs:
            self._graphs.move_to_end(key)
        else:
            while len(self._graphs) >= _MOST_GRAPHS:
                self._graphs.popitem(last=False)
            self._graphs[key] = self._capture(*key, self._pool, self._scratch)
        return self._graphs[key]

    def unpack(self, tokens: Tokens, answers: Mapping[str, Any]) -> dict[str, Array]:
        by_token = self.plan.head.pooling == "tokens"
        count = len(tokens.ids) if by_token else len(tokens.starts) - 1
        host = {name: value[:count].cpu().numpy() for name, value in answers.items()}
        return {name: spread(value, tokens) for name, value in host.items()} if by_token else host

    def bind(self, tokens: int, rows: int, longest: int, reach: int) -> BoundTokens:
        """Return launches of up to so many tokens, a multiple of 64; of the rest see `choose_graph`."""
        import torch

        pool = torch.cuda.graph_pool_handle()  # graphs of one pool must not run at once
        scratch = self._make_scratch()
        graph, (_, _, device), answers = self._capture(tokens, rows, longest, reach, pool, scratch)
        torch.cuda.synchronize()
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        return BoundTokens({PACKED: device}, answers, stream, graph, scratch)

    def load(self, tokens: Tokens) -> _Rows:
        """Return inputs on the GPU, for a run without a CUDA graph."""
        import torch

        bucket, rows, longest, reach = choose_graph(tokens)
        host = np.zeros(5 * bucket + rows + 1, np.int32)
        fill(host, tokens, bucket, rows)
        given = {}
        for name, state in tokens.given.items():
            padded = np.zeros((bucket, self.plan.tensors[name].width), np.float16)
            padded[: len(state), : state.shape[1]] = state
            given[name] = torch.from_numpy(padded).to(self.device)
        device = torch.from_numpy(host).to(self.device)
        return _split(device, bucket, longest, reach, self._scratch, given)

    def _capture(  # noqa: PLR0913, PLR0917
        self, tokens: int, rows: int, longest: int, reach: int, pool: Any, scratch: Any
    ) -> tuple[Any, Any, dict[str, Any]]:
        import torch

        if not self.target.wgmma:
            self._time_tiles(tokens)
        host = torch.zeros(5 * tokens + rows + 1, dtype=torch.int32).pin_memory()
        fill(host.numpy(), None, tokens, rows)
        device = host.cuda()
        inputs = _split(device, tokens, longest, reach, scratch)
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.forward(inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with capture_graph(graph, pool=pool):
            answers = self.forward(inputs)
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return graph, (host, event, device), answers

    def forward(
        self, rows: _Rows, kept: dict[str, Any] | None = None, around: _Around = lambda _: nullcontext()
    ) -> dict[str, Any]:
        """Launch all operations; `kept` gets a copy of every tensor, for parity and bisect."""
        values = dict(rows.given)
        answers: dict[str, Any] = {}
        for number, operation in enumerate(self.plan.operations):
            with around(operation):
                answers |= self._launch(operation, values, rows)
            if kept is not None:
                kept.update({name: value.clone() for name, value in values.items() if name not in kept})
            for name in [name for name in values if self._last.get(name, -1) <= number]:
                del values[name]
        return answers

    def _launch(self, operation: Operation, values: dict[str, Any], rows: _Rows) -> dict[str, Any]:
        """Compute the tensors of an operation into `values`; return those of the head, the answers."""
        match operation:
            case Embed() | Norm():
                self._norm(operation, values, rows)
            case Quantize():
                source = values[operation.input]
                values |= {name: self._codes(source, name) for name in operation.codes}
            case Linear():
                self._linear(operation, values, rows)
            case Attention():
                self._attention(operation, values, rows)
            case Head():
                return self._head(operation, values, rows)
        return {}

    def _make(self, name: str, tokens: int) -> Any:
        import torch

        tensor = self.plan.tensors[name]
        kind = torch.int8 if tensor.kind == "int8" else torch.float16
        return torch.empty(tokens, tensor.width, dtype=kind, device=self.device)

    def _norm(self, operation: Embed | Norm, values: dict[str, Any], rows: _Rows) -> None:
        tokens, tensor = len(rows.ids), self.plan.tensors[operation.writes[0]]
        name, width = operation.name, tensor.width
        call = NormArguments(self._at(f"{name}.gamma"), self._at(f"{name}.beta"))
        if operation.half is not None:
            values[operation.half] = self._make(operation.half, tokens)
            call.half = values[operation.half].data_ptr()
        for number, codes in enumerate(operation.codes):
            values[codes] = self._make(codes, tokens)
            call.codes[number] = values[codes].data_ptr()
            call.multiplier[number] = self._at(f"{codes}.multiplier")
        call.epsilon, call.tokens = operation.epsilon, tokens
        call.hidden, call.channels, call.spare = width, tensor.own, width - tensor.own
        if isinstance(operation, Embed):
            ids = (rows.ids.data_ptr(), rows.positions.data_ptr(), rows.types.data_ptr())
            first: Any = TableArguments(
                *ids, *(self._find(f"{name}.{part}") for part in ("word", "position", "type"))
            )
        else:
            first = c.c_void_p(values[operation.input].data_ptr())
        kernel = f"{operation.op}_{norm_name(operation, width)}"
        grid = min(NORM_BLOCKS[count_parts(width)] * self._multiprocessors, -(-tokens // 4))
        self._kernels.launch(kernel, (grid, 1), 128, [first, call])

    def _codes(self, source: Any, name: str, factor: str = "") -> Any:
        made = self._make(name, len(source))
        pointers = (source.data_ptr(), self._at(factor or f"{name}.multiplier"), made.data_ptr())
        arguments = [*map(c.c_void_p, pointers), *map(c.c_int, source.shape)]
        self._kernels.launch("quantize", (-(-source.numel() // 1024), 1), 256, arguments)
        return made

    def _gemm(  # noqa: PLR0913, PLR0917
        self,
        operation: Linear,
        source: Any,
        residual: Any,
        made: Any,
        scratch: Any,
        positions: Any,
        form: Tile | None = None,
    ) -> None:
        """Launch the GEMM of a linear operation, by a tile or by the one that is expected to be fastest."""
        name, weight = operation.name, self._arrays[f"{operation.name}.weight"]
        sizes = m, n, k = len(source), count_columns(operation, self.plan), weight.shape[1]
        factor = f"{operation.output}.multiplier" if operation.residual is None else f"{name}.residual"
        call = (RotaryArguments if operation.rotary else GemmArguments)(
            self._at(f"{name}.scale"),
            self._at(f"{name}.bias"),
            self._find(factor),
            None if residual is None else residual.data_ptr(),
            made.data_ptr(),
        )
        call.m, call.n, call.k, call.center = m, n, k, operation.center
        if operation.rotary:
            table = self._turns[name]
            call.positions, call.table = positions.data_ptr(), table.data_ptr()
            call.turned, call.head, call.pitch = 2 * n // 3, operation.rotary, table.shape[1]
        tiles, count = list_tiles(operation, self.plan, self.target), self._multiprocessors
        instance = gemm_name(operation, self.plan)
        if self.target.wgmma:
            tile, scratch = choose_tile(*sizes, count, tiles), None
        else:
            tile = form or self._tiles.get(instance, *sizes, count) or guess_form(*sizes, count, tiles)
        launch_gemm(self._kernels, instance, tile, count, source, weight, call, scratch)

    def _time_tiles(self, tokens: int) -> None:
        """Find the fastest tile of each GEMM that was not timed at this size. All make the same bits."""
        import torch

        tokens = round_size(tokens)
        groups: dict[tuple[str, int, int, int], list[Linear]] = {}
        for each in self.plan.linears:
            if each.weight == "int8":
                weight = self._arrays[f"{each.name}.weight"]
                sizes = tokens, count_columns(each, self.plan), weight.shape[1]
                groups.setdefault((gemm_name(each, self.plan), *sizes), []).append(each)
        new = {
            key: alike[:_TIMED]
            for key, alike in groups.items()
            if self._tiles.get(*key, self._multiprocessors) is None
        }
        for (instance, m, n, k), alike in new.items():
            source = torch.randint(-127, 128, (m, k), dtype=torch.int8, device=self.device)
            residual = None if alike[0].residual is None else self._make(alike[0].residual, m).zero_()
            made, scratch = self._make(alike[0].output, m), self._make_scratch()
            positions = torch.zeros(m, dtype=torch.int32, device=self.device)
            times: dict[Tile, float] = {}
            for tile in list_forms(m, n, k, self._multiprocessors, self.target.tiles):

                def launch(tile: Tile = tile) -> None:
                    for operation in alike:  # noqa: B023  it runs here
                        self._gemm(operation, source, residual, made, scratch, positions, tile)  # noqa: B023

                times[tile] = time_launches(launch)
            self._tiles.add(min(times, key=times.__getitem__), instance, m, n, k)
        if new:
            self._tiles.keep()

    def _linear(self, operation: Linear, values: dict[str, Any], rows: _Rows) -> None:
        from torch.nn import functional

        name, source = operation.name, values[operation.input]
        residual = None if operation.residual is None else values[operation.residual]
        if operation.weight == "int8":
            made = values[operation.output] = self._make(operation.output, len(source))
            self._gemm(operation, source, residual, made, rows.scratch, rows.positions)
            return
        x: Any = functional.linear(source, self._arrays[f"{name}.weight"], self._arrays[f"{name}.bias"])
        if operation.rotary:
            self._turn(x, self._turns[name].index_select(0, rows.positions), operation.rotary)
        if operation.activation is not None:
            approximate = "tanh" if operation.activation == "gelu_tanh" else "none"
            one = functional.gelu(x[:, ::2] if operation.gated else x, approximate=approximate)
            x = one * x[:, 1::2] if operation.gated else one
        if residual is not None:
            scale = self._arrays.get(f"{name}.residual")
            x = (x.float() + (residual.float() if scale is None else residual.float() * scale)).half()
        coded = self.plan.tensors[operation.output].kind == "int8"
        x = x - operation.center if operation.center else x
        values[operation.output] = self._codes(x, operation.output) if coded else x

    @staticmethod
    def _turn(x: Any, turns: Any, head: int) -> None:
        """Rotate q and k in a product [T, 3 H] by cosines and sines [T, C / 4, 4], in place."""
        import torch

        pairs = x[:, : 2 * x.shape[1] // 3].view(len(x), -1, head // 2, 2)
        one, other = pairs.float().unbind(3)
        cos, sin = turns.view(len(x), 1, -1, 2)[:, :, : head // 2].unbind(3)
        pairs.copy_(torch.stack([one * cos - other * sin, other * cos + one * sin], dim=3))

    def _attention(self, operation: Attention, values: dict[str, Any], rows: _Rows) -> None:
        import torch

        sources = [values[name] for name in operation.reads]
        heads, size = operation.heads, operation.head_size
        tokens, hidden = len(rows.ids), heads * size
        if operation.probability_multiplier is None:
            q, k, v = (
                source[:, view.column : view.column + hidden].view(tokens, heads, size)
                for source, view in zip(sources, operation.views, strict=True)
            )
            scale = {"scale": operation.score_scale}
            if operation.window is not None:
                scale |= {"window_size_left": operation.window, "window_size_right": operation.window}
            bounds = (rows.bounds, rows.bounds, rows.longest, rows.longest)
            context = torch.ops.aten._flash_attention_forward(q, k, v, *bounds, 0.0, False, False, **scale)[0]
            context = context.reshape(tokens, hidden)
            coded = self.plan.tensors[operation.output].kind == "int8"
            values[operation.output] = (
                self._codes(context, operation.output, f"{operation.name}.scale") if coded else context
            )
            return
        made = values[operation.output] = self._make(operation.output, tokens)
        call = AttentionArguments(
            *(source.data_ptr() + view.column for source, view in zip(sources, operation.views, strict=True)),
            rows.start.data_ptr(),
            rows.end.data_ptr(),
            self._at(f"{operation.name}.scale"),
            self._at(f"{operation.name}.bias") if operation.biased else None,
            made.data_ptr(),
        )
        reach = rows.reach
        if operation.window is not None:
            reach = min(reach, bound_reach(operation.window + 1))
        while fit_attention(1, reach, size) > self.target.shared:
            reach -= _KEYS
        call.most, call.span = reach, self.plan.embed.span or 0
        call.sight = operation.window if operation.window is not None else tokens
        call.scale = operation.score_scale * (1 if operation.biased else math.log2(math.e))
        call.heads = choose_heads(tokens, heads, reach, rows.longest, self._multiprocessors)
        if fit_attention(call.heads, reach, size) > self.target.shared:
            call.heads = 1
        call.unit = operation.probability_multiplier
        call.tokens, call.hidden, call.pitch = tokens, hidden, sources[0].stride(0)
        grid = -(-tokens // _WINDOW), -(-heads // call.heads)
        shared = fit_attention(call.heads, reach, size)
        kernel = f"attention_{attention_name(operation, self.plan)}_{'short' if reach == _KEYS else 'long'}"
        self._kernels.launch(kernel, grid, 128, [call], shared)

    def _head(self, operation: Head, values: dict[str, Any], rows: _Rows) -> dict[str, Any]:
        import torch

        x, count, tensor = values[operation.input], len(rows.bounds) - 1, self.plan.tensors[operation.input]
        places = {"first": (rows.bounds[:-1], 0), "last": (rows.bounds[1:], -1)}.get(operation.pooling)
        steps = [(f"{operation.name}.{number}", step.kind) for number, step in enumerate(operation.steps)]
        fitting = {name for name, kind in steps if kind == "dense" and self._fits(name, count)}
        if operation.pooling == "tokens":
            fitting.clear()
        elif places is None:
            x = torch.segment_reduce(x.float(), "mean", offsets=rows.bounds.long(), axis=0)
        elif not steps or steps[0][0] not in fitting:
            bounds, shift = places
            x = x.index_select(0, (bounds + shift if shift else bounds).clamp(0, len(x) - 1))
        if not steps or steps[0][1] != "dense":  # whose weights are as wide
            x = x[:, : tensor.own]
        while steps:
            name, kind = steps.pop(0)
            if name in fitting:
                activation = steps.pop(0)[1] if steps and steps[0][1] in _ACTIVATIONS else "none"
                half = any(kind == "dense" for _, kind in steps)
                x = self._dense(name, x.half(), count, places, activation, half)
            else:
                x = self._step(name, kind, x)
            places = None
        x = x.float()
        return {each.name: x[:, each.place] for each in operation.answers}

    def _fits(self, name: str, rows: int) -> bool:
        """Return whether head.cu takes a dense step: it is for few rows, and reads eight channels at once."""
        channels = self._arrays[f"{name}.weight"].shape[1]
        return rows <= _DENSE_ROWS and channels <= _DENSE_CHANNELS and channels % 8 == 0

    def _dense(  # noqa: PLR0913, PLR0917
        self, name: str, x: Any, rows: int, places: tuple[Any, int] | None, activation: str, half: bool
    ) -> Any:
        """Return the answers of a dense step and an activation, of the tokens at `places` or of all."""
        import torch

        n, k = self._arrays[f"{name}.weight"].shape
        made = torch.empty(rows, n, dtype=torch.float16 if half else torch.float32, device=self.device)
        call = DenseArguments(x.data_ptr(), self._at(f"{name}.weight"), self._at(f"{name}.bias"))
        if places is not None:
            call.bounds, call.shift = places[0].data_ptr(), places[1]
        setattr(call, "half" if half else "single", made.data_ptr())
        call.activation = _ACTIVATIONS.index(activation)
        call.tokens, call.rows, call.n, call.k = len(x), rows, n, k
        across, down = -(-n // 16), -(-rows // 8)
        grid = across, min(down, max(1, 3 * self._multiprocessors // across))
        self._kernels.launch("head", grid, 256, [call])
        return made

    def _step(self, name: str, kind: str, x: Any) -> Any:
        """Return what PyTorch computes of one step of a head."""
        import torch
        from torch.nn import functional

        match kind:
            case "norm":
                gamma, beta = (self._arrays[f"{name}.{part}"].float() for part in ("gamma", "beta"))
                step = self.plan.head.steps[int(name.rpartition(".")[2])]
                return functional.layer_norm(x.float(), gamma.shape, gamma, beta, step.epsilon or 0)
            case "dense":
                weight, bias = (self._arrays[f"{name}.{part}"] for part in ("weight", "bias"))
                return functional.linear(x.half(), weight, bias)
            case "gelu" | "gelu_tanh":
                return functional.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")
            case "normalize":
                return functional.normalize(x.float(), dim=1)
        return getattr(torch, kind)(x)

    def _at(self, name: str) -> int:
        return int(self._arrays[name].data_ptr())

    def _find(self, name: str) -> int | None:
        """Return the place of an array; None: there is none."""
        return self._at(name) if name in self._arrays else None


def _split(  # noqa: PLR0913, PLR0917
    device: Any, bucket: int, longest: int, reach: int, scratch: Any, given: dict[str, Any] | None = None
) -> _Rows:
    """Return the parts of a buffer that `fill` filled."""
    ids, positions, types, start, end = device[: 5 * bucket].view(5, bucket)
    bounds = device[5 * bucket :]
    return _Rows(ids, positions, types, start, end, bounds, longest, reach, scratch, given or {})


def fill(staging: Array, tokens: Tokens | None, bucket: int, rows: int) -> None:
    """Write inputs into the host's buffer: five times [bucket], and bounds [rows + 1].

    Spare tokens are rows of one token each, and spare rows are empty.
    """
    ids, positions, types, start, end = staging[: 5 * bucket].reshape(5, bucket)
    bounds, count = staging[5 * bucket :], 0
    if tokens is not None:
        count, lengths = len(tokens.ids), np.diff(tokens.starts)
        ids[:count], positions[:count], types[:count] = tokens.ids, tokens.positions, tokens.types
        start[:count], end[:count] = (
            np.repeat(tokens.starts[:-1], lengths),
            np.repeat(tokens.starts[1:], lengths),
        )
        bounds[: len(tokens.starts)] = tokens.starts
        bounds[len(tokens.starts) :] = count
    for part in (ids, positions, types):
        part[count:] = 0
    start[count:] = np.arange(count, bucket)
    end[count:] = np.arange(count + 1, bucket + 1)
