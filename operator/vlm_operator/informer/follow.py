"""Keeps a store up to date, whatever becomes of the watch: list once, then watch on and on.

list ─▶ watch for `seconds` ─▶ watch from where it ended ─▶ ... ─▶ after `relist`: list again
          └── an error, 410 Gone, or silence ─▶ list again

The API server ends a watch after `seconds`; the next one resumes at the version up to which events
and bookmarks came, so a quiet cluster is not listed. A list every `relist` makes up for an event
that got lost. After an error what is known may be read for `GRACE_SECONDS`; from then on until the
next list is whole a turn waits, or is told that the API server is away.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Mapping

from vlm_operator import pauses
from vlm_operator.cluster import Happening, Kind, Manifest, Source
from vlm_operator.errors import ClusterError, UnavailableError
from vlm_operator.informer.store import Service, Store

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 5.0  # that a read waits for a list: as long as one that the API server answers
GRACE_SECONDS = 10.0  # less than the view of a turn that nothing woke may be old
LEAST_SECONDS = 1.0  # between two lists, where watches end at once
LONGEST_PAUSE_SECONDS = 5.0
RELIST_SECONDS = 1800.0


class Informer:
    """Follows one kind, in one namespace or in all.

    Args:
        source: where lists and watches come from.
        kind: what is followed.
        namespace: None for all.
        labelled: a label that objects must carry to be followed; "" for all.
        told: hears whose objects changed.
        seconds: the longest that one watch lasts.
        relist: everything is listed again after so many seconds, whatever the watches said.
        silence: a watch that says nothing for so many seconds is dead.
    """

    def __init__(
        self,
        source: Source,
        kind: Kind,
        namespace: str | None,
        *,
        labelled: str,
        told: Callable[[Service], None],
        seconds: float = 60.0,
        relist: float = RELIST_SECONDS,
        silence: float = 70.0,
    ) -> None:
        self._source = source
        self._kind = kind
        self._namespace = namespace
        self._labelled = labelled
        self._told = told
        self._seconds = seconds
        self._relist = relist
        self._silence = silence
        self._whole = asyncio.Event()
        self._readable_until = float("-inf")  # by the clock of the event loop
        self._problem = "not listed yet"
        self.store = Store(kind)

    async def run(self) -> None:
        """Follow until cancelled."""
        clock, failures = asyncio.get_running_loop().time, 0
        list_at = float("-inf")
        while True:
            due = clock() + LEAST_SECONDS
            try:
                if clock() >= list_at:
                    await self._list()
                    # not all kinds, nor all operators, at the same moment
                    list_at = clock() + self._relist * random.uniform(0.7, 1.0)  # noqa: S311
                failures = 0
                await self._watch(self.store.version)
            except ClusterError as error:
                failures += 1
                list_at = float("-inf")
                self._lost(error)
                if failures > 1:  # a watch that broke is no reason to wait with the list
                    await asyncio.sleep(pauses.growing(failures - 1, longest=LONGEST_PAUSE_SECONDS))
            await asyncio.sleep(max(0.0, due - clock()))

    async def list(self, namespace: str | None, labels: Mapping[str, str]) -> list[Manifest]:
        """Return what the store knows, once it does.

        Raises:
            UnavailableError: the API server has not told for too long.
        """
        if asyncio.get_running_loop().time() > self._readable_until:
            try:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    await self._whole.wait()
            except TimeoutError:
                text = f"{self._kind.plural} are not seen: {self._problem}"
                raise UnavailableError(0, "Unseen", text) from None
        return self.store.list(namespace, labels)

    async def _list(self) -> None:
        """Take in everything there is."""
        uids: set[str] = set()
        version = 0
        async with contextlib.aclosing(
            self._source.pages(self._kind, self._namespace, labelled=self._labelled)
        ) as pages:
            async for page in pages:
                version = page.version
                uids.update(item["metadata"]["uid"] for item in page.items)
                self._tell(self.store.page(page.items))
        self._tell(self.store.only(uids, version))
        self._readable_until = float("inf")
        self._whole.set()

    async def _watch(self, since: int) -> None:
        """Take in what happens, until the watch ends."""
        async with contextlib.aclosing(
            self._source.watch(
                self._kind,
                self._namespace,
                labelled=self._labelled,
                since=since,
                # not all kinds, nor all operators, at the same moment
                seconds=self._seconds * random.uniform(0.7, 1.0),  # noqa: S311
                silence=self._silence,
            )
        ) as events:
            async for event in events:
                self._take(event.happening, event.item)

    def _lost(self, error: ClusterError) -> None:
        """Let nobody read for long: what was not told since may be anything."""
        if self._whole.is_set():
            self._whole.clear()
            self._readable_until = asyncio.get_running_loop().time() + GRACE_SECONDS
        self._problem = str(error)
        logger.info("watch broken", extra={"kind": self._kind.kind, "error": str(error)})

    def _take(self, happening: Happening, item: Manifest) -> None:
        match happening:
            case Happening.BOOKMARK:
                self.store.advance(int(item["metadata"]["resourceVersion"]))
            case Happening.DELETED:
                self._tell(self.store.gone(item))
            case _:
                self._tell(self.store.changed(item))

    def _tell(self, services: set[Service]) -> None:
        for service in services:
            self._told(service)
