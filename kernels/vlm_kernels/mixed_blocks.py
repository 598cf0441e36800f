"""Blocks of two kinds in one cache: keys and values of one modality in few bits, others unrounded.

    cache   [N, L, 2, H, P * (D + 4)] words of the wide type's size: int16 with bfloat16, int32
            with float32
    wide    [P, D] of the wide type                         P tokens; its last words are unused
    narrow  [R * P, D] int8, then [R * P] float32 scales    R * P tokens; R is the size of a word

In 4 bits, a narrow block is a group of 32 tokens (`int4_groups`), R is twice the size of a word,
and P is 32 / R. Words are uint16 and uint32, and a piece has those of the group. A group is written
when all its tokens are there, next to each other; attention reads it after that.

All blocks have the same number of bytes, so that a pool, a transfer or a hash does not see kinds. A
narrow block has R parts of P rows each. An entry of a block table is one part, thus P tokens:

    entry = (block * 2 + is_narrow) * R + part              the part of a wide block is 0

A slot is `entry * P + offset`: a block's slots are adjacent. Entry 0 is the null block. A value of
a row in int8 is `element * scale`, rounded to the wide type.

Shapes: D head size, P tokens per entry, E entries, C pieces.
"""

from __future__ import annotations

import numpy as np
import torch

from vlm_kernels.int4_groups import GROUP, store_group, values_of_groups
from vlm_kernels.kv_rows import GROUPED, TWO_KINDS, block_size_of, quantise, values_of


def num_parts(kv_cache: torch.Tensor) -> int:
    """R: the entries of a narrow block; 1 if the cache has one kind."""
    return _num_parts(kv_cache.dtype) if kv_cache.dtype in TWO_KINDS else 1


def num_entries(kv_cache: torch.Tensor) -> int:
    """The numbers that an entry of a block table may have, from 0 on."""
    kinds = 2 if kv_cache.dtype in TWO_KINDS else 1
    return len(kv_cache) * num_parts(kv_cache) * kinds


def split_entries(
    entries_E: np.ndarray, num_parts: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Block, part and kind (True is narrow) of each entry."""
    kind, part = np.divmod(entries_E, num_parts)
    block, is_narrow = np.divmod(kind, 2)
    return block, part, is_narrow.astype(np.bool_)


def values_of_entries(
    pieces_C: torch.Tensor, entries_C: np.ndarray, is_key_C: np.ndarray, head_dim: int
) -> torch.Tensor:
    """The values `[C, P, D]` of entries, in the wide type.

    Args:
        pieces_C: `[C, words]` of a cache with two kinds: the piece of each entry's block.
        entries_C: int64.
        is_key_C: bool, whether a piece has keys.
        head_dim: D.
    """
    wide, size = TWO_KINDS[pieces_C.dtype], block_size_of(pieces_C, head_dim)
    parts = _num_parts(pieces_C.dtype)
    _, part, is_narrow = (torch.from_numpy(x) for x in split_entries(entries_C, parts))
    values = pieces_C.view(wide)[:, : size * head_dim].reshape(-1, size, head_dim).clone()
    of_narrow = pieces_C.view(torch.uint8)[is_narrow].contiguous()
    if pieces_C.dtype in GROUPED:
        narrow = values_of_groups(of_narrow, torch.from_numpy(is_key_C)[is_narrow], head_dim)
    else:
        narrow = values_of(of_narrow.view(torch.int8), head_dim)
    narrow = narrow.view(len(narrow), parts, size, head_dim)
    values[is_narrow] = narrow[torch.arange(len(narrow)), part[is_narrow]].to(wide)
    return values


def check_groups(kv_cache: torch.Tensor, slots_T: np.ndarray, head_dim: int) -> None:
    """Raise ValueError if new tokens would write a part of a block in 4 bits.

    `slots_T` are int64, in the order of the tokens.
    """
    if kv_cache.dtype not in GROUPED:
        return
    entries = slots_T // block_size_of(kv_cache, head_dim)
    at = split_entries(entries, num_parts(kv_cache))[2].nonzero()[0]
    if not len(at):
        return
    if len(at) % GROUP == 0:
        groups, tokens = slots_T[at].reshape(-1, GROUP), at.reshape(-1, GROUP)
        order = np.arange(GROUP)
        is_whole = (groups == groups[:, :1] + order) & (groups[:, :1] % GROUP == 0)
        if is_whole.all() and (tokens == tokens[:, :1] + order).all():
            return
    raise ValueError(f"slots: a block in 4 bits is written whole, {GROUP} tokens in order")


def store_mixed(
    kv_cache: torch.Tensor, at: tuple[int, int], slots_T: np.ndarray, rows_THD: torch.Tensor
) -> None:
    """Write keys, or values, of new tokens to their slots: the definition.

    `at` are the layer, and 0 for keys or 1 for values.
    """
    is_grouped, head_dim = kv_cache.dtype in GROUPED, rows_THD.shape[-1]
    size, parts = block_size_of(kv_cache, head_dim), num_parts(kv_cache)
    block_T, _, is_narrow_T = split_entries(slots_T // size, parts)
    for token, slot in enumerate(slots_T.tolist()):
        if not (is_grouped and is_narrow_T[token]):
            _store_row(kv_cache, at, slot, rows_THD[token])
        elif slot % GROUP == 0:
            pieces_H = kv_cache[int(block_T[token]), at[0], at[1]].view(torch.uint8)
            store_group(pieces_H, rows_THD[token : token + GROUP], is_key=at[1] == 0)


def _store_row(
    kv_cache: torch.Tensor, at: tuple[int, int], slot: int, row_HD: torch.Tensor
) -> None:
    """Write one token's keys, or values, of all heads to a slot."""
    head_dim = row_HD.shape[-1]
    size, parts = block_size_of(kv_cache, head_dim), num_parts(kv_cache)
    entry, offset = divmod(slot, size)
    block, part, is_narrow = (x.item() for x in split_entries(np.array(entry), parts))
    pieces_H = kv_cache[block, at[0], at[1]]
    if not is_narrow:
        begin = offset * head_dim
        wide = TWO_KINDS[kv_cache.dtype]
        pieces_H.view(wide)[:, begin : begin + head_dim] = row_HD.to(wide)
        return
    codes_H, row, num_rows = pieces_H.view(torch.int8), part * size + offset, parts * size
    elements, scales = quantise(row_HD)
    codes_H[:, row * head_dim : (row + 1) * head_dim] = elements
    begin = num_rows * head_dim + row * 4
    codes_H[:, begin : begin + 4] = scales[:, None].view(torch.int8)


def _num_parts(words: torch.dtype) -> int:
    return words.itemsize * (2 if words in GROUPED else 1)
