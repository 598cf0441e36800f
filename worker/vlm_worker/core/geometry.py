"""From a picture's size to its patch grid and its tokens, exactly as the model's processor does.

DynamicProcessor    near the picture's own size        tokens grow with its pixels
FixedProcessor      every picture becomes one size     tokens are always as many
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar

from vlm_worker.errors import InvalidRequestError

MAX_ASPECT_RATIO = 200

Grid = tuple[int, int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Geometry:
    """What a picture becomes: its size in pixels, its patch grid, its number of tokens."""

    height: int
    width: int
    grid_thw: Grid
    num_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Processor(abc.ABC):
    """How pixels become what a vision tower reads; the effective parameters, defaults filled in.

    Attributes:
        patch_size: pixels along one side of a patch.
        merge_size: patches along one side of a visual token.
        resample: the filter of resizing, Pillow's number.
        rescale_factor: of a byte, before the mean is taken off and the deviation divided by.
        image_mean: per channel.
        image_std: likewise.
    """

    patch_size: int
    merge_size: int
    resample: int
    rescale_factor: float
    image_mean: tuple[float, float, float]
    image_std: tuple[float, float, float]

    kind: ClassVar[str]

    @property
    @abc.abstractmethod
    def patch_dim(self) -> int:
        """Float32 values of one patch."""

    @property
    @abc.abstractmethod
    def max_tokens(self) -> int:
        """Of the largest picture."""

    @property
    @abc.abstractmethod
    def tokens_per_megapixel(self) -> int:
        """Of a picture of a million pixels that no cap shrinks."""

    @property
    @abc.abstractmethod
    def work_bytes(self) -> int:
        """Memory that preparing the largest picture takes beyond its own pixels."""

    @abc.abstractmethod
    def capped(self, max_pixels: int) -> Processor:
        """The same with at most `max_pixels` per picture (0 = no cap)."""

    @abc.abstractmethod
    def low_detail_pixels(self, max_pixels: int) -> int:
        """The cap of a picture in which details do not matter, at most `max_pixels`; 0 = none."""

    @abc.abstractmethod
    def geometry(self, height: int, width: int) -> Geometry:
        """Of a still picture of oriented size.

        Raises:
            InvalidRequestError: a side is 0, or one is more than 200 times the other.
        """

    @abc.abstractmethod
    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Height and width that a picture is resized to, before anything is cut off.

        Raises as `geometry` does.
        """

    @abc.abstractmethod
    def num_tokens(self, grid_thw: Grid) -> int | None:
        """Visual tokens of a grid; None where no picture has such a grid."""


@dataclasses.dataclass(frozen=True, slots=True)
class DynamicProcessor(Processor):
    """Sizes near the picture's own, in patches that the tower reads packed: Qwen's.

    `min_pixels` and `max_pixels` bound the resized picture.
    """

    temporal_patch_size: int
    min_pixels: int
    max_pixels: int

    kind: ClassVar[str] = "dynamic"

    @property
    def factor(self) -> int:
        """Both sides of a resized picture are multiples of this many pixels."""
        return self.patch_size * self.merge_size

    @property
    def patch_dim(self) -> int:
        """Float32 values of one patch."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    @property
    def max_tokens(self) -> int:
        """Of the largest picture."""
        return max(1, self.max_pixels // self.factor**2)

    @property
    def tokens_per_megapixel(self) -> int:
        """Of a picture of a million pixels that no cap shrinks."""
        return round(1_000_000 / self.factor**2)

    @property
    def work_bytes(self) -> int:
        """Patches, their bytes before the table, and the resized picture."""
        return 2 * self.max_pixels * 3 * 4 * self.temporal_patch_size

    def capped(self, max_pixels: int) -> DynamicProcessor:
        """The same with at most `max_pixels` per picture (0 = no cap), never below `min_pixels`."""
        if max_pixels <= 0 or max_pixels >= self.max_pixels:
            return self
        return dataclasses.replace(self, max_pixels=max(self.min_pixels, max_pixels))

    def low_detail_pixels(self, max_pixels: int) -> int:
        """`max_pixels`, or a quarter of the model's own if less."""
        return max(self.min_pixels, min(max_pixels, self.max_pixels // 4))

    def geometry(self, height: int, width: int) -> Geometry:
        """Of a still picture of oriented size; raises as `smart_resize` does."""
        resized_height, resized_width = self.resized(height, width)
        grid = (1, resized_height // self.patch_size, resized_width // self.patch_size)
        return Geometry(
            resized_height, resized_width, grid, grid[1] * grid[2] // self.merge_size**2
        )

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Height and width in whole tokens; raises as `smart_resize` does."""
        return smart_resize(height, width, self)

    def num_tokens(self, grid_thw: Grid) -> int | None:
        """Visual tokens of a grid, which must be of whole tokens."""
        t, h, w = grid_thw
        if min(t, h, w) < 1 or h % self.merge_size or w % self.merge_size:
            return None
        return t * h * w // self.merge_size**2


@dataclasses.dataclass(frozen=True, slots=True)
class FixedProcessor(Processor):
    """One size for all pictures, which the tower reads as planes: CLIP's and SigLIP's.

    Attributes:
        height: of what the tower reads, in pixels.
        width: likewise.
        shortest_edge: the picture is resized to it, as it is shaped, and its middle cut out;
            0: it is stretched to `height` x `width`.
        num_extra_tokens: that the tower adds to those of the grid, as CLIP's class token.
    """

    height: int
    width: int
    shortest_edge: int
    num_extra_tokens: int

    kind: ClassVar[str] = "fixed"

    @property
    def grid(self) -> Grid:
        """Of every picture."""
        return (1, self.height // self.patch_size, self.width // self.patch_size)

    @property
    def patch_dim(self) -> int:
        """Float32 values of one patch; a tower that reads planes has as many per patch."""
        return 3 * self.patch_size**2

    @property
    def max_tokens(self) -> int:
        """Of every picture."""
        return self.grid[1] * self.grid[2] // self.merge_size**2 + self.num_extra_tokens

    @property
    def tokens_per_megapixel(self) -> int:
        """Of every picture."""
        return self.max_tokens

    @property
    def work_bytes(self) -> int:
        """The planes, and the most extreme resized picture: Pillow's two passes, and its bytes."""
        resized = self.shortest_edge**2 * MAX_ASPECT_RATIO or self.height * self.width
        return 12 * resized + 2 * 3 * 4 * self.height * self.width

    def capped(self, max_pixels: int) -> FixedProcessor:
        """The same: a cap on pixels changes no size."""
        del max_pixels
        return self

    def low_detail_pixels(self, max_pixels: int) -> int:
        """0: there is no smaller size."""
        del max_pixels
        return 0

    def geometry(self, height: int, width: int) -> Geometry:
        """Of any picture; raises as `check_shape` does where its shape is kept."""
        check_shape(height, width, max_ratio=MAX_ASPECT_RATIO if self.shortest_edge else None)
        return Geometry(self.height, self.width, self.grid, self.max_tokens)

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Height and width before the middle is cut out."""
        if not self.shortest_edge:
            return self.height, self.width
        short, long = min(height, width), max(height, width)
        longest_edge = int(self.shortest_edge * long / short)  # in floats, as transformers
        if width <= height:
            return longest_edge, self.shortest_edge
        return self.shortest_edge, longest_edge

    def num_tokens(self, grid_thw: Grid) -> int | None:
        """Visual tokens of the one grid."""
        return self.max_tokens if tuple(grid_thw) == self.grid else None


def smart_resize(height: int, width: int, processor: DynamicProcessor) -> tuple[int, int]:
    """The size that transformers' Qwen2VLImageProcessor gives a picture.

    The expressions are its own, floats included: exact integer roots differ from it by one patch
    where a quotient is whole (471x471 under 448²), and the grid must be what the model was trained
    with. IEEE 754 makes these operations equal on every machine, so gateway and encoder agree.

    Returns:
        Height and width in pixels, multiples of `processor.factor`.

    Raises:
        InvalidRequestError: a side is 0, or one is more than 200 times the other.
    """
    check_shape(height, width, max_ratio=MAX_ASPECT_RATIO)
    factor = processor.factor
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rows * columns > processor.max_pixels:
        shrink = math.sqrt((height * width) / processor.max_pixels)
        rows = max(factor, math.floor(height / shrink / factor) * factor)
        columns = max(factor, math.floor(width / shrink / factor) * factor)
    elif rows * columns < processor.min_pixels:
        grow = math.sqrt(processor.min_pixels / (height * width))
        rows = math.ceil(height * grow / factor) * factor
        columns = math.ceil(width * grow / factor) * factor
    return rows, columns


def check_shape(height: int, width: int, *, max_ratio: int | None) -> None:
    """Raise InvalidRequestError for an empty picture, or one that is too narrow."""
    if height < 1 or width < 1:
        raise InvalidRequestError(f"a picture of {width}x{height} pixels is empty")
    if max_ratio is not None and max(height, width) > max_ratio * min(height, width):
        raise InvalidRequestError(
            f"a picture of {width}x{height} pixels is too narrow: "
            f"one side may be at most {max_ratio} times the other"
        )


PROCESSORS: Mapping[str, type[Processor]] = {
    processor.kind: processor for processor in (DynamicProcessor, FixedProcessor)
}
