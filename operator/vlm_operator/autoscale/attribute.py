"""Where TTFT went, by modality: shares that add up to 1, and what no replica can shorten. Pure.

A_s = Σ t_s(r) / Σ TTFT(r)    over requests r beyond the target, within the window W
Δ   = p95(TTFT) - target      A_s · Δ is the part of stage s in it

Percentiles do not add, conditional means do. If no request missed the target, r are all requests.

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

B(pool) = max(wait_floor, target - Σ floor(s)) · w(pool): how long work may wait there; Σ w = 1
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
IMAGES = frozenset({"image", "video"})  # modalities that pass the encoder
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
    lately = window.lately(now=now, window=policy.window_seconds)
    found = [
        _attribution(policy, name, totals[name], window, alone, lately.get(name, {}))
        for name in sorted(totals.keys() - {ITL})
    ]
    return tuple(item for item in found if item is not None)


def itl_p95(window: Window, totals: Mapping[str, Tally]) -> float | None:
    """The 95th percentile of the time between tokens, None where no token came."""
    tally = totals.get(ITL)
    return percentile(tally.buckets, edges=window.edges(ITL)) if tally is not None else None


def shares(tally: Tally) -> dict[str, float]:
    """A_s: of each stage in the time of the slow requests; they add up to 1, or there are none."""
    spent = tally.missed_seconds if tally.missed else tally.met
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


def target_seconds(
    policy: ServicePolicy, attributions: Sequence[Attribution], role: Role
) -> float | None:
    """The strictest target of the modalities that came and pass a role; of all, where none came."""
    met = {item.modality for item in attributions} & policy.ttft_seconds.keys()
    concerned = {name for name in policy.ttft_seconds if _passes(name, role)}
    chosen = (met & concerned) or concerned
    return min((policy.ttft_seconds[name] for name in chosen), default=None)


def wait_budget(
    policy: ServicePolicy,
    attributions: Sequence[Attribution],
    role: Role,
) -> float | None:
    """B in seconds; None where no target concerns the pool."""
    least = policy.constants.wait_floor_seconds
    weight = WEIGHTS[role]
    left = [
        max(least, item.target_seconds - sum(item.service_seconds.values()))
        for item in attributions
        if item.target_seconds is not None and item.attainable and _passes(item.modality, role)
    ]
    if not left:
        target = target_seconds(policy, attributions, role)
        return None if target is None else max(least, target) * weight
    return max(least, min(left)) * weight


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
        shares=shares(tally),
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


def _passes(modality: str, role: Role) -> bool:
    return role is not Role.ENCODER or modality in IMAGES
