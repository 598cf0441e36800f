"""How long work may wait in each pool, for TTFT to be within its target. Pure.

B(pool) = max(wait_floor, target - Σ floor(s)) · w(pool)      Σ w = 1

The weights are constant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vlm_operator.autoscale.outcome import Attribution
from vlm_operator.autoscale.policy import ServicePolicy
from vlm_operator.names import Role

WEIGHTS: Mapping[Role, float] = {Role.ENCODER: 0.35, Role.PREFILL: 0.50, Role.DECODE: 0.15}
IMAGES = frozenset({"image", "video"})  # modalities that pass the encoder


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


def _passes(modality: str, role: Role) -> bool:
    return role is not Role.ENCODER or modality in IMAGES
