"""Encodes images: several images of any size in one call of the vision tower.

A block of Qwen's towers, which replaces transformers' module:

    x ─▶ norm ─▶ qkv ─▶ rope ─▶ attention in segments ─▶ o ─▶ + x
    x ─▶ norm ─▶ gated or plain MLP ─▶ + x

If the weights are packed for our CPU kernel, consecutive blocks over the same segments are one call
(`vlm_kernels.vision_layers`): the first block makes it, and the others return their input. If not,
each operation is a kernel of its block. Both ways compute the same values, to the last bit.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from vlm_kernels import rope
from vlm_kernels.layer_weights import Heads
from vlm_kernels.native_layers import has_layers
from vlm_kernels.segments import Segments, whole_segments
from vlm_kernels.vision_layers import VisionLayers
from vlm_worker.core.encoding import encode_each
from vlm_worker.core.image_geometry import FixedProcessor, Processor
from vlm_worker.errors import EngineError
from vlm_worker.model.attention import varlen_forward
from vlm_worker.model.layers import mlp_of, norm_of, packed_layer
from vlm_worker.model.linear import add_product
from vlm_worker.model.reduce import Rankings, rank
from vlm_worker.types import PreparedImage


@dataclasses.dataclass(frozen=True, slots=True)
class Embedding:
    """The encoder's output for one image.

    Attributes:
        rows: `[num_tokens, hidden_size]`, not a view of other rows.
        made: the event after which `rows` are valid, if steps run on another stream
            (`gpu.streams`); else None.
        places: int16 `[num_tokens, 2]`, row and column of each row's cell, if it is reduced.
        rankings: what reductions of a whole image know about its rows.
    """

    rows: torch.Tensor
    made: Any = None
    places: np.ndarray | None = None
    rankings: Rankings = dataclasses.field(default_factory=Rankings)

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows and their places, as in a transfer."""
        return self.rows.nbytes + (0 if self.places is None else self.places.nbytes)


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


class ImageEncoder:
    """The vision tower and projector of a loaded model."""

    def __init__(self, model: Any, processor: Processor, *, device: torch.device) -> None:
        self._model, self._processor, self._device = model, processor, device

    def encode(self, images: Sequence[PreparedImage]) -> list[Embedding | Exception]:
        """Encode images in one call; if it fails, one by one (`encode_each`)."""
        return encode_each(self._encode_together, images)

    def _encode_together(self, images: Sequence[PreparedImage]) -> list[Embedding | Exception]:
        values = _joined([self._values(image) for image in images])
        arguments: dict[str, torch.Tensor] = {}
        if isinstance(self._processor, FixedProcessor):
            values = values.view(len(images), 3, self._processor.height, self._processor.width)
        else:
            grid = torch.tensor([image.grid_thw for image in images], dtype=torch.int64)
            values = values.view(-1, self._processor.patch_dim)
            arguments["image_grid_thw"] = grid.to(self._device)
        output = self._model.get_image_features(
            pixel_values=values.to(self._device), return_dict=True, **arguments
        )
        return [
            self._checked(image, rows)
            for image, rows in zip(images, output.pooler_output, strict=True)
        ]

    def _values(self, image: PreparedImage) -> np.ndarray:
        num_tokens = self._processor.num_tokens(image.grid_thw)
        if num_tokens != image.num_tokens:
            raise EngineError(
                f"an image with grid {image.grid_thw} has {num_tokens or 'no'} tokens, "
                f"not {image.num_tokens}"
            )
        num_patches, patch_dim = math.prod(image.grid_thw), self._processor.patch_dim
        values = np.frombuffer(image.patches, np.float32)
        if len(values) != num_patches * patch_dim:
            raise EngineError(
                f"an image with grid {image.grid_thw} needs {num_patches} patches of "
                f"{patch_dim} values, and has {len(values)} values"
            )
        return values

    def _checked(self, image: PreparedImage, rows: torch.Tensor) -> Embedding | Exception:
        if len(rows) != image.num_tokens:
            return EngineError(
                f"the encoder made {len(rows)} tokens of grid {image.grid_thw}, "
                f"not {image.num_tokens}"
            )
        if not is_finite(rows):
            return EngineError(f"the encoder's output for grid {image.grid_thw} is not finite")
        embedding = Embedding(rows.clone())  # a view would keep the whole batch in memory
        if image.reduction is not None:  # here, so that it overlaps with steps
            rank(embedding.rows, image.cells, image.reduction, embedding.rankings)
        return embedding


def is_finite(rows: torch.Tensor) -> bool:
    """Whether all values are finite; `aminmax` returns NaN if any value is NaN."""
    minimum, maximum = torch.aminmax(rows)
    return bool(torch.isfinite(minimum) & torch.isfinite(maximum))


def _joined(values: Sequence[np.ndarray]) -> torch.Tensor:
    """Concatenate arrays; copies unless there is one writeable array."""
    if len(values) == 1 and values[0].flags.writeable:  # torch supports no read-only tensors
        return torch.from_numpy(values[0])
    return torch.from_numpy(np.concatenate(values))


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
