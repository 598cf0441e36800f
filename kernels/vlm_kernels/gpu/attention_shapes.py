"""Tiles of attention that fit into the shared memory of one program. Pure.

    rows x head size        queries
    2 x keys x head size    keys and values; twice if the next ones are loaded meanwhile
    rows x keys             weights, before they multiply values

Triton's compiler stores these in the type of the queries; int8 KV needs no more. A GPU has 227 KiB
for one program (Hopper), 163 (A100) or 99 (L40S, L4, RTX 40), and refuses to launch a kernel that
needs more.
"""

from __future__ import annotations

import dataclasses
from typing import Final

SIZES: Final = (64, 32, 16)
"""Rows of a prefill tile, and keys that a program processes at once, the best first. A tensor core
multiplies 16."""
SPARE_BYTES: Final = 1024
"""Factors, offsets and sums of a tile."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """Rows of a tile (queries and heads), and the keys that it processes at once."""

    rows: int
    keys: int


@dataclasses.dataclass(frozen=True, slots=True)
class Heads:
    """The heads of a kernel.

    Attributes:
        dim: head size; a program computes with the next power of two.
        element_bytes: of the queries' type.
        num_copies: of keys and values: 1, or 2 if the next ones are loaded meanwhile.
    """

    dim: int
    element_bytes: int
    num_copies: int = 1

    def shared_bytes(self, shape: Shape) -> int:
        """Return the shared memory that a program of this shape needs, at most."""
        dim = padded(self.dim)
        kv = 2 * self.num_copies * shape.keys * dim
        elements = shape.rows * dim + kv + shape.rows * shape.keys
        return elements * self.element_bytes + SPARE_BYTES

    def shape_of_rows(self, rows: int, *, limit: int) -> Shape:
        """Return the tile of `rows` rows with the most keys that fits into `limit` bytes.

        Raises:
            ValueError: none does.
        """
        for keys in SIZES:
            if self.shared_bytes(Shape(rows, keys)) <= limit:
                return Shape(rows, keys)
        least = self.shared_bytes(Shape(rows, SIZES[-1]))
        raise ValueError(
            f"attention with heads of {self.dim} and {rows} rows a tile needs {least} bytes of "
            f"shared memory, this GPU has {limit} for a program: use a smaller type, or another GPU"
        )

    def prefill_shape(self, *, limit: int) -> Shape:
        """Return the prefill tile with the most rows, and with these the most keys.

        Raises:
            ValueError: not even the smallest tile fits.
        """
        for rows in SIZES:
            if self.shared_bytes(Shape(rows, SIZES[-1])) <= limit:
                return self.shape_of_rows(rows, limit=limit)
        return self.shape_of_rows(SIZES[-1], limit=limit)


def padded(head_dim: int) -> int:
    """The head size that a program computes with."""
    return max(16, 1 << (head_dim - 1).bit_length())
