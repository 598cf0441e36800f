"""The rule of mode Auto. Plain: the full autoscaler replaces this file, not its interface.

encoder, prefill   load = work admitted per second (Erlang) + queued seconds / DRAIN_SECONDS
                   need = ceil(load / utilization)
decode             need = ceil((running + reserved + queued tokens) / (replica's capacity x share))

Up at once, down only when the whole window asked for less, never on missing data.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from vlm_operator.autoscale.types import Candidate, History, Policy, PoolNow
from vlm_operator.names import Role
from vlm_operator.state import Sample

DRAIN_SECONDS = 30.0  # a queue should be worked off within this time
FRESH_SHARE = 0.7  # of ready pods that must have answered


@dataclasses.dataclass(frozen=True)
class Want:
    """What the rule asks for, within its own pace but not yet within min and max."""

    replicas: int
    reason: str
    message: str
    history: History
    limited_by: str | None = None
    candidates: tuple[Candidate, ...] = ()
    held: bool = False


def wanted(
    policy: Policy,
    pool: PoolNow,
    samples: Mapping[str, Sample],
    *,
    current: int,
    now: float,
    history: History,
) -> Want:
    """Choose the replicas of one pool from what its pods report."""
    seen = [samples[uid] for uid in sorted(pool.ready) if uid in samples]
    if not pool.ready:
        return Want(current, "Hold", "no pod is ready yet", history, held=True)
    if len(seen) < FRESH_SHARE * len(pool.ready):
        message = f"{len(seen)} of {len(pool.ready)} ready pods answered: nothing changes"
        return Want(current, "MissingMetrics", message, history, held=True)
    if policy.role is Role.DECODE:
        candidates = _kv_candidates(policy, seen)
    else:
        candidates, history = _work_candidates(policy, seen, now, history)
    if not candidates:
        message = "the pods report no capacity: nothing changes"
        return Want(current, "MissingMetrics", message, history, held=True)
    leading = max(candidates, key=lambda item: item.replicas)
    need = min(max(leading.replicas, policy.minimum), policy.maximum)
    window = max(policy.down_seconds, 1.0)
    recent = tuple((at, count) for at, count in history.wants if now - at <= window)
    history = dataclasses.replace(history, wants=_thin((*recent, (now, need))))
    return _paced(policy, pool, leading, candidates, current=current, now=now, history=history)


def _paced(
    policy: Policy,
    pool: PoolNow,
    leading: Candidate,
    candidates: tuple[Candidate, ...],
    *,
    current: int,
    now: float,
    history: History,
) -> Want:
    """Move from `current` towards the need no faster than the policy allows."""
    need = leading.replicas
    text = f"{leading.signal} needs {need}"

    def answer(replicas: int, reason: str, message: str, limit: str | None = None) -> Want:
        return Want(replicas, reason, message, history, limit, candidates)

    if need > current:
        added = sum(max(0, to - old) for at, old, to in history.changes if now - at < 60)
        step = max(policy.up_pods, math.floor(current * policy.up_share)) - added
        if step <= 0:
            return answer(current, "RateLimited", text, "MaxPodsPerMinute")
        limit = "MaxPodsPerMinute" if need > current + step else None
        return answer(min(need, current + step), "ScaleUp", text, limit)
    most = max(count for _, count in history.wants)
    if most >= current or need == current:
        return answer(current, "Steady", text)
    if now - history.since < policy.down_seconds:
        return answer(current, "Stabilizing", f"{text}; one whole window must say so", "Window")
    if pool.rolling or pool.starting or pool.pending:
        return answer(current, "Hold", f"{text}; pods are still starting or rolling", "Rollout")
    taken = sum(max(0, old - to) for at, old, to in history.changes if now - at < 60)
    step = policy.down_pods - taken
    if step <= 0:
        return answer(current, "RateLimited", text, "MaxPodsPerMinute")
    return answer(max(most, current - step), "ScaleDown", f"{text} for the whole window")


def _work_candidates(
    policy: Policy, seen: list[Sample], now: float, history: History
) -> tuple[tuple[Candidate, ...], History]:
    """Size by service seconds: those admitted per second, and those that wait."""
    admitted = {sample.pod_uid: sample.admitted_work_seconds for sample in seen}
    queued = sum(sample.queued_work_seconds for sample in seen)
    found = [
        Candidate("queueSeconds", math.ceil(queued / DRAIN_SECONDS / policy.utilization)),
    ]
    if history.work is not None:
        then, before = history.work
        elapsed = now - then
        known = dict(before)
        # a restarted process counts from zero: its growth is unknown for one tick
        grown = sum(max(0.0, value - known[uid]) for uid, value in admitted.items() if uid in known)
        if elapsed > 0:
            load = grown / elapsed + queued / DRAIN_SECONDS
            found.append(Candidate("utilization", math.ceil(load / policy.utilization)))
    history = dataclasses.replace(history, work=(now, tuple(sorted(admitted.items()))))
    return tuple(found), history


def _kv_candidates(policy: Policy, seen: list[Sample]) -> tuple[Candidate, ...]:
    """Size by KV tokens: in use, reserved, and those of requests that wait."""
    caches = [sample.kv for sample in seen if sample.kv is not None and sample.kv.capacity > 0]
    if not caches:
        return ()
    capacity = sum(kv.capacity for kv in caches) / len(caches)
    used = sum(kv.running + kv.reserved for kv in caches)
    waiting = sum(kv.queued for kv in caches)
    room = capacity * policy.kv_occupancy
    return (
        Candidate("kvTokens", math.ceil(used / room)),
        Candidate("kvTokensWithQueue", math.ceil((used + waiting) / room)),
    )


def _thin(wants: tuple[tuple[float, int], ...]) -> tuple[tuple[float, int], ...]:
    """Keep the highest want per ten seconds, so that a window is at most a few dozen entries."""
    kept: dict[int, tuple[float, int]] = {}
    for at, count in wants:
        slot = int(at // 10)
        if slot not in kept or count > kept[slot][1]:
            kept[slot] = (at, count)
    return tuple(kept[slot] for slot in sorted(kept))
