"""Computes the patch grid and the number of tokens of an image, exactly as the model's processor.

DynamicProcessor    near the image's own size        tokens grow with its pixels
FramesProcessor     the same, as two frames          its bounds count the pixels of both
FixedProcessor      every image becomes one size     a constant number of tokens
TilesProcessor      a grid of tiles of one size      a constant number of tokens per tile
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar

from vlm_worker.errors import InvalidRequestError

MAX_ASPECT_RATIO = 200
_LARGE_SIDE = 1 << 14
"""Pixels per side of a square that is larger than the bounds of any model."""

Grid = tuple[int, int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Geometry:
    """Size in pixels, patch grid (time, height, width) and tokens of a preprocessed image."""

    height: int
    width: int
    grid_thw: Grid
    num_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Fields:
    """The effective parameters of preprocessing that all processors have, defaults filled in.

    Attributes:
        patch_size: pixels along one side of a patch.
        merge_size: patches along one side of a visual token.
        resample: the filter of resizing, as Pillow's number.
        rescale_factor: multiplies a byte before normalisation: (byte * factor - mean) / std.
        image_mean, image_std: per channel.
    """

    patch_size: int
    merge_size: int
    resample: int
    rescale_factor: float
    image_mean: tuple[float, float, float]
    image_std: tuple[float, float, float]


@dataclasses.dataclass(frozen=True, slots=True)
class DynamicProcessor(_Fields):
    """Resizes to about the image's own size; the tower reads packed patches (Qwen).

    `min_pixels` and `max_pixels` bound the resized image.
    """

    temporal_patch_size: int
    min_pixels: int
    max_pixels: int

    kind: ClassVar[str] = "dynamic"

    @property
    def factor(self) -> int:
        """Both sides of a resized image are multiples of this many pixels."""
        return self.patch_size * self.merge_size

    @property
    def patch_dim(self) -> int:
        """Float32 values of one patch."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    @property
    def max_tokens(self) -> int:
        """Visual tokens of the largest image."""
        return max(1, self.max_pixels // self.factor**2)

    @property
    def largest(self) -> Geometry:
        """The geometry of the largest square; other aspect ratios may have a few more patches."""
        return self.geometry(_LARGE_SIDE, _LARGE_SIDE)

    @property
    def tokens_per_megapixel(self) -> int:
        """Visual tokens of an image of a million pixels without a pixel cap."""
        return round(1_000_000 / self.factor**2)

    @property
    def work_bytes(self) -> int:
        """Bytes that preprocessing of the largest image needs in addition to its decoded pixels.

        They are the resized image: per pixel four bytes in Pillow and three bytes in the copy.
        """
        return 8 * self.max_pixels

    def capped(self, max_pixels: int) -> DynamicProcessor:
        """This processor with at most `max_pixels` per image, 0 = no cap; at least `min_pixels`."""
        if max_pixels <= 0 or max_pixels >= self.max_pixels:
            return self
        return dataclasses.replace(self, max_pixels=max(self.min_pixels, max_pixels))

    def low_detail_pixels(self, max_pixels: int) -> int:
        """The pixel cap of `detail: low`: `max_pixels`, or a quarter of the model's maximum."""
        return max(self.min_pixels, min(max_pixels, self.max_pixels // 4))

    def geometry(self, height: int, width: int) -> Geometry:
        """The geometry of a still image, from its size after EXIF orientation.

        Raises:
            InvalidRequestError: a side is 0, or one is more than 200 times the other.
        """
        resized_height, resized_width = self.resized(height, width)
        grid = (1, resized_height // self.patch_size, resized_width // self.patch_size)
        num_tokens = grid[1] * grid[2] // self.merge_size**2
        return Geometry(resized_height, resized_width, grid, num_tokens)

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """The size to which transformers' Qwen2VLImageProcessor resizes an image.

        The floating-point expressions are those of transformers: if a quotient is whole (471x471
        with 448² pixels), exact integer roots differ by one patch from the grid that the model was
        trained with. IEEE 754 fixes the results on every machine, so gateway and encoder agree.

        Returns:
            Height and width in pixels, multiples of `factor`.

        Raises:
            InvalidRequestError: as `geometry`.
        """
        _check_aspect_ratio(height, width, max_ratio=MAX_ASPECT_RATIO)
        factor = self.factor
        rows, columns = round(height / factor) * factor, round(width / factor) * factor
        if rows * columns > self.max_pixels:
            shrink = math.sqrt((height * width) / self.max_pixels)
            rows = max(factor, math.floor(height / shrink / factor) * factor)
            columns = max(factor, math.floor(width / shrink / factor) * factor)
        elif rows * columns < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rows = math.ceil(height * grow / factor) * factor
            columns = math.ceil(width * grow / factor) * factor
        return rows, columns

    def num_tokens(self, grid_thw: Grid) -> int | None:
        """Visual tokens of a grid; None if no image has this grid."""
        t, h, w = grid_thw
        if min(t, h, w) < 1 or h % self.merge_size or w % self.merge_size:
            return None
        return t * h * w // self.merge_size**2


@dataclasses.dataclass(frozen=True, slots=True)
class FramesProcessor(DynamicProcessor):
    """As DynamicProcessor, but a still is `temporal_patch_size` frames for its bounds (GLM-4V).

    `min_pixels` and `max_pixels` bound the pixels of all of them.
    """

    kind: ClassVar[str] = "frames"

    @property
    def max_tokens(self) -> int:
        return max(1, self.max_pixels // self.temporal_patch_size // self.factor**2)

    def capped(self, max_pixels: int) -> FramesProcessor:
        """`max_pixels` counts those of one frame."""
        capped = max_pixels * self.temporal_patch_size
        if max_pixels <= 0 or capped >= self.max_pixels:
            return self
        return dataclasses.replace(self, max_pixels=max(self.min_pixels, capped))

    def low_detail_pixels(self, max_pixels: int) -> int:
        frames = self.temporal_patch_size
        return max(self.min_pixels, min(max_pixels * frames, self.max_pixels // 4)) // frames

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """The size to which transformers' Glm4vImageProcessor resizes an image."""
        _check_aspect_ratio(height, width, max_ratio=None)
        factor, frames = self.factor, self.temporal_patch_size
        if height < factor or width < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        _check_aspect_ratio(height, width, max_ratio=MAX_ASPECT_RATIO)
        rows, columns = round(height / factor) * factor, round(width / factor) * factor
        if frames * rows * columns > self.max_pixels:
            shrink = math.sqrt((frames * height * width) / self.max_pixels)
            rows = max(factor, math.floor(height / shrink / factor) * factor)
            columns = max(factor, math.floor(width / shrink / factor) * factor)
        elif frames * rows * columns < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (frames * height * width))
            rows = math.ceil(height * grow / factor) * factor
            columns = math.ceil(width * grow / factor) * factor
        return rows, columns


@dataclasses.dataclass(frozen=True, slots=True)
class FixedProcessor(_Fields):
    """Resizes all images to one size; the tower reads planes (CLIP, SigLIP).

    `DynamicProcessor` describes the methods.

    Attributes:
        height, width: of the tower's input, in pixels.
        shortest_edge: the shorter side is resized to it, with the aspect ratio kept, and the image
            is center-cropped. 0: the image is stretched to `height` x `width`.
        num_extra_tokens: tokens that the tower adds to the grid, such as CLIP's class token.
    """

    height: int
    width: int
    shortest_edge: int
    num_extra_tokens: int

    kind: ClassVar[str] = "fixed"

    @property
    def grid(self) -> Grid:
        """The patch grid of every image."""
        return (1, self.height // self.patch_size, self.width // self.patch_size)

    @property
    def patch_dim(self) -> int:
        return 3 * self.patch_size**2

    @property
    def max_tokens(self) -> int:
        return self.grid[1] * self.grid[2] // self.merge_size**2 + self.num_extra_tokens

    @property
    def largest(self) -> Geometry:
        return self.geometry(_LARGE_SIDE, _LARGE_SIDE)

    @property
    def tokens_per_megapixel(self) -> int:
        return self.max_tokens

    @property
    def work_bytes(self) -> int:
        """The planes, and the largest resized image: Pillow's two passes, and its bytes."""
        resized = self.shortest_edge**2 * MAX_ASPECT_RATIO or self.height * self.width
        return 12 * resized + 2 * 3 * 4 * self.height * self.width

    def capped(self, _: int) -> FixedProcessor:
        return self

    def low_detail_pixels(self, _: int) -> int:
        return 0

    def geometry(self, height: int, width: int) -> Geometry:
        """The aspect ratio is limited if it is kept."""
        _check_aspect_ratio(
            height, width, max_ratio=MAX_ASPECT_RATIO if self.shortest_edge else None
        )
        return Geometry(self.height, self.width, self.grid, self.max_tokens)

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Height and width before the center crop."""
        if not self.shortest_edge:
            return self.height, self.width
        short, long = min(height, width), max(height, width)
        longest_edge = int(self.shortest_edge * long / short)  # float division, as in transformers
        if width <= height:
            return longest_edge, self.shortest_edge
        return self.shortest_edge, longest_edge

    def num_tokens(self, grid_thw: Grid) -> int | None:
        return self.max_tokens if tuple(grid_thw) == self.grid else None


@dataclasses.dataclass(frozen=True, slots=True)
class TilesProcessor(_Fields):
    """Cuts an image into tiles of one size, and adds the whole image as a last one (InternVL).

        image ─▶ columns x rows with the closest aspect ratio ─▶ tiles in rows [, the whole]

    The grid of an image is (tiles, height, width) of a tile's patches; its pixels are the tiles,
    one below the other. `DynamicProcessor` describes the methods.

    Attributes:
        side: of a tile, in pixels.
        max_tiles: most tiles of an image, without the whole; with 1, an image is one tile.
    """

    side: int
    max_tiles: int

    kind: ClassVar[str] = "tiles"

    @property
    def patch_dim(self) -> int:
        return 3 * self.patch_size**2

    @property
    def tile_tokens(self) -> int:
        """Visual tokens of one tile."""
        return (self.side // self.patch_size // self.merge_size) ** 2

    @property
    def max_tokens(self) -> int:
        return self.largest.num_tokens

    @property
    def largest(self) -> Geometry:
        """That of the most tiles, which a square may not have."""
        return self._geometry_of(_with_whole(self.max_tiles))

    @property
    def tokens_per_megapixel(self) -> int:
        return self.geometry(1000, 1000).num_tokens

    @property
    def work_bytes(self) -> int:
        """The resized image and its tiles: four bytes per pixel in Pillow, three in two copies."""
        return 10 * _with_whole(self.max_tiles) * self.side**2

    def capped(self, max_pixels: int) -> TilesProcessor:
        """The tiles of an image have at most `max_pixels`, but there is one."""
        tiles = max(1, max_pixels // self.side**2)
        if max_pixels <= 0 or tiles >= self.max_tiles:
            return self
        return dataclasses.replace(self, max_tiles=tiles)

    def low_detail_pixels(self, max_pixels: int) -> int:
        """One tile."""
        return max(1, min(max_pixels, self.side**2))

    def geometry(self, height: int, width: int) -> Geometry:
        """The size is that of the tiles, one below the other."""
        rows, columns = self.tiling(height, width)
        return self._geometry_of(_with_whole(rows * columns))

    def _geometry_of(self, tiles: int) -> Geometry:
        patches = self.side // self.patch_size
        grid = (tiles, patches, patches)
        return Geometry(tiles * self.side, self.side, grid, tiles * self.tile_tokens)

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Height and width before the image is cut."""
        rows, columns = self.tiling(height, width)
        return rows * self.side, columns * self.side

    def tiling(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns, as transformers' GotOcr2ImageProcessor chooses them.

        The closest aspect ratio wins. Of equal ones, more tiles win, if they have less than twice
        the pixels of the image.
        """
        _check_aspect_ratio(height, width, max_ratio=None)
        ratio, area = width / height, width * height
        best, least = (1, 1), math.inf
        for columns, rows in _tilings(self.max_tiles):
            difference = abs(ratio - columns / rows)
            is_covered = area > 0.5 * self.side * self.side * columns * rows
            if difference < least or (difference == least and is_covered):
                best, least = (rows, columns), difference
        return best

    def num_tokens(self, grid_thw: Grid) -> int | None:
        tiles, *sides = grid_thw
        patches = self.side // self.patch_size
        fits = sides == [patches, patches] and 1 <= tiles <= _with_whole(self.max_tiles)
        return tiles * self.tile_tokens if fits and tiles != 2 else None  # never one and the whole


def _with_whole(tiles: int) -> int:
    return tiles + 1 if tiles > 1 else 1


def _tilings(max_tiles: int) -> list[tuple[int, int]]:
    """All (columns, rows) of at most `max_tiles`, fewer tiles first."""
    sides = range(1, max_tiles + 1)
    pairs = [(x, y) for x in sides for y in sides if x * y <= max_tiles]
    return sorted(pairs, key=math.prod)


Processor = DynamicProcessor | FixedProcessor | TilesProcessor

PROCESSORS: Mapping[str, type[Processor]] = {
    processor.kind: processor
    for processor in (DynamicProcessor, FramesProcessor, FixedProcessor, TilesProcessor)
}


def _check_aspect_ratio(height: int, width: int, *, max_ratio: int | None) -> None:
    """Raise InvalidRequestError if an image is empty or exceeds `max_ratio`."""
    if height < 1 or width < 1:
        raise InvalidRequestError(f"an image of {width}x{height} pixels is empty")
    if max_ratio is not None and max(height, width) > max_ratio * min(height, width):
        raise InvalidRequestError(
            f"an image of {width}x{height} pixels is too narrow: "
            f"one side may be at most {max_ratio} times the other"
        )
