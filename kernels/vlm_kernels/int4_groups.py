"""Blocks of 32 tokens in 4 bits: keys with a scale per channel, values per token.

KIVI (arXiv 2402.02750): channels of keys have outliers, so 4 bits of a key need a range per
channel, over a group of tokens. Values have none: a range per token, over a group of its channels.

    codes     uint8 [32, D / 2]       of a token: channel d in the low half of byte d, d + D / 2 in
                                      the high one
    keys      bfloat16 scales [D], minima [D]             of a channel, over the block's tokens
    values    bfloat16 scales [32, C], minima [32, C]     of a token, over up to 32 channels

    scale = (max x - min x) / 15    code = round((x - minimum) / scale)

A value is `code * scale + minimum`. Scale and minimum are rounded before the codes are computed
from them. A group that has a number that is not finite reads as NaN. A piece is these bytes of one
block, layer and head, of keys or of values; both have `32 * (D / 2 + 4 * C)` bytes if C is D / 32,
rounded up.

All 32 tokens are written at once. `mixed_blocks` has the cache, `cpu/int4_groups.h` the kernels'
part.

Shapes: D head size, H heads, C pieces where it is the first axis.
"""

from __future__ import annotations

import torch

GROUP = 32
_LEVELS = 15


def piece_bytes(head_dim: int) -> int:
    """Bytes of one block's keys, or values, of one layer and head."""
    return GROUP * (head_dim // 2 + 4 * -(-head_dim // GROUP))


def store_group(pieces_H: torch.Tensor, rows_THD: torch.Tensor, *, is_key: bool) -> None:
    """Write the keys, or values, of 32 tokens to the pieces of a block.

    Args:
        pieces_H: uint8 `[H, piece_bytes]`, written in place.
        rows_THD: `[32, H, D]`.
        is_key: the rows are keys.
    """
    x_HTD = rows_THD.float().transpose(0, 1)
    head_dim = x_HTD.shape[-1]
    codes = torch.empty(x_HTD.shape, dtype=torch.uint8)
    parts: list[list[torch.Tensor]] = [[], []]
    for begin in range(0, head_dim, GROUP):
        of = slice(begin, begin + GROUP)
        codes[..., of], scales, minima = _quantise(x_HTD[..., of], axis=1 if is_key else 2)
        parts[0].append(scales)
        parts[1].append(minima)
    half = head_dim // 2
    packed = codes[..., :half] | codes[..., half:] << 4
    numbers = [torch.cat(part, dim=2).flatten(1).contiguous().view(torch.uint8) for part in parts]
    done = torch.cat([packed.flatten(1), *numbers], dim=1)
    pieces_H[:, : done.shape[1]] = done


def values_of_groups(pieces_C: torch.Tensor, is_key_C: torch.Tensor, head_dim: int) -> torch.Tensor:
    """The values of pieces, float32 `[C, 32, D]`.

    Args:
        pieces_C: uint8 `[C, piece_bytes]`.
        is_key_C: bool, whether a piece has keys.
        head_dim: D.
    """
    half = head_dim // 2
    packed = pieces_C[:, : GROUP * half].view(-1, GROUP, half)
    codes = torch.cat([packed & 15, packed >> 4], dim=2).float()
    numbers = pieces_C[:, GROUP * half :].contiguous().view(torch.bfloat16).float()
    out = torch.empty_like(codes)
    for is_key, num_scales in ((True, head_dim), (False, GROUP * -(-head_dim // GROUP))):
        of = is_key_C == is_key
        scales, minima = numbers[of, :num_scales], numbers[of, num_scales : 2 * num_scales]
        shape = (-1, 1, head_dim) if is_key else (-1, GROUP, num_scales // GROUP)
        scales, minima = (x.reshape(shape) for x in (scales, minima))
        if not is_key:
            scales, minima = (
                x.repeat_interleave(GROUP, dim=2)[..., :head_dim] for x in (scales, minima)
            )
        out[of] = codes[of] * scales + minima
    return out


def _quantise(x: torch.Tensor, *, axis: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes of the shape of x; scales and minima, of size 1 in `axis`."""
    low, high = x.amin(dim=axis, keepdim=True), x.amax(dim=axis, keepdim=True)
    bad = (x - x).sum(dim=axis, keepdim=True)
    scales = ((high - low) / _LEVELS + bad).bfloat16()
    minima = low.bfloat16()
    factor = 1 / scales.float()
    is_usable = torch.isfinite(factor) & (factor > 0)
    codes = ((x - minima.float()) * factor).round().clamp(0, _LEVELS)
    return torch.where(is_usable, codes, 0).to(torch.uint8), scales, minima
