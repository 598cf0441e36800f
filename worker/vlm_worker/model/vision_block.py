"""Blocks of Qwen's vision towers, in place of transformers' modules.

    x ─▶ norm ─▶ qkv ─▶ rope ─▶ attention in segments ─▶ o ─▶ + x
    x ─▶ norm ─▶ gated or plain MLP ─▶ + x

Packed on a CPU that multiplies bfloat16, blocks that follow each other over the same segments are
one call of the first of them (`vlm_kernels.vision_layers`), and the others give what they get;
elsewhere one kernel follows the other, and both give the same to the last bit.
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
    """Of a model whose weights are packed."""
    for tower in model.modules():
        blocks = getattr(tower, "blocks", None)
        if not has_layers() or not isinstance(blocks, nn.ModuleList):
            continue
        for run in _runs(list(blocks), frozenset(getattr(tower, "fullatt_block_indexes", ()))):
            run[0].join(run[1:])


def _runs(blocks: list[nn.Module], whole: frozenset[int]) -> Iterator[list[VisionBlock]]:
    """Packed blocks that follow each other with the same segments: windows, or `whole` pictures."""

    def kind(numbered: tuple[int, nn.Module]) -> tuple[bool, bool]:
        number, block = numbered
        return isinstance(block, VisionBlock) and block.layer() is not None, number in whole

    for (is_packed, _), numbered in itertools.groupby(enumerate(blocks), kind):
        if is_packed:
            yield [block for _, block in numbered if isinstance(block, VisionBlock)]


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
        self.native: VisionLayers | None = None
        self.is_joined = False

    def forward(
        self,
        hidden_states: torch.Tensor,
        cu_seqlens: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **_unused: Any,
    ) -> torch.Tensor:
        """`[T, D]` to `[T, D]`, called as transformers' towers call a block; may be in place."""
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
        """Compute these blocks, too, in one call from here on; all of them are packed."""
        layers = [layer for block in (self, *following) if (layer := block.layer()) is not None]
        head_dim = layers[0].qkv.weights.num_outputs // (3 * self._num_heads)
        self.native = VisionLayers(layers, Heads(self._num_heads, self._num_heads, head_dim))
        for block in following:
            block.is_joined = True

    def layer(self) -> LayerWeights | None:
        """As the one call takes it; None where the block is not packed."""
        return packed_layer(self)


@functools.lru_cache(maxsize=4)
def _segments(lengths: tuple[int, ...]) -> Segments:
    """Laid out once for all runs of a tower: of whole pictures, and of windows."""
    return whole_segments(np.array(lengths))
