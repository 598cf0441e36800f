"""Memory copied and digested: XXH3-128 of a head and of just those bytes that were written.

    parts ─▶ rooms, both in order and of as many bytes ─▶ digest

The native library reads each byte once, past the cache, without Python's lock (`copy_digest.cpp`);
without it a piece is copied, and digested while it is in the cache.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

COPIED_BYTES: Final = 1 << 18
"""At a time, where it is digested next: half of it and more stay in a core's own cache."""
_LEAST: Final = 241
"""Bytes of a head and all parts that the native function takes."""
_MOVE: Final = struct.Struct("=QQq")
_FUNCTION: Final = ctypes.CFUNCTYPE(
    None,
    ctypes.c_char_p,
    ctypes.c_int64,
    ctypes.c_char_p,
    ctypes.c_int64,
    ctypes.c_char_p,
)

Memory = Sequence[memoryview]


class Lying(NamedTuple):
    """Bytes where they lie, one part after the other.

    `check` raises GoneError where others may have written there meanwhile: a copy that was made
    before it counts for nothing then.
    """

    parts: Memory
    check: Callable[[], None]

    @property
    def num_bytes(self) -> int:
        """Of all parts."""
        return sum(part.nbytes for part in self.parts)


class Copier(Protocol):
    """For any thread."""

    def copy(self, parts: Memory, rooms: Memory, *, head: bytes) -> bytes:
        """Fill `rooms` with `parts`, which have as many bytes; the digest of all after `head`."""


class PlainCopier:
    """By numpy and xxhash."""

    def copy(self, parts: Memory, rooms: Memory, *, head: bytes) -> bytes:
        """See `Copier`."""
        state = xxhash.xxh3_128(head)
        for part, room in _pairs(parts, rooms):
            for start in range(0, part.nbytes, COPIED_BYTES):
                target = room[start : start + COPIED_BYTES]
                np.copyto(_array(target), _array(part[start : start + COPIED_BYTES]))
                state.update(target)
        found: bytes = state.digest()
        return found


class NativeCopier:
    """By the native library in a file."""

    def __init__(self, library: str) -> None:
        self._native = ctypes.CDLL(library)
        self._copy = _FUNCTION(("triptych_copy_digest", self._native))
        self._plain = PlainCopier()

    def copy(self, parts: Memory, rooms: Memory, *, head: bytes) -> bytes:
        """See `Copier`."""
        moves, num_bytes = bytearray(), len(head)
        for part, room in _pairs(parts, rooms):
            assert not room.readonly
            num_bytes += part.nbytes
            moves += _MOVE.pack(address_of(room), address_of(part), part.nbytes)
        if num_bytes < _LEAST:
            return self._plain.copy(parts, rooms, head=head)
        digest = ctypes.create_string_buffer(16)
        self._copy(bytes(moves), len(moves) // _MOVE.size, head, len(head), digest)
        return digest.raw


PLAIN: Final[Copier] = PlainCopier()


def copier_of(library: str | None) -> Copier:
    """By the native library in a file, where there is one."""
    return PLAIN if library is None else NativeCopier(library)


def address_of(memory: memoryview) -> int:
    """Of its first byte."""
    return int(_array(memory).__array_interface__["data"][0])


def cut(parts: Iterable[memoryview], sizes: Iterable[int]) -> Iterator[list[memoryview]]:
    """The same bytes, for each size as many as it says."""
    left = iter(parts)
    part = memoryview(b"")
    for size in sizes:
        run: list[memoryview] = []
        missing = size
        while missing:
            if not part.nbytes:
                part = next(left)
                continue
            run.append(part[:missing])
            part, missing = part[missing:], missing - run[-1].nbytes
        yield run


def _pairs(parts: Memory, rooms: Memory) -> Iterator[tuple[memoryview, memoryview]]:
    """Those bytes of both that belong together."""
    assert sum(part.nbytes for part in parts) == sum(room.nbytes for room in rooms)
    for room, run in zip(rooms, cut(parts, (room.nbytes for room in rooms)), strict=True):
        start = 0
        for part in run:
            yield part, room[start : start + part.nbytes]
            start += part.nbytes


def _array(memory: memoryview) -> NDArray[np.uint8]:
    return np.frombuffer(memory, np.uint8)
