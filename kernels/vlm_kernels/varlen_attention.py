"""Attention inside segments:  o_i = sum_j softmax_j(scale * q_i . k_j) v_j  over j in i's segment.

Shapes: T packed tokens, H heads, D head size, C segments; segment c is `[cu_C1[c], cu_C1[c + 1])`.

Vision towers attend in both directions inside a window or a frame; a batch of pictures is many
segments of few different lengths, so segments of one length are computed together, without padding
and without a T x T mask.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch

from vlm_kernels.dense_attention import dense_attention
from vlm_kernels.flash_attention import can_attend_dense, flash_attention


def varlen_attention_reference(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    cu_C1: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """The definition: segment by segment, in float32."""
    o_THD = torch.empty_like(q_THD)
    edges = cu_C1.tolist()
    for start, end in itertools.pairwise(edges):
        scores = torch.einsum("qhd,khd->hqk", q_THD[start:end].float(), k_THD[start:end].float())
        weights = torch.softmax(scale * scores, dim=-1)
        o_THD[start:end] = torch.einsum("hqk,khd->qhd", weights, v_THD[start:end].float()).to(
            o_THD.dtype
        )
    return o_THD


def varlen_attention(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    cu_C1: torch.Tensor,
    *,
    scale: float,
    use_native: bool = True,
) -> torch.Tensor:
    """Attend inside each segment.

    Args:
        q_THD: queries.
        k_THD: keys, as many heads as queries.
        v_THD: values.
        cu_C1: int32 `[C + 1]`, rising from 0 to T; an empty segment is allowed.
        scale: factor of the scores.
        use_native: compute by the native kernel, where there is one.

    Returns:
        `[T, H, D]`, every element written.
    """
    edges = cu_C1.cpu().numpy().astype(np.int64)
    assert edges[0] == 0
    assert edges[-1] == len(q_THD)
    lengths = np.diff(edges)
    sizes = np.unique(lengths[lengths > 0])
    if len(sizes) == 1:
        return _attend(q_THD, k_THD, v_THD, int(sizes[0]), scale, use_native)
    o_THD = torch.empty_like(q_THD)
    for size in sizes.tolist():
        starts = edges[:-1][lengths == size]
        tokens = (starts[:, None] + np.arange(size)).reshape(-1)
        at = torch.from_numpy(tokens).to(q_THD.device)
        o_THD[at] = _attend(q_THD[at], k_THD[at], v_THD[at], size, scale, use_native)
    return o_THD


def _attend(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    size: int,
    scale: float,
    use_native: bool,
) -> torch.Tensor:
    """Segments of one length as a batch."""
    if use_native and can_attend_dense(q_THD.dtype, q_THD.device):
        o_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype)
        q, k, v, o = (
            x.view(-1, size, *x.shape[1:]).transpose(1, 2) for x in (q_THD, k_THD, v_THD, o_THD)
        )
        flash_attention(q[:, :, None], k, v, o[:, :, None], scale=scale)
        return o_THD
    q, k, v = (
        x.reshape(-1, size, *x.shape[1:]).transpose(1, 2).flatten(0, 1)
        for x in (q_THD, k_THD, v_THD)
    )
    o = dense_attention(q[:, None], k, v, scale=scale)
    return o.view(-1, q_THD.shape[1], size, q_THD.shape[2]).transpose(1, 2).flatten(0, 1)
