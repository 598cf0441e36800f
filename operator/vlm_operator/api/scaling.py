"""The replicas of a pool: their owner, bounds, pace and targets."""

from __future__ import annotations

from typing import ClassVar

from vlm_operator.api.base import Model, Rule, field
from vlm_operator.api.enums import ScalingMode, WhileAtZero


class ScaleToZero(Model):
    """The condition for scaling a pool to zero, and the handling of images at zero."""

    idle_seconds: int = field(
        600,
        "Seconds without images after which the pool goes to zero.",
        example=900,
        ge=1,
        le=86400,
    )
    while_at_zero: WhileAtZero = field(
        WhileAtZero.INLINE_AT_PREFILL,
        "Images meanwhile are encoded by the next role, queued or refused.",
        example="Queue",
    )


class ScaleUp(Model):
    """The maximum pace of growth."""

    stabilization_window_seconds: int = field(
        0, "Seconds for which the need must last.", example=15, ge=0, le=3600
    )
    max_pods_per_minute: int = field(
        100, "Maximum number of pods added per minute.", example=8, ge=1, le=1000
    )


class ScaleDown(Model):
    """The maximum pace of shrinking."""

    stabilization_window_seconds: int = field(
        180, "Seconds for which the need must stay lower.", example=600, ge=0, le=3600
    )
    max_pods_per_minute: int = field(
        4, "Maximum number of pods drained per minute.", example=2, ge=1, le=1000
    )


class Behavior(Model):
    """The maximum pace of changes."""

    scale_up: ScaleUp = field(ScaleUp(), "How fast the pool may grow.")
    scale_down: ScaleDown = field(ScaleDown(), "How fast the pool may shrink.")


class Targets(Model):
    """The target load of one replica."""

    utilization_percent: int = field(
        75, "Busy time of an encoder or prefill pod, in percent.", example=60, ge=10, le=95
    )
    kv_occupancy_percent: int = field(60, "KV blocks in use, in percent.", example=70, ge=10, le=95)


class Scaling(Model):
    """The number of replicas and its owner. A change restarts no pod."""

    mode: ScalingMode = field(
        ...,
        "Owner of the number: Auto (the autoscaler), External (HPA, KEDA or kubectl scale, on the "
        "VLMPool), Manual (this manifest).",
        example="Manual",
    )
    replicas: int | None = field(
        None,
        "Number of replicas in mode Manual; not allowed in other modes.",
        example=2,
        ge=1,
        le=1000,
    )
    min_replicas: int | None = field(
        None,
        "Minimum number of replicas in modes Auto and External. Only an encoder may have 0.",
        example=1,
        ge=0,
        le=1000,
    )
    max_replicas: int | None = field(
        None, "Maximum number of replicas in modes Auto and External.", example=8, ge=1, le=1000
    )
    scale_to_zero: ScaleToZero | None = field(
        None,
        "How the pool goes to zero. Required if minReplicas is 0, else not allowed.",
        unset="never",
    )
    behavior: Behavior | None = field(None, "How fast the pool may change in mode Auto.")
    targets: Targets | None = field(None, "Target load of one replica in mode Auto.")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="manual-replicas",
            holds="self.mode != 'Manual' || has(self.replicas)",
            message="is required with mode Manual",
            at=".replicas",
            reason="FieldValueRequired",
        ),
        Rule(
            name="manual-no-bounds",
            holds="self.mode != 'Manual' || !(has(self.minReplicas) || has(self.maxReplicas))",
            message="mode Manual takes replicas, not minReplicas and maxReplicas: "
            "remove them, or choose Auto or External",
            at=".mode",
        ),
        Rule(
            name="owned-replicas",
            holds="self.mode == 'Manual' || !has(self.replicas)",
            message="belongs to mode Manual alone: remove it and set minReplicas and maxReplicas",
            says="'belongs to mode Manual alone: with mode ' + self.mode + "
            "' remove it and set minReplicas and maxReplicas'",
            at=".replicas",
        ),
        Rule(
            name="owned-bounds",
            holds="self.mode == 'Manual' || (has(self.minReplicas) && has(self.maxReplicas))",
            message="modes Auto and External need minReplicas and maxReplicas",
            says="'mode ' + self.mode + ' needs minReplicas and maxReplicas'",
            at=".mode",
            reason="FieldValueRequired",
        ),
        Rule(
            name="min-max",
            holds="!(has(self.minReplicas) && has(self.maxReplicas)) || "
            "self.minReplicas <= self.maxReplicas",
            message="minReplicas is greater than maxReplicas",
            says="'minReplicas (%d) is greater than maxReplicas (%d)'"
            ".format([self.minReplicas, self.maxReplicas])",
            at=".minReplicas",
        ),
        Rule(
            name="zero-needs-policy",
            holds="!has(self.minReplicas) || self.minReplicas > 0 || has(self.scaleToZero)",
            message="is required with minReplicas 0: say what becomes of images meanwhile",
            at=".scaleToZero",
            reason="FieldValueRequired",
        ),
        Rule(
            name="policy-needs-zero",
            holds="!has(self.scaleToZero) || (has(self.minReplicas) && self.minReplicas == 0)",
            message="takes effect only with minReplicas 0: set that, or remove scaleToZero",
            at=".scaleToZero",
        ),
    )
