"""Decides the replicas of all pools: bounds of each pool first, then one allocation.

view ─▶ capacity ─▶ bounds of each pool (ownership, pace) ─▶ allocate ─▶ decisions
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from vlm_operator.api import ScalingMode
from vlm_operator.api.enums import AutoscalingPolicy
from vlm_operator.autoscale.allocation.allocate import allocate
from vlm_operator.autoscale.allocation.bounds import PoolContext, ReplicaBounds
from vlm_operator.autoscale.allocation.capacity import count_capacity, exhausted
from vlm_operator.autoscale.allocation.decision_message import advised, decision_of
from vlm_operator.autoscale.allocation.history import (
    KEPT_DECISIONS,
    KEPT_SECONDS,
    Change,
    Exhausted,
    ScalingHistory,
    ScalingMemory,
)
from vlm_operator.autoscale.allocation.ownership import external, manual, off
from vlm_operator.autoscale.allocation.pace import auto
from vlm_operator.autoscale.estimating.estimate import Estimate
from vlm_operator.autoscale.outcome import Decision
from vlm_operator.autoscale.policy import PoolPolicy, ServicePolicy
from vlm_operator.autoscale.view import PoolView, View
from vlm_operator.names import Role

_NOTHING = PoolView(replicas=None, owner=None, live={}, pods=())


def decide_replicas(
    policy: ServicePolicy, view: View, estimate: Estimate, memory: ScalingMemory
) -> tuple[dict[Role, Decision], ScalingMemory]:
    """Choose every pool's replicas.

    Args:
        policy: what the manifest says.
        view: what was seen.
        estimate: what each pool needs.
        memory: what the last call returned.

    Returns:
        A decision for every pool of the policy, and the memory for the next call.
    """
    memory = dataclasses.replace(memory, strained_at=_strained(policy, view, estimate, memory))
    contexts = {
        role: _case(policy, pool, view, estimate, memory) for role, pool in policy.pools.items()
    }
    lacking, given = _nodes_lacking(contexts), _nodes_given(contexts)
    contexts = {role: _told(context, lacking, given) for role, context in contexts.items()}
    bounds_by_role: dict[Role, ReplicaBounds] = {}
    paces: dict[Role, ScalingHistory] = {}
    for role, context in contexts.items():
        bounds_by_role[role], paces[role] = _replica_bounds(context)
    allocations = allocate(contexts, bounds_by_role)
    real, advice = bounds_by_role, allocations
    if policy.apply is AutoscalingPolicy.ADVISORY:
        real = {
            role: _unadvised(context, bounds_by_role[role]) for role, context in contexts.items()
        }
        allocations = allocate(contexts, real)
    decisions = {}
    for role, context in contexts.items():
        now = dataclasses.replace(context, pace=paces[role])
        decisions[role] = decision_of(now, real[role], allocations[role], contexts)
        if real[role] is not bounds_by_role[role]:
            told = decision_of(now, bounds_by_role[role], advice[role], contexts)
            decisions[role] = advised(decisions[role], told)
        paces[role] = _remember(now, decisions[role], memory.pools.get(role))
    return decisions, dataclasses.replace(memory, pools=paces)


def _nodes_lacking(contexts: Mapping[Role, PoolContext]) -> dict[str, Exhausted]:
    """Node classes that a pool has found at this tick to give no node."""
    return {
        item.node_class: known
        for context in contexts.values()
        for item in context.policy.variants
        if item.node_class is not None
        and (known := context.pace.exhausted.get(item.name)) is not None
        and known.nodes
        and known.since == context.now
    }


def _nodes_given(contexts: Mapping[Role, PoolContext]) -> dict[str, float]:
    """When a pod of any pool last got a node, by node class."""
    found: dict[str, float] = {}
    for context in contexts.values():
        classes = {item.name: item.node_class for item in context.policy.variants}
        for pod in context.pool.pods:
            name = classes.get(pod.variant)
            if name is not None and pod.scheduled_since is not None:
                found[name] = max(found.get(name, pod.scheduled_since), pod.scheduled_since)
    return found


def _told(
    context: PoolContext, lacking: Mapping[str, Exhausted], given: Mapping[str, float]
) -> PoolContext:
    """The same pool, which need not wait in vain for nodes that another pool did not get.

    What a pool knows from others alone (no pod of its own was late) ends when others get nodes.
    """
    known = dict(context.pace.exhausted)
    for item in context.policy.variants:
        name, own = item.node_class or "", known.get(item.name)
        if own is None and name in lacking:
            known[item.name] = dataclasses.replace(lacking[name], late=())
        elif own is not None and not own.late and given.get(name, own.since) > own.since:
            del known[item.name]
    if known == context.pace.exhausted:
        return context
    return dataclasses.replace(context, pace=dataclasses.replace(context.pace, exhausted=known))


def _strained(
    policy: ServicePolicy, view: View, estimate: Estimate, memory: ScalingMemory
) -> float | None:
    """When a target was last closer than shrinking allows."""
    constants = policy.constants
    close = any(
        item.count > 0 and item.attainable and item.exceeds(constants.ttft_margin)
        for item in estimate.attributions
    )
    itl = estimate.itl_p95_seconds
    if itl is not None and policy.itl_seconds is not None and math.isfinite(itl):
        close = close or itl > constants.itl_margin * policy.itl_seconds
    return view.now if close else memory.strained_at


def _case(
    service: ServicePolicy,
    policy: PoolPolicy,
    view: View,
    estimate: Estimate,
    memory: ScalingMemory,
) -> PoolContext:
    pool = view.pools.get(policy.role, _NOTHING)
    pace = memory.pools.get(policy.role)
    if pace is None:
        pace = ScalingHistory(since=view.now, mode=policy.mode)
    elif pace.mode is not policy.mode:
        # another owner knew nothing of windows: what stands is where a new one begins
        pace = dataclasses.replace(
            ScalingHistory(since=view.now, mode=policy.mode),
            standing=pace.standing,
            exhausted=pace.exhausted,
            decisions=pace.decisions,
            changes=pace.changes,
        )
    capacity = count_capacity(policy, pool, pace, estimate, service.constants, now=view.now)
    pace = dataclasses.replace(
        pace,
        changes=_carried_out(pace, capacity.replicas),
        exhausted=exhausted(policy, pool, capacity, pace, service.constants, now=view.now),
    )
    others = {**memory.pools, policy.role: pace}
    return PoolContext(
        service=service,
        policy=policy,
        view=view,
        pool=pool,
        estimate=estimate,
        capacity=capacity,
        pace=pace,
        memory=dataclasses.replace(memory, pools=others),
    )


def _replica_bounds(context: PoolContext) -> tuple[ReplicaBounds, ScalingHistory]:
    if context.policy.mode is ScalingMode.MANUAL:
        return manual(context), context.pace
    if context.policy.mode is ScalingMode.EXTERNAL:
        return external(context), context.pace
    if context.service.apply is AutoscalingPolicy.OFF:
        return off(context), context.pace
    return auto(context)


def _unadvised(context: PoolContext, bounds: ReplicaBounds) -> ReplicaBounds:
    """What a pool may become where advice is not followed."""
    return off(context) if context.policy.mode is ScalingMode.AUTO else bounds


def _carried_out(pace: ScalingHistory, before: int) -> tuple[Change, ...]:
    """The changes that the cluster has seen: one that it has not is decided anew."""
    if pace.changes and pace.changes[-1].before == before != pace.changes[-1].to:
        return pace.changes[:-1]
    return pace.changes


def _remember(
    context: PoolContext, decision: Decision, earlier: ScalingHistory | None
) -> ScalingHistory:
    """Note what was decided; the same decision again keeps the time of the first."""
    pace = dataclasses.replace(context.pace, standing=dict(decision.variants))
    if decision.before == decision.to:
        return pace
    known = earlier.changes if earlier is not None else ()
    change = Change(context.now, decision.before, decision.to)
    again = len(known) > len(context.pace.changes) and (known[-1].before, known[-1].to)
    if again == (change.before, change.to):
        return dataclasses.replace(pace, changes=known)
    oldest = context.now - KEPT_SECONDS
    recent = tuple(item for item in context.pace.changes if item.at > oldest)
    return dataclasses.replace(
        pace,
        changes=(*recent, change),
        decisions=(*pace.decisions, decision)[-KEPT_DECISIONS:],
    )
