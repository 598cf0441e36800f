"""Builds the gateway's pod template, and the configuration that it re-reads every second."""

from __future__ import annotations

from typing import Any

from vlm_operator import names
from vlm_operator.api import VLMService, quantity
from vlm_operator.api.gateway import Gateway
from vlm_operator.api.visual import Visual, VisualTier
from vlm_operator.names import Role
from vlm_operator.pods.overlay import with_overlay
from vlm_operator.pods.parts import (
    Part,
    container_security,
    environment,
    identity_mount,
    labels,
    model_mount,
    pod_spec,
    probes,
    selector,
    with_pull_policy,
)
from vlm_operator.state import Revision

CONFIG_PATH = "/etc/triptych/gateway"
CONFIG_KEY = "gateway.json"
KEYS_PATH = "/etc/triptych/keys"
TLS_PATH = "/etc/triptych/tls"
GPU_LABELS = (
    "nvidia.com/gpu.present",  # NVIDIA's GPU feature discovery
    "amd.com/gpu.product-name",  # AMD's node labeller
    "cloud.google.com/gke-accelerator",
    "kubernetes.azure.com/accelerator",
    "karpenter.k8s.aws/instance-gpu-count",
)
"""Labels that device plugins and cloud providers set on nodes with GPUs."""


def gateway_template(service: VLMService, revision: Revision) -> Part:
    gateway, model = service.spec.gateway, model_mount(service)
    name = names.child(service.name, Role.GATEWAY)
    mounts = [
        {"name": "triptych-tmp", "mountPath": "/tmp"},  # noqa: S108
        model.mount,
        {"name": "triptych-config", "mountPath": CONFIG_PATH, "readOnly": True},
    ]
    volumes: list[Part] = [
        {"name": "triptych-tmp", "emptyDir": {}},
        model.volume,
        {"name": "triptych-config", "configMap": {"name": name}},
    ]
    if gateway.auth.secret_ref is not None:
        mounts.append({"name": "triptych-keys", "mountPath": KEYS_PATH, "readOnly": True})
        secret = {"secretName": gateway.auth.secret_ref.name}
        volumes.append({"name": "triptych-keys", "secret": secret})
    get: Part = {"path": "/readyz", "port": "http"}
    if gateway.tls.secret_ref is not None:
        get["scheme"] = "HTTPS"  # the kubelet does not check the certificate
        mounts.append({"name": "triptych-tls", "mountPath": TLS_PATH, "readOnly": True})
        secret = {"secretName": gateway.tls.secret_ref.name}
        volumes.append({"name": "triptych-tls", "secret": secret})
    identity = identity_mount(service, revision)
    mounts += identity.mounts
    volumes += identity.volumes
    container = {
        "name": "gateway",
        "image": gateway.image,
        "command": ["vlm-worker"],
        "args": arguments(service, revision),
        "env": [*environment(service, revision), *model.env],
        "ports": [
            {"name": "http", "containerPort": names.PORT_GATEWAY, "protocol": "TCP"},
            {"name": "admin", "containerPort": names.PORT_GATEWAY_ADMIN, "protocol": "TCP"},
        ],
        **probes(service, {"httpGet": get}, live={**get, "path": "/healthz"}),
        "resources": gateway.resources.to_dict(),
        "securityContext": container_security(),
        "volumeMounts": mounts,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    spec = pod_spec(service, revision, account=name, token=True, placement=gateway.placement)
    spec.setdefault("affinity", _prefers_nodes_without_gpus())
    spec |= {"containers": [with_pull_policy(container, revision)], "volumes": volumes}
    template = {"metadata": {"labels": labels(service, revision)}, "spec": spec}
    spread = selector(service.name, Role.GATEWAY)
    return with_overlay(template, gateway.pod_template, spread=spread)


def _prefers_nodes_without_gpus() -> Part:
    """Return a preferred affinity; if only nodes with GPUs are free, a gateway runs on one."""
    absent = [{"key": label, "operator": "DoesNotExist"} for label in GPU_LABELS]
    term = {"weight": 100, "preference": {"matchExpressions": absent}}
    return {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [term]}}


def arguments(service: VLMService, revision: Revision) -> list[str]:
    """Return the gateway's command line (docs/contract.md)."""
    model, settled = service.spec.model, revision.resolved
    found = [
        Role.GATEWAY.value,
        *model_mount(service).args,
        f"--served-name={service.spec.model.served_name}",
        f"--bind={settled.bind}",
        f"--http-port={names.PORT_GATEWAY}",
        f"--admin-port={names.PORT_GATEWAY_ADMIN}",
        f"--namespace={service.namespace}",
        f"--service={service.name}",
        f"--config={CONFIG_PATH}/{CONFIG_KEY}",
        f"--block-size={settled.block_size}",
        f"--drain-timeout-seconds={settled.drain_seconds}",
        f"--compat={settled.compat}",
    ]
    if service.spec.gateway.auth.secret_ref is not None:
        found.append(f"--api-keys-dir={KEYS_PATH}")
    if service.spec.gateway.tls.secret_ref is not None:
        found.append(f"--tls-dir={TLS_PATH}")
    found += identity_mount(service, revision).args
    kv = service.spec.pools.decode.kv
    if kv is not None and kv.prune_text is not None:
        found.append("--mark-history")
    if model.max_model_len is not None:
        found.append(f"--max-model-len={model.max_model_len}")
    return [*found, *_limit_arguments(service.spec.gateway)]


def _limit_arguments(gateway: Gateway) -> list[str]:
    limits, priority = gateway.limits, gateway.client_priority
    memory = limits.request_memory
    flags = {
        "--max-waiting": limits.waiting_requests,
        "--max-connections": limits.connections,
        "--gateway-memory-bytes": None if memory is None else int(quantity.parse(memory)),
        "--patience-seconds": gateway.patience_seconds,
        "--client-priority": None if priority is None else priority.value.lower(),
    }
    switches = {
        "--session-prefetch": gateway.session_prefetch,
        "--client-embeddings": gateway.client_embeddings,
    }
    return [
        *(f"{flag}={value}" for flag, value in flags.items() if value is not None),
        *(flag for flag, is_on in switches.items() if is_on),
    ]


def _visual(visual: Visual) -> dict[str, Any]:
    """Return `limits.visual` of gateway.json."""
    return {
        "policy": visual.policy.value,
        "low": _tier(visual.low, keep_percent=25),
        "medium": _tier(visual.medium, keep_percent=50),
        "classifier": visual.classifier.value,
        "brown_out_seconds": visual.brown_out_seconds,
        "on_context_exceeded": visual.on_context_exceeded.value,
        "max_tokens_per_request": visual.max_tokens_per_request,
        "tenants": {
            tenant.name: {
                "visual": None if tenant.visual is None else tenant.visual.value.lower(),
                "max_tokens_per_request": tenant.max_tokens_per_request,
            }
            for tenant in visual.tenants
        },
    }


def _tier(tier: VisualTier, *, keep_percent: int) -> dict[str, Any]:
    """Return a tier; `keep_percent` is its default."""
    return {
        "method": tier.method.value,
        "keep_percent": tier.keep_percent or keep_percent,
        "max_pixels": tier.max_pixels,
    }


def gateway_config(service: VLMService) -> dict[str, Any]:
    """Return the settings that the gateway applies without a restart.

    They are the content of `gateway.json` (docs/contract.md).
    """
    spec = service.spec
    limits, slo, admission = spec.model.limits, spec.slo, spec.admission
    media = spec.gateway.media
    encoder = spec.pools.encoder
    zero = None if encoder is None else encoder.scaling.scale_to_zero
    return {
        "served_name": service.spec.model.served_name,
        "revision": spec.model.revision or "",
        "slo": {
            "ttft_ms": slo.ttft_p95_milliseconds,
            "itl_ms": slo.itl_p95_milliseconds,
            "overrides": {
                item.modality.value.lower(): item.ttft_p95_milliseconds for item in slo.overrides
            },
        },
        "limits": {
            "images_per_request": limits.images_per_request,
            "bytes_per_image": limits.bytes_per_image,
            "pixels_per_image": limits.pixels_per_image,
            "on_oversize": limits.on_oversize.value,
            "on_corrupt": limits.on_corrupt.value,
            "video_seconds": limits.video_seconds,
            **({} if limits.visual is None else {"visual": _visual(limits.visual)}),
        },
        "max_model_len_tokens": spec.model.max_model_len,
        "on_demand": "InlineAtPrefill" if zero is None else zero.while_at_zero.value,
        "wake_timeout_seconds": None
        if spec.scale_to_zero is None
        else spec.scale_to_zero.wake_timeout_seconds,
        "admission": {
            "max_queue_seconds": None if admission is None else admission.max_queue_seconds,
            "on_exceeded": "Queue" if admission is None else admission.on_exceeded.value,
        },
        "media": {
            "allowed_domains": list(media.allowed_domains),
            "allow_http": media.allow_http,
            "allowed_networks": list(media.allowed_networks),
            "max_redirects": media.max_redirects,
        },
        **_optional(spec.gateway),
    }


def _optional(gateway: Gateway) -> dict[str, Any]:
    """Return the fields that gateway.json has only if they are set: others stay as they are."""
    found: dict[str, Any] = {}
    if gateway.tenants:
        found["tenants"] = {
            tenant.name: {
                "requests_per_minute": tenant.requests_per_minute,
                "tokens_per_minute": tenant.tokens_per_minute,
                "concurrent_requests": tenant.concurrent_requests,
                "weight": tenant.weight,
            }
            for tenant in gateway.tenants
        }
    if gateway.cors.allowed_origins:
        found["cors"] = {
            "allowed_origins": list(gateway.cors.allowed_origins),
            "allowed_headers": list(gateway.cors.allowed_headers),
        }
    if gateway.access_log:
        found["access_log"] = True
    return found
