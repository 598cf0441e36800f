"""Kernels of the engine: one file each, with its definition and the function that computes it fast.

    store_kv           write the keys and values of new tokens into KV blocks
    paged_attention    attention of packed queries over KV blocks
    varlen_attention   attention inside segments of a packed axis (vision towers)
    dense_attention    attention of a batch of equal shapes, which both are made of
    gather_blocks      whole KV blocks to one contiguous piece, and back (scatter_blocks)

The KV buffer is `kv_cache[block, layer, 2, kv_head, block_size * head_dim]`: one block is one
contiguous piece.
"""

from vlm_kernels.attention_plan import AttentionPlan, plan_attention
from vlm_kernels.dense_attention import dense_attention
from vlm_kernels.gather_blocks import gather_blocks, scatter_blocks
from vlm_kernels.paged_attention import paged_attention
from vlm_kernels.store_kv import store_kv
from vlm_kernels.varlen_attention import varlen_attention

__all__ = [
    "AttentionPlan",
    "dense_attention",
    "gather_blocks",
    "paged_attention",
    "plan_attention",
    "scatter_blocks",
    "store_kv",
    "varlen_attention",
]
