"""Blocks of two kinds in one cache: keys and values of one modality in int8, the others unrounded.

    cache   [N, L, 2, H, P * (D + 4)] words of the wide type's size: int16 with bfloat16, int32
            with float32
    wide    [P, D] of the wide type                         P tokens; its last words are unused
    narrow  [R * P, D] int8, then [R * P] float32 scales    R * P tokens; R is the size of a word

All blocks have the same number of bytes, so that a pool, a transfer or a hash does not see kinds. A
narrow block has R parts of P rows each. An entry of a block table is one part, thus P tokens:

    entry = (block * 2 + is_narrow) * R + part              the part of a wide block is 0

A slot is `entry * P + offset`: a block's slots are adjacent. Entry 0 is the null block. A value of
a narrow row is `element * scale`, rounded to the wide type.

Shapes: D head size, P tokens per entry, E entries, C pieces.
"""

from __future__ import annotations

import numpy as np
import torch

from vlm_kernels.kv_rows import MIXED, block_size_of, quantise, values_of


def num_parts(kv_cache: torch.Tensor) -> int:
    """R: the entries of a narrow block; 1 if the cache has one kind."""
    return kv_cache.dtype.itemsize if kv_cache.dtype in MIXED else 1


def num_entries(kv_cache: torch.Tensor) -> int:
    """The numbers that an entry of a block table may have, from 0 on."""
    kinds = 2 if kv_cache.dtype in MIXED else 1
    return len(kv_cache) * num_parts(kv_cache) * kinds


def split_entries(
    entries_E: np.ndarray, num_parts: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Block, part and kind (True is narrow) of each entry."""
    kind, part = np.divmod(entries_E, num_parts)
    block, is_narrow = np.divmod(kind, 2)
    return block, part, is_narrow.astype(np.bool_)


def values_of_entries(pieces_C: torch.Tensor, entries_C: np.ndarray, head_dim: int) -> torch.Tensor:
    """The values `[C, P, D]` of entries, in the wide type.

    Args:
        pieces_C: `[C, P * (D + 4)]` of a cache with two kinds: the piece of each entry's block.
        entries_C: int64.
        head_dim: D.
    """
    wide, size = MIXED[pieces_C.dtype], block_size_of(pieces_C, head_dim)
    parts = pieces_C.dtype.itemsize
    _, part, is_narrow = (torch.from_numpy(x) for x in split_entries(entries_C, parts))
    values = pieces_C[:, : size * head_dim].view(wide).reshape(-1, size, head_dim).clone()
    narrow = values_of(pieces_C[is_narrow].contiguous().view(torch.int8), head_dim)
    narrow = narrow.view(len(narrow), parts, size, head_dim)
    values[is_narrow] = narrow[torch.arange(len(narrow)), part[is_narrow]].to(wide)
    return values


def store_row(kv_cache: torch.Tensor, at: tuple[int, int], slot: int, row_HD: torch.Tensor) -> None:
    """Write one token's keys, or values, of all heads to a slot: the definition.

    `at` are the layer, and 0 for keys or 1 for values.
    """
    head_dim = row_HD.shape[-1]
    size, parts = block_size_of(kv_cache, head_dim), num_parts(kv_cache)
    entry, offset = divmod(slot, size)
    block, part, is_narrow = (x.item() for x in split_entries(np.array(entry), parts))
    pieces_H = kv_cache[block, at[0], at[1]]
    if not is_narrow:
        begin = offset * head_dim
        wide = MIXED[kv_cache.dtype]
        pieces_H.view(wide)[:, begin : begin + head_dim] = row_HD.to(wide)
        return
    codes_H, row, num_rows = pieces_H.view(torch.int8), part * size + offset, parts * size
    elements, scales = quantise(row_HD)
    codes_H[:, row * head_dim : (row + 1) * head_dim] = elements
    begin = num_rows * head_dim + row * 4
    codes_H[:, begin : begin + 4] = scales[:, None].view(torch.int8)
