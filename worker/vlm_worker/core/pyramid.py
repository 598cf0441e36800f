"""Which scale each window of an image is encoded at, and its visual tokens. Pure, in integers.

    relevance u16 [R, C] ─ sum of a window ─▶ plan ─▶ level of each window of 4x4 cells

    level   scale   tokens of a whole window   a token covers
    0       1       16                         1x1 cells
    1       1/2     4                          2x2 cells
    2       1/4     1                          4x4 cells

Every window begins at level 2. The window whose next level shows the most relevance per added token
gets it, until the tokens are as many as a prompt gets. If the last level makes too many, the least
relevant tokens of its window become one mean.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Iterator

import numpy as np

from vlm_worker.core.relevance import centre_first
from vlm_worker.reduction import WINDOW, Cells, num_windows


@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    """A window at its level: `rows` x `columns` cells from `top`, `left` on, less at the edges."""

    top: int
    left: int
    rows: int
    columns: int
    level: int

    @property
    def shape(self) -> Cells:
        """Rows and columns of its tokens."""
        step = 1 << self.level
        return math.ceil(self.rows / step), math.ceil(self.columns / step)

    @property
    def num_tokens(self) -> int:
        return self.shape[0] * self.shape[1]


@dataclasses.dataclass(frozen=True, slots=True)
class Pyramid:
    """What is encoded of an image, and what a prompt gets of it.

    Attributes:
        windows: in raster order. The encoder makes their tokens in this order, each in raster
            order.
        groups: the numbers of the encoder's tokens whose mean each kept token is, the one at its
            place first; in raster order of their places.
        places: int16 `[N, 2]`, row and column in cells of each kept token.
    """

    windows: tuple[Window, ...]
    groups: tuple[tuple[int, ...], ...]
    places: np.ndarray

    @property
    def num_tokens(self) -> int:
        """Tokens that the encoder makes."""
        return sum(window.num_tokens for window in self.windows)


def whole_windows(cells: Cells) -> tuple[Window, ...]:
    """All windows of an image at scale 1, in raster order."""
    return tuple(dataclasses.replace(window, level=0) for window in _coarsest(cells))


def plan(relevance: np.ndarray, num_kept: int) -> Pyramid:
    """The levels that give exactly `num_kept` tokens.

    Args:
        relevance: uint16 `[R, C]`.
        num_kept: from `num_windows` of these cells to R * C.
    """
    cells: Cells = relevance.shape[0], relevance.shape[1]
    assert num_windows(cells) <= num_kept <= relevance.size
    windows = list(_coarsest(cells))
    missing, finest = num_kept - len(windows), 0
    queue = [step for number in range(len(windows)) for step in _steps(relevance, windows, number)]
    heapq.heapify(queue)
    while missing > 0:
        _, finest, finer = heapq.heappop(queue)
        missing -= finer.num_tokens - windows[finest].num_tokens
        windows[finest] = finer
        for step in _steps(relevance, windows, finest):
            heapq.heappush(queue, step)
    return _grouped(relevance, windows, windows[finest], 1 - missing)


Step = tuple[int, int, Window]
"""Relevance per token, negative; the number of a window; the window at a finer level."""


def places_of(window: Window) -> np.ndarray:
    """The place of each token of a window, int16 `[N, 2]`: the middle of its cells, rounded down.

    Cells beyond the image's edge do not count.
    """
    step = 1 << window.level
    rows, columns = (
        np.minimum(np.arange(count) * step + (step - 1) // 2, size - 1) + start
        for count, size, start in zip(
            window.shape, (window.rows, window.columns), (window.top, window.left), strict=True
        )
    )
    grid = np.meshgrid(rows, columns, indexing="ij")
    return np.stack(grid, axis=-1).reshape(-1, 2).astype(np.int16)


def _coarsest(cells: Cells) -> Iterator[Window]:
    """Every window with one token: at the finest level that has no more."""
    for top in range(0, cells[0], WINDOW):
        for left in range(0, cells[1], WINDOW):
            rows, columns = min(WINDOW, cells[0] - top), min(WINDOW, cells[1] - left)
            level = (max(rows, columns) - 1).bit_length()
            yield Window(top, left, rows, columns, level)


def _steps(relevance: np.ndarray, windows: list[Window], number: int) -> list[Step]:
    """The next finer level of a window, if there is one that has more tokens."""
    window = windows[number]
    for level in reversed(range(window.level)):
        finer = dataclasses.replace(window, level=level)
        more = finer.num_tokens - window.num_tokens
        if more:
            gain = int(_cells(relevance, window).sum(dtype=np.int64)) << 16
            return [(-(gain // more), number, finer)]
    return []


def _cells(values: np.ndarray, window: Window) -> np.ndarray:
    bottom, right = window.top + window.rows, window.left + window.columns
    return values[window.top : bottom, window.left : right]


def _grouped(
    relevance: np.ndarray, windows: list[Window], joined: Window, num_joined: int
) -> Pyramid:
    """Each token alone, but for the `num_joined` least relevant ones of the window `joined`."""
    groups: list[tuple[int, ...]] = []
    first = 0
    for window in windows:
        tokens = list(range(window.num_tokens))
        if window is joined and num_joined > 1:
            tokens, rest = _divided(_relevance_of_tokens(relevance, window), num_joined)
            groups.append(tuple(first + i for i in centre_first(rest, window.shape[1])))
        groups += [(first + i,) for i in tokens]
        first += window.num_tokens
    places = np.concatenate([places_of(window) for window in windows])
    groups.sort(key=lambda group: tuple(places[group[0]].tolist()))
    return Pyramid(tuple(windows), tuple(groups), places[[group[0] for group in groups]])


def _divided(relevance: np.ndarray, num_least: int) -> tuple[list[int], list[int]]:
    """The numbers of the most relevant tokens, and of the `num_least` others, ascending."""
    order = np.argsort(-relevance, kind="stable")
    return np.sort(order[:-num_least]).tolist(), np.sort(order[-num_least:]).tolist()


def _relevance_of_tokens(relevance: np.ndarray, window: Window) -> np.ndarray:
    """The greatest relevance of the cells that each token covers, int64 `[N]`."""
    step = 1 << window.level
    cells = _cells(relevance, window).astype(np.int64)
    starts = [np.arange(0, size, step) for size in cells.shape]
    lines = np.maximum.reduceat(cells, starts[0], axis=0)
    return np.asarray(np.maximum.reduceat(lines, starts[1], axis=1).ravel())
