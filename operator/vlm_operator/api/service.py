"""VLMService: one vision-language model, served by pools of pods. Users write this object."""

from __future__ import annotations

from typing import ClassVar

from vlm_operator.api.base import ImageName, Model, NameRef, Restarts, Rule, field, not_built
from vlm_operator.api.gateway import Gateway
from vlm_operator.api.model import ModelSource
from vlm_operator.api.policy import (
    Admission,
    Autoscaling,
    Budget,
    Identity,
    PoolRatio,
    Rollout,
    ServiceScaleToZero,
    Slo,
    Tracing,
    Transfer,
)
from vlm_operator.api.pool import Pools
from vlm_operator.names import POOL_ROLES


def _present(side: str) -> str:
    """Return CEL that is true if the pool on one side of a ratio exists."""
    optional = (f"(c.{side} == '{r}' && has(self.pools.{r}))" for r in ("encoder", "prefill"))
    return f"(c.{side} == 'decode' || {' || '.join(optional)})"


def _zero_needs_auto(role: str) -> Rule:
    """Return the rule that only the autoscaler sets the size of a pool that sleeps and wakes."""
    pool = f"self.pools.{role}"
    absent = "" if role == "decode" else f"!has({pool}) || "
    return Rule(
        name=f"zero-auto-{role}",
        holds=f"!has(self.scaleToZero) || {absent}{pool}.scaling.mode == 'Auto'",
        message=f"scaleToZero needs every pool in mode Auto: set pools.{role}.scaling.mode to Auto "
        "with minReplicas and maxReplicas, or remove scaleToZero",
        says=f"'scaleToZero needs every pool in mode Auto, and {role} has ' + {pool}.scaling.mode "
        f"+ ': set pools.{role}.scaling.mode to Auto with minReplicas and maxReplicas, or remove "
        "scaleToZero'",
        at=".scaleToZero",
    )


class VLMServiceSpec(Model):
    """The desired state of a service."""

    stopped: bool = field(
        False,
        "Drain all pools and keep them at zero; the status is kept.",
        example=True,
        restarts=Restarts.NONE,
    )
    paused: bool = field(
        False,
        "Write nothing except status, the accepting gate, certificates and deletions.",
        example=True,
        restarts=Restarts.NONE,
    )
    image: ImageName | None = field(
        None,
        "Worker image of all roles.",
        example="ghcr.io/me/vlm-worker:1.0",
        unset="the operator's --worker-image",
        restarts=Restarts.PODS,
    )
    image_pull_secrets: list[NameRef] = field(
        [], "Secrets for pulling the images.", restarts=Restarts.PODS, keys="name", max_length=8
    )
    model: ModelSource = field(..., "The model that the service serves.")
    pools: Pools = field(..., "One pool per role; decode is required.", restarts=Restarts.PODS)
    gateway: Gateway = field(Gateway(), "The OpenAI-compatible gateway.", restarts=Restarts.GATEWAY)
    slo: Slo = field(Slo(), "Latency goals of the service.", restarts=Restarts.NONE)
    budget: Budget | None = field(
        None,
        "Limits on resources and cost of the whole service.",
        unset="no bound",
        restarts=Restarts.NONE,
    )
    pool_ratios: list[PoolRatio] = field(
        [],
        "Bounds on the ratio between the sizes of two pools.",
        restarts=Restarts.NONE,
        max_length=6,
    )
    autoscaling: Autoscaling = field(
        Autoscaling(), "How the autoscaler sizes the pools of mode Auto.", restarts=Restarts.NONE
    )
    scale_to_zero: ServiceScaleToZero | None = field(
        None,
        "When all worker pools go to zero, and how long a request waits for their start. "
        "The gateway stays.",
        unset="never",
        restarts=Restarts.NONE,
    )
    admission: Admission | None = field(
        None,
        "What happens to requests that would have to wait.",
        unset="they wait",
        restarts=Restarts.NONE,
    )
    transfer: Transfer = field(
        Transfer(),
        "How KV blocks and embeddings are transferred between pods.",
        restarts=Restarts.PODS,
    )
    identity: Identity = field(
        Identity(), "Mutual TLS between the pods of the service.", restarts=Restarts.PODS
    )
    rollout: Rollout = field(
        Rollout(), "How a new revision replaces the old one.", restarts=Restarts.NONE
    )
    tracing: Tracing | None = field(
        None, "Spans of requests over all pods.", unset="no spans", restarts=Restarts.PODS
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="encoder-input",
            holds="!has(self.pools.encoder) || !has(self.model.limits) || "
            "!has(self.model.limits.imagesPerRequest) || self.model.limits.imagesPerRequest > 0 || "
            "(has(self.model.limits.videoSeconds) && self.model.limits.videoSeconds > 0)",
            message="an encoder pool needs images or video: remove it, "
            "or raise model.limits.imagesPerRequest",
            at=".pools.encoder",
        ),
        Rule(
            name="auto-slo",
            holds="(has(self.slo) && has(self.slo.ttftP95Milliseconds)) || "
            "!((has(self.pools.encoder) && self.pools.encoder.scaling.mode == 'Auto') || "
            "(has(self.pools.prefill) && self.pools.prefill.scaling.mode == 'Auto') || "
            "self.pools.decode.scaling.mode == 'Auto')",
            message="scaling mode Auto needs a goal: set slo.ttftP95Milliseconds",
            at=".slo",
            reason="FieldValueRequired",
        ),
        Rule(
            name="pool-ratio-present",
            holds="!has(self.poolRatios) || "
            f"self.poolRatios.all(c, {_present('numerator')} && {_present('denominator')})",
            message="names a pool that the service does not have",
            at=".poolRatios",
        ),
        *(_zero_needs_auto(role) for role in POOL_ROLES),
        not_built(
            "admission",
            "!has(self.admission)",
            "admission control and tenants",
            at=".admission",
            instead="remove it",
        ),
    )
