"""Received attention:  a_j = 1 / (H n) sum_h sum_i softmax_j(scale * q_i . k_j).

Shapes: T packed tokens, H heads, D head size, C segments; i runs over the segment
`[cu_C1[c], cu_C1[c + 1])` of j, which has n tokens.

It is the mean, over queries and heads, of the weight that attention gives to a token; the tokens
of a segment share 1. VisionZip (arXiv 2412.04467) selects visual tokens by it if a tower has no
class token. Scores are never whole in memory. C++ on CPUs (`cpu/received_attention.cpp`), Triton on
GPUs, torch elsewhere.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch

from vlm_kernels import gpu
from vlm_kernels.cpu import native

SYMBOL = "triptych_received_attention"
_POINTER, _SIZE, _NUMBER = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
ARGUMENTS = (
    *(_POINTER, _SIZE, _SIZE, _POINTER, _SIZE, _SIZE),
    *(_POINTER, _SIZE, _SIZE, _SIZE, ctypes.c_float, _NUMBER, _POINTER, _NUMBER),
)
MAX_SCORES = 1 << 22
"""Scores that torch has in memory at once: 16 MiB."""


def received_attention_reference(
    q_THD: torch.Tensor, k_THD: torch.Tensor, cu_C1: torch.Tensor, *, scale: float
) -> torch.Tensor:
    """The definition: segment by segment, in float32."""
    a_T = torch.zeros(len(q_THD))
    for start, end in itertools.pairwise(cu_C1.tolist()):
        scores = torch.einsum("qhd,khd->hqk", q_THD[start:end].float(), k_THD[start:end].float())
        if end > start:
            a_T[start:end] = torch.softmax(scale * scores, dim=-1).mean((0, 1))
    return a_T


def received_attention(
    q_THD: torch.Tensor, k_THD: torch.Tensor, cu_C1: torch.Tensor, *, scale: float
) -> torch.Tensor:
    """Compute the attention that each token receives inside its segment.

    On a CPU, the result of a segment does not depend on the others, or on the number of threads.

    Args:
        q_THD: queries after rotation, float32 or bfloat16, on GPUs float16 too.
        k_THD: keys of the same shape and type.
        cu_C1: int32, nondecreasing from 0 to T; segments may be empty.
        scale: factor of the scores, positive.

    Returns:
        float32 `[T]`, every element written.

    Raises:
        ValueError: a shape, type, device or edge is wrong. The values of `cu_C1` are not read back
            from a GPU; tokens that it does not cover are 0 there.
    """
    _check(q_THD, k_THD, cu_C1, scale)
    q_THD, k_THD = (x if x.stride(2) == 1 else x.contiguous() for x in (q_THD, k_THD))
    if gpu.serves(q_THD.device):
        from vlm_kernels.gpu.received_attention import received_attention as launch

        return launch(q_THD, k_THD, cu_C1.contiguous(), scale=scale)
    edges = _edges(cu_C1, len(q_THD))
    run = _kernel() if q_THD.device.type == "cpu" else None
    if run is None or q_THD.dtype not in {torch.float32, torch.bfloat16}:
        return _by_torch(q_THD, k_THD, edges, scale)
    a_T = q_THD.new_empty(len(q_THD), dtype=torch.float32)
    run(
        q_THD.data_ptr(),
        *q_THD.stride()[:2],
        k_THD.data_ptr(),
        *k_THD.stride()[:2],
        edges.data_ptr(),
        len(edges) - 1,
        *q_THD.shape[1:],
        scale,
        q_THD.dtype == torch.bfloat16,
        a_T.data_ptr(),
        torch.get_num_threads(),
    )
    return a_T


def _check(q_THD: torch.Tensor, k_THD: torch.Tensor, cu_C1: torch.Tensor, scale: float) -> None:
    gpu.check_floats("received_attention: q", q_THD)
    is_alike = q_THD.shape == k_THD.shape and q_THD.dtype == k_THD.dtype
    if q_THD.dim() != 3 or not is_alike or q_THD.shape[1] == 0:
        raise ValueError(
            f"received_attention: q and k are {q_THD.dtype} {tuple(q_THD.shape)}, "
            f"{k_THD.dtype} {tuple(k_THD.shape)}, must be alike, [T, H, D]"
        )
    if cu_C1.dtype != torch.int32 or cu_C1.dim() != 1 or len(cu_C1) < 2:
        raise ValueError(
            f"received_attention: cu is {cu_C1.dtype} {tuple(cu_C1.shape)}, must be int32 [C + 1]"
        )
    if len({x.device for x in (q_THD, k_THD, cu_C1)}) > 1:
        raise ValueError(
            f"received_attention: q is on {q_THD.device}, k on {k_THD.device}, cu on {cu_C1.device}"
        )
    if not scale > 0:
        raise ValueError(f"received_attention: scale is {scale}, must be positive")


def _edges(cu_C1: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """The edges as int64 on the CPU; raises ValueError unless they rise from 0 to all tokens."""
    edges = cu_C1.to("cpu", torch.int64).contiguous()
    if edges[0] != 0 or edges[-1] != num_tokens or bool((edges.diff() < 0).any()):
        raise ValueError(f"received_attention: cu must not fall from 0 to {num_tokens}")
    return edges


def _by_torch(
    q_THD: torch.Tensor, k_THD: torch.Tensor, edges: torch.Tensor, scale: float
) -> torch.Tensor:
    """As the reference, some rows of scores at a time."""
    num_tokens, num_heads, _ = q_THD.shape
    a_T = torch.zeros(num_tokens, device=q_THD.device)
    for start, end in itertools.pairwise(edges.tolist()):
        q, k = (x[start:end].float().transpose(0, 1) for x in (q_THD, k_THD))
        rows = max(1, MAX_SCORES // (num_heads * max(1, end - start)))
        for some in torch.split(q, rows, dim=1):
            weights = torch.softmax(scale * (some @ k.mT), dim=-1)
            a_T[start:end] += weights.sum((0, 1)) / (num_heads * (end - start))
    return a_T


@functools.cache
def _kernel() -> Callable[..., Any] | None:
    return native.function(SYMBOL, *ARGUMENTS)
