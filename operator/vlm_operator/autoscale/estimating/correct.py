"""How long admitted work took, over how long the pods predicted that it would take. Pure.

ratio   (busy seconds + PRIOR · pods) / (admitted seconds + PRIOR · pods), by role and node type
        both sums forget within FORGET_SECONDS; the ratio stays within LEAST and MOST

A pod that has not measured anything yet predicts 0, and a wrong prediction would be a wrong need:
rates and queues of predicted seconds are multiplied by the ratio. Where no work has ended, nothing
was measured, and the ratio stays. Pods that do not report for how long they were busy do not count.
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
        at: when work was last measured.
        busy: that the work took.
        admitted: that it was predicted to take when it was begun.
        begun: the same of work that was begun since.
        pods: that were ready then.
    """

    at: float
    busy: float = 0.0
    admitted: float = 0.0
    begun: float = 0.0
    pods: int = 1

    @property
    def ratio(self) -> float:
        """What predicted seconds are multiplied by."""
        prior = PRIOR_SECONDS * max(1, self.pods)
        found = (self.busy + prior) / (self.admitted + prior)
        return min(max(found, LEAST), MOST)


def measured(
    pools: Mapping[Role, PoolReading], memory: Mapping[str, Measured], *, now: float
) -> dict[str, Measured]:
    """Add what pods have done and begun since their last answers; keys are "role/variant"."""
    found = dict(memory)
    for role, pool in pools.items():
        kinds = ("encode",) if role is Role.ENCODER else ("prefill", "encode")
        for variant in {pod.variant for pod in pool.pods}:
            key = f"{role}/{variant}"
            own = [pod for pod in pool.pods if pod.variant == variant]
            begun = taken = 0.0
            for pod in own:
                done = [pod.did[kind].seconds for kind in kinds if kind in pod.did]
                if pod.began is not None and done:
                    begun += pod.began
                    taken += sum(done)
            old = found.get(key, Measured(now))
            if taken <= 0:
                found[key] = dataclasses.replace(old, begun=old.begun + begun)
                continue
            fade = math.exp(-max(0.0, now - old.at) / FORGET_SECONDS)
            found[key] = Measured(
                at=now,
                busy=old.busy * fade + taken,
                admitted=old.admitted * fade + old.begun + begun,
                pods=len(own),
            )
    return found


def corrected(
    pools: Mapping[Role, PoolReading], found: Mapping[str, Measured]
) -> dict[Role, PoolReading]:
    """The same readings, whose pods know by what their predictions are multiplied.

    Args:
        pools: the readings of a tick.
        found: what was measured before it: more work at a tick must never look like less.
    """
    ratios = {key: item.ratio for key, item in found.items()}
    return {
        role: dataclasses.replace(
            pool,
            pods=tuple(
                dataclasses.replace(pod, ratio=ratios.get(f"{role}/{pod.variant}", 1.0))
                for pod in pool.pods
            ),
        )
        for role, pool in pools.items()
    }
