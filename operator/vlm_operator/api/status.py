"""The status of a VLMService, which the operator writes in one server-side apply."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from vlm_operator.api.base import Model, Open, Quantity, Time, field
from vlm_operator.api.enums import Modality, Topology

Text = Annotated[str, Field(max_length=4096)]
Word = Annotated[str, Field(max_length=256)]

# All condition types. NameConflict is a reason of Stalled, ScalingConflict of ScalingActive.
ConditionType = Literal[
    "Ready",
    "Accepted",
    "EncoderReady",
    "PrefillReady",
    "DecodeReady",
    "GatewayReady",
    "ScalingActive",
    "MetricsAvailable",
    "CapacitySufficient",
    "ModelReady",
    "CertificatesReady",
    "SLOAttainable",
    "RolloutProgressing",
    "Reconciling",
    "Stalled",
]
CONDITIONS: tuple[ConditionType, ...] = get_args(ConditionType)


class Condition(Model):
    """One condition, as `metav1.Condition` of Kubernetes."""

    type: Word = field(..., "Which aspect.")
    status: Literal["True", "False", "Unknown"] = field(..., "Whether it holds.")
    observed_generation: int | None = field(None, "The generation it speaks of.")
    last_transition_time: Time = field(..., "When status last changed.")
    reason: Word = field(..., "Why, in one CamelCase word.")
    message: Text = field(..., "Why, for people; names the one thing that blocks.")


class Candidate(Model):
    """The replicas that one signal asks for."""

    signal: Word = field(..., "Name of the signal.")
    replicas: int = field(..., "Replicas it asked for.")


class Decision(Model):
    """One scaling decision with its reasons."""

    time: Time = field(..., "When it was made.")
    epoch: int | None = field(None, "Lease transitions at that time.")
    from_: int = Field(..., alias="from", description="Replicas before.")
    to: int = field(..., "Replicas after.")
    reason: Word = field(..., "Why, in one CamelCase word.")
    limited_by: Word | None = field(None, "The bound that held it back.")
    shares: dict[Word, int] | None = field(
        None, "Share of each stage in missed TTFT, in percent.", max_length=16
    )
    candidates: list[Candidate] | None = field(
        None, "What each signal asked for.", keys="signal", max_length=16
    )
    cost_per_hour: Quantity | None = field(None, "Cost of the pool after it, per hour.")
    message: Text | None = field(None, "Why, for people.")


class PastDecision(Model):
    """A summary of an earlier decision; the operator's log has the full record."""

    time: Time = field(..., "When it was made.")
    from_: int = Field(..., alias="from", description="Replicas before.")
    to: int = field(..., "Replicas after.")
    reason: Word = field(..., "Why, in one CamelCase word.")


class VariantStatus(Model):
    """The pods of one variant."""

    name: Word = field(..., "Name of the variant.")
    node_class: Word | None = field(None, "VLMNodeClass it runs on.")
    replicas: int = field(0, "Pods that exist.")
    ready_replicas: int = field(0, "Pods that are ready.")
    cost_per_hour: Quantity | None = field(None, "Cost of its pods per hour.")
    startup_p90_seconds: int | None = field(None, "Seconds until ready, 90th percentile.")


class PoolStatus(Model):
    """The pods of one pool."""

    desired_replicas: int = field(0, "Pods there should be.")
    replicas: int = field(0, "Pods that exist.")
    ready_replicas: int = field(0, "Pods that take requests.")
    starting_replicas: int = field(0, "Pods that load.")
    pending_replicas: int = field(0, "Pods without a node.")
    draining_replicas: int = field(0, "Pods that finish.")
    updated_replicas: int = field(0, "Pods of the newest revision.")
    variants: list[VariantStatus] | None = field(
        None, "The same per node type.", keys="name", max_length=4
    )
    load: Open | None = field(None, "What the pods report, rounded.")
    last_decision: Decision | None = field(None, "The last scaling decision.")
    history: list[PastDecision] | None = field(None, "The decisions before it.", max_length=8)
    recommendation: int | None = field(None, "Replicas that it would choose.")


class PoolStatuses(Model):
    """The pools, by role."""

    encoder: PoolStatus | None = field(None, "The encoder pool.")
    prefill: PoolStatus | None = field(None, "The prefill pool.")
    decode: PoolStatus | None = field(None, "The decode pool.")


class WeightsBytes(Model):
    """Bytes of weights that one pod of a role loads."""

    encoder: int | None = field(None, "In an encoder pod.")
    prefill: int | None = field(None, "In a prefill pod.")
    decode: int | None = field(None, "In a decode pod.")


class ModelStatus(Model):
    """Facts about the model that the workers report."""

    kv_bytes_per_token: int | None = field(None, "Bytes of KV cache per token.")
    image_tokens_per_megapixel: int | None = field(None, "Tokens that a million pixels become.")
    embedding_bytes_per_token: int | None = field(None, "Bytes of embedding per image token.")
    weights_bytes: WeightsBytes | None = field(None, "Bytes of weights per role.")


class SloStatus(Model):
    """Target and observed latency of one modality."""

    modality: Modality = field(..., "What the requests carried.")
    ttft_p95_milliseconds: int | None = field(None, "TTFT at the 95th percentile, rounded.")
    target_milliseconds: int | None = field(None, "What was promised.")
    stages: dict[Word, int] | None = field(
        None,
        "Percent of each stage in the TTFT of requests that missed, or of the slowest tenth.",
        max_length=16,
    )
    dominant_stage: Word | None = field(None, "The stage with the largest share.")


class CertificateStatus(Model):
    """The certificate of one role, without its key."""

    secret: Word = field(..., "Secret that contains it.")
    role: Word = field(..., "Role of the pods that use it.")
    issuer: Text = field(..., "Its issuer.")
    serial: Word | None = field(None, "Serial number, in hexadecimal.")
    not_before: Time = field(..., "Start of its validity.")
    not_after: Time = field(..., "End of its validity.")
    secret_version: Word | None = field(None, "The resourceVersion of the written Secret.")
    anchors: Word | None = field(None, "Digest of the trust anchors in the Secret.")


class Cost(Model):
    """The cost of the service."""

    per_hour: Quantity | None = field(None, "Cost of all pods per hour.")
    currency: Word | None = field(None, "Its currency.")


class Accelerators(Model):
    """Devices of all pools together."""

    in_use: int = field(0, "Devices that pods hold.")
    limit: int | None = field(None, "Devices they may hold.")


class Summary(Model):
    """Columns of `kubectl get`."""

    encoder: Word | None = field(None, "ready/desired.")
    prefill: Word | None = field(None, "ready/desired.")
    decode: Word | None = field(None, "ready/desired.")
    ttft_p95: Word | None = field(None, "TTFT at the 95th percentile.")
    kv_occupancy_percent: Word | None = field(None, "KV blocks in use.")
    dominant_stage: Word | None = field(None, "Where missed TTFT went.")
    cost_per_hour: Word | None = field(None, "Cost of all pods.")


class VLMServiceStatus(Model):
    """The observed state of a service."""

    observed_generation: int | None = field(None, "The generation this speaks of.")
    conditions: list[Condition] | None = field(
        None, "Aspects of the state.", keys="type", max_length=32
    )
    topology: Topology | None = field(None, "Which pools there are.")
    url: Word | None = field(None, "Where clients find the OpenAI API, inside the cluster.")
    last_progress_time: Time | None = field(
        None, "When the service last got on; unset once its generation is reached."
    )
    current_revision: Word | None = field(None, "Revision that serves.")
    update_revision: Word | None = field(None, "Revision being rolled out.")
    compatibility_hash: Word | None = field(None, "Pods with the same value may work together.")
    model: ModelStatus | None = field(None, "What the workers measured on the model.")
    pools: PoolStatuses | None = field(None, "The pools, by role.")
    slo: list[SloStatus] | None = field(
        None, "Promise and reality per modality.", keys="modality", max_length=3
    )
    cost: Cost | None = field(None, "What the service costs.")
    accelerators: Accelerators | None = field(None, "Devices of all pools together.")
    identity: list[CertificateStatus] | None = field(
        None, "Certificates that the pods use.", keys="secret", max_length=32
    )
    effective: Open | None = field(None, "Defaults that took effect, spelt as in spec.")
    summary: Summary | None = field(None, "What kubectl get prints.")
