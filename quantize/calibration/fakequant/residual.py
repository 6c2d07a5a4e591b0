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

from qdqbench.quantize.calibration.fakequant.quantizers import import_modelopt
from qdqbench.quantize.models.families.known import family_of

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


QUANTIZER = "residual_quantizer"


@contextmanager
def register_residuals(model: "PreTrainedModel", wanted: Collection[str] = ("all",)) -> Iterator[None]:
    """Let ModelOpt give a model's residuals a quantizer while the block runs, and keep its own attention.

    Not for good: every such model that the process quantizes later would get them, and ModelOpt restores a
    saved state only where the same classes are registered. So restore one with this too.
    Nothing is registered where no module's residual is `wanted` in INT8. ModelOpt writes the source of an
    attention anew that transformers' interface does not call, and fails on some: such a one stays as it is.
    """
    mtq, family = import_modelopt(), family_of(model.config)
    from modelopt.torch.quantization.plugins.custom import CUSTOM_MODEL_PLUGINS
    from modelopt.torch.quantization.plugins.huggingface import register_hf_attentions_on_the_fly

    classes = family.residual_classes(model) if wanted else ()
    if family.attention is None:
        CUSTOM_MODEL_PLUGINS.discard(register_hf_attentions_on_the_fly)
    for each in classes:
        mtq.register(each, _quantized_class())
    try:
        yield
    finally:
        CUSTOM_MODEL_PLUGINS.add(register_hf_attentions_on_the_fly)
        for each in classes:
            mtq.unregister(each)


def _quantized_class() -> type:
    """Return the mix-in of ModelOpt for a module that adds a residual."""
    from modelopt.torch.quantization.nn import TensorQuantizer

    class QuantResidual:
        """`LayerNorm(dense(h) + x)` whose x is fake-quantized."""

        def _setup(self) -> None:
            self.residual_quantizer = TensorQuantizer()

        def forward(self, hidden_states: "torch.Tensor", input_tensor: "torch.Tensor") -> "torch.Tensor":
            rounded = quantize_residual(self.residual_quantizer, input_tensor)
            return super().forward(hidden_states, rounded)  # type: ignore[misc,no-any-return]

    return QuantResidual


def quantize_residual(quantizer: Any, value: "torch.Tensor") -> "torch.Tensor":
    """Quantize a residual and take the factors of smoothing out: powers of two, so both are exact."""
    rounded: torch.Tensor = quantizer(value)
    factors = quantizer.pre_quant_scale
    return rounded if factors is None else rounded * (1 / factors)
