"""Previews a rollout without a cluster: the operator's turns, with pods ready at once. Pure.

Jobs are complete at once, too.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping

from vlm_operator import names
from vlm_operator.api import VLMService
from vlm_operator.autoscale.decide import Memory
from vlm_operator.cluster import DEPLOYMENT, JOB, Manifest
from vlm_operator.names import Role
from vlm_operator.plan.children import replicas_apply
from vlm_operator.reconcile.decisions import Options, TurnPlan, plan_turn
from vlm_operator.state import DeploymentState, NodeClassState, Observed

_MAX_STEPS = 1000  # more than any rollout has


@dataclasses.dataclass(frozen=True)
class Row:
    """One step of a rollout.

    Attributes:
        counts: numbers of pods of older revisions and of the newest one, by role.
        awaits: what the next step waits for; "" after the last one.
    """

    counts: Mapping[Role, tuple[int, int]]
    awaits: str


def children(
    service: VLMService, node_classes: Mapping[str, NodeClassState], options: Options
) -> list[Manifest]:
    """Return every object that the operator creates for a new service.

    Raises:
        SpecError: the manifest is invalid with these node classes.
    """
    turn_plan = plan_turn(service, _empty(node_classes), Memory(), options=options)
    return _objects(turn_plan)


def preview(
    old: VLMService,
    new: VLMService,
    node_classes: Mapping[str, NodeClassState],
    options: Options,
) -> tuple[Row, ...]:
    """Return the steps of the rollout from `old` to `new`, at most 1000.

    Raises:
        SpecError: a manifest is invalid with these node classes.
    """
    observed = _empty(node_classes)
    for _ in range(2 if old.spec.model.cache else 1):  # the first turn of a cache downloads
        observed = _applied(plan_turn(old, observed, Memory(), options=options), observed)
    # an update of the same object, so that its children keep their names
    new = new.model_copy(update={"name": old.name, "namespace": old.namespace})
    rows: list[Row] = []
    for _ in range(_MAX_STEPS):
        turn_plan = plan_turn(new, observed, Memory(), options=options)
        row = _row(turn_plan)
        if not rows or row != rows[-1]:
            rows.append(row)
        after = _applied(turn_plan, observed)
        if turn_plan.step.done or after.children == observed.children:
            break
        observed = after
    return tuple(rows)


def _empty(node_classes: Mapping[str, NodeClassState]) -> Observed:
    return Observed(
        service=None, children={}, pods=(), node_classes=node_classes, samples={}, now=0.0
    )


def _objects(turn_plan: TurnPlan) -> list[Manifest]:
    """Return the plan's objects; each VLMPool has the autoscaler's replica count."""
    objects = copy.deepcopy(list(turn_plan.plan.objects))
    pool_replicas = {
        item["metadata"]["name"]: item["spec"]["replicas"]
        for role, number in turn_plan.pool_replicas.items()
        for item in (replicas_apply(turn_plan.service, role, number),)
    }
    for item in objects:
        name = item["metadata"]["name"]
        if item["kind"] == names.KIND_POOL and name in pool_replicas:
            item["spec"]["replicas"] = pool_replicas[name]
    return objects


def _applied(turn_plan: TurnPlan, observed: Observed) -> Observed:
    """Return the view after a plan is applied, its pods are ready and its Jobs are complete."""
    children = {key: observed.children[key] for key in turn_plan.plan.kept}
    for item in _objects(turn_plan):
        key = (item["kind"], item["metadata"]["name"])
        if item["kind"] == names.KIND_POOL and "replicas" not in item["spec"]:
            item["spec"]["replicas"] = observed.children[key]["spec"]["replicas"]
        if item["kind"] == DEPLOYMENT.kind:
            count = item["spec"]["replicas"]
            item["status"] = dict.fromkeys(("replicas", "readyReplicas"), count)
            item["status"]["availableReplicas"] = count
        if item["kind"] == JOB.kind:
            item["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
        children[key] = item
    return dataclasses.replace(observed, children=children)


def _row(turn_plan: TurnPlan) -> Row:
    newest = {item.id for item in turn_plan.revisions.values()}
    compat = turn_plan.revisions[Role.GATEWAY, ""].resolved.compat
    counts: dict[Role, tuple[int, int]] = {}
    for manifest in turn_plan.plan.objects:
        if manifest["kind"] != DEPLOYMENT.kind:
            continue
        item = DeploymentState.of(manifest)
        assert item is not None, "the plan gives every Deployment its role"
        was, now = counts.get(item.role, (0, 0))
        is_new = item.compat == compat if item.role is Role.GATEWAY else item.revision in newest
        size = item.desired
        counts[item.role] = (was, now + size) if is_new else (was + size, now)
    return Row(counts, turn_plan.step.waiting)
