"""Explains each pool's size as text, from a record or from the status of a VLMService.

decode: 6 replicas (a 4, b 2), 12.00 an hour
  why      ScaleUp 4 → 6 at 10:03:05 UTC: kvTokens needs 5.7 units, 4 of 4 units are ready
  load     9,120 KV tokens in use or asked for, 0 of them wait; 9,500 are planned for, 60 s ahead
  rests on 60% occupancy; a unit has 2,780; bottleneck share 62%, growth from 20%
  signals  kvTokens 6, utilization 3
  misses   decode_reserve 62 %, prefill_queue 21 %
  bound    MaxPodsPerMinute
  next     goes on within a minute: …
"""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Iterable, Mapping
from typing import Any

from vlm_operator.autoscale.attribute import REMEDIES
from vlm_operator.autoscale.outcome import Attribution, Bound, Decision, Reason
from vlm_operator.autoscale.record import Record
from vlm_operator.autoscale.size import LoadSignals
from vlm_operator.names import POOL_ROLES, Role

_LOAD = "more load, or less for a whole window (for one surplus replica: six windows)"

# What would change a pool's size, by the bound that limits it; without a bound, by the reason.
NEXT: Mapping[str, str] = {
    Bound.MIN: "less is not allowed: scaling.minReplicas",
    Bound.MAX: "more is not allowed: scaling.maxReplicas",
    Bound.BUDGET: "more needs a greater budget (spec.budget), or less need elsewhere",
    Bound.BUDGET_UNREADABLE: "nothing grows until the budget can be computed: spec.budget, and "
    "the cost of every node type",
    Bound.CAPACITY: "more needs nodes of its types, another variant, or a greater "
    "variants[].maxReplicas",
    Bound.POOL_RATIO: "spec.poolRatios limits its ratio to another pool",
    Bound.MAX_PODS_PER_MINUTE: "goes on within a minute: scaling.behavior.*.maxPodsPerMinute",
    Bound.UNKNOWN_TIMES: "goes on by one replica at a time: more work shows how long it takes",
    Bound.UP_WINDOW: "grows when the need has lasted: scaling.behavior.scaleUp"
    ".stabilizationWindowSeconds",
    Bound.WINDOW: "shrinks when a whole window has needed less: scaling.behavior.scaleDown"
    ".stabilizationWindowSeconds, at least twice the start-up time",
    Bound.SLO_MARGIN: "shrinks when no target has been close for a whole window",
    Bound.ROLLOUT: "shrinks when the rollout is done",
    Bound.FRESHNESS: "shrinks when nearly all ready pods answer",
    Bound.IDLE_SECONDS: "goes to zero after scaling.scaleToZero.idleSeconds without images",
    Reason.MANUAL: "the manifest: scaling.replicas",
    Reason.PUT_BACK: "the manifest: scaling.replicas; mode External lets others write VLMPool",
    Reason.EXTERNAL: "the writer of VLMPool's spec.replicas",
    Reason.FOREIGN_WRITE: "the autoscaler decides again after one window",
    Reason.SCALING_CONFLICT: "mode External; or stop the other writer, and delete the VLMPool",
    Reason.OFF: "autoscaling.policy: Active",
    Reason.BOUNDS: "scaling.minReplicas and maxReplicas, or spec.budget",
    Reason.MISSING_METRICS: "pods that answer to /stats",
    Reason.FALLBACK: "pods that answer to /stats; autoscaling.fallbackReplicas",
    Reason.STEADY: _LOAD,
    Reason.SCALE_UP: _LOAD,
    Reason.WAKE: "more load, or no images for scaling.scaleToZero.idleSeconds",
    Reason.SCALED_TO_ZERO: "a request at the gateway starts all pools",
    Reason.WOKEN_BY_REQUEST: "more load, or no request for spec.scaleToZero.idleSeconds",
    Reason.AT_ZERO: "images, enough to be worth a replica",
    Reason.NOT_BOTTLENECK: "growth of its own queue or use: more replicas would not shorten TTFT",
    Reason.UNATTAINABLE: "faster node types, smaller images or another target",
    Reason.SCALE_DOWN: "more load, or a whole window of still less",
    Reason.IDLE: "images, enough to be worth a replica",
    Reason.STABILIZING: _LOAD,
    Reason.REPLACING: "nodes of the cheaper type, when it is tried again",
    Reason.WAITING_FOR_DEVICES: "draining pods that end",
}


def explain(record: Record) -> str:
    """Explain the size of each pool at one recorded tick."""
    estimate = record.outcome.estimate
    lines = [f"{record.service} at {_utc(record.view.now)} UTC"]
    for item in estimate.attributions:
        target = "" if item.target_seconds is None else f", target {item.target_seconds * 1000:.0f}"
        p95 = "unknown" if math.isnan(item.p95_seconds) else f"{item.p95_seconds * 1000:.0f}"
        line = f"{item.modality}: TTFT p95 {p95} ms{target}, {item.missed} of {item.count} missed"
        lines.append(line if item.attainable else f"{line}; {beyond(item)}")
    if estimate.absurd:
        lines.append(f"pods with impossible numbers count as silent: {', '.join(estimate.absurd)}")
    parts = [
        _pool(role, item.to, item.variants, _status(item), _notes(item), _numbers(record, role))
        for role, item in record.outcome.decisions.items()
    ]
    return "\n\n".join(["\n".join(lines), *parts])


def explain_status(service: Mapping[str, Any], notes: Mapping[Role, Iterable[str]]) -> str:
    """Explain the size of each pool from a VLMService's status; "" without pools in it.

    Args:
        service: the manifest with its status.
        notes: lines from the autoscaler's memory, by pool.
    """
    pools = (service.get("status") or {}).get("pools") or {}
    parts = []
    for role in [role for role in POOL_ROLES if role in pools]:
        pool = pools[role]
        desired, wanted = pool.get("desiredReplicas", 0), pool.get("recommendation")
        own = [] if wanted in (None, desired) else [f"the need alone asks for {wanted}"]
        variants = {item["name"]: item.get("replicas", 0) for item in pool.get("variants") or ()}
        decision = pool.get("lastDecision") or {}
        parts.append(_pool(role, desired, variants, decision, [*own, *notes.get(role, ())], ()))
    return "\n\n".join(parts)


def beyond(item: Attribution) -> str:
    """Say why no number of replicas meets a target, and what would.

    The stages that no replica can shorten take longer than the target.
    """
    stage = item.blocking_stage or "other"
    alone, longest = sum(item.service_seconds.values()), item.service_seconds.get(stage, 0.0)
    return (
        f"without any waiting it takes {round_ms(alone)} ms, {round_ms(item.lacking_seconds)} ms "
        f"more than the goal of {round_ms(item.target_seconds or 0.0)} ms, most of it {stage} with "
        f"{round_ms(longest)} ms: more replicas do not help, {remedy(stage)} would, or another goal"
    )


def remedy(stage: str) -> str:
    """Say what shortens a stage."""
    return REMEDIES.get(stage, "less work there")


def round_ms(seconds: float) -> int:
    """Convert seconds to milliseconds, rounded to 10 ms."""
    return round(seconds * 100) * 10


def what_next(reason: str, limited_by: str | None) -> str:
    """Say what would change the size; a newer operator may have other reasons."""
    return NEXT.get(limited_by or "") or NEXT.get(reason, "unknown to this version of vlm")


def _status(decision: Decision) -> dict[str, Any]:
    """Return a decision as in `status.pools.*.lastDecision`, with exact shares."""
    cost = decision.cost_per_hour
    return {
        "time": _utc(decision.time),
        "from": decision.before,
        "to": decision.to,
        "reason": decision.reason,
        "message": decision.message,
        "limitedBy": decision.limited_by,
        "candidates": [dataclasses.asdict(item) for item in decision.candidates],
        "shares": {name: round(100 * share) for name, share in decision.shares.items()},
        "costPerHour": None if cost is None else f"{cost:.2f}",
    }


def _notes(decision: Decision) -> list[str]:
    wanted = decision.recommendation
    own = [] if wanted in (None, decision.to) else [f"the need alone asks for {wanted}"]
    return [*own, decision.capacity] if decision.capacity else own


def _pool(
    role: Role,
    replicas: int,
    variants: Mapping[str, int],
    decision: Mapping[str, Any],
    notes: Iterable[str],
    numbers: Iterable[str],
) -> str:
    """Explain one pool in a few lines.

    Args:
        role: the pool's role.
        replicas: replicas that the pool should have.
        variants: replicas by variant.
        decision: fields of `lastDecision`; {} if the autoscaler has not decided yet.
        notes: lines at the end.
        numbers: lines with the numbers of the decision.
    """
    mix = ", ".join(f"{name} {count}" for name, count in variants.items() if count)
    cost = decision.get("costPerHour")
    head = f"{role}: {replicas} replica{'' if replicas == 1 else 's'}"
    head += (f" ({mix})" if mix else "") + (f", {cost} an hour" if cost else "")
    ends = [_line("note", note) for note in notes]
    if not decision:
        return "\n".join([head, _line("why", "nothing has been decided yet"), *ends])
    before, to, limit = decision["from"], decision["to"], decision.get("limitedBy")
    moved = f"stays at {to}" if before == to else f"{before} → {to}"
    time = decision["time"].replace("T", " ").removesuffix("Z")
    why = f"{decision['reason']}, {moved} at {time} UTC: {decision['message']}"
    signals = [f"{item['signal']} {item['replicas']}" for item in decision.get("candidates") or ()]
    shares = decision.get("shares") or {}
    largest = sorted(shares, key=lambda name: (-shares[name], name))[:4]
    misses = ", ".join(f"{name} {shares[name]} %" for name in largest if shares[name])
    lines = [head, _line("why", why), *numbers]
    lines += [_line("signals", f"{', '.join(signals)} replicas")] if signals else []
    lines += [_line("misses", misses)] if misses else []
    lines += [_line("bound", limit)] if limit else []
    return "\n".join([*lines, _line("next", what_next(decision["reason"], limit)), *ends])


def _line(name: str, text: str) -> str:
    return f"  {name:<8} {text}"


def _utc(seconds: float) -> str:
    return f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%d %H:%M:%S}"


def _numbers(record: Record, role: Role) -> list[str]:
    """Return lines from which a reader can compute the replicas by docs/autoscaling.md."""
    signals = record.outcome.estimate.signals.get(role)
    if signals is None:
        return []
    starts = [seconds for (of, _), seconds in record.outcome.estimate.startup.items() if of is role]
    ahead = f"{max(starts, default=0.0):.0f} s ahead"
    if role is not Role.DECODE:
        return _work_lines(record, role, signals, f"{signals.planned:.3g} is planned for, {ahead}")
    lines = _token_lines(record, signals, ahead)
    if Role.PREFILL not in record.policy.pools:
        planned = f"{signals.planned_work:.3g} is planned for, now"
        lines += _work_lines(record, role, signals, planned)
    return lines


def _work_lines(record: Record, role: Role, signals: LoadSignals, planned: str) -> list[str]:
    demand, each, budget = signals.demand, signals.service_seconds, signals.budget_seconds
    load = (
        f"{demand.erlangs:.3g} s of work came each second, {demand.queued_seconds:.3g} s wait; "
        f"{planned}"
    )
    basis = [f"{record.policy.pools[role].utilization:.0%} use"]
    if each is not None and budget is not None:
        known = "" if signals.credible else ", not credible yet"
        basis.append(f"an item takes {each:.3g} s and may wait {budget:.3g} s{known}")
    return _load_lines(record, signals, load, basis)


def _token_lines(record: Record, signals: LoadSignals, ahead: str) -> list[str]:
    demand = signals.demand
    load = (
        f"{demand.tokens:,.0f} KV tokens in use or asked for, {demand.queued_tokens:,.0f} of them "
        f"wait; {signals.planned:,.0f} are planned for, {ahead}"
    )
    basis = [f"{record.policy.pools[Role.DECODE].kv_occupancy:.0%} occupancy"]
    if demand.tokens_per_unit is not None:
        basis.append(f"a unit has {demand.tokens_per_unit:,.0f}")
    if signals.itl_tokens is not None:
        basis.append(f"{signals.itl_tokens:,.0f} within the ITL target")
    return _load_lines(record, signals, load, basis)


def _load_lines(record: Record, signals: LoadSignals, load: str, basis: list[str]) -> list[str]:
    gate = f"growth from {record.policy.constants.bottleneck_share:.0%}"
    basis = [*basis, f"bottleneck share {signals.bottleneck_share:.0%}, {gate}"]
    return [_line("load", load), _line("rests on", "; ".join(basis))]
