"""Watch caches of labelled objects and all VLMPools, so that turns read from memory.

API server ── list, watch ──▶ Informer ─▶ Store ◀── answers to our writes ────┐
                                            │ list()                          │
                        a turn ◀── CachedClient ───────── writes ─────────────┴─▶ Fenced

list ─▶ watch for `seconds` ─▶ watch from where it ended ─▶ ... ─▶ after `relist`: list again
          └── an error, 410 Gone, or silence ─▶ list again

The API server ends a watch after `seconds`. The next watch resumes at the version of the last event
or bookmark, so a quiet cluster is not listed. A list every `relist` seconds repairs lost events.
After an error, turns read the store for `GRACE_SECONDS`. Then a turn waits for the next complete
list, or fails because the API server is unavailable. Reasons:
docs/decisions/0015-turns-read-from-memory.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Iterator, Mapping

from vlm_operator import names
from vlm_operator.backoff import Backoff
from vlm_operator.cluster import VLM_POOL, Cluster, Kind, Manifest, Source, WatchEventType, kind_of
from vlm_operator.errors import ClusterError, UnavailableError
from vlm_operator.object_store import Service, Store

logger = logging.getLogger(__name__)

LIST_WAIT_SECONDS = 5.0  # a read waits for a list as long as a request may take
GRACE_SECONDS = 10.0  # less than the longest age of an idle turn's view
MIN_LIST_SECONDS = 1.0  # least time between two lists, if watches end at once
RETRY = Backoff(longest=5.0)
RELIST_SECONDS = 1800.0


def label_of(kind: Kind) -> str:
    """Return the label that selects the watched objects of a kind; "" selects all.

    All VLMPools are watched, because those that users create lack our label.
    """
    return names.LABEL_SERVICE if kind.namespaced and kind != VLM_POOL else ""


class Informer:
    """Watches one kind, in one namespace or in all.

    Args:
        source: client that lists and watches.
        kind: kind of the watched objects; `label_of` selects them.
        namespace: watched namespace; None for all.
        notify: called with each service whose objects changed.
        seconds: longest duration of one watch.
        relist: seconds after which all objects are listed again.
        silence: seconds without an event after which a watch counts as broken.
    """

    def __init__(
        self,
        source: Source,
        kind: Kind,
        namespace: str | None,
        *,
        notify: Callable[[Service], None],
        seconds: float = 60.0,
        relist: float = RELIST_SECONDS,
        silence: float = 70.0,
    ) -> None:
        self._source = source
        self._kind = kind
        self._namespace = namespace
        self._labelled = label_of(kind)
        self._notify = notify
        self._seconds = seconds
        self._relist = relist
        self._silence = silence
        self._whole = asyncio.Event()
        self._readable_until = float("-inf")  # by the clock of the event loop
        self._problem = "not listed yet"
        self.store = Store(kind)

    async def run(self) -> None:
        """List and watch until cancelled."""
        clock, failures = asyncio.get_running_loop().time, 0
        list_at = float("-inf")
        while True:
            due = clock() + MIN_LIST_SECONDS
            try:
                if clock() >= list_at:
                    await self._list()
                    # jitter: kinds and operators must not list at the same moment
                    list_at = clock() + self._relist * random.uniform(0.7, 1.0)  # noqa: S311
                failures = 0
                await self._watch(self.store.version)
            except ClusterError as error:
                failures += 1
                list_at = float("-inf")
                self._lost(error)
                if failures > 1:  # after one broken watch, list without a pause
                    await asyncio.sleep(RETRY.seconds(failures - 1))
            await asyncio.sleep(max(0.0, due - clock()))

    async def list(self, namespace: str | None, labels: Mapping[str, str]) -> list[Manifest]:
        """Return objects of the store; if it may lack events, wait for the next list.

        Raises:
            UnavailableError: no list was complete within `LIST_WAIT_SECONDS`.
        """
        if asyncio.get_running_loop().time() > self._readable_until:
            try:
                async with asyncio.timeout(LIST_WAIT_SECONDS):
                    await self._whole.wait()
            except TimeoutError:
                text = f"{self._kind.plural} are not listed: {self._problem}"
                raise UnavailableError(0, "Unseen", text) from None
        return self.store.list(namespace, labels)

    async def _list(self) -> None:
        uids: set[str] = set()
        version = 0
        async with contextlib.aclosing(
            self._source.pages(self._kind, self._namespace, labelled=self._labelled)
        ) as pages:
            async for page in pages:
                version = page.version
                uids.update(item["metadata"]["uid"] for item in page.items)
                self._notify_all(self.store.page(page.items))
        self._notify_all(self.store.only(uids, version))
        self._readable_until = float("inf")
        self._whole.set()

    async def _watch(self, since: int) -> None:
        async with contextlib.aclosing(
            self._source.watch(
                self._kind,
                self._namespace,
                labelled=self._labelled,
                since=since,
                # jitter, as for lists
                seconds=self._seconds * random.uniform(0.7, 1.0),  # noqa: S311
                silence=self._silence,
            )
        ) as events:
            async for event in events:
                self._apply(event.type, event.item)

    def _lost(self, error: ClusterError) -> None:
        """Allow reads only for the grace period, because events may be missing."""
        if self._whole.is_set():
            self._whole.clear()
            self._readable_until = asyncio.get_running_loop().time() + GRACE_SECONDS
        self._problem = str(error)
        logger.info("watch broken", extra={"kind": self._kind.kind, "error": str(error)})

    def _apply(self, kind: WatchEventType, item: Manifest) -> None:
        match kind:
            case WatchEventType.BOOKMARK:
                self.store.advance(int(item["metadata"]["resourceVersion"]))
            case WatchEventType.DELETED:
                self._notify_all(self.store.gone(item))
            case _:
                self._notify_all(self.store.changed(item))

    def _notify_all(self, services: set[Service]) -> None:
        for service in services:
            self._notify(service)


class CachedClient:
    """A `Cluster` whose lists come from memory; single objects and all writes use the API server.

    A list after a write contains that write: the client puts the answer into the store before it
    returns.
    """

    def __init__(
        self, cluster: Cluster, informers: Mapping[tuple[Kind, str | None], Informer]
    ) -> None:
        self._cluster = cluster
        self._informers = informers

    async def get(self, kind: Kind, namespace: str, name: str) -> Manifest | None:
        return await self._cluster.get(kind, namespace, name)

    async def list(
        self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None
    ) -> list[Manifest]:
        informer = next(self._informers_of(kind, namespace), None)
        if informer is None:
            return await self._cluster.list(kind, namespace, labels)
        assert label_of(kind) in ("", *(labels or {})), "an informer holds only labelled objects"
        return await informer.list(namespace, labels or {})

    async def apply(
        self, manifest: Manifest, *, manager: str, subresource: str = "", dry_run: bool = False
    ) -> Manifest:
        answer = await self._cluster.apply(
            manifest, manager=manager, subresource=subresource, dry_run=dry_run
        )
        return answer if dry_run else self._written(answer)

    async def merge(self, manifest: Manifest, *, manager: str) -> Manifest:
        return self._written(await self._cluster.merge(manifest, manager=manager))

    async def metadata_if(
        self, kind: Kind, namespace: str, name: str, expected: Mapping[str, str]
    ) -> Manifest | None:
        return await self._cluster.metadata_if(kind, namespace, name, expected)

    async def create(self, manifest: Manifest) -> Manifest:
        return self._written(await self._cluster.create(manifest))

    async def replace(self, manifest: Manifest) -> Manifest:
        return self._written(await self._cluster.replace(manifest))

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str | None) -> None:
        await self._cluster.delete(kind, namespace, name, uid=uid)
        if uid is not None:
            for informer in self._informers_of(kind, namespace):
                informer.store.deleted(uid)

    def _written(self, answer: Manifest) -> Manifest:
        for informer in self._informers_of(kind_of(answer), answer["metadata"].get("namespace")):
            informer.store.written(answer)
        return answer

    def _informers_of(self, kind: Kind, namespace: str | None) -> Iterator[Informer]:
        places = {None, namespace if kind.namespaced else None}
        return (
            self._informers[kind, place] for place in places if (kind, place) in self._informers
        )
