"""Decides whether a whole service is at zero: when it falls asleep, and when it wakes. Pure.

awake ─ no request for idleSeconds, every gateway answered ─▶ falling ─ VLMPools at 0 ─▶ asleep
  ▲                                                                                       │
  └── a pod of every pool is ready ── waking ◀── a request waits, or a VLMPool is written ┘

A new service is `waking`, too: the idle time begins when a pod of every pool is ready.

Only gateways know requests. What is unknown counts as a request: a gateway that is silent, one that
ended, and all time before the first tick of this process. A service that was woken before
`idle_seconds` of sleep had passed, needs twice the idle time for the next sleep, at most
`2 ** MAX_SHORT_SLEEPS` times as much. So a slow steady load does not stop and start pods for ever.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Literal

from vlm_operator.api import ScalingMode
from vlm_operator.api.enums import AutoscalingPolicy
from vlm_operator.autoscale.policy import ServicePolicy
from vlm_operator.autoscale.view import View
from vlm_operator.names import MANAGER_AUTOSCALER, Role
from vlm_operator.state import Sample

MAX_SHORT_SLEEPS = 2
SleepState = Literal["awake", "falling", "asleep", "waking"]


@dataclasses.dataclass(frozen=True)
class SleepMemory:
    """What one tick passes to the next. Times are seconds since the epoch.

    Attributes:
        since: start of the state; `asleep` keeps the start of `falling`.
        short_sleeps: sleeps in a row that a request ended within `idle_seconds`, at most
            `MAX_SHORT_SLEEPS`.
        active_at: the last time at which a request may have existed; None before the first tick of
            this process.
        gateways: uids of the gateways at the last tick.
    """

    state: SleepState = "awake"
    since: float = 0.0
    short_sleeps: int = 0
    active_at: float | None = None
    gateways: tuple[str, ...] = ()

    @property
    def lasting(self) -> SleepMemory:
        """The part that the next process needs; it observes activity anew."""
        return dataclasses.replace(self, active_at=None, gateways=())


class Verdict(enum.Enum):
    """Who decides the sizes of the pools in this tick."""

    AWAKE = "awake"  # each pool's own rules
    SLEEP = "sleep"  # every pool has zero replicas
    WAKE = "wake"  # every pool has its minimum, at least one


@dataclasses.dataclass(frozen=True)
class Sleep:
    """The verdict about one service, with its reason, and the memory for the next tick."""

    verdict: Verdict
    message: str = ""
    memory: SleepMemory | None = None


@dataclasses.dataclass(frozen=True)
class _Activity:
    """The requests at the gateways now.

    Attributes:
        at: as `active_at` in SleepMemory.
        heard_at: the same, from what gateways report now.
        waiting: requests that wait for the service to wake.
        running: whether a request is in flight at any gateway or worker.
        unknown: why it is not known that there is no request; "" if it is known.
    """

    at: float
    heard_at: float
    waiting: int
    running: bool
    unknown: str


def decide_sleep(policy: ServicePolicy, view: View, memory: SleepMemory | None) -> Sleep:
    """Decide whether the service sleeps. Without `policy.sleep` it never does."""
    if policy.sleep is None or policy.apply is not AutoscalingPolicy.ACTIVE:
        return Sleep(Verdict.AWAKE)
    before = memory or SleepMemory("waking", view.now)
    first = before.active_at is None
    activity = _activity(view, before)
    before = dataclasses.replace(before, active_at=activity.at, gateways=view.gateways)
    at_zero = _at_zero(view)
    fell = before.state == "falling" or (first and (memory is None or before.state == "awake"))
    if fell and at_zero and _owned(view):
        before = _enter(before, "asleep", before.since if before.state == "falling" else view.now)
    if before.state == "asleep":
        return _asleep(policy, view, before, activity, at_zero=at_zero)
    if before.state == "waking":
        if at_zero:  # the last tick's decision was not carried out
            return Sleep(Verdict.WAKE, "a request woke the service", before)
        if not _all_ready(view):
            return Sleep(Verdict.AWAKE, "", before)
        before = _enter(before, "awake", view.now)
    return _awake(policy, view, before, activity)


def idle_seconds(policy: ServicePolicy, memory: SleepMemory) -> float:
    """Return the seconds without a request after which the service falls asleep."""
    assert policy.sleep is not None
    return float(policy.sleep.idle_seconds * 2**memory.short_sleeps)


def _asleep(
    policy: ServicePolicy, view: View, memory: SleepMemory, activity: _Activity, *, at_zero: bool
) -> Sleep:
    assert policy.sleep is not None
    if not at_zero:
        return Sleep(Verdict.AWAKE, "", _enter(memory, "waking", view.now))
    draining = any(pool.pods for pool in view.pools.values())
    answered = activity.running or activity.heard_at > memory.since  # by pods that drain
    if activity.waiting or (draining and answered):
        slept = max(0.0, view.now - memory.since)
        short = slept < policy.sleep.idle_seconds
        count = min(memory.short_sleeps + 1, MAX_SHORT_SLEEPS) if short else 0
        woken = dataclasses.replace(_enter(memory, "waking", view.now), short_sleeps=count)
        message = f"a request woke the service, which was at zero for {slept:.0f} s"
        if count:
            message += f"; it sleeps again only after {idle_seconds(policy, woken):.0f} idle s"
        return Sleep(Verdict.WAKE, message, woken)
    return Sleep(Verdict.SLEEP, _idle_message(policy, memory), memory)


def _awake(policy: ServicePolicy, view: View, memory: SleepMemory, activity: _Activity) -> Sleep:
    """Fall asleep if nothing forbids it. The idle time begins with the state at the earliest."""
    needed = idle_seconds(policy, memory)
    since = activity.at if memory.state == "falling" else max(activity.at, memory.since)
    idle = not activity.unknown and not activity.waiting and not activity.running
    if idle and view.now - since >= needed and not _held_awake(policy, view):
        start = memory.since if memory.state == "falling" else view.now
        return Sleep(Verdict.SLEEP, _idle_message(policy, memory), _enter(memory, "falling", start))
    if memory.state == "falling":
        memory = _enter(memory, "awake", view.now)
    return Sleep(Verdict.AWAKE, "", memory)


def _held_awake(policy: ServicePolicy, view: View) -> bool:
    """Whether pods are being replaced, or another manager sets the size of a pool."""
    return not _owned(view) or any(
        pool.rolling or policy.pools[role].mode is not ScalingMode.AUTO
        for role, pool in view.pools.items()
    )


def _owned(view: View) -> bool:
    return all(pool.owner in (None, MANAGER_AUTOSCALER) for pool in view.pools.values())


def _idle_message(policy: ServicePolicy, memory: SleepMemory) -> str:
    seconds = idle_seconds(policy, memory)
    return f"no request for {seconds:.0f} s; a request at the gateway wakes the service"


def _enter(memory: SleepMemory, state: SleepState, at: float) -> SleepMemory:
    return memory if memory.state == state else dataclasses.replace(memory, state=state, since=at)


def _at_zero(view: View) -> bool:
    """Whether the VLMPools ask for no pod. One that somebody deleted counts as the others."""
    counts = [pool.replicas for pool in view.pools.values() if pool.replicas is not None]
    return bool(counts) and not any(counts)


def _all_ready(view: View) -> bool:
    return all(pool.of("ready") for pool in view.pools.values() if pool.replicas)


def _activity(view: View, memory: SleepMemory) -> _Activity:
    samples = {uid: view.samples.get(uid) for uid in view.gateways}
    heard = [item for item in samples.values() if item is not None and _tells(item)]
    times = [view.now if memory.active_at is None else memory.active_at]
    told = [view.now - item.idle_seconds for item in heard if item.idle_seconds is not None]
    workers = [item for item in view.samples.values() if item.role is not Role.GATEWAY]
    # a gateway answers some requests without workers: its idle time goes on
    running = any(item.inflight and item.idle_seconds == 0 for item in heard) or any(
        item.inflight or item.queued_requests for item in workers
    )
    if running or set(memory.gateways) - samples.keys():
        times.append(view.now)
    return _Activity(
        at=max(times + told),
        heard_at=max(told, default=0.0),
        waiting=sum(item.waiting_for_wake for item in heard),
        running=running,
        unknown=_unknown(samples),
    )


def _tells(sample: Sample) -> bool:
    return sample.role is Role.GATEWAY and sample.idle_seconds is not None


def _unknown(samples: Mapping[str, Sample | None]) -> str:
    if not samples:
        return "no gateway runs"
    silent = [uid for uid, item in samples.items() if item is None or not _tells(item)]
    return f"{len(silent)} of {len(samples)} gateways do not tell their requests" if silent else ""
