"""Builds the whole status of a VLMService, rounded, for one apply; decides when to write it. Pure.

Decisions are written at once, measured values at most every 30 s. Otherwise the operator would
write the status of a service under load on each turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vlm_operator import names
from vlm_operator.api import effective, topology
from vlm_operator.autoscale.explain import round_ms
from vlm_operator.autoscale.outcome import Decision
from vlm_operator.cluster import timestamp
from vlm_operator.names import Role
from vlm_operator.pods.parts import selector
from vlm_operator.rollout.revisions import service_revision
from vlm_operator.state import Manifest, PodState, Sample
from vlm_operator.status.conditions import condition_states, with_times
from vlm_operator.status.inputs import StatusInputs
from vlm_operator.status.readiness import serving

MEASURED_SECONDS = 30.0
_MEASURED = frozenset(
    ("load", "recommendation", "startupP90Seconds", "ttftP95", "ttftP95Milliseconds", "stages",
     "dominantStage", "kvOccupancyPercent")
)  # fmt: skip
_HISTORY = 8


def build_status(view: StatusInputs, previous: Manifest, *, now: float) -> Manifest:
    """Return the content of `status`.

    Unchanged conditions keep their times from the `previous` status. Facts that workers measured
    stay while no worker answers.
    """
    pools = view.service.spec.pools
    revision = service_revision(view.revisions)
    compat = view.revisions[Role.GATEWAY, ""].resolved.compat
    before = previous.get("pools", {})
    status: dict[str, Any] = {
        "observedGeneration": view.written.generation,
        "conditions": with_times(
            condition_states(view), previous, generation=view.written.generation, now=now
        ),
        "topology": topology(pools).value,
        "url": view.url,
        "lastProgressTime": timestamp(view.stalled_since) if _on_its_way(view) else None,
        "currentRevision": revision
        if view.step.done
        else previous.get("currentRevision", revision),
        "updateRevision": revision,
        "compatibilityHash": compat,
        "model": _model(view, previous),
        "pools": {
            role.value: pool_status(view, role, before.get(role.value, {}))
            for role in pools.present
        },
        "slo": _slo(view),
        "cost": _cost(view),
        "accelerators": _accelerators(view),
        "identity": [item.to_status() for item in view.identity.certificates],
        "effective": effective(view.written, view.service),
        "summary": _summary(view),
    }
    return {key: value for key, value in status.items() if value not in (None, {}, [])}


class WritePacing:
    """Paces status writes of one service. Its one writer is the service's reporter."""

    def __init__(self) -> None:
        self._measured_at = float("-inf")

    def due(self, before: Manifest, after: Manifest, *, now: float) -> Manifest:
        """Return the status to write: `after`, or `before` if only measured values differ.

        `now` is in seconds. At most every `MEASURED_SECONDS`, measured values are written too.
        """
        if before == after:
            return before
        if meaning(before) == meaning(after) and now - self._measured_at < MEASURED_SECONDS:
            return before
        self._measured_at = now
        return after


def meaning(status: Manifest) -> Manifest:
    unmeasured = {"effective": status.get("effective"), "model": None}
    return {key: _without_measured(value) for key, value in status.items()} | unmeasured


def _without_measured(node: Any) -> Any:
    if isinstance(node, list):
        return [_without_measured(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {key: _without_measured(value) for key, value in node.items() if key not in _MEASURED}


def pool_status(view: StatusInputs, role: Role, previous: Manifest) -> dict[str, Any]:
    pods = view.observed.of(role)
    decisions = view.history(role)
    status: dict[str, Any] = {
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
        status["recommendation"] = decision.recommendation
    if decisions:
        last = previous.get("lastDecision", {})
        status["lastDecision"] = decision_status(decisions[-1], last, epoch=view.epoch)
        earlier = [past_status(item) for item in reversed(decisions[:-1])][:_HISTORY]
        if earlier:
            status["history"] = earlier
    return {key: value for key, value in status.items() if value is not None}


def cost_per_hour(view: StatusInputs) -> float | None:
    """Return the cost of all pods of the pools per hour; None if no variant has a known cost."""
    costs = [pool_cost_per_hour(view, role) for role in view.policy.pools]
    known = [cost for cost in costs if cost is not None]
    return sum(known) if known else None


def pool_cost_per_hour(view: StatusInputs, role: Role) -> float | None:
    """Return the cost of a pool's pods per hour; None if no variant has a known cost."""
    costs = [
        variant.cost_per_hour * len(_pods(view, role, variant.name))
        for variant in view.policy.pools[role].variants
        if variant.cost_per_hour is not None
    ]
    return sum(costs) if costs else None


def load(view: StatusInputs, role: Role) -> dict[str, int] | None:
    """Return the load that pods report, rounded to avoid writes; None if no pod answers."""
    samples = view.samples(role)
    if not samples:
        return None
    occupancy = kv_occupancy_percent(samples)
    return {
        "inflight": sum(sample.inflight for sample in samples),
        "queuedRequests": sum(sample.queued_requests for sample in samples),
        "queuedSeconds": round(sum(sample.queued_work_seconds for sample in samples)),
        **({} if occupancy is None else {"kvOccupancyPercent": occupancy}),
    }


def kv_occupancy_percent(samples: Sequence[Sample]) -> int | None:
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
    entries = []
    policies = {item.name: item for item in view.policy.pools[role].variants}
    for variant in pool.variants:
        pods, policy = _pods(view, role, variant.name), policies[variant.name]
        entry: dict[str, Any] = {
            "name": variant.name,
            "replicas": len(pods),
            "readyReplicas": sum(pod.variant == variant.name for pod in view.serving(role)),
        }
        if variant.node_class_ref is not None:
            entry["nodeClass"] = variant.node_class_ref.name
        if policy.cost_per_hour is not None:
            entry["costPerHour"] = money(policy.cost_per_hour * len(pods))
        if policy.startup_seconds is not None:
            entry["startupP90Seconds"] = round(policy.startup_seconds / 5) * 5
        entries.append(entry)
    return entries


def _pods(view: StatusInputs, role: Role, variant: str) -> list[PodState]:
    return [pod for pod in view.observed.of(role) if pod.variant == variant]


def decision_status(
    decision: Decision, previous: Mapping[str, Any], *, epoch: int
) -> dict[str, Any]:
    """Return `status.pools.*.lastDecision`.

    `previous` is the present one. Its epoch stays if the decision is the same; `epoch` is that of
    the Lease, for a new decision.
    """
    past = past_status(decision)
    same = all(previous.get(key) == value for key, value in past.items())
    candidates = [
        {"signal": item.signal, "replicas": item.replicas} for item in decision.candidates
    ]
    cost = decision.cost_per_hour
    status: dict[str, Any] = {
        **past,
        "epoch": previous.get("epoch") if same else epoch,
        "limitedBy": decision.limited_by,
        "shares": percents(decision.shares) or None,
        "candidates": candidates or None,
        "costPerHour": None if cost is None else money(cost),
        "message": decision.message,
    }
    return {key: value for key, value in status.items() if value is not None}


def past_status(decision: Decision) -> dict[str, Any]:
    """Return an item of `status.pools.*.history`; the operator's log has the full record."""
    return {
        "time": timestamp(round(decision.time)),
        "from": decision.before,
        "to": decision.to,
        "reason": decision.reason,
    }


def percents(shares: Mapping[str, float]) -> dict[str, int]:
    """Round shares to percent in steps of 5, without those that round to 0."""
    rounded = {name: round(20 * share) * 5 for name, share in sorted(shares.items())}
    return {name: share for name, share in rounded.items() if share}


def money(amount: float) -> str:
    return f"{amount:.2f}"


def _on_its_way(view: StatusInputs) -> bool:
    """Whether the generation is not reached, so that the progress deadline applies."""
    return not view.service.spec.stopped and not (view.step.done and view.settled and serving(view))


def pool_status_of_kind(view: StatusInputs, role: Role) -> Manifest:
    """Return the status of the role's VLMPool; HPA reads the selector."""
    pairs = selector(view.service.name, role).items()
    return {
        "replicas": len(view.observed.of(role)),
        "readyReplicas": len(view.serving(role)),
        "selector": ",".join(f"{key}={value}" for key, value in pairs),
    }


def _model(view: StatusInputs, previous: Manifest) -> dict[str, Any]:
    """Return what workers found in the checkpoint; the last known facts while none answers."""
    model: dict[str, Any] = dict(previous.get("model", {}))
    weights = dict(model.get("weightsBytes", {}))
    for sample in sorted(view.observed.samples.values(), key=lambda item: item.pod_uid):
        facts = sample.model
        if facts is None:
            continue
        if sample.role in names.POOL_ROLES and facts.weights_bytes:
            weights[sample.role.value] = facts.weights_bytes
        measured = {
            "kvBytesPerToken": facts.kv_bytes_per_token,
            "imageTokensPerMegapixel": facts.image_tokens_per_megapixel,
            "embeddingBytesPerToken": facts.embedding_bytes_per_token,
        }
        model |= {name: value for name, value in measured.items() if value}
    return model | ({"weightsBytes": weights} if weights else {})


def _slo(view: StatusInputs) -> list[dict[str, Any]]:
    states = []
    for item in view.slo:
        target = item.target_seconds
        entry = {
            "modality": item.modality.capitalize(),
            "ttftP95Milliseconds": round_ms(item.p95_seconds),
            "targetMilliseconds": None if target is None else round(1000 * target),
            "stages": percents(item.shares),
            "dominantStage": item.dominant_stage,
        }
        states.append({key: value for key, value in entry.items() if value not in (None, {})})
    return states


def _cost(view: StatusInputs) -> dict[str, str] | None:
    """Return the cost of all pods per hour; None if no node class has a cost."""
    cost, budget = cost_per_hour(view), view.service.spec.budget
    if cost is None:
        return None
    currency = {"currency": budget.currency} if budget and budget.currency is not None else {}
    return {"perHour": money(cost), **currency}


def _accelerators(view: StatusInputs) -> dict[str, int]:
    total = sum(pool_accelerators(view, role) for role in view.service.spec.pools.present)
    limit = view.policy.budget.accelerators
    return {"inUse": total} if limit is None else {"inUse": total, "limit": limit}


def pool_accelerators(view: StatusInputs, role: Role) -> int:
    """Return the accelerators of a pool's scheduled pods, by their variants' limits."""
    devices = {}
    for variant in view.service.spec.pools.present[role].variants:
        reference = variant.node_class_ref
        node_class = view.observed.node_classes.get(reference.name) if reference else None
        resource = node_class.accelerator if node_class else None
        devices[variant.name] = variant.accelerators(resource)
    return sum(devices.get(pod.variant, 0) for pod in view.observed.of(role) if pod.scheduled)


def _summary(view: StatusInputs) -> dict[str, str]:
    """Return the values of the columns that `kubectl get` prints."""
    columns = {
        role.value: f"{len(view.serving(role))}/{view.desired.get(role, 0)}"
        for role in view.service.spec.pools.present
    }
    slowest = max(view.slo, key=lambda item: item.p95_seconds, default=None)
    if slowest is not None:
        columns["ttftP95"] = f"{round_ms(slowest.p95_seconds)}ms"
        columns["dominantStage"] = slowest.dominant_stage or ""
    occupancy = kv_occupancy_percent(view.samples(Role.DECODE))
    if occupancy is not None:
        columns["kvOccupancyPercent"] = f"{occupancy}"
    cost = cost_per_hour(view)
    if cost is not None:
        columns["costPerHour"] = money(cost)
    return {key: value for key, value in columns.items() if value}
