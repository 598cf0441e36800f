"""One number for three pools, 1:1:1: groups of an encoder, a prefill and a decode replica.

Every 5 s: requests under way over a target per group, at most one group more or less, and less only
when the last 300 s asked for less (Foretoken).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from vlm_cli.simulator.baselines import horizontal
from vlm_cli.simulator.run import Choice, Reading
from vlm_operator.autoscale.policy import ServicePolicy
from vlm_operator.names import Role

_EVALUATION_SECONDS = 5.0


class Linked:
    """See the head of this module.

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
        self._next = now + _EVALUATION_SECONDS
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
