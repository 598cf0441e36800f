"""Memory of transfers: destinations, private mappings, and copies with a digest.

The digest is XXH3-128 of a head and of exactly the bytes written.

    parts ─▶ destinations, in order and of equal size ─▶ digest

The native library reads each byte once, bypasses the cache and releases the GIL
(`copy_digest.cpp`). Without it, each chunk is copied and digested while it is in the cache.

malloc keeps freed memory in the arena of each thread. Threads that make patches of 25 MB in turn
would leave that much unused memory in each arena. A large buffer is therefore an mmap of its own,
which is unmapped with its last view. Smaller buffers come from malloc, which reuses them without
page faults.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import enum
import mmap
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

COPIED_BYTES: Final = 1 << 18
"""Chunk size if the digest follows the copy: most of it stays in the core's L2 cache."""
_MIN_NATIVE_BYTES: Final = 241
"""Minimum bytes of head and parts for the native function."""
_MOVE: Final = struct.Struct("=QQq")
_FUNCTION: Final = ctypes.CFUNCTYPE(
    None, ctypes.c_char_p, ctypes.c_int64, ctypes.c_char_p, ctypes.c_int64, ctypes.c_char_p
)

Memory = Sequence[memoryview]


class MemoryKind(enum.Enum):
    """Who can reach memory: any thread by an address, or only the owner of a device."""

    HOST = "host"
    DEVICE = "device"


class DeviceMemory(Protocol):
    """The memory of one device, which only its owner copies. Thread-safe.

    `digest(ranges, head)` is XXH3-128 of a head and of the bytes, computed on the device; None if
    the device cannot.
    """

    device: str
    digest: Callable[[Ranges, bytes], bytes] | None

    def read(self, ranges: Ranges, destination: memoryview) -> None:
        """Copy from the device to host memory of equal size."""

    def write(self, ranges: Ranges, source: memoryview) -> None:
        """Copy from host memory of equal size to the device."""


class Range(NamedTuple):
    """Bytes of a device's memory."""

    start: int
    num_bytes: int


Ranges = tuple[Range, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class HostRegions:
    """Views of host memory, in order."""

    views: Memory

    @property
    def num_bytes(self) -> int:
        return sum(view.nbytes for view in self.views)


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceRegions:
    """Ranges of a device's memory, in order, without an address in this process.

    Raises:
        ValueError: the owner has no digest, which validates what a consumer reads.
    """

    ranges: Ranges
    owner: DeviceMemory

    def __post_init__(self) -> None:
        if self.owner.digest is None:
            raise ValueError(
                f"{self.owner.device} computes no digest: copy its memory to the host first"
            )

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size in self.ranges)

    def slice(self, start: int, num_bytes: int) -> DeviceRegions:
        """The bytes from an offset on."""
        if not 0 <= start <= start + num_bytes <= self.num_bytes:
            raise ValueError(f"{num_bytes} bytes from {start} on are not within {self.num_bytes}")
        ranges, end, position = [], start + num_bytes, 0
        for address, size in self.ranges:
            first, last = max(start, position), min(end, position + size)
            if first < last:
                ranges.append(Range(address + first - position, last - first))
            position += size
        return DeviceRegions(tuple(ranges), self.owner)

    def digest(self, head: bytes) -> bytes:
        assert self.owner.digest is not None
        return self.owner.digest(self.ranges, head)


Regions = HostRegions | DeviceRegions


class LiveRegions(NamedTuple):
    """Memory that others may overwrite.

    Copy or digest first, then call `check`: if the memory may have changed, it raises GoneError and
    the result must not be used.
    """

    regions: Regions
    check: Callable[[], None]


def stage(regions: Regions, buffer: memoryview) -> None:
    """Copy regions to host memory of equal size, for a transport that takes no device memory."""
    assert regions.num_bytes == buffer.nbytes
    if isinstance(regions, DeviceRegions):
        regions.owner.read(regions.ranges, buffer)
    else:
        PLAIN.copy(regions.views, [buffer], head=b"")


def digest(head: bytes, *views: memoryview) -> bytes:
    """XXH3-128 of a head and of all bytes."""
    state = xxhash.xxh3_128(head)
    for view in views:
        state.update(view)
    return state.digest()


def host_views(regions: Regions) -> Memory:
    """The views of host regions; device regions must be staged before."""
    assert isinstance(regions, HostRegions)
    return regions.views


class Copier:
    """Copies and digests, with the native library at a path or with numpy. Thread-safe."""

    def __init__(self, library: str | None = None) -> None:
        self._native: Callable[..., Any] | None = None
        if library is not None:
            self._native = _FUNCTION(("triptych_copy_digest", ctypes.CDLL(library)))

    def copy(self, parts: Memory, destinations: Memory, *, head: bytes) -> bytes:
        """Copy `parts` to `destinations` of equal size; returns the digest of `head` and data."""
        if self._native is None:
            return _copy(parts, destinations, head=head)
        moves, num_bytes = bytearray(), len(head)
        for part, target in _pairs(parts, destinations):
            assert not target.readonly
            num_bytes += part.nbytes
            moves += _MOVE.pack(address_of(target), address_of(part), part.nbytes)
        if num_bytes < _MIN_NATIVE_BYTES:
            return _copy(parts, destinations, head=head)
        digest = ctypes.create_string_buffer(16)
        self._native(bytes(moves), len(moves) // _MOVE.size, head, len(head), digest)
        return digest.raw


PLAIN: Final = Copier()


def _copy(parts: Memory, destinations: Memory, *, head: bytes) -> bytes:
    state = xxhash.xxh3_128(head)
    for part, target in _pairs(parts, destinations):
        for start in range(0, part.nbytes, COPIED_BYTES):
            chunk = target[start : start + COPIED_BYTES]
            np.copyto(_array(chunk), _array(part[start : start + COPIED_BYTES]))
            state.update(chunk)
    return state.digest()


def address_of(memory: memoryview) -> int:
    """Address of the first byte."""
    return int(_array(memory).__array_interface__["data"][0])


def split_views(parts: Iterable[memoryview], sizes: Iterable[int]) -> Iterator[list[memoryview]]:
    """Split the bytes of `parts` into lists of views, one list of `size` bytes for each size."""
    remaining = iter(parts)
    part = memoryview(b"")
    for size in sizes:
        run: list[memoryview] = []
        missing = size
        while missing:
            if not part.nbytes:
                part = next(remaining)
                continue
            run.append(part[:missing])
            part, missing = part[missing:], missing - run[-1].nbytes
        yield run


def _pairs(parts: Memory, destinations: Memory) -> Iterator[tuple[memoryview, memoryview]]:
    """Pairs of source and destination views of equal size."""
    assert sum(part.nbytes for part in parts) == sum(target.nbytes for target in destinations)
    for target, run in zip(
        destinations, split_views(parts, (target.nbytes for target in destinations)), strict=True
    ):
        start = 0
        for part in run:
            yield part, target[start : start + part.nbytes]
            start += part.nbytes


def _array(memory: memoryview) -> NDArray[np.uint8]:
    return np.frombuffer(memory, np.uint8)


class DestinationBuffers:
    """The destination of a transfer: host buffers of equal size, or device memory.

    With `reports_progress`, the reader returns units as they arrive; without, only the commit.
    """

    def __init__(self, memory: Memory | Regions, *, reports_progress: bool = False) -> None:
        self.device = memory if isinstance(memory, DeviceRegions) else None
        host = memory.views if isinstance(memory, HostRegions) else memory
        self._buffers: Memory = () if isinstance(host, DeviceRegions) else host
        assert len({buffer.nbytes for buffer in self._buffers}) <= 1, "of one size"
        self.reports_progress = reports_progress

    @property
    def num_bytes(self) -> int:
        if self.device is not None:
            return self.device.num_bytes
        return sum(buffer.nbytes for buffer in self._buffers)

    def parts(self, position: int, num_bytes: int) -> Iterator[memoryview]:
        """The host views of `num_bytes` from `position`, in order."""
        while num_bytes:
            number, start = divmod(position, self._buffers[0].nbytes)
            part = self._buffers[number][start : start + num_bytes]
            yield part
            position += part.nbytes
            num_bytes -= part.nbytes


def allocate_buffer(num_bytes: int) -> memoryview:
    """Uninitialised memory; its pages are allocated when they are written."""
    return np.empty(num_bytes, np.uint8).data


def private_memory(num_bytes: int, *, huge: bool = False) -> mmap.mmap:
    """Map `num_bytes`, in huge pages if `huge` and the system has them.

    Pages are allocated when they are written.
    """
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge:
        with contextlib.suppress(AttributeError, OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


OWN_MAPPING_BYTES: Final = 8 << 20
"""Buffers from this size on are mapped. With huge pages they are as fast to write as others."""


def new_buffer(num_bytes: int) -> memoryview:
    """Uninitialised memory; it lives as long as any view of it."""
    if num_bytes < OWN_MAPPING_BYTES:
        return allocate_buffer(num_bytes)
    return memoryview(private_memory(num_bytes, huge=True))
