"""A device whose memory only its owner copies, and a transport that reads it directly."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import xxhash

from vlm_worker.errors import CorruptTransferError, GoneError, Refusal
from vlm_worker.transfer.transport import ExposureAccount
from vlm_worker.wire.buffers import (
    DeviceRegions,
    HostRegions,
    MemoryKind,
    Range,
    Ranges,
    Regions,
    digest,
    host_views,
    stage,
)


class Arena:
    """Device memory without a memoryview; counts copies between device and host."""

    def __init__(self, data: bytes, *, has_digest: bool = True) -> None:
        self.device = "fake:0"
        self.num_copies = 0
        self.digest: Callable[[Ranges, bytes], bytes] | None = self._digest if has_digest else None
        self._data = bytearray(data)

    def regions(self, start: int, num_bytes: int) -> DeviceRegions:
        """Two ranges in order, as scattered blocks have."""
        half = num_bytes // 2
        ranges = (Range(start, half), Range(start + half, num_bytes - half))
        return DeviceRegions(ranges, self)

    def read(self, ranges: Ranges, destination: memoryview) -> None:
        self.num_copies += 1
        destination[:] = self.bytes_of(ranges)

    def write(self, ranges: Ranges, source: memoryview) -> None:
        self.num_copies += 1
        self.put(ranges, bytes(source))

    def bytes_of(self, ranges: Ranges) -> bytes:
        """What the device itself sees."""
        return b"".join(bytes(self._data[start : start + size]) for start, size in ranges)

    def put(self, ranges: Ranges, data: bytes) -> None:
        """What the device itself writes."""
        for start, size in ranges:
            self._data[start : start + size], data = data[:size], data[size:]

    def overwrite(self) -> None:
        """Other data, of another sequence."""
        self._data[:] = bytes(len(self._data))

    def _digest(self, ranges: Ranges, head: bytes) -> bytes:
        found: bytes = xxhash.xxh3_128(head + self.bytes_of(ranges)).digest()
        return found


class Fabric:
    """What connects the devices: exposures by their opening."""

    def __init__(self) -> None:
        self.exposures: dict[bytes, FabricExposure] = {}


class DeviceTransport:
    """Reads a producer's device memory over a fabric; `capacity_bytes` limits what is exposed."""

    name = "fabric/1"
    accepts = frozenset(MemoryKind)

    def __init__(self, fabric: Fabric, *, capacity_bytes: int) -> None:
        self.account = ExposureAccount(capacity_bytes)
        self.fabric = fabric

    def invitation(self) -> bytes:
        return b"fabric"

    def expose(self, invitation: bytes, num_bytes: int) -> FabricExposure | None:
        if invitation != self.invitation() or not self.account.take(num_bytes):
            return None
        exposure = FabricExposure(self.account, num_bytes)
        self.fabric.exposures[exposure.opening] = exposure
        return exposure

    def view(self, opening: bytes, num_bytes: int) -> FabricView:
        exposure = self.fabric.exposures.get(opening)
        if exposure is None or exposure.num_bytes != num_bytes:
            raise CorruptTransferError("no such memory", refusal=Refusal.MEMORY)
        return FabricView(exposure)

    def close(self) -> None:
        """Nothing to free."""


class FabricExposure:
    """Regions by position: no byte is copied."""

    def __init__(self, account: ExposureAccount, num_bytes: int) -> None:
        self.opening = secrets.token_bytes(8)
        self.num_bytes = num_bytes
        self.parts: dict[int, Regions] = {}
        self._account = account
        self._is_open = True

    def buffer(self, position: int, num_bytes: int) -> None:
        """None: units stay where they are."""

    def write(self, position: int, source: Regions) -> memoryview:
        if not self._is_open:
            raise GoneError("the transfer was abandoned")
        if isinstance(source, HostRegions):  # a buffer that is reused
            source = HostRegions([memoryview(bytes(view)) for view in source.views])
        self.parts[position] = source
        return memoryview(b"")

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._account.release(self.num_bytes)

    def abandon(self) -> None:
        if self._is_open:
            self._is_open = False
            self._account.abandon(self.num_bytes)


class FabricView:
    """Copies from device to device, or to the host."""

    accepts = frozenset(MemoryKind)

    def __init__(self, exposure: FabricExposure) -> None:
        self._exposure = exposure

    def read(self, position: int, destination: Regions, *, head: bytes) -> bytes:
        source = self._exposure.parts.get(position)
        if source is None or source.num_bytes != destination.num_bytes:
            raise CorruptTransferError("no such bytes", refusal=Refusal.MEMORY)
        data = memoryview(bytearray(source.num_bytes))
        if isinstance(source, DeviceRegions) and isinstance(source.owner, Arena):
            data[:] = source.owner.bytes_of(source.ranges)
        else:
            stage(source, data)
        if isinstance(destination, DeviceRegions):
            assert isinstance(destination.owner, Arena)
            destination.owner.put(destination.ranges, bytes(data))
            return destination.digest(head)
        for view in host_views(destination):
            view[:], data = data[: view.nbytes], data[view.nbytes :]
        return digest(head, *host_views(destination))

    def close(self) -> None:
        """Nothing to free."""
