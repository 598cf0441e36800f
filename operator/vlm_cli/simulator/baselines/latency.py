"""Each pod's own p95 over the last minute against a target, with panic (kthena), every 15 s.

desired = ceil(mean of the pods' p95 / target · pods), tolerance 10 %
panic   desired ≥ 2 · current: jump there, and do not shrink until 60 s after it ended
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from vlm_cli.simulator.baselines import horizontal
from vlm_cli.simulator.run import Choice, Reading
from vlm_operator.autoscale.policy import ServicePolicy
from vlm_operator.names import Role

_PANIC = 2.0
_PANIC_HOLD_SECONDS = 60.0


class PodLatency:
    """See the head of this module.

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
