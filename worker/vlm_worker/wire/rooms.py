"""Where the bytes of a transfer shall lie: memory of our own, in pieces.

rows of an embedding   one piece              KV blocks of a request   a piece each, anywhere
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class Rooms:
    """Pieces of memory of one size, which follow each other as the units of a transfer do.

    With `is_followed`, whoever reads the transfer hears of units as they come; without, of the end.
    """

    def __init__(self, pieces: Sequence[memoryview], *, is_followed: bool = False) -> None:
        assert len({piece.nbytes for piece in pieces}) <= 1, "of one size"
        self._pieces = pieces
        self.is_followed = is_followed

    @property
    def num_bytes(self) -> int:
        """Of all pieces."""
        return sum(piece.nbytes for piece in self._pieces)

    def parts(self, position: int, num_bytes: int) -> Iterator[memoryview]:
        """The memory of so many bytes from a position on, in order."""
        while num_bytes:
            number, start = divmod(position, self._pieces[0].nbytes)
            part = self._pieces[number][start : start + num_bytes]
            yield part
            position += part.nbytes
            num_bytes -= part.nbytes
