"""How a token's row lies in a KV block, by the type of the cache.

    float32, bfloat16, float16    [P, D]                     values
    int8                          [P, D] then [P] float32    value = integer * scale of its row

A row is one token's key, or value, of one head: what a scale is shared by (KIVI, arXiv 2402.02750,
finds one scale per token enough for 8 bits). A new token changes no scale that is there already,
and the scales lie behind their integers in the same piece, so that a block moves as one.

    scale = max |x| / 127      integer = round(x * (127 / max |x|)), ties to even

A row that is not finite has a scale that is not: it reads as NaN, and shows.

Shapes: D head size, P slots per block, C pieces, one of each (block, layer, key or value, head).
"""

from __future__ import annotations

import torch

SCALE_BYTES = 4
MOST = 127


def slot_elements(dtype: torch.dtype, head_dim: int) -> int:
    """Elements of the cache's last axis that one slot takes."""
    return head_dim + SCALE_BYTES if dtype == torch.int8 else head_dim


def block_size_of(kv_cache: torch.Tensor, head_dim: int) -> int:
    """Slots of a block. Raises ValueError where the last axis does not hold whole ones."""
    size = slot_elements(kv_cache.dtype, head_dim)
    if head_dim < 1 or kv_cache.shape[-1] % size:
        raise ValueError(
            f"head_dim {head_dim}: a slot of {size} does not divide {kv_cache.shape[-1]} elements"
        )
    return kv_cache.shape[-1] // size


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `[..., D]` as int8 of the same shape, and their float32 scales `[...]`."""
    x = x.float()
    most = x.abs().amax(dim=-1)
    factor = MOST / most
    factor = torch.where(torch.isfinite(factor), factor, 0)
    integers = (x * factor[..., None]).round()
    return torch.where(factor[..., None] > 0, integers, 0).to(torch.int8), most / MOST


def split_pieces(pieces: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Views of an int8 or float cache `[..., P * slot]`: its rows, and the bytes of its scales.

    Returns:
        `[..., P, D]`, and `[..., P, SCALE_BYTES]` int8, None where the rows are values.
    """
    block_size = block_size_of(pieces, head_dim)
    shape = pieces.shape[:-1]
    rows = pieces[..., : block_size * head_dim].view(*shape, block_size, head_dim)
    if pieces.dtype != torch.int8:
        return rows, None
    return rows, pieces[..., block_size * head_dim :].view(*shape, block_size, SCALE_BYTES)


def values_of(pieces: torch.Tensor, head_dim: int) -> torch.Tensor:
    """The values `[..., P, D]` of pieces: as they are, or float32 out of int8."""
    rows, scale_bytes = split_pieces(pieces, head_dim)
    if scale_bytes is None:
        return rows
    return rows.float() * scale_bytes.contiguous().view(torch.float32)
