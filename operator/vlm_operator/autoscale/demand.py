"""Computes the load of one pool, and extrapolates it over a start-up. Pure.

encoder, prefill  erlangs = EWMA(work seconds that arrive per second) · ratio
                  queued  = Σ queued work seconds · ratio      in seconds on a replica of speed 1
decode            tokens  = Σ running + flow · Σ (reserved + queued KV tokens)
                  a request that a gateway holds counts with the mean KV of those in flight
                  load = max(EWMA(tokens), tokens - NOISE · deviation)
                  deviation = √(SPREAD · tokens · KV of a mean request), by random arrivals

planned = load + rise over the start-up, at most growth_cap · load
rise    = Theil-Sen slope of the last minute · start-up - chance; 0 unless RISING_SHARE of the
          pairs of points rise

Workers predict work seconds, so a pod of speed 0.5 reports twice as many for the same item.
`PodReading.unit_seconds` converts them.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

from vlm_operator.autoscale.policy import ServicePolicy
from vlm_operator.autoscale.readings import PoolReading
from vlm_operator.names import Role

NOISE = 2.0  # standard deviations that count as random variation
SPREAD = 1.5  # mean square of the KV of one request, over the square of the mean
TREND_SECONDS = 60.0
TREND_POINTS = 12
MIN_TREND_POINTS = 5
RISING_SHARE = 0.75


@dataclasses.dataclass(frozen=True)
class DemandMemory:
    """One pool's load at the last tick. Times are seconds since the epoch.

    Attributes:
        at: time of the last tick; None before the first.
        erlangs: smoothed work seconds per second in units, as predicted (without the ratio).
        encode_erlangs: the part of images.
        tokens: KV tokens that are held, reserved or awaited, smoothed.
        waiting: queued work seconds, for decode queued KV tokens, smoothed.
        trend: time and load, over the last minute, oldest first.
        worked_at: last time with work; the first tick counts as such.
        silent_since: time since which too few pods answer; None if enough do.
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
    """One pool's load at one tick.

    Attributes:
        erlangs: work seconds that arrive per second, smoothed; 0 before the second sample.
        encode_erlangs: the part of images.
        queued_seconds: work seconds in queues.
        tokens: KV tokens that are held, reserved or awaited, less random variation.
        queued_tokens: the part that is awaited.
        tokens_per_unit: KV capacity of a unit; None if no pod reports one.
        idle_seconds: time since the last work.
        tokens_each: KV tokens of a mean request.
        piling: the queue is at least as long as its smoothed length, so it is not being worked off.
        ratio: measured over predicted seconds; `erlangs` and `queued_seconds` contain it.
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
        return max(0.0, self.tokens - self.queued_tokens)

    def deviation(self, tokens: float) -> float:
        """Return the standard deviation of KV tokens in use around this mean."""
        return _deviation(self.tokens_each, tokens)


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
    """Return a pool's load at one tick, and its memory for the next.

    Args:
        policy: the service's settings.
        pool: the pool's pods.
        memory: the result of the last call.
        now: seconds since the epoch.
        known: whether enough pods answer; None takes `pool.known`.
        elsewhere: work of the pool that other pools do or hold; above 0 if there is any.
        held: requests that gateways hold until the pool has free KV blocks.
        flow: share of reserved and queued tokens that encoder and prefill can deliver in time.
    """
    known = pool.known if known is None else known
    loads = pool.loads
    samples = [last for _, last in loads]
    rates = [last.rate * pod.speed for pod, last in loads if last.rate is not None]
    rate = sum(rates) if rates else None
    encode_rate = sum((last.encode_rate * pod.speed for pod, last in loads), 0.0)
    queued = sum((last.queued_seconds * pod.unit_seconds for pod, last in loads), 0.0)
    speeds = sum(pod.speed for pod, _ in loads)
    ratio = sum(pod.unit_seconds for pod, _ in loads) / speeds if speeds else 1.0

    with_kv = [] if pool.role is Role.ENCODER else samples  # its KV is of text that is lent to it
    running = float(sum(last.running for last in with_kv))
    reserved = float(sum(last.promised for last in with_kv))
    inflight = sum(last.inflight for last in with_kv)
    each = (running + reserved) / inflight if inflight else 0.0
    awaited = sum(last.queued_tokens for last in with_kv) + held * each
    tokens, queued_tokens = running + flow * (reserved + awaited), flow * awaited
    capacity = sum(last.capacity for last in with_kv)
    sized_speed = sum(pod.speed for pod, last in loads if last.capacity > 0)

    works = bool(rate or queued or tokens or encode_rate or elsewhere)
    waiting = queued_tokens if pool.role is Role.DECODE else queued
    elapsed = 0.0 if memory.at is None else max(0.0, now - memory.at)
    weight = 1.0 - math.exp(-elapsed / max(policy.constants.smoothing_seconds, 1e-3))
    # `min(…, now)`: the clock may have gone back
    worked_at = (
        now if memory.worked_at is None or works or not known else min(memory.worked_at, now)
    )
    silent_since = now if memory.silent_since is None else min(memory.silent_since, now)
    after = dataclasses.replace(
        memory,
        at=now,
        erlangs=memory.erlangs if rate is None else _smoothed(memory.erlangs, rate, weight),
        encode_erlangs=_smoothed(memory.encode_erlangs, encode_rate, weight),
        tokens=_smoothed(memory.tokens, tokens, weight),
        waiting=_smoothed(memory.waiting, waiting, weight),
        worked_at=worked_at,
        silent_since=None if known or not pool.pods else silent_since,
    )
    level = after.tokens or 0.0
    demand = Demand(
        erlangs=max(0.0, after.erlangs or 0.0) * ratio,
        encode_erlangs=after.encode_erlangs,
        queued_seconds=queued,
        tokens=max(level, tokens - NOISE * _deviation(each, level)),
        queued_tokens=queued_tokens,
        tokens_per_unit=capacity / sized_speed if sized_speed else None,
        idle_seconds=max(0.0, now - worked_at),
        tokens_each=each,
        piling=waiting >= (memory.waiting or 0.0),
        ratio=ratio,
    )
    return demand, after


def with_trend(memory: DemandMemory, load: float, *, now: float) -> DemandMemory:
    """Add a point to the trend, unless the last one is too recent."""
    last = memory.trend[-1][0] if memory.trend else -math.inf
    if last > now:  # the clock has gone back
        return dataclasses.replace(memory, trend=((now, load),))
    if now - last < TREND_SECONDS / TREND_POINTS:
        return memory
    kept = [point for point in memory.trend if now - point[0] <= TREND_SECONDS]
    return dataclasses.replace(memory, trend=(*kept, (now, load))[-TREND_POINTS - 1 :])


def planned(
    policy: ServicePolicy,
    load: float,
    trend: Sequence[tuple[float, float]],
    *,
    startup: float,
    chance: float = 0.0,
) -> float:
    """Return the load to expect after `startup` seconds.

    `chance` is the rise within that time that random variation alone can cause.
    """
    rise = max(0.0, rising_slope(trend) * startup - chance)
    return load + min(rise, policy.constants.growth_cap * load)


def rising_slope(points: Sequence[tuple[float, float]]) -> float:
    """Return Theil-Sen's slope per second; 0 if too few pairs rise."""
    if len(points) < MIN_TREND_POINTS:
        return 0.0
    slopes = [
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for index, earlier in enumerate(points)
        for later in points[index + 1 :]
        if later[0] > earlier[0]
    ]
    if not slopes or sum(slope > 0 for slope in slopes) < RISING_SHARE * len(slopes):
        return 0.0
    return max(0.0, statistics.median(slopes))


def _deviation(each: float, tokens: float) -> float:
    return math.sqrt(SPREAD * each * max(tokens, 0.0))


def _smoothed(before: float | None, value: float, weight: float) -> float:
    return value if before is None else before + weight * (value - before)
