"""Layers of transformers as recipes need them, to the bit; weights and their names stay.

MPNet's and DeBERTa's attention go through transformers' AttentionInterface. Sums of residuals are modules,
where a quantizer has a place.

MPNet's bias of relative positions (Song et al. 2020, arXiv 2004.09297), the same in every layer, is added to
the mask once. Buckets are constants, as their logarithms in FP16 would fall into other buckets.

In DeBERTa (He et al. 2020, arXiv 2006.03654) the score of query i for key j in bucket b of i - j is (q_i k_j
+ q_i K_b + k_j Q_b) / sqrt(3 d). K and Q, the projections of the relative embeddings, follow from weights
alone: constants of a graph, never quantized. The last two terms are added to the mask and stay in FP16.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deberta_v2 import modeling_deberta_v2 as deberta
from transformers.models.distilbert.modeling_distilbert import TransformerBlock
from transformers.models.mpnet import modeling_mpnet as mpnet

from qdqbench.quantize.models.attention import UNROUNDED, make_additive_mask


class Sum(nn.Module):
    """The sum of a layer's output and the residual, [B, L, hidden] each."""

    def forward(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        return hidden_states + input_tensor


class SummedTransformerBlock(TransformerBlock):  # type: ignore[no-untyped-call]
    """The original to the bit; its sums have no weights, so checkpoints are the same."""

    attention_sum: Sum
    ffn_sum: Sum

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        attended, _ = self.attention(hidden_states, attention_mask=attention_mask, **kwargs)
        attended = self.sa_layer_norm(self.attention_sum(attended, hidden_states))
        summed = self.ffn_sum(self.ffn(attended), attended)
        return self.output_layer_norm(summed)  # type: ignore[no-any-return]


def add_sums(model: PreTrainedModel) -> None:
    for module in model.modules():
        if type(module) is TransformerBlock:
            module.attention_sum, module.ffn_sum = Sum(), Sum()
            module.__class__ = SummedTransformerBlock


class MPNetSelfAttention(mpnet.MPNetSelfAttention):
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


class MPNetAttention(mpnet.MPNetAttention):
    """Attention, residual and LayerNorm; the sum has no weights, so checkpoints are the same."""

    sum: Sum

    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output, probabilities = self.attn(hidden_states, attention_mask)
        return self.LayerNorm(self.sum(self.dropout(output), hidden_states)), probabilities


class MPNetEncoder(mpnet.MPNetEncoder):
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


class Terms(nn.Module):
    """Terms of the scores from positions; a module, so that its product is not taken for the attention's."""

    def forward(self, heads: torch.Tensor, table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Multiply q or k [B, H, L, D] by a table [H, D, buckets], and take the places [L, L]: [B, H, L, L].

        Heads stand first in the product, as an engine would copy the table for each sample of a batch.
        """
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            table = torch.from_numpy(table.detach().cpu().numpy()).to(table.device)  # a constant of the graph
        batch, count, _, size = heads.shape
        products = torch.bmm(heads.transpose(0, 1).reshape(count, -1, size), table)
        return products.view(count, batch, -1)[:, :, places].transpose(0, 1)


class DisentangledSelfAttention(deberta.DisentangledSelfAttention):
    config: Any
    c2p: Terms
    p2c: Terms
    is_causal = False

    def forward(  # noqa: PLR0913, PLR0917  (that of transformers)
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor,
        output_attentions: bool = False,
        query_states: None = None,
        relative_pos: torch.Tensor | None = None,
        rel_embeddings: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the context [B, L, N], and the probabilities [B, H, L, L] or None.

        Args:
            attention_mask: added to the scores, [B, 1, 1, L].
            relative_pos: places in [L * buckets] of the terms of each query and of each key, int64 [2, L, L].
            rel_embeddings: [buckets, N].
        """
        assert relative_pos is not None
        shape = hidden_states.shape[:-1]
        heads = (*shape, -1, self.attention_head_size)
        query, key, value = (
            linear(hidden_states).view(heads).transpose(1, 2)
            for linear in (self.query_proj, self.key_proj, self.value_proj)
        )
        parts = 1 + sum(kind in self.pos_att_type for kind in ("c2p", "p2c"))
        scaling = (parts * self.attention_head_size) ** -0.5
        rel_embeddings = self.pos_dropout(rel_embeddings)
        if "c2p" in self.pos_att_type:
            table = self._project(self.key_proj, rel_embeddings) * scaling
            attention_mask = attention_mask + self.c2p(query, table, relative_pos[0])
        if "p2c" in self.pos_att_type:
            table = self._project(self.query_proj, rel_embeddings) * scaling
            attention_mask = attention_mask + self.p2c(key, table, relative_pos[1])
        # called here, by this name: ModelOpt finds attentions by it in a module's own source
        attention = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        dropout = self.dropout.p if self.training else 0.0
        context, probabilities = attention(
            self, query, key, value, attention_mask, scaling=scaling, dropout=dropout
        )
        return context.reshape(*shape, -1), probabilities

    def _project(self, linear: Any, rel_embeddings: torch.Tensor) -> torch.Tensor:
        """Return relative embeddings as q or k of each head [H, D, buckets], past the linear's quantizers."""
        factors = getattr(getattr(linear, "input_quantizer", None), "pre_quant_scale", None)  # of smoothing
        inputs = rel_embeddings if factors is None else rel_embeddings * factors
        projected = functional.linear(inputs, linear.__dict__.get(UNROUNDED, linear.weight), linear.bias)
        return projected.view(-1, self.num_attention_heads, self.attention_head_size).permute(1, 2, 0)


class DebertaV2Encoder(deberta.DebertaV2Encoder):
    places: torch.Tensor  # int64 [2, P, P]

    def get_attention_mask(self, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return the mask added to the scores, [B, 1, 1, L]; nothing reads what padded queries attend to."""
        return make_additive_mask(attention_mask[:, None, None, :], self.rel_embeddings.weight.dtype)

    def get_rel_pos(self, hidden_states: torch.Tensor, *_: Any) -> torch.Tensor:
        length = hidden_states.shape[1]
        return self.places[:, :length, :length]


class DebertaV2Embeddings(deberta.DebertaV2Embeddings):
    """Embeddings that are not set to 0 where padding is: nothing reads them."""

    def forward(self, *args: Any, mask: Any = None, **kwargs: Any) -> torch.Tensor:
        return super().forward(*args, **kwargs)  # type: ignore[no-any-return, no-untyped-call]


_MPNET = (MPNetSelfAttention, MPNetAttention, MPNetEncoder)
_DEBERTA = (DisentangledSelfAttention, DebertaV2Embeddings, DebertaV2Encoder)
OURS: dict[type, type] = {ours.__bases__[0]: ours for ours in (*_MPNET, *_DEBERTA)}


def use_interface(model: Any) -> None:
    """Let every attention of a model go through the interface, in place."""
    device, positions = model.device, torch.arange(model.config.max_position_embeddings)
    for module in list(model.modules()):
        if (ours := OURS.get(type(module))) is None:
            continue
        module.__class__ = ours
        if ours is DisentangledSelfAttention:
            module.config, module.c2p, module.p2c = model.config, Terms(), Terms()
        elif ours is DebertaV2Encoder:
            module.register_buffer("places", _places(module, positions).to(device), persistent=False)
        elif ours is MPNetSelfAttention:
            module.config = model.config
        elif ours is MPNetAttention:
            module.sum = Sum()
        elif ours is MPNetEncoder:
            buckets = module.relative_position_bucket(positions - positions[:, None])
            module.register_buffer("buckets", buckets.to(device), persistent=False)


def _places(encoder: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return flat places of the terms of each query i and each key j in [P * buckets], int64 [2, P, P]."""
    each, limits = tokens[:, None].float(), (encoder.position_buckets, encoder.max_relative_positions)
    distance = deberta.build_relative_position(each, each, *limits)[0]
    buckets = encoder.rel_embeddings.num_embeddings
    bucket = (distance + buckets // 2).clamp(0, buckets - 1)
    return torch.stack([tokens[:, None] * buckets + bucket, tokens * buckets + bucket])
