"""PyTorch and torch.compile on padded batches, as baselines of INT8.

They get their best form: SDPA, CUDA graphs and max-autotune, and TF32 where the engines have it. They take
the attention mask as the engines do, at fixed shapes too, where it is all ones: without one, transformers
makes its own while a graph is captured or traced, and SDPA then computes attention in FP32.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from qdqbench.quantize.calibration.fakequant.quantizers import name_outputs
from qdqbench.quantize.models.attention import use_attention
from qdqbench.quantize.models.inputs import MASK
from qdqbench.quantize.tasks.types.kind import join_outputs
from qdqbench.quantize.utils.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

PeerPrecision = Literal["fp16", "bf16", "fp32"]
WARM_CALLS = 3
OUTPUT = "answers"
COMPILE_MODES = ("default", "max-autotune-no-cudagraphs")


def sdpa_model(model: "PreTrainedModel", precision: PeerPrecision, device: str) -> "PreTrainedModel":
    """The model with SDPA attention in a precision on a device, in place.

    Raises:
        UserError: this version of transformers does not switch its attention.
    """
    import torch

    use_attention(model, "sdpa")
    if model.config._attn_implementation != "sdpa":
        raise UserError(
            "transformers did not switch to SDPA attention; use a version that pyproject.toml allows"
        )
    dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
    return model.to(device=device, dtype=dtypes[precision]).eval()  # type: ignore[no-any-return, call-arg]


def example(inputs: Sequence[str], batch: int, length: int, device: str) -> "dict[str, torch.Tensor]":
    """Inputs int64 [batch, length] by name: zeros, and a mask of ones."""
    import torch

    shape = (batch, length)
    return {
        name: (torch.ones if name == MASK else torch.zeros)(*shape, dtype=torch.long, device=device)
        for name in inputs
    }


class TorchRun:
    """A PyTorch model bound to one shape: own buffers and stream, a CUDA graph where it captures.

    A `lanes.Bound` on these input buffers; `detail` says how it runs.
    """

    def __init__(
        self,
        forward: "Callable[..., Any]",
        inputs: "dict[str, torch.Tensor]",
        how: str,
        *,
        graph: bool = True,
        stream: "torch.cuda.Stream | None" = None,
    ) -> None:
        import torch

        self.torch, self.forward, self.inputs = torch, forward, inputs
        self.outputs: dict[str, torch.Tensor] = {}
        self.stream = stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.graph: Any = None
        torch.cuda.synchronize()
        for _ in range(WARM_CALLS):
            self._call()
        self.stream.synchronize()
        why = self._capture() if graph else "launched one by one"
        self.detail = f"{how}, no CUDA graph ({why})" if why else f"{how}, CUDA graph"

    def launch(self) -> None:
        """Enqueue one inference."""
        if self.graph is None:
            self._call()
            return
        with self.torch.cuda.stream(self.stream):
            self.graph.replay()

    def _call(self) -> None:
        with self.torch.cuda.stream(self.stream), self.torch.inference_mode():
            self.outputs = {OUTPUT: self.forward(**self.inputs)}

    def _capture(self) -> str | None:
        """Capture one inference; returns why it does not capture."""
        graph = self.torch.cuda.CUDAGraph()
        try:
            with self.torch.inference_mode(), self.torch.cuda.graph(graph, stream=self.stream):
                self.outputs = {OUTPUT: self.forward(**self.inputs)}
        except RuntimeError as error:
            self.torch.cuda.synchronize()
            self._call()
            return " ".join(str(error).split())[:160]
        self.graph = graph
        return None


def eager_forward(model: "PreTrainedModel") -> "Callable[..., torch.Tensor]":
    """Keyword inputs to answers."""
    names = list(name_outputs(model))
    return lambda **inputs: join_outputs(model(**inputs), names)


def compiled_forward(model: "PreTrainedModel", mode: str, *, dynamic: bool) -> "Callable[..., torch.Tensor]":
    """As `eager_forward`, through Inductor as one graph.

    `TorchRun` captures what comes out, so that "default" is what mode "reduce-overhead" does, less its copies
    of the inputs and its guards on every call.

    Raises:
        UserError: unknown mode.
    """
    import torch

    if mode not in COMPILE_MODES:
        raise UserError(f"compile mode {mode!r} is unknown; use {' or '.join(COMPILE_MODES)}")
    return torch.compile(eager_forward(model), mode=mode, dynamic=dynamic, fullgraph=True)


@contextlib.contextmanager
def tf32_allowed() -> Iterator[None]:
    """TF32 for FP32 matrix products, as engine builders allow it by default."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
