"""The memory of one Encode call, from its first byte to its last embedding. On one event loop.

with contextlib.closing(CallMemory(memory, tenant)) as call:
    call.received(n)                 count bytes, or OverloadedError
    await call.reserve_images(n, ...)  wait for the memory of all images, or OverloadedError
    call.forget_file(n)              a file is decoded
... the end of the context frees the rest
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from vlm_worker.core.limits import fits
from vlm_worker.core.request_memory import (
    ImageMemory,
    ImageReservation,
    MemoryBudget,
    MemoryKind,
    UploadMemory,
)
from vlm_worker.engine.settings import EngineStats
from vlm_worker.errors import InvalidRequestError, OverloadedError

RETRY_AFTER_SECONDS: Final = 1.0
MAX_WAITING_IMAGES: Final = 256
"""Limit of the images of calls that wait for memory, because they hold their files meanwhile."""


class RequestMemory:
    """The memory that all Encode calls of a worker hold, within the process's budget.

    Attributes:
        num_early_refusals: calls refused before their upload because embeddings had no memory. The
            engine counts its own refusals.
    """

    def __init__(self, budget: MemoryBudget, *, max_waiting: int = MAX_WAITING_IMAGES) -> None:
        self.budget = budget
        self.uploads = UploadMemory(budget.uploads)
        self.images = ImageMemory(budget.images, max_waiting=max_waiting)
        self.num_early_refusals = 0
        self._waiters: dict[ImageReservation, asyncio.Event] = {}

    @property
    def used(self) -> Mapping[MemoryKind, int]:
        """Bytes in use, of the kinds that are counted here."""
        return {MemoryKind.UPLOADS: self.uploads.used, MemoryKind.IMAGES: self.images.used}

    @property
    def num_refused(self) -> Mapping[MemoryKind, int]:
        """Refused calls, by the kind of memory that was full."""
        return {
            MemoryKind.UPLOADS: self.uploads.num_refused,
            MemoryKind.IMAGES: self.images.num_refused,
            MemoryKind.EMBEDDINGS: self.num_early_refusals,
        }

    def check_embeddings(self, stats: EngineStats, num_bytes: int) -> None:
        """Raise OverloadedError if embeddings that peers have not fetched leave no memory."""
        held, maximum = stats.held_embedding_bytes, stats.max_held_embedding_bytes
        if not fits(held, num_bytes, maximum=maximum):
            self.num_early_refusals += 1
            raise OverloadedError(
                f"embeddings of {held} bytes are queued or held for peers, {maximum} may be",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )

    async def wait(self, reservation: ImageReservation, *, num_images: int) -> None:
        """Wait until a reservation is granted.

        Raises:
            OverloadedError: too many images wait already.
        """
        if not self.images.wait(reservation, num_images=num_images):
            raise OverloadedError(
                f"{self.images.num_waiting} images wait for memory already",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        granted = self._waiters[reservation] = asyncio.Event()
        self.grant()
        try:
            await granted.wait()
        except asyncio.CancelledError:
            if self._waiters.pop(reservation, None) is None:  # granted before the cancellation
                self.images.release(reservation)
            else:
                self.images.cancel(reservation)
            self.grant()
            raise

    def grant(self) -> None:
        """Grant the reservations that fit now and wake their waiters. Called after every change."""
        for reservation in self.images.granted():
            self._waiters.pop(reservation).set()


class CallMemory:
    def __init__(self, memory: RequestMemory, tenant: bytes) -> None:
        self._memory = memory
        self._tenant = tenant
        self._num_uploaded = 0
        self._reservation: ImageReservation | None = None

    @property
    def has_images(self) -> bool:
        """Whether the memory of its images is granted."""
        return self._reservation is not None

    def check_files(self, num_bytes: int) -> None:
        """Refuse files that do not fit now, before their upload; counts nothing.

        If the caller is still writing, gRPC may lose a status that the worker sends.

        Raises:
            InvalidRequestError: the files exceed what one call may ever hold.
            OverloadedError: the files of other calls leave too little memory.
        """
        uploads = self._memory.uploads
        if num_bytes > uploads.capacity:
            raise InvalidRequestError(
                f"the images of this request have {num_bytes} bytes, and this worker has "
                f"{uploads.capacity} for files: send fewer or smaller images, or raise "
                "--request-memory-bytes"
            )
        if not uploads.has_capacity(num_bytes):
            raise self._overloaded()

    def received(self, num_bytes: int) -> None:
        """Count a part of a file.

        Raises:
            OverloadedError: the files of other calls leave too little memory.
        """
        if not self._memory.uploads.take(num_bytes):
            raise self._overloaded()
        self._num_uploaded += num_bytes

    def forget_file(self, num_bytes: int) -> None:
        self._num_uploaded -= num_bytes
        self._memory.uploads.release(num_bytes)

    def reserve_early(self, num_bytes: int) -> None:
        """Reserve the memory of all images before all files have arrived, if much is free."""
        reservation = self._new_reservation(num_bytes)
        if self._memory.images.take_early(reservation):
            self._reservation = reservation

    async def reserve_images(self, num_bytes: int, *, num_images: int) -> None:
        """Wait for the memory of all images, after all files have arrived.

        Raises:
            InvalidRequestError: the images exceed what one call may ever hold.
            OverloadedError: too many images wait already.
        """
        reservation = self._new_reservation(num_bytes)
        await self._memory.wait(reservation, num_images=num_images)
        self._reservation = reservation

    @property
    def max_image_bytes(self) -> int:
        """Maximum bytes of images that one call may hold."""
        return self._memory.images.largest

    def _overloaded(self) -> OverloadedError:
        uploads = self._memory.uploads
        return OverloadedError(
            f"{uploads.used} of {uploads.capacity} bytes are taken by files of images",
            retry_after_seconds=RETRY_AFTER_SECONDS,
        )

    def _new_reservation(self, num_bytes: int) -> ImageReservation:
        largest = self.max_image_bytes
        if num_bytes > largest:
            raise InvalidRequestError(
                f"the images of this request take {num_bytes} bytes when decoded, and this worker "
                f"has {largest} for one request: send fewer or smaller images, or raise "
                "--request-memory-bytes"
            )
        return self._memory.images.reservation(num_bytes, tenant=self._tenant)

    def close(self) -> None:
        self._memory.uploads.release(self._num_uploaded)
        self._num_uploaded = 0
        reservation, self._reservation = self._reservation, None
        if reservation is not None:
            self._memory.images.release(reservation)
            self._memory.grant()
