"""Eager attention with a finite mask, registered with transformers."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ATTENTION = "qdq_eager"
ROW_MAX = "softmax_over_row_max"  # of an attention whose INT8 softmax is over the largest of each row
UNROUNDED = "unrounded_weight"  # of a linear whose weight is rounded for a while: as it was
MASK_FILL = -1e4  # finite in FP16; exp(-1e4) is exactly 0 in FP32 and FP16


def make_additive_mask(seen: "torch.Tensor", dtype: "torch.dtype") -> "torch.Tensor":
    """Return what is added to the scores: 0 where a query sees a key, MASK_FILL elsewhere.

    OpenVINO reads (1 - mask) * c as a dequantization, and adds scores / c to the mask, which BF16 loses.
    """
    import torch

    zero = torch.zeros((), dtype=dtype, device=seen.device)
    return torch.where(seen if seen.dtype == torch.bool else seen.bool(), zero, zero + MASK_FILL)


def _register_attention() -> None:
    """Register eager attention with a quantizer on the softmax output and a mask that is finite in FP16.

    ModelOpt puts `p_bmm_quantizer` on HF attention and then ignores INT8 there. The mask is [B, 1, 1, L], and
    with a sliding window [B, 1, L, L].
    """
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface

    def attention(  # noqa: PLR0913, PLR0917  (the interface of transformers)
        module: "torch.nn.Module",
        query: "torch.Tensor",
        key: "torch.Tensor",
        value: "torch.Tensor",
        attention_mask: "torch.Tensor | None",
        scaling: float | None = None,
        dropout: float = 0.0,
        **_: Any,
    ) -> "tuple[torch.Tensor, torch.Tensor]":
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        scores = torch.matmul(query, key.transpose(2, 3)) * scaling
        if attention_mask is not None:
            scores = scores + attention_mask
        weights = torch.nn.functional.softmax(scores, dim=-1)
        row_max = getattr(module, ROW_MAX, False)
        if row_max:
            weights = weights / weights.amax(-1, keepdim=True)
        if (quantizer := getattr(module, "p_bmm_quantizer", None)) is not None:
            weights = quantizer(weights)
        total = weights.sum(-1, keepdim=True) if row_max else None
        weights = torch.nn.functional.dropout(weights, p=dropout, training=module.training)
        context = torch.matmul(weights, value)
        if total is not None:
            context, weights = context / total, weights / total
        return context.transpose(1, 2).contiguous(), weights

    def mask(
        *,
        attention_mask: "torch.Tensor | None" = None,
        dtype: "torch.dtype" = torch.float32,
        local_size: int | None = None,
        **sizes: Any,
    ) -> "torch.Tensor | None":
        seen = attention_mask if attention_mask is None else attention_mask[:, None, None, :]
        if local_size is not None:  # to both sides
            rows, columns = (
                torch.arange(sizes[n], device=sizes["device"]) for n in ("q_length", "kv_length")
            )
            near = (rows[:, None] - columns).abs() <= local_size
            seen = near[None, None] if seen is None else near & seen.bool()
        return None if seen is None else make_additive_mask(seen, dtype)

    AttentionInterface.register(ATTENTION, attention)
    AttentionMaskInterface.register(ATTENTION, mask)
