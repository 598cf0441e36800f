"""The operator's own decisions on the simulated service: the same function, the same memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from vlm_operator.autoscale.decide import Memory, Outcome, decide
from vlm_operator.autoscale.policy import ServicePolicy
from vlm_operator.autoscale.view import View
from vlm_operator.names import Role
from vlm_operator.simulate.run import Choice, Reading

Watch = Callable[[View, Memory, Outcome], None]

# what is tuned of ours, as the baselines are: fields of a VLMService, the same for each pool
GRID: Mapping[str, tuple[Any, ...]] = {
    "utilization": (0.7, 0.75),
    "kv_occupancy": (0.6,),
    "down_seconds": (180.0, 240.0, 300.0),
}


def adjusted(policy: ServicePolicy, settings: Mapping[str, Any]) -> ServicePolicy:
    """The same policy with other fields of every pool (`GRID`)."""
    pools = {role: dataclasses.replace(pool, **settings) for role, pool in policy.pools.items()}
    return dataclasses.replace(policy, pools=pools)


class Ours:
    """Calls `decide`, as `reconcile` does.

    Args:
        watch: told of every decision: what was seen, what was remembered, what came out.
    """

    def __init__(self, policy: ServicePolicy, *, watch: Watch | None = None) -> None:
        self._policy, self._watch = policy, watch
        self._memory = Memory()

    def decide(self, reading: Reading) -> Mapping[Role, Choice]:
        """See `run.Autoscaler`."""
        before = self._memory
        outcome = decide(self._policy, reading.view, before)
        self._memory = outcome.memory
        if self._watch is not None:
            self._watch(reading.view, before, outcome)
        return {
            role: Choice(decision.variants, decision.claim, decision)
            for role, decision in outcome.decisions.items()
        }
