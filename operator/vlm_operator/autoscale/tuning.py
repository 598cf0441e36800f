"""The constants of the autoscaling method as floats: seconds, shares, multiples.

api.Tuning: band_up_percent 85 ─▶ Tuning: band_up 0.85
"""

from __future__ import annotations

import dataclasses
from typing import Any

from vlm_operator.api import tuning as api

# Suffix in the API, suffix of the constant, and the number of API units per unit of the constant.
_UNITS = (
    ("_milliseconds", "_seconds", 1000.0),
    ("_percent", "", 100.0),
)


def _converted(written: api.Tuning) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in api.Tuning.model_fields:
        value = getattr(written, name)
        for suffix, own, scale in _UNITS:
            if name.endswith(suffix):
                found[name.removesuffix(suffix) + own] = value / scale
                break
        else:
            found[name] = float(value) if name.endswith("_seconds") else value
    return found


_DEFAULTS = _converted(api.Tuning())


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The constants of the method. Defaults are the API's; docs/autoscaling.md has the reasons.

    Attributes:
        min_requests: if the window has fewer requests, it is widened threefold.
        min_misses: if fewer requests missed their target, the slowest tenth supplements them.
        slow_seconds: time between two calibrations.
        smoothing_seconds: time constant of the smoothing of admitted work.
        backlog_seconds: time within which a backlog should be processed.
        wait_floor_seconds: minimum budget of waiting time in a queue.
        band_up, band_down: share of capacity in use above which a pool grows, and below which it
            may shrink. Between them the pool keeps its size.
        bottleneck_share: minimum share of a pool's own stages in the overrun of TTFT.
        ttft_margin, itl_margin: share of the target that must not be exceeded before shrinking.
        consolidation: share of the KV limit from ITL that a pool with one replica fewer may use.
        after_growth_seconds: time without shrinking after any pool of the service grew.
        write_off: multiple of the usual duration of a start phase after which a pod in that phase
            does not count as capacity.
        pending_seconds: minimum time without a node after which a pod of a variant with known
            start-ups does not count. Adding a node takes longer than using an existing one.
        spot_risk: share of its price by which a spot replica counts as more expensive, because a
            preempted replica must start again.
        exhausted_seconds: time until the next try of a variant that got no node; doubles each time.
        startup_seconds: start-up time of a variant until it is measured.
        startups_kept: number of start-ups kept per variant, for the 90th percentile.
        window_starts: minimum length of the scale-down window, as a multiple of the longest
            start-up time.
        growth_cap: maximum growth that extrapolation may add within one start-up time, as a share.
        stale_ticks: ticks without an answer after which a pod counts as silent.
        fresh_share: share of ready pods that must answer.
        fresh_down_share: share of ready pods that must answer before a pool shrinks.
        missing_seconds: time without metrics before fallback replicas apply.
        fit_points: minimum number of rows of a fit.
        fit_spread: minimum spread of the regressor.
        fit_seconds: memory of a fit.
        fit_shift: change of shape that restarts a fit.
    """

    min_requests: int = _DEFAULTS["min_requests"]
    min_misses: int = _DEFAULTS["min_misses"]
    slow_seconds: float = _DEFAULTS["slow_seconds"]
    smoothing_seconds: float = _DEFAULTS["smoothing_seconds"]
    backlog_seconds: float = _DEFAULTS["backlog_seconds"]
    wait_floor_seconds: float = _DEFAULTS["wait_floor_seconds"]
    band_up: float = _DEFAULTS["band_up"]
    band_down: float = _DEFAULTS["band_down"]
    bottleneck_share: float = _DEFAULTS["bottleneck_share"]
    ttft_margin: float = _DEFAULTS["ttft_margin"]
    itl_margin: float = _DEFAULTS["itl_margin"]
    consolidation: float = _DEFAULTS["consolidation"]
    after_growth_seconds: float = _DEFAULTS["after_growth_seconds"]
    write_off: float = _DEFAULTS["write_off"]
    pending_seconds: float = _DEFAULTS["pending_seconds"]
    spot_risk: float = _DEFAULTS["spot_risk"]
    exhausted_seconds: float = _DEFAULTS["exhausted_seconds"]
    startup_seconds: float = _DEFAULTS["startup_seconds"]
    startups_kept: int = _DEFAULTS["startups_kept"]
    window_starts: float = _DEFAULTS["window_starts"]
    growth_cap: float = _DEFAULTS["growth_cap"]
    stale_ticks: int = _DEFAULTS["stale_ticks"]
    fresh_share: float = _DEFAULTS["fresh_share"]
    fresh_down_share: float = _DEFAULTS["fresh_down_share"]
    missing_seconds: float = _DEFAULTS["missing_seconds"]
    fit_points: int = _DEFAULTS["fit_points"]
    fit_spread: float = _DEFAULTS["fit_spread"]
    fit_seconds: float = _DEFAULTS["fit_seconds"]
    fit_shift: float = _DEFAULTS["fit_shift"]


def constants(written: api.Tuning) -> Tuning:
    """Convert the API's integers to the units of the method."""
    return Tuning(**_converted(written))
