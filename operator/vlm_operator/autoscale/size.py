"""Computes the units that one pool needs, by each signal. Pure.

encoder, prefill   utilization        planned / target use
                   backlog            erlangs + queued seconds / drain time
                                      drain time = min(backlogSeconds, DRAIN_TARGETS · TTFT target)
decode             kvTokens           running tokens / (target occupancy · tokens per unit)
                   kvTokensWithQueue  the same with all planned tokens
                   itl                planned tokens / tokens at which a step takes the ITL target
all                overrun            ready units + one replica, if the pool is a bottleneck and its
                                      queue (beyond the waiting budget, for work) does not shrink

units        what the pool may grow to: the largest signal. A signal whose use is below the upper
             band asks for at most the present units.
least_units  what the pool may shrink to: the largest signal, by the lower band and with headroom
             for random variation
bottleneck   a signal is above its band, or the pool's share of an overrun is bottleneck_share

Pods of unknown load count as fully used. Each pool is sized alone, so that pools behind each other
grow in one tick.

An encoder pool with scaleToZero runs at least one replica while images arrive. At zero:
grow    a gateway holds a request; images encoded inline cost more than an encoder; or they are
        bottleneck_share of the work of a pool whose use is above its lower band
shrink  the last replica is idle and, if images are encoded inline then, that pool has capacity
"""

from __future__ import annotations

import dataclasses
import math

from vlm_operator.api.enums import WhileAtZero
from vlm_operator.autoscale.demand import Demand
from vlm_operator.autoscale.outcome import Candidate, Need
from vlm_operator.autoscale.policy import PoolPolicy, ServicePolicy
from vlm_operator.autoscale.readings import PoolReading
from vlm_operator.names import Role

NEUTRAL_UTILIZATION = 0.75  # the target for which band_up and band_down are given
NEUTRAL_OCCUPANCY = 0.80
DRAIN_TARGETS = 10.0
MAX_UNITS = 100_000.0
TIMED_SIGNALS = frozenset({"utilization", "backlog"})  # computed from service times


@dataclasses.dataclass(frozen=True)
class LoadSignals:
    """The numbers from which one pool's need is computed.

    Attributes:
        planned: load after a start-up: work seconds per second, for decode KV tokens.
        planned_work: work seconds per second; of a decode pool that also prefills.
        chance: rise of the load within a start-up that random variation can cause.
        credible: service times are known from fit_points rows.
        service_seconds: mean seconds of one item; None if unknown.
        budget_seconds: time that work may wait in this pool; None without a target.
        target_seconds: the lowest TTFT target that concerns the pool; None without one.
        bottleneck_share: share of the pool's own waiting in an overrun of TTFT.
        itl_tokens: KV tokens per unit at which ITL meets its target; None if unknown.
    """

    demand: Demand
    planned: float
    planned_work: float = 0.0
    chance: float = 0.0
    credible: bool = True
    service_seconds: float | None = None
    budget_seconds: float | None = None
    target_seconds: float | None = None
    bottleneck_share: float = 0.0
    itl_tokens: float | None = None


@dataclasses.dataclass(frozen=True)
class SignalNeed:
    """The units that one signal needs.

    Attributes:
        least: units that the pool must keep.
        fires: the pool's own use justifies growth.
        bottleneck_only: it counts only if the pool is a bottleneck.
    """

    signal: str
    units: float
    least: float
    fires: bool = False
    bottleneck_only: bool = False


@dataclasses.dataclass(frozen=True)
class InlinePool:
    """The pool that encodes images while no encoder pod does; `demand` contains them."""

    rules: PoolPolicy
    pool: PoolReading
    demand: Demand


def size(policy: ServicePolicy, rules: PoolPolicy, pool: PoolReading, signals: LoadSignals) -> Need:
    """Return the need of one pool; see the module's docstring."""
    needs: list[SignalNeed] = []
    if rules.role is Role.DECODE:
        needs += _token_needs(policy, rules, pool, signals)
        if Role.PREFILL not in policy.pools:
            needs += _work_needs(policy, rules, pool, signals, planned=signals.planned_work)
    else:
        needs += _work_needs(policy, rules, pool, signals, planned=signals.planned)
    in_overrun = signals.bottleneck_share >= policy.constants.bottleneck_share
    units = least = 0.0
    leading: SignalNeed | None = None
    for need in needs:
        asked = need.units if need.fires else min(need.units, pool.usable_units)
        if need.bottleneck_only:
            asked = need.units if in_overrun else 0.0
        if leading is None or asked > units:
            leading, units = need, max(units, asked)
        least = max(least, need.least)
    units = min(units, MAX_UNITS) + pool.silent_units
    return Need(
        role=rules.role,
        units=units,
        least_units=min(max(least + pool.silent_units, units), MAX_UNITS),
        candidates=_candidates(pool, needs),
        bottleneck=in_overrun or any(need.fires for need in needs),
        known=pool.known and bool(needs),
        idle=pool.known and signals.demand.idle_seconds >= policy.window_seconds,
        credible=signals.credible or leading is None or leading.signal not in TIMED_SIGNALS,
        message=_message(pool, leading, units),
    )


def bands(policy: ServicePolicy, target: float, neutral: float) -> tuple[float, float]:
    """Return the upper and the lower band of a target, in proportion to it."""
    upper = min(target * policy.constants.band_up / neutral, (1.0 + target) / 2.0)
    return upper, target * policy.constants.band_down / neutral


def with_zero(
    policy: ServicePolicy,
    rules: PoolPolicy,
    pool: PoolReading,
    demand: Demand,
    need: Need,
    *,
    held: int,
    inline: InlinePool | None,
) -> Need:
    """Return the need of an encoder pool that may scale to zero; others keep `need`.

    Args:
        policy: the service's settings.
        rules: the encoder pool's settings.
        pool: the encoder's pods.
        demand: the encoder's load; at zero, images that are encoded inline.
        need: the need by `size`.
        held: requests that gateways hold until an encoder is ready.
        inline: the pool that encodes meanwhile; None if there is none.
    """
    if rules.zero is None:
        return need
    one = min((item.speed for item in rules.variants), default=1.0)

    def at_least_one(signal: str, message: str, *, known: bool = True, grow: bool = False) -> Need:
        return dataclasses.replace(
            need,
            units=max(need.units, one),
            least_units=max(need.least_units, one),
            candidates=(*need.candidates, Candidate(signal, 1)),
            bottleneck=need.bottleneck or grow,
            known=known,
            idle=False,
            message=message,
        )

    zero = dataclasses.replace(need, units=0.0, least_units=0.0, idle=True)
    if held > 0:
        return at_least_one("held", f"{held} requests wait for an encoder", grow=True)
    if pool.replicas == 0:
        cause = _reason_to_grow(policy, rules, demand, inline)
        if cause is not None:
            return at_least_one("inlineEncode", cause, grow=True)
        known = inline is None or inline.pool.known
        message = "images do not pay for an encoder"
        return dataclasses.replace(zero, known=known, bottleneck=False, message=message)
    if not pool.pods:
        return at_least_one("notIdle", "an encoder starts")
    if not need.known or demand.idle_seconds <= 0:
        return at_least_one("notIdle", need.message, known=need.known)
    if rules.zero.while_at_zero is WhileAtZero.INLINE_AT_PREFILL:
        if inline is None or not inline.pool.known:
            return at_least_one("notIdle", "no pool is known to encode images inline")
        if inline.demand.erlangs > policy.constants.band_down * inline.pool.ready_units:
            return at_least_one("notIdle", f"{inline.rules.role} is too busy to encode images")
    message = f"no image for {demand.idle_seconds:.0f} s, and {need.message}"
    return dataclasses.replace(zero, message=message)


def _work_needs(
    policy: ServicePolicy,
    rules: PoolPolicy,
    pool: PoolReading,
    signals: LoadSignals,
    *,
    planned: float,
) -> list[SignalNeed]:
    demand, target, usable = signals.demand, rules.utilization, pool.usable_units
    upper, lower = bands(policy, target, NEUTRAL_UTILIZATION)
    least = (planned + signals.chance) / lower
    needs = [SignalNeed("utilization", planned / target, least, fires=planned > upper * usable)]
    seconds = policy.backlog_seconds
    if signals.target_seconds is not None:
        seconds = min(seconds, DRAIN_TARGETS * signals.target_seconds)
    backlog = demand.erlangs + demand.queued_seconds / max(seconds, 1e-3)
    needs.append(SignalNeed("backlog", backlog, backlog, fires=backlog > usable))
    budget = signals.budget_seconds
    if budget is not None and demand.queued_seconds > budget * pool.ready_units and demand.piling:
        needs.append(_overrun(pool))
    return needs


def _token_needs(
    policy: ServicePolicy, rules: PoolPolicy, pool: PoolReading, signals: LoadSignals
) -> list[SignalNeed]:
    demand, usable = signals.demand, pool.usable_units
    capacity = demand.tokens_per_unit
    if capacity is None:
        return []
    upper, lower = bands(policy, rules.kv_occupancy, NEUTRAL_OCCUPANCY)
    target, lower = rules.kv_occupancy * capacity, lower * capacity
    running, planned = demand.running_tokens, max(signals.planned, demand.tokens)
    needs = [
        SignalNeed("kvTokens", running / target, running / lower),
        SignalNeed(
            "kvTokensWithQueue",
            planned / target,
            (planned + signals.chance) / lower,
            fires=planned > upper * capacity * usable,
        ),
    ]
    if signals.itl_tokens is not None:
        fast = max(signals.itl_tokens, 1.0)
        itl = planned / fast
        needs.append(SignalNeed("itl", itl, itl, fires=planned > fast * usable))
    if demand.piling and demand.queued_tokens > 0:
        needs.append(_overrun(pool))
    return needs


def _overrun(pool: PoolReading) -> SignalNeed:
    return SignalNeed("overrun", pool.ready_units + pool.speed, 0.0, bottleneck_only=True)


def _candidates(pool: PoolReading, needs: list[SignalNeed]) -> tuple[Candidate, ...]:
    found: dict[str, int] = {}
    for need in needs:
        units = min(need.units + pool.silent_units, MAX_UNITS)
        replicas = math.ceil(round(units / pool.speed, 6))
        found[need.signal] = max(found.get(need.signal, 0), replicas)
    return tuple(Candidate(signal, replicas) for signal, replicas in sorted(found.items()))


def _message(pool: PoolReading, leading: SignalNeed | None, units: float) -> str:
    if pool.pods and not pool.known:
        answered = sum(pod.answered for pod in pool.pods)
        return f"{answered} of {len(pool.pods)} ready pods answered"
    if leading is None:
        return "the pods report no capacity" if pool.pods else "no pod is ready"
    ready = f"{pool.ready_units:.3g} of {pool.units:.3g} units are ready"
    return f"{leading.signal} needs {round(units, 2):.3g} units, {ready}"


def _reason_to_grow(
    policy: ServicePolicy, rules: PoolPolicy, demand: Demand, inline: InlinePool | None
) -> str | None:
    """Return why an encoder pool at zero gets a replica; None if it does not.

    Images that are encoded inline cost erlangs · cost(inline) per hour, an encoder cost(encoder).
    """
    if inline is None or not inline.pool.known:
        return None
    images, work = demand.encode_erlangs, inline.demand.erlangs
    own, other = _cost_per_unit(rules), _cost_per_unit(inline.rules)
    if images > (own / other if own is not None and other else 1.0):
        return f"{images:.2g} s of images a second are encoded inline; an encoder is cheaper"
    use = work / max(inline.pool.ready_units, 1e-9)
    relevant = images >= policy.constants.bottleneck_share * work > 0
    if relevant and use > policy.constants.band_down * inline.rules.utilization:
        return f"{inline.rules.role} is busy to {use:.0%}, and encodes images"
    return None


def _cost_per_unit(rules: PoolPolicy) -> float | None:
    """Return the lowest known cost per hour of a unit."""
    costs = [item.cost_per_hour / item.speed for item in rules.variants if item.cost_per_hour]
    return min(costs, default=None)
