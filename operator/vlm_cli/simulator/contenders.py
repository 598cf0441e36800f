"""The autoscalers that `vlm simulate` can run, by name: the operator's and the baselines."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from vlm_cli.simulator.baselines import baseline
from vlm_cli.simulator.run import Autoscaler, Choice, Reading
from vlm_operator.autoscale.decide import Memory, Outcome, decide
from vlm_operator.autoscale.policy import ServicePolicy
from vlm_operator.autoscale.view import View
from vlm_operator.names import Role

OURS = "triptych"
Settings = Mapping[str, Any]
Watch = Callable[[View, Memory, Outcome], None]

# Grid of the tuned settings of the operator's autoscaler: fields of every pool's policy.
GRID: Mapping[str, tuple[Any, ...]] = {
    "utilization": (0.7, 0.75, 0.8),
    "kv_occupancy": (0.54, 0.6),
    "down_seconds": (180.0,),
}


def adjusted(policy: ServicePolicy, settings: Mapping[str, Any]) -> ServicePolicy:
    """Return the policy with `settings` (fields in `GRID`) in every pool."""
    pools = {role: dataclasses.replace(pool, **settings) for role, pool in policy.pools.items()}
    return dataclasses.replace(policy, pools=pools)


class TriptychAutoscaler:
    """Calls the operator's `decide`, with the memory of the previous call, as `reconcile` does.

    Args:
        watch: called after every decision with the view, the memory before it, and the outcome.
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
            role: Choice(decision.variants, decision.claim)
            for role, decision in outcome.decisions.items()
        }


def contender(name: str, policy: ServicePolicy, settings: Settings) -> Autoscaler:
    """Build the autoscaler `name`.

    Raises:
        KeyError: no autoscaler has that name.
    """
    return TriptychAutoscaler(policy) if name == OURS else baseline(name, policy, settings)


def read_tuned(text: str) -> dict[str, dict[str, Any]]:
    """Return settings by autoscaler from the output of `bench/simulate.py --tune`."""
    return {name: item["settings"] for name, item in json.loads(text)["contenders"].items()}
