"""Paged attention:  o_t = sum_j softmax_j(scale * q_t . k_j) v_j  over the positions j that t sees.

Token t at position p of its sequence sees position j if `j <= p`, or if both are in one span (an
image with bidirectional attention). With a sliding window w, it sees j only if also `j > p - w`.
With a soft cap c, scores are `c * tanh(scale * q_t . k_j / c)` (Gemma 2, arXiv 2408.00118).

Shapes: T packed query tokens, S sequences, H KV heads, G query heads per KV head, D head size,
P slots per block, B blocks per sequence; the cache is `[N, L, 2, H, P * D]`; for int8, scales
follow (`kv_rows`); of two kinds of blocks, a block table has entries of P slots (`mixed_blocks`).
The KV of the queries' own tokens is stored before.

    plan = plan_attention(...)          once per step
    paged_attention(q, ..., plan)       once per layer. In C++, `decode_attention` computes decoding
                                        rows, and `flash_attention` chunks of prefill. Torch
                                        computes the rest by group: gather, attend. On a GPU,
                                        `gpu/paged_attention.py` computes everything

Query heads of one KV head share its gathered rows; nothing is repeated in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vlm_kernels.attention_groups import Group, Spans
from vlm_kernels.attention_plan import AttentionPlan
from vlm_kernels.decode_attention import attend_decode
from vlm_kernels.dense_attention import capped, dense_attention
from vlm_kernels.flash_attention import flash_paged_attention
from vlm_kernels.kv_rows import TWO_KINDS, block_size_of, values_of
from vlm_kernels.mixed_blocks import num_parts, split_entries, values_of_entries
from vlm_kernels.tiled_attention import attend_tiled


def paged_attention_reference(
    q_THD: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    query_start: np.ndarray,
    context_lens: np.ndarray,
    block_table: np.ndarray,
    *,
    scale: float,
    spans: Spans = (),
    window: int | None = None,
    spans_exceed_window: bool = False,
    softcap: float | None = None,
) -> torch.Tensor:
    """The definition: one query token and one head at a time, in float32."""
    num_heads, head_dim = q_THD.shape[1:]
    num_kv_heads, block_size = kv_cache.shape[3], block_size_of(kv_cache, head_dim)
    o_THD = torch.empty_like(q_THD)
    for s, context_len in enumerate(context_lens.tolist()):
        start, end = int(query_start[s]), int(query_start[s + 1])
        for t in range(start, end):
            p = context_len + t - start
            seen = [
                j
                for j in range(context_len + end - start)
                if _sees(p, j, window, spans[s] if len(spans) else (), spans_exceed_window)
            ]
            blocks = _values(
                kv_cache, layer, block_table[s, : seen[-1] // block_size + 1], head_dim
            )
            for h in range(num_heads):
                of_head = blocks[:, :, h * num_kv_heads // num_heads].transpose(0, 1)
                k, v = of_head.reshape(2, -1, head_dim)[:, seen].float()
                scores = capped(scale * (k @ q_THD[t, h].float()), softcap)
                weights = torch.softmax(scores, dim=0)
                o_THD[t, h] = (weights @ v).to(o_THD.dtype)
    return o_THD


def _values(kv_cache: torch.Tensor, layer: int, table: np.ndarray, head_dim: int) -> torch.Tensor:
    """The values `[B, 2, H, P, D]` of the blocks, or entries, of one sequence."""
    if kv_cache.dtype not in TWO_KINDS:
        return values_of(kv_cache[table, layer], head_dim)
    blocks, _, _ = split_entries(table, num_parts(kv_cache))
    pieces = kv_cache[blocks, layer]
    entries = np.repeat(table.astype(np.int64), pieces.shape[1] * pieces.shape[2])
    is_key = np.arange(len(entries)) // pieces.shape[2] % 2 == 0
    values = values_of_entries(pieces.reshape(-1, pieces.shape[-1]), entries, is_key, head_dim)
    return values.view(*pieces.shape[:3], -1, head_dim)


def _sees(
    p: int,
    j: int,
    window: int | None,
    spans: Sequence[tuple[int, int]],
    spans_exceed_window: bool,
) -> bool:
    in_span = any(a <= p < b and a <= j < b for a, b in spans)
    in_window = window is None or j > p - window
    return (in_span and spans_exceed_window) or ((j <= p or in_span) and in_window)


def paged_attention(
    q_THD: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    plan: AttentionPlan,
    *,
    scale: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attend over KV blocks.

    Args:
        q_THD: packed queries, `[T, H * G, D]`; head h reads KV head h // G.
        kv_cache: `[N, L, 2, H, P * D]`, contiguous.
        layer: layer index in the cache.
        plan: of this step, from `plan_attention`.
        scale: factor of the scores.
        softcap: bound of the scores; None sets no bound.

    Returns:
        `[T, H * G, D]`, every element written.

    Raises:
        ValueError: q, cache and plan do not match.
    """
    if plan.tiles is not None:
        return attend_tiled(q_THD, kv_cache, layer, plan.tiles, scale=scale, softcap=softcap)
    num_kv_heads, head_dim = kv_cache.shape[3], q_THD.shape[-1]
    o_THD: torch.Tensor | None = None
    if plan.rows is not None:
        o_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype)
        attend_decode(plan.rows, q_THD, layer, o_THD, scale=scale, softcap=softcap)
    if plan.chunks is not None:
        o_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype) if o_THD is None else o_THD
        flash_paged_attention(
            plan.chunks, q_THD, kv_cache, layer, o_THD, scale=scale, softcap=softcap
        )
    pieces = kv_cache.view(-1, kv_cache.shape[-1])
    for group in plan.groups:
        rows = group.kv_pieces + layer * 2 * num_kv_heads
        gathered = pieces.index_select(0, rows)
        if group.entries is None:
            kv = values_of(gathered, head_dim).reshape(-1, head_dim)
        else:
            is_key = np.arange(len(group.entries)) < len(group.entries) // 2
            kv = values_of_entries(gathered, group.entries, is_key, head_dim).view(-1, head_dim)
        if group.unwritten is not None:
            kv.index_fill_(0, group.unwritten, 0)
        kv = kv.view(2, group.num_seqs * num_kv_heads, -1, head_dim)[:, :, : group.num_kv]
        kv = kv.to(q_THD.dtype)
        at = slice(None) if group.tokens is None else group.tokens
        o_THD = (
            torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
            if o_THD is None
            else o_THD
        )
        o_THD[at] = _attend(q_THD[at], kv, group, num_kv_heads, scale, softcap)
    assert o_THD is not None
    return o_THD


def _attend(
    q: torch.Tensor,
    kv: torch.Tensor,
    group: Group,
    num_kv_heads: int,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Attend in one group: q `[S * Q, H * G, D]`, kv `[2, S * H, num_kv, D]`."""
    head_dim, num_groups = q.shape[-1], q.shape[1] // num_kv_heads
    q = q.view(group.num_seqs, group.num_queries, num_kv_heads, num_groups, head_dim)
    q = q.permute(0, 2, 3, 1, 4).reshape(-1, num_groups, group.num_queries, head_dim)
    o = dense_attention(
        q, kv[0], kv[1], scale=scale, mask=group.mask, causal=group.causal, softcap=softcap
    )
    o = o.view(group.num_seqs, num_kv_heads, num_groups, group.num_queries, head_dim)
    return o.permute(0, 3, 1, 2, 4).reshape(-1, num_kv_heads * num_groups, head_dim)
