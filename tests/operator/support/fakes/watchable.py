"""An API server in memory that can be followed: `FakeCluster` with lists in pages and watches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from support.fakes.cluster import Clock, FakeCluster, Key
from vlm_operator.cluster import KINDS, Kind, Manifest, Page, WatchEvent, WatchEventType, kind_of
from vlm_operator.errors import ClusterError

_PAGE = 3  # objects, so that lists have parts
# The event of a watch of a label, by whether the object had the label before, and has it now.
_SEEN = {
    (False, True): WatchEventType.ADDED,
    (True, True): WatchEventType.MODIFIED,
    (True, False): WatchEventType.DELETED,
}


class WatchableCluster(FakeCluster):
    """See `cluster.Source`.

    Attributes:
        down: raised by every list and watch while it is set, also by watches that are open.
        lists: how many were asked for, by kind.
        watching: watches that are open now.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__(clock)
        self.down: ClusterError | None = None
        self.lists: dict[str, int] = {}
        self.watching = 0
        self._history: list[tuple[int, WatchEventType, Manifest] | None] = []
        self._ends = 0

    async def pages(
        self, kind: Kind, namespace: str | None, *, labelled: str
    ) -> AsyncGenerator[Page, None]:
        """See `Source.pages`."""
        self._answer()
        self.lists[kind.kind] = self.lists.get(kind.kind, 0) + 1
        found = [item for item in self.all(kind, namespace) if _carries(item, labelled)]
        version = self.version
        for start in range(0, max(1, len(found)), _PAGE):
            yield Page(found[start : start + _PAGE], version)
            await asyncio.sleep(0)

    async def watch(
        self,
        kind: Kind,
        namespace: str | None,
        *,
        labelled: str,
        since: int,
        seconds: float,
        silence: float,
    ) -> AsyncGenerator[WatchEvent, None]:
        """See `Source.watch`; it lasts until `end_watches`."""
        del seconds, silence
        ends, told = self._ends, 0
        shown: set[tuple[str | None, str]] = set()
        self.watching += 1
        try:
            while self._ends == ends:
                self._answer()
                news = self._history[told:]
                told += len(news)
                for version, happening, item in filter(None, news):
                    meta = item["metadata"]
                    place = meta.get("namespace")
                    if kind_of(item) != kind or namespace not in (None, place):
                        continue
                    known = (place, meta["name"]) in shown
                    carries = happening is not WatchEventType.DELETED and _carries(item, labelled)
                    (shown.add if carries else shown.discard)((place, meta["name"]))
                    if version <= since or not (known or carries):
                        continue
                    yield WatchEvent(_SEEN[known, carries], item)
                await asyncio.sleep(0.001)
        finally:
            self.watching -= 1

    def end_watches(self) -> None:
        """End the watches that are open, as an API server does after a while."""
        self._ends += 1

    def lose(self) -> None:
        """Drop the events that open watches have not sent yet."""
        self._history = [None] * len(self._history)

    def remove(self, kind: Kind, namespace: str, name: str) -> None:
        """See `FakeCluster.remove`."""
        super().remove(kind, namespace, name)
        key = (kind.kind, namespace, name)
        if key in self._objects:
            self._tell(WatchEventType.MODIFIED, self._shown(key))

    def _store(self, key: Key, item: Any, before: Mapping[Any, Any]) -> None:
        happening = WatchEventType.MODIFIED if key in self._objects else WatchEventType.ADDED
        super()._store(key, item, before)
        self._tell(happening, self._shown(key))

    def _collect(self, key: Key) -> None:
        item = self._shown(key)
        super()._collect(key)
        item["metadata"]["resourceVersion"] = str(self._next())
        self._tell(WatchEventType.DELETED, item)

    def _answer(self) -> None:
        if self.down is not None:
            raise self.down

    def _tell(self, happening: WatchEventType, item: Manifest) -> None:
        self._history.append((int(item["metadata"]["resourceVersion"]), happening, item))

    def _shown(self, key: Key) -> Manifest:
        kind = next(kind for kind in KINDS.values() if kind.kind == key[0])
        found = self.all(kind, key[1] or None)
        return next(item for item in found if item["metadata"]["name"] == key[2])


def _carries(item: Manifest, label: str) -> bool:
    return not label or label in item["metadata"].get("labels", {})
