"""Blocks of Qwen's vision towers that replace transformers' modules.

    x ─▶ norm ─▶ qkv ─▶ rope ─▶ attention in segments ─▶ o ─▶ + x
    x ─▶ norm ─▶ gated or plain MLP ─▶ + x

If the weights are packed for our CPU kernel, consecutive blocks over the same segments are one call
(`vlm_kernels.vision_layers`): the first block makes it, and the others return their input. If not,
each operation is a kernel of its block. Both ways compute the same values, to the last bit.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from vlm_kernels import rope
from vlm_kernels.layer_weights import Heads, LayerWeights
from vlm_kernels.native_layers import has_layers
from vlm_kernels.segments import Segments, whole_segments
from vlm_kernels.vision_layers import VisionLayers
from vlm_worker.model.attention import varlen_forward
from vlm_worker.model.layers import mlp_of, norm_of, packed_layer
from vlm_worker.model.linear import add_product


def join_vision_blocks(model: nn.Module) -> None:
    """Join consecutive packed blocks of each vision tower, so that one call computes them."""
    for tower in model.modules():
        blocks = getattr(tower, "blocks", None)
        if not has_layers() or not isinstance(blocks, nn.ModuleList):
            continue
        for run in _runs(list(blocks), frozenset(getattr(tower, "fullatt_block_indexes", ()))):
            run[0].join(run[1:])


def _runs(blocks: list[nn.Module], whole: frozenset[int]) -> Iterator[list[VisionBlock]]:
    """Yield runs of consecutive packed blocks over the same segments.

    Segments are windows, or whole images for the block numbers in `whole`.
    """

    def kind(numbered: tuple[int, nn.Module]) -> tuple[bool, bool]:
        number, block = numbered
        return isinstance(block, VisionBlock) and block.layer() is not None, number in whole

    for (is_packed, _), numbered in itertools.groupby(enumerate(blocks), kind):
        if is_packed:
            yield [block for _, block in numbered if isinstance(block, VisionBlock)]


class VisionBlock(nn.Module):
    """One layer over the patches of packed images; it reuses the weights of the replaced block."""

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
        self.native: VisionLayers | None = None
        self.is_joined = False

    def forward(
        self,
        hidden_states: torch.Tensor,
        cu_seqlens: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **_unused: Any,
    ) -> torch.Tensor:
        """`[T, D]` to `[T, D]`, with the signature of transformers' block; may be in place."""
        if self.is_joined:
            return hidden_states
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

    def join(self, following: list[VisionBlock]) -> None:
        """Compute this and the following blocks in one call; all of them must be packed."""
        layers = [layer for block in (self, *following) if (layer := block.layer()) is not None]
        head_dim = layers[0].qkv.weights.num_outputs // (3 * self._num_heads)
        self.native = VisionLayers(layers, Heads(self._num_heads, self._num_heads, head_dim))
        for block in following:
            block.is_joined = True

    def layer(self) -> LayerWeights | None:
        """The weights as `vlm_kernels.vision_layers` expects them; None if not packed."""
        return packed_layer(self)


@functools.lru_cache(maxsize=4)
def _segments(lengths: tuple[int, ...]) -> Segments:
    """Segments of these lengths, cached: all runs of a tower share those of images and windows."""
    return whole_segments(np.array(lengths))
