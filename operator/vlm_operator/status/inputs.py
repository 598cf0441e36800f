"""Inputs of the status from one turn."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Literal

from vlm_operator.api import VLMService
from vlm_operator.api.status import ConditionType
from vlm_operator.autoscale.decide import Outcome
from vlm_operator.autoscale.outcome import Attribution, Decision
from vlm_operator.autoscale.policy import ServicePolicy
from vlm_operator.autoscale.sleep import SleepState
from vlm_operator.names import Role
from vlm_operator.rollout.steps import Step
from vlm_operator.state import Observed, PodState, Revision, Sample
from vlm_operator.state.downloads import DownloadState
from vlm_operator.state.identities import IdentityState
from vlm_operator.status.causes import Problem


class ConditionReason(enum.StrEnum):
    """Reasons of conditions that code compares or uses in several modules."""

    NAME_CONFLICT = "NameConflict"
    DELETING = "Deleting"
    DRAIN_TIMEOUT = "DrainTimeout"
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
    WAKING = "Waking"
    ROLLED_BACK = "RolledBack"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    DOWNLOAD_FAILED = "DownloadFailed"
    WAITS_FOR_MODEL = "WaitsForModel"


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a turn could not apply its plan.

    Attributes:
        message: cause and fix.
        accepted: whether the manifest is valid, so that the cause is elsewhere.
        needs_user_action: whether the failure lasts until a user acts.
    """

    reason: str
    message: str
    accepted: bool = True
    needs_user_action: bool = True


@dataclasses.dataclass(frozen=True)
class ConditionState:
    """One condition without its times. If `status` is None, the condition is Unknown.

    NodesFound is the condition of a VLMNodeClass.
    """

    type: ConditionType | Literal["NodesFound"]
    status: bool | None
    reason: str
    message: str


@dataclasses.dataclass(frozen=True)
class StatusInputs:
    """Plan and observation of one service in this turn.

    Attributes:
        written: the service as the user wrote it.
        service: the service with every default filled in.
        desired: final number of replicas of each pool.
        slo: TTFT and its stages at the last ended request; empty if none ended within the window.
        url: address of the API inside the cluster.
        epoch: the Lease's leaseTransitions; part of decision records.
        stalled_since: when the service last made progress, in seconds since the epoch. The
            deadline counts from there.
        settled: whether the service has reached this generation once.
        newly_contested: messages about children that another writer has changed for long.
        put_back: messages about replica counts that another writer set in Manual pools.
        problems: problems by role, worst first; `examined` sets it.
        pending: whether the plan of a paused service differs from its children.
        identity: the certificates of the pods.
        download: the download of the model; None without `model.cache`.
        held: whether the rollout waits for it.
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
    newly_contested: tuple[str, ...] = ()
    put_back: Mapping[Role, str] = dataclasses.field(default_factory=dict)
    pending: bool = False
    identity: IdentityState = dataclasses.field(default_factory=IdentityState)
    problems: Mapping[Role, tuple[Problem, ...]] = dataclasses.field(default_factory=dict)
    download: DownloadState | None = None
    held: bool = False

    @property
    def decisions(self) -> Mapping[Role, Decision]:
        return self.outcome.decisions

    @property
    def sleep_state(self) -> SleepState | None:
        """Whether the service sleeps; None if it never does."""
        sleep = self.outcome.memory.pace.sleep
        return None if sleep is None else sleep.state

    def history(self, role: Role) -> tuple[Decision, ...]:
        """Return the last decisions that changed a pool, newest last."""
        pace = self.outcome.memory.pace.pools.get(role)
        return () if pace is None else pace.decisions

    def serving(self, role: Role) -> tuple[PodState, ...]:
        return tuple(pod for pod in self.observed.of(role) if pod.ready and not pod.draining)

    def samples(self, role: Role) -> list[Sample]:
        samples = self.observed.samples
        return [samples[pod.uid] for pod in self.observed.of(role) if pod.uid in samples]

    def aimed(self, role: Role) -> tuple[PodState, ...]:
        """Return the pods of the revisions that the rollout goes to."""
        pods = self.observed.of(role)
        return tuple(pod for pod in pods if self.aims_at(role, pod.variant, pod.revision))

    def aims_at(self, role: Role, variant: str, revision: str) -> bool:
        """Whether the rollout goes to a revision; a rollback goes to all that have not failed."""
        if self.step.back:
            failed = {key[1:] for key in self.step.failed if key[0] is role}
            return (variant, revision) not in failed
        return (variant, revision) in self._newest(role)

    def updated(self, role: Role) -> tuple[PodState, ...]:
        newest = self._newest(role)
        return tuple(pod for pod in self.observed.of(role) if (pod.variant, pod.revision) in newest)

    def _newest(self, role: Role) -> set[tuple[str, str]]:
        return {
            (variant, revision.id)
            for (of, variant), revision in self.revisions.items()
            if of is role
        }
