"""Store KV:  cache[slot of t] = (k_t, v_t) for each new token t, in one layer.

Shapes: T new tokens, H KV heads, D head size, N blocks, L layers, P slots per block.
A slot is `block * P + offset`; the cache is `[N, L, 2, H, P * D]`, inner order `[P, D]`.
"""

from __future__ import annotations

import numpy as np
import torch


def store_kv_reference(
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    slots_T: torch.Tensor,
) -> None:
    """The definition: token by token, in place."""
    head_dim = k_THD.shape[-1]
    block_size = kv_cache.shape[-1] // head_dim
    for token, slot in enumerate(slots_T.tolist()):
        block, offset = divmod(slot, block_size)
        inside = slice(offset * head_dim, (offset + 1) * head_dim)
        kv_cache[block, layer, 0, :, inside] = k_THD[token]
        kv_cache[block, layer, 1, :, inside] = v_THD[token]


def store_kv(
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    slots_T: torch.Tensor,
) -> None:
    """Write keys and values of new tokens into their slots, in place.

    Args:
        k_THD: keys after rotation; cast to the cache's type.
        v_THD: values.
        kv_cache: `[N, L, 2, H, P * D]`, contiguous.
        layer: which layer.
        slots_T: int64, all different, on the cache's device.
    """
    head_dim = k_THD.shape[-1]
    num_blocks, num_layers, _, num_heads, inner = kv_cache.shape
    assert k_THD.shape == v_THD.shape == (len(slots_T), num_heads, head_dim)
    block_size = inner // head_dim
    k_THD, v_THD = k_THD.to(kv_cache.dtype), v_THD.to(kv_cache.dtype)
    block_T = slots_T // block_size
    offset_T = slots_T - block_T * block_size
    if kv_cache.device.type == "cpu":
        # numpy copies rows; torch's indexed assignment copies elements, ten times as slow
        first_T = (block_T * num_layers + layer) * (2 * num_heads * block_size) + offset_T
        rows_TH = first_T.numpy()[:, None] + np.arange(num_heads) * block_size
        rows = _as_integers(kv_cache.view(-1, head_dim))
        rows[rows_TH] = _as_integers(k_THD)
        rows[rows_TH + num_heads * block_size] = _as_integers(v_THD)
        return
    slots = kv_cache.view(num_blocks, num_layers, 2, num_heads, block_size, head_dim)
    # two index tensors with a slice between them: the indexed axis comes first, as in k_THD
    slots[block_T, layer, 0, :, offset_T] = k_THD
    slots[block_T, layer, 1, :, offset_T] = v_THD


def _as_integers(x: torch.Tensor) -> np.ndarray:
    """The same memory for numpy, which has no bfloat16."""
    size = x.element_size()
    return np.asarray(x.view(torch.int16 if size == 2 else torch.int32).numpy())
