"""Plans Deployments: one per role, variant and revision, and one per compat for the gateway.

Of a Deployment of an older revision, only replicas and annotations of the rollout change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from vlm_operator import names
from vlm_operator.api import VLMService
from vlm_operator.cluster import DEPLOYMENT, Manifest
from vlm_operator.names import Role
from vlm_operator.plan.policies import Network
from vlm_operator.pods.gateway import gateway_template
from vlm_operator.pods.parts import Images, labels, selector
from vlm_operator.pods.worker import worker_template
from vlm_operator.rollout.steps import Step
from vlm_operator.state import Observed, Resolved, Revision
from vlm_operator.state.deployments import (
    ANNOTATION_FAILED,
    ANNOTATION_INITIAL,
    ANNOTATION_INPUTS,
    ANNOTATION_RESOLVED,
)

_OWN_LABELS = (f"{names.GROUP}/", "app.kubernetes.io/")


@dataclasses.dataclass(frozen=True)
class Options:
    images: Images = dataclasses.field(default_factory=Images)
    network: Network = dataclasses.field(default_factory=Network)


def owner_reference(service: VLMService) -> dict[str, object]:
    """Return the ownerReference of a child; garbage collection deletes it with the service."""
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
    step: Step,
) -> Iterator[Manifest]:
    """Yield the pools' Deployments, of the newest and of older revisions.

    `replicas` are those of `step`, raised by pods that still drain.
    """
    current = {(role, name, item.id): item for (role, name), item in revisions.items()}
    live: dict[tuple[Role, str, str], str] = {}
    for item in observed.deployments():  # ordered by name; of duplicates, the first is kept
        live.setdefault((item.role, item.variant, item.revision), item.name)
    for key, count in sorted(replicas.items()):
        role, name, identity = key
        notes = _notes(step, key)
        revision = current.get(key)
        # an existing Deployment keeps its name; version 0.1 used other names
        deployment_name = live.get(key) or names.deployment(service.name, role, name, identity)
        if revision is None or _of_another_operator(observed, deployment_name, revision):
            # its pod template is unknown to this operator, so only the replicas change
            yield _as_it_was(service, observed, deployment_name, count, notes)
            continue
        pool = service.spec.pools.of(role)
        assert pool is not None
        variant = next(item for item in pool.variants if item.name == name)
        template = worker_template(service, pool, variant, revision)
        yield _deployment(
            service,
            revision,
            deployment_name,
            count,
            template,
            match={**selector(service.name, role), names.LABEL_VARIANT: name}
            | {names.LABEL_REVISION: identity},
            notes=notes,
            min_ready=pool.rollout.min_ready_seconds,
        )


def gateway_deployments(
    service: VLMService, observed: Observed, revision: Revision, step: Step
) -> Iterator[Manifest]:
    """Yield the gateway's Deployments, one per compat.

    While the compat stays, Kubernetes rolls the Deployment in place. A gateway works with pods of
    one compat only, so a new compat gets a second Deployment.
    """
    live = {item.compat: item for item in observed.deployments() if item.role is Role.GATEWAY}
    usual = names.child(service.name, Role.GATEWAY)
    taken = {item.name for item in live.values()}
    for compat, count in sorted(step.gateways.items()):
        present = live.get(compat)
        if compat != revision.resolved.compat:
            assert present is not None, f"gateways of {compat} are in the step, so they were seen"
            initial = present.initial
            if initial is None and count < present.desired:
                initial = present.desired
            note = {} if initial is None else {ANNOTATION_INITIAL: str(initial)}
            yield _as_it_was(service, observed, present.name, count, note)
            continue
        match = selector(service.name, Role.GATEWAY)
        name = usual if present is None else present.name
        if present is None and usual in taken:
            name = names.gateway(service.name, compat)
        if name != usual:
            match |= {names.LABEL_COMPAT: compat}
        same = present is not None and present.revision == revision.id
        if same and _of_another_operator(observed, name, revision):
            yield _as_it_was(service, observed, name, count, {})
            continue
        template = gateway_template(service, revision)
        yield _deployment(service, revision, name, count, template, match=match)


def _of_another_operator(observed: Observed, name: str, revision: Revision) -> bool:
    """Whether an operator with another version of the pod template created this Deployment."""
    older = revision.resolved.template != Resolved.template
    return older and observed.child(DEPLOYMENT.kind, name) is not None


def _notes(step: Step, key: tuple[Role, str, str]) -> dict[str, str]:
    notes = {}
    if key in step.initial:
        notes[ANNOTATION_INITIAL] = str(step.initial[key])
    if key in step.failed:
        notes[ANNOTATION_FAILED] = step.failed[key]
    return notes


def _deployment(
    service: VLMService,
    revision: Revision,
    name: str,
    replicas: int,
    template: dict[str, object],
    *,
    match: dict[str, str],
    notes: Mapping[str, str] | None = None,
    min_ready: int = 0,
) -> Manifest:
    annotations = {
        ANNOTATION_INPUTS: revision.inputs,
        ANNOTATION_RESOLVED: revision.resolved.text(),
    }
    return {
        "apiVersion": DEPLOYMENT.api_version,
        "kind": DEPLOYMENT.kind,
        "metadata": _metadata(
            service, name, labels(service, revision), {**annotations, **(notes or {})}
        ),
        "spec": {
            "replicas": replicas,
            **({"minReadySeconds": min_ready} if min_ready else {}),
            "revisionHistoryLimit": 1,
            "selector": {"matchLabels": match},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
            },
            "template": template,
        },
    }


def _as_it_was(
    service: VLMService, observed: Observed, name: str, count: int, notes: Mapping[str, str]
) -> Manifest:
    """Return the applied fields of an existing Deployment with other replicas and notes."""
    live = observed.child(DEPLOYMENT.kind, name)
    assert live is not None, f"{name} is in the step, so it was seen"
    meta, spec = live["metadata"], live["spec"]
    kept = ("revisionHistoryLimit", "selector", "strategy", "template", "minReadySeconds")
    own_labels = {
        key: value for key, value in meta["labels"].items() if key.startswith(_OWN_LABELS)
    }
    annotations = {
        key: value
        for key, value in meta.get("annotations", {}).items()
        if key in (ANNOTATION_INPUTS, ANNOTATION_RESOLVED)
    }
    return {
        "apiVersion": DEPLOYMENT.api_version,
        "kind": DEPLOYMENT.kind,
        "metadata": _metadata(service, name, own_labels, {**annotations, **notes}),
        "spec": {"replicas": count, **{key: spec[key] for key in kept if key in spec}},
    }


def _metadata(
    service: VLMService, name: str, own_labels: Mapping[str, str], annotations: Mapping[str, str]
) -> Manifest:
    return {
        "name": name,
        "namespace": service.namespace,
        "labels": own_labels,
        "annotations": annotations,
        "ownerReferences": [owner_reference(service)],
    }
