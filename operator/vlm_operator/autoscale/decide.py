"""One tick of a service's autoscaler: estimates each pool's need, then decides its replicas. Pure.

policy, view, memory ─▶ estimate ─▶ decide_replicas ─▶ Outcome: decisions and the next memory
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from vlm_operator.autoscale.allocation.decide_replicas import decide_replicas
from vlm_operator.autoscale.allocation.history import ScalingMemory
from vlm_operator.autoscale.estimating.estimate import Estimate, EstimateMemory, estimate
from vlm_operator.autoscale.outcome import Decision
from vlm_operator.autoscale.policy import ServicePolicy
from vlm_operator.autoscale.view import View
from vlm_operator.names import Role


@dataclasses.dataclass(frozen=True)
class Memory:
    """State that one tick passes to the next.

    After `Memory()`, no pool shrinks until its scale-down window has passed.
    """

    estimate: EstimateMemory = dataclasses.field(default_factory=EstimateMemory)
    pace: ScalingMemory = dataclasses.field(default_factory=ScalingMemory)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The decisions of one tick, the estimate behind them, and the memory for the next tick."""

    decisions: Mapping[Role, Decision]
    estimate: Estimate
    memory: Memory


def decide(policy: ServicePolicy, view: View, memory: Memory) -> Outcome:
    """Choose the replicas of all pools of one service.

    Args:
        policy: settings from the manifest and its node classes.
        view: pods, their samples, and the current replicas.
        memory: the memory that the last call returned, `Memory()`, or the result of `memory.load`.
    """
    found, estimated = estimate(policy, view, memory.estimate)
    decisions, paced = decide_replicas(policy, view, found, memory.pace)
    return Outcome(decisions, found, Memory(estimated, paced))
