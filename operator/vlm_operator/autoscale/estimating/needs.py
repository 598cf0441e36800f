"""What each pool needs at one tick: joins demand, horizon, budget and bottleneck share.

decode ─▶ prefill ─▶ encoder      the encoder last: it depends on who encodes in its stead
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from vlm_operator.autoscale.estimating.attribute import (
    bottleneck_share,
    target_seconds,
    wait_budget,
)
from vlm_operator.autoscale.estimating.calibrate import (
    FitMemory,
    credible,
    fit_of,
    service_seconds,
)
from vlm_operator.autoscale.estimating.demand import (
    NOISE,
    Demand,
    DemandMemory,
    demand_of,
    with_trend,
)
from vlm_operator.autoscale.estimating.horizon import planned
from vlm_operator.autoscale.estimating.readings import PoolReading
from vlm_operator.autoscale.estimating.size import LoadSignals, size
from vlm_operator.autoscale.estimating.zero import Inline, with_zero
from vlm_operator.autoscale.outcome import Attribution, Need
from vlm_operator.autoscale.policy import ServicePolicy
from vlm_operator.names import POOL_ROLES, Role

ITEMS: Mapping[Role, str] = {
    Role.ENCODER: "encode",
    Role.PREFILL: "prefill",
    Role.DECODE: "prefill",  # of a pool that prefills too
}


@dataclasses.dataclass
class PoolInputs:
    """One tick over all pools. `needs` alone writes it, once.

    Attributes:
        signals: what each pool's size follows from.
        present: roles with pods.
        alone: by stage, the share of its time that is its own work.
        held: requests that gateways hold, by the pool that they wait for.
        memories: as the last tick left them; `memories_after`: for the next.
    """

    policy: ServicePolicy
    pools: Mapping[Role, PoolReading]
    fits: Mapping[str, FitMemory]
    memories: Mapping[Role, DemandMemory]
    attributions: tuple[Attribution, ...]
    present: frozenset[Role]
    alone: Mapping[str, float]
    startup: Mapping[tuple[Role, str], float]
    held: Mapping[Role, int]
    now: float
    memories_after: dict[Role, DemandMemory] = dataclasses.field(default_factory=dict)
    signals: dict[Role, LoadSignals] = dataclasses.field(default_factory=dict)

    def needs(self) -> dict[Role, Need]:
        """Size every pool, the encoder last: it depends on who encodes in its stead."""
        demands: dict[Role, Demand] = {}
        needs: dict[Role, Need] = {}
        for role in reversed(POOL_ROLES):
            pool = self.pools.get(role)
            if pool is None:
                continue
            rules = self.policy.pools[role]
            inline = self._inline(demands) if role is Role.ENCODER else None
            demand = self._demand(pool, inline)
            demands[role] = demand
            signals = self.signals[role] = self._signals(pool, demand)
            need = size(self.policy, rules, pool, signals)
            if role is Role.ENCODER:
                need = with_zero(
                    self.policy,
                    rules,
                    pool,
                    demand,
                    need,
                    held=self.held.get(role, 0),
                    inline=inline,
                )
            needs[role] = need
        return needs

    def _demand(self, pool: PoolReading, inline: Inline | None) -> Demand:
        """Add one tick; an encoder at zero has the images that are encoded in its stead."""
        known, elsewhere, encoder = None, 0.0, pool.role is Role.ENCODER
        if encoder and not pool.pods and inline is not None:
            known, elsewhere = inline.pool.known, inline.demand.encode_erlangs
        demand, memory = demand_of(
            self.policy,
            pool,
            self.memories.get(pool.role, DemandMemory()),
            now=self.now,
            known=known,
            elsewhere=elsewhere + (self.held.get(Role.ENCODER, 0) if encoder else 0),
            held=0 if encoder else self.held.get(pool.role, 0),
            flow=self._flow() if pool.role is Role.DECODE else 1.0,
        )
        if elsewhere:
            demand = dataclasses.replace(demand, encode_erlangs=elsewhere)
        self.memories_after[pool.role] = memory
        return demand

    def _flow(self) -> float:
        """The share of what decode has promised that is not stuck before encoder or prefill."""
        share = 1.0
        if Role.PREFILL not in self.policy.pools:
            return share  # what waits, waits for decode's own steps
        for role in (Role.ENCODER, Role.PREFILL):
            pool = self.pools.get(role)
            budget = wait_budget(self.policy, self.attributions, role)
            if pool is None or budget is None:
                continue
            queued = sum(last.queued_seconds * pod.speed for pod, last in pool.loads)
            if queued > 0:
                share = min(share, budget * pool.ready_units / queued)
        return share

    def _signals(self, pool: PoolReading, demand: Demand) -> LoadSignals:
        """Everything that the pool's size follows from."""
        role, policy = pool.role, self.policy
        horizon = max((self.startup[key] for key in self.startup if key[0] is role), default=0.0)
        # what waits is no growth: it is what growth has left behind
        load = demand.running_tokens if role is Role.DECODE else demand.erlangs
        if role is Role.ENCODER and not pool.pods:
            load = demand.encode_erlangs
        # a ratio that is learnt is no growth
        ratio = 1.0 if role is Role.DECODE else demand.ratio
        memory = self.memories_after[role]
        if pool.known:
            memory = self.memories_after[role] = with_trend(memory, load / ratio, now=self.now)
        lag = policy.constants.smoothing_seconds  # by which a smoothed load is behind a slope
        chance = self._chance(role, demand, load)
        ahead = planned(
            policy,
            load,
            [(at, value * ratio) for at, value in memory.trend],
            startup=horizon + lag,
            chance=chance,
        )
        if role is Role.DECODE:
            ahead += demand.tokens - load
        return LoadSignals(
            demand=demand,
            planned=ahead,
            chance=chance,
            credible=credible(self.fits, role, ITEMS[role]),
            planned_work=demand.erlangs,
            service_seconds=self._each(role),
            budget_seconds=wait_budget(policy, self.attributions, role),
            target_seconds=target_seconds(policy, self.attributions, role),
            bottleneck_share=bottleneck_share(self.attributions, self.alone, self.present, role),
            itl_tokens=self._itl_tokens(pool) if role is Role.DECODE else None,
        )

    def _chance(self, role: Role, demand: Demand, load: float) -> float:
        """By how much smoothed load may seem to rise within a start-up though it does not."""
        if role is Role.DECODE:
            return NOISE * demand.spread(load) / 2  # requests of seconds, smoothed over more
        seconds, each = self.policy.constants.smoothing_seconds, self._each(role) or 0.0
        return NOISE * math.sqrt(each * load / seconds)

    def _itl_tokens(self, pool: PoolReading) -> float | None:
        """KV tokens of a unit at which the time between tokens meets its target."""
        target = self.policy.itl_seconds
        if target is None or not pool.pods:
            return None
        margin, tokens, units = self.policy.constants.itl_margin, 0.0, 0.0
        for pod in pool.pods:
            fit = fit_of(self.policy, self.fits, pod.variant)
            if fit is None or not fit.confident or fit.base >= margin * target:
                continue  # a guess, or a step without any KV takes too long: no replica helps
            tokens, units = tokens + fit.tokens_within(target), units + pod.speed
        return tokens / units if units else None

    def _inline(self, demands: Mapping[Role, Demand]) -> Inline | None:
        """Who encodes images while no encoder does."""
        for role in (Role.PREFILL, Role.DECODE):
            rules, pool = self.policy.pools.get(role), self.pools.get(role)
            if rules is not None and pool is not None and rules.inline:
                return Inline(rules=rules, pool=pool, demand=demands[role])
        return None

    def _each(self, role: Role) -> float | None:
        """Mean seconds of one item of a role's work."""
        return service_seconds(self.fits, role, ITEMS[role])
