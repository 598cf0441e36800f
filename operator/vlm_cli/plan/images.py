"""Counts the visual tokens of an image by its size, as the worker's processors do. Pure.

NativeSize   the size is kept, within limits    tokens grow with the pixels     Qwen
FixedSize    every image gets one size          a constant number of tokens     Gemma 3, LLaVA

tests/contracts/test_plan.py compares the counts with `vlm_worker.core.image_geometry`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Final

from vlm_cli.plan.fields import PlanError

LOW_DETAIL_PIXELS: Final = 512 * 512
MAX_ASPECT_RATIO: Final = 200
LARGE_SIDE: Final = 1 << 14
"""Pixels per side: no image has more visual tokens than a square of this side."""


@dataclasses.dataclass(frozen=True)
class ImageCount:
    """What the model sees of one image: its resized size in pixels, patches and visual tokens."""

    height: int
    width: int
    num_patches: int
    num_tokens: int


@dataclasses.dataclass(frozen=True)
class NativeSize:
    """Keeps an image near its own size.

    Attributes:
        patch_size: pixels along one side of a patch.
        merge_size: patches along one side of a visual token.
        patch_values: numbers per patch that the tower reads.
        min_pixels, max_pixels: limits of the resized image.
    """

    patch_size: int
    merge_size: int
    patch_values: int
    min_pixels: int
    max_pixels: int

    def count(self, width: int, height: int, *, low_detail: bool = False) -> ImageCount:
        """Count an image of `width` x `height` pixels.

        The expressions are those of transformers' Qwen2VLImageProcessor. Integer roots would
        differ by a patch if a quotient is whole.

        Raises:
            PlanError: a side is below 1, or more than 200 times the other.
        """
        _check(width, height, limits_ratio=True)
        factor = self.patch_size * self.merge_size
        most = self.max_pixels
        if low_detail:
            most = max(self.min_pixels, min(LOW_DETAIL_PIXELS, self.max_pixels // 4))
        rows, columns = round(height / factor) * factor, round(width / factor) * factor
        if rows * columns > most:
            shrink = math.sqrt((height * width) / most)
            rows = max(factor, math.floor(height / shrink / factor) * factor)
            columns = max(factor, math.floor(width / shrink / factor) * factor)
        elif rows * columns < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rows = math.ceil(height * grow / factor) * factor
            columns = math.ceil(width * grow / factor) * factor
        num_patches = (rows // self.patch_size) * (columns // self.patch_size)
        return ImageCount(rows, columns, num_patches, num_patches // self.merge_size**2)

    @property
    def formula(self) -> str:
        factor = self.patch_size * self.merge_size
        return (
            f"height/{factor} · width/{factor}, each side rounded to a multiple of {factor} px, "
            f"{self.min_pixels} to {self.max_pixels} px in all"
        )


@dataclasses.dataclass(frozen=True)
class FixedSize:
    """Gives every image `side` x `side` pixels.

    Attributes:
        patch_size, merge_size, patch_values: as in `NativeSize`.
        num_extra_tokens: tokens that the tower adds, such as CLIP's class token.
        keeps_ratio: whether the middle is cut out. If not, the image is stretched.
    """

    patch_size: int
    merge_size: int
    patch_values: int
    side: int
    num_extra_tokens: int
    keeps_ratio: bool

    def count(self, width: int, height: int, *, low_detail: bool = False) -> ImageCount:  # noqa: ARG002
        """As `NativeSize.count`; the ratio is limited only if it is kept."""
        _check(width, height, limits_ratio=self.keeps_ratio)
        num_patches = (self.side // self.patch_size) ** 2
        num_tokens = num_patches // self.merge_size**2 + self.num_extra_tokens
        return ImageCount(self.side, self.side, num_patches, num_tokens)

    @property
    def formula(self) -> str:
        extra = f" + {self.num_extra_tokens}" if self.num_extra_tokens else ""
        return f"({self.side}/{self.patch_size * self.merge_size})²{extra}, for every size"


Sizing = NativeSize | FixedSize


def largest(sizing: Sizing) -> ImageCount:
    """Count the image with the most visual tokens."""
    return sizing.count(LARGE_SIDE, LARGE_SIDE)


def _check(width: int, height: int, *, limits_ratio: bool) -> None:
    if width < 1 or height < 1:
        raise PlanError(f"an image of {width}x{height} pixels is empty")
    if limits_ratio and max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise PlanError(
            f"an image of {width}x{height} pixels is refused: "
            f"one side may be at most {MAX_ASPECT_RATIO} times the other"
        )
