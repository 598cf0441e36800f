"""Baselines: other autoscalers as implemented upstream, for comparison with ours.

horizontal.py has the HorizontalPodAutoscaler's own arithmetic, which three of them share.
They ignore node types: each uses the first variant of a pool. A budget limits them like a quota:
pods beyond it stay pending.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from vlm_cli.simulator import horizontal
from vlm_cli.simulator.run import Autoscaler, Choice, Reading
from vlm_operator.autoscale.policy import PoolPolicy, ServicePolicy
from vlm_operator.names import Role
from vlm_operator.state import Sample

_KEDA_SECONDS = 30.0
_LINKED_SECONDS = 5.0
_THRESHOLD_SECONDS = 5.0
_PANIC = 2.0
_PANIC_HOLD_SECONDS = 60.0
_ITEM_SECONDS = 0.4  # of one image or prompt, for the spread of what arrives
_OCCUPANCY_BELOW = 0.1  # decode aims so much lower than the others


class QueueLength:
    """HPA on queue length: one per pool, on requests that wait or on requests under way.

    Args:
        signal: "waiting" or "inflight".
        target: for each encoder and prefill replica.
        decode_target: for each decode replica; with "waiting", requests without room.
    """

    GRID: ClassVar[horizontal.GRID] = {
        "signal": ("inflight",),  # requests that wait tell of nothing before it is too late
        "target": (2.0, 3.0),
        "decode_target": (14.0,),
        "down_seconds": (120.0, 180.0, 300.0),
    }

    def __init__(
        self,
        policy: ServicePolicy,
        *,
        signal: str = "inflight",
        target: float = 2.0,
        decode_target: float = 12.0,
        down_seconds: float = 300.0,
    ) -> None:
        self._read = horizontal.inflight if signal == "inflight" else horizontal.queued
        self._targets = dict.fromkeys(policy.pools, target) | {Role.DECODE: decode_target}
        self._hpas = horizontal.Hpas(policy, down_seconds=down_seconds)

    def decide(self, reading: Reading) -> Mapping[Role, Choice]:
        """See `run.Autoscaler`."""

        def advise(role: Role, current: int) -> int:
            return horizontal.by_total(self._read(reading, role), self._targets[role], current)

        return self._hpas.decide(reading, advise)


class KvOccupancy:
    """KEDA on KV occupancy for decode; encoders and prefill have no such signal and use the queue.

    KEDA asks for metrics every 30 s and hands them to an HPA that it owns.

    Args:
        share: of KV tokens that each decode replica should have in use.
        queue: requests under way for each encoder and prefill replica.
    """

    GRID: ClassVar[horizontal.GRID] = {
        "share": (0.6, 0.7),
        "queue": (1.5,),
        "down_seconds": (120.0, 180.0, 300.0),
    }

    def __init__(
        self,
        policy: ServicePolicy,
        *,
        share: float = 0.7,
        queue: float = 2.0,
        down_seconds: float = 300.0,
    ) -> None:
        self._share, self._queue = share, queue
        self._hpas = horizontal.Hpas(policy, down_seconds=down_seconds, every=_KEDA_SECONDS)

    def decide(self, reading: Reading) -> Mapping[Role, Choice]:
        """See `run.Autoscaler`."""

        def advise(role: Role, current: int) -> int:
            if role is Role.DECODE:
                used = sum(horizontal.kv_shares(reading, role).values())
                return horizontal.by_total(used, self._share, current)
            return horizontal.by_total(horizontal.inflight(reading, role), self._queue, current)

        return self._hpas.decide(reading, advise)


class Linked:
    """One number for three pools, 1:1:1: groups of an encoder, a prefill and a decode replica.

    Every 5 s: requests under way over a target per group, at most one group more or less, and less
    only when the last 300 s asked for less (Foretoken).

    Args:
        signal: "waiting" or "inflight".
        target: requests per group.
    """

    GRID: ClassVar[horizontal.GRID] = {
        "signal": ("waiting",),
        "target": (2.0, 4.0),
        "down_seconds": (120.0, 180.0, 300.0),
    }

    def __init__(
        self,
        policy: ServicePolicy,
        *,
        signal: str = "inflight",
        target: float = 8.0,
        down_seconds: float = 300.0,
    ) -> None:
        self._policy, self._target, self._down_seconds = policy, target, down_seconds
        self._read = horizontal.inflight if signal == "inflight" else horizontal.queued
        self._advised: list[tuple[float, int]] = []
        self._next = 0.0

    def decide(self, reading: Reading) -> Mapping[Role, Choice]:
        """See `run.Autoscaler`."""
        now = reading.view.now
        if now < self._next:
            return {}
        self._next = now + _LINKED_SECONDS
        current = max(horizontal.current_of(reading, role) for role in self._policy.pools)
        total = sum(self._read(reading, role) for role in self._policy.pools)
        advised = max(1, math.ceil(total / self._target))
        if not self._advised:
            self._advised = [(now, current)]
        self._advised = [
            *((at, count) for at, count in self._advised if now - at < self._down_seconds),
            (now, advised),
        ]
        groups = current
        if advised > current:
            groups = current + 1
        elif max(count for _, count in self._advised) < current:
            groups = current - 1
        return {
            role: horizontal.choose(pool, horizontal.bounded(pool, groups))
            for role, pool in self._policy.pools.items()
        }


class Threshold:
    """One up, one down, by thresholds (the Dynamo planner's load loop, easy mode), every 5 s.

    prefill   +1 where any engine's waiting prompts exceed `up`, -1 where one fewer is not busy
    decode    +1 where any engine's KV share exceeds `kv_up`, -1 where one fewer would hold it
    encoder   not known upstream: here by the rule of prefill, with images

    Blocked while a pod of the pool is starting.

    Args:
        up: waiting requests of one engine that make its pool grow.
        down: requests under way per engine, below which a pool shrinks.
        kv_up, kv_down: shares of KV.
        hold_seconds: between two changes of a pool that shrinks.
    """

    GRID: ClassVar[horizontal.GRID] = {
        "up": (2.0,),
        "down": (0.3,),
        "kv_up": (0.5, 0.6, 0.7),
        "kv_down": (0.4,),
        "hold_seconds": (60.0, 180.0),
    }

    def __init__(
        self,
        policy: ServicePolicy,
        *,
        up: float = 2.0,
        down: float = 0.5,
        kv_up: float = 0.85,
        kv_down: float = 0.6,
        hold_seconds: float = 60.0,
    ) -> None:
        self._policy = policy
        self._up, self._down, self._kv_up, self._kv_down = up, down, kv_up, kv_down
        self._hold_seconds = hold_seconds
        self._changed: dict[Role, float] = {}
        self._next = 0.0

    def decide(self, reading: Reading) -> Mapping[Role, Choice]:
        """See `run.Autoscaler`."""
        now = reading.view.now
        if now < self._next:
            return {}
        self._next = now + _THRESHOLD_SECONDS
        found = {}
        for role, pool in self._policy.pools.items():
            view = reading.view.pools[role]
            current = horizontal.current_of(reading, role)
            step = 0
            if not view.of("starting") and not view.of("pending"):
                step = (
                    self._kv(reading, current)
                    if role is Role.DECODE
                    else self._work(reading, role, current)
                )
            found[role] = horizontal.choose(pool, self._paced(pool, current, step, now))
        return found

    def _paced(self, pool: PoolPolicy, current: int, step: int, now: float) -> int:
        held = now - self._changed.get(pool.role, -1e18) < self._hold_seconds
        count = current if step < 0 and held else horizontal.bounded(pool, current + step)
        if count != current:
            self._changed[pool.role] = now
        return count

    def _work(self, reading: Reading, role: Role, current: int) -> int:
        samples = [
            reading.view.samples[pod.uid]
            for pod in reading.view.pools[role].of("ready")
            if pod.uid in reading.view.samples
        ]
        if not samples:
            return 0
        if any(sample.queued_requests >= self._up for sample in samples):
            return 1
        busy = sum(sample.inflight for sample in samples) / max(1, current - 1)
        return -1 if current > 1 and busy < self._down else 0

    def _kv(self, reading: Reading, current: int) -> int:
        shares = horizontal.kv_shares(reading, Role.DECODE)
        if not shares:
            return 0
        if reading.waiting.get(Role.DECODE, 0) or max(shares.values()) > self._kv_up:
            return 1
        fewer = sum(shares.values()) / max(1, current - 1)
        return -1 if current > 1 and fewer < self._kv_down else 0


class PodLatency:
    """Each pod's own p95 over the last minute against a target, with panic (kthena), every 15 s.

    desired = ceil(mean of the pods' p95 / target · pods), tolerance 10 %
    panic   desired ≥ 2 · current: jump there, and do not shrink until 60 s after it ended

    Args:
        target: seconds, of encoder and prefill pods' own p95 (waiting and computing).
        kv_share: of KV tokens; a decode pod's p95 says how long answers are, not how full it is.
    """

    GRID: ClassVar[horizontal.GRID] = {
        "target": (1.0, 1.4),
        "kv_share": (0.5,),
        "down_seconds": (120.0, 180.0, 300.0),
    }

    def __init__(
        self,
        policy: ServicePolicy,
        *,
        target: float = 1.0,
        kv_share: float = 0.7,
        down_seconds: float = 300.0,
    ) -> None:
        self._target, self._kv_share = target, kv_share
        self._hpas = horizontal.Hpas(policy, down_seconds=down_seconds)
        self._panicked: dict[Role, float] = {}

    def decide(self, reading: Reading) -> Mapping[Role, Choice]:
        """See `run.Autoscaler`."""
        now = reading.view.now
        found = {}
        asked = self._hpas.ask(reading, lambda role, count: self._advise(reading, role, count))
        for role, item in asked.items():
            count = item.count
            if item.advised >= _PANIC * item.current:
                self._panicked[role] = now
                count = horizontal.bounded(item.policy, item.advised)
            if now - self._panicked.get(role, -1e18) < _PANIC_HOLD_SECONDS:
                count = max(count, item.current)
            found[role] = horizontal.choose(item.policy, count)
        return found

    def _advise(self, reading: Reading, role: Role, current: int) -> int:
        pool = reading.view.pools[role]
        if role is Role.DECODE:
            shares = horizontal.kv_shares(reading, role)
            return horizontal.by_pods(shares, self._kv_share, pool, current)
        # a pod that had nothing to do has no percentile, and counts as one that is idle
        known = reading.latencies()
        values = {pod.uid: known.get(pod.uid, 0.0) for pod in pool.of("ready")}
        return horizontal.by_pods(values, self._target, pool, current)


class Work:
    """A simple rule on the signals that our own autoscaler reads: work seconds and KV tokens.

    encoder, prefill   (arriving work + z · √(arriving work · item / window) + backlog / drain)
                       / use
    decode             (KV held, promised and waited for + z · √(the same · a request)) / occupancy
    up                 at once, every tick
    down               to the greatest advice of the last `down_seconds`

    Args:
        use: share of their time that encoders and prefill should work; decode's share of KV in use
            is 0.1 lower.
        down_seconds: over which the greatest advice counts when shrinking.
        window: seconds over which arriving work and KV are averaged.
        drain: seconds in which a backlog should be done.
        spread: standard deviations of load that are held ready, z.
    """

    GRID: ClassVar[horizontal.GRID] = {
        "use": (0.58, 0.62, 0.68),
        "down_seconds": (120.0, 180.0),
    }

    def __init__(
        self,
        policy: ServicePolicy,
        *,
        use: float = 0.68,
        down_seconds: float = 180.0,
        window: float = 25.0,
        drain: float = 10.0,
        spread: float = 0.4,
    ) -> None:
        self._policy, self._use, self._down = policy, use, down_seconds
        self._window, self._drain, self._spread = window, drain, spread
        self._seen: dict[str, float] = {}
        self._total = dict.fromkeys(policy.pools, 0.0)
        self._history: dict[Role, deque[tuple[float, float]]] = {
            role: deque() for role in policy.pools
        }
        self._advice: dict[Role, deque[tuple[float, int]]] = {
            role: deque() for role in policy.pools
        }

    def decide(self, reading: Reading) -> Mapping[Role, Choice]:
        """See `run.Autoscaler`."""
        found = {}
        for role, pool in self._policy.pools.items():
            samples = [
                reading.view.samples[pod.uid]
                for pod in reading.view.pools[role].pods
                if pod.uid in reading.view.samples
            ]
            waiting = reading.waiting.get(role, 0)
            now = reading.view.now
            if role is Role.DECODE:
                need = self._kv_need(samples, waiting, now)
            else:
                need = self._work_need(role, samples, now)
            if need is None:
                continue
            current = horizontal.current_of(reading, role)
            count = self._settled(role, current, max(1, math.ceil(need - 1e-9)), now)
            found[role] = horizontal.choose(pool, horizontal.bounded(pool, count))
        return found

    def _work_need(self, role: Role, samples: Sequence[Sample], now: float) -> float | None:
        for item in samples:
            taken = item.started_work_seconds + item.queued_work_seconds
            self._total[role] += taken - self._seen.get(item.pod_uid, 0.0)
            self._seen[item.pod_uid] = taken
        history = self._keep(role, self._total[role], now)
        if len(history) < 2:
            return None
        (first, before), (last, after) = history[0], history[-1]
        load = max(0.0, after - before) / (last - first)
        spread = math.sqrt(load * _ITEM_SECONDS / self._window)
        backlog = sum(item.queued_work_seconds for item in samples) / self._drain
        return (load + self._spread * spread + backlog) / self._use

    def _kv_need(self, samples: Sequence[Sample], waiting: int, now: float) -> float | None:
        known = [item.kv for item in samples if item.kv is not None]
        capacity = max((kv.capacity for kv in known), default=0)
        if not capacity:
            return None
        used = sum(kv.running + kv.reserved for kv in known)
        inflight = sum(item.inflight for item in samples)
        each = used / inflight if inflight else 0.0
        history = self._keep(Role.DECODE, (used + waiting * each) / capacity, now)
        load = sum(value for _, value in history) / len(history)
        spread = math.sqrt(load * each / capacity)
        return (load + self._spread * spread) / (self._use - _OCCUPANCY_BELOW)

    def _keep(self, role: Role, value: float, now: float) -> deque[tuple[float, float]]:
        history = self._history[role]
        history.append((now, value))
        while now - history[0][0] > self._window:
            history.popleft()
        return history

    def _settled(self, role: Role, current: int, advised: int, now: float) -> int:
        """Up at once; down to the greatest advice of a while, the first of which is what stands."""
        advice = self._advice[role]
        if not advice:
            advice.append((now, current))
        while advice and now - advice[0][0] >= self._down:
            advice.popleft()
        advice.append((now, advised))
        return advised if advised >= current else min(current, max(count for _, count in advice))


# name → (how to build it from a policy and its settings, the grid that it is tuned over)
BASELINES: Mapping[str, tuple[Callable[..., Autoscaler], Mapping[str, tuple[Any, ...]]]] = {
    "hpa-queue": (QueueLength, QueueLength.GRID),
    "keda-kv": (KvOccupancy, KvOccupancy.GRID),
    "linked-1-1-1": (Linked, Linked.GRID),
    "threshold": (Threshold, Threshold.GRID),
    "pod-p95": (PodLatency, PodLatency.GRID),
    "work": (Work, Work.GRID),
}


def baseline(name: str, policy: ServicePolicy, settings: Mapping[str, Any]) -> Autoscaler:
    """Build one by name.

    Raises:
        KeyError: there is none of that name.
    """
    return BASELINES[name][0](policy, **settings)
