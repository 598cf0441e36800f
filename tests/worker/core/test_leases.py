"""Every lease has an owner and a deadline, and ends by release, quarantine or sweep."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from vlm_worker.core.leases import LeaseKind, LeaseTable
from vlm_worker.settings.timers import PRODUCTION
from vlm_worker.types import RequestKey

OWNER = RequestKey("r", 0)
ids = st.sampled_from(["a", "b", "c"])


class LeaseMachine(RuleBasedStateMachine):
    """A table beside a dict of (kind, deadline)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable()
        self.now = 0.0
        self.model: dict[str, tuple[LeaseKind, float]] = {}

    @rule(seconds=st.floats(0, 30))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(lease_id=ids, kind=st.sampled_from([LeaseKind.HELD, LeaseKind.RESERVED]))
    def grant(self, lease_id: str, kind: LeaseKind) -> None:
        if lease_id in self.model:
            with pytest.raises(ValueError, match="held already"):
                self.table.grant(lease_id, OWNER, now=self.now, kind=kind)
            return
        lease = self.table.grant(lease_id, OWNER, now=self.now, kind=kind)
        assert lease.deadline == self.now + 10
        self.model[lease_id] = (kind, self.now + 10)

    @rule(lease_ids=st.lists(ids, max_size=3))
    def renew(self, lease_ids: list[str]) -> None:
        gone = self.table.renew(lease_ids, now=self.now)
        for lease_id in lease_ids:
            kind, deadline = self.model.get(lease_id, (None, 0.0))
            dead = kind in (None, LeaseKind.QUARANTINED) or deadline <= self.now
            assert (lease_id in gone) == dead
            if kind is not None and not dead:
                lease = self.table.get(lease_id)
                assert lease is not None
                self.model[lease_id] = (kind, min(self.now + 10, lease.ends))

    @rule(lease_id=ids)
    def quarantine(self, lease_id: str) -> None:
        assert self.table.quarantine(lease_id, now=self.now) == (lease_id in self.model)
        kind, deadline = self.model.get(lease_id, (None, 0.0))
        if kind is LeaseKind.QUARANTINED:
            self.model[lease_id] = (kind, deadline)  # a second quarantine does not extend it
        elif kind is not None:
            self.model[lease_id] = (LeaseKind.QUARANTINED, self.now + 60)

    @rule(lease_id=ids)
    def release(self, lease_id: str) -> None:
        assert (self.table.release(lease_id) is None) == (lease_id not in self.model)
        self.model.pop(lease_id, None)

    @rule()
    def sweep(self) -> None:
        expired = {lease.id for lease in self.table.sweep(now=self.now)}
        assert expired == {i for i, (_, deadline) in self.model.items() if deadline <= self.now}
        for lease_id in expired:
            del self.model[lease_id]

    @invariant()
    def the_table_is_as_the_model(self) -> None:
        leases = [lease for name in "abc" if (lease := self.table.get(name)) is not None]
        assert {lease.id: (lease.kind, lease.deadline) for lease in leases} == self.model
        assert len(self.table) == len(leases)
        assert len(self.table) == sum(self.table.count(kind) for kind in LeaseKind)


LeaseMachine.TestCase.settings = settings(max_examples=100)
TestLeases = LeaseMachine.TestCase


def test_one_sweep_returns_all_that_expired() -> None:
    table = LeaseTable()
    for number in range(5):
        table.grant(str(number), OWNER, now=0.0)
    table.renew(["3"], now=5.0)
    assert [lease.id for lease in table.sweep(now=10.0)] == ["0", "1", "2", "4"]
    assert len(table) == 1


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [(LeaseKind.RESERVED, PRODUCTION.reserved), (LeaseKind.HELD, PRODUCTION.held)],
)
def test_no_renewal_keeps_a_lease_beyond_its_life(kind: LeaseKind, seconds: float) -> None:
    table, now = LeaseTable(), 0.0
    lease = table.grant("a", OWNER, now=now, kind=kind)
    assert lease.ends == seconds
    while not table.renew(["a"], now=now):
        now += 2.0
        assert now <= seconds, "it is renewed for ever"
    (expired,) = table.sweep(now=now)
    assert "the longest time of its kind" in expired.why_expired(now=now)
    assert now == pytest.approx(seconds, abs=2.0)


def test_lives_are_longer_than_all_that_is_done_with_a_lease() -> None:
    timers = PRODUCTION
    assert timers.reserved > timers.encode + timers.reservation
    assert timers.held > timers.encode + timers.prefill + timers.fetch


def test_an_expired_lease_says_why() -> None:
    table = LeaseTable()
    table.grant("never", OWNER, now=0.0)
    table.grant("once", OWNER, now=0.0)
    table.renew(["once"], now=5.0)
    table.grant("read", OWNER, now=0.0)
    table.quarantine("read", now=0.0)
    why = {lease.id: lease.why_expired(now=60.0) for lease in table.sweep(now=60.0)}
    assert why["never"] == "it was not renewed in the 60.0 s since it was granted"
    assert why["once"] == "it was not renewed for 55.0 s, 60.0 s after it was granted"
    assert why["read"] == "its reader did not confirm that it stopped"
