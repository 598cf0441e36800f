"""A rollout without a cluster: the operator's own turns, on pods that are ready at once. Pure."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping

from vlm_operator import names
from vlm_operator.api import VLMService
from vlm_operator.autoscale.decide import Memory
from vlm_operator.cluster import DEPLOYMENT, Manifest
from vlm_operator.names import Role
from vlm_operator.plan import pool_claim
from vlm_operator.reconcile.decisions import Intent, Options, intend
from vlm_operator.state import DeploymentState, NodeClassState, Observed

_MOST = 1000  # steps; no rollout has as many pods


@dataclasses.dataclass(frozen=True)
class Row:
    """One step.

    Attributes:
        counts: pods of older revisions and of the newest, by role.
        awaits: what the next step waits for, "" after the last one.
    """

    counts: Mapping[Role, tuple[int, int]]
    awaits: str


def children(
    service: VLMService, node_classes: Mapping[str, NodeClassState], options: Options
) -> list[Manifest]:
    """Every object that the operator makes of a service where nothing is there yet.

    Raises:
        SpecError: the node classes do not allow what the manifest asks for.
    """
    intent = intend(service, _nothing(node_classes), Memory(), options=options)
    return _objects(intent)


def rehearse(
    old: VLMService,
    new: VLMService,
    node_classes: Mapping[str, NodeClassState],
    options: Options,
) -> tuple[Row, ...]:
    """The steps from a service that runs as `old` says to one that runs as `new` says.

    Raises:
        SpecError: the node classes do not allow what a manifest asks for.
    """
    observed = _nothing(node_classes)
    observed = _carried_out(intend(old, observed, Memory(), options=options), observed)
    # the same object, changed: its children keep their names
    new = new.model_copy(update={"name": old.name, "namespace": old.namespace})
    rows: list[Row] = []
    for _ in range(_MOST):
        intent = intend(new, observed, Memory(), options=options)
        row = _row(intent)
        if not rows or row != rows[-1]:
            rows.append(row)
        after = _carried_out(intent, observed)
        if intent.step.done or after.children == observed.children:
            break
        observed = after
    return tuple(rows)


def _nothing(node_classes: Mapping[str, NodeClassState]) -> Observed:
    return Observed(
        service=None, children={}, pods=(), node_classes=node_classes, samples={}, now=0.0
    )


def _objects(intent: Intent) -> list[Manifest]:
    """The plan, each VLMPool with the number that the autoscaler writes into it."""
    found = copy.deepcopy(list(intent.plan.objects))
    claims = {
        item["metadata"]["name"]: item["spec"]["replicas"]
        for role, number in intent.claims.items()
        for item in (pool_claim(intent.service, role, number),)
    }
    for item in found:
        name = item["metadata"]["name"]
        if item["kind"] == names.KIND_POOL and name in claims:
            item["spec"]["replicas"] = claims[name]
    return found


def _carried_out(intent: Intent, observed: Observed) -> Observed:
    """What is there once a plan was applied and every pod that it asks for is ready."""
    found: dict[tuple[str, str], Manifest] = {}
    for item in _objects(intent):
        key = (item["kind"], item["metadata"]["name"])
        if item["kind"] == names.KIND_POOL and "replicas" not in item["spec"]:
            item["spec"]["replicas"] = observed.children[key]["spec"]["replicas"]
        if item["kind"] == DEPLOYMENT.kind:
            count = item["spec"]["replicas"]
            item["status"] = dict.fromkeys(("replicas", "readyReplicas"), count)
            item["status"]["availableReplicas"] = count
        found[key] = item
    return dataclasses.replace(observed, children=found)


def _row(intent: Intent) -> Row:
    newest = {item.id for item in intent.revisions.values()}
    compat = intent.revisions[Role.GATEWAY, ""].resolved.compat
    counts: dict[Role, tuple[int, int]] = {}
    for manifest in intent.plan.objects:
        if manifest["kind"] != DEPLOYMENT.kind:
            continue
        item = DeploymentState.of(manifest)
        assert item is not None, "the plan gives every Deployment its role"
        was, now = counts.get(item.role, (0, 0))
        fresh = item.compat == compat if item.role is Role.GATEWAY else item.revision in newest
        size = item.desired
        counts[item.role] = (was, now + size) if fresh else (was + size, now)
    return Row(counts, intent.step.waiting)
