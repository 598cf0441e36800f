"""What a role's pods are made of, as a digest.

manifest fields that restart pods ─▶ inputs ┐
operator's defaults ─▶ resolved ────────────┴▶ revision

`resolved` stands on every Deployment. While its `base` still matches the manifest, it is kept: a
new operator with another default image changes no digest, and so restarts no pod. Settings that
enter pods are in it too: changed ones are for new revisions.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from vlm_operator.api import Drain, Pool, Variant, VLMService, resolve, stages
from vlm_operator.names import Role
from vlm_operator.state import DeploymentState, Resolved, Revision


def keep_defaults(
    written: VLMService, deployments: Iterable[DeploymentState], *, worker_image: str
) -> tuple[VLMService, Resolved]:
    """Fill in a service's defaults: those that its live pods were made with, else today's.

    Args:
        written: the service as the user wrote it.
        deployments: what is there.
        worker_image: the operator's default image.

    Returns:
        The service with every default filled in, and what its pods must agree on.
    """
    service = resolve(written, worker_image=worker_image)
    base = _digest("", _base_inputs(written, service))
    for deployment in deployments:
        stored = _read(deployment)
        if stored is not None and stored.base == base:
            return resolve(written, worker_image=stored.image), stored
    block_size = service.spec.model.block_size_tokens
    assert block_size is not None, "resolve fills it in"
    images = {role.value: pool.image for role, pool in service.spec.pools.present.items()}
    compat = _digest(base, {"images": images, "blockSize": block_size})
    return service, Resolved(
        base=base, image=worker_image, block_size=block_size, compat=compat, drain_seconds=0
    )


def current_revisions(
    service: VLMService,
    shared: Resolved,
    deployments: Iterable[DeploymentState],
    *,
    pull_policy: str = "",
    bind: str = "::",
) -> dict[tuple[Role, str], Revision]:
    """What every role and variant should run now, gateway included (its variant is "").

    `service` and `shared` come from `keep_defaults`. `pull_policy` and `bind` are the operator's
    settings; a revision that is there keeps those that it was made with.
    """
    live = list(deployments)
    shared = dataclasses.replace(shared, pull_policy=pull_policy, bind=bind)
    found: dict[tuple[Role, str], Revision] = {}
    for role, pool in service.spec.pools.present.items():
        for variant in pool.variants:
            inputs = _digest(shared.base, _pool_inputs(service, role, pool, variant))
            found[role, variant.name] = _revision(
                role, variant.name, inputs, shared, live, drain=pool.drain.timeout_seconds
            )
    gateway = service.spec.gateway
    inputs = _digest(
        shared.base,
        {
            "image": gateway.image,
            "resources": gateway.resources.to_dict(),
            "placement": gateway.placement.to_dict(),
            "auth": gateway.auth.to_dict(),
        },
    )
    found[Role.GATEWAY, ""] = _revision(
        Role.GATEWAY, "", inputs, shared, live, drain=gateway.drain.timeout_seconds
    )
    return found


def service_revision(revisions: Mapping[tuple[Role, str], Revision]) -> str:
    """One digest over all roles, for `status.updateRevision`."""
    return _digest("", {f"{role}/{name}": item.id for (role, name), item in revisions.items()})


def _revision(
    role: Role,
    variant: str,
    inputs: str,
    shared: Resolved,
    live: Iterable[DeploymentState],
    *,
    drain: int,
) -> Revision:
    for deployment in live:
        same = (deployment.role, deployment.variant, deployment.inputs) == (role, variant, inputs)
        stored = _read(deployment)
        if same and stored is not None:
            kept = _settings_of(deployment, stored)
            return Revision(role, variant, deployment.revision, inputs, kept)
    resolved = dataclasses.replace(shared, drain_seconds=drain, template=Resolved.template)
    identity = _digest(inputs, {"image": resolved.image, "template": resolved.template})
    return Revision(role, variant, identity, inputs, resolved)


def _settings_of(deployment: DeploymentState, stored: Resolved) -> Resolved:
    """Settings that version 0.1 did not store are read off the pods themselves."""
    return dataclasses.replace(
        stored,
        pull_policy=deployment.pull_policy if stored.pull_policy is None else stored.pull_policy,
        bind=deployment.bind if stored.bind is None else stored.bind,
    )


def _read(deployment: DeploymentState) -> Resolved | None:
    """Read what a Deployment stores; None where somebody garbled it."""
    try:
        return Resolved(**json.loads(deployment.resolved))
    except (ValueError, TypeError):
        return None


def _base_inputs(written: VLMService, service: VLMService) -> dict[str, Any]:
    """What all pods must agree on, so that a change rolls them all."""
    spec = written.spec
    model = spec.model.to_dict()
    for live in ("limits", "servedName"):
        model.pop(live, None)
    return {
        "model": model,
        "image": spec.image,
        "images": {
            role.value: pool.image for role, pool in spec.pools.present.items() if pool.image
        },
        "blockSize": service.spec.model.block_size_tokens,
        "pullSecrets": [item.name for item in spec.image_pull_secrets],
        "transfer": spec.transfer.to_dict(),
    }


def _pool_inputs(service: VLMService, role: Role, pool: Pool, variant: Variant) -> dict[str, Any]:
    placement = None if variant.placement is None else variant.placement.to_dict()
    return {
        "stages": [str(stage) for stage in stages(service.spec.pools, role)],
        "parallelism": pool.parallelism.to_dict(),
        "kv": None if pool.kv is None else pool.kv.to_dict(),
        "engine": pool.engine.to_dict(),
        "pod": pool.pod.to_dict(),
        "placement": placement,
        "nodeClass": variant.node_class_ref and variant.node_class_ref.name,
        "resources": variant.resources.to_dict(),
    }


def _digest(salt: str, value: Mapping[str, Any]) -> str:
    text = json.dumps([salt, value], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def drain_seconds(deployment: DeploymentState, pool: Pool | None) -> float:
    """How long a Deployment's pods may take to finish: as the manifest says now, else as then."""
    if pool is not None:
        return float(pool.drain.timeout_seconds)
    stored = _read(deployment)
    return float(stored.drain_seconds if stored is not None else Drain().timeout_seconds)
