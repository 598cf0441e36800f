"""Sets up the framing of a transfer for one consumer: in exposed memory or in the frames.

for_reader      chunk by chunk: one is copied and digested while the one before is sent
for_all_units   all at once, before a fetch: few frames, in the cache
"""

from __future__ import annotations

import dataclasses
import functools

from vlm_worker.transfer.chunk_framer import ChunkFramer, Export, chunk_bytes_of
from vlm_worker.transfer.exposure_set import ExposureSet
from vlm_worker.transfer.transport import Exposure, Transport
from vlm_worker.types import RequestKey
from vlm_worker.wire.buffers import PLAIN, Copier
from vlm_worker.wire.frames import (
    MAX_LARGE_BYTES,
    MAX_OUT_OF_BAND_BYTES,
    MAX_PAYLOAD_BYTES,
    FrameWriter,
    TransferId,
)


@dataclasses.dataclass(frozen=True)
class FrameBuilder:
    """The parameters of one transfer of at most `max_units`; `copier` copies units."""

    identity: TransferId
    unit_bytes: int
    max_units: int
    export: Export
    copier: Copier
    exposures: ExposureSet

    @property
    def num_bytes(self) -> int:
        """Bytes of all units."""
        return self.max_units * self.unit_bytes

    def for_reader(
        self,
        key: RequestKey,
        first_unit: int,
        transport: Transport | None,
        exposure: Exposure | None,
        *,
        large: bool,
    ) -> tuple[ChunkFramer, FrameWriter]:
        """Frames from a unit on; `exposure` belongs to `transport` and this consumer."""
        large = large or exposure is not None
        writer = self._writer(
            key,
            first_unit,
            exposure,
            max_bytes=MAX_LARGE_BYTES if large else MAX_PAYLOAD_BYTES,
            copier=self.copier,
        )
        num_bytes = self.num_bytes - first_unit * self.unit_bytes
        chunk_bytes = chunk_bytes_of(num_bytes, large=large)
        return self._framer(writer, first_unit, transport, exposure, chunk_bytes), writer

    def for_all_units(self, transport: Transport | None, exposure: Exposure | None) -> ChunkFramer:
        """All units as one chunk, for the consumer with this transfer's key.

        No consumer waits for one frame while the next is built: out-of-band frames are as large as
        allowed.
        """
        key = self.identity.key
        max_bytes = MAX_PAYLOAD_BYTES if exposure is None else MAX_OUT_OF_BAND_BYTES
        writer = self._writer(key, 0, exposure, max_bytes=max_bytes, copier=PLAIN)
        return self._framer(writer, 0, transport, exposure, self.num_bytes)

    def _writer(
        self,
        key: RequestKey,
        first_unit: int,
        exposure: Exposure | None,
        *,
        max_bytes: int,
        copier: Copier,
    ) -> FrameWriter:
        return FrameWriter(
            dataclasses.replace(self.identity, key=key),
            unit_bytes=self.unit_bytes,
            first_unit=first_unit,
            write_at=None if exposure is None else self.exposures.writing(exposure),
            max_bytes=max_bytes,
            copier=copier,
        )

    def _framer(
        self,
        writer: FrameWriter,
        first_unit: int,
        transport: Transport | None,
        exposure: Exposure | None,
        chunk_bytes: int,
    ) -> ChunkFramer:
        opening = None
        if exposure is not None and transport is not None:
            opening = writer.open(transport.name, exposure.opening)
        return ChunkFramer(
            self.export,
            writer,
            unit_bytes=self.unit_bytes,
            first_unit=first_unit,
            chunk_bytes=chunk_bytes,
            buffer=functools.partial(self._buffer, first_unit, exposure),
            opening=opening,
        )

    def _buffer(
        self, first_unit: int, exposure: Exposure | None, unit: int, num_bytes: int
    ) -> memoryview | None:
        """Exposed memory in which to make units from `unit` on, or None."""
        if exposure is None:
            return None
        return self.exposures.buffer(exposure, (unit - first_unit) * self.unit_bytes, num_bytes)
