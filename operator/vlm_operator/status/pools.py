"""Builds the status of pools: pods by state, load, decisions."""

from __future__ import annotations

from typing import Any

from vlm_operator.names import Role
from vlm_operator.state import Manifest, PodState, Sample
from vlm_operator.status.decisions import decision_status, money, past_status
from vlm_operator.status.inputs import StatusInputs

_HISTORY = 8


def pool_status(view: StatusInputs, role: Role, previous: Manifest) -> dict[str, Any]:
    """Return the content of `status.pools.<role>`; `previous` is its present content."""
    pods = view.observed.of(role)
    decisions = view.history(role)
    found: dict[str, Any] = {
        "desiredReplicas": view.desired.get(role, 0),
        "replicas": len(pods),
        "readyReplicas": len(view.serving(role)),
        "startingReplicas": sum(pod.starting for pod in pods),
        "pendingReplicas": sum(pod.pending for pod in pods),
        "drainingReplicas": sum(pod.draining for pod in pods),
        "updatedReplicas": len(view.updated(role)),
        "variants": _variants(view, role),
        "load": load(view, role),
    }
    decision = view.decisions.get(role)
    if decision is not None and decision.recommendation not in (None, decision.to):
        found["recommendation"] = decision.recommendation
    if decisions:
        told = previous.get("lastDecision", {})
        found["lastDecision"] = decision_status(decisions[-1], told, epoch=view.epoch)
        earlier = [past_status(item) for item in reversed(decisions[:-1])][:_HISTORY]
        if earlier:
            found["history"] = earlier
    return {key: value for key, value in found.items() if value is not None}


def cost_per_hour(view: StatusInputs) -> float | None:
    """Return the cost of all pods of the pools per hour; None if no variant has a known cost."""
    total, known = 0.0, False
    for role, pool in view.policy.pools.items():
        for variant in pool.variants:
            if variant.cost_per_hour is not None:
                known = True
                total += variant.cost_per_hour * len(_pods(view, role, variant.name))
    return total if known else None


def load(view: StatusInputs, role: Role) -> dict[str, int] | None:
    """Return the load that pods report, rounded to avoid writes; None if no pod answers."""
    samples = [
        view.observed.samples[pod.uid]
        for pod in view.observed.of(role)
        if pod.uid in view.observed.samples
    ]
    if not samples:
        return None
    found = {
        "inflight": sum(sample.inflight for sample in samples),
        "queuedRequests": sum(sample.queued_requests for sample in samples),
        "queuedSeconds": round(sum(sample.queued_work_seconds for sample in samples)),
    }
    occupancy = kv_occupancy_percent(samples)
    if occupancy is not None:
        found["kvOccupancyPercent"] = occupancy
    return found


def kv_occupancy_percent(samples: list[Sample]) -> int | None:
    """Return the share of KV tokens in use or reserved, in steps of 5 %; cached tokens are free.

    None if no sample has KV capacity.
    """
    caches = [sample.kv for sample in samples if sample.kv is not None]
    capacity = sum(kv.capacity for kv in caches)
    if capacity == 0:
        return None
    used = sum(kv.running + kv.reserved for kv in caches)
    return round(20 * used / capacity) * 5


def _variants(view: StatusInputs, role: Role) -> list[dict[str, Any]]:
    pool = view.service.spec.pools.of(role)
    assert pool is not None
    found = []
    policies = {item.name: item for item in view.policy.pools[role].variants}
    for variant in pool.variants:
        pods, known = _pods(view, role, variant.name), policies[variant.name]
        serving = [pod for pod in view.serving(role) if pod.variant == variant.name]
        entry: dict[str, Any] = {
            "name": variant.name,
            "replicas": len(pods),
            "readyReplicas": len(serving),
        }
        if variant.node_class_ref is not None:
            entry["nodeClass"] = variant.node_class_ref.name
        if known.cost_per_hour is not None:
            entry["costPerHour"] = money(known.cost_per_hour * len(pods))
        if known.startup_seconds is not None:
            entry["startupP90Seconds"] = round(known.startup_seconds / 5) * 5
        found.append(entry)
    return found


def _pods(view: StatusInputs, role: Role, variant: str) -> list[PodState]:
    return [pod for pod in view.observed.of(role) if pod.variant == variant]
