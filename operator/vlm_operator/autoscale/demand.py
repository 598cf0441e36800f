"""How much work arrives, in a unit that does not depend on the mix of requests. Pure.

encoder, prefill   a = EWMA of (work seconds that arrived · speed · ratio / second)     Erlang
                   Q = Σ work seconds that wait · speed · ratio
                   ratio: measured over predicted seconds (`readings.Measured`)
decode             D = Σ running + flow · (reserved + queued tokens)        KV tokens
                   flow: share of them that is not stuck before encoder or prefill; requests that
                   gateways hold for want of room count with the mean of those that have some
                   (cached blocks can be evicted: they are no load); its EWMA, and of what lies
                   above that, what is beyond NOISE · s: answers of a few seconds come and go
                   faster than pods
s                  = √(SPREAD · D · tokens of a mean request): as many requests as by chance

Work seconds are the workers' own predictions, of which a pod of speed 0.5 has twice as many for the
same item. A pod that has been silent for a few ticks counts with what it last said.
"""

from __future__ import annotations

import dataclasses
import math

from vlm_operator.autoscale.policy import ServicePolicy
from vlm_operator.autoscale.readings import PoolReading
from vlm_operator.names import Role

NOISE = 2.0  # standard deviations of the KV in use that are nothing but chance
SPREAD = 1.5  # mean square of the KV of one request, over the square of the mean
TREND_SECONDS = 60.0  # over which a slope is taken
TREND_POINTS = 12


@dataclasses.dataclass(frozen=True)
class DemandMemory:
    """What is remembered of one pool's load.

    Attributes:
        at: of the last tick that was known.
        erlangs: smoothed, in units, as pods predicted it; the newest ratio goes for all of it.
        encode_erlangs: the same of images alone.
        tokens: KV tokens in use or asked for, smoothed.
        waiting: work seconds that wait, of decode KV tokens, smoothed.
        trend: (when, load) of the last minute, oldest first.
        worked_at: when anything last came or was there; the first tick counts as such.
        silent_since: since when too few pods answer, None while they do.
    """

    at: float | None = None
    erlangs: float | None = None
    encode_erlangs: float = 0.0
    tokens: float | None = None
    waiting: float | None = None
    trend: tuple[tuple[float, float], ...] = ()
    worked_at: float | None = None
    silent_since: float | None = None


@dataclasses.dataclass(frozen=True)
class Demand:
    """The load of one pool at one tick, in units of work and in tokens.

    Attributes:
        erlangs: work seconds admitted a second, smoothed; 0 before two answers.
        encode_erlangs: of these, images.
        queued_seconds: work that waits.
        tokens: KV tokens in use or asked for, chance apart; `queued_tokens` of them wait.
        tokens_each: of them, those of a mean request.
        tokens_per_unit: KV capacity of a unit, None where no pod reports one.
        piling: what waits is no less than it was lately; what shrinks is being served.
        idle_seconds: since anything came or was there.
        ratio: measured over predicted seconds, which `erlangs` are multiplied by.
    """

    erlangs: float
    encode_erlangs: float
    queued_seconds: float
    tokens: float
    queued_tokens: float
    tokens_per_unit: float | None
    idle_seconds: float
    tokens_each: float = 0.0
    piling: bool = True
    ratio: float = 1.0

    @property
    def running_tokens(self) -> float:
        """Those that do not wait."""
        return max(0.0, self.tokens - self.queued_tokens)

    def spread(self, tokens: float) -> float:
        """Standard deviation of KV tokens in use about a mean: requests come by chance."""
        return _spread(self.tokens_each, tokens)


def demand_of(
    policy: ServicePolicy,
    pool: PoolReading,
    memory: DemandMemory,
    *,
    now: float,
    known: bool | None = None,
    elsewhere: float = 0.0,
    held: int = 0,
    flow: float = 1.0,
) -> tuple[Demand, DemandMemory]:
    """Add one tick to what is known of a pool's load.

    Args:
        policy: the service's.
        pool: what its pods said.
        memory: what the last call returned.
        now: seconds since the epoch.
        known: enough is known of it; None is what the pool itself says.
        elsewhere: work seconds a second that other pools do in its stead.
        held: requests that gateways hold for want of KV room.
        flow: share of what is promised or waits that is not stuck in another pool's queue.
    """
    known = pool.known if known is None else known
    loads = pool.loads
    rates = [last.rate * pod.speed for pod, last in loads if last.rate is not None]
    rate = sum(rates) if rates else None
    encode_rate = sum((last.encode_rate * pod.speed for pod, last in loads), 0.0)
    elapsed = 0.0 if memory.at is None else max(0.0, now - memory.at)
    weight = _weight(elapsed, policy.constants.smoothing_seconds)
    ratio = _ratio(pool)
    tokens, waiting, each = _tokens(pool, held, flow)
    queued = sum((last.queued_seconds * pod.unit_seconds for pod, last in loads), 0.0)
    sized = [(last.capacity, pod.speed) for pod, last in loads if last.capacity > 0]
    works = bool(rate or queued or tokens or encode_rate or elsewhere)
    # a clock that was put back makes nothing older than now
    worked_at = now if memory.worked_at is None or works or not known else memory.worked_at
    worked_at = min(worked_at, now)
    silent = min(memory.silent_since if memory.silent_since is not None else now, now)
    behind = waiting if pool.role is Role.DECODE else queued
    found = dataclasses.replace(
        memory,
        at=now,
        erlangs=_smoothed(memory.erlangs, rate, weight),
        encode_erlangs=_smoothed(memory.encode_erlangs, encode_rate, weight) or 0.0,
        tokens=_smoothed(memory.tokens, tokens, weight),
        waiting=_smoothed(memory.waiting, behind, weight),
        worked_at=worked_at,
        silent_since=None if known or not pool.pods else silent,
    )
    level = found.tokens or 0.0
    demand = Demand(
        erlangs=max(0.0, found.erlangs or 0.0) * ratio,
        encode_erlangs=found.encode_erlangs,
        queued_seconds=queued,
        tokens=max(level, tokens - NOISE * _spread(each, level)),
        queued_tokens=waiting,
        tokens_per_unit=(
            sum(capacity for capacity, _ in sized) / sum(speed for _, speed in sized)
            if sized
            else None
        ),
        idle_seconds=max(0.0, now - worked_at),
        tokens_each=each,
        piling=behind >= (memory.waiting or 0.0),
        ratio=ratio,
    )
    return demand, found


def with_trend(memory: DemandMemory, load: float, *, now: float) -> DemandMemory:
    """Note the load for the slope, at most twelve times in a minute."""
    last = memory.trend[-1][0] if memory.trend else -math.inf
    if last > now:
        return dataclasses.replace(memory, trend=((now, load),))  # the clock was put back
    if now - last < TREND_SECONDS / TREND_POINTS:
        return memory
    kept = [point for point in memory.trend if now - point[0] <= TREND_SECONDS]
    return dataclasses.replace(memory, trend=(*kept, (now, load))[-TREND_POINTS - 1 :])


def _tokens(pool: PoolReading, held: int, flow: float) -> tuple[float, float, float]:
    """KV tokens that count as load, those of them that wait, and those of a mean request."""
    last = [item for _, item in pool.loads]
    running = float(sum(item.running for item in last))
    promised = float(sum(item.promised for item in last))
    inflight = sum(item.inflight for item in last)
    # who waits at a gateway will hold what others hold
    each = (running + promised) / inflight if inflight else 0.0
    queued = sum(item.queued_tokens for item in last) + held * each
    return running + flow * (promised + queued), flow * queued, each


def _spread(each: float, tokens: float) -> float:
    return math.sqrt(SPREAD * each * max(tokens, 0.0))


def _weight(elapsed: float, seconds: float) -> float:
    """Of a new value in an average that forgets within so many seconds."""
    return 1.0 - math.exp(-elapsed / max(seconds, 1e-3))


def _smoothed(before: float | None, value: float | None, weight: float) -> float | None:
    if value is None:
        return before
    return value if before is None else before + weight * (value - before)


def _ratio(pool: PoolReading) -> float:
    """Measured over predicted seconds of the pods that count, the faster ones counting for more."""
    speeds = sum(pod.speed for pod, _ in pool.loads)
    return sum(pod.unit_seconds for pod, _ in pool.loads) / speeds if speeds else 1.0
