"""One up, one down, by thresholds (the Dynamo planner's load loop, easy mode), every 5 s.

prefill   +1 where any engine's waiting prompts exceed `up`, -1 where one fewer is not busy
decode    +1 where any engine's KV share exceeds `kv_up`, -1 where one fewer would hold it
encoder   not known upstream: here by the rule of prefill, with images

Blocked while a pod of the pool is starting.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from vlm_cli.simulator.baselines import horizontal
from vlm_cli.simulator.run import Choice, Reading
from vlm_operator.autoscale.policy import PoolPolicy, ServicePolicy
from vlm_operator.names import Role

_LOOP_SECONDS = 5.0


class Threshold:
    """See the head of this module.

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
        self._next = now + _LOOP_SECONDS
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
