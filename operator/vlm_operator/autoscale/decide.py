"""One tick of a service's autoscaler: what is needed, then what is granted. Values in, values out.

policy, view ─▶ estimate ─▶ settle ─▶ Outcome: a decision for every pool, and the memory
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from vlm_operator.autoscale.estimating.estimate import Estimate, EstimateMemory, estimate
from vlm_operator.autoscale.outcome import Decision
from vlm_operator.autoscale.policy import ServicePolicy
from vlm_operator.autoscale.settling.paced import PaceMemory
from vlm_operator.autoscale.settling.settle import settle
from vlm_operator.autoscale.view import View
from vlm_operator.names import Role


@dataclasses.dataclass(frozen=True)
class Memory:
    """What one tick leaves to the next; `Memory()` knows nothing, and shrinks nothing for long."""

    estimate: EstimateMemory = dataclasses.field(default_factory=EstimateMemory)
    pace: PaceMemory = dataclasses.field(default_factory=PaceMemory)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one tick decides, what it rests on, and what the next tick needs of it."""

    decisions: Mapping[Role, Decision]
    estimate: Estimate
    memory: Memory


def decide(policy: ServicePolicy, view: View, memory: Memory) -> Outcome:
    """Choose the replicas of all pools of one service.

    Args:
        policy: what the manifest and its node classes say.
        view: pods, their samples, the numbers that stand.
        memory: what the last call returned, or `Memory()`, or one read by `memory.load`.
    """
    found, estimated = estimate(policy, view, memory.estimate)
    decisions, paced = settle(policy, view, found, memory.pace)
    return Outcome(decisions, found, Memory(estimated, paced))
