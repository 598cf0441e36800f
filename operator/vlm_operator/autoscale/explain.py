"""Explains each pool's size as text, from a record or from the status of a VLMService.

decode: 6 replicas (a 4, b 2), 12.00 an hour
  why      ScaleUp 4 → 6 at 10:03:05 UTC: kvTokens needs 5.7 units, 4 of 4 units are ready
  load     9,120 KV tokens in use or asked for, 0 of them wait; 9,500 are planned for, 60 s ahead
  rests on 60% occupancy; a unit has 2,780; bottleneck share 62%, growth from 20%
  signals  kvTokens 6, utilization 3
  misses   decode_reserve 62 %, prefill_queue 21 %
  bound    MaxPodsPerMinute
  next     grows on within the next minute; …
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable, Mapping
from typing import Any

from vlm_operator.autoscale.attribute import REMEDIES
from vlm_operator.autoscale.outcome import Attribution, Bound, Decision, Reason
from vlm_operator.autoscale.record import Record
from vlm_operator.autoscale.size import LoadSignals
from vlm_operator.names import POOL_ROLES, Role

# What would change a pool's size, by the bound that limits it.
BOUND_NEXT: Mapping[Bound, str] = {
    Bound.MIN: "less is not allowed: scaling.minReplicas",
    Bound.MAX: "more is not allowed: scaling.maxReplicas",
    Bound.BUDGET: "more needs a greater budget (spec.budget), or less need elsewhere",
    Bound.BUDGET_UNREADABLE: "nothing grows until the budget can be established: spec.budget, and "
    "the cost of every node type",
    Bound.CAPACITY: "more needs nodes of its types, another variant, or a greater "
    "variants[].maxReplicas",
    Bound.POOL_RATIO: "spec.poolRatios ties it to another pool",
    Bound.MAX_PODS_PER_MINUTE: "goes on within a minute: scaling.behavior.*.maxPodsPerMinute",
    Bound.UNKNOWN_TIMES: "goes on by one replica at a time: more work shows how long it takes",
    Bound.UP_WINDOW: "grows when the need has lasted: scaling.behavior.scaleUp"
    ".stabilizationWindowSeconds",
    Bound.WINDOW: "shrinks when a whole window has needed less: scaling.behavior.scaleDown"
    ".stabilizationWindowSeconds, at least twice the start-up time",
    Bound.SLO_MARGIN: "shrinks when no target has been close for a whole window",
    Bound.ROLLOUT: "shrinks when the rollout is done",
    Bound.FRESHNESS: "shrinks when nearly all ready pods answer",
    Bound.IDLE_SECONDS: "goes to zero when nothing has come for scaling.scaleToZero.idleSeconds",
}
# What would change a pool's size if no bound limits it, by the reason of the decision.
REASON_NEXT: Mapping[Reason, str] = {
    Reason.MANUAL: "the manifest: scaling.replicas",
    Reason.PUT_BACK: "the manifest: scaling.replicas; mode External lets others write VLMPool",
    Reason.EXTERNAL: "whoever writes VLMPool's spec.replicas",
    Reason.FOREIGN_WRITE: "the autoscaler decides again after one window",
    Reason.SCALING_CONFLICT: "mode External; or let the other writer stop, and delete the VLMPool",
    Reason.OFF: "autoscaling.policy: Active",
    Reason.BOUNDS: "scaling.minReplicas and maxReplicas, or spec.budget",
    Reason.MISSING_METRICS: "pods that answer to /stats",
    Reason.FALLBACK: "pods that answer to /stats; autoscaling.fallbackReplicas",
    Reason.STEADY: "more load, or a whole window of less",
    Reason.SCALE_UP: "more load, or a whole window of less",
    Reason.WAKE: "more load, or no images for scaling.scaleToZero.idleSeconds",
    Reason.AT_ZERO: "images, enough to be worth a replica",
    Reason.NOT_BOTTLENECK: "growth of its own queue or use: more replicas would not shorten TTFT",
    Reason.UNATTAINABLE: "faster node types, smaller images or another target",
    Reason.SCALE_DOWN: "more load, or a whole window of still less",
    Reason.IDLE: "images, enough to be worth a replica",
    Reason.STABILIZING: "more load, or a whole window of less",
    Reason.REPLACING: "nodes of the cheaper type, when it is tried again",
    Reason.WAITING_FOR_DEVICES: "draining pods that end",
}


@dataclasses.dataclass(frozen=True)
class Story:
    """The content of one pool's explanation.

    Attributes:
        now: replicas that the pool should have.
        variants: replicas by variant.
        decision: fields of `lastDecision`; {} if the autoscaler has not decided yet.
        notes: lines that follow the explanation.
        numbers: lines with the numbers of the decision.
    """

    role: Role
    now: int
    variants: Mapping[str, int]
    decision: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()


def explain(record: Record) -> str:
    """Explain the size of each pool at one recorded tick."""
    moment = _clock(record.view.now)
    head = [f"{record.service} at {moment} UTC"]
    estimate = record.outcome.estimate
    for item in estimate.attributions:
        target = "" if item.target_seconds is None else f", target {item.target_seconds * 1000:.0f}"
        p95 = "unknown" if item.p95_seconds != item.p95_seconds else f"{item.p95_seconds * 1e3:.0f}"
        line = f"{item.modality}: TTFT p95 {p95} ms{target}, {item.missed} of {item.count} missed"
        head.append(line if item.attainable else f"{line}; {beyond(item)}")
    if estimate.absurd:
        head.append(f"numbers that cannot be, taken for silence: {', '.join(estimate.absurd)}")
    stories = [
        dataclasses.replace(_of_decision(role, item), numbers=tuple(_numbers(record, role)))
        for role, item in record.outcome.decisions.items()
    ]
    return "\n".join([*head, "", tell(stories)])


def explain_status(service: Mapping[str, Any], notes: Mapping[Role, Iterable[str]]) -> str:
    """Explain the size of each pool from a VLMService's status.

    Args:
        service: the manifest with its status.
        notes: lines from the autoscaler's memory, by pool.
    """
    pools = (service.get("status") or {}).get("pools") or {}
    stories = []
    for role in POOL_ROLES:
        pool = pools.get(role)
        if pool is None:
            continue
        variants = {item["name"]: item.get("replicas", 0) for item in pool.get("variants") or ()}
        extra = list(notes.get(role, ()))
        wanted = pool.get("recommendation")
        if wanted is not None and wanted != pool.get("desiredReplicas"):
            extra.insert(0, f"the need alone asks for {wanted}")
        stories.append(
            Story(
                role=role,
                now=pool.get("desiredReplicas", 0),
                variants=variants,
                decision=pool.get("lastDecision") or {},
                notes=tuple(extra),
            )
        )
    return tell(stories)


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


def tell(stories: Iterable[Story]) -> str:
    """Format each pool in a few lines, with an empty line between pools."""
    return "\n\n".join("\n".join(_lines(story)) for story in stories)


def _of_decision(role: Role, decision: Decision) -> Story:
    notes = []
    if decision.recommendation not in (None, decision.to):
        notes.append(f"the need alone asks for {decision.recommendation}")
    if decision.capacity:
        notes.append(decision.capacity)
    shown = {
        "time": f"{_clock(decision.time)}",
        "from": decision.before,
        "to": decision.to,
        "reason": decision.reason,
        "message": decision.message,
        "limitedBy": decision.limited_by,
        "candidates": [dataclasses.asdict(item) for item in decision.candidates],
        "shares": {name: round(100 * share) for name, share in decision.shares.items()},
        "costPerHour": None if decision.cost_per_hour is None else f"{decision.cost_per_hour:.2f}",
    }
    return Story(role, decision.to, decision.variants, shown, tuple(notes))


def _lines(story: Story) -> list[str]:
    decision = story.decision
    mix = ", ".join(f"{name} {count}" for name, count in story.variants.items() if count)
    cost = decision.get("costPerHour")
    head = f"{story.role}: {story.now} replica{'' if story.now == 1 else 's'}"
    head += f" ({mix})" if mix else ""
    lines = [head + (f", {cost} an hour" if cost else "")]
    if not decision:
        return [*lines, "  why      nothing has been decided yet", *_notes(story)]
    moved = f"{decision['from']} → {decision['to']}"
    if decision["from"] == decision["to"]:
        moved = f"stays at {decision['to']}"
    lines.append(
        f"  why      {decision['reason']}, {moved} at {_time(decision['time'])} UTC: "
        f"{decision['message']}"
    )
    lines += story.numbers
    signals = [f"{item['signal']} {item['replicas']}" for item in decision.get("candidates") or ()]
    if signals:
        lines.append(f"  signals  {', '.join(signals)} replicas")
    shares = decision.get("shares") or {}
    largest = sorted(shares, key=lambda name: (-shares[name], name))[:4]
    if any(shares[name] for name in largest):
        said = ", ".join(f"{name} {shares[name]} %" for name in largest if shares[name])
        lines.append(f"  misses   {said}")
    if decision.get("limitedBy"):
        lines.append(f"  bound    {decision['limitedBy']}")
    lines.append(f"  next     {what_next(decision['reason'], decision.get('limitedBy'))}")
    return [*lines, *_notes(story)]


def what_next(reason: str, limited_by: str | None) -> str:
    """Say what would change the size; a reason of a newer operator gives a fixed sentence."""
    if limited_by in {item.value for item in Bound}:
        return BOUND_NEXT[Bound(limited_by)]
    if reason in {item.value for item in Reason}:
        return REASON_NEXT[Reason(reason)]
    return "unknown to this version of vlm"


def _notes(story: Story) -> list[str]:
    return [f"  note     {note}" for note in story.notes]


def _clock(seconds: float) -> str:
    return f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%d %H:%M:%S}"


def _time(text: str) -> str:
    return text.replace("T", " ").removesuffix("Z")


def _numbers(record: Record, role: Role) -> list[str]:
    """Return the numbers of one pool, with which a reader can compute the replicas by hand.

    The formulas are in docs/autoscaling.md.
    """
    signals = record.outcome.estimate.signals.get(role)
    if signals is None:
        return []
    starts = [seconds for (of, _), seconds in record.outcome.estimate.startup.items() if of is role]
    ahead = f"{max(starts, default=0.0):.0f} s ahead"
    if role is Role.DECODE:
        parts = _of_tokens(record, signals, ahead)
        if Role.PREFILL in record.policy.pools:
            return parts
        return [*parts, *_of_work(record, role, signals, signals.planned_work, "now")]
    return _of_work(record, role, signals, signals.planned, ahead)


def _of_work(
    record: Record, role: Role, signals: LoadSignals, planned: float, ahead: str
) -> list[str]:
    demand, rules = signals.demand, record.policy.pools[role]
    load = (
        f"{demand.erlangs:.3g} s of work came each second, {demand.queued_seconds:.3g} s wait; "
        f"{planned:.3g} is planned for, {ahead}"
    )
    rests = [f"{rules.utilization:.0%} use"]
    each, budget = signals.service_seconds, signals.budget_seconds
    if each is not None and budget is not None:
        known = "" if signals.credible else ", not credible yet"
        rests.append(f"an item takes {each:.3g} s and may wait {budget:.3g} s{known}")
    return [
        _number_line("load", load),
        _number_line("rests on", "; ".join([*rests, _bottleneck_share(record, signals)])),
    ]


def _of_tokens(record: Record, signals: LoadSignals, ahead: str) -> list[str]:
    demand, rules = signals.demand, record.policy.pools[Role.DECODE]
    load = (
        f"{demand.tokens:,.0f} KV tokens in use or asked for, {demand.queued_tokens:,.0f} of them "
        f"wait; {signals.planned:,.0f} are planned for, {ahead}"
    )
    rests = [f"{rules.kv_occupancy:.0%} occupancy"]
    if demand.tokens_per_unit is not None:
        rests.append(f"a unit has {demand.tokens_per_unit:,.0f}")
    if signals.itl_tokens is not None:
        rests.append(f"{signals.itl_tokens:,.0f} within the time between tokens")
    return [
        _number_line("load", load),
        _number_line("rests on", "; ".join([*rests, _bottleneck_share(record, signals)])),
    ]


def _bottleneck_share(record: Record, signals: LoadSignals) -> str:
    share = f"bottleneck share {signals.bottleneck_share:.0%}"
    return f"{share}, growth from {record.policy.constants.bottleneck_share:.0%}"


def _number_line(name: str, text: str) -> str:
    return f"  {name:<8} {text}"
