"""Two processes and one lease: whoever lost it writes nothing, however often it changes hands."""

from __future__ import annotations

import asyncio
import random

import pytest

from support.fakes import FakeCluster
from vlm_operator.cluster import CONFIG_MAP, LEASE
from vlm_operator.errors import LeaseLostError
from vlm_operator.leader import Fenced, Lease, Timing

TIMING = Timing(duration=15.0, renew_deadline=10.0, retry=0.0005)
HANDOVERS = 20


class Process:
    """An operator that writes as often as it may. It may stand still, with its clock going on."""

    def __init__(self, cluster: Audited, name: str, now: float) -> None:
        self.name = name
        self.now = now
        self.stopped = False
        self.refused = 0
        self.lease = Lease(
            cluster, namespace="ns", name="lock", identity=name, clock=lambda: self.now,
            timing=TIMING,
        )  # fmt: skip
        self._cluster = cluster
        self._writer = Fenced(cluster, self.lease)

    async def write(self) -> bool:
        """Try one write, as this process; tells whether it was let through."""
        self._cluster.writer = self.name
        try:
            await self._writer.apply(
                {
                    "apiVersion": "v1",
                    "kind": "ConfigMap",
                    "metadata": {"name": "one", "namespace": "ns"},
                    "data": {"count": str(len(self._cluster.audit))},
                },
                manager=self.name,
            )
        except LeaseLostError:
            self.refused += 1
            return False
        return True


class Audited(FakeCluster):
    """Notes who wrote the ConfigMap, and who held the lease at that moment."""

    def __init__(self) -> None:
        super().__init__()
        self.writer = ""
        self.audit: list[tuple[str, str]] = []

    async def apply(self, manifest, **options):
        if manifest["kind"] == CONFIG_MAP.kind:
            holder = self.all(LEASE)[0]["spec"]["holderIdentity"]
            self.audit.append((self.writer, holder))
        return await super().apply(manifest, **options)


async def _hand_over(leader: Process, other: Process, draw: random.Random) -> None:
    """The leader stands still, past its lease, and wakes; the other takes over meanwhile."""
    waiting = asyncio.create_task(other.lease.acquire())
    await asyncio.sleep(0.005)  # it has seen the lease as it is
    stands_still = draw.uniform(15.1, 60.0)
    for process in (leader, other):
        process.now += stands_still
    await asyncio.wait_for(waiting, 60)
    assert await other.write()
    # it wakes in the middle of whatever it was about to write
    assert not await leader.write()
    with pytest.raises(LeaseLostError):
        await asyncio.wait_for(leader.lease.renew_loop(), 5)
    assert not await leader.write()


async def test_twenty_hand_overs_and_no_write_by_the_loser():
    draw = random.Random(20)
    cluster = Audited()
    # clocks of two machines have nothing in common
    leader, other = Process(cluster, "one", 5.0), Process(cluster, "two", 90_000.0)
    await leader.lease.acquire()
    for _ in range(HANDOVERS):
        assert await leader.write()
        await _hand_over(leader, other, draw)
        leader, other = other, leader
    assert cluster.all(LEASE)[0]["spec"]["leaseTransitions"] == HANDOVERS
    assert len(cluster.audit) == 2 * HANDOVERS
    assert [(who, held) for who, held in cluster.audit if who != held] == []
    assert leader.refused + other.refused == 2 * HANDOVERS
