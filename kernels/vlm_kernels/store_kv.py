"""Store KV:  cache[slot of t] = (k_t, v_t) for each new token t, in one layer.

Shapes: T new tokens, H KV heads, D head size, N blocks, L layers, P slots per block.
A slot is `block * P + offset`; the cache is `[N, L, 2, H, P * D]`, inner order `[P, D]`.
"""

from __future__ import annotations

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
    slots = kv_cache.view(num_blocks, num_layers, 2, num_heads, block_size, head_dim)
    block_T = slots_T // block_size
    offset_T = slots_T - block_T * block_size
    # two index tensors with a slice between them: the indexed axis comes first, as in k_THD
    slots[block_T, layer, 0, :, offset_T] = k_THD.to(kv_cache.dtype)
    slots[block_T, layer, 1, :, offset_T] = v_THD.to(kv_cache.dtype)
