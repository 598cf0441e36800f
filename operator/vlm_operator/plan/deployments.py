"""Deployments: one per role, variant and revision, and one for the gateway.

Of an older revision only the number of replicas is ours to change; the rest is repeated as it is.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping

from vlm_operator import names
from vlm_operator.api import VLMService
from vlm_operator.cluster import DEPLOYMENT, Manifest
from vlm_operator.names import Role
from vlm_operator.pods import Images, gateway_template, labels, selector, worker_template
from vlm_operator.state import (
    ANNOTATION_INPUTS,
    ANNOTATION_RESOLVED,
    Observed,
    Revision,
)

_OWN_LABELS = (f"{names.GROUP}/", "app.kubernetes.io/")


@dataclasses.dataclass(frozen=True)
class Options:
    """What the operator's own settings add to a plan."""

    images: Images = dataclasses.field(default_factory=Images)
    operator_namespace: str = names.OPERATOR_NAMESPACE


def owner_reference(service: VLMService) -> dict[str, object]:
    """What makes an object a child: it goes with the service."""
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND_SERVICE,
        "name": service.name,
        "uid": service.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def deployments(
    service: VLMService,
    observed: Observed,
    revisions: Mapping[tuple[Role, str], Revision],
    replicas: Mapping[tuple[Role, str, str], int],
    options: Options,
) -> Iterator[Manifest]:
    """Every Deployment of the pools, of the newest and of older revisions."""
    current = {(role, name, item.id): item for (role, name), item in revisions.items()}
    for (role, name, identity), count in sorted(replicas.items()):
        revision = current.get((role, name, identity))
        if revision is None:
            # an old revision: whatever its pods were made of, only their number is ours to change
            yield _old_deployment(service, observed, role, name, identity, count)
            continue
        pool = service.spec.pools.of(role)
        assert pool is not None
        variant = next(item for item in pool.variants if item.name == name)
        template = worker_template(service, pool, variant, revision, options.images)
        yield _deployment(
            service,
            revision,
            names.deployment(service.name, role, name, identity),
            count,
            template,
            match={**selector(service.name, role), names.LABEL_VARIANT: name}
            | {names.LABEL_REVISION: identity},
        )


def gateway_deployment(service: VLMService, revision: Revision, options: Options) -> Manifest:
    """The gateway's Deployment: one, rolled in place by Kubernetes."""
    return _deployment(
        service,
        revision,
        names.child(service.name, Role.GATEWAY),
        0 if service.spec.suspend else service.spec.gateway.replicas,
        gateway_template(service, revision, options.images),
        match=selector(service.name, Role.GATEWAY),
    )


def _deployment(
    service: VLMService,
    revision: Revision,
    name: str,
    replicas: int,
    template: dict[str, object],
    *,
    match: dict[str, str],
) -> Manifest:
    stored = json.dumps(dataclasses.asdict(revision.resolved), sort_keys=True)
    return {
        "apiVersion": DEPLOYMENT.api_version,
        "kind": DEPLOYMENT.kind,
        "metadata": {
            "name": name,
            "namespace": service.namespace,
            "labels": labels(service, revision),
            "annotations": {ANNOTATION_INPUTS: revision.inputs, ANNOTATION_RESOLVED: stored},
            "ownerReferences": [owner_reference(service)],
        },
        "spec": {
            "replicas": replicas,
            "revisionHistoryLimit": 1,
            "selector": {"matchLabels": match},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
            },
            "template": template,
        },
    }


def _old_deployment(
    service: VLMService, observed: Observed, role: Role, variant: str, identity: str, count: int
) -> Manifest:
    """Repeat an old revision's Deployment as it was applied, with another number of replicas."""
    name = names.deployment(service.name, role, variant, identity)
    live = observed.child(DEPLOYMENT.kind, name)
    assert live is not None, f"{name} is in the step, so it was seen"
    meta, spec = live["metadata"], live["spec"]
    kept = ("revisionHistoryLimit", "selector", "strategy", "template")
    notes = {
        key: value
        for key, value in meta.get("annotations", {}).items()
        if key in (ANNOTATION_INPUTS, ANNOTATION_RESOLVED)
    }
    return {
        "apiVersion": DEPLOYMENT.api_version,
        "kind": DEPLOYMENT.kind,
        "metadata": {
            "name": name,
            "namespace": service.namespace,
            "labels": {
                key: value for key, value in meta["labels"].items() if key.startswith(_OWN_LABELS)
            },
            "annotations": notes,
            "ownerReferences": [owner_reference(service)],
        },
        "spec": {"replicas": count, **{key: spec[key] for key in kept if key in spec}},
    }
