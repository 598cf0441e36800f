"""KEDA on KV occupancy for decode; encoders and prefill have no such signal and get its queue one.

KEDA asks for metrics every 30 s and hands them to an HPA that it owns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from vlm_cli.simulator.baselines import horizontal
from vlm_cli.simulator.run import Choice, Reading
from vlm_operator.autoscale.policy import ServicePolicy
from vlm_operator.names import Role

_POLL_SECONDS = 30.0


class KvOccupancy:
    """See the head of this module.

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
        self._hpas = horizontal.Hpas(policy, down_seconds=down_seconds, every=_POLL_SECONDS)

    def decide(self, reading: Reading) -> Mapping[Role, Choice]:
        """See `run.Autoscaler`."""

        def advise(role: Role, current: int) -> int:
            if role is Role.DECODE:
                used = sum(horizontal.kv_shares(reading, role).values())
                return horizontal.by_total(used, self._share, current)
            return horizontal.by_total(horizontal.inflight(reading, role), self._queue, current)

        return self._hpas.decide(reading, advise)
