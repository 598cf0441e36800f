"""Encodes images: several images of any size in one call of the vision tower."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from vlm_worker.core.encoding import encode_each
from vlm_worker.core.image_geometry import FixedProcessor, Processor
from vlm_worker.errors import EngineError
from vlm_worker.types import PreparedImage


@dataclasses.dataclass(frozen=True, slots=True)
class Embedding:
    """The encoder's output for one image.

    Attributes:
        rows: `[num_tokens, hidden_size]`, not a view of other rows.
        made: the event after which `rows` are valid, if steps run on another stream
            (`gpu.streams`); else None.
    """

    rows: torch.Tensor
    made: Any = None

    @property
    def num_bytes(self) -> int:
        """Bytes of `rows`."""
        return self.rows.numel() * self.rows.element_size()


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
        return Embedding(rows.clone())  # a view would keep the whole batch in memory


def is_finite(rows: torch.Tensor) -> bool:
    """Whether all values are finite; `aminmax` returns NaN if any value is NaN."""
    least, most = torch.aminmax(rows)
    return bool(torch.isfinite(least) & torch.isfinite(most))


def _joined(values: Sequence[np.ndarray]) -> torch.Tensor:
    """Concatenate arrays; copies unless there is one writeable array."""
    if len(values) == 1 and values[0].flags.writeable:  # torch supports no read-only tensors
        return torch.from_numpy(values[0])
    return torch.from_numpy(np.concatenate(values))
