"""Plans every object of a service.

ServiceAccount, Role, RoleBinding, ConfigMap, NetworkPolicy, PersistentVolumeClaim, Job, Service,
PDB, VLMPool, Deployment

The operator applies them in this order. It deletes objects with the service's labels that the plan
does not contain.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping

from vlm_operator import names
from vlm_operator.api import VLMService
from vlm_operator.api.enums import DisruptionPolicy, ScalingMode
from vlm_operator.api.pool import Disruption
from vlm_operator.cluster import (
    CONFIG_MAP,
    DEPLOYMENT,
    JOB,
    NETWORK_POLICY,
    PDB,
    ROLE,
    ROLE_BINDING,
    SERVICE,
    SERVICE_ACCOUNT,
    VLM_POOL,
    Kind,
    Manifest,
)
from vlm_operator.names import Role
from vlm_operator.plan.deployments import Options, deployments, gateway_deployments, owner_reference
from vlm_operator.plan.model_cache import plan_cache
from vlm_operator.plan.policies import live_downloads, network_policies
from vlm_operator.pods.gateway import CONFIG_KEY, gateway_config
from vlm_operator.pods.parts import object_labels, selector
from vlm_operator.rollout.steps import Step
from vlm_operator.state import Observed, Revision

# The operator has these permissions itself; RBAC allows it to grant no others.
GATEWAY_RULE = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}


@dataclasses.dataclass(frozen=True)
class Plan:
    """All objects that should exist, in the order of application.

    Attributes:
        kept: kind and name of existing objects that stay as they are.
    """

    objects: tuple[Manifest, ...]
    kept: frozenset[tuple[str, str]] = frozenset()

    @property
    def named(self) -> frozenset[tuple[str, str]]:
        planned = ((item["kind"], item["metadata"]["name"]) for item in self.objects)
        return frozenset(planned) | self.kept


def plan(
    service: VLMService,
    observed: Observed,
    *,
    revisions: Mapping[tuple[Role, str], Revision],
    replicas: Mapping[tuple[Role, str, str], int],
    desired: Mapping[Role, int],
    step: Step,
    options: Options,
) -> Plan:
    """Decide every object of a service.

    Of Deployments of old revisions, only replicas and annotations change. `replicas` are those of
    every Deployment that should exist now, `desired` those of each pool after the rollout. `step`
    has the gateway replicas by compat, and annotations of Deployments.
    """
    roles = service.spec.pools.present
    policies = network_policies(service, options.network, live_downloads=live_downloads(observed))
    cache = plan_cache(service, observed, options.images, owner_reference(service))
    accounts: tuple[Role | str, ...] = (*roles, Role.GATEWAY)
    if service.spec.model.cache is not None:
        accounts += (names.MODEL_PART,)
    return Plan(
        (
            *(
                _object(service, SERVICE_ACCOUNT, role, automountServiceAccountToken=False)
                for role in accounts
            ),
            _object(service, ROLE, Role.GATEWAY, rules=[dict(GATEWAY_RULE)]),
            _role_binding(service, observed),
            _gateway_config(service),
            *(_object(service, NETWORK_POLICY, role, spec=spec) for role, spec in policies.items()),
            *sorted(cache.objects, key=lambda item: item["kind"] == JOB.kind),
            *_services(service),
            *_budgets(service, observed, desired),
            *(_pool(service, role) for role in roles),
            *_gateway_pool(service),
            *deployments(service, observed, revisions, replicas, step),
            *gateway_deployments(service, observed, revisions[Role.GATEWAY, ""], step),
        ),
        kept=cache.kept,
    )


def replicas_apply(service: VLMService, role: Role, replicas: int) -> Manifest:
    """Return the fields of a VLMPool that the autoscaler applies.

    They include the required ones, because the apply creates the VLMPool if it does not exist.
    """
    reference = {"name": service.name, "uid": service.uid}
    spec = {"serviceRef": reference, "role": role.value, "replicas": replicas}
    return _object(service, VLM_POOL, role, spec=spec)


def _object(service: VLMService, kind: Kind, role: Role | str, **fields: object) -> Manifest:
    return {
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "metadata": {
            "name": names.child(service.name, role),
            "namespace": service.namespace,
            "labels": object_labels(service.name, role),
            "ownerReferences": [owner_reference(service)],
        },
        **fields,
    }


def _role_binding(service: VLMService, observed: Observed) -> Manifest:
    """Bind the gateway's accounts to the Role that lets it watch pods.

    They are the operator's, that of the podTemplate, and those of live Deployments: old gateways
    watch pods until they have drained.
    """
    wanted = service.spec.gateway.pod_template.spec.get("serviceAccountName")
    accounts = {names.child(service.name, Role.GATEWAY), *([wanted] if wanted else [])}
    for deployment in observed.deployments():
        live = observed.child(DEPLOYMENT.kind, deployment.name)
        if deployment.role is Role.GATEWAY and live is not None:
            accounts.add(live["spec"]["template"]["spec"].get("serviceAccountName", "default"))
    subjects = [
        {"kind": SERVICE_ACCOUNT.kind, "name": name, "namespace": service.namespace}
        for name in sorted(accounts)
    ]
    role = {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": ROLE.kind,
        "name": names.child(service.name, Role.GATEWAY),
    }
    return _object(service, ROLE_BINDING, Role.GATEWAY, subjects=subjects, roleRef=role)


def _gateway_config(service: VLMService) -> Manifest:
    text = json.dumps(gateway_config(service), indent=1, sort_keys=True)
    return _object(service, CONFIG_MAP, Role.GATEWAY, data={CONFIG_KEY: text + "\n"})


def _services(service: VLMService) -> Iterator[Manifest]:
    for role in service.spec.pools.present:
        yield _object(
            service,
            SERVICE,
            role,
            spec={
                "clusterIP": "None",
                "selector": selector(service.name, role),
                "ports": [
                    _port("grpc", names.PORT_GRPC, "grpc"),
                    _port("http", names.PORT_HTTP, "http"),
                ],
            },
        )
    front = service.spec.gateway.service
    manifest = _object(
        service,
        SERVICE,
        Role.GATEWAY,
        spec={
            "type": front.type.value,
            "selector": selector(service.name, Role.GATEWAY),
            "ports": [_port("http", front.port, "http")],
        },
    )
    if front.annotations:
        manifest["metadata"]["annotations"] = dict(front.annotations)
    yield manifest


def _port(name: str, port: int, target: str) -> dict[str, object]:
    return {"name": name, "port": port, "targetPort": target, "protocol": "TCP"}


def _budgets(
    service: VLMService, observed: Observed, desired: Mapping[Role, int]
) -> Iterator[Manifest]:
    """Yield PodDisruptionBudgets: by default a fifth of the ready pods may be evicted at once.

    Unready pods may always be evicted. A pool with fewer than two pods gets no budget.
    """
    pools = service.spec.pools.present
    counts = {role: (desired[role], pool.disruption) for role, pool in pools.items()}
    counts[Role.GATEWAY] = (service.spec.gateway.replicas, Disruption())
    for role, (count, disruption) in counts.items():
        if count < 2 or disruption.policy is DisruptionPolicy.NONE:
            continue
        chosen = disruption.max_unavailable
        ready = sum(pod.ready and not pod.draining for pod in observed.of(role))
        unavailable: int | str = max(1, min(ready, count) // 5)
        if chosen is not None:
            unavailable = chosen if chosen.endswith("%") else int(chosen)
        spec = {
            "maxUnavailable": unavailable,
            "selector": {"matchLabels": selector(service.name, role)},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        }
        yield _object(service, PDB, role, spec=spec)


def _gateway_pool(service: VLMService) -> Iterator[Manifest]:
    """Yield the VLMPool of the gateway, if another scaler sets its replicas."""
    scaling = service.spec.gateway.scaling
    if scaling is not None:
        spec = {
            "serviceRef": {"name": service.name, "uid": service.uid},
            "role": Role.GATEWAY.value,
            "mode": ScalingMode.EXTERNAL.value,
            "minReplicas": scaling.min_replicas,
            "maxReplicas": scaling.max_replicas,
        }
        yield _object(service, VLM_POOL, Role.GATEWAY, spec=spec)


def _pool(service: VLMService, role: Role) -> Manifest:
    """Return the operator's fields of a VLMPool; only the autoscaler writes `spec.replicas`."""
    pool = service.spec.pools.of(role)
    assert pool is not None
    scaling = pool.scaling
    spec: dict[str, object] = {
        "serviceRef": {"name": service.name, "uid": service.uid},
        "role": role.value,
        "mode": scaling.mode.value,
    }
    if scaling.mode is not ScalingMode.MANUAL:
        spec |= {"minReplicas": scaling.min_replicas, "maxReplicas": scaling.max_replicas}
    return _object(service, VLM_POOL, role, spec=spec)
