"""The residual stream in INT8: what a BERT layer adds is rounded like the input of its linears.

In `LayerNorm(dense(h) + x)` the tensor x is also the input of other linears: of q, k and v, or of the first
feed-forward linear. Its quantizer rounds x exactly as theirs do, with the same amax and the same
factors of smoothing, which are divided out behind it. So all of them read one INT8 tensor, and it is the only
one that the LayerNorm before has to write; the placement is that of NVIDIA's BERT QAT (`residual_quantizer`).
A scale of its own would leave the engine with two tensors (docs/graph.md).
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from qdqbench.quantize.fakequant.quantizers import import_modelopt
from qdqbench.quantize.families.known import family_of

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


QUANTIZER = "residual_quantizer"


@contextmanager
def registered(model: "PreTrainedModel", wanted: Collection[str] = ("all",)) -> Iterator[None]:
    """Let ModelOpt give a model's residuals a quantizer while the block runs.

    Not for good: every such model that the process quantizes later would get them, and ModelOpt restores a
    saved state only where the same classes are registered. So restore one with this too.
    Nothing is registered where no module's residual is `wanted` in INT8.
    """
    mtq = import_modelopt()
    classes = family_of(model.config).residual_classes(model) if wanted else ()
    for each in classes:
        mtq.register(each, _quantized_class())
    try:
        yield
    finally:
        for each in classes:
            mtq.unregister(each)


def _quantized_class() -> type:
    """What ModelOpt mixes into a module that adds a residual."""
    from modelopt.torch.quantization.nn import TensorQuantizer

    class QuantResidual:
        """`LayerNorm(dense(h) + x)` whose x is fake-quantized."""

        def _setup(self) -> None:
            self.residual_quantizer = TensorQuantizer()

        def forward(self, hidden_states: "torch.Tensor", input_tensor: "torch.Tensor") -> "torch.Tensor":
            rounded = fake_quantized(self.residual_quantizer, input_tensor)
            return super().forward(hidden_states, rounded)  # type: ignore[misc,no-any-return]

    return QuantResidual


def fake_quantized(quantizer: Any, value: "torch.Tensor") -> "torch.Tensor":
    """A residual after its quantizer, without the factors of smoothing: powers of two, so both are exact."""
    rounded: torch.Tensor = quantizer(value)
    factors = quantizer.pre_quant_scale
    return rounded if factors is None else rounded * (1 / factors)
