"""The OpenAI-compatible gateway: `spec.gateway`."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from vlm_operator.api.base import Bytes, ImageName, Model, NameRef, Restarts, Rule, field, shaped
from vlm_operator.api.enums import ClientPriority, ServiceType
from vlm_operator.api.placement import Placement, ResourceRequirements
from vlm_operator.api.pod_template import Annotations, PodTemplate

_DOMAIN = r"^(\*\.)?[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
Domain = Annotated[
    str,
    Field(min_length=1, max_length=253, pattern=_DOMAIN),
    shaped("domain", _DOMAIN, "must be a host in lower case, or *. and a host"),
]
# Kubernetes 1.30 takes no `isCIDR()` in a new CRD: a function of 1.30 is for CRDs from 1.31 on.
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_V4 = rf"({_OCTET}\.){{3}}{_OCTET}/(3[0-2]|[12]?[0-9])"
_HEX = "[0-9a-f]{1,4}"
# `::` stands for at least one group: n groups after it leave at most 7 - n before it.
_V6_SHORT = "|".join(f"({_HEX}:){{1,{7 - n}}}(:{_HEX}){{1,{n}}}" for n in range(1, 7))
_V6 = f"(({_HEX}:){{7}}{_HEX}|({_HEX}:){{1,7}}:|{_V6_SHORT}|:((:{_HEX}){{1,7}}|:))"
_CIDR = f"(?i)^({_V4}|{_V6}/(12[0-8]|1[01][0-9]|[1-9]?[0-9]))$"
_CIDR_MESSAGE = "must be ADDRESS/BITS of IPv4 or IPv6, as 10.20.0.0/16"


def _network(value: object) -> object:
    """Refuse what is no network with the rule's message: that of the long pattern has no fix."""
    if isinstance(value, str) and not re.fullmatch(_CIDR, value):
        raise PydanticCustomError("cidr", _CIDR_MESSAGE)
    return value


Cidr = Annotated[
    str,
    Field(max_length=49, pattern=_CIDR),
    shaped("cidr", _CIDR, _CIDR_MESSAGE),
    BeforeValidator(_network),
]


TenantName = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^(\*|[-._a-zA-Z0-9]+)$")]
Origin = Annotated[
    str, Field(min_length=1, max_length=253, pattern=r"^(\*|[a-z][-+.a-z0-9]*://[^/?#\s]+)$")
]
HeaderName = Annotated[str, Field(min_length=1, max_length=64, pattern="^[-_a-zA-Z0-9]+$")]


class GatewayService(Model):
    """The Kubernetes Service in front of the gateway."""

    type: ServiceType = field(
        ServiceType.CLUSTER_IP, "How the gateway is reached.", example="LoadBalancer"
    )
    port: int = field(80, "Port of the Service.", example=8000, ge=1, le=65535)
    annotations: Annotations = field(
        {},
        "Annotations of the Service.",
        example={"service.beta.kubernetes.io/aws-load-balancer-scheme": "internal"},
    )


class GatewayDrain(Model):
    """The drain of gateway pods."""

    timeout_seconds: int = field(
        600,
        "Seconds for streams to end; one that outlasts them ends with an error event.",
        example=120,
        ge=1,
        le=86400,
    )


class Auth(Model):
    """The authentication of clients."""

    secret_ref: NameRef | None = field(
        None,
        "Secret with the bearer keys of each tenant; its contents are live.",
        unset="the gateway is open",
        restarts=Restarts.GATEWAY,
    )


class Tls(Model):
    """TLS of the OpenAI API."""

    secret_ref: NameRef | None = field(
        None,
        "Secret of type kubernetes.io/tls, as cert-manager writes it. A renewed one is used within "
        "a minute or two, without a restart.",
        unset="HTTP without TLS",
        restarts=Restarts.GATEWAY,
    )


class Media(Model):
    """The sources of images besides data: URLs."""

    allowed_domains: list[Domain] = field(
        [],
        "Hosts from which gateways fetch images; *.HOST allows all below HOST.",
        example=["images.example.com"],
        max_length=32,
        unset="only data: URLs",
    )
    allow_http: bool = field(False, "Whether URLs without TLS are fetched.", example=True)
    allowed_networks: list[Cidr] = field(
        [],
        "Networks that are not public in which hosts of allowedDomains may be.",
        example=["10.20.0.0/16"],
        max_length=8,
    )
    max_redirects: int = field(
        0, "Redirects that are followed; each is checked as the URL is.", example=2, ge=0, le=3
    )


class TenantLimits(Model):
    """The limits of one tenant, over all gateways. Beyond them its clients get 429."""

    name: TenantName = field(..., "Name of the tenant's key; * is any other.", example="team-a")
    requests_per_minute: int | None = field(
        None,
        "Requests per minute, at most.",
        example=600,
        unset="that of *",
        ge=1,
        le=1_000_000,
    )
    tokens_per_minute: int | None = field(
        None,
        "Tokens of prompts and answers per minute, at most.",
        example=100_000,
        unset="that of *",
        ge=1,
        le=1_000_000_000,
    )
    concurrent_requests: int | None = field(
        None,
        "Requests at once, at most.",
        example=32,
        unset="that of *",
        ge=1,
        le=1_000_000,
    )
    weight: int | None = field(
        None,
        "Share of the turns of waiting requests; without any, they wait in order.",
        example=2,
        unset="that of *, else 1",
        ge=1,
        le=1000,
    )


class Cors(Model):
    """The pages that may call the API from a browser."""

    allowed_origins: list[Origin] = field(
        [],
        "Origins of pages; * is any.",
        example=["https://app.example.com"],
        max_length=32,
        unset="none",
    )
    allowed_headers: list[HeaderName] = field(
        [], "Headers of their requests.", example=["authorization"], max_length=32, unset="all"
    )


class GatewayLimits(Model):
    """The limits of one gateway pod. Beyond them, clients get 429 or 503 with Retry-After."""

    waiting_requests: int | None = field(
        None,
        "Maximum number of requests that wait for a worker.",
        example=1024,
        unset="512",
        ge=0,
        le=1_000_000,
    )
    connections: int | None = field(
        None,
        "Maximum number of client connections.",
        example=4096,
        unset="1024",
        ge=1,
        le=1_000_000,
    )
    request_memory: Bytes | None = field(
        None,
        "Memory that requests hold in the gateway, at least 128Mi.",
        example="1Gi",
        unset="512Mi, at most what the memory limit leaves",
    )


class GatewayScaling(Model):
    """Bounds of the number of gateway pods that another scaler sets."""

    min_replicas: int = field(..., "Minimum number of gateway pods.", example=2, ge=1, le=100)
    max_replicas: int = field(..., "Maximum number of gateway pods.", example=10, ge=1, le=100)

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="gateway-min-max",
            holds="self.minReplicas <= self.maxReplicas",
            message="minReplicas is greater than maxReplicas: lower it, or raise maxReplicas",
            at=".minReplicas",
        ),
    )


class Gateway(Model):
    """The OpenAI-compatible gateway of the service."""

    replicas: int = field(
        1,
        "Gateway pods; they share nothing, limits count per replica. With one, requests fail while "
        "its pod moves; from two on a PodDisruptionBudget keeps the others.",
        example=2,
        restarts=Restarts.NONE,
        ge=1,
        le=100,
    )
    scaling: GatewayScaling | None = field(
        None,
        "Lets HPA, KEDA or kubectl scale set the number, on the VLMPool NAME-gateway; `replicas` "
        "is then where it starts.",
        unset="replicas is the number",
        restarts=Restarts.NONE,
    )
    image: ImageName | None = field(
        None,
        "Image of the gateway. That of the workers contains the gateway too.",
        example="ghcr.io/me/vlm-gateway:1.0",
        unset="spec.image, else the operator's --gateway-image",
        restarts=Restarts.GATEWAY,
    )
    resources: ResourceRequirements = field(
        ResourceRequirements(), "CPU and memory of one gateway.", restarts=Restarts.GATEWAY
    )
    placement: Placement = field(
        Placement(),
        "Nodes for gateway pods. Without an affinity, they prefer nodes without GPUs.",
        restarts=Restarts.GATEWAY,
    )
    service: GatewayService = field(
        GatewayService(), "The Kubernetes Service of the gateway.", restarts=Restarts.NONE
    )
    limits: GatewayLimits = field(
        GatewayLimits(), "Limits of one gateway pod.", restarts=Restarts.GATEWAY
    )
    patience_seconds: int | None = field(
        None,
        "Time that requests wait for a pod after their pool lost the last one, in seconds.",
        example=60,
        unset="20",
        restarts=Restarts.GATEWAY,
        ge=0,
        le=3600,
    )
    client_priority: ClientPriority | None = field(
        None,
        "Whether clients may put a request before others (Any) or only behind them (Later).",
        example="Any",
        unset="Later",
        restarts=Restarts.GATEWAY,
    )
    session_prefetch: bool = field(
        False,
        "Whether idle prefill pods compute the next turn of a conversation after an answer.",
        example=True,
        restarts=Restarts.GATEWAY,
    )
    client_embeddings: bool = field(
        False,
        "Whether clients may send embeddings in place of images.",
        example=True,
        restarts=Restarts.GATEWAY,
    )
    drain: GatewayDrain = field(GatewayDrain(), "How gateway pods end.", restarts=Restarts.NONE)
    auth: Auth = field(Auth(), "Authentication of clients.", restarts=Restarts.GATEWAY)
    tls: Tls = field(
        Tls(), "Encryption between clients and the gateway.", restarts=Restarts.GATEWAY
    )
    media: Media = field(Media(), "Allowed sources of images.", restarts=Restarts.NONE)
    tenants: list[TenantLimits] = field(
        [], "Limits of tenants.", keys="name", max_length=64, restarts=Restarts.NONE
    )
    cors: Cors = field(Cors(), "Pages that may call the API.", restarts=Restarts.NONE)
    access_log: bool = field(
        False,
        "Whether each request writes a log line `access`, which has no content.",
        example=True,
        restarts=Restarts.NONE,
    )
    pod_template: PodTemplate = field(
        PodTemplate(), "Changes to the pod template.", restarts=Restarts.GATEWAY
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="tenants-have-keys",
            holds="!has(self.tenants) || (has(self.auth) && has(self.auth.secretRef)) || "
            "self.tenants.all(t, t.name == '*')",
            message="without auth.secretRef there is one tenant: set it, or name the entry *",
            at=".tenants",
        ),
    )
