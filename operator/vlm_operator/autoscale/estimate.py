"""From what was seen to what each pool needs. Pure: the same arguments give the same estimate.

samples ─▶ readings ─▶ calibrate ─▶ demand ─▶ horizon ─┐
        └▶ window   ─▶ attribute ──────────────────────┴▶ size ─▶ zero ─▶ Need of each pool

What is remembered is bounded: pods that live, twelve slots of a window, 64 rows of a fit, 20
starts.

decode ─▶ prefill ─▶ encoder      the encoder last: it depends on who encodes in its stead
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
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
    calibrated,
    credible,
    fit_of,
    service_seconds,
)
from vlm_operator.autoscale.demand import (
    NOISE,
    Demand,
    DemandMemory,
    demand_of,
    with_trend,
)
from vlm_operator.autoscale.horizon import (
    Phases,
    StartupMemory,
    planned,
    startup_phases,
    startup_seconds,
    time_startups,
)
from vlm_operator.autoscale.outcome import Attribution, Need
from vlm_operator.autoscale.policy import ServicePolicy
from vlm_operator.autoscale.readings import (
    LastAnswer,
    Measured,
    PoolReading,
    corrected,
    measured,
    read_pools,
)
from vlm_operator.autoscale.size import LoadSignals, size
from vlm_operator.autoscale.view import View
from vlm_operator.autoscale.window import Window
from vlm_operator.autoscale.zero import Inline, with_zero
from vlm_operator.names import POOL_ROLES, Role
from vlm_operator.state import Sample


def _parted(key: Any) -> Any:
    """JSON has no tuples as keys: `decode,a` is (decode, a)."""
    return key.split(",", 1) if isinstance(key, str) else key


RoleVariant = Annotated[tuple[Role, str], BeforeValidator(_parted)]


@dataclasses.dataclass(frozen=True)
class EstimateMemory:
    """What the next estimate needs of those before. Values only, and bounded.

    Attributes:
        answers: what each pod last said, by uid.
        window: what gateways counted.
        fits: by "role/variant/kind".
        demands: by role.
        measured: how long work took, and was predicted to take, by "role/variant".
    """

    answers: Mapping[str, LastAnswer] = dataclasses.field(default_factory=dict)
    window: Window = dataclasses.field(default_factory=Window)
    fits: Mapping[str, FitMemory] = dataclasses.field(default_factory=dict)
    demands: Mapping[Role, DemandMemory] = dataclasses.field(default_factory=dict)
    startups: StartupMemory = dataclasses.field(default_factory=StartupMemory)
    measured: Mapping[str, Measured] = dataclasses.field(default_factory=dict)

    @property
    def lasting(self) -> EstimateMemory:
        """What is worth keeping beyond this process: fits and starts.

        Counters and loads are not in it: they are known again after two ticks, and would change
        at each.
        """
        fits = {
            key: dataclasses.replace(item, rows=())
            for key, item in self.fits.items()
            if item.fit or item.credible
        }
        starts = dataclasses.replace(self.startups, starting={})
        return EstimateMemory(fits=fits, startups=starts)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What is known of a service at one tick.

    Attributes:
        attributions: of each modality that had requests; one without any is not in it.
        needs: of every pool that there is.
        fresh: enough pods of every pool answered.
        missing_seconds: since they did not; 0 while they do.
        startup: seconds until a new replica is ready, by role and variant.
        phases: the same by phase, of those whose starts were seen.
        itl_p95_seconds: between tokens, None where none came.
        signals: what needs follow from, by role.
        absurd: uids of pods whose answers at this tick had numbers that nobody believes.
        counted: requests ended since the last tick.
        fits: times of decode steps by "role/variant/kind".
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
        """The load of each pool."""
        return {role: item.demand for role, item in self.signals.items()}


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
    taken = measured(readings.pools, memory.measured, now=now)
    pools = corrected(readings.pools, memory.measured)
    gateways = readings.gateways
    window = memory.window.advance(gateways, now=now, window=policy.window_seconds)
    fits = calibrated(policy, readings.pools.values(), memory.fits, now=now)
    startups = time_startups(policy, view, memory.startups)
    present = frozenset(role for role, pool in readings.pools.items() if pool.pods)
    totals = window.total(now=now, window=policy.window_seconds)
    alone = alone_shares(policy, totals, memory.fits, now=now)
    attributions = attribute(policy, window, totals, alone, now=now)
    startup = startup_seconds(policy, startups)
    turn = PoolInputs(
        policy=policy,
        pools=pools,
        fits=memory.fits,
        memories=memory.demands,
        attributions=attributions,
        present=present,
        alone=alone,
        startup=startup,
        held={role: _held(gateways, role) for role in POOL_ROLES},
        now=now,
    )
    needs = turn.needs()
    silent = [
        item.silent_since for item in turn.memories_after.values() if item.silent_since is not None
    ]
    found = Estimate(
        attributions=attributions,
        needs=needs,
        fresh=not silent,
        missing_seconds=max((now - since for since in silent), default=0.0),
        startup=startup,
        itl_p95_seconds=itl_p95(window, totals),
        signals=turn.signals,
        absurd=readings.absurd,
        counted=window is not memory.window,
        fits={key: item.fit for key, item in fits.items() if item.fit is not None},
        phases=startup_phases(startups),
    )
    return found, EstimateMemory(
        answers=readings.answers,
        window=window,
        fits=fits,
        demands=turn.memories_after,
        startups=startups,
        measured=taken,
    )


def _held(gateways: Iterable[Sample], role: Role) -> int:
    """Requests that gateways hold for a pool."""
    return sum(item.held_for.get(role, 0) for item in gateways)


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
