"""Limits the memory that requests use in one worker process, and orders reservations. Pure.

    MemoryBudget     a total in bytes, divided by kind of use
    UploadMemory     bytes of files, counted when they arrive; a file that does not fit is refused
    ImageMemory      decoded images; one reservation for all images of a call, which waits until
                     it fits

Laws (tests/worker/core/test_request_memory.py):

    M1  used memory never exceeds its share
    M2  a reservation is granted as a whole, so no two of them wait for each other
    M3  if all granted reservations are released, each waiting reservation is eventually granted
    M4  small reservations never wait for large ones, and no tenant waits for all those of another
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Mapping
from typing import Final

SMALL_SHARE: Final = 8
"""One eighth of the image memory is kept for small reservations."""
SMALL_RESERVATIONS: Final = 4
"""A reservation is small if this many of its size fit into the memory kept for small ones."""


class MemoryKind(enum.StrEnum):
    """The use of request memory; the label of `triptych_request_memory_bytes`."""

    UPLOADS = "uploads"
    IMAGES = "images"
    EMBEDDINGS = "embeddings"
    EXPOSED = "exposed"


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes that requests may use in one process, by kind.

    `uploads` are files until they are decoded, `images` pixels and patches until they are encoded,
    `embeddings` those that are queued or held for peers, with the copies for them, and `exposed` is
    memory that peers read directly.
    """

    uploads: int = 0
    images: int = 0
    embeddings: int = 0
    exposed: int = 0

    @property
    def total(self) -> int:
        return self.uploads + self.images + self.embeddings + self.exposed

    def by_kind(self) -> Mapping[MemoryKind, int]:
        return {kind: getattr(self, kind.value) for kind in MemoryKind}


def divide(
    total: int | None,
    *,
    uploads: int,
    images: int,
    embeddings: int,
    exposed: int,
    least_uploads: int,
    least_images: int,
) -> MemoryBudget:
    """Divide the bytes of a process's request memory among the kinds.

    `embeddings` and `exposed` are fixed. `uploads` and `images` are defaults: if there is a total,
    they share the rest of it in the same proportion. One image needs `least_uploads` and
    `least_images`. Raises ValueError if the total is too small for one image.
    """
    if total is None:
        return MemoryBudget(uploads, images, embeddings, exposed)
    serves_images = uploads + images > 0
    own = embeddings + exposed
    least = own + (least_uploads + least_images if serves_images else 0)
    if total < least:
        raise ValueError(
            f"--request-memory-bytes={total} is too small: {embeddings} are for embeddings, "
            f"{exposed} for memory that peers read, and one image needs {least - own}: "
            f"give it at least {least}"
        )
    if not serves_images:
        return MemoryBudget(0, 0, embeddings, exposed)
    rest = total - own
    share = rest * uploads // (uploads + images)
    share = min(max(share, least_uploads), rest - least_images)
    return MemoryBudget(share, rest - share, embeddings, exposed)


class UploadMemory:
    """Counts the bytes of received files that are still needed, and those that did not fit."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self.num_refused = 0

    def has_capacity(self, num_bytes: int) -> bool:
        """Whether `num_bytes` fit now. Takes nothing, but counts a refusal."""
        has_capacity = self.used + num_bytes <= self.capacity
        self.num_refused += not has_capacity
        return has_capacity

    def take(self, num_bytes: int) -> bool:
        """Count received bytes; False if they do not fit: the caller must end the upload."""
        if not self.has_capacity(num_bytes):
            return False
        self.used += num_bytes
        return True

    def release(self, num_bytes: int) -> None:
        assert 0 <= num_bytes <= self.used
        self.used -= num_bytes


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ImageReservation:
    """The memory that all images of one call need; `tenant` identifies the caller."""

    num_bytes: int
    tenant: bytes
    is_small: bool


class ImageMemory:
    """Memory of decoded images. A reservation is granted as a whole, in the order of its lane.

    small    in order of arrival
    large    one reservation of each tenant in turn; the next is chosen after the last is granted

    If no large reservation waits, small ones may use all memory; otherwise only the part that is
    kept for them.

    Attributes:
        num_refused: reservations that were refused because too many images waited.
        num_waiting: images of waiting reservations.
    """

    def __init__(self, capacity: int, *, max_waiting: int) -> None:
        self.capacity = capacity
        self.num_refused = 0
        self.num_waiting = 0
        self._max_waiting = max_waiting
        self._kept = capacity // SMALL_SHARE
        self._used_small = 0
        self._used_large = 0
        self._small: collections.deque[tuple[ImageReservation, int]] = collections.deque()
        self._large: collections.OrderedDict[bytes, collections.deque[tuple[ImageReservation, int]]]
        self._large = collections.OrderedDict()

    @property
    def used(self) -> int:
        """Bytes of all granted reservations."""
        return self._used_small + self._used_large

    @property
    def largest(self) -> int:
        """Bytes of the largest reservation that can be granted."""
        return self.capacity - self._kept

    def reservation(self, num_bytes: int, *, tenant: bytes) -> ImageReservation:
        """Return a reservation that is not granted yet. It must not exceed `largest`."""
        assert 0 <= num_bytes <= self.largest
        return ImageReservation(
            num_bytes, tenant, is_small=num_bytes * SMALL_RESERVATIONS <= self._kept
        )

    def take_early(self, reservation: ImageReservation) -> bool:
        """Grant a reservation before all its files arrived, if half of the memory stays free.

        So callers that never send the rest of their files block at most half of the memory.
        """
        waits = self._small or self._large
        if (
            waits
            or self.used + reservation.num_bytes > self.capacity // 2
            or not self._fits(reservation)
        ):
            return False
        self._count(reservation, reservation.num_bytes)
        return True

    def wait(self, reservation: ImageReservation, *, num_images: int) -> bool:
        """Append a reservation to its lane; False if too many images wait already."""
        if self.num_waiting and self.num_waiting + num_images > self._max_waiting:
            self.num_refused += 1
            return False
        self.num_waiting += num_images
        lane = self._small
        if not reservation.is_small:
            lane = self._large.setdefault(reservation.tenant, collections.deque())
        lane.append((reservation, num_images))
        return True

    def granted(self) -> list[ImageReservation]:
        """Grant and return the reservations that fit now, in order; called after every change."""
        granted = []
        while self._large:
            tenant, lane = next(iter(self._large.items()))
            if not self._fits(lane[0][0]):
                break
            granted.append(self._grant_first(lane))
            del self._large[tenant]
            if lane:  # one reservation of each other tenant is next
                self._large[tenant] = lane
        while self._small and self._fits(self._small[0][0]):
            granted.append(self._grant_first(self._small))
        return granted

    def cancel(self, reservation: ImageReservation) -> None:
        """Remove a waiting reservation from its lane."""
        lane = self._small if reservation.is_small else self._large[reservation.tenant]
        entry = next(entry for entry in lane if entry[0] is reservation)
        lane.remove(entry)
        self.num_waiting -= entry[1]
        if not reservation.is_small and not lane:
            del self._large[reservation.tenant]

    def release(self, reservation: ImageReservation) -> None:
        """Release a granted reservation."""
        self._count(reservation, -reservation.num_bytes)
        assert self._used_small >= 0
        assert self._used_large >= 0

    def _fits(self, reservation: ImageReservation) -> bool:
        if not reservation.is_small:
            beyond = max(self._used_small - self._kept, 0)
            return self._used_large + beyond + reservation.num_bytes <= self.largest
        if self._large:
            return self._used_small + reservation.num_bytes <= self._kept
        return self.used + reservation.num_bytes <= self.capacity

    def _grant_first(
        self, lane: collections.deque[tuple[ImageReservation, int]]
    ) -> ImageReservation:
        reservation, num_images = lane.popleft()
        self.num_waiting -= num_images
        self._count(reservation, reservation.num_bytes)
        return reservation

    def _count(self, reservation: ImageReservation, num_bytes: int) -> None:
        if reservation.is_small:
            self._used_small += num_bytes
        else:
            self._used_large += num_bytes
