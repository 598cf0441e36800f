"""From what was seen to what each pool needs. Pure: the same arguments give the same estimate.

samples ─▶ readings ─▶ calibrate ─▶ demand ─▶ horizon ─┐
        └▶ window   ─▶ attribute ─▶ budget ────────────┴▶ size ─▶ zero ─▶ Need of each pool

Every tick adds counters and loads; fits and weights move on the slow tick. What is remembered is
bounded: pods that live, twelve slots of a window, 64 rows of a fit, 20 starts, a day of hours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from vlm_operator.autoscale.attribute import alone_shares, attribute, guilt, itl_p95
from vlm_operator.autoscale.budget import WEIGHTS, reweighted, target_seconds, wait_budget
from vlm_operator.autoscale.calibrate import (
    Fit,
    FitMemory,
    fit_of,
    fitted,
    service_seconds,
    with_rows,
)
from vlm_operator.autoscale.demand import Demand, DemandMemory, demand_of, with_trend
from vlm_operator.autoscale.horizon import (
    SeasonMemory,
    StartupMemory,
    planned,
    startup_seconds,
    time_startups,
    with_hour,
)
from vlm_operator.autoscale.outcome import Attribution, Need
from vlm_operator.autoscale.policy import ServicePolicy
from vlm_operator.autoscale.readings import LastAnswer, PoolReading, Readings, read_pools
from vlm_operator.autoscale.size import Signals, hold_upstream, size
from vlm_operator.autoscale.view import View
from vlm_operator.autoscale.window import Window
from vlm_operator.autoscale.zero import Inline, with_zero
from vlm_operator.names import POOL_ROLES, Role
from vlm_operator.state import Sample

ITEMS: Mapping[Role, str] = {
    Role.ENCODER: "encode",
    Role.PREFILL: "prefill",
    Role.DECODE: "prefill",  # of a pool that prefills too
}


@dataclasses.dataclass(frozen=True)
class EstimateMemory:
    """What the next estimate needs of those before. Values only, and bounded.

    Attributes:
        answers: what each pod last said, by uid.
        window: what gateways counted.
        fits: by "role/variant/kind".
        demands, seasons, weights: by role.
        slow_at: when the last slow tick was.
    """

    answers: Mapping[str, LastAnswer] = dataclasses.field(default_factory=dict)
    window: Window = dataclasses.field(default_factory=Window)
    fits: Mapping[str, FitMemory] = dataclasses.field(default_factory=dict)
    demands: Mapping[Role, DemandMemory] = dataclasses.field(default_factory=dict)
    seasons: Mapping[Role, SeasonMemory] = dataclasses.field(default_factory=dict)
    weights: Mapping[Role, float] = dataclasses.field(default_factory=lambda: dict(WEIGHTS))
    startups: StartupMemory = dataclasses.field(default_factory=StartupMemory)
    slow_at: float | None = None

    @property
    def lasting(self) -> EstimateMemory:
        """What is worth keeping beyond this process: fits, starts, hours and weights.

        Counters and loads are not in it: they are known again after two ticks, and would change
        at each.
        """
        fits = {key: FitMemory((), item.fit) for key, item in self.fits.items() if item.fit}
        starts = StartupMemory({}, self.startups.seconds)
        whole = {
            role: dataclasses.replace(item, hour=None, total=0.0, ticks=0)
            for role, item in self.seasons.items()
            if item.since is not None
        }
        return EstimateMemory(fits=fits, seasons=whole, weights=self.weights, startups=starts)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What is known of a service at one tick.

    Attributes:
        attributions: of each modality that had requests; one without any is not in it.
        needs: of every pool that there is.
        fresh: enough pods of every pool answered.
        missing_seconds: since they did not; 0 while they do.
        startup: seconds until a new replica is ready, by role and variant.
        itl_p95_seconds: between tokens, None where none came.
        demands: the load that needs follow from.
        bad_samples: answers whose numbers were absurd, at this tick.
        fits: service times by "role/variant/kind".
    """

    attributions: tuple[Attribution, ...]
    needs: Mapping[Role, Need]
    fresh: bool
    missing_seconds: float
    startup: Mapping[tuple[Role, str], float]
    itl_p95_seconds: float | None = None
    demands: Mapping[Role, Demand] = dataclasses.field(default_factory=dict)
    bad_samples: int = 0
    fits: Mapping[str, Fit] = dataclasses.field(default_factory=dict)


def estimate(
    policy: ServicePolicy, view: View, memory: EstimateMemory
) -> tuple[Estimate, EstimateMemory]:
    """Say what every pool needs.

    Args:
        policy: what the manifest says.
        view: what was seen at this tick.
        memory: what the last call returned.

    Returns:
        The estimate, and the memory for the next call.
    """
    now = view.now
    readings = read_pools(policy, view, memory.answers)
    gateways = readings.gateways
    window = memory.window.advance(gateways, now=now, window=policy.window_seconds)
    fits = with_rows(policy, readings.pools.values(), memory.fits, now=now)
    startups = time_startups(policy, view, memory.startups)
    present = frozenset(role for role, pool in readings.pools.items() if pool.pods)
    totals = window.total(now=now, window=policy.window_seconds)
    alone = alone_shares(policy, totals, memory.fits, now=now)
    attributions = attribute(policy, window, totals, alone, now=now)
    weights = memory.weights
    slow_at = memory.slow_at
    if slow_at is None or not 0 <= now - slow_at < policy.tuning.slow_seconds:
        last, slow_at = slow_at, now
        fits = {
            key: fitted(policy.tuning, item, key.rpartition("/")[2], now=now)
            if item.rows and (last is None or item.rows[-1].at > last)
            else item
            for key, item in fits.items()
        }
        weights = reweighted(weights, attributions, present)
    turn = _Turn(policy, readings, memory, attributions, weights, present, alone, now)
    startup = startup_seconds(policy, startups)
    needs, demands = turn.needs(startup, held=_held(gateways))
    silent = [item.silent_since for item in turn.demands.values() if item.silent_since is not None]
    found = Estimate(
        attributions=attributions,
        needs=needs,
        fresh=not silent,
        missing_seconds=max((now - since for since in silent), default=0.0),
        startup=startup,
        itl_p95_seconds=itl_p95(window, totals),
        demands=demands,
        bad_samples=readings.bad,
        fits={key: item.fit for key, item in fits.items() if item.fit is not None},
    )
    return found, EstimateMemory(
        answers=readings.answers,
        window=window,
        fits=fits,
        demands=turn.demands,
        seasons=turn.seasons,
        weights=weights,
        startups=startups,
        slow_at=slow_at,
    )


def _held(gateways: Iterable[Sample]) -> int:
    """Requests that gateways hold for an encoder."""
    return sum(item.held_for.get(Role.ENCODER, 0) for item in gateways)


class _Turn:
    """One tick over all pools; `demands` and `seasons` grow as it goes."""

    def __init__(
        self,
        policy: ServicePolicy,
        readings: Readings,
        memory: EstimateMemory,
        attributions: tuple[Attribution, ...],
        weights: Mapping[Role, float],
        present: frozenset[Role],
        alone: Mapping[str, float],
        now: float,
    ) -> None:
        self._policy = policy
        self._pools = readings.pools
        self._memory = memory
        self._attributions = attributions
        self._weights = weights
        self._present = present
        self._alone = alone
        self._now = now
        self._each = {
            role: service_seconds(memory.fits, role, ITEMS[role]) for role in readings.pools
        }
        self.demands: dict[Role, DemandMemory] = {}
        self.seasons: dict[Role, SeasonMemory] = {}

    def needs(
        self, startup: Mapping[tuple[Role, str], float], *, held: int
    ) -> tuple[dict[Role, Need], dict[Role, Demand]]:
        """Size every pool, the encoder last: it depends on who encodes in its stead."""
        demands: dict[Role, Demand] = {}
        needs: dict[Role, Need] = {}
        for role in reversed(POOL_ROLES):
            pool = self._pools.get(role)
            if pool is None:
                continue
            rules = self._policy.pools[role]
            inline = self._inline(demands) if role is Role.ENCODER else None
            demand = self._demand(pool, inline, held=held)
            demands[role] = demand
            need = size(self._policy, rules, pool, self._signals(pool, demand, startup))
            if role is Role.ENCODER:
                need = with_zero(self._policy, rules, pool, demand, need, held=held, inline=inline)
            needs[role] = need
        return hold_upstream(needs, self._pools, demands), demands

    def _demand(self, pool: PoolReading, inline: Inline | None, *, held: int) -> Demand:
        """Add one tick; an encoder at zero has the pictures that are encoded in its stead."""
        known, elsewhere = None, 0.0
        if pool.role is Role.ENCODER and not pool.pods and inline is not None:
            known, elsewhere = inline.pool.known, inline.demand.encode_erlangs
        demand, memory = demand_of(
            self._policy,
            pool,
            self._memory.demands.get(pool.role, DemandMemory()),
            service_seconds=self._each[pool.role],
            now=self._now,
            known=known,
            elsewhere=elsewhere + held * (pool.role is Role.ENCODER),
        )
        if elsewhere:
            demand = dataclasses.replace(demand, encode_erlangs=elsewhere)
        self.demands[pool.role] = memory
        return demand

    def _signals(
        self, pool: PoolReading, demand: Demand, startup: Mapping[tuple[Role, str], float]
    ) -> Signals:
        """Everything that the pool's size follows from."""
        role, policy = pool.role, self._policy
        horizon = max((startup[key] for key in startup if key[0] is role), default=0.0)
        load = demand.tokens if role is Role.DECODE else demand.erlangs
        if role is Role.ENCODER and not pool.pods:
            load = demand.encode_erlangs
        season = self._memory.seasons.get(role, SeasonMemory())
        memory = self.demands[role]
        if pool.known:
            memory = self.demands[role] = with_trend(memory, load, now=self._now)
            self.seasons[role] = with_hour(season, load, now=self._now)
        else:
            self.seasons[role] = season
        ahead = planned(policy, load, memory.trend, season, startup=horizon, now=self._now)
        return Signals(
            demand=demand,
            planned=ahead,
            planned_work=demand.erlangs,
            service_seconds=self._each[role],
            budget_seconds=wait_budget(policy, self._attributions, self._weights, role),
            target_seconds=target_seconds(policy, self._attributions, role),
            guilt=guilt(self._attributions, self._alone, self._present, role),
            itl_tokens=self._itl_tokens(pool) if role is Role.DECODE else None,
        )

    def _itl_tokens(self, pool: PoolReading) -> float | None:
        """KV tokens of a unit at which the time between tokens meets its target."""
        target = self._policy.itl_seconds
        if target is None or not pool.pods:
            return None
        margin, tokens, units = self._policy.tuning.itl_margin, 0.0, 0.0
        for pod in pool.pods:
            fit = fit_of(self._policy, self._memory.fits, Role.DECODE, pod.variant, "decode")
            if fit is None or not fit.confident or fit.base >= margin * target:
                continue  # a guess, or a step without any KV takes too long: no replica helps
            room = fit.size_within(target)
            if room is not None:
                tokens, units = tokens + room, units + pod.speed
        return tokens / units if units else None

    def _inline(self, demands: Mapping[Role, Demand]) -> Inline | None:
        """Who encodes pictures while no encoder does."""
        for role in (Role.PREFILL, Role.DECODE):
            rules, pool = self._policy.pools.get(role), self._pools.get(role)
            if rules is not None and pool is not None and rules.inline:
                return Inline(
                    rules=rules,
                    pool=pool,
                    demand=demands[role],
                    service_seconds=self._each[role],
                    budget_seconds=wait_budget(
                        self._policy, self._attributions, self._weights, role
                    ),
                )
        return None
