"""Run a plan on a Hopper GPU: token-packed buffers, and a CUDA graph for each bucket of tokens and rows."""

import ctypes as c
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from qdqbench.quantize.engine.cuda.compile import (
    STAGES,
    TILES,
    attention_name,
    gemm_name,
    norm_name,
)
from qdqbench.quantize.engine.cuda.driver import (
    AttentionArguments,
    GemmArguments,
    Kernels,
    NormArguments,
    TableArguments,
    map_tiles,
)
from qdqbench.quantize.engine.cuda.plan import Attention, Embed, Head, Linear, Norm, Plan, Quantize, Quantized
from qdqbench.quantize.engine.cuda.tokens import Tokens, pack_tokens, spread
from qdqbench.quantize.utils.arrays import Array

_ALIGN = 64  # tokens: an attention block's
# us on one H200 of a block's first tile and of each further one, which the first hides in part: fixed, and for each
# 128 of K
_COSTS = {
    (128, 128): (2.2, 0.33, -0.3, 0.42),
    (64, 128): (2.2, 0.155, 0.7, 0.28),
    (64, 64): (2.0, 0.106, 0.05, 0.16),
}
_NORM_BLOCKS = 4  # of a multiprocessor; a block takes four tokens at a time
_KEYS = 128  # of a step of an attention block
_MOST_KEYS = 3 * _KEYS  # that it holds in shared memory
_WINDOW = 64  # tokens of an attention block


def choose_bucket(tokens: int) -> int:
    """Return the least bucket that holds so many tokens: 16 for each power of two, all multiples of 64."""
    step = max(_ALIGN, (1 << (tokens - 1).bit_length()) // 32)
    return -(-tokens // step) * step


def choose_graph(tokens: Tokens) -> tuple[int, int, int, int]:
    """Return what a graph is captured for: tokens, rows, the longest row, and keys of an attention block."""
    lengths, count = np.diff(tokens.starts), len(tokens.ids)
    rows, longest = (1 << int(each - 1).bit_length() for each in (len(lengths), lengths.max()))
    first = np.arange(0, count, _WINDOW)
    last = np.minimum(first + _WINDOW, count) - 1
    row = np.repeat(np.arange(len(lengths)), lengths)
    reach = (tokens.starts[row[last] + 1] - tokens.starts[row[first]]).max()
    return choose_bucket(count), rows, longest, min(-(-int(reach) // _KEYS) * _KEYS, _MOST_KEYS)


def choose_heads(tokens: int, heads: int, reach: int, longest: int, multiprocessors: int) -> int:
    """Return how many heads an attention block takes: several where loads, not sums, bound it."""
    most = 4 if reach == _KEYS else 2 if longest <= _WINDOW else 1
    blocks = -(-tokens // _WINDOW) * heads
    return max(1, min(most, blocks // (6 * multiprocessors)))


def choose_tile(m: int, n: int, k: int, multiprocessors: int) -> tuple[int, int]:
    """Return the tile that is expected to be fastest."""

    def cost(tile: tuple[int, int]) -> float:
        waves = math.ceil(math.ceil(m / tile[0]) * math.ceil(n / tile[1]) / multiprocessors)
        first, first_k, more, more_k = _COSTS[tile]
        steps = k / 128
        return first + first_k * steps + (waves - 1) * (more + more_k * steps)

    return min(TILES, key=cost)


def permute_rows(n: int, run: int) -> Array:
    """Return the row of B that each row in memory holds, so that a thread owns `run` consecutive columns."""
    row = np.arange(n)
    group, at = row // (4 * run), row % (4 * run)
    return group * 4 * run + run * (at % 8 // 2) + 2 * (at // 8) + at % 2


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


class CudaEngine:
    """A plan with its arrays on the current GPU. Not safe for threads: buffers are shared."""

    def __init__(self, plan: Plan, arrays: Mapping[str, Array], cubins: Mapping[str, bytes]) -> None:
        import torch

        self.plan, self._host = plan, arrays
        self._kernels = Kernels([*cubins.values()])
        self._multiprocessors = torch.cuda.get_device_properties().multi_processor_count
        self._arrays = {name: torch.from_numpy(array).cuda() for name, array in self._prepared()}
        self._last = {name: number for number, each in enumerate(plan.operations) for name in _reads(each)}
        self._graphs: dict[tuple[int, int, int, int], tuple[Any, Any, dict[str, Any]]] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def _prepared(self) -> Iterator[tuple[str, Array]]:
        """Yield arrays as the kernels read them: rows of INT8 weights permuted, channels in groups of 64."""
        permuted = {}
        for each in self.plan.operations:
            if isinstance(each, Linear) and each.weight == "int8":
                permuted[f"{each.name}.weight"] = 16 if self.plan.tensors[each.output].kind == "int8" else 8
        for name, array in self._host.items():
            if name in permuted:
                array = array[permute_rows(len(array), permuted[name])]
            if name.startswith(f"{self.plan.head.name}."):
                array = array.astype(np.float16)
            yield name, np.ascontiguousarray(array)

    def run(self, batch: Mapping[str, Array]) -> dict[str, Array]:
        """Return the answers of int [B, L] inputs by name, FP32; those of masked tokens are 0."""
        tokens = pack_tokens(self.plan, self._host, batch)
        return self.unpack(tokens, self.answer(tokens))

    def answer(self, tokens: Tokens) -> dict[str, Any]:
        """Return the answers of packed tokens on the GPU; the next call overwrites them."""
        key = choose_graph(tokens)
        if key not in self._graphs:
            self._graphs[key] = self._capture(*key)
        graph, staging, answers = self._graphs[key]
        staging[1].synchronize()  # the last copy out of the host's buffer is over
        fill(staging[0].numpy(), tokens, *key[:2])
        staging[2].copy_(staging[0], non_blocking=True)
        staging[1].record()
        graph.replay()
        return answers

    def unpack(self, tokens: Tokens, answers: Mapping[str, Any]) -> dict[str, Array]:
        by_token = self.plan.head.pooling == "tokens"
        count = len(tokens.ids) if by_token else len(tokens.starts) - 1
        host = {name: value[:count].cpu().numpy() for name, value in answers.items()}
        return {name: spread(value, tokens) for name, value in host.items()} if by_token else host

    def _capture(self, tokens: int, rows: int, longest: int, reach: int) -> tuple[Any, Any, dict[str, Any]]:
        import torch

        host = torch.zeros(5 * tokens + rows + 1, dtype=torch.int32).pin_memory()
        fill(host.numpy(), None, tokens, rows)
        device = host.cuda()
        parts = device.split([tokens] * 5 + [rows + 1])
        inputs = _Rows(*parts, longest=longest, reach=reach)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.forward(inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            answers = self.forward(inputs)
        event = torch.cuda.Event()
        event.record()
        return graph, (host, event, device), answers

    def forward(self, rows: _Rows, kept: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Launch all operations; `kept` gets a copy of every tensor, for parity and bisect."""
        values: dict[str, Any] = {}
        for number, operation in enumerate(self.plan.operations):
            match operation:
                case Embed() | Norm():
                    self._norm(operation, values, rows)
                case Quantize():
                    self._quantize(operation, values)
                case Linear():
                    self._linear(operation, values)
                case Attention():
                    self._attention(operation, values, rows)
                case Head():
                    return self._head(operation, values, rows)
            if kept is not None:
                kept.update({name: value.clone() for name, value in values.items() if name not in kept})  # type: ignore[attr-defined]
            for name in [name for name in values if self._last.get(name, -1) <= number]:
                del values[name]
        raise AssertionError("a plan ends with its head")

    def _make(self, name: str, tokens: int) -> Any:
        import torch

        tensor = self.plan.tensors[name]
        kind = torch.int8 if tensor.kind == "int8" else torch.float16
        return torch.empty(tokens, tensor.width, dtype=kind, device="cuda")

    def _norm(self, operation: Embed | Norm, values: dict[str, Any], rows: _Rows) -> None:
        tokens, width = len(rows.ids), self.plan.tensors[self._any_output(operation)].width
        name = operation.name
        call = NormArguments(self._at(f"{name}.gamma"), self._at(f"{name}.beta"))
        self._outputs(operation, values, tokens, call)
        call.epsilon, call.tokens, call.hidden = operation.epsilon, tokens, width
        if isinstance(operation, Embed):
            ids = (rows.ids.data_ptr(), rows.positions.data_ptr(), rows.types.data_ptr())
            first: Any = TableArguments(
                *ids, *(self._at(f"{name}.{part}") for part in ("word", "position", "type"))
            )
        else:
            first = c.c_void_p(values[operation.input].data_ptr())
        grid = min(_NORM_BLOCKS * self._multiprocessors, -(-tokens // 4))
        self._kernels.launch(f"{operation.op}_{norm_name(operation, width)}", (grid, 1), 128, [first, call])

    def _outputs(
        self, operation: Quantized, values: dict[str, Any], tokens: int, call: NormArguments
    ) -> None:
        if operation.half is not None:
            values[operation.half] = self._make(operation.half, tokens)
            call.half = values[operation.half].data_ptr()
        for number, name in enumerate(operation.codes):
            values[name] = self._make(name, tokens)
            call.codes[number], call.multiplier[number] = (
                values[name].data_ptr(),
                self._at(f"{name}.multiplier"),
            )

    @staticmethod
    def _any_output(operation: Quantized) -> str:
        return operation.codes[0] if operation.half is None else operation.half

    def _quantize(self, operation: Quantize, values: dict[str, Any]) -> None:
        source = values[operation.input]
        for name in operation.codes:
            values[name] = self._codes(source, name)

    def _codes(self, source: Any, name: str) -> Any:
        made = self._make(name, len(source))
        pointers = (source.data_ptr(), self._at(f"{name}.multiplier"), made.data_ptr())
        arguments = [*map(c.c_void_p, pointers), *map(c.c_int, source.shape)]
        self._kernels.launch("quantize", (-(-source.numel() // 1024), 1), 256, arguments)
        return made

    def _linear(self, operation: Linear, values: dict[str, Any]) -> None:
        from torch.nn import functional

        name, source = operation.name, values[operation.input]
        residual = None if operation.residual is None else values[operation.residual]
        if operation.weight == "int8":
            made = values[operation.output] = self._make(operation.output, len(source))
            weight = self._arrays[f"{name}.weight"]
            m, (n, k) = len(source), weight.shape
            tile = choose_tile(m, n, k, self._multiprocessors)
            factor = f"{operation.output}.multiplier" if operation.residual is None else f"{name}.residual"
            call = GemmArguments(
                self._at(f"{name}.scale"),
                self._at(f"{name}.bias"),
                self._at(factor) if factor in self._arrays else None,
                None if residual is None else residual.data_ptr(),
                made.data_ptr(),
            )
            call.m, call.n, call.k = m, n, k
            stages, grid = STAGES[tile], min(self._multiprocessors, -(-m // tile[0]) * -(-n // tile[1]))
            shared = stages * (sum(tile) * 128 + 16) + 1024
            kernel = f"gemm_{tile[0]}_{tile[1]}_{gemm_name(operation, self.plan)}"
            arguments = [map_tiles(source, tile[0]), map_tiles(weight, tile[1]), call]
            self._kernels.launch(kernel, (grid, 1), 384, arguments, shared)
            return
        x = functional.linear(source, self._arrays[f"{name}.weight"], self._arrays[f"{name}.bias"])
        if operation.activation is not None:
            approximate = "tanh" if operation.activation == "gelu_tanh" else "none"
            x = functional.gelu(x, approximate=approximate)
        if residual is not None:
            factor = self._arrays.get(f"{name}.residual")
            x = (x.float() + (residual.float() if factor is None else residual.float() * factor)).half()
        coded = self.plan.tensors[operation.output].kind == "int8"
        values[operation.output] = self._codes(x, operation.output) if coded else x

    def _attention(self, operation: Attention, values: dict[str, Any], rows: _Rows) -> None:
        import torch

        views = (operation.query, operation.key, operation.value)
        sources = [values[view.tensor] for view in views]
        heads, size = operation.heads, operation.head_size
        tokens, hidden = len(rows.ids), heads * size
        if operation.probability_multiplier is None:
            q, k, v = (
                source[:, view.column : view.column + hidden].view(tokens, heads, size)
                for source, view in zip(sources, views, strict=True)
            )
            scale = {"scale": operation.score_scale}
            bounds = (rows.bounds, rows.bounds, rows.longest, rows.longest)
            context = torch.ops.aten._flash_attention_forward(q, k, v, *bounds, 0.0, False, False, **scale)[0]
            context = context.reshape(tokens, hidden)
            coded = self.plan.tensors[operation.output].kind == "int8"
            values[operation.output] = self._codes_by(context, operation) if coded else context
            return
        made = values[operation.output] = self._make(operation.output, tokens)
        call = AttentionArguments(
            *(source.data_ptr() + view.column for source, view in zip(sources, views, strict=True)),
            rows.start.data_ptr(),
            rows.end.data_ptr(),
            self._at(f"{operation.name}.scale"),
            made.data_ptr(),
        )
        call.most, call.scale = rows.reach, operation.score_scale * math.log2(math.e)
        call.heads = choose_heads(tokens, heads, rows.reach, rows.longest, self._multiprocessors)
        call.unit = operation.probability_multiplier
        call.tokens, call.hidden, call.pitch = tokens, hidden, sources[0].stride(0)
        grid = -(-tokens // _WINDOW), -(-heads // call.heads)
        shared = (_WINDOW + 2 * rows.reach + 4) * size * (2 if call.heads > 1 else 1)
        kernel = f"attention_{attention_name(operation, self.plan)}_{'short' if rows.reach == _KEYS else 'long'}"
        self._kernels.launch(kernel, grid, 128, [call], shared)

    def _codes_by(self, context: Any, operation: Attention) -> Any:
        made = self._make(operation.output, len(context))
        pointers = (context.data_ptr(), self._at(f"{operation.name}.scale"), made.data_ptr())
        arguments = [*map(c.c_void_p, pointers), *map(c.c_int, context.shape)]
        self._kernels.launch("quantize", (-(-context.numel() // 1024), 1), 256, arguments)
        return made

    def _head(self, operation: Head, values: dict[str, Any], rows: _Rows) -> dict[str, Any]:
        import torch
        from torch.nn import functional

        x = values[operation.input]
        first, stop = rows.bounds[:-1].long(), rows.bounds[1:].long()
        match operation.pooling:
            case "first":
                x = x[first.clamp(max=len(x) - 1)].float()
            case "last":
                x = x[(stop - 1).clamp(min=0)].float()
            case "mean":
                x = torch.segment_reduce(x.float(), "mean", offsets=rows.bounds.long(), axis=0)
            case "tokens":
                x = x.float()
        for number, step in enumerate(operation.steps):
            match step.kind:
                case "dense":
                    weight, bias = (
                        self._arrays[f"{operation.name}.{number}.{part}"] for part in ("weight", "bias")
                    )
                    x = functional.linear(x.half(), weight, bias).float()
                case "tanh" | "relu" | "sigmoid":
                    x = getattr(torch, step.kind)(x)
                case "gelu" | "gelu_tanh":
                    x = functional.gelu(x, approximate="tanh" if step.kind == "gelu_tanh" else "none")
                case "normalize":
                    x = functional.normalize(x, dim=1)
        return {each.name: x if each.column is None else x[:, each.column] for each in operation.answers}

    def _at(self, name: str) -> int:
        return int(self._arrays[name].data_ptr())


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


def _reads(operation: Any) -> Iterator[str]:
    match operation:
        case Attention():
            yield from {operation.query.tensor, operation.key.tensor, operation.value.tensor}
        case Linear():
            yield from {operation.input, operation.residual} - {None}  # type: ignore[misc]
        case Norm() | Quantize() | Head():
            yield operation.input
