"""Ten times what a service can do, in an open loop: who is served, who is refused, and how fast.

One prefill and one decode process with steps of a set length, so that the capacity is known; KV for
a few dozen requests, and a few that wait. The rest is refused at once, with Retry-After.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import time
from collections import Counter
from typing import NamedTuple

from worker.faults.asking import Outcome, Question
from worker.faults.figures import quantile
from worker.faults.harness import Cluster, cluster

STEP_SECONDS = 0.02
NUM_RUNNING = 8
NUM_TOKENS = 16
# so many answers are computed in a second
CAPACITY = NUM_RUNNING / (NUM_TOKENS * STEP_SECONDS)
MAX_WAITING = 16
# of a worker: it holds no more prompts than its KV blocks allow
MAX_QUEUED = 64
CANCEL_SHARE = 0.02
SAMPLE_SECONDS = 0.25
NORMAL_FACTOR = 1.5
GIVE_UP_SECONDS = 60.0


class Word(NamedTuple):
    """The last word on a request, as the gateway logs it."""

    outcome: str
    seconds: float
    reason: str


@dataclasses.dataclass(frozen=True)
class Figures:
    """What came of it.

    `own_account`, `own_reasons` and `own_reject_seconds` are the gateway's, from its log: outcomes,
    why requests were refused, and how long that took from their arrival. The crowd's own seconds
    count what it waits for itself, too.
    """

    sent: int
    accepted: int
    rejected: int
    cancelled: int
    other: list[Outcome]
    own_account: dict[str, int]
    own_reasons: frozenset[str]
    num_without_retry_after: int
    reject_seconds: list[float]
    own_reject_seconds: list[float]
    accepted_seconds: list[float]
    longest_queue: int
    longest_wait_for_room: int
    recovered_seconds: float

    @property
    def line(self) -> dict[str, object]:
        """For people and programs."""
        return {
            "sent": self.sent,
            "accepted": self.accepted,
            "rejected": self.rejected,
            "cancelled": self.cancelled,
            "other": len(self.other),
            "reject_p50_ms": round(1e3 * quantile(self.reject_seconds, 0.5), 1),
            "reject_p99_ms": round(1e3 * quantile(self.reject_seconds, 0.99), 1),
            "own_reject_p50_ms": round(1e3 * quantile(self.own_reject_seconds, 0.5), 1),
            "own_reject_p99_ms": round(1e3 * quantile(self.own_reject_seconds, 0.99), 1),
            "accepted_p95_s": round(quantile(self.accepted_seconds, 0.95), 2),
            "longest_queue": self.longest_queue,
            "longest_wait_for_room": self.longest_wait_for_room,
            "recovered_s": round(self.recovered_seconds, 2),
        }


async def overload(seconds: float, *, factor: float = 10.0, seed: int = 0) -> Figures:
    """Poisson arrivals at so many times the capacity, for so long, and what came of them."""
    flags = (f"--max-requests={NUM_RUNNING}", "--max-batched-tokens=512")
    async with cluster(
        scale=1.0,
        counts={"encoder": 0, "prefill": 1, "decode": 1},
        gateway_flags=(f"--max-waiting={MAX_WAITING}",),
        prefill=flags,
        decode=flags,
    ) as service:
        await service.pod("decode-0").do(step=STEP_SECONDS)
        await asyncio.gather(*(service.ask(question(-n)) for n in range(NUM_RUNNING)))
        normal = sorted([(await service.ask(question(-n - 100))).seconds for n in range(5)])[2]
        log_from = len(service.gateway.log)
        queues: list[tuple[int, int]] = []
        sampling = asyncio.create_task(sample(service, queues))
        got = await crowd(service, seconds, factor * CAPACITY, random.Random(seed))
        recovered = await back_to_normal(service, normal)
        sampling.cancel()
        await asyncio.gather(sampling, return_exceptions=True)
        await service.until_idle(seconds=15)
        own = [
            Word(line["outcome"], line["seconds"], line["reason"])
            for line in service.gateway.log[log_from:]
            if line.get("message") == "request" and line["client_request_id"].startswith("crowd")
        ]
        return figures(got, own, queues, recovered)


def question(number: int) -> Question:
    """A prompt of about 500 tokens, so that KV is full with a few dozen of them."""
    return Question(f"Number {number}: what is this? " * 40, num_tokens=NUM_TOKENS)


async def crowd(
    service: Cluster, seconds: float, rate: float, rng: random.Random
) -> list[Outcome | None]:
    """Everybody comes in their own time; None is a client who left."""
    tasks = []
    begun = time.monotonic()
    due = 0.0
    while due < seconds:
        due += rng.expovariate(rate)
        await asyncio.sleep(max(0.0, begun + due - time.monotonic()))
        leaves_after = rng.random() * 2 if rng.random() < CANCEL_SHARE else None
        tasks.append(asyncio.create_task(client(service, len(tasks), leaves_after)))
    return list(await asyncio.gather(*tasks))


async def client(service: Cluster, number: int, leaves_after: float | None) -> Outcome | None:
    """One request; None where its client left before the last word."""
    asking = asyncio.create_task(
        service.ask(question(number), name=f"crowd-{number}", seconds=GIVE_UP_SECONDS)
    )
    done, _ = await asyncio.wait({asking}, timeout=leaves_after)
    if done:
        return asking.result()
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking
    return None


async def sample(service: Cluster, queues: list[tuple[int, int]]) -> None:
    """How long queues are: the longest of a worker, and of the gateway for KV blocks."""
    while True:
        reports = await service.reports("now")
        workers = [r["waiting"] for name, r in reports.items() if name != "gateway"]
        queues.append((max(workers), reports["gateway"]["waiting"]))
        await asyncio.sleep(SAMPLE_SECONDS)


async def back_to_normal(service: Cluster, normal: float) -> float:
    """Seconds until a request takes no longer than it did before the crowd came."""
    begun = time.monotonic()
    while time.monotonic() - begun < GIVE_UP_SECONDS:
        outcome = await service.ask(question(-1000))
        if outcome.error is None and outcome.seconds < NORMAL_FACTOR * normal:
            break
    return time.monotonic() - begun


def figures(
    got: list[Outcome | None],
    own: list[Word],
    queues: list[tuple[int, int]],
    recovered: float,
) -> Figures:
    """Sort the outcomes; each is counted once."""
    present = [one for one in got if one is not None]
    rejected = [one for one in present if one.status == 429 and not one.defects]
    accepted = [one for one in present if one.error is None and not one.defects]
    return Figures(
        sent=len(got),
        accepted=len(accepted),
        rejected=len(rejected),
        cancelled=len(got) - len(present),
        other=[one for one in present if one not in rejected and one not in accepted],
        own_account=dict(Counter(word.outcome for word in own)),
        own_reasons=frozenset(word.reason for word in own if word.outcome == "rejected"),
        num_without_retry_after=sum(one.retry_after is None for one in rejected),
        reject_seconds=[one.seconds for one in rejected],
        own_reject_seconds=[word.seconds for word in own if word.outcome == "rejected"],
        accepted_seconds=[one.seconds for one in accepted],
        longest_queue=max(longest for longest, _ in queues),
        longest_wait_for_room=max(waiting for _, waiting in queues),
        recovered_seconds=recovered,
    )
