"""From what was seen to what each pool needs. Pure: the same arguments give the same estimate.

samples ─▶ readings ─▶ calibrate ─▶ demand ─▶ horizon ─┐
        └▶ window   ─▶ attribute ─▶ budget ────────────┴▶ size ─▶ zero ─▶ Need of each pool

What is remembered is bounded: pods that live, twelve slots of a window, 64 rows of a fit, 20
starts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator

from vlm_operator.autoscale.estimating.attribute import alone_shares, attribute, itl_p95
from vlm_operator.autoscale.estimating.calibrate import Fit, FitMemory, calibrated
from vlm_operator.autoscale.estimating.correct import Measured, corrected, measured
from vlm_operator.autoscale.estimating.demand import Demand, DemandMemory
from vlm_operator.autoscale.estimating.horizon import (
    Phases,
    StartupMemory,
    startup_phases,
    startup_seconds,
    time_startups,
)
from vlm_operator.autoscale.estimating.needs import PoolInputs
from vlm_operator.autoscale.estimating.readings import LastAnswer, read_pools
from vlm_operator.autoscale.estimating.size import LoadSignals
from vlm_operator.autoscale.estimating.window import Window
from vlm_operator.autoscale.outcome import Attribution, Need
from vlm_operator.autoscale.policy import ServicePolicy
from vlm_operator.autoscale.view import View
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
