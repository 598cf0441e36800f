"""From one view of a service to the next step of its rollout. Pure."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from vlm_operator.api import VLMService, quantity, stages
from vlm_operator.api.enums import NoSpareCapacity
from vlm_operator.api.pool import PoolRollout
from vlm_operator.names import Role
from vlm_operator.rollout import (
    Bill,
    Course,
    Pace,
    Step,
    course,
    next_step,
    sizes,
    within_budget,
)
from vlm_operator.state import DeploymentState, Observed, Revision


def plot(
    service: VLMService,
    observed: Observed,
    revisions: Mapping[tuple[Role, str], Revision],
    *,
    patience: float,
    progressed: float,
) -> Course:
    """Choose where the rollout goes.

    `patience` is as in `roll`; `progressed` is when the service last got on, in seconds since the
    epoch.
    """
    loads = {
        role: frozenset(stage.value for stage in stages(service.spec.pools, role))
        for role in service.spec.pools.present
    }
    return course(
        revisions,
        loads,
        observed.deployments(),
        observed.pods,
        service.spec.rollout,
        patience=patience,
        progressed=progressed,
        now=observed.now,
    )


def roll(
    service: VLMService,
    observed: Observed,
    whither: Course,
    target: Mapping[tuple[Role, str], int],
    *,
    patience: float,
) -> Step:
    """Decide the next step.

    Args:
        service: with its defaults filled in.
        observed: what was seen.
        whither: from `plot`.
        target: replicas of each pool's variants in the end.
        patience: seconds that a surge pod may wait for a node.
    """
    live = observed.deployments()
    front = 0 if service.spec.suspend else service.spec.gateway.replicas
    whole = sizes(whither.goals, {**target, (Role.GATEWAY, ""): front}, live)
    gateways = collections.Counter(
        pod.compat for pod in observed.pods if pod.role is Role.GATEWAY and not pod.finished
    )
    paces = _paces(service, observed, whither, whole, patience)
    step = next_step(whither, whole, live, gateways, paces, service.spec.rollout.strategy)
    tight = [role for role, pace in paces.items() if pace.surge == 0 == pace.unavailable]
    if step.done or not tight:
        return step
    reason = f"{step.waiting}; spec.budget has no room for one more {tight[0]} pod"
    return dataclasses.replace(step, waiting=reason, over_budget=True)


def rolling(whither: Course, own: Sequence[DeploymentState]) -> bool:
    """Whether pods of another revision than the goal's are still there."""
    goals = {(*key, goal.revision) for key, goal in whither.goals.items()}
    return any(
        item.desired + item.replicas > 0
        for item in own
        if (item.role, item.variant, item.revision) not in goals
    )


def _paces(
    service: VLMService,
    observed: Observed,
    whither: Course,
    whole: Mapping[tuple[Role, str], int],
    patience: float,
) -> dict[Role, Pace]:
    """What each pool's settings, the budget and full nodes leave of surge."""
    found = {}
    for role in {name for name, _ in whole} - {Role.GATEWAY}:
        pool = service.spec.pools.of(role)
        count = sum(number for (name, _), number in whole.items() if name is role)
        found[role] = Pace.of(PoolRollout() if pool is None else pool.rollout, count)
    paces = within_budget(found, _bills(service, observed, whole))
    chosen = service.spec.rollout.when_no_spare_capacity
    if chosen is NoSpareCapacity.WAIT:
        return paces
    goals = {(*key, goal.revision) for key, goal in whither.goals.items()}
    stuck = {role for role, pace in paces.items() if pace.surge == 0 == pace.unavailable} | {
        pod.role
        for pod in observed.pods
        if pod.pending
        and (pod.role, pod.variant, pod.revision) in goals
        and observed.now - pod.created > patience
    }
    last_too = chosen is NoSpareCapacity.DRAIN_FIRST
    return {
        role: dataclasses.replace(pace, drain_first=role in stuck, last_too=last_too)
        for role, pace in paces.items()
    }


def _bills(
    service: VLMService, observed: Observed, whole: Mapping[tuple[Role, str], int]
) -> Iterator[Bill]:
    """The budget's two bounds: devices and cost."""
    budget = service.spec.budget
    if budget is None:
        return
    devices, costs = {}, {}
    for role, pool in service.spec.pools.present.items():
        for variant in pool.variants:
            reference = variant.node_class_ref
            known = observed.node_classes.get(reference.name) if reference else None
            devices[role, variant.name] = float(
                variant.accelerators(known.accelerator if known else None)
            )
            costs[role, variant.name] = (known.cost_per_hour if known else None) or 0.0
    limit = budget.max_cost_per_hour
    for prices, bound in (
        (devices, budget.max_accelerators),
        (costs, None if limit is None else float(quantity.parse(limit))),
    ):
        each: dict[Role, float] = {}
        for (role, _), price in prices.items():
            each[role] = max(each.get(role, 0.0), price)
        steady = sum(prices.get(key, 0.0) * count for key, count in whole.items())
        yield Bill(each, steady, bound)
