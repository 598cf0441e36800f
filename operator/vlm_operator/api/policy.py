"""Settings of a whole service: SLO, budget, autoscaling, transfer, rollout, tracing."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from vlm_operator.api.base import Model, ObjectName, Quantity, Rule, field, not_built, shaped
from vlm_operator.api.enums import (
    AutoscalingPolicy,
    IdentityMode,
    MissingMetrics,
    Modality,
    NoSpareCapacity,
    OnExceeded,
    OnFailure,
    RolloutStrategy,
    TransferMode,
)
from vlm_operator.names import POOL_ROLES, Role

PoolRole = Annotated[Role, Field(json_schema_extra={"enum": [str(role) for role in POOL_ROLES]})]
Milliseconds = Annotated[int, Field(ge=1, le=3_600_000)]
_COLLECTOR = r"^https?://([-A-Za-z0-9.]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?(/[^ ]*)?$"
Collector = Annotated[
    str,
    Field(max_length=512, pattern=_COLLECTOR),
    shaped("collector", _COLLECTOR, "must be http:// or https://, a host, and a port"),
]


class SloOverride(Model):
    """A different TTFT target for one modality."""

    modality: Modality = field(..., "What the request carries.", example="Image")
    ttft_p95_milliseconds: Milliseconds = field(
        ..., "TTFT at the 95th percentile, in milliseconds.", example=2500
    )


class Slo(Model):
    """The latency targets of the service."""

    ttft_p95_milliseconds: Milliseconds | None = field(
        None,
        "Time to first token at the 95th percentile, in milliseconds, from the last byte of the "
        "request to the first byte of the answer.",
        example=1500,
        unset="no goal; required by scaling mode Auto",
    )
    itl_p95_milliseconds: Milliseconds | None = field(
        None,
        "Time between two tokens at the 95th percentile, in milliseconds.",
        example=50,
        unset="no goal",
    )
    window_seconds: int = field(
        300, "Length in seconds of the window for percentiles.", example=600, ge=1, le=3600
    )
    overrides: list[SloOverride] = field(
        [], "Other goals for single modalities.", keys="modality", max_length=3
    )


class ServiceScaleToZero(Model):
    """When the whole service goes to zero, and how long a request waits for its start."""

    idle_seconds: int = field(
        1800,
        "Seconds without a request, accepted or in flight, after which all pools go to zero.",
        example=3600,
        ge=10,
        le=604_800,
    )
    wake_timeout_seconds: int = field(
        600,
        "Seconds for which the gateway holds a request until the pools are ready; then it answers "
        "503 with Retry-After.",
        example=900,
        ge=1,
        le=7200,
    )


class Budget(Model):
    """The limits of all pools together."""

    max_accelerators: int | None = field(
        None,
        "Accelerators of all pools together: what a VLMNodeClass names, and resources with the "
        "name of one (gpu, mig-*, tpu, npu, hpu, gaudi, neuron); network cards do not count.",
        example=8,
        unset="no bound",
        ge=0,
        le=100_000,
    )
    max_cost_per_hour: Quantity | None = field(
        None, "Cost of all pools per hour; quote fractions.", example="24.50", unset="no bound"
    )
    currency: str | None = field(
        None, "Currency of the cost, shown only.", example="EUR", unset="none", max_length=8
    )


class PoolRatio(Model):
    """Bounds of the ratio of two pools' replicas."""

    numerator: PoolRole = field(..., "Role whose replicas are counted.", example="prefill")
    denominator: PoolRole = field(..., "Role against which they are counted.", example="decode")
    min_percent: int | None = field(
        None, "Minimum ratio in percent.", example=50, unset="no bound", ge=0, le=10_000
    )
    max_percent: int | None = field(
        None, "Maximum ratio in percent.", example=200, unset="no bound", ge=1, le=10_000
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="pool-ratio-sides",
            holds="self.numerator != self.denominator",
            message="is a ratio of a pool to itself: numerator and denominator must differ",
            at=".denominator",
        ),
        Rule(
            name="pool-ratio-bounds",
            holds="!(has(self.minPercent) && has(self.maxPercent)) || "
            "self.minPercent <= self.maxPercent",
            message="minPercent is greater than maxPercent",
            says="'minPercent (%d) is greater than maxPercent (%d)'"
            ".format([self.minPercent, self.maxPercent])",
            at=".minPercent",
        ),
    )


class FallbackReplicas(Model):
    """Replicas by role while metrics are missing."""

    encoder: int | None = field(
        None, "Encoder replicas.", example=1, unset="as they are", ge=0, le=1000
    )
    prefill: int | None = field(
        None, "Prefill replicas.", example=2, unset="as they are", ge=1, le=1000
    )
    decode: int | None = field(
        None, "Decode replicas.", example=2, unset="as they are", ge=1, le=1000
    )


class Autoscaling(Model):
    """The autoscaler's settings, for pools with scaling mode Auto."""

    policy: AutoscalingPolicy = field(
        AutoscalingPolicy.ACTIVE,
        "Apply decisions, only show them, or make none.",
        example="Advisory",
    )
    interval_seconds: int = field(5, "Seconds between two decisions.", example=10, ge=1, le=300)
    missing_metrics: MissingMetrics = field(
        MissingMetrics.HOLD, "What a pool does while too few of its pods answer.", example="Hold"
    )
    fallback_replicas: FallbackReplicas | None = field(
        None, "Replica counts to hold if missingMetrics is Fallback.", unset="as they are"
    )
    backlog_seconds: int = field(
        30, "Seconds within which a pool should process its queue.", example=10, ge=1, le=3600
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="fallback-replicas",
            holds="!has(self.missingMetrics) || self.missingMetrics != 'Fallback' || "
            "has(self.fallbackReplicas)",
            message="is required with missingMetrics Fallback: say how many replicas to hold",
            at=".fallbackReplicas",
            reason="FieldValueRequired",
        ),
    )


class Tenant(Model):
    """One tenant's share, by the name of its bearer key."""

    name: str = field(
        ..., "Data key in the Secret of gateway.auth.", example="team-a", max_length=63
    )
    weight: int = field(1, "Share relative to the other tenants.", example=2, ge=1, le=1000)


class Admission(Model):
    """The handling of requests that would wait."""

    max_queue_seconds: int | None = field(
        None, "Seconds that a request may wait.", example=30, unset="no bound", ge=1, le=3600
    )
    on_exceeded: OnExceeded = field(
        OnExceeded.QUEUE, "A request that would wait longer waits, or gets a 429.", example="Reject"
    )
    tenants: list[Tenant] = field([], "Shares of tenants.", keys="name", max_length=16)


class Transfer(Model):
    """The transport of KV and embeddings between pods."""

    embeddings: TransferMode = field(
        TransferMode.AUTO, "Encoder to prefill; Auto is Stream.", example="Stream"
    )
    kv: TransferMode = field(
        TransferMode.AUTO, "Prefill to decode; Auto is Stream.", example="Stream"
    )

    rules: ClassVar[tuple[Rule, ...]] = tuple(
        not_built(
            f"transfer-{name}",
            f"!has(self.{name}) || self.{name} in ['Auto', 'Stream']",
            "RDMA between pods",
            at=f".{name}",
            instead="use Auto or Stream",
        )
        for name in ("embeddings", "kv")
    )


IssuerKind = Annotated[str, Field(max_length=63, pattern="^[A-Z][A-Za-z0-9]*$")]


class IssuerRef(Model):
    """An issuer of cert-manager."""

    name: ObjectName = field(..., "Name of the issuer.", example="internal-ca")
    kind: IssuerKind = field("Issuer", "Kind of the issuer.", example="ClusterIssuer")
    group: ObjectName = field(
        "cert-manager.io", "API group of the issuer.", example="awspca.cert-manager.io"
    )


class Identity(Model):
    """Mutual TLS between the pods of the service: one certificate per role."""

    mode: IdentityMode | None = field(
        None,
        "Issuer of the certificates: the operator's CA, an issuer of cert-manager, or Off for "
        "plaintext.",
        example="OperatorCA",
        unset="the operator's --identity-mode when the pods were first created",
    )
    issuer_ref: IssuerRef | None = field(
        None, "Issuer of cert-manager, for mode CertManager.", unset="no issuer"
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="identity-issuer",
            holds="has(self.issuerRef) == (has(self.mode) && self.mode == 'CertManager')",
            message="mode CertManager needs issuerRef, and other modes have none: "
            "set both or remove it",
            at=".issuerRef",
        ),
    )


class Rollout(Model):
    """The rollout of a new revision."""

    strategy: RolloutStrategy = field(
        RolloutStrategy.ROLLING_BY_REVISION,
        "RollingByRevision keeps serving meanwhile; Recreate drains everything first.",
        example="Recreate",
    )
    progress_deadline_seconds: int = field(
        600,
        "Seconds without progress after which Stalled is True, the first rollout included; a new "
        "revision has failed then.",
        example=3600,
        ge=60,
        le=86400,
    )
    on_failure: OnFailure | None = field(
        None,
        "What follows a rollout that failed: stay where it is, or go back.",
        example="Rollback",
        unset="it stays where it is",
    )
    when_no_spare_capacity: NoSpareCapacity | None = field(
        None,
        "What to do if nodes or the budget do not allow one more pod: drain an old pod first, "
        "or wait.",
        example="Wait",
        unset="DrainFirst, but for the last ready pod of a pool",
    )


class Tracing(Model):
    """OpenTelemetry spans of requests."""

    endpoint: Collector = field(
        ...,
        "URL of a collector that takes OTLP over HTTP; NetworkPolicies allow its port, which must "
        "be the port of its pods.",
        example="http://collector.observability:4318",
    )
    sample_percent: Annotated[int, Field(ge=0, le=100)] = field(
        100, "Percent of the requests that are traced; all pods trace the same ones.", example=5
    )
