"""How long work may wait in each pool, for TTFT to be within its target. Pure.

B(pool) = max(wait_floor, target - Σ floor(s)) · w(pool)      Σ w = 1

The weights begin as below and move towards each pool's share of slow requests' time, by a tenth of
themselves at most on each slow tick: where time is lost, more of it is allowed for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from vlm_operator.autoscale.estimating.attribute import owner
from vlm_operator.autoscale.outcome import Attribution
from vlm_operator.autoscale.policy import ServicePolicy
from vlm_operator.names import POOL_ROLES, Role

WEIGHTS: Mapping[Role, float] = {Role.ENCODER: 0.35, Role.PREFILL: 0.50, Role.DECODE: 0.15}
STEP = 0.1  # of a weight, that one slow tick may change
LEAST_WEIGHT = 0.05
PICTURES = frozenset({"image", "video"})  # modalities that pass the encoder


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
    weights: Mapping[Role, float],
    role: Role,
) -> float | None:
    """B in seconds; None where no target concerns the pool."""
    least = policy.tuning.wait_floor_seconds
    weight = weights.get(role, WEIGHTS[role])
    left = [
        max(least, item.target_seconds - sum(item.service_seconds.values()))
        for item in attributions
        if item.target_seconds is not None and item.attainable and _passes(item.modality, role)
    ]
    if not left:
        target = target_seconds(policy, attributions, role)
        return None if target is None else max(least, target) * weight
    return max(least, min(left)) * weight


def reweighted(
    weights: Mapping[Role, float],
    attributions: Sequence[Attribution],
    present: Collection[Role],
) -> dict[Role, float]:
    """Move the weights one step towards the shares of slow requests' time."""
    spent = dict.fromkeys(POOL_ROLES, 0.0)
    for item in attributions:
        for stage, share in item.shares.items():
            role = owner(stage, present)
            if role is not None:
                spent[role] += share * item.count
    total = sum(spent.values())
    found = {role: weights.get(role, WEIGHTS[role]) for role in POOL_ROLES}
    if total > 0:
        for role, weight in found.items():
            step = min(max(spent[role] / total - weight, -STEP * weight), STEP * weight)
            found[role] = max(LEAST_WEIGHT, weight + step)
    whole = sum(found.values())
    return {role: round(weight / whole, 6) for role, weight in found.items()}


def _passes(modality: str, role: Role) -> bool:
    return role is not Role.ENCODER or modality in PICTURES
