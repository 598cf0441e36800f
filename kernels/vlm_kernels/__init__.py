"""The kernels of the engine: one file each, with its definition and its fast implementation.

    store_kv           write the keys and values of new tokens into KV blocks
    paged_attention    attention of packed queries over KV blocks
    mixed_blocks       blocks of two kinds in one cache: int8 or 4 bits for one modality
    int4_groups        blocks of 32 tokens in 4 bits (KIVI)
    decode_attention   the part of it for sequences with one query, in C++
    varlen_attention   attention inside segments of a packed axis (vision towers)
    flash_attention    both in C++, for bfloat16; a query sees an interval of its `segments`
    attention_mass     the attention that the last rows of a sequence pay to each of its tokens
    received_attention the mean weight that attention inside segments gives to each token
    dense_attention    attention of a batch of equal shapes, used if no other kernel applies
    packed_weights     weights in panels, in bfloat16 or int8
    packed_linear      linear layers on packed weights, with the operations that follow them
    decoder_layers     all layers of a step, and the head, in one call of these kernels
    vision_layers      layers of a vision tower in one call
    layer_norm         LayerNorm of packed tokens
    rms_norm           RMSNorm of packed tokens, also after an addition (add_rms_norm)
    rope               rotary positions, in place; rope_store_kv writes keys and values, too
    quantised_linear   linear layers on int8 and int4 weights, for GPUs
    silu_mul           activation and product between the linear layers of a gated MLP
    merge_tokens       averages, or a selection, of visual tokens
    resize_patches     from an image's bytes to a vision tower's patches, for GPUs
    sampling           logits to tokens
    gather_blocks      copy whole KV blocks to one contiguous buffer, and back (scatter_blocks), or
                       view their memory (block_memory)
    move_rows          copy rows of tokens within the KV blocks
    opaque             a kernel as one operation for torch.compile

resize_patches is for other projects; the worker does not use it (`docs/decisions/0017`).

The KV buffer is `kv_cache[block, layer, 2, kv_head, block_size * head_dim]`. For int8, scales
follow the elements (`kv_rows`). One block is contiguous.
"""

from vlm_kernels.attention_mass import attention_mass
from vlm_kernels.attention_plan import AttentionPlan, plan_attention
from vlm_kernels.dense_attention import dense_attention
from vlm_kernels.gather_blocks import block_memory, gather_blocks, scatter_blocks
from vlm_kernels.layer_norm import layer_norm
from vlm_kernels.merge_tokens import merge_tokens
from vlm_kernels.move_rows import move_rows
from vlm_kernels.packed_linear import Activation, packed_linear
from vlm_kernels.packed_weights import PackedWeights
from vlm_kernels.paged_attention import paged_attention
from vlm_kernels.quantised_linear import QuantisedWeights, quantise_weights, quantised_linear
from vlm_kernels.received_attention import received_attention
from vlm_kernels.resize_patches import resize_patches
from vlm_kernels.rms_norm import add_rms_norm, rms_norm
from vlm_kernels.rope import rope, rope_store_kv
from vlm_kernels.sampling import sample_tokens
from vlm_kernels.silu_mul import silu_mul
from vlm_kernels.store_kv import store_kv
from vlm_kernels.varlen_attention import varlen_attention

__all__ = [
    "Activation",
    "AttentionPlan",
    "PackedWeights",
    "QuantisedWeights",
    "add_rms_norm",
    "attention_mass",
    "block_memory",
    "dense_attention",
    "gather_blocks",
    "layer_norm",
    "merge_tokens",
    "move_rows",
    "packed_linear",
    "paged_attention",
    "plan_attention",
    "quantise_weights",
    "quantised_linear",
    "received_attention",
    "resize_patches",
    "rms_norm",
    "rope",
    "rope_store_kv",
    "sample_tokens",
    "scatter_blocks",
    "silu_mul",
    "store_kv",
    "varlen_attention",
]
