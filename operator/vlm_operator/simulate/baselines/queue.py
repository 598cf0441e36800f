"""HPA on queue length: one per pool, on requests that wait or on requests under way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from vlm_operator.autoscale.policy import ServicePolicy
from vlm_operator.names import Role
from vlm_operator.simulate.baselines import horizontal
from vlm_operator.simulate.run import Choice, Reading


class QueueLength:
    """See the head of this module.

    Args:
        signal: "waiting" or "inflight".
        target: for each encoder and prefill replica.
        decode_target: for each decode replica; with "waiting", requests without room.
    """

    GRID: ClassVar[horizontal.GRID] = {
        "signal": ("waiting", "inflight"),
        "target": (1.0, 1.5, 2.0),
        "decode_target": (8.0, 14.0),
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
        self._policy = policy
        self._read = horizontal.inflight if signal == "inflight" else horizontal.queued
        self._targets = dict.fromkeys(policy.pools, target) | {Role.DECODE: decode_target}
        self._hpas = {
            role: horizontal.Horizontal(pool, down_seconds) for role, pool in policy.pools.items()
        }
        self._next = 0.0

    def decide(self, reading: Reading) -> Mapping[Role, Choice]:
        """See `run.Autoscaler`."""
        now = reading.view.now
        if now < self._next:
            return {}
        self._next = now + horizontal.SYNC_SECONDS
        found = {}
        for role, hpa in self._hpas.items():
            current = horizontal.current_of(reading, role)
            total = self._read(reading, role)
            advised = horizontal.by_total(total, self._targets[role], current)
            found[role] = horizontal.choose(hpa.policy, hpa.settle(now, current, advised))
        return found
