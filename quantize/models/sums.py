"""DistilBERT's layers with a module for each sum of a residual, where a quantizer has a place."""

from typing import TYPE_CHECKING, Any

from torch import nn
from transformers.models.distilbert.modeling_distilbert import TransformerBlock

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class Sum(nn.Module):
    """The sum of a layer's output and the residual, [B, L, hidden] each."""

    def forward(self, hidden_states: "torch.Tensor", input_tensor: "torch.Tensor") -> "torch.Tensor":
        return hidden_states + input_tensor


class SummedTransformerBlock(TransformerBlock):  # type: ignore[no-untyped-call]
    """The original to the bit; its sums have no weights, so checkpoints are the same."""

    attention_sum: Sum
    ffn_sum: Sum

    def forward(
        self, hidden_states: "torch.Tensor", attention_mask: "torch.Tensor | None" = None, **kwargs: Any
    ) -> "torch.Tensor":
        attended, _ = self.attention(hidden_states, attention_mask=attention_mask, **kwargs)
        attended = self.sa_layer_norm(self.attention_sum(attended, hidden_states))
        summed = self.ffn_sum(self.ffn(attended), attended)
        return self.output_layer_norm(summed)  # type: ignore[no-any-return]


def add_sums(model: "PreTrainedModel") -> None:
    for module in model.modules():
        if type(module) is TransformerBlock:
            module.attention_sum, module.ffn_sum = Sum(), Sum()
            module.__class__ = SummedTransformerBlock
