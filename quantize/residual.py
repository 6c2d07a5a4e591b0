"""The residual stream in INT8: what a BERT layer adds is rounded like the input of its linears.

In `LayerNorm(dense(h) + x)` the tensor x is also the input of other linears: of q, k and v, or of the first
feed-forward linear. Its quantizer rounds x exactly as theirs do, with the same amax and the same
factors of smoothing, which are divided out behind it. So all of them read one INT8 tensor, and it is the only
one that the LayerNorm before has to write; the placement is that of NVIDIA's BERT QAT (`residual_quantizer`).
A scale of its own would leave the engine with two tensors (docs/graph.md).
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from qdqbench.quantize.errors import CheckFailed
from qdqbench.quantize.kinds import residual_read_by, residual_readers

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from qdqbench.quantize.calibration import QuantizerState
    from qdqbench.quantize.matching import Plan

QUANTIZER = "residual_quantizer"


def shared_quantizers(plan: "Plan") -> list[tuple[str, ...]]:
    """Full names of the quantizers that round one tensor, and so have one amax, for each INT8 residual.

    The residual's comes first, then the input quantizers of its readers.
    """
    return [
        (f"{name}.{QUANTIZER}", *(f"{reader}.input_quantizer" for reader in residual_readers(name)))
        for name in plan.residual
    ]


def require_shared(states: "Mapping[str, QuantizerState]", plan: "Plan") -> None:
    """Hold residuals to the amax of the linears that read the same tensor.

    Raises:
        CheckFailed: names every residual that differs.
    """
    lost = [
        f"{group[0]} ({', '.join(f'{states[name].amax:g}' for name in group)})"
        for group in shared_quantizers(plan)
        if len({states[name].amax for name in group}) > 1
    ]
    if lost:
        raise CheckFailed(
            f"an INT8 residual and the linears that read the same tensor need one amax, and these differ: "
            f"{'; '.join(lost)}; calibrate again, or train them as one number"
        )


@contextmanager
def registered(wanted: Collection[str] = ("all",)) -> Iterator[None]:
    """Let ModelOpt give BERT's residuals a quantizer while the block runs.

    Not for good: every BERT that the process quantizes later would get them, and ModelOpt restores a saved
    state only where the same classes are registered. So restore one with this too.

    Args:
        wanted: modules whose residual becomes INT8; nothing is registered where there are none.
    """
    from transformers.models.bert.modeling_bert import BertOutput, BertSelfOutput

    from qdqbench.quantize.ptq import import_modelopt

    mtq = import_modelopt()
    classes = (BertSelfOutput, BertOutput) if wanted else ()
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


def smooth_like(model: "PreTrainedModel", linear: str, factors: "torch.Tensor") -> None:
    """Give the residual that reads the same tensor as a linear the factors of its input, in place."""
    name = residual_read_by(linear)
    quantizer: Any = getattr(model.get_submodule(name), QUANTIZER, None) if name else None
    if quantizer is not None and quantizer.is_enabled:
        quantizer.pre_quant_scale = factors
