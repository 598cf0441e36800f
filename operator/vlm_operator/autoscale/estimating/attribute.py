"""Where TTFT went, by modality: shares that add up to 1, and what no replica can shorten. Pure.

A_s = Σ t_s(r) / Σ TTFT(r)    over requests r beyond the target, within the window W
Δ   = p95(TTFT) - target      A_s · Δ is the part of stage s in it

Percentiles do not add, conditional means do. Fewer than min_requests widen W threefold. Fewer than
min_misses are made up to the slowest tenth: of requests that met the target only sums and each
stage's own buckets are known, so they enter with the mean of each stage's slowest, then all is
scaled to 1.

stage            remedy
encoder_queue    encoder pool +
prefill_queue    prefill pool +
decode_reserve   decode pool +: prefill has no place to send to
encode, prefill  faster node type; + only as far as work slows other work down
media            more processors for encoder pods
embed_transfer   transfer
gateway          gateway replicas
other            the network

floor(s) = p95(t_s) · alone(s)
alone(s) = Σ busy seconds / Σ seconds in the stage, at most 1: what is left of its time on an empty
           replica; 1 where workers do not say
Σ floor ≥ target, and the target is missed: no number of replicas meets it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from vlm_operator.autoscale.estimating.calibrate import FitMemory, busy_seconds
from vlm_operator.autoscale.estimating.window import (
    ITL,
    WIDEST,
    Tally,
    Window,
    percentile,
    tail_mean,
)
from vlm_operator.autoscale.outcome import Attribution
from vlm_operator.autoscale.policy import ServicePolicy
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
SLOWEST = 0.1  # of requests, where too few missed
LATELY_REQUESTS = 20  # of the last minute, before a percentile of it is one


def attribute(
    policy: ServicePolicy,
    window: Window,
    totals: Mapping[str, Tally],
    alone: Mapping[str, float],
    *,
    now: float,
) -> tuple[Attribution, ...]:
    """Say of every modality that had requests where their time went.

    Args:
        policy: targets and window.
        window: what gateways counted.
        totals: of it, the last window.
        alone: by stage, the share of its mean time that is its own work; see above.
        now: seconds since the epoch.
    """
    span = policy.window_seconds
    found = []
    lately = window.lately(now=now, window=span)
    wide: dict[str, Tally] | None = None
    for name in sorted(window.names()):
        if name == ITL:
            continue
        tally = totals.get(name)
        if tally is None or tally.count < policy.constants.min_requests:
            if wide is None:
                wide = window.total(now=now, window=span, windows=WIDEST)
            tally = wide.get(name)
        if tally is not None:
            one = _attribution(policy, name, tally, window, alone, lately.get(name, {}))
            if one is not None:
                found.append(one)
    return tuple(found)


def itl_p95(window: Window, totals: Mapping[str, Tally]) -> float | None:
    """The 95th percentile of the time between tokens, None where no token came."""
    tally = totals.get(ITL)
    return percentile(tally.buckets, edges=window.edges(ITL)) if tally is not None else None


def shares(tally: Tally, *, min_misses: int, edges: Sequence[float] = ()) -> dict[str, float]:
    """A_s: of each stage in the time of the slow requests; they add up to 1, or there are none."""
    spent = dict(tally.missed_seconds)
    if tally.missed < min_misses:
        wanted = max(min_misses, SLOWEST * tally.count)
        lacking = min(wanted, tally.count) - tally.missed
        for stage, seconds in tally.met.items():
            mean = _slow(tally, stage, seconds, lacking, edges)
            spent[stage] = spent.get(stage, 0.0) + lacking * mean
    total = sum(spent.values())
    if total <= 0:
        return {}
    return {stage: seconds / total for stage, seconds in sorted(spent.items()) if seconds > 0}


def owner(stage: str, present: Collection[Role]) -> Role | None:
    """The role that does a stage's work: its own, or the next one that has replicas."""
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
    """The largest share of a pool's own waiting in any overrun that lasts and replicas can shorten.

    Its own waiting is the time in its queues, and of its work as far as other work slows it down.
    """
    most = 0.0
    for item in attributions:
        if item.exceeds() and item.attainable:
            own = sum(
                share if stage in QUEUES else share * (1.0 - alone.get(stage, 1.0))
                for stage, share in item.shares.items()
                if owner(stage, present) is role
            )
            most = max(most, own)
    return most


def alone_shares(
    policy: ServicePolicy,
    totals: Mapping[str, Tally],
    fits: Mapping[str, FitMemory],
    *,
    now: float,
) -> dict[str, float]:
    """By stage: seconds that its work took, over seconds that requests spent in it."""
    found = {}
    for stage, kind in (("encode", "encode"), ("prefill", "prefill")):
        spent = sum(
            tally.met.get(stage, 0.0) + tally.missed_seconds.get(stage, 0.0)
            for tally in totals.values()
        )
        busy = busy_seconds(fits, kind, since=now - policy.window_seconds)
        if spent > 0 and busy > 0:
            found[stage] = min(1.0, busy / spent)
    return found


def _attribution(
    policy: ServicePolicy,
    modality: str,
    tally: Tally,
    window: Window,
    alone: Mapping[str, float],
    lately: Mapping[float, int],
) -> Attribution | None:
    p95 = percentile(tally.buckets, edges=window.edges(modality))
    if p95 is None:
        return None
    target = policy.ttft_seconds.get(modality)
    edges = window.stage_edges(modality)
    floors = {}
    for stage in tally.met.keys() | tally.missed_seconds.keys():
        if stage in QUEUES:
            continue
        seconds = _floor(tally, stage, edges) * alone.get(stage, 1.0)
        if seconds > 0:
            floors[stage] = seconds
    missed = target is not None and p95 > target
    return Attribution(
        modality=modality,
        count=tally.count,
        missed=tally.missed,
        p95_seconds=p95,
        target_seconds=target,
        shares=shares(tally, min_misses=policy.constants.min_misses, edges=edges),
        service_seconds=dict(sorted(floors.items())),
        attainable=not (missed and target is not None and sum(floors.values()) >= target),
        lately_seconds=percentile(lately, edges=window.edges(modality))
        if sum(lately.values()) >= LATELY_REQUESTS
        else None,
    )


def _floor(tally: Tally, stage: str, edges: Sequence[float]) -> float:
    """The 95th percentile of a stage, its mean where no buckets are reported."""
    buckets = tally.stage_buckets.get(stage)
    found = percentile(buckets, edges=edges) if buckets else None
    spent = tally.met.get(stage, 0.0) + tally.missed_seconds.get(stage, 0.0)
    return found if found is not None else spent / tally.count


def _slow(
    tally: Tally, stage: str, met_seconds: float, lacking: float, edges: Sequence[float]
) -> float:
    """Mean time in a stage of those that met the target and were the slowest in it."""
    met = tally.count - tally.missed
    if met <= 0:
        return 0.0
    mean = met_seconds / met
    buckets = tally.stage_buckets.get(stage)
    if not buckets:
        return mean
    found = tail_mean(buckets, min(1.0, (tally.missed + lacking) / tally.count), edges=edges)
    # all of them together cannot have taken longer than those that met the target did
    return mean if found is None else min(max(found, mean), met_seconds / max(lacking, 1.0))
