"""Store KV:  cache[slot of t] = (k_t, v_t) for each new token t, in one layer.

Shapes: T new tokens, H KV heads, D head size, N blocks, L layers, P slots per block.
A slot is `block * P + offset`; the cache is `[N, L, 2, H, P * D]`, inner order `[P, D]`; for int8,
scales follow (`kv_rows`). If blocks have two kinds, slots are as in `mixed_blocks`. On CPUs
`cpu/store_kv.cpp` writes the rows, else numpy. The only computation is rounding.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from vlm_kernels import gpu
from vlm_kernels.cpu import native
from vlm_kernels.kv_rows import (
    LIMITS,
    NATIVE_TYPES,
    TWO_KINDS,
    block_size_of,
    check_cache_type,
    layer_views,
    quantise,
    split_pieces,
)
from vlm_kernels.mixed_blocks import check_groups, num_entries, store_mixed

TYPES = (torch.float32, torch.bfloat16)
"""Types of k and v that the C++ kernel reads."""

SYMBOL = "triptych_store_kv"
_P, _N = ctypes.c_void_p, ctypes.c_int64
ARGUMENTS = (_P, _N, _N, _P, _N, _N, _N, _P, _N, _P, *(_N,) * 7)
"""k and v with their strides {token, head}; their type; the cache, its type; slots; counts"""


def store_kv_reference(
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    slots_T: torch.Tensor,
) -> None:
    """The definition: token by token, in place."""
    if kv_cache.dtype in TWO_KINDS:
        store_mixed(kv_cache, (layer, 0), slots_T.numpy(), k_THD)
        store_mixed(kv_cache, (layer, 1), slots_T.numpy(), v_THD)
        return
    rows, scale_bytes = split_pieces(kv_cache, k_THD.shape[-1])
    for token, slot in enumerate(slots_T.tolist()):
        block, offset = divmod(slot, rows.shape[-2])
        for kv, new in enumerate((k_THD[token], v_THD[token])):
            if scale_bytes is None:
                rows[block, layer, kv, :, offset] = new
                continue
            elements, scales = quantise(new, kv_cache.dtype)
            rows[block, layer, kv, :, offset] = elements
            scale_bytes[block, layer, kv, :, offset] = scales[:, None].view(torch.int8)


def store_kv(
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    slots_T: torch.Tensor,
) -> None:
    """Write keys and values of new tokens into their slots, in place.

    Args:
        k_THD: keys after rotation; rounded to the cache's type.
        v_THD: values.
        kv_cache: `[N, L, 2, H, P * D]`, contiguous; quantised as in `kv_rows`.
        layer: layer index in the cache.
        slots_T: int64, all different, on the cache's device; those of a block in 4 bits are
            all here, in order. On a GPU, slots outside of the cache are skipped, such as -1, the
            padding of a captured graph: a check on the host would synchronise the stream.

    Raises:
        ValueError: a shape, type or slot is wrong; the text says which.
    """
    check_store(k_THD, v_THD, kv_cache, layer, slots_T)
    head_dim = k_THD.shape[-1]
    block_size = block_size_of(kv_cache, head_dim)
    if gpu.serves(kv_cache.device):
        from vlm_kernels.gpu.store_kv import store_kv as launch

        launch(k_THD, v_THD, *layer_views(kv_cache, layer, head_dim), slots_T)
        return
    if kv_cache.device.type == "cpu":
        slots = checked_slots(slots_T, kv_cache, head_dim)
        if _native(k_THD, v_THD, kv_cache, layer, slots_T, block_size):
            return
        if kv_cache.dtype in TWO_KINDS:
            store_kv_reference(k_THD, v_THD, kv_cache, layer, slots_T)
            return
        if kv_cache.dtype not in LIMITS:
            _by_numpy(k_THD, v_THD, kv_cache, layer, slots)
            return
    block_T = slots_T // block_size
    offset_T = slots_T - block_T * block_size
    rows, scale_bytes = split_pieces(kv_cache, head_dim)
    for kv, new_THD in enumerate((k_THD, v_THD)):
        # two index tensors with a slice between them: the indexed axis comes first, as in new_THD
        if scale_bytes is None:
            rows[block_T, layer, kv, :, offset_T] = new_THD.to(kv_cache.dtype)
        else:
            elements, scales = quantise(new_THD, kv_cache.dtype)
            rows[block_T, layer, kv, :, offset_T] = elements
            scale_bytes[block_T, layer, kv, :, offset_T] = scales[..., None].view(torch.int8)


def checked_slots(slots_T: torch.Tensor, kv_cache: torch.Tensor, head_dim: int) -> np.ndarray:
    """The same memory as a numpy array.

    Raises ValueError if a slot is outside of the cache, or a block in 4 bits is not written whole.
    """
    num_slots = num_entries(kv_cache) * block_size_of(kv_cache, head_dim)
    slots = slots_T.numpy()
    if slots.dtype != np.int64 or not slots.flags.c_contiguous:
        raise ValueError(f"slots are {slots.dtype}: must be contiguous int64")
    if len(slots) and (slots.min() < 0 or slots.max() >= num_slots):
        raise ValueError(f"a slot is not in 0 to {num_slots - 1}")
    check_groups(kv_cache, slots, head_dim)
    return slots


def check_store(
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    slots_T: torch.Tensor,
) -> None:
    """Raise ValueError for a wrong shape or, on a GPU, a wrong type, stride or device."""
    if kv_cache.dim() != 5 or kv_cache.shape[2] != 2 or slots_T.dim() != 1:
        raise ValueError(
            f"kv_cache {tuple(kv_cache.shape)}, slots {tuple(slots_T.shape)}: must be "
            f"[N, L, 2, H, P * D] and [T]"
        )
    num_tokens, num_heads, head_dim = len(slots_T), kv_cache.shape[3], k_THD.shape[-1]
    if not k_THD.shape == v_THD.shape == (num_tokens, num_heads, head_dim):
        raise ValueError(
            f"k {tuple(k_THD.shape)}, v {tuple(v_THD.shape)}: must be "
            f"[{num_tokens} slots, {num_heads}, D]"
        )
    block_size_of(kv_cache, head_dim)
    if not kv_cache.is_contiguous() or not 0 <= layer < kv_cache.shape[1]:
        raise ValueError(f"kv_cache {tuple(kv_cache.shape)}, layer {layer}")
    if not gpu.serves(kv_cache.device):
        return
    gpu.check_floats("store_kv: k", k_THD)
    gpu.check_floats("store_kv: v", v_THD)
    check_cache_type(kv_cache)
    if slots_T.dtype != torch.int64 or not slots_T.is_contiguous():
        raise ValueError(f"slots are {slots_T.dtype}: must be contiguous int64")
    if (k_THD.stride(2), v_THD.stride(2)) != (1, 1):
        raise ValueError(f"k has strides {k_THD.stride()}, v {v_THD.stride()}: the last must be 1")
    devices = {x.device for x in (k_THD, v_THD, kv_cache, slots_T)}
    if len(devices) > 1:
        raise ValueError(f"k, v, cache and slots are on {sorted(map(str, devices))}")


def _native(
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    slots_T: torch.Tensor,
    block_size: int,
) -> bool:
    """Write with the C++ kernel; False if it does not support the arguments."""
    kernel = _kernel()
    num_heads, head_dim = k_THD.shape[1:]
    (k_token, k_head, k_inner), (v_token, v_head, v_inner) = k_THD.stride(), v_THD.stride()
    if (
        kernel is None
        or kv_cache.dtype not in NATIVE_TYPES
        or k_THD.dtype not in TYPES
        or v_THD.dtype != k_THD.dtype
        or (k_inner, v_inner) != (1, 1)
        or k_THD.device.type != "cpu"
    ):
        return False
    kernel(
        k_THD.data_ptr(), k_token, k_head, v_THD.data_ptr(), v_token, v_head,
        k_THD.dtype == torch.bfloat16,
        kv_cache.data_ptr(), NATIVE_TYPES[kv_cache.dtype], slots_T.data_ptr(), len(slots_T),
        kv_cache.shape[1], num_heads, head_dim, block_size, layer, torch.get_num_threads(),
    )  # fmt: skip
    return True


@functools.cache
def _kernel() -> Callable[..., Any] | None:
    return native.function(SYMBOL, *ARGUMENTS)


def _by_numpy(
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    slots_T: np.ndarray,
) -> None:
    """Write with numpy, which copies rows; torch's indexed assignment is ten times as slow."""
    num_layers, _, num_heads, inner = kv_cache.shape[1:]
    head_dim = k_THD.shape[-1]
    block_size = inner // head_dim
    block_T, offset_T = np.divmod(slots_T, block_size)
    first_T = (block_T * num_layers + layer) * (2 * num_heads * block_size) + offset_T
    rows_TH = first_T[:, None] + np.arange(num_heads) * block_size
    rows = _as_integers(kv_cache.view(-1, head_dim))
    rows[rows_TH] = _as_integers(k_THD.to(kv_cache.dtype))
    rows[rows_TH + num_heads * block_size] = _as_integers(v_THD.to(kv_cache.dtype))


def _as_integers(x: torch.Tensor) -> np.ndarray:
    """The same memory as numpy integers, because numpy has no bfloat16."""
    size = x.element_size()
    return np.asarray(x.view(torch.int16 if size == 2 else torch.int32).numpy())
