"""Which cells of an image matter, and how many visual tokens each part gets. Pure, in integers.

    histogram ─ propositional ─┐
    |g|, distance from the     ├─▶ mean ─ balance ─▶ r u16 [R, C] ─ allocate ─▶ groups of cells
    median colour ─ perspectival ┘

    balance    focus, diversify: r - d * mean3x3(r); d is the entropy of r over that of an even r
    allocate   compress, particularise: cells above a threshold are alone, and the others of each
               region of 5x5 cells are one group; the threshold gives as many groups as tokens

A share is u16: 65535 is 1. Logarithms are in 1/65536, from squaring integers. So every machine
chooses the same cells, and any number of threads.

The participatory stream is the perspectival one, which so counts twice: no question reaches the
encoder.
"""

from __future__ import annotations

import functools
import math
from typing import Final

import numpy as np

from vlm_worker.reduction import Cells

ONE: Final = 65535
SIDE: Final = 5
"""Cells of a region in each direction; twice as many if there are more regions than tokens."""
LEAST_SHARE: Final = 16
"""A cell keeps this part of its relevance, so that cells of an even region keep an order."""
_ONE_SHARE: Final = 1 << 16


def relevance_of(histogram: np.ndarray, edge: np.ndarray, contrast: np.ndarray) -> np.ndarray:
    """The balanced relevance of each cell, uint16 `[R, C]`.

    Args:
        histogram: `[R, C, bins]`, pixels of each cell by lightness; equally many in each cell.
        edge: `[R, C]`, strength of the edges, at least 0.
        contrast: `[R, C]`, distance from the median colour, at least 0.
    """
    seen = perspectival(edge, contrast)
    return balance((propositional(histogram) + 2 * seen) // 3)


def relevance_array(stored: bytes, cells: Cells) -> np.ndarray:
    """`PreparedImage.relevance` as uint16 `[R, C]`, a view."""
    return np.frombuffer(stored, np.uint16).reshape(cells)


def propositional(histogram: np.ndarray) -> np.ndarray:
    """How much a cell tells, a share: its lightness' entropy over the most, int64 `[R, C]`."""
    most = log2(histogram.shape[-1])
    return np.asarray(np.minimum(entropy(histogram) * ONE // most, ONE))


def perspectival(edge: np.ndarray, contrast: np.ndarray) -> np.ndarray:
    """How much a cell stands out, a share: both over their maxima, and the mean, int64 `[R, C]`."""
    return np.asarray((_over_maximum(edge) + _over_maximum(contrast)) // 2)


def balance(shares: np.ndarray) -> np.ndarray:
    """Compare each cell to its neighbours, as far as relevance is spread; uint16 `[R, C]`."""
    shares = shares.astype(np.int64)
    spread = _spread(shares)
    focused = np.maximum(shares - (spread * _mean3x3(shares) >> 16), shares // LEAST_SHARE)
    return np.asarray(focused, np.uint16)


def allocate(relevance: np.ndarray, num_kept: int) -> list[list[int]]:
    """Exactly `num_kept` groups; each cell, numbered in raster order, is in exactly one of them.

    The most relevant cells are alone, as many as there are tokens; ties go to the lower cell. The
    other cells of each region are one group, the one nearest to their centre first. Each cell more
    that is alone adds one group, or none if it was the last one of its region: so some number of
    them gives each count.

    Args:
        relevance: uint16 `[R, C]`.
        num_kept: 1 to R * C.
    """
    cells: Cells = relevance.shape[0], relevance.shape[1]
    regions = regions_of(cells, num_kept)
    region_of = np.empty(relevance.size, np.int64)
    for number, region in enumerate(regions):
        region_of[region] = number
    left = [len(region) for region in regions]
    num_groups, alone = len(regions), set()
    for cell in np.argsort(-relevance.ravel().astype(np.int64), kind="stable").tolist():
        if num_groups == num_kept:
            break
        alone.add(cell)
        left[region_of[cell]] -= 1
        num_groups += left[region_of[cell]] > 0
    rests = ([cell for cell in region if cell not in alone] for region in regions)
    return [[cell] for cell in alone] + [centre_first(rest, cells[1]) for rest in rests if rest]


def regions_of(cells: Cells, most: int) -> list[list[int]]:
    """The cells of each square region, at most `most` of them; edge regions may be smaller."""
    side, (rows, columns) = SIDE, cells
    while math.ceil(rows / side) * math.ceil(columns / side) > most:
        side *= 2
    index = np.arange(rows * columns).reshape(cells)
    return [
        index[row : row + side, column : column + side].ravel().tolist()
        for row in range(0, rows, side)
        for column in range(0, columns, side)
    ]


def entropy(counts: np.ndarray) -> np.ndarray:
    """Bits in 1/65536 of the shares of `counts`, over the last axis; 0 if all are 0. int64."""
    counts = counts.astype(np.int64)
    totals = counts.sum(-1)
    table = _n_log2_n(1 << int(counts.max(initial=0)).bit_length())
    sizes, at = np.unique(totals, return_inverse=True)  # few: cells have equally many pixels
    of_totals = np.array([log2(int(n)) for n in sizes], np.int64)[at].reshape(totals.shape)
    mean = table[counts].sum(-1) // np.maximum(totals, 1)
    return np.asarray(np.maximum(of_totals - mean, 0))


@functools.cache
def log2(n: int) -> int:
    """The logarithm to base 2 of n, in 1/65536, rounded down; 0 of 0."""
    if n < 1:
        return 0
    whole = n.bit_length() - 1
    x, bits = (n << 62) >> whole, 0  # 1 to 2, in 1 / 2**62
    for _ in range(16):
        x = x * x >> 62
        bits <<= 1
        if x >> 63:
            x >>= 1
            bits |= 1
    return whole << 16 | bits


@functools.lru_cache(maxsize=8)
def _n_log2_n(count: int) -> np.ndarray:
    return np.array([n * log2(n) for n in range(count)], np.int64)


def _over_maximum(values: np.ndarray) -> np.ndarray:
    values = values.astype(np.int64)
    return np.asarray(values * ONE // max(1, int(values.max())))


def _spread(shares: np.ndarray) -> int:
    """The entropy of relevance over that of even relevance, in 1/65536; 0 of a single cell."""
    if shares.size == 1:
        return 0
    return int(entropy(shares.ravel() >> 8)) * _ONE_SHARE // log2(shares.size)


def _mean3x3(values: np.ndarray) -> np.ndarray:
    rows, columns = values.shape
    padded = np.pad(values, 1, mode="edge")
    lines = padded[:rows] + padded[1 : rows + 1] + padded[2:]
    return np.asarray((lines[:, :columns] + lines[:, 1 : columns + 1] + lines[:, 2:]) // 9)


def centre_first(region: list[int], columns: int) -> list[int]:
    """The region with the member nearest to its centre first; ties go to the lower cell."""
    places = [divmod(cell, columns) for cell in region]
    num, y, x = len(region), sum(row for row, _ in places), sum(column for _, column in places)
    distances = [(num * row - y) ** 2 + (num * column - x) ** 2 for row, column in places]
    at = distances.index(min(distances))
    return [region[at], *region[:at], *region[at + 1 :]]
