"""Inputs, lanes and timers of real devices: CUDA events around launches on a stream, wall time on a CPU."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from qdqbench.eval.bench.rounds import Lane
from qdqbench.quantize.models.inputs import MASK, TOKENS
from qdqbench.quantize.pipeline.session import Session
from qdqbench.quantize.tasks.types.kind import join_outputs
from qdqbench.quantize.utils.arrays import Array, Batch, Float32, Int64

if TYPE_CHECKING:
    import torch


class Bound(Protocol):
    """An inference at one shape with its own CUDA buffers and stream: an engine's, or PyTorch's."""

    inputs: "dict[str, torch.Tensor]"
    outputs: "dict[str, torch.Tensor]"
    stream: "torch.cuda.Stream"

    def launch(self) -> None: ...


def random_sets(
    inputs: Sequence[str], shape: tuple[int, int], vocabulary: int, sets: int, seed: int
) -> list[Batch]:
    """Draw input sets of random token ids in [0, vocabulary), int64 [batch, length], without padding.

    Of the model's other inputs the mask is 1 and the rest 0; sets of other shapes are drawn anew.
    """
    rest = {name: np.full(shape, int(name == MASK), dtype=np.int64) for name in inputs if name != TOKENS}
    generators = (np.random.default_rng([seed, *shape, number]) for number in range(sets))
    return [{TOKENS: rng.integers(0, vocabulary, shape, dtype=np.int64)} | rest for rng in generators]


def session_sets(session: Session, batch: int, length: int, sets: int) -> list[Batch]:
    vocabulary = int(session.fp32_model.config.vocab_size)
    return random_sets(session.plan.family.inputs, (batch, length), vocabulary, sets, session.config.seed)


class DeviceLane:
    """One bound inference that rotates through input sets held on the GPU."""

    def __init__(self, bound: Bound, sets: "Sequence[Mapping[str, torch.Tensor]]") -> None:
        import torch

        self.torch, self.bound, self.sets, self.stream = torch, bound, sets, bound.stream
        self.input_sets = len(sets)
        first = sets[0]
        for name in bound.inputs:
            bound.inputs[name].copy_(first[name])
        torch.cuda.synchronize()
        # the mask and the types are the same in all sets: copying them would only disturb
        self.varying = [
            name for name in bound.inputs if any(not torch.equal(first[name], s[name]) for s in sets)
        ]

    def feed(self, number: int) -> None:
        chosen = self.sets[number % len(self.sets)]
        with self.torch.cuda.stream(self.stream):
            for name in self.varying:
                self.bound.inputs[name].copy_(chosen[name], non_blocking=True)

    def launch(self) -> None:
        self.bound.launch()

    def fetch(self) -> Float32:
        self.bound.stream.synchronize()
        return _host_logits(self.bound.outputs)


@dataclass(frozen=True)
class Step:
    bound: Bound
    inputs: "Mapping[str, torch.Tensor]"  # in pinned memory of the host
    rows: Int64  # rows of the outputs that are answers, in the order of the split; the others are copies


class SplitLane:
    """A whole split in one launch on one stream, with its copies: inputs to the GPU, outputs to the host."""

    def __init__(self, steps: Sequence[Step]) -> None:
        import torch

        self.torch, self.steps = torch, steps
        self.stream, self.input_sets = steps[0].bound.stream, 1
        self.outputs = [
            {
                name: torch.empty_like(buffer, device="cpu").pin_memory()
                for name, buffer in step.bound.outputs.items()
            }
            for step in steps
        ]

    def feed(self, number: int) -> None:
        """Do nothing: the copies are part of the work."""

    def launch(self) -> None:
        for step, outputs in zip(self.steps, self.outputs, strict=True):
            with self.torch.cuda.stream(self.stream):
                for name, buffer in step.bound.inputs.items():
                    buffer.copy_(step.inputs[name], non_blocking=True)
            step.bound.launch()
            with self.torch.cuda.stream(self.stream):
                for name, buffer in outputs.items():
                    buffer.copy_(step.bound.outputs[name], non_blocking=True)

    def fetch(self) -> Float32:
        self.stream.synchronize()
        return np.concatenate(
            [_host_logits(outputs)[step.rows] for step, outputs in zip(self.steps, self.outputs, strict=True)]
        )


def _host_logits(outputs: "Mapping[str, torch.Tensor]") -> Float32:
    return by_row(np.array(join_outputs(outputs, sorted(outputs)).float().cpu().numpy()))


def by_row(answers: Float32) -> Float32:
    """Return answers [B, width]; of tokens [B, L, width] those of the first ones, whatever the length."""
    return answers[:, 0] if answers.ndim == 3 else answers


class HostLane:
    """Inference on a CPU: a function from one batch to logits, over input sets or over a whole split."""

    def __init__(self, run: Callable[[Batch], Float32], sets: Sequence[Sequence[Batch]]) -> None:
        self.run, self.sets, self.input_sets = run, sets, len(sets)
        self.batches: Sequence[Batch] = sets[0]
        self.answers: list[Float32] = []

    def feed(self, number: int) -> None:
        self.batches = self.sets[number % len(self.sets)]

    def launch(self) -> None:
        self.answers = [self.run(batch) for batch in self.batches]

    def fetch(self) -> Float32:
        return np.concatenate([by_row(answers) for answers in self.answers])


class CudaTimer:
    """CUDA events on a lane's stream around each launch; wall time for several streams at once."""

    def __init__(self) -> None:
        import torch

        self.cuda: Any = torch.cuda

    def latencies(self, lane: Any, count: int) -> list[float]:
        """See `Timer`: device time; for a launch that the host cannot keep up with, the time it waits too."""
        pairs = [
            (self.cuda.Event(enable_timing=True), self.cuda.Event(enable_timing=True)) for _ in range(count)
        ]
        for number, (start, end) in enumerate(pairs):
            lane.feed(number)
            start.record(lane.stream)
            lane.launch()
            end.record(lane.stream)
        lane.stream.synchronize()
        return [float(start.elapsed_time(end)) for start, end in pairs]

    def wall(self, lanes: Sequence[Lane], count: int) -> float:
        self.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            for lane in lanes:
                lane.launch()
        self.cuda.synchronize()
        return time.perf_counter() - start


def to_device(batch: Mapping[str, Array]) -> "dict[str, torch.Tensor]":
    import torch

    return {name: torch.from_numpy(array).cuda() for name, array in batch.items()}


def to_pinned(batch: Mapping[str, Array]) -> "dict[str, torch.Tensor]":
    """Return the same arrays in pinned memory of the host, from which copies to the GPU do not wait."""
    import torch

    return {name: torch.from_numpy(array).pin_memory() for name, array in batch.items()}


class WallTimer:
    """Times on the host, for lanes whose launch waits for the result (a CPU).

    Args:
        clock: seconds.
        pool: threads for several lanes at once, as many as there are lanes.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, pool: Executor | None = None) -> None:
        self.clock, self.pool = clock, pool

    def latencies(self, lane: Lane, count: int) -> list[float]:
        times = []
        for number in range(count):
            lane.feed(number)
            start = self.clock()
            lane.launch()
            times.append(1000 * (self.clock() - start))
        return times

    def wall(self, lanes: Sequence[Lane], count: int) -> float:
        def launch(lane: Lane) -> None:
            for _ in range(count):
                lane.launch()

        start = self.clock()
        list((self.pool.map if self.pool and len(lanes) > 1 else map)(launch, lanes))
        return self.clock() - start


def gpu_uuid() -> str | None:
    """Return the UUID of the GPU that CUDA shows first; NVML counts otherwise."""
    import torch

    uuid = getattr(torch.cuda.get_device_properties(0), "uuid", None)
    return f"GPU-{uuid}" if uuid else None
