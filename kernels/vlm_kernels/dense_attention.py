"""Dense attention:  o_q = sum_j softmax_j(scale * q . k_j + mask_qj) v_j  in batches of one shape.

Shapes: B batches, each of one KV head; G query heads that share it, Q queries, K keys, D head size.

Two implementations. torch's fused kernel never stores the scores, but its inner products run at a
third of the speed of a matrix product on CPUs with AVX512-BF16. There, in bfloat16, two matrix
products around a softmax are twice as fast, in parts whose scores fit into the cache. Scores are
then rounded to bfloat16 before the softmax, as in transformers' `eager` attention. Sums inside
products and softmax are float32.
"""

from __future__ import annotations

import torch
from torch.nn import functional

MAX_SCORES = 1 << 20
"""Scores of one part: 2 MiB of bfloat16, about the size of a core's own cache."""

MAX_QUERIES = 256
"""Queries of one part; under a causal mask, a part reads no key after its last query."""


def dense_attention_reference(
    q_BGQD: torch.Tensor,
    k_BKD: torch.Tensor,
    v_BKD: torch.Tensor,
    *,
    scale: float,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    softcap: float | None = None,
) -> torch.Tensor:
    """The definition, in float32."""
    scores = scale * torch.einsum("bgqd,bkd->bgqk", q_BGQD.float(), k_BKD.float())
    scores = capped(scores, softcap)
    if mask is not None:
        scores = scores + mask.float()
    if causal:
        behind = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(behind, float("-inf"))
    o_BGQD = torch.einsum("bgqk,bkd->bgqd", torch.softmax(scores, dim=-1), v_BKD.float())
    return o_BGQD.to(q_BGQD.dtype)


def capped(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Scores s bounded to c tanh(s / c); None sets no bound."""
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def dense_attention(
    q_BGQD: torch.Tensor,
    k_BKD: torch.Tensor,
    v_BKD: torch.Tensor,
    *,
    scale: float,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attend; keys and values of a batch are shared by its G query heads.

    Args:
        q_BGQD: queries.
        k_BKD: keys; the inner axis has stride 1.
        v_BKD: values; the inner axis has stride 1.
        scale: factor of the scores.
        mask: added to scores; 4 axes that broadcast to `[B, G, Q, K]`. Every query sees some key.
        causal: query i sees keys up to i; K = Q, and no mask.
        softcap: bound of the scores before the mask; None sets no bound.

    Returns:
        `[B, G, Q, D]`, every element written.
    """
    assert not causal or (mask is None and q_BGQD.shape[2] == k_BKD.shape[1])
    if softcap is not None or (q_BGQD.device.type == "cpu" and q_BGQD.dtype == torch.bfloat16):
        return _by_products(q_BGQD, k_BKD, v_BKD, scale, mask, causal, softcap)
    return _fused(q_BGQD, k_BKD, v_BKD, scale, mask, causal)


def _fused(
    q_BGQD: torch.Tensor,
    k_BKD: torch.Tensor,
    v_BKD: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None,
    causal: bool,
) -> torch.Tensor:
    """Use the fused kernel; shared keys are one view per query head, with stride 0."""
    if q_BGQD.shape[2] == 1:  # the query heads of a KV head become rows of one small product
        mask = None if mask is None else mask.transpose(1, 2)
        o_BQGD = functional.scaled_dot_product_attention(
            q_BGQD.transpose(1, 2), k_BKD[:, None], v_BKD[:, None], attn_mask=mask, scale=scale
        )
        return o_BQGD.transpose(1, 2)
    k, v = (x[:, None].expand(-1, q_BGQD.shape[1], -1, -1) for x in (k_BKD, v_BKD))
    return functional.scaled_dot_product_attention(
        q_BGQD, k, v, attn_mask=mask, is_causal=causal, scale=scale
    )


def _by_products(
    q_BGQD: torch.Tensor,
    k_BKD: torch.Tensor,
    v_BKD: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None,
    causal: bool,
    softcap: float | None,
) -> torch.Tensor:
    """Compute in parts: some batches, and some of their queries."""
    num_batches, num_groups, num_queries, _ = q_BGQD.shape
    per_query = num_groups * k_BKD.shape[1]
    queries = max(1, min(num_queries, MAX_QUERIES, MAX_SCORES // per_query))
    batches = max(1, MAX_SCORES // (per_query * queries))
    if mask is not None:
        mask = mask.expand(num_batches, -1, num_queries, -1)
    o_BGQD = torch.empty_like(q_BGQD, memory_format=torch.contiguous_format)
    for b in range(0, num_batches, batches):
        of = slice(b, b + batches)
        for start in range(0, num_queries, queries):
            end = min(start + queries, num_queries)
            num_keys = end if causal else k_BKD.shape[1]
            o_BGQD[of, :, start:end] = _piece(
                q_BGQD[of, :, start:end],
                k_BKD[of, :num_keys],
                v_BKD[of, :num_keys],
                scale,
                None if mask is None else mask[of, :, start:end],
                causal,
                softcap,
            )
    return o_BGQD


def _piece(
    q_BGQD: torch.Tensor,
    k_BKD: torch.Tensor,
    v_BKD: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None,
    causal: bool,
    softcap: float | None,
) -> torch.Tensor:
    """Scores, softmax, sum: the queries of all G heads are the rows of one product per batch.

    Causal queries are the last Q of the K keys.
    """
    num_batches, num_groups, num_queries, head_dim = q_BGQD.shape
    num_keys = k_BKD.shape[1]
    rows = q_BGQD.reshape(num_batches, num_groups * num_queries, head_dim)
    nothing = rows.new_empty(1)  # not read, because beta is 0
    scores = torch.baddbmm(nothing, rows, k_BKD.transpose(1, 2), beta=0, alpha=scale)
    scores = capped(scores, softcap)
    scores_BGQK = scores.view(num_batches, num_groups, num_queries, num_keys)
    if mask is not None:
        scores_BGQK += mask
    if causal:
        behind = scores.new_full((num_queries, num_queries), float("-inf"))
        scores_BGQK[..., num_keys - num_queries :] += behind.triu_(1)
    weights = torch.softmax(scores, dim=-1)
    return torch.bmm(weights, v_BKD).view(num_batches, num_groups, num_queries, head_dim)
