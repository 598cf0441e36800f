"""Gather blocks:  piece[i] = cache[ids[i]], bytes, contiguous; scatter is its inverse.

Shapes: N blocks in the cache, I blocks moved, C bytes per block. A block is contiguous, so a
move is one copy of C bytes, whatever the model.
"""

from __future__ import annotations

import numpy as np
import torch


def gather_blocks_reference(kv_cache: torch.Tensor, ids_I: np.ndarray) -> np.ndarray:
    """The definition: block by block."""
    blocks = [kv_cache[int(i)].contiguous().view(torch.uint8).flatten().cpu() for i in ids_I]
    return torch.stack(blocks).numpy()


def gather_blocks(kv_cache: torch.Tensor, ids_I: np.ndarray) -> np.ndarray:
    """Copy whole blocks into one buffer in host memory.

    Args:
        kv_cache: `[N, ...]`, contiguous.
        ids_I: int64 block ids, each below N.

    Returns:
        uint8 `[I, C]`, its own memory.
    """
    _check_ids(kv_cache, ids_I)
    if kv_cache.device.type == "cpu":
        return np.take(_host_bytes(kv_cache), ids_I, axis=0)
    ids = torch.from_numpy(ids_I).to(kv_cache.device)
    moved = kv_cache.index_select(0, ids).flatten(1).view(torch.uint8).cpu().numpy()
    return np.asarray(moved)


def scatter_blocks(kv_cache: torch.Tensor, ids_I: np.ndarray, data_IC: np.ndarray) -> None:
    """Write whole blocks into the cache, in place.

    Args:
        kv_cache: `[N, ...]`, contiguous.
        ids_I: int64 block ids, all different, each below N.
        data_IC: uint8 `[I, C]`; may be read-only.
    """
    _check_ids(kv_cache, ids_I)
    assert data_IC.shape == (len(ids_I), kv_cache[0].numel() * kv_cache.element_size())
    if kv_cache.device.type == "cpu":
        _host_bytes(kv_cache)[ids_I] = data_IC
        return
    staged = torch.from_numpy(data_IC.copy()).view(kv_cache.dtype)
    ids = torch.from_numpy(ids_I).to(kv_cache.device)
    kv_cache.flatten(1).index_copy_(0, ids, staged.to(kv_cache.device))


def _host_bytes(kv_cache: torch.Tensor) -> np.ndarray:
    """The cache's own memory as uint8 `[N, C]`."""
    return np.asarray(kv_cache.flatten(1).view(torch.uint8).numpy())


def _check_ids(kv_cache: torch.Tensor, ids_I: np.ndarray) -> None:
    assert ids_I.dtype == np.int64
    assert ids_I.ndim == 1
    assert len(ids_I) == 0 or 0 <= ids_I.min() <= ids_I.max() < kv_cache.shape[0]
