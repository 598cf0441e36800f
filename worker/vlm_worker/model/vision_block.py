"""Blocks of Qwen's vision towers, in place of transformers' modules.

    x ─▶ norm ─▶ qkv ─▶ rope ─▶ attention in segments ─▶ o ─▶ + x
    x ─▶ norm ─▶ gated or plain MLP ─▶ + x

Packed on a CPU that multiplies bfloat16, a block is one call (`vlm_kernels.vision_layer`);
elsewhere one kernel follows the other, and both give the same to the last bit.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import nn

from vlm_kernels import rope
from vlm_kernels.layer_weights import Heads
from vlm_kernels.native_layers import has_layers
from vlm_kernels.segments import Segments, whole_segments
from vlm_kernels.vision_layer import VisionLayer
from vlm_worker.model.attention import varlen_forward
from vlm_worker.model.layers import mlp_of, norm_of, packed_layer
from vlm_worker.model.linear import add_product


def join_vision_blocks(model: nn.Module) -> None:
    """Of a model whose weights are packed."""
    for module in model.modules():
        if isinstance(module, VisionBlock):
            module.join()


class VisionBlock(nn.Module):
    """One layer over the patches of packed pictures; takes over the weights of the one before."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        attention, mlp = block.attn, mlp_of(block.mlp)
        attention_norm, mlp_norm = norm_of(block.norm1), norm_of(block.norm2)
        assert mlp is not None
        assert attention_norm is not None
        assert mlp_norm is not None
        self._num_heads: int = attention.num_heads
        self.scaling: float = attention.scaling
        self.attention_norm, self.mlp_norm = attention_norm, mlp_norm
        self.qkv, self.o, self.mlp = attention.qkv, attention.proj, mlp
        self.native: VisionLayer | None = None

    def forward(
        self,
        hidden_states: torch.Tensor,
        cu_seqlens: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **_unused: Any,
    ) -> torch.Tensor:
        """`[T, D]` to `[T, D]`, called as transformers' towers call a block; may be in place."""
        if self.native is not None:
            x_TD = hidden_states.contiguous()
            cos_TD, sin_TD = (table.contiguous() for table in position_embeddings)
            segments = _segments(tuple(np.diff(cu_seqlens.numpy()).tolist()))
            self.native(x_TD, segments, (cos_TD, sin_TD))
            return x_TD
        qkv = self.qkv(self.attention_norm(hidden_states))
        q_THD, k_THD, v_THD = qkv.view(len(qkv), 3, self._num_heads, -1).unbind(1)
        for x_THD in (q_THD, k_THD):
            rope(x_THD, *position_embeddings)
        q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, k_THD, v_THD))
        o, _ = varlen_forward(self, q, k, v, None, scaling=self.scaling, cu_seq_lens_q=cu_seqlens)
        x_TD = add_product(self.o, o[0].flatten(1), hidden_states)
        return self.mlp(self.mlp_norm(x_TD), x_TD)

    def join(self) -> None:
        """Compute in one call from here on, where the block is packed for it."""
        layer = packed_layer(self) if has_layers() else None
        if layer is None:
            return
        head_dim = layer.qkv.weights.num_outputs // (3 * self._num_heads)
        self.native = VisionLayer(layer, Heads(self._num_heads, self._num_heads, head_dim))


@functools.lru_cache(maxsize=4)
def _segments(lengths: tuple[int, ...]) -> Segments:
    """Laid out once for all blocks of a tower: of whole pictures, and of windows."""
    return whole_segments(np.array(lengths))
