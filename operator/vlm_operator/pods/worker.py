"""Builds the pod template of an encoder, prefill or decode worker.

nodeClassRef ─▶ VLMNodeClass ─▶ placement {nodeSelector, tolerations}, resources.limits[device]

`place` yields a service in which the user wrote these fields. So a change of a class that affects
pods creates a new revision, and a change of its cost or speed does not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from vlm_operator import names
from vlm_operator.api import Pool, Variant, VLMService, quantity, stages
from vlm_operator.api.placement import Placement, ResourceRequirements, Toleration
from vlm_operator.api.pool import EncoderCache, KvCache
from vlm_operator.errors import SpecError
from vlm_operator.names import Role
from vlm_operator.pods.overlay import with_overlay
from vlm_operator.pods.parts import (
    Part,
    container_security,
    disk_mount,
    environment,
    identity_mount,
    labels,
    model_mount,
    pod_spec,
    probes,
    scales_mount,
    selector,
    with_pull_policy,
)
from vlm_operator.state import NodeClassState, Revision


def worker_template(service: VLMService, pool: Pool, variant: Variant, revision: Revision) -> Part:
    role = revision.role
    model, identity = model_mount(service), identity_mount(service, revision)
    disk, scales = disk_mount(pool.encoder_cache), scales_mount(service.spec.model)
    container = {
        "name": "worker",
        "image": pool.image,
        "command": ["vlm-worker"],
        "args": [*arguments(service, pool, variant, revision), *pool.engine.extra_args],
        "env": [
            *environment(service, revision),
            *model.env,
            *(item.to_dict() for item in pool.engine.env),
        ],
        "ports": [
            {"name": "grpc", "containerPort": names.PORT_GRPC, "protocol": "TCP"},
            {"name": "http", "containerPort": names.PORT_HTTP, "protocol": "TCP"},
        ],
        **probes(service, _readiness(revision), live={"path": "/healthz", "port": "http"}),
        "resources": _resources(variant, disk.requests),
        "securityContext": container_security(),
        "volumeMounts": [
            {"name": "triptych-tmp", "mountPath": "/tmp"},  # noqa: S108
            model.mount,
            *identity.mounts,
            *disk.mounts,
            *scales.mounts,
        ],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    spec = pod_spec(
        service,
        revision,
        account=names.child(service.name, role),
        token=False,
        placement=variant.placement,
    )
    spec |= {
        "readinessGates": [{"conditionType": names.GATE_ACCEPTING}],
        "containers": [with_pull_policy(container, revision)],
        "volumes": [
            {"name": "triptych-tmp", "emptyDir": {}},
            model.volume,
            *identity.volumes,
            *disk.volumes,
            *scales.volumes,
        ],
    }
    template = {"metadata": {"labels": labels(service, revision)}, "spec": spec}
    return with_overlay(template, pool.pod_template, spread=selector(service.name, role))


def arguments(service: VLMService, pool: Pool, variant: Variant, revision: Revision) -> list[str]:
    """Return the command line without the user's extra arguments (docs/contract.md)."""
    model, settled = service.spec.model, revision.resolved
    loaded = ",".join(stage.value for stage in stages(service.spec.pools, revision.role))
    found = [
        revision.role.value,
        *model_mount(service).args,
        f"--served-name={service.spec.model.served_name}",
        f"--stages={loaded}",
        f"--bind={settled.bind}",
        f"--grpc-port={names.PORT_GRPC}",
        f"--http-port={names.PORT_HTTP}",
        f"--block-size={settled.block_size}",
        f"--dtype={model.dtype.value.lower()}",
        f"--kv-dtype={model.kv_cache_dtype.flag}",
        *_kv_arguments(pool.kv),
        *disk_mount(pool.encoder_cache).args,
        *_session_pin_arguments(pool.encoder_cache),
        *_thread_arguments(variant),
        f"--drain-timeout-seconds={settled.drain_seconds}",
        f"--compat={settled.compat}",
    ]
    found += identity_mount(service, revision).args
    if pool.max_lent_requests:
        found.append(f"--max-lent-requests={pool.max_lent_requests}")
    if model.max_model_len is not None:
        found.append(f"--max-model-len={model.max_model_len}")
    if model.weights is not None and model.weights.text != "auto":
        found.append(f"--weights={model.weights.text}")
    found += scales_mount(model).args
    return found


def _readiness(revision: Revision) -> Part:
    """Return the handler of the readiness probe: a kubelet's gRPC probe cannot use TLS."""
    if revision.resolved.identity:
        return {"httpGet": {"path": "/readyz", "port": "http"}}
    return {"grpc": {"port": names.PORT_GRPC, "service": revision.role.value}}


def _thread_arguments(variant: Variant) -> list[str]:
    """Set one thread per CPU of the limit.

    With more threads, the kernel throttles the container and threads wait for each other.
    """
    limit = variant.resources.limits.get("cpu")
    return [] if limit is None else [f"--threads={math.ceil(quantity.parse(limit))}"]


def _resources(variant: Variant, requests: Mapping[str, str]) -> Part:
    """Return the variant's resources with `requests` that it does not set itself.

    A limit alone is also the request.
    """
    resources = variant.resources.to_dict()
    own = {*resources.get("requests", {}), *resources.get("limits", {})}
    if added := {name: size for name, size in requests.items() if name not in own}:
        resources["requests"] = {**resources.get("requests", {}), **added}
    return resources


def _session_pin_arguments(cache: EncoderCache | None) -> list[str]:
    seconds = None if cache is None else cache.session_pin_seconds
    return [] if seconds is None else [f"--session-pin-seconds={seconds}"]


def _kv_arguments(kv: KvCache | None) -> list[str]:
    if kv is None:
        return []
    arguments = []
    if kv.memory is not None:
        arguments.append(f"--kv-memory-bytes={int(quantity.parse(kv.memory))}")
    if kv.memory_percent is not None:
        arguments.append(f"--kv-memory-percent={kv.memory_percent}")
    if kv.reserve_percent is not None:
        arguments.append(f"--kv-reserve-percent={kv.reserve_percent}")
    if kv.visual_percent is not None:
        arguments.append(f"--kv-visual-percent={kv.visual_percent}")
    if kv.prune_text is not None:
        arguments.append(f"--kv-prune-text={kv.prune_text}")
    return arguments


def place(service: VLMService, classes: Mapping[str, NodeClassState]) -> VLMService:
    """Fill in the placement and the devices of all variants.

    Args:
        service: the service as the user wrote it.
        classes: the cluster's VLMNodeClasses by name.

    Raises:
        SpecError: a class does not exist, or does not allow the role.
    """
    pools = {}
    for role, pool in service.spec.pools.present.items():
        variants = [_placed(role, variant, classes) for variant in pool.variants]
        pools[role.value] = pool.model_copy(update={"variants": variants})
    spec = service.spec
    placed = spec.model_copy(update={"pools": spec.pools.model_copy(update=pools)})
    return service.model_copy(update={"spec": placed})


def _placed(role: Role, variant: Variant, classes: Mapping[str, NodeClassState]) -> Variant:
    if variant.node_class_ref is None:
        return variant
    name = variant.node_class_ref.name
    path = f"spec.pools.{role}.variants[{variant.name}].nodeClassRef"
    node_class = classes.get(name)
    if node_class is None:
        raise SpecError(path, f"VLMNodeClass {name} does not exist: create it")
    if node_class.roles and role not in node_class.roles:
        allowed = " and ".join(sorted(node_class.roles))
        raise SpecError(path, f"VLMNodeClass {name} takes {allowed} only: choose another class")
    placement = Placement(
        node_selector=dict(node_class.node_selector),
        tolerations=[Toleration.model_validate(item) for item in node_class.tolerations],
    )
    resources = variant.resources
    if node_class.accelerator is not None:
        limits = {node_class.accelerator: str(node_class.accelerators), **resources.limits}
        resources = ResourceRequirements(requests=resources.requests, limits=limits)
    return variant.model_copy(update={"placement": placement, "resources": resources})
