"""Builds the whole status of a VLMService, rounded, for one apply."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import Any

from vlm_operator import names
from vlm_operator.api import effective, topology
from vlm_operator.autoscale.explain import round_ms
from vlm_operator.names import Role
from vlm_operator.pods import selector
from vlm_operator.rollout import service_revision
from vlm_operator.state import Manifest, Sample
from vlm_operator.status.conditions import condition_states
from vlm_operator.status.decisions import money, percents
from vlm_operator.status.inputs import ConditionState, StatusInputs
from vlm_operator.status.pools import cost_per_hour, kv_occupancy_percent, pool_status
from vlm_operator.status.readiness import serving


def build_status(view: StatusInputs, previous: Manifest, *, now: float) -> Manifest:
    """Return the content of `status`.

    Args:
        view: inputs of this turn.
        previous: the present status. Unchanged conditions keep their times. Facts that workers
            measured stay while no worker answers.
        now: seconds since the epoch.
    """
    pools = view.service.spec.pools
    revision = service_revision(view.revisions)
    compat = view.revisions[Role.GATEWAY, ""].resolved.compat
    known = previous.get("pools", {})
    found: dict[str, Any] = {
        "observedGeneration": view.written.generation,
        "conditions": conditions(
            condition_states(view), previous, view.written.generation, now=now
        ),
        "topology": topology(pools).value,
        "url": view.url,
        "lastProgressTime": _moment(view.stalled_since) if _on_its_way(view) else None,
        "currentRevision": revision
        if view.step.done
        else previous.get("currentRevision", revision),
        "updateRevision": revision,
        "compatibilityHash": compat,
        "model": _model(view, previous),
        "pools": {
            role.value: pool_status(view, role, known.get(role.value, {})) for role in pools.present
        },
        "slo": _slo(view),
        "cost": _cost(view),
        "accelerators": _accelerators(view),
        "effective": effective(view.written, view.service),
        "summary": _summary(view),
    }
    return {key: value for key, value in found.items() if value not in (None, {}, [])}


def conditions(
    found: Iterable[ConditionState], previous: Manifest, generation: int, *, now: float
) -> list[dict[str, Any]]:
    """Return conditions with `lastTransitionTime`, the time at which their status last changed.

    `now` is in seconds since the epoch. Messages are cut at 1024 characters.
    """
    known = {item["type"]: item for item in previous.get("conditions", [])}
    moment = _moment(now)
    states = []
    for state in found:
        status = {True: "True", False: "False", None: "Unknown"}[state.status]
        before = known.get(state.type)
        same = before is not None and before["status"] == status
        states.append(
            {
                "type": state.type,
                "status": status,
                "reason": state.reason,
                "message": state.message[:1024],
                "observedGeneration": generation,
                "lastTransitionTime": before["lastTransitionTime"] if same and before else moment,
            }
        )
    return states


def _on_its_way(view: StatusInputs) -> bool:
    """Whether the generation is not reached, so that the progress deadline applies."""
    return not view.service.spec.stopped and not (view.step.done and view.settled and serving(view))


def _moment(at: float) -> str:
    return datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


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
    found: dict[str, Any] = dict(previous.get("model", {}))
    weights = dict(found.get("weightsBytes", {}))
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
        found |= {name: value for name, value in measured.items() if value}
    if weights:
        found["weightsBytes"] = weights
    return found


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
    found = {"perHour": money(cost)}
    if budget is not None and budget.currency is not None:
        found["currency"] = budget.currency
    return found


def _accelerators(view: StatusInputs) -> dict[str, int]:
    """Return the accelerators of scheduled pods, by their variants' limits."""
    total, classes = 0, view.observed.node_classes
    for role, pool in view.service.spec.pools.present.items():
        devices = {}
        for variant in pool.variants:
            reference = variant.node_class_ref
            known = classes.get(reference.name) if reference else None
            devices[variant.name] = variant.accelerators(known.accelerator if known else None)
        total += sum(devices.get(pod.variant, 0) for pod in view.observed.of(role) if pod.scheduled)
    limit = view.policy.budget.accelerators
    return {"inUse": total} if limit is None else {"inUse": total, "limit": limit}


def _summary(view: StatusInputs) -> dict[str, str]:
    """Return the values of the columns that `kubectl get` prints."""
    found = {
        role.value: f"{len(view.serving(role))}/{view.desired.get(role, 0)}"
        for role in view.service.spec.pools.present
    }
    slowest = max(view.slo, key=lambda item: item.p95_seconds, default=None)
    if slowest is not None:
        found["ttftP95"] = f"{round_ms(slowest.p95_seconds)}ms"
        found["dominantStage"] = slowest.dominant_stage or ""
    decodes: list[Sample] = [
        view.observed.samples[pod.uid]
        for pod in view.observed.of(Role.DECODE)
        if pod.uid in view.observed.samples
    ]
    occupancy = kv_occupancy_percent(decodes)
    if occupancy is not None:
        found["kvOccupancyPercent"] = f"{occupancy}"
    cost = cost_per_hour(view)
    if cost is not None:
        found["costPerHour"] = money(cost)
    return {key: value for key, value in found.items() if value}
