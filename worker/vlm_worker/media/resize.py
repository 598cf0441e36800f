"""Resizes as Pillow does, byte for byte: with the native library, or without it with Pillow.

This module computes the weights of each output pixel; `resize.cpp`, beside the model's kernels,
computes the sums. The decode child gets the library's path, so that it imports no kernels.

Source of weights and order: Pillow 13, src/libImaging/Resample.c (precompute_coeffs).
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

SYMBOL = "triptych_resize"
_SCALE = 1 << 22
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
_IMAGE = (_POINTER, _SIZE, _SIZE)
_SIDE = (_POINTER, _POINTER, _POINTER, _SIZE)
_TYPES = (*_IMAGE, *_IMAGE, *_SIDE, *_SIDE, ctypes.c_bool)


class _Filter(NamedTuple):
    """A filter by distance, 0 from `support` on; distances are in pixels of the smaller side."""

    weight: Callable[[np.ndarray], np.ndarray]
    support: float


def _bilinear(x: np.ndarray) -> np.ndarray:
    return np.where(x < 1, 1 - x, 0.0)


def _bicubic(x: np.ndarray) -> np.ndarray:
    a = -0.5
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


_FILTERS: Mapping[int, _Filter] = {
    Image.Resampling.BILINEAR: _Filter(_bilinear, 1.0),
    Image.Resampling.BICUBIC: _Filter(_bicubic, 2.0),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Taps:
    """Inputs of each output along one side: int32 `first`, `count` `[N]`, `weights` `[N, K]`."""

    first: np.ndarray
    count: np.ndarray
    weights: np.ndarray

    @property
    def arguments(self) -> tuple[int, int, int, int]:
        first, count, weights = (
            each.ctypes.data for each in (self.first, self.count, self.weights)
        )
        return first, count, weights, self.weights.shape[1]


class Resizer:
    """Resizes images. `library` is the native library's file; without it, Pillow resizes.

    Pillow also resizes for filters that the library does not have.
    """

    def __init__(self, library: str | None = None) -> None:
        self._run: Callable[..., Any] | None = None
        if library is not None:
            self._run = ctypes.CFUNCTYPE(ctypes.c_bool, *_TYPES)((SYMBOL, ctypes.CDLL(library)))

    def resize(self, rgb: np.ndarray, height: int, width: int, *, resample: int) -> np.ndarray:
        """uint8 `[height, width, 3]`, C-contiguous; the input itself if the size is the same.

        Raises:
            MemoryError: an allocation failed.
        """
        if rgb.shape[:2] == (height, width):
            return np.ascontiguousarray(rgb)
        if self._run is None or resample not in _FILTERS:
            resized = Image.fromarray(rgb).resize((width, height), Image.Resampling(resample))
            return np.asarray(resized)
        source = np.ascontiguousarray(rgb)
        old_height, old_width, _ = source.shape
        out = np.empty((height, width, 3), np.uint8)
        is_done = self._run(
            source.ctypes.data,
            old_height,
            old_width,
            out.ctypes.data,
            height,
            width,
            *taps(old_width, width, resample).arguments,
            *taps(old_height, height, resample).arguments,
            old_height - height > max(0, 2 * (old_width - width)),  # Pillow's order of passes
        )
        if not is_done:
            raise MemoryError(f"resizing {old_width}x{old_height} to {width}x{height}")
        return out


@functools.lru_cache(maxsize=64)
def taps(num_in: int, num_out: int, resample: int) -> Taps:
    """The inputs and weights of `num_out` pixels of a side of `num_in`, in Pillow's arithmetic."""
    weight, support = _FILTERS[resample]
    scale = num_in / num_out
    stretch = max(scale, 1.0)
    reach = support * stretch
    centre = (np.arange(num_out) + 0.5) * scale
    first = np.maximum((centre - reach + 0.5).astype(np.int64), 0)
    count = np.minimum((centre + reach + 0.5).astype(np.int64), num_in) - first
    numbers = np.arange(int(count.max()))
    distance = np.abs((numbers + first[:, None] - centre[:, None] + 0.5) * (1.0 / stretch))
    weights = np.where(numbers < count[:, None], weight(distance), 0.0)
    # summed sequentially, as Pillow's loop does: pairwise summation would round differently
    weights /= np.add.accumulate(weights, axis=1)[:, -1:]
    scaled = (weights * _SCALE + np.where(weights < 0, -0.5, 0.5)).astype(np.int32)
    return Taps(first.astype(np.int32), count.astype(np.int32), scaled)
