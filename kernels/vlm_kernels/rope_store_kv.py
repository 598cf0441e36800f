"""Rotary positions and the KV write:  q = rope(q),  cache[slot of t] = (rope(k_t), v_t).

Shapes: T tokens, D head size; heads of q and of the cache. `rope` and `store_kv` define the two
halves. Keys are rotated while they are written into the cache. Triton on GPUs; elsewhere, and for
tables of another type, one kernel after the other.
"""

from __future__ import annotations

import torch

from vlm_kernels import gpu
from vlm_kernels.kv_rows import layer_views
from vlm_kernels.rope import check_rope, rope
from vlm_kernels.store_kv import check_store, store_kv


def rope_store_kv(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    slots_T: torch.Tensor,
) -> None:
    """Rotate queries in place; write rotated keys, and values, into their slots.

    Args:
        q_THD: queries before rotation.
        k_THD: keys before rotation; whether they are also rotated in place is undefined.
        v_THD: values.
        cos_TD: of the type of q and k, or float32, as for `rope`.
        sin_TD: of the type of cos.
        kv_cache: as for `store_kv`.
        layer: layer index in the cache.
        slots_T: as for `store_kv`.

    Raises:
        ValueError: a shape, type, stride or layer does not fit.
    """
    check_rope(q_THD, cos_TD, sin_TD, heads="q")
    check_rope(k_THD, cos_TD, sin_TD, heads="k")
    check_store(k_THD, v_THD, kv_cache, layer, slots_T)
    is_of_one_type = q_THD.dtype == k_THD.dtype == cos_TD.dtype
    if not gpu.serves(kv_cache.device) or not is_of_one_type:
        rope(q_THD, cos_TD, sin_TD)
        rope(k_THD, cos_TD, sin_TD)
        store_kv(k_THD, v_THD, kv_cache, layer, slots_T)
        return
    from vlm_kernels.gpu.rope import rope_store_kv as launch

    views = layer_views(kv_cache, layer, k_THD.shape[-1])
    launch(q_THD, k_THD, v_THD, cos_TD.contiguous(), sin_TD.contiguous(), *views, slots_T)
