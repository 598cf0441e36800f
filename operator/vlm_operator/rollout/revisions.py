"""Computes the revision of each role and variant: a digest of the inputs of its pods.

manifest fields that restart pods ─▶ inputs ┐
operator's defaults ─▶ resolved ────────────┴▶ revision

An annotation of every Deployment stores `resolved`. As long as its `base` matches the manifest,
the operator keeps the stored value. So an operator with another default image changes no digest
and restarts no pod. `resolved` also holds the operator's settings that enter pods; changed
settings apply to new revisions only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from vlm_operator.api import Pool, Variant, VLMService, resolve, stages
from vlm_operator.api.enums import IdentityMode
from vlm_operator.api.gateway import Gateway
from vlm_operator.api.pod_template import PodTemplate
from vlm_operator.api.pool import Drain, EncoderCache
from vlm_operator.errors import SpecError
from vlm_operator.names import Role, digest_of
from vlm_operator.state import DeploymentState, Resolved, Revision
from vlm_operator.state.identities import OPERATOR_CA, IssuerName

_STORED_NAMES = {
    "maxModelLen": "maxModelLenTokens",
    "kvCacheDtype": "kvDtype",
    "memoryPercent": "memoryFractionPercent",
    "extraArgs": "args",
}
"""Renamed fields, with the names from which the digests of live Deployments were computed."""
_EMPTY_OVERLAY: dict[str, Any] = {
    "labels": {},
    "annotations": {},
    "topologySpreadConstraints": [],
    "volumes": [],
    "volumeMounts": [],
}
"""The field `pod` of earlier versions without a value: part of the digests of live Deployments."""


def keep_defaults(
    written: VLMService,
    deployments: Iterable[DeploymentState],
    *,
    worker_image: str,
    gateway_image: str = "",
    identity: str = "",
) -> tuple[VLMService, Resolved]:
    """Fill in a service's defaults: those of its live pods, or the operator's current ones.

    `identity` is the operator's default issuer. Live pods keep theirs until the manifest names
    another one.

    Returns:
        The service with every default filled in, and the values that all its pods share.
    """
    service = resolve(written, worker_image=worker_image, gateway_image=gateway_image)
    base = _digest("", _base_inputs(written, service))
    wanted = written_identity(written)
    for deployment in sorted(deployments, key=lambda item: -item.created):
        stored = Resolved.parse(deployment.resolved)
        same = stored is not None and wanted in (None, stored.identity)
        if stored is not None and stored.base == base and same:
            kept = resolve(
                written, worker_image=stored.image, gateway_image=stored.gateway_image or ""
            )
            return kept, stored
    block_size = service.spec.model.block_size_tokens
    assert block_size is not None, "resolve fills it in"
    images = {role.value: pool.image for role, pool in service.spec.pools.present.items()}
    issuer = identity if wanted is None else wanted
    compat = _digest(base, {"images": images, "blockSize": block_size, **_identity(issuer)})
    return service, Resolved(
        base=base,
        image=worker_image,
        block_size=block_size,
        compat=compat,
        drain_seconds=0,
        gateway_image=gateway_image or None,
        identity=issuer,
    )


def written_identity(written: VLMService) -> str | None:
    """Return the issuer that a manifest asks for, as in `Resolved`; None if it asks for none."""
    identity = written.spec.identity
    if identity.mode is None:
        return None
    if identity.mode is IdentityMode.OFF:
        return ""
    if identity.mode is IdentityMode.OPERATOR_CA:
        return OPERATOR_CA
    reference = identity.issuer_ref
    if reference is None:
        raise SpecError("spec.identity.issuerRef", "is required with mode CertManager")
    return IssuerName(reference.kind, reference.group, reference.name).text


def wanted_identities(
    revisions: Iterable[Revision], deployments: Iterable[DeploymentState]
) -> frozenset[tuple[Role, str]]:
    """Return role and issuer of all certificates that pods of live or planned revisions use."""
    planned = {(item.role, item.resolved.identity) for item in revisions}
    live = {
        (item.role, stored.identity)
        for item in deployments
        if (stored := Resolved.parse(item.resolved)) is not None
    }
    return frozenset((role, identity) for role, identity in planned | live if identity)


def current_revisions(
    service: VLMService,
    shared: Resolved,
    deployments: Iterable[DeploymentState],
    *,
    pull_policy: str = "",
    bind: str = "::",
) -> dict[tuple[Role, str], Revision]:
    """Return the revision that the manifest asks for, by role and variant.

    The gateway is included with variant "". `service` and `shared` come from `keep_defaults`.
    `pull_policy` and `bind` are the operator's settings. An existing revision keeps the settings
    that it was created with.
    """
    live = list(deployments)
    shared = dataclasses.replace(shared, pull_policy=pull_policy, bind=bind)
    # an issuer changes all revisions; plaintext leaves the digests of older versions equal
    salt = _digest(shared.base, _identity(shared.identity)) if shared.identity else shared.base
    revisions: dict[tuple[Role, str], Revision] = {}
    for role, pool in service.spec.pools.present.items():
        for variant in pool.variants:
            inputs = _digest(salt, _pool_inputs(service, role, pool, variant))
            revisions[role, variant.name] = _revision(
                role, variant.name, inputs, shared, live, drain=pool.drain.timeout_seconds
            )
    gateway = service.spec.gateway
    inputs = _digest(
        salt,
        {
            "image": gateway.image,
            "resources": gateway.resources.to_dict(),
            "placement": gateway.placement.to_dict(),
            "auth": gateway.auth.to_dict(),
            **({"tls": gateway.tls.to_dict()} if gateway.tls.secret_ref else {}),
            **_pod_template(gateway.pod_template),
            **_gateway_flags(gateway),
            **_restart(service),
        },
    )
    revisions[Role.GATEWAY, ""] = _revision(
        Role.GATEWAY, "", inputs, shared, live, drain=gateway.drain.timeout_seconds
    )
    return revisions


def service_revision(revisions: Mapping[tuple[Role, str], Revision]) -> str:
    """Return one digest over all roles, for `status.updateRevision`."""
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
        stored = Resolved.parse(deployment.resolved)
        if same and stored is not None:
            kept = _settings_of(deployment, stored)
            return Revision(role, variant, deployment.revision, inputs, kept)
    resolved = dataclasses.replace(shared, drain_seconds=drain, template=Resolved.template)
    identity = _digest(inputs, {"image": resolved.image, "template": resolved.template})
    return Revision(role, variant, identity, inputs, resolved)


def _settings_of(deployment: DeploymentState, stored: Resolved) -> Resolved:
    """Add the settings that version 0.1 did not store, from the Deployment's pod template."""
    return dataclasses.replace(
        stored,
        pull_policy=deployment.pull_policy if stored.pull_policy is None else stored.pull_policy,
        bind=deployment.bind if stored.bind is None else stored.bind,
    )


def _identity(issuer: str) -> dict[str, str]:
    """Return {} for plaintext, so that older digests, which lack the key, stay equal."""
    return {"identity": issuer} if issuer else {}


def _base_inputs(written: VLMService, service: VLMService) -> dict[str, Any]:
    """Return the fields that all pods share; a change of one replaces all pods."""
    spec = written.spec
    model = _as_stored(spec.model.to_dict())
    for live in ("limits", "servedName"):
        model.pop(live, None)
    if spec.model.weights is not None and spec.model.weights.text == "auto":
        del model["weights"]  # the same pods as without the field
    if "cache" in model:
        model["cache"].pop("podTemplate")  # of the Job, not of the pods
    return {
        "model": model,
        "image": spec.image,
        "images": {
            role.value: pool.image for role, pool in spec.pools.present.items() if pool.image
        },
        "blockSize": service.spec.model.block_size_tokens,
        "pullSecrets": [item.name for item in spec.image_pull_secrets],
        "transfer": spec.transfer.to_dict(),
        **({} if spec.tracing is None else {"tracing": spec.tracing.to_dict()}),
    }


def _pool_inputs(service: VLMService, role: Role, pool: Pool, variant: Variant) -> dict[str, Any]:
    placement = None if variant.placement is None else variant.placement.to_dict()
    return {
        "stages": [str(stage) for stage in stages(service.spec.pools, role)],
        "parallelism": pool.parallelism.to_dict(),
        "kv": None if pool.kv is None else _as_stored(pool.kv.to_dict()),
        **_disk(pool.encoder_cache),
        **_session_pins(pool.encoder_cache),
        "engine": _as_stored(pool.engine.to_dict()),
        "pod": _EMPTY_OVERLAY,
        **_pod_template(pool.pod_template),
        **({"maxLentRequests": pool.max_lent_requests} if pool.max_lent_requests else {}),
        "placement": placement,
        "nodeClass": variant.node_class_ref and variant.node_class_ref.name,
        "resources": variant.resources.to_dict(),
        **_restart(service),
    }


def _as_stored(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Rename fields to their names in version 0.1, so that a renamed field changes no digest."""
    return {_STORED_NAMES.get(name, name): value for name, value in fields.items()}


def _disk(cache: EncoderCache | None) -> dict[str, Any]:
    """Return {} without a disk, so that older digests, which lack the key, stay equal."""
    return {} if cache is None or cache.disk is None else {"encoderDisk": cache.disk.to_dict()}


def _session_pins(cache: EncoderCache | None) -> dict[str, Any]:
    """Return {} without pins, so that older digests, which lack the key, stay equal."""
    seconds = None if cache is None else cache.session_pin_seconds
    return {} if seconds is None else {"sessionPinSeconds": seconds}


def _pod_template(template: PodTemplate) -> dict[str, Any]:
    """Return {} for an empty template, so that older digests, which lack the key, stay equal."""
    return {} if template.is_empty else {"podTemplate": template.to_dict()}


def _gateway_flags(gateway: Gateway) -> dict[str, Any]:
    """Return the set flags only, so that older digests, which lack the keys, stay equal."""
    fields = gateway.to_dict()
    names = (
        "limits", "patienceSeconds", "clientPriority", "sessionPrefetch", "clientEmbeddings"
    )  # fmt: skip
    return {name: fields[name] for name in names if fields.get(name)}


def _restart(service: VLMService) -> dict[str, str]:
    """Return {} without the annotation, so that older digests, which lack the key, stay equal."""
    return {"restartedAt": service.restarted_at} if service.restarted_at else {}


def _digest(salt: str, value: Mapping[str, Any]) -> str:
    return digest_of([salt, value], length=8)


def drain_seconds(deployment: DeploymentState, pool: Pool | None) -> float:
    """Return the drain timeout of a Deployment's pods in seconds.

    If the manifest still has the pool, its current value applies; if not, the stored one.
    """
    if pool is not None:
        return float(pool.drain.timeout_seconds)
    stored = Resolved.parse(deployment.resolved)
    return float(stored.drain_seconds if stored is not None else Drain().timeout_seconds)
