"""How many visual tokens of an image a prompt gets, and which: the policy without its arithmetic.

                 cells of the image         kept, in raster order
    DIVERSE      a b c d e f g h    ─▶      a   d   g        the rows that differ most
    ZIP          a b c d e f g h    ─▶      b   d   g'       the rows that get most attention;
                                                             g' is the mean of g and its like
    MERGE        a b c d e f g h    ─▶      a'  d'  f'       means of regions of like neighbours
    POOL         a b c d e f g h    ─▶      a'  c'  e' g'    means of blocks of one size
    ARRCOC       a b c d e f g h    ─▶      b   d   f'       per region, the most relevant pixels;
                                                             f' is the mean of its other cells
    ARRCOC_PYRAMID  windows of 4x4 cells, encoded at scales 1, 1/2 and 1/4 by the relevance of their
                    pixels: as few tokens leave the encoder as the prompt gets

A cell is one visual token of the whole image. A kept token keeps its cell's row and column, so text
after the image has the positions that it has behind the whole image. The number of kept tokens
depends on the grid and the policy alone: the gateway writes placeholders before anyone encodes.

`vlm_worker.model.reduce` has the arithmetic, `vlm_worker.core.relevance` that of ARRCOC, and
`vlm_worker.core.pyramid` that of ARRCOC_PYRAMID.

ARRCOC_PYRAMID is approximate. All other methods choose rows of the whole image's embedding, which
serves all of them. A row of a pyramid is in none of these, and serves no other method or share.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import math
from typing import Annotated, Final

from vlm_worker.annotations import Between
from vlm_worker.errors import InvalidRequestError

MAX_PERMILLE: Final = 1000
VERSION: Final = 1
"""Part of every key: an embedding that another version reduced is another embedding."""
WINDOW: Final = 4
"""Cells of a window of ARRCOC_PYRAMID in each direction: 112 pixels, as in Qwen2.5-VL's tower."""
POOL_BLOCKS: Final = {500: (1, 2), 250: (2, 2)}
"""Rows and columns of cells that POOL averages, by the share that it keeps."""

Cells = tuple[int, int]
"""Rows and columns of visual tokens."""


class Method(enum.StrEnum):
    """How visual tokens are chosen. The values are part of keys and messages."""

    DIVERSE = "diverse"
    ZIP = "zip"
    MERGE = "merge"
    POOL = "pool"
    ARRCOC = "arrcoc"
    ARRCOC_PYRAMID = "arrcocpyramid"

    @property
    def needs_relevance(self) -> bool:
        """Whether it chooses by the relevance of the pixels."""
        return self in (Method.ARRCOC, Method.ARRCOC_PYRAMID)

    @property
    def is_approximate(self) -> bool:
        """Whether its rows come from pixels of several scales, not from the whole image's rows."""
        return self is Method.ARRCOC_PYRAMID


@dataclasses.dataclass(frozen=True, slots=True)
class Reduction:
    """Keep `keep_permille` thousandths of the visual tokens of an image, at least one.

    POOL knows 500 and 250 only: its blocks are 1x2 and 2x2 cells. ARRCOC_PYRAMID keeps at least one
    token per window.
    """

    method: Method
    keep_permille: Annotated[int, Between(1, MAX_PERMILLE)]

    def num_tokens(self, cells: Cells) -> int:
        """Visual tokens that are kept of an image with these cells.

        Raises:
            ValueError: POOL has no blocks for this share.
        """
        rows, columns = cells
        if self.method is Method.POOL:
            block = POOL_BLOCKS.get(self.keep_permille)
            if block is None:
                shares = " or ".join(map(str, POOL_BLOCKS))
                raise ValueError(f"pool keeps {shares} permille, not {self.keep_permille}")
            return math.ceil(rows / block[0]) * math.ceil(columns / block[1])
        least = num_windows(cells) if self.method is Method.ARRCOC_PYRAMID else 1
        return max(least, (rows * columns * self.keep_permille + 500) // 1000)

    def key(self, image_key: bytes) -> bytes:
        """The 32-byte content key of the reduced embedding of the image `image_key`."""
        digest = hashlib.sha256(b"triptych.reduce/1")
        digest.update(f"{VERSION}/{self.method}/{self.keep_permille}".encode())
        digest.update(image_key)
        return digest.digest()


def num_windows(cells: Cells) -> int:
    """Windows of ARRCOC_PYRAMID; those at the right and lower edge may be smaller."""
    return math.ceil(cells[0] / WINDOW) * math.ceil(cells[1] / WINDOW)


def cells_of(grid_thw: tuple[int, int, int], num_tokens: int) -> Cells:
    """The cells of a still image, from its patch grid and its number of visual tokens.

    Raises:
        ValueError: the tokens are not a grid of equal squares of patches.
    """
    time, height, width = grid_thw
    side = math.isqrt(height * width // num_tokens) if num_tokens > 0 else 0
    if time != 1 or not side or (height // side) * (width // side) != num_tokens:
        raise ValueError(f"{num_tokens} tokens are no grid of cells of the patches {grid_thw}")
    return height // side, width // side


def num_kept(reduction: Reduction | None, grid_thw: tuple[int, int, int], num_tokens: int) -> int:
    """Visual tokens that a prompt gets of a still image, of `num_tokens`; without a reduction, all.

    Raises:
        InvalidRequestError: the tokens have no cells, or the method no such share.
    """
    if reduction is None:
        return num_tokens
    try:
        return reduction.num_tokens(cells_of(grid_thw, num_tokens))
    except ValueError as error:
        raise InvalidRequestError(f"reduction: {error}") from error
