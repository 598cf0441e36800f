"""From a picture's size to its patch grid and its tokens, exactly as the model's processor does."""

from __future__ import annotations

import dataclasses
import math

from vlm_worker.errors import InvalidRequestError

MAX_ASPECT_RATIO = 200


@dataclasses.dataclass(frozen=True, slots=True)
class Processor:
    """How pixels become patches; the effective parameters, defaults filled in.

    `min_pixels` and `max_pixels` bound the resized picture; `resample` is Pillow's number.
    """

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int
    resample: int
    rescale_factor: float
    image_mean: tuple[float, float, float]
    image_std: tuple[float, float, float]

    @property
    def factor(self) -> int:
        """Both sides of a resized picture are multiples of this many pixels."""
        return self.patch_size * self.merge_size

    @property
    def patch_dim(self) -> int:
        """Float32 values of one patch."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    def capped(self, max_pixels: int) -> Processor:
        """The same with at most `max_pixels` per picture (0 = no cap), never below `min_pixels`."""
        if max_pixels <= 0 or max_pixels >= self.max_pixels:
            return self
        return dataclasses.replace(self, max_pixels=max(self.min_pixels, max_pixels))


@dataclasses.dataclass(frozen=True, slots=True)
class Geometry:
    """What a picture becomes: its resized size in pixels, its patch grid, its number of tokens."""

    height: int
    width: int
    grid_thw: tuple[int, int, int]
    num_tokens: int


def picture_geometry(height: int, width: int, processor: Processor) -> Geometry:
    """Geometry of a still picture of oriented size; raises as `smart_resize` does."""
    resized_height, resized_width = smart_resize(height, width, processor)
    rows = resized_height // processor.patch_size
    columns = resized_width // processor.patch_size
    num_tokens = rows * columns // processor.merge_size**2
    return Geometry(resized_height, resized_width, (1, rows, columns), num_tokens)


def smart_resize(height: int, width: int, processor: Processor) -> tuple[int, int]:
    """The size that transformers' Qwen2VLImageProcessor gives a picture.

    The expressions are its own, floats included: exact integer roots differ from it by one patch
    where a quotient is whole (471x471 under 448²), and the grid must be what the model was trained
    with. IEEE 754 makes these operations equal on every machine, so gateway and encoder agree.

    Returns:
        Height and width in pixels, multiples of `processor.factor`.

    Raises:
        InvalidRequestError: a side is 0, or one is more than 200 times the other.
    """
    if height < 1 or width < 1:
        raise InvalidRequestError(f"a picture of {width}x{height} pixels is empty")
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise InvalidRequestError(
            f"a picture of {width}x{height} pixels is too narrow: "
            f"one side may be at most {MAX_ASPECT_RATIO} times the other"
        )
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
