"""A simple rule on the signals that our own autoscaler reads: work seconds and KV tokens.

encoder, prefill   (arriving work + z · √(arriving work · item / window) + backlog / drain) / use
decode             (KV held, promised and waited for + z · √(the same · a request)) / occupancy
up                 at once, every tick
down               to the greatest advice of the last `down_seconds`
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import ClassVar

from vlm_cli.simulator.baselines import horizontal
from vlm_cli.simulator.run import Choice, Reading
from vlm_operator.autoscale.policy import ServicePolicy
from vlm_operator.names import Role
from vlm_operator.state import Sample

_ITEM_SECONDS = 0.4  # of one image or prompt, for the spread of what arrives
_OCCUPANCY_BELOW = 0.1  # decode aims so much lower than the others


class Work:
    """See the head of this module.

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
