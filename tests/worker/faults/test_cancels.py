"""Clients that leave, in every stage and at any moment in it: nothing is left anywhere."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections import Counter
from typing import Any

import pytest
from worker.faults.asking import Question
from worker.faults.figures import note
from worker.faults.harness import ROLES, SLACK, Cluster, owing
from worker.faults.marks import STAGES, drawn

pytestmark = pytest.mark.asyncio(loop_scope="session")

NUM_CANCELS = 1_000
NUM_CANCELS_FULL = 10_000
AT_ONCE = 24
STAGE_SECONDS = 0.04
CLEAN_SECONDS = 5.0
TRIES = 5
# Of the gateway: grpcio gives back no buffer of a call that is cancelled while it waits, 0.2 KiB of
# a stream and 0.9 KiB of any other; tokenizers remembers 10,000 words. The first thousand requests
# of a process widen its heap besides.
GROWTH_KIB = 1.6
HEAP_KIB = 12 << 10
# The gateway, and the two pods of the next role, which fetch.
NUM_CALLERS = {"encoder": 3, "prefill": 3, "decode": 1}
NUM_FETCHERS = {"encoder": 2, "prefill": 2, "decode": 0}
# kv_middle is there only while prefill still runs
CANCELLED_IN = tuple(stage for stage in STAGES if stage != "kv_middle")


async def test_a_thousand_clients_that_leave_leave_nothing(service: Cluster) -> None:
    await leave(service, NUM_CANCELS)


@pytest.mark.full
@pytest.mark.timeout(3600)
async def test_ten_thousand_clients_that_leave_leave_nothing(service: Cluster) -> None:
    await leave(service, NUM_CANCELS_FULL)


async def leave(service: Cluster, num_cancels: int) -> None:
    """Many clients, each of which leaves when its request is in a stage that its id drew."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    crowd = Crowd(service, random.Random(seed))
    before = await connected(service, crowd)
    pods = (*service.pods.values(), service.gateway)
    for pod in pods:
        pod.on_line = crowd.hear
        await pod.do(scatter=CANCELLED_IN, seconds=STAGE_SECONDS)
    try:
        await crowd.run(num_cancels // 2)
        half = await service.reports()
        await crowd.run(num_cancels)
    finally:
        for pod in pods:
            pod.on_line = lambda _: None
            await pod.do(scatter=[], seconds=0.0)
    seconds = await clean(service, before)
    after = await service.reports()
    grown = {name: after[name]["rss_kib"] - half[name]["rss_kib"] for name in after}
    most = max(grown, key=lambda name: grown[name])
    a_cancel = grown[most] / (num_cancels - num_cancels // 2)
    note(f"cancels by stage: {dict(sorted(crowd.left.items()))}")
    note(
        f"{crowd.num_left} cancels, {crowd.num_late} came too late; clean after {seconds:.2f} s "
        f"(promised {CLEAN_SECONDS:g}); {most} grew most, {a_cancel:.2f} KiB a cancel"
    )
    assert grown[most] <= HEAP_KIB + SLACK * GROWTH_KIB * num_cancels / 2
    assert crowd.num_left == num_cancels
    assert set(crowd.left) == set(CANCELLED_IN), "a stage was never left"
    assert min(crowd.left.values()) >= num_cancels / len(CANCELLED_IN) / 2


class Crowd:
    """Clients at once; `left` counts, by stage, those who left while their request was in it."""

    def __init__(self, service: Cluster, rng: random.Random) -> None:
        self._service = service
        self._rng = rng
        self._in_stage: dict[str, asyncio.Future[str]] = {}
        self._names: dict[str, str] = {}
        self.left: Counter[str] = Counter()
        self.num_left = 0
        self.num_late = 0

    def question(self) -> Question:
        number = self._rng.randrange(1 << 23)
        return Question(f"Is this {number}? " * 8, num_tokens=16, colour=number)

    def hear(self, line: dict[str, Any]) -> None:
        """What pods say: whose request came, and in which stage it is now."""
        if "enter" in line:
            self._names[line["enter"]] = line["client"]
        elif "at" in line:
            future = self._in_stage.get(self._names.get(line["request"], ""))
            if future is not None and not future.done():
                future.set_result(line["at"])

    async def run(self, num_cancels: int) -> None:
        """Until so many have left."""
        async with asyncio.TaskGroup() as group:
            for lane in range(AT_ONCE):
                group.create_task(self._clients(lane, num_cancels))

    async def _clients(self, lane: int, num_cancels: int) -> None:
        number = 0
        while self.num_left < num_cancels:
            self.num_left += 1  # taken now, given back where it came too late
            number += 1
            if not await self._client(f"{lane}-{number}"):
                self.num_left -= 1
                self.num_late += 1

    async def _client(self, name: str) -> bool:
        """One client, who leaves at a random point inside the stage; False: it was answered."""
        entered = self._in_stage[name] = asyncio.get_running_loop().create_future()
        asking = asyncio.create_task(self._service.ask(self.question(), name=name))
        try:
            await asyncio.wait({asking, entered}, return_when=asyncio.FIRST_COMPLETED)
            if not entered.done():
                assert not asking.result().defects, asking.result()
                return False
            await asyncio.wait({asking}, timeout=self._rng.random() * STAGE_SECONDS)
            if asking.done():
                return False
            self.left[entered.result()] += 1
            return True
        finally:
            del self._in_stage[name]
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asking


async def connected(service: Cluster, crowd: Crowd) -> dict[str, dict[str, Any]]:
    """What everybody has at rest, with a connection to all whom they will ever talk to.

    On a busy machine an idle one may be lost, and is made again only when it is used.
    """
    for _ in range(TRIES):
        for route in itertools.product(*([f"{role}-0", f"{role}-1"] for role in ROLES)):
            await service.accept(*route)
            outcome = await service.ask(crowd.question())
            assert outcome.error is None
        await service.accept_all()
        await service.until_idle(seconds=SLACK * CLEAN_SECONDS)
        reports = await service.reports()
        if all(
            len(pod.proxy.grpc.connections) == NUM_CALLERS[pod.role]
            and len(pod.proxy.data.connections) >= NUM_FETCHERS[pod.role]
            for pod in service.pods.values()
        ):
            return reports
    raise AssertionError("connections are lost as fast as they are made")


async def clean(service: Cluster, before: dict[str, dict[str, Any]]) -> float:
    """Wait until every process has what it had before, and no more; how long it took."""
    begun = time.monotonic()
    had = {name: counts(service, name, report) for name, report in before.items()}
    while True:
        reports = await service.reports()
        left: dict[str, Any] = owing(reports)
        for name, report in reports.items():
            for what, num in counts(service, name, report).items():
                if num > had[name][what]:
                    left[f"{name} {what}"] = (had[name][what], num)
                    left[f"{name} files"] = sorted(
                        set(report["files"]) - set(before[name]["files"])
                    )
        took = time.monotonic() - begun
        if not left:
            return took
        assert took < SLACK * CLEAN_SECONDS, f"after {took:.1f} s there is still {left}"
        await asyncio.sleep(0.05)


def counts(service: Cluster, name: str, report: dict[str, Any]) -> dict[str, int]:
    """Tasks and descriptors without those of data connections, some of which idle between fetches.

    Of these a producer has a task and a descriptor each, a consumer a descriptor.
    """
    port = service.pods[name].ready["data"] if name in service.pods else None
    doors = {str(pod.proxy.data.port) for pod in service.pods.values()}
    ends = [file.partition(">") for file in report["files"] if file.startswith("tcp ")]
    num_served = sum(ours == f"tcp {port}" and theirs != "0" for ours, _, theirs in ends)
    num_kept = sum(theirs in doors for _, _, theirs in ends)
    return {
        "tasks": report["tasks"] - num_served,
        "fds": report["fds"] - num_served - num_kept,
    }


async def test_every_stage_is_drawn_alike() -> None:
    ids = [f"{random.getrandbits(128):032x}" for _ in range(10_000)]
    counts = Counter(found[0] for i in ids if (found := drawn(CANCELLED_IN, i)))
    assert set(counts) == set(CANCELLED_IN)
    assert max(counts.values()) < 1.3 * min(counts.values())
