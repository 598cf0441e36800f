"""Turns kopf's events of VLMServices into causes of turns; kopf itself writes nothing.

watch (kopf) ─▶ service_event ─┐
                               ├─▶ ServiceEvents ─ the signature changed ─▶ a cause for the queue
list, each minute ─▶ missed ───┘

An event does not say what changed, because each turn reads the whole state. A status write does not
change the signature, so it starts no turn.

kopf reads only: a plain event handler needs neither its finalizer nor its annotations. kopf removes
the finalizer of its settings from objects whose handlers need none, so that is a name that nobody
uses. docs/decisions/0007-one-queue-of-turns.md gives the reasons.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any

import kopf

from vlm_operator import names
from vlm_operator.backoff import Backoff
from vlm_operator.cluster import Manifest
from vlm_operator.kube import Connection
from vlm_operator.reconcile.queue import Cause, Key
from vlm_operator.reconcile.workers import Workers

# Annotations by which users request a turn.
_WAKING = (names.ANNOTATION_RESTARTED_AT, f"{names.GROUP}/reconcile-at")


@dataclasses.dataclass(frozen=True)
class Signature:
    """The metadata of a VLMService whose change starts a turn."""

    uid: str
    generation: int
    deleting: bool
    finalizer: bool
    annotations: tuple[str | None, ...]

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> Signature:
        notes = meta.get("annotations") or {}
        return cls(
            uid=meta["uid"],
            generation=meta["generation"],
            deleting=meta.get("deletionTimestamp") is not None,
            finalizer=names.FINALIZER in (meta.get("finalizers") or ()),
            annotations=tuple(notes.get(key) for key in _WAKING),
        )

    def cause_after(self, before: Signature | None) -> Cause | None:
        """Return what the change from `before` causes; None if there is nothing to do.

        We add the finalizer ourselves, so its appearance causes nothing. A service that is being
        deleted without it is no longer ours.
        """
        if self.deleting:
            return Cause.DELETION if self.finalizer and self != before else None
        if before is not None and self in (before, dataclasses.replace(before, finalizer=True)):
            return None
        return Cause.SPEC


class ServiceEvents:
    """The signatures of all services by events and lists. One event loop writes it."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._signatures: dict[Key, Signature] = {}

    @property
    def signatures(self) -> dict[Key, Signature]:
        return dict(self._signatures)

    def changed(self, meta: Mapping[str, Any]) -> None:
        key, signature = _key(meta), Signature.of(meta)
        cause = signature.cause_after(self._signatures.get(key))
        self._signatures[key] = signature
        if cause is not None:
            self._workers.add(key, cause)

    def deleted(self, key: Key) -> None:
        self._signatures.pop(key, None)
        self._workers.notify(key, Cause.DELETION)

    def missed(self, before: Mapping[Key, Signature], listed: Iterable[Manifest]) -> int:
        """Start turns for changes in a list that no event reported; return their number.

        `before` are the signatures before the list. A service counts only if no event changed its
        signature since: else the event and the list were on their way together.
        """
        listed_now = {_key(item["metadata"]): Signature.of(item["metadata"]) for item in listed}
        num_missed = 0
        for key in listed_now.keys() | before.keys():
            present, now = self._signatures.get(key), listed_now.get(key)
            if present == now or present != before.get(key):
                continue
            num_missed += 1
            if now is None:
                self.deleted(key)
            else:
                self._signatures[key] = now
                self._workers.add(key, Cause.RESYNC)
        return num_missed


@dataclasses.dataclass(frozen=True)
class Kopf:
    events: ServiceEvents
    connect: Callable[[], Awaitable[Connection]]
    watch_seconds: int = 300  # the next watch resumes where this one ended
    silence_seconds: int = 70  # without event or bookmark; the API server sends one each minute


def register(registry: kopf.OperatorRegistry) -> None:
    kopf.on.startup(registry=registry)(configure)
    kopf.on.login(registry=registry)(login)
    place = (names.GROUP, names.VERSION, names.PLURAL_SERVICE)
    kopf.on.event(*place, registry=registry, id="service_event")(service_event)


async def service_event(event: Any, meta: Any, memo: Any, **_: Any) -> None:
    events: ServiceEvents = memo.kopf.events
    if event["type"] == "DELETED":
        events.deleted(_key(meta))
    else:
        events.changed(meta)


async def configure(settings: kopf.OperatorSettings, memo: Any, **_: Any) -> None:
    ours: Kopf = memo.kopf
    settings.persistence.finalizer = f"{names.GROUP}/unused"
    settings.posting.enabled = False  # we write Events ourselves, with counts
    settings.peering.standalone = True  # the Lease elects the leader
    settings.scanning.disabled = True  # no rights on namespaces and CRDs are needed
    settings.networking.error_backoffs = Backoffs()
    settings.networking.connect_timeout = 5
    settings.networking.request_timeout = 30
    settings.watching.server_timeout = ours.watch_seconds
    settings.watching.client_timeout = ours.watch_seconds + 30
    settings.watching.inactivity_timeout = ours.silence_seconds


class Backoffs:
    """Endless exponential backoff with jitter: an API server may be unavailable for long."""

    def __iter__(self) -> Iterator[float]:
        """Yield seconds: about 1, 2, 4, 8, then about 15."""
        return map(Backoff(longest=15.0).seconds, itertools.count(1))


async def login(memo: Any, **_: Any) -> kopf.ConnectionInfo:
    """Give kopf a connection; kopf calls it again if the API server refuses the token."""
    connection: Connection = await memo.kopf.connect()
    return kopf.ConnectionInfo(**dataclasses.asdict(connection))


def _key(meta: Mapping[str, Any]) -> Key:
    return meta["namespace"], meta["name"]
