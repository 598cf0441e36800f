"""An encoder pool between zero and one: when it wakes, and when it may go. Pure.

asleep   images are encoded inline, waited for or refused, as whileAtZero says
wake     a request is held for the pool: at once
         a_v · T_up · cost(inline) > T_up · cost(encoder): what is encoded inline within one
         start-up is worth more than the start-up
         a_inline / units > band_down · its target, and images have bottleneck_share: an encoder
         takes a start-up to come, and until then that pool fills up
awake    one replica at least while images come
idle     no image since the last tick and, where they would be encoded inline, that pool's use is
         below band_down; pace waits idleSeconds

a_v is what pods encode inline (`busy.encode`), in work seconds a second; T_up cancels out.
"""

from __future__ import annotations

import dataclasses

from vlm_operator.api.enums import WhileAtZero
from vlm_operator.autoscale.demand import Demand
from vlm_operator.autoscale.outcome import Candidate, Need
from vlm_operator.autoscale.policy import PoolPolicy, ServicePolicy, ZeroPolicy
from vlm_operator.autoscale.readings import PoolReading


@dataclasses.dataclass(frozen=True)
class Inline:
    """The pool that encodes images while no encoder does.

    Attributes:
        demand: its own, images included.
    """

    rules: PoolPolicy
    pool: PoolReading
    demand: Demand


def with_zero(
    policy: ServicePolicy,
    rules: PoolPolicy,
    pool: PoolReading,
    demand: Demand,
    need: Need,
    *,
    held: int,
    inline: Inline | None,
) -> Need:
    """Adapt an encoder's need to a pool that may be at zero.

    Args:
        policy: the service's.
        rules: the encoder's, with a `zero` policy.
        pool: the encoder's pods.
        demand: the encoder's, with what is encoded inline while it is at zero.
        need: what its pods ask for.
        held: requests that gateways hold for it.
        inline: who encodes meanwhile, None where nobody does.
    """
    zero = rules.zero
    if zero is None:
        return need
    one = min((item.speed for item in rules.variants), default=1.0)
    if held > 0:
        text = f"{held} requests wait for an encoder"
        return _awake(need, one, Candidate("held", 1), text, known=True, wakes=True)
    if pool.replicas == 0:
        why = _wakes(policy, rules, demand, inline)
        if why is None:
            return dataclasses.replace(
                need,
                units=0.0,
                least_units=0.0,
                known=inline is None or inline.pool.known,
                idle=True,
                bottleneck=False,
                message="images do not pay for an encoder",
            )
        return _awake(need, one, Candidate("inlineEncode", 1), why, known=True, wakes=True)
    if not pool.pods:  # it has just been woken
        return _awake(need, one, Candidate("notIdle", 1), "an encoder starts", known=True)
    if not need.known or demand.idle_seconds <= 0:
        return _awake(need, one, Candidate("notIdle", 1), need.message, known=need.known)
    keeps = _keeps(policy, zero, inline)
    if keeps is not None:
        return _awake(need, one, Candidate("notIdle", 1), keeps, known=need.known)
    message = f"no image for {demand.idle_seconds:.0f} s, and {need.message}"
    return dataclasses.replace(need, units=0.0, least_units=0.0, idle=True, message=message)


def _awake(
    need: Need, one: float, why: Candidate, message: str, *, known: bool, wakes: bool = False
) -> Need:
    return dataclasses.replace(
        need,
        units=max(need.units, one),
        least_units=max(need.least_units, one),
        candidates=(*need.candidates, why),
        bottleneck=need.bottleneck or wakes,
        known=known,
        idle=False,
        message=message,
    )


def _wakes(
    policy: ServicePolicy, rules: PoolPolicy, demand: Demand, inline: Inline | None
) -> str | None:
    """The reason for an encoder, None while there is none."""
    if inline is None or not inline.pool.known:
        return None
    virtual = demand.encode_erlangs
    mine, theirs = _cost(rules), _cost(inline.rules)
    ratio = mine / theirs if mine is not None and theirs else 1.0
    if virtual > ratio:
        return f"{virtual:.2g} s of images a second are encoded inline; an encoder is cheaper"
    use = inline.demand.erlangs / max(inline.pool.ready_units, 1e-9)
    images = virtual >= policy.constants.bottleneck_share * inline.demand.erlangs > 0
    if use > policy.constants.band_down * inline.rules.utilization and images:
        return f"{inline.rules.role} is busy to {use:.0%}, and encodes images"
    return None


def _keeps(policy: ServicePolicy, zero: ZeroPolicy, inline: Inline | None) -> str | None:
    """Why an idle encoder stays, None where it may go."""
    if zero.while_at_zero is not WhileAtZero.INLINE_AT_PREFILL:
        return None
    if inline is None or not inline.pool.known:
        return "nobody is known to encode in its stead"
    units, load = inline.pool.ready_units, inline.demand.erlangs
    role = inline.rules.role
    if load > policy.constants.band_down * units:
        return f"{role} is too busy to encode in its stead"
    return None


def _cost(rules: PoolPolicy) -> float | None:
    """The cheapest known cost of a unit."""
    return min(
        (item.cost_per_hour / item.speed for item in rules.variants if item.cost_per_hour),
        default=None,
    )
