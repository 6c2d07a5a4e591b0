"""MPNet's attention through transformers' AttentionInterface.

The bias of relative positions (Song et al. 2020, arXiv 2004.09297), the same in every layer, is added to the
mask once. Buckets are constants, as their logarithms in FP16 would fall into other buckets.
"""

from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.mpnet import modeling_mpnet as theirs

from qdqbench.quantize.models.sums import Sum


class MPNetSelfAttention(theirs.MPNetSelfAttention):
    """Attention over hidden states [B, L, N]; `attention_mask` is added to the scores, [B, H, L, L]."""

    config: Any
    is_causal = False

    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shape = hidden_states.shape[:-1]
        heads = (*shape, -1, self.attention_head_size)
        query, key, value = (
            linear(hidden_states).view(heads).transpose(1, 2) for linear in (self.q, self.k, self.v)
        )
        # called here, by this name: ModelOpt finds attentions by it in a module's own source
        attention = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        dropout = self.dropout.p if self.training else 0.0
        context, probabilities = attention(
            self, query, key, value, attention_mask, scaling=self.attention_head_size**-0.5, dropout=dropout
        )
        return self.o(context.reshape(*shape, -1)), probabilities


class MPNetAttention(theirs.MPNetAttention):
    """Attention, residual and LayerNorm; the sum has no weights, so checkpoints are the same."""

    sum: Sum

    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output, probabilities = self.attn(hidden_states, attention_mask)
        return self.LayerNorm(self.sum(self.dropout(output), hidden_states)), probabilities


class MPNetEncoder(theirs.MPNetEncoder):
    buckets: torch.Tensor  # int64 [P, P], from query to key

    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **options: Any
    ) -> Any:
        length = hidden_states.shape[1]
        bias = self.relative_attention_bias(self.buckets[:length, :length]).permute(2, 0, 1).unsqueeze(0)
        if attention_mask is not None and attention_mask.dtype == torch.bool:  # as SDPA gets it
            bias = bias.masked_fill(~attention_mask, torch.finfo(bias.dtype).min)
        elif attention_mask is not None:
            bias = bias + attention_mask
        return super().forward(hidden_states, bias, **options)

    def compute_position_bias(self, *_: Any, **__: Any) -> None:
        """Return None: the bias is in the mask."""


def use_interface(model: Any) -> None:
    """Let every attention of a model go through the interface, in place; weights and their names stay."""
    positions = torch.arange(model.config.max_position_embeddings)
    for module in list(model.modules()):
        if type(module) is theirs.MPNetSelfAttention:
            module.__class__ = MPNetSelfAttention
            module.config = model.config
        elif type(module) is theirs.MPNetAttention:
            module.__class__ = MPNetAttention
            module.sum = Sum()
        elif type(module) is theirs.MPNetEncoder:
            module.__class__ = MPNetEncoder
            buckets = module.relative_position_bucket(  # type: ignore[no-untyped-call]
                positions - positions[:, None]
            )
            module.register_buffer("buckets", buckets.to(model.device), persistent=False)
