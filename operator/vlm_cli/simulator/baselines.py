"""Baselines: other autoscalers as implemented upstream, for comparison with ours.

Three of them use the HorizontalPodAutoscaler's arithmetic in horizontal.py. They ignore node types:
all replicas get the first variant of a pool. They ignore the budget: pods beyond it stay pending.
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
_PANIC_RATIO = 2.0
_PANIC_HOLD_SECONDS = 60.0
_ITEM_SECONDS = 0.4  # work of one image or prompt, for the deviation of the arriving work
_DECODE_MARGIN = 0.1  # decode's target is lower than `use` by this


class QueueLength:
    """HPA on queue length: one per pool, on waiting requests or on requests in flight.

    Args:
        signal: "waiting" or "inflight".
        target: requests per encoder or prefill replica.
        decode_target: requests per decode replica; waiting are those without a KV reservation.
    """

    GRID: ClassVar[horizontal.GRID] = {
        "signal": ("inflight",),  # waiting requests appear only after TTFT has risen
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
        self._metric = horizontal.inflight if signal == "inflight" else horizontal.queued
        self._targets = dict.fromkeys(policy.pools, target) | {Role.DECODE: decode_target}
        self._hpas = horizontal.HPAs(policy, down_seconds=down_seconds)

    def decide(self, reading: Reading) -> Mapping[Role, Choice]:
        """See `run.Autoscaler`."""

        def recommend(role: Role, current: int) -> int:
            return horizontal.by_total(self._metric(reading, role), self._targets[role], current)

        return self._hpas.decide(reading, recommend)


class KvOccupancy:
    """KEDA on KV occupancy for decode, and on requests in flight for encoders and prefill.

    KEDA reads metrics every 30 s, for an HPA that it owns.

    Args:
        share: KV occupancy per decode replica, 0..1.
        queue: requests in flight per encoder or prefill replica.
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
        self._hpas = horizontal.HPAs(policy, down_seconds=down_seconds, every=_KEDA_SECONDS)

    def decide(self, reading: Reading) -> Mapping[Role, Choice]:
        """See `run.Autoscaler`."""

        def recommend(role: Role, current: int) -> int:
            if role is Role.DECODE:
                used = sum(horizontal.kv_occupancies(reading, role).values())
                return horizontal.by_total(used, self._share, current)
            return horizontal.by_total(horizontal.inflight(reading, role), self._queue, current)

        return self._hpas.decide(reading, recommend)


class Linked:
    """One number for three pools, 1:1:1: groups of an encoder, a prefill and a decode replica.

    Every 5 s it adds or removes at most one group, by requests in flight over a target per group.
    It removes one only if all recommendations of the last 300 s are lower (Foretoken).

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
        self._metric = horizontal.inflight if signal == "inflight" else horizontal.queued
        self._recommendations: list[tuple[float, int]] = []
        self._next = 0.0

    def decide(self, reading: Reading) -> Mapping[Role, Choice]:
        """See `run.Autoscaler`."""
        now = reading.view.now
        if now < self._next:
            return {}
        self._next = now + _LINKED_SECONDS
        current = max(horizontal.current_of(reading, role) for role in self._policy.pools)
        total = sum(self._metric(reading, role) for role in self._policy.pools)
        recommended = max(1, math.ceil(total / self._target))
        if not self._recommendations:
            self._recommendations = [(now, current)]
        self._recommendations = [
            *((at, count) for at, count in self._recommendations if now - at < self._down_seconds),
            (now, recommended),
        ]
        groups = current
        if recommended > current:
            groups = current + 1
        elif max(count for _, count in self._recommendations) < current:
            groups = current - 1
        return {
            role: horizontal.choose(pool, horizontal.clamped(pool, groups))
            for role, pool in self._policy.pools.items()
        }


class Threshold:
    """One replica more or less by thresholds every 5 s (the Dynamo planner's load loop, easy mode).

    prefill   +1 if any engine has `up` waiting prompts; -1 if one pod fewer has less than `down`
              requests per engine
    decode    +1 if any engine's KV occupancy exceeds `kv_up`; -1 if it is below `kv_down` with one
              pod fewer
    encoder   by the rule of prefill, with images; upstream has no encoder pools

    A pool with a pending or starting pod does not change.

    Args:
        up: waiting requests of one engine from which its pool grows.
        down: requests in flight per engine below which a pool shrinks.
        kv_up, kv_down: KV occupancies, 0..1.
        hold_seconds: minimum time from a change of a pool to its scale-down.
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
        choices = {}
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
            choices[role] = horizontal.choose(pool, self._limited(pool, current, step, now))
        return choices

    def _limited(self, pool: PoolPolicy, current: int, step: int, now: float) -> int:
        held = now - self._changed.get(pool.role, -1e18) < self._hold_seconds
        count = current if step < 0 and held else horizontal.clamped(pool, current + step)
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
        shares = horizontal.kv_occupancies(reading, Role.DECODE)
        if not shares:
            return 0
        if reading.waiting.get(Role.DECODE, 0) or max(shares.values()) > self._kv_up:
            return 1
        fewer = sum(shares.values()) / max(1, current - 1)
        return -1 if current > 1 and fewer < self._kv_down else 0


class PodLatency:
    """Each pod's p95 latency of the last minute against a target, with panic (kthena), every 15 s.

    desired = ceil(mean of the pods' p95 / target · pods), tolerance 10 %
    panic   if desired ≥ 2 · current: scale to it, and do not scale down within 60 s of it

    Args:
        target: seconds in encoder and prefill pods, waiting and computing.
        kv_share: target KV occupancy of decode pods; their p95 depends on the lengths of answers.
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
        self._hpas = horizontal.HPAs(policy, down_seconds=down_seconds)
        self._panicked: dict[Role, float] = {}

    def decide(self, reading: Reading) -> Mapping[Role, Choice]:
        """See `run.Autoscaler`."""
        now = reading.view.now
        choices = {}
        decisions = self._hpas.evaluate(
            reading, lambda role, count: self._recommend(reading, role, count)
        )
        for role, item in decisions.items():
            count = item.count
            if item.recommended >= _PANIC_RATIO * item.current:
                self._panicked[role] = now
                count = horizontal.clamped(item.policy, item.recommended)
            if now - self._panicked.get(role, -1e18) < _PANIC_HOLD_SECONDS:
                count = max(count, item.current)
            choices[role] = horizontal.choose(item.policy, count)
        return choices

    def _recommend(self, reading: Reading, role: Role, current: int) -> int:
        pool = reading.view.pools[role]
        if role is Role.DECODE:
            shares = horizontal.kv_occupancies(reading, role)
            return horizontal.by_pods(shares, self._kv_share, pool, current)
        # a pod without finished work in the last minute is idle: 0 s
        known = reading.latencies()
        values = {pod.uid: known.get(pod.uid, 0.0) for pod in pool.of("ready")}
        return horizontal.by_pods(values, self._target, pool, current)


class Work:
    """A simple rule on the signals that our own autoscaler reads: work seconds and KV tokens.

    encoder, prefill   (work + spread · √(work · work of an item / window) + backlog / drain) / use
    decode             (KV + spread · √(KV · KV of a request)) / (use - 0.1)
    up                 at once, every tick
    down               to the maximum recommendation of the last `down_seconds`

    `work` arrives per second; `KV` is in use, reserved or waited for, in units of a replica.

    Args:
        use: target utilization of encoders and prefill, 0..1.
        down_seconds: stabilization window of scale-down.
        window: seconds over which arriving work and KV are averaged.
        drain: seconds in which the pool completes its backlog.
        spread: number of standard deviations of load that the pool has capacity for.
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
        self._last_total: dict[str, float] = {}
        self._total = dict.fromkeys(policy.pools, 0.0)
        self._history: dict[Role, deque[tuple[float, float]]] = {
            role: deque() for role in policy.pools
        }
        self._recommendations: dict[Role, deque[tuple[float, int]]] = {
            role: deque() for role in policy.pools
        }

    def decide(self, reading: Reading) -> Mapping[Role, Choice]:
        """See `run.Autoscaler`."""
        choices = {}
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
            count = self._stabilized(role, current, max(1, math.ceil(need - 1e-9)), now)
            choices[role] = horizontal.choose(pool, horizontal.clamped(pool, count))
        return choices

    def _work_need(self, role: Role, samples: Sequence[Sample], now: float) -> float | None:
        for item in samples:
            total = item.started_work_seconds + item.queued_work_seconds
            self._total[role] += total - self._last_total.get(item.pod_uid, 0.0)
            self._last_total[item.pod_uid] = total
        history = self._add_to_window(role, self._total[role], now)
        if len(history) < 2:
            return None
        (first, before), (last, after) = history[0], history[-1]
        load = max(0.0, after - before) / (last - first)
        deviation = math.sqrt(load * _ITEM_SECONDS / self._window)
        backlog = sum(item.queued_work_seconds for item in samples) / self._drain
        return (load + self._spread * deviation + backlog) / self._use

    def _kv_need(self, samples: Sequence[Sample], waiting: int, now: float) -> float | None:
        known = [item.kv for item in samples if item.kv is not None]
        capacity = max((kv.capacity for kv in known), default=0)
        if not capacity:
            return None
        used = sum(kv.running + kv.reserved for kv in known)
        inflight = sum(item.inflight for item in samples)
        tokens_per_request = used / inflight if inflight else 0.0
        history = self._add_to_window(
            Role.DECODE, (used + waiting * tokens_per_request) / capacity, now
        )
        load = sum(value for _, value in history) / len(history)
        deviation = math.sqrt(load * tokens_per_request / capacity)
        return (load + self._spread * deviation) / (self._use - _DECODE_MARGIN)

    def _add_to_window(self, role: Role, value: float, now: float) -> deque[tuple[float, float]]:
        history = self._history[role]
        history.append((now, value))
        while now - history[0][0] > self._window:
            history.popleft()
        return history

    def _stabilized(self, role: Role, current: int, recommended: int, now: float) -> int:
        """Scale up at once, and down to the maximum recommendation; the first is `current`."""
        recommendations = self._recommendations[role]
        if not recommendations:
            recommendations.append((now, current))
        while recommendations and now - recommendations[0][0] >= self._down:
            recommendations.popleft()
        recommendations.append((now, recommended))
        return (
            recommended
            if recommended >= current
            else min(current, max(count for _, count in recommendations))
        )


# name → (constructor from a policy and settings, grid of the settings that are tuned)
BASELINES: Mapping[str, tuple[Callable[..., Autoscaler], Mapping[str, tuple[Any, ...]]]] = {
    "hpa-queue": (QueueLength, QueueLength.GRID),
    "keda-kv": (KvOccupancy, KvOccupancy.GRID),
    "linked-1-1-1": (Linked, Linked.GRID),
    "threshold": (Threshold, Threshold.GRID),
    "pod-p95": (PodLatency, PodLatency.GRID),
    "work": (Work, Work.GRID),
}


def baseline(name: str, policy: ServicePolicy, settings: Mapping[str, Any]) -> Autoscaler:
    """Build a baseline by its name.

    Raises:
        KeyError: no baseline has that name.
    """
    return BASELINES[name][0](policy, **settings)
