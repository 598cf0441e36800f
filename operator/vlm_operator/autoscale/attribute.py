"""Attributes TTFT to its stages, and derives how long work may wait in each pool. Pure.

share(s)  = Σ t_s(r) / Σ TTFT(r)   over the requests r of the window that missed their target; over
                                   all requests if none missed. Means add up, percentiles do not.
floor(s)  = p95(t_s) · alone(s)    time of a stage that is no queue, on a replica without other work
alone(s)  = Σ busy seconds / Σ seconds in the stage, at most 1; 1 if workers report no busy seconds
budget(p) = max(wait_floor_seconds, target - Σ floor(s)) · WEIGHTS[p]

If p95 misses the target and Σ floor(s) reaches it, no number of replicas meets the target.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from vlm_operator.autoscale.calibrate import FitMemory, busy_seconds
from vlm_operator.autoscale.outcome import Attribution
from vlm_operator.autoscale.policy import ServicePolicy
from vlm_operator.autoscale.window import ITL, Tally, Window, percentile
from vlm_operator.names import POOL_ROLES, Role

QUEUES: Mapping[str, Role] = {
    "encoder_queue": Role.ENCODER,
    "prefill_queue": Role.PREFILL,
    "decode_reserve": Role.DECODE,
}
SERVICES: Mapping[str, Role] = {"encode": Role.ENCODER, "prefill": Role.PREFILL}
REMEDIES: Mapping[str, str] = {
    "encoder_queue": "more encoder replicas",
    "prefill_queue": "more prefill replicas",
    "decode_reserve": "more decode replicas",
    "media": "more processors for encoder pods",
    "encode": "a faster node type for the encoder",
    "embed_transfer": "a faster transfer of embeddings",
    "prefill": "a faster node type for prefill",
    "gateway": "more gateway replicas",
    "other": "a faster network",
}
WEIGHTS: Mapping[Role, float] = {Role.ENCODER: 0.35, Role.PREFILL: 0.50, Role.DECODE: 0.15}
IMAGE_MODALITIES = frozenset({"image", "video"})
LATELY_REQUESTS = 20  # requests of the last minute from which a percentile is computed


def attribute(
    policy: ServicePolicy,
    window: Window,
    totals: Mapping[str, Tally],
    alone: Mapping[str, float],
    *,
    now: float,
) -> tuple[Attribution, ...]:
    """Return an attribution of each modality that had requests.

    Args:
        policy: targets and length of the window.
        window: the gateways' counts.
        totals: `window.total()` at `now`.
        alone: `alone_shares`, by stage.
        now: seconds since the epoch.
    """
    lately = window.lately(now=now, window=policy.window_seconds)
    found = []
    for modality in sorted(totals.keys() - {ITL}):
        tally, edges = totals[modality], window.edges(modality)
        p95 = percentile(tally.buckets, edges=edges)
        if p95 is None:
            continue
        target = policy.ttft_seconds.get(modality)
        floors = _floors(tally, window.stage_edges(modality), alone)
        recent = lately[modality].buckets if modality in lately else {}
        enough = sum(recent.values()) >= LATELY_REQUESTS
        found.append(
            Attribution(
                modality=modality,
                count=tally.count,
                missed=tally.missed,
                p95_seconds=p95,
                target_seconds=target,
                shares=_shares(tally),
                service_seconds=floors,
                attainable=target is None or p95 <= target or sum(floors.values()) < target,
                lately_seconds=percentile(recent, edges=edges) if enough else None,
            )
        )
    return tuple(found)


def itl_p95(window: Window, totals: Mapping[str, Tally]) -> float | None:
    """Return the 95th percentile of ITL in seconds; None without a token."""
    return percentile(totals[ITL].buckets, edges=window.edges(ITL)) if ITL in totals else None


def alone_shares(
    policy: ServicePolicy,
    totals: Mapping[str, Tally],
    fits: Mapping[str, FitMemory],
    *,
    now: float,
) -> dict[str, float]:
    """Return alone(s) of the stages that workers compute, as far as it is known."""
    found = {}
    for stage in SERVICES:
        spent = sum(tally.stage_seconds(stage) for tally in totals.values())
        busy = busy_seconds(fits, stage, since=now - policy.window_seconds)
        if spent > 0 and busy > 0:
            found[stage] = min(1.0, busy / spent)
    return found


def owner(stage: str, present: Collection[Role]) -> Role | None:
    """Return the role that does a stage's work: the next one with replicas; None if no pool's."""
    role = QUEUES.get(stage) or SERVICES.get(stage)
    if role is None:
        return None
    return next((item for item in POOL_ROLES[POOL_ROLES.index(role) :] if item in present), None)


def bottleneck_share(
    attributions: Iterable[Attribution],
    alone: Mapping[str, float],
    present: Collection[Role],
    role: Role,
) -> float:
    """Return the largest share of a pool's own waiting in an overrun; 0 without an overrun.

    Own waiting is the time in the pool's queues, and the part of its stages that other work adds.
    An overrun counts if it is not over and if replicas can shorten it.
    """
    shares = [
        sum(
            share if stage in QUEUES else share * (1.0 - alone.get(stage, 1.0))
            for stage, share in item.shares.items()
            if owner(stage, present) is role
        )
        for item in attributions
        if item.exceeds() and item.attainable
    ]
    return max([0.0, *shares])


def target_seconds(
    policy: ServicePolicy, attributions: Iterable[Attribution], role: Role
) -> float | None:
    """Return the lowest target of the modalities with requests that use a role; None without one.

    If no such modality had requests, those without requests count.
    """
    targets = {name: item for name, item in policy.ttft_seconds.items() if _uses(name, role)}
    served = targets.keys() & {item.modality for item in attributions}
    return min((targets[name] for name in served or targets), default=None)


def wait_budget(
    policy: ServicePolicy, attributions: Sequence[Attribution], role: Role
) -> float | None:
    """Return the seconds that work may wait in a pool; None without a target."""
    least = policy.constants.wait_floor_seconds
    left = [
        max(least, item.target_seconds - sum(item.service_seconds.values()))
        for item in attributions
        if item.target_seconds is not None and item.attainable and _uses(item.modality, role)
    ]
    if left:
        return max(least, min(left)) * WEIGHTS[role]
    target = target_seconds(policy, attributions, role)
    return None if target is None else max(least, target) * WEIGHTS[role]


def _shares(tally: Tally) -> dict[str, float]:
    spent = tally.missed_seconds if tally.missed else tally.met
    total = sum(spent.values())
    if total <= 0:
        return {}
    return {stage: seconds / total for stage, seconds in sorted(spent.items()) if seconds > 0}


def _floors(tally: Tally, edges: Iterable[float], alone: Mapping[str, float]) -> dict[str, float]:
    """Return floor(s) of the stages without queues; the mean of a stage without buckets."""
    found = {}
    for stage in sorted((tally.met.keys() | tally.missed_seconds.keys()) - QUEUES.keys()):
        seconds = percentile(tally.stage_buckets.get(stage, {}), edges=edges)
        if seconds is None:
            seconds = tally.stage_seconds(stage) / tally.count
        if seconds * alone.get(stage, 1.0) > 0:
            found[stage] = seconds * alone.get(stage, 1.0)
    return found


def _uses(modality: str, role: Role) -> bool:
    return role is not Role.ENCODER or modality in IMAGE_MODALITIES
