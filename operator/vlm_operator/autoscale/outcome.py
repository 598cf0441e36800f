"""What estimating and deciding return: values that explain themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from vlm_operator.names import Role


@dataclasses.dataclass(frozen=True)
class Candidate:
    """What one signal asked for, in replicas of the pool's present mix."""

    signal: str
    replicas: int


@dataclasses.dataclass(frozen=True)
class Attribution:
    """Where one modality's TTFT went, over the window.

    Attributes:
        count: requests that got their first token within it.
        missed: of these, beyond the target.
        p95_seconds: by interpolation inside a bucket; a modality without any is not told of.
        lately_seconds: the same of the last minute alone, None where too few came.
        target_seconds: None without a target.
        shares: of each stage in the TTFT of requests that missed (or of the slowest tenth), adding
            up to 1.
        service_seconds: what the stages that no replica can shorten take at least, by stage.
        attainable: False where these alone exceed the target.
    """

    modality: str
    count: int
    missed: int
    p95_seconds: float
    target_seconds: float | None
    shares: Mapping[str, float]
    service_seconds: Mapping[str, float]
    attainable: bool = True
    lately_seconds: float | None = None

    def exceeds(self, share: float = 1.0) -> bool:
        """Whether that share of the target is exceeded now, not only earlier in the window."""
        seconds = self.p95_seconds if self.lately_seconds is None else self.lately_seconds
        return self.target_seconds is not None and seconds > share * self.target_seconds

    @property
    def overrun_seconds(self) -> float:
        """By how much the 95th percentile exceeds its target; 0 where that is unknown."""
        if self.target_seconds is None or not self.p95_seconds > self.target_seconds:
            return 0.0
        return self.p95_seconds - self.target_seconds

    @property
    def dominant_stage(self) -> str | None:
        """The stage with the largest share, None where none is known."""
        return max(self.shares, key=lambda name: self.shares[name], default=None)

    @property
    def blocking_stage(self) -> str | None:
        """Of the stages that no replica can shorten, the longest."""
        return max(self.service_seconds, key=lambda name: self.service_seconds[name], default=None)

    @property
    def lacking_seconds(self) -> float:
        """By how much these stages alone exceed the target; 0 where they do not."""
        if self.target_seconds is None:
            return 0.0
        return max(0.0, sum(self.service_seconds.values()) - self.target_seconds)


@dataclasses.dataclass(frozen=True)
class Need:
    """What one pool needs, before bounds, budget and pace.

    Attributes:
        units: capacity needed, in replicas of speed 1.
        least_units: capacity that suffices under the stricter rule for shrinking.
        candidates: what each signal asked for.
        guilty: its own stages or its own use justify growth.
        known: False where its pods do not say enough: the pool is held.
        idle: nothing came within the window, and the reports are fresh; of a pool that may go to
            zero, nothing came since the last tick, and the pool is not missed at zero.
        urgent: the work that waits cannot be done within the target: panic may set in.
        message: one sentence.
        credible: service times are known well enough; where they are not, the pool grows and
            shrinks by one replica at a time.
        warm_units: of `units`, those held for growth within a start-up.
    """

    role: Role
    units: float
    least_units: float
    candidates: tuple[Candidate, ...]
    guilty: bool
    known: bool
    idle: bool
    urgent: bool
    message: str
    credible: bool = True
    warm_units: float = 0.0


@dataclasses.dataclass(frozen=True)
class Decision:
    """A pool's number, and everything it rests on. Named as in `status.pools.*.lastDecision`.

    Attributes:
        before: replicas before it.
        to: replicas after it, for the pool's Deployments.
        claim: what `VLMPool.spec.replicas` should say; None leaves it to its owner.
        variants: `to` over the node types.
        reason: one CamelCase word.
        limited_by: the bound that held it back, None where none did.
        recommendation: what it would be without Advisory mode, rollouts and holds.
        shares: of each stage in missed TTFT, 0..1.
        cost_per_hour: of the pool after it, None where nobody said.
        conflict: two managers write the same number; it is held.
        held: metrics are missing or doubtful.
        flapping: its window is longer for a while, because it went up and down too often.
        capacity: which node types gave no node, and until when they are not tried; "" where all is
            well.
        warm_cost_per_hour: of the capacity that is held for growth within a start-up, None where
            none is, or nobody said.
    """

    time: float
    before: int
    to: int
    claim: int | None
    reason: str
    message: str
    variants: Mapping[str, int] = dataclasses.field(default_factory=dict)
    limited_by: str | None = None
    candidates: tuple[Candidate, ...] = ()
    recommendation: int | None = None
    shares: Mapping[str, float] = dataclasses.field(default_factory=dict)
    cost_per_hour: float | None = None
    conflict: bool = False
    held: bool = False
    flapping: bool = False
    capacity: str = ""
    warm_cost_per_hour: float | None = None
