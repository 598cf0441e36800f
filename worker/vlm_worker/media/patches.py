"""From RGB pixels to what the vision tower reads, bit for bit as transformers' own processor.

    rgb ─ resize ─▶ model_pixels, bytes ─ table, cut ─▶ patches, floats: 4 or 8 times as many bytes

Pixels are bytes, so rescaling and normalising are a table of 256 floats per channel, made with the
processor's own arithmetic and looked up once. Patches are cut by the native library where there is
one (`patches.cpp`), else by numpy.
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

from vlm_worker.core.geometry import DynamicProcessor, FixedProcessor, Geometry, Processor
from vlm_worker.media.resize import Resizer

SYMBOL = "triptych_patches"
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
_TYPES = (_POINTER, _SIZE, _SIZE, _SIZE, _SIZE, _SIZE, _POINTER, _POINTER)


class Cutter:
    """`library` is the file of the native library; None is numpy."""

    def __init__(self, library: str | None = None) -> None:
        self._run: Callable[..., Any] | None = None
        if library is not None:
            self._run = ctypes.CFUNCTYPE(None, *_TYPES)((SYMBOL, ctypes.CDLL(library)))

    @property
    def is_native(self) -> bool:
        """Whether the native library cuts."""
        return self._run is not None

    def cut(self, pixels: np.ndarray, processor: Processor, geometry: Geometry) -> np.ndarray:
        """Normalise and, where the tower reads patches, cut what `model_pixels` gives.

        Returns:
            float32 `[t*h*w, patch_dim]`, C-contiguous. Of a DynamicProcessor, rows are grouped by
            merged token and columns are (channel, time, y, x); of a FixedProcessor it is
            `[3, height, width]` by another shape.
        """
        table = _tables(processor)
        if isinstance(processor, DynamicProcessor):
            return self._cut(pixels, processor, geometry, table)
        planes = np.empty((3, *pixels.shape[:2]), dtype=np.float32)
        for channel, values in enumerate(table):
            np.take(values, pixels[:, :, channel], out=planes[channel])
        return planes.reshape(math.prod(geometry.grid_thw), processor.patch_dim)

    def _cut(
        self,
        pixels: np.ndarray,
        processor: DynamicProcessor,
        geometry: Geometry,
        table: np.ndarray,
    ) -> np.ndarray:
        patch, merge, times = (
            processor.patch_size,
            processor.merge_size,
            processor.temporal_patch_size,
        )
        _, rows, columns = geometry.grid_thw
        out = np.empty((rows * columns, 3, times, patch * patch), dtype=np.float32)
        if self._run is None:
            # [row/m, m, y, column/m, m, x, c] -> [row/m, column/m, m, m, c, y, x]
            tiles = pixels.reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
            bytes_ = tiles.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, 3, patch * patch)
            for channel, values in enumerate(table):
                np.take(values, bytes_[:, channel], out=out[:, channel, 0])
            out[:, :, 1:] = out[:, :, :1]
        else:
            pixels = np.ascontiguousarray(pixels)
            sizes = (rows, columns, patch, merge, times)
            self._run(pixels.ctypes.data, *sizes, table.ctypes.data, out.ctypes.data)
        return out.reshape(rows * columns, processor.patch_dim)


PLAIN, PLAIN_CUTTER = Resizer(), Cutter()


def make_patches(
    rgb: np.ndarray,
    processor: Processor,
    geometry: Geometry,
    *,
    resizer: Resizer = PLAIN,
    cutter: Cutter = PLAIN_CUTTER,
    size: tuple[int, int] | None = None,
) -> np.ndarray:
    """What `cutter` makes of `model_pixels`; any gives the same values."""
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
    """Resize a picture, and cut out the middle where the model sees no more.

    Args:
        rgb: uint8 `[height, width, 3]`.
        processor: the effective parameters.
        geometry: of this picture under these parameters.
        resizer: any gives the same bytes.
        size: the picture's own height and width, where it was decoded smaller.

    Returns:
        uint8 `[height, width, 3]` of the geometry's size, C-contiguous; `rgb` where it is that.
    """
    height, width = geometry.height, geometry.width
    if isinstance(processor, FixedProcessor):
        height, width = processor.resized(*(size or rgb.shape[:2]))
    resized = resizer.resize(rgb, height, width, resample=processor.resample)
    top, left = (height - geometry.height) // 2, (width - geometry.width) // 2
    middle = resized[top : top + geometry.height, left : left + geometry.width]
    return np.ascontiguousarray(middle)


def _tables(processor: Processor) -> np.ndarray:
    """float32 `[3, 256]`: what each byte becomes, per channel."""
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
    """The 32-byte content key: equal for equal pixels, whatever file they came in.

    A picture that was decoded smaller is another than the one decoded whole, and than a picture of
    that size: both its own size and the number of its bytes are part of the key.

    Args:
        rgb: uint8 `[height, width, 3]`, oriented, before resizing.
        processor: the effective parameters, the request's cap included.
        model_revision: of the weights that will encode it.
        salt: separates tenants.
        size: the picture's own height and width, where it was decoded smaller.
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
