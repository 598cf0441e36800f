"""What one turn of the loop knows when it reports."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

from vlm_operator.api import VLMService
from vlm_operator.api.status import ConditionType
from vlm_operator.autoscale.decide import Outcome
from vlm_operator.autoscale.outcome import Attribution, Decision
from vlm_operator.autoscale.policy import ServicePolicy
from vlm_operator.names import Role
from vlm_operator.rollout import Step
from vlm_operator.state import Observed, PodState, Revision


class Told(enum.StrEnum):
    """Reasons of conditions that events tell apart from the others of their condition."""

    NAME_CONFLICT = "NameConflict"
    DELETING = "Deleting"
    LIMITED = "Limited"
    DAMPED = "Damped"
    ROLLED_BACK = "RolledBack"
    DEADLINE_EXCEEDED = "DeadlineExceeded"


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a turn could not do what it should.

    Attributes:
        accepted: the manifest is fine and something else is wrong.
        person: nothing changes until somebody acts.
    """

    reason: str
    message: str
    accepted: bool = True
    person: bool = True


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One condition without its times. `status` is None where nobody knows."""

    type: ConditionType
    status: bool | None
    reason: str
    message: str


@dataclasses.dataclass(frozen=True)
class View:
    """One service, as decided and seen in this turn.

    Attributes:
        written: the service as the user wrote it.
        service: the same with every default filled in.
        policy: what the manifest and its node classes say about sizes.
        outcome: what was decided from it, the estimate, the memory.
        desired: replicas of each pool in the end.
        step: what the rollout allows now.
        slo: where TTFT went when a request last ended; empty once none has within the window.
        failure: the first thing that went wrong, None where nothing did.
        url: where clients find the API, inside the cluster.
        epoch: leaseTransitions; part of decision records.
    """

    written: VLMService
    service: VLMService
    observed: Observed
    revisions: Mapping[tuple[Role, str], Revision]
    policy: ServicePolicy
    outcome: Outcome
    desired: Mapping[Role, int]
    step: Step
    slo: tuple[Attribution, ...]
    url: str
    epoch: int
    failure: Failure | None = None

    @property
    def decisions(self) -> Mapping[Role, Decision]:
        """Of each pool."""
        return self.outcome.decisions

    def history(self, role: Role) -> tuple[Decision, ...]:
        """The last decisions that changed a pool, newest last."""
        pace = self.outcome.memory.pace.pools.get(role)
        return () if pace is None else pace.decisions

    def serving(self, role: Role) -> tuple[PodState, ...]:
        """Pods of a role that take requests."""
        return tuple(pod for pod in self.observed.of(role) if pod.ready and not pod.draining)

    def updated(self, role: Role) -> tuple[PodState, ...]:
        """Pods of a role's newest revisions."""
        current = {
            (variant, revision.id)
            for (of, variant), revision in self.revisions.items()
            if of is role
        }
        return tuple(
            pod for pod in self.observed.of(role) if (pod.variant, pod.revision) in current
        )
