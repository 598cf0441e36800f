"""How many units each pool needs, by every signal, and which of them may make it grow. Pure.

encoder, prefill   utilization  a_plan / target       between the bands nothing moves
                   backlog      a + Q / T_drain       T_drain = min(backlogSeconds, 10 · target)
                   overrun      one replica more than is ready        if bottleneck, and work waits
decode             kvTokens     D / (target · capacity)               the same bands
                   itl          D / k2                k2: KV tokens at which ITL(k) = target
                   overrun      as above

units        what a pool grows to       max of the signals that may speak
least_units  what it may shrink to      the same, with D / lower band
bottleneck       its own waiting has bottleneck_share of an overrun, or its own band fires

A breach with all queues short therefore raises nothing. Pods of unknown load are added to both:
they give no capacity to grow by, and are not taken for idle. Each pool is sized by itself: what it
needs behind a pool that lacks room is ordered in the same tick, so that all of it starts at once.
"""

from __future__ import annotations

import dataclasses
import math

from vlm_operator.autoscale.demand import Demand
from vlm_operator.autoscale.outcome import Candidate, Need
from vlm_operator.autoscale.policy import PoolPolicy, ServicePolicy
from vlm_operator.autoscale.readings import PoolReading
from vlm_operator.names import Role

NEUTRAL_UTILIZATION = 0.75  # the target that the bands are drawn around
NEUTRAL_OCCUPANCY = 0.80
DRAIN_TARGETS = 10.0  # times the target of TTFT, within which a backlog is worked off
MOST_UNITS = 100_000.0
TIMED = frozenset({"utilization", "backlog"})  # rest on how long work takes


@dataclasses.dataclass(frozen=True)
class LoadSignals:
    """Everything that one pool's size follows from.

    Attributes:
        planned: load to plan for: Erlang, or KV tokens for decode.
        chance: by how much load may seem to rise within a start-up though it does not: there must
            be room for that before a pool shrinks.
        planned_work: Erlang of a decode pool that prefills too, 0 elsewhere.
        credible: service times are known well enough to size by them.
        service_seconds: mean seconds of one item on a unit, None where unknown.
        budget_seconds: that may be spent waiting here, None without a target.
        target_seconds: the strictest target of TTFT, None without one.
        bottleneck_share: share of its own waiting in an overrun of TTFT.
        itl_tokens: KV tokens of a unit at which ITL meets its target, None where that is unknown.
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
    """What one signal asks for, in units.

    Attributes:
        fires: the pool's own use justifies growth.
        bottleneck_only: it counts only if the pool is a bottleneck.
        least: units that it needs before the pool may shrink.
    """

    signal: str
    units: float
    least: float
    fires: bool = False
    bottleneck_only: bool = False


def size(policy: ServicePolicy, rules: PoolPolicy, pool: PoolReading, signals: LoadSignals) -> Need:
    """Say what one pool needs."""
    if rules.role is Role.DECODE:
        signal_needs = _token_needs(policy, rules, pool, signals)
        if Role.PREFILL not in policy.pools:
            signal_needs += _work_needs(policy, rules, pool, signals, signals.planned_work)
    else:
        signal_needs = _work_needs(policy, rules, pool, signals, signals.planned)
    speaks = bool(signal_needs) or not pool.pods
    there = max(0.0, pool.units - pool.silent_units)
    fires = any(signal_need.fires for signal_need in signal_needs)
    bottleneck = fires or signals.bottleneck_share >= policy.constants.bottleneck_share
    units = least = 0.0
    leading = None
    for signal_need in signal_needs:
        asked = signal_need.units if signal_need.fires else min(signal_need.units, there)
        if signal_need.bottleneck_only:
            asked = (
                signal_need.units
                if signals.bottleneck_share >= policy.constants.bottleneck_share
                else 0.0
            )
        if leading is None or asked > units:
            leading, units = signal_need, max(units, asked)
        least = max(least, signal_need.least)
    units = min(units, MOST_UNITS) + pool.silent_units
    least = min(max(least + pool.silent_units, units), MOST_UNITS)
    return Need(
        role=rules.role,
        units=units,
        least_units=least,
        candidates=_candidates(pool, signal_needs),
        bottleneck=bottleneck,
        known=pool.known and speaks,
        idle=pool.known and signals.demand.idle_seconds >= policy.window_seconds,
        credible=signals.credible or leading is None or leading.signal not in TIMED,
        message=_message(pool, leading, units, speaks=speaks),
    )


def bands(policy: ServicePolicy, target: float, neutral: float) -> tuple[float, float]:
    """The upper and the lower band of a target: those of the policy, moved along with it."""
    upper = min(target * policy.constants.band_up / neutral, (1.0 + target) / 2.0)
    return upper, target * policy.constants.band_down / neutral


def _work_needs(
    policy: ServicePolicy,
    rules: PoolPolicy,
    pool: PoolReading,
    signals: LoadSignals,
    planned: float,
) -> list[SignalNeed]:
    demand = signals.demand
    there = max(0.0, pool.units - pool.silent_units)
    upper, lower = bands(policy, rules.utilization, NEUTRAL_UTILIZATION)
    use = planned / rules.utilization
    signal_needs = [
        SignalNeed(
            "utilization", use, (planned + signals.chance) / lower, fires=planned > upper * there
        )
    ]
    seconds = policy.backlog_seconds
    if signals.target_seconds is not None:
        seconds = min(seconds, DRAIN_TARGETS * signals.target_seconds)
    backlog = demand.erlangs + demand.queued_seconds / max(seconds, 1e-3)
    signal_needs.append(SignalNeed("backlog", backlog, backlog, fires=backlog > there))
    budget = signals.budget_seconds
    if budget is None:
        return signal_needs
    if demand.piling and demand.queued_seconds > budget * pool.ready_units:
        signal_needs.append(_overrun(pool))
    return signal_needs


def _token_needs(
    policy: ServicePolicy, rules: PoolPolicy, pool: PoolReading, signals: LoadSignals
) -> list[SignalNeed]:
    demand = signals.demand
    capacity = demand.tokens_per_unit
    if capacity is None:
        return []
    there = max(0.0, pool.units - pool.silent_units)
    share = rules.kv_occupancy
    upper, lower = bands(policy, share, NEUTRAL_OCCUPANCY)
    planned = max(signals.planned, demand.tokens)
    running = demand.running_tokens
    signal_needs = [
        SignalNeed("kvTokens", running / (share * capacity), running / (lower * capacity)),
        SignalNeed(
            "kvTokensWithQueue",
            planned / (share * capacity),
            (planned + signals.chance) / (lower * capacity),
            fires=planned > upper * capacity * there,
        ),
    ]
    if signals.itl_tokens is not None:
        fast = max(signals.itl_tokens, 1.0)
        itl = planned / fast
        signal_needs.append(SignalNeed("itl", itl, itl, fires=planned > fast * there))
    if demand.piling and demand.queued_tokens > 0:
        signal_needs.append(_overrun(pool))
    return signal_needs


def _overrun(pool: PoolReading) -> SignalNeed:
    """A queue that the models do not explain: one more, and another when that one is ready."""
    return SignalNeed("overrun", pool.ready_units + pool.speed, 0.0, bottleneck_only=True)


def _candidates(pool: PoolReading, signal_needs: list[SignalNeed]) -> tuple[Candidate, ...]:
    found: dict[str, int] = {}
    for signal_need in signal_needs:
        units = min(signal_need.units + pool.silent_units, MOST_UNITS)
        replicas = math.ceil(round(units / pool.speed, 6))
        found[signal_need.signal] = max(found.get(signal_need.signal, 0), replicas)
    return tuple(Candidate(signal, replicas) for signal, replicas in sorted(found.items()))


def _message(pool: PoolReading, leading: SignalNeed | None, units: float, *, speaks: bool) -> str:
    if pool.pods and not pool.known:
        answered = sum(pod.answered for pod in pool.pods)
        return f"{answered} of {len(pool.pods)} ready pods answered"
    if not speaks:
        return "the pods report no capacity"
    if leading is None:
        return "no pod is ready"
    there = f"{pool.ready_units:.3g} of {pool.units:.3g} units are ready"
    return f"{leading.signal} needs {round(units, 2):.3g} units, {there}"
