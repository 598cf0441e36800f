"""Which events of a VLMService start a turn, which lists show a missed one, and kopf's settings."""

from __future__ import annotations

import dataclasses
from typing import Any

import kopf
import pytest

from support.fakes import Clock
from vlm_operator.kopf_events import (
    Backoffs,
    Kopf,
    ServiceEvents,
    Signature,
    configure,
    login,
    register,
    service_event,
)
from vlm_operator.kube import Connection
from vlm_operator.reconcile.queue import Cause, Key
from vlm_operator.reconcile.workers import Workers

KEY = ("ns", "demo")
META = {"namespace": "ns", "name": "demo", "uid": "u", "generation": 1}
OURS = {**META, "finalizers": ["triptych.dev/drain"]}
DELETED = {**OURS, "deletionTimestamp": "2026-01-01T00:00:00Z"}


class Noted(Workers):
    """Workers that note causes and take no turns."""

    def __init__(self) -> None:
        super().__init__(lambda *_: None, clock=Clock())  # type: ignore[arg-type, return-value]
        self.causes: list[tuple[Key, Cause]] = []

    def add(self, key: Key, cause: Cause, *, after: float = 0.0) -> None:
        self.causes.append((key, cause))
        super().add(key, cause, after=after)


@dataclasses.dataclass
class Seen:
    workers: Noted = dataclasses.field(default_factory=Noted)

    def __post_init__(self) -> None:
        self.events = ServiceEvents(self.workers)

    async def tell(self, kind: str | None, meta: dict[str, Any]) -> list[Cause]:
        """Be kopf with an event; returns what it causes."""
        before = len(self.workers.causes)
        memo = kopf.Memo()
        memo.kopf = Kopf(self.events, _connect)
        await service_event(event={"type": kind, "object": {}}, meta=meta, memo=memo)
        return [cause for _, cause in self.workers.causes[before:]]


async def _connect() -> Connection:
    return Connection("https://server", None, False, "secret", None, None)


WAKING = {
    "another spec": {"generation": 2},
    "another object of the name": {"uid": "other"},
    "the loss of our finalizer": {"finalizers": ["a/b"]},
    "a restart that was asked for": {"annotations": {"triptych.dev/restarted-at": "now"}},
    "a turn that was asked for": {"annotations": {"triptych.dev/reconcile-at": "now"}},
}


@pytest.mark.parametrize("change", WAKING.values(), ids=WAKING)
async def test_a_change_that_a_turn_reads_starts_one(change: dict):
    seen = Seen()
    assert await seen.tell(None, OURS) == [Cause.SPEC]
    assert await seen.tell("MODIFIED", {**OURS, **change}) == [Cause.SPEC]
    assert await seen.tell("MODIFIED", {**OURS, **change}) == []


QUIET = {
    "a status write": {"resourceVersion": "2", "managedFields": [{"manager": "triptych-status"}]},
    "a label": {"labels": {"team": "vision"}},
    "an annotation of another tool": {"annotations": {"note": "1"}},
    "our own finalizer": {"finalizers": ["triptych.dev/drain"]},
}


@pytest.mark.parametrize("change", QUIET.values(), ids=QUIET)
async def test_our_own_writes_and_the_notes_of_others_start_no_turn(change: dict):
    seen = Seen()
    await seen.tell("ADDED", META)
    assert await seen.tell("MODIFIED", {**META, **change}) == []


async def test_a_deletion_starts_a_turn_and_so_does_one_that_began_before_this_process():
    seen = Seen()
    await seen.tell("ADDED", OURS)
    assert await seen.tell("MODIFIED", DELETED) == [Cause.DELETION]
    assert await Seen().tell(None, DELETED) == [Cause.DELETION]


async def test_a_deleted_service_without_our_finalizer_is_not_ours():
    seen = Seen()
    assert await seen.tell(None, {**DELETED, "finalizers": ["a/b"]}) == []
    await seen.tell("DELETED", DELETED)
    assert seen.events.signatures == {}


async def test_the_end_of_a_service_with_a_loop_starts_its_last_turn():
    seen = Seen()
    await seen.tell("ADDED", OURS)
    assert await seen.tell("DELETED", OURS) == [Cause.DELETION]
    assert await Seen().tell("DELETED", OURS) == []


def listed(*metas: dict) -> list[dict]:
    return [{"metadata": meta} for meta in metas]


async def test_what_events_reported_is_not_missed():
    seen = Seen()
    await seen.tell("ADDED", OURS)
    before = seen.events.signatures
    status_written = {**OURS, "resourceVersion": "7"}
    assert seen.events.missed(before, listed(status_written)) == 0


@pytest.mark.parametrize(
    "found", [[], [{**OURS, "generation": 2}], [OURS, {**OURS, "name": "other"}]],
    ids=["a deletion", "a change", "a creation"],
)  # fmt: skip
async def test_what_a_list_shows_and_no_event_reported_starts_a_turn_once(found: list):
    seen = Seen()
    await seen.tell("ADDED", OURS)
    before = seen.events.signatures
    assert seen.events.missed(before, listed(*found)) == 1
    assert len(seen.workers.causes) == 2
    assert seen.events.missed(seen.events.signatures, listed(*found)) == 0


async def test_an_event_that_was_only_later_than_the_list_is_not_missed():
    seen = Seen()
    await seen.tell("ADDED", OURS)
    before = seen.events.signatures
    await seen.tell("MODIFIED", {**OURS, "generation": 3})
    assert seen.events.missed(before, listed({**OURS, "generation": 2})) == 0
    before = seen.events.signatures
    await seen.tell("DELETED", OURS)
    assert seen.events.missed(before, listed(OURS)) == 0


def test_an_object_that_users_restored_with_our_finalizer_gets_a_turn():
    assert Signature.of(OURS).cause_after(None) is Cause.SPEC


def test_kopf_has_one_handler_of_events_and_none_for_which_it_would_write():
    registry = kopf.OperatorRegistry()
    register(registry)
    assert len(registry._watching.get_all_handlers()) == 1
    assert not registry._spawning.get_all_handlers()
    assert not registry._changing.get_all_handlers()


async def test_kopf_is_set_up_as_the_design_asks():
    settings, memo = kopf.OperatorSettings(), kopf.Memo()
    memo.kopf = Kopf(Seen().events, _connect)
    await configure(settings=settings, memo=memo)
    assert settings.persistence.finalizer != "triptych.dev/drain", "kopf would remove it"
    assert settings.posting.enabled is False
    assert settings.scanning.disabled is True
    assert settings.peering.standalone is True
    pauses = [pause for pause, _ in zip(Backoffs(), range(50), strict=False)]
    assert len(pauses) == 50
    assert max(pauses) < 20


async def test_kopf_is_given_our_credentials():
    memo = kopf.Memo()
    memo.kopf = Kopf(Seen().events, _connect)
    found = await login(memo=memo)
    assert (found.server, found.token, found.insecure) == ("https://server", "secret", False)
