"""The operator's own decisions on the simulated service: the same function, the same memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from vlm_operator.autoscale.policy import ServicePolicy
from vlm_operator.autoscale.service import Memory, Outcome, decide_service
from vlm_operator.autoscale.view import View
from vlm_operator.names import Role
from vlm_operator.simulate.run import Choice, Reading

Watch = Callable[[View, Memory, Outcome], None]


class Ours:
    """Calls `decide_service`, as `reconcile` does.

    Args:
        watch: told of every decision: what was seen, what was remembered, what came out.
    """

    def __init__(self, policy: ServicePolicy, *, watch: Watch | None = None) -> None:
        self._policy, self._watch = policy, watch
        self._memory = Memory()

    def decide(self, reading: Reading) -> Mapping[Role, Choice]:
        """See `run.Autoscaler`."""
        before = self._memory
        outcome = decide_service(self._policy, reading.view, before)
        self._memory = outcome.memory
        if self._watch is not None:
            self._watch(reading.view, before, outcome)
        return {
            role: Choice(decision.variants, decision.claim, decision)
            for role, decision in outcome.decisions.items()
        }
