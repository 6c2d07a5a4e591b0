"""DeBERTa's attention (He et al. 2020, arXiv 2006.03654) through transformers' AttentionInterface.

The score of query i for key j in bucket b of i - j is (q_i k_j + q_i K_b + k_j Q_b) / sqrt(3 d). K and Q, the
projections of the relative embeddings, follow from weights alone: constants of a graph, never quantized. The
last two terms are added to the mask and stay in FP16.
"""

from typing import Any

import torch
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deberta_v2 import modeling_deberta_v2 as theirs

from qdqbench.quantize.models.attention import MASK_FILL, UNROUNDED


class Terms(torch.nn.Module):
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


class DisentangledSelfAttention(theirs.DisentangledSelfAttention):
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


class DebertaV2Encoder(theirs.DebertaV2Encoder):
    places: torch.Tensor  # int64 [2, P, P]

    def get_attention_mask(self, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return the mask added to the scores, [B, 1, 1, L]; nothing reads what padded queries attend to."""
        dtype = self.rel_embeddings.weight.dtype
        return (1.0 - attention_mask[:, None, None, :].to(dtype)) * MASK_FILL

    def get_rel_pos(self, hidden_states: torch.Tensor, *_: Any) -> torch.Tensor:
        length = hidden_states.shape[1]
        return self.places[:, :length, :length]


class DebertaV2Embeddings(theirs.DebertaV2Embeddings):
    """Embeddings that are not set to 0 where padding is: nothing reads them."""

    def forward(self, *args: Any, mask: Any = None, **kwargs: Any) -> torch.Tensor:
        return super().forward(*args, **kwargs)  # type: ignore[no-any-return, no-untyped-call]


def use_interface(model: Any) -> None:
    """Let every attention of a model go through the interface, in place; weights and their names stay."""
    for module in list(model.modules()):
        if type(module) is theirs.DisentangledSelfAttention:
            module.__class__ = DisentangledSelfAttention
            module.config, module.c2p, module.p2c = model.config, Terms(), Terms()
        elif type(module) is theirs.DebertaV2Embeddings:
            module.__class__ = DebertaV2Embeddings
        elif type(module) is theirs.DebertaV2Encoder:
            module.__class__ = DebertaV2Encoder
            module.register_buffer("places", _places(module, model.config).to(model.device), persistent=False)


def _places(encoder: Any, config: Any) -> torch.Tensor:
    """Return flat places of the terms of each query i and each key j in [P * buckets], int64 [2, P, P]."""
    tokens = torch.arange(config.max_position_embeddings)
    each, limits = tokens[:, None].float(), (encoder.position_buckets, encoder.max_relative_positions)
    distance = theirs.build_relative_position(each, each, *limits)[0]
    buckets = encoder.rel_embeddings.num_embeddings
    bucket = (distance + buckets // 2).clamp(0, buckets - 1)
    return torch.stack([tokens[:, None] * buckets + bucket, tokens * buckets + bucket])
