"""What the pixels of each cell of an image look like: 13 channels in integers, and its lightness.

    u8 [H, W, 3] ─ sums of 2x2 ─▶ RGB, L*a*b*, Sobel ─ mean of a cell ─▶ i16 [13, R, C]

    channel   what                                     unit
    0-2       red, green, blue                         1/16 of a byte: 0 to 4080
    3-5       L*, a*, b* (CIE 1976, D65)               1/64
    6-8       Sobel x, y and its length, of the grey   1/4 of a byte
    9, 10     y, x of the cell's centre                1/32768 of the height, the width
    11        distance from the image's centre         as 9 and 10
    12        distance from the image's median colour  1/64: |L*| + |a*| + |b*|

All arithmetic is on integers, and tables replace powers and roots, so that every machine gets the
same values. The length of a vector is max + 3/8 min of its components: at most 7 % off.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from vlm_worker.core.relevance import relevance_of
from vlm_worker.errors import InvalidRequestError
from vlm_worker.reduction import Cells

NUM_CHANNELS: Final = 13
LIGHTNESS, EDGE, CONTRAST = 3, 8, 12
"""Channels L*, length of the Sobel vector, and distance from the median colour."""
NUM_BINS: Final = 8
"""Of lightness."""
BAND_PIXELS: Final = 1 << 14
"""Half pixels at a time: few enough that their arrays stay in a core's cache. All arrays together
take 3 bytes per pixel of the image, and 2 MB."""

_LINEAR_MAX: Final = 4095
_XYZ: Final = ((1777, 1541, 778), (871, 2929, 296), (73, 448, 3575))
"""sRGB to X, Y, Z, each over the white's, in 1/4096: each row is white at (1, 1, 1)."""
_LAB_SCALE: Final = 64
_LIGHTNESS_MAX: Final = 100 * _LAB_SCALE


class Texture(NamedTuple):
    """`channels` is int16 `[13, R, C]`.

    `histogram` is int64 `[R, C, 8]`: half pixels of each cell by lightness.
    """

    channels: np.ndarray
    histogram: np.ndarray


def pixel_relevance(pixels: np.ndarray, cells: Cells) -> np.ndarray:
    """The relevance of each cell for ARRCOC, uint16 `[R, C]`; arguments and errors of `texture`."""
    seen = texture(pixels, cells)
    return relevance_of(seen.histogram, seen.channels[EDGE], seen.channels[CONTRAST])


def texture(pixels: np.ndarray, cells: Cells, *, band: int = BAND_PIXELS) -> Texture:
    """The texture of an image, uint8 `[height, width, 3]`, as the model reads it.

    `band` changes memory and time alone.

    Raises:
        InvalidRequestError: the cells are no squares of an even side that cover the image.
    """
    side = _half_side(pixels, cells)
    height, width = pixels.shape[0] // 2, pixels.shape[1] // 2
    lab = np.empty((3, height, width), np.int16)
    grey = np.empty((height + 2, width + 2), np.int16)  # with a border, for Sobel
    channels = np.empty((NUM_CHANNELS, *cells), np.int16)
    for rows, of_cells in _bands(height, width, side, band):
        rgb = _half(pixels[2 * rows.start : 2 * rows.stop])
        _lab(rgb, lab[:, rows])
        grey[1:-1][rows, 1:-1] = (77 * rgb[0] + 150 * rgb[1] + 29 * rgb[2]) >> 8
        channels[:3, of_cells] = _means(rgb * 4, side)
    _extend(grey)
    median = [_median(plane) for plane in lab]
    histogram = np.empty((*cells, NUM_BINS), np.int64)
    for rows, of_cells in _bands(height, width, side, band):
        colours = lab[:, rows]
        channels[3:6, of_cells] = _means(colours, side)
        for channel, plane in enumerate(_sobel(grey[rows.start : rows.stop + 2]), start=6):
            channels[channel, of_cells] = _means(plane[None], side)[0]
        channels[12, of_cells] = _means(_distance(colours, median)[None], side)[0]
        histogram[of_cells] = _histogram(colours[0], side)
    channels[9:12] = _places(cells)
    return Texture(channels, histogram)


def _half_side(pixels: np.ndarray, cells: Cells) -> int:
    """Half the side of a cell, in pixels."""
    height, width = pixels.shape[:2]
    side: int = height // cells[0]
    if side % 2 or (height, width) != (side * cells[0], side * cells[1]):
        raise InvalidRequestError(
            f"reduction.method: arrcoc needs square cells of an even side; {width} x {height} "
            f"pixels have no {cells[1]} x {cells[0]} of them"
        )
    return side // 2


def _bands(height: int, width: int, side: int, pixels: int) -> Iterator[tuple[slice, slice]]:
    """Rows of half pixels and of cells, a band of whole cells at a time."""
    step = max(1, pixels // (width * side))
    for at in range(0, height // side, step):
        end = min(at + step, height // side)
        yield slice(at * side, end * side), slice(at, end)


def _half(pixels: np.ndarray) -> np.ndarray:
    """Sums of 2x2 pixels, int32 `[3, rows / 2, columns / 2]`."""
    lines = np.add(pixels[0::2], pixels[1::2], dtype=np.uint16)
    sums = np.empty((3, lines.shape[0], lines.shape[1] // 2), np.int32)
    for channel, into in enumerate(sums):
        np.add(lines[:, 0::2, channel], lines[:, 1::2, channel], out=into)
    return sums


def _lab(rgb: np.ndarray, into: np.ndarray) -> None:
    """Write L*, a*, b* of `_half`, int16 of the same shape."""
    linear, root = _tables()
    r, g, b = linear.take(rgb)
    x, y, z = (root.take((k[0] * r + k[1] * g + k[2] * b) >> 12) for k in _XYZ)
    into[0] = ((116 * _LAB_SCALE * y) >> 15) - 16 * _LAB_SCALE
    into[1] = (500 * _LAB_SCALE * (x - y)) >> 15
    into[2] = (200 * _LAB_SCALE * (y - z)) >> 15


@functools.cache
def _tables() -> tuple[np.ndarray, np.ndarray]:
    """Of sRGB's curve by a sum of four bytes, and of CIE's f in 1/32768 by linear light; int32."""
    linear, root = exact_tables()
    return np.rint(linear).astype(np.int32), np.rint(root).astype(np.int32)


def exact_tables() -> tuple[np.ndarray, np.ndarray]:
    """The tables before rounding. No value is so near to a half that machines round it apart."""
    v = np.arange(4 * 255 + 1) / (4 * 255)
    linear = np.where(v <= 0.04045, v / 12.92, ((v + 0.055) / 1.055) ** 2.4)
    t = np.arange(_LINEAR_MAX + 1) / _LINEAR_MAX
    root = np.where(t > (6 / 29) ** 3, np.cbrt(t), t * (29 / 6) ** 2 / 3 + 4 / 29)
    return linear * _LINEAR_MAX, root * 32768


def _extend(grey: np.ndarray) -> None:
    """Copy the outermost half pixels into the border."""
    grey[0], grey[-1] = grey[1], grey[-2]
    grey[:, 0], grey[:, -1] = grey[:, 1], grey[:, -2]


def _sobel(grey: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sobel x, y and length over 4: int16, without the border of `grey`."""
    down = grey[:-2] + 2 * grey[1:-1] + grey[2:]
    across = grey[:, :-2] + 2 * grey[:, 1:-1] + grey[:, 2:]
    x, y = (down[:, 2:] - down[:, :-2]) >> 2, (across[2:] - across[:-2]) >> 2
    return x, y, _length(x, y)


def _length(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    x, y = abs(x), abs(y)
    return np.asarray(np.maximum(x, y) + ((3 * np.minimum(x, y)) >> 3))


def _distance(colours: np.ndarray, median: list[int]) -> np.ndarray:
    """int16: the greatest distance between two colours of sRGB is below 500 = 32,000 / 64."""
    lightness, a, b = (abs(plane - np.int16(of)) for plane, of in zip(colours, median, strict=True))
    return np.asarray(lightness + a + b)


def _median(plane: np.ndarray) -> int:
    """The lower median of a plane of int16."""
    middle = (plane.size - 1) // 2
    return int(np.partition(plane, middle, axis=None)[middle])


def _means(planes: np.ndarray, side: int) -> np.ndarray:
    """Means over the cells, rounded down: `[N, rows, columns]` to `[N, R, C]`."""
    num, rows, columns = planes.shape
    lines = planes.reshape(num, rows // side, side, columns).sum(2, dtype=np.int32)
    sums = lines.reshape(num, rows // side, columns // side, side).sum(3)
    return np.asarray(sums // (side * side))


def _histogram(lightness: np.ndarray, side: int) -> np.ndarray:
    """Half pixels of each cell by lightness, int64 `[R, C, 8]`."""
    rows, columns = lightness.shape[0] // side, lightness.shape[1] // side
    bins = lightness // (_LIGHTNESS_MAX // NUM_BINS + 1)
    of_row = np.repeat(np.arange(rows) * columns * NUM_BINS, side)[:, None]
    of_column = np.repeat(np.arange(columns) * NUM_BINS, side)
    counts = np.bincount((of_row + of_column + bins).ravel(), minlength=rows * columns * NUM_BINS)
    return counts.reshape(rows, columns, NUM_BINS)


def _places(cells: Cells) -> np.ndarray:
    """Channels 9 to 11."""
    y, x = (((2 * np.arange(n) + 1) << 14) // n for n in cells)
    y, x = np.meshgrid(y, x, indexing="ij")
    return np.stack([y, x, _length(y - (1 << 14), x - (1 << 14))])
