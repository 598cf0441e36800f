"""The units of one transfer, put together from the parts that frames bring.

due(header)   is this part the next one, and of units that we want?
parts         where it lies: in `Rooms`, or in memory of the run's own
add           the whole units that it completes
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from vlm_worker.errors import CorruptTransferError, Refusal
from vlm_worker.wire.frames import Header, Units, units_per_frame
from vlm_worker.wire.rooms import Rooms

NOTHING: Final = memoryview(b"")

Refuse = Callable[[Refusal, str], CorruptTransferError]


class Assembly:
    """Which bytes are due, and where they shall lie; all of it is our own reckoning.

    Args:
        unit_bytes: size of a unit.
        first_unit, end_unit: the units that are wanted.
        into: memory for all of them. Without it each run has memory of its own.
        refuse: makes the error of a part that is not due.

    Attributes:
        next_unit: the first one that is not whole yet.
        num_bytes: of whole units.
    """

    def __init__(
        self,
        *,
        unit_bytes: int,
        first_unit: int,
        end_unit: int,
        into: Rooms | None,
        refuse: Refuse,
    ) -> None:
        assert into is None or into.num_bytes == (end_unit - first_unit) * unit_bytes
        self.into = into
        self.next_unit = first_unit
        self.num_bytes = 0
        self._unit_bytes = unit_bytes
        self._first_unit = first_unit
        self._end_unit = end_unit
        self._refuse = refuse
        self._run: memoryview | None = None
        self._run_bytes = 0
        self._part_bytes = 0

    @property
    def is_followed(self) -> bool:
        """Whether `add` gives units at all."""
        return self.into is None or self.into.is_followed

    @property
    def is_whole(self) -> bool:
        """Whether no unit is there in part."""
        return not self._part_bytes

    @property
    def total_bytes(self) -> int:
        """Of the whole transfer."""
        return (self._end_unit - self._first_unit) * self._unit_bytes

    @property
    def position(self) -> int:
        """Of the next byte, in the transfer."""
        return (self.next_unit - self._first_unit) * self._unit_bytes + self._part_bytes

    def due(self, header: Header, num_bytes: int, *, most: int) -> int:
        """The bytes of a run of units, part of which this payload is; all is held to our own.

        A frame speaks for at most `most` bytes.

        Raises:
            CorruptTransferError: another part is due, or the payload is not of one run.
        """
        first_unit, num_units, offset = header.first_unit, header.num_units, header.offset
        total = num_units * self._unit_bytes
        if first_unit != self.next_unit or offset != self._part_bytes:
            due = f"unit {self.next_unit}+{self._part_bytes} is due"
            raise self._refuse(Refusal.SEQUENCE, f"unit {first_unit}+{offset} where {due}")
        if not 0 < num_units <= self._end_unit - first_unit or not num_bytes:
            raise self._refuse(
                Refusal.RANGE, f"{num_units} units where {self._end_unit} is the end"
            )
        if num_units > units_per_frame(self._unit_bytes, most=most) or offset + num_bytes > total:
            raise self._refuse(Refusal.RANGE, "it holds more than its units")
        if self._part_bytes and self._run_bytes != total:
            raise self._refuse(Refusal.RANGE, f"{num_units} units after a part of others")
        return total

    def parts(self, total: int, num_bytes: int) -> list[memoryview]:
        """Where the next bytes of a run lie, whose memory is all there from its first part on."""
        self._run_bytes = total
        if self.into is not None:
            return list(self.into.parts(self.position, num_bytes))
        if self._run is None:
            self._run = np.empty(total, np.uint8).data
        return [self._run[self._part_bytes : self._part_bytes + num_bytes]]

    def put(self, total: int, payload: memoryview) -> None:
        """Bring a part to its place; one that is a whole run may stay where it is."""
        if payload.nbytes == total and self.into is None:
            self._run, self._run_bytes = payload, total
            return
        for part in self.parts(total, payload.nbytes):
            part[:], payload = payload[: part.nbytes], payload[part.nbytes :]

    def add(self, header: Header, num_bytes: int) -> Units | None:
        """Count a part that is in its place and right; returns the units that are whole with it.

        Those that lie in `into` are given without their bytes, if that is followed, or not at all.
        """
        self._part_bytes += num_bytes
        if self._part_bytes < self._run_bytes:
            return None
        units = Units(header.first_unit, header.num_units, self._run or NOTHING)
        self.num_bytes += self._run_bytes
        self._run, self._part_bytes = None, 0
        self.next_unit += header.num_units
        return units if self.is_followed else None
