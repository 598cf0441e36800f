"""Ten times the capacity: bounded queues, quick refusals, and every request accounted for.

`bench/overload.py` has the 20 s of the promise and its figures.
"""

from __future__ import annotations

import json

import pytest
from worker.faults.figures import note
from worker.faults.harness import SLACK
from worker.faults.overload import CAPACITY, MAX_QUEUED, MAX_WAITING, overload

pytestmark = pytest.mark.asyncio(loop_scope="session")

SECONDS = 4.0
RECOVERED_SECONDS = 10.0


async def test_an_overload_is_refused_at_once_and_accounted_for_exactly() -> None:
    got = await overload(SECONDS)
    note(f"overload 10x for {SECONDS:g} s: {json.dumps(got.line)}")
    assert got.sent > 5 * CAPACITY * SECONDS, "the crowd was no overload"
    assert got.other == []
    assert got.accepted + got.rejected + got.cancelled == got.sent
    assert got.rejected > got.sent / 2
    assert got.accepted > 0
    assert got.num_without_retry_after == 0
    # The gateway's own account agrees. A client that left after the last word counts as served
    # there; one that left before its request arrived is unknown there.
    assert got.sent - got.cancelled <= sum(got.own_account.values()) <= got.sent
    assert got.own_account["rejected"] >= got.rejected
    assert got.longest_queue <= MAX_QUEUED
    assert got.longest_wait_for_room <= MAX_WAITING
    # At once: at the door, with every place taken, before its body is read or a worker is asked.
    # How many milliseconds that takes is measured, not tested.
    full = f"{MAX_WAITING} requests wait for a worker already, as many as may."
    assert got.own_reasons == {full}
    assert got.recovered_seconds <= SLACK * RECOVERED_SECONDS
