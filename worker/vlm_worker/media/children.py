"""The decode children of one pool: who is idle, who died, and that another takes the place.

    take ─▶ child, or an empty place ─▶ give_back      places never get lost, children may
Large pictures never have all places, so that a small one behind sixteen of them waits for none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

from vlm_worker.errors import EngineError
from vlm_worker.media.child import ChildDiedError, DecodeChild
from vlm_worker.media.frames import ChildConfig

logger = logging.getLogger(__name__)


class Children:
    """`num_places` processes. Owned by one event loop; the media pool is its only user."""

    def __init__(self, config: ChildConfig, *, num_places: int) -> None:
        self._config = config
        self._num_places = num_places
        self._idle: asyncio.LifoQueue[DecodeChild | None] = asyncio.LifoQueue()
        # where there is one place only, large pictures have it too
        self._large = asyncio.Semaphore(max(num_places - 1, 1))
        self._alive: set[DecodeChild] = set()
        self._closed = False

    def __iter__(self) -> Iterator[DecodeChild]:
        """Those that run."""
        return iter(self._alive)

    async def start(self) -> None:
        """Start all; raises EngineError where one does not come up."""
        starting = [self.spawn() for _ in range(self._num_places)]
        # to the end of each, so that none comes up after a sibling's failure closed the pool
        for child in await asyncio.gather(*starting, return_exceptions=True):
            if isinstance(child, BaseException):
                raise child
            self._idle.put_nowait(child)

    def refuse(self, num_waiting: int) -> None:
        """Start no more, and wake who waits: they find that all is over."""
        self._closed = True
        for _ in range(num_waiting):
            self._large.release()
            self._idle.put_nowait(None)

    def end(self) -> None:
        """End all at once."""
        for child in self._alive:
            child.close()
        self._alive.clear()

    async def take(self, *, large: bool) -> DecodeChild | None:
        """An idle child; None is a place whose child died. Each kind: first come, first served."""
        if large:
            await self._large.acquire()
        try:
            return await self._idle.get()
        except BaseException:
            if large:
                self._large.release()
            raise

    def give_back(self, child: DecodeChild | None, *, large: bool) -> None:
        """The place that `take` gave, with the child that is in it now."""
        if large:
            self._large.release()
        self._idle.put_nowait(child)

    async def spawn(self) -> DecodeChild:
        """Start one; raises EngineError where that cannot be."""
        if self._closed:
            raise EngineError("the media pool is closed")
        child = await DecodeChild.start(self._config)
        self._alive.add(child)
        if self._closed:  # in the meantime: `end` saw no such child
            self._alive.discard(child)
            child.close()
            raise EngineError("the media pool is closed")
        return child

    async def replacement(self) -> DecodeChild | None:
        """Another child for the place of one that died, None where it does not come up."""
        try:
            return await self.spawn()
        except EngineError as error:
            logger.warning("decode child not restarted", extra={"error": str(error)})
            return None

    def bury(self, child: DecodeChild, death: ChildDiedError) -> None:
        """It died: forget it."""
        logger.warning(
            "decode child died", extra={"pid": child.pid, "returncode": death.returncode}
        )
        self._alive.discard(child)
        child.close()
