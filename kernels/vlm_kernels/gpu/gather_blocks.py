"""Move whole blocks in Triton:  piece[i] = cache[ids[i]], and back.

Shapes: N blocks of C bytes in the cache; I of them are moved.

Reference: `vlm_kernels.gather_blocks.gather_blocks_reference`.

Tiles: a program moves TILE_N words of one block, the widest words that divide a block. A single
block has many programs, so it keeps the whole GPU busy.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vlm_kernels.gpu.configs import config

DEFAULT = {"TILE_N": 1024, "num_warps": 4}
WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@triton.jit
def _move(
    cache_ptr, piece_ptr, id_ptr, num_words,
    INTO_CACHE: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Grid: [blocks, tiles of a block]."""
    i = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    inside = word < num_words
    in_cache = cache_ptr + tl.load(id_ptr + i) * num_words + word
    in_piece = piece_ptr + i * num_words + word
    if INTO_CACHE:
        tl.store(in_cache, tl.load(in_piece, mask=inside, other=0), mask=inside)
    else:
        tl.store(in_piece, tl.load(in_cache, mask=inside, other=0), mask=inside)


def move_blocks(
    cache: torch.Tensor, piece: torch.Tensor, ids_I: torch.Tensor, *, into_cache: bool
) -> None:
    """Launch.

    Args:
        cache: uint8 `[N, C]`, contiguous.
        piece: uint8 `[I, C]`, contiguous; is written, or with `into_cache` is read.
        ids_I: int64 `[I]` on the device, 0 to N - 1; with `into_cache` all different.
        into_cache: whether the cache is written.
    """
    if not len(ids_I):
        return
    size, offset = cache.shape[1], cache.data_ptr() | piece.data_ptr()
    word = next(word for word in WORDS if (size | offset) % word.itemsize == 0)
    num_words = size // word.itemsize
    chosen = config("gather_blocks", "any", cache.device, DEFAULT)
    _move[len(ids_I), triton.cdiv(num_words, chosen["TILE_N"])](
        cache.view(word), piece.view(word), ids_I, num_words, INTO_CACHE=into_cache, **chosen
    )
