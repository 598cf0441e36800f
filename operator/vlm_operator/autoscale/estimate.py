"""Computes what each pool of a service needs, from one tick's view and the memory. Pure.

samples ─▶ readings ─▶ calibrate ─▶ demand ─┐
        └▶ window ───▶ attribute ───────────┴▶ size ─▶ Need of each pool

The pools are sized in the order decode, prefill, encoder: at zero, the need of the encoder depends
on the pool that encodes images inline. The memory is bounded: live pods, twelve slots of a window,
64 rows per fit, 20 starts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator

from vlm_operator.autoscale.attribute import (
    alone_shares,
    attribute,
    bottleneck_share,
    itl_p95,
    target_seconds,
    wait_budget,
)
from vlm_operator.autoscale.calibrate import (
    Fit,
    FitMemory,
    calibrate,
    credible,
    service_seconds,
)
from vlm_operator.autoscale.demand import (
    NOISE,
    Demand,
    DemandMemory,
    demand_of,
    planned,
    with_trend,
)
from vlm_operator.autoscale.outcome import Attribution, Need
from vlm_operator.autoscale.policy import ServicePolicy
from vlm_operator.autoscale.readings import (
    LastSample,
    Measured,
    PoolReading,
    add_measured,
    read_pools,
)
from vlm_operator.autoscale.size import InlinePool, LoadSignals, size, with_zero
from vlm_operator.autoscale.startups import (
    Phases,
    StartupMemory,
    startup_phases,
    startup_seconds,
    time_startups,
)
from vlm_operator.autoscale.view import View
from vlm_operator.autoscale.window import Window
from vlm_operator.names import POOL_ROLES, Role

# The work by which the items of a pool are counted. Decode prefills only without a prefill pool.
WORK_KINDS: Mapping[Role, str] = {
    Role.ENCODER: "encode",
    Role.PREFILL: "prefill",
    Role.DECODE: "prefill",
}


def _split(key: Any) -> Any:
    """Convert a key of a JSON object to a tuple: "decode,a" to ("decode", "a")."""
    return key.split(",", 1) if isinstance(key, str) else key


RoleVariant = Annotated[tuple[Role, str], BeforeValidator(_split)]


@dataclasses.dataclass(frozen=True)
class EstimateMemory:
    """What one estimate passes to the next.

    Attributes:
        answers: the last sample of each pod, by uid.
        fits: by "role/variant/kind".
        measured: by "role/variant".
    """

    answers: Mapping[str, LastSample] = dataclasses.field(default_factory=dict)
    window: Window = dataclasses.field(default_factory=Window)
    fits: Mapping[str, FitMemory] = dataclasses.field(default_factory=dict)
    demands: Mapping[Role, DemandMemory] = dataclasses.field(default_factory=dict)
    startups: StartupMemory = dataclasses.field(default_factory=StartupMemory)
    measured: Mapping[str, Measured] = dataclasses.field(default_factory=dict)

    @property
    def lasting(self) -> EstimateMemory:
        """The part that the next process needs: lines of fits, and seconds of starts.

        Counters and loads are known again after two ticks, and change at each.
        """
        fits = {
            key: dataclasses.replace(item, rows=())
            for key, item in self.fits.items()
            if item.fit or item.credible
        }
        return EstimateMemory(fits=fits, startups=dataclasses.replace(self.startups, starting={}))


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The need of each pool at one tick, with the numbers behind it.

    Attributes:
        attributions: of each modality that had requests within the window.
        needs: of each pool that the view and the policy have.
        fresh: in every pool, fresh_share of the ready pods answered.
        missing_seconds: time since this is not so; 0 while it is.
        startup: seconds of a start, by role and variant.
        itl_p95_seconds: None without a token.
        absurd: uids of pods whose samples of this tick are contradictory.
        counted: a gateway counted requests or tokens since the last tick.
        fits: lines of decode steps, by "role/variant/kind".
        phases: of a start, by role and variant, as far as they were measured.
    """

    attributions: tuple[Attribution, ...]
    needs: Mapping[Role, Need]
    fresh: bool
    missing_seconds: float
    startup: Mapping[RoleVariant, float]
    itl_p95_seconds: float | None = None
    signals: Mapping[Role, LoadSignals] = dataclasses.field(default_factory=dict)
    absurd: tuple[str, ...] = ()
    counted: bool = False
    fits: Mapping[str, Fit] = dataclasses.field(default_factory=dict)
    phases: Mapping[RoleVariant, Phases] = dataclasses.field(default_factory=dict)

    @property
    def demands(self) -> Mapping[Role, Demand]:
        return {role: item.demand for role, item in self.signals.items()}


def estimate(
    policy: ServicePolicy, view: View, memory: EstimateMemory
) -> tuple[Estimate, EstimateMemory]:
    """Return the estimate of one tick, and the memory for the next.

    `memory` is that of the last call, or `EstimateMemory()`. Fits and ratios of this tick are used
    from the next tick on, so that more work in a tick never looks like less.
    """
    now = view.now
    pools, absurd = read_pools(policy, view, memory.answers, memory.measured)
    window = memory.window.advance(view.samples.values(), now=now, window=policy.window_seconds)
    totals = window.total(now=now, window=policy.window_seconds)
    alone = alone_shares(policy, totals, memory.fits, now=now)
    startups = time_startups(policy, view, memory.startups)
    tick = Tick(
        policy=policy,
        view=view,
        pools=pools,
        memory=memory,
        attributions=attribute(policy, window, totals, alone, now=now),
        alone=alone,
        startup=startup_seconds(policy, startups),
    )
    demands: dict[Role, DemandMemory] = {}
    signals: dict[Role, LoadSignals] = {}
    needs: dict[Role, Need] = {}
    for role in reversed(POOL_ROLES):
        if role not in pools:
            continue
        rules, pool = policy.pools[role], pools[role]
        inline = tick.inline_pool(signals) if role is Role.ENCODER else None
        demand, demands[role] = tick.demand(pool, inline)
        signals[role], demands[role] = tick.signals(pool, demand, demands[role])
        needs[role] = size(policy, rules, pool, signals[role])
        if role is Role.ENCODER:
            needs[role] = with_zero(
                policy, rules, pool, demand, needs[role], held=tick.held(role), inline=inline
            )
    fits = calibrate(policy, pools.values(), memory.fits, now=now)
    silent = [item.silent_since for item in demands.values() if item.silent_since is not None]
    found = Estimate(
        attributions=tick.attributions,
        needs=needs,
        fresh=not silent,
        missing_seconds=max((now - since for since in silent), default=0.0),
        startup=tick.startup,
        itl_p95_seconds=itl_p95(window, totals),
        signals=signals,
        absurd=absurd,
        counted=window is not memory.window,
        fits={key: item.fit for key, item in fits.items() if item.fit is not None},
        phases=startup_phases(startups),
    )
    pods = [pod for pool in pools.values() for pod in pool.pods]
    return found, EstimateMemory(
        answers={pod.uid: pod.last for pod in pods if pod.last is not None},
        window=window,
        fits=fits,
        demands=demands,
        startups=startups,
        measured=add_measured(pools, memory.measured, now=now),
    )


@dataclasses.dataclass(frozen=True)
class Tick:
    """The inputs of all pools' demands and signals at one tick.

    Attributes:
        memory: that of the last tick.
        alone: `alone_shares`, by stage.
        startup: seconds of a start, by role and variant.
    """

    policy: ServicePolicy
    view: View
    pools: Mapping[Role, PoolReading]
    memory: EstimateMemory
    attributions: tuple[Attribution, ...]
    alone: Mapping[str, float]
    startup: Mapping[tuple[Role, str], float]

    def held(self, role: Role) -> int:
        """Return the requests that gateways hold until a pool has capacity."""
        samples = self.view.samples.values()
        return sum(item.held_for.get(role, 0) for item in samples if item.role is Role.GATEWAY)

    def inline_pool(self, signals: Mapping[Role, LoadSignals]) -> InlinePool | None:
        """Return the pool that encodes images while no encoder pod does."""
        for role in (Role.PREFILL, Role.DECODE):
            if role in self.pools and self.policy.pools[role].inline:
                return InlinePool(self.policy.pools[role], self.pools[role], signals[role].demand)
        return None

    def demand(self, pool: PoolReading, inline: InlinePool | None) -> tuple[Demand, DemandMemory]:
        """Return a pool's load; that of an encoder pool at zero are images encoded inline."""
        role, known, images = pool.role, None, 0.0
        encoder = role is Role.ENCODER
        if encoder and inline is not None and not pool.pods:
            known, images = inline.pool.known, inline.demand.encode_erlangs
        demand, memory = demand_of(
            self.policy,
            pool,
            self.memory.demands.get(role, DemandMemory()),
            now=self.view.now,
            known=known,
            elsewhere=images + self.held(role) if encoder else 0.0,
            held=0 if encoder else self.held(role),
            flow=self._flow() if role is Role.DECODE else 1.0,
        )
        if images:
            demand = dataclasses.replace(demand, encode_erlangs=images)
        return demand, memory

    def signals(
        self, pool: PoolReading, demand: Demand, memory: DemandMemory
    ) -> tuple[LoadSignals, DemandMemory]:
        """Return what a pool's need is computed from, and its memory with the new trend."""
        role, policy = pool.role, self.policy
        decode = role is Role.DECODE
        # queued work is no growth, but its result
        load = demand.running_tokens if decode else demand.erlangs
        if role is Role.ENCODER and not pool.pods:
            load = demand.encode_erlangs
        # a new ratio is no growth
        ratio = 1.0 if decode else demand.ratio
        if pool.known:
            memory = with_trend(memory, load / ratio, now=self.view.now)
        startup = max((self.startup[key] for key in self.startup if key[0] is role), default=0.0)
        chance = self._chance(role, demand, load)
        ahead = planned(
            policy,
            load,
            [(at, value * ratio) for at, value in memory.trend],
            startup=startup + policy.constants.smoothing_seconds,  # a smoothed load lags
            chance=chance,
        )
        kind, present = WORK_KINDS[role], [name for name, item in self.pools.items() if item.pods]
        signals = LoadSignals(
            demand=demand,
            planned=ahead + (demand.tokens - load) if decode else ahead,
            planned_work=demand.erlangs,
            chance=chance,
            credible=credible(self.memory.fits, role, kind),
            service_seconds=service_seconds(self.memory.fits, role, kind),
            budget_seconds=wait_budget(policy, self.attributions, role),
            target_seconds=target_seconds(policy, self.attributions, role),
            bottleneck_share=bottleneck_share(self.attributions, self.alone, present, role),
            itl_tokens=self._itl_tokens(pool) if decode else None,
        )
        return signals, memory

    def _flow(self) -> float:
        """Return the share of queued work that encoder and prefill finish within their budgets."""
        share = 1.0
        if Role.PREFILL not in self.policy.pools:
            return share
        for role in (Role.ENCODER, Role.PREFILL):
            pool, budget = self.pools.get(role), wait_budget(self.policy, self.attributions, role)
            if pool is not None and budget is not None:
                queued = sum(last.queued_seconds * pod.speed for pod, last in pool.loads)
                if queued > 0:
                    share = min(share, budget * pool.ready_units / queued)
        return share

    def _chance(self, role: Role, demand: Demand, load: float) -> float:
        """Return the rise of a smoothed load within a start-up that random variation can cause."""
        if role is Role.DECODE:
            return NOISE * demand.deviation(load) / 2  # smoothed over more than one request
        each = service_seconds(self.memory.fits, role, WORK_KINDS[role]) or 0.0
        return NOISE * math.sqrt(each * load / self.policy.constants.smoothing_seconds)

    def _itl_tokens(self, pool: PoolReading) -> float | None:
        """Return the KV tokens per unit at which ITL meets its target; None if unknown.

        Variants whose steps take too long without any KV do not count: no replica helps.
        """
        target = self.policy.itl_seconds
        if target is None:
            return None
        tokens = units = 0.0
        for pod in pool.pods:
            fit = self.memory.fits.get(f"{Role.DECODE}/{pod.variant}/decode", FitMemory()).fit
            longest_base = self.policy.constants.itl_margin * target
            if fit is not None and fit.confident and fit.base < longest_base:
                tokens, units = tokens + fit.tokens_within(target), units + pod.speed
        return tokens / units if units else None
