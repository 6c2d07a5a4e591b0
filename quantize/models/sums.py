"""Layers that add their residuals themselves get a module for each sum, where a quantizer has a place."""

from typing import TYPE_CHECKING, Any

from torch import nn
from transformers.models.distilbert.modeling_distilbert import TransformerBlock

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class Sum(nn.Module):
    """What a layer made, and the residual."""

    def forward(self, hidden_states: "torch.Tensor", input_tensor: "torch.Tensor") -> "torch.Tensor":
        """Add both tensors [B, L, hidden]."""
        return hidden_states + input_tensor


class SummedTransformerBlock(TransformerBlock):  # type: ignore[no-untyped-call]
    """DistilBERT's layer; its sums have no weights, so checkpoints are the same."""

    attention_sum: Sum
    ffn_sum: Sum

    def forward(
        self, hidden_states: "torch.Tensor", attention_mask: "torch.Tensor | None" = None, **kwargs: Any
    ) -> "torch.Tensor":
        """Compute as the original, bit for bit the same."""
        attended, _ = self.attention(hidden_states, attention_mask=attention_mask, **kwargs)
        attended = self.sa_layer_norm(self.attention_sum(attended, hidden_states))
        made: torch.Tensor = self.output_layer_norm(self.ffn_sum(self.ffn(attended), attended))
        return made


def add_sums(model: "PreTrainedModel") -> None:
    """Give each such layer of a model its sums, in place."""
    for module in model.modules():
        if type(module) is TransformerBlock:
            module.attention_sum, module.ffn_sum = Sum(), Sum()
            module.__class__ = SummedTransformerBlock
