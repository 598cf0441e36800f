"""HPA on queue length: one per pool, on requests that wait or on requests under way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from vlm_cli.simulator.baselines import horizontal
from vlm_cli.simulator.run import Choice, Reading
from vlm_operator.autoscale.policy import ServicePolicy
from vlm_operator.names import Role


class QueueLength:
    """See the head of this module.

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
