"""One fixed shape of an engine, with its own buffers, as a CUDA graph."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from qdqbench.quantize.engine.profiles import fill_shape
from qdqbench.quantize.engine.runtime.tensors import DEVICE, Arrays, load, make_poisoned, to_numpy, to_torch
from qdqbench.quantize.utils.arrays import Array
from qdqbench.quantize.utils.errors import CheckFailed

if TYPE_CHECKING:
    import torch


class Owner(Protocol):
    """What a bound run needs of its engine (`runtime.engine.Engine`)."""

    torch: Any
    name: str
    notes: list[str]
    inputs: Any  # names
    shapes: Any  # by name
    dtypes: Any  # by name

    def new_context(self, profile: int, stream: Any) -> Any:
        """Return an execution context of its own."""

    def choose_profile(self, batch: int, length: int) -> int:
        """Return the profile that takes a shape."""

    def attach(self, context: Any, inputs: Any) -> Any:
        """Bind buffers, and make those of the outputs."""

    def enqueue(self, context: Any, stream: Any) -> None:
        """Start one inference."""


class BoundRun:
    """One fixed shape of an engine: buffers, an execution context, a stream, and by default a CUDA graph.

    Inputs are zeros until they are written (masks: ones), on `stream`, or with `load`.
    """

    def __init__(self, owner: Owner, batch: int, length: int, *, stream: Any, graph: bool) -> None:
        gpu = self._torch = owner.torch
        self._owner = owner
        self.stream: torch.cuda.Stream = gpu.cuda.Stream() if stream is None else stream
        self._context: Any = owner.new_context(owner.choose_profile(batch, length), self.stream)
        with gpu.cuda.stream(self.stream):
            self.inputs: dict[str, torch.Tensor] = {}
            for name in owner.inputs:
                make = gpu.ones if "mask" in name else gpu.zeros
                shape = fill_shape(owner.shapes[name], (batch, length))
                self.inputs[name] = make(shape, dtype=owner.dtypes[name], device=DEVICE)
            self.outputs: dict[str, torch.Tensor] = owner.attach(self._context, self.inputs)
        for _ in range(2):  # kernels are compiled and memory is taken at the first run of a shape
            owner.enqueue(self._context, self.stream)
            self.stream.synchronize()
        self._graph: Any = self._capture(f"batch {batch}, length {length}") if graph else None

    @property
    def captured(self) -> bool:
        """Return whether `launch` replays a CUDA graph; the engine's notes say where it cannot."""
        return self._graph is not None

    def launch(self) -> None:
        """Enqueue one inference on `stream`; does not wait."""
        if self._graph is not None:
            with self._torch.cuda.stream(self.stream):
                self._graph.replay()
            return
        context = self._context
        if not context.execute_async_v3(self.stream.cuda_stream):
            raise CheckFailed(f"{self._owner.name} fails to run")

    def load(self, feeds: Mapping[str, Array]) -> None:
        """Write inputs of exactly the bound shape, and NaN into the outputs; waits.

        Raises:
            UserError: inputs are missing, unknown, or of another kind or shape.
        """
        tensors = to_torch(feeds, {name: t.dtype for name, t in self.inputs.items()}, self._owner.name)
        with self._torch.cuda.stream(self.stream):
            load(tensors, self.inputs)
            for buffer in self.outputs.values():
                buffer.copy_(make_poisoned(tuple(buffer.shape), buffer.dtype, DEVICE))
            self.stream.synchronize()

    def read(self) -> Arrays:
        """Wait, and return every output as in `Engine.run`."""
        with self._torch.cuda.stream(self.stream):
            self.stream.synchronize()
            return {name: to_numpy(buffer) for name, buffer in self.outputs.items()}

    def close(self) -> None:
        """Give the memory back; it cannot run again."""
        self.stream.synchronize()
        self._graph = self._context = None
        self.inputs, self.outputs = {}, {}

    def _capture(self, what: str) -> Any:
        """Capture one enqueue as a CUDA graph, or note that the backend cannot."""
        torch, context = self._torch, self._context
        where = f"{self._owner.name} at {what}"
        graph, enqueued = torch.cuda.CUDAGraph(), False
        try:
            # thread_local: compiler threads of the backend may allocate meanwhile
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                enqueued = context.execute_async_v3(self.stream.cuda_stream)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:200]
            self._owner.notes.append(f"{where} runs without a CUDA graph: capturing fails ({reason})")
            return None
        if not enqueued:
            raise CheckFailed(f"{where}: the engine fails to run while it is captured")
        self.stream.synchronize()
        return graph
