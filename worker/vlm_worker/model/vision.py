"""Encodes images: several images of any size in one call of the vision tower."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vlm_worker.core.encoding import encode_each
from vlm_worker.core.image_geometry import DynamicProcessor, FixedProcessor, Processor
from vlm_worker.core.window_cache import WindowCache
from vlm_worker.errors import EngineError
from vlm_worker.model.pyramid import PyramidEncoder, tower_of
from vlm_worker.model.reduce import Rankings, rank
from vlm_worker.model.vision_blocks import TokenScorer
from vlm_worker.types import PreparedImage

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Embedding:
    """The encoder's output for one image.

    Attributes:
        rows: `[num_tokens, hidden_size]`, not a view of other rows.
        made: the event after which `rows` are valid, if steps run on another stream
            (`gpu.streams`); else None.
        places: int16 `[num_tokens, 2]`, row and column of each row's cell, if it is reduced.
        rankings: what reductions of a whole image know about its rows; with `scores` if they were
            asked for (`TokenScorer`).
    """

    rows: torch.Tensor
    made: Any = None
    places: np.ndarray | None = None
    rankings: Rankings = dataclasses.field(default_factory=Rankings)

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows and their places, as in a transfer."""
        return self.rows.nbytes + (0 if self.places is None else self.places.nbytes)


class ImageEncoder:
    """The vision tower and projector of a loaded model."""

    def __init__(
        self,
        model: Any,
        processor: Processor,
        *,
        device: torch.device,
        windows: WindowCache | None = None,
        fingerprint: bytes = b"",
    ) -> None:
        """`windows` caches states of windows; `fingerprint` is of the model that made them."""
        self._model, self._processor, self._device = model, processor, device
        self._windows, self._fingerprint = windows, fingerprint
        self._is_approximate = False  # some image was

    def encode(
        self, images: Sequence[PreparedImage], *, scored: bool = False
    ) -> list[Embedding | Exception]:
        """Encode images in one call; if it fails, one by one (`encode_each`).

        Images of approximate reductions are a call of their own. `scored` asks for the scores of
        visual tokens of the others; it changes no row.

        Raises:
            EngineError: the tower of this model cannot score visual tokens.
        """
        if scored and self._scorer is None:
            raise EngineError("the vision tower of this model has no scores of visual tokens")
        together = functools.partial(self._encode_together, scored=scored)
        if not any(image.is_approximate for image in images):
            return encode_each(together, images)
        wholes = iter(encode_each(together, [one for one in images if not one.is_approximate]))
        others = iter(
            encode_each(self._encode_windows, [one for one in images if one.is_approximate])
        )
        return [next(others if image.is_approximate else wholes) for image in images]

    @functools.cached_property
    def _scorer(self) -> TokenScorer | None:
        return TokenScorer.of(self._model)

    @functools.cached_property
    def _pyramids(self) -> PyramidEncoder:
        tower = tower_of(self._model)
        if tower is None or not isinstance(self._processor, DynamicProcessor):
            raise EngineError("the vision tower of this model has no windows at several scales")
        return PyramidEncoder(tower, self._processor, cache=self._windows, model=self._fingerprint)

    def _encode_windows(self, images: Sequence[PreparedImage]) -> list[Embedding | Exception]:
        if not self._is_approximate:
            self._is_approximate = True
            logger.info("images are encoded at several scales: arrcocpyramid is approximate")
        encoded = self._pyramids.encode(images, [self._values(image) for image in images])
        return [
            Embedding(rows, places=places)
            if is_finite(rows)
            else EngineError(f"the encoder's output for grid {image.grid_thw} is not finite")
            for image, (rows, places) in zip(images, encoded, strict=True)
        ]

    def _encode_together(
        self, images: Sequence[PreparedImage], *, scored: bool
    ) -> list[Embedding | Exception]:
        if self._windows is not None and not scored:
            found = self._pyramids.encode_whole(images, [self._values(image) for image in images])
            return [
                self._checked(image, rows, None) for image, rows in zip(images, found, strict=True)
            ]
        values = _joined([self._values(image) for image in images])
        arguments: dict[str, torch.Tensor] = {}
        if isinstance(self._processor, FixedProcessor):
            values = values.view(len(images), 3, self._processor.height, self._processor.width)
        else:
            grid = torch.tensor([image.grid_thw for image in images], dtype=torch.int64)
            values = values.view(-1, self._processor.patch_dim)
            arguments["image_grid_thw"] = grid.to(self._device)
        encode = functools.partial(
            self._model.get_image_features,
            pixel_values=values.to(self._device),
            return_dict=True,
            **arguments,
        )
        scores: Sequence[torch.Tensor | None] = [None] * len(images)
        if scored:
            assert self._scorer is not None
            output, scores_N = self._scorer.run(encode, arguments["image_grid_thw"])
            scores = torch.split(scores_N, [image.num_tokens for image in images])
        else:
            output = encode()
        return [
            self._checked(*one) for one in zip(images, output.pooler_output, scores, strict=True)
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

    def _checked(
        self, image: PreparedImage, rows: torch.Tensor, scores: torch.Tensor | None
    ) -> Embedding | Exception:
        if len(rows) != image.num_tokens:
            return EngineError(
                f"the encoder made {len(rows)} tokens of grid {image.grid_thw}, "
                f"not {image.num_tokens}"
            )
        if not is_finite(rows) or (scores is not None and not is_finite(scores)):
            return EngineError(f"the encoder's output for grid {image.grid_thw} is not finite")
        # views would keep the whole batch in memory
        rankings = Rankings(None if scores is None else scores.clone())
        rankings.learn(image)
        embedding = Embedding(rows.clone(), rankings=rankings)
        if image.reduction is not None:  # here, so that it overlaps with steps
            rank(embedding.rows, image.cells, image.reduction, rankings)
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
