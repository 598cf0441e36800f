"""The frames of a transfer, as one consumer gets them: through memory exposed to him, or whole.

for_reader    a piece at a time, copied and digested while the one before is sent or checked
ahead         all at once, before anybody asks: left in the cache, and few
"""

from __future__ import annotations

import dataclasses
import functools

from vlm_worker.transfer.exposures import Exposures
from vlm_worker.transfer.pieces import Export, Pieces, piece_bytes_of
from vlm_worker.transfer.transport import Exposure, Transport
from vlm_worker.types import RequestKey
from vlm_worker.wire.copying import PLAIN, Copier
from vlm_worker.wire.frames import (
    MAX_LARGE_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_PLACED_BYTES,
    FrameWriter,
    TransferId,
)


@dataclasses.dataclass(frozen=True)
class Making:
    """Of one transfer, which has at most `max_units`; `copier` is for those that are copied."""

    identity: TransferId
    unit_bytes: int
    max_units: int
    export: Export
    copier: Copier
    exposures: Exposures

    @property
    def num_bytes(self) -> int:
        """Of all units."""
        return self.max_units * self.unit_bytes

    def for_reader(
        self,
        key: RequestKey,
        first_unit: int,
        transport: Transport | None,
        exposure: Exposure | None,
        *,
        large: bool,
    ) -> tuple[Pieces, FrameWriter]:
        """From a unit on; `exposure` of `transport` is this consumer's. See `Outgoing.runs`."""
        large = large or exposure is not None
        writer = self._writer(
            key,
            first_unit,
            exposure,
            most=MAX_LARGE_BYTES if large else MAX_PAYLOAD_BYTES,
            copier=self.copier,
        )
        num_bytes = self.num_bytes - first_unit * self.unit_bytes
        piece_bytes = piece_bytes_of(num_bytes, large=large)
        return self._pieces(writer, first_unit, transport, exposure, piece_bytes), writer

    def ahead(self, transport: Transport | None, exposure: Exposure | None) -> Pieces:
        """All units, for the consumer of our own key: one piece, by way of the cache.

        Nobody waits for one frame while another is made: where none has to be received, they are as
        large as may be.
        """
        key = self.identity.key
        most = MAX_PAYLOAD_BYTES if exposure is None else MAX_PLACED_BYTES
        writer = self._writer(key, 0, exposure, most=most, copier=PLAIN)
        return self._pieces(writer, 0, transport, exposure, self.num_bytes)

    def _writer(
        self,
        key: RequestKey,
        first_unit: int,
        exposure: Exposure | None,
        *,
        most: int,
        copier: Copier,
    ) -> FrameWriter:
        return FrameWriter(
            dataclasses.replace(self.identity, key=key),
            unit_bytes=self.unit_bytes,
            first_unit=first_unit,
            place=None if exposure is None else self.exposures.placing(exposure),
            most=most,
            copier=copier,
        )

    def _pieces(
        self,
        writer: FrameWriter,
        first_unit: int,
        transport: Transport | None,
        exposure: Exposure | None,
        piece_bytes: int,
    ) -> Pieces:
        opening = None
        if exposure is not None and transport is not None:
            opening = writer.open(transport.name, exposure.opening)
        return Pieces(
            self.export,
            writer,
            unit_bytes=self.unit_bytes,
            first_unit=first_unit,
            piece_bytes=piece_bytes,
            room=functools.partial(self._room, first_unit, exposure),
            opening=opening,
        )

    def _room(
        self, first_unit: int, exposure: Exposure | None, unit: int, num_bytes: int
    ) -> memoryview | None:
        """Where the units from one on had best be made."""
        if exposure is None:
            return None
        return self.exposures.room(exposure, (unit - first_unit) * self.unit_bytes, num_bytes)
