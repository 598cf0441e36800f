"""How long admitted work took, over how long the pods predicted that it would take. Pure.

ratio   (busy seconds + PRIOR) / (admitted seconds + PRIOR), by role and node type
        both sums forget within FORGET_SECONDS; the ratio stays within LEAST and MOST

A pod that has not measured anything yet predicts 0, and a wrong prediction would be a wrong need:
rates and queues of predicted seconds are multiplied by the ratio. Pods that do not report for how
long they were busy do not count.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from vlm_operator.autoscale.estimating.readings import PoolReading
from vlm_operator.names import Role

FORGET_SECONDS = 300.0
PRIOR_SECONDS = 20.0
LEAST, MOST = 0.5, 3.0


@dataclasses.dataclass(frozen=True)
class Measured:
    """Seconds of work of one role and node type, older ones counted less.

    Attributes:
        at: of the last tick.
        busy: that the work took.
        admitted: that it was predicted to take when it was begun.
    """

    at: float
    busy: float = 0.0
    admitted: float = 0.0

    @property
    def ratio(self) -> float:
        """What predicted seconds are multiplied by."""
        found = (self.busy + PRIOR_SECONDS) / (self.admitted + PRIOR_SECONDS)
        return min(max(found, LEAST), MOST)


def measured(
    pools: Mapping[Role, PoolReading], memory: Mapping[str, Measured], *, now: float
) -> dict[str, Measured]:
    """Add what pods have done and begun since their last answers; keys are "role/variant"."""
    found = {}
    for role, pool in pools.items():
        kinds = ("encode",) if role is Role.ENCODER else ("prefill", "encode")
        for variant in {pod.variant for pod in pool.pods}:
            key = f"{role}/{variant}"
            old = memory.get(key, Measured(now))
            fade = math.exp(-max(0.0, now - old.at) / FORGET_SECONDS)
            busy, admitted = old.busy * fade, old.admitted * fade
            for pod in pool.pods:
                done = [pod.did[kind].seconds for kind in kinds if kind in pod.did]
                if pod.variant == variant and pod.began is not None and done:
                    admitted += pod.began
                    busy += sum(done)
            found[key] = Measured(now, busy, admitted)
    return found


def corrected(
    pools: Mapping[Role, PoolReading], found: Mapping[str, Measured]
) -> dict[Role, PoolReading]:
    """The same readings, whose pods know by what their predictions are multiplied."""
    return {
        role: dataclasses.replace(
            pool,
            pods=tuple(
                dataclasses.replace(pod, ratio=found[f"{role}/{pod.variant}"].ratio)
                for pod in pool.pods
            ),
        )
        for role, pool in pools.items()
    }
