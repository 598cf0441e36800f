"""The layout of a token's row in a KV block, by the type of the cache.

    float32, bfloat16, float16    [P, D]                     values
    int8, float8_e4m3fn           [P, D] then [P] float32    value = element * scale of its row
    int16, int32                  blocks of two kinds, one of them int8 (`mixed_blocks`)
    uint16, uint32                blocks of two kinds, one of them in 4 bits (`int4_groups`)

A row is one token's key, or value, of one head, and has one scale (KIVI, arXiv 2402.02750, finds
one scale per token enough for 8 bits). A new token changes no existing scale. The scales follow
their elements in the same block, so that a block is copied as one.

    scale = max |x| / limit    element = round(x * (limit / max |x|)), ties to even

The limit is 127, or 448 for float8. Only GPUs support float8, with tensor cores; the C++ kernels do
not. A row that is not finite has a scale that is not: it reads as NaN, which makes the error
visible.

Shapes: D head size, P slots per block, C pieces, one of each (block, layer, key or value, head).
"""

from __future__ import annotations

import torch

from vlm_kernels import gpu
from vlm_kernels.int4_groups import GROUP, piece_bytes

SCALE_BYTES = 4
LIMITS = {torch.int8: 127, torch.float8_e4m3fn: 448}
"""Types of quantised rows, and their largest elements."""

MIXED = {torch.int16: torch.bfloat16, torch.int32: torch.float32}
"""Words of a cache with blocks of two kinds, and the type of its wide rows (`mixed_blocks`)."""

GROUPED = {torch.uint16: torch.bfloat16, torch.uint32: torch.float32}
"""The same with narrow blocks of 32 tokens in 4 bits (`int4_groups`)."""

TWO_KINDS = MIXED | GROUPED

NATIVE_TYPES = {
    torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.int16: 3, torch.int32: 4,
    torch.uint16: 5, torch.uint32: 6,
}  # fmt: skip
"""Cache types of the C++ kernels; the numbers are `KVType`'s in cpu/kv_types.h."""


def slot_elements(dtype: torch.dtype, head_dim: int) -> int:
    """Elements of the cache's last axis per slot, scale included."""
    if dtype in GROUPED:
        return piece_bytes(head_dim) * 2 // GROUP  # a wide block has 32 / 2 / itemsize slots
    return head_dim + SCALE_BYTES if dtype in LIMITS or dtype in MIXED else head_dim


def block_size_of(kv_cache: torch.Tensor, head_dim: int) -> int:
    """Slots of a block, or of an entry (`mixed_blocks`).

    Raises ValueError if the last axis is not a multiple of a slot, or no group of 4 bits.
    """
    if kv_cache.dtype in GROUPED:
        num_bytes = kv_cache.shape[-1] * kv_cache.element_size()
        if head_dim < 1 or head_dim % 2 or num_bytes != piece_bytes(head_dim):
            raise ValueError(
                f"head_dim {head_dim}: a block in 4 bits has {GROUP} tokens of an even head_dim, "
                f"not {num_bytes} bytes"
            )
        return GROUP // (2 * kv_cache.element_size())
    size = slot_elements(kv_cache.dtype, head_dim)
    if head_dim < 1 or kv_cache.shape[-1] % size:
        raise ValueError(
            f"head_dim {head_dim}: a slot of {size} does not divide {kv_cache.shape[-1]} elements"
        )
    return kv_cache.shape[-1] // size


def check_cache_type(kv_cache: torch.Tensor) -> None:
    """Raise ValueError if the GPU kernels do not support the cache's type."""
    if kv_cache.dtype in TWO_KINDS:
        raise ValueError("kv_cache: the GPU kernels do not read blocks of two kinds")
    if kv_cache.dtype not in LIMITS:
        gpu.check_floats("kv_cache", kv_cache)


def quantise(x: torch.Tensor, dtype: torch.dtype = torch.int8) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows `[..., D]`: elements of the same shape, and their float32 scales `[...]`."""
    x = x.float()
    most = x.abs().amax(dim=-1)
    factor = LIMITS[dtype] / most
    factor = torch.where(torch.isfinite(factor), factor, 0)[..., None]
    elements = torch.where(factor > 0, x * factor, 0)
    if dtype == torch.int8:
        elements = elements.round()
    return elements.to(dtype), most / LIMITS[dtype]


def split_pieces(pieces: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Views of a cache `[..., P * slot]`: its rows, and the bytes of its scales.

    Returns:
        `[..., P, D]`, and `[..., P, SCALE_BYTES]` int8, or None if rows are not quantised.
    """
    block_size = block_size_of(pieces, head_dim)
    shape = pieces.shape[:-1]
    rows = pieces[..., : block_size * head_dim].view(*shape, block_size, head_dim)
    if pieces.dtype not in LIMITS:
        return rows, None
    scale_bytes = pieces[..., block_size * head_dim :].view(torch.int8)
    return rows, scale_bytes.view(*shape, block_size, SCALE_BYTES)


def layer_views(
    kv_cache: torch.Tensor, layer: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One layer in the layout of the GPU kernels.

    Returns:
        Rows `[N, 2, H, P, D]`, and float32 scales `[N, 2, H, P]` of a quantised cache.

    Raises:
        ValueError: rows are so short that the scales after them are misaligned, or the GPU does not
            support float8.
    """
    if kv_cache.dtype == torch.float8_e4m3fn and kv_cache.device.type == "cuda":
        capability = torch.cuda.get_device_capability(kv_cache.device)
        if capability < (8, 9):
            raise ValueError(f"float8 KV needs compute capability 8.9, this GPU has {capability}")
    rows, scale_bytes = split_pieces(kv_cache[:, layer], head_dim)
    if scale_bytes is None:
        return rows, None
    if rows.shape[-2] * head_dim % 4:
        raise ValueError(
            f"kv_cache of {kv_cache.dtype}: {rows.shape[-2]} slots of {head_dim} must fill words"
        )
    return rows, scale_bytes.view(torch.float32)[..., 0]


def values_of(pieces: torch.Tensor, head_dim: int) -> torch.Tensor:
    """The values `[..., P, D]` of pieces: the rows themselves, or dequantised to float32."""
    rows, scale_bytes = split_pieces(pieces, head_dim)
    if scale_bytes is None:
        return rows
    return rows.float() * scale_bytes.contiguous().view(torch.float32)
