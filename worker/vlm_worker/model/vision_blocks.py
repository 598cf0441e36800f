"""The blocks of Qwen's vision towers as a few kernels, in place of transformers' modules.

    x ─▶ norm ─▶ qkv ─▶ rope ─▶ attention in segments ─▶ o ─▶ + x
    x ─▶ norm ─▶ gated or plain MLP ─▶ + x

If the weights are packed for our CPU kernel, consecutive blocks over the same segments are one call
(`vlm_kernels.vision_layers`): the first block makes it, and the others return their input. If not,
each operation is a kernel of its block. Both ways compute the same values, to the last bit.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from vlm_kernels import received_attention, rope
from vlm_kernels.layer_weights import Heads
from vlm_kernels.native_layers import has_layers
from vlm_kernels.segments import Segments, whole_segments
from vlm_kernels.vision_layers import VisionLayers
from vlm_worker.model.attention import varlen_forward
from vlm_worker.model.layers import mlp_of, norm_of, packed_layer
from vlm_worker.model.linear import add_product

T = TypeVar("T")


class PatchProjection(nn.Module):
    """A convolution with stride equal to its kernel, computed as one matrix product.

    It shares `weight` `[D, C, T, P, P]` with the convolution. About three times as fast on CPUs.
    """

    def __init__(self, convolution: nn.Conv3d) -> None:
        super().__init__()
        self.weight = convolution.weight

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """`[N, C, T, P, P]` to `[N, D]`."""
        return functional.linear(patches.flatten(1), self.weight.flatten(1))


def use_patch_projection(tower: nn.Module) -> None:
    """Replace the convolutions of a vision tower whose stride is their kernel."""
    for parent in list(tower.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Conv3d) and _reads_patches(child):
                setattr(parent, name, PatchProjection(child))


def _reads_patches(convolution: nn.Conv3d) -> bool:
    plain = convolution.bias is None and convolution.groups == 1
    return plain and convolution.stride == convolution.kernel_size and not any(convolution.padding)


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
        return isinstance(block, VisionBlock) and packed_layer(block) is not None, number in whole

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
        heads = self._heads_of(hidden_states, position_embeddings)
        q, k, v = (x_THD.transpose(0, 1)[None] for x_THD in heads)
        o, _ = varlen_forward(self, q, k, v, None, scaling=self.scaling, cu_seq_lens_q=cu_seqlens)
        x_TD = add_product(self.o, o[0].flatten(1), hidden_states)
        return self.mlp(self.mlp_norm(x_TD), x_TD)

    def received(
        self,
        hidden_states: torch.Tensor,
        cu_seqlens: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **_unused: Any,
    ) -> torch.Tensor:
        """The attention that each patch receives in this block; arguments as of `forward`.

        Returns:
            float32 `[T]`; the patches of a segment share 1. The arguments are not changed.
        """
        q_THD, k_THD, _ = self._heads_of(hidden_states, position_embeddings)
        return received_attention(q_THD, k_THD, cu_seqlens, scale=self.scaling)

    def _heads_of(
        self, x_TD: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values `[T, H, D]`; the first two are rotated."""
        qkv = self.qkv(self.attention_norm(x_TD))
        q_THD, k_THD, v_THD = qkv.view(len(qkv), 3, self._num_heads, -1).unbind(1)
        for x_THD in (q_THD, k_THD):
            rope(x_THD, *position_embeddings)
        return q_THD, k_THD, v_THD

    def join(self, following: list[VisionBlock]) -> None:
        """Compute this and the following blocks in one call; all of them must be packed."""
        layers = [
            layer for block in (self, *following) if (layer := packed_layer(block)) is not None
        ]
        head_dim = layers[0].qkv.weights.num_outputs // (3 * self._num_heads)
        self.native = VisionLayers(layers, Heads(self._num_heads, self._num_heads, head_dim))
        for block in following:
            block.is_joined = True


@functools.lru_cache(maxsize=4)
def _segments(lengths: tuple[int, ...]) -> Segments:
    """Segments of these lengths, cached: all runs of a tower share those of images and windows."""
    return whole_segments(np.array(lengths))


class TokenScorer:
    """Scores visual tokens by the attention that their patches receive in one block of a tower.

    VisionZip's score (arXiv 2412.04467), without a class token: the mean over heads and queries,
    summed over the patches of a token. The block is the last in which segments are whole images.

        scored call:   blocks before ─▶ x ─▶ qkv of the block ─▶ received attention
                                         └─▶ block and blocks behind, as in any other call

    Another call computes nothing for it. Only one thread may run a tower while it is scored.
    """

    def __init__(self, tower: Any, number: int) -> None:
        self._tower, self._number = tower, number

    @classmethod
    def of(cls, model: nn.Module) -> TokenScorer | None:
        """The scorer of a model's tower; None if no block of it is a `VisionBlock` as needed."""
        for tower in model.modules():
            blocks = getattr(tower, "blocks", None)
            if not isinstance(blocks, nn.ModuleList) or not len(blocks):
                continue
            whole = getattr(tower, "fullatt_block_indexes", range(len(blocks)))
            number = max(whole, default=None)
            if number is not None and isinstance(blocks[number], VisionBlock):
                return cls(tower, number)
        return None

    def run(self, encode: Callable[..., T], grid_I3: torch.Tensor) -> tuple[T, torch.Tensor]:
        """Score the tokens of one call of the tower.

        Args:
            encode: makes the call, with the keyword arguments that it gets.
            grid_I3: int64, patches of each image: time, height, width.

        Returns:
            What `encode` returns; and float32 `[N]`, the score of each token in the order of the
            output's rows. The scores of an image with one frame sum to 1.
        """
        windows = self._windows(grid_I3)
        found: list[torch.Tensor] = []
        block = self._tower.blocks[self._number]

        def record(_block: nn.Module, args: Any, kwargs: Any) -> None:
            found.append(block.received(*args, **kwargs))

        with _beginning_a_call(self._tower.blocks, self._number):
            hook = block.register_forward_pre_hook(record, with_kwargs=True)
            try:
                output = encode(**windows)
            finally:
                hook.remove()
        (received_T,) = found
        scores_N = received_T.view(-1, self._tower.spatial_merge_size**2).sum(1)
        if windows:
            scores_N = scores_N[torch.argsort(windows["window_index"]).to(scores_N.device)]
        return output, scores_N

    def _windows(self, grid_I3: torch.Tensor) -> dict[str, torch.Tensor]:
        """Arguments of a tower with windows, in whose order it computes tokens; else none.

        The tower would compute the same.
        """
        tower = self._tower
        if not hasattr(tower, "window_size"):
            return {}
        from transformers.vision_utils import get_vision_window_index

        index_N, cu = get_vision_window_index(
            grid_I3,
            spatial_merge_size=tower.spatial_merge_size,
            window_size=tower.window_size,
            patch_size=tower.patch_size,
        )
        return {"window_index": index_N, "cu_window_seqlens": cu}


@contextlib.contextmanager
def _beginning_a_call(blocks: Any, number: int) -> Iterator[None]:
    """Split the native call that a block is part of, if any, so that the block begins one."""
    block = blocks[number]
    if not block.is_joined:
        yield
        return
    first = next(one for one in reversed(blocks[:number]) if one.native is not None)
    whole, place = first.native, number - list(blocks).index(first)
    first.native, block.native = whole.split(place)
    block.is_joined = False
    try:
        yield
    finally:
        first.native, block.native, block.is_joined = whole, None, True
