"""Gather blocks:  out[i] = cache[ids[i]], as contiguous bytes; scatter is its inverse.

Shapes: N blocks in the cache, I blocks to copy, C bytes per block. A block is contiguous, so its
copy is one copy of C bytes for every model. A GPU gathers blocks in its own memory first, so that
one transfer crosses the bus.
"""

from __future__ import annotations

import numpy as np
import torch

from vlm_kernels import gpu


def gather_blocks_reference(kv_cache: torch.Tensor, ids_I: np.ndarray) -> np.ndarray:
    """The definition: block by block."""
    blocks = [kv_cache[int(i)].contiguous().view(torch.uint8).flatten().cpu() for i in ids_I]
    return torch.stack(blocks).numpy()


def gather_blocks(
    kv_cache: torch.Tensor, ids_I: np.ndarray, out_IC: np.ndarray | None = None
) -> np.ndarray:
    """Copy whole blocks into one buffer in host memory.

    Args:
        kv_cache: `[N, ...]`, contiguous.
        ids_I: int64 block ids, each below N.
        out_IC: uint8 `[I, C]`, contiguous, the destination; None allocates. Filling memory that was
            written before is several times as fast.

    Returns:
        uint8 `[I, C]`.

    Raises:
        ValueError: an id is not in the cache or not int64, or `out_IC` has another shape or type,
            or is not writable.
    """
    _check_ids(kv_cache, ids_I)
    if out_IC is None:
        out_IC = np.empty((len(ids_I), _block_bytes(kv_cache)), np.uint8)
    _check_bytes(kv_cache, ids_I, out_IC)
    if not out_IC.flags.c_contiguous or not out_IC.flags.writeable:
        raise ValueError("out_IC must be contiguous, and writeable")
    ids, out = torch.from_numpy(ids_I).to(kv_cache.device), torch.from_numpy(out_IC)
    if gpu.serves(kv_cache.device):
        out.copy_(_move(kv_cache, None, ids))
    elif kv_cache.device.type == "cpu":
        # the ids are checked; without "clip", numpy would gather into a temporary buffer
        np.take(_host_bytes(kv_cache), ids_I, axis=0, out=out_IC, mode="clip")
    else:
        out.copy_(kv_cache.index_select(0, ids).flatten(1).view(torch.uint8))
    return out_IC


def scatter_blocks(kv_cache: torch.Tensor, ids_I: np.ndarray, data_IC: np.ndarray) -> None:
    """Write whole blocks into the cache, in place.

    Args:
        kv_cache: `[N, ...]`, contiguous.
        ids_I: int64 block ids, all different, each below N.
        data_IC: uint8 `[I, C]`; may be read-only.

    Raises:
        ValueError: an id is not in the cache, not int64 or repeated, or the number of bytes is
            wrong.
    """
    _check_ids(kv_cache, ids_I)
    _check_bytes(kv_cache, ids_I, data_IC)
    if len(np.unique(ids_I)) != len(ids_I):
        raise ValueError("a block is written twice")
    ids = torch.from_numpy(ids_I).to(kv_cache.device)
    if gpu.serves(kv_cache.device):
        _move(kv_cache, torch.from_numpy(data_IC.copy()).to(kv_cache.device), ids)
        return
    if kv_cache.device.type == "cpu":
        _host_bytes(kv_cache)[ids_I] = data_IC
        return
    staged = torch.from_numpy(data_IC.copy()).view(kv_cache.dtype)
    kv_cache.flatten(1).index_copy_(0, ids, staged.to(kv_cache.device))


def block_memory(kv_cache: torch.Tensor, ids_I: np.ndarray) -> list[memoryview]:
    """The memory of the blocks, writable by its holder.

    Args:
        kv_cache: `[N, ...]`, contiguous, in host memory.
        ids_I: int64 block ids, each below N.

    Returns:
        I views of C bytes.

    Raises:
        ValueError: an id is not in the cache or not int64, or the cache is not in host memory.
    """
    _check_ids(kv_cache, ids_I)
    if kv_cache.device.type != "cpu":
        raise ValueError(f"kv_cache is on {kv_cache.device}, not in host memory")
    blocks = _host_bytes(kv_cache)
    return [blocks[block].data for block in ids_I]


def _move(kv_cache: torch.Tensor, data_IC: torch.Tensor | None, ids: torch.Tensor) -> torch.Tensor:
    """Gather blocks into one tensor on their GPU, or scatter `data_IC`; returns the tensor."""
    from vlm_kernels.gpu.gather_blocks import move_blocks

    cache = kv_cache.flatten(1).view(torch.uint8)
    piece = cache.new_empty(len(ids), cache.shape[1]) if data_IC is None else data_IC
    move_blocks(cache, piece, ids, into_cache=data_IC is not None)
    return piece


def _host_bytes(kv_cache: torch.Tensor) -> np.ndarray:
    """The cache's memory as uint8 `[N, C]`, without a copy."""
    return np.asarray(kv_cache.flatten(1).view(torch.uint8).numpy())


def _block_bytes(kv_cache: torch.Tensor) -> int:
    return kv_cache[0].numel() * kv_cache.element_size()


def _check_bytes(kv_cache: torch.Tensor, ids_I: np.ndarray, data_IC: np.ndarray) -> None:
    if data_IC.shape != (len(ids_I), _block_bytes(kv_cache)) or data_IC.dtype != np.uint8:
        raise ValueError(f"{data_IC.shape} bytes for {len(ids_I)} blocks, of {data_IC.dtype}")


def _check_ids(kv_cache: torch.Tensor, ids_I: np.ndarray) -> None:
    if ids_I.dtype != np.int64 or ids_I.ndim != 1 or not kv_cache.is_contiguous():
        raise ValueError(
            f"block ids are {ids_I.dtype} {ids_I.shape}: must be int64 in one axis, of a "
            f"contiguous cache"
        )
    if len(ids_I) and not 0 <= ids_I.min() <= ids_I.max() < len(kv_cache):
        raise ValueError(f"a block is not in 0 to {len(kv_cache) - 1}")
