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
from vlm_operator.status.causes import Problem


class Told(enum.StrEnum):
    """Reasons of conditions that events tell apart from the others of their condition."""

    NAME_CONFLICT = "NameConflict"
    DELETING = "Deleting"
    DELETING_NAMESPACE = "NamespaceTerminating"
    SPEC_INVALID = "SpecInvalid"
    CLASS_INVALID = "NodeClassInvalid"
    TEMPLATE_REFUSED = "PodTemplateRefused"
    CHILD_REFUSED = "ChildRefused"
    CHILD_CONTESTED = "ChildContested"
    STARTING = "Starting"
    NO_SPARE = "NoSpareCapacity"
    ROLLING_BACK = "RollingBack"
    LIMITED = "Limited"
    DAMPED = "Damped"
    ROLLED_BACK = "RolledBack"
    DEADLINE_EXCEEDED = "DeadlineExceeded"


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a turn could not do what it should.

    Attributes:
        message: cause and fix.
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
        stalled_since: when the service last got on; the deadline counts from there.
        settled: this generation has served as asked once.
        contested: children that somebody else has kept changing for long.
        put_back: sentences about numbers of Manual pools that somebody else wrote.
        problems: by role, worst first; `examined` fills it.
        pending: the plan differs from what is there; asked of a paused service alone.
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
    stalled_since: float = 0.0
    settled: bool = False
    contested: tuple[str, ...] = ()
    put_back: Mapping[Role, str] = dataclasses.field(default_factory=dict)
    pending: bool = False
    problems: Mapping[Role, tuple[Problem, ...]] = dataclasses.field(default_factory=dict)

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

    def aimed(self, role: Role) -> tuple[PodState, ...]:
        """Pods of the revisions that this rollout goes to."""
        if self.step.back:
            failed = {key[1:] for key in self.step.failed if key[0] is role}
            pods = self.observed.of(role)
            return tuple(pod for pod in pods if (pod.variant, pod.revision) not in failed)
        return self.updated(role)

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
