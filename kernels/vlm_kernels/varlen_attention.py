"""Attention inside segments:  o_i = sum_j softmax_j(scale * q_i . k_j) v_j  over j in i's segment.

Shapes: T packed tokens, H heads, D head size, C segments; segment c is `[cu_C1[c], cu_C1[c + 1])`.

Vision towers attend in both directions inside a window or a frame. With a native kernel, all
segments are one call. Without it, segments of equal length are computed together, without padding
and without a T x T mask: a batch of images has many segments of few different lengths.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch

from vlm_kernels import gpu
from vlm_kernels.dense_attention import dense_attention
from vlm_kernels.flash_attention import can_attend_segments, flash_attention
from vlm_kernels.opaque import opaque
from vlm_kernels.segments import plan_segments


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


@opaque(
    "varlen_attention(Tensor q_THD, Tensor k_THD, Tensor v_THD, Tensor cu_C1, *, float scale, "
    "bool use_native=True) -> Tensor"
)
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
        k_THD: keys, with as many heads as queries.
        v_THD: values.
        cu_C1: int32 `[C + 1]`, nondecreasing from 0 to T; segments may be empty.
        scale: factor of the scores.
        use_native: use the native kernel if it is available.

    Returns:
        `[T, H, D]`, every element written.

    Raises:
        ValueError: on a GPU, a shape, type, stride or device is wrong. The values of `cu_C1` are
            not read back from a GPU; tokens that it does not cover are not written.
    """
    if use_native and gpu.serves(q_THD.device):
        _check_launch(q_THD, k_THD, v_THD, cu_C1)
        from vlm_kernels.gpu.varlen_attention import varlen_attention as launch

        return launch(q_THD, k_THD, v_THD, cu_C1, scale=scale)
    edges = cu_C1.cpu().numpy().astype(np.int64)
    assert edges[0] == 0
    assert edges[-1] == len(q_THD)
    lengths = np.diff(edges)
    if use_native and can_attend_segments(q_THD.dtype, q_THD.device):
        o_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype)
        end = np.repeat(lengths, lengths)
        segments = plan_segments(lengths, lengths, np.zeros_like(end), end)
        flash_attention(segments, q_THD, k_THD, v_THD, o_THD, scale=scale)
        return o_THD
    sizes = np.unique(lengths[lengths > 0])
    if len(sizes) == 1:
        return _attend(q_THD, k_THD, v_THD, int(sizes[0]), scale)
    o_THD = torch.empty_like(q_THD)
    for size in sizes.tolist():
        starts = edges[:-1][lengths == size]
        tokens = (starts[:, None] + np.arange(size)).reshape(-1)
        at = torch.from_numpy(tokens).to(q_THD.device)
        o_THD[at] = _attend(q_THD[at], k_THD[at], v_THD[at], size, scale)
    return o_THD


def _check_launch(
    q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, cu_C1: torch.Tensor
) -> None:
    gpu.check_floats("varlen_attention: q", q_THD)
    if (
        q_THD.dim() != 3
        or not q_THD.shape == k_THD.shape == v_THD.shape
        or not q_THD.dtype == k_THD.dtype == v_THD.dtype
    ):
        shapes = [f"{x.dtype} {tuple(x.shape)}" for x in (q_THD, k_THD, v_THD)]
        raise ValueError(
            f"varlen_attention: q, k, v are {', '.join(shapes)}, must be alike, [T, H, D]"
        )
    if any(x.stride(2) != 1 for x in (q_THD, k_THD, v_THD)):
        raise ValueError("varlen_attention: the last stride of q, k and v must be 1")
    if cu_C1.dtype != torch.int32 or cu_C1.dim() != 1 or not cu_C1.is_contiguous():
        raise ValueError(f"varlen_attention: cu is {cu_C1.dtype} {tuple(cu_C1.shape)}, not int32")
    if len({x.device for x in (q_THD, k_THD, v_THD, cu_C1)}) > 1 or len(cu_C1) < 2:
        raise ValueError(
            f"varlen_attention: cu {tuple(cu_C1.shape)} on {cu_C1.device}, q on {q_THD.device}"
        )


def _attend(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    size: int,
    scale: float,
) -> torch.Tensor:
    """Segments of one length as a batch."""
    q, k, v = (
        x.reshape(-1, size, *x.shape[1:]).transpose(1, 2).flatten(0, 1)
        for x in (q_THD, k_THD, v_THD)
    )
    o = dense_attention(q[:, None], k, v, scale=scale)
    return o.view(-1, q_THD.shape[1], size, q_THD.shape[2]).transpose(1, 2).flatten(0, 1)
