"""Turns RGB pixels into the vision tower's input, bit for bit as transformers' processor does.

    rgb ─ resize ─▶ model_pixels, bytes ─ table, cut ─▶ patches, floats: 4 or 8 times as many bytes

Pixels are bytes, so rescaling and normalising are one lookup in a table of 256 floats per channel.
The table is computed with the processor's arithmetic. The native library cuts patches
(`patches.cpp`); without it, numpy does.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from vlm_worker.core.image_geometry import (
    DynamicProcessor,
    FixedProcessor,
    Geometry,
    Processor,
    TilesProcessor,
)
from vlm_worker.media.resize import Resizer
from vlm_worker.wire.buffers import new_buffer

SYMBOL = "triptych_patches"
BAND = 64
"""Rows of pixels that numpy converts to floats at a time."""
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
_TYPES = (_POINTER, _SIZE, _SIZE, _SIZE, _SIZE, _SIZE, _POINTER, _POINTER)


class PatchExtractor:
    """Normalises pixels and cuts patches. `library` is the native library; None uses numpy."""

    def __init__(self, library: str | None = None) -> None:
        self._run: Callable[..., Any] | None = None
        if library is not None:
            self._run = ctypes.CFUNCTYPE(None, *_TYPES)((SYMBOL, ctypes.CDLL(library)))

    @property
    def is_native(self) -> bool:
        return self._run is not None

    def cut(self, pixels: np.ndarray, processor: Processor, geometry: Geometry) -> np.ndarray:
        """Normalise the output of `model_pixels` and, if the tower reads patches, cut it.

        Returns:
            float32 `[t*h*w, patch_dim]`, C-contiguous. For a DynamicProcessor, rows are grouped by
            merged token and columns are (channel, time, y, x). For the others it is
            `[tiles, 3, height, width]`, reshaped; a FixedProcessor has one tile.
        """
        table = _tables(processor)
        if isinstance(processor, DynamicProcessor):
            return self._cut(pixels, processor, geometry, table)
        tiles = geometry.grid_thw[0]
        height = len(pixels) // tiles
        planes = _floats(tiles, 3, height, pixels.shape[1])
        for plane, tile in zip(planes, pixels.reshape(tiles, height, -1, 3), strict=True):
            for channel, values in enumerate(table):
                for top in range(0, height, BAND):  # numpy's indices have eight times the bytes
                    plane[channel, top : top + BAND] = values[tile[top : top + BAND, :, channel]]
        return planes.reshape(math.prod(geometry.grid_thw), processor.patch_dim)

    def _cut(
        self, pixels: np.ndarray, processor: DynamicProcessor, geometry: Geometry, table: np.ndarray
    ) -> np.ndarray:
        patch, merge = processor.patch_size, processor.merge_size
        times = processor.temporal_patch_size
        _, rows, columns = geometry.grid_thw
        out = _floats(rows * columns, 3, times, patch * patch)
        if self._run is None:
            band = patch * merge
            per_band = merge * columns
            for number in range(rows // merge):  # numpy's indices have eight times the bytes
                # [m, y, column/m, m, x, c] -> [column/m, m, m, c, y, x]
                tiles = pixels[number * band : (number + 1) * band].reshape(
                    merge, patch, columns // merge, merge, patch, 3
                )
                bytes_ = tiles.transpose(2, 0, 3, 5, 1, 4).reshape(per_band, 3, patch * patch)
                into = out[number * per_band : (number + 1) * per_band]
                for channel, values in enumerate(table):
                    into[:, channel, 0] = values[bytes_[:, channel]]
                into[:, :, 1:] = into[:, :, :1]
        else:
            pixels = np.ascontiguousarray(pixels)
            sizes = (rows, columns, patch, merge, times)
            self._run(pixels.ctypes.data, *sizes, table.ctypes.data, out.ctypes.data)
        return out.reshape(rows * columns, processor.patch_dim)


def _floats(*shape: int) -> np.ndarray:
    return np.frombuffer(new_buffer(4 * math.prod(shape)), np.float32).reshape(shape)


PLAIN, PLAIN_CUTTER = Resizer(), PatchExtractor()


def make_patches(
    rgb: np.ndarray,
    processor: Processor,
    geometry: Geometry,
    *,
    resizer: Resizer = PLAIN,
    cutter: PatchExtractor = PLAIN_CUTTER,
    size: tuple[int, int] | None = None,
) -> np.ndarray:
    """`model_pixels`, then `cutter.cut`: the reference of tests and benchmarks."""
    pixels = model_pixels(rgb, processor, geometry, resizer=resizer, size=size)
    return cutter.cut(pixels, processor, geometry)


def model_pixels(
    rgb: np.ndarray,
    processor: Processor,
    geometry: Geometry,
    *,
    resizer: Resizer = PLAIN,
    size: tuple[int, int] | None = None,
) -> np.ndarray:
    """Resize an image, and crop its centre if the model reads a smaller part.

    Args:
        rgb: uint8 `[height, width, 3]`.
        processor: the effective parameters.
        geometry: of this image under these parameters.
        resizer: all resizers give the same bytes.
        size: the image's full height and width, if it was decoded at a reduced size.

    Returns:
        uint8 `[height, width, 3]` of the geometry's size, C-contiguous; `rgb` itself if it has that
        size.
    """
    height, width = geometry.height, geometry.width
    if isinstance(processor, TilesProcessor):
        return _tiles(rgb, processor, resizer=resizer, size=size or rgb.shape[:2])
    if isinstance(processor, FixedProcessor):
        height, width = processor.resized(*(size or rgb.shape[:2]))
    resized = resizer.resize(rgb, height, width, resample=processor.resample)
    top, left = (height - geometry.height) // 2, (width - geometry.width) // 2
    middle = resized[top : top + geometry.height, left : left + geometry.width]
    return np.ascontiguousarray(middle)


def _tiles(
    rgb: np.ndarray, processor: TilesProcessor, *, resizer: Resizer, size: tuple[int, ...]
) -> np.ndarray:
    """The tiles of an image, one below the other; if there are several, the whole is the last."""
    side, (rows, columns) = processor.side, processor.tiling(*size)
    resized = resizer.resize(rgb, rows * side, columns * side, resample=processor.resample)
    tiles = resized.reshape(rows, side, columns, side, 3).swapaxes(1, 2).reshape(-1, side, 3)
    if rows * columns == 1:
        return np.ascontiguousarray(tiles)
    return np.concatenate([tiles, resizer.resize(rgb, side, side, resample=processor.resample)])


def _tables(processor: Processor) -> np.ndarray:
    """float32 `[3, 256]`: the normalised value of each byte, per channel."""
    values = (np.arange(256).astype(np.float64) * processor.rescale_factor).astype(np.float32)
    mean = np.array(processor.image_mean, dtype=np.float32)
    std = np.array(processor.image_std, dtype=np.float32)
    return (values - mean[:, None]) / std[:, None]


def image_key(
    rgb: np.ndarray,
    processor: Processor,
    *,
    model_revision: str,
    salt: bytes,
    size: tuple[int, int] | None = None,
) -> bytes:
    """The 32-byte content key: equal for equal pixels, even from different files.

    The key contains the image's full size and the number of decoded bytes. An image that was
    decoded at a reduced size therefore differs from the full image, and from an image of that size.

    Args:
        rgb: uint8 `[height, width, 3]`, oriented, before resizing.
        processor: the effective parameters, the request's cap included.
        model_revision: of the weights that will encode it.
        salt: separates tenants.
        size: the image's own height and width, where it was decoded smaller.
    """
    parameters = json.dumps(dataclasses.asdict(processor), sort_keys=True, separators=(",", ":"))
    height, width = size or rgb.shape[:2]
    digest = hashlib.sha256()
    for part in (
        b"triptych.image/1",
        model_revision.encode(),
        parameters.encode(),
        f"{width}x{height}".encode(),
        np.ascontiguousarray(rgb).data.cast("B"),
        salt,
    ):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
