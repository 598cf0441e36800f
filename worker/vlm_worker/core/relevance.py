"""Which cells of an image matter, and how many visual tokens each part gets. Pure, in integers.

    histogram ─ propositional ─┐
    |g|, distance from the     ├─▶ mean ─ balance ─▶ r u16 [R, C] ─ allocate ─▶ groups of cells
    median colour ─ perspectival ┘

    balance    focus, diversify    r - d * mean3x3(r); d is the entropy of r, as a share of the most
               exploit, explore    (1 - e) * r + e
    allocate   compress, particularise: 25, 12, 4 or 1 rows per region of 5x5 cells, by bisection

A share is u16: 65535 is 1. Logarithms are in 1/65536, from squaring integers. So every machine
chooses the same cells, and any number of threads.

The participatory stream is the perspectival one, which so counts twice: no question reaches the
encoder.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from vlm_worker.reduction import Cells

ONE: Final = 65535
SIDE: Final = 5
"""Cells of a region in each direction; twice as many if there are more regions than tokens."""
LEVELS: Final = (25, 12, 4)
"""Rows of a region of 25 cells by level, 400, 200 and 64 tokens over 16; the last level is 1."""
QUOTAS: Final = (10, 30, 69)
"""Percent of the regions that have at least this level: 20, 40 and 76 of 196, added up."""
EXPLORE: Final = 19_661
"""e: 0.1 + 0.2 * (1 - p) in 1/65536, with the p of an unknown class, 0."""
LEAST_SHARE: Final = 16
"""A cell keeps this part of its relevance, so that cells of an even region keep an order."""
_ONE_SHARE: Final = 1 << 16
_MOST_SHARE: Final = _ONE_SHARE * 100 // QUOTAS[0] + 1
"""With this factor, every region has the first level."""


def relevance_of(histogram: np.ndarray, edge: np.ndarray, contrast: np.ndarray) -> np.ndarray:
    """The balanced relevance of each cell, uint16 `[R, C]`.

    Args:
        histogram: `[R, C, bins]`, pixels of each cell by lightness; equally many in each cell.
        edge: `[R, C]`, strength of the edges, at least 0.
        contrast: `[R, C]`, distance from the median colour, at least 0.
    """
    seen = perspectival(edge, contrast)
    return balance((propositional(histogram) + 2 * seen) // 3)


def propositional(histogram: np.ndarray) -> np.ndarray:
    """How much a cell tells, a share: its lightness' entropy over the most, int64 `[R, C]`."""
    most = log2(histogram.shape[-1])
    return np.asarray(np.minimum(entropy(histogram) * ONE // most, ONE))


def perspectival(edge: np.ndarray, contrast: np.ndarray) -> np.ndarray:
    """How much a cell stands out, a share: both over their maxima, and the mean, int64 `[R, C]`."""
    return np.asarray((_over_maximum(edge) + _over_maximum(contrast)) // 2)


def balance(shares: np.ndarray) -> np.ndarray:
    """Diversify as far as relevance is spread, and explore; uint16 `[R, C]`."""
    shares = shares.astype(np.int64)
    spread = _spread(shares)
    focused = np.maximum(shares - (spread * _mean3x3(shares) >> 16), shares // LEAST_SHARE)
    explored = ((_ONE_SHARE - EXPLORE) * focused + EXPLORE * ONE) >> 16
    return np.asarray(explored, np.uint16)


def allocate(relevance: np.ndarray, num_kept: int) -> list[list[int]]:
    """Exactly `num_kept` groups; each cell, numbered in raster order, is in exactly one of them.

    A region of k rows has its k - 1 most relevant cells alone, and one group of all others. The
    first cell of a group is the one nearest to its centre.

    Args:
        relevance: uint16 `[R, C]`.
        num_kept: 1 to R * C.
    """
    cells: Cells = relevance.shape[0], relevance.shape[1]
    flat = relevance.ravel().tolist()
    regions = regions_of(cells, num_kept)
    sums = [sum(flat[cell] for cell in region) for region in regions]
    rows = rows_of_regions(sums, [len(region) for region in regions], num_kept)
    groups = []
    for region, count in zip(regions, rows, strict=True):
        ordered = sorted(region, key=lambda cell: (-flat[cell], cell))
        groups += [[cell] for cell in ordered[: count - 1]]
        groups.append(_centre_first(sorted(ordered[count - 1 :]), cells[1]))
    return groups


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


def rows_of_regions(sums: Sequence[int], sizes: Sequence[int], num_kept: int) -> list[int]:
    """Rows of each region: together `num_kept`, each from 1 to its size.

    Quotas, scaled until they fit, give the levels. What is left goes to the upgrades of most
    relevance per row, then row by row. The k-th row of a region has 1/k of the region's relevance:
    the apportionment of D'Hondt.

    Args:
        sums: relevance of each region, more than 0.
        sizes: cells of each region.
        num_kept: at least one per region, at most all cells.
    """
    rows = levels_of_regions(sums, sizes, num_kept)
    left = num_kept - sum(rows)
    while left:
        steps = [
            (_per_row(sums[i], rows[i], to), -i, to)
            for i, size in enumerate(sizes)
            if rows[i] < (to := _next_level(rows[i], size)) <= rows[i] + left
        ]
        if not steps:
            steps = [
                (_per_row(sums[i], rows[i], rows[i] + 1), -i, rows[i] + 1)
                for i, size in enumerate(sizes)
                if rows[i] < size
            ]
        _, negative, to = max(steps)
        left -= to - rows[-negative]
        rows[-negative] = to
    return rows


def levels_of_regions(sums: Sequence[int], sizes: Sequence[int], num_kept: int) -> list[int]:
    """Rows by level alone: the quotas times the greatest factor with at most `num_kept` rows.

    No region has fewer rows if `num_kept` is greater.
    """
    order = sorted(range(len(sums)), key=lambda i: (-(sums[i] << 16) // sizes[i], i))

    def rows_with(factor: int) -> list[int]:
        ends = [min(len(order), len(order) * q * factor // (100 * _ONE_SHARE)) for q in QUOTAS]
        rows = [1] * len(order)
        for place, i in enumerate(order[: ends[-1]]):
            level = next(level for level, end in zip(LEVELS, ends, strict=True) if place < end)
            rows[i] = _rows(level, sizes[i])
        return rows

    low, high = 0, _MOST_SHARE
    while low < high:
        middle = (low + high + 1) // 2
        if sum(rows_with(middle)) <= num_kept:
            low = middle
        else:
            high = middle - 1
    return rows_with(low)


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


def _rows(level: int, size: int) -> int:
    """Rows of a region of `size` cells, in proportion to those of 25, rounded up."""
    return (size * level + LEVELS[0] - 1) // LEVELS[0]


def _next_level(rows: int, size: int) -> int:
    """Rows at the lowest level above `rows`; `rows` at the top."""
    return next((n for level in reversed(LEVELS) if (n := _rows(level, size)) > rows), rows)


def _per_row(total: int, rows: int, to: int) -> int:
    """Relevance per row that an upgrade adds."""
    return total * sum((1 << 32) // k for k in range(rows + 1, to + 1)) // (to - rows)


def _centre_first(region: list[int], columns: int) -> list[int]:
    """The region with the member nearest to its centre first; ties go to the lower cell."""
    places = [divmod(cell, columns) for cell in region]
    num, y, x = len(region), sum(row for row, _ in places), sum(column for _, column in places)
    distances = [(num * row - y) ** 2 + (num * column - x) ** 2 for row, column in places]
    at = distances.index(min(distances))
    return [region[at], *region[:at], *region[at + 1 :]]
