"""How many units each pool needs, by every signal, and which of them may make it grow. Pure.

encoder, prefill   utilization  a_plan / target       between the bands nothing moves
                   backlog      a + Q / T_drain       T_drain = min(drain_seconds, 10 · target)
                   waiting      least N: W95(N, a) ≤ B                if guilty
                   overrun      one replica more than is ready        if guilty, and work piles up
decode             kvTokens     D / (target · capacity)               the same bands
                   kvReserve    (D + NOISE · s) / (FULL · capacity)   small pools need more room
                   itl          D / k2                k2: KV tokens at which ITL(k) = target
                   overrun      as above

units        what a pool grows to       max of the signals that may speak
least_units  what it may shrink to      the same, with D / lower band and W95(N) ≤ consolidation · B
guilty       its own waiting has guilty_share of an overrun, or its own band fires

A breach with all queues short therefore raises nothing. Pods of unknown load are added to both:
they give no capacity to grow by, and are not taken for idle. While decode lacks KV room, the others
do not grow: what they begin could not end (`hold_upstream`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from vlm_operator.autoscale.estimating.demand import NOISE, Demand
from vlm_operator.autoscale.estimating.readings import PoolReading
from vlm_operator.autoscale.estimating.waiting import least_servers
from vlm_operator.autoscale.outcome import Candidate, Need
from vlm_operator.autoscale.policy import PoolPolicy, ServicePolicy
from vlm_operator.names import Role

NEUTRAL_UTILIZATION = 0.75  # the target that the bands are drawn around
NEUTRAL_OCCUPANCY = 0.80
FULL = 0.95  # of KV, beyond which requests wait for room
SAFE_NOISE = 3.0  # standard deviations for which there must be room before a pool shrinks
DRAIN_TARGETS = 10.0  # times the target of TTFT, within which a backlog is worked off
MOST_UNITS = 100_000.0
TIMED = frozenset({"utilization", "backlog", "waiting"})  # rest on how long work takes


@dataclasses.dataclass(frozen=True)
class Signals:
    """Everything that one pool's size follows from.

    Attributes:
        planned: load to plan for: Erlang, or KV tokens for decode.
        warm: of it, what is held for growth within a start-up.
        chance: by how much load may seem to rise within a start-up though it does not: there must
            be room for that before a pool shrinks.
        planned_work: Erlang of a decode pool that prefills too, 0 elsewhere.
        credible: service times are known well enough to size by them.
        service_seconds: mean seconds of one item on a unit, None where unknown.
        budget_seconds: that may be spent waiting here, None without a target.
        target_seconds: the strictest target of TTFT, None without one.
        guilt: share of its own waiting in an overrun of TTFT.
        itl_tokens: KV tokens of a unit at which ITL meets its target, None where that is unknown.
    """

    demand: Demand
    planned: float
    planned_work: float = 0.0
    warm: float = 0.0
    chance: float = 0.0
    credible: bool = True
    service_seconds: float | None = None
    budget_seconds: float | None = None
    target_seconds: float | None = None
    guilt: float = 0.0
    itl_tokens: float | None = None


@dataclasses.dataclass(frozen=True)
class Wish:
    """What one signal asks for, in units.

    Attributes:
        fires: the pool's own use justifies growth.
        guilty_only: it speaks only where the pool is guilty.
        least: units that it needs before the pool may shrink.
    """

    signal: str
    units: float
    least: float
    fires: bool = False
    guilty_only: bool = False


def size(policy: ServicePolicy, rules: PoolPolicy, pool: PoolReading, signals: Signals) -> Need:
    """Say what one pool needs."""
    if rules.role is Role.DECODE:
        wishes = _token_wishes(policy, rules, pool, signals)
        if Role.PREFILL not in policy.pools:
            wishes += _work_wishes(policy, rules, pool, signals, signals.planned_work)
    else:
        wishes = _work_wishes(policy, rules, pool, signals, signals.planned)
    speaks = bool(wishes) or not pool.pods
    there = max(0.0, pool.units - pool.silent_units)
    fires = any(wish.fires for wish in wishes)
    guilty = fires or signals.guilt >= policy.tuning.guilty_share
    units = least = 0.0
    leading = None
    for wish in wishes:
        asked = wish.units if wish.fires else min(wish.units, there)
        if wish.guilty_only:
            asked = wish.units if signals.guilt >= policy.tuning.guilty_share else 0.0
        if leading is None or asked > units:
            leading, units = wish, max(units, asked)
        least = max(least, wish.least)
    units = min(units, MOST_UNITS) + pool.silent_units
    least = min(max(least + pool.silent_units, units), MOST_UNITS)
    return Need(
        role=rules.role,
        units=units,
        least_units=least,
        candidates=_candidates(pool, wishes),
        guilty=guilty,
        known=pool.known and speaks,
        idle=pool.known and signals.demand.idle_seconds >= policy.window_seconds,
        urgent=_urgent(rules, pool, signals, units),
        credible=signals.credible or leading is None or leading.signal not in TIMED,
        warm_units=_warm(rules, signals),
        message=_message(pool, leading, units, speaks=speaks),
    )


def hold_upstream(
    needs: Mapping[Role, Need], pools: Mapping[Role, PoolReading], demands: Mapping[Role, Demand]
) -> dict[Role, Need]:
    """Let encoder and prefill wait for decode where KV room is what lacks."""
    found = dict(needs)
    decode, pool = needs.get(Role.DECODE), pools.get(Role.DECODE)
    if decode is None or pool is None or not decode.known:
        return found
    demand = demands[Role.DECODE]
    room = (demand.tokens_per_unit or 0.0) * pool.ready_units
    if not (demand.queued_tokens > 0 and demand.tokens >= room and decode.units > pool.units):
        return found
    for role in (Role.ENCODER, Role.PREFILL):
        need = needs.get(role)
        if need is None or not pools[role].pods:
            continue
        message = need.message
        if need.units > pools[role].units:
            message = f"{message}; decode has no KV room and grows first"
        found[role] = dataclasses.replace(
            need, units=min(need.units, pools[role].units), urgent=False, message=message
        )
    return found


def bands(policy: ServicePolicy, target: float, neutral: float) -> tuple[float, float]:
    """The upper and the lower band of a target: those of the policy, moved along with it."""
    upper = min(target * policy.tuning.band_up / neutral, (1.0 + target) / 2.0)
    return upper, target * policy.tuning.band_down / neutral


def _work_wishes(
    policy: ServicePolicy, rules: PoolPolicy, pool: PoolReading, signals: Signals, planned: float
) -> list[Wish]:
    demand, tuning = signals.demand, policy.tuning
    there = max(0.0, pool.units - pool.silent_units)
    upper, lower = bands(policy, rules.utilization, NEUTRAL_UTILIZATION)
    use = planned / rules.utilization
    wishes = [
        Wish("utilization", use, (planned + signals.chance) / lower, fires=planned > upper * there)
    ]
    seconds = tuning.drain_seconds
    if signals.target_seconds is not None:
        seconds = min(seconds, DRAIN_TARGETS * signals.target_seconds)
    backlog = demand.erlangs + demand.queued_seconds / max(seconds, 1e-3)
    wishes.append(Wish("backlog", backlog, backlog, fires=backlog > there))
    budget, each = signals.budget_seconds, signals.service_seconds
    if budget is None:
        return wishes
    if each is not None:
        work = demand.erlangs if pool.pods else planned  # a queue is of what comes, not of growth
        needed, safe = (
            float(least_servers(work, seconds=each, within=most, variability=demand.variability))
            for most in (budget, tuning.consolidation * budget)
        )
        # a time that is not credible adds nothing, and takes nothing away either
        grow = needed if signals.credible else 0.0
        wishes.append(Wish("waiting", grow, safe, guilty_only=True))
    if demand.piling and demand.queued_seconds > budget * pool.ready_units:
        wishes.append(_overrun(pool))
    return wishes


def _token_wishes(
    policy: ServicePolicy, rules: PoolPolicy, pool: PoolReading, signals: Signals
) -> list[Wish]:
    demand = signals.demand
    capacity = demand.tokens_per_unit
    if capacity is None:
        return []
    there = max(0.0, pool.units - pool.silent_units)
    share = rules.kv_occupancy
    upper, lower = bands(policy, share, NEUTRAL_OCCUPANCY)
    planned = max(signals.planned, demand.tokens)
    running = demand.running_tokens
    wishes = [
        Wish("kvTokens", running / (share * capacity), running / (lower * capacity)),
        Wish(
            "kvTokensWithQueue",
            planned / (share * capacity),
            (planned + signals.chance) / (lower * capacity),
            fires=planned > upper * capacity * there,
        ),
    ]
    room, safe = (
        demand.tokens + sigmas * demand.spread(demand.tokens) for sigmas in (NOISE, SAFE_NOISE)
    )
    full = FULL * capacity
    wishes.append(Wish("kvReserve", room / full, safe / full, fires=room > full * there))
    if signals.itl_tokens is not None:
        fast = max(signals.itl_tokens, 1.0)
        margin = policy.tuning.consolidation
        wishes.append(
            Wish("itl", planned / fast, planned / (fast * margin), fires=planned > fast * there)
        )
    if demand.piling and demand.queued_tokens > 0:
        wishes.append(_overrun(pool))
    return wishes


def _warm(rules: PoolPolicy, signals: Signals) -> float:
    """Units that are held for growth within a start-up."""
    if rules.role is not Role.DECODE:
        return signals.warm / rules.utilization
    capacity = signals.demand.tokens_per_unit
    return 0.0 if capacity is None else signals.warm / (rules.kv_occupancy * capacity)


def _overrun(pool: PoolReading) -> Wish:
    """A queue that the models do not explain: one more, and another when that one is ready."""
    return Wish("overrun", pool.ready_units + pool.speed, 0.0, guilty_only=True)


def _urgent(rules: PoolPolicy, pool: PoolReading, signals: Signals, units: float) -> bool:
    """Whether the pool must grow, as what waits cannot be done in time by those who are there."""
    demand, ready = signals.demand, pool.ready_units
    if not pool.known or units <= pool.units:
        return False
    if rules.role is Role.DECODE and demand.tokens_per_unit is not None:
        late = demand.queued_tokens > 0 and demand.tokens > demand.tokens_per_unit * ready
    else:
        target = signals.target_seconds
        late = target is not None and demand.queued_seconds > target * ready
    return late or units >= rules.panic * max(pool.units, 1e-9)


def _candidates(pool: PoolReading, wishes: list[Wish]) -> tuple[Candidate, ...]:
    found: dict[str, int] = {}
    for wish in wishes:
        units = min(wish.units + pool.silent_units, MOST_UNITS)
        replicas = math.ceil(round(units / pool.speed, 6))
        found[wish.signal] = max(found.get(wish.signal, 0), replicas)
    return tuple(Candidate(signal, replicas) for signal, replicas in sorted(found.items()))


def _message(pool: PoolReading, leading: Wish | None, units: float, *, speaks: bool) -> str:
    if pool.pods and not pool.known:
        answered = sum(pod.answered for pod in pool.pods)
        return f"{answered} of {len(pool.pods)} ready pods answered"
    if not speaks:
        return "the pods report no capacity"
    if leading is None:
        return "no pod is ready"
    there = f"{pool.ready_units:.3g} of {pool.units:.3g} units are ready"
    return f"{leading.signal} needs {round(units, 2):.3g} units, {there}"
